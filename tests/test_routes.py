"""The warm path: guards, `find` and routes, in Python and in C++, and how a growing key length keeps few of them."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_dispatch import (
    InputError,
    dispatch,
    masks,
    native,
    reference,
    variants,
)
from attn_dispatch.ir.ops import bucket
from attn_dispatch.plan import make_plan
from attn_dispatch.routes import PythonGuard, Route, _guard_by_torch, find_in_python, make_guard, routes

sdpa = F.scaled_dot_product_attention
compiled = native.lookup().module
needs_compiled = pytest.mark.skipif(compiled is None, reason=native.lookup().why)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# --- guards ----------------------------------------------------------------------------------------------------------


def _situations() -> dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """Changes to three tensors like those a guard was made for; each is asked of both guards."""
    same = lambda: tuple(torch.randn(2, 4, n, 8) for n in (3, 5, 5))
    change = lambda f: lambda: (lambda q, k, v: (f(q), k, v))(*same())
    keys = lambda f: lambda: (lambda q, k, v: (q, f(k), f(v)))(*same())
    return {
        "the same": same,
        "other values": change(lambda q: q * 2),
        "another query length": change(lambda q: q[:, :, :2].contiguous()),
        "another batch": change(lambda q: q[:1].contiguous()),
        "another head count": change(lambda q: q[:, :2].contiguous()),
        "another head dim": change(lambda q: q[..., :4].contiguous()),
        "another key length": keys(lambda k: k[:, :, :4].contiguous()),
        "a key length that differs from the value's": lambda: (lambda q, k, v: (q, k[:, :, :4].contiguous(), v))(
            *same()
        ),
        "another dtype": change(lambda q: q.double()),
        "half precision": change(lambda q: q.bfloat16()),
        "another device": change(lambda q: q.to("meta")),
        "needs a gradient": change(lambda q: q.requires_grad_()),
        "a key needs a gradient": keys(lambda k: k.requires_grad_()),
        "other outer strides": change(lambda q: torch.randn(2, 3, 4, 8).transpose(1, 2)),
        "a scattered last dimension": change(lambda q: torch.randn(2, 4, 8, 3).transpose(2, 3)),
        "expanded": change(lambda q: torch.randn(1, 4, 3, 8).expand(2, 4, 3, 8)),
        "three dimensions": change(lambda q: q[0]),
        "a parameter": change(lambda q: torch.nn.Parameter(q, requires_grad=False)),
        "a slice of a longer cache": keys(lambda k: torch.randn(2, 4, 50, 8)[:, :, :5]),
    }


MODES: dict[str, Callable[[], Any]] = {
    "plain": lambda: torch.enable_grad(),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.mark.parametrize("opened", [False, True], ids=["closed", "open length"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("situation", _situations())
def test_the_guards_in_python_in_cpp_and_torchs_own_agree(situation, mode, opened):
    made_for = _situations()["the same"]()
    fast, plain = _guard_by_torch(made_for, opened), PythonGuard(made_for, opened).check
    in_cpp = None if compiled is None else compiled.Guard(made_for, opened)
    tensors = _situations()[situation]()
    with MODES[mode]():
        verdict = fast(*tensors), plain(*tensors)
        if in_cpp is not None:
            assert in_cpp(*tensors) == verdict[1]
    if situation == "a parameter":  # torch compares the exact type, so does ours
        assert verdict in ((False, False), (True, True))
    if mode == "no_grad" and "needs a gradient" in situation:
        assert verdict == (False, True)  # nothing is recorded, so the plan is right: torch only makes a second route
        return
    assert verdict[0] == verdict[1], f"TensorGuards {verdict[0]}, PythonGuard {verdict[1]}"
    if situation in ("the same", "other values") and mode == "plain":
        assert verdict == (True, True)
    if situation == "another key length":
        assert verdict == ((opened and mode not in ("inference_mode", "autocast")),) * 2


@pytest.mark.parametrize("opened", [False, True])
def test_one_tensor_in_two_places_is_not_two_equal_tensors(opened):
    q, k, v = _situations()["the same"]()
    shared = _guard_by_torch((q, k, k), opened)  # torch's takes each tensor once
    assert shared(q, v, v)
    assert not shared(q, k, v)


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of few kinds, so that two draws are often alike: its values do not matter."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 3]), min_size=3, max_size=4))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.bool]))
    x = torch.zeros(sizes, dtype=dtype)
    if draw(st.booleans()):
        x = x.transpose(-1, draw(st.sampled_from([0, 1, -2])))
    if draw(st.integers(0, 4)) == 0:
        x = torch.nn.Parameter(x, requires_grad=False)
    return x.requires_grad_() if x.is_floating_point() and draw(st.booleans()) else x


@needs_compiled
@given(st.data(), st.sampled_from(list(MODES)), st.sampled_from(list(MODES)))
def test_the_guard_in_cpp_says_what_the_one_in_python_says(data, before, after):
    made_for = [data.draw(_tensors()) for _ in range(3)]
    given_ = [data.draw(st.one_of(st.just(x), _tensors())) for x in made_for]
    opened = all(x.ndim == 4 for x in made_for[1:]) and data.draw(st.booleans())
    with MODES[before]():
        in_cpp, in_python = compiled.Guard(tuple(made_for), opened), PythonGuard(made_for, opened).check
        assert in_cpp(*made_for)
    with MODES[after]():
        assert in_cpp(*given_) == in_python(*given_)


@needs_compiled
def test_the_guard_in_cpp_takes_what_it_can_compare_and_says_what_it_cannot():
    x = torch.zeros(2, 3, 4, 8)
    guard = compiled.Guard((x, x, x))
    assert guard(x, x, x)
    assert not any(guard(*given_) for given_ in ((), (x,), (x, x, x, x), (x, None, x), (x, x, "x")))
    nested = torch.nested.nested_tensor([torch.zeros(3, 4, 8)] * 2)
    sparse = x.to_sparse()
    for other in (nested, sparse, x.to_mkldnn(), torch._neg_view(x)):
        assert not guard(x, other, x)
    for strange in (nested, sparse):
        with pytest.raises(ValueError, match="strided tensors"):
            compiled.Guard((x, strange, x))
    with pytest.raises(ValueError, match="of 4-D keys"):
        compiled.Guard((x, x[0], x), True)
    for stranger in ([1.0], weakref.proxy(x)):  # isinstance believes that a proxy is a tensor
        with pytest.raises(TypeError, match="Guard takes tensors, got a"):
            compiled.Guard((stranger,))
    with pytest.raises(TypeError, match="by position"):
        guard(x, x, value=x)


@needs_compiled
def test_the_guard_in_cpp_knows_batched_tensors_modes_and_symbolic_sizes():
    x = torch.zeros(2, 3, 4, 8)
    guard, verdicts = compiled.Guard((x,)), []

    def ask(one: torch.Tensor) -> torch.Tensor:
        verdicts.append(guard(one))
        return one

    torch.func.vmap(ask)(x[None])
    torch.func.grad(lambda one: ask(one).sum())(x)
    with FakeTensorMode() as mode:
        verdicts += [guard(mode.from_tensor(x)), guard(x)]
    assert verdicts == [False] * 4
    assert guard(x)


# --- find ------------------------------------------------------------------------------------------------------------


FINDERS = [
    pytest.param(find_in_python, _guard_by_torch, id="python"),
    pytest.param(find_in_python, lambda *args: PythonGuard(*args).check, id="python alone"),
    pytest.param(
        getattr(compiled, "find", None), getattr(compiled, "Guard", None), id="compiled", marks=needs_compiled
    ),
]


def _tensors_of(*lengths: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(1, 2, n, 8) for n in lengths)


@pytest.mark.parametrize(("find", "guard"), FINDERS)
def test_find_gives_the_run_of_the_first_route_whose_guard_holds(find, guard):
    tensors, other = _tensors_of(3, 5, 5), _tensors_of(4, 5, 5)
    last = Route(lambda *_: True, "last")
    table = {"both": (Route(guard(other, False), "other"), Route(guard(tensors, False), "first"), last)}
    assert find(table, "both", tensors) == "first"
    assert find(table, "both", other) == "other"
    assert find(table, "both", _tensors_of(5, 5, 5)) == "last"
    assert find(table, "neither", tensors) is None
    assert find({"both": ()}, "both", tensors) is None


@pytest.mark.parametrize(("find", "guard"), FINDERS)
def test_find_takes_the_run_of_the_bucket_where_the_length_is_open(find, guard):
    runs = {4: "9 to 16", 5: "17 to 32"}
    table = {(): (Route(guard(_tensors_of(1, 9, 9), True), "unused", 0, runs),)}
    wanted = {(1, 1): None, (2, 2): None, (8, 8): None, (9, 9): "9 to 16", (16, 16): "9 to 16", (17, 17): "17 to 32"}
    wanted |= {(32, 32): "17 to 32", (33, 33): None, (9, 10): None, (0, 0): None}
    assert {pair: find(table, (), _tensors_of(1, *pair)) for pair in wanted} == wanted
    assert find(table, (), tuple(x[0, 0] for x in _tensors_of(1, 9, 9))) is None


@pytest.mark.parametrize(("find", "guard"), FINDERS)
def test_find_leaves_to_the_slow_path_what_it_cannot_look_up(find, guard):
    x, y, z = (torch.zeros(2, 3, 4, 8) for _ in range(3))
    nested = torch.nested.nested_tensor([torch.zeros(3, 4, 8)] * 2)
    table = {"key": (Route(guard((x, y, z), False), "run"),)}
    assert find(table, "key", (x, y, z)) == "run"
    assert find(table, ["unhashable"], (x, y, z)) is None
    for given_ in ((x, None, z), ("q", y, z), (nested, y, z), (x, nested, z), (x, y, nested)):
        assert find(table, "key", given_) is None


@pytest.mark.parametrize(("find", "guard"), FINDERS)
def test_find_raises_what_a_key_raises_that_is_no_mistake_of_type(find, guard):
    class Broken:
        def __hash__(self) -> int:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        find({}, (Broken(),), _tensors_of(1, 9, 9))


@needs_compiled
def test_find_in_cpp_takes_a_guard_in_python_and_raises_what_it_raises():
    x = torch.zeros(2, 3, 4, 8)
    tensors = (x, x, x)
    table = {"held": (Route(PythonGuard(tensors, False).check, "run"),), "broken": (Route(lambda *_: 1 // 0, "run"),)}
    assert compiled.find(table, "held", tensors) == "run"
    assert compiled.find(table, "held", (x[:1], x, x)) is None
    with pytest.raises(ZeroDivisionError):
        compiled.find(table, "broken", tensors)
    with pytest.raises(TypeError, match="a dict, a key and a tuple"):
        compiled.find(table, "held")


@needs_compiled
def test_the_lookup_in_cpp_keeps_and_drops_its_references():
    class Run:
        pass

    x, run, options = torch.zeros(2, 3, 4, 8), Run(), ("options", 1.5)
    tensors = (x, x, x)
    index = {2: run}
    table = {options: (Route(make_guard(tensors), run), Route(make_guard(tensors, True), run, 0, index))}
    only = {options: table[options][1:]}
    watched = (x, run, options, tensors, index, table, table[options], torch.Tensor, compiled.Guard)
    before = [sys.getrefcount(one) for one in watched]
    for _ in range(1000):
        assert compiled.find(table, options, tensors) is run
        assert compiled.find(only, options, tensors) is run
        assert compiled.find(table, options, (x, None, x)) is None
        assert compiled.find(table, [], tensors) is None
        assert compiled.Guard(tensors)(*tensors)
        with pytest.raises(ValueError, match="strided"):
            compiled.Guard((x, x.to_sparse(), x))
    assert [sys.getrefcount(one) for one in watched] == before


@pytest.mark.usefixtures("each_lookup")
def test_a_call_with_operands_that_are_prepared_is_the_same_warm_and_cold():
    q, k, v = (torch.randn(2, 4, n, 8) for n in (1, 40, 40))
    keep = torch.arange(40) < torch.tensor([[40], [23]])
    mask = keep[:, None, None]
    for _ in range(3):
        torch.testing.assert_close(dispatch.attention(q, k, v, mask), sdpa(q, k, v, mask))
        mask.logical_not_()
        torch.testing.assert_close(dispatch.attention(q, k, v, mask[1:]), sdpa(q, k, v, mask[1:]))
        mask.logical_not_()


# --- growing key lengths ----------------------------------------------------------------------------------------------


def opened_routes() -> list[Any]:
    return [route for kept in routes.table.values() for route in kept if route.runs is not None]


@pytest.mark.usefixtures("each_lookup")
def test_decode_growth_uses_one_open_length_route():
    from attn_dispatch import plan as plan_module

    routes.clear()
    plan_module.decisions.clear()
    q = torch.randn(1, 4, 1, 16)
    cache = torch.randn(2, 1, 2, 512, 16)
    made = []
    with dispatch.use("sdpa_flash"):  # one candidate, so that the estimate cannot change its mind on the way
        for n in range(300, 400):
            k, v = cache[0][:, :, :n], cache[1][:, :, :n]
            before = plan_module.decisions.misses
            out = dispatch.attention(q, k, v, enable_gqa=True)
            made.append(plan_module.decisions.misses - before)
            torch.testing.assert_close(out, sdpa(q, k, v, enable_gqa=True))
        assert len(opened_routes()) == 1
        assert sum(len(kept) for kept in routes.table.values()) <= 2
    assert sum(made) <= 2


GROWING = {
    "lengths": lambda n: {"key_lengths": torch.tensor([n, n - 7])},
    "sinks": lambda n: {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "an offset": lambda n: {"q_offset": torch.tensor([n - 1, n - 7]), "attn_mask": masks.causal()},
    "slopes": lambda n: {"bias": torch.tensor([0.5, 0.25, 0.1, 0.05]), "attn_mask": masks.causal()},
    "a decay": lambda n: {
        "variant": variants.Retention(torch.tensor([0.9, 0.8, 0.7, 0.6])),
        "attn_mask": masks.causal(),
    },
}


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize("what", GROWING)
@pytest.mark.usefixtures("each_lookup")
def test_decode_growth_with_tensors_that_know_no_length_uses_one_open_length_route(what, backend, monkeypatch):
    """It described, decided and compiled at each step: half a millisecond."""
    routes.clear()
    plans: list[Any] = []
    monkeypatch.setattr(dispatch, "make_plan", lambda *args: plans.append(args) or make_plan(*args))
    q, cache = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 2, 512, 16)
    for n in range(300, 340):
        k, v = cache[0][:, :, :n], cache[1][:, :, :n]
        options = {"enable_gqa": True, **GROWING[what](n)}
        got = dispatch.attention(q, k, v, backend=backend, **options)
        steps = len(plans)
        want = reference_of(q, k, v, options)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
        del plans[steps:]
    assert len(plans) <= 3


def reference_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    made = dispatch.plan(q, k, v, **options)
    return reference.attention(made.op, q, k, v, made.binding.operands(made.tensors)).out


@pytest.mark.usefixtures("each_lookup")
def test_decode_growth_with_a_tensor_of_the_key_length_is_never_open():
    routes.clear()
    q, cache = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 2, 512, 16)
    bias, keep = torch.randn(1, 1, 1, 512), torch.rand(2, 1, 1, 512) < 0.7
    for n in (300, 310, 311, 300, 312):
        k, v = cache[0][:, :, :n], cache[1][:, :, :n]
        for options in ({"bias": bias[..., :n]}, {"attn_mask": keep[..., :n]}):
            got = dispatch.attention(q, k, v, enable_gqa=True, **options)
            mask = options.get("bias", options.get("attn_mask"))
            torch.testing.assert_close(got, sdpa(q, k, v, attn_mask=mask, enable_gqa=True))
        picked = torch.tensor([[[0, n - 1]], [[3, -1]]])
        got = dispatch.attention(q, k, v, enable_gqa=True, attn_mask=masks.Selected(picked))
        wanted = masks.Selected(picked).dense(1, n)
        torch.testing.assert_close(got, sdpa(q, k, v, attn_mask=wanted, enable_gqa=True))
    assert not opened_routes()
    with pytest.raises(InputError, match="index 312 is out of range"):
        dispatch.attention(q, k, v, enable_gqa=True, attn_mask=masks.Selected(torch.tensor([[[0, 312]], [[3, -1]]])))


@pytest.mark.usefixtures("each_lookup")
def test_decode_growth_over_buckets_is_right_and_keeps_few_routes():
    routes.clear()
    q = torch.randn(1, 4, 1, 16)
    cache = torch.randn(2, 1, 2, 300, 16)
    for n in range(1, 300, 3):
        k, v = cache[0][:, :, :n], cache[1][:, :, :n]
        torch.testing.assert_close(dispatch.attention(q, k, v, enable_gqa=True), sdpa(q, k, v, enable_gqa=True))
    assert all(len(kept) <= 16 for kept in routes.table.values())


@pytest.mark.parametrize(
    "lengths", [(90, 120), (90, 91, 100, 101, 120), (70, 99, 100, 101, 128, 65), (120, 90, 121)], ids=str
)
@pytest.mark.parametrize("backend", [None, "eager", "blocked", "sdpa_flash"])
@pytest.mark.usefixtures("each_lookup")
def test_a_window_that_starts_to_matter_at_a_longer_length_is_not_lost(lengths, backend):
    assert len({bucket(n) for n in lengths}) == 1
    routes.clear()
    q = torch.randn(1, 2, 1, 16)
    cache = torch.randn(2, 1, 2, 128, 16)
    for _ in range(2):
        for n in lengths:
            k, v = cache[0][:, :, :n], cache[1][:, :, :n]
            got = dispatch.attention(q, k, v, window=(99, 0), backend=backend)
            near = slice(max(0, n - 100), n)
            torch.testing.assert_close(got, sdpa(q, k[:, :, near], v[:, :, near]))


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"is_causal": True, "q_offset": 60}, {"window": (5, 0), "q_offset": 70}, {"window": (3, 3)}],
    ids=str,
)
@pytest.mark.parametrize("sq", [1, 2, 65])
@pytest.mark.usefixtures("each_lookup")
def test_warm_calls_at_growing_lengths_are_cold_calls(options, sq):
    routes.clear()
    q = torch.randn(1, 2, sq, 16)
    cache = torch.randn(2, 1, 2, 128, 16)
    for n in (66, 70, 71, 100, 128, 66):
        k, v = cache[0][:, :, :n], cache[1][:, :, :n]
        warm = dispatch.attention(q, k, v, **options)
        torch.testing.assert_close(warm, dispatch.plan(q, k, v, backend="eager", **options)(q, k, v))


@pytest.mark.usefixtures("each_lookup")
def test_a_mask_that_changes_in_place_is_not_remembered():
    inputs = [torch.randn(2, 4, n, 8) for n in (5, 7, 7)]
    mask = torch.ones(5, 7, dtype=torch.bool)
    for keep in (7, 4, 2, 7):
        mask[:] = torch.arange(7) < keep
        torch.testing.assert_close(dispatch.attention(*inputs, mask), sdpa(*inputs, mask))


@pytest.mark.usefixtures("each_lookup")
def test_warm_calls_raise_no_warning():
    inputs = [torch.randn(2, 4, n, 8) for n in (5, 7, 7)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            dispatch.attention(*inputs)
            dispatch.attention(*inputs, window=(2, 0))
