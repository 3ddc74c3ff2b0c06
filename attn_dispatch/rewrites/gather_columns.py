"""``gather_columns``: unions of a band, a few columns and a few rows (Longformer, Sparse Transformer's fixed, sinks).

1. The mask is a union, alone or in a conjunction. Its parts are columns (those that name keys: ``Columns``,
   ``KeyRange``), rows (``Rows`` alone), and what is left: the band.
2. Query rows run in blocks. A block reads the band's keys, a slice, and beside them the columns, gathered once; both
   are in one softmax.
3. A key that the band already gives a row is masked among the gathered columns, so that none counts twice.
4. Gathered columns that lie outside what the columns' part lets a block see (``Causal``) are cut off.
5. Global rows attend all that the conjunction leaves: they run once more, densely, and replace their results.
6. Keys that the conjunction excludes for every query are not gathered; in the band's slice they are masked.
7. Which columns and rows are marked is read when it runs, so with such tensors this is for the CPU.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attn_dispatch import reference, tiling
from attn_dispatch.backend import Cost, Operands, Raw, Run
from attn_dispatch.capability import Reason
from attn_dispatch.ir.atoms import Columns, Full, KeyLengths, KeyRange, Rows, SameBlock
from attn_dispatch.ir.masks import And, Grid, Mask, Or
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.pointwise import allowed_at, is_pointwise, kept_columns
from attn_dispatch.ir.scores import Bias
from attn_dispatch.ir.tensors import Ref, TensorDesc
from attn_dispatch.rewrites.base import Rewrite, Rewritten, not_useful
from attn_dispatch.rewrites.lattice import why_not_split

__all__ = ["GatherColumns"]

_BIAS = "union_bias"
# Query rows at a time. Torch's flash kernel works in 32 of them up to 191 on the CPU, so that more only add keys that
# are masked: 64 were measured best for a window of 512 keys on 2 cores. A GPU has launches to save.
BLOCK = {"cpu": 64, "cuda": 128}
ROWS_AT_ONCE = 256  # global rows at a time
_COLUMN_ATOMS = (Columns, KeyLengths, KeyRange)


@dataclass(frozen=True)
class _Union:
    """The union's parts, each with the conjunction's other parts in it.

    Args:
        band: what a block reads as a slice; None where there is no band.
        columns: the parts that name keys; gathered: a mask over keys alone that holds all keys of those parts.
        rows: the global rows; their mask, ``common``, is the conjunction's rest, and ``padding`` what of it looks at
            keys alone.
    """

    band: Mask | None
    columns: Mask | None
    gathered: Mask | None
    rows: Mask | None
    common: Mask
    padding: Mask | None


class GatherColumns(Rewrite):
    """A band's slice and gathered columns in one softmax; global rows apart."""

    name = "gather_columns"
    order = 19

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        union = _take_apart(op.mask)
        if union is None:
            return not_useful("the mask is no union of columns or rows with something else")
        if (reason := why_not_split(op)) is not None:
            return reason
        if not is_pointwise(op.mask):
            lists = sorted({type(atom).__name__ for atom in op.mask.atoms() if not is_pointwise(atom)})
            return Reason("feature", "mask", text=f"{', '.join(lists)} in the mask lists its pairs itself")
        if op.device != "cpu" and op.mask.refs():
            text = "which columns are marked would have to be waited for"
            return Reason("device", "device", op.device, "cpu", text=text)
        return _rewritten(op, union)


def _take_apart(mask: Mask) -> _Union | None:
    """Rule 1."""
    parts = mask.args if isinstance(mask, And) else (mask,)
    unions = [part for part in parts if isinstance(part, Or)]
    if len(unions) != 1:
        return None
    rest = [part for part in parts if part is not unions[0]]
    columns: list[Mask] = []
    gathered: list[Mask] = []
    rows: list[Mask] = []
    band: list[Mask] = []
    for part in unions[0].args:
        atoms = part.args if isinstance(part, And) else (part,)
        named = [atom for atom in atoms if isinstance(atom, _COLUMN_ATOMS)]
        if named:
            columns.append(part)
            gathered.append(And.of(*named))
        elif isinstance(part, Rows):
            rows.append(part)
        else:
            band.append(part)
    if not columns and not rows:
        return None

    def within(chosen: list[Mask]) -> Mask | None:
        return And.of(Or.of(*chosen), *rest) if chosen else None

    padding = [part for part in rest if isinstance(part, _COLUMN_ATOMS)]
    common = And.of(*rest) if rest else Full()
    held = And.of(Or.of(*gathered), *padding) if gathered else None
    return _Union(
        within(band),
        within(columns),
        held,
        Or.of(*rows) if rows else None,
        common,
        And.of(*padding) if padding else None,
    )


def _rewritten(op: AttentionOp, union: _Union) -> Rewritten | Reason:
    block = min(_block_size(union, BLOCK.get(op.device, 128)), max(op.Sq, 1))
    banded = op.with_(mask=union.band) if union.band is not None else None
    widest, mean = tiling.key_span(banded, block) if banded is not None else (0, 0.0)
    extra = _expected_columns(op, union)
    reach = op.with_(mask=union.columns) if union.columns is not None else None
    seen = tiling.key_span(reach, block)[1] / max(op.Skv, 1) if reach is not None else 0.0
    if mean + seen * extra > 0.6 * op.Skv:
        return not_useful(f"blocks of {block} rows need {mean + seen * extra:.0f} of {op.Skv} keys")
    keys = max(1, widest + extra)
    inner = op.with_(
        query=op.query.with_shape(op.B, op.Hq, block, op.D),
        key=op.key.with_shape(op.B, op.Hkv, keys, op.D),
        value=op.value.with_shape(op.B, op.Hkv, keys, op.Dv),
        mask=Full(),
        q_offset=0,
        score=(*op.score, Bias(Ref(_BIAS))),
    )
    kept = tuple((n, d) for n, d in op.operands if n not in op.mask.refs())
    batch = op.B if op.mask.refs() else 1
    inner = inner.with_(operands=(*kept, (_BIAS, TensorDesc((batch, 1, block, keys), op.dtype, op.device))))
    tiles = -(-op.Sq // block)
    turns = tiles * (mean + seen * extra) / keys
    if union.rows is not None:  # as many as there are columns, each over all keys
        turns += _expected_marks(op) * op.Skv / (block * keys)
    copied = op.query.itemsize * op.B * op.Hkv * tiles * (mean + extra) * (op.D + op.Dv) * 2.0
    bias = 12.0 * batch * op.Sq * keys
    io = 2.0 * op.query.itemsize * op.B * op.Hq * op.Sq * op.Dv

    def adapt(run: Run) -> Run:
        return lambda q, k, v, t: _Turn(op, union, block, run, q, k, v, t).result()

    return Rewritten(inner, adapt, max(turns, 1.0), Cost(0.0, copied + bias + io, 12.0 * tiles))


def _block_size(union: _Union, wanted: int) -> int:
    """Near ``wanted``, and along the borders of ``SameBlock`` where the band has them: across one is twice the keys."""
    atoms = union.band.atoms() if union.band is not None else []
    size = next((atom.size for atom in atoms if isinstance(atom, SameBlock)), 0)
    if size == 0 or size > 4 * wanted:
        return wanted
    return size * max(1, wanted // size)


def _expected_columns(op: AttentionOp, union: _Union) -> int:
    """How many columns are gathered: counted where the mask says it, guessed where a tensor will."""
    if union.gathered is None:
        return 0
    if not union.gathered.refs():
        return int(kept_columns(union.gathered, op.Skv, {}, torch.device("cpu")).sum())
    return _expected_marks(op)


def _expected_marks(op: AttentionOp) -> int:
    return min(op.Skv, max(16, op.Skv // 64))


class _Turn:
    """One call: the gathered columns, then block after block, then the global rows."""

    def __init__(
        self,
        op: AttentionOp,
        union: _Union,
        block: int,
        inner: Run,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        t: Operands,
    ) -> None:
        self.op, self.union, self.block, self.inner = op, union, block, inner
        self.q, self.k, self.v = q, k, v
        self.t = {n: x for n, x in t.items() if n not in op.mask.refs()}
        self.tensors = t
        self.sq, self.skv = q.shape[2], k.shape[2]
        offset = reference.offset_of(op, self.sq, self.skv, t)
        assert isinstance(offset, int)
        self.offset = offset
        self.band = op.with_(mask=union.band) if union.band is not None else None
        self.cached = _BandBias(self, union) if union.band is not None else None
        self.index, self.k_extra, self.v_extra = self._gather_columns()
        self.columns = self.index[0].tolist() if self.index.shape[0] == 1 else []
        self.room, self.written = self._make_room(), 0
        self.seen: dict[tuple[int, ...], torch.Tensor] = {}

    def _gather_columns(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rule 2: indices ``[B|1, n]``, Skv where a batch has fewer, and the keys and values there."""
        if self.union.gathered is None:
            none = torch.zeros((1, 0), dtype=torch.int64, device=self.q.device)
            return none, self.k[:, :, :0], self.v[:, :, :0]
        kept = kept_columns(self.union.gathered, self.skv, self.tensors, self.q.device)
        index = _marked(kept, self.skv)
        return index, _pick(self.k, index), _pick(self.v, index)

    def result(self) -> Any:
        keep_graph = bool(self.op.grad) or self.op.higher_order
        sums: list[tuple[tiling.Tile, torch.Tensor | None]] = []
        out = tiling.join_rows(self._tiles(sums), self.q, self.v.shape[3], 0.0, keep_graph)
        lse = tiling.join_rows(iter(sums), self.q, 0, -math.inf, keep_graph) if self.op.outputs.lse else None
        if keep_graph:  # where no block attends anything, the gradients of all are 0 and not missing
            others = (self.k, self.v, *tiling.differentiated(self.op, self.tensors))
            out = out + sum(x[..., :0].sum() for x in others)
        if self.union.rows is not None:
            out, lse = self._global_rows(out, lse, keep_graph)
        return out if lse is None else Raw(out, lse)

    def _tiles(
        self, sums: list[tuple[tiling.Tile, torch.Tensor | None]]
    ) -> Iterator[tuple[tiling.Tile, torch.Tensor | None]]:
        acc = torch.float64 if self.q.dtype == torch.float64 else torch.float32
        for start in range(0, self.sq, self.block):
            rows = (start, min(self.sq, start + self.block))
            keys = (0, 0)
            if self.band is not None:
                keys = self.band.mask.key_interval(rows, self.skv, self.offset, self.tensors)
            tile = tiling.Tile(rows, keys, self.offset + start - keys[0])
            part = self._tile(tile)
            if part is None:
                shape = (self.q.shape[0], self.q.shape[1], rows[1] - rows[0])
                sums.append((tile, reference.empty_lse(self.op, shape, self.t, acc, self.q.device)))
                yield tile, None
                continue
            if self.op.outputs.lse:
                sums.append((tile, part.lse))
                part = part.out
            yield tile, part

    def _tile(self, tile: tiling.Tile) -> Any:
        lo, hi = tile.keys
        first, last = self._columns_seen(tile)
        if hi - lo + last - first == 0:
            return None
        k, v = self._keys(lo, hi, first, last)
        return self.inner(self.q[:, :, slice(*tile.rows)], k, v, {**self.t, _BIAS: self._bias(tile, first, last)})

    def _keys(self, lo: int, hi: int, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gathered columns ``first .. last`` and after them the band's keys ``lo .. hi``."""
        if self.room is None or lo < self.written:
            return (
                _beside(self.k_extra[:, :, first:last], self.k[:, :, lo:hi]),
                _beside(self.v_extra[:, :, first:last], self.v[:, :, lo:hi]),
            )
        self.written = lo
        start, end = self.index.shape[1] + lo, self.index.shape[1] + hi
        for room, extra in zip(self.room, (self.k_extra, self.v_extra), strict=True):
            room[:, :, start - (last - first) : start] = extra[:, :, first:last]
        return self.room[0][:, :, start - (last - first) : end], self.room[1][:, :, start - (last - first) : end]

    def _make_room(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values with room in front: the columns are written over keys that later blocks do not read.

        One copy of the keys instead of one for each block; not with gradients, which need what was overwritten.
        """
        if self.op.grad or self.op.higher_order or self.band is None or self.index.shape[1] == 0:
            return None
        last = self.band.mask.key_interval((max(self.sq - self.block, 0), self.sq), self.skv, self.offset, self.tensors)
        if -(-self.sq // self.block) * (last[1] - last[0] + self.index.shape[1]) <= self.skv:
            return None  # a decode step: its slices are less than all keys
        ahead = (0, 0, self.index.shape[1], 0)
        return torch.nn.functional.pad(self.k, ahead), torch.nn.functional.pad(self.v, ahead)

    def _bias(self, tile: tiling.Tile, first: int, last: int) -> torch.Tensor:
        lo, hi = tile.keys
        if last == first:
            assert self.cached is not None
            return self.cached(tile)
        if hi == lo or self.cached is None:
            return self._column_bias(tile, first, last)
        if not self._clear_of(lo, hi):
            return _cat_keys(self._column_bias(tile, first, last), self.cached(tile))
        looks = (tile.rows[1] - tile.rows[0], hi - lo, tile.q_offset, last - first)
        if looks not in self.seen or not self.cached.repeats:
            band = self.cached(tile)
            self.seen[looks] = _cat_keys(band.new_zeros((1, 1, 1, last - first)), band)
        return self.seen[looks]

    def _clear_of(self, lo: int, hi: int) -> bool:
        """No gathered column lies in the band's slice, and every row sees all of them: nothing to mask there."""
        if self.index.shape[0] > 1 or self.union.columns is None or self.union.columns.per_query:
            return False
        if self.union.columns != self.union.gathered:  # with `Not`, or a union inside, not all that is gathered is seen
            return False
        return bisect_left(self.columns, lo) == bisect_left(self.columns, hi)

    def _columns_seen(self, tile: tiling.Tile) -> tuple[int, int]:
        """Rule 4: the range of gathered columns that a block may see."""
        if self.union.columns is None:
            return (0, 0)
        lo, hi = self.union.columns.key_interval(tile.rows, self.skv, self.offset, self.tensors)
        if self.index.shape[0] > 1:
            return (0, self.index.shape[1]) if lo < hi else (0, 0)
        return bisect_left(self.columns, lo), bisect_left(self.columns, hi)

    def _column_bias(self, tile: tiling.Tile, first: int, last: int) -> torch.Tensor:
        """Rule 3."""
        assert self.union.columns is not None
        rows = torch.arange(*tile.rows, device=self.q.device).view(1, 1, -1, 1)
        keys = self.index[:, first:last][:, None, None, :]
        mask = self.union.columns & KeyRange(0, self.skv)
        if self.union.band is not None:
            mask = mask & ~self.union.band
        grid = Grid(rows, rows + self.offset, keys, self.tensors, self.sq, self.skv)
        return _additive(allowed_at(mask, grid), rows.shape[2], keys.shape[3], self.q.dtype)

    # --- global rows -------------------------------------------------------------------------------------------------

    def _global_rows(
        self, out: torch.Tensor, lse: torch.Tensor | None, keep_graph: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rule 5."""
        assert self.union.rows is not None
        rows = torch.arange(self.sq, device=self.q.device).view(1, 1, -1, 1)
        none = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=self.q.device)
        grid = Grid(rows, rows + self.offset, none, self.tensors, self.sq, self.skv)
        marked = allowed_at(self.union.rows, grid).expand(-1, 1, self.sq, 1)[:, 0, :, 0]
        index = _marked(marked, self.sq)
        for start in range(0, index.shape[1], ROWS_AT_ONCE):
            part = index[:, start : start + ROWS_AT_ONCE]
            result = self._dense(part)
            out = _put_rows(out, result.out if lse is not None else result, part, keep_graph)
            if lse is not None:
                lse = _put_rows(lse[..., None], result.lse[..., None], part, keep_graph)[..., 0]
        return out, lse

    def _dense(self, index: torch.Tensor) -> Any:
        keys = torch.arange(self.skv, device=self.q.device).view(1, 1, 1, -1)
        rows = index[:, None, :, None]
        grid = Grid(rows, rows + self.offset, keys, self.tensors, self.sq, self.skv)
        bias = _additive(allowed_at(self.union.common, grid), 1, self.skv, self.q.dtype)
        return self.inner(_pick(self.q, index), self.k, self.v, {**self.t, _BIAS: bias})


class _BandBias:
    """The band's additive mask for a block; what looks at keys alone is added to what all blocks share."""

    def __init__(self, turn: _Turn, union: _Union) -> None:
        assert union.band is not None
        parts = union.band.args if isinstance(union.band, And) else (union.band,)
        moving = [part for part in parts if not isinstance(part, _COLUMN_ATOMS)]
        shape = And.of(*moving) if moving else Full()
        self._tile_bias = tiling.TileBias(turn.op.with_(mask=shape), turn.q, turn.k, turn.tensors)
        self._turn = turn
        self._kept = None
        self.repeats = union.padding is None and self._tile_bias.repeats
        if union.padding is not None:
            kept = kept_columns(union.padding, turn.skv, turn.tensors, turn.q.device)
            self._kept = _additive(kept[:, None, None, :], 1, turn.skv, turn.q.dtype)

    def __call__(self, tile: tiling.Tile) -> torch.Tensor:
        lo, hi = tile.keys
        bias = self._tile_bias(tile)
        if bias is None:
            bias = self._turn.q.new_zeros((1, 1, 1, hi - lo))
        return bias if self._kept is None else bias + self._kept[..., lo:hi]


def _additive(allowed: torch.Tensor, rows: int, keys: int, dtype: torch.dtype) -> torch.Tensor:
    rows = max(rows, allowed.shape[2])
    allowed = allowed.expand(*allowed.shape[:2], rows, keys)
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, -math.inf)


def _cat_keys(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    sizes = [max(x, y) for x, y in zip(a.shape[:3], b.shape[:3], strict=True)]
    return torch.cat([a.expand(*sizes, -1), b.expand(*sizes, -1)], -1)


def _beside(extra: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if extra.shape[2] == 0:
        return x
    return torch.cat([extra, x], 2) if x.shape[2] else extra


def _marked(kept: torch.Tensor, length: int) -> torch.Tensor:
    """Where ``kept [B|1, S]`` is True: indices ``[B|1, n]`` in rising order, ``length`` where a batch has fewer."""
    counts = kept.sum(-1)
    most = int(counts.max()) if counts.numel() else 0
    at = torch.arange(length, device=kept.device)
    return torch.where(kept, at, length).sort(-1).values[:, :most]


def _pick(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``x [B, H, S, E]`` at the positions ``index [B|1, n]`` of each batch; one beyond the end reads the last."""
    index = index.clamp(max=x.shape[2] - 1)
    if index.shape[0] == 1:
        return x.index_select(2, index[0])
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _put_rows(out: torch.Tensor, part: torch.Tensor, index: torch.Tensor, keep_graph: bool) -> torch.Tensor:
    """``out [B, H, S, E]`` with the rows ``index [B|1, n]`` replaced, where they are rows."""
    index = index.expand(out.shape[0], -1)
    batch, nth = (index < out.shape[2]).nonzero(as_tuple=True)
    rows = index[batch, nth]
    values = part.transpose(1, 2)[batch, nth].to(out.dtype)  # [rows, H, E]
    by_row = out.transpose(1, 2)
    put = by_row.index_put if keep_graph else by_row.index_put_
    return put((batch, rows), values).transpose(1, 2)
