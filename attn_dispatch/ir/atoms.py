"""The atoms of the mask algebra. Each says what it allows, what it knows of a tile, and which keys a block may see.

``p`` is the position of a query (row + q_offset), ``i`` its row, ``j`` a key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_dispatch.ir.masks import Bounds, Grid, Mask, Tensors, TileGrid, holding, operand_tensor
from attn_dispatch.ir.operands import Held, Operand, Table

__all__ = [
    "BlockTable",
    "Causal",
    "Columns",
    "Dense",
    "Full",
    "KeyLengths",
    "KeyRange",
    "QueryLengths",
    "Rows",
    "SameBlock",
    "Segments",
    "Selected",
    "Stride",
    "Window",
]


_MOST_VALUES = 1 << 20  # of a block table that counts by value; a larger one is a tensor of the call


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether it can be read: on the CPU, and not the stand-in of a tracer."""
    return tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _yes(like: torch.Tensor) -> torch.Tensor:
    return torch.ones((1, 1), dtype=torch.bool, device=like.device)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class Full(Mask):
    """Every pair."""

    per_query = False

    def allowed(self, grid: Grid) -> torch.Tensor:
        return _yes(grid.keys)

    def bounds(self, tiles: TileGrid) -> Bounds:
        return Bounds(_yes(tiles.k_lo), _yes(tiles.k_lo))


@dataclass(frozen=True)
class Causal(Mask):
    """``j <= p``."""

    positional = True

    def allowed(self, grid: Grid) -> torch.Tensor:
        return grid.keys <= grid.queries

    def bounds(self, tiles: TileGrid) -> Bounds:
        return Bounds(tiles.k_lo <= tiles.q_hi, tiles.k_hi <= tiles.q_lo)

    def interval(self, q_lo: int, q_hi: int, skv: int, tensors: Tensors) -> tuple[int, int]:
        return (0, q_hi + 1)


@dataclass(frozen=True)
class Window(Mask):
    """``p - left <= j <= p + right``, both ends included; None is unbounded.

    A causal window of W keys, self included, is ``Window(W - 1, 0)``.
    """

    left: int | None
    right: int | None
    positional = True
    sanitises = True

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            value = getattr(self, name)
            _require(value is None or (isinstance(value, int) and value >= 0), f"{name} must be >= 0, got {value}")

    def allowed(self, grid: Grid) -> torch.Tensor:
        distance = grid.keys - grid.queries
        out = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            out = out & (distance >= -self.left)
        return out & (distance <= self.right) if self.right is not None else out

    def bounds(self, tiles: TileGrid) -> Bounds:
        nearest, farthest = tiles.k_lo - tiles.q_hi, tiles.k_hi - tiles.q_lo
        may = must = torch.ones_like(nearest, dtype=torch.bool)
        if self.left is not None:
            may, must = may & (farthest >= -self.left), must & (nearest >= -self.left)
        if self.right is not None:
            may, must = may & (nearest <= self.right), must & (farthest <= self.right)
        return Bounds(may, must)

    def interval(self, q_lo: int, q_hi: int, skv: int, tensors: Tensors) -> tuple[int, int]:
        lo = 0 if self.left is None else q_lo - self.left
        return (lo, skv if self.right is None else q_hi + self.right + 1)


@dataclass(frozen=True)
class Stride(Mask):
    """``(p - j) % step == 0``."""

    step: int
    positional = True
    sanitises = True

    def __post_init__(self) -> None:
        _require(self.step >= 1, f"step must be >= 1, got {self.step}")

    def allowed(self, grid: Grid) -> torch.Tensor:
        return (grid.queries - grid.keys) % self.step == 0

    def bounds(self, tiles: TileGrid) -> Bounds:
        lo, hi = tiles.k_lo - tiles.q_hi, tiles.k_hi - tiles.q_lo  # every distance between them occurs in the tile
        may = torch.div(hi, self.step, rounding_mode="floor") * self.step >= lo
        must = (lo == hi) & (lo % self.step == 0) if self.step > 1 else torch.ones_like(may)
        return Bounds(may, must)


@dataclass(frozen=True)
class SameBlock(Mask):
    """``p // size == j // size``: chunked attention."""

    size: int
    positional = True
    sanitises = True

    def __post_init__(self) -> None:
        _require(self.size >= 1, f"size must be >= 1, got {self.size}")

    def allowed(self, grid: Grid) -> torch.Tensor:
        return _block(grid.queries, self.size) == _block(grid.keys, self.size)

    def bounds(self, tiles: TileGrid) -> Bounds:
        q_lo, q_hi = _block(tiles.q_lo, self.size), _block(tiles.q_hi, self.size)
        k_lo, k_hi = _block(tiles.k_lo, self.size), _block(tiles.k_hi, self.size)
        return Bounds((q_lo <= k_hi) & (k_lo <= q_hi), (q_lo == q_hi) & (k_lo == k_hi) & (q_lo == k_lo))

    def interval(self, q_lo: int, q_hi: int, skv: int, tensors: Tensors) -> tuple[int, int]:
        return (q_lo // self.size * self.size, (q_hi // self.size + 1) * self.size)


def _block(positions: torch.Tensor, size: int) -> torch.Tensor:
    return torch.div(positions, size, rounding_mode="floor")


class _KeyMask(Mask):
    """Base of masks that look at the key alone: a whole column is in or out."""

    per_query = False
    sanitises = True

    def keep(self, grid: Grid) -> torch.Tensor:
        """Which keys are kept: ``[1, Skv]``, ``[B, 1, 1, Skv]``."""
        raise NotImplementedError

    def allowed(self, grid: Grid) -> torch.Tensor:
        return self.keep(grid)


@dataclass(frozen=True)
class KeyRange(_KeyMask):
    """Keys ``start <= j < stop``; with ``period``, keys whose ``j % period`` lies there. A prefix is ``(0, n)``."""

    start: int
    stop: int
    period: int | None = None

    def __post_init__(self) -> None:
        _require(0 <= self.start <= self.stop, f"need 0 <= start <= stop, got {self.start}, {self.stop}")
        _require(self.period is None or self.period >= max(1, self.stop), f"period {self.period} < stop {self.stop}")

    def keep(self, grid: Grid) -> torch.Tensor:
        at = grid.keys if self.period is None else grid.keys % self.period
        return (at >= self.start) & (at < self.stop)

    def interval(self, q_lo: int, q_hi: int, skv: int, tensors: Tensors) -> tuple[int, int]:
        return (0, skv) if self.period is not None and self.start < self.stop else (self.start, self.stop)


@dataclass(frozen=True)
class Columns(_KeyMask):
    """Keys where ``keep`` is True, whatever the query: bool ``[Skv]`` or ``[B, Skv]`` (padding, global tokens)."""

    kept: Operand

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", holding(self.kept))

    def keep(self, grid: Grid) -> torch.Tensor:
        return _per_batch(operand_tensor(self.kept, grid).bool())


@dataclass(frozen=True)
class KeyLengths(_KeyMask):
    """Keys ``j < lengths[b]``; lengths are integers ``[B]``."""

    lengths: Operand

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", holding(self.lengths))

    def keep(self, grid: Grid) -> torch.Tensor:
        return grid.keys < operand_tensor(self.lengths, grid).view(-1, 1, 1, 1)


@dataclass(frozen=True)
class QueryLengths(Mask):
    """Query rows ``i < lengths[b]``; the rows beyond are empty rows, whose output is 0."""

    lengths: Operand

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", holding(self.lengths))

    def allowed(self, grid: Grid) -> torch.Tensor:
        return grid.rows < operand_tensor(self.lengths, grid).view(-1, 1, 1, 1)


@dataclass(frozen=True)
class Rows(Mask):
    """Query rows where ``kept`` is True, whatever the key: bool ``[Sq]`` or ``[B, Sq]`` (global queries)."""

    kept: Operand

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", holding(self.kept))

    def allowed(self, grid: Grid) -> torch.Tensor:
        kept = operand_tensor(self.kept, grid).bool()
        return _per_batch(kept).transpose(-1, -2)[..., grid.rows[:, 0], :]


def _per_batch(rows: torch.Tensor) -> torch.Tensor:
    """``[S]`` -> ``[1, S]``; ``[B, S]`` -> ``[B, 1, 1, S]``."""
    return rows[None, :] if rows.ndim == 1 else rows[:, None, None, :]


@dataclass(frozen=True)
class Segments(Mask):
    """Pairs of equal segment (document) number: integers ``[Sq]``/``[B, Sq]`` and ``[Skv]``/``[B, Skv]``."""

    queries: Operand
    keys: Operand
    sanitises = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "queries", holding(self.queries))
        object.__setattr__(self, "keys", holding(self.keys))

    def allowed(self, grid: Grid) -> torch.Tensor:
        q_ids = _per_batch(operand_tensor(self.queries, grid)).transpose(-1, -2)[..., grid.rows[:, 0], :]
        return q_ids == _per_batch(operand_tensor(self.keys, grid))


@dataclass(frozen=True)
class BlockTable(Mask):
    """Tiles of ``block`` x ``block`` that are attended: a boolean table ``[nq, nk]`` or ``[H, nq, nk]``.

    Row ``p // block`` and column ``j // block`` of the table say whether the pair is in; beyond the table nothing is.
    """

    block: int
    table: Operand
    positional = True
    sanitises = True

    def __post_init__(self) -> None:
        _require(self.block >= 1, f"block must be >= 1, got {self.block}")
        table = holding(self.table)
        if isinstance(table, Held) and _has_values(table.tensor) and table.tensor.numel() <= _MOST_VALUES:
            table = Table.of(table.tensor.bool())  # a pattern is part of what the op is: it counts by value
        object.__setattr__(self, "table", table)

    def allowed(self, grid: Grid) -> torch.Tensor:
        table = operand_tensor(self.table, grid).bool()
        _require(table.ndim in (2, 3), f"a block table is [nq, nk] or [H, nq, nk], got {list(table.shape)}")
        q_block = _block(grid.queries[..., 0], self.block)
        k_block = _block(grid.keys[0], self.block)
        nq, nk = table.shape[-2:]
        inside = ((q_block >= 0) & (q_block < nq))[..., :, None] & (k_block < nk)
        picked = (
            table[..., q_block.clamp(0, max(nq - 1, 0)), :] if q_block.ndim == 1 else _rows_per_batch(table, q_block)
        )
        return picked[..., k_block.clamp(0, max(nk - 1, 0))] & inside

    def bounds(self, tiles: TileGrid) -> Bounds:
        table = operand_tensor(self.table, tiles.grid).bool()
        nq, nk = table.shape[-2:]
        sums = torch.nn.functional.pad(table.long().cumsum(-1).cumsum(-2), (1, 0, 1, 0))  # of all blocks before

        def span(lo: torch.Tensor, hi: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            lo, hi = _block(lo, self.block), _block(hi, self.block) + 1
            return lo.clamp(0, count), hi.clamp(0, count), (lo >= 0) & (hi <= count)

        q_lo, q_hi, q_inside = span(tiles.q_lo, tiles.q_hi, nq)
        k_lo, k_hi, k_inside = span(tiles.k_lo, tiles.k_hi, nk)
        q_lo, q_hi, k_lo, k_hi = torch.broadcast_tensors(q_lo, q_hi, k_lo, k_hi)
        found = sums[..., q_hi, k_hi] - sums[..., q_lo, k_hi] - sums[..., q_hi, k_lo] + sums[..., q_lo, k_lo]
        whole = (q_hi - q_lo) * (k_hi - k_lo)
        return Bounds(found > 0, (found == whole) & q_inside & k_inside)

    def interval(self, q_lo: int, q_hi: int, skv: int, tensors: Tensors) -> tuple[int, int]:
        if not isinstance(self.table, Table):
            return (0, skv)
        table = self.table.tensor()
        rows = table[..., max(q_lo // self.block, 0) : max(q_hi // self.block + 1, 0), :]
        used = rows.reshape(-1, table.shape[-1]).any(0).nonzero()[:, 0]
        return (int(used[0]) * self.block, (int(used[-1]) + 1) * self.block) if len(used) else (0, 0)


def _rows_per_batch(table: torch.Tensor, q_block: torch.Tensor) -> torch.Tensor:
    """Rows of a table for positions that differ per batch (``q_block [B, 1, Sq]``)."""
    rows = table if table.ndim == 3 else table[None]
    index = q_block[:, 0].clamp(0, max(table.shape[-2] - 1, 0))
    return rows[:, index].transpose(0, 1)


@dataclass(frozen=True)
class Selected(Mask):
    """Keys listed per query: integers ``[B, Sq, K]`` or ``[B, Hq, Sq, K]``; -1 is padding, repeats count once."""

    indices: Operand
    sanitises = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", holding(self.indices))

    def allowed(self, grid: Grid) -> torch.Tensor:
        indices = operand_tensor(self.indices, grid).long()
        indices = (indices[:, None] if indices.ndim == 3 else indices)[..., grid.rows[:, 0], :]
        spare = indices.new_zeros((*indices.shape[:-1], grid.skv + 1), dtype=torch.bool)  # slot Skv takes the pads
        slots = torch.where((indices >= 0) & (indices < grid.skv), indices, grid.skv)
        return spare.scatter(-1, slots, True)[..., : grid.skv]


@dataclass(frozen=True)
class Dense(Mask):
    """A boolean tensor that broadcasts to ``[B, H, Sq, Skv]``; True = attend. What no other atom says."""

    mask: Operand

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", holding(self.mask))

    def allowed(self, grid: Grid) -> torch.Tensor:
        mask = operand_tensor(self.mask, grid).bool()
        mask = mask[None] if mask.ndim == 1 else mask
        whole = grid.rows.shape[0] == mask.shape[-2] or mask.shape[-2] == 1
        return mask if whole else mask[..., grid.rows[:, 0], :]
