"""Benchmark cases of sparse attention: ours, what a user has today, and the best he could write by hand.

Where a module of transformers does the same, it is ``as_given``, with its projections on both sides.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from attn_dispatch import masks
from attn_dispatch.bench.cases import Case, Contenders, make_qkv
from attn_dispatch.dispatch import attention

__all__ = ["CASES"]

_EMBED, _HEADS = 768, 12


def _without_grad(call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return call()

    return run


def _tokens(length: int) -> torch.Tensor:
    return torch.randn(1, length, _EMBED, generator=torch.Generator().manual_seed(0))


def _longformer_module() -> Contenders:
    """Longformer-base, S 4096, 256 keys to each side, one global token, projections on both sides."""
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention as Theirs

    from attn_dispatch.nn.longformer import LongformerSelfAttention

    config = LongformerConfig(
        attention_window=[512], hidden_size=_EMBED, num_attention_heads=_HEADS, num_hidden_layers=1
    )
    theirs = Theirs(config, 0).eval()
    ours = LongformerSelfAttention(_EMBED, _HEADS, 512).eval()
    ours.load_state_dict(theirs.state_dict())
    x = _tokens(4096)
    kinds = torch.zeros(1, 4096)
    kinds[:, 0] = 10000.0  # transformers' mark of a global token at the layer
    marks = kinds > 0

    def as_given() -> Any:
        return theirs(
            x,
            attention_mask=kinds,
            is_index_masked=kinds < 0,
            is_index_global_attn=marks,
            is_global_attn=True,
        )

    return Contenders(_without_grad(lambda: ours(x, marks)), _without_grad(as_given))


def _masked(mask: masks.Mask, heads: int, length: int, by_hand: Callable[..., Any] | None = None) -> Contenders:
    """Ours against SDPA with the mask written out beforehand."""
    q, k, v = make_qkv(1, heads, heads, length, length, 64)
    dense = mask.dense(length, length)
    dense = dense[(None,) * (4 - dense.ndim)]
    return Contenders(
        lambda: attention(q, k, v, attn_mask=mask),
        lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=dense),
        None if by_hand is None else lambda: by_hand(q, k, v),
    )


def _longformer() -> Contenders:
    return _masked(masks.longformer(256, torch.arange(4096) == 0), _HEADS, 4096)


def _bigbird_module() -> Contenders:
    """BigBird-base, S 4096, projections on both sides. In eval transformers' table is all zeros, at the same cost."""
    from transformers import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    config = BigBirdConfig(
        hidden_size=_EMBED,
        num_attention_heads=_HEADS,
        attention_type="block_sparse",
        block_size=64,
        num_random_blocks=3,
    )
    theirs = BigBirdBlockSparseAttention(config, seed=0).eval()
    x = _tokens(4096)
    blocked, band, rows, columns = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, 4096), 64)
    mask = masks.bigbird(4096, 64, 3, seed=0, heads=_HEADS)

    def ours() -> Any:
        q, k, v = (layer(x).unflatten(2, (_HEADS, -1)).transpose(1, 2) for layer in projections)
        return attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)

    def as_given() -> Any:
        return theirs(
            x,
            band_mask=band,
            from_mask=rows,
            to_mask=columns,
            from_blocked_mask=blocked,
            to_blocked_mask=blocked,
        )

    projections = (theirs.query, theirs.key, theirs.value)
    return Contenders(_without_grad(ours), _without_grad(as_given))


def _strided() -> Contenders:
    def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.unflatten(2, (-1, 64)).permute(0, 3, 1, 2, 4).flatten(0, 1) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.unflatten(0, (-1, 64)).permute(0, 2, 3, 1, 4).flatten(2, 3)

    return _masked(masks.strided(64), 8, 8192, by_hand)


def _documents() -> Contenders:
    ends = [0, 1000, 1500, 3000, 4096]

    def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        spans = [slice(a, b) for a, b in itertools.pairwise(ends)]
        return [F.scaled_dot_product_attention(q[:, :, s], k[:, :, s], v[:, :, s], is_causal=True) for s in spans]

    return _masked(masks.causal() & masks.documents(ends), _HEADS, 4096, by_hand)


CASES: tuple[Case, ...] = (
    Case("longformer-base S4096, module", _longformer_module, ">= 2.3x transformers' module"),
    Case("longformer-base S4096", _longformer, ">= 5x dense-masked SDPA"),
    Case(
        "bigbird-base S4096, module",
        _bigbird_module,
        ">= 3x transformers' block-sparse",
        differs="in eval transformers' table of random blocks is all zeros",
    ),
    Case("strided 64 S8192", _strided, ">= 8x dense-masked SDPA"),
    Case("fixed 128/8 S8192", lambda: _masked(masks.fixed(128, 8), 8, 8192)),
    Case("dilated 64x8 S8192", lambda: _masked(masks.dilated(64, 8), 8, 8192)),
    Case("chunked 64 S8192", lambda: _masked(masks.chunked(64), 8, 8192)),
    Case("documents S4096", _documents),
)
