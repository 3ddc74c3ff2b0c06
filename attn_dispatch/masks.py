"""Masks by the names people use, and the atoms to build others. Combine with ``&``, ``|`` and ``~``.

Example:
    >>> from attn_dispatch import masks
    >>> print(masks.sliding_window(256) | masks.columns(prefix=4) & masks.causal())
    (Causal & KeyRange(0, 4, None)) | (Causal & Window(255, None))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attn_dispatch.errors import InputError, InputTypeError
from attn_dispatch.ir.atoms import (
    BlockTable,
    Causal,
    Columns,
    Dense,
    Full,
    KeyLengths,
    KeyRange,
    QueryLengths,
    Rows,
    SameBlock,
    Segments,
    Selected,
    Stride,
    Window,
)
from attn_dispatch.ir.listed import first_of_each
from attn_dispatch.ir.mask_text import parse_mask
from attn_dispatch.ir.masks import EMPTY, FULL, PARTIAL, Mask
from attn_dispatch.ir.recognise import recognise

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "BlockTable",
    "Causal",
    "Columns",
    "Dense",
    "Full",
    "KeyLengths",
    "KeyRange",
    "Mask",
    "QueryLengths",
    "Rows",
    "SameBlock",
    "Segments",
    "Selected",
    "Stride",
    "Window",
    "bigbird",
    "causal",
    "chunked",
    "columns",
    "dilated",
    "documents",
    "fixed",
    "from_tensor",
    "full",
    "key_lengths",
    "longformer",
    "parse_mask",
    "prefix_lm",
    "selected",
    "sliding_window",
    "strided",
    "window",
]


def full() -> Mask:
    """Every query attends every key."""
    return Full()


def causal() -> Mask:
    """A query attends the keys up to its own position."""
    return Causal()


def window(left: int | None, right: int | None) -> Mask:
    """Keys from ``left`` before to ``right`` after the query, both ends included; None or -1 is unbounded.

    Example:
        >>> window(3, 0).dense(1, 6, q_offset=5).int().tolist()
        [[0, 0, 1, 1, 1, 1]]
    """
    ends = [None if end is None or end == -1 else end for end in (left, right)]
    return Full() if ends == [None, None] else Window(*ends)


def sliding_window(size: int) -> Mask:
    """Causal window of ``size`` keys, the query's own included (Mistral's ``sliding_window``)."""
    if size < 1:
        raise ValueError(f"a sliding window holds at least the query's own key: size must be >= 1, got {size}")
    return Causal() & Window(size - 1, None)


def dilated(count: int, step: int) -> Mask:
    """Keys at distance ``m * step``, m from ``-count`` to ``count`` (Longformer's dilation counts keys, not span).

    Example:
        >>> dilated(2, 2).dense(1, 9, q_offset=4).nonzero()[:, 1].tolist()
        [0, 2, 4, 6, 8]
    """
    return Window(count * step, count * step) & Stride(step)


def strided(stride: int) -> Mask:
    """Causal keys at multiples of ``stride`` before the query (Sparse Transformer, Child et al. 2019)."""
    return Causal() & Stride(stride)


def fixed(block: int, summary: int) -> Mask:
    """Causal: the query's own block, and the last ``summary`` keys of every block (Sparse Transformer, fixed).

    Args:
        block: length l of a block.
        summary: number c of summary columns, ``0 <= c <= l``.
    """
    return Causal() & (SameBlock(block) | KeyRange(block - summary, block, block))


def chunked(size: int) -> Mask:
    """Causal attention inside chunks of ``size`` (Llama 4)."""
    return Causal() & SameBlock(size)


def longformer(side: int, global_keys: torch.Tensor | None = None, valid: torch.Tensor | None = None) -> Mask:
    """A window of ``side`` to both sides, global tokens that see all and are seen by all, and padding.

    Args:
        side: one-sided width, so ``2 * side + 1`` keys.
        global_keys: bool ``[S]`` or ``[B, S]``, the global tokens.
        valid: bool ``[B, S]``, False for padded keys.

    Source: Beltagy et al. 2020; tied projections.
    """
    mask: Mask = Window(side, side)
    if global_keys is not None:
        mask = mask | Columns(global_keys) | Rows(global_keys)  # type: ignore[arg-type]
    return mask & Columns(valid) if valid is not None else mask  # type: ignore[arg-type]


def bigbird(
    length: int,
    block: int = 64,
    random_blocks: int = 3,
    seed: int = 0,
    heads: int = 1,
    valid: torch.Tensor | None = None,
) -> Mask:
    """BigBird (ITC): three window blocks, first and last block global, and random blocks drawn once from ``seed``.

    The table is drawn here with a private generator, is stored in the mask and counts by value; the global RNG does
    not move. Random blocks are drawn without repeats from the blocks that are not attended anyway.

    Args:
        length: sequence length; blocks are counted from it.
        block: block size; random_blocks: r per block row; heads: number of different tables.

    Source: Zaheer et al. 2020.
    """
    n = -(-length // block)
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(heads, n, n, dtype=torch.bool)
    table[:, [0, n - 1], :] = True
    table[:, :, [0, n - 1]] = True
    for row in range(1, n - 1):
        table[:, row, row - 1 : row + 2] = True
        for head in range(heads):
            free = (~table[head, row]).nonzero()[:, 0]
            table[head, row, free[torch.randperm(len(free), generator=generator)[:random_blocks]]] = True
    mask: Mask = BlockTable(block, table if heads > 1 else table[0])  # type: ignore[arg-type]
    return mask & Columns(valid) if valid is not None else mask  # type: ignore[arg-type]


def prefix_lm(prefix: int) -> Mask:
    """Causal, and every query sees the first ``prefix`` keys."""
    return Causal() | KeyRange(0, prefix)


def columns(prefix: int | None = None, *, keep: torch.Tensor | None = None) -> Mask:
    """Keys that every query may attend: the first ``prefix``, or where ``keep`` (``[Skv]``/``[B, Skv]``) is True."""
    if (prefix is None) == (keep is None):
        raise ValueError("give either prefix= or keep=")
    return KeyRange(0, prefix) if prefix is not None else Columns(keep)  # type: ignore[arg-type]


def documents(cu_seqlens: torch.Tensor | Sequence[int]) -> Mask:
    """Packed documents: a query attends only its own document (combine with `causal`).

    Args:
        cu_seqlens: cumulative lengths ``[0, n1, n1 + n2, ...]`` as FlashAttention's varlen functions take them.

    Raises:
        ValueError: they do not start at 0 or they fall.
    """
    ends = torch.as_tensor(cu_seqlens)
    if ends.ndim != 1 or ends.numel() < 2 or int(ends[0]) != 0 or bool((ends.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must be [0, ...] and never fall, got {ends.tolist()}")
    lengths = ends.diff()
    ids = torch.repeat_interleave(torch.arange(len(lengths), device=ends.device), lengths)
    return Segments(ids, ids)  # type: ignore[arg-type]


def key_lengths(lengths: torch.Tensor | Sequence[int]) -> Mask:
    """The first ``lengths[b]`` keys of each batch (right padding)."""
    return KeyLengths(torch.as_tensor(lengths))  # type: ignore[arg-type]


def selected(indices: torch.Tensor) -> Mask:
    """Keys by index per query (DSA): integers ``[B, Sq, K]``, or ``[B, Hq, Sq, K]`` for a selection per head.

    -1 is padding. `dispatch.select` makes such indices, and one selection serves every layer that shares it. The list
    is a set: a key listed twice is a mistake, which is looked for here when the indices are on the CPU. Indices beyond
    the keys are refused by `attention`, before anything runs. The atom ``Selected(indices)`` takes repeats and counts
    them once.

    Raises:
        InputError, InputTypeError: a key is listed twice; not integers; a wrong rank.

    Example:
        >>> selected(torch.tensor([[[2, 0, -1]]])).dense(1, 4).int().tolist()
        [[[[1, 0, 1, 0]]]]
    """
    if isinstance(indices, torch.Tensor):
        _check_selected(indices)
    return Selected(indices)  # type: ignore[arg-type]


def _check_selected(indices: torch.Tensor) -> None:
    if indices.dtype not in (torch.int32, torch.int64):
        raise InputTypeError(f"selected indices must be int32 or int64, got {indices.dtype}")
    if indices.ndim not in (3, 4):
        remedy = "[B, Sq, K], or [B, Hq, Sq, K] for a selection per head"
        raise InputError(f"selected indices must have 3 or 4 dimensions, got {list(indices.shape)}", remedy=remedy)
    if type(indices) is not torch.Tensor or indices.device.type != "cpu" or torch.compiler.is_compiling():
        return  # looking would wait for the device, or there is nothing to look at
    if torch._C._functorch.is_functorch_wrapped_tensor(indices):
        return
    repeated = (indices >= 0) & ~first_of_each(indices)
    if bool(repeated.any()):
        at = repeated.nonzero()[0].tolist()
        raise InputError(
            f"key {int(indices[tuple(at)])} is selected twice in batch {at[0]}, row {at[-2]}: a selection is a set",
            remedy="keep each key once and fill with -1, or masks.Selected(indices), which counts repeats once",
        )


def from_tensor(mask: torch.Tensor) -> Mask:
    """The simplest mask equal to a boolean tensor: Full, KeyRange, Causal, Window, KeyLengths, Columns, BlockTable.

    Positions are the tensor's own (query row i at key position i), so use the result with ``q_offset=0``. A causal
    pattern with another offset stays `Dense` here; `attention` recognises it by itself and sets the offset.

    Example:
        >>> from_tensor(torch.ones(8, 8, dtype=torch.bool).tril())
        Causal()
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"a mask tensor is bool (True = attend), got {mask.dtype}; a float tensor is a bias")
    found, offset = recognise(mask)
    return found if offset == 0 else Dense(mask)  # type: ignore[arg-type]
