"""Recognise the pattern of a boolean mask tensor: all true, causal, window, padding, blocks.

Recognition is exact: what is returned allows the same pairs as the tensor, or it is `Dense`. It reads the tensor every
time it is asked and remembers nothing, so a mask that changed in place is never mistaken for its past self.

How: each row of most masks is one interval of keys. A guess is made from a few elements, the guess is written out
as interval ends per row, and the tensor is compared with it in one pass.
"""

from __future__ import annotations

import torch

from attn_dispatch.ir.atoms import BlockTable, Causal, Columns, Dense, Full, KeyLengths, KeyRange, Window
from attn_dispatch.ir.masks import Mask

__all__ = ["recognise"]

_BLOCKS = (128, 64, 32, 16)


def recognise(mask: torch.Tensor) -> tuple[Mask, int]:
    """The mask as an expression, and the q_offset at which it is meant.

    Args:
        mask: bool, broadcastable to ``[B, H, Sq, Skv]``, at least two dimensions, on the CPU.

    Returns:
        ``(mask, q_offset)``; ``(Dense(mask), 0)`` when nothing simpler is equal to it.

    Example:
        >>> recognise(torch.ones(4, 6, dtype=torch.bool).tril(2))
        (Causal(), 2)
    """
    if mask.ndim < 2 or mask.numel() == 0:
        return Dense(mask), 0  # type: ignore[arg-type]
    plane = _one_plane(mask)
    if mask.shape[-2] == 1:
        return _recognise_columns(mask), 0
    if plane is None:
        return Dense(mask), 0  # type: ignore[arg-type]
    first, last = _probe_row(plane[0]), _probe_row(plane[-1])
    for guess in (_guess_full, _guess_interval_rows, _guess_causal, _guess_window):
        found = guess(plane, first, last)
        if found is not None:
            return found
    return _recognise_blocks(plane) or Dense(mask), 0  # type: ignore[arg-type]


def _one_plane(mask: torch.Tensor) -> torch.Tensor | None:
    """The ``[Sq, Skv]`` plane that all batches and heads share, or None when they may differ."""
    while mask.ndim > 2:
        if mask.shape[0] != 1 and mask.stride(0) != 0:
            return None
        mask = mask[0]
    return mask


def _probe_row(row: torch.Tensor) -> tuple[int, int] | None:
    """(first, one past the last) allowed key of a row that is one interval; (0, 0) when empty; None otherwise."""
    count = int(row.sum())
    if count == 0:
        return (0, 0)
    start = int(row.to(torch.uint8).argmax())
    return (start, start + count) if bool(row[start : start + count].all()) else None


def _is_band(plane: torch.Tensor, lower: int | None, upper: int | None) -> bool:
    """Whether exactly the keys ``i + lower <= j <= i + upper`` are True. By row blocks: a wrong guess ends early."""
    for start in range(0, plane.shape[0], 256):
        rows = plane[start : start + 256]
        # tril/triu of a byte tensor: 4 times faster than comparing int64 positions, and this is on the call's path
        want = torch.ones_like(rows, memory_format=torch.contiguous_format)
        want = want.tril_(start + upper) if upper is not None else want
        want = want.triu_(start + lower) if lower is not None else want
        if not _same_bytes(rows, want):
            return False
    return True


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two boolean tensors are equal; eight elements at a time where possible (torch compares single bytes)."""
    if a.is_contiguous() and a.storage_offset() % 8 == 0 and a.numel() % 8 == 0:
        return torch.equal(a.view(-1).view(torch.int64), b.view(-1).view(torch.int64))
    return torch.equal(a, b)


Probe = tuple[int, int] | None


def _guess_full(plane: torch.Tensor, first: Probe, last: Probe) -> tuple[Mask, int] | None:
    whole = (0, plane.shape[1])
    return (Full(), 0) if first == whole and last == whole and bool(plane.all()) else None


def _guess_interval_rows(plane: torch.Tensor, first: Probe, last: Probe) -> tuple[Mask, int] | None:
    """Every row allows the same interval of keys: padding shared by the batch."""
    if first is None or first != last:
        return None
    return (KeyRange(*first), 0) if torch.equal(plane, plane[:1].expand_as(plane)) else None


def _guess_causal(plane: torch.Tensor, first: Probe, last: Probe) -> tuple[Mask, int] | None:
    if first is None or first[0] != 0 or first[1] == 0 or first[1] > plane.shape[1]:
        return None
    offset = first[1] - 1
    return (Causal(), offset) if _is_band(plane, None, offset) else None


def _guess_window(plane: torch.Tensor, first: Probe, last: Probe) -> tuple[Mask, int] | None:
    """``Window(left, right)`` at offset 0, ends taken from the middle row, where neither end is cut by the border."""
    sq = plane.shape[0]
    middle = _probe_row(plane[sq // 2])
    if middle is None or middle[1] == 0:
        return None
    left, right = sq // 2 - middle[0], middle[1] - 1 - sq // 2
    if left < 0 or right < 0:
        return None
    if not _is_band(plane, -left, right):
        return None
    return (Causal() & Window(left, None) if right == 0 else Window(left, right)), 0


def _recognise_columns(mask: torch.Tensor) -> Mask:
    """Masks over keys alone: ``[..., 1, Skv]``, per batch or shared."""
    if mask.ndim == 2 or mask.shape[:-1].numel() == 1:
        row = mask.reshape(-1)
        if bool(row.all()):
            return Full()
        probe = _probe_row(row)
        return KeyRange(*probe) if probe is not None else Columns(row)  # type: ignore[arg-type]
    if mask.ndim == 4 and mask.shape[1] == 1:
        rows = mask[:, 0, 0]
        if bool(rows.all()):
            return Full()
        lengths = rows.sum(-1)
        if torch.equal(rows, torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]):
            return KeyLengths(lengths)  # type: ignore[arg-type]
        return Columns(rows)  # type: ignore[arg-type]
    return Dense(mask)  # type: ignore[arg-type]


def _recognise_blocks(plane: torch.Tensor) -> Mask | None:
    """A pattern that is constant on square blocks, when at least a quarter of them is empty."""
    sq, skv = plane.shape
    for block in _BLOCKS:
        if sq < 2 * block or skv < 2 * block:
            continue
        table = plane[::block, ::block]
        if table.float().mean() > 0.75:
            continue
        corner = plane[:block, :block]
        if bool(corner.any()) != bool(corner.all()):
            continue
        whole = table.repeat_interleave(block, 0)[:sq].repeat_interleave(block, 1)[:, :skv]
        if torch.equal(whole, plane):
            return BlockTable(block, table.contiguous())  # type: ignore[arg-type]
    return None
