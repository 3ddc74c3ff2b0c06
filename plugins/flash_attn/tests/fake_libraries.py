"""Stand-ins for the three libraries on the CPU: their signatures, word for word, and what their documentation says.

Signatures read from Dao-AILab/flash-attention: `flash_attn/flash_attn_interface.py` of v2.8.3 and v2.3.6,
`hopper/flash_attn_interface.py` and `flash_attn/cute/interface.py` at 0251105. A call with an argument that the real
function does not have is a TypeError here too. The arithmetic is float64 and shares nothing with attn_dispatch.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch


def attend(q, k, v, scale, causal, window, softcap=0.0, slopes=None, sinks=None, empty_lse=math.inf, used=None):
    """``[S, H, D]`` of one sequence: out and lse ``[H, Sq]``; positions count from the last of the used keys."""
    sq, groups = q.shape[0], q.shape[1] // k.shape[1]
    k, v = (x[: used if used is not None else x.shape[0]].repeat_interleave(groups, 1) for x in (k, v))
    skv = k.shape[0]
    at = torch.arange(sq)[:, None] + skv - sq
    distance = torch.arange(skv)[None, :] - at
    scores = torch.einsum("ihd,jhd->hij", q.double(), k.double()) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = torch.tanh(scores / softcap) * softcap if softcap else scores
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    left, right = (None if side is None or side < 0 else side for side in window)
    right = 0 if causal else right
    gone = torch.zeros(sq, skv, dtype=torch.bool)
    gone |= (distance < -left) if left is not None else gone
    gone |= (distance > right) if right is not None else gone
    scores = scores.masked_fill(gone, -math.inf)
    logits = scores if sinks is None else torch.cat([scores, sinks.double()[:, None, None].expand(-1, sq, 1)], -1)
    lse = torch.logsumexp(logits, -1) if logits.shape[-1] else torch.full(logits.shape[:2], -math.inf).double()
    dead = torch.isneginf(lse)
    weights = torch.exp(scores - torch.where(dead, 0.0, lse)[..., None]).masked_fill(gone, 0.0)
    out = torch.einsum("hij,jhe->ihe", weights, v.double()).to(q.dtype)
    # as the kernels have it: "sum == 0 || sum != sum"
    lse = torch.where(dead | lse.isnan(), empty_lse, lse)
    return out, lse.float()


def batched(q, k, v, used=None, **options):
    """``[B, S, H, D]``; used keys per sequence."""
    pairs = [
        attend(*row, used=None if used is None else int(used[i]), **options)
        for i, row in enumerate(zip(q, k, v, strict=False))
    ]
    return torch.stack([out for out, _ in pairs]), torch.stack([lse for _, lse in pairs])


def packed(q, k, v, ends_q, ends_k, **options):
    """``[total, H, D]``; lse ``[H, total]``."""
    assert ends_q.dtype == ends_k.dtype == torch.int32
    spans = zip(ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:], strict=False)
    pairs = [attend(q[a:b], k[c:d], v[c:d], **options) for a, b, c, d in spans]
    return torch.cat([out for out, _ in pairs]), torch.cat([lse for _, lse in pairs], 1)


def pages(cache, table):
    return torch.stack([cache[row.long()].flatten(0, 1) for row in table])


# --- line 2 ----------------------------------------------------------------------------------------------------------


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    assert q.shape[-1] <= 256
    assert not (softcap and dropout_p)
    out, lse = batched(
        q, k, v, None, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, slopes=alibi_slopes
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    out, lse = packed(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        slopes=alibi_slopes,
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    block_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    assert k is None
    assert v is None
    assert cache_seqlens.dtype == torch.int32
    assert not any(x.requires_grad for x in (q, k_cache, v_cache)) or not torch.is_grad_enabled()
    if block_table is not None:
        assert k_cache.shape[1] % 256 == 0
        assert block_table.dtype == torch.int32
        k_cache, v_cache = pages(k_cache, block_table), pages(v_cache, block_table)
    out, lse = batched(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        slopes=alibi_slopes,
    )
    return (out, lse) if return_softmax_lse else out


def old_flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    return_attn_probs=False,
):
    """v2.3.6."""
    out, lse = batched(q, k, v, None, scale=softmax_scale, causal=causal, window=window_size)
    return (out, lse, None) if return_attn_probs else out


# --- line 3 ----------------------------------------------------------------------------------------------------------


def flash_attn_3_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    found = batched(
        q, k, v, None, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, empty_lse=-math.inf
    )
    return found if return_attn_probs else found[0]


def older_flash_attn_3_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
):
    """Before ``return_attn_probs``: always ``(out, lse)``."""
    return batched(
        q, k, v, None, scale=softmax_scale, causal=causal, window=window_size, softcap=softcap, empty_lse=-math.inf
    )


def flash_attn_3_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    found = packed(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        empty_lse=-math.inf,
    )
    return found if return_attn_probs else found[0]


def flash_attn_3_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens=None,
    cache_batch_idx=None,
    cache_leftpad=None,
    page_table=None,
    cu_seqlens_q=None,
    cu_seqlens_k_new=None,
    max_seqlen_q=None,
    rotary_seqlens=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    assert k is None
    assert v is None
    assert cache_seqlens.dtype == torch.int32
    if page_table is not None:
        assert page_table.dtype == torch.int32
        k_cache, v_cache = pages(k_cache, page_table), pages(v_cache, page_table)
    out, lse = batched(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        empty_lse=-math.inf,
    )
    return (out, lse, None, None) if return_softmax_lse else out


# --- line 4 ----------------------------------------------------------------------------------------------------------


def flash_attn_4_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv=None,
    gather_kv_indices=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    aux_tensors=None,
    aux_scalars=None,
    block_sparse_tensors=None,
    block_sparse_tensors_bwd=None,
    return_lse=False,
):
    assert all(side is None or side >= 0 for side in window_size)
    out, lse = batched(
        q,
        k,
        v,
        None,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        sinks=learnable_sink,
        empty_lse=-math.inf,
    )
    return out, lse if return_lse else None


def older_flash_attn_4_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    return_lse=False,
):
    """fa4-v4.0.0.beta25, as far as it matters: "learnable_sink must be bfloat16"."""
    assert learnable_sink is None or learnable_sink.dtype == torch.bfloat16
    return flash_attn_4_func(
        q, k, v, None, None, softmax_scale, causal, window_size, learnable_sink, softcap, return_lse=return_lse
    )


def flash_attn_4_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    score_mod_bwd=None,
    mask_mod=None,
    block_sparse_tensors=None,
    aux_tensors=None,
    aux_scalars=None,
    return_lse=False,
    scheduler_metadata=None,
    seqlen_k_per_split=None,
    disable_scheduler_metadata=False,
):
    options: dict[str, Any] = {"scale": softmax_scale, "causal": causal, "window": window_size, "softcap": softcap}
    options |= {"sinks": learnable_sink, "empty_lse": -math.inf}
    if page_table is not None:
        assert cu_seqlens_k is None
        assert page_table.dtype == torch.int32
        k, v = pages(k, page_table), pages(v, page_table)
    if cu_seqlens_q is None:
        assert seqused_k.dtype == torch.int32
        out, lse = batched(q, k, v, seqused_k, **options)
    else:
        out, lse = packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    return out, lse if return_lse else None


FLASH_2 = SimpleNamespace(
    flash_attn_func=flash_attn_func,
    flash_attn_varlen_func=flash_attn_varlen_func,
    flash_attn_with_kvcache=flash_attn_with_kvcache,
)
FLASH_2_3 = SimpleNamespace(flash_attn_func=old_flash_attn_func)
FLASH_3 = SimpleNamespace(
    flash_attn_func=flash_attn_3_func,
    flash_attn_varlen_func=flash_attn_3_varlen_func,
    flash_attn_with_kvcache=flash_attn_3_with_kvcache,
)
OLDER_FLASH_3 = SimpleNamespace(flash_attn_func=older_flash_attn_3_func)
FLASH_4 = SimpleNamespace(flash_attn_func=flash_attn_4_func, flash_attn_varlen_func=flash_attn_4_varlen_func)
OLDER_FLASH_4 = SimpleNamespace(flash_attn_func=older_flash_attn_4_func)
