"""``trim_lengths``: compute each sequence of a padded batch at its true length.

1. Key padding (``KeyLengths``, or ``Columns`` per batch, in a conjunction) is cut off the keys: padding is never read.
2. Query padding (``QueryLengths``) is cut off the queries; the rows beyond are 0 with lse -inf.
3. Columns move the keys that are left, so nothing else in the mask may look at a key's number. Under ``Causal``, the
   queries before a left-padded sequence's first key see nothing and are cut off too; positions of queries and keys
   then move alike, so this needs a square op at offset 0.
4. Kept keys are gathered where they have gaps; where positions count, which a gap would move, such a sequence is
   computed by the reference, a few rows at a time.
5. Sequences of equal lengths run as one batch, if they are small or stand beside each other.
6. The lengths are read at run time, so this is for the CPU: on a GPU reading them would wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attn_dispatch import reference
from attn_dispatch.backend import Cost, Operands, Raw, Run
from attn_dispatch.capability import Reason
from attn_dispatch.ir.atoms import Causal, Columns, Full, KeyLengths, QueryLengths, Stride, Window
from attn_dispatch.ir.masks import And, Mask
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias
from attn_dispatch.ir.tensors import Ref, stride_class
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.passes.drop_noops import used_names
from attn_dispatch.rewrites.base import Rewrite, Rewritten, not_useful

__all__ = ["TrimLengths"]

_EXPECTED_FILL = 0.6  # of a padded length, when nothing is known; the cost model needs a number
_DISTANCES = (Causal, Window)  # atoms that look at ``p - j`` alone, and whose fast forms take any number of keys
_ROWS_AT_ONCE = 256  # of a sequence with gaps
_GATHERED_BYTES = 64 << 10  # of a sequence's keys: gathering more takes longer than one more call


@dataclass(frozen=True)
class _Lengths:
    """The operands that say what is padding, and what is left of the mask.

    Args:
        keys, queries: names of lengths ``[B]``. columns: name of a mask ``[B, Skv]``.
        rest: the mask without them. positional: whether positions count in what is left.
    """

    keys: str | None
    queries: str | None
    columns: str | None
    rest: Mask
    positional: bool


@dataclass(frozen=True)
class _Span:
    """What of a sequence is computed.

    Args:
        rows, keys: from where to where. gaps: the sequence's number where its keys have gaps, so that it runs alone.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    gaps: int | None = None

    @property
    def empty(self) -> bool:
        return self.rows[0] >= self.rows[1] or self.keys[0] >= self.keys[1]


class TrimLengths(Rewrite):
    """A padded batch at its true lengths."""

    name = "trim_lengths"
    order = 10

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        lengths = _split(op)
        if lengths is None:
            return not_useful("no key or query lengths")
        for word, wrong in {
            "traced": op.traced or op.device != "cpu",
            "weights": op.outputs.weights,
            "q_offset:tensor": isinstance(op.q_offset, Ref),
            op.weight.feature: not isinstance(op.weight, Softmax),
            "sinks": isinstance(op.weight, Softmax) and op.weight.sinks is not None and _empty_lse_wanted(op, lengths),
        }.items():
            if wrong:
                return Reason("feature", word, text=f"not with {word}: the lengths are read on the host, per sequence")
        if any(ref for atom in lengths.rest.atoms() for ref in atom.refs()):
            return Reason("feature", "mask", text=f"the rest of the mask, {lengths.rest}, has tensors per batch")
        if lengths.columns is not None and (reason := _why_keys_stay(op, lengths)) is not None:
            return reason
        if op.B == 0:
            return Reason("not_useful", "B", 0, ">= 1", text="there are no sequences")
        offset = op.static_offset() if lengths.positional else 0
        both = lengths.columns is not None and lengths.positional
        sq = _expected(op.Sq) if lengths.queries or both else op.Sq
        skv = _expected(op.Skv) if lengths.keys or lengths.columns else op.Skv
        if sq == skv and any(isinstance(atom, Stride) for atom in lengths.rest.atoms()):
            sq += 1  # at run time there may be fewer keys than rows, which `residue_classes` must know
        inner = op.resized(1 if op.B > 1 else op.B, sq, skv).with_(mask=lengths.rest, q_offset=offset or 0)
        inner = inner.with_(operands=tuple((n, d) for n, d in inner.operands if n in used_names(inner)))

        def adapt(run: Run) -> Run:
            return lambda q, k, v, t: _run_trimmed(op, lengths, run, q, k, v, t)

        copies = 2.0 * op.query.itemsize * op.B * op.Hq * op.Sq * op.Dv
        calls = (5.0 if lengths.columns else 4.0) * op.B  # a slice of each tensor, the placing, the looking for gaps
        return Rewritten(inner, adapt, float(op.B), Cost(0.0, copies, calls), cuts_excluded=True)


def _expected(length: int) -> int:
    return max(1, int(length * _EXPECTED_FILL))


def _split(op: AttentionOp) -> _Lengths | None:
    """Take at most one of each kind of padding out of a conjunction."""
    parts = list(op.mask.args) if isinstance(op.mask, And) else [op.mask]
    keys = next((p for p in parts if isinstance(p, KeyLengths) and isinstance(p.lengths, Ref)), None)
    queries = next((p for p in parts if isinstance(p, QueryLengths) and isinstance(p.lengths, Ref)), None)
    columns = next((p for p in parts if isinstance(p, Columns) and _is_per_batch(p, op)), None)
    taken = [p for p in (keys, queries, columns) if p is not None]
    if not taken:
        return None
    rest = And.of(*kept) if (kept := [p for p in parts if not any(p is t for t in taken)]) else Full()
    alibi = any(isinstance(term, Alibi) for term in op.score)  # counts positions too
    return _Lengths(_name(keys), _name(queries), _name(columns), rest, rest.positional or alibi)


def _name(part: Mask | None) -> str | None:
    return None if part is None else part.refs()[0]


def _is_per_batch(columns: Columns, op: AttentionOp) -> bool:
    if not isinstance(columns.kept, Ref):
        return False
    return len(dict(op.operands)[columns.kept.name].shape) == 2


def _why_keys_stay(op: AttentionOp, lengths: _Lengths) -> Reason | None:
    """Rule 3."""
    if others := sorted({type(a).__name__ for a in lengths.rest.atoms() if not isinstance(a, (*_DISTANCES, Full))}):
        return Reason("feature", "mask", text=f"{', '.join(others)} beside columns: the numbers of keys would move")
    if not lengths.positional:
        return None
    if Causal() not in (lengths.rest.args if isinstance(lengths.rest, And) else (lengths.rest,)):
        text = f"queries before the first key may see keys under {lengths.rest}, whose positions would move"
        return Reason("feature", "mask", text=text)
    if op.Sq != op.Skv or op.static_offset() != 0:
        text = "columns are cut off where positions count only of a square op, whose queries move alike"
        return Reason("shape", "Sq", op.Sq, op.Skv, text)
    return None


def _run_trimmed(
    op: AttentionOp, lengths: _Lengths, inner: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands
) -> Any:
    b, h, sq, _ = q.shape
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    batches = _batches(_spans(lengths, b, sq, k.shape[2], t), k[:1].nbytes)
    whole = all(span.rows == (0, sq) and not span.empty for span, _ in batches)

    def padded(like: torch.Tensor | None, fill: float, dtype: torch.dtype, *last: int) -> torch.Tensor:
        # laid out as the first part, so that placing one is a straight copy: fused kernels put heads beside each other
        outer = like is None or (like.ndim == 4 and like.stride(1) > like.stride(2))
        sizes = (b, h, sq, *last) if outer else (b, sq, h, *last)
        empty = torch.empty(sizes, dtype=dtype, device=q.device)
        empty = empty if outer else empty.transpose(1, 2)
        return empty if whole else empty.fill_(fill)

    lse = padded(None, -math.inf, acc) if op.outputs.lse else None
    out: torch.Tensor | None = None
    kept: list[tuple[list[int], _Span, torch.Tensor | None]] = []
    for rows, span, part in _pieces(op, lengths, inner, batches, q, k, v, t):
        if op.grad:
            kept.append((rows, span, part.out))
        else:  # placed before the next is computed, which then reuses its memory
            out = padded(part.out, 0.0, q.dtype, v.shape[3]) if out is None else out
            _place(out, rows, span, part.out)
        if lse is not None:
            _place(lse, rows, span, part.lse)
    if op.grad:
        out = _join(kept, q, (b, h, sq, v.shape[3]))
        if all(part is None for _, _, part in kept):  # gradients are 0, not missing
            out = out + sum(x[..., :0].sum() for x in (k, v, *(t[name] for name in op.grad if name in t)))
    out = padded(None, 0.0, q.dtype, v.shape[3]) if out is None else out  # a batch of none
    return out if lse is None else Raw(out, lse)


def _pieces(
    op: AttentionOp, lengths: _Lengths, inner: Run, batches: list[tuple[_Span, list[int]]], q: torch.Tensor,
    k: torch.Tensor, v: torch.Tensor, t: Operands,
) -> Iterator[tuple[list[int], _Span, Any]]:  # fmt: skip
    """What each batch of sequences gives, in turn: ``(rows, span, Raw)``, with ``Raw(None)`` where it is empty."""
    biases = {term.bias.name for term in op.score if isinstance(term, Bias)}
    if len(q) > 1:  # a bias that all sequences share is put in order once, not by the kernel for each of them
        shared = {name for name in biases if t[name].shape[0] == 1 and stride_class(t[name]) == "scattered"}
        t = {name: x.contiguous() if name in shared else x for name, x in t.items()}
    for span, rows in batches:
        if span.empty:
            yield rows, span, Raw(None)  # type: ignore[arg-type]
            continue
        pick = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else rows
        keys: Any = slice(*span.keys)
        run = inner
        if span.gaps is not None:
            kept = _kept(lengths, t, span.gaps)[keys]
            if lengths.positional:
                run = _by_reference(op, lengths, kept, biases)
            else:
                keys = kept.nonzero()[:, 0] + span.keys[0]
        operands = {name: _cut(x, pick, slice(*span.rows), keys) if name in biases else x for name, x in t.items()}
        result = run(q[pick, :, slice(*span.rows)], _take(k, pick, keys), _take(v, pick, keys), operands)
        yield rows, span, result if op.outputs.lse else Raw(result)


def _spans(lengths: _Lengths, b: int, sq: int, skv: int, t: Operands) -> list[_Span]:
    """What of each sequence is computed; rules 1 to 3."""
    ends = [min(n, skv) for n in t[lengths.keys].tolist()] if lengths.keys else [skv]
    rows = [min(n, sq) for n in t[lengths.queries].tolist()] if lengths.queries else [sq]
    ends, rows = _spread(ends, b), _spread(rows, b)
    if lengths.columns is None:
        return [_Span((0, row), (0, end)) for row, end in zip(rows, ends, strict=True)]
    if skv == 0:
        return [_Span((0, 0), (0, 0))] * b
    kept = t[lengths.columns].bool()
    stretches = zip(kept.to(torch.uint8).argmax(-1).tolist(), kept.sum(-1).tolist(), strict=True)
    found: list[_Span] = []
    for i, (first, count) in enumerate(_spread(list(stretches), b)):
        mine = _kept(lengths, t, i)
        last, gaps = first + count, None
        if count and not bool(mine[first:last].all()):
            last, gaps = int(mine.nonzero()[-1]) + 1, i
        start = first if lengths.positional else 0
        found.append(_Span((start, rows[i]), (first, min(last, ends[i])), gaps))
    return found


def _batches(spans: list[_Span], key_bytes: int) -> list[tuple[_Span, list[int]]]:
    """Sequences of equal spans, rule 5: those beside each other, and all where gathering them is less than a call."""
    found: list[tuple[_Span, list[int]]] = []
    for i, span in enumerate(spans):
        last = next((rows for other, rows in reversed(found) if other == span), None)
        if last is not None and (span.empty or last[-1] == i - 1 or key_bytes <= _GATHERED_BYTES):
            last.append(i)
        else:
            found.append((span, [i]))
    return found


def _kept(lengths: _Lengths, t: Operands, row: int) -> torch.Tensor:
    """The columns of a sequence, bool ``[Skv]``."""
    assert lengths.columns is not None
    kept = t[lengths.columns].bool()
    return kept[min(row, kept.shape[0] - 1)]


def _by_reference(op: AttentionOp, lengths: _Lengths, kept: torch.Tensor, biases: set[str]) -> Run:
    """Rule 4: what the specification says of a sequence with gaps, whose rows and keys start at the same position."""
    masked = op.with_(mask=And.of(lengths.rest, Columns(kept)))  # type: ignore[arg-type]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        parts: list[Any] = []
        for start in range(0, q.shape[2], _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            mine = {n: x[..., rows, :] if n in biases and x.shape[-2] != 1 else x for n, x in t.items()}
            parts.append(reference.attention(masked.with_(q_offset=start), q[:, :, rows], k, v, mine))
        out = torch.cat([part.out for part in parts], 2)
        return Raw(out, torch.cat([part.lse for part in parts], 2)) if op.outputs.lse else out

    return run


def _empty_lse_wanted(op: AttentionOp, lengths: _Lengths) -> bool:
    """The lse of the rows that are cut off is asked for: with sinks it is the sink's logit, not the -inf put there."""
    return op.outputs.lse or lengths.queries is not None


def _spread(values: list[Any], b: int) -> list[Any]:
    return values * b if len(values) == 1 else values


def _take(x: torch.Tensor, pick: Any, keys: Any) -> torch.Tensor:
    """Sequences and keys of a tensor ``[B, H, S, E]``; a view where both are slices."""
    return x[pick, :, keys] if isinstance(keys, slice) else x[pick].index_select(2, keys)


def _cut(x: torch.Tensor, pick: Any, rows: slice, keys: Any) -> torch.Tensor:
    x = x if x.shape[0] == 1 else x[pick]
    x = x if x.shape[-2] == 1 else x[..., rows, :]
    return x if x.shape[-1] == 1 else x[..., keys]


def _place(out: torch.Tensor, rows: list[int], span: _Span, part: torch.Tensor | None) -> None:
    """Write the results of some sequences into the padded tensor."""
    for n, row in enumerate(rows if part is not None else ()):
        out[row, :, slice(*span.rows)] = part[n]  # type: ignore[index]


def _join(
    pieces: list[tuple[list[int], _Span, torch.Tensor | None]], q: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    """The results in the padded shape, with a graph."""
    by_row: dict[int, torch.Tensor] = {}
    for rows, span, part in pieces:
        for n, row in enumerate(rows):
            if part is None:  # empty: zeros that still know the query, whose gradient is 0
                by_row[row] = q[row, ..., :0].sum(-1, keepdim=True).expand(*shape[1:])
            else:
                by_row[row] = torch.nn.functional.pad(part[n], (0, 0, span.rows[0], shape[2] - span.rows[1]))
    return torch.stack([by_row[row] for row in range(shape[0])])
