"""Cut an op into blocks of query rows, each with the only keys that they may attend.

The one loop behind the rewrites `bands` and `tile_queries` and the backend `blocked`. Keys are sliced, not gathered, so
a tile costs no copy; a tile that attends nothing is not computed at all.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from attn_dispatch import reference
from attn_dispatch.backend import Operands
from attn_dispatch.ir.atoms import Full
from attn_dispatch.ir.masks import FULL, And, Grid
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.pointwise import allowed_at, is_pointwise
from attn_dispatch.ir.scores import Bias

__all__ = ["Cut", "Cutting", "Tile", "TileBias", "cutting", "join_rows", "key_span", "query_tiles", "slice_bias"]


@dataclass(frozen=True)
class Tile:
    """Query rows ``rows`` with keys ``keys``, both half-open; ``q_offset`` of row 0 of the tile within its keys."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    q_offset: int

    @property
    def is_empty(self) -> bool:
        """These rows attend nothing."""
        return self.keys[0] >= self.keys[1]

    @property
    def width(self) -> int:
        """How many keys."""
        return self.keys[1] - self.keys[0]

    @property
    def from_the_end(self) -> tuple[int, int]:
        """Rows, and how far the last key is from the first row: who agrees in both differs in its first keys alone."""
        return self.rows[1] - self.rows[0], self.width - self.q_offset

    @property
    def pairs(self) -> int:
        """How many pairs of a row and a key."""
        return (self.rows[1] - self.rows[0]) * self.width

    @property
    def looks(self) -> tuple[int, int, int]:
        """What a mask that moves with the query knows a tile by."""
        return (*self.from_the_end, self.width)


@dataclass(frozen=True)
class Cut:
    """An op cut into tiles, with all that is known of them without tensors.

    Args:
        moves: the mask says the same of all tiles that look alike.
        full: by the looks of a tile, whether all its pairs attend.
        widest: the widest tile of those that agree `from_the_end`.
        masks: additive masks that were built for it before, by looks and dtype, where they are small.
    """

    tiles: tuple[Tile, ...]
    moves: bool
    full: Mapping[tuple[int, int, int], bool] = field(default_factory=dict)
    widest: Mapping[tuple[int, int], Tile] = field(default_factory=dict)
    masks: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict, compare=False)


Cutting = Callable[[int, int, int, Operands], Cut]
_CUTS_KEPT = 16  # lengths of a bucket that alternate
_KEPT_PAIRS = 1 << 16  # of a mask that is kept: 256 KiB of float32


def cutting(op: AttentionOp, block: int) -> Cutting:
    """What cuts an op: ``(sq, skv, offset, operands) -> Cut``; where the mask is no tensor a length is cut once.

    Finding a tile and looking whether it is full takes 0.2 ms of Python, and a block of rows may take no longer.
    """
    if op.mask.refs() or op.traced:  # traced lengths may be symbols, which have no hash
        return lambda sq, skv, offset, t: _cut(op, sq, skv, offset, block, t)
    by_lengths = functools.lru_cache(_CUTS_KEPT)(lambda sq, skv, offset: _cut(op, sq, skv, offset, block, {}))
    return lambda sq, skv, offset, t: by_lengths(sq, skv, offset)


def _cut(op: AttentionOp, sq: int, skv: int, offset: int, block: int, t: Operands) -> Cut:
    tiles = tuple(query_tiles(op, sq, skv, offset, block, t))
    if not _moves(op):
        return Cut(tiles, False)
    seen = {tile.looks: tile for tile in tiles if not tile.is_empty}
    full = {looks: _is_full(op, tile) for looks, tile in seen.items()}
    return Cut(
        tiles, True, full, {tile.from_the_end: tile for tile in sorted(seen.values(), key=lambda tile: tile.width)}
    )


def _moves(op: AttentionOp) -> bool:
    """Whether the mask depends on the distance of query and key alone, not on where they stand."""
    leaves = [atom for atom in op.mask.atoms() if type(atom).__name__ != "Not"]
    return all(
        atom.positional and not atom.refs() and type(atom).__name__ in ("Causal", "Window", "Stride", "Full")
        for atom in leaves
    )


def _is_full(op: AttentionOp, tile: Tile) -> bool:
    rows, keys = tile.rows[1] - tile.rows[0], tile.width
    return bool((op.mask.tiles(rows, keys, rows, keys, tile.q_offset) == FULL).all())


def query_tiles(op: AttentionOp, sq: int, skv: int, offset: int, block: int, t: Operands) -> Iterator[Tile]:
    """All tiles of ``block`` query rows, with the key interval of each."""
    for start in range(0, sq, block):
        stop = min(sq, start + block)
        lo, hi = op.mask.key_interval((start, stop), skv, offset, t)
        yield Tile((start, stop), (lo, hi), offset + start - lo)


def key_span(op: AttentionOp, block: int) -> tuple[int, float]:
    """(widest, mean) number of keys that a tile of ``block`` rows needs, from what the mask says without tensors."""
    offset = op.static_offset() or 0
    tiles = list(query_tiles(op, op.Sq, op.Skv, offset, block, {}))
    spans = [tile.keys[1] - tile.keys[0] for tile in tiles]
    return (max(spans, default=0), sum(spans) / max(len(spans), 1))


class TileBias:
    """The mask and biases of tiles as additive tensors; a tile that looks like one before is not built again.

    Masks that move with the query (causal, windows, strides) look the same in every interior tile, and in those at the
    border, seen from their last key, like a part of it: most are built once per call.

    Args:
        cut: its tiles may be asked for, and the widest of those that look alike is built and serves the others. Without
            one any tile may.
    """

    def __init__(self, op: AttentionOp, q: torch.Tensor, k: torch.Tensor, t: Operands, cut: Cut | None = None) -> None:
        self._op, self._q, self._k, self._t = op, q, k, t
        self._offset = reference.offset_of(op, q.shape[2], k.shape[2], t)
        self._cut = cut or Cut((), _moves(op))
        self._seen: dict[tuple[int, int, int], torch.Tensor | None] = {}

    @property
    def repeats(self) -> bool:
        """Tiles that look alike share one tensor."""
        return self._cut.moves

    def __call__(self, tile: Tile) -> torch.Tensor | None:
        """The additive mask ``[.., rows, keys]`` in q's dtype; None when every pair of the tile attends."""
        if not self._cut.moves:
            return self._build(tile)
        if self._is_full(tile):
            return None
        if tile.pairs <= _KEPT_PAIRS and self._op.device == "cpu" and not self._op.traced:
            return self._kept(tile)
        if tile.looks not in self._seen:
            widest = self._cut.widest.get(tile.from_the_end, tile)
            whole = self._build(tile) if widest.width <= tile.width else self(widest)
            self._seen[tile.looks] = whole if whole is None else whole[..., -tile.width :]
        return self._seen[tile.looks]

    def _kept(self, tile: Tile) -> torch.Tensor | None:
        """A small mask, from the call before if there was one: building it takes as long as a short tile."""
        key = (tile.looks, self._q.dtype)
        mask = self._cut.masks.get(key)
        if mask is None:
            with torch.inference_mode(False):  # else a later call with gradients could not use it
                mask = self._build(tile)
            if type(mask) is torch.Tensor:  # a mode around this call may make others, which are strangers to the next
                self._cut.masks[key] = mask
        return mask

    def _is_full(self, tile: Tile) -> bool:
        known = self._cut.full.get(tile.looks)
        return _is_full(self._op, tile) if known is None else known

    def _build(self, tile: Tile) -> torch.Tensor | None:
        if isinstance(self._op.mask, Full):
            return None
        allowed = self._allowed(tile)
        zeros = torch.zeros(allowed.shape, dtype=self._q.dtype, device=self._q.device)
        return zeros.masked_fill_(~allowed, -math.inf)

    def _allowed(self, tile: Tile) -> torch.Tensor:
        sq, skv = self._q.shape[2], self._k.shape[2]
        if isinstance(self._offset, int) and is_pointwise(self._op.mask):  # the tile alone, not all keys of its rows
            rows = torch.arange(*tile.rows, device=self._q.device).view(1, 1, -1, 1)
            keys = torch.arange(*tile.keys, device=self._q.device).view(1, 1, 1, -1)
            found = allowed_at(self._op.mask, Grid(rows, rows + self._offset, keys, self._t, sq, skv))
            return found.expand(*found.shape[:2], rows.shape[2], keys.shape[3])
        allowed = self._op.mask.dense(sq, skv, self._offset, self._t, self._q.device, rows=tile.rows)
        allowed = allowed[..., tile.keys[0] : tile.keys[1]]
        return allowed[(None,) * (4 - allowed.ndim)]


def slice_bias(x: torch.Tensor, tile: Tile) -> torch.Tensor:
    """The part of a bias ``[.., Sq|1, Skv|1]`` that belongs to a tile."""
    if x.shape[-2] != 1:
        x = x[..., tile.rows[0] : tile.rows[1], :]
    return x[..., tile.keys[0] : tile.keys[1]] if x.shape[-1] != 1 else x


def slice_terms(op: AttentionOp, tile: Tile, t: Operands) -> dict[str, torch.Tensor]:
    """The op's operands with every bias cut to a tile."""
    biases = {term.bias.name for term in op.score if isinstance(term, Bias)}
    if not biases:
        return dict(t)
    return {name: slice_bias(x, tile) if name in biases else x for name, x in t.items()}


def differentiated(op: AttentionOp, t: Operands) -> list[torch.Tensor]:
    """The operands that want a gradient."""
    return [t[name] for name in op.grad if name in t]


def join_rows(
    parts: Iterator[tuple[Tile, torch.Tensor | None]],
    q: torch.Tensor,
    last: int,
    fill: float,
    keep_graph: bool,
    others: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Put the tiles' results together along the rows; an empty tile is filled with ``fill``.

    Without gradients the parts are written into one preallocated result, so that two copies never exist at once.
    ``others``: tensors whose gradient is 0, and not missing, where all tiles are empty.
    """
    shape = q.shape[:3] if last == 0 else (*q.shape[:3], last)
    pieces: list[torch.Tensor] = []
    out: torch.Tensor | None = None
    seen = False
    for tile, part in parts:
        seen = seen or part is not None
        rows = tile.rows[1] - tile.rows[0]
        if part is None:
            sizes = (*shape[:2], rows, *shape[3:])
            part = torch.full(sizes, fill, dtype=q.dtype if last else torch.float32, device=q.device)
            if keep_graph and last:  # connected to the query, so that its gradient is 0 and not missing
                part = part + q[:, :, tile.rows[0] : tile.rows[1], :0].sum(-1, keepdim=True)
        if keep_graph:
            pieces.append(part)
            continue
        if out is None:
            # heads beside each other, as the fused kernels return them, so that placing a part is a straight copy
            b, h, s, *rest = shape
            out = torch.empty((b, s, h, *rest), dtype=part.dtype, device=q.device).transpose(1, 2)
        out[:, :, tile.rows[0] : tile.rows[1]] = part
    if keep_graph:
        whole = torch.cat(pieces, 2)
        return whole if seen or not others else whole + sum(x[..., :0].sum() for x in others)
    assert out is not None
    return out


# Of the CPU's flash kernel (AMD EPYC, 2 cores, windows of 128 to 4096): a tile costs b * (w + b) for b * w pairs, and
# by itself as much as a few columns for each key that it reads again, and some microseconds of Python.
_COLUMNS_PER_KEY, _START_PAIRS = 16, 900_000


def tile_by_block(op: AttentionOp) -> int:
    """Rows b per tile of a band of w keys: small b wastes starts, large b computes pairs beyond the band."""
    width = _band_width(op)
    if op.device != "cpu":
        return max(64, min(512, 1 << max(width.bit_length() - 1, 0)))
    starts = _START_PAIRS / max(op.B * op.Hq * (op.D + op.Dv) / 2, 1)
    best = math.sqrt(_COLUMNS_PER_KEY * width + starts)
    return 1 << round(math.log2(max(32, min(512, best))))


def _band_width(op: AttentionOp) -> int:
    middle = op.Sq // 2
    offset = op.static_offset() or 0
    lo, hi = op.mask.key_interval((middle, middle + 1), op.Skv, offset, {})
    return hi - lo


def is_causal_blocks(op: AttentionOp) -> bool:
    """Chunked causal attention whose blocks start at row 0: each block is a small causal square of its own."""
    parts = op.mask.args if isinstance(op.mask, And) else ()
    return sorted(type(part).__name__ for part in parts) == ["Causal", "SameBlock"] and op.q_offset == 0
