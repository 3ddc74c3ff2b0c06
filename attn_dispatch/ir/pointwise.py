"""A mask at chosen pairs: what gathers of rows and keys need, without the ``[Sq, Skv]`` that `Mask.dense` writes.

The grid's ``rows``, ``queries`` and ``keys`` are four-dimensional index tensors that broadcast to ``[B, P, R, K]``:
batch, heads (or any other group), rows, keys. Keys and rows beyond the tensors of a mask read the nearest element, so
a caller that pads its indices excludes the pads himself, by a `KeyRange` for instance.
"""

from __future__ import annotations

import torch

from attn_dispatch.ir.atoms import BlockTable, Columns, Dense, Rows, Segments, Selected
from attn_dispatch.ir.masks import And, Grid, Mask, Not, Or, Tensors, operand_tensor

__all__ = ["allowed_at", "is_pointwise", "kept_columns"]


def is_pointwise(mask: Mask) -> bool:
    """Whether `allowed_at` knows every atom: all but those that list their pairs themselves."""
    return not any(isinstance(atom, (Dense, Selected)) for atom in mask.atoms())


def allowed_at(mask: Mask, grid: Grid, heads: torch.Tensor | None = None) -> torch.Tensor:
    """Which pairs of a four-dimensional grid attend, broadcastable to ``[B, P, R, K]``.

    Args:
        heads: the query head of each entry of the second dimension, for tables per head; the default is all heads.
    """
    if isinstance(mask, (And, Or)):
        out = allowed_at(mask.args[0], grid, heads)
        for arg in mask.args[1:]:
            other = allowed_at(arg, grid, heads)
            out = out & other if isinstance(mask, And) else out | other
        return out
    if isinstance(mask, Not):
        return ~allowed_at(mask.arg, grid, heads)
    if isinstance(mask, Columns):
        return _look_up(operand_tensor(mask.kept, grid).bool(), grid.keys)
    if isinstance(mask, Rows):
        return _look_up(operand_tensor(mask.kept, grid).bool(), grid.rows)
    if isinstance(mask, Segments):
        q_ids = _look_up(operand_tensor(mask.queries, grid), grid.rows)
        return q_ids == _look_up(operand_tensor(mask.keys, grid), grid.keys)
    if isinstance(mask, BlockTable):
        return _in_table(mask, grid, heads)
    if isinstance(mask, (Dense, Selected)):
        raise TypeError(f"{type(mask).__name__} lists its pairs itself; it cannot be asked for others")
    out = mask.allowed(grid)
    return out[(None,) * (4 - out.ndim)]


def kept_columns(mask: Mask, skv: int, tensors: Tensors, device: torch.device) -> torch.Tensor:
    """Which keys a mask over keys alone keeps, bool ``[B|1, Skv]``."""
    keys = torch.arange(skv, device=device).view(1, 1, 1, -1)
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=device)
    kept = allowed_at(mask, Grid(zero, zero, keys, tensors, 1, skv))
    return kept.expand(*kept.shape[:3], skv)[:, 0, 0]


def _look_up(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``values [S]`` or ``[B, S]`` at a four-dimensional index."""
    index = index.clamp(0, max(values.shape[-1] - 1, 0))
    if values.ndim == 1 or values.shape[0] == 1:
        return values.reshape(-1)[index]
    return values[torch.arange(values.shape[0], device=values.device).view(-1, 1, 1, 1), index]


def _in_table(mask: BlockTable, grid: Grid, heads: torch.Tensor | None) -> torch.Tensor:
    table = operand_tensor(mask.table, grid).bool()
    nq, nk = table.shape[-2:]
    row = torch.div(grid.queries, mask.block, rounding_mode="floor")
    column = torch.div(grid.keys, mask.block, rounding_mode="floor")
    inside = (row >= 0) & (row < nq) & (column < nk)
    row, column = row.clamp(0, max(nq - 1, 0)), column.clamp(0, max(nk - 1, 0))
    if table.ndim == 2:
        return table[row, column] & inside
    if heads is None or table.shape[0] == 1:
        heads = torch.arange(table.shape[0], device=table.device).view(1, -1, 1, 1)
    return table[heads, row, column] & inside
