"""The answer of `dispatch.explain`: what would run, what would not, and why, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attn_dispatch.capability import Reason
from attn_dispatch.errors import NoBackendError
from attn_dispatch.frontend import Binding
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.passes import canonicalise
from attn_dispatch.registry import Registry
from attn_dispatch.selection.decide import Request, decide, ranked

__all__ = ["Report", "explain_op", "make_report"]


@dataclass(frozen=True)
class Report:
    """Why an op runs as it does.

    Args:
        op: the canonical op. passes: ``(pass, op after it)`` for each that changed it. chosen: the candidate's name,
            empty when nothing can run it. source, why: where the choice comes from. legal: candidates that could run
            it, with the estimate in microseconds, best first. refused: reasons by candidate (``"name >"``: a rewrite).
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

    def __str__(self) -> str:
        lines = [f"asked     {self.op}", f"features  {', '.join(sorted(self.op.features))}"]
        lines += [f"note      {note}" for note in self.notes]
        lines += [f"pass      {name}: {after}" for name, after in self.passes]
        if self.error:
            return "\n".join([*lines, "", self.error])
        lines += [f"chosen    {self.chosen}   ({self.source}: {self.why})", ""]
        best = self.legal[0][1] if self.legal else 0.0
        width = max([len(name) for name, _ in self.legal] + [len(n) for n in self.refused if " > " not in n] + [8])
        for name, time_us in self.legal:
            mark = "*" if name == self.chosen else " "
            ratio = f"{time_us / best:.2f}x the best" if best else ""
            lines.append(f"{mark} {name:<{width}}  {time_us:>12,.0f} us estimated   {ratio}".rstrip())
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
    try:
        decision = decide(op, registry, requests)
    except NoBackendError as error:
        legal, refused = ranked(op, registry)
        named = tuple((c.name, us) for c, us in legal)
        return Report(op, passes, tuple(notes), "", "", "", named, refused, str(error))
    named = tuple((c.name, us) for c, us in decision.legal)
    said = (*notes, *decision.notes)
    return Report(op, passes, said, decision.chosen.name, decision.source, decision.why, named, decision.refused)
