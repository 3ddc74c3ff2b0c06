"""The decomposed form: plain operators that every runtime has."""

from __future__ import annotations

import math

from attn_dispatch.capability import Reason
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.lowering.nodes import Value
from attn_dispatch.lowering.parts import Call, Results, accumulated
from attn_dispatch.lowering.target import Target

__all__ = ["lower", "reasons_against"]

_OLDEST = 18


def reasons_against(op: AttentionOp, target: Target) -> list[Reason]:
    """Why plain operators cannot express an op."""
    if target.opset >= _OLDEST:
        return []
    text = f"opset {target.opset}: the decomposed form needs {_OLDEST}"
    return [Reason("version", "opset", target.opset, f">= {_OLDEST}", f"opset={_OLDEST}", text)]


def lower(call: Call) -> Results:
    """Scale, soft cap, biases, mask, softmax, ``@ V``, in the order of DESIGN section 2."""
    op, n = call.op, call.nodes
    acc = accumulated(op.dtype)
    q, k, v = call.inputs(acc)
    q = n("Mul", q, n.const(op.effective_scale, acc))
    plain = call.allowed is None and not op.score and call.sinks is None and not op.outputs.lse
    folded = op.groups > 1
    rows = n("Reshape", q, n.const([0, op.Hkv, -1, op.D])) if folded else q
    scores = n("MatMul", rows, n("Transpose", k, perm=[0, 1, 3, 2]))
    if folded and not (plain and not op.outputs.weights):
        scores = n("Reshape", scores, n.shape(call.batch, op.Hq, call.sq, call.skv))
    weights, lse = _softmax(call, _scored(call, scores, acc), acc)
    shares = weights
    if folded and not (plain and not op.outputs.weights):
        rows_of_group = n("Mul", call.sq, n.const([op.groups]))
        shares = n("Reshape", weights, n.shape(call.batch, op.Hkv, rows_of_group, call.skv))
    out = n("MatMul", shares, v)
    if folded:
        out = n("Reshape", out, n.shape(call.batch, op.Hq, call.sq, op.Dv))
    shown = n.cast(weights, acc, op.dtype) if op.outputs.weights else None
    return Results(n.cast(out, acc, op.dtype), lse if op.outputs.lse else None, shown)


def _scored(call: Call, scores: Value, acc: str) -> Value:
    """Soft cap, biases and mask on scaled scores."""
    n = call.nodes
    if call.softcap:
        cap = n.const(call.softcap, acc)
        scores = n("Mul", n("Tanh", n("Div", scores, cap)), cap)
    bias = call.bias(acc)
    scores = scores if bias is None else n("Add", scores, bias)
    if call.allowed is not None:
        scores = n("Where", call.allowed, scores, n.const(-math.inf, acc))
    return scores


def _softmax(call: Call, scores: Value, acc: str) -> tuple[Value, Value | None]:
    """Weights and log-sum-exp. A row without a finite score has weights 0; NaN stays NaN."""
    n, op = call.nodes, call.op
    may_be_empty = call.allowed is not None or call.bias(acc) is not None
    if call.sinks is None and not op.outputs.lse:
        weights = n("Softmax", scores, axis=-1)
        if may_be_empty:  # softmax of a row of -inf is NaN; what is not attended weighs 0
            gone = n("Equal", scores, n.const(-math.inf, acc))
            weights = n("Where", gone, n.const(0, acc), weights)
        return weights, None
    top = n("ReduceMax", scores, n.const([-1]), keepdims=1)
    sink = None
    if call.sinks is not None:
        sink = n("Reshape", call.operand(call.sinks, acc), n.const([1, -1, 1, 1]))
        top = n("Max", top, sink)
    minus_inf = n.const(-math.inf, acc)
    top = n("Where", n("Equal", top, minus_inf), n.const(0, acc), top)
    exponentials = n("Exp", n("Sub", scores, top))
    total = n("ReduceSum", exponentials, n.const([-1]), keepdims=1)
    if sink is not None:
        total = n("Add", total, n("Exp", n("Sub", sink, top)))
    empty = n("Equal", total, n.const(0, acc))
    safe = n("Where", empty, n.const(1, acc), total)
    lse = n("Where", empty, minus_inf, n("Add", n("Log", safe), top))
    return n("Div", exponentials, safe), n("Squeeze", lse, n.const([-1]))
