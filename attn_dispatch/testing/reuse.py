"""One executable, run again: with fresh values in the same memory, and at other sizes of its bucket.

A route keeps an executable for all calls of its bucket, so it may bake in no size that a length or the batch decides,
remember no input by its address, and hand out no buffer that the next call writes to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from attn_dispatch import dispatch
from attn_dispatch.backend import Raw, Run
from attn_dispatch.budgets import Budget, budget
from attn_dispatch.errors import InputError
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.passes import canonicalise
from attn_dispatch.registry import Registry
from attn_dispatch.selection.candidates import rebuild
from attn_dispatch.testing import CaseError, worst_error
from attn_dispatch.testing.cases import Case, Inputs, make_inputs
from attn_dispatch.testing.goldens import golden

__all__ = ["neighbours", "reuse_problem"]

# Budgets were set for the table's own values; others round a little worse, and what this looks for is far off.
_LOOSE = 4.0
# added to (B, Sq, Skv); what leaves the bucket is passed over
_STEPS = ((0, 0, 3), (0, 3, 3), (0, 0, -1), (0, -1, -1), (1, 2, 2))


def reuse_problem(backend: str, case: Case, registry: Registry) -> str:
    """What is wrong when a backend's executable for a case is run several times; empty when nothing is.

    Args:
        backend: its name. case: one that it is right on when it is run once. registry: where it is registered.

    Example:
        >>> from attn_dispatch.registry import current
        >>> from attn_dispatch.testing import BY_ID
        >>> reuse_problem("sdpa_math", BY_ID["causal"], current())
        ''
    """
    if case.grad or case.poison:  # a backend need not keep NaN in by itself: the plan's guard does
        return ""
    inputs = make_inputs(case)
    op, q, k, v, operands = _bound(inputs)
    run = registry.backend(backend).compile(op).run
    first = _tensors(run(q, k, v, operands))
    was = {name: x.clone() for name, x in first.items()}
    problem = ""
    if case.strides != "expanded":  # no memory of its own to write to
        for x, factor in ((inputs.query, -0.75), (inputs.key, 0.875), (inputs.value, -1.25)):
            x.mul_(factor)
        problem = _problem(case, inputs, run(q, k, v, operands), "with fresh values in the same tensors")
    problem = problem or _problem_at_sizes(case, op, run, backend, registry)
    changed = [name for name, x in first.items() if not torch.equal(x.nan_to_num(), was[name].nan_to_num())]
    problem = problem or (f"a later run changed the {changed[0]} that the first returned" if changed else "")
    return problem or _problem_at_batches(case, backend, registry)


def _problem_at_batches(case: Case, backend: str, registry: Registry) -> str:
    """As `_problem_at_sizes`, compiled for a batch of 3: those of 1 and 2 are buckets of their own."""
    wide = replace(case, sizes=replace(case.sizes, B=3))
    if case.rank != 4 or case.sizes.B in (0, 3):
        return ""
    op = _op_of(wide)
    if op is None or rebuild(backend, op, registry) is None:
        return ""
    return _problem_at_sizes(wide, op, registry.backend(backend).compile(op).run, backend, registry, ((1, 0, 0),))


def _problem_at_sizes(
    case: Case,
    op: AttentionOp,
    run: Run,
    backend: str,
    registry: Registry,
    steps: tuple[tuple[int, int, int], ...] = _STEPS,
) -> str:
    for other in neighbours(case, op, backend, registry, steps):
        theirs = make_inputs(other)
        _, q, k, v, operands = _bound(theirs)
        n = other.sizes
        where = f"at B {n.B}, Sq {n.Sq}, Skv {n.Skv} (compiled for {case.sizes.B}, {case.sizes.Sq}, {case.sizes.Skv})"
        try:
            problem = _problem(other, theirs, run(q, k, v, operands), where)
        except Exception as error:  # noqa: BLE001 - a stranger's backend may raise anything; it is the result
            return f"run again {where}, it raised {type(error).__name__}: {str(error)[:200]}"
        if problem:
            return problem
    return ""


def neighbours(
    case: Case,
    op: AttentionOp,
    backend: str,
    registry: Registry,
    steps: tuple[tuple[int, int, int], ...] = _STEPS,
) -> Iterator[Case]:
    """The case at other sizes, where that is the same op in the same bucket and the backend takes it."""
    n = case.sizes
    for b, sq, skv in steps:
        sizes = replace(n, B=n.B + b, Sq=n.Sq + sq, Skv=n.Skv + skv)
        # a call of another rank says its batch otherwise
        if min(n.B, n.Sq, n.Skv, sizes.B, sizes.Sq, sizes.Skv) < 1 or (b and case.rank != 4):
            continue
        other = replace(case, sizes=sizes)
        theirs = _op_of(other)
        if theirs is None:
            continue
        same = theirs.bucketed() == op.bucketed() and theirs.resized(op.B, op.Sq, op.Skv) == op
        if same and rebuild(backend, theirs, registry) is not None:
            yield other


def _bound(inputs: Inputs) -> tuple[AttentionOp, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The canonical op of a call, and its tensors as an executable gets them."""
    made = dispatch.plan(inputs.query, inputs.key, inputs.value, **inputs.arguments)
    q, k, v = made.binding.form.pack(inputs.query, inputs.key, inputs.value)
    return canonicalise(made.binding.op)[0], q, k, v, dict(made.binding.operands(made.tensors))


def _op_of(case: Case) -> AttentionOp | None:
    try:
        return _bound(make_inputs(case))[0]
    except InputError:  # a mask that says the same lengths for queries and keys
        return None


def _tensors(result: Any) -> dict[str, torch.Tensor]:
    raw = result if isinstance(result, Raw) else Raw(result)
    found = {"out": raw.out, "lse": raw.lse, "weights": raw.weights}
    if raw.state is not None:
        found |= {"S": raw.state.S, "z": raw.state.z}
    return {name: x for name, x in found.items() if x is not None}


def _problem(case: Case, inputs: Inputs, result: Any, where: str) -> str:
    """What is wrong with the result of a later run."""
    want, got = golden(case, inputs), _tensors(result)
    wanted = {"out": want.out, "lse": want.lse, "weights": want.weights, **want.state}
    asked = {"out", *(("lse",) if case.lse else ()), *(("weights",) if case.weights else ())}
    try:
        for name in sorted(asked | ({"S", "z"} & set(want.state))):
            if name not in got:
                return f"run again {where}, it returned no {name}"
            limit = budget("float64" if case.dtype == "float64" else "float32", "grad")
            limit = limit if name in ("S", "z") else budget(case.dtype, name)
            limit = Budget(*(_LOOSE * bound for bound in limit))
            worst_error(f"run again {where}: {name}", got[name], wanted[name], limit)
    except CaseError as error:
        return str(error)
    return ""
