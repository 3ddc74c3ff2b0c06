"""A stand-in for flashinfer on the CPU: its wrappers' signatures, and what their documentation says.

Signatures read from flashinfer-ai/flashinfer: ``flashinfer/prefill.py``, ``decode.py`` and ``attention/_core.py`` at
fb28d72 (0.6.18). An argument that the real function does not have is a TypeError here too. The arithmetic is float64
and shares nothing with attn_dispatch.
"""

from __future__ import annotations

import math

import torch

plans: list[str] = []  # the wrapper of every plan that was made, in order
workspaces: list[torch.Tensor] = []  # and its workspace
libraries: dict[str, int] = {}  # compiled kernels by their name: the head size that they were first built for
MASKED = -5e4  # ``math::inf`` of include/flashinfer/math.cuh, until 0.6.19; -inf is the other


def attend(q, k, v, scale, causal, left, cap, sinks=None):
    """``[S, H, D]`` of one sequence: out and the base-2 lse ``[Sq, H]``; positions count from the last key.

    With the finite mask a row without keys is as on Hopper: 0 where no tile is computed, else the mean of the values.
    """
    sq, skv, groups = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    distance = torch.arange(skv)[None, :] - (torch.arange(sq)[:, None] + skv - sq)
    scores = torch.einsum("ihd,jhd->hij", q.double(), k.double()) * scale
    scores = torch.tanh(scores / cap) * cap if cap else scores
    gone = (distance > 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    gone = gone | (distance < -left) if left >= 0 else gone
    scores = scores.masked_fill(gone, -math.inf)
    logits = scores if sinks is None else torch.cat([scores, sinks.double()[:, None, None].expand(-1, sq, 1)], -1)
    lse = torch.logsumexp(logits, -1)
    dead = torch.isneginf(lse)
    weights = torch.exp(scores - torch.where(dead, 0.0, lse)[..., None]).masked_fill(gone, 0.0)
    out = torch.einsum("hij,jhe->ihe", weights, v.double()).to(q.dtype)
    lse = torch.where(lse.isnan(), -math.inf, lse) / math.log(2)  # the maximum drops NaN
    if sinks is None and not math.isinf(MASKED):
        out = torch.where(dead.T[..., None], v.double().mean(0).to(q.dtype), out) if skv else out
        lse = torch.where(torch.isneginf(lse), MASKED * scale / math.log(2) + math.log2(skv) if skv else MASKED, lse)
    return out, lse.float().T


class _Wrapper:
    def __init__(self, float_workspace_buffer, kv_layout):
        assert float_workspace_buffer.dtype == torch.uint8
        self.layout, self.workspace = kv_layout, float_workspace_buffer

    def sequences(self, cache):
        """Keys of each sequence, ``[S, H, D]``, out of its pages."""
        pages = cache if self.layout == "NHD" else cache.transpose(1, 2)
        assert pages.shape[1:3] == (self.page, self.hkv)
        for i, last in enumerate(self.last.tolist()):
            own = pages[self.indices[self.indptr[i] : self.indptr[i + 1]].long()].flatten(0, 1)
            yield own[: max(int(self.indptr[i + 1] - self.indptr[i]) - 1, 0) * self.page + last]

    def caches(self, pair):
        k, v = pair
        assert k.stride() == v.stride(), "k/v strides must be identical"
        return self.sequences(k), self.sequences(v)

    def finish(self, q, ks, vs, return_lse, sinks=None, scale=None):
        scale = self.scale if scale is None else scale
        rows = [q[a:b] for a, b in zip(self.qo[:-1], self.qo[1:], strict=False)]
        pairs = [attend(*row, scale, self.causal, self.left, self.cap, sinks) for row in zip(rows, ks, vs, strict=True)]
        out, lse = (torch.cat(part) for part in zip(*pairs, strict=False))
        return (out, lse) if return_lse else out

    def note(self, q_dtype, d, scale, causal, left, cap):
        plans.append(type(self).__name__)
        workspaces.append(self.workspace)
        self.dtype, self.causal, self.left, self.cap = q_dtype, causal, left, cap or 0.0
        self.scale = d**-0.5 if scale is None else scale


def _int32(*tensors):
    assert all(x.dtype == torch.int32 for x in tensors)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        kv_indptr_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        window_left=-1,
        logits_soft_cap=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        _int32(qo_indptr, kv_indptr)
        self.qo, self.kv = qo_indptr.tolist(), kv_indptr.tolist()
        self.note(q_data_type, head_dim_qk, sm_scale, causal, window_left, logits_soft_cap)

    def run(
        self,
        q,
        k,
        v,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        o_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        kv_cache_sf=None,
    ):
        assert q.dtype == self.dtype
        assert q.shape[0] == self.qo[-1]
        ks, vs = ([x[a:b] for a, b in zip(self.kv[:-1], self.kv[1:], strict=False)] for x in (k, v))
        return self.finish(q, ks, vs, return_lse)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    ):
        super().__init__(float_workspace_buffer, kv_layout)
        # kernels of one's own lie in a library of the name that is given; what it was built for is what it is
        self.built_for = None if jit_args is None else libraries.setdefault(jit_args[0], jit_args[5])

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        _int32(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self.qo, self.indptr, self.indices = qo_indptr.tolist(), paged_kv_indptr, paged_kv_indices
        self.last, self.page, self.hkv = paged_kv_last_page_len.clone(), page_size, num_kv_heads
        self.note(q_data_type, head_dim_qk, sm_scale, causal, window_left, logits_soft_cap)

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        kv_cache_sf=None,
    ):
        assert q.dtype == self.dtype
        assert not args
        return self.finish(q, *self.caches(paged_kv_cache), return_lse)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        jit_args=None,
    ):
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        pos_encoding_mode="NONE",
        window_left=-1,
        window_right=0,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
        rope_scale=None,
        rope_theta=None,
        non_blocking=True,
        block_tables=None,
        seq_lens=None,
        fixed_split_size=None,
        disable_split_kv=False,
        q_len_per_req=1,
    ):
        _int32(indptr, indices, last_page_len)
        self.qo, self.indptr, self.indices = list(range(len(indptr))), indptr, indices
        self.last, self.page, self.hkv = last_page_len.clone(), page_size, num_kv_heads
        self.note(q_data_type, head_dim, sm_scale, False, window_left, logits_soft_cap)

    def run(
        self,
        q,
        paged_kv_cache,
        *args,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        out=None,
        lse=None,
        return_lse=False,
        enable_pdl=None,
        window_left=None,
        sinks=None,
        q_len_per_req=None,
        skip_softmax_threshold_scale_factor=None,
        kv_cache_sf=None,
    ):
        assert q.dtype == self.dtype
        assert not args
        return self.finish(q, *self.caches(paged_kv_cache), return_lse)


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
        custom_mask_buf=None,
        mask_indptr_buf=None,
        backend="auto",
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        head_dim_qk=128,
        head_dim_vo=128,
        window_left=-1,
    ):
        # the name, the head sizes and what they stand between, as there
        name = f"batch_prefill_attention_sink_{q_data_type}_swa_{window_left >= 0}_{backend}"
        kinds = (q_data_type, kv_data_type, q_data_type, torch.int32, head_dim_qk, head_dim_vo)
        super().__init__(
            float_workspace_buffer=float_workspace_buffer,
            kv_layout=kv_layout,
            use_cuda_graph=use_cuda_graph,
            qo_indptr_buf=qo_indptr_buf,
            backend=backend,
            jit_args=[name, *kinds, ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", ""],
            jit_kwargs={"use_sliding_window": window_left >= 0},
        )
        self.made_for = (q_data_type, head_dim_qk, head_dim_vo, window_left >= 0)

    def run(self, q, paged_kv_cache, sink, sm_scale):
        """As in tests/attention/test_attention_sink.py: sink and scale are the kernel's own extra arguments."""
        assert self.made_for == (q.dtype, q.shape[-1], q.shape[-1], self.left >= 0)
        assert self.built_for == q.shape[-1], f"kernels built for head_dim {self.built_for}, got {q.shape[-1]}"
        assert sink.dtype == torch.float32
        return self.finish(q, *self.caches(paged_kv_cache), False, sink, sm_scale)
