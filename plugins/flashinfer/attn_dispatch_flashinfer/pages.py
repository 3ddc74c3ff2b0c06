"""Attention over a paged cache, by hand: attn_dispatch gathers pages into rows before an op is described.

`PagedPlan` is FlashInfer's plan/run split as its users know it: plan once per step, run once per layer. The dispatcher
does not choose it, having no word for pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from attn_dispatch.plugin import BackendError
from attn_dispatch_flashinfer.backend import FlashInfer
from attn_dispatch_flashinfer.wrappers import in_our_terms, workspace

__all__ = ["PagedPlan", "plan_pages"]


@dataclass(frozen=True)
class PagedPlan:
    """A planned wrapper; make it with `plan_pages`, and run it on the stream that it was planned on."""

    wrapper: Any
    batch: int
    queries: int
    masks_with_finite: bool

    def run(
        self, query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer.

        Args:
            query: ``[B, Sq, Hq, D]``; key_pages, value_pages: ``[num_pages, page, Hkv, D]``.

        Returns:
            out ``[B, Sq, Hq, D]``, lse ``[B, Hq, Sq]``.
        """
        out, lse = self.wrapper.run(query.flatten(0, 1), (key_pages, value_pages), return_lse=True)
        lse = in_our_terms(out, lse, self.masks_with_finite)
        sizes = (self.batch, self.queries)
        return out.unflatten(0, sizes), lse.unflatten(0, sizes).transpose(1, 2)


def plan_pages(
    backend: FlashInfer,
    query: torch.Tensor,
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    key_lengths: torch.Tensor,
    *,
    is_causal: bool = True,
    window_left: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> PagedPlan:
    """Plan attention over pages; positions count from each sequence's last key.

    Args:
        query, key_pages: like those that will run. block_table: integers ``[B, max_pages]``; key_lengths: ``[B]``, each
            at least 1. Both are read on the host.

    Raises:
        BackendError: the library or a GPU is missing, or a sequence has no keys (before 0.6.19, with a causal mask: or
            fewer than queries).
    """
    missing = backend.unavailable()
    if missing is not None:
        raise BackendError(f"{backend.name}: {missing}")
    b, sq, hq, d = query.shape
    page, hkv = key_pages.shape[1:3]
    lengths = [int(n) for n in key_lengths.tolist()]
    if min(lengths) < 1:
        raise BackendError(f"flashinfer plans pages of sequences with at least one key, got key_lengths {lengths}")
    if is_causal and backend.masks_with_finite and min(lengths) < sq:
        raise BackendError(f"rows without a key need flashinfer 0.6.19: {sq} queries, key_lengths {lengths}")
    counts = [math.ceil(n / page) for n in lengths]
    used = torch.cat([row[:count] for row, count in zip(block_table, counts, strict=True)]).to(torch.int32)
    ends = torch.tensor([sum(counts[:i]) for i in range(b + 1)], dtype=torch.int32, device=query.device)
    last = torch.tensor([(n - 1) % page + 1 for n in lengths], dtype=torch.int32, device=query.device)
    wrapper = backend.load().BatchPrefillWithPagedKVCacheWrapper(workspace(query.device), kv_layout="NHD")
    wrapper.plan(
        *(torch.arange(b + 1, dtype=torch.int32, device=query.device) * sq, ends, used, last, hq, hkv, d, page),
        causal=is_causal,
        window_left=-1 if window_left is None else window_left,
        logits_soft_cap=softcap,
        sm_scale=d**-0.5 if scale is None else scale,
        q_data_type=query.dtype,
        kv_data_type=key_pages.dtype,
    )
    return PagedPlan(wrapper, b, sq, backend.masks_with_finite)
