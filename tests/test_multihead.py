"""nn.MultiheadAttention against torch's own and transformers' Llama, Rotary against Llama's and ONNX's, KVCache."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from attn_dispatch import dispatch, masks, variants
from attn_dispatch.biases import alibi_slopes
from attn_dispatch.errors import InputError, InputTypeError, UnknownBackendError
from attn_dispatch.nn import KVCache, MultiheadAttention, Rotary

F64 = torch.float64


def close(got, want, atol=1e-12):
    torch.testing.assert_close(got, want, atol=atol, rtol=1e-10 if want.dtype == F64 else 1e-5)


def pair(batch_first=True, **options):
    """torch's module and ours with its parameters, float64, biases not zero."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(24, 4, batch_first=batch_first, dtype=F64, **options)
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return theirs, MultiheadAttention.from_torch(theirs)


# --- torch.nn.MultiheadAttention -------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_it_equals_torch_with_weights_averaged_and_per_head(batch_first, training, bias):
    theirs, ours = pair(batch_first, bias=bias)
    theirs.train(training), ours.train(training)
    x = torch.randn(3, 5, 24, dtype=F64)
    other = torch.randn(3, 7, 24, dtype=F64)
    q, kv = (x, other) if batch_first else (x.transpose(0, 1), other.transpose(0, 1))
    for args in ((q, q, q), (q, kv, kv), (q, kv, kv * 2)):
        for average in (True, False):
            want = theirs(*args, need_weights=True, average_attn_weights=average)
            got = ours(*args, need_weights=True, average_attn_weights=average)
            close(got.out, want[0]), close(got.weights, want[1])
        close(ours(*args).out, want[0])
        assert ours(*args).weights is None


@pytest.mark.parametrize("sizes", [(10, 24), (24, 6), (10, 6)])
def test_it_equals_torch_with_other_features_of_key_and_value(sizes):
    theirs, ours = pair(kdim=sizes[0], vdim=sizes[1])
    assert set(ours.state_dict()) == set(theirs.state_dict())
    q, k, v = (
        torch.randn(2, 3, 24, dtype=F64),
        torch.randn(2, 4, sizes[0], dtype=F64),
        torch.randn(2, 4, sizes[1], dtype=F64),
    )
    close(ours(q, k, v).out, theirs(q, k, v, need_weights=False)[0])


def test_torchs_masks_say_who_may_not_attend_and_a_mask_object_who_may():
    theirs, ours = pair()
    b, s = 2, 6
    x = torch.randn(b, s, 24, dtype=F64)
    banned = torch.rand(s, s) < 0.4
    banned[:, 0] = False
    per_head = torch.rand(b * 4, s, s) < 0.4
    per_head[:, :, 0] = False
    padded = torch.arange(s) >= torch.tensor([6, 3])[:, None]
    added = torch.randn(s, s, dtype=F64)
    causal = nn.Transformer.generate_square_subsequent_mask(s, dtype=F64)
    for given in (
        {"attn_mask": banned},
        {"attn_mask": per_head},
        {"attn_mask": added},
        {"attn_mask": causal},
        {"key_padding_mask": padded},
        {"key_padding_mask": padded, "attn_mask": banned},
        {"key_padding_mask": torch.randn(b, s, dtype=F64), "attn_mask": added},
        {"key_padding_mask": torch.zeros(b, s, dtype=F64).masked_fill(padded, -torch.inf)},
    ):
        close(ours(x, **given).out, theirs(x, x, x, need_weights=False, **given)[0])
        close(ours(x, need_weights=True, **given).weights, theirs(x, x, x, **given)[1])
    want = theirs(x, x, x, attn_mask=causal, is_causal=True, need_weights=False)[0]
    close(ours(x, is_causal=True).out, want)
    close(ours(x, attn_mask=masks.causal()).out, want)
    close(ours(x, attn_mask=causal, is_causal=True).out, want)
    want = theirs(x, x, x, attn_mask=causal.isinf(), key_padding_mask=padded, need_weights=False)[0]
    close(ours(x, is_causal=True, key_padding_mask=padded).out, want)
    close(ours(x, attn_mask=masks.causal(), key_padding_mask=padded).out, want)


def test_a_row_that_may_attend_nothing_gives_the_projection_of_zero():
    _, ours = pair()
    out = ours(torch.randn(1, 3, 24, dtype=F64), key_padding_mask=torch.ones(1, 3, dtype=torch.bool)).out
    close(out, ours.out_proj.bias.expand_as(out))


def test_unbatched_inputs_equal_torchs():
    theirs, ours = pair(batch_first=False)
    q, k = torch.randn(5, 24, dtype=F64), torch.randn(3, 24, dtype=F64)
    padding = torch.tensor([False, False, True])
    want = theirs(q, k, k, key_padding_mask=padding)
    got = ours(q, k, key_padding_mask=padding, need_weights=True)
    close(got.out, want[0]), close(got.weights, want[1])


def test_gradients_of_inputs_and_parameters_equal_torchs():
    theirs, ours = pair()
    x = torch.randn(2, 5, 24, dtype=F64)
    found = []
    for module, call in ((theirs, lambda x: theirs(x, x, x, need_weights=False)[0]), (ours, lambda x: ours(x).out)):
        leaf = x.clone().requires_grad_()
        call(leaf).square().sum().backward()
        found.append({"x": leaf.grad} | {n: p.grad for n, p in module.named_parameters()})
    assert set(found[0]) == set(found[1])
    for name, want in found[0].items():
        close(found[1][name], want, 1e-11)


@pytest.mark.parametrize("options", [{}, {"kdim": 10, "vdim": 6}, {"bias": False}])
def test_one_seed_draws_the_same_parameters_as_torch(options):
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(24, 4, **options)
    torch.manual_seed(3)
    ours = MultiheadAttention(24, 4, **options)
    after = torch.rand(1)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    for name, want in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], want), name
    torch.manual_seed(3)
    ours.reset_parameters()
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(ours.out_proj.weight, theirs.out_proj.weight)
    assert torch.equal(next(iter(ours.parameters())), next(iter(theirs.parameters())))


def test_a_state_dict_with_separate_projections_is_stacked_and_the_other_way_round():
    _, ours = pair()
    state = ours.state_dict()
    parts = state.pop("in_proj_weight").split(24)
    state |= dict(zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), parts, strict=True))
    other = MultiheadAttention(24, 4, dtype=F64)
    other.load_state_dict(state)
    assert torch.equal(other.in_proj_weight, ours.in_proj_weight)
    whole = nn.ModuleDict({"attn": MultiheadAttention(24, 4, dtype=F64)})
    whole.load_state_dict({f"attn.{name}": x for name, x in state.items()})
    assert torch.equal(whole["attn"].in_proj_weight, ours.in_proj_weight)
    theirs = nn.MultiheadAttention(24, 4, dtype=F64)
    theirs.load_state_dict(ours.state_dict())


def test_what_torch_adds_to_the_keys_is_refused_by_name():
    with pytest.raises(InputError, match="bias_k: a learned extra key"):
        MultiheadAttention.from_torch(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    with pytest.raises(InputError, match="add_zero_attn"):
        MultiheadAttention.from_torch(nn.MultiheadAttention(8, 2, add_zero_attn=True))


def test_dropout_is_for_training():
    torch.manual_seed(0)
    module = MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
    x = torch.randn(1, 8, 16)
    assert not torch.equal(module(x).out, module(x).out)
    module.eval()
    assert torch.equal(module(x).out, module(x).out)


def test_a_frozen_module_stays_frozen():
    theirs = nn.MultiheadAttention(16, 2)
    theirs.in_proj_weight.requires_grad_(False), theirs.out_proj.bias.requires_grad_(False)
    ours = MultiheadAttention.from_torch(theirs)
    wanted = {name: p.requires_grad for name, p in theirs.named_parameters()}
    assert {name: p.requires_grad for name, p in ours.named_parameters()} == wanted


def test_weights_are_those_before_dropout():
    torch.manual_seed(0)
    module = MultiheadAttention(16, 2, dropout=0.5, batch_first=True)
    x = torch.randn(1, 8, 16)
    dropped = module(x, need_weights=True)
    whole = module.eval()(x, need_weights=True)
    close(dropped.weights, whole.weights, 1e-6)
    assert not torch.allclose(dropped.out, whole.out)


ENCODER_MASKS = ["none", "src_mask", "src_key_padding_mask", "both"]


def encoder_masks(which):
    given = {
        "src_mask": nn.Transformer.generate_square_subsequent_mask(5).isinf(),
        "src_key_padding_mask": torch.arange(5) >= torch.tensor([5, 3])[:, None],
    }
    return {name: mask for name, mask in given.items() if which in (name, "both")}


@pytest.mark.parametrize("which", ENCODER_MASKS)
@pytest.mark.parametrize("training", [True, False])
def test_torchs_encoder_layer_and_encoder_run_with_it_as_with_their_own(training, which):
    """In eval the layer asked for `_qkv_same_embed_dim`, and so did the encoder when it was made."""
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(24, 4, 32, dropout=0.0, batch_first=True)
    nn.init.normal_(theirs.self_attn.in_proj_bias)
    ours = copy.deepcopy(theirs)
    ours.self_attn = MultiheadAttention.from_torch(theirs.self_attn)
    x, given = torch.randn(2, 5, 24), encoder_masks(which)
    with pytest.warns(UserWarning, match="_qkv_same_embed_dim was not True"):
        stack = nn.TransformerEncoder(ours, 2).train(training)
    torchs = nn.TransformerEncoder(theirs, 2).train(training)
    theirs.train(training), ours.train(training)
    names = {"src_mask": "mask"}
    for record in (True, False):  # in eval, without gradients, torch's own goes its fused way
        with torch.set_grad_enabled(record):
            pairs = [(ours(x, **given), theirs(x, **given))]
            given_to_all = {names.get(name, name): mask for name, mask in given.items()}
            pairs.append((stack(x, **given_to_all), torchs(x, **given_to_all)))
        for got, want in pairs:
            close(got[0], want[0], 1e-5), close(got[1, :3], want[1, :3], 1e-5)  # beyond is padding in half of them


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"attn_mask": torch.zeros(3, 4, dtype=torch.bool)}, InputError, "attn_mask must be"),
        ({"attn_mask": torch.zeros(5, 5, dtype=torch.int64)}, InputTypeError, "attn_mask has dtype"),
        ({"key_padding_mask": torch.zeros(2, 4, dtype=torch.bool)}, InputError, "key_padding_mask must be"),
        ({"key": torch.zeros(2, 5, 7)}, InputError, "key must have 16 features"),
        ({"key": torch.zeros(2, 5, 16), "cache": KVCache()}, InputError, "a cache holds the keys of the query's own"),
    ],
)
def test_a_wrong_argument_is_named(arguments, kind, words):
    with pytest.raises(kind, match=words):
        MultiheadAttention(16, 2, batch_first=True)(torch.zeros(2, 5, 16), **arguments)


def test_sizes_that_do_not_divide_are_named():
    with pytest.raises(InputError, match="num_heads 6 must be a multiple of kv_heads 4"):
        MultiheadAttention(24, 6, kv_heads=4)
    with pytest.raises(InputError, match="embed_dim 25 is not a multiple"):
        MultiheadAttention(25, 6)


def test_no_kv_heads_are_named_and_not_taken_for_the_default():
    with pytest.raises(InputError, match="kv_heads 0"):
        MultiheadAttention(24, 6, kv_heads=0)


def test_cross_attention_over_as_many_keys_as_queries_counts_its_keys_from_0():
    """Which keys are turned by whose positions was told by their number, which may be equal by chance."""
    torch.manual_seed(0)
    module = MultiheadAttention(16, 2, rotary=100.0, batch_first=True, dtype=F64)
    x, other = torch.randn(1, 5, 16, dtype=F64), torch.randn(1, 6, 16, dtype=F64)
    at = torch.arange(3, 8)
    want = module(x, other[:, :5], positions=at).out
    beyond = torch.arange(6)[None] > 4  # the sixth key is padding
    close(module(x, other, positions=at, key_padding_mask=beyond).out, want)


SAID_TWICE = [
    ({"window": (2, 0)}, {"window": (3, 0)}, "window of the call is said by the module already"),
    ({"variant": variants.LinearAttention()}, {"variant": variants.Softmax()}, "variant of the call"),
    ({}, {"key_lengths": torch.tensor([2])}, "lengths="),
    ({}, {"sinks": torch.zeros(2)}, "sinks=True of the module"),
    ({}, {"return_weights": True}, "need_weights=True"),
    ({}, {"enable_gqa": True}, "kv_heads= of the module"),
    ({}, {"layout": "bshd"}, "batch_first= of the module"),
]


@pytest.mark.parametrize(("made", "called", "words"), SAID_TWICE, ids=[str(list(c)) for _, c, _ in SAID_TWICE])
def test_what_the_module_says_already_is_refused_in_a_call(made, called, words):
    module = MultiheadAttention(16, 2, batch_first=True, **made)
    with pytest.raises(InputError, match=words):
        module(torch.zeros(1, 4, 16), **called)


NEGLECTED = {  # what they replaced or ignored without a word
    "dropout": ({"dropout": 0.1}, {"dropout_p": 0.9}, "dropout_p=0.9 of the call, and the module has dropout=0.1"),
    "positions": (
        {},
        {"positions": torch.arange(4)},
        r"positions \[4\] are for Rotary, and the module has rotary=None",
    ),
    "offset": (
        {"is_causal": True},
        {"cache": KVCache(), "q_offset": 2},
        r"q_offset=2 beside a cache, which puts the queries behind what it holds \(0 tokens\)",
    ),
    "offset beside rows": (
        {"is_causal": True},
        {"cache": KVCache(), "q_offset": 2, "lengths": torch.tensor([3])},
        "q_offset=2 beside a cache",
    ),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NEGLECTED)
def test_an_argument_that_would_be_dropped_is_refused_with_its_value(name, training):
    made, called, words = NEGLECTED[name]
    module = MultiheadAttention(16, 2, batch_first=True, **made).train(training)
    with torch.no_grad(), pytest.raises(InputError, match=words) as error:
        module(torch.zeros(1, 4, 16), **called)
    assert error.value.remedy
    module(torch.zeros(1, 4, 16), q_offset=None, positions=None)


@pytest.mark.parametrize("window", [None, (7, 0), (None, 0)])
def test_a_rolling_cache_that_drops_keys_which_are_seen_is_refused(window):
    module = MultiheadAttention(16, 2, is_causal=True, window=window, batch_first=True)
    cache = KVCache(window=4)
    with pytest.raises(InputError, match="a cache of window 4 keeps 4 keys, and the module's window is"):
        module(torch.zeros(1, 4, 16), cache=cache)
    assert cache.length == 0


@pytest.mark.parametrize("where", ["module", "call"])
def test_a_mask_that_counts_keys_from_0_is_refused_with_a_rolling_cache(where):
    mask = masks.causal() & masks.SameBlock(2)
    own = {"mask": mask} if where == "module" else {}
    module = MultiheadAttention(16, 2, window=(3, 0), batch_first=True, **own)
    with pytest.raises(InputError, match="counts keys from 0, and a rolling cache drops the first ones"):
        module(torch.zeros(1, 2, 16), cache=KVCache(window=4), attn_mask=None if own else mask)


def test_a_bias_of_the_call_is_added_to_alibi_and_to_a_float_mask():
    """It replaced the module's."""
    torch.manual_seed(0)
    module = MultiheadAttention(16, 2, alibi=True, is_causal=True, batch_first=True, dtype=F64)
    x, bias = torch.randn(2, 5, 16, dtype=F64), torch.randn(2, 5, 5, dtype=F64)
    want = module(x, attn_mask=bias.expand(2, 2, 5, 5).flatten(0, 1)).out
    close(module(x, bias=bias[None]).out, want)
    assert not torch.allclose(module(x).out, want)


def test_weights_lse_and_unbatched_inputs_go_together():
    """With `return_lse` the weights kept their heads, and unbatched inputs their batch."""
    torch.manual_seed(0)
    module = MultiheadAttention(16, 2, is_causal=True, batch_first=True, dtype=F64)
    x = torch.randn(1, 5, 16, dtype=F64)
    out, lse, weights = module(x, return_lse=True, need_weights=True)
    assert (lse.shape, weights.shape) == ((1, 2, 5), (1, 5, 5))
    close(weights, module(x, need_weights=True).weights)
    alone = module(x[0], return_lse=True, need_weights=True, average_attn_weights=False)
    assert [tuple(part.shape) for part in alone] == [(5, 16), (2, 5), (2, 5, 5)]
    close(alone[1], lse[0])
    close(alone[2].mean(0), weights[0])
    close(alone[0], out[0])


# --- beyond torch ----------------------------------------------------------------------------------------------------


def llama(heads=4, kv_heads=2, width=32):
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=width, num_attention_heads=heads, num_key_value_heads=kv_heads, attn_implementation="eager"
    )
    torch.manual_seed(1)
    theirs, rotary = LlamaAttention(config, 0).double().eval(), LlamaRotaryEmbedding(config)
    ours = MultiheadAttention(
        width, heads, kv_heads=kv_heads, bias=False, rotary=10_000.0, is_causal=True, batch_first=True, dtype=F64
    )
    with torch.no_grad():
        ours.in_proj_weight.copy_(torch.cat([p.weight for p in (theirs.q_proj, theirs.k_proj, theirs.v_proj)]))
        ours.out_proj.weight.copy_(theirs.o_proj.weight)
    return theirs, rotary, ours.eval()


def run_llama(theirs, rotary, x):
    s = x.shape[1]
    cos, sin = (y.double() for y in rotary(x.float(), torch.arange(s)[None]))
    mask = torch.full((s, s), -torch.inf, dtype=F64).triu(1)[None, None]
    return theirs(x, position_embeddings=(cos, sin), attention_mask=mask)[0]


def test_grouped_heads_with_rotary_equal_transformers_llama_attention():
    theirs, rotary, ours = llama()
    x = torch.randn(2, 9, 32, dtype=F64)
    close(ours(x).out, run_llama(theirs, rotary, x), 1e-6)  # Llama's own cosines are float32


@pytest.mark.parametrize("steps", [(9,), (4, 5), (1,) * 9, (3, 1, 1, 4)])
def test_prefill_and_decode_with_a_cache_equal_llama_in_one_shot(steps):
    theirs, rotary, ours = llama()
    x = torch.randn(2, 9, 32, dtype=F64)
    cache = KVCache(max_length=9)
    with torch.no_grad():
        parts = [ours(part, cache=cache).out for part in x.split(steps, 1)]
    close(torch.cat(parts, 1), run_llama(theirs, rotary, x), 1e-6)
    close(torch.cat(parts, 1), ours(x).out)


@pytest.mark.parametrize("window", [1, 2, 4, 9, 20])
@pytest.mark.parametrize("steps", [(9,), (4, 5), (1,) * 9, (3, 1, 5)])
def test_a_rolling_cache_equals_a_window_over_everything(window, steps):
    torch.manual_seed(0)
    module = MultiheadAttention(
        16, 2, rotary=100.0, window=(window - 1, 0), alibi=True, sinks=True, batch_first=True, dtype=F64
    )
    x = torch.randn(2, 9, 16, dtype=F64)
    cache = KVCache(window=window)
    with torch.no_grad():
        parts = [module(part, cache=cache).out for part in x.split(steps, 1)]
    close(torch.cat(parts, 1), module(x).out)


def test_rows_of_different_lengths_decode_as_each_alone():
    torch.manual_seed(0)
    module = MultiheadAttention(
        16, 4, kv_heads=2, rotary=100.0, is_causal=True, alibi=True, batch_first=True, dtype=F64
    )
    lengths = [5, 2, 3]
    prompts = [torch.randn(1, n, 16, dtype=F64) for n in lengths]
    steps = torch.randn(3, 4, 16, dtype=F64)
    padded = torch.full((3, 5, 16), torch.nan, dtype=F64)  # what is padded must not be seen
    for i, prompt in enumerate(prompts):
        padded[i, : lengths[i]] = prompt[0]
    cache = KVCache()
    with torch.no_grad():
        found = [module(padded.nan_to_num(1e3), cache=cache, lengths=torch.tensor(lengths)).out]
        found += [module(steps[:, i : i + 1], cache=cache).out for i in range(4)]
    assert cache.lengths.tolist() == [9, 6, 7]
    for i, prompt in enumerate(prompts):
        want = module(torch.cat([prompt, steps[i : i + 1]], 1)).out[0]
        close(found[0][i, : lengths[i]], want[: lengths[i]])
        close(torch.cat([step[i] for step in found[1:]]), want[lengths[i] :])


FAILURES = {
    "mask": ({"attn_mask": torch.zeros(3, 3, dtype=torch.bool)}, InputError),
    "padding": ({"key_padding_mask": torch.zeros(3, 3, dtype=torch.bool)}, InputError),
    "option": ({"softcap": -1.0}, InputError),
    "backend": ({"backend": "no such backend"}, UnknownBackendError),
}


@pytest.mark.parametrize("tokens", [1, 3, 100])
@pytest.mark.parametrize("kind", ["plain", "rolling", "rows", "gradients"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_call_that_fails_leaves_its_cache_as_it_was(failure, kind, tokens):
    """Its tokens stayed, and the call that was made again had them twice."""
    torch.manual_seed(0)
    window = 4 if kind == "rolling" else None
    module = MultiheadAttention(
        16, 2, rotary=True, is_causal=True, window=window and (window - 1, 0), batch_first=True, dtype=F64
    )
    cache, untouched = KVCache(window=window), KVCache(window=window)
    lengths = torch.tensor([2, 5]) if kind == "rows" else None
    prompt, more = torch.randn(2, 5, 16, dtype=F64), torch.randn(2, tokens, 16, dtype=F64)
    with torch.set_grad_enabled(kind == "gradients"):
        for one in (cache, untouched):
            module(prompt, cache=one, lengths=lengths)
        wrong, error = FAILURES[failure]
        with pytest.raises(error):
            module(more, cache=cache, **wrong)
        assert (cache.length, cache.start) == (untouched.length, untouched.start)
        close(module(more, cache=cache).out, module(more, cache=untouched).out)
    assert cache.length == untouched.length
    assert (cache.lengths is None) == (untouched.lengths is None)


def test_a_cache_under_gradients_keeps_the_graph():
    torch.manual_seed(0)
    module = MultiheadAttention(16, 2, is_causal=True, batch_first=True, dtype=F64)
    x = torch.randn(1, 6, 16, dtype=F64)
    (want,) = torch.autograd.grad(module(x).out.square().sum(), module.in_proj_weight)
    cache = KVCache()
    out = torch.cat([module(part, cache=cache).out for part in x.split((3, 1, 2), 1)], 1)
    (got,) = torch.autograd.grad(out.square().sum(), module.in_proj_weight)
    close(got, want, 1e-11)


@pytest.mark.parametrize(
    "variant", [variants.LinearAttention(), variants.Retention(torch.tensor([0.9, 0.5]))], ids=["linear", "retention"]
)
def test_any_variant_by_argument(variant):
    module = MultiheadAttention(16, 2, is_causal=True, variant=variant, batch_first=True, dtype=F64)
    x = torch.randn(2, 5, 16, dtype=F64)
    q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in (x @ module.in_proj_weight.T).split(16, -1))
    heads = dispatch.attention(q, k, v, is_causal=True, variant=variant, backend="eager")
    close(module(x).out, heads.transpose(1, 2).flatten(2) @ module.out_proj.weight.T)


def test_softcap_mask_and_other_value_heads_reach_the_call():
    torch.manual_seed(0)
    module = MultiheadAttention(
        16, 2, head_dim=6, value_head_dim=10, softcap=2.0, mask=masks.strided(2), scale=0.3, batch_first=True, dtype=F64
    )
    x = torch.randn(2, 5, 16, dtype=F64)
    q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (x @ module.in_proj_weight.T).split((12, 12, 20), -1))
    scores = 2.0 * torch.tanh(0.3 * q @ k.mT / 2.0)
    i = torch.arange(5)
    allowed = (i <= i[:, None]) & ((i[:, None] - i) % 2 == 0)
    want = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
    close(module(x).out, want.transpose(1, 2).flatten(2) @ module.out_proj.weight.T)


def test_alibi_beside_a_float_mask_is_the_sum_of_both():
    torch.manual_seed(0)
    module = MultiheadAttention(16, 4, alibi=True, batch_first=True, dtype=F64)
    x, added = torch.randn(2, 5, 16, dtype=F64), torch.randn(5, 5, dtype=F64)
    i = torch.arange(5)
    whole = added - module.alibi.double()[:, None, None] * (i[:, None] - i).abs()
    module_without = MultiheadAttention(16, 4, batch_first=True, dtype=F64)
    module_without.load_state_dict(module.state_dict())
    want = module_without(x, attn_mask=whole.repeat(2, 1, 1)).out
    close(module(x, attn_mask=added).out, want)


@pytest.mark.parametrize("where", ["argument", "context"])
def test_slopes_are_whole_after_meta_and_an_empty_module(where):
    """They were a buffer that no state dict fills: what lay in the memory was taken for slopes."""
    torch.manual_seed(0)
    options = {"alibi": True, "is_causal": True, "batch_first": True}
    module = MultiheadAttention(24, 12, **options)
    if where == "argument":
        other = MultiheadAttention(24, 12, **options, device="meta")
    else:
        with torch.device("meta"):
            other = MultiheadAttention(24, 12, **options)
    for parameter in other.to_empty(device="cpu").parameters():
        nn.init.constant_(parameter, torch.nan)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.alibi, alibi_slopes(12))
    x = torch.randn(2, 5, 24)
    close(other(x).out, module(x).out, 0.0)


def test_slopes_are_not_rounded_with_the_module():
    module = MultiheadAttention(24, 12, alibi=True, batch_first=True).bfloat16()  # 2 ** -0.5 is between two bfloat16
    assert torch.equal(module.alibi, alibi_slopes(12))
    with dispatch.capture() as workload:
        module(torch.zeros(1, 3, 24, dtype=torch.bfloat16))
    (entry,) = workload
    assert dict(entry.op.operands)["bias"].dtype == "float32"


def test_a_module_with_alibi_is_exported_and_compiled():
    torch.manual_seed(0)
    module = MultiheadAttention(16, 4, alibi=True, is_causal=True, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    want = module(x).out
    for strict in (False, True):
        exported = torch.export.export(module, (x,), strict=strict).module()
        close(exported(x)[0], want, 1e-6)
    torch._dynamo.reset()
    close(torch.compile(module, backend="eager", fullgraph=True)(x).out, want, 1e-6)


def test_rotary_true_is_a_rotary_of_the_usual_base_and_false_is_none():
    """True was a base of 1, which turns every pair of features alike."""
    assert MultiheadAttention(16, 2, rotary=True).rotary == Rotary(8, base=10_000.0)
    assert MultiheadAttention(16, 2, rotary=False).rotary is None
    assert MultiheadAttention(16, 2, rotary=500).rotary == Rotary(8, base=500)


def test_nested_tensors_go_through_the_projections():
    torch.manual_seed(0)
    module = MultiheadAttention(16, 2, is_causal=True, batch_first=True, dtype=F64)
    rows = [torch.randn(n, 16, dtype=F64) for n in (3, 1, 6)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for got, row in zip(module(nested).out.unbind(), rows, strict=True):
        close(got, module(row[None]).out[0])


# --- Rotary ----------------------------------------------------------------------------------------------------------


def test_rotary_equals_llamas_and_onnxs():
    from onnx.reference.ops.op_rotary_embedding import rotary_embedding
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x = torch.randn(2, 3, 7, 16)
    at = torch.stack([torch.arange(7), torch.arange(7) + 900])
    angles = Rotary(16).angles(at)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    close(Rotary(16)(x, at), apply_rotary_pos_emb(x, x, cos, sin)[0], 1e-6)
    inverse = 1.0 / (500.0 ** (torch.arange(0, 8, 2) / 8))
    table = torch.arange(1000)[:, None] * inverse
    for interleaved in (False, True):
        want = rotary_embedding(
            x.numpy(),
            table.cos().numpy(),
            table.sin().numpy(),
            at.numpy(),
            interleaved=interleaved,
            rotary_embedding_dim=8,
        )
        close(Rotary(8, base=500.0, interleaved=interleaved)(x, at), torch.from_numpy(want), 2e-5)


def test_rotary_keeps_a_late_position_apart_in_half_precision():
    x = torch.ones(1, 1, 1, 8, dtype=torch.bfloat16)
    one, next_one = (Rotary(8)(x, torch.tensor([at])) for at in (4096, 4097))
    assert not torch.equal(one, next_one)


def test_rotary_names_what_is_wrong():
    with pytest.raises(InputError, match="dim must be even"):
        Rotary(7)
    with pytest.raises(InputError, match="x has 4 features"):
        Rotary(8)(torch.ones(1, 1, 1, 4), torch.arange(1))


# --- KVCache ---------------------------------------------------------------------------------------------------------


def rows(start, stop):
    at = torch.arange(start, stop, dtype=torch.float32)
    return at.view(1, 1, -1, 1).expand(2, 1, -1, 4)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 64, 65])
def test_a_cache_holds_the_last_keys_and_their_positions(window):
    cache, at = KVCache(window=window), 0
    for n in (1, 1, 5, 70, 1, 1, 3, 200, 1):
        found = cache.append(rows(at, at + n), rows(at, at + n) * 2)
        start = 0 if window is None else max(0, at - window + 1)
        assert (found.start, found.q_offset, cache.length) == (start, at - start, at + n)
        assert found.key[0, 0, :, 0].tolist() == list(range(start, at + n))
        assert found.value[0, 0, :, 0].tolist() == [2.0 * i for i in range(start, at + n)]
        assert cache.positions.tolist() == list(range(start, at + n))
        at += n


def test_appending_moves_what_is_stored_only_when_the_storage_is_full():
    cache, moves = KVCache(), 0
    for at in range(1000):
        before = cache.capacity
        cache.append(rows(at, at + 1), rows(at, at + 1))
        moves += cache.capacity != before
    assert moves <= 5
    rolling = KVCache(window=8)
    for at in range(1000):
        rolling.append(rows(at, at + 1), rows(at, at + 1))
    assert rolling.capacity <= 64


def test_a_cache_is_cropped_and_reordered():
    cache = KVCache()
    cache.append(rows(0, 5), rows(0, 5))
    cache.crop(3)
    assert cache.append(rows(7, 8), rows(7, 8)).key[0, 0, :, 0].tolist() == [0, 1, 2, 7]
    two = torch.stack([torch.zeros(1, 2, 4), torch.ones(1, 2, 4)])
    beams = KVCache()
    beams.append(two, two)
    beams.reorder(torch.tensor([1, 1, 0]))
    more = torch.full((3, 1, 1, 4), 5.0)
    assert beams.append(more, more).key[:, 0, :, 0].tolist() == [[1, 1, 5], [1, 1, 5], [0, 0, 5]]


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda c: c.append(rows(0, 9), rows(0, 9)), "11 tokens > max_length 10"),
        (lambda c: c.append(rows(0, 1)[:1], rows(0, 1)[:1]), r"the cache \(\[2, 1\]"),
        (lambda c: c.append(rows(0, 1).double(), rows(0, 1).double()), "float64"),
        (lambda c: c.append(rows(0, 1), rows(0, 2)), r"must be \[B, Hkv, n, D\]"),
        (lambda c: c.append(rows(0, 1), rows(0, 1), torch.tensor([1, 2])), r"lengths must be in \[0, 1\]"),
        (lambda c: c.append(rows(0, 1), rows(0, 1), torch.tensor([1])), r"lengths must be integers \[B\]"),
        (lambda c: c.crop(3), r"can be cropped to 0 .. 2 tokens"),
        (lambda c: KVCache(window=0), "window must be >= 1"),
        (lambda c: KVCache(window=2).append(rows(0, 1), rows(0, 1), torch.tensor([1, 1])), "a rolling cache"),
    ],
)
def test_a_mistake_with_a_cache_is_named_and_leaves_it_as_it_was(act, words):
    cache = KVCache(max_length=10)
    cache.append(rows(0, 2), rows(0, 2))
    with pytest.raises(InputError, match=words):
        act(cache)
    assert cache.append(rows(2, 3), rows(2, 3)).key[0, 0, :, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("length", "fits"), [(9, True), (8, True), (7, False), (6, False)])
def test_a_rolling_cache_is_cropped_only_as_far_as_the_next_window_reaches(length, fits):
    """The next query sees the window before it: keys that are gone would be missing without a word."""
    cache, whole = KVCache(window=3), KVCache()
    for at in range(9):
        found = cache.append(rows(at, at + 1), rows(at, at + 1))
        whole.append(rows(at, at + 1), rows(at, at + 1))
    assert found.start == 6
    if fits:
        cache.crop(length)
        assert cache.append(rows(20, 21), rows(20, 21)).key[0, 0, -3:, 0].tolist() == [length - 2, length - 1, 20]
    else:
        with pytest.raises(InputError, match=rf"can be cropped to 8 .. 9 tokens, not to {length}"):
            cache.crop(length)
        assert cache.length == 9


def test_a_rolling_cache_is_refused_for_a_window_without_a_left_end():
    module = MultiheadAttention(32, 4, window=(-1, 0), batch_first=True)
    x = torch.randn(1, 1, 32)
    with pytest.raises(InputError, match="keeps 4 keys"):
        module(x, x, x, cache=KVCache(window=4))
