"""What a modern decoder needs, beside what a user would write for it with torch alone."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from attn_dispatch import biases, masks
from attn_dispatch.bench.cases import Case, Contenders, make_qkv
from attn_dispatch.dispatch import attention, varlen_attention
from attn_dispatch.nn.cache import KVCache
from attn_dispatch.nn.multihead import MultiheadAttention

__all__ = ["CASES"]

sdpa = F.scaled_dot_product_attention


def _alibi(sq: int, skv: int) -> torch.Tensor:
    distance = (torch.arange(sq)[:, None] + skv - sq - torch.arange(skv)).abs()
    return (-biases.alibi_slopes(16).view(-1, 1, 1) * distance)[None]


def _alibi_prefill() -> Contenders:
    q, k, v = make_qkv(1, 16, 16, 1024, 1024, 64)
    bias = _alibi(1024, 1024).masked_fill(~torch.ones(1024, 1024, dtype=torch.bool).tril(), -torch.inf)
    slopes = biases.alibi_slopes(16)
    return Contenders(lambda: attention(q, k, v, is_causal=True, bias=slopes), lambda: sdpa(q, k, v, attn_mask=bias))


def _alibi_decode() -> Contenders:
    q, k, v = make_qkv(1, 16, 16, 1, 4096, 64)
    slopes, bias = biases.alibi_slopes(16), _alibi(1, 4096)
    return Contenders(lambda: attention(q, k, v, bias=slopes), lambda: sdpa(q, k, v, attn_mask=bias))


_ENDS = [0, 128, 640, 700, 1500, 1756, 2048]


def _packed() -> Contenders:
    q, k, v = make_qkv(1, 8, 8, 2048, 2048, 64)
    rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    ids = torch.bucketize(torch.arange(2048), torch.tensor(_ENDS[1:]), right=True)
    mask = (ids[:, None] == ids) & torch.ones(2048, 2048, dtype=torch.bool).tril()
    ends = torch.tensor(_ENDS, dtype=torch.int32)

    def by_hand() -> torch.Tensor:
        parts = [sdpa(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True) for a, b in pairwise(_ENDS)]
        return torch.cat(parts, 2)

    return Contenders(
        lambda: varlen_attention(rows[0], rows[1], rows[2], ends, is_causal=True),
        lambda: sdpa(q, k, v, attn_mask=mask),
        by_hand,
    )


def _paged() -> Contenders:
    lengths = torch.tensor([2000, 500, 1200, 90])
    q = make_qkv(4, 32, 8, 1, 1, 128)[0]
    pages, values = make_qkv(4 * 128, 8, 8, 16, 16, 128)[1:]
    table = torch.randperm(4 * 128, generator=torch.Generator().manual_seed(0)).view(4, 128).int()

    def by_hand() -> torch.Tensor:
        k, v = (x[table.long()].transpose(1, 2).flatten(2, 3) for x in (pages, values))
        mask = (torch.arange(2048) < lengths[:, None])[:, None, None]
        return sdpa(q, k, v, attn_mask=mask, enable_gqa=True)

    def ours() -> torch.Tensor:
        return attention(q, pages, values, block_table=table, key_lengths=lengths, enable_gqa=True)

    return Contenders(ours, by_hand)


def _mla() -> Contenders:
    q, k, _ = make_qkv(1, 16, 16, 1024, 1024, 192)
    v = make_qkv(1, 16, 16, 1024, 1024, 128)[2]
    return Contenders(
        lambda: attention(q, k, v, is_causal=True),
        lambda: sdpa(q, k, v, is_causal=True),
        lambda: sdpa(q, k, F.pad(v, (0, 64)), is_causal=True)[..., :128],
    )


def _split_kv() -> Contenders:
    q, k, v = make_qkv(1, 8, 1, 1, 32768, 128)
    return Contenders(
        lambda: attention(q, k, v, enable_gqa=True),
        lambda: sdpa(q, k, v, enable_gqa=True),
        lambda: sdpa(q.view(1, 1, 8, 128), k, v).view(1, 8, 1, 128),
    )


def _prefix() -> Contenders:
    q, k, v = make_qkv(2, 8, 8, 1024, 1024, 64)
    prefix = torch.tensor([100, 400])
    mask = torch.ones(1024, 1024, dtype=torch.bool).tril() | (torch.arange(1024) < prefix[:, None])[:, None, None]
    return Contenders(
        lambda: attention(q, k, v, attn_mask=masks.prefix_lm(prefix)), lambda: sdpa(q, k, v, attn_mask=mask)
    )


def _module() -> Contenders:
    theirs = torch.nn.MultiheadAttention(768, 12, batch_first=True).eval()
    ours = MultiheadAttention.from_torch(theirs)
    x = torch.randn(4, 512, 768, generator=torch.Generator().manual_seed(0))
    padded = torch.arange(512) >= torch.tensor([512, 60, 200, 300])[:, None]

    def run(module: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return module(x, x, x, key_padding_mask=padded, need_weights=False)[0]

    return Contenders(lambda: run(ours), lambda: run(theirs))


def _cached_steps() -> Contenders:
    module = MultiheadAttention(512, 8, kv_heads=2, rotary=1e4, is_causal=True, batch_first=True, bias=False).eval()
    prompt, steps = torch.randn(1, 512, 512), torch.randn(64, 1, 1, 512)

    def ours() -> None:
        with torch.no_grad():
            cache = KVCache()
            module(prompt, cache=cache)
            for step in steps:
                module(step, cache=cache)

    def concatenating() -> None:
        """The cache that one writes first: ``torch.cat`` at every step, SDPA on what comes out."""
        with torch.no_grad():
            k = v = torch.zeros(1, 2, 0, 64)
            for x in (prompt, *steps):
                q, new_k, new_v = (
                    F.linear(x, w).unflatten(-1, (-1, 64)).transpose(1, 2)
                    for w in module.in_proj_weight.split((512, 128, 128))  # type: ignore[union-attr]
                )
                at = torch.arange(x.shape[1]) + k.shape[2]
                assert module.rotary is not None
                k, v = torch.cat([k, module.rotary(new_k, at)], 2), torch.cat([v, new_v], 2)
                out = sdpa(module.rotary(q, at), k, v, is_causal=x.shape[1] > 1, enable_gqa=True)
                module.out_proj(out.transpose(1, 2).flatten(2))

    return Contenders(ours, concatenating)


CASES: tuple[Case, ...] = (
    Case("alibi causal S1024 H16", _alibi_prefill, ">= 0.95x as given (which holds the mask ready)"),
    Case("alibi decode S4096 H16", _alibi_decode, ">= 0.95x as given (which holds the mask ready)"),
    Case("packed documents 6 in 2048", _packed, ">= 2x as given"),
    Case("paged decode 32/8 D128 B4", _paged, ">= 1.5x as given"),
    Case("MLA heads 192/128 S1024", _mla, ">= 2x as given"),
    Case("split-KV decode 8/1 S32768", _split_kv, ">= 2x as given"),
    Case("prefix-LM per batch S1024", _prefix, ">= 0.95x as given"),
    Case("nn.MultiheadAttention padded 4x512", _module, ">= 1x torch's module"),
    Case("nn.MultiheadAttention 64 cached steps", _cached_steps, ">= 1x a concatenated cache"),
)
