"""Attention over a paged cache, by hand: attn_dispatch gathers pages into rows before an op is described.

`dispatch.attention(..., block_table=...)` is right on every backend, and copies the keys. `attend_pages` hands the
table to the kernel instead. It is not chosen by the dispatcher, which has no word for pages.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_dispatch.plugin import BackendError
from attn_dispatch_flash_attn.backends import FlashAttn

__all__ = ["attend_pages"]

_PAGE_MULTIPLE = {"flash_attn_2": 256}  # line 3: any; line 4: any, fastest where a tile holds whole pages


def attend_pages(
    backend: FlashAttn,
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    block_table: torch.Tensor,
    key_lengths: torch.Tensor,
    *,
    is_causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of ``query [B, Sq, Hq, D]`` over pages ``[pages, page, Hkv, D]``; positions count from the last key.

    Args:
        backend: which line runs it. block_table: integers ``[B, max_pages]``; key_lengths: integers ``[B]``.
        window: ``(left, right)`` inclusive distances, None is unbounded.

    Returns:
        ``[B, Sq, Hq, Dv]``.

    Raises:
        BackendError: the library is missing, too old for pages, or it takes no such pages on this GPU.
    """
    missing = backend.unavailable()
    if missing is not None:
        raise BackendError(f"{backend.name}: {missing}")
    if "pages" not in backend.known.can:
        raise BackendError(f"{backend.name} {backend.version()} has no pages; FlashAttention 2 has them since 2.5")
    page, multiple = key_pages.shape[1], _PAGE_MULTIPLE.get(backend.name, 1)
    if page % multiple:
        raise BackendError(f"{backend.name} takes pages of a multiple of {multiple} keys, got {page}")
    major = (backend.compute_capability() or (0, 0))[0]
    at_256 = query.shape[-1] == 256 and major in (10, 11)  # a kernel of its own, which takes no lengths
    if backend.name == "flash_attn_4" and (major == 12 or at_256):
        raise BackendError(f"flash_attn_4 has no pages{' at head_dim 256' * at_256} on compute capability {major}.x")
    library, unbounded = backend.load(), None if backend.name == "flash_attn_4" else -1
    table, used = block_table.to(torch.int32), key_lengths.to(torch.int32)
    given: dict[str, Any] = {"causal": is_causal}
    given |= {"softmax_scale": scale} if scale is not None else {}
    given |= {"softcap": softcap} if softcap is not None else {}
    if window is not None:
        given["window_size"] = tuple(unbounded if side is None else side for side in window)
    if backend.name == "flash_attn_4":
        call, names = library.flash_attn_varlen_func, ("seqused_k", "page_table")
    elif backend.name == "flash_attn_3":
        call, names = library.flash_attn_with_kvcache, ("cache_seqlens", "page_table")
    else:
        call, names = library.flash_attn_with_kvcache, ("cache_seqlens", "block_table")
    result = call(query, key_pages, value_pages, **{names[0]: used, names[1]: table}, **given)
    return result[0] if isinstance(result, tuple) else result
