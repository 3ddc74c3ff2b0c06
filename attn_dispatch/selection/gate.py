"""The numerics gate: no candidate is timed before it has been right.

A candidate is compared with float64 on a problem cut to a size where that is cheap, with each kind of sample of
`samples.KINDS` (large logits, ragged lengths and empty rows, views), values, lse and gradients; and then at the size
that is tuned, for rows at the beginning, the middle and the end. An element may be off by the budget of
`attn_dispatch.budgets`, or by `SLACK` times the error that the specification itself makes in the op's dtype, whichever
is more: on hard inputs the second is the yardstick (as in PyTorch's own tests).
"""

from __future__ import annotations

import functools
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
from attn_dispatch.selection.samples import KINDS, Sample, as_double, golden, golden_rows, make_sample

__all__ = ["SLACK", "Verdict", "crops", "run_gate", "step"]

SLACK = 8.0
# Rounding a logit of some hundreds changes its exponential by so many roundings: what `large` inputs may be off more.
_LARGE = 100.0
_ROWS = 8  # rows compared at each of three places of a large problem
_CROP = (61, 130)  # lengths of the cut problems: neither is a multiple of what kernels tile by
_LONG_CROP = (301, 602, 1203)


@dataclass(frozen=True)
class Verdict:
    """What the gate says of a candidate.

    Args:
        problem: what is wrong, with the sample on which it is; empty when it may be timed.
        errors: the largest error by quantity (``out lse grad``), in units of what is allowed.
    """

    problem: str = ""
    errors: dict[str, float] = field(default_factory=dict)


def run_gate(name: str, op: AttentionOp, registry: Registry, seen: dict[Any, Verdict] | None = None) -> Verdict:
    """Check one candidate on an op.

    Args:
        name: the candidate. op: a canonical op. registry: where the name is registered.
        seen: verdicts on cut problems, kept over the ops of one session: many sizes share one cut problem.
    """
    seen = {} if seen is None else seen
    errors: dict[str, float] = {}
    fitting = [small for small in crops(op) if rebuild(name, small, registry) is not None]
    if not fitting:  # forms that only pay for long inputs decline short ones
        longer = (small for small in crops(op, _LONG_CROP) if rebuild(name, small, registry) is not None)
        fitting = list(itertools.islice(longer, 1))
    for small in fitting:
        key = (name, small)
        if key not in seen:
            seen[key] = _check(name, small, registry, KINDS, whole=True)
        if seen[key].problem:
            return seen[key]
        errors = _worst_of(errors, seen[key].errors)
    at_size = _check(name, op, registry, ("typical",), whole=_is_small(op))
    return Verdict(at_size.problem, _worst_of(errors, at_size.errors))


def crops(op: AttentionOp, lengths: tuple[int, ...] = _CROP) -> Iterator[AttentionOp]:
    """The op cut to small lengths, with equal lengths staying equal and the longer side staying longer."""
    if _is_small(op):
        yield op
        return
    for length in lengths:
        if length >= max(op.Sq, op.Skv):
            return
        sq, skv = min(op.Sq, length), min(op.Skv, length)
        if op.Sq != op.Skv and sq == skv:
            sq, skv = (sq, skv + 19) if op.Skv > op.Sq else (sq + 19, skv)
        try:
            yield canonicalise(op.resized(min(op.B, 3 if lengths is _CROP else 1), sq, skv))[0]
        except ValueError:  # a mask whose constants (a block table) fit the op's own lengths alone
            continue


def _is_small(op: AttentionOp) -> bool:
    return op.B * op.Hq * op.Sq * op.Skv <= 1 << 20


def step(run: Run, op: AttentionOp, sample: Sample) -> Callable[[], Any]:
    """What is timed: the forward, or the forward and backward as one when the op needs gradients."""
    q, k, v, t = sample.query, sample.key, sample.value, sample.operands
    if not op.grad:
        return lambda: run(q, k, v, t)
    leaves = [sample.named()[name] for name in op.grad]
    up = torch.ones((op.B, op.Hq, op.Sq, op.Dv), dtype=q.dtype, device=q.device)

    def both() -> Any:
        result = run(q, k, v, t)
        out = result.out if isinstance(result, Raw) else result
        return torch.autograd.grad(out, leaves, up, allow_unused=True)

    return both


# --- one candidate on one problem ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Problem:
    """Inputs, copies of them, and what is right: for each block of rows in float64 and in the op's dtype."""

    sample: Sample
    before: dict[str, torch.Tensor]
    blocks: tuple[tuple[tuple[int, int], Raw, Raw], ...]
    upstream: torch.Tensor | None = None
    gradients: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None


@functools.lru_cache(maxsize=12)  # all candidates of an op meet the same problems
def _problem(op: AttentionOp, kind: str, whole: bool) -> _Problem:
    sample = make_sample(op, kind, seed=1)
    before = {n: x.detach().clone() for n, x in sample.named().items()}
    # rows alone do not say what a state should be; the cut problems show it
    speaks = op.dropout_p == 0 and 0 not in (op.B, op.Hq, op.Sq, op.Dv)
    if not speaks or (not whole and op.features & {"state:in", "state:out"}):
        return _Problem(sample, before, ())
    own = getattr(torch, op.dtype)
    if not whole:
        blocks = tuple((r, golden_rows(op, sample, r), golden_rows(op, sample, r, own)) for r in _places(op.Sq))
        return _Problem(sample, before, blocks)
    blocks = (((0, op.Sq), golden(op, sample), golden(op, sample, own)),)
    if not op.grad:
        return _Problem(sample, before, blocks)
    shape = (op.B, op.Hq, op.Sq, op.Dv)
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(own)
    right, plain = (_reference_gradients(op, sample, upstream, dtype) for dtype in (torch.float64, None))
    return _Problem(sample, before, blocks, upstream, (right, plain))


def _check(name: str, op: AttentionOp, registry: Registry, kinds: tuple[str, ...], whole: bool) -> Verdict:
    candidate = rebuild(name, op, registry)
    if candidate is None:
        return Verdict("it declines the op")
    run = build(candidate, op).run
    errors: dict[str, float] = {}
    for kind in kinds:
        ready = _problem(op, kind, whole)
        sample, where = ready.sample, f"{kind} inputs, {op}"
        result = run(sample.query, sample.key, sample.value, sample.operands)
        raw = result if isinstance(result, Raw) else Raw(result)
        problem = _changed(sample, ready.before)
        if problem:
            _problem.cache_clear()  # what was changed must not spoil the next check
            return Verdict(f"{problem} ({where})", errors)
        if op.dropout_p > 0:  # random: shape, dtype and finiteness are all that can be said
            problem = _shape_problem(op, raw, sample)
            problem = problem or ("" if reference.finite(raw.out) or kind != "typical" else "the output is not finite")
        else:
            problem, found = _compare(op, ready, raw, _LARGE if kind == "large" else 1.0)
            errors = _worst_of(errors, found)
        if problem:
            return Verdict(f"{problem} ({where})", errors)
    return Verdict("", errors)


def _shape_problem(op: AttentionOp, raw: Raw, sample: Sample) -> str:
    wanted = (op.B, op.Hq, op.Sq, op.Dv)
    if tuple(raw.out.shape) != wanted:
        return f"out has shape {list(raw.out.shape)}, not {list(wanted)}"
    if raw.out.dtype != sample.query.dtype:
        return f"out is {raw.out.dtype}, the query {sample.query.dtype}"
    if op.outputs.lse and (raw.lse is None or tuple(raw.lse.shape) != wanted[:3]):
        return f"lse has shape {None if raw.lse is None else list(raw.lse.shape)}, not {list(wanted[:3])}"
    return "no state was returned" if op.outputs.state and raw.state is None else ""


def _compare(op: AttentionOp, ready: _Problem, raw: Raw, loose: float) -> tuple[str, dict[str, float]]:
    """What is wrong with a result, and its errors."""
    problem = _shape_problem(op, raw, ready.sample)
    errors: dict[str, float] = {}
    if problem:
        return problem, errors
    for rows, want, usual in ready.blocks:
        parts: list[tuple[str, Any, Any, Any]] = [("out", raw.out, want.out, usual.out)]
        if op.outputs.lse:
            parts.append(("lse", raw.lse, want.lse, usual.lse))
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


def _places(sq: int) -> list[tuple[int, int]]:
    starts = sorted({0, max(sq // 2 - _ROWS // 2, 0), max(sq - _ROWS, 0)})
    return [(start, min(sq, start + _ROWS)) for start in starts]


def _gradient_problem(op: AttentionOp, ready: _Problem, raw: Raw, loose: float) -> tuple[str, float]:
    """Compare gradients with autograd's through the specification, in float64 and in the op's dtype."""
    assert ready.upstream is not None and ready.gradients is not None  # noqa: PT018 - made together
    leaves = [ready.sample.named()[name] for name in op.grad]
    got = torch.autograd.grad(raw.out, leaves, ready.upstream.to(raw.out.device), allow_unused=True)
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
    op: AttentionOp, sample: Sample, upstream: torch.Tensor, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    tensors = {n: x.detach().cpu() for n, x in sample.named().items()}
    if dtype is not None:
        tensors = {n: x.to(dtype) if x.is_floating_point() else x for n, x in tensors.items()}
    for name in op.grad:
        tensors[name].requires_grad_()
    leaves = [tensors[name] for name in op.grad]
    own = Sample(tensors.pop("query"), tensors.pop("key"), tensors.pop("value"), tensors)
    out = reference.attention(op, own.query, own.key, own.value, own.operands).out if dtype is None else None
    out = _double_out(op, own) if out is None else out
    found = torch.autograd.grad(out, leaves, upstream.to(out.dtype), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]


def _double_out(op: AttentionOp, sample: Sample) -> torch.Tensor:
    return reference.attention(as_double(op), sample.query, sample.key, sample.value, sample.operands).out


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
