"""Masks as ONNX nodes, for lengths that are known only at run time: the sets of `Mask.allowed`, atom by atom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from attn_dispatch.capability import Reason
from attn_dispatch.ir import atoms
from attn_dispatch.ir.masks import And, Mask, Not, Or
from attn_dispatch.ir.operands import Held, Operand, Table
from attn_dispatch.ir.ops import END, AttentionOp
from attn_dispatch.ir.select_op import SelectOp
from attn_dispatch.ir.tensors import Ref, dtype_name
from attn_dispatch.lowering.nodes import Nodes, Value

__all__ = ["KNOWN_ATOMS", "Grid", "allowed", "key_columns", "reasons_against_mask"]


@dataclass(frozen=True)
class Grid:
    """Positions of a call, made when a mask asks for them.

    Args:
        nodes: what makes the nodes.
        batch, sq, skv: sizes, int64 ``[1]``.
        offset: key position of query row 0: a number, ``"end"``, or the name of an operand ``[B]``.
        operands: values by name, with their ranks and dtypes.
    """

    nodes: Nodes
    batch: Value
    sq: Value
    skv: Value
    offset: int | str | Ref
    operands: Mapping[str, tuple[Value, int, str]]

    @classmethod
    def of(
        cls,
        op: AttentionOp | SelectOp,
        nodes: Nodes,
        batch: Value,
        sq: Value,
        skv: Value,
        operands: Mapping[str, Value],
    ) -> Grid:
        """The grid of an op."""
        known = {name: (operands[name], len(desc.shape), desc.dtype) for name, desc in op.operands}
        return cls(nodes, batch, sq, skv, op.q_offset, known)

    @property
    def per_batch(self) -> bool:
        """Whether each sequence has an offset of its own."""
        return isinstance(self.offset, Ref)

    @cached_property
    def rows(self) -> Value:
        """Query rows, int64 ``[Sq, 1]``."""
        result: Value = self.nodes("Unsqueeze", _range(self.nodes, self.sq), self.nodes.const([1]))
        return result

    @cached_property
    def keys(self) -> Value:
        """Keys, int64 ``[1, Skv]``."""
        result: Value = self.nodes("Unsqueeze", _range(self.nodes, self.skv), self.nodes.const([0]))
        return result

    @cached_property
    def queries(self) -> Value:
        """Where the query rows stand among the keys, int64 ``[Sq, 1]``; ``[B, 1, Sq, 1]`` with an offset each."""
        n = self.nodes
        if self.offset == 0:
            return self.rows
        if isinstance(self.offset, Ref):
            value, _, dtype = self.operands[self.offset.name]
            shift = n("Reshape", n.cast(value, dtype, "int64"), n.const([-1, 1, 1, 1]))
        else:
            shift = n("Sub", self.skv, self.sq) if self.offset == END else n.const([int(self.offset)])
        result: Value = n("Add", self.rows, shift)
        return result

    def resolve(self, operand: Operand) -> tuple[Value, int, str]:
        """The value of an operand, its rank and dtype."""
        if isinstance(operand, Table):
            table = operand.tensor()
            dtype = dtype_name(table.dtype)
            return self.nodes.const(table.numpy(), dtype), table.ndim, dtype
        assert not isinstance(operand, Held), "a mask is bound before it is lowered"
        return self.operands[operand.name]

    def of_type(self, operand: Operand, dtype: str) -> tuple[Value, int]:
        """The value of an operand in a dtype, and its rank."""
        value, rank, own = self.resolve(operand)
        return self.nodes.cast(value, own, dtype), rank


def allowed(mask: Mask, grid: Grid) -> Value:
    """The pairs of a mask, bool, broadcastable to ``[B, Hq, Sq, Skv]`` from the right."""
    n = grid.nodes
    if isinstance(mask, (And, Or)):
        parts = [allowed(arg, grid) for arg in mask.args]
        return n.both(parts, type(mask).__name__)
    if isinstance(mask, Not):
        result: Value = n("Not", allowed(mask.arg, grid))
        return result
    lowered: Value = _ATOMS[type(mask)](mask, grid)
    return lowered


def reasons_against_mask(mask: Mask) -> list[Reason]:
    """Why a mask has no nodes: atoms that are not known here."""
    reasons = []
    for atom in mask.atoms():
        if type(atom) not in KNOWN_ATOMS:
            text = f"mask {type(atom).__name__} has no ONNX form"
            reasons.append(Reason("feature", atom.feature, str(atom), "the masks of attn_dispatch.masks", text=text))
    return reasons


def key_columns(op: AttentionOp) -> Mask | None:
    """The part of a mask that excludes whole keys whatever the query; None when there is none."""
    parts = op.mask.args if isinstance(op.mask, And) else (op.mask,)
    columns = [part for part in parts if isinstance(part, (atoms.Columns, atoms.KeyLengths, atoms.KeyRange))]
    return And.of(*columns) if columns else None


def _range(n: Nodes, size: Value) -> Value:
    result: Value = n("Range", n.const(0), n("Squeeze", size, n.const([0])), n.const(1))
    return result


# --- atoms of numbers ------------------------------------------------------------------------------------------------


def _full(_mask: atoms.Full, grid: Grid) -> Value:
    return grid.nodes.const([[True]], "bool")


def _causal(_mask: atoms.Causal, grid: Grid) -> Value:
    result: Value = grid.nodes("LessOrEqual", grid.keys, grid.queries)
    return result


def _window(mask: atoms.Window, grid: Grid) -> Value:
    n = grid.nodes
    distance = n("Sub", grid.keys, grid.queries)
    ends = []
    if mask.left is not None:
        ends.append(n("GreaterOrEqual", distance, n.const(-mask.left)))
    if mask.right is not None:
        ends.append(n("LessOrEqual", distance, n.const(mask.right)))
    return n.both(ends) if ends else n.const([[True]], "bool")


def _stride(mask: atoms.Stride, grid: Grid) -> Value:
    n = grid.nodes
    distance = n("Sub", grid.queries, grid.keys)
    result: Value = n("Equal", n("Mod", distance, n.const(mask.step)), n.const(0))
    return result


def _block_of(n: Nodes, positions: Value, size: int) -> Value:
    """``floor(positions / size)``; ONNX divides integers towards zero, and a position may be negative."""
    rest = n("Mod", positions, n.const(size))
    result: Value = n("Div", n("Sub", positions, rest), n.const(size))
    return result


def _same_block(mask: atoms.SameBlock, grid: Grid) -> Value:
    n = grid.nodes
    result: Value = n("Equal", _block_of(n, grid.queries, mask.size), _block_of(n, grid.keys, mask.size))
    return result


def _key_range(mask: atoms.KeyRange, grid: Grid) -> Value:
    n = grid.nodes
    at = grid.keys if mask.period is None else n("Mod", grid.keys, n.const(mask.period))
    return n.both([n("GreaterOrEqual", at, n.const(mask.start)), n("Less", at, n.const(mask.stop))])


# --- atoms of tensors ------------------------------------------------------------------------------------------------


def _over_keys(grid: Grid, operand: Operand, dtype: str) -> Value:
    """``[Skv]`` -> ``[1, Skv]``; ``[B, Skv]`` -> ``[B, 1, 1, Skv]``."""
    value, rank = grid.of_type(operand, dtype)
    result: Value = grid.nodes("Unsqueeze", value, grid.nodes.const([0] if rank == 1 else [1, 2]))
    return result


def _over_rows(grid: Grid, operand: Operand, dtype: str) -> Value:
    """``[Sq]`` -> ``[Sq, 1]``; ``[B, Sq]`` -> ``[B, 1, Sq, 1]``."""
    value, rank = grid.of_type(operand, dtype)
    result: Value = grid.nodes("Unsqueeze", value, grid.nodes.const([1] if rank == 1 else [1, 3]))
    return result


def _columns(mask: atoms.Columns, grid: Grid) -> Value:
    return _over_keys(grid, mask.kept, "bool")


def _rows(mask: atoms.Rows, grid: Grid) -> Value:
    return _over_rows(grid, mask.kept, "bool")


def _lengths(grid: Grid, operand: Operand) -> Value:
    n = grid.nodes
    result: Value = n("Reshape", grid.of_type(operand, "int64")[0], n.const([-1, 1, 1, 1]))
    return result


def _key_lengths(mask: atoms.KeyLengths, grid: Grid) -> Value:
    result: Value = grid.nodes("Less", grid.keys, _lengths(grid, mask.lengths))
    return result


def _query_lengths(mask: atoms.QueryLengths, grid: Grid) -> Value:
    result: Value = grid.nodes("Less", grid.rows, _lengths(grid, mask.lengths))
    return result


def _segments(mask: atoms.Segments, grid: Grid) -> Value:
    result: Value = grid.nodes("Equal", _over_rows(grid, mask.queries, "int64"), _over_keys(grid, mask.keys, "int64"))
    return result


def _block_table(mask: atoms.BlockTable, grid: Grid) -> Value:
    n = grid.nodes
    table, rank = grid.of_type(mask.table, "bool")
    table = n("Unsqueeze", table, n.const([0])) if rank == 2 else table  # [H|1, nq, nk]
    counts = [n("Shape", table, start=d, end=d + 1) for d in (1, 2)]
    q_block = _block_of(n, grid.queries, mask.block)
    k_block = _block_of(n, grid.keys, mask.block)
    inside = []
    for block, count in ((q_block, counts[0]), (k_block, counts[1])):
        inside += [n("GreaterOrEqual", block, n.const(0)), n("Less", block, count)]

    def index(block: Value, count: Value, *shape: Value | int) -> Value:
        low = n("Max", block, n.const([0]))
        result: Value = n("Reshape", n("Min", low, n("Sub", count, n.const([1]))), n.shape(*shape))
        return result

    if grid.per_batch:
        rows = n("Gather", table, index(q_block, counts[0], -1, grid.sq), axis=1)  # [H, B, Sq, nk]
        rows = n("Transpose", rows, perm=[1, 0, 2, 3])
    else:
        rows = n("Gather", table, index(q_block, counts[0], grid.sq), axis=1)  # [H, Sq, nk]
    picked = n("Gather", rows, index(k_block, counts[1], grid.skv), axis=-1)
    return n.both([picked, *inside])


def _selected(mask: atoms.Selected, grid: Grid) -> Value:
    """Each row's listed keys; pads (-1) go into one slot more, which is cut off."""
    n = grid.nodes
    indices, rank = grid.of_type(mask.indices, "int64")
    indices = n("Unsqueeze", indices, n.const([1])) if rank == 3 else indices  # [B, H|1, Sq, K]
    known = n("And", n("GreaterOrEqual", indices, n.const(0)), n("Less", indices, grid.skv))
    slots = n("Where", known, indices, grid.skv)
    spare = n("Concat", n("Shape", indices, start=0, end=3), n("Add", grid.skv, n.const([1])), axis=0)
    empty = n("Expand", n.const(False, "bool"), spare)
    chosen = n("ScatterElements", empty, slots, n("Expand", n.const(True, "bool"), n("Shape", slots)), axis=3)
    return n.slice(chosen, 0, grid.skv, 3)


def _dense(mask: atoms.Dense, grid: Grid) -> Value:
    return grid.of_type(mask.mask, "bool")[0]


_ATOMS: dict[type, Callable[[Any, Grid], Value]] = {
    atoms.Full: _full,
    atoms.Causal: _causal,
    atoms.Window: _window,
    atoms.Stride: _stride,
    atoms.SameBlock: _same_block,
    atoms.KeyRange: _key_range,
    atoms.Columns: _columns,
    atoms.Rows: _rows,
    atoms.KeyLengths: _key_lengths,
    atoms.QueryLengths: _query_lengths,
    atoms.Segments: _segments,
    atoms.BlockTable: _block_table,
    atoms.Selected: _selected,
    atoms.Dense: _dense,
}
KNOWN_ATOMS = frozenset({*_ATOMS, Not})
