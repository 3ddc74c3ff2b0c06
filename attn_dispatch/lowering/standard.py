"""The standard form: one Attention node of ai.onnx (opset 23, 24)."""

from __future__ import annotations

import math
from typing import Any

from attn_dispatch.capability import Reason
from attn_dispatch.ir.atoms import Causal, Dense, Full, KeyLengths
from attn_dispatch.ir.masks import And, Mask
from attn_dispatch.ir.ops import END, AttentionOp
from attn_dispatch.ir.scores import Bias
from attn_dispatch.lowering.nodes import Value
from attn_dispatch.lowering.parts import Call, Results, needs_wide_scores
from attn_dispatch.lowering.target import Target

__all__ = ["lower", "reasons_against"]

_OLDEST = 23
_WITH_LENGTHS = 24


def reasons_against(op: AttentionOp, target: Target) -> list[Reason]:
    """Why one Attention node cannot express an op, or not on this runtime."""
    reasons = []
    if target.opset < _OLDEST:
        text = f"opset {target.opset}: Attention is there from opset {_OLDEST} on"
        reasons.append(Reason("version", "opset", target.opset, f">= {_OLDEST}", "form='decomposed'", text))
    if op.outputs.lse:
        text = "return_lse: the Attention node has no log-sum-exp"
        reasons.append(Reason("feature", "lse", True, False, "form='decomposed'", text))
    for word in _needed(op):
        if word not in target.proven:
            text = f"{word} is wrong or missing on {target.runtime}"
            reasons.append(Reason("version", word, False, True, "form='decomposed'", text))
    return reasons


def _needed(op: AttentionOp) -> list[str]:
    """What the runtime must have been seen to do, where there is no other way to say it with this node."""
    words = ["gqa"] if op.groups > 1 else []
    words += ["weights"] if op.outputs.weights else []
    words += ["float64"] if op.dtype == "float64" else []
    masked = not isinstance(op.mask, Full) or any(term.feature != "score:SoftCap" for term in op.score)
    words += ["empty_rows"] if masked and not _is_causal_at_start(op) else []
    return words + (["softcap"] if masked and any(term.feature == "score:SoftCap" for term in op.score) else [])


def lower(call: Call) -> Results:
    """One Attention node, its mask, and what the node cannot say before and behind it."""
    op, n = call.op, call.nodes
    wide = needs_wide_scores(op) or (op.dtype in ("float16", "bfloat16") and op.dtype not in call.target.proven)
    dtype = "float32" if wide else op.dtype
    q, k, v = call.inputs(dtype)
    scale = op.effective_scale
    if scale <= 0 or dtype == "float64":  # the node takes the root of its scale, which is a float32
        q, scale = n("Mul", q, n.const(scale, dtype)), 1.0
    attributes: dict[str, Any] = {"scale": float(scale), "softcap": float(call.softcap) or None}
    attributes["softmax_precision"] = 1 if dtype in ("float16", "bfloat16") else None
    mask = lengths = None
    if call.sinks is not None:
        k, v, mask = _with_sink(call, k, v, dtype)
    else:
        attributes["is_causal"], lengths, mask = _masked(call, dtype)
    if op.outputs.weights:
        attributes["qk_matmul_output_mode"] = 3
    made = n("Attention", q, k, v, mask, None, None, lengths, outputs=4 if op.outputs.weights else 1, **attributes)
    out, weights = (made[0], made[3]) if op.outputs.weights else (made, None)
    for absent in made[1:3] if op.outputs.weights else ():
        absent.name = ""
    if weights is not None:
        weights = n.slice(weights, 0, call.skv, 3) if call.sinks is not None else weights
        weights = n.cast(weights, dtype, op.dtype)
    return Results(n.cast(out, dtype, op.dtype), None, weights)


def _is_causal_at_start(op: AttentionOp) -> bool:
    return isinstance(op.mask, Causal) and op.q_offset == 0 and not _biased(op)


def _biased(op: AttentionOp) -> bool:
    return any(term.feature != "score:SoftCap" for term in op.score)


def _masked(call: Call, dtype: str) -> tuple[int | None, Value | None, Value | None]:
    """``is_causal``, ``nonpad_kv_seqlen`` and ``attn_mask``: the least that says what the op says."""
    op, n, proven = call.op, call.nodes, call.target.proven
    has_lengths = call.target.opset >= _WITH_LENGTHS
    if isinstance(op.mask, Full) and not _biased(op):
        return None, None, None
    if _is_causal_at_start(op) and "causal_start" in proven:
        return 1, None, None
    if has_lengths and _is_causal_to_the_end(op) and "causal_end" in proven:
        return 1, n("Expand", call.skv, call.batch), None
    lengths, rest = _apart(op.mask) if has_lengths else (None, op.mask)
    joined = _biased(op) or not isinstance(rest, Full)
    word = "lengths_and_bias" if _biased(op) else "lengths_and_mask" if joined else "lengths"
    if lengths is None or word not in proven:
        return None, None, _whole(call, _mask_tensor(call, op.mask, dtype))
    counts = call.grid.of_type(lengths.lengths, "int64")[0]
    counts = n("Expand", n("Max", n("Min", counts, call.skv), n.const([0])), call.batch)  # a mask may say more than Skv
    return None, counts, _whole(call, _mask_tensor(call, rest, dtype)) if joined else None


def _is_causal_to_the_end(op: AttentionOp) -> bool:
    return isinstance(op.mask, Causal) and op.q_offset == END and not _biased(op)


def _apart(mask: Mask) -> tuple[KeyLengths | None, Mask]:
    """The key lengths of a conjunction and what else it says: a node takes them as numbers."""
    parts = list(mask.args) if isinstance(mask, And) else [mask]
    lengths = next((part for part in parts if isinstance(part, KeyLengths)), None)
    rest = [part for part in parts if part is not lengths]
    return lengths, And.of(*rest) if rest else Full()


def _mask_tensor(call: Call, mask: Mask, dtype: str) -> Value:
    """A mask, bool, or all biases with -inf where the mask is not, in a dtype."""
    n, bias = call.nodes, call.bias(dtype)
    allowed = None if isinstance(mask, Full) else call.allowed_by(mask)
    if bias is None:
        assert allowed is not None
        return allowed
    if allowed is None:
        return bias
    result: Value = n("Where", allowed, bias, n.const(-math.inf, dtype))
    return result


def _whole(call: Call, mask: Value) -> Value:
    """A mask with a size for every query row and key: the specification lets them broadcast, kernels do not."""
    n = call.nodes
    if _has_whole_tensor(call.op):  # expanding to the same shape would copy it, which may cost as much as the attention
        return mask
    result: Value = n("Expand", mask, n.shape(1, 1, call.sq, call.skv))
    return result


def _has_whole_tensor(op: AttentionOp) -> bool:
    """Whether a bias or mask given as a tensor has rank 4, every row and every key: so has what it is joined with."""
    names = [term.bias.name for term in op.score if isinstance(term, Bias)]
    names += [name for atom in op.mask.atoms() if isinstance(atom, Dense) for name in atom.refs()]
    shapes = [op.operand(name).shape for name in names]
    return any(len(shape) == 4 and shape[2:] == (op.Sq, op.Skv) and 1 not in shape[2:] for shape in shapes)


def _with_sink(call: Call, k: Value, v: Value, dtype: str) -> tuple[Value, Value, Value]:
    """One more key and value of 0 per head: its score is 0, so its bias is the sink's logit, and it adds nothing."""
    op, n = call.op, call.nodes
    zero = n.const(0, dtype)
    k, v = (
        n("Concat", x, n("Expand", zero, n.shape(call.batch, op.Hkv, 1, size)), axis=2)
        for x, size in ((k, op.D), (v, op.Dv))
    )
    bias, allowed = call.bias(dtype), call.allowed
    bias = zero if bias is None else bias
    bias = bias if allowed is None else n("Where", allowed, bias, n.const(-math.inf, dtype))
    # heads and, where the mask has them, batches: both parts need every size, since Concat does not broadcast
    rows = n("Expand", bias, n.shape(1, op.Hq, call.sq, call.skv))
    assert call.sinks is not None
    sink = n("Reshape", call.operand(call.sinks, dtype), n.const([1, op.Hq, 1, 1]))
    column = n("Expand", sink, n("Concat", n("Shape", rows, start=0, end=3), n.const([1]), axis=0))
    return k, v, n("Concat", rows, column, axis=3)
