"""The contrib form: onnxruntime's own operators, only inside the limits within which they were seen to be right.

GroupQueryAttention: causal, from the last key or over equal lengths; a window whose right end is the query; soft cap;
sinks. Several query rows over a past need a batch of 1: the runtime refuses others when it runs.
MultiHeadAttention: every pair, equal heads, with or without a bias; its own causal flag is wrong for unequal lengths,
and a row without a key is NaN, so neither is used.
"""

from __future__ import annotations

from typing import Any

from attn_dispatch.capability import Reason
from attn_dispatch.ir.atoms import Causal, Full, Window
from attn_dispatch.ir.masks import And
from attn_dispatch.ir.ops import END, AttentionOp
from attn_dispatch.lowering.nodes import Value
from attn_dispatch.lowering.parts import Call, Results, needs_wide_scores
from attn_dispatch.lowering.target import Target

__all__ = ["lower", "reasons_against"]

_DOMAIN = "com.microsoft"


def reasons_against(op: AttentionOp, target: Target) -> list[Reason]:
    """Why none of the operators expresses an op."""
    reasons = [_no("lse", "return_lse")] if op.outputs.lse else []
    reasons += [_no("weights", "return_weights")] if op.outputs.weights else []
    if op.effective_scale <= 0:
        reasons.append(_no("scale<=0", f"scale {op.effective_scale:g}, which they take as unset or refuse"))
    if op.dtype not in ("float32", "float16", "bfloat16") or (
        op.dtype == "bfloat16" and "bfloat16" not in target.proven
    ):
        reasons.append(_no("dtype", f"dtype {op.dtype}"))
    if needs_wide_scores(op):
        reasons.append(_no("score:Bias", f"a bias that is wider than {op.dtype}"))
    if isinstance(op.mask, Full):
        return reasons + _against_mha(op, target)
    return reasons + _against_gqa(op, target)


def _no(field: str, text: str) -> Reason:
    return Reason(
        "feature", field, True, False, "form='standard' or 'decomposed'", f"no {text} in com.microsoft's operators"
    )


def _against_mha(op: AttentionOp, target: Target) -> list[Reason]:
    reasons = [] if "contrib_mha" in target.proven else [_unproven("MultiHeadAttention", target)]
    for word, on, text in (
        ("gqa", op.groups > 1, f"grouped heads ({op.Hq} over {op.Hkv}) without a causal mask"),
        ("score:SoftCap", "score:SoftCap" in op.features, "soft cap without a causal mask"),
        ("score:Alibi", "score:Alibi" in op.features, "ALiBi"),
        ("sinks", "sinks" in op.features, "sinks without a causal mask"),
    ):
        reasons += [_no(word, text)] if on else []
    return reasons


def _against_gqa(op: AttentionOp, target: Target) -> list[Reason]:
    reasons = [] if "contrib_gqa" in target.proven else [_unproven("GroupQueryAttention", target)]
    if _window_of(op) is None:
        reasons.append(_no("mask", f"mask {op.mask}: causal, or a window that ends at the query"))
    elif op.q_offset != END and not (op.q_offset == 0 and op.Sq == op.Skv):
        reasons.append(_no("q_offset", f"causal mask at q_offset {op.q_offset} over {op.Sq} rows and {op.Skv} keys"))
    for name, size in (("head_dim", op.D), ("value head_dim", op.Dv)):
        if size != op.D or size % 8:
            text = f"{name} {size}: GroupQueryAttention takes one head_dim that is a multiple of 8"
            reasons.append(Reason("limit", name, size, "multiple of 8, equal to head_dim", "form='standard'", text))
    return reasons + ([_no("score", "bias")] if any(t.feature != "score:SoftCap" for t in op.score) else [])


def _unproven(name: str, target: Target) -> Reason:
    text = f"{name} was not seen to be right on {target.runtime}"
    return Reason("version", name, False, True, "form='standard'", text)


def _window_of(op: AttentionOp) -> int | None:
    """Keys that a row sees at most, its own among them; -1 for all before it, None when the mask is another one."""
    parts = op.mask.args if isinstance(op.mask, And) else (op.mask,)
    lefts: list[int] = []
    ends_at_query = False
    for part in parts:
        if isinstance(part, Window) and part.right in (0, None):
            ends_at_query = ends_at_query or part.right == 0
            lefts += [] if part.left is None else [part.left]
        elif isinstance(part, Causal):
            ends_at_query = True
        else:
            return None
    if not ends_at_query:
        return None
    return min(lefts) + 1 if lefts else -1


def lower(call: Call) -> Results:
    """One node of com.microsoft, and the packing of heads around it."""
    return _mha(call) if isinstance(call.op.mask, Full) else _gqa(call)


def _packed(call: Call, x: Value) -> Value:
    """``[B, H, S, D]`` -> ``[B, S, H * D]``."""
    n = call.nodes
    result: Value = n("Reshape", n("Transpose", x, perm=[0, 2, 1, 3]), n.const([0, 0, -1]))
    return result


def _unpacked(call: Call, x: Value) -> Results:
    n, op = call.nodes, call.op
    heads = n("Reshape", x, n.const([0, 0, op.Hq, op.Dv]))
    return Results(n("Transpose", heads, perm=[0, 2, 1, 3]))


def _mha(call: Call) -> Results:
    n, op = call.nodes, call.op
    q, k, v = (_packed(call, x) for x in (call.query, call.key, call.value))
    bias = call.bias(op.dtype)
    bias = None if bias is None else n("Expand", bias, n.shape(1, 1, call.sq, call.skv))
    out = n("MultiHeadAttention", q, k, v, None, None, bias, domain=_DOMAIN, num_heads=op.Hq, scale=op.effective_scale)
    return _unpacked(call, out)


def _gqa(call: Call) -> Results:
    n, op = call.nodes, call.op
    window = _window_of(op)
    key, value = call.key, call.value
    past: tuple[Value | None, Value | None] = (None, None)
    if op.q_offset == END:  # the operator counts from what it calls the past
        before = n("Sub", call.skv, call.sq)
        past = (n.slice(key, 0, before, 2), n.slice(value, 0, before, 2))
        key, value = (n.slice(x, before, call.skv, 2) for x in (key, value))
    q, k, v = (_packed(call, x) for x in (call.query, key, value))
    total = n.cast(call.skv, "int64", "int32")
    last = n("Expand", n("Sub", total, n.const([1], "int32")), call.batch)
    sinks = None if call.sinks is None else call.operand(call.sinks, op.dtype)
    attributes: dict[str, Any] = {"num_heads": op.Hq, "kv_num_heads": op.Hkv, "scale": op.effective_scale}
    attributes |= {"softcap": call.softcap} if call.softcap else {}
    attributes |= {"local_window_size": window} if window is not None and window > 0 else {}
    scalar = n("Squeeze", total, n.const([0]))
    made = n(
        "GroupQueryAttention", q, k, v, *past, last, scalar, None, None, None, None, sinks, domain=_DOMAIN, outputs=3,
        **attributes,
    )  # fmt: skip
    return _unpacked(call, made[0])
