"""The mask algebra: a mask is a boolean set of (query, key) pairs, written with atoms and ``& | ~``.

A mask is a frozen value. Atoms speak of *positions*: query row ``i`` stands at key position ``i + q_offset``, key ``j``
at ``j``; the offset belongs to the op, not to the mask, so one mask serves prefill, chunked prefill and decode.

Every mask answers four questions, and backends need no others:

=================  ======================================================================================
``dense(...)``     the boolean tensor, broadcastable to ``[B, H, Sq, Skv]``
``tiles(...)``     per tile EMPTY, FULL or PARTIAL; a sound summary: PARTIAL may be said of anything
``key_interval``   a half-open key range that holds all that a block of query rows may attend
``digest()``       a hash of the set's description; equal digests only for equal masks
=================  ======================================================================================

Tensors of a mask (segment ids, lengths, tables) are held by a mask that a person builds, and are replaced by named
`Ref` s when the frontend binds the mask to an op (`Mask.bind`), so that an op never holds a tensor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from attn_dispatch.ir.operands import Held, Operand, Table, as_operand, no_mask, resolve
from attn_dispatch.ir.tensors import Ref

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "And",
    "Bounds",
    "Grid",
    "Mask",
    "Not",
    "Or",
]

EMPTY, FULL, PARTIAL = 0, 1, 2

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Grid:
    """Where a mask is evaluated: positions of queries and keys, and the tensors behind its names.

    ``rows`` are query row numbers ``[Sq, 1]``, ``queries`` their key positions ``[Sq, 1]`` (``[B, 1, Sq, 1]`` when the
    offset is per batch), ``keys`` are ``[1, Skv]``.
    """

    rows: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    tensors: Tensors
    sq: int
    skv: int

    @classmethod
    def make(
        cls, sq: int, skv: int, q_offset: int | torch.Tensor, tensors: Tensors, device: Any, rows: tuple[int, int]
    ) -> Grid:
        """A grid over query rows ``rows[0] .. rows[1]`` and all keys."""
        row = torch.arange(rows[0], rows[1], device=device)[:, None]
        offset = q_offset.to(row.device).view(-1, 1, 1, 1) if isinstance(q_offset, torch.Tensor) else q_offset
        return cls(row, row + offset, torch.arange(skv, device=device)[None, :], tensors, sq, skv)


@dataclass(frozen=True)
class Bounds:
    """What is known of each tile: ``may`` hold an allowed pair, ``must`` hold nothing else."""

    may: torch.Tensor
    must: torch.Tensor


@dataclass(frozen=True)
class TileGrid:
    """Inclusive position bounds of tiles: queries ``[nq, 1]``, keys ``[1, nk]``; ``grid`` for data-dependent atoms."""

    q_lo: torch.Tensor
    q_hi: torch.Tensor
    k_lo: torch.Tensor
    k_hi: torch.Tensor
    bq: int
    bk: int
    grid: Grid

    def summarise(self, allowed: torch.Tensor) -> Bounds:
        """Any and all over each tile of a mask given by element (``[..., Sq, Skv]`` or broadcast along either).

        A dimension of size 1 is left alone, so that a mask over keys or over rows costs no Sq x Skv here.
        """
        sizes = ((-2, self.bq, self.q_lo.shape[0]), (-1, self.bk, self.k_lo.shape[1]))
        may = must = allowed
        for dim, size, count in sizes:
            if allowed.shape[dim] > 1:
                missing = count * size - allowed.shape[dim]
                pad = (0, missing) if dim == -1 else (0, 0, 0, missing)
                may = torch.nn.functional.pad(may, pad, value=False).unflatten(dim, (count, size)).any(dim)
                must = torch.nn.functional.pad(must, pad, value=True).unflatten(dim, (count, size)).all(dim)
        return Bounds(may, must)


@dataclass(frozen=True)
class Mask:
    """Base of all masks. Build them with `attn_dispatch.masks` or the atoms, and combine with ``& | ~``."""

    # --- combining -----------------------------------------------------------------------------------------------

    def __and__(self, other: Mask) -> Mask:
        return And.of(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Or.of(self, other)

    __rand__, __ror__ = __and__, __or__  # `tensor & mask` is told what to write, too

    def __invert__(self) -> Mask:
        return self.arg if isinstance(self, Not) else Not(self)

    # --- asking --------------------------------------------------------------------------------------------------

    def dense(
        self,
        sq: int,
        skv: int,
        q_offset: int | torch.Tensor = 0,
        tensors: Tensors | None = None,
        device: Any = None,
        rows: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """The mask as a boolean tensor that broadcasts to ``[B, H, Sq, Skv]``; True = attend.

        Args:
            sq, skv: number of query rows and of keys.
            q_offset: key position of query row 0; a tensor ``[B]`` gives one per batch.
            tensors: what the mask's names stand for; not needed where the mask holds its tensors itself.
            rows: evaluate only query rows ``rows[0] .. rows[1]``.

        Example:
            >>> from attn_dispatch import masks
            >>> masks.causal().dense(2, 3, q_offset=1).int().tolist()
            [[1, 1, 0], [1, 1, 1]]
        """
        device = device if device is not None else self._device(tensors)
        start, stop = rows if rows is not None else (0, sq)
        grid = Grid.make(sq, skv, q_offset, tensors or {}, device, (start, stop))
        allowed = self.allowed(grid)
        return allowed.expand(*allowed.shape[:-2], stop - start, skv)

    def tiles(
        self,
        bq: int,
        bk: int,
        sq: int,
        skv: int,
        q_offset: int = 0,
        tensors: Tensors | None = None,
    ) -> torch.Tensor:
        """Per tile of ``bq`` x ``bk``: EMPTY (0), FULL (1) or PARTIAL (2), int8 ``[..., ceil(Sq/bq), ceil(Skv/bk)]``.

        Sound, not tight: a tile said EMPTY or FULL is so; a PARTIAL one may be anything.

        Example:
            >>> from attn_dispatch import masks
            >>> masks.causal().tiles(2, 2, 4, 4).tolist()
            [[2, 0], [1, 2]]
        """
        grid = Grid.make(sq, skv, q_offset, tensors or {}, self._device(tensors), (0, sq))
        row_lo = torch.arange(0, sq, bq, device=grid.rows.device)[:, None]
        row_hi = (row_lo + bq - 1).clamp(max=sq - 1)
        k_lo = torch.arange(0, skv, bk, device=grid.rows.device)[None, :]
        k_hi = (k_lo + bk - 1).clamp(max=skv - 1)
        bounds = self.bounds(TileGrid(row_lo + q_offset, row_hi + q_offset, k_lo, k_hi, bq, bk, grid))
        shape = torch.broadcast_shapes(bounds.may.shape, bounds.must.shape, (row_lo.shape[0], k_lo.shape[1]))
        state = torch.where(bounds.must, FULL, torch.where(bounds.may, PARTIAL, EMPTY))
        return state.expand(shape).to(torch.int8)

    def key_interval(
        self, query_block: tuple[int, int], skv: int, q_offset: int = 0, tensors: Tensors | None = None
    ) -> tuple[int, int]:
        """A half-open range of keys that holds every key which query rows ``query_block`` (half-open) may attend.

        Example:
            >>> from attn_dispatch import masks
            >>> masks.sliding_window(4).key_interval((8, 10), skv=16)
            (5, 10)
        """
        if query_block[0] >= query_block[1]:
            return (0, 0)
        lo, hi = self.interval(query_block[0] + q_offset, query_block[1] - 1 + q_offset, skv, tensors or {})
        lo, hi = max(0, lo), min(skv, hi)
        return (lo, hi) if lo < hi else (0, 0)

    def digest(self) -> str:
        """A hex digest; equal only for equal masks. Tensors that the mask holds count by content, names by name."""
        return hashlib.sha256(self._digest_text().encode()).hexdigest()[:32]

    # --- what an atom answers ------------------------------------------------------------------------------------

    def allowed(self, grid: Grid) -> torch.Tensor:
        """The mask on a grid, broadcastable to ``[B, H, Sq, Skv]``, at least two dimensions."""
        raise NotImplementedError

    def bounds(self, tiles: TileGrid) -> Bounds:
        """What is known of each tile; the default evaluates every element."""
        return tiles.summarise(self.allowed(tiles.grid))

    def interval(self, q_lo: int, q_hi: int, skv: int, tensors: Tensors) -> tuple[int, int]:
        """Keys that queries at positions ``q_lo .. q_hi`` (inclusive) may attend; the default knows nothing."""
        return (0, skv)

    # What the mask depends on; passes and rewrites ask these instead of matching types.
    positional = False  # moves with q_offset
    per_query = True  # differs between query rows
    sanitises = False  # by DESIGN section 2 the keys it excludes never leak NaN or Inf

    # --- structure -----------------------------------------------------------------------------------------------

    @property
    def feature(self) -> str:
        """The word that a backend declares to serve this mask natively."""
        return f"mask:{type(self).__name__}"

    def atoms(self) -> list[Mask]:
        """The atoms of the expression, each once, in the order of its text."""
        return [self]

    def map_operands(self, replace: Callable[[str, Operand], Operand]) -> Mask:
        """The same mask with each tensor operand replaced; ``replace`` gets ``"Atom.field"`` and the operand."""
        changes = {
            f.name: replace(f"{type(self).__name__}.{f.name}", getattr(self, f.name))
            for f in fields(self)
            if isinstance(getattr(self, f.name), (Ref, Held, Table))
        }
        return type(self)(**{**{f.name: getattr(self, f.name) for f in fields(self)}, **changes}) if changes else self

    def bind(self, prefix: str = "mask") -> tuple[Mask, dict[str, torch.Tensor]]:
        """The mask with every held tensor replaced by a name, and the tensors by name. Cached: it is asked per call."""
        return self._bound if prefix == "mask" else self._bind(prefix)

    @cached_property
    def text(self) -> str:
        """``str(mask)``, made once: it is part of the key of every call that has this mask."""
        return str(self)

    @cached_property
    def _bound(self) -> tuple[Mask, dict[str, torch.Tensor]]:
        return self._bind("mask")

    def _bind(self, prefix: str) -> tuple[Mask, dict[str, torch.Tensor]]:
        found: dict[str, torch.Tensor] = {}
        names: dict[int, str] = {}

        def name(_where: str, operand: Operand) -> Operand:
            if not isinstance(operand, Held):
                return operand
            known = names.setdefault(id(operand.tensor), f"{prefix}{len(names)}")
            found[known] = operand.tensor
            return Ref(known)

        return self.map_operands(name), found

    def refs(self) -> list[str]:
        """Names of the tensors that the mask needs at run time."""
        seen: dict[str, None] = {}

        def note(_where: str, operand: Operand) -> Operand:
            if isinstance(operand, Ref):
                seen[operand.name] = None
            return operand

        self.map_operands(note)
        return list(seen)

    def _held_ids(self) -> tuple[int, ...]:
        found: list[int] = []

        def note(_where: str, operand: Operand) -> Operand:
            found.extend([id(operand.tensor)] if isinstance(operand, Held) else [])
            return operand

        self.map_operands(note)
        return tuple(found)

    def _device(self, tensors: Tensors | None) -> torch.device:
        devices = [t.device for t in (self.bind()[1] | dict(tensors or {})).values()]
        return devices[0] if devices else torch.device("cpu")

    def _digest_text(self) -> str:
        def text(value: Any) -> str:
            if isinstance(value, Held):
                return value.content_digest()
            return str(value) if isinstance(value, (Ref, Table)) else repr(value)

        return f"{type(self).__name__}({', '.join(text(getattr(self, f.name)) for f in fields(self))})"

    def __str__(self) -> str:
        parts = [str(getattr(self, f.name)) for f in fields(self)]
        return f"{type(self).__name__}({', '.join(parts)})" if parts else type(self).__name__


@dataclass(frozen=True)
class _Nary(Mask):
    args: tuple[Mask, ...]

    @classmethod
    def of(cls, *args: Mask) -> Mask:
        """Flatten, drop repeats and put the parts into the order of their text, so that ``a & b == b & a``."""
        flat: dict[Mask, None] = {}
        for arg in args:
            if not isinstance(arg, Mask):
                raise no_mask(cls.__name__, arg)
            for part in arg.args if isinstance(arg, cls) else (arg,):
                flat[part] = None
        parts, texts = list(flat), {part: str(part) for part in flat}
        if len(set(texts.values())) < len(parts):  # two held tensors may read the same
            parts.sort(key=cls._held_ids)
        parts.sort(key=lambda part: texts[part])  # two sorts: Dynamo cannot sort by pairs
        return parts[0] if len(parts) == 1 else cls(tuple(parts))

    def atoms(self) -> list[Mask]:
        return list(dict.fromkeys(atom for arg in self.args for atom in arg.atoms()))

    def map_operands(self, replace: Callable[[str, Operand], Operand]) -> Mask:
        return self.of(*(arg.map_operands(replace) for arg in self.args))  # new names, so a new order of texts

    def _digest_text(self) -> str:
        return f"{type(self).__name__}({', '.join(sorted(arg._digest_text() for arg in self.args))})"

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return any(arg.positional for arg in self.args)

    @property
    def per_query(self) -> bool:  # type: ignore[override]
        return any(arg.per_query for arg in self.args)

    @property
    def sanitises(self) -> bool:  # type: ignore[override]
        return any(arg.sanitises for arg in self.args)


@dataclass(frozen=True)
class And(_Nary):
    """The pairs that are in every part."""

    def allowed(self, grid: Grid) -> torch.Tensor:
        out = self.args[0].allowed(grid)
        for arg in self.args[1:]:
            out = out & arg.allowed(grid)
        return out

    def bounds(self, tiles: TileGrid) -> Bounds:
        out = self.args[0].bounds(tiles)
        for arg in self.args[1:]:
            other = arg.bounds(tiles)
            out = Bounds(out.may & other.may, out.must & other.must)
        return out

    def interval(self, q_lo: int, q_hi: int, skv: int, tensors: Tensors) -> tuple[int, int]:
        spans = [arg.interval(q_lo, q_hi, skv, tensors) for arg in self.args]
        return (max(lo for lo, _ in spans), min(hi for _, hi in spans))

    def __str__(self) -> str:
        # Lists and sums, here and below: Dynamo can join no generator, and cannot quote what it formatted.
        return " & ".join(["(" + str(a) + ")" if isinstance(a, Or) else str(a) for a in self.args])


@dataclass(frozen=True)
class Or(_Nary):
    """The pairs that are in at least one part."""

    def allowed(self, grid: Grid) -> torch.Tensor:
        out = self.args[0].allowed(grid)
        for arg in self.args[1:]:
            out = out | arg.allowed(grid)
        return out

    def bounds(self, tiles: TileGrid) -> Bounds:
        out = self.args[0].bounds(tiles)
        for arg in self.args[1:]:
            other = arg.bounds(tiles)
            out = Bounds(out.may | other.may, out.must | other.must)
        return out

    def interval(self, q_lo: int, q_hi: int, skv: int, tensors: Tensors) -> tuple[int, int]:
        spans = [arg.interval(q_lo, q_hi, skv, tensors) for arg in self.args]
        spans = [(max(0, lo), min(skv, hi)) for lo, hi in spans]
        spans = [(lo, hi) for lo, hi in spans if lo < hi]
        return (min(lo for lo, _ in spans), max(hi for _, hi in spans)) if spans else (0, 0)

    def __str__(self) -> str:
        return " | ".join(["(" + str(a) + ")" if isinstance(a, And) else str(a) for a in self.args])


@dataclass(frozen=True)
class Not(Mask):
    """The pairs that are not in the argument."""

    arg: Mask

    def allowed(self, grid: Grid) -> torch.Tensor:
        return ~self.arg.allowed(grid)

    def bounds(self, tiles: TileGrid) -> Bounds:
        inner = self.arg.bounds(tiles)
        return Bounds(~inner.must, ~inner.may)

    def atoms(self) -> list[Mask]:
        return [self, *self.arg.atoms()]

    def map_operands(self, replace: Callable[[str, Operand], Operand]) -> Mask:
        return Not(self.arg.map_operands(replace))

    def _digest_text(self) -> str:
        return f"Not({self.arg._digest_text()})"

    @property
    def positional(self) -> bool:  # type: ignore[override]
        return self.arg.positional

    @property
    def per_query(self) -> bool:  # type: ignore[override]
        return self.arg.per_query

    @property
    def sanitises(self) -> bool:  # type: ignore[override]
        return self.arg.sanitises

    def __str__(self) -> str:
        return "~(" + str(self.arg) + ")" if isinstance(self.arg, (And, Or)) else "~" + str(self.arg)


def operand_tensor(operand: Operand, grid: Grid) -> torch.Tensor:
    """The tensor behind an operand, on the grid's device."""
    return resolve(operand, grid.tensors, grid.keys.device)


def holding(value: Any) -> Any:
    """Field converter for atoms: a tensor or nested list becomes an operand; names and operands stay."""
    return as_operand(value)
