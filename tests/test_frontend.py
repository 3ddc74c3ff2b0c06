"""The caller's mistakes, each with its error; ranks and layouts; and equality with torch's SDPA on legal calls."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_dispatch import (
    InputError,
    InputTypeError,
    UnknownBackendError,
    dispatch,
    masks,
    patterns,
    variants,
)
from attn_dispatch.ir.recognise import recognise
from attn_dispatch.ir.scores import alibi_slopes
from attn_dispatch.routes import routes

B, HQ, HKV, SQ, SKV, D = 2, 4, 2, 5, 7, 8


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"query": (B, HQ, SQ, D), "key": (B, HKV, SKV, D), "value": (B, HKV, SKV, D)}
    return {name: torch.randn(*size, generator=generator).to(dtype) for name, size in sizes.items()}


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(*shape, **options)


BOOL = torch.bool
FAR = {"device": "meta"}

# id: (changes to a legal call, exception, words that the message must hold: argument, value, limit, remedy)
MISTAKES: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    # query, key, value
    "query is a list": ({"query": [1.0]}, InputTypeError, ("query must be a tensor", "got list")),
    "key is None": ({"key": None}, InputTypeError, ("key must be a tensor", "got NoneType")),
    "one dimension": ({"query": ones(D)}, InputError, ("query must have 2 to 5 dimensions", "got 1", "[B, H, S, D]")),
    "six dimensions": ({"query": ones(1, 1, 1, 1, SQ, D)}, InputError, ("query must have 2 to 5", "got 6")),
    "ranks differ": ({"key": ones(HKV, SKV, D)}, InputError, ("same number of dimensions", "4, 3, 4")),
    "head dims differ": ({"key": ones(B, HKV, SKV, 9)}, InputError, ("head_dim 8 != key head_dim 9", "must be equal")),
    "kv lengths differ": ({"value": ones(B, HKV, 6, D)}, InputError, ("key length 7 != value length 6", "equal")),
    "kv heads differ": (
        {"value": ones(B, 4, SKV, D)},
        InputError,
        ("key has 2 heads and value 4", "repeat_interleave"),
    ),
    "heads no multiple": ({"query": ones(B, 3, SQ, D)}, InputError, ("query heads 3", "not a multiple of kv heads 2")),
    "batches differ": ({"key": ones(3, HKV, SKV, D)}, InputError, ("batch sizes [2], [3], [2]", "do not broadcast")),
    "gqa not asked for": ({"enable_gqa": False}, InputError, ("4 heads and key 2", "enable_gqa is False", "=True")),
    "dtypes differ": (
        {"key": ones(B, HKV, SKV, D).half()},
        InputTypeError,
        ("one dtype", "query float32", "key float16", "x.to(query.dtype)"),
    ),
    "integers": (tensors(torch.int64), InputTypeError, ("dtype int64", "not a floating-point type", "x.float()")),
    "complex": (tensors(torch.complex64), InputTypeError, ("dtype complex64", "not a floating-point type")),
    "devices differ": (
        {"key": ones(B, HKV, SKV, D, **FAR)},
        InputError,
        ("key is on meta and query on cpu", "key.to('cpu')"),
    ),
    "mask elsewhere": (
        {"attn_mask": ones(SQ, SKV, dtype=BOOL, **FAR)},
        InputError,
        ("attn_mask is on meta", "attn_mask.to('cpu')"),
    ),
    "lengths elsewhere": ({"key_lengths": ones(B, dtype=torch.int64, **FAR)}, InputError, ("key_lengths is on meta",)),
    "sparse": ({"query": ones(B, HQ, SQ, D).to_sparse()}, InputTypeError, ("query has layout", "must be strided")),
    "nested": (
        {"query": torch.nested.nested_tensor([ones(3, D), ones(2, D)], layout=torch.jagged)},
        InputTypeError,
        ("query is a nested tensor", "and key is not", "all three nested, or none"),
    ),
    # layout
    "no such layout": ({"layout": "sbhd"}, InputError, ("layout must be one of bhsd, bshd", "'sbhd'")),
    "bshd of rank 3": (
        {n: ones(4, 5, D) for n in ("query", "key", "value")} | {"layout": "bshd"},
        InputError,
        ("layout='bshd' means 4-D inputs [B, S, H, D]", "got 3-D"),
    ),
    # attn_mask
    "mask is a list": ({"attn_mask": [[True]]}, InputTypeError, ("attn_mask must be a tensor or a Mask", "got list")),
    "mask of integers": (
        {"attn_mask": ones(SQ, SKV, dtype=torch.int64)},
        InputTypeError,
        ("attn_mask has dtype int64", "bool or float", "attn_mask.bool()"),
    ),
    "mask too long": (
        {"attn_mask": ones(SQ, 8, dtype=BOOL)},
        InputError,
        ("attn_mask [5, 8] does not broadcast to [2, 4, 5, 7]", "must be 1 or the one wanted"),
    ),
    "mask of rank 5": (
        {"attn_mask": ones(1, 1, 1, SQ, SKV, dtype=BOOL)},
        InputError,
        ("attn_mask", "does not broadcast"),
    ),
    "mask of rank 3": (
        {"attn_mask": ones(B, SQ, SKV, dtype=BOOL)},
        InputError,
        ("attn_mask [2, 5, 7] of rank 3 is ambiguous", "attn_mask[:, None]", "attn_mask[None]"),
    ),
    "mask for kv heads": ({"attn_mask": ones(B, HKV, SQ, SKV, dtype=BOOL)}, InputError, ("attn_mask [2, 2, 5, 7]",)),
    "mask object of a wrong size": (
        {"attn_mask": masks.columns(keep=ones(6, dtype=BOOL))},
        InputError,
        ("attn_mask Columns", "[6]", "must be [7] or [2, 7]"),
    ),
    "columns of a list": (
        {"attn_mask": masks.Columns([True] * 6)},
        InputError,
        ("attn_mask Columns", "[6]", "must be [7] or [2, 7]"),
    ),
    "rows of a list": ({"attn_mask": masks.Rows([True] * 6)}, InputError, ("Rows", "[6]", "must be [5] or [2, 5]")),
    "lengths of a list": ({"attn_mask": masks.KeyLengths([1, 2, 3])}, InputError, ("KeyLengths", "[3]", "[2]")),
    "segments of a list": (
        {"attn_mask": masks.Segments([0] * SQ, [0] * 6)},
        InputError,
        ("its segments add up to 6 keys, there are 7",),
    ),
    "indices of a list": (
        {"attn_mask": masks.Selected([[[0]] * 4])},
        InputError,
        ("Selected", "[1, 4, 1]", "with B 2, Sq 5"),
    ),
    "pairs of a list": (
        {"attn_mask": masks.Dense([[True] * 6] * SQ)},
        InputError,
        ("its tensor [5, 6] does not broadcast to [2, 4, 5, 7]",),
    ),
    "mask object's lengths": ({"attn_mask": masks.key_lengths([1, 2, 3])}, InputError, ("KeyLengths", "[3]", "[2]")),
    # window
    "window too negative": (
        {"window": (-2, 0)},
        InputError,
        ("window must be (left, right), each >= 0", "(-2, 0)", "W - 1"),
    ),
    "window of one": ({"window": 3}, InputError, ("window must be (left, right)", "got 3", "(W - 1, 0)")),
    "window of three": ({"window": (1, 2, 3)}, InputError, ("window must be (left, right)", "(1, 2, 3)")),
    "window of floats": ({"window": (1.5, 0)}, InputError, ("window must be (left, right)", "(1.5, 0)")),
    "window and is_causal": (
        {"window": (2, 0), "is_causal": True},
        InputError,
        ("is_causal=True counts from key 0 but window", "Sq 5 != Skv 7", "q_offset=2", "q_offset=0"),
    ),
    "mask object and is_causal": (
        {"attn_mask": masks.sliding_window(3), "is_causal": True},
        InputError,
        ("is_causal=True counts from key 0 but attn_mask", "q_offset=2"),
    ),
    # numbers
    "dropout above 1": ({"dropout_p": 1.5}, InputError, ("dropout_p must be in [0, 1]", "1.5")),
    "dropout below 0": ({"dropout_p": -0.1}, InputError, ("dropout_p must be in [0, 1]", "-0.1")),
    "dropout NaN": ({"dropout_p": math.nan}, InputError, ("dropout_p must be in [0, 1]", "nan")),
    "dropout a string": ({"dropout_p": "no"}, InputError, ("dropout_p must be in [0, 1]", "no")),
    "scale inf": ({"scale": math.inf}, InputError, ("scale must be a finite number", "inf", "D ** -0.5")),
    "scale NaN": ({"scale": math.nan}, InputError, ("scale must be a finite number", "nan")),
    "scale a string": ({"scale": "auto"}, InputTypeError, ("scale must be a finite number", "'auto'", "D ** -0.5")),
    "softcap below 0": ({"softcap": -1.0}, InputError, ("softcap must be a finite number >= 0", "-1.0", "0 or None")),
    "softcap inf": ({"softcap": math.inf}, InputError, ("softcap must be a finite number >= 0", "inf")),
    "softcap a string": ({"softcap": "50"}, InputTypeError, ("softcap must be a finite number >= 0", "'50'")),
    # bias, sinks
    "bias of booleans": ({"bias": ones(SQ, SKV, dtype=BOOL)}, InputTypeError, ("bias has dtype bool", "attn_mask=")),
    "bias too long": ({"bias": ones(SQ, 8)}, InputError, ("bias [5, 8] does not broadcast to [2, 4, 5, 7]",)),
    "bias of rank 3": (
        {"bias": ones(HQ, SQ, SKV)},
        InputError,
        ("bias [4, 5, 7] of rank 3 is ambiguous", "bias[None]"),
    ),
    "slopes of a wrong size": ({"bias": ones(3)}, InputError, ("ALiBi slopes [Hq] = [4]", "[3]")),
    "bias a number": ({"bias": 1.0}, InputTypeError, ("bias must be a tensor", "got float")),
    "sinks of a wrong size": ({"sinks": ones(2)}, InputError, ("sinks must have shape [Hq] = [4]", "[2]")),
    "sinks a list": ({"sinks": [1.0] * 4}, InputTypeError, ("sinks must be a tensor", "got list")),
    # lengths
    "key_lengths above": (
        {"key_lengths": torch.tensor([7, 8])},
        InputError,
        ("key_lengths must be in [0, 7]", "got 8"),
    ),
    "key_lengths below": (
        {"key_lengths": torch.tensor([-1, 7])},
        InputError,
        ("key_lengths must be in [0, 7]", "got -1"),
    ),
    "key_lengths of floats": (
        {"key_lengths": ones(B)},
        InputTypeError,
        ("key_lengths has dtype float32", "int32 or int64"),
    ),
    "key_lengths of a wrong size": (
        {"key_lengths": torch.tensor([1])},
        InputError,
        ("key_lengths must have shape [B] = [2]", "[1]"),
    ),
    "key_lengths a number": (
        {"key_lengths": 3},
        InputTypeError,
        ("key_lengths must be a tensor", "got int", "torch.tensor"),
    ),
    "query_lengths above": (
        {"query_lengths": torch.tensor([5, 6])},
        InputError,
        ("query_lengths must be in [0, 5]", "6"),
    ),
    "query_lengths of a wrong rank": (
        {"query_lengths": ones(B, 1, dtype=torch.int64)},
        InputError,
        ("query_lengths must have shape [B] = [2]", "[2, 1]"),
    ),
    # q_offset
    "q_offset of a wrong size": (
        {"is_causal": True, "q_offset": torch.tensor([1, 2, 3])},
        InputError,
        ("q_offset must be an int or a tensor [B] = [2]", "[3]"),
    ),
    "q_offset a float": (
        {"is_causal": True, "q_offset": 1.5},
        InputTypeError,
        ("q_offset must be an integer", "float"),
    ),
    "q_offset a float tensor": (
        {"is_causal": True, "q_offset": ones(B)},
        InputTypeError,
        ("q_offset has dtype float32", "int32 or int64"),
    ),
    # variants
    "no variant": ({"variant": "linear"}, InputTypeError, ("variant must be from attn_dispatch.variants", "'linear'")),
    "softcap of linear": (
        {"variant": variants.LinearAttention(), "softcap": 2.0},
        InputError,
        ("softcap means nothing for LinearAttention", "Softmax()"),
    ),
    "feature map": ({"variant": variants.LinearAttention(feature_map="relu2")}, InputError, ("feature_map", "'relu2'")),
    "decay": ({"variant": variants.Retention(ones(2))}, InputError, ("decay must be [Hq] = [4] in (0, 1]", "1.0")),
    "decay above 1": ({"variant": variants.Retention(ones(4) * 2)}, InputError, ("decay must be", "(0, 1]", "2.0")),
    # backend
    "no such backend": (
        {"backend": "sdpa_flas"},
        UnknownBackendError,
        ("no backend 'sdpa_flas'", "did you mean 'sdpa_flash'", "eager"),
    ),
    "no such rewrite": (
        {"backend": "fold_grops > eager"},
        UnknownBackendError,
        ("no rewrite 'fold_grops'", "fold_groups"),
    ),
    "no name": ({"backend": []}, InputError, ("backend must be a name or a non-empty list", "[]")),
    "an empty name": ({"backend": ""}, InputError, ("backend must be a name", "''")),
    "a number": ({"backend": [1]}, InputError, ("backend must be a name", "[1]")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_value_its_limit_and_a_remedy_and_the_next_call_works(mistake):
    changes, kind, words = MISTAKES[mistake]
    arguments = {**tensors(), "enable_gqa": None, **changes}
    before = {n: x.clone() for n, x in arguments.items() if isinstance(x, torch.Tensor) and x.layout == torch.strided}
    for _ in range(2):  # the second time must not be taken for a call that was seen before
        with pytest.raises(kind) as caught:
            dispatch.attention(**arguments)
        missing = [word for word in words if word not in str(caught.value)]
        assert not missing, f"{missing} not in:\n{caught.value}"
    for name, x in before.items():
        if x.device.type == "cpu":
            torch.testing.assert_close(arguments[name], x, rtol=0, atol=0)
    legal = tensors()
    want = F.scaled_dot_product_attention(*legal.values(), enable_gqa=True)
    torch.testing.assert_close(dispatch.attention(**legal, enable_gqa=True), want)


@pytest.mark.parametrize("call", [dispatch.plan, dispatch.explain], ids=lambda f: f.__name__)
def test_plan_and_explain_raise_the_same_mistakes(call):
    for changes, kind, words in MISTAKES.values():
        arguments = {**tensors(), "enable_gqa": None, **changes}
        with pytest.raises(kind) as caught:
            call(**arguments)
        assert words[0] in str(caught.value)


def test_every_error_of_a_call_is_a_value_error_and_one_of_ours():
    from attn_dispatch import AttnDispatchError

    for changes, kind, _ in MISTAKES.values():
        with pytest.raises(kind) as caught:
            dispatch.attention(**{**tensors(), "enable_gqa": None, **changes})
        assert isinstance(caught.value, AttnDispatchError)
        assert isinstance(caught.value, ValueError)


def test_an_error_says_what_was_asked():
    with pytest.raises(
        InputError, match=r"asked  q \[2, 4, 5, 8\] f32   k \[2, 2, 7, 8\] f32   v \[2, 2, 7, 8\] f32   cpu"
    ):
        dispatch.attention(**tensors())


def test_heads_are_inferred_unless_forbidden():
    legal = tensors()
    out = dispatch.attention(**legal, enable_gqa=None)
    torch.testing.assert_close(out, dispatch.attention(**legal, enable_gqa=True))


# --- ranks and layouts -----------------------------------------------------------------------------------------------

SHAPES = {
    2: ((5, 8), (7, 8), (7, 6)),
    3: ((4, 5, 8), (4, 7, 8), (4, 7, 6)),
    4: ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6)),
    5: ((3, 2, 4, 5, 8), (3, 2, 4, 7, 8), (3, 2, 4, 7, 6)),
}


@pytest.mark.parametrize("rank", SHAPES)
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float", "column"])
def test_two_to_five_dimensions_are_torchs(rank, kind):
    torch.manual_seed(rank)
    q, k, v = (torch.randn(*shape) for shape in SHAPES[rank])
    mask = {
        "bool": torch.rand(5, 7) > 0.3,
        "float": torch.randn(*SHAPES[rank][0][:-2], 5, 7),
        "column": torch.tensor([True] * 4 + [False] * 3),
    }.get(kind)
    if mask is not None and mask.dtype == torch.bool and mask.ndim == 2:
        mask[:, 0] = True
    options = {"attn_mask": mask, "is_causal": kind == "causal"}
    two = mask[None] if kind == "column" else mask  # torch's CPU kernel takes no mask of rank 1
    want = F.scaled_dot_product_attention(q, k, v, **{**options, "attn_mask": two})
    for _ in range(2):
        torch.testing.assert_close(dispatch.attention(q, k, v, **options), want)


@pytest.mark.parametrize("rank", SHAPES)
def test_lse_and_weights_have_the_rank_of_the_call(rank):
    torch.manual_seed(0)
    q, k, v = (torch.randn(*shape) for shape in SHAPES[rank])
    out, lse, weights = dispatch.attention(q, k, v, return_lse=True, return_weights=True)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(weights, scores.softmax(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": (2, 0)}, {"return_lse": True}], ids=str)
def test_bshd_is_the_same_attention_transposed(options):
    q, k, v = tensors().values()
    want = dispatch.attention(q, k, v, enable_gqa=True, **options)
    got = dispatch.attention(*(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, layout="bshd", **options)
    if options.get("return_lse"):
        torch.testing.assert_close(got.lse, want.lse)
        got, want = got.out, want.out
    torch.testing.assert_close(got.transpose(1, 2), want)


@pytest.mark.parametrize("shapes", [((1, 2, 3, 8), (2, 2, 3, 8)), ((2, 2, 3, 8), (1, 2, 3, 8))], ids=str)
def test_batches_broadcast_as_in_torch(shapes):
    q, k = (torch.randn(*shape) for shape in shapes)
    torch.testing.assert_close(dispatch.attention(q, k, k), F.scaled_dot_product_attention(q, k, k))


# --- a mask tensor that is recognised as a pattern is the same call ---------------------------------------------------


@pytest.mark.parametrize("make", [torch.ones, lambda *size: torch.ones(*size).tril()], ids=["full", "causal"])
@pytest.mark.parametrize("lead", [(), (1,), (2,), (1, 1), (5, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("sizes", [(512, 512), (300, 512), (512, 300)], ids=str)
def test_a_pattern_of_another_size_is_refused_as_any_mask_is(make, lead, sizes):
    x = torch.randn(2, 2, 300, 8)
    mask = make(*sizes).bool().expand(*lead, *sizes)
    with pytest.raises(InputError, match=r"does not broadcast|ambiguous"):
        dispatch.attention(x, x, x, mask)


@pytest.mark.parametrize("pattern", ["full", "causal from key 0", "causal from the end"])
def test_a_pattern_leaves_the_distances_of_alibi_as_they_are(pattern):
    q, k, slopes = torch.randn(1, 8, 256, 16), torch.randn(1, 8, 512, 16), alibi_slopes(8)
    mask = torch.ones(256, 512, dtype=torch.bool)
    mask = mask if pattern == "full" else mask.tril(0 if pattern == "causal from key 0" else 256)
    bias = -slopes[:, None, None] * (torch.arange(256)[:, None] + 256 - torch.arange(512)).abs()
    want = F.scaled_dot_product_attention(q, k, k, attn_mask=torch.where(mask, bias, -math.inf)[None])
    torch.testing.assert_close(dispatch.attention(q, k, k, mask, bias=slopes), want, atol=1e-5, rtol=1e-4)


def test_a_row_of_columns_is_not_taken_for_lengths_where_a_state_would_be_cut_too():
    x, decay = torch.randn(2, 2, 64, 8), variants.retention_decay(2)
    kept = torch.arange(64) < torch.tensor([[64], [40]])
    options = {"variant": variants.Retention(decay), "return_state": True}
    got = dispatch.attention(x, x, x, kept[:, None, None], **options)
    want = dispatch.attention(x, x, x, masks.columns(keep=kept), **options, backend="eager")
    torch.testing.assert_close(got.out, want.out, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.state.S, want.state.S, atol=1e-4, rtol=1e-4)
    assert torch.equal(got.state.length, want.state.length)


def test_a_causal_pattern_serves_linear_attention_with_a_state():
    q, k = torch.randn(1, 16, 256, 8), torch.randn(1, 16, 512, 8)
    options = {"variant": variants.LinearAttention("elu1"), "return_state": True}
    got = dispatch.attention(q, k, k, torch.ones(256, 512).tril().bool(), **options)
    want = dispatch.attention(q, k, k, masks.causal(), q_offset=0, **options, backend="eager")
    torch.testing.assert_close(got.out, want.out, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.state.S, want.state.S, atol=1e-3, rtol=1e-4)


def test_explain_recognises_a_pattern_under_autocast_too():
    x, mask = torch.randn(1, 8, 512, 16), torch.ones(512, 512).tril().bool()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert str(dispatch.explain(x, x, x, mask).op.mask) == "Causal"


@pytest.mark.parametrize("backend", ["eager", "sdpa_flash", "trim_lengths > sdpa_flash", "blocked", "onnxruntime"])
def test_a_mask_that_switches_whole_sequences_off(backend):
    x, on = torch.randn(4, 2, 20, 8), torch.tensor([True, True, False, True])
    got = dispatch.attention(x, x, x, on.view(4, 1, 1, 1), backend=backend)
    want = dispatch.attention(x, x, x)
    want[2] = 0
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["bool", "column", "float"])
@pytest.mark.parametrize("backend", ["eager", "sdpa_flash", None])
def test_a_four_dimensional_mask_of_a_five_dimensional_call_broadcasts_as_in_torch(kind, backend):
    q, k = torch.randn(3, 2, 4, 5, 8), torch.randn(3, 2, 4, 7, 8)
    mask = torch.rand(2, 1, 1, 7) > 0.5 if kind == "column" else torch.rand(2, 4, 5, 7) > 0.5
    mask[..., 0] = True
    mask = torch.randn(2, 4, 5, 7) if kind == "float" else mask
    want = F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    torch.testing.assert_close(dispatch.attention(q, k, k, mask, backend=backend), want, atol=1e-5, rtol=1e-4)


def test_each_mask_of_one_size_is_read_whatever_the_one_before_it_held():
    """A route by sizes alone would run the second as the first: a pattern as scattered pairs, or pairs as a pattern."""
    x = torch.randn(1, 8, 256, 16)
    causal, scattered = torch.ones(256, 256).tril().bool(), torch.rand(256, 256) > 0.3
    routes.clear()
    for mask in (scattered, causal, scattered, ~causal.T, causal):
        want = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        torch.testing.assert_close(dispatch.attention(x, x, x, mask), want, atol=1e-5, rtol=1e-4)
    kept = [key for key in routes.table if ("attn_mask",) in key]
    assert [key[0] for key in kept] == ["pairs"]


@pytest.mark.parametrize("size", [64, 6000], ids=["compared", "summed"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backend", ["sdpa_flash", "sdpa_math", "blocked", "onnxruntime"])
def test_nothing_in_keys_that_a_mask_tensor_excludes_shows_in_small_and_large_results(size, bad, backend):
    heads = size // 32
    q, k, v = (torch.randn(2, heads, n, 16) for n in (1, 40, 40))
    kept = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    kept[..., 30:] = False
    want = F.scaled_dot_product_attention(q, k[:, :, :30], v[:, :, :30])
    for poisoned in (k, v):
        good = poisoned[:, :, 33].clone()
        poisoned[:, :, 33] = bad
        got = dispatch.attention(q, k, v, kept, backend=backend)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
        poisoned[:, :, 33] = good


def test_an_infinity_that_is_attended_is_the_same_in_small_and_large_results():
    """The large one was run again by the specification, where these infinities meet in another order and give NaN."""
    k, v = torch.zeros(1, 1, 20, 8), torch.zeros(1, 1, 20, 8)
    k[0, 0, 0], v[0, 0, 0] = -math.inf, math.inf
    options = {"key_lengths": torch.tensor([10]), "softcap": 3.0, "backend": "blocked"}
    rows = [dispatch.attention(torch.ones(1, 1, n, 8), k, v, **options) for n in (1, 600)]
    assert torch.equal(rows[0][:, :, :1], rows[1][:, :, :1])


@pytest.mark.parametrize("dim", [8, 32, 48, 64, 80, 96, 128, 256])
def test_the_flash_kernel_is_told_a_scale_that_is_not_its_own_and_no_other(dim, monkeypatch):
    told: list[tuple[Any, ...]] = []
    kernel = torch._scaled_dot_product_flash_attention_for_cpu

    def listening(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **named: Any) -> Any:
        told.append((*rest, *named.values()))
        return kernel(q, k, v, *rest, **named)

    monkeypatch.setattr(torch, "_scaled_dot_product_flash_attention_for_cpu", listening)
    q, k = torch.randn(1, 2, 3, dim), torch.randn(1, 2, 40, dim)
    for scale in (None, dim**-0.5, 0.3, -(dim**-0.5)):
        made = dispatch.plan(q, k, k, scale=scale, backend="sdpa_flash")
        torch.testing.assert_close(made(q, k, k), F.scaled_dot_product_attention(q, k, k, scale=scale))
    assert told == [(), (), (0.0, False, 0.3), (0.0, False, -(dim**-0.5))]


@pytest.mark.parametrize("place", ["query", "key", "attn_mask", "sinks"])
@pytest.mark.usefixtures("each_lookup")
def test_a_strided_nested_tensor_after_a_warm_call_is_refused(place):
    """torch's C++ guard of a warm call ends the process when it asks a strided nested tensor for its sizes."""
    x, mask, sinks = torch.randn(1, 8, 20, 16), torch.ones(1, 1, 1, 20, dtype=torch.bool), torch.randn(8)
    given = {"query": x, "key": x.clone(), "value": x.clone()}
    given |= {"attn_mask": mask} if place == "attn_mask" else {"sinks": sinks} if place == "sinks" else {}
    for _ in range(2):
        dispatch.attention(**given)
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 16), torch.randn(2, 4, 16)])
    with pytest.raises(InputTypeError, match="nested"):
        dispatch.attention(**given | {place: nested})


def test_a_sparse_mask_is_refused_by_name():
    x = torch.randn(1, 8, 256, 16)
    with pytest.raises(InputTypeError, match=r"attn_mask has layout torch.sparse_coo"):
        dispatch.attention(x, x, x, torch.ones(256, 256, dtype=torch.bool).to_sparse())


def test_enable_gqa_of_0_is_false():
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    for _ in range(2):
        with pytest.raises(InputError, match="enable_gqa is False"):
            dispatch.attention(q, k, k, enable_gqa=0)


@pytest.mark.parametrize("backend", ["sdpa_math", "sdpa_flash"])
def test_a_plan_with_lengths_serves_fake_tensors(backend):
    x, lengths = torch.randn(2, 4, 64, 16), torch.tensor([5, 60])
    made = dispatch.plan(x, x, x, query_lengths=lengths, backend=backend)
    with FakeTensorMode() as mode:
        one, of = mode.from_tensor(x), mode.from_tensor(lengths)
        assert made(one, one, one, query_lengths=of).shape == x.shape


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_number_that_is_a_tensor_is_refused(name):
    x = torch.randn(1, 2, 5, 8)
    with pytest.raises(InputTypeError, match=rf"{name} must be .*got a tensor(.|\n)*{name}.item\(\)"):
        dispatch.attention(x, x, x, **{name: torch.tensor(0.5)})


def test_a_pattern_beside_a_value_of_another_rank_is_named():
    x, mask = torch.randn(2, 2, 256, 8), torch.ones(256, 256, dtype=torch.bool)
    with pytest.raises(InputError, match="same number of dimensions"):
        dispatch.attention(x, x, x[0], mask)


def test_a_constant_pattern_is_not_read_while_a_model_is_exported():
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.ones(512, 512).tril().bool()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return dispatch.attention(x, x, x, self.mask)

    model, x = Model(), torch.randn(1, 8, 512, 16)
    exported = torch.export.export(model, (x,), strict=False).module()
    torch.testing.assert_close(exported(x), model(x))


def test_a_pattern_under_autocast_is_recognised_once(monkeypatch):
    x, mask = torch.randn(1, 8, 512, 16), torch.ones(512, 512).tril().bool()
    seen = []
    monkeypatch.setattr(patterns, "recognise", lambda given: seen.append(given) or recognise(given))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = dispatch.attention(x, x, x, mask)
        want = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    assert len(seen) == 1
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "mask",
    [
        masks.Columns([True, False] * 3 + [True]),
        masks.Columns([[True] * SKV, [False] * 3 + [True] * 4]),
        masks.Rows([True] * SQ),
        masks.KeyLengths([3, 7]),
        masks.Segments([0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1]),
        masks.Selected([[[0, -1], [1, 0], [2, 1], [3, 0], [6, 5]]]),
        masks.Dense([[True] * 3 + [False] * 4] * SQ),
    ],
    ids=str,
)
def test_an_atom_made_from_lists_of_the_right_size_is_served(mask):
    q, k, v = tensors().values()
    got = dispatch.attention(q, k, v, mask, enable_gqa=True)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense(SQ, SKV), enable_gqa=True)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("backend", ["eager", None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_lowest_float64_of_a_bias_masks_nothing(dtype, backend):
    """Beside half precision it became -inf: a row of it was an empty row."""
    x = torch.randn(1, 2, 4, 8).to(dtype)
    bias = torch.zeros(4, 4, dtype=torch.float64)
    bias[1] = torch.finfo(torch.float64).min
    bias[2] = -math.inf
    got = dispatch.attention(x, x, x, bias=bias, backend=backend)
    torch.testing.assert_close(got[:, :, 1], x.float().mean(2).to(dtype), atol=1e-2, rtol=1e-2)
    assert not got[:, :, 2].any()
    torch.testing.assert_close(dispatch.attention(x, x, x, bias, backend=backend), got)


# --- torch's SDPA is the oracle --------------------------------------------------------------------------------------


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """A legal call of torch's SDPA."""
    size = lambda lo, hi: draw(st.integers(lo, hi))
    b, hkv, groups, sq, skv, d, dv = (
        size(1, 3),
        size(1, 3),
        size(1, 3),
        size(1, 9),
        size(1, 9),
        size(1, 12),
        size(1, 12),
    )
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(size(0, 10_000))
    shapes = (b, hkv * groups, sq, d), (b, hkv, skv, d), (b, hkv, skv, dv)
    inputs = tuple(torch.randn(*shape, generator=generator, dtype=dtype) for shape in shapes)
    options: dict[str, Any] = {"enable_gqa": groups > 1, "scale": draw(st.sampled_from([None, 0.3, 2.0]))}
    kind = draw(st.sampled_from(["none", "causal", "bool", "float"]))
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        shape = draw(st.sampled_from([(sq, skv), (1, skv), (b, 1, 1, skv), (1, hkv * groups, sq, skv), (b, 1, sq, 1)]))
        noise = torch.randn(*shape, generator=generator, dtype=dtype)
        options["attn_mask"] = noise > -1 if kind == "bool" else noise
    return inputs, options


@given(calls())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_every_legal_call_of_torchs_sdpa_is_torchs_sdpa(call):
    inputs, options = call
    want = F.scaled_dot_product_attention(*inputs, **options).nan_to_num(nan=0.0)  # empty rows are 0 here
    copies = [x.clone() for x in inputs]
    torch.testing.assert_close(dispatch.attention(*inputs, **options), want, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))


@pytest.mark.parametrize("backend", [None, "eager"])
def test_without_keys_everything_that_wants_a_gradient_gets_one_of_zero(backend):
    q = torch.randn(1, 2, 3, 8, requires_grad=True)
    k, v = (torch.randn(1, 2, 0, 8, requires_grad=True) for _ in range(2))
    sinks = torch.randn(2, requires_grad=True)
    grads = torch.autograd.grad(dispatch.attention(q, k, v, sinks=sinks, backend=backend).sum(), (q, k, v, sinks))
    assert [g.shape for g in grads] == [q.shape, k.shape, v.shape, sinks.shape]
    assert not any(g.any() for g in grads)
    dispatch.attention(q.detach(), k, v, backend=backend).sum().backward()
    assert k.grad is not None


@pytest.mark.parametrize("grad", [False, True])
def test_a_padded_batch_of_no_sequences_is_empty(grad):
    q = torch.randn(0, 2, 4, 8, requires_grad=grad)
    for options in ({"key_lengths": torch.zeros(0, dtype=torch.int64)},
                    {"attn_mask": torch.ones(0, 1, 1, 4, dtype=torch.bool)}):  # fmt: skip
        out = dispatch.attention(q, q, q, **options)
        assert out.shape == q.shape
        if grad:
            assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


def test_nan_in_keys_that_any_mask_excludes_does_not_leak():
    """The float twin of a mask, and one written out for each query, leaked where the bool one over keys did not."""
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    k[..., 3, :] = v[..., 3, :] = math.nan
    keep = torch.tensor([[True, True, True, False]])
    want = dispatch.attention(q, k[..., :3, :], v[..., :3, :])
    for mask in (keep, keep.expand(4, 4), torch.zeros(1, 4).masked_fill(~keep, -math.inf)):
        torch.testing.assert_close(dispatch.attention(q, k, v, attn_mask=mask), want)
        torch.testing.assert_close(dispatch.attention(q, k, v, attn_mask=mask.clone(), softcap=50.0),
                                   dispatch.attention(q, k[..., :3, :], v[..., :3, :], softcap=50.0))  # fmt: skip


def test_autocast_leaves_devices_without_it_alone():
    x = torch.empty(1, 2, 4, 8, device="meta")
    with torch.autocast("cpu", torch.bfloat16):
        assert dispatch.attention(x, x, x).dtype == torch.float32
