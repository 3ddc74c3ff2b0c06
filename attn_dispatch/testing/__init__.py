"""The contract suite: prove that a backend computes what it claims, and refuses what it does not.

`check` runs one candidate on one case of the table in `attn_dispatch.testing.cases`. A case is verified against a
float64 golden written here from DESIGN section 2 (it shares no code with the reference), or refused for a declared
reason. There is no third result: anything else is a `CaseError`, which is an AssertionError.

Example:
    >>> from attn_dispatch.testing import BY_ID, check
    >>> check("eager", BY_ID["causal"]).verdict.name
    'VERIFIED'
    >>> check("sdpa_math", BY_ID["softcap"]).verdict.name
    'REFUSED'
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from attn_dispatch.testing.goldens import Golden, as_four, golden, loss_of

__all__ = [
    "BUDGETS",
    "BY_ID",
    "CASES",
    "Budget",
    "Case",
    "CaseError",
    "Golden",
    "Result",
    "Verdict",
    "budget",
    "candidates_of",
    "check",
    "check_dispatch",
    "golden",
    "op_of",
    "outputs_of",
    "worst_error",
]


class Verdict(Enum):
    """What a check can say; a wrong result is a `CaseError`."""

    VERIFIED = "verified"
    REFUSED = "refused"


class CaseError(AssertionError):
    """A case that a candidate is wrong on.

    Args:
        kind: ``refusal`` (for a reason that it did not declare), ``mutation`` (it changed an input), ``contract`` (a
            dtype, a shape, a tensor that is not its own), ``value`` (numbers).
        quantity: which result, ``out lse weights grad state``; empty where it means nothing.
    """

    def __init__(self, kind: str, text: str, quantity: str = "") -> None:
        self.kind, self.quantity = kind, quantity
        super().__init__(text)


def _require(holds: bool, kind: str, text: str, quantity: str = "") -> None:
    if not holds:
        raise CaseError(kind, text, quantity)


class Result(NamedTuple):
    """The verdict, the reasons of a refusal, and the largest error by quantity in units of its budget."""

    verdict: Verdict
    reasons: tuple[Reason, ...] = ()
    errors: dict[str, float] = {}  # noqa: RUF012 - a NamedTuple default, never written to


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


def op_of(case: Case) -> AttentionOp:
    """The canonical op of a case."""
    return _prepare(case).op


def candidates_of(case: Case, registry: Registry | None = None) -> list[Candidate]:
    """Every candidate of a case, legal or not: all chains of rewrites before all backends that exist here.

    Backends that compile for seconds (`Backend.compile_s`) are left out: they are checked by name, on chosen cases.
    """
    registry = registry or current()
    quick = {name: backend for name, backend in registry.backends.items() if backend.compile_s == 0}
    found, _ = enumerate_candidates(_prepare(case).op, replace(registry, backends=quick))
    return found


def check(name: str, case: Case, registry: Registry | None = None) -> Result:
    """Run one candidate on one case.

    Args:
        name: a backend, or a chain such as ``"fold_groups > sdpa_flash"``.
        case: a line of the table. registry: where the name is registered; default the process's own.

    Raises:
        CaseError: the result is wrong (value, lse, gradient, dtype, shape), an input was changed, or the
            candidate was refused without a declared reason. It is an AssertionError.
    """
    registry = registry or current()
    ready = _prepare(case)
    rewrites, backend = parse_name(name, registry)
    reasons = _refusal(rewrites, backend, ready.op, registry)
    if reasons:
        return Result(Verdict.REFUSED, reasons)
    return Result(
        Verdict.VERIFIED, (), _run_and_compare(f"{name} on {case.id}", case, ready, _run_of(name, case, registry))
    )


def outputs_of(name: str, case: Case, registry: Registry | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run one candidate on a case that it does not refuse, and compare nothing.

    Returns:
        out ``[B, Hq, Sq, Dv]``, and lse ``[B, Hq, Sq]`` where the case asks for it.
    """
    result = _run_of(name, case, registry or current())()
    out, lse, _ = _parts(case, result[0] if case.state else result)
    n = case.sizes
    return as_four(out, case).detach(), None if lse is None else lse.detach().reshape(n.B, n.Hq, n.Sq)


def _run_of(name: str, case: Case, registry: Registry) -> Callable[[], Any]:
    """The candidate's plan on the tensors of a case."""
    ready, (rewrites, backend) = _prepare(case), parse_name(name, registry)
    # decide among little more than this candidate; the rest is what the guard against leaking NaN falls back to
    backends = {n: b for n, b in registry.backends.items() if n in (backend, "eager")}
    kept = {n: r for n, r in registry.rewrites.items() if n in (*rewrites, "bands", "tile_queries")}
    narrow = Registry(backends, kept, known_bad=registry.known_bad)  # without origins: its errors come as they are
    plan = make_plan(ready.binding, [Request((name,), "the contract suite")], narrow)
    assert plan.name == name, f"asked for {name}, got {plan.name}"
    inputs = ready.inputs
    return functools.partial(plan.run, inputs.query, inputs.key, inputs.value, ready.operands)


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
            raise CaseError("mutation", f"{label}: changed its input {', '.join(changed)} in place")


def _refusal(rewrites: tuple[str, ...], backend: str, op: AttentionOp, registry: Registry) -> tuple[Reason, ...]:
    """The reasons against a candidate, each checked to be one that was declared; empty when it is legal."""
    inner = op
    for rewrite in rewrites:
        applied = registry.rewrites[rewrite].apply(inner)
        if isinstance(applied, Reason):
            _require(_is_said(applied), "refusal", f"{rewrite} refused without a reason: {applied!r}")
            return (applied,)
        inner = applied.inner
    reasons = reasons_of(registry.backends[backend], inner, registry)
    capability = registry.backends[backend].capability_on(inner.device)
    for reason in reasons:
        where = f"{backend} refused {inner}: {reason!r}"
        _require(_is_said(reason), "refusal", where)
        if reason.code == "feature":
            _require(reason.field in inner.features, "refusal", f"{where}, a feature that the op does not have")
            _require(reason.field not in capability.features, "refusal", f"{where}, a feature that it declares")
        elif reason.code == "dtype":
            _require(inner.dtype not in capability.dtypes, "refusal", f"{where}, a dtype that it declares")
        elif reason.code == "device":
            away = inner.device not in capability.devices or registry.backends[backend].unavailable() is not None
            _require(away, "refusal", f"{where}, a device that it declares")
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
    _require(tuple(out.shape) == shape, "contract", f"{label}: out has shape {tuple(out.shape)}, not {shape}", "out")
    _require(out.dtype == query.dtype, "contract", f"{label}: out is {out.dtype} for a query of {query.dtype}", "out")
    shared = [n for n, x in ready.inputs.named().items() if out.numel() and _share(out, x)]
    _require(not shared, "contract", f"{label}: out shares its memory with {', '.join(shared)}", "out")
    errors["out"] = worst_error(f"{label}: out", as_four(out, case), want.out, budget(case.dtype, "out"))
    if case.lse:
        acc = torch.float64 if query.dtype == torch.float64 else torch.float32
        _require(lse.dtype == acc, "contract", f"{label}: lse is {lse.dtype}, not {acc}", "lse")
        errors["lse"] = worst_error(f"{label}: lse", lse.reshape(want.lse.shape), want.lse, budget(case.dtype, "lse"))
    if case.weights:
        got = weights.reshape(want.weights.shape)
        errors["weights"] = worst_error(f"{label}: weights", got, want.weights, budget(case.dtype, "weights"))
    if case.grad:
        leaves = [ready.inputs.named()[name] for name in case.grad]
        lse4 = None if lse is None else lse.reshape(want.lse.shape)
        grads = torch.autograd.grad(loss_of(case, as_four(out, case), lse4, state), leaves)
        for name, got in zip(case.grad, grads, strict=True):
            limit = budget(case.dtype, "grad")
            errors["grad"] = max(
                errors.get("grad", 0.0), worst_error(f"{label}: grad of {name}", got, want.grads[name], limit)
            )
    return errors


def _compare_state(
    label: str, case: Case, ready: _Prepared, state: dict[str, torch.Tensor], errors: dict[str, float]
) -> None:
    want = ready.golden.state
    same = set(state) == set(want)
    _require(same, "contract", f"{label}: the state has {sorted(state)}, not {sorted(want)}", "state")
    acc = torch.float64 if case.dtype == "float64" else torch.float32
    for name in ("S", "z"):
        if name in state:
            wrong = f"{label}: state.{name} is {state[name].dtype}, not {acc}"
            _require(state[name].dtype == acc, "contract", wrong, "state")
            limit = budget(str(acc).removeprefix("torch."), "grad")  # sums over all keys, as gradients are
            errors["state"] = max(
                errors.get("state", 0.0), worst_error(f"{label}: {name}", state[name], want[name], limit)
            )
            for given in ready.inputs.linear.values():
                own = state[name].data_ptr() != given.data_ptr()
                _require(own, "contract", f"{label}: state.{name} is the tensor that went in", "state")
    counted = state["length"].tolist()
    _require(counted == want["length"].tolist(), "value", f"{label}: length {counted}", "state")


def _parts(case: Case, result: Any) -> tuple[torch.Tensor, Any, Any]:
    if case.lse and case.weights:
        return result[0], result[1], result[2]
    if case.lse:
        return result[0], result[1], None
    return (result[0], None, result[1]) if case.weights else (result, None, None)


def worst_error(label: str, got: torch.Tensor, want: torch.Tensor, limit: Budget) -> float:
    """The largest error in units of the budget; NaN and Inf must stand where they are wanted and nowhere else."""
    got, want = got.detach().double(), want.detach().double()
    of = label.rpartition(": ")[2].split(" ")[0]  # out, lse, weights, grad, S, z
    quantity = "state" if of in ("S", "z") else of
    shapes = f"{label} has shape {tuple(got.shape)}, not {tuple(want.shape)}"
    _require(got.shape == want.shape, "contract", shapes, quantity)
    for kind, test in (("NaN", torch.isnan), ("-inf", torch.isneginf), ("+inf", torch.isposinf)):
        wrong = test(got) != test(want)
        if wrong.any():
            text = f"{label}: {kind} is or is missing at {wrong.nonzero()[0].tolist()}"
            raise CaseError("value", text, quantity)
    finite = torch.isfinite(want)
    if not finite.any():
        return 0.0
    difference = torch.where(finite, got - want, 0.0).abs() / (limit.absolute + limit.relative * want.abs())
    difference = torch.where(finite, difference, 0.0)
    worst = float(difference.max())
    at = (difference == difference.max()).nonzero()[0].tolist()
    text = f"{label} is {worst:.3g} times its budget at {at}: {got[tuple(at)]:.6g}, not {want[tuple(at)]:.6g}"
    _require(worst <= 1.0, "value", text, quantity)
    return worst


def _share(x: torch.Tensor, other: torch.Tensor) -> bool:
    return x.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _same_bits(x: torch.Tensor, was: torch.Tensor) -> bool:
    x = x.detach()
    return torch.equal(torch.isnan(x), torch.isnan(was)) and torch.equal(x.nan_to_num(), was.nan_to_num())
