"""The numerics gate: no candidate is timed before it has been right.

A candidate is compared with float64 on problems cut to a size where that is cheap, with each kind of sample of
`samples.KINDS` (large logits, ragged lengths and empty rows, views): values, lse, weights, state and gradients; and
then at the size that is tuned, for rows at the beginning, the middle and the end. An element may be off by the budget
of `attn_dispatch.budgets`, or by `SLACK` times the error that the specification itself makes in the op's dtype,
whichever is more: on hard inputs the second is the yardstick (as in PyTorch's own tests). Dropout is checked by
`gate_dropout`: alike without it; with it which weights are dropped, how the others grow, and the mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_dispatch import reference
from attn_dispatch.backend import Raw, Run
from attn_dispatch.budgets import budget
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.passes import canonicalise
from attn_dispatch.registry import Registry
from attn_dispatch.selection.candidates import build, rebuild
from attn_dispatch.selection.gate_dropout import dropout_problem
from attn_dispatch.selection.samples import KINDS, Sample, as_double, golden, golden_rows, make_sample
from attn_dispatch.state import state_dtype

__all__ = ["PROBLEMS", "SLACK", "Problems", "Verdict", "as_used", "crops", "places", "run_gate", "step"]

SLACK = 8.0
# Rounding a logit of some hundreds changes its exponential by so many roundings: what `large` inputs may be off more.
_LARGE = 100.0
_ROWS = 8  # rows compared at each of three places of a large problem
# Lengths of the cut problems: one that no kernel tiles by, and one that every kernel does, since what takes multiples
# of 64 alone must be cut too. Forms that only pay for long inputs decline both, and get one of the longer ones.
_CROPS = (61, 128)
_LONG_CROPS = (301, 256, 602, 512, 1203, 1024)
_SMALL = 1 << 20  # pairs up to which an op is its own cut
_AFFORDABLE = 1 << 24  # pairs up to which all of an op that cannot be cut is compared


@dataclass(frozen=True)
class Verdict:
    """What the gate says of a candidate.

    Args:
        problem: what is wrong, with the sample on which it is; empty when it may be timed.
        errors: the largest error by quantity (``out lse weights state grad dropout``), in units of what is allowed.
        unverified: quantities that the op wants and that could not be compared; they are part of the problem.
    """

    problem: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    unverified: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """What a record says of it: ``ok``, ``wrong``, or ``unverified`` when it may be right and nobody knows."""
        return "unverified" if self.unverified else "wrong" if self.problem else "ok"


def run_gate(
    name: str,
    op: AttentionOp,
    registry: Registry,
    seen: dict[Any, Verdict] | None = None,
    problems: Problems | None = None,
) -> Verdict:
    """Check one candidate on an op.

    Args:
        name: the candidate. op: a canonical op. registry: where the name is registered.
        seen: verdicts on cut problems, kept over the ops of one session: many sizes share one cut problem.
        problems: inputs and what is right for them, kept for the other candidates of a session, the last `PROBLEMS`.

    Returns:
        The verdict; the random state is left as it was. Rows alone do not say what a gradient or a state should be:
        where no cut problem fits, all of the op is compared, and when it is too large for that, the verdict's problem
        is that it was not verified.
    """
    devices = range(torch.cuda.device_count()) if op.device == "cuda" else ()  # a seed is for all of them
    with torch.random.fork_rng(devices):
        return _gate(name, op, registry, {} if seen is None else seen, {} if problems is None else problems)


def _gate(name: str, op: AttentionOp, registry: Registry, seen: dict[Any, Verdict], problems: Problems) -> Verdict:
    errors: dict[str, float] = {}
    fitting = [small for small in crops(op) if rebuild(name, small, registry) is not None]
    if not fitting:
        longer = (small for small in crops(op, _LONG_CROPS, most=1) if rebuild(name, small, registry) is not None)
        fitting = list(itertools.islice(longer, 1))
    whole = _pairs(op) <= (_SMALL if fitting else _AFFORDABLE)
    for small in fitting:
        key = (name, small)
        if key not in seen:
            seen[key] = _check(name, small, registry, KINDS, True, problems)
        if seen[key].problem:
            return seen[key]
        errors = _worst_of(errors, seen[key].errors)
    at_size = _check(name, op, registry, ("typical",), whole, problems)
    errors = _worst_of(errors, at_size.errors)
    missing = () if at_size.problem or whole or fitting else _needs_all(op)
    if not missing:
        return Verdict(at_size.problem, errors)
    what = " and ".join(missing)
    problem = f"the {what} cannot be compared: it declines every cut of the op, which is too large to compare whole"
    return Verdict(problem, errors, missing)


def _needs_all(op: AttentionOp) -> tuple[str, ...]:
    """What is wanted and cannot be compared by some rows."""
    wanted = {"gradients": bool(op.grad), "state": op.outputs.state, "dropout": op.dropout_p > 0}
    return tuple(name for name, on in wanted.items() if on)


def crops(op: AttentionOp, lengths: tuple[int, ...] = _CROPS, most: int = 3) -> Iterator[AttentionOp]:
    """The op cut to small lengths and batch, with equal lengths staying equal and the longer side staying longer.

    Args:
        op: a canonical op; one that is small already is its own cut. lengths: what to cut to. most: sequences kept.
    """
    if _pairs(op) <= _SMALL:
        yield op
        return
    known: set[AttentionOp] = set()
    for length in lengths:
        sq, skv = min(op.Sq, length), min(op.Skv, length)
        if op.Sq != op.Skv and sq == skv:
            more = 19 if length % 64 else 64
            sq, skv = (sq, min(skv + more, op.Skv)) if op.Skv > op.Sq else (min(sq + more, op.Sq), skv)
        try:
            small = canonicalise(op.resized(min(op.B, most), sq, skv))[0]
        except ValueError:  # a mask whose constants (a block table) fit the op's own lengths alone
            continue
        if small not in known:
            known.add(small)
            yield small


def _pairs(op: AttentionOp) -> int:
    return op.B * op.Hq * op.Sq * op.Skv


def step(run: Run, op: AttentionOp, sample: Sample) -> Callable[[], Any]:
    """What is timed: the forward, or the forward and backward as one when the op needs gradients."""
    q, k, v, t = sample.query, sample.key, sample.value, sample.operands
    if not op.grad and op.query.strides != "bshd":
        return lambda: run(q, k, v, t)
    leaves = [sample.named()[name] for name in op.grad]
    up = torch.ones((op.B, op.Hq, op.Sq, op.Dv), dtype=q.dtype, device=q.device) if leaves else None

    def whole() -> Any:
        result = run(q, k, v, t)
        out = as_used(op, result.out if isinstance(result, Raw) else result)
        return torch.autograd.grad(out, leaves, up, allow_unused=True) if leaves else out

    return whole


def as_used(op: AttentionOp, out: torch.Tensor) -> torch.Tensor:
    """A result as the model takes it: where the heads of a query lie side by side, the next projection wants the result
    so, and who returns another layout has it copied."""
    return out.transpose(1, 2).contiguous().transpose(1, 2) if op.query.strides == "bshd" else out


# --- one candidate on one problem ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Problem:
    """Inputs, copies of them, and what is right: for each block of rows in float64 and in the op's dtype."""

    sample: Sample
    before: dict[str, torch.Tensor]
    blocks: tuple[tuple[tuple[int, int], Raw, Raw], ...]
    upstream: dict[str, torch.Tensor] | None = None
    gradients: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None


Problems = dict[Any, Any]
PROBLEMS = 20  # kept at once: all candidates of an op meet the same ones, and large ones take much memory


def _problem(op: AttentionOp, kind: str, whole: bool, problems: Problems) -> _Problem:
    """The problem, made once for all who share ``problems``."""
    key = (op, kind, whole)
    found = problems.pop(key, None) or _make_problem(op, kind, whole)
    problems[key] = found  # the last used stands last
    while len(problems) > PROBLEMS:
        problems.pop(next(iter(problems)))
    return found


def _make_problem(op: AttentionOp, kind: str, whole: bool) -> _Problem:
    sample = make_sample(op, kind, seed=1)
    before = {n: x.detach().clone() for n, x in sample.named().items()}
    # rows alone do not say what a state should be; the cut problems show it
    speaks = 0 not in (op.B, op.Hq, op.Sq, op.Dv)
    if not speaks or (not whole and op.features & {"state:in", "state:out"}):
        return _Problem(sample, before, ())
    own = getattr(torch, op.dtype)
    if not whole:
        blocks = tuple((r, golden_rows(op, sample, r), golden_rows(op, sample, r, own)) for r in places(op.Sq))
        return _Problem(sample, before, blocks)
    blocks = (((0, op.Sq), golden(op, sample), golden(op, sample, own)),)
    if not op.grad or op.dropout_p > 0:
        return _Problem(sample, before, blocks)
    upstream = _upstream(op, blocks[0][1])
    right, plain = (_reference_gradients(op, sample, upstream, dtype) for dtype in (torch.float64, None))
    return _Problem(sample, before, blocks, upstream, (right, plain))


def _check(
    name: str, op: AttentionOp, registry: Registry, kinds: tuple[str, ...], whole: bool, problems: Problems
) -> Verdict:
    candidate = rebuild(name, op, registry)
    if candidate is None:
        return Verdict("it declines the op")
    run = build(candidate, op).run
    errors: dict[str, float] = {}
    for kind in kinds:
        ready = _problem(op, kind, whole, problems)
        sample, where = ready.sample, f"{kind} inputs, {op}"
        result = run(sample.query, sample.key, sample.value, sample.operands)
        raw = result if isinstance(result, Raw) else Raw(result)
        problem = _changed(sample, ready.before)
        if problem:
            problems.clear()  # what was changed must not spoil the next check
            return Verdict(f"{problem} ({where})", errors)
        problem, found = _compare(op, ready, raw, _LARGE if kind == "large" else 1.0)
        errors = _worst_of(errors, found)
        if op.dropout_p > 0 and whole and kind == "typical" and ready.blocks and not problem:
            problem, off = dropout_problem(op, run, sample, ready.blocks[0][1].out)
            errors = _worst_of(errors, {"dropout": off})
        if problem:
            return Verdict(f"{problem} ({where})", errors)
    plain = op.with_(dropout_p=0.0)
    if op.dropout_p == 0 or rebuild(name, plain, registry) is None:
        return Verdict("", errors)
    without = _check(name, plain, registry, kinds, whole, problems)
    return Verdict(without.problem, _worst_of(errors, without.errors))


def _shape_problem(op: AttentionOp, raw: Raw, sample: Sample) -> str:
    wanted = (op.B, op.Hq, op.Sq, op.Dv)
    if tuple(raw.out.shape) != wanted:
        return f"out has shape {list(raw.out.shape)}, not {list(wanted)}"
    if raw.out.dtype != sample.query.dtype:
        return f"out is {raw.out.dtype}, the query {sample.query.dtype}"
    if op.outputs.lse and (raw.lse is None or tuple(raw.lse.shape) != wanted[:3]):
        return f"lse has shape {None if raw.lse is None else list(raw.lse.shape)}, not {list(wanted[:3])}"
    pairs = (*wanted[:3], op.Skv)
    if op.outputs.weights and (raw.weights is None or tuple(raw.weights.shape) != pairs):
        return f"weights have shape {None if raw.weights is None else list(raw.weights.shape)}, not {list(pairs)}"
    return "no state was returned" if op.outputs.state and raw.state is None else ""


def _compare(op: AttentionOp, ready: _Problem, raw: Raw, loose: float) -> tuple[str, dict[str, float]]:
    """What is wrong with a result, and its errors."""
    problem = _shape_problem(op, raw, ready.sample)
    errors: dict[str, float] = {}
    if problem:
        return problem, errors
    for rows, want, usual in ready.blocks:
        parts: list[tuple[str, Any, Any, Any]] = []
        if op.dropout_p == 0:
            parts.append(("out", raw.out, want.out, usual.out))
        elif loose == 1.0 and not reference.finite(raw.out):  # lse, weights and state are those before dropout
            return "the output is not finite", errors
        if op.outputs.lse:
            parts.append(("lse", raw.lse, want.lse, usual.lse))
        if op.outputs.weights:
            parts.append(("weights", raw.weights, want.weights, usual.weights))
        if op.outputs.state:
            parts += _states(raw, want, usual)
        for quantity, got, right, plain in parts:
            part = got if quantity == "state" else got[:, :, slice(*rows)]
            worst, problem = _error(op.dtype, quantity, part, right, plain, loose)
            errors = _worst_of(errors, {quantity: worst})
            if problem:
                return f"{problem}, rows {rows[0]} to {rows[1]}", errors
    if ready.gradients is not None:
        problem, worst = _gradient_problem(op, ready, raw, loose)
        errors = _worst_of(errors, {"grad": worst})
    return problem, errors


def _states(raw: Raw, want: Raw, usual: Raw) -> list[tuple[str, Any, Any, Any]]:
    """The parts of a returned state with what they should be."""
    got, right, plain = (result.state for result in (raw, want, usual))
    assert got is not None and right is not None and plain is not None  # noqa: PT018 - the specification returns them
    parts = [("state", got.S, right.S, plain.S)]
    return parts if right.z is None else [*parts, ("state", got.z, right.z, plain.z)]


def places(sq: int) -> list[tuple[int, int]]:
    """Rows ``(start, stop)`` at the beginning, the middle and the end of ``sq`` query rows."""
    starts = sorted({0, max(sq // 2 - _ROWS // 2, 0), max(sq - _ROWS, 0)})
    return [(start, min(sq, start + _ROWS)) for start in starts]


def _upstream(op: AttentionOp, want: Raw) -> dict[str, torch.Tensor]:
    """What flows back into each output that has a gradient; nothing into the lse of an empty row, which is -inf."""
    generator = torch.Generator().manual_seed(5)
    found = {"out": torch.randn(want.out.shape, generator=generator).to(getattr(torch, op.dtype))}
    for quantity, x in _differentiable(op, want).items():
        if quantity != "out":
            up = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(state_dtype(found["out"].dtype))
            found[quantity] = torch.where(torch.isfinite(x), up, 0.0)
    return found


def _differentiable(op: AttentionOp, raw: Raw) -> dict[str, torch.Tensor]:
    """The outputs that gradients flow through."""
    found = {"out": raw.out} | ({"lse": raw.lse} if op.outputs.lse and raw.lse is not None else {})
    if op.outputs.weights and raw.weights is not None:
        found["weights"] = raw.weights
    if op.outputs.state and raw.state is not None:
        found |= {"S": raw.state.S} | ({} if raw.state.z is None else {"z": raw.state.z})
    return found


def _pull(op: AttentionOp, raw: Raw, upstream: dict[str, torch.Tensor], leaves: list[torch.Tensor]) -> Any:
    """Gradients of all outputs together; an output that has no graph gives none, which shows as a wrong gradient."""
    through = {n: x for n, x in _differentiable(op, raw).items() if x.requires_grad}
    if not through:
        return [None] * len(leaves)
    ups = [upstream[name].to(x.device, x.dtype) for name, x in through.items()]
    return torch.autograd.grad(list(through.values()), leaves, ups, allow_unused=True)


def _gradient_problem(op: AttentionOp, ready: _Problem, raw: Raw, loose: float) -> tuple[str, float]:
    """Compare gradients with autograd's through the specification, in float64 and in the op's dtype."""
    assert ready.upstream is not None and ready.gradients is not None  # noqa: PT018 - made together
    leaves = [ready.sample.named()[name] for name in op.grad]
    got = _pull(op, raw, ready.upstream, leaves)
    right, plain = ready.gradients
    worst = 0.0
    for name, mine, want, usual in zip(op.grad, got, right, plain, strict=True):
        mine = torch.zeros_like(want) if mine is None else mine
        error, problem = _error(op.dtype, "grad", mine, want, usual, loose)
        worst = max(worst, error)
        if problem:
            return f"gradient of {name}: {problem}", worst
    return "", worst


def _reference_gradients(
    op: AttentionOp, sample: Sample, upstream: dict[str, torch.Tensor], dtype: torch.dtype | None
) -> list[torch.Tensor]:
    tensors = {n: x.detach().cpu() for n, x in sample.named().items()}
    if dtype is not None:
        tensors = {n: x.to(dtype) if x.is_floating_point() else x for n, x in tensors.items()}
    for name in op.grad:
        tensors[name].requires_grad_()
    leaves = [tensors[name] for name in op.grad]
    own = Sample(tensors.pop("query"), tensors.pop("key"), tensors.pop("value"), tensors)
    part = op if dtype is None else as_double(op)
    found = _pull(op, reference.attention(part, own.query, own.key, own.value, own.operands), upstream, leaves)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def _error(
    dtype: str, quantity: str, got: torch.Tensor, right: torch.Tensor, plain: torch.Tensor, loose: float
) -> tuple[float, str]:
    """The largest error in units of what is allowed, and what is wrong, if anything."""
    got, plain = got.detach().double().cpu(), plain.detach().double().cpu()
    right = right.detach().cpu()
    for kind, test in (("NaN", torch.isnan), ("-inf", torch.isneginf), ("+inf", torch.isposinf)):
        if bool((test(got) & ~test(right) & ~test(plain)).any()):
            return math.inf, f"{quantity} has {kind} where float64 has none"
        if bool((test(right) & ~test(got)).any()):
            return math.inf, f"{quantity} lacks {kind} where float64 has it"
    finite = torch.isfinite(right) & torch.isfinite(plain) & torch.isfinite(got)
    limit = budget(dtype, "out" if quantity == "state" else quantity)
    # the specification's own error, of the tensor as a whole: element by element it is zero by chance here and there
    usual = torch.where(finite, plain - right, 0.0).abs().max() if finite.any() else torch.zeros(())
    allowed = torch.maximum(loose * (limit.absolute + limit.relative * right.abs()), SLACK * usual)
    ratio = torch.where(finite, (got - right).abs() / allowed, 0.0)
    worst = float(ratio.max()) if ratio.numel() else 0.0
    if worst <= 1.0:
        return worst, ""
    at = (ratio == ratio.max()).nonzero()[0].tolist()
    where = tuple(at)
    return (
        worst,
        f"{quantity} is {worst:.3g} times what is allowed off at {at}: {got[where]:.6g}, not {right[where]:.6g}",
    )


def _changed(sample: Sample, before: dict[str, torch.Tensor]) -> str:
    for name, x in sample.named().items():
        if not torch.equal(x.detach().nan_to_num(), before[name].nan_to_num()):
            return f"it changes its input {name}"
    return ""


def _worst_of(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {name: max(a.get(name, 0.0), b.get(name, 0.0)) for name in {**a, **b}}
