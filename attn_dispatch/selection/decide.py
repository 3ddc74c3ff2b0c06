"""Which candidate runs an op, and why.

Precedence, first that speaks:

1. the call's own ``backend=`` argument;
2. `dispatch.use` around the call;
3. YAML pins, in file order, the first that matches;
4. the tuned store;
5. the heuristic cost.

1, 2 (with ``require=True``) and pins with ``mode: require`` are explicit: they never fall back. When none of the names
they give can run the op, `NoBackendError` says what was asked and why each refused. A preference (``require=False``,
``mode: prefer``) falls through to the next source and warns once with the reason.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attn_dispatch.capability import Reason
from attn_dispatch.errors import FallbackWarning, NoBackendError
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.registry import Registry
from attn_dispatch.registry.discover import on_reset
from attn_dispatch.selection.candidates import Candidate, enumerate_candidates, parse_name
from attn_dispatch.selection.heuristics import estimate_us

if TYPE_CHECKING:
    from attn_dispatch.selection.tuned import Tuned

__all__ = ["Decision", "Request", "TunedLookup", "decide", "ranked"]


@dataclass(frozen=True)
class Request:
    """What somebody asked for.

    Args:
        names: backends or chains, in order of preference.
        source: who asked, for `explain`: ``"call argument"``, ``"dispatch.use"``, ``"pin configs/x.yaml:4"``.
        require: never fall back.
        avoid: backends or chains that must not run, unless a stronger request names them; a request may say only this.
    """

    names: tuple[str, ...]
    source: str
    require: bool = True
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The choice for an op.

    Args:
        chosen: the candidate that runs.
        source: ``"call argument"``, ``"dispatch.use"``, ``"pin ..."``, ``"tuned"`` or ``"heuristic"``.
        why: one line for people.
        legal: all candidates that could run it, best first, with the estimate in microseconds.
        refused: reasons by candidate name; rewrites that do not apply stand under their own name.
        notes: preferences that could not be met.
        ranking: names as the tuner ranks them, best first; those that are barred left out. measured_us: their medians.
        ranked_by, ranked_why: source of the ranking, ``"tuned"``, with the file when it is a lock file; and its line.
    """

    chosen: Candidate
    source: str
    why: str
    legal: tuple[tuple[Candidate, float], ...]
    refused: dict[str, tuple[Reason, ...]] = field(default_factory=dict, compare=False)
    notes: tuple[str, ...] = ()
    ranking: tuple[str, ...] = ()
    measured_us: Mapping[str, float] = field(default_factory=dict, compare=False)
    ranked_by: str = ""
    ranked_why: str = ""


# What was measured for an op, best first; None for a miss. `attn_dispatch.selection.tuned` answers.
TunedLookup = Callable[[AttentionOp], "Tuned | None"]

_said: dict[str, None] = {}  # reasons that were warned of, once each; a new registry starts anew
_MAX_SAID = 1024
on_reset.append(_said.clear)


def ranked(op: AttentionOp, registry: Registry) -> tuple[list[tuple[Candidate, float]], dict[str, tuple[Reason, ...]]]:
    """Legal candidates with their estimates, best first, and the reasons of all others.

    Those that would start another runtime (`Backend.start_s`) come last, whatever their estimate. Ties go to the
    shorter chain, then to built-in backends in their order, then to strangers by name: neither chance nor the order of
    installation decides.
    """
    candidates, rewrites = enumerate_candidates(op, registry)
    own = [name for name in registry.backends if registry.is_builtin(name)]
    position = {name: n for n, name in enumerate([*own, *sorted(set(registry.backends) - set(own))])}
    refused = {c.name: c.reasons for c in candidates if c.reasons}
    legal = []
    for candidate in (c for c in candidates if not c.reasons):
        estimate = _estimate(candidate, op)
        if isinstance(estimate, Reason):
            refused[candidate.name] = (estimate,)
        else:
            legal.append((candidate, estimate))
    legal.sort(key=lambda pair: _place(pair[0], pair[1], position))
    return legal, refused | {f"{name} >": (reason,) for name, reason in rewrites.items()}


def _place(candidate: Candidate, estimate: float, position: Mapping[str, int]) -> tuple[Any, ...]:
    return (
        candidate.backend.start_s,
        estimate,
        len(candidate.chain.names),
        position[candidate.backend.name],
        candidate.name,
    )


def _estimate(candidate: Candidate, op: AttentionOp) -> float | Reason:
    """The estimate in microseconds; a backend that raises or answers nonsense is refused with that as the reason."""
    try:
        time_us = estimate_us(candidate, op)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's estimate; the error becomes its reason
        return Reason("error", "estimate", text=f"its cost estimate raised {type(error).__name__}: {error}")
    if not math.isfinite(time_us):
        return Reason("error", "estimate", time_us, "a finite cost", text=f"its cost estimate is {time_us}")
    return time_us


def decide(
    op: AttentionOp,
    registry: Registry,
    requests: Sequence[Request] = (),
    tuned: TunedLookup | None = None,
) -> Decision:
    """Choose, by the precedence of the module's docstring.

    Args:
        op: a canonical op. requests: explicit wishes, strongest first. tuned: the store's lookup.

    Raises:
        NoBackendError: an explicit request cannot be met, or nothing can run the op.
        UnknownBackendError: a request names what nobody registered.
    """
    legal, refused = ranked(op, registry)
    notes: list[str] = []
    for request in requests:
        legal, barred = _without(request, legal)
        refused |= barred
        found = next((c for name in request.names if (c := _matching(name, legal, registry)) is not None), None)
        if found is not None:
            why = f"asked for by {request.source}"
            return Decision(found, request.source, why, tuple(legal), refused, tuple(notes))
        reasons = {n: _reasons_for(n, refused, registry) for n in request.names}
        if request.require:
            raise NoBackendError(_report(op, request, reasons, legal), {n: list(r) for n, r in reasons.items()})
        if request.names:
            asked = ", ".join(request.names)
            notes.append(f"{request.source} prefers {asked}, which cannot run it: {_brief(reasons)}")
            _warn_once(notes[-1])
    if not legal:
        alone = {n: r for n, r in refused.items() if ">" not in n}
        raise NoBackendError(_report(op, None, alone, legal), {n: list(r) for n, r in refused.items()})
    measured = tuned(op) if tuned is not None else None
    if measured is not None and measured.wrong:  # nobody asked for them by name
        legal, barred = _without_wrong(measured, legal)
        refused |= barred
    found, source, why = legal[0][0], "heuristic", f"lowest estimate, {legal[0][1]:.0f} us"
    if measured is None:
        return Decision(found, source, why, tuple(legal), refused, tuple(notes))
    barred_names = {name for request in requests for name in request.avoid}  # by name: more is legal at other shapes
    ranking = tuple(n for n in measured.names if not barred_names & {n, n.rpartition(" > ")[2]})
    by_name = {c.name: c for c, _ in legal}
    if name := next((name for name in ranking if name in by_name), None):
        why = measured.why if name == measured.names[0] else f"{measured.names[0]} cannot run it; next measured"
        found, source = by_name[name], measured.source
    return Decision(
        found, source, why, tuple(legal), refused, tuple(notes), ranking, measured.measured_us, measured.source,
        measured.why,
    )  # fmt: skip


def _without(
    request: Request, legal: Sequence[tuple[Candidate, float]]
) -> tuple[list[tuple[Candidate, float]], dict[str, tuple[Reason, ...]]]:
    """The legal candidates that a request does not bar, and the reason for those that it does."""
    why: tuple[Reason, ...] = (Reason("barred", "avoid", text=f"barred by {request.source}"),)
    barred = {c.name: why for c, _ in legal if c.name in request.avoid or c.backend.name in request.avoid}
    return [(c, us) for c, us in legal if c.name not in barred], barred


def _without_wrong(
    measured: Tuned, legal: Sequence[tuple[Candidate, float]]
) -> tuple[list[tuple[Candidate, float]], dict[str, tuple[Reason, ...]]]:
    """The legal candidates without those that a measurement found wrong, unless there are no others."""
    kept = [(c, us) for c, us in legal if c.name not in measured.wrong]
    if not kept:
        return list(legal), {}
    why = (
        Reason("barred", "measured", text=f"it was wrong, crashed or hung when it was measured ({measured.source})"),
    )
    return kept, {c.name: why for c, _ in legal if c.name in measured.wrong}


def _matching(name: str, legal: Sequence[tuple[Candidate, float]], registry: Registry) -> Candidate | None:
    """The candidate that a name asks for: a chain exactly; a backend alone in its plain form, else its best chain."""
    rewrites, backend = parse_name(name, registry)
    exact = " > ".join((*rewrites, backend))
    by_name = {c.name: c for c, _ in legal}
    if exact in by_name:
        return by_name[exact]
    if rewrites:
        return None
    return next((c for c, _ in legal if c.backend.name == backend), None)


def _reasons_for(name: str, refused: Mapping[str, tuple[Reason, ...]], registry: Registry) -> tuple[Reason, ...]:
    """Why a name cannot run: the chain's own reasons, else those of its first rewrite that does not apply."""
    rewrites, backend = parse_name(name, registry)
    keys = (" > ".join((*rewrites, backend)), *(f"{rewrite} >" for rewrite in rewrites))
    return next((refused[key] for key in keys if key in refused), ())


def _warn_once(text: str) -> None:
    if text in _said:
        return
    if len(_said) >= _MAX_SAID:
        _said.clear()
    _said[text] = None
    warnings.warn(text, FallbackWarning, stacklevel=3)


def _brief(reasons: dict[str, tuple[Reason, ...]]) -> str:
    return "; ".join(f"{name}: {', '.join(map(str, why)) or 'not applicable'}" for name, why in reasons.items())


def _report(
    op: AttentionOp,
    request: Request | None,
    reasons: dict[str, tuple[Reason, ...]],
    legal: Sequence[tuple[Candidate, float]],
) -> str:
    """The message of a `NoBackendError`: what was asked, why each refused, what to try."""
    head = "no backend can run this attention"
    if request is not None:
        head = f"{' or '.join(request.names)}, asked for by {request.source}, cannot run this attention"
    width = max([len(n) for n in reasons] + [10])
    lines = [head, f"  {'asked':<{width}}  {op}"]
    for name, why in reasons.items():
        lines += [f"  {name if n == 0 else '':<{width}}  {reason}" for n, reason in enumerate(why)]
        lines += [] if why else [f"  {name:<{width}}  its rewrites do not apply here"]
    if legal:
        lines.append(f"  {'try':<{width}}  backend={legal[0][0].name!r}, or leave backend out")
    lines.append(f"  {'details':<{width}}  dispatch.explain(...) with the same arguments")
    return "\n".join(lines)
