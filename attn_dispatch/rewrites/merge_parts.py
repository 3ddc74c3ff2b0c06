"""``merge_parts`` and ``apply_sinks``: softmax attention from partial results.

Partial results ``(out, lse)`` are a monoid: see `merge`. It serves split-KV, unions of disjoint masks, chunked prefill.

1. `merge_parts` splits the keys of a decode step into parts that run as extra heads: a single kv head otherwise keeps
   all but one core idle. The parts are views of the keys; only what does not divide runs on its own.
2. `apply_sinks` leaves the sinks out of the kernel and applies them to the final lse, once:
   ``out * sigmoid(lse - sink)``.
3. Both need the kernel's lse, and its gradient: with gradients they are illegal.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_dispatch.backend import Cost, Operands, Raw, Run
from attn_dispatch.capability import Reason
from attn_dispatch.device import facts
from attn_dispatch.ir.atoms import Full
from attn_dispatch.ir.ops import AttentionOp, Outputs
from attn_dispatch.ir.scores import Bias
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.rewrites.base import Rewrite, Rewritten, not_useful

__all__ = ["ApplySinks", "MergeParts", "merge"]

_MIN_PART = 256


def merge(parts: list[Raw]) -> Raw:
    """Combine attention over disjoint sets of keys: associative, commutative, with (0, -inf) as the neutral element.

    Example:
        >>> import torch
        >>> one = Raw(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
        >>> none = Raw(torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf))
        >>> merge([one, none]).out.tolist()
        [[[[1.0, 1.0]]]]
    """
    outs = torch.stack([part.out for part in parts])
    sums = torch.stack([part.lse for part in parts if part.lse is not None])
    return _merge_stacked(outs, sums)


def _merge_stacked(outs: torch.Tensor, sums: torch.Tensor) -> Raw:
    total = torch.logsumexp(sums, 0)
    safe = torch.where(torch.isneginf(total), 0.0, total)  # no part attends anything: -inf - -inf is NaN, 0 is meant
    weights = torch.exp(sums - safe)[..., None]
    return Raw((outs.to(sums.dtype) * weights).sum(0).to(outs.dtype), total)


def _no_gradients(op: AttentionOp) -> Reason | None:
    if op.grad or op.higher_order:
        return Reason("feature", "grad:lse", True, False, text="gradients would have to flow through the kernel's lse")
    return None


class MergeParts(Rewrite):
    """Split-KV decode."""

    name = "merge_parts"
    order = 40

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        if (reason := _no_gradients(op)) is not None:
            return reason
        if not isinstance(op.mask, Full) or op.score or op.dropout_p or op.weight != Softmax() or op.outputs.weights:
            return Reason("feature", "mask", text="only for plain softmax over all keys")
        parts = self._parts(op)
        if parts < 2:
            return not_useful(f"{op.B * op.Hkv} heads of {op.Skv} keys keep {facts(op.device).threads} threads busy")
        part = op.Skv // parts
        inner = op.with_(
            query=op.query.with_shape(op.B, op.Hq * parts, op.Sq, op.D),
            key=op.key.with_shape(op.B, op.Hkv * parts, part, op.D),
            value=op.value.with_shape(op.B, op.Hkv * parts, part, op.Dv),
            outputs=Outputs(lse=True),
        )

        def adapt(run: Run) -> Run:
            return lambda q, k, v, t: _run_parts(op, parts, run, q, k, v, t)

        moved = 4.0 * op.query.itemsize * op.B * op.Hq * op.Sq * (op.D + op.Dv) * parts
        return Rewritten(inner, adapt, 1.0, Cost(0.0, moved, 8.0))

    @staticmethod
    def _parts(op: AttentionOp) -> int:
        threads = facts(op.device).threads or 1
        if op.Sq > 16:
            return 1
        return min(-(-threads // max(op.B * op.Hkv, 1)), op.Skv // _MIN_PART)


def _run_parts(
    op: AttentionOp, parts: int, inner: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands
) -> Any:
    b, hq, sq, d = q.shape
    hkv, skv = k.shape[1], k.shape[2]
    if skv < parts:  # a rewrite around this one cut the keys: nothing is left to split
        raw = inner(q, k, v, t)
        return raw if op.outputs.lse else raw.out
    groups, part = hq // hkv, skv // parts
    whole = part * parts

    def split(x: torch.Tensor) -> torch.Tensor:
        return x[:, :, :whole].reshape(b, hkv * parts, part, x.shape[3])

    # heads in the order (kv head, part, member of the group), so that head // groups is still the right kv head
    queries = q.reshape(b, hkv, 1, groups, sq, d).expand(b, hkv, parts, groups, sq, d).reshape(b, -1, sq, d)
    raw = inner(queries, split(k), split(v), t)
    shape = (b, hkv, parts, groups, sq)
    outs = raw.out.reshape(*shape, v.shape[3]).movedim(2, 0).reshape(parts, b, hq, sq, v.shape[3])
    sums = raw.lse.reshape(shape).movedim(2, 0).reshape(parts, b, hq, sq)
    if whole < skv:
        rest = inner(q, k[:, :, whole:], v[:, :, whole:], t)
        outs, sums = torch.cat([outs, rest.out[None]]), torch.cat([sums, rest.lse[None]])
    merged = _merge_stacked(outs, sums)
    return merged if op.outputs.lse else merged.out


class ApplySinks(Rewrite):
    """Sinks outside the kernel."""

    name = "apply_sinks"
    order = 25

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        if not (isinstance(op.weight, Softmax) and op.weight.sinks is not None):
            return not_useful("no sinks")
        if (reason := _no_gradients(op)) is not None:
            return reason
        if op.dropout_p or op.outputs.weights:
            return Reason("feature", "dropout", text="dropout and weights come after the sinks")
        name = op.weight.sinks.name
        inner = op.drop_operands(name).with_(weight=Softmax(), outputs=Outputs(lse=True))
        never_empty = isinstance(op.mask, Full) and not any(isinstance(term, Bias) for term in op.score)

        def adapt(run: Run) -> Run:
            def outer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
                raw = run(q, k, v, {n: x for n, x in t.items() if n != name} if len(t) > 1 else {})
                out, lse, sink = raw.out, raw.lse, t[name].view(-1, 1)
                sink = sink if sink.dtype is lse.dtype else sink.to(lse.dtype)
                # -inf - -inf, of a row without keys, would be NaN
                least = sink if never_empty else sink.clamp(min=torch.finfo(lse.dtype).min)
                out = out * torch.sigmoid(lse - least).unsqueeze(-1)
                out = out if out.dtype is q.dtype else out.to(q.dtype)
                return Raw(out, torch.logaddexp(lse, sink)) if op.outputs.lse else out

            return outer

        moved = 3.0 * op.query.itemsize * op.B * op.Hq * op.Sq * op.Dv
        return Rewritten(inner, adapt, 1.0, Cost(0.0, moved, 4.0))
