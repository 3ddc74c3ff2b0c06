"""``attn-dispatch conformance``: the contract suite over one backend, as a matrix, or as JSON."""

from __future__ import annotations

import json
import textwrap
import warnings
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from attn_dispatch.testing.conformance import Conformance

__all__ = ["run", "text_of"]

_SHOWN = 12  # failures that are printed at length; the JSON has all


def run(name: str, plugin: str, only: str, attempts: bool, as_json: bool) -> int:
    """Run the suite and print what it says.

    Returns:
        The exit code: 0 all is right, 1 something is wrong or a lie, 3 nothing could be proven on this machine.
    """
    import torch

    from attn_dispatch.errors import InputError, PluginWarning
    from attn_dispatch.testing import CASES
    from attn_dispatch.testing.apart import apart, registry_of
    from attn_dispatch.testing.conformance import conform

    cases = tuple(case for case in CASES if only in case.id)
    if not cases:
        raise InputError(f"no case has {only!r} in its id", remedy="--only causal")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PluginWarning)  # another plugin's trouble is doctor's to tell
            registry = registry_of(plugin)
        found = conform(name, registry, cases, apart(plugin) if attempts else None)
    finally:
        torch.set_num_threads(threads)
    origin = registry.origins.get(name, "")
    typer.echo(json.dumps(data_of(found, origin), indent=2) if as_json else text_of(found, origin))
    return found.exit_code


def data_of(found: Conformance, origin: str) -> dict[str, Any]:
    """The findings as plain types."""
    from attn_dispatch.testing.conformance import Outcome

    return {
        "backend": found.backend,
        "distribution": origin,
        "passed": found.passed,
        "unavailable": found.unavailable,
        "counts": {outcome.value: len(found.having(outcome)) for outcome in Outcome},
        "by_word": {w: {o.value: n for o, n in counts.items() if n} for w, counts in found.by_word().items()},
        "suspects": list(found.suspects()),
        "could_declare": dict(found.hints),
        "unproven": list(found.unproven),
        "cases": [
            {"case": line.case, "outcome": line.outcome.value, "text": line.text, "fix": line.fix, "error": line.error}
            for line in found.lines
        ],
    }


def text_of(found: Conformance, origin: str) -> str:
    """The findings for people: the matrix, what failed and how to mend it, what could be declared."""
    from attn_dispatch.testing.conformance import Outcome

    lines = [f"{found.backend}   {origin}   {len(found.lines)} cases", ""]
    if found.unavailable:
        lines += [f"not available here: {found.unavailable}", ""]
    heads = [outcome.value for outcome in Outcome]
    lines.append("  ".join([f"{'':<26}", f"{'claimed':<7}", *heads]))
    total = {outcome: len(found.having(outcome)) for outcome in Outcome}
    silent = []  # words that it does not claim and that no case tells anything of
    for word, counts in {"all cases": total, **found.by_word()}.items():
        if word not in ("all cases", *found.claimed) and not any(
            n for o, n in counts.items() if o is not Outcome.REFUSED
        ):
            silent.append(word)
            continue
        claimed = "" if word == "all cases" else "yes" if word in found.claimed else "no"
        cells = [f"{counts[outcome] or '.':>{len(outcome.value)}}" for outcome in Outcome]
        lines.append("  ".join([f"{word:<26}", f"{claimed:<7}", *cells]))
    if silent:
        lines += textwrap.wrap(f"not claimed, and refused: {', '.join(silent)}", 110, subsequent_indent="  ")
    lines += ["", *_failures(found)]
    if found.hints:
        lines.append("needlessly refused: these were right when they were asked for all the same; declare them")
        lines += [f"  {word}  ({n} {'case' if n == 1 else 'cases'})" for word, n in found.hints] + [""]
    if found.unproven:
        lines += [f"declared, and in no case that was verified: {', '.join(found.unproven)}", ""]
    verdict = {
        0: "passed",
        1: f"FAILED: {len(found.failures)} cases are wrong or lies",
        3: "nothing could be proven here",
    }
    return "\n".join([*lines, verdict[found.exit_code]])


def _failures(found: Conformance) -> list[str]:
    lines = []
    for line in found.failures[:_SHOWN]:
        lines += [f"{line.outcome.value}: {line.case}", f"  {line.text}"]
        lines += [f"  fix: {line.fix}"] if line.fix else []
    if more := len(found.failures) - _SHOWN:
        lines += [f"... and {more} more (--json has all)"] if more > 0 else []
    if found.suspects():
        lines.append(f"no case with {', '.join(found.suspects())} is right: mend it, or take it out of the features")
    return [*lines, ""] if lines else []
