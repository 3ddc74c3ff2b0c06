"""``gather_blocks``: a block table (BigBird) as small dense problems over gathered key blocks.

1. Each block of query rows, per head, becomes one sequence of a batch: its rows against the key blocks that its row
   of the table lists, gathered side by side. The cost follows the number of listed blocks.
2. Block rows that list the same run of blocks in every head (BigBird's first and last) read a slice, not a copy.
3. The gathered copies are made in parts of bounded size, so that memory does not grow with the length.
4. Rows that list different numbers of blocks run in groups of one width; where there are many widths, near ones share
   a group, and the places that are too many are masked.
5. What the rest of the mask (padding, ``Causal``) excludes inside the blocks becomes an additive tensor per part, and
   so does what is missing of the last block. A block row that lists nothing is not computed.
6. A table that all heads share is gathered once for each kv head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from attn_dispatch import reference
from attn_dispatch.backend import Cost, Operands, Raw, Run
from attn_dispatch.capability import Reason
from attn_dispatch.ir.atoms import BlockTable, Full, KeyRange
from attn_dispatch.ir.masks import And, Grid, Mask
from attn_dispatch.ir.operands import Table
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.pointwise import allowed_at, is_pointwise
from attn_dispatch.ir.scores import Bias
from attn_dispatch.ir.tensors import Ref, TensorDesc
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.rewrites.base import Rewrite, Rewritten, not_useful
from attn_dispatch.rewrites.lattice import why_not_split

__all__ = ["GatherBlocks"]

_BIAS = "gather_bias"
_PART_ELEMENTS = 1 << 21  # of gathered keys and values, or of the additive mask, at a time
_EXACT_WIDTHS = 6


@dataclass(frozen=True)
class _Work:
    """Block rows to run together.

    Args:
        heads, rows: of the table, ``[P]``; ``rows`` count from the first block row of the queries.
        blocks: the key blocks of each, ``[P, W]``, -1 where there are fewer; None for a slice.
        span: the key blocks of a slice, half-open.
    """

    heads: torch.Tensor
    rows: torch.Tensor
    blocks: torch.Tensor | None = None
    span: tuple[int, int] = (0, 0)


class GatherBlocks(Rewrite):
    """Key blocks gathered per block of query rows."""

    name = "gather_blocks"
    order = 26

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        found = _split(op.mask)
        if found is None:
            return not_useful(
                f"{op.mask if len(str(op.mask)) < 80 else 'the mask'} is no conjunction with a block table"
            )
        table, rest = found
        if not isinstance(table.table, Table):
            return Reason("feature", "mask:BlockTable", text="the table of BlockTable is known only when it runs")
        if (reason := why_not_split(op)) is not None:
            return reason
        if not is_pointwise(rest) or any(isinstance(atom, BlockTable) for atom in rest.atoms()):
            return Reason("feature", "mask", text=f"the rest of the mask, {rest}, lists its pairs itself or by blocks")
        if isinstance(op.weight, Softmax) and op.weight.sinks is not None:
            text = "sinks belong to a head, and blocks of rows become a batch"
            return Reason("feature", "sinks", True, False, "apply_sinks > gather_blocks", text)
        values = table.table.tensor().bool()
        values = values if values.ndim == 3 else values[None]
        if values.shape[0] not in (1, op.Hq):
            return Reason("limit", "heads of the table", values.shape[0], f"1 or {op.Hq}")
        layout = _Layout(op, table.block, values, rest)
        if layout.visited > 0.7:
            return not_useful(f"the table lists {layout.visited:.0%} of all blocks")
        return layout.rewritten()


def _split(mask: Mask) -> tuple[BlockTable, Mask] | None:
    """One block table, and the rest of the conjunction."""
    parts = mask.args if isinstance(mask, And) else (mask,)
    tables = [part for part in parts if isinstance(part, BlockTable)]
    if not tables:
        return None
    rest = [part for part in parts if part is not tables[0]]
    return tables[0], And.of(*rest) if rest else Full()


class _Layout:
    """What a table means for an op: which inner op it makes, and how to run it."""

    def __init__(self, op: AttentionOp, block: int, table: torch.Tensor, rest: Mask) -> None:
        self.op, self.block, self.table, self.rest = op, block, table, rest
        self.shared = table.shape[0] == 1  # rule 6
        self.groups = op.groups if self.shared else 1  # query heads that a gathered part serves
        self.heads = op.Hkv if self.shared else op.Hq
        # decided from what holds for every length of a route: only a square op has one length
        square = op.Sq == op.Skv and op.static_offset() == 0
        self.works = self.plan(op.Sq, op.Skv, op.static_offset() or 0)
        exact = all(work.blocks is None or bool((work.blocks >= 0).all()) for work in self.works)
        self.needs_bias = not (square and exact and isinstance(rest, Full) and op.Skv % block == 0)
        self._plans: dict[tuple[int, int, int], list[_Work]] = {}  # by block rows and key blocks: few in a decode
        self.gathered = sum(w.blocks.numel() for w in self.works if w.blocks is not None)
        pairs = self.gathered + sum(len(w.rows) * (w.span[1] - w.span[0]) for w in self.works)
        self.visited = pairs * min(block, op.Sq) * block / max(1, self.heads * op.Sq * op.Skv)

    # --- what runs ---------------------------------------------------------------------------------------------------

    def plan(self, sq: int, skv: int, offset: int) -> list[_Work]:
        """Rules 2 and 4: slices first, then groups of one width."""
        first, last = offset // self.block, (offset + sq - 1) // self.block
        nq = self.table.shape[-2]
        used = self.table[..., : -(-skv // self.block)]
        works: list[_Work] = []
        spans: dict[tuple[int, int], list[int]] = {}
        left = []
        for row in range(max(first, 0), min(last + 1, nq)):
            span = _common_run(used[:, row])
            if span is None:
                left.append(row)
            elif span[0] < span[1]:
                spans.setdefault(span, []).append(row - first)
        heads = torch.arange(self.heads)
        for span, rows in spans.items():
            grid = torch.meshgrid(heads, torch.tensor(rows), indexing="ij")
            works.append(_Work(grid[0].reshape(-1), grid[1].reshape(-1), None, span))
        if left:
            works += self._gathers(used[:, left].expand(self.heads, -1, -1), torch.tensor(left) - first)
        return works

    def _gathers(self, used: torch.Tensor, rows: torch.Tensor) -> Iterator[_Work]:
        widths = used.sum(-1)
        order = torch.argsort((~used).to(torch.uint8), dim=-1, stable=True)  # listed blocks first, each in its order
        for low, high in _width_groups(sorted(set(widths.flatten().tolist()) - {0})):
            head, row = ((widths >= low) & (widths <= high)).nonzero(as_tuple=True)
            blocks = order[head, row, :high]
            blocks = torch.where(torch.arange(high) < widths[head, row, None], blocks, -1)
            yield _Work(head, rows[row], blocks)

    def rewritten(self) -> Rewritten:
        """The inner op: a part of the largest size, all sequences of the mean width."""
        op, block = self.op, self.block
        gathers = [w for w in self.works if w.blocks is not None]
        sequences = max(1, sum(len(w.rows) for w in gathers))
        width = max(1, round(self.gathered / sequences))
        keys = min([width * block, *(w.blocks.shape[1] * block for w in gathers if w.blocks.shape[1] * block < 16)])  # type: ignore[union-attr]
        rows = min(block, op.Sq)
        part = max(1, min(sequences, self._part_size(width)))
        inner = op.with_(
            query=op.query.with_shape(op.B * part, self.groups, rows, op.D),
            key=op.key.with_shape(op.B * part, 1, keys, op.D),
            value=op.value.with_shape(op.B * part, 1, keys, op.Dv),
            mask=Full(),
            q_offset=0,
            operands=(),
        )
        if self.needs_bias:
            per_row = self.rest.per_query and not isinstance(self.rest, Full)
            bias = TensorDesc((op.B * part, 1, rows if per_row else 1, keys), op.dtype, op.device)
            inner = inner.with_(score=(*op.score, Bias(Ref(_BIAS))), operands=((_BIAS, bias),))
        slices = sum(len(w.rows) * (w.span[1] - w.span[0]) for w in self.works if w.blocks is None)
        turns = (sequences + slices / width) / part
        moved = op.query.itemsize * op.B * block * (2.0 * self.gathered * (op.D + op.Dv))
        moved += op.query.itemsize * op.B * op.Hq * op.Sq * (2.0 * op.D + 2.0 * op.Dv)

        def adapt(run: Run) -> Run:
            return lambda q, k, v, t: self.run(run, q, k, v, t)

        return Rewritten(inner, adapt, turns, Cost(0.0, moved, 8.0 * turns))

    def _part_size(self, width: int) -> int:
        keys = width * self.block
        most = keys * (self.op.D + self.op.Dv)
        if self.needs_bias and self.rest.per_query:
            most = max(most, keys * self.block)
        return max(1, _PART_ELEMENTS // max(1, self.op.B * most))

    # --- running it --------------------------------------------------------------------------------------------------

    def run(self, inner: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        sq, skv, block = q.shape[2], k.shape[2], self.block
        offset = reference.offset_of(self.op, sq, skv, t)
        assert isinstance(offset, int)
        first, last = offset // block, (offset + sq - 1) // block
        known = (first, last, -(-skv // block))
        if known not in self._plans:
            self._plans[known] = self.plan(sq, skv, offset)
        works = self._plans[known]
        count = last - first + 1
        front = offset - first * block if count > 1 else 0
        behind = count * block - sq - front if count > 1 else 0
        padded = F.pad(q, (0, 0, front, behind)) if front or behind else q
        rows = padded.shape[2] // count  # a single block row is taken as it is
        # [B, heads * block rows, groups, rows, D]: one entry for each sequence
        queries = (
            padded.unflatten(1, (self.heads, self.groups)).unflatten(3, (count, rows)).transpose(2, 3).flatten(1, 2)
        )
        position = (first * block if count > 1 else offset) - offset  # row number of row 0 of block row 0
        run = _Parts(self, inner, works, k, v, t, offset, position, rows, skv)
        pieces = [piece for work in works for piece in run.pieces(queries, work, count)]
        outs = [(i, p.out if isinstance(p, Raw) else p) for i, p in pieces]
        out = _place(outs, queries, (k, v), v.shape[3], 0.0, q.dtype, self.op)

        def back(x: torch.Tensor) -> torch.Tensor:
            x = x.unflatten(1, (self.heads, count)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
            return x[:, :, front : front + sq]

        if not self.op.outputs.lse:
            return back(out)
        sums = [(i, p.lse[..., None]) for i, p in pieces]
        acc = torch.float64 if q.dtype == torch.float64 else torch.float32
        return Raw(back(out), back(_place(sums, queries, (k, v), 1, -math.inf, acc, self.op))[..., 0])


class _Parts:
    """Runs works part by part; a piece is ``(entries, result [B, n, groups, rows, E])``."""

    def __init__(
        self,
        layout: _Layout,
        inner: Run,
        works: list[_Work],
        k: torch.Tensor,
        v: torch.Tensor,
        t: Operands,
        offset: int,
        position: int,
        rows: int,
        skv: int,
    ) -> None:
        self.layout, self.inner, self.k, self.v, self.t = layout, inner, k, v, t
        self.offset, self.position, self.rows, self.skv = offset, position, rows, skv
        missing = -skv % layout.block
        # [B, Hkv * key blocks, block * E]: a row for each key block, to be picked
        self.stores = [
            (F.pad(x, (0, 0, 0, missing)) if missing else x)
            .unflatten(2, (-1, layout.block))
            .flatten(1, 2)
            .flatten(2, 3)
            for x in ((k, v) if any(w.blocks is not None for w in works) else ())
        ]
        self.mask = And.of(layout.rest, KeyRange(0, skv)) if not isinstance(layout.rest, Full) else KeyRange(0, skv)

    def pieces(self, queries: torch.Tensor, work: _Work, count: int) -> Iterator[tuple[torch.Tensor, Any]]:
        heads, rows = work.heads.to(queries.device), work.rows.to(queries.device)
        if work.blocks is None:
            yield self._slice(queries, work, heads, rows, count)
            return
        size = self.layout._part_size(work.blocks.shape[1])
        blocks = work.blocks.to(queries.device)
        for at in range(0, len(heads), size):
            part = slice(at, at + size)
            yield self._gather(queries, heads[part], rows[part], blocks[part], count)

    def _slice(
        self, queries: torch.Tensor, work: _Work, heads: torch.Tensor, rows: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, Any]:
        layout, block = self.layout, self.layout.block
        b, n = queries.shape[0], len(rows) // layout.heads
        lo, hi = work.span[0] * block, min(work.span[1] * block, self.skv)
        entries = heads * count + rows
        picked = queries[:, entries].unflatten(1, (layout.heads, n))  # [B, heads, n, groups, rows, D]
        picked = picked.transpose(2, 3).flatten(3, 4).flatten(0, 1)  # [B * heads, groups, n * rows, D]
        k, v = (_by_head(x[:, :, lo:hi], layout.heads) for x in (self.k, self.v))
        t: dict[str, torch.Tensor] = {}
        if layout.needs_bias:
            at = rows[:n, None] * block + torch.arange(self.rows, device=rows.device) + self.position
            keys = torch.arange(lo, hi, device=rows.device).view(1, 1, 1, -1)
            allowed = self._allowed(at.view(1, 1, -1, 1), keys, torch.arange(layout.heads, device=rows.device))
            t[_BIAS] = _additive(allowed, (b, layout.heads, allowed.shape[2], hi - lo), queries.dtype)
        result = self.inner(picked, k, v, t)

        def back(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(0, (b, layout.heads)).unflatten(3, (n, self.rows)).transpose(2, 3).flatten(1, 2)

        return entries, _map(result, back, layout.op.outputs.lse)

    def _gather(
        self, queries: torch.Tensor, heads: torch.Tensor, rows: torch.Tensor, blocks: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, Any]:
        layout, block = self.layout, self.layout.block
        b, n, width = queries.shape[0], len(heads), blocks.shape[1]
        entries = heads * count + rows
        picked = queries[:, entries].flatten(0, 1)
        kv_heads = heads if layout.shared else heads // layout.op.groups
        index = (kv_heads[:, None] * -(-self.skv // block) + blocks.clamp(min=0)).reshape(-1)
        k, v = (
            x.index_select(1, index).unflatten(1, (n, width)).reshape(b * n, 1, width * block, -1) for x in self.stores
        )
        t: dict[str, torch.Tensor] = {}
        if layout.needs_bias:
            inside = torch.arange(block, device=rows.device)
            keys = torch.where(blocks[..., None] >= 0, blocks[..., None] * block + inside, self.skv)
            at = rows[:, None] * block + inside[: self.rows] + self.position
            allowed = self._allowed(at.view(1, n, -1, 1), keys.view(1, n, 1, -1), heads)
            t[_BIAS] = _additive(allowed, (b, n, allowed.shape[2], width * block), queries.dtype)
        result = self.inner(picked, k, v, t)
        return entries, _map(result, lambda x: x.unflatten(0, (b, n)), layout.op.outputs.lse)

    def _allowed(self, rows: torch.Tensor, keys: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        q = self.layout.op.Sq
        grid = Grid(rows, rows + self.offset, keys, self.t, q, self.skv)
        return allowed_at(self.mask, grid, heads.view(1, -1, 1, 1))


def _additive(allowed: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """``[B|1, P|1, R, K]`` as an additive mask with batch and heads in one: ``[B * P, 1, R, K]``."""
    bias = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -math.inf)
    return bias.expand(shape).reshape(-1, 1, *shape[2:])


def _by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, Hkv, S, E]`` -> ``[B * heads, 1, S, E]``."""
    if x.shape[1] != heads:
        x = x.repeat_interleave(heads // x.shape[1], 1)
    return x.flatten(0, 1)[:, None]


def _map(result: Any, f: Any, lse: bool) -> Any:
    return Raw(f(result.out), f(result.lse[..., None])[..., 0]) if lse else f(result)


def _place(
    pieces: list[tuple[torch.Tensor, torch.Tensor]],
    queries: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    last: int,
    fill: float,
    dtype: torch.dtype,
    op: AttentionOp,
) -> torch.Tensor:
    """All pieces in the order of the entries; an entry without a piece attends nothing and is filled."""
    shape = (*queries.shape[:-1], last)
    if not op.grad and not op.higher_order:
        out = torch.empty(shape, dtype=dtype, device=queries.device)
        if sum(len(entries) for entries, _ in pieces) < shape[1]:
            out.fill_(fill)
        for entries, piece in pieces:
            out.index_copy_(1, entries, piece)
        return out
    # knows query, key and value, so that where nothing is attended their gradients are 0 and not missing
    zero = queries[..., :0].sum(-1, keepdim=True) + kv[0][..., :0].sum() + kv[1][..., :0].sum()
    empty = zero.to(dtype).expand(shape) + fill
    found = torch.cat([*(piece for _, piece in pieces), empty], 1)
    where = torch.arange(shape[1], device=queries.device) + found.shape[1] - shape[1]
    at = 0
    for entries, piece in pieces:
        where[entries] = torch.arange(at, at + piece.shape[1], device=queries.device)
        at += piece.shape[1]
    return found[:, where]


def _common_run(rows: torch.Tensor) -> tuple[int, int] | None:
    """The run of blocks ``[heads, nk]`` that every head lists, no more and no fewer; None where there is none."""
    if bool((rows != rows[:1]).any()):
        return None
    listed = rows[0].nonzero()[:, 0]
    if len(listed) == 0:
        return (0, 0)
    lo, hi = int(listed[0]), int(listed[-1]) + 1
    return (lo, hi) if hi - lo == len(listed) else None


def _width_groups(widths: list[int]) -> list[tuple[int, int]]:
    """Rule 4: inclusive ranges of widths that run together, each to be padded to its upper end."""
    if len(widths) <= _EXACT_WIDTHS:
        return [(w, w) for w in widths]
    groups: list[tuple[int, int]] = []
    for width in reversed(widths):
        if groups and width > 0.75 * groups[-1][1]:
            groups[-1] = (width, groups[-1][1])
        else:
            groups.append((width, width))
    return groups
