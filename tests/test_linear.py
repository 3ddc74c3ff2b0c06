"""Linear attention and retention: against code that nobody here wrote, cut anywhere, with state in and out."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from onnx.reference.ops.op_linear_attention import LinearAttention as OnnxLinearAttention
from torch.utils._python_dispatch import TorchDispatchMode

from attn_dispatch import InputError, InputTypeError, NoBackendError, dispatch, masks, reference, variants
from attn_dispatch.backends import linear_chunks
from attn_dispatch.ir import AttentionOp, Linear, Outputs, Ref, TensorDesc
from attn_dispatch.ir.atoms import Causal
from attn_dispatch.registry import current
from attn_dispatch.variants import LinearAttention, LinearState, Retention, combine, retention_decay

B, H, T, D, DV = 2, 4, 70, 8, 12
BACKENDS = ("linear", "eager")
NORMALISED, PLAIN = LinearAttention(normalizer_eps=1e-10), LinearAttention("identity", None)


def fla(topic: str):
    """One of fla-core's naive files; its package would import triton."""
    root = Path(importlib.util.find_spec("fla").submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location(f"fla_naive_{topic}", root / "ops" / topic / "naive.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def qkv(t: int = T, h: int = H, hkv: int | None = None, dtype: torch.dtype = torch.float32, seed: int = 0):
    gen = torch.Generator().manual_seed(seed)
    sizes = ((B, h, t, D), (B, hkv or h, t, D), (B, hkv or h, t, DV))
    return [torch.randn(size, generator=gen, dtype=torch.float64).to(dtype) for size in sizes]


def flip(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


def attend(q, k, v, variant, **options):
    options = {"is_causal": True, "enable_gqa": True} | options
    return dispatch.attention(q, k, v, variant=variant, **options)


# --- oracles ---------------------------------------------------------------------------------------------------------


def run_onnx(q, k, v, rule: str, decay: torch.Tensor | None = None, past: torch.Tensor | None = None):
    """The reference of ONNX's LinearAttention, numpy: ``[B, T, H * D]`` in and out."""
    packed = [x.transpose(1, 2).flatten(2).numpy() for x in (q, k, v)]
    log_decay = None
    if decay is not None:
        log_decay = np.broadcast_to(decay.log().numpy(), (q.shape[0], q.shape[2], q.shape[1]))
    out, state = OnnxLinearAttention._run(
        None, *packed, past_state=None if past is None else past.numpy(), decay=log_decay,
        q_num_heads=q.shape[1], kv_num_heads=k.shape[1], update_rule=rule,
    )  # fmt: skip
    return torch.from_numpy(out).unflatten(2, (q.shape[1], -1)).transpose(1, 2), torch.from_numpy(state)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("hkv", [4, 2, 1])
def test_unnormalised_linear_attention_is_that_of_onnx_with_groups_and_state(backend, hkv):
    q, k, v = qkv(hkv=hkv)
    past = torch.randn(B, hkv, D, DV)
    want, want_state = run_onnx(q, k, v, "linear", past=past)
    out, state = attend(q, k, v, PLAIN, state=LinearState(past, None, 7), return_state=True, backend=backend)
    close(out, want, 6e-5)
    close(state.S, want_state, 6e-5)
    assert state.length.tolist() == [T + 7] * B


@pytest.mark.parametrize("backend", BACKENDS)
def test_retention_is_the_gated_rule_of_onnx(backend):
    q, k, v = qkv()
    decay, past = retention_decay(H), torch.randn(B, H, D, DV)
    want, want_state = run_onnx(q, k, v, "gated", decay, past)
    out, state = attend(q, k, v, Retention(decay), state=LinearState(past, None, 0), return_state=True, backend=backend)
    close(out, want, 6e-5)
    close(state.S, want_state, 6e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_normalised_linear_attention_is_the_recurrence_of_fla(backend):
    q, k, v = qkv()
    first = attend(*(x[:, :, :30] for x in (q, k, v)), NORMALISED, return_state=True, backend=backend)
    rest = attend(*(x[:, :, 30:] for x in (q, k, v)), NORMALISED, state=first.state, return_state=True, backend=backend)
    phi_q, phi_k, values = flip(F.elu(q) + 1, F.elu(k) + 1, v)
    naive = fla("linear_attn").naive_recurrent_linear_attn
    want, (s, z) = naive(phi_q, phi_k, values, normalize=True, output_final_state=True)
    close(torch.cat([first.out, rest.out], 2), want.transpose(1, 2), 2e-6)
    close(rest.state.S, s, 6e-5)
    close(rest.state.z, z[:, 0], 6e-5)
    half = T - T % 64  # fla's chunked form wants whole chunks
    chunked = fla("linear_attn").naive_chunk_linear_attn(*(x[:, :half] for x in (phi_q, phi_k, values)), normalize=True)
    close(attend(*(x[:, :, :half] for x in (q, k, v)), NORMALISED, backend=backend), chunked.transpose(1, 2), 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_retention_is_that_of_fla_in_its_parallel_recurrent_and_chunked_form(backend):
    q, k, v = qkv(dtype=torch.float32)
    decay = retention_decay(H)
    out, state = attend(q, k, v, Retention(decay), return_state=True, backend=backend)
    close(out, fla("retention").naive_retention(q, k, v), 6e-5)
    g = decay.log().expand(B, T, H)
    gla = fla("simple_gla")
    for naive in (gla.naive_recurrent_simple_gla, gla.naive_chunk_simple_gla):
        want, want_state = naive(*flip(q, k, v), g, output_final_state=True)
        close(out, want.transpose(1, 2), 6e-5)
        close(state.S, want_state, 6e-5)


def test_lightning_attention_of_minimax_is_retention_without_a_scale():
    from transformers.models.minimax.configuration_minimax import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "block_size": 16}
    config = MiniMaxConfig(**sizes, num_hidden_layers=4, vocab_size=8, intermediate_size=8)
    torch.manual_seed(0)
    theirs = MiniMaxLightningAttention(config, layer_idx=1).eval()
    x = torch.randn(2, 40, 32)
    with torch.no_grad():
        want = theirs(x, position_embeddings=None, attention_mask=torch.ones(2, 40, dtype=torch.bool))[0]
        qkv = theirs.act_fn(theirs.qkv_proj(x)).reshape(2, 40, 4, 24).transpose(1, 2)
        decay = torch.exp(-theirs.slope_rate.reshape(-1))
        out = attend(*qkv.split(8, -1), Retention(decay), scale=1.0, backend="linear")
        normed = theirs.norm(out.transpose(1, 2).flatten(2))
        close(theirs.out_proj(torch.sigmoid(theirs.output_gate(x)) * normed), want, 6e-5)


# --- cut anywhere ----------------------------------------------------------------------------------------------------


def parts_of(variant, q, k, v, cuts: list[int], **options):
    outs, state = [], None
    edges = [0, *sorted(cuts), q.shape[2]]
    for lo, hi in itertools.pairwise(edges):
        if lo < hi:
            piece = [x[:, :, lo:hi] for x in (q, k, v)]
            out, state = attend(*piece, variant, state=state, return_state=True, **options)
            outs.append(out)
    return torch.cat(outs, 2), state


KINDS = {"elu1": LinearAttention(), "identity": PLAIN, "retention": Retention(torch.tensor([0.5, 0.9, 0.99, 1.0]))}


@given(
    kind=st.sampled_from(list(KINDS)),
    t=st.sampled_from([1, 2, 7, 8, 63, 64, 65, 130]),
    chunk=st.sampled_from([1, 2, 16, 64, 129, 131]),
    batch=st.sampled_from([1, 1 << 12, 1 << 20]),
    cuts=st.lists(st.integers(0, 130), max_size=3),
    hkv=st.sampled_from([1, 4]),
)
def test_chunk_length_batch_and_cuts_change_nothing(kind, t, chunk, batch, cuts, hkv):
    q, k, v = qkv(t, hkv=hkv, dtype=torch.float64)
    want, want_state = attend(q, k, v, KINDS[kind], return_state=True, backend="eager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_chunks, "chunk_size", lambda d, dv: chunk)
        patch.setattr(linear_chunks, "BATCH_BYTES", batch)
        out, state = parts_of(KINDS[kind], q, k, v, [min(cut, t) for cut in cuts], backend="linear")
    close(out, want, 1e-11)
    close(state.S, want_state.S, 1e-11)
    assert state.length.tolist() == [t] * B
    if kind == "elu1":
        close(state.z, want_state.z, 1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_token_by_token_is_the_whole(kind):
    q, k, v = qkv(12, dtype=torch.float64)
    out, _ = parts_of(KINDS[kind], q, k, v, list(range(1, 12)), backend="linear")
    close(out, attend(q, k, v, KINDS[kind], backend="eager"), 1e-12)


@given(kind=st.sampled_from(list(KINDS)), cuts=st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_states_of_stretches_combine_to_the_state_of_all_and_how_they_are_bracketed_means_nothing(kind, cuts):
    variant = KINDS[kind]
    q, k, v = qkv(40, dtype=torch.float64)
    _, whole = attend(q, k, v, variant, return_state=True)
    edges = [0, *sorted(cuts), 40]
    states = []
    for lo, hi in itertools.pairwise(edges):
        piece = [x[:, :, lo:hi] for x in (q, k, v)]
        states.append(attend(piece[0], piece[1], piece[2], variant, return_state=True).state)
    decay = variant.decay.double() if kind == "retention" else None
    left = combine(*states, decay=decay)
    right = states[-1]
    for state in reversed(states[:-1]):
        right = combine(state, right, decay=decay)
    for merged in (left, right):
        close(merged.S, whole.S, 1e-11)
        assert merged.length.tolist() == whole.length.tolist()
    if kind == "elu1":
        close(left.z, whole.z, 1e-11)


def test_a_state_of_no_keys_is_neutral():
    _, some = attend(*qkv(9), KINDS["elu1"], return_state=True)
    none = LinearState(torch.zeros_like(some.S), torch.zeros_like(some.z), 0)
    for merged in (combine(none, some), combine(some, none)):
        assert torch.equal(merged.S, some.S)
        assert torch.equal(merged.z, some.z)


def test_softmax_parts_combine_and_mixtures_do_not():
    q, k, v = qkv(9)
    parts = [dispatch.attention(q, k[:, :, a:b], v[:, :, a:b], return_lse=True) for a, b in ((0, 2), (2, 3), (3, 9))]
    want = dispatch.attention(q, k, v, return_lse=True)
    out, lse = combine(*parts)
    close(out, want.out, 2e-6)
    close(lse, want.lse, 2e-6)
    with pytest.raises(InputTypeError, match="not both"):
        combine(attend(q, k, v, PLAIN, return_state=True).state, parts[0])
    with pytest.raises(InputError, match="do not fade"):
        combine(*parts, decay=retention_decay(H))
    with pytest.raises(InputError, match="at least one"):
        combine()


# --- edge case 22: normalised linear attention -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_row_is_the_first_value(backend):
    q, k, v = qkv(dtype=torch.float64)
    close(attend(q, k, v, NORMALISED, backend=backend)[:, :, 0], v[:, :, 0], 1e-8)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_padded_keys_count_nowhere_not_in_the_sum_either(backend, is_causal):
    q, k, v = qkv(dtype=torch.float64)
    lengths = torch.tensor([0, 41])
    k[1, :, 41:], v[1, :, 41:] = math.nan, math.inf
    options = {"is_causal": is_causal, "backend": backend}
    out, state = attend(q, k, v, LinearAttention(), key_lengths=lengths, return_state=True, **options)
    assert (out[0] == 0).all()
    assert (state.S[0] == 0).all()
    assert (state.z[0] == 0).all()
    assert state.length.tolist() == [0, 41]
    cut = [x[1:, :, :41] for x in (k, v)]
    want, want_state = attend(q[1:], *cut, LinearAttention(), return_state=True, q_offset=0, **options)
    close(out[1:], want, 1e-12)
    close(state.z[1:], want_state.z, 1e-12)
    close(state.S[1:], want_state.S, 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_does_not_fade_the_state_of_retention(backend):
    q, k, v = qkv(dtype=torch.float64)
    variant = Retention(torch.tensor([1e-3, 0.5, 0.9, 1.0], dtype=torch.float64))
    before = LinearState(torch.randn(B, H, D, DV, dtype=torch.float64), None, 4)
    lengths = torch.tensor([3, T])
    _, state = attend(q, k, v, variant, key_lengths=lengths, state=before, return_state=True, backend=backend)
    for b, n in enumerate(lengths.tolist()):
        piece = [x[b : b + 1, :, :n] for x in (q, k, v)]
        mine = LinearState(before.S[b : b + 1], None, 4)
        want = attend(*piece, variant, state=mine, return_state=True, backend="eager").state
        close(state.S[b : b + 1], want.S, 1e-12)
        assert int(state.length[b]) == int(want.length) == n + 4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_never_changed_nor_handed_back(backend, kind):
    q, k, v = qkv()
    _, before = attend(q, k, v, KINDS[kind], return_state=True)
    kept = copy.deepcopy(before)
    for t in (1, 3, T):
        piece = [x[:, :, :t] for x in (q, k, v)]
        _, after = attend(*piece, KINDS[kind], state=before, return_state=True, backend=backend)
        for old, new, copied in zip(before, after, kept, strict=True):
            if old is not None:
                assert torch.equal(old, copied)
                assert new.untyped_storage().data_ptr() != old.untyped_storage().data_ptr()


def test_a_call_without_new_keys_returns_a_copy_of_the_state():
    q, k, v = qkv(5)
    before = attend(q, k, v, LinearAttention(), return_state=True).state
    out, after = attend(
        q, k[:, :, :0], v[:, :, :0], LinearAttention(), is_causal=False, state=before, return_state=True
    )
    assert torch.equal(after.S, before.S)
    assert after.S.data_ptr() != before.S.data_ptr()
    close(out, attend(q, k, v, LinearAttention(), is_causal=False), 1e-5)


def test_eps_is_added_to_the_sum_of_scaled_weights():
    q, k, v = qkv(6, dtype=torch.float64)
    for backend in BACKENDS:
        out = attend(q, k, v, LinearAttention(normalizer_eps=0.5), scale=1.0, backend=backend)
        a = ((F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-1, -2)).tril()
        close(out, (a @ v) / (a.sum(-1, keepdim=True) + 0.5), 1e-12)
        none = attend(q, k, v, LinearAttention(normalizer_eps=0.0), key_lengths=torch.tensor([0, 6]), backend=backend)
        assert (none[0] == 0).all()


def test_half_precision_keeps_its_sums_in_float32():
    k = torch.ones(1, 1, 2048, D, dtype=torch.bfloat16)
    _, state = attend(k, k, k, LinearAttention(), return_state=True, backend="linear")
    assert state.z.dtype == torch.float32
    assert (state.z == 2048 * 2).all()  # bfloat16 would have stopped at 256


# --- edge case 23 ----------------------------------------------------------------------------------------------------


@given(t=st.integers(1, 140), seed=st.integers(0, 99))
def test_normalised_outputs_are_convex_combinations_and_retention_is_not(t, seed):
    q, k, v = qkv(t, seed=seed, dtype=torch.float64)
    ones = torch.ones_like(v)
    close(attend(q, k, ones, NORMALISED, backend="linear"), ones, 1e-7)
    out = attend(q, k, v, NORMALISED, backend="linear")
    top, low = v.cummax(2).values, v.cummin(2).values
    assert (out <= top + 1e-7).all()
    assert (out >= low - 1e-7).all()
    kept = attend(q, k, ones, KINDS["retention"], backend="linear")
    assert not torch.allclose(kept, ones)


# --- edge case 24: retention -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_decay_of_one_is_causal_linear_attention(backend):
    q, k, v = qkv()
    close(attend(q, k, v, Retention(torch.ones(H)), backend=backend), attend(q, k, v, PLAIN, backend="eager"), 6e-5)


def below_the_frontend(name: str, decay: torch.Tensor, q, k, v, state: LinearState | None = None):
    """Run an op that the frontend would refuse: a decay of 0."""
    descs = {n: TensorDesc.of(x) for n, x in {"query": q, "key": k, "value": v}.items()}
    operands = {"decay": decay} | ({} if state is None else {"state": state.S})
    weight = Linear("identity", Ref("decay"), None, None if state is None else Ref("state"))
    described = tuple((n, TensorDesc.of(x)) for n, x in operands.items())
    op = AttentionOp(**descs, mask=Causal(), weight=weight, operands=described, outputs=Outputs(state=True))
    backend = current().backends[name]
    assert not backend.reasons_against(op)
    return backend.compile(op).run(q, k, v, operands)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("t", [1, 2, 70])
def test_a_decay_of_zero_leaves_each_token_its_own_value(backend, t):
    q, k, v = qkv(t, dtype=torch.float64)
    state = LinearState(torch.randn(B, H, D, DV, dtype=torch.float64), None, 1)
    for given_state in (None, state):
        raw = below_the_frontend(backend, torch.zeros(H, dtype=torch.float64), q, k, v, given_state)
        close(raw.out, D**-0.5 * (q * k).sum(-1, keepdim=True) * v, 1e-12)
        close(raw.state.S, k[:, :, -1, :, None] * v[:, :, -1, None, :], 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_at_a_decay_of_zero_are_finite(backend):
    q, k, v = (x.requires_grad_() for x in qkv(70, dtype=torch.float64))
    decay = torch.zeros(H, dtype=torch.float64, requires_grad=True)
    raw = below_the_frontend(backend, decay, q, k, v)
    grads = torch.autograd.grad(raw.out.sum() + raw.state.S.sum(), (q, k, v, decay))
    assert all(torch.isfinite(g).all() for g in grads)
    # only the key one before has decay ** 1, whose slope at 0 is 1
    slope = (D**-0.5 * (q[:, :, 1:] * k[:, :, :-1]).sum(-1, keepdim=True) * v[:, :, :-1]).sum((0, 2, 3))
    slope = slope + (k[:, :, -2, :, None] * v[:, :, -2, None, :]).sum((0, 2, 3))
    close(grads[3], slope, 1e-10)


def test_four_thousand_tokens_stay_finite_and_right_in_float32():
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 4096, 16, generator=gen) for _ in range(3))
    decay = retention_decay(2)
    assert torch.isinf(decay[0] ** -4096.0), "the trap: as a factor of its own, a decay overflows"
    out = attend(q, k, v, Retention(decay), backend="linear")
    want = attend(q.double(), k.double(), v.double(), Retention(decay.double()), backend="linear")
    assert torch.isfinite(out).all()
    close(out, want, 3e-4)


def test_bfloat16_inputs_keep_a_float32_decay():
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, 256, 16, generator=gen).bfloat16() for _ in range(3))
    out = attend(q, k, v, Retention(retention_decay(8)), backend="linear")
    want = attend(q.double(), k.double(), v.double(), Retention(retention_decay(8).double()), backend="eager")
    assert float(retention_decay(8)[4].bfloat16()) == 1.0, "the trap: in bfloat16 head 4 would not fade at all"
    torch.testing.assert_close(out.double(), want, atol=2e-2, rtol=1e-2)


def test_the_decay_of_a_head_follows_its_global_number():
    q, k, v = qkv()
    whole = attend(q, k, v, Retention(retention_decay(H)))
    shard = attend(*(x[:, 2:] for x in (q, k, v)), Retention(retention_decay(2, first=2)))
    close(shard, whole[:, 2:], 2e-6)


def test_retention_that_is_not_causal_fades_to_both_sides():
    q, k, v = qkv(9, dtype=torch.float64)
    decay = KINDS["retention"].decay.double()
    at = torch.arange(9)
    weights = D**-0.5 * (q @ k.transpose(-1, -2)) * decay[:, None, None] ** (at[:, None] - at).abs()
    close(attend(q, k, v, Retention(decay), is_causal=False), weights @ v, 1e-12)
    with pytest.raises(NoBackendError, match="decay without a causal mask"):
        attend(q, k, v, Retention(decay), is_causal=False, backend="linear")


# --- edge case 25: gradients, memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "is_causal"),
    [("elu1", True), ("elu1", False), ("identity", True), ("identity", False), ("retention", True)],
)
def test_gradients_of_inputs_state_and_decay(kind, is_causal, monkeypatch):
    monkeypatch.setattr(linear_chunks, "chunk_size", lambda d, dv: 4)
    gen = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.rand(*size, generator=gen, dtype=torch.float64).requires_grad_()
    inputs = [draw(1, 2, 11, 3), draw(1, 2, 11, 3), draw(1, 2, 11, 2), draw(1, 2, 3, 2)]
    inputs += [draw(1, 2, 3)] if kind == "elu1" else [draw(2)] if kind == "retention" else []

    def run(q, k, v, s, *more):
        variant = Retention(more[0]) if kind == "retention" else KINDS[kind]
        state = LinearState(s, more[0] if kind == "elu1" else None, 2)
        options = {"is_causal": is_causal, "backend": "linear", "return_state": True}
        out, after = dispatch.attention(q, k, v, variant=variant, state=state, **options)
        return (out, after.S) if after.z is None else (out, after.S, after.z)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


class Largest(TorchDispatchMode):
    """The largest tensor that is made inside, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad", [False, True])
def test_nothing_as_large_as_all_pairs_or_a_state_per_token_is_made(kind, grad):
    t, h, d = 2048, 4, 32
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, t, d, generator=gen).requires_grad_(grad) for _ in range(3))
    with Largest() as largest:
        out, state = attend(q, k, v, KINDS[kind], return_state=True, backend="linear")
        if grad:
            torch.autograd.grad(out.sum() + state.S.sum(), (q, k, v))
    assert largest.elements <= 2 * h * t * d  # the inputs are h * t * d
    assert largest.elements < min(t * t, h * t * d * d) / 4


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_for_the_backward_pass_grows_linearly(kind):
    def kept(t: int) -> int:
        sizes: dict[int, int] = {}

        def note(x: torch.Tensor) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        q, k, v = (x.requires_grad_() for x in qkv(t))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            out = attend(q, k, v, KINDS[kind], backend="linear")
        assert out.requires_grad
        return sum(sizes.values())

    small, large = kept(1024), kept(4096)
    assert 3.5 < large / small < 4.5


def test_the_transforms_of_functorch_run_on_it():
    q, k, v = qkv(20, dtype=torch.float64)
    f = lambda q, k, v: attend(q, k, v, LinearAttention(), backend="linear")
    want = f(q, k, v)
    mapped = torch.func.vmap(lambda q, k, v: f(q[None], k[None], v[None])[0])(q, k, v)
    close(mapped, want, 1e-12)
    out, tangent = torch.func.jvp(f, (q, k, v), (torch.ones_like(q), torch.zeros_like(k), torch.zeros_like(v)))
    close(out, want, 1e-12)
    eager = lambda q: attend(q, k, v, LinearAttention(), backend="eager")
    close(tangent, torch.func.jvp(eager, (q,), (torch.ones_like(q),))[1], 1e-10)


# --- masks and positions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_documents_start_anew_and_the_last_one_gives_the_state(kind):
    variant, ends = KINDS[kind], [0, 20, 20, 21, T]
    q, k, v = qkv(dtype=torch.float64)
    mask = masks.causal() & masks.documents(ends)
    out, state = attend(q, k, v, variant, is_causal=False, attn_mask=mask, return_state=True, backend="linear")
    for lo, hi in itertools.pairwise(ends):
        if lo < hi:
            want, last = attend(*(x[:, :, lo:hi] for x in (q, k, v)), variant, return_state=True, backend="eager")
            close(out[:, :, lo:hi], want, 1e-12)
    close(state.S, last.S, 1e-12)


def test_documents_per_batch_and_segments_out_of_order():
    q, k, v = qkv(12, dtype=torch.float64)
    rising = torch.tensor([[0] * 5 + [1] * 7, [0] * 2 + [3] * 9 + [4]])
    mixed = torch.tensor([0, 1, 0, 1, 2, 2, 0, 1, 1, 0, 2, 2])
    for ids in (rising, mixed):
        mask = masks.causal() & masks.Segments(ids, ids)
        results = [
            attend(q, k, v, LinearAttention(), is_causal=False, attn_mask=mask, return_state=True, backend=name)
            for name in BACKENDS
        ]
        close(results[0].out, results[1].out, 1e-12)
        close(results[0].state.S, results[1].state.S, 1e-12)


def test_the_queries_of_a_state_stand_behind_it():
    q, k, v = qkv(20, dtype=torch.float64)
    for variant in KINDS.values():
        whole = attend(q, k, v, variant)
        before = attend(*(x[:, :, :8] for x in (q, k, v)), variant, return_state=True).state
        for backend in BACKENDS:  # four queries over the last twelve keys
            mask = {"attn_mask": masks.causal(), "is_causal": False}
            out = attend(q[:, :, 16:], k[:, :, 8:], v[:, :, 8:], variant, state=before, backend=backend, **mask)
            close(out, whole[:, :, 16:], 1e-12)


@given(
    kind=st.sampled_from(list(KINDS)),
    sizes=st.sampled_from([(9, 9), (1, 9), (9, 1), (1, 1), (5, 70), (70, 5), (70, 70)]),
    mask=st.sampled_from(["none", "causal", "end", "offset", "lengths", "columns", "documents", "rows"]),
    hkv=st.sampled_from([1, 2, 4]),
    with_state=st.booleans(),
    batch=st.sampled_from([1 << 11, 1 << 20]),
)
def test_the_backend_is_the_specification_or_refuses(kind, sizes, mask, hkv, with_state, batch):
    (sq, skv), variant = sizes, KINDS[kind]
    q, k, v = qkv(sq, dtype=torch.float64)[0], *qkv(skv, hkv=hkv, dtype=torch.float64)[1:]
    keep = torch.arange(skv) % 3 != 1
    options = {
        "none": {"is_causal": False},
        "causal": {"q_offset": max(skv - sq, 0)},
        "end": {"is_causal": False, "attn_mask": masks.causal()},
        "offset": {"q_offset": 2},
        "lengths": {"key_lengths": torch.tensor([skv // 2, skv]), "q_offset": 0},
        "columns": {"attn_mask": masks.columns(keep=keep), "q_offset": 0},
        "documents": {"attn_mask": masks.documents([0, skv // 3, skv]) & masks.columns(keep=keep), "q_offset": 0},
        "rows": {"query_lengths": torch.tensor([sq, sq // 2]), "q_offset": 0},
    }[mask]
    if mask == "documents" and sq != skv:
        return
    if with_state:
        heads = H if kind == "retention" else hkv
        s, z = torch.randn(B, heads, D, DV, dtype=torch.float64), torch.rand(B, heads, D, dtype=torch.float64)
        options["state"] = LinearState(s, z if kind == "elu1" else None, 3)
    try:
        want = attend(q, k, v, variant, return_state=True, backend="eager", **options)
    except InputError as error:
        assert with_state
        assert "stand behind it" in str(error)  # noqa: PT017
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_chunks, "BATCH_BYTES", batch)
        try:
            got = attend(q, k, v, variant, return_state=True, backend="linear", **options)
        except NoBackendError as error:
            assert kind == "retention"
            assert "decay without a causal mask" in str(error)  # noqa: PT017
            return
    close(got.out, want.out, 1e-11)
    close(got.state.S, want.state.S, 1e-11)
    assert torch.equal(got.state.length, want.state.length)
    if kind == "elu1":
        close(got.state.z, want.state.z, 1e-11)


# --- the calls -------------------------------------------------------------------------------------------------------


def test_warm_steps_of_the_recurrence_plan_nothing(monkeypatch):
    made = []
    plan = dispatch.make_plan
    monkeypatch.setattr(dispatch, "make_plan", lambda *args, **kwargs: made.append(1) or plan(*args, **kwargs))
    for kind in KINDS:
        variant, state = KINDS[kind], None
        made.clear()
        for step in range(6):
            if kind == "retention":
                variant = Retention(variant.decay.clone())  # a new object each step, as a module's forward makes
            piece = qkv(1, seed=step)
            _, state = attend(*piece, variant, state=state, return_state=True)
            assert state.length.tolist() == [step + 1] * B
        assert len(made) == 2, "one plan without a state, one with"


def test_a_plan_takes_the_next_state():
    q, k, v = qkv(4, dtype=torch.float64)
    first = attend(q, k, v, LinearAttention(), return_state=True).state
    made = dispatch.plan(q, k, v, is_causal=True, variant=LinearAttention(), state=first, return_state=True)
    second = made(q, k, v).state
    third = made(q, k, v, state=second)
    want = attend(q, k, v, LinearAttention(), state=second, return_state=True)
    close(third.out, want.out, 1e-12)
    assert third.state.length.tolist() == [12, 12]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_in_and_out_of_a_compiled_graph(kind):
    variant = KINDS[kind]
    q, k, v = qkv(6)

    def two_steps(q, k, v):
        first, state = dispatch.attention(q, k, v, is_causal=True, variant=variant, return_state=True)
        return dispatch.attention(first[..., :D], k, v, is_causal=True, variant=variant, state=state, return_state=True)

    torch._dynamo.reset()
    compiled = torch.compile(two_steps, backend="aot_eager", fullgraph=True)
    want, got = two_steps(q, k, v), compiled(q, k, v)
    close(got.out, want.out, 1e-6)
    close(got.state.S, want.state.S, 1e-6)
    assert got.state.length.tolist() == want.state.length.tolist()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    grads = []
    for run in (two_steps, compiled):
        out, state = run(*leaves)
        grads.append(torch.autograd.grad(out.sum() + state.S.sum(), leaves))
    for a, b in zip(*grads, strict=True):
        close(a, b, 1e-4)


def test_the_heuristic_takes_linear_for_long_sequences_and_a_quadratic_form_for_short_ones():
    for variant in KINDS.values():
        long = [torch.randn(1, 4, 4096, 64) for _ in range(3)]
        short = [torch.randn(1, 4, 16, 64) for _ in range(3)]
        assert dispatch.explain(*long, is_causal=True, variant=variant).chosen == "linear"
        assert dispatch.explain(*short, is_causal=True, variant=variant).chosen in ("eager", "onnxruntime")


def test_no_rewrite_loses_a_state():
    q, k, v = (x.bfloat16() for x in qkv(6))
    report = dispatch.explain(q, k, v, variant=PLAIN, is_causal=True, return_state=True)
    assert {name for name, _ in report.legal} - {"onnxruntime"} == {"linear", "eager"}
    assert "does not hand on a state" in str(report.refused["upcast >"][0])


def state_of(**changes) -> LinearState:
    return LinearState(torch.zeros(B, H, D, DV), torch.zeros(B, H, D), 0)._replace(**changes)


ELU = LinearAttention()
MISTAKES = {
    "softmax state": (
        {"variant": variants.Softmax(), "state": state_of()},
        InputError,
        "state= means nothing",
    ),
    "softmax return": ({"variant": variants.Softmax(), "return_state": True}, InputError, "return_lse=True"),
    "no variant": ({"variant": "linear", "return_state": True}, InputTypeError, "attn_dispatch.variants, got 'linear'"),
    "a tuple": ({"state": (1, 2, 3)}, InputTypeError, "state must be a LinearState, got tuple"),
    "other heads": ({"state": state_of(S=torch.zeros(B, 2, D, DV))}, InputError, r"state.S must be .*\[2, 4, 8, 12\]"),
    "other sum": ({"state": state_of(z=torch.zeros(B, H, 9))}, InputError, r"state.z must be .*\[2, 4, 8\]"),
    "half state": ({"state": state_of(S=torch.zeros(B, H, D, DV).half())}, InputTypeError, "must be float32.*float16"),
    "no sum": ({"state": state_of(z=None)}, InputError, "this variant has a normaliser"),
    "a sum too many": ({"variant": PLAIN, "state": state_of()}, InputError, "nothing is normalised here"),
    "length": ({"state": state_of(length=torch.zeros(3))}, InputError, "state.length must be an int"),
    "window": ({"window": (3, 0)}, InputError, "a window means nothing for LinearAttention"),
    "window mask": ({"attn_mask": masks.sliding_window(4), "is_causal": False}, InputError, "a window means nothing"),
    "bias": ({"bias": torch.zeros(1, H, T, T)}, InputError, "bias means nothing"),
    "alibi": ({"bias": torch.ones(H)}, InputError, "bias means nothing"),
    "float mask": ({"attn_mask": torch.zeros(T, T)}, InputError, "a float attn_mask means nothing"),
    "softcap": ({"softcap": 5.0}, InputError, "softcap means nothing"),
    "sinks": ({"sinks": torch.zeros(H)}, InputError, "sinks means nothing"),
    "dropout": ({"dropout_p": 0.5}, InputError, "dropout_p means nothing"),
    "lse": ({"return_lse": True}, InputError, "return_lse means nothing.*\n.*\n.*return_state"),
    "eps": ({"variant": LinearAttention(normalizer_eps=-1.0)}, InputError, "normalizer_eps must be .* got -1.0"),
    "decay 0": ({"variant": Retention(torch.zeros(H))}, InputError, r"decay must be in \(0, 1\]"),
    "decay above 1": ({"variant": Retention(torch.ones(H) * 1.5)}, InputError, r"decay must be in \(0, 1\]"),
    "decay NaN": ({"variant": Retention(torch.full((H,), math.nan))}, InputError, r"decay must be in \(0, 1\]"),
    "decay type": ({"variant": Retention([0.5] * H)}, InputTypeError, "decay must be a tensor .*got list"),
    "state of lists": ({"state": state_of(S=[1.0])}, InputTypeError, "state.S must be a tensor, got list"),
    "length type": (
        {"state": state_of(length="3")},
        InputTypeError,
        "state.length must be .* an int, got str",
    ),
    "decay shape": ({"variant": Retention(torch.ones(3))}, InputError, r"decay must be \[Hq\] = \[4\]"),
    "weights and state": ({"return_weights": True, "return_state": True}, InputError, "exclude each other"),
    "state and chunks": (
        {"attn_mask": masks.chunked(8), "is_causal": False, "return_state": True},
        InputError,
        "cannot follow the mask SameBlock",
    ),
    "state, documents, lengths": (
        {"attn_mask": masks.documents([0, T]), "key_lengths": torch.tensor([3, 4]), "return_state": True},
        InputError,
        "ambiguous",
    ),
    "state before the queries": ({"state": state_of(), "q_offset": -1}, InputError, "query 0 is at key position -1"),
    "state, offsets": ({"state": state_of(), "q_offset": torch.zeros(B, dtype=torch.int64)}, InputError, "per batch"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_before_anything_runs(mistake):
    changes, kind, words = MISTAKES[mistake]
    q, k, v = qkv()
    options = {"is_causal": True, "variant": ELU} | changes
    with pytest.raises(kind, match=f"(?s){words}") as error:
        dispatch.attention(q, k, v, **options)
    assert type(error.value) is kind


def test_a_state_needs_four_dimensions():
    q = torch.randn(4, 6, 8)
    with pytest.raises(InputError, match="4-D inputs, got 3-D"):
        dispatch.attention(q, q, q, variant=PLAIN, return_state=True)


def test_the_feature_maps_are_computed_in_float32():
    assert reference.apply_feature_map("elu1", torch.tensor([-1.0])).item() == pytest.approx(math.exp(-1), rel=1e-6)
    x = torch.full((1, 1, 1, 4), -7.0, dtype=torch.bfloat16)  # elu + 1 would be 0 in bfloat16, and the output too
    out = attend(x, x, torch.ones_like(x), LinearAttention(normalizer_eps=1e-12), backend="linear")
    assert out.float().mean().item() == pytest.approx(1.0, abs=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_an_op_with_a_state_can_be_sampled_and_called_again(kind):
    from attn_dispatch.bench.calls import call_of, op_of
    from attn_dispatch.selection.samples import make_sample

    q, k, v = qkv(6)
    before = attend(q, k, v, KINDS[kind], return_state=True).state
    op = dispatch.explain(q, k, v, is_causal=True, variant=KINDS[kind], state=before, return_state=True).op
    call = call_of(op, make_sample(op))
    assert op_of(call) == op
    assert torch.isfinite(dispatch.attention(*call.args, **call.kwargs).out).all()


@pytest.mark.parametrize("wrong", ["shape", "dtype"])
def test_a_plan_refuses_a_state_that_it_was_not_made_for(wrong):
    """Nothing looked at it, and a kernel met another shape than it was compiled for."""
    q, k, v = qkv()
    state = LinearState(torch.zeros(B, H, D, DV), None, 0)
    made = dispatch.plan(q, k, v, variant=PLAIN, state=state, return_state=True, is_causal=True)
    out, _ = made(q, k, v, state=state)
    assert out.shape == v.shape
    bad = torch.zeros(B, H, D, DV + 1) if wrong == "shape" else state.S.double()
    with pytest.raises(InputError, match="the plan was made for state "):
        made(q, k, v, state=LinearState(bad, None, 0))


@pytest.mark.parametrize("t", [128, 256])
@pytest.mark.parametrize("right", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_band_given_as_a_tensor_is_served_whatever_its_size(kind, right, t):
    """From 256 rows on it was recognised as a window, which was then refused though nobody had asked for one."""
    q, k, v = (torch.randn(1, H, t, 40, generator=torch.Generator().manual_seed(i)) for i in range(3))
    band = torch.ones(t, t, dtype=torch.bool).tril(right).triu(-8)
    want = attend(q, k, v, KINDS[kind], attn_mask=masks.Dense(band), is_causal=False, backend="eager")
    close(attend(q, k, v, KINDS[kind], attn_mask=band, is_causal=False), want, 1e-4)
