"""One op as an ONNX model of its own: what the onnxruntime backend runs and what the node tests check."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.tensors import TensorDesc
from attn_dispatch.lowering.forms import Results, Target, lower
from attn_dispatch.lowering.nodes import DTYPES, Nodes, Value

__all__ = ["build_model", "input_names", "output_names"]

_IR_VERSION = 10  # the oldest that runtimes of the last two years all read, and new enough for opset 24


def input_names(op: AttentionOp) -> list[str]:
    """The inputs of `build_model`'s model, in order."""
    return ["query", "key", "value", *(name for name, _ in op.operands)]


def output_names(op: AttentionOp) -> list[str]:
    """The outputs of `build_model`'s model, in order."""
    outputs = [name for name in ("lse", "weights") if getattr(op.outputs, name)]
    if op.outputs.state:
        outputs += ["state", *(["state_z"] if _has_z(op) else []), "state_length"]
    return ["out", *outputs]


def _has_z(op: AttentionOp) -> bool:
    return getattr(op.weight, "normalizer_eps", None) is not None


def build_model(op: AttentionOp, target: Target) -> ir.Model:
    """A model that computes one op; batch and lengths are symbols, heads and head sizes are fixed.

    Args:
        op: described and legal for the target (`lower.reasons_against` is empty).
        target: the form, opset and runtime.

    Returns:
        A model with the inputs of `input_names` (query, key and value ``[B, H, S, D]``, then the operands in the op's
        shapes) and the outputs of `output_names`. ``onnx_ir.to_proto(model).SerializeToString()`` is what a session
        takes.

    Example:
        >>> from attn_dispatch.ir.tensors import TensorDesc
        >>> x = TensorDesc((1, 2, 4, 8), "float32")
        >>> [node.op_type for node in build_model(AttentionOp(x, x, x), Target()).graph]
        ['Attention']
    """
    nodes = Nodes(target.opset)
    main = {
        "query": _input("query", op.query, ("B", op.Hq, "Sq", op.D)),
        "key": _input("key", op.key, ("B", op.Hkv, "Skv", op.D)),
        "value": _input("value", op.value, ("B", op.Hkv, "Skv", op.Dv)),
    }
    operands = {name: _input(name, desc, _open(desc)) for name, desc in op.operands}
    results = lower(op, (main["query"], main["key"], main["value"]), operands, nodes, target)
    outputs = _named(results, op, nodes)
    graph = ir.Graph(
        [*main.values(), *operands.values()], outputs, nodes=nodes.take(), opset_imports=nodes.domains, name="attention"
    )
    NameFixPass()(model := ir.Model(graph, ir_version=_IR_VERSION, producer_name="attn_dispatch"))
    return model


def _input(name: str, desc: TensorDesc, shape: tuple[Any, ...]) -> Value:
    return ir.Value(name=name, type=ir.TensorType(DTYPES[desc.dtype]), shape=ir.Shape(shape))


def _open(desc: TensorDesc) -> tuple[Any, ...]:
    """Sizes of an operand: only a 1, which broadcasts, is fixed."""
    return tuple(1 if size == 1 else None for size in desc.shape)


def _named(results: Results, op: AttentionOp, nodes: Nodes) -> list[Value]:
    """The outputs with names, types and ranks; a value that is an input or comes out twice is copied."""
    acc = "float64" if op.dtype == "float64" else "float32"
    shapes: dict[str, tuple[str, tuple[Any, ...]]] = {
        "out": (op.dtype, ("B", op.Hq, "Sq", op.Dv)),
        "lse": (acc, ("B", op.Hq, "Sq")),
        "weights": (op.dtype, ("B", op.Hq, "Sq", "Skv")),
        "state": (acc, ("B", None, op.D, op.Dv)),
        "state_z": (acc, ("B", None, op.D)),
        "state_length": ("int64", ("B",)),
    }
    outputs = []
    for name, value in zip(output_names(op), results.flat(), strict=True):
        dtype, shape = shapes[name]
        value = value if value.producer() is not None and value.name is None else nodes("Identity", value)
        value.name, value.type, value.shape = name, ir.TensorType(DTYPES[dtype]), ir.Shape(shape)
        outputs.append(value)
    return outputs
