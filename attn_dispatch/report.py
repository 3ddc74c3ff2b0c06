"""The answer of `dispatch.explain`: what would run, what would not, and why, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from attn_dispatch import context
from attn_dispatch.capability import Reason
from attn_dispatch.complexity import complexity
from attn_dispatch.errors import NoBackendError, NotTunedError
from attn_dispatch.frontend import Binding
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.passes import canonicalise
from attn_dispatch.plan import at_shape, bucket_decision
from attn_dispatch.registry import Registry
from attn_dispatch.selection.candidates import Candidate
from attn_dispatch.selection.decide import Request, ranked
from attn_dispatch.selection.pins import current_pins
from attn_dispatch.selection.store import explain_miss
from attn_dispatch.selection.tuned import Tuned, find, known_wrong, look_up, store
from attn_dispatch.settings import settings

__all__ = ["Report", "explain_op", "make_report"]


@dataclass(frozen=True)
class Report:
    """Why an op runs as it does.

    Args:
        op: the canonical op. passes: ``(pass, op after it)`` for each that changed it. chosen: the candidate's name,
            empty when nothing can run it. source, why: where the choice comes from. legal: candidates that could run
            it, with the estimate in microseconds, best first. refused: reasons by candidate (``"name >"``: a rewrite).
        measured: medians in microseconds by candidate, where the tuner measured this op.
        error: the message of the `NoBackendError` that the call would raise.
    """

    op: AttentionOp
    passes: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    chosen: str
    source: str
    why: str
    legal: tuple[tuple[str, float], ...]
    refused: dict[str, tuple[Reason, ...]]
    error: str = ""
    measured: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"asked     {self.op}", f"features  {', '.join(sorted(self.op.features))}"]
        lines.append(f"costs     {complexity(self.op)}")
        lines += [f"note      {note}" for note in self.notes]
        lines += [f"pass      {name}: {after}" for name, after in self.passes]
        if self.error:
            return "\n".join([*lines, "", self.error])
        lines += [f"chosen    {self.chosen}   ({self.source}: {self.why})", ""]
        best = min((us for _, us in self.legal), default=0.0)
        width = max([len(name) for name, _ in self.legal] + [len(n) for n in self.refused if " > " not in n] + [8])
        for name, time_us in self.legal:
            mark = "*" if name == self.chosen else " "
            ratio = f"{time_us / best:.2f}x the best" if best else ""
            took = f"{self.measured[name]:>12,.0f} us measured" if name in self.measured else ""
            lines.append(f"{mark} {name:<{width}}  {time_us:>12,.0f} us estimated   {ratio:<15} {took}".rstrip())
        for name, reasons in self.refused.items():
            if " > " in name:
                continue  # a refused chain says what its backend says; its plain form or its rewrite is listed
            lines.append(f"- {name:<{width}}  {'; '.join(map(str, reasons))}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for ``--json``."""
        return {
            "op": self.op.to_dict(),
            "digest": self.op.digest(),
            "chosen": self.chosen,
            "source": self.source,
            "why": self.why,
            "notes": list(self.notes),
            "passes": [name for name, _ in self.passes],
            "legal": [{"name": name, "estimated_us": round(time_us, 1)} for name, time_us in self.legal],
            "measured_us": dict(self.measured),
            "complexity": asdict(complexity(self.op)),
            "refused": {
                name: [{"code": r.code, "field": r.field, "text": str(r)} for r in reasons]
                for name, reasons in self.refused.items()
            },
            "error": self.error,
        }


def make_report(binding: Binding, requests: Sequence[Request], registry: Registry, notes: Sequence[str]) -> Report:
    """Describe, canonicalise, enumerate and decide, and run nothing."""
    return explain_op(binding.op, requests, registry, notes)


def explain_op(
    described: AttentionOp, requests: Sequence[Request], registry: Registry, notes: Sequence[str] = ()
) -> Report:
    """The report of an op that is given as such, from YAML or the command line."""
    op, trace = canonicalise(described)
    passes = tuple((step.name, str(step.after)) for step in trace)
    said = list(notes)

    def measured(asked: AttentionOp) -> Tuned | None:
        mode = context.surrounding().autotune or settings().autotune
        if mode == "off" or op.traced:
            return None
        found = find(op, registry)
        if isinstance(found, Tuned):
            return found
        if mode == "assert":
            return look_up(op, registry, mode)  # raises, as the call would
        why = found if found.reasons != ("no entry",) or mode == "cached" else explain_miss(store(), op)
        said.append(f"not tuned: {why}")
        return known_wrong(found)

    wishes = (*requests, *current_pins().requests(op, context.current_layer.get()))
    try:  # as a call decides: for the bucket, and then at this shape
        decision = at_shape(bucket_decision(op, wishes, registry, measured), op, wishes, registry, measured)
    except (NoBackendError, NotTunedError) as error:
        legal, refused = ranked(op, registry)
        named = tuple((c.name, us) for c, us in legal)
        return Report(op, passes, tuple(said), "", "", "", named, refused, str(error))
    legal, refused = list(decision.legal), decision.refused
    if not any(wish.names for wish in wishes):  # decided for the bucket: what is legal here is asked again
        legal, refused = ranked(op, registry)
        barred = {name: why for name, why in decision.refused.items() if any(r.code == "barred" for r in why)}
        legal, refused = [(c, us) for c, us in legal if c.name not in barred], refused | barred
    named = tuple((c.name, us) for c, us in legal)
    said += [*decision.notes, *_remarks(legal, op, registry)]
    return Report(
        op, passes, tuple(dict.fromkeys(said)), decision.chosen.name, decision.source, decision.why, named,
        refused, measured=decision.measured_us,
    )  # fmt: skip


def _remarks(legal: Sequence[tuple[Candidate, float]], op: AttentionOp, registry: Registry) -> list[str]:
    """What backends that could run the op add; a stranger's mistake in saying so is said in its place."""
    said = []
    for candidate, _ in legal:
        if candidate.chain.steps:
            continue
        backend = candidate.backend
        try:
            said += backend.remarks(op)
        except Exception as error:  # noqa: BLE001 - explain describes, whatever a backend's library does
            said.append(f"{backend.name} said nothing of itself: {type(error).__name__}: {error}")
    return said
