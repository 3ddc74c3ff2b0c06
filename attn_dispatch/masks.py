"""Masks by the names people use, and the atoms to build others. Combine with ``&``, ``|`` and ``~``.

Example:
    >>> from attn_dispatch import masks
    >>> print(masks.sliding_window(256) | masks.columns(prefix=4) & masks.causal())
    (Causal & KeyRange(0, 4, None)) | (Causal & Window(255, None))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    "block_table",
    "causal",
    "chunked",
    "columns",
    "dilated",
    "documents",
    "fixed",
    "from_tensor",
    "full",
    "global_tokens",
    "key_lengths",
    "local",
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


def local(size: int) -> Mask:
    """The ``size`` keys up to the query's own, which is one of them (Sparse Transformer's local heads)."""
    return sliding_window(size)


def dilated(count: int, step: int) -> Mask:
    """Keys at distance ``m * step``, m from ``-count`` to ``count`` (Longformer's dilation counts keys, not span).

    Example:
        >>> dilated(2, 2).dense(1, 9, q_offset=4).nonzero()[:, 1].tolist()
        [0, 2, 4, 6, 8]
    """
    _at_least("count", count, 0)
    _at_least("step", step, 1)
    return Window(count * step, count * step) & Stride(step)


def strided(stride: int) -> Mask:
    """Causal keys at multiples of ``stride`` before the query (Sparse Transformer, Child et al. 2019)."""
    _at_least("stride", stride, 1)
    return Causal() & Stride(stride)


def fixed(block: int, summary: int) -> Mask:
    """Causal: the query's own block, and the last ``summary`` keys of every block (Sparse Transformer, fixed).

    Args:
        block: length l of a block.
        summary: number c of summary columns, ``0 <= c <= l``.

    Example:
        >>> fixed(3, 1).dense(6, 6).int().tolist()[5]
        [0, 0, 1, 1, 1, 1]
    """
    _at_least("block", block, 1)
    if not 0 <= summary <= block:
        raise InputError(f"summary columns must be in [0, block] = [0, {block}], got {summary}")
    return Causal() & (SameBlock(block) | KeyRange(block - summary, block, block))


def chunked(size: int) -> Mask:
    """Causal attention inside chunks of ``size`` (Llama 4)."""
    return Causal() & SameBlock(size)


def global_tokens(keep: torch.Tensor) -> Mask:
    """Tokens that see every token and are seen by every token: bool ``[S]`` or ``[B, S]``, True = global."""
    _marks("keep", keep)
    return Columns(keep) | Rows(keep)  # type: ignore[arg-type]


def longformer(
    side: int,
    global_keys: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    *,
    global_rows: bool = True,
) -> Mask:
    """A window of ``side`` to both sides, global tokens that see all and are seen by all, and padding.

    Args:
        side: one-sided width, so ``2 * side + 1`` keys (half of Hugging Face's ``attention_window``).
        global_keys: bool ``[S]`` or ``[B, S]``, the global tokens.
        valid: bool ``[S]`` or ``[B, S]``, False for padded keys.
        global_rows: False when global tokens are only seen by all: for separate global projections, whose rows are
            an attention of their own (`attn_dispatch.nn.LongformerSelfAttention`).

    Source: Beltagy et al. 2020; tied projections.
    """
    _at_least("side", side, 0)
    mask: Mask = Window(side, side)
    if global_keys is not None:
        _marks("global_keys", global_keys)
        mask = mask | Columns(global_keys)  # type: ignore[arg-type]
        mask = mask | Rows(global_keys) if global_rows else mask  # type: ignore[arg-type]
    if valid is None:
        return mask
    _marks("valid", valid)
    return mask & Columns(valid)  # type: ignore[arg-type]


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
        valid: bool ``[S]`` or ``[B, S]``, False for padded keys.

    Source: Zaheer et al. 2020.
    """
    for name, value, least in (("length", length, 1), ("block", block, 1), ("heads", heads, 1)):
        _at_least(name, value, least)
    _at_least("random_blocks", random_blocks, 0)
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
    if valid is None:
        return mask
    _marks("valid", valid)
    return mask & Columns(valid)  # type: ignore[arg-type]


def block_table(block: int, table: torch.Tensor | Sequence[Any], key_blocks: int | None = None) -> Mask:
    """Any pattern of blocks: which key blocks each block of query rows attends.

    Args:
        block: block size, of rows and of keys.
        table: a layout ``[nq, nk]`` or ``[Hq, nq, nk]`` of booleans (or 0 and 1, as DeepSpeed writes it); or, with
            ``key_blocks``, the numbers of the key blocks of each row, ``[nq, w]`` or ``[Hq, nq, w]``, -1 for none.
        key_blocks: how many key blocks there are, when ``table`` lists numbers.

    Raises:
        InputError: a table of another shape or kind, a number that is out of range or listed twice in a row.

    Example:
        >>> lists = [[0, -1], [0, 1]]
        >>> block_table(2, lists, key_blocks=2).dense(4, 4).int().tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    """
    _at_least("block", block, 1)
    values = torch.as_tensor(table)
    if values.ndim not in (2, 3) or values.is_floating_point():
        problem = f"a block table is [nq, nk] or [Hq, nq, nk] of booleans or integers, got {list(values.shape)}"
        raise InputError(f"{problem} {values.dtype}")
    if key_blocks is not None:
        values = _listed_blocks(values, key_blocks)
    elif values.dtype != torch.bool and bool(((values != 0) & (values != 1)).any()):
        problem = f"a layout is of 0 and 1, and the table has {int(values[(values != 0) & (values != 1)][0])}"
        raise InputError(problem, remedy="key_blocks=n when the table lists the numbers of key blocks")
    return BlockTable(block, values.bool())  # type: ignore[arg-type]


def _listed_blocks(numbers: torch.Tensor, key_blocks: int) -> torch.Tensor:
    """A layout ``[.., nq, nk]`` from lists of block numbers."""
    if numbers.dtype == torch.bool:
        raise InputError("key_blocks= goes with a table of block numbers, and this one is of booleans")
    wrong = (numbers < -1) | (numbers >= key_blocks)
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        problem = f"block number {int(numbers[tuple(at)])} at {at} is not in [0, {key_blocks}), nor -1 for none"
        raise InputError(problem)
    counts = torch.zeros((*numbers.shape[:-1], key_blocks + 1), dtype=torch.int64, device=numbers.device)
    counts.scatter_add_(-1, torch.where(numbers < 0, key_blocks, numbers).long(), torch.ones_like(numbers).long())
    counts = counts[..., :key_blocks]
    if bool((counts > 1).any()):
        *row, number = (counts > 1).nonzero()[0].tolist()
        raise InputError(
            f"block number {number} is listed {int(counts[(*row, number)])} times in row {row}",
            remedy="a mask is a set: list each block once",
        )
    return counts > 0


def _at_least(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name} must be an integer >= {least}, got {value!r}")


def _marks(name: str, marks: torch.Tensor) -> None:
    if not isinstance(marks, torch.Tensor) or marks.dtype != torch.bool or marks.ndim not in (1, 2):
        got = f"{list(marks.shape)} {marks.dtype}" if isinstance(marks, torch.Tensor) else type(marks).__name__
        raise InputError(f"{name} must be a bool tensor [S] or [B, S], got {got}", remedy=f"{name}.bool()")


def prefix_lm(prefix: int | torch.Tensor) -> Mask:
    """Causal, and every query sees the first ``prefix`` keys; a tensor ``[B]`` gives a prefix per batch.

    Example:
        >>> prefix_lm(torch.tensor([0, 2])).dense(2, 3)[:, 0].int().tolist()
        [[[1, 0, 0], [1, 1, 0]], [[1, 1, 0], [1, 1, 0]]]
    """
    return Causal() | (KeyLengths(prefix) if isinstance(prefix, torch.Tensor) else KeyRange(0, prefix))  # type: ignore[arg-type]


def columns(prefix: int | None = None, *, keep: torch.Tensor | None = None) -> Mask:
    """Keys that every query may attend: the first ``prefix``, or where ``keep`` (``[Skv]``/``[B, Skv]``) is True."""
    if (prefix is None) == (keep is None):
        raise ValueError("give either prefix= or keep=")
    if isinstance(prefix, torch.Tensor):
        raise InputError("prefix is a number of keys, got a tensor", remedy="masks.columns(keep=tensor)")
    return KeyRange(0, prefix) if prefix is not None else Columns(keep)  # type: ignore[arg-type]


def documents(
    cu_seqlens: torch.Tensor | Sequence[int],
    cu_seqlens_k: torch.Tensor | Sequence[int] | None = None,
    *,
    prefix: torch.Tensor | Sequence[int] | int | None = None,
    chunk: int | None = None,
) -> Mask:
    """Packed documents: a query attends only its own document (combine with `causal`).

    Args:
        cu_seqlens: cumulative lengths ``[0, n1, n1 + n2, ...]`` as FlashAttention's varlen functions take them.
        cu_seqlens_k: those of the keys, when they differ. Positions are those of the packed rows: where a document
            has other keys than queries, causal masks belong to `dispatch.varlen_attention`.
        prefix: with causal queries, how many first keys of its document each query sees: `prefix_lm` per document, an
            integer or one for each. The mask is then causal by itself.
        chunk: attend only within chunks of this many rows, counted from the document's first row.

    Raises:
        ValueError: they do not start at 0 or they fall; there are other documents of queries than of keys.

    Example:
        >>> documents([0, 2, 5], prefix=2).dense(5, 5).int().tolist()[2:]
        [[0, 0, 1, 1, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    """
    ids, at = _document_rows(cu_seqlens, "cu_seqlens")
    key_ids, key_at = (ids, at) if cu_seqlens_k is None else _document_rows(cu_seqlens_k, "cu_seqlens_k")
    count = len(torch.as_tensor(cu_seqlens)) - 1
    if cu_seqlens_k is not None and len(torch.as_tensor(cu_seqlens_k)) - 1 != count:
        others = len(torch.as_tensor(cu_seqlens_k)) - 1
        raise ValueError(f"cu_seqlens has {count} documents and cu_seqlens_k {others}; they must be equally many")
    keep = None
    if prefix is not None:
        each = torch.as_tensor(prefix, device=key_ids.device)
        if each.is_floating_point() or tuple(each.shape) not in ((), (count,)):
            raise InputError(f"prefix must be an integer or {count} of them, one for each document, got {prefix}")
        each = each.expand(count)
        keep = Causal() | Columns(key_at < each[key_ids])  # type: ignore[arg-type]
    if chunk is not None:
        _at_least("chunk", chunk, 1)
        most = 1 + max(int(x.max()) if x.numel() else 0 for x in (at, key_at)) // chunk
        ids, key_ids = ids * most + at // chunk, key_ids * most + key_at // chunk
    mask = Segments(ids, ids if cu_seqlens_k is None else key_ids)  # type: ignore[arg-type]
    return mask if keep is None else mask & keep


def _document_rows(cu_seqlens: torch.Tensor | Sequence[int], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The document of each row, and its position there."""
    ends = torch.as_tensor(cu_seqlens)
    if ends.ndim != 1 or ends.numel() < 2 or int(ends[0]) != 0 or bool((ends.diff() < 0).any()):
        raise ValueError(f"{name} must be [0, ...] and never fall, got {ends.tolist()}")
    lengths = ends.diff()
    ids = torch.repeat_interleave(torch.arange(len(lengths), device=ends.device), lengths)
    return ids, torch.arange(len(ids), device=ends.device) - ends[:-1][ids]


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
