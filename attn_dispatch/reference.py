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
from attn_dispatch.ir.atoms import Columns, Full, KeyLengths, KeyRange
from attn_dispatch.ir.masks import And, Grid, Mask
from attn_dispatch.ir.ops import END, AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias, SoftCap
from attn_dispatch.ir.tensors import Ref
from attn_dispatch.ir.weights import Linear, Softmax

__all__ = [
    "allowed_pairs",
    "apply_terms",
    "attention",
    "column_masks",
    "empty_lse",
    "finite",
    "grouped_matmul",
    "hide_columns",
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
        ``Raw(out [B, Hq, Sq, Dv], lse [B, Hq, Sq], weights [B, Hq, Sq, Skv])``; weights are those before dropout.
    """
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    if k.shape[2] == 0 or q.shape[1] == 0:
        return _no_keys(op, q, v, tensors, acc)
    k, v = hide_columns(op.mask, k, v, tensors)
    k, v, bad = _set_aside_nonfinite(op, k, v)
    q_acc, k_acc = q.to(acc), k.to(acc)
    if isinstance(op.weight, Linear):
        q_acc, k_acc = (apply_feature_map(op.weight.feature_map, x) for x in (q_acc, k_acc))
    scores = grouped_matmul(q_acc, k_acc.transpose(-1, -2)) * op.effective_scale
    scores = scores if bad is None else scores.masked_fill(_heads(bad.keys, q)[..., None, :], math.nan)
    scores = apply_terms(op, scores, tensors)
    allowed = allowed_pairs(op, q, k, tensors)
    allowed = allowed if bad is None else _without_minus_inf(op, allowed, tensors)
    weights, lse = _weigh(op, scores, allowed, tensors)
    dropped = F.dropout(weights, op.dropout_p) if op.dropout_p > 0 else weights
    out = grouped_matmul(dropped, v.to(acc))
    if bad is not None:  # a key that a row does attend must still show: 0 * NaN is NaN only where the weight is not 0
        attended = dropped.detach()  # as a constant: the gradient of a row that excludes the key must not see it either
        touched = grouped_matmul((attended != 0).to(acc), bad.values.to(acc)) > 0
        out = out + torch.where(touched, grouped_matmul(attended, bad.raw_v.to(acc)), 0.0)
    return Raw(out.to(q.dtype), lse, weights.to(q.dtype) if op.outputs.weights else None)


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


def _weigh(
    op: AttentionOp, scores: torch.Tensor, allowed: torch.Tensor | None, tensors: Tensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores to weights and log-sum-exp."""
    if isinstance(op.weight, Linear):
        return _weigh_linear(op, op.weight, scores, allowed, tensors)
    return weigh_softmax(op, scores, allowed, tensors)


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


def _weigh_linear(
    op: AttentionOp, weight: Linear, scores: torch.Tensor, allowed: torch.Tensor | None, tensors: Tensors
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = scores if allowed is None else torch.where(allowed, scores, 0.0)
    if weight.decay is not None:
        sq, skv = scores.shape[-2:]
        grid = Grid.make(sq, skv, offset_of(op, sq, skv, tensors), tensors, scores.device, (0, sq))
        decay = tensors[weight.decay.name].to(scores.dtype).view(-1, 1, 1)
        weights = weights * decay ** (grid.queries - grid.keys).clamp(min=0)  # a power: 0 ** 0 is the 1 that is meant
    total = weights.sum(-1, keepdim=True)
    if weight.normalizer_eps is not None:
        weights = weights / (total + weight.normalizer_eps)
    return weights, torch.log(total.abs()).squeeze(-1)


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
    return per_kv_head.repeat_interleave(q.shape[1] // per_kv_head.shape[1], 1)


def _no_keys(op: AttentionOp, q: torch.Tensor, v: torch.Tensor, tensors: Tensors, acc: torch.dtype) -> Raw:
    """Every row is empty: 0, connected to q so that its gradient is 0 too."""
    zero = q[..., :0].sum(-1, keepdim=True)
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
    return math.isfinite(x.detach().sum(dtype=torch.float64 if x.dtype == torch.float64 else torch.float32).item())
