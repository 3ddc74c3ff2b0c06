"""What a modern decoder needs, against implementations that nobody here wrote and dense float64.

The numbers in the names are those of the edge cases in the research notes on variants.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from attn_dispatch import InputError, InputTypeError, NoBackendError, biases, dispatch, masks, variants
from attn_dispatch.backend import Raw
from attn_dispatch.registry import current
from attn_dispatch.rewrites.merge_parts import merge

F64 = torch.float64


def close(got, want, atol=2e-6):
    torch.testing.assert_close(got.to(want.dtype), want, atol=atol, rtol=1e-5)


def qkv(b=2, hq=4, hkv=2, sq=5, skv=9, d=16, dv=None, dtype=torch.float32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = ((b, hq, sq, d), (b, hkv, skv, d), (b, hkv, skv, dv or d))
    return [torch.randn(s, generator=gen, dtype=F64).to(dtype) for s in shapes]


def dense(q, k, v, allowed=None, bias=None, sinks=None, softcap=None, scale=None):
    """Plain float64 attention: (out, lse)."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    scores = scores if not softcap else softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    scores = scores if allowed is None else scores.masked_fill(~allowed, -math.inf)
    sink = torch.full((q.shape[1],), -math.inf, dtype=F64) if sinks is None else sinks.double()
    logits = torch.cat([scores, sink.view(1, -1, 1, 1).expand(*q.shape[:3], 1)], -1)
    weights = logits.softmax(-1)[..., :-1].nan_to_num(0.0)
    return weights @ v, logits.logsumexp(-1)


def legal(*args, **options):
    """All candidates that may run a call."""
    return [name for name, _ in dispatch.explain(*args, **options).legal if _is_quick(name)]


def _is_quick(name):
    """Not a backend that compiles for seconds for each op: those have tests of their own."""
    return current().backends[name.split(" > ")[-1]].compile_s == 0


def everywhere(want, *args, atol=2e-6, **options):
    """The call gives ``want`` by default and on every candidate that does not refuse it."""
    names = legal(*args, **options)
    assert "eager" in names
    for backend in (None, *names):
        close(dispatch.attention(*args, backend=backend, **options), want, atol)
    return names


def causal_end(sq, skv):
    return torch.arange(skv) <= torch.arange(sq)[:, None] + skv - sq


# --- positions (1, 2) ------------------------------------------------------------------------------------------------


def test_case_1_two_queries_over_five_keys_see_4_and_5_at_the_end_and_1_and_2_at_0():
    q, k, v = qkv(sq=2, skv=5, dtype=F64)
    for options, counts in (({"attn_mask": masks.causal()}, (4, 5)), ({"is_causal": True}, (1, 2))):
        want = torch.cat([dense(q[:, :, i : i + 1], k[:, :, :n], v[:, :, :n])[0] for i, n in enumerate(counts)], 2)
        everywhere(want, q, k, v, enable_gqa=True, atol=1e-12, **options)


def test_case_2_rows_before_the_first_key_are_empty():
    q, k, v = qkv(sq=5, skv=2)
    for backend in ("eager", "densify_mask > sdpa_flash", "blocked"):
        out, lse = dispatch.attention(
            q, k, v, attn_mask=masks.causal(), enable_gqa=True, return_lse=True, backend=backend
        )
        assert not out[:, :, :3].any()
        assert bool((lse[:, :, :3] == -math.inf).all())
        want = dense(q, k, v, causal_end(5, 2))
        close(out, want[0]), close(lse[:, :, 3:], want[1][:, :, 3:])


# --- ALiBi and biases (8, 25) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 7, 8, 12, 25, 40, 71, 112])
def test_case_8_slopes_are_blooms(heads):
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    close(biases.alibi_slopes(heads), _get_alibi_slopes(heads, torch.device("cpu")), 1e-7)


@pytest.mark.parametrize("heads", [6, 12])
def test_case_8_causal_alibi_equals_blooms_shortcut_and_its_lse_does_not_shift(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    q, k, v = qkv(hq=heads, hkv=heads, sq=4, skv=9)
    theirs = build_alibi_tensor(torch.ones(2, 9, dtype=torch.int64), heads, torch.float32).view(2, heads, 1, 9).double()
    slopes = biases.alibi_slopes(heads)
    allowed = causal_end(4, 9)
    names = everywhere(dense(q, k, v, allowed, theirs)[0], q, k, v, attn_mask=masks.causal(), bias=slopes)
    assert "materialise_bias > sdpa_flash" in names or "materialise_bias > densify_mask > sdpa_flash" in names
    distance = (torch.arange(4)[:, None] + 5 - torch.arange(9)).abs()
    exact = dense(q, k, v, allowed, -slopes.double().view(-1, 1, 1) * distance)
    for backend in (None, "eager", "densify_mask > sdpa_flash"):
        got = dispatch.attention(q, k, v, attn_mask=masks.causal(), bias=slopes, return_lse=True, backend=backend)
        close(got.lse, exact[1])
    assert (dense(q, k, v, allowed, theirs)[1] - exact[1]).abs().max() > 0.1  # the shortcut would be seen


def test_case_8_alibi_without_a_causal_mask_has_absolute_distances_also_with_sinks_and_padding():
    q, k, v = qkv(hq=6, hkv=3, sq=5, skv=9)
    slopes, sinks, lengths = biases.alibi_slopes(6), torch.randn(6), torch.tensor([9, 4])
    distance = (torch.arange(5)[:, None] + 4 - torch.arange(9)).abs()
    padded = (torch.arange(9) < lengths[:, None])[:, None, None]
    want = dense(q, k, v, padded, -slopes.double().view(-1, 1, 1) * distance, sinks)[0]
    everywhere(want, q, k, v, bias=slopes, sinks=sinks, key_lengths=lengths, enable_gqa=True)


def test_a_fused_kernel_runs_an_alibi_decode_step():
    q, k, v = (x.double() for x in qkv(b=1, hq=32, hkv=8, sq=1, skv=4096, d=64))  # flash_decode does at less precision
    chosen = dispatch.explain(q, k, v, bias=biases.alibi_slopes(32), enable_gqa=True).chosen
    assert "sdpa_flash" in chosen
    assert "materialise_bias" in chosen


@pytest.mark.parametrize("decoder", [False, True])
def test_relative_bias_equals_t5s_with_gradients_to_the_table(decoder):
    from transformers.models.t5.modeling_t5 import T5Attention, T5Config

    torch.manual_seed(0)
    theirs = T5Attention(T5Config(d_model=32, d_kv=8, num_heads=4, is_decoder=decoder), True, 0)
    table = theirs.relative_attention_bias.weight.detach().clone().requires_grad_()
    for sq, skv in ((7, 300), (300, 300), (1, 40)):
        want = theirs.compute_bias(sq, skv, past_seen_tokens=skv - sq)
        assert torch.equal(biases.t5_relative_bias(table, sq, skv, bidirectional=not decoder), want)
    q, k, v = qkv(hq=4, hkv=4, sq=40, skv=40, d=8)
    grads = []
    for bias, weight in (
        (theirs.compute_bias(40, 40), theirs.relative_attention_bias.weight),
        (biases.t5_relative_bias(table, 40, 40, bidirectional=not decoder), table),
    ):
        out = (
            dispatch.attention(q, k, v, bias=bias, scale=1.0)
            if weight is table
            else dense(q, k, v, bias=bias, scale=1.0)[0]
        )
        grads.append(torch.autograd.grad(out.double().square().sum(), weight)[0])
    assert grads[0].abs().max() > 1e-3
    close(grads[1], grads[0], 1e-4)


def test_wrong_relative_biases_are_named():
    with pytest.raises(InputError, match=r"table must be \[buckets, Hq\]"):
        biases.t5_relative_bias(torch.zeros(32), 2, 2)
    with pytest.raises(InputError, match="an even number >= 4"):
        biases.t5_relative_bias(torch.zeros(33, 2), 2, 2)
    with pytest.raises(InputError, match="max_distance must be > 8"):
        biases.t5_relative_bias(torch.zeros(32, 2), 2, 2, max_distance=8)
    with pytest.raises(ValueError, match="at least one head"):
        biases.alibi_slopes(0)


@pytest.mark.parametrize("shape", [(5, 9), (1, 1, 5, 9), (2, 1, 1, 9), (1, 4, 1, 1), (1, 4, 5, 9)])
def test_case_25_gradients_of_a_broadcast_bias_are_summed(shape):
    q, k, v = qkv(dtype=F64)
    bias = torch.randn(shape, dtype=F64, requires_grad=True)
    want = torch.autograd.grad(dense(q, k, v, causal_end(5, 9), bias)[0].square().sum(), bias)[0]
    options = {"attn_mask": masks.causal(), "bias": bias, "enable_gqa": True}
    for backend in (None, *legal(q, k, v, **options)):
        out = dispatch.attention(q, k, v, backend=backend, **options)
        got = torch.autograd.grad(out.square().sum(), bias)[0]
        assert got.shape == bias.shape
        close(got, want, 1e-12)


def test_case_25_gradients_of_slopes():
    q, k, v = qkv(dtype=F64)
    slopes = biases.alibi_slopes(4).double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda s: dispatch.attention(q, k, v, attn_mask=masks.causal(), bias=s, enable_gqa=True), slopes
    )


# --- softcap, sinks (9, 10) ------------------------------------------------------------------------------------------


def test_case_9_softcap_comes_before_bias_and_mask_as_in_onnx_and_gemma2():
    from onnx.reference.ops.op_attention import _compute_attention
    from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

    q, k, v = (3 * x for x in qkv(sq=6, skv=6))
    bias = torch.randn(1, 4, 6, 6)
    masked = bias.masked_fill(~causal_end(6, 6), -math.inf)
    onnx = _compute_attention(q.numpy(), k.numpy(), v.numpy(), masked.numpy(), softcap=1.5)[0]
    module = SimpleNamespace(num_key_value_groups=2, training=False, head_dim=16)
    gemma = eager_attention_forward(module, q, k, v, masked, softcap=1.5)[0].transpose(1, 2)
    close(gemma, torch.from_numpy(np.asarray(onnx)), 1e-5)
    everywhere(gemma, q, k, v, is_causal=True, bias=bias, softcap=1.5, enable_gqa=True, atol=1e-5)
    other = dense(q, k, v, causal_end(6, 6))[0]
    wrong = dense(q, k, v, causal_end(6, 6), bias)[0]
    assert min((gemma - other).abs().max(), (gemma - wrong).abs().max()) > 1e-2  # each part is seen


def test_case_9_what_is_masked_has_weight_exactly_0_under_a_softcap():
    q, k, v = qkv(sq=6, skv=6)
    weights = dispatch.attention(q, k, v, is_causal=True, softcap=0.5, return_weights=True, enable_gqa=True).weights
    assert not weights[..., ~causal_end(6, 6)].any()
    close(weights.sum(-1), torch.ones(2, 4, 6))


def _fla():
    path = Path(importlib.util.find_spec("fla").origin).parent / "ops" / "attn" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive_attn", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_parallel_attn


@pytest.mark.parametrize("window", [None, 3])
def test_case_10_sinks_equal_fla_and_gpt_oss(window):
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    q, k, v = qkv(sq=9, skv=9)
    sinks = torch.randn(4)
    theirs = _fla()(*(x.transpose(1, 2) for x in (q, k, v)), window_size=window, sink_bias=sinks)[0].transpose(1, 2)
    allowed = causal_end(9, 9)
    allowed = allowed if window is None else allowed & (torch.arange(9)[:, None] - torch.arange(9) < window)
    module = SimpleNamespace(num_key_value_groups=2, training=False, sinks=sinks)
    float_mask = torch.zeros(9, 9).masked_fill(~allowed, -math.inf)
    gpt_oss = eager_attention_forward(module, q, k, v, float_mask, scaling=0.25)[0].transpose(1, 2)
    close(gpt_oss, theirs)
    options = {"attn_mask": masks.causal()} if window is None else {"window": (window - 1, 0)}
    everywhere(theirs, q, k, v, sinks=sinks, enable_gqa=True, **options)


def test_case_10_a_sink_of_minus_infinity_is_none_a_large_one_takes_all_one_key_shares():
    q, k, v = qkv()
    everywhere(dense(q, k, v)[0], q, k, v, sinks=torch.full((4,), -math.inf), enable_gqa=True)
    assert dispatch.attention(q, k, v, sinks=torch.full((4,), 200.0), enable_gqa=True).abs().max() < 1e-30
    one = dispatch.attention(q, k[:, :, :1], v[:, :, :1], sinks=torch.zeros(4), enable_gqa=True)
    score = (q @ k[:, :, :1].repeat_interleave(2, 1).mT) / 4
    close(one, torch.sigmoid(score) * v[:, :, :1].repeat_interleave(2, 1))


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("backend", ["eager", "sdpa_flash", "blocked"])
def test_cases_4_and_10_split_keys_merge_with_empty_parts_and_one_sink(parts, backend):
    q, k, v = qkv(hkv=4, sq=2, skv=20)
    sinks = torch.randn(4)
    lengths = torch.tensor([20, 6])  # the later parts of row 1 are empty
    pieces, size = [], 20 // parts
    for start in range(0, 20, size):
        own = (lengths - start).clamp(0, size)
        part = [x[:, :, start : start + size] for x in (k, v)]
        pieces.append(Raw(*dispatch.attention(q, *part, key_lengths=own, return_lse=True, backend=backend)))
    none = Raw(torch.zeros_like(q), torch.full(q.shape[:3], -math.inf))
    whole = merge([none, *pieces, none])
    allowed = (torch.arange(20) < lengths[:, None])[:, None, None]
    want, lse = dense(q, k, v, allowed)
    close(whole.out, want), close(whole.lse, lse)
    with_sink = whole.out * torch.sigmoid(whole.lse - sinks.view(1, -1, 1))[..., None]
    close(with_sink, dense(q, k, v, allowed, sinks=sinks)[0])
    close(dispatch.attention(q, k, v, key_lengths=lengths, sinks=sinks), with_sink)


def test_case_10_split_kv_decode_is_a_candidate_and_applies_sinks_once(monkeypatch):
    from attn_dispatch.device import DeviceFacts
    from attn_dispatch.rewrites import merge_parts

    monkeypatch.setattr(merge_parts, "facts", lambda device: DeviceFacts(device, "test", "test", 5))
    q, k, v = qkv(b=1, hq=2, hkv=1, sq=1, skv=1303)
    sinks = torch.randn(2)
    names = legal(q, k, v, sinks=sinks, enable_gqa=True)
    assert (
        "apply_sinks > fold_groups > merge_parts > sdpa_flash" in names
        or "apply_sinks > merge_parts > sdpa_flash" in names
    )
    for name in (n for n in names if "merge_parts" in n):
        got = dispatch.attention(q, k, v, sinks=sinks, enable_gqa=True, return_lse=True, backend=name)
        want = dense(q, k, v, sinks=sinks)
        close(got.out, want[0]), close(got.lse, want[1])


# --- heads and sizes (11, 12) ----------------------------------------------------------------------------------------


def test_case_11_query_head_h_uses_kv_head_h_over_the_group_size():
    q = torch.zeros(1, 4, 1, 8)
    k = torch.zeros(1, 2, 3, 8)
    v = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1).expand(1, 2, 3, 8)
    for backend in (None, *legal(q, k, v, enable_gqa=True)):
        got = dispatch.attention(q, k, v, enable_gqa=True, backend=backend)
        assert got[0, :, 0, 0].tolist() == [10.0, 10.0, 20.0, 20.0]
    everywhere(dense(*qkv(hkv=1))[0], *qkv(hkv=1), enable_gqa=True)


@pytest.mark.parametrize("sizes", [(192, 128), (8, 20), (7, 5), (20, 3)])
@pytest.mark.parametrize(("sq", "skv"), [(17, 17), (1, 33), (5, 33)])
def test_case_12_heads_of_mla_and_of_odd_sizes(sizes, sq, skv):
    q, k, v = qkv(sq=sq, skv=skv, d=sizes[0], dv=sizes[1])
    names = everywhere(dense(q, k, v, causal_end(sq, skv))[0], q, k, v, attn_mask=masks.causal(), enable_gqa=True)
    assert any("pad_head_dim" in n and "sdpa_flash" in n for n in names), "no fused kernel for these heads"


def test_mla_heads_run_fused_by_default_when_the_work_is_large():
    q, k, v = qkv(b=1, hq=16, hkv=16, sq=512, skv=512, d=192, dv=128)
    assert "sdpa_flash" in dispatch.explain(q, k, v, is_causal=True).chosen


# --- packed documents (13) and prefixes (14) -------------------------------------------------------------------------


CUTS = {
    "length 1": [0, 1, 9],
    "empty": [0, 4, 4, 9],
    "empty ends": [0, 0, 5, 9, 9],
    "one": [0, 9],
    "all": list(range(10)),
}


def alone(q, k, v, cuts, keys=None, **options):
    """Each document by itself, float64."""
    parts = []
    for (a, b), (c, d) in zip(itertools.pairwise(cuts), itertools.pairwise(keys or cuts), strict=True):
        allowed = causal_end(b - a, d - c)
        slopes = options.get("bias")
        distance = (torch.arange(b - a)[:, None] + (d - c) - (b - a) - torch.arange(d - c)).abs()
        bias = None if slopes is None else -slopes.double().view(-1, 1, 1) * distance
        left = options.get("left")
        allowed = allowed if left is None else allowed & (distance <= left)
        parts.append(dense(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], allowed, bias, options.get("sinks"))[0])
    return torch.cat(parts, 2)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_case_13_documents_equal_a_loop_over_them_with_alibi_window_and_sinks(cuts):
    q, k, v = qkv(b=1, sq=9, skv=9)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    slopes, sinks = biases.alibi_slopes(4), torch.randn(4)
    for theirs, ours in (
        ({}, {"attn_mask": masks.causal()}),
        ({"bias": slopes}, {"attn_mask": masks.causal(), "bias": slopes}),
        ({"left": 2, "sinks": sinks}, {"window": (2, 0), "sinks": sinks}),
    ):
        want = alone(q, k, v, cuts, **theirs)
        got = dispatch.varlen_attention(*packed, torch.tensor(cuts, dtype=torch.int32), **ours)
        close(got.transpose(0, 1)[None], want)
        mask = masks.documents(cuts) & ours.get("attn_mask", masks.full())
        everywhere(want, q, k, v, enable_gqa=True, **{**ours, "attn_mask": mask})
    if all(b > a for a, b in itertools.pairwise(cuts)):
        got = dispatch.varlen_attention(*packed, cuts, is_causal=True, return_lse=True)
        close(got.out.transpose(0, 1)[None], alone(q, k, v, cuts))
        assert got.lse.shape == (4, 9)


@pytest.mark.parametrize("prefix", [0, 2, [1, 0, 4]])
def test_case_13_prefixes_and_chunks_count_from_the_first_row_of_a_document(prefix):
    cuts = [0, 2, 5, 11]
    each = prefix if isinstance(prefix, list) else [prefix] * 3
    i = torch.arange(11)
    doc = torch.bucketize(i, torch.tensor(cuts[1:]), right=True)
    at = i - torch.tensor(cuts)[doc]
    same = doc[:, None] == doc
    want = same & ((at <= at[:, None]) | (at < torch.tensor(each)[doc]))
    assert torch.equal(masks.documents(cuts, prefix=prefix).dense(11, 11).expand(11, 11), want)
    chunks = masks.causal() & masks.documents(cuts, chunk=2)
    assert torch.equal(chunks.dense(11, 11), same & (at <= at[:, None]) & (at // 2 == at[:, None] // 2))
    q, k, v = qkv(b=1, sq=11, skv=11)
    everywhere(dense(q, k, v, want)[0], q, k, v, attn_mask=masks.documents(cuts, prefix=prefix), enable_gqa=True)


def test_case_13_keys_of_other_lengths_are_aligned_at_the_end_of_each_segment():
    q, k, v = qkv(b=1, sq=6, skv=10)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    cuts, keys = [0, 2, 2, 6], [0, 5, 6, 10]
    got = dispatch.varlen_attention(*packed, cuts, keys, attn_mask=masks.causal(), return_lse=True)
    close(got.out.transpose(0, 1)[None], alone(q, k, v, cuts, keys))
    with pytest.raises(InputError, match="FlashAttention's causal from the last"):
        dispatch.varlen_attention(*packed, cuts, keys, is_causal=True)
    first = dispatch.varlen_attention(*packed, cuts, keys, is_causal=True, q_offset=0)
    close(first[0], packed[2][0].repeat_interleave(2, 0))  # its first query sees its first key alone
    full = dispatch.varlen_attention(*packed, cuts, [0, 0, 6, 10])
    assert not full[:2].any()  # no keys: empty rows
    cross = masks.documents([0, 2, 6], [0, 5, 10])
    want = torch.cat(
        [dense(q[:, :, :2], k[:, :, :5], v[:, :, :5])[0], dense(q[:, :, 2:], k[:, :, 5:], v[:, :, 5:])[0]], 2
    )
    everywhere(want, q, k, v, attn_mask=cross, enable_gqa=True)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=6), st.integers(0, 99))
def test_packed_rows_equal_each_segment_alone(lengths, seed):
    cuts, keys = ([0, *itertools.accumulate(n)] for n in zip(*lengths, strict=True))
    q, k, v = qkv(b=1, sq=cuts[-1], skv=keys[-1], dtype=F64, seed=seed)
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    got = dispatch.varlen_attention(*packed, cuts, keys, attn_mask=masks.causal())
    close(got.transpose(0, 1)[None], alone(q, k, v, cuts, keys), 1e-12)


BAD_SEGMENTS = {
    "add up": ([0, 4, 8], None, {}, InputError, r"cu_seqlens_q adds up to 8 rows, there are 9"),
    "keys add up": ([0, 9], [0, 10], {}, InputError, r"cu_seqlens_k adds up to 10 rows, there are 9"),
    "fall": ([0, 5, 4, 9], None, {}, InputError, "falls at 1"),
    "start": ([1, 9], None, {}, InputError, "must start at 0"),
    "other count": ([0, 9], [0, 4, 9], {}, InputError, "has 1 segments and cu_seqlens_k 2"),
    "floats": ([0.0, 9.0], None, {}, InputTypeError, "must be int32 or int64"),
    "mask tensor": (
        [0, 9],
        None,
        {"attn_mask": torch.ones(9, 9, dtype=torch.bool)},
        InputError,
        "a Mask without tensors",
    ),
    "lengths": ([0, 9], None, {"key_lengths": torch.tensor([3])}, InputError, "key_lengths cannot be given"),
    "bias": ([0, 9], None, {"bias": torch.ones(9, 9)}, InputError, "ALiBi slopes"),
    "offset": ([0, 9], None, {"q_offset": torch.tensor([1])}, InputError, "q_offset must be an int"),
    "layout": ([0, 9], None, {"layout": "bshd"}, InputError, "layout='bshd' cannot be given"),
    "weights": ([0, 9], None, {"return_weights": True}, InputError, "return_weights cannot be given"),
}


@pytest.mark.parametrize(("cuts", "keys", "options", "kind", "words"), BAD_SEGMENTS.values(), ids=BAD_SEGMENTS)
def test_wrong_segments_are_named(cuts, keys, options, kind, words):
    x = torch.zeros(9, 2, 8)
    with pytest.raises(kind, match=words):
        dispatch.varlen_attention(x, x, x, torch.tensor(cuts), keys and torch.tensor(keys), **options)


def test_documents_that_do_not_add_up_are_named():
    x = torch.zeros(1, 2, 9, 8)
    with pytest.raises(InputError, match="its segments add up to 8 queries, there are 9"):
        dispatch.attention(x, x, x, attn_mask=masks.documents([0, 4, 8]))
    with pytest.raises(ValueError, match="must be equally many"):
        masks.documents([0, 4, 9], [0, 9])


@pytest.mark.parametrize("lengths", [[0, 0], [9, 9], [0, 9], [3, 0]])
def test_case_14_prefixes_per_batch(lengths):
    q, k, v = qkv(sq=9, skv=9)
    prefix = torch.tensor(lengths)
    allowed = causal_end(9, 9) | (torch.arange(9) < prefix[:, None])[:, None, None]
    everywhere(dense(q, k, v, allowed)[0], q, k, v, attn_mask=masks.prefix_lm(prefix), enable_gqa=True)
    for b, n in enumerate(lengths):
        one = dispatch.attention(*(x[b : b + 1] for x in (q, k, v)), attn_mask=masks.prefix_lm(n), enable_gqa=True)
        close(one, dense(q, k, v, allowed)[0][b : b + 1])


# --- nested tensors --------------------------------------------------------------------------------------------------


def nested(lengths, heads, d, seed=0, grad=False):
    gen = torch.Generator().manual_seed(seed)
    rows = [torch.randn(n, heads, d, generator=gen, dtype=F64) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, requires_grad=grad)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (2, 0)}, {"softcap": 2.0}], ids=str)
def test_nested_tensors_give_each_sequence_alone_with_the_offsets_of_the_query(options):
    lengths = [4, 1, 6, 4]
    q, k, v = (nested(lengths, h, 8, i).transpose(1, 2) for i, h in enumerate((4, 2, 2)))
    out = dispatch.attention(q, k, v, enable_gqa=True, **options)
    assert out.shape == q.shape
    assert (out + q).is_nested  # of one shape with the query, as elementwise operations want
    for got, *one in zip(*(x.unbind() for x in (out, q, k, v)), strict=True):
        close(got, dispatch.attention(*(x[None] for x in one), enable_gqa=True, backend="eager", **options)[0], 1e-12)


def test_nested_tensors_equal_torchs_sdpa():
    q, k, v = (nested([4, 1, 6], 2, 8, i).transpose(1, 2) for i in range(3))
    close(dispatch.attention(q, k, v).values(), F.scaled_dot_product_attention(q, k, v).values(), 1e-12)


def test_nested_keys_may_have_other_lengths_and_sequences_may_be_empty():
    q = nested([3, 0, 2, 1], 2, 8, 1).transpose(1, 2)
    k = nested([5, 2, 1, 0], 2, 8, 2).transpose(1, 2)
    out, lse = dispatch.attention(q, k, k, attn_mask=masks.causal(), return_lse=True)
    assert lse.shape == q.shape[:3]
    for got, sums, one, keys in zip(out.unbind(), lse.unbind(), q.unbind(), k.unbind(), strict=True):
        want = dense(one[None], keys[None], keys[None], causal_end(one.shape[1], keys.shape[1]))
        close(got, want[0][0], 1e-12), close(sums, want[1][0], 1e-12)


def test_nested_tensors_have_gradients_and_other_layouts():
    flat = nested([3, 5], 2, 8, grad=True)
    out = dispatch.attention(flat, flat, flat, layout="bshd", is_causal=True)
    assert out.shape == flat.shape
    close(out.values(), dispatch.attention(*[flat.transpose(1, 2)] * 3, is_causal=True).transpose(1, 2).values(), 1e-12)
    (got,) = torch.autograd.grad(out.values().square().sum(), flat)
    leaves = [x.detach().requires_grad_() for x in flat.unbind()]
    for leaf, grad in zip(leaves, got.unbind(), strict=True):
        x = leaf.transpose(0, 1)[None]
        (want,) = torch.autograd.grad(dense(x, x, x, causal_end(len(leaf), len(leaf)))[0].square().sum(), leaf)
        close(grad, want, 1e-11)


def test_wrong_nested_tensors_are_named():
    q = nested([3, 5], 2, 8)
    t = q.transpose(1, 2)
    with pytest.raises(InputError, match="ragged dimension j"):
        dispatch.attention(q, q, q)
    with pytest.raises(InputTypeError, match="query is a nested tensor and key is not"):
        dispatch.attention(t, torch.zeros(2, 2, 3, 8, dtype=F64), t)
    with pytest.raises(InputError, match="equally many sequences"):
        dispatch.attention(t, *[nested([3], 2, 8).transpose(1, 2)] * 2)
    with pytest.raises(InputError, match="the same lengths"):
        dispatch.attention(t, t, nested([5, 3], 2, 8).transpose(1, 2))
    with pytest.raises(InputError, match="key_lengths cannot be given"):
        dispatch.attention(t, t, t, key_lengths=torch.tensor([3, 5]))


# --- chunked prefill and lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [(12,), (5, 7), (1,) * 12, (4, 4, 4)])
@pytest.mark.parametrize("options", [{}, {"window": (3, 0)}, {"softcap": 1.0}], ids=str)
def test_chunked_prefill_equals_one_shot(chunks, options):
    q, k, v = qkv(sq=12, skv=12, dtype=F64)
    whole = dispatch.attention(q, k, v, is_causal=True, enable_gqa=True, backend="eager", **options)
    at, found = 0, {"int": [], "tensor": [], "mask": []}
    for n in chunks:
        part = (q[:, :, at : at + n], k[:, :, : at + n], v[:, :, : at + n])
        found["int"].append(dispatch.attention(*part, is_causal=True, q_offset=at, enable_gqa=True, **options))
        offsets = torch.tensor([at, at])
        found["tensor"].append(dispatch.attention(*part, is_causal=True, q_offset=offsets, enable_gqa=True, **options))
        found["mask"].append(dispatch.attention(*part, attn_mask=masks.causal(), enable_gqa=True, **options))
        at += n
    for parts in found.values():
        close(torch.cat(parts, 2), whole, 1e-12)


def test_chunks_of_rows_at_different_places_of_a_padded_cache():
    q, k, v = qkv(b=3, sq=4, skv=12, dtype=F64)
    before = torch.tensor([0, 3, 8])
    k[0, :, 4:], v[1, :, 7:] = math.nan, math.inf
    got = dispatch.attention(
        q, k, v, is_causal=True, q_offset=before, key_lengths=before + 4, enable_gqa=True, return_lse=True
    )
    for b, n in enumerate(before.tolist()):
        one = (q[b : b + 1], k[b : b + 1, :, : n + 4], v[b : b + 1, :, : n + 4])
        want = dense(*one, causal_end(4, n + 4))
        close(got.out[b : b + 1], want[0], 1e-12), close(got.lse[b : b + 1], want[1], 1e-12)


def test_decode_with_a_length_for_each_row_equals_each_alone():
    q, k, v = qkv(b=4, sq=1, skv=32)
    lengths = torch.tensor([1, 32, 0, 17])
    allowed = (torch.arange(32) < lengths[:, None])[:, None, None]
    everywhere(dense(q, k, v, allowed)[0], q, k, v, key_lengths=lengths, enable_gqa=True)


# --- paged keys and values (15) --------------------------------------------------------------------------------------


def paged(k, v, lengths, page, layout="bhsd", spare=3, seed=0):
    """Contiguous keys in pages at random places, NaN wherever nothing is: (key, value, table)."""
    b, h, skv, _ = k.shape
    per = -(-skv // page)
    gen = torch.Generator().manual_seed(seed)
    order = torch.randperm(b * per + spare, generator=gen)
    table = order[: b * per].view(b, per).to(torch.int32)
    pages = [torch.full((b * per + spare, h, page, x.shape[3]), math.nan, dtype=x.dtype) for x in (k, v)]
    for row, n in enumerate(lengths.tolist()):
        for j in range(n):
            for x, stored in zip((k, v), pages, strict=True):
                stored[table[row, j // page], :, j % page] = x[row, :, j]
        unused = slice(-(-n // page), None)
        table[row, unused] = torch.tensor([-1, 1 << 30, 0])[torch.arange(table[row, unused].numel()) % 3].int()
    if layout == "bshd":
        pages = [x.transpose(1, 2).contiguous() for x in pages]
    return *pages, table


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("lengths", [[12, 5, 1], [12, 12, 12], [0, 3, 0], [0, 0, 0]], ids=str)
def test_case_15_pages_equal_contiguous_keys_and_garbage_is_never_seen(page, layout, lengths):
    q, k, v = qkv(b=3, sq=1, skv=12, dv=8)
    lengths = torch.tensor(lengths)
    pages_k, pages_v, table = paged(k, v, lengths, page, layout)
    query = q.transpose(1, 2) if layout == "bshd" else q
    allowed = (torch.arange(12) < lengths[:, None])[:, None, None]
    want = dense(q, k, v, allowed)[0]
    for options in ({}, {"attn_mask": masks.causal()}, {"backend": "eager"}):
        got = dispatch.attention(
            query, pages_k, pages_v, block_table=table, key_lengths=lengths, layout=layout, enable_gqa=True, **options
        )
        close(got.transpose(1, 2) if layout == "bshd" else got, want)


def test_case_15_masks_window_alibi_and_sinks_count_from_each_rows_own_last_key():
    q, k, v = qkv(b=3, sq=3, skv=12)
    lengths = torch.tensor([12, 5, 3])
    pages = paged(k, v, lengths, 4)
    slopes, sinks = biases.alibi_slopes(4), torch.randn(4)
    own = {"block_table": pages[2], "key_lengths": lengths, "enable_gqa": True}
    for options, left, with_bias in (
        ({"attn_mask": masks.causal()}, 99, False),
        ({"window": (2, 0)}, 2, False),
        ({"attn_mask": masks.causal(), "bias": slopes, "sinks": sinks}, 99, True),
    ):
        got = dispatch.attention(q, *pages[:2], **own, **options)
        for b, n in enumerate(lengths.tolist()):
            one = [x[b : b + 1, :, :n] for x in (k, v)]
            distance = torch.arange(3)[:, None] + n - 3 - torch.arange(n)
            bias = -slopes.double().view(-1, 1, 1) * distance.abs() if with_bias else None
            allowed = (distance >= 0) & (distance <= left)
            close(got[b : b + 1], dense(q[b : b + 1], *one, allowed, bias, sinks if with_bias else None)[0])


def test_case_15_pages_are_shared_and_have_gradients_and_tensors_for_the_capacity():
    q, k, v = qkv(b=2, sq=1, skv=8, dtype=F64)
    k[1, :, :4], v[1, :, :4] = k[0, :, :4], v[0, :, :4]  # a common prefix in one page
    pages = torch.stack([k[0, :, :4], k[0, :, 4:], k[1, :, 4:]]).requires_grad_()
    values = torch.stack([v[0, :, :4], v[0, :, 4:], v[1, :, 4:]]).requires_grad_()
    table, lengths = torch.tensor([[0, 1, 9], [0, 2, 9]]), torch.tensor([8, 7])
    bias = torch.randn(2, 1, 1, 12, dtype=F64)
    keep = torch.rand(2, 1, 1, 12) < 0.7
    options = {"block_table": table, "key_lengths": lengths, "enable_gqa": True, "bias": bias, "attn_mask": keep}
    out = dispatch.attention(q, pages, values, **options)
    allowed = keep[..., :8] & (torch.arange(8) < lengths[:, None])[:, None, None]
    got = torch.autograd.grad(out.square().sum(), (pages, values))
    leaves = [x.detach().clone().requires_grad_() for x in (pages, values)]
    rows = [
        torch.stack([x[[0, 1]].transpose(0, 1).flatten(1, 2), x[[0, 2]].transpose(0, 1).flatten(1, 2)]) for x in leaves
    ]
    want = dense(q, *rows, allowed, bias[..., :8])[0]
    close(out, want, 1e-12)
    for mine, theirs in zip(got, torch.autograd.grad(want.square().sum(), leaves), strict=True):
        close(mine, theirs, 1e-11)


def test_case_15_no_more_rows_are_gathered_than_the_longest_sequence_has():
    q, k, v = qkv(b=2, sq=1, skv=64)
    lengths = torch.tensor([9, 3])
    pages = paged(k, v, lengths, 4)
    with dispatch.capture() as workload:
        dispatch.attention(q, *pages[:2], block_table=pages[2], key_lengths=lengths, enable_gqa=True)
    (entry,) = workload
    assert entry.op.Skv == 9
    report = dispatch.explain(q, *pages[:2], block_table=pages[2], key_lengths=lengths, enable_gqa=True)
    assert "pages gathered into 9 rows" in str(report)


def _page_case(**changes):
    given = {"block_table": torch.tensor([[0, 1], [2, 3]]), "key_lengths": torch.tensor([8, 5]), "q": (2, 2, 1, 8)}
    given |= changes
    pages = torch.zeros(given.pop("pages", (4, 2, 4, 8)))
    q = torch.zeros(given.pop("q"))
    return lambda call=dispatch.attention: call(q, pages, given.pop("value", pages), **given)


BAD_PAGES = {
    "page": (
        {"block_table": torch.tensor([[0, 1], [2, 7]])},
        InputError,
        r"block_table\[1, 1\] is page 7, there are 4",
    ),
    "negative": ({"block_table": torch.tensor([[-1, 1], [2, 3]])}, InputError, r"block_table\[0, 0\] is page -1"),
    "rank": ({"block_table": torch.tensor([0, 1])}, InputError, r"must be \[B, max_pages\] with B 2, got \[2\]"),
    "batch": ({"block_table": torch.tensor([[0, 1]])}, InputError, r"with B 2, got \[1, 2\]"),
    "dtype": ({"block_table": torch.zeros(2, 2)}, InputTypeError, "block_table must be an int32 or int64 tensor"),
    "no lengths": ({"key_lengths": None}, InputError, "block_table needs key_lengths"),
    "too long": ({"key_lengths": torch.tensor([9, 1])}, InputError, r"must be in \[0, 8\], what 2 pages of 4 hold"),
    "negative length": ({"key_lengths": torch.tensor([-1, 1])}, InputError, r"must be in \[0, 8\]"),
    "lengths": ({"key_lengths": torch.tensor([1])}, InputError, r"key_lengths must be integers \[B\] = \[2\]"),
    "causal": ({"is_causal": True}, InputError, "is_causal counts from key 0"),
    "value": ({"value": torch.zeros(5, 2, 4, 8)}, InputError, "must agree in all but the last size"),
    "not pages": ({"pages": (2, 4, 8)}, InputError, r"pages \[num_pages, Hkv, page, D\]"),
    "layout": ({"layout": "sbhd"}, InputError, "layout must be one of"),
}


@pytest.mark.parametrize(("changes", "kind", "words"), BAD_PAGES.values(), ids=BAD_PAGES)
def test_wrong_pages_are_named_before_anything_runs(changes, kind, words):
    with dispatch.capture() as workload, pytest.raises(kind, match=words):
        _page_case(**changes)()
    assert not len(workload)


def test_a_page_that_no_sequence_reaches_may_be_anything_and_a_plan_has_no_pages():
    assert _page_case(block_table=torch.tensor([[0, 1], [2, 99]]), key_lengths=torch.tensor([8, 4]))().shape == (
        2,
        2,
        1,
        8,
    )
    with pytest.raises(InputError, match="a plan runs on rows"):
        _page_case()(dispatch.plan)


def test_pages_run_in_a_compiled_graph():
    q, k, v = qkv(b=2, sq=1, skv=8)
    lengths = torch.tensor([8, 3])
    pages = paged(k, v, lengths, 4)

    def step(q, key, value, table, lengths):
        return dispatch.attention(q, key, value, block_table=table, key_lengths=lengths, enable_gqa=True)

    got = torch.compile(step, backend="eager", fullgraph=True)(q, *pages, lengths)
    allowed = (torch.arange(8) < lengths[:, None])[:, None, None]
    close(got, dense(q, k, v, allowed)[0])


# --- NaN in what is excluded (29) ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_case_29_nan_and_inf_in_other_documents_lengths_and_windows_do_not_leak(bad):
    q, k, v = qkv(b=1, sq=9, skv=9)
    k[:, :, 4:], v[:, :, 4:] = bad, bad
    clean = [x[:, :, :4] for x in (q, k, v)]
    want = dense(*clean, causal_end(4, 4))[0]
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    got = dispatch.varlen_attention(*packed, [0, 4, 9], attn_mask=masks.causal())
    close(got[:4].transpose(0, 1)[None], want)
    options = {"attn_mask": masks.causal() & masks.documents([0, 4, 9]), "enable_gqa": True}
    for backend in (None, *legal(q, k, v, **options)):
        close(dispatch.attention(q, k, v, backend=backend, **options)[:, :, :4], want)
    everywhere(dense(q, k[:, :, :4], v[:, :, :4])[0], q, k, v, key_lengths=torch.tensor([4]), enable_gqa=True)


def test_nothing_falls_back_when_a_backend_is_asked_for():
    x = torch.zeros(9, 2, 8)
    with pytest.raises(NoBackendError, match="sdpa_flash"):
        dispatch.varlen_attention(x, x, x, [0, 4, 9], softcap=1.0, backend="sdpa_flash")


def test_case_15_retention_over_pages_fades_from_each_rows_own_last_key():
    """A single row lost its causal mask, and with it where it stands: the decay counted from key 0."""
    q, k, v = qkv(b=3, hkv=4, sq=1, skv=12)
    lengths = torch.tensor([12, 5, 3])
    pages = paged(k, v, lengths, 4)
    variant = variants.Retention(torch.tensor([0.9, 0.8, 0.7, 0.6]))
    options = {"block_table": pages[2], "key_lengths": lengths, "variant": variant}
    for mask in (None, masks.causal()):
        got = dispatch.attention(q, *pages[:2], attn_mask=mask, **options)
        for b, n in enumerate(lengths.tolist()):
            one = [x[b : b + 1, :, :n] for x in (k, v)]
            want = dispatch.attention(q[b : b + 1], *one, variant=variant, attn_mask=masks.causal(), q_offset=n - 1)
            close(got[b : b + 1], want)


class Largest(TorchDispatchMode):
    """The largest tensor that any operator makes anew."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and func in (
            torch.ops.aten.clone.default,
            torch.ops.aten.index_select.default,
        ):
            self.elements = max(self.elements, out.numel())
        return out


def test_case_15_pages_that_are_views_are_gathered_without_a_copy_of_the_cache():
    q, k, v = qkv(b=2, sq=1, skv=12)
    lengths = torch.tensor([12, 5])
    pages_k, pages_v, table = paged(k, v, lengths, 4, spare=500)
    options = {"block_table": table, "key_lengths": lengths, "enable_gqa": True}
    want = dispatch.attention(q, pages_k, pages_v, **options)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (pages_k, pages_v)]
    with Largest() as seen:
        got = dispatch.attention(q, *views, **options)
    close(got, want)
    assert seen.elements < views[0].numel() // 8


def test_explain_counts_the_gathered_rows_in_either_layout():
    """It took the larger of rows and heads."""
    q, k, v = qkv(b=2, sq=1, skv=12)
    lengths = torch.tensor([1, 1])
    for layout in ("bhsd", "bshd"):
        pages = paged(k, v, lengths, 4, layout)
        query = q.transpose(1, 2) if layout == "bshd" else q
        own = {"block_table": pages[2], "key_lengths": lengths, "enable_gqa": True, "layout": layout}
        assert "pages gathered into 1 rows" in str(dispatch.explain(query, *pages[:2], **own))


def test_a_state_for_packed_rows_is_refused_also_when_the_variant_brings_it():
    x = torch.zeros(9, 2, 8)
    stateful = variants.stateful(variants.LinearAttention(), None, True)
    with pytest.raises(InputError, match="state cannot be given for sequences of different lengths"):
        dispatch.varlen_attention(x, x, x, [0, 4, 9], variant=stateful)
    nested = torch.nested.nested_tensor([torch.zeros(2, n, 8) for n in (4, 5)], layout=torch.jagged)
    with pytest.raises(InputError, match="state"):
        dispatch.attention(nested, nested, nested, variant=variants.LinearAttention(), return_state=True)
