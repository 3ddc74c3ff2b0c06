"""Benchmark cases of DeepSeek Sparse Attention: attention over selected keys, and the indexer that selects, apart.

For decode the contender is dense attention over the whole cache, which is what DSA replaces; for prefill it is SDPA
with the selection as a mask, which gives the same result. The indexer's contender is the formula written out, as model
code has it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from attn_dispatch import masks
from attn_dispatch.bench.cases import Case, Contenders
from attn_dispatch.dispatch import attention, select

__all__ = ["CASES"]

sdpa = F.scaled_dot_product_attention
Sizes = tuple[int, int, int, int, int]  # Hq, Hkv, Skv, D, Dv


def _qkv(sizes: Sizes, sq: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hq, hkv, skv, d, dv = sizes
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s, generator=g) for s in ((1, hq, sq, d), (1, hkv, skv, d), (1, hkv, skv, dv)))
    return q, k, v


def _chosen(sq: int, skv: int, top_k: int) -> torch.Tensor:
    """A random causal selection, as `select` would make it: ascending, -1 behind."""
    scores = torch.rand(sq, skv, generator=torch.Generator().manual_seed(1))
    allowed = torch.arange(skv)[None] <= torch.arange(sq)[:, None] + skv - sq
    values, found = scores.masked_fill(~allowed, -1.0).topk(top_k, -1)
    found = torch.where(values < 0, skv, found).sort(-1).values
    return torch.where(found == skv, -1, found)[None]


def _decode(sizes: Sizes, top_k: int) -> Callable[[], Contenders]:
    def make() -> Contenders:
        q, k, v = _qkv(sizes, 1)
        hq, hkv, skv, d, dv = sizes
        chosen = _chosen(1, skv, top_k)
        folded = q.view(1, hkv, hq // hkv, d)
        return Contenders(
            lambda: attention(q, k, v, masks.causal() & masks.selected(chosen), enable_gqa=True),
            lambda: sdpa(q, k, v, enable_gqa=True),
            lambda: sdpa(folded, k, v).view(1, hq, 1, dv),
        )

    return make


def _prefill(sizes: Sizes, top_k: int) -> Callable[[], Contenders]:
    def make() -> Contenders:
        skv = sizes[2]
        q, k, v = _qkv(sizes, skv)
        chosen = _chosen(skv, skv, top_k)
        mask = torch.zeros(skv, skv + 1, dtype=torch.bool).scatter_(1, chosen[0].remainder(skv + 1), True)[:, :skv]
        return Contenders(
            lambda: attention(q, k, v, masks.causal() & masks.selected(chosen), enable_gqa=True),
            lambda: sdpa(q, k, v, attn_mask=mask, enable_gqa=True),
        )

    return make


def _indexer(hi: int, sq: int, skv: int, di: int, top_k: int) -> Callable[[], Contenders]:
    def make() -> Contenders:
        g = torch.Generator().manual_seed(0)
        q, k, w = (torch.randn(s, generator=g) for s in ((1, hi, sq, di), (1, skv, di), (1, sq, hi)))
        future = torch.arange(skv)[None] > torch.arange(sq)[:, None] + skv - sq

        def written_out() -> torch.Tensor:
            scores = F.relu(q.transpose(1, 2) @ k[:, None].mT * di**-0.5)  # [1, Sq, Hi, Skv]
            total = (w[..., None, :] @ scores)[..., 0, :]
            return total.masked_fill(future, -torch.inf).topk(top_k, -1).indices

        return Contenders(lambda: select(q, k, w, top_k), written_out)

    return make


_GQA: Sizes = (32, 8, 8192, 128, 128)
_MLA: Sizes = (16, 1, 8192, 576, 512)  # absorbed: all heads over one latent of 512 + 64
_HEADS: Sizes = (16, 16, 8192, 192, 128)
_DENSE = "dense attention looks at the whole cache"

CASES: tuple[Case, ...] = (
    Case("dsa decode 32/8 D128 top 256 of 8192", _decode(_GQA, 256), ">= 3x dense decode", differs=_DENSE),
    Case("dsa decode mla 16/1 D576/512 top 256 of 8192", _decode(_MLA, 256), ">= 3x dense decode", differs=_DENSE),
    Case("dsa decode mla 16/16 D192/128 top 256 of 8192", _decode(_HEADS, 256), ">= 3x dense decode", differs=_DENSE),
    Case("dsa prefill 16/1 D192/128 top 512 S4096", _prefill((16, 1, 4096, 192, 128), 512)),
    Case("dsa prefill 8/2 D128 top 512 S4096", _prefill((8, 2, 4096, 128, 128), 512)),
    Case("dsa indexer decode 64 heads D128 S8192", _indexer(64, 1, 8192, 128, 256)),
    Case("dsa indexer prefill 16 heads D64 S2048", _indexer(16, 2048, 2048, 64, 256)),
)
