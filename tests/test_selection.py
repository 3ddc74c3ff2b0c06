"""Choosing: the precedence of `selection.decide` line by line, on backends made for it; caches, threads, forks."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch import InputError, NoBackendError, UnknownBackendError, dispatch, reference, registry
from attn_dispatch import plan as plan_module
from attn_dispatch.backend import Backend, Cost, Executable
from attn_dispatch.capability import ALL_FEATURES, Capability, Limit, Reason
from attn_dispatch.errors import FallbackWarning
from attn_dispatch.ir.ops import AttentionOp, bucket
from attn_dispatch.ir.tensors import TensorDesc
from attn_dispatch.plan import PlanCache
from attn_dispatch.plugin import hookimpl
from attn_dispatch.registry import Registry
from attn_dispatch.registry.discover import discover
from attn_dispatch.routes import routes
from attn_dispatch.selection.candidates import rebuild
from attn_dispatch.selection.decide import Decision, Request, decide
from attn_dispatch.selection.tuned import Tuned

GOLDEN = Path(__file__).parent / "golden" / "no_backend_error.txt"


class Toy(Backend):
    """Right everywhere that its limits admit; costs what it is told."""

    def __init__(self, name: str, us: float = 10.0, *limits: Limit, says: list[Reason] | None = None) -> None:
        self.name, self.us, self.says = name, us, says or []
        features = ALL_FEATURES - {"score:SoftCap"}
        self.capabilities = (Capability(frozenset({"cpu"}), frozenset({"float32"}), features, limits),)
        self.asked = self.compiled = self.ran = 0

    def extra_reasons(self, op: AttentionOp) -> list[Reason]:
        self.asked += 1
        return self.says

    def estimate(self, op: AttentionOp) -> Cost:
        return Cost(launches=self.us)

    def compile(self, op: AttentionOp) -> Executable:
        self.compiled += 1

        def run(q, k, v, t) -> Any:
            self.ran += 1
            raw = reference.attention(op, q, k, v, t)
            return raw if op.outputs.lse or op.outputs.weights else raw.out

        return Executable(run)


def registry_of(*backends: Backend) -> Registry:
    return Registry({b.name: b for b in backends}, {}, {b.name: "attn-dispatch 0" for b in backends})


@pytest.fixture
def install() -> Iterator[Callable[..., Registry]]:
    """Make toy backends the only ones of the process, until the test ends."""
    before = registry.current()

    def put(*backends: Backend) -> Registry:
        made = registry_of(*backends)
        registry.reset(made)
        return made

    yield put
    registry.reset(before)


def x(sq: int = 4, d: int = 8, b: int = 1, h: int = 2) -> torch.Tensor:
    return torch.randn(b, h, sq, d)


def op_of(sq: int = 4, skv: int = 4, d: int = 8, **changes: Any) -> AttentionOp:
    q, k = (TensorDesc((1, 2, n, d), "float32") for n in (sq, skv))
    return AttentionOp(q, k, k, scale=0.5, **changes)


# --- precedence, by the numbers of decide's docstring ----------------------------------------------------------------


def measured(*names: str) -> Any:
    """A tuned lookup that knows these names for every op."""
    return lambda op: Tuned(names, "measured")


def chosen(requests: list[Request], tuned: Any = None, backends: tuple[Toy, ...] | None = None) -> Decision:
    toys = backends or (Toy("cheap", 1), Toy("middle", 5), Toy("dear", 9), Toy("never", 0.1, Limit("D", maximum=1)))
    return decide(op_of(), registry_of(*toys), requests, tuned)


def test_1_the_calls_argument_comes_first():
    made = chosen([Request(("dear",), "backend="), Request(("middle",), "dispatch.use")], measured("middle"))
    assert (made.chosen.name, made.source) == ("dear", "backend=")


def test_1_the_calls_argument_comes_before_dispatch_use_in_a_call(install):
    install(Toy("cheap", 1), Toy("middle", 5), Toy("dear", 9))
    with dispatch.use("middle"):
        assert dispatch.plan(x(), x(), x(), backend="dear").name == "dear"
        assert dispatch.explain(x(), x(), x(), backend="dear").source == "backend="


def test_2_dispatch_use_comes_before_pins_and_the_store():
    requests = [Request(("middle",), "dispatch.use"), Request(("dear",), "pin a.yaml:1", require=False)]
    made = chosen(requests, measured("dear"))
    assert (made.chosen.name, made.source) == ("middle", "dispatch.use")


def test_3_pins_come_in_order_and_before_the_store():
    requests = [Request((name,), f"pin {name}", require=False) for name in ("middle", "dear")]
    assert chosen(requests, measured("dear")).source == "pin middle"


def test_4_the_store_comes_before_the_heuristic():
    made = chosen([], measured("dear", "cheap"))
    assert (made.chosen.name, made.source) == ("dear", "tuned")


def test_4_a_tuned_name_that_is_gone_or_refuses_gives_way_to_the_next():
    assert chosen([], measured("gone", "never", "middle")).chosen.name == "middle"
    assert chosen([], measured("gone", "never")).source == "heuristic"
    assert chosen([], lambda op: None).source == "heuristic"


def test_5_the_heuristic_takes_the_lowest_estimate():
    made = chosen([])
    assert (made.chosen.name, made.source) == ("cheap", "heuristic")
    assert [c.name for c, _ in made.legal] == ["cheap", "middle", "dear"]
    assert [r.text for r in made.refused["never"]] == ["head_dim 8 > 1"]


def test_the_names_of_a_request_are_an_order_of_preference():
    assert chosen([Request(("never", "dear", "cheap"), "backend=")]).chosen.name == "dear"


@pytest.mark.parametrize("source", ["backend=", "dispatch.use", "pin a.yaml:3"])
def test_an_explicit_request_never_falls_back(source):
    with pytest.raises(NoBackendError, match=f"never, asked for by {source}, cannot run this attention") as caught:
        chosen([Request(("never",), source)], measured("cheap"))
    assert [r.code for r in caught.value.refusals["never"]] == ["limit"]
    assert "head_dim 8 > 1" in str(caught.value)
    assert "backend='cheap'" in str(caught.value)


def test_a_preference_falls_through_to_the_next_source_and_says_why():
    registry.reset(registry.current())  # what was said before counts no more
    for tuned, want in ((measured("dear"), "tuned"), (None, "heuristic")):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            made = chosen([Request(("never",), "pin a.yaml:3", require=False)], tuned)
        assert made.source == want
        assert made.notes == ("pin a.yaml:3 prefers never, which cannot run it: never: head_dim 8 > 1",)
        assert [str(w.message) for w in said] == ([made.notes[0]] if want == "tuned" else [])  # the second time: silent


def test_a_preference_warns_once_per_reason_whatever_the_shape(install):
    install(Toy("cheap", 1), Toy("never", 1, Limit("D", maximum=1)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for sq in (3, 4, 30, 100, 4):
            with dispatch.use("never", require=False):
                dispatch.attention(x(sq), x(sq), x(sq))
        with dispatch.use("never", require=False):
            dispatch.attention(x(4, 16), x(4, 16), x(4, 16))
    assert [type(w.message) for w in said] == [FallbackWarning] * 2
    assert ["head_dim 8 > 1" in str(said[0].message), "head_dim 16 > 1" in str(said[1].message)] == [True, True]


def test_a_request_that_names_nothing_registered_is_an_error_even_as_a_preference():
    with pytest.raises(UnknownBackendError, match="did you mean 'cheap'"):
        chosen([Request(("cheep",), "pin a.yaml:3", require=False)])


def test_nothing_legal_raises_with_every_reason(install):
    install(Toy("one", 1, Limit("D", maximum=1)), Toy("two", 1, says=[Reason("version", "lib", text="lib 1 < 2")]))
    with pytest.raises(NoBackendError, match="no backend can run this attention") as caught:
        dispatch.attention(x(), x(), x())
    assert "head_dim 8 > 1" in str(caught.value)
    assert "lib 1 < 2" in str(caught.value)
    assert set(caught.value.refusals) == {"one", "two"}


# --- ties ------------------------------------------------------------------------------------------------------------


def test_a_tie_does_not_depend_on_the_order_in_which_strangers_were_registered():
    class Plugin:
        def __init__(self, *names: str) -> None:
            self.names = names

        @hookimpl
        def attn_dispatch_backends(self) -> list[Backend]:
            return [Toy(name, 0.001) for name in self.names]

    orders = []
    for names in (("beta", "alpha", "gamma"), ("gamma", "beta", "alpha")):
        found = discover(extra=[(f"from_{name}", Plugin(name)) for name in names])
        orders.append([c.name for c, _ in decide(op_of(), found).legal if c.name in names])
    assert orders == [["alpha", "beta", "gamma"]] * 2


def test_a_built_in_backend_wins_a_tie_against_a_stranger():
    own, stranger = Toy("zeta"), Toy("alpha")
    for order in ((own, stranger), (stranger, own)):
        made = Registry({b.name: b for b in order}, {}, {"zeta": "attn-dispatch 0", "alpha": "other 1"})
        assert decide(op_of(), made).chosen.name == "zeta"


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "text", None])
def test_a_backend_whose_estimate_is_nonsense_is_refused_and_the_others_work(wrong):
    made = chosen([], None, (Toy("odd", wrong), Toy("good", 5)))
    assert made.chosen.name == "good"
    assert "cost estimate" in str(made.refused["odd"][0])


def test_a_backend_whose_estimate_raises_is_refused_and_the_others_work():
    class Odd(Toy):
        def estimate(self, op: AttentionOp) -> Cost:
            raise ZeroDivisionError("no rate")

    made = chosen([], None, (Odd("odd"), Toy("good", 5)))
    assert (made.chosen.name, str(made.refused["odd"][0])) == (
        "good",
        "its cost estimate raised ZeroDivisionError: no rate",
    )


# --- what is remembered ----------------------------------------------------------------------------------------------


def test_the_cache_of_decisions_stays_small_over_ten_thousand_shapes():
    made = decide(op_of(), registry_of(Toy("toy")))
    cache = PlanCache(100)
    for n in range(10_000):
        cache.put((op_of(sq=1 + n), ()), made)
        assert len(cache) <= 100
    assert cache.get((op_of(sq=10_000), ())) is made
    assert cache.get((op_of(sq=1), ())) is None


def test_routes_stay_few_over_many_shapes(install):
    install(Toy("toy"))
    for d in range(1, 60):
        dispatch.attention(x(3, d), x(3, d), x(3, d))
    assert all(len(kept) <= 16 for kept in routes.table.values())


def test_ten_thousand_lengths_are_a_few_decisions(install):
    install(Toy("toy"))
    assert len({op_of(sq=n, skv=n).bucketed() for n in range(1, 10_001)}) == len({bucket(n) for n in range(1, 10_001)})


def test_two_configurations_that_alternate_are_two_selections(install):
    toy = Toy("toy")
    install(toy)
    small, large = x(4, 8), x(4, 16)
    for _ in range(20):
        dispatch.attention(small, small, small)
        dispatch.attention(large, large, large)
    assert toy.asked <= 4  # enumerated once and checked again on the true shape once, each
    assert (toy.compiled, toy.ran) == (2, 40)


def test_a_capability_is_checked_again_on_the_true_shape_of_a_bucket(install):
    picky = Toy("picky", 1, Limit("Skv", multiple_of=8))
    spare = Toy("spare", 5)
    install(picky, spare)
    q = x(1)
    names = {n: dispatch.plan(q, x(n), x(n)).name for n in (64, 40, 41, 48, 63)}
    assert names == {64: "picky", 40: "picky", 41: "spare", 48: "picky", 63: "spare"}
    assert "picky cannot run this shape of its bucket" in str(dispatch.plan(q, x(41), x(41)))


def test_an_opened_route_does_not_skip_a_better_liked_candidate(install):
    """The route of 41 and 42 was opened to the whole bucket with what runs there, and 48 got it too."""
    picky, spare = Toy("picky", 1, Limit("Skv", multiple_of=8)), Toy("spare", 5)
    install(picky, spare)
    q = x(1)
    for n in (41, 42, 43, 48, 49, 64):
        dispatch.attention(q, x(n), x(n))
    assert (picky.ran, spare.ran) == (2, 4)


def test_opening_a_route_asks_nothing_that_could_fail_or_warn(install, monkeypatch):
    """It decided anew for the ends of the bucket: a warning about a length that nobody asked for, or an error."""
    picky, spare = Toy("picky", 1, Limit("Skv", multiple_of=8)), Toy("spare", 5)
    install(picky, spare)
    q = x(1)
    with dispatch.use("picky", require=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in (48, 56, 40):
            dispatch.attention(q, x(n), x(n))
    assert (picky.ran, spare.ran) == (3, 0)


def test_a_digest_holds_whichever_way_the_rows_lie():
    rows = torch.randn(1, 2, 24, 8)
    side_by_side = torch.randn(1, 24, 2, 8).transpose(1, 2)
    ops = [dispatch.explain(q, q, q).op for q in (rows, side_by_side)]
    assert ops[0] != ops[1]
    assert ops[0].digest() == ops[1].digest()


def test_lists_get_a_route_as_tuples_do(install):
    """A list cannot be part of a key; each of its calls was described and compiled anew."""
    toy, other = Toy("toy", 1), Toy("other")
    install(toy, other)
    q = x(9)
    for _ in range(5):
        dispatch.attention(q, q, q, backend=["other", "toy"])
        dispatch.attention(q, q, q, window=[2, 0])
    assert (toy.compiled, toy.ran, other.compiled, other.ran) == (1, 5, 1, 5)


def test_a_type_error_of_a_kernel_is_raised_and_not_tried_again(install):
    class Odd(Toy):
        def compile(self, op: AttentionOp) -> Executable:
            run = super().compile(op).run

            def odd(q, k, v, t) -> Any:
                result = run(q, k, v, t)
                if self.ran > 1:
                    raise TypeError("a kernel's own")
                return result

            return Executable(odd)

    toy = Odd("toy")
    install(toy)
    q = x()
    dispatch.attention(q, q, q)
    with pytest.raises(TypeError, match="a kernel's own"):
        dispatch.attention(q, q, q)
    assert toy.ran == 2


def test_a_request_that_only_bars_does_not_make_the_first_length_decide(install):
    class Steep(Toy):
        """Cheap for short keys, dear for long ones."""

        def estimate(self, op: AttentionOp) -> Cost:
            return Cost(launches=1.0 if op.Skv <= 20 else 100.0)

    for lengths in ((18, 30), (30, 18)):
        made = install(Steep("steep"), Toy("flat", 10), Toy("barred", 0.1))
        names = []
        for n in lengths:
            op = dispatch.explain(x(n), x(n), x(n)).op
            request = Request((), "pin a.yaml:1", require=False, avoid=("barred",))
            names.append(plan_module._decide_for_bucket(op, (request,), made, "off").chosen.name)
        assert names == ["flat", "flat"]


def test_a_chain_that_cannot_run_says_why():
    q = x(8)
    for name in ("bands > sdpa_flash", "bands>sdpa_flash"):
        with pytest.raises(NoBackendError) as said:
            dispatch.attention(q, q, q, backend=name)
        assert "its rewrites do not apply here" not in str(said.value)
        assert said.value.refusals[name]


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_made_without_gradients_refuses_tensors_that_want_one():
    """A kernel without a backward lost the gradient without a word."""
    q = x()
    for name in ("onnxruntime", "sdpa_flash", "blocked"):
        made = dispatch.plan(q, q, q, backend=name)
        with pytest.raises(InputError, match="made without a gradient of query"):
            made(q.clone().requires_grad_(), q, q)
        with torch.no_grad():
            assert made(q.clone().requires_grad_(), q, q).shape == q.shape
    leaf = x().requires_grad_()
    out = dispatch.plan(leaf, q, q)(leaf, q, q)
    assert out.requires_grad


def test_a_plan_refuses_strides_that_its_kernel_would_misread():
    q = x(8, 8)
    scattered = q.transpose(-1, -2).contiguous().transpose(-1, -2)
    made = dispatch.plan(q, q, q, backend="sdpa_flash")
    with pytest.raises(InputError, match="key with contiguous rows, got scattered"):
        made(q, scattered, q)
    assert made(q.transpose(1, 2).contiguous().transpose(1, 2), q, q).shape == q.shape
    assert torch.equal(dispatch.plan(q, scattered, q, backend="sdpa_flash")(q, q, q), made(q, q, q))


def test_a_plan_refuses_a_mask_of_another_kind_or_size():
    """A float mask for a plan of a bool one was turned into its opposite."""
    q = x()
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    made = dispatch.plan(q, q, q, attn_mask=keep)
    with pytest.raises(InputError, match=r"made for attn_mask \[4, 4\] bool, got \[4, 4\] f32"):
        made(q, q, q, attn_mask=torch.zeros(4, 4).masked_fill(~keep, -torch.inf))
    with pytest.raises(InputError, match="made for attn_mask"):
        made(q, q, q, attn_mask=keep[None, None])
    other = keep.flip(0) | torch.eye(4, dtype=torch.bool)
    assert torch.allclose(made(q, q, q, attn_mask=other), dispatch.attention(q, q, q, other), atol=1e-6)


def test_plan_and_explain_see_autocast_as_a_call_does():
    q, half = x(), x().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert dispatch.explain(q, half, half).op.dtype == "bfloat16"
        made = dispatch.plan(q, half, half)
        assert made.op.dtype == "bfloat16"
        want = dispatch.attention(q, half, half)
        assert torch.equal(made(q, half, half), want)
    assert want.dtype == torch.bfloat16
    plain = dispatch.plan(q, q, q, backend="blocked")
    want = plain(q, q, q)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain(q, q, q), want)  # made without autocast, it keeps its dtype, inside too


def test_a_backend_for_multiples_of_8_gets_no_other_head_dim(install):
    install(Toy("picky", 1, Limit("D", multiple_of=8)), Toy("spare", 5))
    assert [dispatch.plan(x(4, d), x(4, d), x(4, d)).name for d in (8, 12, 16)] == ["picky", "spare", "picky"]


def test_a_better_liked_name_that_declined_one_shape_of_a_bucket_gets_the_next(install):
    install(Toy("picky", 1, Limit("Skv", multiple_of=8)), Toy("spare", 5), Toy("cheap", 0.5))
    q = x(1)
    for n, want in ((41, "spare"), (48, "picky"), (63, "spare"), (64, "picky")):
        assert dispatch.plan(q, x(n), x(n), backend=["picky", "spare"]).name == want, n


def test_an_explicit_request_raises_for_the_shape_of_a_bucket_that_it_cannot_run(install):
    install(Toy("picky", 1, Limit("Skv", multiple_of=8)), Toy("spare", 5))
    assert dispatch.plan(x(1), x(64), x(64), backend="picky").name == "picky"
    with pytest.raises(NoBackendError, match="Skv 63 is not a multiple of 8"):
        dispatch.plan(x(1), x(63), x(63), backend="picky")


def test_a_winner_that_is_gone_gives_way_to_the_next(install):
    install(Toy("first", 1), Toy("second", 5))
    assert dispatch.plan(x(), x(), x()).name == "first"
    install(Toy("second", 5))
    assert dispatch.plan(x(), x(), x()).name == "second"
    assert rebuild("first", op_of(), registry.current()) is None


def test_a_registry_given_by_hand_does_not_use_what_the_current_one_decided(install):
    install(Toy("first", 1), Toy("second", 5))
    made = dispatch.plan(x(), x(), x())
    other = registry_of(Toy("second", 5))
    assert plan_module.make_plan(made.binding, (), other).name == "second"


def test_eight_threads_that_start_together_select_once(install):
    class Slow(Toy):
        def extra_reasons(self, op: AttentionOp) -> list[Reason]:
            threading.Event().wait(0.02)
            return super().extra_reasons(op)

    toy = Slow("toy")
    install(toy)
    estimates = 0
    plain = toy.estimate

    def counted(op: AttentionOp) -> Cost:
        nonlocal estimates
        estimates += 1
        return plain(op)

    toy.estimate = counted  # type: ignore[method-assign] - one estimate is one enumeration
    start = threading.Barrier(8)
    inputs, results = x(), []

    def work() -> None:
        start.wait()
        results.append(dispatch.attention(inputs, inputs, inputs))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 8
    assert all(torch.equal(results[0], other) for other in results)
    assert estimates == 1


# --- dispatch.use ----------------------------------------------------------------------------------------------------


def name_now() -> str:
    return dispatch.plan(x(), x(), x()).name


def test_use_nests_and_is_restored_on_exceptions(install):
    install(Toy("one", 1), Toy("two", 2), Toy("three", 3))
    with dispatch.use("two"):
        with dispatch.use("three"):
            assert name_now() == "three"
        with pytest.raises(RuntimeError, match="inside"), dispatch.use("three"):
            raise RuntimeError("inside")
        assert name_now() == "two"
        with dispatch.use(autotune="off"):
            assert name_now() == "two"
    assert name_now() == "one"


def test_use_is_seen_by_its_own_thread_alone(install):
    install(Toy("one", 1), Toy("two", 2))
    seen = []
    with dispatch.use("two"):
        thread = threading.Thread(target=lambda: seen.append(name_now()))
        thread.start()
        thread.join(30)
        assert name_now() == "two"
    assert seen == ["one"]


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"backend": "nope"}, UnknownBackendError, "no backend 'nope'"),
        ({"backend": []}, InputError, "non-empty list"),
        ({"autotune": "always"}, InputError, "autotune must be one of off, cached, on, force, assert, got 'always'"),
    ],
)
def test_use_names_what_is_wrong_and_changes_nothing(install, arguments, kind, words):
    install(Toy("one", 1))
    with pytest.raises(kind, match=words), dispatch.use(**arguments):
        pass
    assert name_now() == "one"


def test_a_route_that_was_made_outside_use_does_not_serve_inside_and_back(install):
    one, two = Toy("one", 1), Toy("two", 2)
    install(one, two)
    inputs = x()
    for _ in range(2):
        dispatch.attention(inputs, inputs, inputs)
        with dispatch.use("two"):
            dispatch.attention(inputs, inputs, inputs)
    assert (one.ran, two.ran) == (2, 2)


# --- robustness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["reasons", "compile", "run"])
def test_a_backend_may_call_attention_itself(install, where):
    class Reentrant(Toy):
        def again(self, at: str, d: int) -> None:
            if at == where and d == 8:
                dispatch.attention(x(3, 16), x(3, 16), x(3, 16))

        def extra_reasons(self, op: AttentionOp) -> list[Reason]:
            self.again("reasons", op.D)
            return []

        def compile(self, op: AttentionOp) -> Executable:
            self.again("compile", op.D)
            inner = super().compile(op).run

            def run(q, k, v, t) -> Any:
                self.again("run", op.D)
                return inner(q, k, v, t)

            return Executable(run)

    install(Reentrant("toy"))
    inputs = x()
    want = torch.nn.functional.scaled_dot_product_attention(inputs, inputs, inputs)
    for _ in range(2):
        torch.testing.assert_close(dispatch.attention(inputs, inputs, inputs), want)


_FORK = """
import os, sys, threading, torch
torch.set_num_threads(1)
from attn_dispatch import dispatch, plan
from attn_dispatch.registry import discover
x = torch.randn(1, 2, 4, 8)
want = dispatch.attention(x, x, x)
held, done = threading.Event(), threading.Event()
def hold():
    with plan._deciding, plan.decisions._lock, discover._lock:
        held.set(); done.wait(60)
threading.Thread(target=hold, daemon=True).start()
held.wait()
pid = os.fork()
if pid == 0:
    y = torch.randn(1, 2, 9, 8)
    ok = torch.equal(dispatch.attention(x, x, x), want) and dispatch.attention(y, y, y).shape == y.shape
    os._exit(0 if ok else 3)
done.set()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


# Windows has no fork, so there a process that was forked cannot be in any state; on every other system this runs.
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_works_even_when_another_thread_held_the_locks():
    done = subprocess.run([sys.executable, "-c", _FORK], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_choosing_never_moves_a_random_generator_or_touches_inputs():
    torch.manual_seed(1)
    random.seed(1)
    inputs = x(33, 24).requires_grad_()
    before = torch.get_rng_state(), random.getstate(), inputs.detach().clone()
    registry.reset()
    dispatch.explain(inputs, inputs, inputs, is_causal=True)
    dispatch.plan(inputs, inputs, inputs, is_causal=True)
    dispatch.attention(inputs, inputs, inputs, is_causal=True)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert torch.equal(before[2], inputs)
    assert inputs.grad is None


def test_explain_runs_and_compiles_nothing(install):
    toy = Toy("toy")
    install(toy)
    report = dispatch.explain(x(), x(), x())
    assert (report.chosen, toy.compiled, toy.ran) == ("toy", 0, 0)


def test_explain_works_on_tensors_without_data():
    far = torch.empty(1, 2, 1 << 20, 64, device="meta")
    assert dispatch.explain(far, far, far, backend="eager").chosen == "eager"


# --- the text of the error -------------------------------------------------------------------------------------------


def _message(call: Callable[[], Any]) -> str:
    with pytest.raises(NoBackendError) as caught:
        call()
    return str(caught.value)


def test_the_text_of_a_no_backend_error_is_the_golden_one(install):
    lib = Reason("version", "toylib", "1.0", ">= 2", "pip install -U toylib", "toylib 1.0 < 2")
    install(Toy("narrow", 1, Limit("D", maximum=64, hint="pad_head_dim")), Toy("old", 2, says=[lib]), Toy("wide", 9))
    small, wide = x(), x(16, 320)
    texts = [
        _message(lambda: dispatch.attention(wide, wide, wide, is_causal=True, backend="narrow")),
        _message(lambda: dispatch.attention(small, small, small, backend=["old", "narrow"], softcap=2.0)),
        _message(lambda: dispatch.attention(small, small, small, softcap=2.0)),
    ]
    text = "\n\n".join(texts) + "\n"
    if not GOLDEN.exists():
        GOLDEN.write_text(text, encoding="utf-8")
        pytest.fail(f"{GOLDEN} was missing and is written now: read it and run again")
    assert text == GOLDEN.read_text(encoding="utf-8")
