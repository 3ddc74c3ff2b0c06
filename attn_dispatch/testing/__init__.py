"""The contract suite: prove that a backend computes what it claims, and refuses what it does not.

`check` runs one candidate on one case of the table in `attn_dispatch.testing.cases`. A case is verified against a
float64 golden written here from DESIGN section 2 (it shares no code with the reference), or refused for a declared
reason. There is no third result: anything else is an AssertionError.

Example:
    >>> from attn_dispatch.testing import BY_ID, check
    >>> check("eager", BY_ID["causal"]).verdict.name
    'VERIFIED'
    >>> check("sdpa_math", BY_ID["softcap"]).verdict.name
    'REFUSED'
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from attn_dispatch import dispatch
from attn_dispatch.budgets import BUDGETS, Budget, budget
from attn_dispatch.capability import Reason
from attn_dispatch.frontend import Binding
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.passes import canonicalise
from attn_dispatch.plan import make_plan
from attn_dispatch.registry import Registry, current
from attn_dispatch.selection.candidates import Candidate, enumerate_candidates, parse_name, reasons_of
from attn_dispatch.selection.decide import Request
from attn_dispatch.testing.cases import BY_ID, CASES, Case, Inputs, make_inputs
from attn_dispatch.testing.linear import golden_linear

__all__ = [
    "BUDGETS",
    "BY_ID",
    "CASES",
    "Budget",
    "Case",
    "Golden",
    "Result",
    "Verdict",
    "budget",
    "candidates_of",
    "check",
    "check_dispatch",
    "golden",
]


class Verdict(Enum):
    """What a check can say; a wrong result is an AssertionError."""

    VERIFIED = "verified"
    REFUSED = "refused"


class Result(NamedTuple):
    """The verdict, the reasons of a refusal, and the largest error by quantity in units of its budget."""

    verdict: Verdict
    reasons: tuple[Reason, ...] = ()
    errors: dict[str, float] = {}  # noqa: RUF012 - a NamedTuple default, never written to


# --- the golden ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Golden:
    """What is right, float64: out ``[B, Hq, Sq, Dv]``, lse ``[B, Hq, Sq]``, weights, gradients by name, the state."""

    out: torch.Tensor
    lse: torch.Tensor
    weights: torch.Tensor
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def golden(case: Case, inputs: Inputs) -> Golden:
    """Attention of a case in float64, from the dense mask of its predicate; gradients by autograd."""
    leaves = {name: x.detach().double().requires_grad_(name in case.grad) for name, x in _float_tensors(inputs).items()}
    state: dict[str, torch.Tensor] = {}
    if case.linear:
        four = {name: _four(leaves[name], case) for name in ("query", "key", "value")}
        out, weights, state = golden_linear(case, inputs, leaves | four)
        lse = torch.full(out.shape[:3], math.nan)
    else:
        out, lse, weights = _golden_forward(case, inputs, leaves)
    if not case.grad:
        return Golden(out, lse, weights, {}, state)
    wanted = [leaves[name] for name in case.grad]
    loss = _loss(case, out, lse, state)
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    grads = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(case.grad, found, strict=True)}
    state = {name: x.detach() for name, x in state.items()}
    return Golden(out.detach(), lse.detach(), weights.detach(), grads, state)


def _float_tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: x for name, x in inputs.named().items() if x.is_floating_point()}


def _golden_forward(
    case: Case, inputs: Inputs, t: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, allowed = case.sizes, inputs.allowed
    q, k, v = (_four(t[name], case) for name in ("query", "key", "value"))
    bad = torch.isnan(k).any(-1)[:, :1].any(1)  # [B, Skv]: poisoned keys, the same for all heads
    k, v = (torch.where(bad[:, None, :, None], 0.0, x) for x in (k, v))
    kv_head = torch.arange(n.Hq) // max(n.Hq // max(n.Hkv, 1), 1)
    k, v = k[:, kv_head], v[:, kv_head]
    scale = case.scale if case.scale is not None else (1 / math.sqrt(n.D) if n.D else 1.0)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    if case.softcap:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    if inputs.bias is not None:
        # a bias that is an argument itself gets a gradient; one that is derived from it (ALiBi) is a constant
        own = next((t[name] for name in ("bias", "attn_mask") if name in t and t[name].ndim >= 2), None)
        scores = scores + (inputs.bias.double() if own is None else own)
    scores = torch.where(allowed, scores, -math.inf)
    logits = scores
    if case.sinks:
        sink = t["sinks"].reshape(1, -1, 1, 1).expand(n.B, n.Hq, n.Sq, 1)
        logits = torch.cat([scores, sink], -1)
    empty = torch.isneginf(logits).all(-1)
    some = torch.where(empty[..., None], 0.0, logits)  # logsumexp of nothing has a NaN gradient
    lse = torch.logsumexp(some, -1) if logits.shape[-1] else torch.zeros_like(some.sum(-1))
    lse = torch.where(empty, -math.inf, lse)
    weights = torch.exp(scores - torch.where(empty, 0.0, lse)[..., None])
    weights = torch.where(scores == -math.inf, 0.0, weights)
    out = torch.einsum("bhij,bhje->bhie", weights, v)
    poisoned = (allowed & bad[:, None, None, :]).any(-1)
    return torch.where(poisoned[..., None], math.nan, out), torch.where(poisoned, math.nan, lse), weights


def _four(x: torch.Tensor, case: Case) -> torch.Tensor:
    if case.layout == "bshd":
        return x.transpose(1, 2)
    if case.rank == 5:
        return x.reshape(-1, *x.shape[2:])
    return x[(None,) * (4 - x.ndim)]


def _loss(
    case: Case, out: torch.Tensor, lse: torch.Tensor | None, state: dict[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """A scalar that weighs every element of the output, and of a finite lse and a state when asked for, differently."""
    gen = torch.Generator().manual_seed(7)
    up = torch.randn(out.shape, generator=gen, dtype=torch.float64)
    loss = (out.double() * up.to(out.dtype).double()).nan_to_num(0.0).sum()
    if case.lse and lse is not None:
        up = torch.randn(lse.shape, generator=gen, dtype=torch.float64)
        loss = loss + (torch.where(torch.isfinite(lse), lse, 0.0).double() * up).sum()
    for name in ("S", "z"):
        if state and name in state:
            up = torch.randn(state[name].shape, generator=gen, dtype=torch.float64)
            loss = loss + (state[name].double() * up).sum()
    return loss


# --- the check -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Prepared:
    inputs: Inputs
    pristine: dict[str, torch.Tensor]
    golden: Golden
    binding: Binding
    operands: dict[str, torch.Tensor]
    op: AttentionOp


_prepared: dict[Case, _Prepared] = {}


def _prepare(case: Case) -> _Prepared:
    if case not in _prepared:
        inputs = make_inputs(case)
        pristine = {name: x.detach().clone() for name, x in inputs.named().items()}
        made = dispatch.plan(inputs.query, inputs.key, inputs.value, **inputs.arguments)
        operands = made.binding.operands(made.tensors)
        op, _ = canonicalise(made.binding.op)
        _prepared[case] = _Prepared(inputs, pristine, golden(case, inputs), made.binding, operands, op)
    return _prepared[case]


def candidates_of(case: Case, registry: Registry | None = None) -> list[Candidate]:
    """Every candidate of a case, legal or not: all chains of rewrites before all backends that exist here.

    Backends that compile for seconds (`Backend.compile_s`) are left out: they are checked by name, on chosen cases.
    """
    registry = registry or current()
    quick = {name: backend for name, backend in registry.backends.items() if backend.compile_s == 0}
    found, _ = enumerate_candidates(_prepare(case).op, Registry(quick, registry.rewrites))
    return found


def check(name: str, case: Case, registry: Registry | None = None) -> Result:
    """Run one candidate on one case.

    Args:
        name: a backend, or a chain such as ``"fold_groups > sdpa_flash"``.
        case: a line of the table. registry: where the name is registered; default the process's own.

    Raises:
        AssertionError: the result is wrong (value, lse, gradient, dtype, shape), an input was changed, or the candidate
            was refused without a declared reason.
    """
    registry = registry or current()
    ready = _prepare(case)
    rewrites, backend = parse_name(name, registry)
    reasons = _refusal(rewrites, backend, ready.op, registry)
    if reasons:
        return Result(Verdict.REFUSED, reasons)
    # decide among little more than this candidate; the rest is what the guard against leaking NaN falls back to
    backends = {n: b for n, b in registry.backends.items() if n in (backend, "eager")}
    kept = {n: r for n, r in registry.rewrites.items() if n in (*rewrites, "bands", "tile_queries")}
    narrow = Registry(backends, kept)
    plan = make_plan(ready.binding, [Request((name,), "the contract suite")], narrow)
    assert plan.name == name, f"asked for {name}, got {plan.name}"
    inputs = ready.inputs
    run = functools.partial(plan.run, inputs.query, inputs.key, inputs.value, ready.operands)
    return Result(Verdict.VERIFIED, (), _run_and_compare(f"{name} on {case.id}", case, ready, run))


def check_dispatch(case: Case, backend: str | None = None) -> Result:
    """`dispatch.attention` on one case, twice: the first call decides, the second goes by the route that it kept.

    Raises:
        AssertionError: as `check`; NoBackendError: ``backend`` cannot run the case.
    """
    ready = _prepare(case)
    inputs = ready.inputs
    run = functools.partial(
        dispatch.attention, inputs.query, inputs.key, inputs.value, **inputs.arguments, backend=backend
    )
    _run_and_compare(f"the first call of {case.id}", case, ready, run)
    return Result(Verdict.VERIFIED, (), _run_and_compare(f"the second call of {case.id}", case, ready, run))


def _run_and_compare(label: str, case: Case, ready: _Prepared, run: Callable[[], Any]) -> dict[str, float]:
    try:
        return _compare(label, case, ready, run())
    finally:
        changed = [n for n, x in ready.inputs.named().items() if not _same_bits(x, ready.pristine[n])]
        if changed:
            _prepared.pop(case, None)  # what was changed must not spoil the next check
            raise AssertionError(f"{label}: changed its input {', '.join(changed)} in place")


def _refusal(rewrites: tuple[str, ...], backend: str, op: AttentionOp, registry: Registry) -> tuple[Reason, ...]:
    """The reasons against a candidate, each checked to be one that was declared; empty when it is legal."""
    inner = op
    for rewrite in rewrites:
        applied = registry.rewrites[rewrite].apply(inner)
        if isinstance(applied, Reason):
            assert _is_said(applied), f"{rewrite} refused without a reason: {applied!r}"
            return (applied,)
        inner = applied.inner
    reasons = reasons_of(registry.backends[backend], inner)
    capability = registry.backends[backend].capability_on(inner.device)
    for reason in reasons:
        where = f"{backend} refused {inner}: {reason!r}"
        assert _is_said(reason), where
        if reason.code == "feature":
            assert reason.field in inner.features, f"{where}, a feature that the op does not have"
            assert reason.field not in capability.features, f"{where}, a feature that it declares"
        elif reason.code == "dtype":
            assert inner.dtype not in capability.dtypes, where
        elif reason.code == "device":
            assert inner.device not in capability.devices or registry.backends[backend].unavailable(), where
    return reasons


def _is_said(reason: Reason) -> bool:
    return reason.code != "error" and bool(str(reason))


def _compare(label: str, case: Case, ready: _Prepared, result: Any) -> dict[str, float]:
    want, n = ready.golden, case.sizes
    errors: dict[str, float] = {}
    state: dict[str, torch.Tensor] = {}
    if case.state:
        result, found = result
        state = {name: x for name, x in zip(("S", "z", "length"), found, strict=True) if x is not None}
        _compare_state(label, case, ready, state, errors)
    out, lse, weights = _parts(case, result)
    query = ready.inputs.query
    shape = (*query.shape[:-1], n.Dv)
    assert tuple(out.shape) == shape, f"{label}: out has shape {tuple(out.shape)}, not {shape}"
    assert out.dtype == query.dtype, f"{label}: out is {out.dtype} for a query of {query.dtype}"
    errors["out"] = _worst(f"{label}: out", _four(out, case), want.out, budget(case.dtype, "out"))
    if case.lse:
        acc = torch.float64 if query.dtype == torch.float64 else torch.float32
        assert lse.dtype == acc, f"{label}: lse is {lse.dtype}, not {acc}"
        errors["lse"] = _worst(f"{label}: lse", lse.reshape(want.lse.shape), want.lse, budget(case.dtype, "lse"))
    if case.weights:
        got = weights.reshape(want.weights.shape)
        errors["weights"] = _worst(f"{label}: weights", got, want.weights, budget(case.dtype, "weights"))
    if case.grad:
        leaves = [ready.inputs.named()[name] for name in case.grad]
        lse4 = None if lse is None else lse.reshape(want.lse.shape)
        grads = torch.autograd.grad(_loss(case, _four(out, case), lse4, state), leaves)
        for name, got in zip(case.grad, grads, strict=True):
            limit = budget(case.dtype, "grad")
            errors["grad"] = max(
                errors.get("grad", 0.0), _worst(f"{label}: grad of {name}", got, want.grads[name], limit)
            )
    return errors


def _compare_state(
    label: str, case: Case, ready: _Prepared, state: dict[str, torch.Tensor], errors: dict[str, float]
) -> None:
    want = ready.golden.state
    assert set(state) == set(want), f"{label}: the state has {sorted(state)}, not {sorted(want)}"
    acc = torch.float64 if case.dtype == "float64" else torch.float32
    for name in ("S", "z"):
        if name in state:
            assert state[name].dtype == acc, f"{label}: state.{name} is {state[name].dtype}, not {acc}"
            limit = budget(str(acc).removeprefix("torch."), "grad")  # sums over all keys, as gradients are
            errors["state"] = max(errors.get("state", 0.0), _worst(f"{label}: {name}", state[name], want[name], limit))
            for given in ready.inputs.linear.values():
                assert state[name].data_ptr() != given.data_ptr(), f"{label}: state.{name} is the tensor that went in"
    assert state["length"].tolist() == want["length"].tolist(), f"{label}: length {state['length'].tolist()}"


def _parts(case: Case, result: Any) -> tuple[torch.Tensor, Any, Any]:
    if case.lse and case.weights:
        return result[0], result[1], result[2]
    if case.lse:
        return result[0], result[1], None
    return (result[0], None, result[1]) if case.weights else (result, None, None)


def _worst(label: str, got: torch.Tensor, want: torch.Tensor, limit: Budget) -> float:
    """The largest error in units of the budget; NaN and Inf must stand where they are wanted and nowhere else."""
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape, f"{label} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    for kind, test in (("NaN", torch.isnan), ("-inf", torch.isneginf), ("+inf", torch.isposinf)):
        wrong = test(got) != test(want)
        assert not wrong.any(), f"{label}: {kind} is or is missing at {wrong.nonzero()[0].tolist()}"
    finite = torch.isfinite(want)
    if not finite.any():
        return 0.0
    difference = torch.where(finite, got - want, 0.0).abs() / (limit.absolute + limit.relative * want.abs())
    difference = torch.where(finite, difference, 0.0)
    worst = float(difference.max())
    at = (difference == difference.max()).nonzero()[0].tolist()
    assert worst <= 1.0, (
        f"{label} is {worst:.3g} times its budget at {at}: {got[tuple(at)]:.6g}, not {want[tuple(at)]:.6g}"
    )
    return worst


def _same_bits(x: torch.Tensor, was: torch.Tensor) -> bool:
    x = x.detach()
    return torch.equal(torch.isnan(x), torch.isnan(was)) and torch.equal(x.nan_to_num(), was.nan_to_num())
