"""`conform`: the contract suite over one backend, as a matrix of what it claims and what is true.

Each case of the table ends as one of five:

==================  ================================================================================================
verified            it ran and is right against float64, twice alike where the backend says that it is deterministic,
                    and one executable is right for other values and sizes of its bucket, run after run
refused rightly     it declined for a reason that it declared
needlessly refused  it declined, and was right when asked all the same: a hint, not a failure
wrong               it claims the case and its numbers are off, or it raised
lied                it claims the case and does not do a part of it (dropped the scale, ignored the mask), changed an
                    input or the process, broke the contract of its result, or refused what it declares
==================  ================================================================================================

Example:
    >>> from attn_dispatch.testing import BY_ID
    >>> found = conform("sdpa_math", cases=(BY_ID["causal"], BY_ID["softcap"]))
    >>> [line.outcome.value for line in found.lines[:2]], found.passed
    (['verified', 'refused rightly'], True)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from attn_dispatch.backend import Backend
from attn_dispatch.capability import ALL_FEATURES, Reason
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.registry import Registry, current
from attn_dispatch.registry.guarding import Watch
from attn_dispatch.selection.pins import settle
from attn_dispatch.testing import CASES, Case, CaseError, Verdict, check, op_of, outputs_of
from attn_dispatch.testing.diagnosis import Diagnosis, diagnose
from attn_dispatch.testing.dropout import dropout_problem
from attn_dispatch.testing.reuse import reuse_problem

__all__ = ["Conformance", "Line", "Outcome", "Try", "attempt", "conform", "try_here"]

# Words that no case can bring: transforms have tests of their own, and dropout a check of its own here.
_ELSEWHERE = frozenset({"dropout", "higher_order", "traced"})
_TRIED = frozenset({"feature", "dtype", "limit"})  # refusals that are tried all the same

# (backend, case ids) -> the problem of each, "" where it was right; a case may be left out
Try = Callable[[str, Sequence[str]], Mapping[str, str]]


class Outcome(Enum):
    """How a case ended."""

    VERIFIED = "verified"
    REFUSED = "refused rightly"
    NEEDLESS = "needlessly refused"
    WRONG = "wrong"
    LIED = "lied"


@dataclass(frozen=True)
class Line:
    """One case.

    Args:
        case: its id. words: features and dtype of its op. text: the reasons or the problem. fix: what to do.
        error: the largest error in units of the budget, where it was verified.
    """

    case: str
    outcome: Outcome
    words: frozenset[str]
    text: str = ""
    fix: str = ""
    error: float = 0.0


@dataclass(frozen=True)
class Conformance:
    """What the suite says of a backend.

    Args:
        backend: its name. claimed: the words and dtypes that it declares for the device. lines: one a case.
        unavailable: why it cannot run here; empty when it can.
        hints: words that it could declare, with how many cases were right.
        unproven: words that it declares and that no verified case shows.
    """

    backend: str
    claimed: frozenset[str]
    lines: tuple[Line, ...]
    unavailable: str = ""
    hints: tuple[tuple[str, int], ...] = ()
    unproven: tuple[str, ...] = ()

    def having(self, *outcomes: Outcome) -> tuple[Line, ...]:
        """The lines that ended so."""
        return tuple(line for line in self.lines if line.outcome in outcomes)

    @property
    def failures(self) -> tuple[Line, ...]:
        """The lines that are wrong or lies."""
        return self.having(Outcome.WRONG, Outcome.LIED)

    @property
    def passed(self) -> bool:
        """Nothing is wrong, and something was proven."""
        return not self.failures and bool(self.having(Outcome.VERIFIED))

    @property
    def exit_code(self) -> int:
        """0 passed, 1 something is wrong or a lie, 3 nothing could be proven here."""
        return 1 if self.failures else 0 if self.passed else 3

    def suspects(self) -> tuple[str, ...]:
        """Claimed words of failing cases that no verified case has: what to mend, or to take out of the claims."""
        right = frozenset[str]().union(*(line.words for line in self.having(Outcome.VERIFIED)))
        failing = frozenset[str]().union(*(line.words for line in self.failures))
        return tuple(sorted((failing & self.claimed) - right))

    def by_word(self) -> dict[str, dict[Outcome, int]]:
        """How many cases with a word ended how, the words that the backend claims first."""
        words = sorted({w for line in self.lines for w in line.words}, key=lambda w: (w not in self.claimed, w))
        return {w: {o: sum(w in line.words for line in self.having(o)) for o in Outcome} for w in words}


def conform(
    backend: str,
    registry: Registry | None = None,
    cases: Sequence[Case] = CASES,
    try_refused: Try | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Conformance:
    """Run the contract suite over a backend.

    Args:
        backend: its name. registry: where it is registered; the process's own when None. cases: of the table.
        try_refused: runs refused cases all the same, to find refusals that are needless; `try_here` in this process
            (where a crash is the end of it), `apart.apart` in one of its own. None leaves it out.
        progress: called with the number of cases done.

    Raises:
        UnknownBackendError: nobody registered that name.
    """
    registry = registry or current()
    thing = registry.backend(backend)
    settle(registry)
    missing = _unavailable(thing)
    capability = thing.capability_on("cpu")
    lines: list[Line] = []
    refused: dict[str, tuple[Reason, ...]] = {}
    for case in cases:
        line, reasons = _line(backend, case, registry, capability.deterministic)
        lines.append(line)
        if reasons and all(reason.code in _TRIED for reason in reasons):
            refused[case.id] = reasons
        progress(len(lines))
    if "dropout" in capability.features and "cpu" in capability.devices and not missing:
        lines.append(_dropout_line(backend, registry))
    tried = dict(try_refused(backend, tuple(refused))) if try_refused is not None and not missing else {}
    hints = _hints({case: reasons for case, reasons in refused.items() if case in tried}, tried)
    named = {word for word, _ in hints}
    lines = [_with_attempt(line, refused.get(line.case, ()), tried, named) for line in lines]
    shown = frozenset[str]().union(*(line.words for line in lines if line.outcome is Outcome.VERIFIED))
    claimed = capability.features | capability.dtypes
    unproven = () if missing else tuple(sorted(claimed - shown - (_ELSEWHERE - {"dropout"})))
    return Conformance(backend, claimed, tuple(lines), missing, tuple(hints), unproven)


def _unavailable(backend: Backend) -> str:
    try:
        missing = backend.unavailable()
    except Exception as error:  # noqa: BLE001 - a stranger's backend; it is what the report says
        return f"its unavailable() raised {type(error).__name__}: {error}"
    if missing is not None:
        return str(missing)
    devices = sorted(frozenset().union(*(c.devices for c in backend.capabilities)))
    return "" if "cpu" in devices else f"it runs on {', '.join(devices)}, and the suite's tensors are on the CPU"


def _line(backend: str, case: Case, registry: Registry, deterministic: bool) -> tuple[Line, tuple[Reason, ...]]:
    words = op_of(case).features | {op_of(case).dtype}
    with Watch() as watch:
        try:
            result = check(backend, case, registry)
            right = result.verdict is Verdict.VERIFIED
            again = _differs(backend, case, registry) if deterministic and right else ""
            kept = reuse_problem(backend, case, registry) if right and not again else ""
        except CaseError as error:
            return _explained(backend, case, registry, words, error), ()
        except Exception as error:  # noqa: BLE001 - a stranger's backend may raise anything; it is the result
            fix = "mend it, or declare less: what is not declared is refused before it is compiled"
            return Line(case.id, Outcome.WRONG, words, f"{type(error).__name__}: {_brief(error)}", fix), ()
    if result.verdict is Verdict.REFUSED:
        return Line(case.id, Outcome.REFUSED, words, "; ".join(map(str, result.reasons))), result.reasons
    if watch.changes:
        fix = "leave the process as it was: use generators and dtypes of your own, and print nothing"
        return Line(case.id, Outcome.LIED, words, f"it {' and '.join(watch.changes)}", fix), ()
    if again:
        return Line(case.id, Outcome.LIED, words, again, "declare deterministic=False"), ()
    if kept:
        fix = "read batch and lengths from the tensors, keep no input and no output between runs, or declare a limit"
        return Line(case.id, Outcome.LIED, words, kept, fix), ()
    return Line(case.id, Outcome.VERIFIED, words, error=max(result.errors.values(), default=0.0)), ()


def _differs(backend: str, case: Case, registry: Registry) -> str:
    first, second = (outputs_of(backend, case, registry)[0] for _ in range(2))
    same = torch.equal(first.nan_to_num(), second.nan_to_num())
    return "" if same else "it declares deterministic=True, and two runs on the same inputs differ"


_FIXES = {
    "refusal": "refuse only what is not declared: drop it from extra_reasons, or take the word out of the capability",
    "mutation": "compute out of place: the tensors are the caller's",
    "contract": "return a new tensor of the query's dtype in [B, Hq, Sq, Dv]; lse is fp32 (fp64 for fp64 inputs)",
}


def _explained(backend: str, case: Case, registry: Registry, words: frozenset[str], error: CaseError) -> Line:
    """A failing case with what explains it."""
    text = str(error).removeprefix(f"{backend} on {case.id}: ")
    if error.kind in _FIXES:
        return Line(case.id, Outcome.LIED, words, text, _FIXES[error.kind])
    if error.quantity == "grad":
        fix = "mend the backward pass, or take grad out of the features"
        return Line(case.id, Outcome.LIED, words, f"{text}; the output is right", fix)
    try:
        found = diagnose(case, *outputs_of(backend, case, registry))
    except Exception as again:  # noqa: BLE001 - it ran a moment ago; that it does not now is worth saying
        return Line(case.id, Outcome.WRONG, words, f"{text}; run again, it raised {_brief(again)}")
    if case.strides != "plain" and _is_right(backend, replace(case, strides="plain"), registry):
        found = Diagnosis("strides", "the same numbers laid out contiguously are right: the strides are not read")
    if not found.claim:
        return Line(case.id, Outcome.WRONG, words, text)
    fix = f"honour it, or take the words for it out of the features ({_words_of(found.claim, words)})"
    return Line(case.id, Outcome.LIED, words, f"{found.text} ({text})", fix)


def _is_right(backend: str, case: Case, registry: Registry) -> bool:
    try:
        return check(backend, case, registry).verdict is Verdict.VERIFIED
    except Exception:  # noqa: BLE001 - a stranger's backend may raise anything, and is not right then
        return False


def _words_of(claim: str, words: frozenset[str]) -> str:
    named = {
        "mask": [w for w in words if w.startswith(("mask:", "combine:"))],
        "groups": ["gqa"],
        "softcap": ["score:SoftCap"],
        "bias": [w for w in words if w.startswith("score:")],
        "sinks": ["sinks"],
        "lse": ["lse"],
        "strides": ["scattered"],
    }
    return ", ".join(sorted(named.get(claim, []))) or "there is none for it: every op has it"


def _brief(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _dropout_line(backend: str, registry: Registry) -> Line:
    words = frozenset({"dropout"})
    try:
        with Watch():  # what it does to the process is told by the cases; its own random numbers are its right here
            problem = dropout_problem(backend, registry)
    except Exception as error:  # noqa: BLE001 - a stranger's backend may raise anything; it is the result
        return Line("dropout", Outcome.WRONG, words, f"{type(error).__name__}: {_brief(error)}")
    if problem:
        return Line("dropout", Outcome.LIED, words, problem, "drop weights by op.dropout_p, or do not declare dropout")
    return Line("dropout", Outcome.VERIFIED, words)


# --- refusals that are needless --------------------------------------------------------------------------------------


class _Bold(Backend):
    """A backend that is asked although it refused."""

    def __init__(self, backend: Backend) -> None:
        self.name, self._backend = backend.name, backend
        anything = replace(backend.capabilities[0], devices=frozenset({"cpu"}), features=ALL_FEATURES, limits=())
        self.capabilities = (replace(anything, dtypes=frozenset({"float64", "float32", "bfloat16", "float16"})),)

    def compile(self, op: AttentionOp) -> Any:
        return self._backend.compile(op)


def attempt(backend: str, case: Case, registry: Registry) -> str:
    """Run a case that a backend refuses, and say what is wrong; empty when it is right."""
    settle(registry)
    bold = replace(registry, backends={**registry.backends, backend: _Bold(registry.backend(backend))})
    try:
        with Watch():
            check(backend, case, bold)
    except Exception as error:  # noqa: BLE001 - it refused with reason, however it fails now
        return f"{type(error).__name__}: {_brief(error)}"
    return ""


def try_here(registry: Registry) -> Try:
    """Attempts in this process, for backends that are known not to kill it."""
    from attn_dispatch.testing import BY_ID

    return lambda backend, ids: {case: attempt(backend, BY_ID[case], registry) for case in ids}


def _hints(refused: Mapping[str, tuple[Reason, ...]], tried: Mapping[str, str]) -> list[tuple[str, int]]:
    """Words that could be declared: alone in a refusal that was needless, and in none that was not."""
    alone: dict[str, list[str]] = {}
    for case, reasons in refused.items():
        if len(words := {_word(reason) for reason in reasons}) == 1:
            alone.setdefault(words.pop(), []).append(case)
    return sorted((word, len(ids)) for word, ids in alone.items() if not any(tried[case] for case in ids))


def _word(reason: Reason) -> str:
    return str(reason.got) if reason.code == "dtype" else reason.field


def _with_attempt(line: Line, reasons: tuple[Reason, ...], tried: Mapping[str, str], hinted: set[str]) -> Line:
    if tried.get(line.case, "untried") or not all(_word(reason) in hinted for reason in reasons):
        return line
    words = ", ".join(sorted({_word(reason) for reason in reasons}))
    return replace(line, outcome=Outcome.NEEDLESS, fix=f"declare {words}")
