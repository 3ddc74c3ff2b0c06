"""What a person writes with torch alone: SDPA fed what the caller has, and the careful forms that we know.

==================  ===========================================================================================
``sdpa``            ``is_causal`` for a causal square, else the mask as a tensor (padding ``[B, 1, 1, Skv]``),
                    ``enable_gqa``; soft caps and sinks, which SDPA lacks, as matmul, softmax, matmul
fold groups         decode: the query heads of a kv head as rows
repeat kv           ``repeat_interleave`` instead of ``enable_gqa``
per sequence        padding: a loop over the batch at its true lengths
per document        packed documents: a loop over them with ``is_causal``
window blocks       a window: blocks of rows against the keys that they can see
sink key            a sink as one more key, whose logit stands in a float mask
eager, folded       soft caps in place, without repeating keys and values
in float32          half precision through the float32 kernel
==================  ===========================================================================================

Masks are made outside the timing, and a form's result is one tensor: putting parts together is timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from attn_dispatch import reference
from attn_dispatch.bench.contenders import Contender, Forward, NotApplicable
from attn_dispatch.ir.atoms import Causal, Columns, Full, KeyLengths, QueryLengths, Segments, Window
from attn_dispatch.ir.masks import And, Mask
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias, SoftCap
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.selection.samples import Sample

__all__ = ["allowed_pairs", "by_hand", "float_mask", "is_causal_square", "is_sdpa", "parts_of"]

_sdpa = F.scaled_dot_product_attention


@dataclass(frozen=True)
class _Given:
    """An op and its tensors, with the pieces that every form asks for."""

    op: AttentionOp
    sample: Sample

    @property
    def softcap(self) -> float | None:
        return next((term.cap for term in self.op.score if isinstance(term, SoftCap)), None)

    @property
    def sinks(self) -> torch.Tensor | None:
        weight = self.op.weight
        named = weight.sinks if isinstance(weight, Softmax) else None
        return None if named is None else self.sample.operands[named.name]

    @property
    def has_bias(self) -> bool:
        return any(isinstance(term, (Bias, Alibi)) for term in self.op.score)

    @property
    def is_plain(self) -> bool:
        """Nothing but a mask: what SDPA does."""
        return not self.op.score and self.sinks is None

    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.sample.query, self.sample.key, self.sample.value


def by_hand(op: AttentionOp, sample: Sample) -> list[Contender]:
    """SDPA as given, first, and the careful forms that apply to the op."""
    given = _Given(op, sample)
    makers: list[tuple[str, Callable[[_Given], Forward]]] = [("sdpa", _as_given)]
    makers += [(f"hand: {name}", make) for name, make in _FORMS if _applies(make, given)]
    return [Contender(name, "torch", lambda make=make: make(given)) for name, make in makers]  # type: ignore[misc]


def parts_of(mask: Mask) -> tuple[Mask, ...]:
    """A conjunction's parts; a mask that is none is its own only part."""
    return mask.args if isinstance(mask, And) else (mask,)


def is_causal_square(op: AttentionOp) -> bool:
    """Whether the mask is what ``is_causal=True`` means everywhere: causal, as many queries as keys."""
    return op.mask == Causal() and op.q_offset == 0 and op.Sq == op.Skv


def is_sdpa(op: AttentionOp) -> bool:
    """Whether torch's SDPA computes the op; it has no soft caps, sinks or linear attention."""
    has_sinks = isinstance(op.weight, Softmax) and op.weight.sinks is not None
    capped = any(isinstance(term, SoftCap) for term in op.score)
    return isinstance(op.weight, Softmax) and not has_sinks and not capped


def allowed_pairs(op: AttentionOp, sample: Sample) -> torch.Tensor | None:
    """The mask as a user has it: bool ``[B|1, H|1, Sq, Skv]``, ``[B|1, 1, 1, Skv]`` for padding, None for none."""
    if isinstance(op.mask, Full):
        return None
    offset = reference.offset_of(op, op.Sq, op.Skv, sample.operands)
    allowed = op.mask.dense(op.Sq, op.Skv, offset, sample.operands, op.device)
    allowed = allowed if op.mask.per_query else allowed[..., :1, :]
    return allowed[(None,) * (4 - allowed.ndim)].contiguous()


def float_mask(op: AttentionOp, sample: Sample) -> torch.Tensor:
    """Biases, ALiBi and the mask as one additive tensor ``[B|1, H|1, Sq, Skv]`` in the op's dtype.

    A bias that stands alone is handed over as it lies, as a user would: T5's has its heads last.
    """
    biases = [sample.operands[term.bias.name] for term in op.score if isinstance(term, Bias)]
    if isinstance(op.mask, Full) and len(biases) == len(op.score) == 1 and biases[0].ndim == 4:
        return biases[0].to(getattr(torch, op.dtype))
    shape = (1, 1, op.Sq, op.Skv)
    added = torch.zeros(shape, dtype=torch.float32, device=op.device)
    terms = op.with_(score=tuple(term for term in op.score if not isinstance(term, SoftCap)))
    added = reference.apply_terms(terms, added, sample.operands)
    allowed = allowed_pairs(op, sample)
    added = added if allowed is None else torch.where(allowed, added, -math.inf)
    return added.to(getattr(torch, op.dtype)).contiguous()


# --- as given --------------------------------------------------------------------------------------------------------


def _as_given(given: _Given) -> Forward:
    op = given.op
    if not isinstance(op.weight, Softmax):
        raise NotApplicable("SDPA has no linear attention")
    if op.outputs.lse or op.outputs.weights or op.dropout_p:
        raise NotApplicable("SDPA returns no lse or weights; dropout cannot be compared")
    if not is_sdpa(op):
        return _eager(given)
    return _plain_sdpa(given, *given.qkv(), gqa=op.groups != 1)


def _plain_sdpa(given: _Given, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gqa: bool) -> Forward:
    op, scale = given.op, given.op.scale
    if not given.has_bias and is_causal_square(op):
        return lambda: _sdpa(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    mask = float_mask(op, given.sample) if given.has_bias else allowed_pairs(op, given.sample)
    mask = mask if mask is None or not mask.is_floating_point() else mask.to(q.dtype)
    return lambda: _sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)


def _eager(given: _Given) -> Forward:
    """Matmul, cap, mask, softmax, matmul on repeated keys and values, as model code has it."""
    op, (q, k, v) = given.op, given.qkv()
    cap, sinks, groups, scale = given.softcap, given.sinks, op.groups, op.effective_scale
    has_mask = given.has_bias or not isinstance(op.mask, Full)
    mask = float_mask(op, given.sample) if has_mask else None

    def forward() -> torch.Tensor:
        keys, values = (x.repeat_interleave(groups, 1) for x in (k, v)) if groups > 1 else (k, v)
        scores = q @ keys.transpose(-1, -2) * scale
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        scores = scores if mask is None else scores + mask
        if sinks is not None:
            column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            weights = torch.cat([scores, column], -1).softmax(-1, dtype=torch.float32)[..., :-1]
        else:
            weights = scores.softmax(-1, dtype=torch.float32)
        return weights.to(q.dtype) @ values

    return forward


# --- careful forms; each raises NotApplicable where it is not one -----------------------------------------------------


def _applies(make: Callable[[_Given], Forward], given: _Given) -> bool:
    op = given.op
    if not isinstance(op.weight, Softmax) or op.outputs.lse or op.outputs.weights or op.dropout_p:
        return False
    try:
        make(given)
    except NotApplicable:
        return False
    return True


def _need(condition: bool) -> None:
    if not condition:
        raise NotApplicable("not a form of this op")


def _fold_groups(given: _Given) -> Forward:
    op, (q, k, v) = given.op, given.qkv()
    _need(given.is_plain and op.groups > 1 and op.Sq == 1)
    mask, rows = allowed_pairs(op, given.sample), (op.B, op.Hkv, op.groups, op.D)
    _need(mask is None or mask.shape[1] == 1)
    shape = (op.B, op.Hq, 1, op.Dv)
    return lambda: _sdpa(q.reshape(rows), k, v, attn_mask=mask, scale=op.scale).reshape(shape)


def _repeat_kv(given: _Given) -> Forward:
    op, (q, k, v) = given.op, given.qkv()
    _need(given.is_plain and op.groups > 1)
    causal = is_causal_square(op)
    mask = None if causal else allowed_pairs(op, given.sample)

    def forward() -> torch.Tensor:
        keys, values = (x.repeat_interleave(op.groups, 1) for x in (k, v))
        return _sdpa(q, keys, values, attn_mask=mask, is_causal=causal, scale=op.scale)

    return forward


def _per_sequence(given: _Given) -> Forward:
    op, (q, k, v) = given.op, given.qkv()
    parts = parts_of(op.mask)
    causal = Causal() in parts
    padding: list[Mask] = [part for part in parts if isinstance(part, (KeyLengths, Columns, QueryLengths))]
    _need(op.B > 1 and bool(padding) and len(padding) + causal == len(parts))
    _need(op.q_offset == 0)
    _need(given.sinks is None and given.softcap is None)
    keys, rows = _true_spans(op, given.sample, padding)
    if causal and any(span.start for span in keys):  # left-padded: the queries before the first key see nothing
        _need(op.Sq == op.Skv)
        rows = [slice(min(max(k.start, r.start), r.stop), r.stop) for k, r in zip(keys, rows, strict=True)]
    bias = float_mask(op.with_(mask=Full()), given.sample) if given.has_bias else None
    bias = None if bias is None else bias.expand(*bias.shape[:2], op.Sq, op.Skv)
    _need(not (causal and bias is not None))
    gqa = op.groups != 1
    fold = gqa and op.Sq == 1
    q = q.reshape(op.B, op.Hkv, op.groups, op.D) if fold else q

    def one(i: int) -> torch.Tensor:
        n, m = keys[i], slice(None) if fold else rows[i]
        mask = None if bias is None else bias[min(i, bias.shape[0] - 1), :, m, n]
        return _sdpa(
            q[i : i + 1, :, m], k[i : i + 1, :, n], v[i : i + 1, :, n], attn_mask=mask, is_causal=causal,
            scale=op.scale, enable_gqa=gqa and not fold,
        )  # fmt: skip

    def forward() -> torch.Tensor:
        outs = [one(i) for i in range(op.B)]
        if any(out.shape[2] < op.Sq for out in outs):
            outs = [F.pad(out, (0, 0, m.start, op.Sq - m.stop)) for out, m in zip(outs, rows, strict=True)]
        return torch.cat(outs).reshape(op.B, op.Hq, op.Sq, op.Dv)

    return forward


def _true_spans(op: AttentionOp, sample: Sample, padding: list[Mask]) -> tuple[list[slice], list[slice]]:
    """Keys and query rows of each sequence."""
    keys, rows = [slice(0, op.Skv)] * op.B, [slice(0, op.Sq)] * op.B
    for part in padding:
        values = sample.operands[part.refs()[0]]
        if isinstance(part, Columns):
            _need(values.ndim == 2)
            firsts, lengths = values.int().argmax(-1), values.sum(-1)
            at = torch.arange(op.Skv, device=values.device)
            _need(torch.equal(values, (at >= firsts[:, None]) & (at < (firsts + lengths)[:, None])))
        else:
            lengths = values
            firsts = torch.zeros_like(lengths)
        _need(bool((lengths > 0).all()))
        ends = (firsts + lengths).expand(op.B).tolist()
        found = [slice(first, end) for first, end in zip(firsts.expand(op.B).tolist(), ends, strict=True)]
        if isinstance(part, QueryLengths):
            rows = found
        else:
            keys = found
    return keys, rows


def _per_document(given: _Given) -> Forward:
    op, (q, k, v) = given.op, given.qkv()
    segments = [part for part in parts_of(op.mask) if isinstance(part, Segments)]
    causal = Causal() in parts_of(op.mask)
    _need(given.is_plain and len(segments) == 1 and len(parts_of(op.mask)) == 1 + causal)
    _need(op.B == 1 and op.Sq == op.Skv and op.q_offset == 0 and segments[0].queries == segments[0].keys)
    ids = given.sample.operands[segments[0].refs()[0]].reshape(-1)
    ends = [0, *((ids.diff() != 0).nonzero()[:, 0] + 1).tolist(), op.Sq]
    spans = list(pairwise(ends))
    _need(len(spans) == len(ids.unique()))

    def forward() -> torch.Tensor:
        outs = [
            _sdpa(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=causal, scale=op.scale, enable_gqa=op.groups != 1)
            for a, b in spans
        ]
        return torch.cat(outs, 2)

    return forward


def _window_blocks(given: _Given) -> Forward:
    op, (q, k, v) = given.op, given.qkv()
    parts = parts_of(op.mask)
    window = next((part for part in parts if isinstance(part, Window)), None)
    _need(given.is_plain and window is not None and len(parts) == 2 and Causal() in parts)
    _need(op.Sq == op.Skv and op.q_offset == 0)
    assert window is not None
    _need(window.left is not None and window.right is None)
    left = window.left or 0
    rows = max(64, min(512, left + 1))
    blocks: list[tuple[int, int, int, torch.Tensor]] = []
    masks: dict[tuple[int, int, int], torch.Tensor] = {}
    for start in range(0, op.Sq, rows):
        stop, first = min(start + rows, op.Sq), max(0, start - left)
        shape = (start - first, stop - first, stop - start)
        if shape not in masks:
            masks[shape] = op.mask.dense(stop - start, stop - first, start - first, device=op.device)
        blocks.append((start, stop, first, masks[shape]))

    def forward() -> torch.Tensor:
        outs = [
            _sdpa(
                q[:, :, start:stop], k[:, :, first:stop], v[:, :, first:stop], attn_mask=mask, scale=op.scale,
                enable_gqa=op.groups != 1,
            )
            for start, stop, first, mask in blocks
        ]  # fmt: skip
        return torch.cat(outs, 2)

    return forward


def _sink_key(given: _Given) -> Forward:
    op, (q, k, v) = given.op, given.qkv()
    sinks = given.sinks
    _need(sinks is not None and not op.score)
    assert sinks is not None
    fold = op.groups > 1 and op.Sq == 1
    mask = float_mask(op.with_(score=()), given.sample).expand(-1, op.Hq, op.Sq, op.Skv)
    column = sinks.view(1, -1, 1, 1).to(mask.dtype).expand(mask.shape[0], op.Hq, op.Sq, 1)
    mask = torch.cat([mask, column], -1)
    mask = mask.reshape(mask.shape[0], op.Hkv, op.groups, op.Skv + 1) if fold else mask

    def forward() -> torch.Tensor:
        keys, values = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        rows = q.reshape(op.B, op.Hkv, op.groups, op.D) if fold else q
        gqa = op.groups != 1 and not fold
        out = _sdpa(rows, keys, values, attn_mask=mask, scale=op.scale, enable_gqa=gqa)
        return out.reshape(op.B, op.Hq, op.Sq, op.Dv)

    return forward


def _eager_folded(given: _Given) -> Forward:
    op, (q, k, v) = given.op, given.qkv()
    cap = given.softcap
    _need(cap is not None and given.sinks is None and not given.has_bias and not op.grad)
    assert cap is not None
    rows = (op.B, op.Hkv, op.groups * op.Sq, op.D)
    allowed = allowed_pairs(op, given.sample)
    _need(allowed is None or allowed.shape[1] == 1)
    banned = None if allowed is None else ~allowed.expand(-1, -1, op.Sq, -1).repeat(1, 1, op.groups, 1)
    factor = op.effective_scale / cap

    def forward() -> torch.Tensor:
        scores = (q.reshape(rows) @ k.transpose(-1, -2)).mul_(factor).tanh_().mul_(cap)
        if banned is not None:
            scores.masked_fill_(banned, -math.inf)
        return (scores.softmax(-1) @ v).reshape(op.B, op.Hq, op.Sq, op.Dv)

    return forward


def _in_float32(given: _Given) -> Forward:
    op, (q, k, v) = given.op, given.qkv()
    _need(given.is_plain and op.dtype in ("bfloat16", "float16"))
    causal = is_causal_square(op)
    mask = None if causal else allowed_pairs(op, given.sample)
    gqa = op.groups != 1

    def forward() -> torch.Tensor:
        return _sdpa(
            q.float(), k.float(), v.float(), attn_mask=mask, is_causal=causal, scale=op.scale, enable_gqa=gqa
        ).to(q.dtype)

    return forward


_FORMS: tuple[tuple[str, Callable[[_Given], Forward]], ...] = (
    ("fold groups", _fold_groups),
    ("repeat kv", _repeat_kv),
    ("per sequence", _per_sequence),
    ("per document", _per_document),
    ("window blocks", _window_blocks),
    ("sink key", _sink_key),
    ("eager, folded", _eager_folded),
    ("in float32", _in_float32),
)
