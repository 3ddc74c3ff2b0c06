"""Tuning: only what is right is timed, a switch must be worth it, failures are records, nothing is disturbed, and a pin
is never overridden."""

from __future__ import annotations

import ctypes
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_dispatch import dispatch, reference, registry
from attn_dispatch.backend import Backend, Cost, Executable, Raw
from attn_dispatch.capability import ALL_FEATURES, Capability, Limit
from attn_dispatch.context import AUTOTUNE_MODES
from attn_dispatch.errors import FallbackWarning, InputError, NoBackendError, NotTunedError, StoreWarning
from attn_dispatch.ir.atoms import Causal, Columns, KeyLengths
from attn_dispatch.ir.masks import And
from attn_dispatch.ir.ops import AttentionOp, Outputs
from attn_dispatch.ir.scores import Alibi
from attn_dispatch.ir.tensors import Ref, TensorDesc
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.passes import canonicalise
from attn_dispatch.plan import decisions as plan_cache
from attn_dispatch.registry import Registry
from attn_dispatch.selection import gate, lock, tuned
from attn_dispatch.selection.decide import ranked
from attn_dispatch.selection.gate import crops, run_gate
from attn_dispatch.selection.gate_dropout import dropout_problem
from attn_dispatch.selection.pins import Pin, Pins, When
from attn_dispatch.selection.samples import KINDS, golden, make_sample
from attn_dispatch.selection.store import Entry, Record, Store
from attn_dispatch.selection.timing import Timing, interleaved, policy
from attn_dispatch.selection.tuner import Effort, Session, _prune, choose, tune
from attn_dispatch.settings import Settings

QUICK = Effort(rounds=2, final_rounds=2, round_s=0.001, limit_s=30.0)


class Toy(Backend):
    """The specification, spoiled by ``spoil(op, q, k, v, t, raw)``; costs what it is told."""

    capabilities = (Capability(frozenset({"cpu"}), frozenset({"float32", "float64"}), ALL_FEATURES),)

    def __init__(
        self, name: str, us: float = 10.0, spoil: Callable[..., Any] | None = None, version: str = "1"
    ) -> None:
        self.name, self.us, self.spoil, self._version = name, us, spoil, version

    def version(self) -> str:
        return self._version

    def estimate(self, op: AttentionOp) -> Cost:
        return Cost(launches=self.us)

    def compile(self, op: AttentionOp) -> Executable:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Any) -> Any:
            raw = reference.attention(op, q, k, v, t)
            if self.spoil is not None:
                raw = self.spoil(op, q, k, v, t, raw) or raw
            wanted = op.outputs.lse or op.outputs.weights or op.outputs.state
            return raw if wanted else raw.out

        return Executable(run)


class Small(Toy):
    """Declines more than 12 keys."""

    capabilities = (replace(Toy.capabilities[0], limits=(Limit("Skv", maximum=12),)),)


def registry_of(*backends: Backend, ours: bool = True) -> Registry:
    origins = {b.name: "attn-dispatch 0" for b in backends} if ours else {}
    return Registry({b.name: b for b in backends}, {}, origins)


def op_of(sq: int = 24, skv: int = 24, d: int = 8, **changes: Any) -> AttentionOp:
    q, k = (TensorDesc((1, 2, n, d), "float32") for n in (sq, skv))
    return AttentionOp(q, k, k, scale=d**-0.5, **changes)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Store]]:
    """Make toy backends the only ones of the process, with a store of their own and these pins."""
    before = registry.current()

    def put(*backends: Backend, pins: Pins | None = None, root: Path | None = tmp_path) -> Store:
        registry.reset(registry_of(*backends))
        monkeypatch.setattr(tuned, "settings", lambda: Settings((), root))
        monkeypatch.setattr("attn_dispatch.plan.current_pins", lambda: pins or Pins())
        monkeypatch.setattr("attn_dispatch.report.current_pins", lambda: pins or Pins())
        monkeypatch.setattr("attn_dispatch.selection.pins.current_pins", lambda: pins or Pins())
        monkeypatch.setattr(lock, "current_pins", lambda: pins or Pins())
        monkeypatch.setattr("attn_dispatch.selection.ranks.Session", lambda: Session(QUICK))
        return tuned.store()

    yield put
    registry.reset(before)


def read_clock(steps: dict[str, Callable[[], object]], *_: Any) -> dict[str, Timing]:
    """In place of a real clock, which another process may disturb: what is called liked or slow takes long."""
    for step in steps.values():
        step()
    return {name: Timing(3000.0 if name in ("liked", "slow") else 100.0, 1.0) for name in steps}


@pytest.fixture(autouse=True)
def steady_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real_clock" not in request.fixturenames:
        monkeypatch.setattr("attn_dispatch.selection.tuner.interleaved", read_clock)


@pytest.fixture
def real_clock() -> None:
    """Ask for this to measure."""


def slowly(op: AttentionOp, q: Any, k: Any, v: Any, t: Any, raw: Raw) -> None:
    time.sleep(0.05)


def x(sq: int = 24, d: int = 8) -> torch.Tensor:
    return torch.randn(1, 2, sq, d)


# --- the gate -------------------------------------------------------------------------------------------------------


def no_scale(op, q, k, v, t, raw):
    return reference.attention(op.with_(scale=1.0), q, k, v, t)


def mask_off_by_one(op, q, k, v, t, raw):
    return reference.attention(op.with_(q_offset=1), q, k, v, t)


def no_lse(op, q, k, v, t, raw):
    return Raw(raw.out, raw.lse + 0.01)


def nan_rows(op, q, k, v, t, raw):
    return Raw(torch.where(torch.isneginf(raw.lse)[..., None], torch.nan, raw.out), raw.lse)


def overflow(op, q, k, v, t, raw):
    scores = (q @ k.transpose(-1, -2) * op.effective_scale).masked_fill(
        ~op.mask.dense(q.shape[2], k.shape[2], 0, t, "cpu"), -torch.inf
    )
    e = scores.exp()
    return Raw(e / e.sum(-1, keepdim=True) @ v, raw.lse)


def writes(op, q, k, v, t, raw):
    q.detach().mul_(1.5)


def no_gradient(op, q, k, v, t, raw):
    return Raw(raw.out + 0.1 * (v.mean() - v.mean().detach()), raw.lse)


def no_gradient_of_query(op, q, k, v, t, raw):
    return Raw(raw.out + 0.1 * (q.mean() - q.mean().detach()), raw.lse)


def half_precision(op, q, k, v, t, raw):
    return Raw(raw.out.bfloat16().float(), raw.lse)


def wrong_shape(op, q, k, v, t, raw):
    return Raw(raw.out[:, :1], raw.lse)


def other_weights(op, q, k, v, t, raw):
    return Raw(raw.out, raw.lse, raw.weights.roll(1, -1))


def no_weights(op, q, k, v, t, raw):
    return Raw(raw.out, raw.lse)


def lse_without_a_graph(op, q, k, v, t, raw):
    return Raw(raw.out, raw.lse.detach())


def wrong_gradient_of_lse(op, q, k, v, t, raw):
    return Raw(raw.out, 2 * raw.lse - raw.lse.detach())


def without_dropout(op, q, k, v, t, raw):
    return reference.attention(op.with_(dropout_p=0.0), q, k, v, t)


def dropped_and_not_scaled(op, q, k, v, t, raw):
    return Raw(raw.out * (1 - op.dropout_p), raw.lse)


def the_same_draw_each_time(op, q, k, v, t, raw):
    torch.manual_seed(0)
    return reference.attention(op, q, k, v, t)


def backward_without_dropout(op, q, k, v, t, raw):
    plain = without_dropout(op, q, k, v, t, raw).out
    return Raw(plain + (raw.out - plain).detach(), raw.lse)


def lse_after_dropout(op, q, k, v, t, raw):
    return Raw(raw.out, raw.lse + (op.dropout_p > 0))


DROPOUT: dict[str, Any] = {"dropout_p": 0.25}
GRAD: dict[str, Any] = {"grad": ("query", "key", "value")}
GRAD_LSE = GRAD | {"outputs": Outputs(lse=True)}
LIES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a dropped scale": (no_scale, {}, "out is"),
    "a mask off by one": (mask_off_by_one, {}, "out is"),
    "a wrong lse": (no_lse, {"outputs": Outputs(lse=True)}, "lse is"),
    "NaN in empty rows": (nan_rows, {"q_offset": -3}, "out has NaN"),
    "a softmax without its maximum": (overflow, {}, "out"),
    "a changed input": (writes, {}, "changes its input query"),
    "a wrong gradient": (no_gradient, {"grad": ("query", "key", "value")}, "gradient of value"),
    "a lower precision": (half_precision, {}, "out is"),
    "a wrong shape": (wrong_shape, {}, "out has shape"),
    "weights of other keys": (other_weights, {"outputs": Outputs(weights=True)}, "weights is"),
    "no weights": (no_weights, {"outputs": Outputs(weights=True)}, "weights have shape None"),
    "an lse without a graph": (lse_without_a_graph, GRAD_LSE, "gradient of query"),
    "a wrong gradient of the lse": (wrong_gradient_of_lse, GRAD_LSE, "gradient of query"),
    "dropout ignored": (without_dropout, DROPOUT, "dropout_p 0.25 is ignored"),
    "dropout without its scale": (dropped_and_not_scaled, DROPOUT, "neither dropped nor scaled"),
    "one draw for ever": (the_same_draw_each_time, DROPOUT, "two seeds give the same"),
    "dropout in the forward alone": (backward_without_dropout, DROPOUT | GRAD, "the backward drops other weights"),
    "an lse that dropout changes": (lse_after_dropout, DROPOUT | {"outputs": Outputs(lse=True)}, "lse is"),
    "a wrong gradient beside dropout": (no_gradient_of_query, DROPOUT | GRAD, "gradient of query"),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_gate_stops_what_is_wrong_and_says_how(lie):
    """Peer bug (SGLang's tests, atol 0.1 on constant inputs): an off-by-one mask must not pass."""
    spoil, changes, words = LIES[lie]
    op = op_of(mask=Causal(), **changes)
    verdict = run_gate("liar", op, registry_of(Toy("liar", spoil=spoil)))
    assert words in verdict.problem
    assert run_gate("honest", op, registry_of(Toy("honest"))).problem == ""


def test_a_liar_is_a_record_and_never_wins():
    entry = tune(op_of(mask=Causal()), registry_of(Toy("liar", 1, no_scale), Toy("slow", 5)), Session(QUICK))
    assert entry.winner == "slow"
    record = entry.record("liar")
    assert record is not None
    assert record.status == "wrong"
    assert record.median_us is None
    assert record.errors["out"] > 1


def test_the_error_of_a_winner_is_in_its_record():
    record = tune(op_of(), registry_of(Toy("one")), Session(QUICK)).record("one")
    assert record is not None
    assert 0 <= record.errors["out"] < 1


def test_large_problems_are_checked_at_their_own_size_row_by_row():
    def only_large(op, q, k, v, t, raw):
        return no_scale(op, q, k, v, t, raw) if k.shape[2] > 2000 else None

    op = op_of(2048, 2048)
    assert "rows 0 to 8" in run_gate("liar", op, registry_of(Toy("liar", spoil=only_large))).problem


class Multiples(Toy):
    """Takes multiples of 64 alone, as kernels without masked tails do."""

    capabilities = (replace(Toy.capabilities[0], limits=(Limit("Sq", multiple_of=64), Limit("Skv", multiple_of=64))),)


class LongAlone(Toy):
    """Declines fewer than 2048 keys, so that no cut of an op fits it."""

    capabilities = (replace(Toy.capabilities[0], limits=(Limit("Skv", minimum=2048),)),)


def wide_op(b: int, h: int, sq: int, skv: int, **changes: Any) -> AttentionOp:
    q, k = (TensorDesc((b, h, n, 8), "float32") for n in (sq, skv))
    return AttentionOp(q, k, k, scale=8**-0.5, **changes)


def test_a_problem_that_is_large_by_its_batch_is_cut_in_its_batch():
    """B 64, S 50 had no cut at all: neither gradients nor large logits were looked at."""
    op = wide_op(64, 8, 50, 50, mask=Causal(), grad=("query", "key", "value"))
    assert [(small.B, small.Sq, small.Skv) for small in crops(op)] == [(3, 50, 50)]
    problem = run_gate("liar", op, registry_of(Toy("liar", spoil=no_gradient))).problem
    assert "gradient of value" in problem


@pytest.mark.parametrize(
    ("op", "lengths"),
    [
        (wide_op(1, 2, 2048, 2048), {(61, 61), (128, 128)}),
        (wide_op(8, 64, 1, 4096), {(1, 61), (1, 128)}),
        (wide_op(1, 2, 1024, 4096), {(61, 80), (128, 192)}),  # the longer side stays longer
        (wide_op(4, 64, 100, 100), {(61, 61), (100, 100)}),
    ],
)
def test_problems_are_cut_to_a_length_that_nothing_tiles_by_and_to_one_that_everything_does(op, lengths):
    found = list(crops(op))
    assert {(small.Sq, small.Skv) for small in found} == lengths
    assert {small.B for small in found} == {min(op.B, 3)}


def test_a_backend_for_multiples_of_64_alone_is_cut_and_not_waved_through():
    op = op_of(2048, 2048, mask=Causal(), grad=("query", "key", "value"))
    assert "gradient of value" in run_gate("liar", op, registry_of(Multiples("liar", spoil=no_gradient))).problem
    assert run_gate("honest", op, registry_of(Multiples("honest"))).problem == ""


def test_operands_are_cut_by_what_they_are_and_not_by_a_size_that_happens_to_be_equal():
    lengths, slopes = TensorDesc((64,), "int64"), TensorDesc((64,), "float32")
    columns = TensorDesc((64, 64), "bool")
    op = wide_op(
        64, 64, 64, 64,
        mask=And.of(KeyLengths(Ref("lengths")), Columns(Ref("columns"))), score=(Alibi(Ref("slopes")),),
        operands=(("columns", columns), ("lengths", lengths), ("slopes", slopes)),
    )  # fmt: skip
    small = next(crops(op))
    shapes = {name: desc.shape for name, desc in small.operands}
    assert (small.B, small.Hq, small.Sq, small.Skv) == (3, 64, 61, 61)
    assert shapes == {"columns": (3, 61), "lengths": (3,), "slopes": (64,)}
    assert op.resized(2, 64, 9).operand("columns").shape == (2, 9)


def doubled_gradient(op, q, k, v, t, raw):
    return Raw(2 * raw.out - raw.out.detach(), raw.lse)


@pytest.mark.parametrize("lie", [None, doubled_gradient])
def test_what_no_cut_fits_is_compared_whole_while_that_can_be_afforded(lie):
    op = op_of(8, 2100, grad=("query", "key", "value"))
    big = op.with_(query=op.query.with_shape(1, 64, 8, 8), key=op.key.with_shape(1, 64, 2100, 8))
    big = big.with_(value=big.key)
    assert big.B * big.Hq * big.Sq * big.Skv > 1 << 20
    verdict = run_gate("toy", big, registry_of(LongAlone("toy", spoil=lie)))
    assert ("gradient of query" in verdict.problem) is (lie is not None)
    assert "grad" in verdict.errors


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grad": ("query",)}, "the gradients cannot be compared"),
        ({"dropout_p": 0.5}, "the dropout cannot be compared"),
    ],
)
def test_what_cannot_be_compared_is_not_called_verified(changes, words, monkeypatch):
    monkeypatch.setattr("attn_dispatch.selection.gate._AFFORDABLE", 1 << 20)
    entry = tune(op_of(16, 40_000, **changes), registry_of(LongAlone("toy", 1), Toy("eager", 2)), Session(QUICK))
    record = entry.record("toy")
    assert record is not None
    assert (record.status, record.median_us) == ("unverified", None)
    assert words in record.note
    assert entry.ranking == ("eager",)


def test_what_needs_no_gradient_is_verified_by_its_rows():
    assert run_gate("toy", op_of(64, 16384), registry_of(LongAlone("toy"))).problem == ""


@pytest.mark.parametrize("p", [0.01, 0.5, 1.0])
def test_honest_dropout_passes_and_moves_no_random_state(p):
    state = torch.get_rng_state()
    verdict = run_gate("toy", op_of(mask=Causal(), dropout_p=p), registry_of(Toy("toy")))
    assert verdict.problem == ""
    assert "dropout" in verdict.errors
    assert torch.equal(torch.get_rng_state(), state)


def test_a_session_lets_go_of_its_problems_with_itself_and_the_gate_keeps_none():
    import gc

    from attn_dispatch.selection import gate

    def alive() -> int:
        gc.collect()
        return sum(type(x) is gate._Problem for x in gc.get_objects())

    before = alive()
    session, candidates = Session(QUICK), registry_of(Toy("one"), Toy("eager"))
    tune(op_of(), candidates, session)
    assert session.problems
    assert alive() <= before + gate.PROBLEMS
    del session
    run_gate("one", op_of(), candidates)
    assert alive() == before


def _weights_of(op, q, k):
    return torch.softmax(q.float() @ k.float().mT * op.effective_scale, -1)


def _drop(op, weights):
    return torch.nn.functional.dropout(weights, op.dropout_p)


WRONG_DROPOUT = {
    "ignored": (lambda op, w, v: w @ v, "is ignored"),
    "half of p": (lambda op, w, v: torch.nn.functional.dropout(w, op.dropout_p / 2) @ v, ""),
    "half of p, scaled by p": (
        lambda op, w, v: (w * (torch.rand_like(w) > op.dropout_p / 2)) @ v / (1 - op.dropout_p),
        "it drops 0.0",
    ),
    "the output": (lambda op, w, v: _drop(op, w @ v), "elements of the output"),
    "the values": (lambda op, w, v: w @ _drop(op, v), ""),
    "the same keys for all rows": (lambda op, w, v: (w * _drop(op, torch.ones_like(w[:, :, :1]))) @ v, "rows drop"),
    "the same for all heads": (lambda op, w, v: (w * _drop(op, torch.ones_like(w[:, :1]))) @ v, "heads drop the same"),
    "the same for all sequences": (lambda op, w, v: (w * _drop(op, torch.ones_like(w[:1]))) @ v, "sequences drop"),
    "whole rows": (lambda op, w, v: (w * _drop(op, torch.ones_like(w[..., :1]))) @ v, "keys drop the same"),
    "not scaled": (lambda op, w, v: (w * (torch.rand_like(w) > op.dropout_p)) @ v, ""),
    "a seed of its own": (
        lambda op, w, v: (
            (w * (torch.rand(w.shape, generator=torch.Generator().manual_seed(1)) > op.dropout_p))
            @ v
            / (1 - op.dropout_p)
        ),
        "two seeds give the same",
    ),
    "no seed at all": (
        lambda op, w, v: (w * (torch.rand(w.shape, generator=UNSEEDED) > op.dropout_p)) @ v / (1 - op.dropout_p),
        "one seed gives two outputs",
    ),
}
UNSEEDED = torch.Generator().manual_seed(2)


def _dropout_of(drop, p: float, dtype: str) -> str:
    x = TensorDesc((2, 4, 64, 64), dtype)
    op = canonicalise(AttentionOp(x, x, x, dropout_p=p))[0]
    sample = make_sample(op)

    def run(q, k, v, t):
        return drop(op, _weights_of(op, q, k), v.float()).to(q.dtype)

    with torch.random.fork_rng(devices=[]):
        return dropout_problem(op, run, sample, golden(op, sample).out)[0]


@pytest.mark.parametrize(("p", "dtype"), [(0.1, "float32"), (0.5, "float32"), (0.1, "bfloat16"), (0.01, "bfloat16")])
@pytest.mark.parametrize("wrong", WRONG_DROPOUT)
def test_a_wrong_dropout_is_found(wrong, p, dtype):
    drop, words = WRONG_DROPOUT[wrong]
    problem = _dropout_of(drop, p, dtype)
    assert problem
    assert words in problem or (words == "it drops 0.0" and p == 0.5 and "it drops 0.2" in problem), problem


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("p", [0.001, 0.01, 0.1, 0.5, 0.9, 1.0])
def test_a_right_dropout_is_not_accused(p, dtype):
    assert _dropout_of(lambda op, w, v: _drop(op, w) @ v, p, dtype) == ""


# --- choosing -------------------------------------------------------------------------------------------------------


def timing(median: float, spread: float = 0.5, *samples: float) -> Timing:
    return Timing(median, spread, samples)


@pytest.mark.parametrize(
    ("times", "winner"),
    [
        ({"a": timing(100), "b": timing(98)}, "a"),  # 2 %: not worth a switch
        ({"a": timing(100), "b": timing(90)}, "b"),
        ({"a": timing(100, 20), "b": timing(90)}, "a"),  # the spread is wider than the gain
        ({"a": timing(200), "b": timing(101), "c": timing(100)}, "b"),  # a tie among challengers goes by the order too
        ({"c": timing(5)}, "c"),
        ({"a": timing(10, 9, 10, 20, 10, 20), "b": timing(9, 9, 8, 16, 8, 16)}, "b"),  # always faster, in each round
    ],
)
def test_a_switch_must_gain_more_than_three_percent_and_the_spread(times, winner):
    ranking, why = choose(["a", "b", "c"], times)
    assert ranking[0] == winner
    assert set(ranking) == set(times)
    assert why


def test_the_faster_one_wins_against_the_estimate(real_clock):
    patient = Session(replace(QUICK, rounds=5, final_rounds=5))
    entry = tune(op_of(), registry_of(Toy("liked", 1, slowly), Toy("fast", 2)), patient)
    assert entry.ranking == ("fast", "liked")
    assert "faster than liked" in entry.why


def test_what_cannot_win_is_pruned_with_the_reason():
    cheap = [Toy(f"b{n}", 1.0 + n / 10) for n in range(3)]
    entry = tune(op_of(), registry_of(*cheap, Toy("dear", 100)), Session(QUICK))
    record = entry.record("dear")
    assert record is not None
    assert record.status == "pruned"
    assert "100.0x the best; the limit is 8x" in record.note
    assert {r.name for r in entry.records if r.status == "ok"} == {"b0", "b1", "b2"}


def test_nothing_to_tune_is_said():
    with pytest.raises(NoBackendError, match="nothing to tune"):
        tune(op_of(skv=24), registry_of(Small("small")), Session(QUICK))


def test_forward_and_backward_are_timed_as_one():
    calls: list[str] = []

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            calls.append("forward")
            return out.clone()

        @staticmethod
        def backward(ctx, grad):
            calls.append("backward")
            return grad

    def spoil(op, q, k, v, t, raw):
        return Raw(Counting.apply(raw.out), raw.lse)

    tune(op_of(grad=("query",)), registry_of(Toy("one", spoil=spoil)), Session(QUICK))
    assert calls.count("backward") == calls.count("forward") > len(KINDS)


# --- failures are records ---------------------------------------------------------------------------------------------


def dies(op, q, k, v, t, raw):
    ctypes.string_at(0)


def leaves(op, q, k, v, t, raw):
    os._exit(7)


def hangs(op, q, k, v, t, raw):
    time.sleep(600)


def eats_memory(op, q, k, v, t, raw):
    return torch.ones(1 << 46, dtype=torch.uint8)


def raises(op, q, k, v, t, raw):
    raise ValueError("not today")


@pytest.mark.parametrize(
    ("spoil", "status", "words"),
    [
        (dies, "crashed", "SIGSEGV"),
        (leaves, "crashed", "exited with 7"),
        (hangs, "timeout", "more than 20 s"),
        (eats_memory, "memory", ""),
        (raises, "error", "ValueError: not today"),
        (no_scale, "wrong", "times what is allowed off"),
    ],
)
def test_a_stranger_that_fails_is_a_record_and_the_process_lives(spoil, status, words):
    strangers = registry_of(Toy("bad", 1, spoil), Toy("eager", 5), ours=False)
    origins = {"eager": "attn-dispatch 0", "bad": "bad-plugin 1.0"}
    entry = tune(op_of(), replace(strangers, origins=origins), Session(replace(QUICK, limit_s=20.0)))
    record = entry.record("bad")
    assert entry.winner == "eager"
    assert record is not None
    assert record.status == status
    assert words in record.note
    assert "bad-plugin 1.0" in record.version


def test_a_stranger_that_is_right_is_timed():
    toys = registry_of(Toy("good", 1), Toy("slow", 2), ours=False)
    entry = tune(op_of(), replace(toys, origins={"slow": "attn-dispatch 0"}), Session(QUICK))
    assert entry.winner == "good"


def test_one_of_ours_that_raises_is_a_record():
    entry = tune(op_of(), registry_of(Toy("bad", 1, raises), Toy("good", 2)), Session(QUICK))
    assert entry.ranking == ("good",)


# --- nothing is disturbed ---------------------------------------------------------------------------------------------


def draws(op, q, k, v, t, raw):
    torch.rand(3)


def seeds(op, q, k, v, t, raw):
    torch.manual_seed(0)


def sets_threads(op, q, k, v, t, raw):
    torch.set_num_threads(torch.get_num_threads() % 3 + 1)


def fills_grad(op, q, k, v, t, raw):
    with torch.enable_grad():
        x = q.detach().requires_grad_()
        x.square().sum().backward()


@pytest.mark.parametrize("rude", [None, draws, seeds, sets_threads, fills_grad])
def test_tuning_leaves_everything_as_it_was(rude, install):
    """The candidates that do not run the call, but are measured, change what they can."""
    changed: list[int] = []

    def touch(*args: Any) -> None:
        changed.append(torch.get_num_threads())
        rude(*args)

    install(Toy("liked", 1, touch if rude else None), Toy("fast", 2))
    q, k, v = (x().requires_grad_() for _ in range(3))
    q.grad = torch.ones_like(q)
    kept = [t.detach().clone() for t in (q, k, v)]
    torch.manual_seed(3)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    try:
        with dispatch.use(autotune="on"):
            made = dispatch.plan(q, k, v, dropout_p=0.0)
        assert made.name == "fast"
        assert bool(changed) is (rude is not None)
        assert rude is not sets_threads or len(set(changed)) > 1
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a.detach(), b) for a, b in zip((q, k, v), kept, strict=True))
    assert torch.equal(q.grad, torch.ones_like(q))
    assert k.grad is None


def notes(seen: list[tuple[bool, ...]]) -> Callable[..., None]:
    """A toy's spoil that writes down what it finds around it."""

    def look(op, q, k, v, t, raw):
        product = (q.detach() @ k.detach().transpose(-1, -2)).dtype
        seen.append((product == q.dtype, torch.is_inference_mode_enabled(), torch.ones(1).device == q.device))

    return look


@pytest.mark.parametrize("around", ["inference_mode", "default dtype", "default device", "replace_sdpa", "autocast"])
def test_tuning_works_whatever_is_set_around_it(around, install):
    seen: list[tuple[bool, ...]] = []
    store = install(Toy("liked", 1), Toy("fast", 2, notes(seen)))
    q = x().double() if around == "autocast" else x()  # autocast leaves float64 as it is, and the toys take no less
    scopes = {
        "inference_mode": torch.inference_mode,
        "default device": lambda: torch.device("meta"),
        "replace_sdpa": dispatch.replace_sdpa,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "default dtype": torch.no_grad,
    }
    if around == "default dtype":
        torch.set_default_dtype(torch.float64)
    try:
        with scopes[around](), dispatch.use(autotune="on"):
            assert dispatch.plan(q, q, q).name == "fast"
    finally:
        torch.set_default_dtype(torch.float32)
    ((_, entry),) = store.entries()
    assert isinstance(entry, Entry)
    assert {r.status for r in entry.records} == {"ok"}
    assert set(seen) == {(True, False, True)}  # no autocast, no inference mode, no other device reaches a candidate


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_fits_its_op_and_leaves_the_random_state_alone(kind):
    op = op_of(mask=Causal(), grad=("query",))
    state = torch.get_rng_state()
    sample = make_sample(op, kind)
    assert torch.equal(torch.get_rng_state(), state)
    assert sample.query.requires_grad
    assert not sample.key.requires_grad
    assert torch.equal(sample.key, make_sample(op, kind).key)


# --- the modes --------------------------------------------------------------------------------------------------------


def entry_for(op: AttentionOp, *ranking: str, version: str = "attn-dispatch 0, {} 1") -> Entry:
    from attn_dispatch.selection.environment import environment

    records = tuple(Record(n, "ok", 10.0 * i, 1.0, {}, version.format(n)) for i, n in enumerate(ranking, 1))
    return Entry(op.bucketed(), op, records, ranking, environment("cpu"), "2026-01-01T00:00:00", 1.0, "measured it")


def chosen(q: torch.Tensor, **options: Any) -> tuple[str, str]:
    decision = dispatch.plan(q, q, q, **options).decision
    return decision.chosen.name, decision.source


def described(q: torch.Tensor, **options: Any) -> AttentionOp:
    return dispatch.explain(q, q, q, **options).op


def test_off_looks_at_nothing_and_cached_at_what_is_there(install):
    store = install(Toy("one", 1), Toy("two", 2))
    store.put(entry_for(described(x()), "two", "one"))
    with dispatch.use(autotune="off"):
        assert chosen(x()) == ("one", "heuristic")
    with dispatch.use(autotune="cached"):
        assert chosen(x()) == ("two", "tuned")
        assert chosen(x(200)) == ("one", "heuristic")  # a miss is not measured
    assert len(list(store.files())) == 1


def test_on_measures_a_miss_once_and_keeps_it(install, monkeypatch):
    store = install(Toy("liked", 1), Toy("fast", 2))
    seen: list[AttentionOp] = []
    monkeypatch.setattr("attn_dispatch.selection.ranks.tune", lambda op, *rest: seen.append(op) or tune(op, *rest))
    with dispatch.use(autotune="on"):
        for _ in range(3):
            dispatch.attention(x(), x(), x())
            assert chosen(x(20)) == ("fast", "tuned")  # the same bucket
    assert len(seen) == 1
    ((_, entry),) = store.entries()
    assert isinstance(entry, Entry)
    assert entry.measured.Sq == 24
    with dispatch.use(autotune="cached"):
        assert chosen(x()) == ("fast", "tuned")  # a decision that was made before is forgotten


def test_force_measures_anew_once(install, monkeypatch):
    store = install(Toy("liked", 1, slowly), Toy("fast", 2))
    store.put(entry_for(described(x()), "liked", "fast"))
    seen: list[AttentionOp] = []
    monkeypatch.setattr("attn_dispatch.selection.ranks.tune", lambda op, *rest: seen.append(op) or tune(op, *rest))
    with dispatch.use(autotune="force"):
        for _ in range(3):
            assert chosen(x()) == ("fast", "tuned")
    assert len(seen) == 1


def test_assert_raises_on_a_miss_and_says_how_the_nearest_entry_differs(install):
    store = install(Toy("one", 1), Toy("two", 2))
    store.put(entry_for(described(x(), is_causal=True), "two"))
    with dispatch.use(autotune="assert"):
        assert chosen(x(), is_causal=True) == ("two", "tuned")
        with pytest.raises(NotTunedError, match="mask: measured Causal, asked none"):
            dispatch.attention(x(), x(), x())


def test_nothing_is_measured_while_something_else_records_what_runs(install):
    store = install(Toy("one", 1), Toy("two", 2))
    with dispatch.use(autotune="on"):
        torch.vmap(lambda q: dispatch.attention(q, q, q))(torch.randn(3, 1, 2, 24, 8))
        q = x()
        torch.func.grad(lambda t: dispatch.attention(t, t, t).sum())(q)
        torch.export.export(_Module(), (q,))
        assert dispatch.explain(q, q, q).source == "heuristic"
    assert not list(store.files())


class _Module(torch.nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return dispatch.attention(q, q, q)


@pytest.mark.parametrize("mode", AUTOTUNE_MODES)
@pytest.mark.parametrize("pin_mode", ["prefer", "require"])
@pytest.mark.parametrize("tuned_before", [True, False])
def test_tuning_never_overrides_a_pin(mode, pin_mode, tuned_before, install):
    """Peer bug (SGLang #39882)."""
    pins = Pins((Pin(When(), ("pinned",), mode=pin_mode, where="pins.yaml:3"),))
    store = install(Toy("pinned", 50), Toy("fast", 1), pins=pins)
    if tuned_before:
        store.put(entry_for(described(x()), "fast", "pinned"))
    with dispatch.use(autotune=mode):
        assert chosen(x()) == ("pinned", "pin pins.yaml:3")
        assert chosen(x(), backend="fast") == ("fast", "backend=")  # and a call's own argument beats the pin
        assert dispatch.explain(x(), x(), x()).source == "pin pins.yaml:3"
    assert len(list(store.files())) == tuned_before


@pytest.mark.parametrize("mode", ["cached", "on", "assert"])
def test_what_a_pin_bars_does_not_run_though_it_was_fastest(mode, install):
    pins = Pins((Pin(When(), avoid=("fast",), where="pins.yaml:3"),))
    store = install(Toy("fast", 1), Toy("other", 2), pins=pins)
    store.put(entry_for(described(x()), "fast", "other"))
    with dispatch.use(autotune=mode):
        assert chosen(x()) == ("other", "tuned")
        assert "barred by pin pins.yaml:3" in str(dispatch.explain(x(), x(), x()))


def test_a_barred_chain_is_not_the_best_form_of_a_wanted_backend():
    from attn_dispatch.selection.decide import Request, decide

    registry.reset()
    q, k = TensorDesc((1, 8, 1, 8), "float32"), TensorDesc((1, 2, 640, 8), "float32")
    sinks = Softmax(Ref("sinks"))  # sdpa_flash cannot run it plainly, so it is asked for in its best form
    op = AttentionOp(q, k, k, scale=0.3, weight=sinks, operands=(("sinks", TensorDesc((8,), "float32")),))
    best = decide(op, registry.current(), [Request(("sdpa_flash",), "pin f:1", False)]).chosen.name
    assert best.endswith("> sdpa_flash")
    other = decide(op, registry.current(), [Request(("sdpa_flash",), "pin f:1", False, (best,))]).chosen.name
    assert other != best
    assert other.endswith("> sdpa_flash")


def test_a_pin_that_cannot_run_falls_to_what_was_measured_and_says_so_once(install):
    pins = Pins((Pin(When(), ("small",), where="pins.yaml:3"),))
    store = install(Small("small", 1), Toy("one", 2), Toy("two", 3), pins=pins)
    store.put(entry_for(described(x(), backend="one"), "two", "one"))
    with dispatch.use(autotune="cached"):
        with pytest.warns(FallbackWarning, match=r"pin pins.yaml:3 prefers small, which cannot run it: .*Skv 24 > 12"):
            assert chosen(x()) == ("two", "tuned")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert chosen(x(23)) == ("two", "tuned")


def test_what_is_barred_by_name_stays_barred_at_a_shape_where_more_can_run(install):
    """What is barred was told by the refusals at one shape: what declines that shape has another reason there, so it
    stayed in the ranking and ran at the next shape."""
    pins = Pins((Pin(When(), avoid=("small",), where="pins.yaml:3"),))
    store = install(Small("small", 9), Toy("one", 1), Toy("two", 2), pins=pins)
    store.put(entry_for(described(x(10)), "small", "two", "one"))
    with dispatch.use(autotune="cached"):
        assert chosen(x(14)) == ("two", "tuned")  # small declines it
        assert chosen(x(10)) == ("two", "tuned")  # and here it is barred
        assert chosen(x(16)) == ("two", "tuned")


def test_tuning_that_fails_is_a_warning_and_the_call_goes_on(install, monkeypatch):
    install(Toy("liked", 1), Toy("fast", 2))

    def broken(*_args: Any) -> Entry:
        raise RuntimeError("the clock stopped")

    monkeypatch.setattr("attn_dispatch.selection.ranks.tune", broken)
    with dispatch.use(autotune="on"):
        with pytest.warns(
            StoreWarning, match="tuning failed, so the estimate decides: RuntimeError: the clock stopped"
        ):
            assert chosen(x()) == ("liked", "heuristic")
        dispatch.attention(x(), x(), x())


def test_the_slow_ones_keep_their_place_behind_those_that_were_measured_twice():
    """Times of two sessions were compared: the first rounds of the slow with the last rounds of the fast."""
    far = {"slow": timing(50.0), "slower": timing(70.0)}
    ranking, why = choose(["slow", "slower", "a", "b"], {"a": timing(60.0), "b": timing(30.0)}, far)
    assert ranking == ("b", "a", "slow", "slower")
    assert why == "30 us, 2.00x faster than a"
    assert choose(["slow", "b"], {"b": timing(10.0)}, {"slow": timing(50.0)}) == (
        ("b", "slow"),
        "10 us, 5.00x faster than slow",
    )


def test_a_busy_machine_does_not_keep_a_choice_that_loses_by_a_fifth():
    """The spread of single rounds grows with noise; that of their median falls with their number."""
    noise = [0.8, 1.0, 1.2, 0.85, 1.15, 0.9, 1.1, 1.0, 1.0, 0.95, 1.05] * 4
    slow = timing(120.0, 40.0, *(120.0 * n for n in noise))
    fast = timing(100.0, 40.0, *(100.0 * n for n in noise[::-1]))
    assert choose(["slow", "fast"], {"slow": slow, "fast": fast})[0][0] == "fast"


def test_the_plain_form_of_each_backend_is_tried_beside_its_best_by_estimate():
    """onnxruntime in tiles was tried, which looked better and was slower than what the runtime does by itself."""
    shape = TensorDesc((1, 8, 448, 64), "float32")
    op = AttentionOp(shape, shape, shape, scale=0.125, mask=Causal())
    legal, _ = ranked(op, registry.current())
    order = [candidate.name for candidate, _ in legal]
    tried = [candidate.name for candidate in _prune(legal, op, Effort())[0]]
    plain = [name for name in order if ">" not in name and name not in ("flex", "eager")]
    assert set(plain) <= set(tried)
    assert next(name for name in order if name.endswith("onnxruntime")) in tried


def test_what_the_spread_hides_runs_off(install, monkeypatch):
    """Two of three seem faster than the liked one, and one of them is not: more rounds by themselves tell."""
    install(Toy("one", 1), Toy("two", 2), Toy("three", 3))
    asked: list[set[str]] = []

    def clock(steps: Any, *_: Any) -> dict[str, Timing]:
        asked.append(set(steps))
        if len(asked) < 3:  # the first rounds and the final
            return {n: Timing({"one": 110.0, "two": 100.0, "three": 140.0}[n], 50.0) for n in steps}
        return {n: Timing({"one": 120.0, "two": 100.0}[n], 1.0) for n in steps}

    monkeypatch.setattr("attn_dispatch.selection.tuner.interleaved", clock)
    entry = tune(described(x()), registry.current(), Session(QUICK))
    assert asked == [{"one", "two", "three"}, {"one", "two", "three"}, {"one", "two"}]
    assert entry.ranking == ("two", "one", "three")
    assert [r.median_us for r in entry.records if r.status == "ok"] == [100.0, 120.0, 140.0]


def test_an_entry_that_ships_with_the_package_and_is_stale_is_not_complained_of(install, monkeypatch):
    """Nobody here asked for it."""
    install(Toy("one", 1), Toy("two", 2, version="2"))
    op = described(x())
    ranking = entry_for(op, "two", "one")
    for shipped in (True, False):
        entry = lock.LockEntry(op.bucketed(), ("two", "one"), ranking.records, "", "shipped.yaml:3", shipped)
        monkeypatch.setattr(lock, "locked", lambda entry=entry: (entry,))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with dispatch.use(autotune="cached"):
                assert dispatch.explain(x(), x(), x()).source == "heuristic"
        assert [w.category for w in said] == ([] if shipped else [StoreWarning])


def test_explain_decides_as_a_call_does_for_the_bucket_and_then_at_the_shape(install):
    """It decided at the shape alone, and so named another candidate where the bucket's first runs here too."""

    class Steep(Toy):
        """Cheap for short keys, dear for long ones."""

        def estimate(self, op: AttentionOp) -> Cost:
            return Cost(launches=1.0 if op.Skv <= 20 else 100.0)

    install(Steep("steep"), Toy("flat", 10))
    q = x(18)  # the bucket is 32, where steep is dear
    assert chosen(q) == ("flat", "heuristic")
    assert dispatch.explain(q, q, q).chosen == "flat"


def test_explain_says_what_a_call_would_raise_when_a_miss_is_an_error(install):
    install(Toy("one", 1))
    with dispatch.use(autotune="assert"):
        report = dispatch.explain(x(), x(), x())
    assert report.chosen == ""
    assert "autotune='assert', and nothing usable was measured" in report.error


# --- what is timed ----------------------------------------------------------------------------------------------------


def test_each_call_comes_after_a_piece_of_torchs_work_that_is_not_counted(real_clock, monkeypatch):
    """Alone in a loop, a library with threads of its own looks faster than it is in a model."""
    order: list[str] = []

    class Beside(torch.Tensor):
        def add_(self, *_: Any) -> None:
            order.append("beside")
            time.sleep(0.02)

    monkeypatch.setattr("attn_dispatch.selection.timing.torch.zeros", lambda *_: torch.empty(0).as_subclass(Beside))
    found = interleaved({"a": lambda: order.append("a")}, rounds=3, min_round_s=1e-6)
    assert order == ["beside", "a"] * (len(order) // 2)
    assert found["a"].median_us < 10_000


def test_a_sample_lies_as_the_captured_tensors_did_and_the_result_is_taken_so():
    base = torch.randn(1, 24, 2, 8).transpose(1, 2)
    with dispatch.capture() as workload:
        dispatch.attention(base, base, base.contiguous())
    ((op, *_),) = ((use.op,) for use in workload.ops())
    assert [desc.strides for desc in (op.query, op.key, op.value)] == ["bshd", "bshd", "rows"]
    sample = make_sample(op)
    assert [x.is_contiguous() for x in (sample.query, sample.key, sample.value)] == [False, False, True]
    assert sample.query.transpose(1, 2).is_contiguous()
    taken = gate.step(lambda q, k, v, t: q.contiguous(), op, sample)()
    assert taken.transpose(1, 2).is_contiguous()
    assert torch.equal(taken, sample.query)


# --- a winner that is gone, declines or is stale ----------------------------------------------------------------------


def test_a_winner_that_is_gone_gives_way_to_the_next_in_the_ranking(install):
    store = install(Toy("one", 1), Toy("two", 2), Toy("three", 3))
    store.put(entry_for(described(x()), "gone", "three", "two"))
    with dispatch.use(autotune="cached"):
        plan = dispatch.plan(x(), x(), x())
    assert (plan.name, plan.decision.source) == ("three", "tuned")
    assert "gone cannot run it" in plan.decision.why


def test_a_winner_that_declines_this_shape_of_its_bucket_gives_way_to_the_next_measured(install):
    store = install(Small("small", 9), Toy("one", 1), Toy("two", 2))
    store.put(entry_for(described(x(10)), "small", "two", "one"))
    with dispatch.use(autotune="cached"):
        assert chosen(x(10)) == ("small", "tuned")
        assert chosen(x(14))[0] == "two"  # capability is checked again on the true shape
        assert chosen(x(10)) == ("small", "tuned")


def test_an_entry_of_other_versions_is_a_miss_and_one_warning(install):
    store = install(Toy("one", 1), Toy("two", 2, version="2"))
    store.put(entry_for(described(x()), "two", "one"))
    with dispatch.use(autotune="cached"):
        with pytest.warns(
            StoreWarning, match="two was measured with attn-dispatch 0, two 1, here is attn-dispatch 0, two 2"
        ):
            assert chosen(x()) == ("one", "heuristic")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert chosen(x(23)) == ("one", "heuristic")


def test_a_corrupt_store_never_stops_a_call(install):
    store = install(Toy("one", 1))
    path = store.put(entry_for(described(x()), "one"))
    assert path is not None
    path.write_text('{"schema": 1, "op":')
    store.forget()
    with dispatch.use(autotune="cached"), pytest.warns(StoreWarning, match=path.name):
        dispatch.attention(x(), x(), x())


def test_a_home_that_cannot_be_written_never_stops_a_call(install):
    install(Toy("liked", 1), Toy("fast", 2), root=Path("/proc/nowhere"))
    with dispatch.use(autotune="on"):
        with pytest.warns(StoreWarning, match="kept in this process only"):
            dispatch.attention(x(), x(), x())
        assert chosen(x()) == ("fast", "tuned")


def test_an_op_for_which_nobody_passed_is_a_miss_and_is_measured_once(install, monkeypatch):
    """Every candidate may have run out of memory that day: such an entry hid shipped ones, and passed for a hit."""
    store = install(Toy("one", 1), Toy("two", 2))
    failed = replace(entry_for(described(x()), "one"), ranking=(), records=(Record("one", "memory", note="no room"),))
    store.put(failed)
    with dispatch.use(autotune="cached"):
        assert chosen(x()) == ("one", "heuristic")
    with dispatch.use(autotune="assert"), pytest.raises(NotTunedError, match="one: no room"):
        dispatch.attention(x(), x(), x())
    shipped = lock.parse_lock({"op": described(x()).to_dict(), "use": ["two"]}, shipped=True)
    with monkeypatch.context() as patch, dispatch.use(autotune="cached"):
        patch.setattr(lock, "locked", lambda: (shipped,))
        plan_cache.clear()
        assert chosen(x())[0] == "two"
    plan_cache.clear()
    store.put(replace(failed, records=(Record("one", "wrong", note="off by one"),)))
    with dispatch.use(autotune="cached"):
        assert chosen(x()) == ("two", "heuristic")
        assert "wrong, crashed or hung" in str(dispatch.explain(x(), x(), x()).refused["one"][0])
    plan_cache.clear()
    store.put(failed)
    seen: list[AttentionOp] = []
    monkeypatch.setattr("attn_dispatch.selection.ranks.tune", lambda op, *_: seen.append(op) or failed)
    with dispatch.use(autotune="on"):
        for _ in range(3):
            plan_cache.clear()
            assert chosen(x())[1] == "heuristic"
    assert len(seen) == 1


def test_what_was_found_wrong_does_not_run_because_it_looks_cheap(install):
    store = install(Toy("wrong", 1), Small("small", 3), Toy("spare", 5))
    entry = entry_for(described(x(10)), "small")
    store.put(replace(entry, records=(*entry.records, Record("wrong", "wrong", note="off by one"))))
    with dispatch.use(autotune="cached"):
        assert chosen(x(10)) == ("small", "tuned")
        q = x(14)  # the same bucket; small declines it
        assert chosen(q)[0] == "spare"
        assert "wrong, crashed or hung when it was measured" in str(dispatch.plan(q, q, q).decision.refused["wrong"][0])
        assert chosen(q, backend="wrong")[0] == "wrong"  # asked for by name


def test_a_lock_entry_may_leave_its_versions_out(install, monkeypatch):
    install(Toy("one", 1), Toy("two", 2))
    op = described(x())
    data = {"op": op.to_dict(), "use": ["two", "one"], "refused": {"three": "timeout: it took long"}}
    entry = lock.parse_lock(data)
    assert [(r.name, r.status, r.note) for r in entry.records][2] == ("three", "timeout", "it took long")
    monkeypatch.setattr(lock, "locked", lambda: (entry,))
    with dispatch.use(autotune="cached"), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(x())[0] == "two"


def test_what_was_measured_on_purpose_comes_before_a_lock_file(install, monkeypatch):
    store = install(Toy("liked", 1, slowly), Toy("fast", 2))
    locked = lock.parse_lock({"op": described(x()).to_dict(), "use": ["liked", "fast"]})
    monkeypatch.setattr(lock, "locked", lambda: (locked,))
    with dispatch.use(autotune="force"):
        assert chosen(x())[0] == "fast"
        for forget in tuned.on_change:  # as the next op that is measured does
            forget()
        assert chosen(x()) == ("fast", "tuned")
    assert len(list(store.files())) == 1


def test_ranks_that_know_different_things_measure_each_op_once(install, monkeypatch):
    """Two ops took turns for ever: what one agreed on, the result of the other made everybody forget."""
    install(Toy("one", 1), Toy("two", 2))
    asked: list[int] = []

    def together(op: AttentionOp, _registry: Registry, known: tuple[str, ...] = ()) -> Entry:
        asked.append(op.Sq)
        return entry_for(op, "two", "one")

    monkeypatch.setattr(tuned, "has_ranks", lambda: True)
    monkeypatch.setattr("attn_dispatch.selection.ranks.tune_together", together)
    with dispatch.use(autotune="on"):
        for sq in (24, 100) * 4:
            assert chosen(x(sq))[0] == "two"
    assert asked == [24, 100]


def test_explain_shows_what_was_measured(install):
    store = install(Toy("one", 1), Toy("two", 2))
    store.put(entry_for(described(x()), "two", "one"))
    with dispatch.use(autotune="cached"):
        report = dispatch.explain(x(), x(), x())
        assert "10 us measured" in str(report)
        assert report.to_dict()["measured_us"] == {"two": 10.0, "one": 20.0}
        assert "not tuned: no entry" in str(dispatch.explain(x(100), x(100), x(100)))


def test_a_warm_call_is_the_same_tuned_and_untuned(install):
    """A tuned lookup adds nothing to the warm call: by then there is a route, and the store is not asked."""
    store = install(Toy("one", 1), Toy("two", 2))
    q = x()
    store.put(entry_for(described(q), "two"))
    with dispatch.use(autotune="cached"):
        dispatch.attention(q, q, q)
        tuned._store = None  # whoever asks it now makes a new one
        dispatch.attention(q, q, q)
        assert tuned._store is None


@pytest.mark.parametrize("by", ["a pin", "a tuned result"])
def test_a_compiled_graph_runs_what_an_eager_call_runs(by, install, monkeypatch):
    """Peer bug (PyTorch: a priority that is lost under compile)."""
    ran: list[str] = []

    def noted(name: str) -> Toy:
        return Toy(name, 1 if name == "liked" else 2, lambda *_: ran.append(name))

    pins = Pins((Pin(When(), ("wanted",), where="pins.yaml:3"),)) if by == "a pin" else Pins()
    store = install(noted("liked"), noted("wanted"), pins=pins)
    monkeypatch.setattr("attn_dispatch.plan.settings", lambda: Settings((), None, "cached"))
    if by == "a tuned result":
        store.put(entry_for(described(x()), "wanted", "liked"))
    torch._dynamo.reset()
    dispatch.attention(x(), x(), x())
    torch.compile(_Module(), backend="eager", fullgraph=True)(x())
    assert ran == ["wanted", "wanted"]


def test_nothing_chosen_is_traced_as_sdpa(install):
    install(Toy("liked"))
    graphs: list[list[Any]] = []

    def look(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    torch._dynamo.reset()
    torch.compile(_Module(), backend=look, fullgraph=True)(x())
    assert graphs == [[torch.nn.functional.scaled_dot_product_attention]]


def accelerator(monkeypatch: pytest.MonkeyPatch, here: str | None) -> list[str]:
    """A fake one, and what it is asked to wait for."""
    order: list[str] = []
    found = torch.device(here) if here else None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda *_: order.append("wait"))
    return order


def test_another_accelerator_is_waited_for_before_and_after_each_turn(real_clock, monkeypatch):
    """It was timed as a CPU: what was measured was the time to hand over the work."""
    order = accelerator(monkeypatch, "xpu")
    found = interleaved({"a": lambda: order.append("call")}, rounds=1, min_round_s=1e-9, device="xpu")
    assert order == ["wait", "call", "wait"] * 3
    assert found["a"].median_us > 0
    assert policy("xpu") not in (policy("cpu"), policy("cuda"))


@pytest.mark.parametrize(("here", "words"), [(None, "accelerator here is None"), ("xpu", "accelerator here is xpu")])
def test_a_device_that_torch_cannot_wait_for_is_not_timed(real_clock, monkeypatch, here, words):
    accelerator(monkeypatch, here)
    with pytest.raises(InputError, match=f"hpu cannot be timed: torch's {words}"):
        interleaved({"a": lambda: None}, device="hpu")
    monkeypatch.delattr(torch, "accelerator")
    with pytest.raises(InputError, match=r"this torch has no torch\.accelerator"):
        interleaved({"a": lambda: None}, device="hpu")
