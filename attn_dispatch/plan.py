"""A `Plan` is a decided and compiled op; `make_plan` makes one, and remembers the decision for its whole bucket."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attn_dispatch import context, reference
from attn_dispatch.autocast import cast, casts
from attn_dispatch.backend import Operands, Raw, Run
from attn_dispatch.device import facts
from attn_dispatch.errors import BackendError, InputError
from attn_dispatch.frontend import Binding
from attn_dispatch.ir.atoms import Dense
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Bias
from attn_dispatch.ir.tensors import TensorDesc, stride_class
from attn_dispatch.passes import Step, canonicalise
from attn_dispatch.registry import Registry, current
from attn_dispatch.registry.discover import on_reset
from attn_dispatch.results import named_results
from attn_dispatch.selection import tuned
from attn_dispatch.selection.candidates import Candidate, build, rebuild
from attn_dispatch.selection.decide import Decision, Request, TunedLookup, decide
from attn_dispatch.selection.pins import current_pins
from attn_dispatch.settings import settings
from attn_dispatch.state import LinearState, WithState, spread_state
from attn_dispatch.watched import Watched

__all__ = [
    "Plan",
    "PlanCache",
    "at_shape",
    "bucket_decision",
    "decisions",
    "make_plan",
    "name_at",
]


class PlanCache:
    """A bounded, thread-safe map from what was asked (a canonical op in its bucket, and the requests) to a decision.

    The least recently used entry goes first. Lookups of a warm call do not come here: see `attn_dispatch.routes`.

    Args:
        size: number of decisions kept.
    """

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._entries: OrderedDict[Any, Decision] = OrderedDict()
        self._lock = threading.RLock()  # re-entrant: a backend may call attention while it is compiled
        self.misses = 0

    def get(self, key: Any) -> Decision | None:
        """The decision for a key, or None."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                self.misses += 1
            else:
                self._entries.move_to_end(key)
            return found

    def peek(self, key: Any) -> Decision | None:
        """As `get`, without counting."""
        return self._entries.get(key)

    def put(self, key: Any, decision: Decision) -> None:
        """Keep a decision; the oldest ones go when there are too many."""
        with self._lock:
            self._entries[key] = decision
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._entries.clear()

    def renew_lock(self) -> None:
        """Take a new lock, in a process that was forked."""
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)


decisions = PlanCache()
on_reset.append(decisions.clear)
tuned.on_change.append(decisions.clear)
_deciding = threading.RLock()  # one thread decides at a time, so that threads that start together decide once


def _after_fork() -> None:
    global _deciding
    _deciding = threading.RLock()  # another thread may have held a lock when the process forked
    decisions.renew_lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class Plan:
    """A decided and compiled attention, to be called with tensors like those it was made for.

    Args:
        op: the canonical op. decision: what runs it and why. trace: the passes that changed it.
        run: ``(query, key, value, operands) -> result`` on the caller's own shapes.
        tensors: the other tensors of the call. requests: who asked for what, pins among them.
    """

    op: AttentionOp
    decision: Decision
    trace: tuple[Step, ...]
    binding: Binding
    run: Run = field(repr=False)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    requests: tuple[Request, ...] = field(default=(), repr=False)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **tensors: torch.Tensor) -> Any:
        """Run the plan.

        Args:
            query, key, value: of the shapes and dtype that the plan was made for.
            tensors: replace the mask, bias, lengths ... given when the plan was made, by argument name.

        Raises:
            InputError: the tensors are not those of the plan.
        """
        form, op = self.binding.form, self.binding.op
        if casts(query):  # a plan made under autocast takes what the call took; one that was not keeps its own dtype
            if str(torch.get_autocast_dtype(query.device.type)) == f"torch.{op.dtype}":
                query, key, value = cast(query, key, value)
            with torch.autocast(query.device.type, enabled=False):
                return self(query, key, value, **tensors)
        for name, x, desc in zip(
            ("query", "key", "value"), form.pack(query, key, value), (op.query, op.key, op.value), strict=True
        ):
            if tuple(x.shape) != desc.shape or str(x.dtype) != f"torch.{desc.dtype}" or x.device.type != desc.device:
                problem = (
                    f"the plan was made for {name} {desc} on {desc.device}, got {list(x.shape)} {x.dtype} {x.device}"
                )
                raise InputError(problem, remedy="make another plan with dispatch.plan(...)")
            if stride_class(x) == "scattered" != desc.strides:
                problem = f"the plan was made for {name} with contiguous rows, got scattered strides"
                raise InputError(problem, remedy=f"{name}.contiguous(), or another plan with dispatch.plan(...)")
        if isinstance(tensors.get("state"), LinearState):
            tensors |= spread_state(tensors["state"])
        self._check_gradients({"query": query, "key": key, "value": value, **self.tensors, **tensors})
        for name, desc in op.operands:
            given = tensors.get(name)
            if name.startswith("state") and given is not None and TensorDesc.of(given).in_rows() != desc.in_rows():
                raise InputError(f"the plan was made for {name} {desc}, got {TensorDesc.of(given)}")
        if unknown := set(tensors) - set(self.tensors):
            raise InputError(f"the plan has no operand {', '.join(sorted(unknown))}; it has {sorted(self.tensors)}")
        for name, x in tensors.items():
            made = self.tensors[name]
            if isinstance(x, torch.Tensor) and (x.dtype, x.shape, x.device.type) != (
                made.dtype,
                made.shape,
                made.device.type,
            ):
                problem = f"the plan was made for {name} {TensorDesc.of(made)}, got {TensorDesc.of(x)}"
                raise InputError(problem, remedy="make another plan with dispatch.plan(...)")
        return self.run(query, key, value, self.binding.operands({**self.tensors, **tensors}))

    def _check_gradients(self, given: dict[str, Any]) -> None:
        """A plan made without gradients may run a kernel that has none, and would lose them without a word."""
        if not torch.is_grad_enabled():
            return
        for name, x in given.items():
            if isinstance(x, torch.Tensor) and x.requires_grad and name not in self.op.grad:
                raise InputError(
                    f"the plan was made without a gradient of {name}, which requires one",
                    remedy="make the plan with tensors that require gradients, or call it under torch.no_grad()",
                )

    @property
    def name(self) -> str:
        """The candidate that runs, ``"fold_groups > sdpa_flash"``."""
        return self.decision.chosen.name

    def __str__(self) -> str:
        return f"{self.name}  ({self.decision.source}: {self.decision.why})  {self.op}"


def make_plan(binding: Binding, requests: Sequence[Request] = (), registry: Registry | None = None) -> Plan:
    """Canonicalise, decide (or remember the bucket's decision) and compile.

    A remembered decision is checked again on the true shape: when its candidate declines there, the next in the
    measured or estimated ranking runs, and an explicit request is decided anew so that it raises its own reasons.

    Args:
        binding: the described call. requests: explicit wishes, strongest first; pins and what was measured come after
            them. registry: another one than the process's; pins and measurements are about the latter alone.
    """
    here = current()
    registry = registry or here
    op, trace = canonicalise(binding.op)
    if registry is here:
        pins = current_pins()
        context.layers_matter = pins.has_layers
        pinned = pins.requests(op, context.current_layer.get())
        mode = context.surrounding().autotune or settings().autotune
        requests = (*requests, *pinned)
        decision = _decide_for_bucket(op, requests, registry, mode)
    else:
        decision = decide(op, registry, requests)
    run = _compile(decision.chosen, op, registry)
    guarded = _guard_excluded(run, op, decision, registry)
    run = _on_one_device(_finish(guarded, op, binding), op)
    return Plan(op, decision, trace, binding, run, requests=tuple(requests))


def name_at(made: Plan, op: AttentionOp) -> str:
    """The candidate that runs another op of a plan's bucket by what was decided for it; "" where that says none."""
    mode = context.surrounding().autotune or settings().autotune
    remembered = decisions.peek((op.bucketed(), made.requests, mode, facts(op.device)))
    if remembered is None or _is_outranked(remembered, op, made.requests, current()):
        return ""
    found = _first_that_runs(remembered, op, made.requests, current())
    return "" if found is None else found.chosen.name


def _on_one_device(run: Run, op: AttentionOp) -> Run:
    """The run with its tensors' CUDA device current, where there are several: libraries start on the current one."""
    if op.device != "cuda" or op.traced or torch.cuda.device_count() < 2:
        return run

    def held(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        with torch.cuda.device(q.device):
            return run(q, k, v, t)

    return held


def _decide_for_bucket(op: AttentionOp, requests: tuple[Request, ...], registry: Registry, mode: str) -> Decision:
    def measured(_: AttentionOp) -> tuned.Tuned | None:
        return tuned.look_up(op, registry, mode)  # by the true shape: a miss may be measured, and not at the bucket's

    key = (op.bucketed(), requests, mode, facts(op.device))
    remembered = decisions.get(key)
    if remembered is None:
        with _deciding:
            remembered = decisions.peek(key)
            if remembered is None:
                remembered = bucket_decision(op, requests, registry, measured)
                decisions.put(key, remembered)
    return at_shape(remembered, op, requests, registry, measured)


def bucket_decision(
    op: AttentionOp, requests: tuple[Request, ...], registry: Registry, measured: TunedLookup
) -> Decision:
    """What holds for the whole bucket of an op, before its own shape is looked at."""
    named = any(request.names for request in requests)  # who only bars something asks for nothing at this very shape
    return decide(op if named else op.bucketed(), registry, requests, measured)


def at_shape(
    remembered: Decision, op: AttentionOp, requests: tuple[Request, ...], registry: Registry, measured: TunedLookup
) -> Decision:
    """A bucket's decision at the true shape: the first of its ranking that runs there."""
    found = None
    if not _is_outranked(remembered, op, requests, registry):
        found = _first_that_runs(remembered, op, requests, registry)
    return found or decide(op, registry, requests, measured)


def _first_that_runs(
    remembered: Decision, op: AttentionOp, requests: tuple[Request, ...], registry: Registry
) -> Decision | None:
    names = [remembered.chosen.name]
    if not any(request.source == remembered.source for request in requests):  # nobody asked for it by name
        names = [*remembered.ranking, *names, *(candidate.name for candidate, _ in remembered.legal)]
    for name in names:
        candidate = rebuild(name, op, registry)
        if candidate is not None:
            if name == remembered.chosen.name:
                return replace(remembered, chosen=candidate)
            why = f"{names[0]} cannot run this shape of its bucket"
            if name == names[0]:  # the first of the ranking, which the top of the bucket is too long for
                why = remembered.ranked_why
            source = remembered.ranked_by if name in remembered.ranking else remembered.source
            return replace(remembered, chosen=candidate, source=source, why=why)
    return None


def _is_outranked(remembered: Decision, op: AttentionOp, requests: tuple[Request, ...], registry: Registry) -> bool:
    """Whether a name that somebody likes better than the remembered choice refused its shape and takes this one."""
    for request in requests:
        for name in request.names:
            if remembered.source == request.source and name in (remembered.chosen.name, remembered.chosen.backend.name):
                return False
            forms = [form for form in (*remembered.refused, name) if form == name or form.endswith(f"> {name}")]
            if any(rebuild(form, op, registry) is not None for form in forms):
                return True
    return False


def _compile(candidate: Candidate, op: AttentionOp, registry: Registry) -> Run:
    """The candidate's run; a stranger's backend is watched, a built-in one runs bare."""
    name = candidate.backend.name
    origin = registry.origins.get(name)
    if origin is not None and not registry.is_builtin(name):  # no origin: a registry made by hand, as the tests do
        candidate = replace(candidate, backend=Watched(candidate.backend, origin))
    return build(candidate, op).run


# --- from the kernel to the caller ---------------------------------------------------------------------------------


def _guard_excluded(run: Run, op: AttentionOp, decision: Decision, registry: Registry) -> Run:
    """Keep NaN and Inf in excluded keys from leaking, which no mask but is_causal alone may allow.

    A leak shows as NaN in the output (0 * NaN, 0 * Inf, -inf + NaN), so the output is looked at, which costs little,
    and only then the op is run again by the specification. On a GPU looking would wait for the device: there excluded
    columns are zeroed beforehand, and what a mask excludes per query is documented to leak.
    """
    steps = decision.chosen.chain.steps
    reaching = steps[0].inner if steps and steps[0].cuts_excluded else op
    if not _excludes_keys(reaching) or decision.chosen.backend.capability_on(op.device).hides_nan:
        return run
    if op.traced or op.device != "cpu":
        if reference.column_masks(op.mask) is None:
            return run
        return lambda q, k, v, t: run(q, *reference.hide_columns(op.mask, k, v, t), t)
    forms = ("bands > eager", "tile_queries > eager", "eager")  # the first that applies; long rows only fit in tiles
    spare = next((c for name in forms if (c := rebuild(name, op, registry)) is not None), None)
    if spare is None:  # a registry without eager: nothing to fall back to
        return run
    exact: list[Run] = []
    by_tensor = not reaching.mask.sanitises
    is_clean = _has_no_nan if op.B * op.Hq * op.Sq * op.Dv <= _FEW else _sums_without_nan

    def guarded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        result = run(q, k, v, t)
        if is_clean(result.out if isinstance(result, Raw) else result):
            return result
        if by_tensor and reference.finite(k) and reference.finite(v):  # its own NaN, as of a NaN query
            return result
        if not exact:
            exact.append(build(spare, op).run)
        return exact[0](q, k, v, t)

    return guarded


_FEW = 1 << 12  # elements up to which comparing one by one is quicker than a sum, which is another tensor to make


def _has_no_nan(x: torch.Tensor) -> bool:
    return torch.equal(x, x)


def _sums_without_nan(x: torch.Tensor) -> bool:
    return reference.finite(x) or torch.equal(x, x)  # an infinity that is attended is as it should be


def _excludes_keys(op: AttentionOp) -> bool:
    """Whether keys may be excluded whose NaN must not leak: by the mask, or by -inf in a bias."""
    tensors = any(isinstance(atom, Dense) for atom in op.mask.atoms()) or any(isinstance(x, Bias) for x in op.score)
    return op.mask.sanitises or tensors


def _finish(run: Run, op: AttentionOp, binding: Binding) -> Run:
    """From the kernel's ``[B, H, S, D]`` to the caller's rank, layout and result type."""
    form = binding.form
    wants_lse, wants_weights = op.outputs.lse, op.outputs.weights
    if op.outputs.state:
        return _finish_state(run, form)
    if form.is_plain and not wants_lse and not wants_weights:
        return run

    def finished(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, t: Operands) -> Any:
        q, k, v = form.pack(query, key, value)
        raw = run(q, k, v, t)
        if not (wants_lse or wants_weights):
            return form.unpack_out(raw)
        if not isinstance(raw, Raw):
            raise BackendError(f"a backend returned {type(raw).__name__} where Raw(out, lse, weights) was wanted")
        out = form.unpack_out(raw.out)
        lse = None if raw.lse is None else form.unpack(raw.lse)
        weights = None if raw.weights is None else form.unpack(raw.weights)
        wanted = [out, *([lse] if wants_lse else []), *([weights] if wants_weights else [])]
        return named_results(wanted, wants_lse, wants_weights)  # type: ignore[arg-type]

    return finished


def _finish_state(run: Run, form: Any) -> Run:
    """As `_finish`, for calls that return a state; the frontend lets only 4-D calls do that."""

    def finished(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, t: Operands) -> Any:
        q, k, v = form.pack(query, key, value)
        raw = run(q, k, v, t)
        if not isinstance(raw, Raw) or raw.state is None:
            raise BackendError(f"a backend returned {type(raw).__name__} without the state that was wanted")
        return WithState(form.unpack_out(raw.out), raw.state)

    return finished
