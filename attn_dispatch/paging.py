"""Paged keys and values: the rows that a block table stands for, gathered before the op is described.

A cache of pages is ``[num_pages, Hkv, page, D]``; with ``layout="bshd"`` it is ``[num_pages, page, Hkv, D]``, as
FlashAttention has it. Key ``j`` of sequence ``b`` lies in row ``j % page`` of page ``block_table[b, j // page]``. Only
the slots below
``ceil(key_lengths[b] / page)`` mean anything: the others are never followed, and what lies behind the true length in
the last page is never seen, NaN or not. On the CPU the rows end at the longest true length; on a GPU, and while a graph
is traced, at the table's capacity, since reading the lengths would wait for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from attn_dispatch import shapes
from attn_dispatch.errors import InputError, InputTypeError
from attn_dispatch.ir.atoms import Causal
from attn_dispatch.ir.masks import Mask
from attn_dispatch.ir.tensors import dtype_name, has_no_values
from attn_dispatch.variants import Retention, Stateful

__all__ = ["Rows", "page_in"]

_INTEGERS = (torch.int32, torch.int64)


class Rows(NamedTuple):
    """The arguments of the same call over contiguous rows; key and value have at most ``capacity`` of them."""

    key: torch.Tensor
    value: torch.Tensor
    attn_mask: Any  # as given, but for a tensor over the whole capacity, which is cut
    bias: Any
    q_offset: Any


def page_in(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_table: Any,
    key_lengths: Any,
    attn_mask: Any = None,
    bias: Any = None,
    is_causal: bool = False,
    window: Any = None,
    q_offset: Any = None,
    layout: str = "bhsd",
    variant: Any = None,
) -> Rows:
    """Gather pages into rows, and write out what else of the call depends on them.

    Masks with positions, ``window`` and ALiBi count from each sequence's own last key: ``q_offset`` becomes
    ``key_lengths - Sq``, as in FlashAttention. A mask or bias tensor is given for the table's whole capacity,
    ``max_pages * page`` keys.

    Args:
        query: ``[B, Hq, Sq, D]``. key, value: pages. block_table: integers ``[B, max_pages]``. key_lengths: ``[B]``.
        attn_mask, bias, is_causal, window, q_offset, layout, variant: as `dispatch.attention` gets them.

    Raises:
        InputError, InputTypeError: a table of the wrong shape or dtype, a page that does not exist in a slot that is
            used, lengths beyond the capacity, no lengths, ``is_causal`` without ``q_offset``.

    Example:
        >>> pages = torch.randn(5, 2, 4, 8)  # five pages of four keys, two heads
        >>> table = torch.tensor([[3, 1], [0, -1]], dtype=torch.int32)
        >>> page_in(torch.randn(2, 2, 1, 8), pages, pages, table, torch.tensor([6, 3])).key.shape
        torch.Size([2, 2, 6, 8])
    """
    asked = f"{shapes.asked(query, key, value)}   block_table {_kind(block_table)}"
    lengths = _check(query, key, value, block_table, key_lengths, layout, asked)
    if is_causal and q_offset is None:
        problem = "is_causal counts from key 0, and a paged cache holds the keys before the query too"
        remedy = "attn_mask=masks.causal() (the last query sees the last key), or q_offset=key_lengths - Sq"
        raise InputError(problem, asked=asked, remedy=remedy)
    page = key.shape[1] if layout == "bshd" else key.shape[2]
    capacity = block_table.shape[1] * page
    readable = block_table.device.type == "cpu" and not has_no_values(block_table, lengths)
    slots, rows = block_table, capacity
    if readable:
        rows = int(lengths.max()) if lengths.numel() else 0
        if int(lengths.min() if lengths.numel() else 0) < 0 or rows > capacity:
            problem = f"key_lengths must be in [0, {capacity}], what {block_table.shape[1]} pages of {page} hold"
            raise InputError(f"{problem}, got {lengths.tolist()}", asked=asked, remedy="a wider block_table")
        slots = block_table[:, : -(-rows // page)]
    used = torch.arange(slots.shape[1], device=slots.device) * page < lengths[:, None]
    if readable:
        _check_pages(slots, used, key.shape[0], asked)
    slots = torch.where(used, slots, 0).long()
    gathered = [_gather(x, slots, lengths, rows, layout, readable) for x in (key, value)]
    sq = query.shape[1] if layout == "bshd" else query.shape[2]
    fades = isinstance(variant.inner if isinstance(variant, Stateful) else variant, Retention)  # with the distance
    if isinstance(attn_mask, Causal) and sq == 1 and q_offset is None and not fades:
        attn_mask = None  # the last query sees every key that there is: the lengths say it all
    alibi = isinstance(bias, torch.Tensor) and bias.ndim == 1
    positional = fades or alibi or (isinstance(attn_mask, Mask) and attn_mask.positional)
    if q_offset is None and (window is not None or positional):
        q_offset = lengths - sq
    bias = bias if alibi else _cut(bias, capacity, rows)
    return Rows(gathered[0], gathered[1], _cut(attn_mask, capacity, rows), bias, q_offset)


def _check(query: Any, key: Any, value: Any, table: Any, key_lengths: Any, layout: str, asked: str) -> torch.Tensor:
    """The lengths as a tensor, once every shape and dtype is right."""

    def fail(problem: str, remedy: str = "", kind: type[InputError] = InputError) -> None:
        raise kind(problem, asked=asked, remedy=remedy)

    if not all(isinstance(x, torch.Tensor) for x in (query, key, value)):
        fail("query, key and value must be tensors", kind=InputTypeError)
    if not isinstance(table, torch.Tensor) or table.dtype not in _INTEGERS:
        fail(f"block_table must be an int32 or int64 tensor [B, max_pages], got {_kind(table)}", kind=InputTypeError)
    if layout not in shapes.LAYOUTS:
        fail(f"layout must be one of {', '.join(shapes.LAYOUTS)}, got {layout!r}")
    form = "[num_pages, page, Hkv, D]" if layout == "bshd" else "[num_pages, Hkv, page, D]"
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        fail(f"with block_table query is 4-D and key and value are pages {form}", f'layout="{layout}" is in force')
    if key.shape[:3] != value.shape[:3]:
        fail(f"key pages {list(key.shape)} and value pages {list(value.shape)} must agree in all but the last size")
    if table.ndim != 2 or table.shape[0] != query.shape[0]:
        fail(f"block_table must be [B, max_pages] with B {query.shape[0]}, got {list(table.shape)}")
    if key_lengths is None:
        fail("block_table needs key_lengths [B]: how many keys of its pages each sequence has", "key_lengths=...")
    lengths = key_lengths if isinstance(key_lengths, torch.Tensor) else torch.as_tensor(key_lengths)
    if lengths.dtype not in _INTEGERS or tuple(lengths.shape) != (query.shape[0],):
        fail(f"key_lengths must be integers [B] = [{query.shape[0]}], got {_kind(lengths)}")
    for name, x in (("block_table", table), ("key_lengths", lengths), ("key", key), ("value", value)):
        if x.device != query.device:
            fail(f"{name} is on {x.device} and query on {query.device}", f"{name}.to({str(query.device)!r})")
    return lengths


def _check_pages(slots: torch.Tensor, used: torch.Tensor, pages: int, asked: str) -> None:
    wrong = used & ((slots < 0) | (slots >= pages))
    if bool(wrong.any()):
        b, slot = (int(n) for n in wrong.nonzero()[0])
        problem = f"block_table[{b}, {slot}] is page {int(slots[b, slot])}, there are {pages}"
        raise InputError(problem, asked=asked, remedy=f"pages are numbered from 0 to {pages - 1}")


def _gather(
    pages: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, rows: int, layout: str, readable: bool
) -> torch.Tensor:
    """``[B, Hkv, rows, D]`` (``[B, rows, Hkv, D]``) in one copy; 0 from each sequence's true length on."""
    b, n = slots.shape
    if layout == "bshd":
        found = pages.index_select(0, slots.flatten()).reshape(b, n * pages.shape[1], *pages.shape[2:])[:, :rows]
        heads_first = found.transpose(1, 2)
    else:
        heads = pages.shape[1]
        which = slots[:, None, :] * heads + torch.arange(heads, device=slots.device)[:, None]
        if pages.is_contiguous():
            flat = pages.flatten(0, 1).index_select(0, which.flatten())
            found = heads_first = flat.reshape(b, heads, n * pages.shape[2], pages.shape[3])[:, :, :rows]
        else:  # flattening would copy the whole cache
            picked = pages.index_select(0, slots.flatten()).unflatten(0, (b, n)).transpose(1, 2)
            found = heads_first = picked.reshape(b, heads, n * pages.shape[2], pages.shape[3])[:, :, :rows]
    if not readable:
        beyond = torch.arange(rows, device=pages.device) >= lengths[:, None]
        return found.masked_fill(beyond[:, :, None, None] if layout == "bshd" else beyond[:, None, :, None], 0.0)
    for i, length in enumerate(lengths.tolist()):
        if length < rows:  # only what is beyond is written, not all that was gathered
            heads_first[i, :, length:].zero_()
    return found


def _cut(x: Any, capacity: int, rows: int) -> Any:
    """A mask or bias tensor over the whole capacity, for the rows that there are."""
    if isinstance(x, torch.Tensor) and x.ndim > 0 and x.shape[-1] == capacity and capacity != rows:
        return x[..., :rows]
    return x


def _kind(x: Any) -> str:
    return f"{dtype_name(x.dtype)} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
