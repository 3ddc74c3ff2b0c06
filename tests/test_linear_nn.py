"""The layers of the linear family: RetNet's own code as oracle, three forms that agree, states, padding."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from attn_dispatch import InputError, nn, variants
from attn_dispatch.nn.linear_modes import rotate
from attn_dispatch.nn.per_device import PerDevice

E, H, T = 32, 4, 40


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def tokens(t: int = T, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, t, E, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.fixture
def torchscale(monkeypatch):
    """torchscale's retention and its positions; what they import and do not use here is not installed."""
    for name in ("fairscale", "fairscale.nn", "timm", "timm.models", "timm.models.layers"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["fairscale.nn"].checkpoint_wrapper = sys.modules["fairscale.nn"].wrap = lambda module, *rest: module
    sys.modules["timm.models.layers"].drop_path = lambda x, *rest: x
    from torchscale.architecture.retnet import RetNetRelPos
    from torchscale.component.multiscale_retention import MultiScaleRetention

    args = types.SimpleNamespace(
        multiway=False, layernorm_eps=1e-6, decoder_embed_dim=E, decoder_retention_heads=H, recurrent_chunk_size=8
    )
    torch.manual_seed(0)
    theirs = MultiScaleRetention(args, E, 2 * E, H).eval()
    return theirs, RetNetRelPos(args)


@pytest.mark.parametrize("mode", ["auto", "parallel", "chunk", "recurrent"])
def test_retention_is_that_of_torchscale_in_all_its_forms(torchscale, mode):
    theirs, positions = torchscale
    ours = nn.Retention(E, H)
    ours.load_state_dict(theirs.state_dict())
    x = tokens() * 20  # large scores, so that the eps of the norm is nothing beside them
    with torch.no_grad():
        got = ours(x, mode=mode)
        parallel = theirs(x, positions(T))
        close(got, parallel, 2e-4)
        chunked = theirs(x, positions(T, chunkwise_recurrent=True), chunkwise_recurrent=True)
        close(got, chunked, 2e-4)
        state: dict = {}
        steps = []
        for i in range(T):
            at = positions(i + 1, activate_recurrent=True)
            steps.append(theirs(x[:, i : i + 1], at, incremental_state=state))
        close(got, torch.cat(steps, 1), 2e-4)


LAYERS = {
    "retention": lambda **more: nn.Retention(E, H, **more),
    "linear": lambda **more: nn.LinearAttention(E, H, rotary=True, **more),
    "grouped": lambda **more: nn.LinearAttention(E, H, kv_heads=2, feature_map="identity", normalizer_eps=None, **more),
}


@pytest.fixture(params=LAYERS)
def layer(request):
    torch.manual_seed(1)
    return LAYERS[request.param](dtype=torch.float64)


MODES = [{"mode": "parallel"}, {"mode": "chunk"}, {"mode": "chunk", "chunk_size": 7}, {"mode": "recurrent"}]


@pytest.mark.parametrize("options", MODES)
def test_every_form_gives_the_same_output_state_and_gradients(layer, options):
    x = tokens(dtype=torch.float64)
    results = []
    for how in ({}, options):
        out, state = layer(x, return_state=True, **how)
        grads = torch.autograd.grad(out.square().sum() + state.S.sum(), list(layer.parameters()), allow_unused=True)
        results.append((out, state, [g for g in grads if g is not None]))
    close(results[1][0], results[0][0], 1e-10)
    close(results[1][1].S, results[0][1].S, 1e-10)
    assert results[1][1].length.tolist() == [T, T]
    for a, b in zip(results[1][2], results[0][2], strict=True):
        close(a, b, 1e-8)


@pytest.mark.parametrize("options", MODES)
def test_a_sequence_may_be_cut_and_the_rotation_goes_on(layer, options):
    x = tokens(dtype=torch.float64)
    first, state = layer(x[:, :11], return_state=True, **options)
    second, state = layer(x[:, 11:12], state=state, return_state=True)
    third = layer(x[:, 12:], state=state, **options)
    close(torch.cat([first, second, third], 1), layer(x), 1e-10)


@pytest.mark.parametrize("options", MODES)
def test_padding_changes_nothing_and_the_padded_batch_goes_on_where_each_sequence_ends(layer, options):
    x, lengths = tokens(dtype=torch.float64), torch.tensor([13, T])
    out, state = layer(x, lengths=lengths, return_state=True, **options)
    alone, own = layer(x[:1, :13], return_state=True)
    close(out[:1, :13], alone, 1e-10)
    close(state.S[:1], own.S, 1e-10)
    assert state.length.tolist() == [13, T]
    after = layer(tokens(3, torch.float64), state=state)
    close(after[:1], layer(tokens(3, torch.float64)[:1], state=own), 1e-10)


def test_heads_spread_over_devices_keep_the_decay_of_their_global_number():
    whole = nn.Retention(E, H, rotary=False)
    half = nn.Retention(E // 2, H // 2, first_head=2, rotary=False)
    assert torch.equal(half.decay, whole.decay[2:])
    assert torch.equal(whole.decay, 1 - 2.0 ** (-5 - torch.arange(4.0)))


def test_a_layer_in_bfloat16_keeps_its_decay():
    layer = nn.Retention(128, 8).bfloat16()
    assert (layer.decay < 1).all()
    assert layer.decay.dtype == torch.float32
    x = torch.randn(1, 20, 128).bfloat16()
    out, state = layer(x, return_state=True)
    assert out.dtype == torch.bfloat16
    assert state.S.dtype == torch.float32


def test_a_decay_of_ones_own_and_no_gate():
    layer = nn.Retention(E, H, decay=torch.full((H,), 0.5), gate=False, rotary=False, value_dim=E)
    assert layer.g_proj is None
    assert {name.split(".")[0] for name, _ in layer.named_parameters()} == {"q_proj", "k_proj", "v_proj", "out_proj"}
    assert layer(tokens()).shape == (2, T, E)


def test_linear_attention_is_the_op_between_its_projections():
    layer, x, context = nn.LinearAttention(E, H), tokens(), tokens(9)
    q, k, v = (p(y).unflatten(-1, (H, -1)).transpose(1, 2) for p, y in (
        (layer.q_proj, x), (layer.k_proj, context), (layer.v_proj, context)))  # fmt: skip
    a = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-1, -2)
    want = layer.out_proj((a / a.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))
    close(layer(x, context), want)


def test_a_layer_compiles():
    layer, x = nn.LinearAttention(E, H), tokens(8)
    torch._dynamo.reset()
    close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


MISTAKES = {
    "heads": (lambda: nn.Retention(30, 4), "embed_dim 30 is not a multiple of num_heads 4"),
    "values": (lambda: nn.Retention(32, 4, value_dim=30), "value_dim 30"),
    "odd pairs": (lambda: nn.Retention(36, 4), "head size must be even, got 9"),
    "decay": (lambda: nn.Retention(32, 4, decay=torch.ones(3)), r"decay must be \[num_heads\] = \[4\]"),
    "kv heads": (lambda: nn.LinearAttention(32, 4, kv_heads=3), "not a multiple of kv_heads 3"),
    "linear heads": (lambda: nn.LinearAttention(30, 4), "embed_dim 30"),
    "odd rotary": (lambda: nn.LinearAttention(36, 4, rotary=True), "head_dim must be even, got 9"),
    "mode": (lambda: nn.Retention(32, 4)(tokens(3), mode="fast"), "mode must be one of auto, parallel, chunk"),
    "chunk size": (lambda: nn.Retention(32, 4)(tokens(3), chunk_size=4), "chunk_size is a positive number for mode"),
    "order": (lambda: nn.LinearAttention(32, 4)(tokens(3), is_causal=False, mode="recurrent"), "needs is_causal=True"),
    "context": (lambda: nn.LinearAttention(32, 4, rotary=True)(tokens(3), tokens(4)), "rotary with a context"),
    "state": (
        lambda: nn.Retention(32, 4)(tokens(3), state=variants.LinearState(torch.zeros(2, 4, 8, 8), None, 0)),
        "state.S must be",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    run, words = MISTAKES[mistake]
    with pytest.raises(InputError, match=words):
        run()


@pytest.mark.parametrize("mode", ["chunk", "recurrent"])
def test_a_form_that_goes_token_by_token_is_refused_for_a_context(mode):
    more = {"chunk_size": 4} if mode == "chunk" else {}
    with pytest.raises(InputError, match="goes through queries and keys together, and there are 3 and 5"):
        nn.LinearAttention(32, 4)(tokens(3), tokens(5), is_causal=True, mode=mode, **more)


def test_lengths_of_a_context_are_those_of_its_keys_alone():
    """They were taken for the queries' too: rows beyond them came out 0."""
    torch.manual_seed(0)
    layer = nn.LinearAttention(E, H, dtype=torch.float64)
    x, context = tokens(9, torch.float64), tokens(12, torch.float64)
    lengths = torch.tensor([4, 12])
    out = layer(x, context, is_causal=True, lengths=lengths)
    close(out[:1], layer(x[:1], context[:1, :4], is_causal=True), 1e-10)


@pytest.mark.parametrize("options", [{}, *MODES])
def test_a_context_of_the_length_of_x_is_still_a_context(options):
    """Whose lengths they are was told by the sizes, which may be equal by chance."""
    torch.manual_seed(0)
    layer = nn.LinearAttention(E, H, dtype=torch.float64)
    x, context = tokens(12, torch.float64), tokens(13, torch.float64)[:, 1:]
    out = layer(x, context, is_causal=True, lengths=torch.tensor([4, 12]), **options)
    close(out[:1], layer(x[:1], context[:1, :4], is_causal=True), 1e-10)


def test_the_rotation_of_a_float64_layer_is_float64():
    """Angles were float32: at a late position off by 1e-3."""
    x, at = torch.randn(1, 2, 3, 8, dtype=torch.float64), torch.tensor([[100_000, 100_001, 100_002]])
    angle = at[0, :, None].double() / 10000.0 ** (torch.arange(4).double() / 3)
    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(angle), angle)
    close(rotate(x, at), torch.view_as_real(pairs).flatten(-2), 1e-10)


@pytest.mark.parametrize("options", [{}, *MODES])
def test_no_sequences_are_no_output(layer, options):
    """mode="chunk" asked for a backend that takes none."""
    out, state = layer(tokens(dtype=torch.float64)[:0], return_state=True, **options)
    assert out.shape == (0, T, E)
    assert state.S.shape[0] == 0


@pytest.mark.parametrize("decay", [None, torch.tensor([0.5, 0.25])], ids=["its own", "given"])
def test_a_layer_made_on_meta_has_its_decay(decay):
    torch.manual_seed(0)
    layer = nn.Retention(16, 2, decay=decay)
    with torch.device("meta"):
        other = nn.Retention(16, 2, decay=decay)
    other.to_empty(device="cpu").load_state_dict(layer.state_dict())
    x = torch.randn(1, 5, 16)
    close(other(x), layer(x), 0.0)
    assert layer.to("meta")(x.to("meta")).is_meta
    with pytest.raises(InputError, match="decay is on meta, where it has no values"):
        nn.Retention(16, 2, decay=torch.ones(2, device="meta"))


def test_a_table_goes_with_its_module_and_keeps_no_stand_in_of_a_tracer():
    table, far = PerDevice(torch.ones(2)), torch.device("meta")
    with FakeTensorMode(allow_non_fake_inputs=True):  # as torch.export has it
        assert isinstance(table.on(far), FakeTensor)
    table.follow(lambda x: x.to(far))
    assert type(table.on(far)) is torch.Tensor
    assert table.on(far) is table.on(far)
    with torch.inference_mode():
        made = PerDevice(torch.ones(2), device=far)
    assert not made.table.is_inference()
    assert not made.on(far).is_inference()
    layer = nn.Retention(16, 2).share_memory().bfloat16()
    assert torch.equal(layer.decay, variants.retention_decay(2))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_decay_given_on_a_gpu_serves_the_cpu_and_training_after_inference():
    layer = nn.Retention(16, 2, decay=torch.tensor([0.5, 0.25], device="cuda"))
    x = torch.randn(1, 5, 16)
    want = layer(x)
    layer.cuda()
    with torch.inference_mode():
        close(layer(x.cuda()).cpu(), want)
    layer(x.cuda()).sum().backward()


@pytest.mark.parametrize("options", [{"mode": "recurrent"}, {"mode": "chunk", "chunk_size": 4}])
def test_no_tokens_are_no_output_and_the_same_state(layer, options):
    first, state = layer(tokens(dtype=torch.float64), return_state=True)
    out, after = layer(tokens(0, torch.float64), state=state, return_state=True, **options)
    assert out.shape == (first.shape[0], 0, first.shape[2])
    close(after.S, state.S, 1e-12)
    assert after.length.tolist() == state.length.tolist()
