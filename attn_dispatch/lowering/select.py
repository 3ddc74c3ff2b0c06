"""`SelectOp` in ONNX: index scores, mask, TopK. One form for every target, since it is plain operators.

TopK takes the lower index of equal scores, as its specification says and `SelectOp` needs; its own order is by score,
so a second TopK sorts the indices. Scores are ``[B, Sq, Hi, Skv]`` in memory: an exported indexer is for inference at
moderate lengths, where `dispatch.select` works in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from attn_dispatch.capability import Reason
from attn_dispatch.ir.atoms import Full
from attn_dispatch.ir.select_op import SelectOp
from attn_dispatch.lowering.masks import Grid, allowed, reasons_against_mask
from attn_dispatch.lowering.nodes import Nodes, Value
from attn_dispatch.lowering.parts import Results
from attn_dispatch.lowering.target import Target

__all__ = ["lower", "reasons_against"]

_OLDEST = 18


def reasons_against(op: SelectOp, target: Target) -> list[Reason]:
    """Why a selection cannot be lowered for a target."""
    reasons = reasons_against_mask(op.mask)
    if target.opset < _OLDEST:
        text = f"opset {target.opset}: a selection needs {_OLDEST}"
        reasons.append(Reason("version", "opset", target.opset, f">= {_OLDEST}", f"opset={_OLDEST}", text))
    return reasons


def lower(op: SelectOp, inputs: tuple[Value, Value, Value], operands: Mapping[str, Value], nodes: Nodes) -> Results:
    """Make the nodes of a selection; its lengths are not looked at.

    Args:
        inputs: query ``[B, Hi, Sq, Di]``, key ``[B, Skv, Di]``, weights ``[B, Sq, Hi]``.
        operands: the mask's tensors and the offset, by name.

    Returns:
        The indices, int64 ``[B, Sq, top_k]``; behind them, as the state, the scores of the selected keys
        ``[B, Sq, top_k]`` when the op wants them.
    """
    n, acc = nodes, _accumulated(op)
    query, key, _ = inputs
    batch, sq, skv = n.size(query, 0), n.size(query, 2), n.size(key, 1)
    scores = _scores(op, inputs, n, acc)
    lowest = n.const(torch.finfo(getattr(torch, acc)).min, acc)
    ranked = n("Max", n("Where", n("IsNaN", scores), lowest, scores), lowest)  # only what is excluded is -inf
    if not isinstance(op.mask, Full):
        keep = n("Expand", allowed(op.mask, Grid.of(op, n, batch, sq, skv, operands)), n.const([1, 1, 1, 1]))
        ranked = n("Where", n("Squeeze", keep, n.const([1])), ranked, n.const(-math.inf, acc))
    count = n("Min", n.const([op.top_k]), skv)
    values, found = n("TopK", ranked, count, outputs=2, axis=-1, largest=1, sorted=1)
    none = n("Equal", values, n.const(-math.inf, acc))
    found = n("Where", none, skv, found)
    found = n("TopK", found, count, outputs=2, axis=-1, largest=0, sorted=1)[0]
    found = n("Where", n("Equal", found, skv), n.const(-1), found)
    missing = n("Expand", n.const(-1), n.shape(batch, sq, n("Sub", n.const([op.top_k]), count)))
    indices = n("Concat", found, missing, axis=2)
    if not op.scores:
        return Results(indices)
    at = n("Max", indices, n.const(0))
    chosen = n("GatherElements", scores, at, axis=2)
    return Results(indices, state=(n("Where", n("Less", indices, n.const(0)), n.const(-math.inf, acc), chosen),))


def _accumulated(op: SelectOp) -> str:
    return "float64" if "float64" in (op.query.dtype, op.key.dtype, op.weights.dtype) else "float32"


def _scores(op: SelectOp, inputs: tuple[Value, Value, Value], n: Nodes, acc: str) -> Value:
    """Index scores ``[B, Sq, Skv]``; the products and sums in the order in which `dispatch.select` takes them."""
    descs = (op.query, op.key, op.weights)
    query, key, weights = (n.cast(x, desc.dtype, acc) for x, desc in zip(inputs, descs, strict=True))
    rows = n.scale(n("Transpose", query, perm=[0, 2, 1, 3]), op.effective_scale, op.Di, acc)  # [B, Sq, Hi, Di]
    keys = n("Unsqueeze", n("Transpose", key, perm=[0, 2, 1]), n.const([1]))  # [B, 1, Di, Skv]
    dots = n("MatMul", rows, keys)
    if op.activation == "relu":  # not Relu, which may make 0 of NaN
        dots = n("Where", n("Less", dots, n.const(0, acc)), n.const(0, acc), dots)
    total = n("MatMul", n("Unsqueeze", weights, n.const([2])), dots)  # [B, Sq, 1, Skv]
    result: Value = n("Squeeze", total, n.const([2]))
    return result
