"""``split_segments``: packed documents, each computed on its own.

1. ``Segments`` over the sequence itself, in a conjunction with ``Causal`` or a ``Window``: each document is a slice of
   queries, keys and values, under the rest of the mask counted from its own start.
2. Documents of equal length run as one batch.
3. A document in several pieces is put together from them where the rest of the mask allows it (``Causal`` or nothing,
   which know order and not distance); with a window it is computed by the specification.
4. Segment numbers per batch are split batch by batch.
5. The numbers are read when it runs, so this is for the CPU: on a GPU reading them would wait for the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from attn_dispatch import reference
from attn_dispatch.backend import Cost, Operands, Raw, Run
from attn_dispatch.capability import Reason
from attn_dispatch.ir.atoms import Causal, Full, Segments, Window
from attn_dispatch.ir.masks import And, Mask
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.tensors import Ref
from attn_dispatch.rewrites.base import Rewrite, Rewritten, not_useful
from attn_dispatch.rewrites.lattice import why_not_split

__all__ = ["SplitSegments"]

_EXPECTED_DOCUMENTS = 4  # in a packed row, when nothing is known; the cost model needs a number


class SplitSegments(Rewrite):
    """Packed documents one by one."""

    name = "split_segments"
    order = 12

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        parts = op.mask.args if isinstance(op.mask, And) else (op.mask,)
        segments = [part for part in parts if isinstance(part, Segments)]
        if len(segments) != 1:
            return not_useful("no segments, or more than one kind of them")
        rest = [part for part in parts if part is not segments[0]]
        if (reason := why_not_split(op)) is not None:
            return reason
        other = next((part for part in rest if not isinstance(part, (Causal, Window))), None)
        if other is not None:
            return Reason("feature", other.feature, text=f"{other} is not the same in every document")
        if op.device != "cpu":
            text = "the documents are read on the host"
            return Reason("device", "device", op.device, "cpu", text=text)
        ids = segments[0].queries
        if not isinstance(ids, Ref) or segments[0].keys != ids or op.Sq != op.Skv or op.q_offset != 0:
            return not_useful("queries and keys are not the same packed sequence")
        return _rewritten(op, ids.name, And.of(*rest) if rest else Full())


def _rewritten(op: AttentionOp, name: str, rest: Mask) -> Rewritten:
    length = max(1, op.Sq // _EXPECTED_DOCUMENTS)
    inner = op.with_(
        query=op.query.with_shape(op.B, op.Hq, length, op.D),
        key=op.key.with_shape(op.B, op.Hkv, length, op.D),
        value=op.value.with_shape(op.B, op.Hkv, length, op.Dv),
        mask=rest,
        operands=tuple((n, d) for n, d in op.operands if n != name),
    )

    def adapt(run: Run) -> Run:
        return lambda q, k, v, t: _run_documents(op, name, rest, run, q, k, v, t)

    moved = 2.0 * op.query.itemsize * op.B * op.Hq * op.Sq * op.Dv
    return Rewritten(inner, adapt, float(op.Sq) / length, Cost(0.0, moved, 4.0 * _EXPECTED_DOCUMENTS))


# A document: its positions as a slice, or as an index where it lies in pieces.
_Where = slice | torch.Tensor


def _documents(ids: torch.Tensor) -> dict[int, list[_Where]]:
    """Where the documents of a row lie, by length."""
    values, counts = torch.unique_consecutive(ids, return_counts=True)
    stops = counts.cumsum(0).tolist()
    runs: dict[int, list[slice]] = {}
    for value, count, stop in zip(values.tolist(), counts.tolist(), stops, strict=True):
        runs.setdefault(value, []).append(slice(stop - count, stop))
    found: dict[int, list[_Where]] = {}
    for pieces in runs.values():
        length = sum(piece.stop - piece.start for piece in pieces)
        where: _Where = pieces[0]
        if len(pieces) > 1:
            where = torch.cat([torch.arange(p.start, p.stop, device=ids.device) for p in pieces])
        found.setdefault(length, []).append(where)
    return found


def _run_documents(
    op: AttentionOp, name: str, rest: Mask, inner: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands
) -> Any:
    ids = t[name]
    left = {n: x for n, x in t.items() if n != name}
    rows = ids[None] if ids.ndim == 1 else ids
    by_distance = any(isinstance(atom, Window) for atom in rest.atoms())
    results = []
    for row in range(rows.shape[0]):
        batch = slice(None) if rows.shape[0] == 1 else slice(row, row + 1)
        documents = _documents(rows[row])
        scattered = any(isinstance(w, torch.Tensor) for group in documents.values() for w in group)
        if by_distance and scattered:  # rule 3
            raw = reference.attention(op, q[batch], k[batch], v[batch], {**t, name: rows[row]})
            results.append(Raw(raw.out, raw.lse))
            continue
        results.append(_run_row(op, documents, inner, q[batch], k[batch], v[batch], left))
    out = results[0].out if len(results) == 1 else torch.cat([r.out for r in results])
    if not op.outputs.lse:
        return out
    return Raw(out, torch.cat([r.lse for r in results if r.lse is not None]))


def _run_row(
    op: AttentionOp,
    documents: dict[int, list[_Where]],
    inner: Run,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    t: Operands,
) -> Raw:
    b, hq, sq, _ = q.shape
    keep_graph = bool(op.grad) or op.higher_order
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((b, sq, hq, v.shape[3])).transpose(1, 2)
    lse = torch.full((b, hq, sq), -math.inf, dtype=acc, device=q.device) if op.outputs.lse else None
    pieces: list[tuple[_Where, torch.Tensor, torch.Tensor | None]] = []
    for group in documents.values():
        qs, ks, vs = (_joined(x, group) for x in (q, k, v))
        result = inner(qs, ks, vs, t)
        parts = (result.out, result.lse) if op.outputs.lse else (result, None)
        for n, where in enumerate(group):
            here = slice(n * b, (n + 1) * b)
            pieces.append((where, parts[0][here], None if parts[1] is None else parts[1][here]))
    if keep_graph:
        at = torch.cat([_positions(where, q.device) for where, _, _ in pieces])
        back = torch.empty_like(at)
        back[at] = torch.arange(len(at), device=q.device)
        sums = [s for _, _, s in pieces if s is not None]
        return Raw(
            torch.cat([p for _, p, _ in pieces], 2).index_select(2, back),
            torch.cat(sums, 2).index_select(2, back) if sums else None,
        )
    for where, part, total in pieces:
        out[:, :, where] = part
        if lse is not None and total is not None:
            lse[:, :, where] = total
    return Raw(out, lse)


def _joined(x: torch.Tensor, group: list[_Where]) -> torch.Tensor:
    """Documents of one length as a batch."""
    return torch.cat([_take(x, where) for where in group]) if len(group) > 1 else _take(x, group[0])


def _take(x: torch.Tensor, where: _Where) -> torch.Tensor:
    return x[:, :, where] if isinstance(where, slice) else x.index_select(2, where)


def _positions(where: _Where, device: torch.device) -> torch.Tensor:
    return torch.arange(where.start, where.stop, device=device) if isinstance(where, slice) else where
