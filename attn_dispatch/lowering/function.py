"""The function form: one node of the domain ``attn_dispatch``, with the decomposed form as its body beside it.

A tool that knows the domain sees one node per attention, whatever it is made of; a runtime that does
not know it inlines the body. The functions of a graph are in ``nodes.functions``, and a model must be given them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from attn_dispatch.capability import Reason
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.weights import Linear
from attn_dispatch.lowering import decomposed, linear
from attn_dispatch.lowering.nodes import Nodes, Value
from attn_dispatch.lowering.parts import Call, Results
from attn_dispatch.lowering.target import Target

__all__ = ["DOMAIN", "lower", "reasons_against"]

DOMAIN = "attn_dispatch"


def reasons_against(op: AttentionOp, target: Target) -> list[Reason]:
    """Why the body of a function cannot express an op."""
    return _body(op).reasons_against(op, target)


def _body(op: AttentionOp) -> Any:
    return linear if isinstance(op.weight, Linear) else decomposed


def lower(call: Call) -> Results:
    """One node; its function is kept in ``nodes.functions``, once for all ops that have the same body."""
    op, outer = call.op, call.nodes
    names = ("query", "key", "value", *(name for name, _ in op.operands))
    given = (call.query, call.key, call.value, *(call.operands[name] for name in names[3:]))
    inputs = [ir.Value(name=name, type=x.type, shape=x.shape) for name, x in zip(names, given, strict=True)]
    inner = Nodes(outer.opset)
    operands = dict(zip(names[3:], inputs[3:], strict=True))
    results: Results = _body(op).lower(Call(op, inputs[0], inputs[1], inputs[2], operands, inner, call.target))
    kept = _keep(outer, inner, inputs, results.flat(), "Linear" if isinstance(op.weight, Linear) else "Softmax")
    count = len(results.flat())
    made = outer(kept, *given, domain=DOMAIN, outputs=count)
    fresh: Iterator[Value] = iter((made,) if count == 1 else made)
    out, lse, weights = (None if x is None else next(fresh) for x in (results.out, results.lse, results.weights))
    assert out is not None
    return Results(out, lse, weights, tuple(fresh))


def _keep(outer: Nodes, inner: Nodes, inputs: list[Value], results: tuple[Value, ...], word: str) -> str:
    """Keep the function of a body and return its name, which is made of a digest of the body: one body, one function.

    The body names no length and no size that a call could change, so calls at other lengths have the same one.
    """
    # an output must be a node's, and one output's only
    outputs: list[Value] = []
    for x in results:
        plain = x.producer() is not None and x not in outputs
        outputs.append(x if plain else inner("Identity", x))
    for x in inputs:  # what was known of this call's inputs does not belong to the function
        x.type, x.shape = None, None
    graph = ir.Graph(inputs, outputs, nodes=inner.take(), opset_imports=inner.domains, name="body")
    unnamed = ir.Function(DOMAIN, f"{word}Attention", graph=graph, attributes=())
    proto = ir.serde.serialize_function(unnamed)
    digest = hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()[:12]
    name = f"{word}Attention_{digest}"
    if (DOMAIN, name) not in outer.functions:
        unnamed.name = name
        outer.functions[DOMAIN, name] = unnamed
    return name
