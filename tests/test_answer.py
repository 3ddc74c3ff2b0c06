"""`answer`: the routes that were found lately, which the compiled lookup tries before the table."""

from __future__ import annotations

import gc
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.nn.functional as F

from attn_dispatch import dispatch, masks, native
from attn_dispatch.routes import PythonGuard, Route, routes

module = native.lookup().module
pytestmark = pytest.mark.skipif(module is None, reason=native.lookup().why)

Arguments = dict[str, Any]
OPERANDS = ("attn_mask", "bias", "sinks", "query_lengths", "key_lengths", "q_offset")
OPTIONS = ("is_causal", "dropout_p", "scale", "enable_gqa", "window", "softcap", "layout", "return_lse",
           "return_weights", "backend")  # fmt: skip
DEFAULTS: Arguments = dict.fromkeys(OPERANDS) | {
    "is_causal": False, "dropout_p": 0.0, "scale": None, "enable_gqa": False, "window": None, "softcap": None,
    "layout": "bhsd", "return_lse": False, "return_weights": False, "backend": None,
}  # fmt: skip
# of a call with the defaults: mask, names of the operands, offset, variant, the options, and what surrounds it
KEY = (None, (), None, None, *(DEFAULTS[name] for name in OPTIONS), None, False, -1)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    routes.clear()
    yield
    routes.clear()


def qkv(sq: int = 5, skv: int = 7, hq: int = 4, hkv: int = 4, **options: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, h, n, 8, **options) for h, n in ((hq, sq), (hkv, skv), (hkv, skv)))


def answered(tensors: tuple[torch.Tensor, ...], **options: Any) -> Any:
    """What the compiled `answer` says to a plain call."""
    given = DEFAULTS | options
    return module.answer(*tensors, *(given[name] for name in (*OPERANDS, *OPTIONS)))


def warm(tensors: tuple[torch.Tensor, ...], **options: Any) -> torch.Tensor:
    """The call until its route was found: the first makes it, the second finds it."""
    dispatch.attention(*tensors, **options)
    return dispatch.attention(*tensors, **options)


KEPT = torch.arange(7) < torch.tensor([[3], [7]])
CALLS: dict[str, Arguments] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "window": {"window": (2, 0)},
    "soft cap": {"softcap": 3.0},
    "mask of pairs": {"attn_mask": torch.randn(5, 7)},
    "mask over keys": {"attn_mask": (torch.arange(7) < torch.tensor([[3], [7]]))[:, None, None]},
    "sinks": {"sinks": torch.randn(4)},
    "sinks and a mask": {"sinks": torch.randn(4), "attn_mask": torch.randn(2, 1, 5, 7)},
    "a mask object": {"attn_mask": masks.sliding_window(3)},
    "a mask of a tensor": {"attn_mask": masks.columns(keep=KEPT)},
    "a mask of two": {"attn_mask": masks.columns(keep=KEPT) | masks.key_lengths(torch.tensor([2, 7]))},
    "a bias": {"bias": torch.randn(5, 7)},
    "slopes": {"bias": torch.rand(4)},
    "key lengths": {"key_lengths": torch.tensor([3, 7])},
    "query lengths": {"query_lengths": torch.tensor([3, 5])},
    "both lengths": {"key_lengths": torch.tensor([3, 7]), "query_lengths": torch.tensor([5, 2])},
    "an offset": {"q_offset": 1, "is_causal": True},
    "offsets": {"q_offset": torch.tensor([1, 2]), "is_causal": True},
    "everything": {"attn_mask": masks.columns(keep=KEPT), "bias": torch.randn(5, 7), "sinks": torch.randn(4),
                   "key_lengths": torch.tensor([3, 7]), "q_offset": torch.tensor([1, 2]), "is_causal": True},
    "lse": {"return_lse": True},
    "weights": {"return_weights": True},
    "a backend": {"backend": "sdpa_math"},
    "backends": {"backend": ("sdpa_math", "eager")},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_was_found_is_answered_and_is_the_same(name):
    tensors, options = qkv(), CALLS[name]
    assert answered(tensors, **options) is NotImplemented
    want = warm(tensors, **options)
    torch.testing.assert_close(answered(tensors, **options), want)
    other = qkv()
    want = dispatch.attention(*other, **options | {"backend": "eager"})
    torch.testing.assert_close(answered(other, **options), want)


def test_a_call_in_the_other_layout_is_answered():
    tensors = tuple(x.transpose(1, 2) for x in qkv())
    want = warm(tensors, layout="bshd")
    torch.testing.assert_close(answered(tensors, layout="bshd"), want)
    assert answered(tensors) is NotImplemented


CHANGES: dict[str, Arguments] = {name: options for name, options in CALLS.items() if options} | {
    "dropout": {"dropout_p": 0.5},
    "another offset": {"q_offset": 2, "is_causal": True},
    "another kind of False": {"is_causal": 0},
    "None for the heads": {"enable_gqa": None},
    "another number": {"scale": 8**-0.5},
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_option_or_operand_is_not_answered(name):
    tensors = qkv()
    warm(tensors)
    assert answered(tensors, **CHANGES[name]) is NotImplemented
    warm(tensors, **CHANGES[name])
    dispatch.attention(*tensors)
    assert answered(tensors) is not NotImplemented


def test_masks_and_operands_that_are_equal_are_answered_and_others_are_not():
    tensors = qkv()
    warm(tensors, attn_mask=masks.columns(keep=KEPT))
    kept = KEPT.flip(0)
    want = dispatch.attention(*tensors, attn_mask=masks.columns(keep=kept), backend="eager")
    torch.testing.assert_close(answered(tensors, attn_mask=masks.columns(keep=kept)), want)  # another, read the same
    assert answered(tensors, attn_mask=masks.columns(keep=KEPT[0])) is NotImplemented
    assert answered(tensors, attn_mask=masks.columns(prefix=3)) is NotImplemented
    assert answered(tensors, attn_mask=KEPT) is NotImplemented
    assert answered(tensors, attn_mask="Columns(mask0)") is NotImplemented
    assert answered(tensors, attn_mask=masks.columns(keep=KEPT), sinks=[1.0] * 4) is NotImplemented
    assert answered(tensors, attn_mask=masks.columns(keep=KEPT), key_lengths=[3, 7]) is NotImplemented


def test_more_tensors_than_it_takes_are_left_to_python():
    mask = masks.columns(keep=torch.ones(7, dtype=torch.bool))
    for i in range(14):
        mask = mask & masks.columns(keep=torch.arange(7) != i % 6 + 1)
    tensors = qkv()
    assert len(mask.bind()[1]) == 15
    want = dispatch.attention(*tensors, attn_mask=mask, backend="eager")
    torch.testing.assert_close(warm(tensors, attn_mask=mask), want)
    assert answered(tensors, attn_mask=mask) is NotImplemented


def test_the_mask_and_the_sinks_are_not_taken_for_each_other():
    tensors, operand = qkv(hq=7, hkv=7), torch.randn(7)
    warm(tensors, sinks=operand)
    assert answered(tensors, attn_mask=operand) is NotImplemented
    warm(tensors, attn_mask=operand)
    for name in ("sinks", "attn_mask"):
        want = dispatch.attention(*tensors, **{name: operand}, backend="eager")
        torch.testing.assert_close(answered(tensors, **{name: operand}), want)


SITUATIONS: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
    "rows": lambda: qkv(sq=4),
    "keys": lambda: qkv(skv=8),
    "heads": lambda: qkv(hq=2, hkv=2),
    "dtype": lambda: qkv(dtype=torch.float64),
    "gradient": lambda: qkv(requires_grad=True),
    "stride": lambda: tuple(x.mT.contiguous().mT for x in qkv()),
    "values of another length": lambda: (*qkv()[:2], qkv(skv=6)[2]),
    "nested": lambda: (torch.nested.nested_tensor([torch.zeros(4, 5, 8)] * 2), *qkv()[1:]),
    "parameter": lambda: (torch.nn.Parameter(qkv()[0], requires_grad=False), *qkv()[1:]),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_other_tensors_are_not_answered(name):
    warm(qkv())
    assert answered(SITUATIONS[name]()) is NotImplemented
    assert answered((None, *qkv()[1:])) is NotImplemented
    assert answered(qkv()) is not NotImplemented


def test_what_surrounds_a_call_is_part_of_it():
    tensors = qkv()
    warm(tensors)
    with dispatch.use("eager"):
        assert answered(tensors) is NotImplemented
    torch.use_deterministic_algorithms(True)
    try:
        assert answered(tensors) is NotImplemented
    finally:
        torch.use_deterministic_algorithms(False)
    with fwd.dual_level():
        assert answered(tensors) is NotImplemented
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert answered(tensors) is NotImplemented
    with torch.inference_mode():
        assert answered(tensors) is NotImplemented
    assert torch.vmap(lambda q: torch.ones(2) if answered((q, *tensors[1:])) is NotImplemented else q)(
        torch.randn(3, *tensors[0].shape)
    ).shape == (3, 2)
    assert answered(tensors) is not NotImplemented


def test_a_context_that_is_equal_is_found_and_then_answered():
    tensors = qkv()
    for _ in range(3):
        with dispatch.use("eager"):
            warm(tensors)
            assert answered(tensors) is not NotImplemented
    assert sum(len(kept) for kept in routes.table.values()) == 1


def test_a_cleared_table_answers_nothing():
    warm(qkv())
    assert answered(qkv()) is not NotImplemented
    routes.clear()
    assert answered(qkv()) is NotImplemented


def test_a_route_that_was_replaced_does_not_answer():
    tensors = qkv()
    warm(tensors)
    (options, (old,)), run = next(iter(routes.table.items())), lambda *_: "new"
    assert answered(tensors) is not NotImplemented
    routes.add(options, Route(old.check, run), replaces=old)
    assert answered(tensors) is NotImplemented
    assert dispatch.attention(*tensors) == "new" == answered(tensors)


def test_more_shapes_than_are_remembered_stay_right():
    many = [qkv(sq=n) for n in range(1, 13)]
    for _ in range(3):
        for tensors in many:
            torch.testing.assert_close(dispatch.attention(*tensors), F.scaled_dot_product_attention(*tensors))
    answers = [answered(tensors) is not NotImplemented for tensors in many]
    assert sum(answers) == 8


def test_a_growing_key_length_is_answered_within_its_bucket():
    q, k, v = qkv(sq=1, skv=70)
    cut = lambda n: (q, k[:, :, :n], v[:, :, :n])
    for n in range(33, 40):
        dispatch.attention(*cut(n))
    for n in range(40, 65):
        torch.testing.assert_close(answered(cut(n)), F.scaled_dot_product_attention(*cut(n)))
    assert answered(cut(65)) is NotImplemented
    assert answered((q, k[:, :, :41], v[:, :, :42])) is NotImplemented


def test_what_the_kernel_raises_is_raised():
    tensors = qkv()
    warm(tensors)
    route = next(iter(routes.table.values()))[0]
    routes.clear()

    def broken(*_: Any) -> torch.Tensor:
        raise ZeroDivisionError

    assert module.find({KEY: (Route(route.check, broken),)}, KEY, tensors) is broken
    with pytest.raises(ZeroDivisionError):
        dispatch.attention(*tensors)


def test_what_ends_a_program_is_not_swallowed(monkeypatch):
    tensors = qkv()
    warm(tensors, attn_mask=masks.sliding_window(3))

    def stopped(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(masks.Mask, "_bind", stopped)
    with pytest.raises(KeyboardInterrupt):
        answered(tensors, attn_mask=masks.sliding_window(3))  # a mask that was not asked before


def test_operands_that_a_run_writes_are_not_those_of_the_next_call():
    tensors, seen = qkv(), []

    def run(_q: Any, _k: Any, _v: Any, operands: dict[str, Any]) -> int:
        seen.append(dict(operands))
        operands["junk"] = 1
        return 1

    assert module.find({KEY: (Route(module.Guard(tensors), run),)}, KEY, tensors) is run
    assert [answered(tensors), answered(tensors)] == [1, 1]
    assert seen == [{}, {}]


def test_a_module_that_watches_nothing_answers_nothing(tmp_path):
    path = shutil.copy(native.built_path(native.LOOKUP), tmp_path)
    other = native.load(native.LOOKUP, Path(path))
    tensors = qkv()
    route = Route(other.Guard(tensors), lambda *_: 1)
    assert other.find({KEY: (route,)}, KEY, tensors) is route.run
    assert other.answer(*tensors, *(DEFAULTS[name] for name in (*OPERANDS, *OPTIONS))) is NotImplemented


def test_a_guard_in_python_is_not_remembered():
    tensors = qkv()
    run = lambda *_: 1
    assert module.find({KEY: (Route(PythonGuard(tensors, False).check, run),)}, KEY, tensors) is run
    assert answered(tensors) is NotImplemented


@pytest.mark.parametrize("name", ["plain", "mask of pairs", "sinks", "a mask of a tensor", "offsets", "lse"])
def test_an_answer_drops_its_references(name):
    tensors, options = qkv(), CALLS[name]
    warm(tensors, **options)
    ((key, (route,)),) = routes.table.items()
    found, operands = object(), [x for x in options.values() if isinstance(x, torch.Tensor)]
    operands += options["attn_mask"].bind()[1].values() if isinstance(options.get("attn_mask"), masks.Mask) else []
    new = Route(route.check, lambda *_: found)
    assert module.find({key: (new,)}, key, (*tensors, *operands)) is new.run
    watched = (*tensors, *operands, key, new, new.run, new.check, found, vars(fwd), *OPTIONS)
    before = [sys.getrefcount(one) for one in watched]
    for _ in range(1000):
        if answered(tensors, **options) is not found or answered(tensors, window=(1, 1)) is not NotImplemented:
            break
    else:
        assert [sys.getrefcount(one) for one in watched] == before
        return
    pytest.fail("the route that was found last does not answer")


def test_an_answer_drops_its_references_where_the_length_is_open():
    tensors, found = qkv(sq=1, skv=40), object()
    runs = {6: lambda *_: found}
    route = Route(module.Guard(tensors, True), None, 0, runs)
    assert module.find({KEY: (route,)}, KEY, tensors) is runs[6]
    watched = (*tensors, route, runs, runs[6], found)
    before = [sys.getrefcount(one) for one in watched]
    assert all(answered(tensors) is found for _ in range(1000))
    longer = qkv(sq=1, skv=70)
    assert all(answered(longer) is NotImplemented for _ in range(1000))  # its bucket has no run yet
    assert [sys.getrefcount(one) for one in watched] == before


def test_what_is_forgotten_is_freed():
    class Run:
        def __call__(self, *_: Any) -> int:
            return 1

    tensors, run = qkv(), Run()
    gone = weakref.ref(run)
    table = {KEY: (Route(module.Guard(tensors), run),)}
    assert module.find(table, KEY, tensors) is run
    del run, table
    gc.collect()
    assert gone() is not None
    assert answered(tensors) == 1
    module.forget()
    assert gone() is None
    assert answered(tensors) is NotImplemented


class OwnSizes(torch.Tensor):
    """A wrapper that answers for its sizes itself, in Python; what it does then is a test's."""

    asked: Any = None

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> OwnSizes:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dispatch_sizes_strides_policy="sizes")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sym_size.default or func is torch.ops.aten.size.default:
            if cls.asked is not None:
                cls.asked()
            return (2, 4, 5, 8)
        if func in (torch.ops.aten.stride.default, torch.ops.aten.sym_stride.default):
            return (160, 40, 8, 1)
        if func in (torch.ops.aten.dim.default,):
            return 4
        return NotImplemented


def test_tensors_that_run_python_when_they_are_compared_are_not_remembered():
    """Their Python could forget the route, or have another call answered, while `answer` looks at it."""
    tensors = tuple(OwnSizes((2, 4, 5, 8)) for _ in range(3))
    run = lambda *_: "found"
    table = {KEY: (Route(module.Guard(tensors), run),)}
    assert module.find(table, KEY, tensors) is run
    assert answered(tensors) is NotImplemented
    OwnSizes.asked = module.forget
    try:
        assert module.find(table, KEY, tensors) is run
    finally:
        OwnSizes.asked = None
    assert answered(tensors) is NotImplemented


def test_a_table_that_is_cleared_while_it_is_searched_is_not_remembered():
    tensors, run = qkv(), lambda *_: "gone"
    clears = Route(lambda *_: bool(module.forget()), None)
    table = {KEY: (clears, Route(module.Guard(tensors), run))}
    assert module.find(table, KEY, tensors) is run
    assert answered(tensors) is NotImplemented
    assert module.find({KEY: table[KEY][1:]}, KEY, tensors) is run
    assert answered(tensors) == "gone"


def test_a_route_without_a_run_for_the_bucket_does_not_hide_another():
    short, long = qkv(sq=1, skv=40), qkv(sq=1, skv=70)
    one, other = lambda *_: 40, lambda *_: 70
    exact = Route(module.Guard(long), other)
    opened = Route(module.Guard(short, True), None, 0, {6: one})
    assert module.find({KEY: (exact,)}, KEY, long) is other
    assert module.find({KEY: (opened,)}, KEY, short) is one
    assert (answered(short), answered(long), answered(short)) == (40, 70, 40)


def test_threads_are_answered_alike():
    many, wrong = [qkv(sq=n) for n in range(1, 5)], []

    def run() -> None:
        for _ in range(50):
            for tensors in many:
                if dispatch.attention(*tensors).shape != tensors[0].shape:
                    wrong.append(tensors)
            routes.clear()

    threads = [threading.Thread(target=run) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert wrong == []


def test_wrong_arguments_of_the_module_are_named():
    with pytest.raises(TypeError, match="answer takes 19 arguments, got 2"):
        module.answer(1, 2)
    with pytest.raises(TypeError, match="a context variable"):
        module.watch(None, {}, int)
