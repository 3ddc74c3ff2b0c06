"""Put lowered nodes in the place of attention calls, and write down in the model what they stand for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from attn_dispatch.capability import Reason
from attn_dispatch.errors import ExportError, UnknownBackendError
from attn_dispatch.export.report import Call
from attn_dispatch.export.trace import DOMAIN, TracedCall
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.select_op import SelectOp
from attn_dispatch.lowering.forms import Target, lower, reasons_against
from attn_dispatch.lowering.nodes import Nodes

__all__ = ["METADATA", "choose_form", "decide_here", "place", "read_calls"]

METADATA = "attn_dispatch.calls"  # on the model: JSON, a list of what `Call` has and the op itself
_INDEX = "attn_dispatch.call"  # on each node: which call it stands for


def choose_form(calls: Sequence[TracedCall], forms: tuple[str, ...], make_target: Any) -> list[Target]:
    """The first form for each call that expresses it.

    Args:
        make_target: from a form to a `Target`.

    Raises:
        ExportError: no form does, with every reason.
    """
    chosen, problems = [], []
    for call in calls:
        refused: list[tuple[str, list[Reason]]] = []
        for form in forms:
            target = make_target(form)
            reasons = reasons_against(call.op, target)
            if not reasons:
                chosen.append(target)
                break
            refused.append((form, reasons))
        else:
            lines = [f"{call.layer}: {call.op}"]
            lines += [f"  {form}: {'; '.join(map(str, reasons))}" for form, reasons in refused]
            problems.append("\n".join(lines))
    if problems:
        raise ExportError("no ONNX form expresses\n" + "\n".join(dict.fromkeys(problems)))
    return chosen


def place(model: ir.Model, calls: Sequence[TracedCall], targets: Sequence[Target], opset: int) -> list[Call]:
    """Replace every call's node by what it is lowered to; the model is changed.

    Raises:
        ExportError: a call stands in a branch or loop, where it cannot be replaced.
    """
    nodes = Nodes(opset)
    found: list[tuple[int, Call]] = []
    for node in [n for n in model.graph if n.domain == DOMAIN and n.op_type == "Call"]:
        index = node.attributes["call"].as_int()
        call, target = calls[index], targets[index]
        query, key, value, *others = node.inputs
        assert query is not None
        assert key is not None
        assert value is not None
        for value_in, dims in zip(node.inputs, call.dims, strict=True):
            if value_in is not None:
                value_in.shape = ir.Shape(dims)  # torch's exporter forgets what a sum of sizes is
        operands = {name: x for name, x in zip(call.names, others, strict=True) if x is not None}
        results = lower(call.op, (query, key, value), operands, nodes, target).flat()
        made = nodes.take()
        counts = Counter(n.op_type for n in made)
        for new in made:
            new.metadata_props.update({**node.metadata_props, _INDEX: str(index)})
        outputs = list(node.outputs)
        for old, new_value in zip(outputs, results, strict=True):
            new_value.type = new_value.type or old.type
            new_value.shape = new_value.shape or old.shape
            if old.is_graph_output():  # it keeps its name, and is no other output's value
                made.append(_copy(new_value, old, opset))
                new_value = made[-1].outputs[0]
            old.replace_all_uses_with(new_value, replace_graph_outputs=True)
        model.graph.insert_before(node, made)
        model.graph.remove(node, safe=True)
        decision = _decision(call)
        found.append((index, Call(call.layer, str(_shown(call.op)), target.form, counts, decision)))
    left = [n for n in model.graph.all_nodes() if n.domain == DOMAIN and n.op_type == "Call"]
    if left:
        raise ExportError("an attention call inside a branch or loop (torch.cond, while_loop) cannot be lowered")
    for domain, version in nodes.domains.items():
        model.opset_imports[domain] = opset if domain == "" else version
    for function in nodes.functions.values():
        model.functions[function.identifier()] = function
    if not any(n.domain == DOMAIN for n in model.graph.all_nodes()) and not model.functions:
        model.opset_imports.pop(DOMAIN, None)
    NameFixPass()(model)
    found.sort(key=lambda pair: pair[0])
    kept = [{**_plain(call), "op_dict": _shown(calls[index].op).to_dict()} for index, call in found]
    model.metadata_props[METADATA] = json.dumps(kept)
    return [call for _, call in found]


def _copy(value: ir.Value, old: ir.Value, opset: int) -> ir.Node:
    node = ir.Node("", "Identity", [value], num_outputs=1, version=opset)
    copied = node.outputs[0]
    copied.name, copied.type, copied.shape = old.name, value.type, value.shape
    old.name = None
    return node


def _shown(op: AttentionOp | SelectOp) -> AttentionOp | SelectOp:
    return op.with_(traced=False)


def _plain(call: Call) -> dict[str, Any]:
    return {"layer": call.layer, "op": call.op, "form": call.form, "nodes": dict(call.nodes), "decision": call.decision}


def _decision(call: TracedCall) -> str:
    """What the dispatcher would run for this call on this machine."""
    from attn_dispatch.context import as_names
    from attn_dispatch.selection.decide import Request

    return decide_here(
        _shown(call.op), [] if call.backend is None else [Request(as_names(call.backend), "backend=", True)]
    )


def decide_here(op: AttentionOp | SelectOp, wishes: Sequence[Any]) -> str:
    """What the dispatcher would run for an op on this machine, in one line."""
    from attn_dispatch.registry import current
    from attn_dispatch.report import explain_op

    if isinstance(op, SelectOp):
        return "select (there is one way to run it)"
    try:
        report = explain_op(op, wishes, current())
    except UnknownBackendError as error:  # the file is for any machine; this one does not have it
        return str(error).splitlines()[0]
    return f"{report.chosen} ({report.source}: {report.why})" if report.chosen else report.error.splitlines()[0]


def read_calls(model: ir.Model, name: str = "the model") -> list[tuple[Call, AttentionOp | SelectOp]]:
    """The calls that an exported model says it has; empty for a model of somebody else.

    Raises:
        ExportError: what is written there cannot be read.
    """
    text = model.metadata_props.get(METADATA)
    if text is None:
        return []
    try:
        rows = json.loads(text)
        return [
            (
                Call(row["layer"], row["op"], row["form"], row["nodes"], row["decision"]),
                (SelectOp if "top_k" in row["op_dict"] else AttentionOp).from_dict(row["op_dict"]),
            )
            for row in rows
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ExportError(
            f"{name}: its metadata {METADATA!r} cannot be read: {type(error).__name__}: {error}"
        ) from error
