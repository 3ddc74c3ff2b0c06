"""Eager attention in plain torch: the specification. Every other backend is right when it agrees with this.

One straight line, in the order of DESIGN section 2: scale, soft cap, biases, mask, softmax, dropout, ``@ V``.
Accumulation is fp32 (fp64 for fp64 inputs). Everything is an ordinary differentiable torch op, so it has gradients of
gradients, forward mode, vmap, compile and export by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from attn_dispatch.backend import Raw
from attn_dispatch.ir.atoms import Columns, Full, KeyLengths, KeyRange, QueryLengths, Rows, Segments
from attn_dispatch.ir.masks import And, Grid, Mask
from attn_dispatch.ir.operands import resolve
from attn_dispatch.ir.ops import END, AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias, SoftCap
from attn_dispatch.ir.tensors import Ref
from attn_dispatch.ir.weights import Linear, Softmax
from attn_dispatch.state import LinearState, state_dtype

__all__ = [
    "allowed_pairs",
    "apply_feature_map",
    "apply_terms",
    "attention",
    "column_masks",
    "empty_lse",
    "finite",
    "grouped_matmul",
    "hide_columns",
    "key_count",
    "offset_of",
    "positions",
    "weigh_softmax",
]

Tensors = Mapping[str, torch.Tensor]


def attention(op: AttentionOp, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Tensors) -> Raw:
    """Attention as DESIGN section 2 defines it.

    Args:
        q: ``[B, Hq, Sq, D]``; k: ``[B, Hkv, Skv, D]``; v: ``[B, Hkv, Skv, Dv]``.
        tensors: what the op's names stand for.

    Returns:
        ``Raw(out [B, Hq, Sq, Dv], lse [B, Hq, Sq], weights [B, Hq, Sq, Skv], state)``; weights before dropout.
    """
    acc = state_dtype(q.dtype)
    linear = op.weight if isinstance(op.weight, Linear) else None
    if q.shape[1] == 0 or (k.shape[2] == 0 and linear is None):
        return _no_keys(op, q, k, v, tensors, acc)
    k, v = hide_columns(op.mask, k, v, tensors)
    state = _next_state(op, linear, k, v, tensors) if linear is not None and op.outputs.state else None
    k, v, bad = _set_aside_nonfinite(op, k, v)
    q_acc, k_acc = q.to(acc), k.to(acc)
    if linear is not None:
        q_acc, k_acc = (apply_feature_map(linear.feature_map, x) for x in (q_acc, k_acc))
    scores = grouped_matmul(q_acc, k_acc.transpose(-1, -2)) * op.effective_scale
    scores = scores if bad is None else scores.masked_fill(_heads(bad.keys, q)[..., None, :], math.nan)
    scores = apply_terms(op, scores, tensors)
    allowed = allowed_pairs(op, q, k, tensors)
    allowed = allowed if bad is None else _without_minus_inf(op, allowed, tensors)
    carried = None
    if linear is None:
        weights, lse = weigh_softmax(op, scores, allowed, tensors)
    else:
        weights, lse, carried = _weigh_linear(op, linear, q_acc, scores, allowed, tensors)
    dropped = F.dropout(weights, op.dropout_p) if op.dropout_p > 0 else weights
    out = grouped_matmul(dropped, v.to(acc))
    out = out if carried is None else out + carried
    if bad is not None:  # a key that a row does attend must still show: 0 * NaN is NaN only where the weight is not 0
        attended = dropped.detach()  # as a constant: the gradient of a row that excludes the key must not see it either
        touched = grouped_matmul((attended != 0).to(acc), bad.values.to(acc)) > 0
        out = out + torch.where(touched, grouped_matmul(attended, bad.raw_v.to(acc)), 0.0)
    return Raw(out.to(q.dtype), lse, weights.to(q.dtype) if op.outputs.weights else None, state)


def offset_of(op: AttentionOp, sq: int, skv: int, tensors: Tensors) -> int | torch.Tensor:
    """The key position of query row 0 for actual lengths: a number, or a tensor ``[B]``."""
    if isinstance(op.q_offset, Ref):
        return tensors[op.q_offset.name]
    return skv - sq if op.q_offset == END else int(op.q_offset)


def positions(op: AttentionOp, q: torch.Tensor, k: torch.Tensor, tensors: Tensors) -> Grid:
    """The grid of query and key positions of this call."""
    sq, skv = q.shape[2], k.shape[2]
    return Grid.make(sq, skv, offset_of(op, sq, skv, tensors), tensors, q.device, (0, sq))


def allowed_pairs(op: AttentionOp, q: torch.Tensor, k: torch.Tensor, tensors: Tensors) -> torch.Tensor | None:
    """The mask as a boolean tensor broadcastable to ``[B, Hq, Sq, Skv]``; None when all pairs attend."""
    return None if isinstance(op.mask, Full) else op.mask.allowed(positions(op, q, k, tensors))


def apply_terms(op: AttentionOp, scores: torch.Tensor, tensors: Tensors) -> torch.Tensor:
    """Soft cap and biases, in the op's order, on scaled scores ``[B, Hq, Sq, Skv]``."""
    for term in op.score:
        if isinstance(term, SoftCap):
            scores = term.cap * torch.tanh(scores / term.cap)
        elif isinstance(term, Bias):
            scores = scores + tensors[term.bias.name].to(scores.dtype)
        elif isinstance(term, Alibi):
            sq, skv = scores.shape[-2:]
            grid = Grid.make(sq, skv, offset_of(op, sq, skv, tensors), tensors, scores.device, (0, sq))
            slopes = tensors[term.slopes.name].to(scores.dtype).view(-1, 1, 1)
            scores = scores - slopes * (grid.queries - grid.keys).abs()
        else:
            raise TypeError(f"the reference does not know the score term {term}")
    return scores


def weigh_softmax(
    op: AttentionOp, scores: torch.Tensor, allowed: torch.Tensor | None, tensors: Tensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax with sinks; an empty row has weights 0 and lse -inf (or its sink's logit)."""
    assert isinstance(op.weight, Softmax)
    if allowed is not None:
        scores = torch.where(allowed, scores, -math.inf)
    top = scores.detach().amax(-1, keepdim=True)
    sink = None
    if op.weight.sinks is not None:
        sink = tensors[op.weight.sinks.name].to(scores.dtype).view(1, -1, 1, 1)
        top = torch.maximum(top, sink.detach())
    top = torch.where(top == -math.inf, 0.0, top)  # -inf - -inf is NaN; exp(-inf - 0) is the 0 that is meant
    exponentials = torch.exp(scores - top)
    total = exponentials.sum(-1, keepdim=True)
    total = total if sink is None else total + torch.exp(sink - top)
    empty = total == 0
    safe = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -math.inf, torch.log(safe) + top)
    return exponentials / safe, lse.squeeze(-1)


# --- the linear family -----------------------------------------------------------------------------------------------


def _weigh_linear(
    op: AttentionOp,
    weight: Linear,
    q: torch.Tensor,
    scores: torch.Tensor,
    allowed: torch.Tensor | None,
    tensors: Tensors,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Weights, the logarithm of their sum, and what the incoming state adds to the output; q has its feature map."""
    weights = scores if allowed is None else torch.where(allowed, scores, 0.0)
    sq, skv = scores.shape[-2:]
    grid = Grid.make(sq, skv, offset_of(op, sq, skv, tensors), tensors, scores.device, (0, sq))
    decay = None if weight.decay is None else tensors[weight.decay.name].to(scores.dtype).view(-1, 1, 1)
    if decay is not None:
        weights = weights * decay ** (grid.queries - grid.keys).abs()  # a power: 0 ** 0 is the 1 that is meant
    total = weights.sum(-1, keepdim=True)
    carried = None
    if weight.state is not None:
        seen = q * op.effective_scale
        if decay is not None:
            seen = seen * decay ** (grid.queries + 1).clamp(min=0)
        for part in op.mask.args if isinstance(op.mask, And) else (op.mask,):
            if isinstance(part, (QueryLengths, Rows)):  # an empty row sees no state either
                seen = torch.where(part.allowed(grid), seen, 0.0)
        segments = _segments(op, tensors)
        if segments is not None and skv:
            query_ids, key_ids = segments
            seen = torch.where((query_ids == key_ids[..., :1])[:, None, :, None], seen, 0.0)
        carried = grouped_matmul(seen, tensors[weight.state.name].to(q.dtype))
        if weight.state_z is not None:
            total = total + grouped_matmul(seen, tensors[weight.state_z.name].to(q.dtype)[..., None])
    if weight.normalizer_eps is not None:
        divisor = total + weight.normalizer_eps
        if weight.normalizer_eps == 0:  # a row that attends nothing gives 0
            divisor = torch.where(divisor == 0, 1.0, divisor)
        weights = weights / divisor
        carried = None if carried is None else carried / divisor
    return weights, torch.log(total.abs()).squeeze(-1), carried


def _next_state(op: AttentionOp, weight: Linear, k: torch.Tensor, v: torch.Tensor, tensors: Tensors) -> LinearState:
    """The state after all keys of this call; with segments, after those of the last key's segment alone."""
    acc = state_dtype(k.dtype)
    b, skv = k.shape[0], k.shape[2]
    count = key_count(op, b, skv, tensors, k.device)  # [B]
    keys, values = apply_feature_map(weight.feature_map, k.to(acc)), v.to(acc)
    keep = torch.ones((b, 1, skv), dtype=torch.bool, device=k.device)
    columns = column_masks(op.mask)
    if columns is not None:
        keep = keep & columns.dense(1, skv, 0, tensors, k.device).reshape(-1, 1, skv)
    carries = torch.ones((b, 1, 1), dtype=acc, device=k.device)
    segments = _segments(op, tensors)
    if segments is not None and skv:
        ids = segments[1].expand(b, skv)
        keep = keep & (ids == ids[:, -1:])[:, None]
        carries = (ids[:, :1] == ids[:, -1:])[..., None].to(acc)
    share = keep.to(acc)  # [B, H|1, Skv]
    if weight.decay is not None:
        decay = tensors[weight.decay.name].to(acc).view(1, -1, 1)
        keys, values = (_repeated(x, decay.shape[1]) for x in (keys, values))
        behind = count.view(-1, 1, 1) - 1 - torch.arange(skv, device=k.device)
        share = share * decay ** behind.clamp(min=0)
        carries = carries * decay ** count.view(-1, 1, 1)
    keys, values = (torch.where(keep[..., None], x, 0.0) for x in (keys * share[..., None], values))
    s, z = keys.transpose(-1, -2) @ values, None if weight.normalizer_eps is None else keys.sum(2)
    if weight.state is not None:
        s = s + carries[..., None] * tensors[weight.state.name].to(acc)
        z = z if weight.state_z is None or z is None else z + carries * tensors[weight.state_z.name].to(acc)
        count = count + tensors[weight.state_length.name] if weight.state_length is not None else count
    return LinearState(s, z, count)


def key_count(op: AttentionOp, b: int, skv: int, tensors: Tensors, device: torch.device) -> torch.Tensor:
    """Keys of each sequence, int64 ``[B]``: Skv, or fewer where the mask has key lengths."""
    count = torch.full((b,), skv, dtype=torch.int64, device=device)
    for part in op.mask.args if isinstance(op.mask, And) else (op.mask,):
        if isinstance(part, KeyLengths):
            count = torch.minimum(count, resolve(part.lengths, tensors, device).to(count.dtype).expand(b))
    return count


def _segments(op: AttentionOp, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The segment numbers ``[B|1, Sq]`` and ``[B|1, Skv]``; None when the mask has no segments of its own."""
    for part in op.mask.args if isinstance(op.mask, And) else (op.mask,):
        if isinstance(part, Segments):
            ids = (resolve(operand, tensors) for operand in (part.queries, part.keys))
            queries, keys = (x[None] if x.ndim == 1 else x for x in ids)
            return queries, keys
    return None


def apply_feature_map(name: str, x: torch.Tensor) -> torch.Tensor:
    """The feature map of the linear family: ``"identity"`` or ``"elu1"`` (elu + 1, Katharopoulos et al. 2020)."""
    if name == "identity":
        return x
    if name == "elu1":
        return F.elu(x) + 1
    raise ValueError(f"unknown feature map {name!r}; there are identity and elu1")


def grouped_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a [B, Hq, M, K] @ b [B, Hkv, K, N]``, query head h with kv head ``h // (Hq / Hkv)``, without repeating b."""
    hq, hkv = a.shape[1], b.shape[1]
    if hq == hkv:
        return a @ b
    groups, m = hq // hkv, a.shape[2]
    rows = a.unflatten(1, (hkv, groups)).flatten(2, 3)  # torch.export cannot prove a reshape over a symbolic length
    return (rows @ b).unflatten(2, (groups, m)).flatten(1, 2)


def _heads(per_kv_head: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """``[B, Hkv, ...]`` repeated to the query heads."""
    return _repeated(per_kv_head, q.shape[1])


def _repeated(per_kv_head: torch.Tensor, heads: int) -> torch.Tensor:
    return per_kv_head.repeat_interleave(heads // per_kv_head.shape[1], 1)


def _no_keys(
    op: AttentionOp, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tensors: Tensors, acc: torch.dtype
) -> Raw:
    """Every row is empty: 0, connected to all that may want a gradient, so that each gets one of 0."""
    zero = q[..., :0].sum(-1, keepdim=True)
    for x in (k, v, *tensors.values()):
        if x.requires_grad:
            zero = zero + x.reshape(-1)[:0].sum().to(zero.dtype)
    shape = q.shape[:3]
    lse = empty_lse(op, shape, tensors, acc, q.device)
    weights = q.new_zeros((*shape, v.shape[2])) if op.outputs.weights else None
    return Raw(zero.expand(*shape, v.shape[3]).clone(), lse, weights)


def empty_lse(
    op: AttentionOp, shape: tuple[int, ...], tensors: Tensors, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """The log-sum-exp ``[B, Hq, Sq]`` of rows that attend nothing: the sink's logit, or -inf without one."""
    if isinstance(op.weight, Softmax) and op.weight.sinks is not None:
        return tensors[op.weight.sinks.name].to(dtype).view(1, -1, 1).expand(shape)
    return torch.full(shape, -math.inf, dtype=dtype, device=device)


# --- NaN and Inf in keys that are excluded -------------------------------------------------------------------------


def column_masks(mask: Mask) -> Mask | None:
    """The part of a mask that excludes whole keys whatever the query; None when there is none."""
    parts = mask.args if isinstance(mask, And) else (mask,)
    columns = [part for part in parts if isinstance(part, (Columns, KeyLengths, KeyRange))]
    return And.of(*columns) if columns else None


def hide_columns(mask: Mask, k: torch.Tensor, v: torch.Tensor, tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Zero the keys and values that are excluded for every query, so that nothing in them can leak."""
    columns = column_masks(mask)
    if columns is None:
        return k, v
    keep = columns.dense(1, k.shape[2], 0, tensors, k.device).transpose(-1, -2)  # [B, 1, Skv, 1] or [Skv, 1]
    return torch.where(keep, k, 0.0), torch.where(keep, v, 0.0)


class _Nonfinite:
    """Keys (any element) and value elements that are NaN or Inf, and the values as they were."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.keys = ~torch.isfinite(k).all(-1)
        self.values = ~torch.isfinite(v)
        self.raw_v = v.detach()


def _set_aside_nonfinite(
    op: AttentionOp, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, _Nonfinite | None]:
    """Replace NaN and Inf by 0 and remember where they were, so that 0 * NaN reaches no row that excludes the key.

    Reads the data, so only on the CPU and only with values at hand; elsewhere a dense mask does not hide NaN.
    """
    excludes = not isinstance(op.mask, Full) or any(isinstance(term, Bias) for term in op.score)
    if not excludes or op.traced or k.device.type != "cpu" or torch.compiler.is_compiling():
        return k, v, None
    if finite(k) and finite(v):
        return k, v, None
    bad = _Nonfinite(k, v)
    return torch.where(bad.keys[..., None], 0.0, k), torch.where(bad.values, 0.0, v), bad


def _without_minus_inf(op: AttentionOp, allowed: torch.Tensor | None, tensors: Tensors) -> torch.Tensor | None:
    """The allowed pairs without those whose bias is -inf: they are masked too, and NaN - inf would be NaN."""
    for term in op.score:
        if isinstance(term, Bias):
            keep = ~torch.isneginf(tensors[term.bias.name])
            allowed = keep if allowed is None else allowed & keep
    return allowed


def finite(x: torch.Tensor) -> bool:
    """Whether all elements are finite, by one pass over the data; an overflowing sum may say no wrongly, never yes."""
    x = x.detach() if x.requires_grad else x
    total = x.sum() if x.dtype is torch.float32 or x.dtype is torch.float64 else x.sum(dtype=torch.float32)
    return math.isfinite(total.item())
