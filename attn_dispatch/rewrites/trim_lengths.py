"""``trim_lengths``: compute each sequence of a padded batch at its true length.

1. Key padding (``KeyLengths`` in a conjunction) is cut off the keys, so what is padded is never read.
2. Query padding (``QueryLengths``) is cut off the queries; the rows beyond are 0 with lse -inf.
3. Sequences of equal lengths run as one batch.
4. The lengths are read at run time, so this is for the CPU: on a GPU reading them would wait for the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from attn_dispatch.backend import Cost, Operands, Raw, Run
from attn_dispatch.capability import Reason
from attn_dispatch.ir.atoms import Full, KeyLengths, QueryLengths
from attn_dispatch.ir.masks import And, Mask
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias
from attn_dispatch.ir.tensors import Ref
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.passes.drop_noops import used_names
from attn_dispatch.rewrites.base import Rewrite, Rewritten, not_useful

__all__ = ["TrimLengths"]

_EXPECTED_FILL = 0.6  # of a padded length, when nothing is known; the cost model needs a number


@dataclass(frozen=True)
class _Lengths:
    keys: str | None
    queries: str | None
    rest: Mask


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
        alibi = any(isinstance(term, Alibi) for term in op.score)  # counts positions too
        offset = op.static_offset() if lengths.rest.positional or alibi else 0
        sq = _expected(op.Sq) if lengths.queries else op.Sq
        skv = _expected(op.Skv) if lengths.keys else op.Skv
        inner = op.resized(1 if op.B > 1 else op.B, sq, skv).with_(mask=lengths.rest, q_offset=offset or 0)
        inner = inner.with_(operands=tuple((n, d) for n, d in inner.operands if n in used_names(inner)))

        def adapt(run: Run) -> Run:
            return lambda q, k, v, t: _run_trimmed(op, lengths, run, q, k, v, t)

        copies = 2.0 * op.query.itemsize * op.B * op.Hq * op.Sq * op.Dv
        return Rewritten(inner, adapt, float(op.B), Cost(0.0, copies, 3.0 * op.B), cuts_excluded=True)


def _expected(length: int) -> int:
    return max(1, int(length * _EXPECTED_FILL))


def _split(op: AttentionOp) -> _Lengths | None:
    """Take at most one KeyLengths and one QueryLengths out of a conjunction."""
    parts = list(op.mask.args) if isinstance(op.mask, And) else [op.mask]
    keys = next((p for p in parts if isinstance(p, KeyLengths) and isinstance(p.lengths, Ref)), None)
    queries = next((p for p in parts if isinstance(p, QueryLengths) and isinstance(p.lengths, Ref)), None)
    if keys is None and queries is None:
        return None
    rest = [p for p in parts if p is not keys and p is not queries]
    names = [p.lengths.name if p is not None and isinstance(p.lengths, Ref) else None for p in (keys, queries)]
    return _Lengths(names[0], names[1], And.of(*rest) if rest else Full())


def _run_trimmed(
    op: AttentionOp, lengths: _Lengths, inner: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands
) -> Any:
    b, h, sq, _ = q.shape
    key_lengths = t[lengths.keys].tolist() if lengths.keys else [k.shape[2]]
    query_lengths = t[lengths.queries].tolist() if lengths.queries else [sq]
    pairs = list(zip(_spread(query_lengths, b), _spread(key_lengths, b), strict=True))
    biases = {term.bias.name for term in op.score if isinstance(term, Bias)}
    pieces: list[tuple[list[int], torch.Tensor | None, torch.Tensor | None]] = []
    for pair in dict.fromkeys(pairs):
        rows = [i for i, other in enumerate(pairs) if other == pair]
        ql, kl = min(pair[0], sq), min(pair[1], k.shape[2])
        if ql == 0 or kl == 0:
            pieces.append((rows, None, None))
            continue
        pick = slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] + 1 == len(rows) else rows
        operands = {name: _cut(x, pick, ql, kl) if name in biases else x for name, x in t.items()}
        result = inner(q[pick, :, :ql], k[pick, :, :kl], v[pick, :, :kl], operands)
        pieces.append((rows, result.out, result.lse) if op.outputs.lse else (rows, result, None))
    out = _assemble([(r, o) for r, o, _ in pieces], q, (b, h, sq, v.shape[3]), 0.0, q.dtype, bool(op.grad))
    if not op.outputs.lse:
        return out
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    return Raw(out, _assemble([(r, x) for r, _, x in pieces], q, (b, h, sq), -math.inf, acc, False))


def _empty_lse_wanted(op: AttentionOp, lengths: _Lengths) -> bool:
    """The lse of the rows that are cut off is asked for: with sinks it is the sink's logit, not the -inf put there."""
    return op.outputs.lse or lengths.queries is not None


def _spread(values: list[int], b: int) -> list[int]:
    return values * b if len(values) == 1 else values


def _cut(x: torch.Tensor, pick: Any, ql: int, kl: int) -> torch.Tensor:
    x = x if x.shape[0] == 1 else x[pick]
    x = x if x.shape[-2] == 1 else x[..., :ql, :]
    return x if x.shape[-1] == 1 else x[..., :kl]


def _assemble(
    pieces: list[tuple[list[int], torch.Tensor | None]],
    q: torch.Tensor,
    shape: tuple[int, ...],
    fill: float,
    dtype: torch.dtype,
    keep_graph: bool,
) -> torch.Tensor:
    """Place the results of the groups into the padded shape."""
    if not keep_graph:
        # heads beside each other, as the fused kernels return them, so that placing a part is a straight copy
        b, h, s, *rest = shape
        out = torch.empty((b, s, h, *rest), dtype=dtype, device=q.device).transpose(1, 2)
        if any(part is None or part.shape[2] < s for _, part in pieces):
            out.fill_(fill)
        for rows, part in pieces:
            if part is not None:
                for n, row in enumerate(rows):
                    out[row, :, : part.shape[2]] = part[n]
        return out
    by_row: dict[int, torch.Tensor] = {}
    for rows, part in pieces:
        for n, row in enumerate(rows):
            if part is None:  # empty: zeros that still know the query, whose gradient is 0
                by_row[row] = q[row, ..., :0].sum(-1, keepdim=True).expand(*shape[1:3], *shape[3:])
            else:
                missing = shape[2] - part.shape[2]
                by_row[row] = torch.nn.functional.pad(part[n], (0, 0, 0, missing), value=fill)
    return torch.stack([by_row[row] for row in range(shape[0])])
