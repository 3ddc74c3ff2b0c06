"""DeepSeek Sparse Attention: selection, attention over selected keys, the indexer layer.

Oracles that nobody here wrote: fla-core's naive files, attn-gym's references, transformers' DeepseekV32Indexer. Indices
of different implementations are compared by the scores they reach (research 11, case 21): ties may fall either way.
"""

from __future__ import annotations

import importlib.util
import itertools
import threading
from pathlib import Path

import pytest
import torch
from attn_gym.sparse.gather_attn.api import AuxRequest, gather_attn
from attn_gym.sparse.indexer.api import lightning_indexer
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from attn_dispatch import InputError, attention, dispatch, masks, nn
from attn_dispatch.errors import InputTypeError
from attn_dispatch.ir import SelectOp, TensorDesc, verify_select
from attn_dispatch.ir.tensors import Ref
from attn_dispatch.registry import current
from attn_dispatch.rewrites import gather
from attn_dispatch.rewrites.gather import Gather
from attn_dispatch.select import Selection, merge_selections


def _load_fla() -> object:
    """fla-core's naive DSA stand-alone: its package imports triton."""
    package = importlib.util.find_spec("fla")
    assert package is not None
    assert package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "ops" / "dsa" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_dsa_naive", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fla = _load_fla()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def inputs(b=2, hi=4, sq=24, skv=24, di=16, seed=0, dtype=torch.float32):
    """Index queries ``[B, Hi, Sq, Di]``, keys ``[B, Skv, Di]``, weights ``[B, Sq, Hi]`` of both signs."""
    gen = torch.Generator().manual_seed(seed)
    shapes = ((b, hi, sq, di), (b, skv, di), (b, sq, hi))
    return [torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


def qkv(b=2, hq=4, hkv=2, sq=24, skv=24, d=16, dv=16, seed=1, dtype=torch.float32):
    gen = torch.Generator().manual_seed(seed)
    shapes = ((b, hq, sq, d), (b, hkv, skv, d), (b, hkv, skv, dv))
    return [torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


def full_scores(q, k, w, relu=True):
    """All index scores ``[B, Sq, Skv]`` in float64, from the formula."""
    dots = torch.einsum("bhtd,bsd->bhts", q.double(), k.double()) * q.shape[-1] ** -0.5
    return torch.einsum("bhts,bth->bts", dots.clamp(min=0) if relu else dots, w.double())


def causal_pairs(sq, skv):
    return torch.arange(skv)[None] <= torch.arange(sq)[:, None] + skv - sq


def brute_force(scores, allowed, top_k):
    """The definition: per row the allowed keys by (-score, index), the first top_k, ascending, -1 behind."""
    rows = []
    for b, t in itertools.product(*(range(n) for n in scores.shape[:2])):
        keys = [s for s in range(scores.shape[2]) if allowed[b, t, s]]
        best = sorted(sorted(keys, key=lambda s: (-scores[b, t, s].item(), s))[:top_k])
        rows.append(best + [-1] * (top_k - len(best)))
    return torch.tensor(rows).view(*scores.shape[:2], top_k)


def assert_reaches_the_same_scores(mine, theirs, scores, atol=1e-5):
    """Two selections of as many keys per row, whose scores are the same up to rounding; neither lists a key twice."""
    reached = []
    for indices in (mine.long(), theirs.long()):
        listed = indices.sort(-1).values
        assert not ((listed[..., 1:] == listed[..., :-1]) & (listed[..., 1:] >= 0)).any()
        got = scores.gather(-1, indices.clamp(min=0)).masked_fill(indices < 0, -torch.inf)
        reached.append(got.sort(-1, descending=True).values)
    torch.testing.assert_close(reached[0], reached[1], atol=atol, rtol=0)


class Largest(TorchDispatchMode):
    """The largest tensor that any operator makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return out


# --- selection: the definition ---------------------------------------------------------------------------------------


@given(st.data())
def test_select_is_the_definition_on_scores_with_many_ties(data):
    draw = data.draw
    b, hi, sq, skv, di = (draw(st.integers(1, n), label=f"size <= {n}") for n in (2, 3, 6, 9, 2))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    q, k, w = (torch.randint(-1, 2, s, generator=gen).float() for s in ((b, hi, sq, di), (b, skv, di), (b, sq, hi)))
    top_k = draw(st.integers(1, skv + 2))
    causal, relu = draw(st.booleans()), draw(st.booleans())
    at = torch.arange(sq)[:, None]
    arguments: dict = {"scale": 1.0, "is_causal": causal, "activation": "relu" if relu else None}
    allowed = torch.ones(b, sq, skv, dtype=torch.bool)
    position = (at + skv - sq).expand(b, sq, 1)
    offset = draw(st.sampled_from(["end", "int", "tensor"]))
    if offset == "int":
        arguments["q_offset"] = draw(st.integers(-2, skv))
        position = (at + arguments["q_offset"]).expand(b, sq, 1)
    if offset == "tensor":
        arguments["q_offset"] = torch.randint(-2, skv + 1, (b,), generator=gen)
        position = at[None] + arguments["q_offset"][:, None, None]
    keys = torch.arange(skv)
    allowed &= (keys <= position) | (not causal)
    if draw(st.booleans()):
        left, right = draw(st.integers(0, 4)), draw(st.sampled_from([None, 0, 2]))
        arguments["window"] = (left, right)
        allowed &= (keys >= position - left) & ((keys <= position + right) if right is not None else True)
    if draw(st.booleans()):
        arguments["key_lengths"] = torch.randint(0, skv + 1, (b,), generator=gen)
        allowed &= keys < arguments["key_lengths"][:, None, None]
    if draw(st.booleans()):
        arguments["attn_mask"] = torch.rand(b, sq, skv, generator=gen) < 0.7
        allowed &= arguments["attn_mask"]
    scores = full_scores(q, k, w, relu) * di**0.5
    got = dispatch.select(q, k, w, top_k, **arguments)
    assert got.dtype == torch.int64
    assert torch.equal(got, brute_force(scores, allowed, top_k))


@pytest.mark.parametrize("block", [1, 200, 5000])
def test_the_size_of_blocks_changes_nothing(monkeypatch, block):
    q, k, w = (x.round() for x in inputs(sq=40, skv=50, hi=5))
    want = dispatch.select(q, k, w, 7)
    monkeypatch.setattr("attn_dispatch.select._BLOCK", block)
    monkeypatch.setattr("attn_dispatch.select._MIN_PAIRS", 1)
    assert torch.equal(dispatch.select(q, k, w, 7), want)


@pytest.mark.parametrize("top_k", [1, 5, 11])
def test_ties_go_to_the_lowest_indices_when_all_scores_are_zero(top_k):
    q, k, w = torch.zeros(1, 2, 12, 4), torch.zeros(1, 12, 4), torch.ones(1, 12, 2)
    want = [[s if s <= t else -1 for s in range(top_k)] for t in range(12)]
    assert dispatch.select(q, k, w, top_k)[0].tolist() == want


def test_equal_scores_at_the_last_place_take_the_lowest_index():
    q = torch.ones(1, 1, 1, 1)
    k = torch.tensor([[[5.0], [1.0], [2.0], [1.0], [1.0], [3.0]]])
    assert dispatch.select(q, k, torch.ones(1, 1, 1), 4).tolist() == [[[0, 1, 2, 5]]]


@pytest.mark.parametrize(("t", "top_k"), [(7, 8), (8, 8), (9, 8), (8, 1)], ids=["T<k", "T==k", "T==k+1", "k=1"])
def test_short_rows_get_all_their_keys_and_padding(t, top_k):
    q, k, w = inputs(sq=t, skv=t)
    got = dispatch.select(q, k, w, top_k)
    assert (got >= 0).sum(-1).tolist() == [[min(row + 1, top_k) for row in range(t)]] * 2
    assert torch.equal(got, brute_force(full_scores(q, k, w), causal_pairs(t, t).expand(2, t, t), top_k))


def test_as_many_places_as_keys_is_dense_causal_attention():
    q, k, w = inputs()
    query, key, value = qkv()
    chosen = dispatch.select(q, k, w, 24)
    got = attention(query, key, value, masks.selected(chosen), enable_gqa=True)
    torch.testing.assert_close(got, attention(query, key, value, is_causal=True, enable_gqa=True), atol=1e-6, rtol=1e-5)


def test_relu_is_not_left_out_and_negative_weights_count():
    q, k, w = inputs(sq=64, skv=64)
    with_relu, without = (dispatch.select(q, k, w, 8, activation=a) for a in ("relu", None))
    assert (with_relu != without).any(-1).float().mean() > 0.3
    negative = dispatch.select(q, k, -w.abs(), 8)
    assert torch.equal(negative, brute_force(full_scores(q, k, -w.abs()), causal_pairs(64, 64).expand(2, 64, 64), 8))


def test_a_nan_score_ranks_last_and_its_key_is_still_a_key():
    q, k, w = inputs(b=1, sq=1, skv=6)
    k[0, 2] = torch.nan
    assert 2 not in dispatch.select(q, k, w, 5)[0, 0].tolist()
    assert dispatch.select(q, k, w, 6)[0, 0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_select_by_the_scores_of_their_values(dtype):
    q, k, w = inputs(sq=96, skv=96, dtype=dtype)
    want = dispatch.select(q.double(), k.double(), w.double(), 16)
    assert_reaches_the_same_scores(dispatch.select(q, k, w, 16), want, full_scores(q, k, w), 1e-5)


def test_autocast_does_not_touch_the_scores():
    q, k, w = inputs(sq=96, skv=96)
    with torch.autocast("cpu", torch.bfloat16):
        got = dispatch.select(q, k, w, 16)
    assert torch.equal(got, dispatch.select(q, k, w, 16))


def test_documents_never_mix():
    q, k, w = inputs(b=1, sq=30, skv=30)
    got = dispatch.select(q, k, w, 6, attn_mask=masks.documents([0, 4, 4, 5, 18, 30]))
    for lo, hi in ((0, 4), (4, 5), (5, 18), (18, 30)):
        alone = dispatch.select(q[:, :, lo:hi], k[:, lo:hi], w[:, lo:hi], 6)
        assert torch.equal(got[:, lo:hi], torch.where(alone < 0, -1, alone + lo))


def test_a_decode_step_selects_as_its_row_of_the_prefill():
    q, k, w = (x.round() for x in inputs())
    rows = dispatch.select(q, k, w, 6)
    for t in range(24):
        step = dispatch.select(q[:, :, t : t + 1], k[:, : t + 1], w[:, t : t + 1], 6)
        assert torch.equal(step[:, 0], rows[:, t])


@pytest.mark.parametrize("cuts", [[0, 24], [0, 1, 24], [0, 7, 7, 20, 24]], ids=str)
def test_selections_of_shards_merge_into_the_selection_of_all_keys(cuts):
    q, k, w = (x.round() for x in inputs())
    want = dispatch.select(q, k, w, 5, return_scores=True)
    parts = []
    for lo, hi in itertools.pairwise(cuts):
        part = dispatch.select(q, k[:, lo:hi], w, 5, q_offset=-lo, return_scores=True)
        parts.append(Selection(torch.where(part.indices < 0, -1, part.indices + lo), part.scores))
    got = merge_selections(parts, 5)
    assert torch.equal(got.indices, want.indices)
    torch.testing.assert_close(got.scores, want.scores, atol=1e-5, rtol=1e-5)
    union = torch.cat([part.indices for part in parts], -1)
    assert (want.indices[..., None] == union[..., None, :]).any(-1).all()


def test_scores_are_those_of_the_selected_keys_and_have_gradients():
    q, k, w = (x.requires_grad_() for x in inputs(b=1, hi=2, sq=5, skv=7, di=3, dtype=torch.float64))
    chosen = dispatch.select(q, k, w, 4, return_scores=True)
    assert not chosen.indices.is_floating_point()
    assert chosen.scores.dtype == torch.float64
    want = full_scores(q, k, w).gather(-1, chosen.indices.clamp(min=0)).masked_fill(chosen.indices < 0, -torch.inf)
    torch.testing.assert_close(chosen.scores, want)

    def finite_scores(*tensors):
        indices, scores = dispatch.select(*tensors, 4, return_scores=True)
        return scores[indices >= 0]

    assert torch.autograd.gradcheck(finite_scores, (q, k, w))


def test_selection_never_holds_all_scores_of_all_index_heads():
    q, k, w = inputs(b=1, hi=16, sq=512, skv=2048, di=4)
    with Largest() as largest:
        dispatch.select(q, k, w, 32)
    assert largest.numel < 512 * 2048 * 16 / 8
    q, k, w = inputs(b=1, hi=2, sq=4096, skv=4096, di=4)
    with Largest() as largest:
        dispatch.select(q, k, w, 32)
    assert largest.numel < 4096 * 4096 / 2


@pytest.mark.parametrize("how", ["vmap", "compile", "export"])
def test_selection_is_traced_without_reading_data(how):
    q, k, w = (x.round() for x in inputs(sq=12, skv=12))
    want = dispatch.select(q, k, w, 5)
    if how == "vmap":
        got = torch.vmap(lambda q, k, w: dispatch.select(q[None], k[None], w[None], 5)[0])(q, k, w)
    elif how == "compile":
        got = torch.compile(lambda q, k, w: dispatch.select(q, k, w, 5), backend="eager", fullgraph=True)(q, k, w)
    else:

        class Module(torch.nn.Module):
            def forward(self, q, k, w):
                return dispatch.select(q, k, w, 5)

        got = torch.export.export(Module(), (q, k, w)).module()(q, k, w)
    assert torch.equal(got, want)


# --- selection: oracles ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("t", "hi", "top_k"), [(37, 4, 8), (64, 1, 16), (33, 3, 40), (128, 8, 1), (96, 64, 32)])
def test_select_agrees_with_fla_and_attn_gym(t, hi, top_k):
    q, k, w = inputs(hi=hi, sq=t, skv=t)
    got = dispatch.select(q, k, w, top_k)
    scores = full_scores(q, k, w)
    rows = q.transpose(1, 2).contiguous()
    assert_reaches_the_same_scores(got, fla.naive_dsa_indexer(rows, k, w, top_k, activation="relu"), scores)
    assert_reaches_the_same_scores(got, lightning_indexer(rows, k, w, top_k, causal=True, impl="reference"), scores)
    bshd = dispatch.select(rows, k, w, top_k, layout="bshd")
    assert torch.equal(bshd, got)


def test_select_agrees_with_attn_gym_without_causality():
    q, k, w = inputs(sq=32, skv=32)
    theirs = lightning_indexer(q.transpose(1, 2).contiguous(), k, w, 9, causal=False, impl="reference")
    assert_reaches_the_same_scores(dispatch.select(q, k, w, 9, is_causal=False), theirs, full_scores(q, k, w))


def test_select_agrees_with_fla_on_packed_documents():
    q, k, w = inputs(b=1, sq=40, skv=40)
    ends = torch.tensor([0, 3, 17, 40])
    local = fla.naive_dsa_indexer(q.transpose(1, 2), k, w, 6, activation="relu", cu_seqlens=ends)
    start = torch.repeat_interleave(ends[:-1], ends.diff())[None, :, None]
    theirs = torch.where(local < 0, -1, local + start)
    got = dispatch.select(q, k, w, 6, attn_mask=masks.documents(ends))
    assert_reaches_the_same_scores(got, theirs, full_scores(q, k, w))


# --- attention over selected keys ------------------------------------------------------------------------------------


def legal_chains(*call, **arguments):
    with_gather = [
        name
        for name, _ in dispatch.explain(*call, **arguments).legal
        if name.startswith("gather") and current().backends[name.split(" > ")[-1]].compile_s == 0
    ]
    assert with_gather
    return with_gather


@pytest.mark.parametrize("dv", [16, 8])
def test_attention_given_indices_agrees_with_fla(dv):
    q, k, w = inputs(sq=40, skv=40)
    query, key, value = qkv(sq=40, skv=40, dv=16)
    value = value[..., :dv].contiguous()
    indices = dispatch.select(q, k, w, 8)
    rows = [x.transpose(1, 2) for x in (query, key, torch.nn.functional.pad(value, (0, 16 - dv)))]
    want = fla.naive_dsa(*rows, None, None, indices=indices, scale=0.3).transpose(1, 2)[..., :dv]
    mask = masks.causal() & masks.selected(indices)
    call = (query, key, value, mask)
    for chain in (*legal_chains(*call, scale=0.3, enable_gqa=True), "eager", None):
        got = attention(*call, scale=0.3, enable_gqa=True, backend=chain)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_the_whole_of_dsa_agrees_with_fla():
    q, k, w = inputs(sq=40, skv=40)
    query, key, value = qkv(sq=40, skv=40)
    rows = [x.transpose(1, 2) for x in (query, key, value)]
    want = fla.naive_dsa(*rows, q.transpose(1, 2), k, w, topk=8).transpose(1, 2)
    got = attention(query, key, value, masks.selected(dispatch.select(q, k, w, 8)), enable_gqa=True)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("hkv", [1, 4])
def test_attention_given_indices_agrees_with_attn_gym(hkv, sinks):
    query, latent, _ = qkv(hkv=hkv, sq=30, skv=30)  # keys and values are one tensor there, as in MLA
    indices = dispatch.select(*inputs(sq=30, skv=30), 6)
    indices[:, 4] = -1  # an empty row
    logits = torch.randn(4, generator=torch.Generator().manual_seed(3)) if sinks else None
    want, aux = gather_attn(
        query, latent, latent, indices, logits, sliding_window_size=0, impl="reference", return_aux=AuxRequest(lse=True)
    )
    call = (query, latent, latent, masks.selected(indices))
    arguments = {"enable_gqa": True, "sinks": logits, "return_lse": True}
    for chain in legal_chains(*call, **arguments):
        got = attention(*call, **arguments, backend=chain)
        torch.testing.assert_close(got.out, want, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(got.lse, aux.lse, atol=2e-6, rtol=1e-5)


def test_future_indices_are_masked_by_the_causal_part():
    query, key, value = qkv()
    indices = torch.arange(23, -1, -1).expand(2, 24, 24)[..., :10]  # the last keys, for every row
    mask = masks.causal() & masks.selected(indices)
    for chain in legal_chains(query, key, value, mask, enable_gqa=True):
        got = attention(query, key, value, mask, enable_gqa=True, backend=chain)
        assert not got[:, :, :14].any()
        dense = attention(query, key, value, (torch.arange(24) >= 14).expand(24, 24).tril(), enable_gqa=True)
        torch.testing.assert_close(got, dense, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_per_batch_and_one_selection_for_all_batches(dtype):
    query, key, value = qkv(sq=3, skv=40)
    indices = torch.tensor([[[3, 9, 30, -1], [1, 22, 2, 39], [0, 5, 11, 38]]], dtype=dtype)
    mask = masks.causal() & masks.selected(indices)
    arguments = {"q_offset": torch.tensor([2, 36]), "key_lengths": torch.tensor([40, 30]), "enable_gqa": True}
    want = attention(query, key, value, mask, **arguments, backend="eager")
    for chain in legal_chains(query, key, value, mask, **arguments):
        got = attention(query, key, value, mask, **arguments, backend=chain)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("how", ["compile", "export", "vmap"])
def test_selection_and_attention_are_traced_as_one_program(how):
    tensors = [*qkv(sq=12, skv=12, hkv=4), *inputs(sq=12, skv=12)]

    def dsa(query, key, value, q, k, w):
        return attention(query, key, value, masks.causal() & masks.selected(dispatch.select(q, k, w, 4)))

    if how == "compile":
        got = torch.compile(dsa, backend="eager", fullgraph=True)(*tensors)
    elif how == "vmap":
        got = torch.vmap(lambda *row: dsa(*(x[None] for x in row))[0])(*tensors)
    else:

        class Module(torch.nn.Module):
            def forward(self, *args):
                return dsa(*args)

        got = torch.export.export(Module(), tuple(tensors)).module()(*tensors)
    torch.testing.assert_close(got, dsa(*tensors), atol=2e-6, rtol=1e-5)


def test_a_repeated_index_counts_once():
    query, key, value = qkv(sq=1)
    once, twice = torch.tensor([[[3, 9, -1, -1]]]), torch.tensor([[[9, 3, 9, 9]]])
    want = attention(query, key, value, masks.selected(once), enable_gqa=True)
    for chain in (*legal_chains(query, key, value, masks.Selected(twice), enable_gqa=True), "eager", "blocked"):
        got = attention(query, key, value, masks.Selected(twice), enable_gqa=True, backend=chain)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("hkv", [1, 4], ids=["absorbed", "per_head"])
def test_mla_shaped_heads_run_by_gathering(hkv):
    query, key, value = qkv(b=1, hkv=hkv, sq=3, skv=40, d=192, dv=128)
    mask = masks.causal() & masks.selected(dispatch.select(*inputs(b=1, sq=3, skv=40), 8))
    want = attention(query, key, value, mask, enable_gqa=None, backend="eager")
    for chain in legal_chains(query, key, value, mask, enable_gqa=None):
        got = attention(query, key, value, mask, enable_gqa=None, backend=chain)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("hkv", [1, 2])
def test_a_long_cache_and_a_short_selection_are_gathered_by_themselves(hkv):
    query, key, value = qkv(b=1, hq=8, hkv=hkv, sq=1, skv=4096, d=64, dv=64)
    indices = torch.randperm(4096, generator=torch.Generator().manual_seed(4))[:128].sort().values[None, None]
    report = dispatch.explain(query, key, value, masks.causal() & masks.selected(indices), enable_gqa=True)
    assert report.chosen.startswith("gather >")


@pytest.mark.parametrize("chain", ["gather > blocked", "gather > fold_groups > sdpa_math", "gather > sdpa_flash"])
def test_gradients_flow_through_the_gather_and_not_through_indices(chain):
    query, key, value = (x.requires_grad_() for x in qkv(1, 2, 1, 3, 9, 4, 4, dtype=torch.float64))
    mask = masks.causal() & masks.selected(torch.tensor([[[0, 3, -1, -1], [-1] * 4, [8, 2, 5, 1]]]))

    def run(*tensors):
        return attention(*tensors, mask, enable_gqa=True, backend=chain)

    assert torch.autograd.gradcheck(run, (query, key, value))
    assert torch.autograd.gradgradcheck(run, (query, key, value))
    grads = torch.autograd.grad(run(query, key, value).sum(), (query, key, value))
    assert not grads[0][:, :, 1].any()  # the empty row
    assert not grads[2][:, :, [4, 6, 7]].any()  # keys that nobody selected


def test_attention_over_selected_keys_allocates_no_square():
    n = 4096
    query, key, value = qkv(1, 2, 1, n, n, 8, 8)
    indices = torch.arange(n)[:, None] - torch.arange(16) * 7
    mask = masks.causal() & masks.selected(torch.where(indices < 0, -1, indices)[None])
    seen = {}
    for chain in ("gather > fold_groups > sdpa_flash", "densify_mask > sdpa_flash"):
        with Largest() as largest:
            attention(query, key, value, mask, enable_gqa=True, backend=chain)
        seen[chain.partition(" ")[0]] = largest.numel
    assert seen["gather"] < n * n / 3
    assert seen["densify_mask"] >= n * n  # the measure sees a square where there is one


def test_nan_in_keys_that_are_not_selected_never_leaks():
    query, key, value = qkv(sq=3, skv=40)
    indices = torch.tensor([[[1, 5, -1, -1], [9, 30, 2, -1], [1, 2, 3, 4]]])
    mask = masks.causal() & masks.selected(indices)
    arguments = {"q_offset": 20, "enable_gqa": True}
    want = attention(query, key, value, mask, **arguments)
    bad = [x.clone() for x in (key, value)]
    for x in bad:
        x[:, :, [0, 30, 39]] = torch.nan  # where -1 points when clamped, a future key, a key nobody lists
    for chain in legal_chains(query, key, value, mask, **arguments):
        got = attention(query, *bad, mask, **arguments, backend=chain)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_nan_where_padding_points_never_leaks_beside_a_mask_per_head():
    query, key, value = qkv(sq=3, skv=40)
    keep = torch.rand(2, 4, 3, 40, generator=torch.Generator().manual_seed(5)) < 0.7
    mask = masks.selected(torch.tensor([[[1, 5, -1, -1], [9, 30, 2, -1], [1, 2, 3, 4]]])) & masks.Dense(keep)
    want = attention(query, key, value, mask, enable_gqa=True)
    bad = [x.index_fill(2, torch.tensor([0]), torch.nan) for x in (key, value)]
    for chain in legal_chains(query, key, value, mask, enable_gqa=True):
        got = attention(query, *bad, mask, enable_gqa=True, backend=chain)
        torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-5)


def test_threads_do_not_share_the_memory_of_fetched_rows():
    calls = []
    for seed in range(4):
        query, key, value = qkv(1, 4, 2, 64, 512, 16, 16, seed=seed)
        indices = dispatch.select(*inputs(1, 2, 64, 512, 8, seed=seed), 32)
        calls.append((query, key, value, masks.causal() & masks.selected(indices)))
    chain = "gather > fold_groups > sdpa_flash"
    want = [attention(*call, enable_gqa=True, backend=chain) for call in calls]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(20):
            if not torch.equal(attention(*calls[n], enable_gqa=True, backend=chain), want[n]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_memory_of_fetched_rows_serves_inference_mode_and_ordinary_calls():
    gather._spaces.clear()
    query, key, value = qkv(1, 4, 2, 1, 64)
    mask = masks.selected(torch.arange(8)[None, None])
    with torch.inference_mode():
        first = attention(query, key, value, mask, enable_gqa=True, backend="gather > sdpa_flash")
    second = attention(query, key, value, mask, enable_gqa=True, backend="gather > sdpa_flash")
    assert torch.equal(first, second)
    assert len(gather._spaces) == 1


# --- the layer -------------------------------------------------------------------------------------------------------


def hf_indexer(top_k=6):
    from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer, DeepseekV32RotaryEmbedding

    config = DeepseekV32Config(
        hidden_size=64, index_n_heads=4, index_head_dim=32, index_topk=top_k, qk_rope_head_dim=16, q_lora_rank=24,
        num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=1, intermediate_size=64, vocab_size=32,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = DeepseekV32Indexer(config, 0)
    torch.nn.init.normal_(theirs.k_norm.bias)
    mine = nn.LightningIndexer(64, 4, 32, top_k, query_size=24, rope_dim=16)
    mine.load_state_dict(theirs.state_dict())
    return theirs, mine, DeepseekV32RotaryEmbedding(config)


def test_the_indexer_agrees_with_transformers_once_its_future_indices_are_dropped():
    theirs, mine, rotary = hf_indexer()
    hidden, query = torch.randn(2, 40, 64), torch.randn(2, 40, 24)
    rope = rotary(hidden, torch.arange(40)[None])
    raw = theirs(hidden, query, rope, torch.ones(40, 40, dtype=torch.bool).tril(), None).long()
    past = torch.arange(40)[:, None]
    want = torch.where(raw <= past, raw, -1)
    got = mine(hidden, query, position_embeddings=rope, return_scores=True)
    assert got.scores is not None
    assert torch.equal(got.indices.sort(-1).values, want.sort(-1).values)


def test_decoding_with_the_key_cache_selects_as_the_prefill_and_as_transformers():
    _, mine, rotary = hf_indexer()
    hidden, query = torch.randn(2, 20, 64), torch.randn(2, 20, 24)
    cos, sin = rotary(hidden, torch.arange(20)[None])
    whole = mine(hidden, query, position_embeddings=(cos, sin))
    keys = None
    for lo, hi in ((0, 7), *((n, n + 1) for n in range(7, 20))):
        rope = (cos[:, lo:hi], sin[:, lo:hi])
        step = mine(hidden[:, lo:hi], query[:, lo:hi], position_embeddings=rope, past_keys=keys)
        keys = step.keys
        assert torch.equal(step.indices, whole.indices[:, lo:hi])
    torch.testing.assert_close(keys, whole.keys)


def test_one_selection_serves_several_layers_and_decode_equals_prefill():
    torch.manual_seed(0)
    indexer = nn.LightningIndexer(32, 2, 8, 4, rope_dim=0)
    hidden = torch.randn(1, 20, 32)
    layers = [qkv(1, 4, 2, 20, 20, seed=seed) for seed in (1, 2)]
    chosen = indexer(hidden)
    keep = masks.causal() & masks.selected(chosen.indices)
    prefill = [attention(*layer, keep, enable_gqa=True) for layer in layers]
    keys = indexer(hidden[:, :12]).keys
    for t in range(12, 20):
        step = indexer(hidden[:, t : t + 1], past_keys=keys)
        keys = step.keys
        for (query, key, value), whole in zip(layers, prefill, strict=True):
            row = (query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1])
            got = attention(*row, masks.selected(step.indices), enable_gqa=True)
            torch.testing.assert_close(got, whole[:, :, t : t + 1], atol=2e-6, rtol=1e-5)


def test_the_indexer_trains_by_its_scores_alone():
    indexer = nn.LightningIndexer(32, 2, 8, 4, rope_dim=0)
    hidden = torch.randn(1, 12, 32)
    chosen = indexer(hidden, return_scores=True)
    chosen.scores[chosen.indices >= 0].sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in indexer.parameters())
    assert not indexer(hidden).indices.requires_grad


def test_the_indexer_scores_in_float64_where_its_weights_are():
    torch.manual_seed(0)
    indexer = nn.LightningIndexer(32, 2, 8, 4, rope_dim=0, dtype=torch.float64)
    hidden = torch.randn(1, 12, 32, dtype=torch.float64)
    chosen = indexer(hidden, return_scores=True)
    assert chosen.scores.dtype == torch.float64
    q = indexer.wq_b(hidden).unflatten(-1, (2, 8)).transpose(1, 2)
    weights = indexer.weights_proj(hidden) * 2**-0.5
    want = full_scores(q, chosen.keys, weights).gather(-1, chosen.indices.clamp(min=0))
    real = chosen.indices >= 0
    torch.testing.assert_close(chosen.scores[real], want[real], atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize(
    ("arguments", "call", "message"),
    [
        ({"rope_dim": 3}, None, "rope_dim must be even"),
        ({"rope_dim": 10}, None, "in \\[0, head_dim = 8\\]"),
        ({"top_k": 0}, None, "top_k must be >= 1"),
        ({"rope_dim": 4}, {}, "no position_embeddings"),
        ({"rope_dim": 4}, {"position_embeddings": (torch.ones(5, 6), torch.ones(5, 6))}, "must end in rope_dim = 4"),
        ({"rope_dim": 0}, {"past_keys": torch.ones(1, 3, 9)}, "past_keys must be"),
    ],
)
def test_the_indexer_names_what_does_not_fit(arguments, call, message):
    with pytest.raises(InputError, match=message):
        nn.LightningIndexer(32, 2, 8, **{"top_k": 4, **arguments})(torch.randn(1, 5, 32), **(call or {}))


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [24, -2])
def test_indices_out_of_range_are_named_at_every_call_before_anything_runs(bad):
    query, key, value = qkv(sq=1)
    good = torch.tensor([[[3, 23, -1]]])
    wrong = good.clone()
    wrong[0, 0, 1] = bad
    plan = dispatch.plan(query, key, value, masks.selected(good), enable_gqa=True)
    for _ in range(3):  # the second call is warm
        attention(query, key, value, masks.selected(good), enable_gqa=True)
        with pytest.raises(InputError, match=f"index {bad} is out of range: Skv is 24"):
            attention(query, key, value, masks.selected(wrong), enable_gqa=True)
    (name,) = plan.tensors
    with pytest.raises(InputError, match="out of range"):
        plan(query, key, value, **{name: wrong})


def test_a_key_selected_twice_is_named_where_masks_selected_can_look():
    with pytest.raises(InputError, match="key 7 is selected twice in batch 1, row 2: a selection is a set") as info:
        masks.selected(torch.tensor([[[1, 2, 3]] * 3, [[1, 2, 3], [3, -1, -1], [7, 0, 7]]]))
    assert "masks.Selected" in info.value.remedy


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        (torch.ones(1, 24, 3), "int32 or int64"),
        (torch.ones(24, dtype=torch.int64), "3 or 4 dimensions"),
    ],
)
def test_selected_refuses_what_is_no_list_of_indices(indices, message):
    with pytest.raises(InputError, match=message):
        masks.selected(indices)


@pytest.mark.parametrize(
    ("shape", "message"), [((2, 23, 3), "Sq 24"), ((3, 24, 3), "B 2"), ((2, 3, 24, 3), "Hq 4 or 1")], ids=str
)
def test_indices_of_another_shape_are_named(shape, message):
    lists = torch.arange(3).expand(shape)
    with pytest.raises(InputError, match=message):
        attention(*qkv(), masks.selected(lists), enable_gqa=True)


def test_float_indices_in_the_atom_are_named():
    with pytest.raises(InputTypeError, match="int32 or int64"):
        attention(*qkv(), masks.Selected(torch.ones(2, 24, 3)), enable_gqa=True)


_Q, _K, _W = inputs()


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ((_Q, _K, _W, 0), {}, "top_k must be an integer >= 1, got 0"),
        ((_Q, _K, _W, 2.0), {}, "top_k must be an integer >= 1, got 2.0"),
        ((_Q, _K, "w", 4), {}, "weights must be a tensor, got str"),
        ((_Q.long(), _K, _W, 4), {}, "query_idx has dtype int64"),
        ((_Q[0], _K, _W, 4), {}, "query_idx must have 4 dimensions, got 3"),
        ((_Q, _K[:, None], _W, 4), {}, "key_idx must have 3 dimensions, got 4"),
        ((_Q, _K[..., :8], _W, 4), {}, "key_idx must be \\[B, Skv, Di\\] = \\[2, Skv, 16\\], got \\[2, 24, 8\\]"),
        ((_Q, _K[:1], _W, 4), {}, "got \\[1, 24, 16\\]"),
        ((_Q, _K, _W.mT, 4), {}, "weights must be \\[B, Sq, Hi\\] = \\[2, 24, 4\\], got \\[2, 4, 24\\]"),
        ((_Q, _K, _W, 4), {"layout": "sbhd"}, "layout must be one of bhsd, bshd"),
        ((_Q, _K, _W, 4), {"activation": "gelu"}, "activation must be one of relu, identity or None, got 'gelu'"),
        ((_Q, _K, _W, 4), {"scale": float("nan")}, "scale must be a finite number"),
        ((_Q, _K, _W, 4), {"window": (3,)}, "window must be \\(left, right\\)"),
        ((_Q, _K, _W, 4), {"key_lengths": torch.tensor([3, 25])}, "key_lengths must be in \\[0, 24\\], got 25"),
        ((_Q, _K, _W, 4), {"key_lengths": torch.tensor([3])}, "key_lengths must have shape \\[B\\] = \\[2\\]"),
        ((_Q, _K, _W, 4), {"key_lengths": [3, 4]}, "key_lengths must be an int32 or int64 tensor"),
        ((_Q, _K, _W, 4), {"q_offset": 1.5}, "q_offset must be an int or an int tensor, got float"),
        ((_Q, _K, _W, 4), {"q_offset": torch.zeros(3).long()}, "q_offset must be an int or an int tensor \\[B\\]"),
        ((_Q, _K, _W, 4), {"attn_mask": torch.zeros(24, 24)}, "a selection takes a bool mask"),
        ((_Q, _K, _W, 4), {"attn_mask": torch.ones(2, 4, 24, 24).bool()}, "does not broadcast to \\[2, 24, 24\\]"),
        ((_Q, _K, _W, 4), {"attn_mask": 3}, "attn_mask must be a bool tensor or a Mask, got int"),
        ((_Q, _K, _W, 4), {"attn_mask": masks.documents([0, 5, 9])}, "add up to 9 queries, there are 24"),
    ],
)
def test_a_wrong_argument_of_select_is_named_with_its_value(call, arguments, message):
    with pytest.raises(InputError, match=message):
        dispatch.select(*call, **arguments)


# --- the op ----------------------------------------------------------------------------------------------------------


def an_op(**changes):
    descs = [TensorDesc(shape, "float32") for shape in ((2, 4, 8, 16), (2, 24, 16), (2, 8, 4))]
    return SelectOp(*descs, top_k=6).with_(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_k": 7, "scale": 0.5, "activation": "identity", "scores": True, "traced": True},
        {"mask": masks.causal() & masks.window(7, None), "q_offset": "end"},
        {
            "mask": masks.causal() & masks.KeyLengths(Ref("key_lengths")),
            "q_offset": Ref("q_offset"),
            "operands": tuple((n, TensorDesc((2,), "int64")) for n in ("q_offset", "key_lengths")),
        },
    ],
)
def test_a_selection_survives_its_text_and_differs_from_others_by_key(changes):
    op = an_op(**changes)
    verify_select(op)
    again = SelectOp.from_dict(op.to_dict())
    assert again == op
    assert again.digest() == op.digest()
    assert an_op(**changes).with_(top_k=9).digest() != op.digest()
    assert f"top {op.top_k}" in str(op)


def test_a_selection_with_an_unknown_key_is_refused():
    with pytest.raises(ValueError, match="a selection has no topk; it has"):
        SelectOp.from_dict({**an_op().to_dict(), "topk": 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, "top_k 0 is an integer >= 1"),
        ({"activation": "gelu"}, "activation 'gelu'"),
        ({"weights": TensorDesc((2, 4, 8), "float32")}, "weights"),
        ({"key": TensorDesc((2, 24, 8), "float32")}, "index head sizes of query 16 and key 8"),
        ({"key": TensorDesc((1, 24, 16), "float32")}, "batch sizes 2, 1, 2"),
        ({"key": TensorDesc((2, 1, 24, 16), "float32")}, "4, 3 and 3 dimensions"),
        ({"q_offset": Ref("q_offset")}, "operands \\['q_offset'\\] are described"),
    ],
)
def test_verify_names_the_rule_that_a_selection_breaks(changes, message):
    with pytest.raises(ValueError, match=message):
        verify_select(an_op(**changes))


@pytest.mark.parametrize("sizes", [(0, 8), (8, 0)])
def test_heads_of_no_elements_are_not_gathered(sizes):
    d, dv = sizes
    q, k, v = (torch.randn(1, 2, 64, n) for n in (d, d, dv))
    indices = torch.arange(4).expand(1, 64, 4)
    out = dispatch.attention(q, k, v, attn_mask=masks.Selected(indices))
    assert out.shape == (1, 2, 64, dv)
    op = dispatch.plan(q, k, v, attn_mask=masks.Selected(indices)).op
    assert "nothing to gather" in str(Gather().apply(op))
