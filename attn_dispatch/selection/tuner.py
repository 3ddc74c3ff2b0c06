"""The tuner: measure an op's candidates on this machine and keep what was found.

1. Enumerate, and prune by estimate what cannot win (each with the reason in its record).
2. Gate: every candidate is right before it is timed (`gate`). Strangers' backends and forms that need much memory are
   tried in a process of their own first (`probe`), so that a crash, a hang or a lack of memory is a record.
3. Time the survivors in turn, then the near ties again with more rounds.
4. Of all that are within max(3 %, the spread) of the fastest, take the one that the heuristic likes best: a switch away
   from its choice must be worth it, and two runs agree. Where the spread hides one that seems faster by more than 3 %,
   the two run off with more rounds.

The pace of the machine is taken before and after (`pace`): who tunes many ops measures those of a slow minute again.

An op that needs gradients is timed forward and backward as one. The random state, gradients, thread count and inputs
are left as they were: samples come from private generators, gradients from `torch.autograd.grad`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

import torch

from attn_dispatch import device
from attn_dispatch.backend import options_text
from attn_dispatch.errors import NoBackendError
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.registry import Registry
from attn_dispatch.selection.candidates import Candidate, build
from attn_dispatch.selection.decide import ranked
from attn_dispatch.selection.environment import environment
from attn_dispatch.selection.gate import Problems, Verdict, run_gate, step
from attn_dispatch.selection.pace import pace_s, slowdown
from attn_dispatch.selection.probe import failure_of, try_apart
from attn_dispatch.selection.samples import make_sample
from attn_dispatch.selection.store import Entry, Record
from attn_dispatch.selection.timing import Timing, interleaved, spread

__all__ = ["MARGIN", "Effort", "Session", "choose", "tune", "undecided", "version_of"]

MARGIN = 0.03
# The standard error of a median is 1.253 sigma / sqrt(n), and sigma is the interquartile range / 1.349.
_TWO_ERRORS = 2 * 1.253 / 1.349


@dataclass(frozen=True)
class Effort:
    """How hard to look.

    Args:
        prune: candidates whose estimate is more than this many times the best are not tried. reach: the same bound for
            the best and the plain form of each backend. keep: at most so many are tried.
        heavy_us: an op whose best estimate is more than this is tried with half of ``prune`` and ``keep``.
        rounds, final_rounds: of the first and of the deciding timing. round_s: seconds of one turn of one candidate.
        compile_s: backends that compile for longer than this are not tried.
        total_s: seconds of timing after which no new round starts, once there are three; of the deciding timing, once
            there are ``least_rounds``. finalists: at most so many are in it. run_offs: at most so many follow.
        limit_s: seconds a candidate may take in a process of its own. memory: part of the free memory beyond which a
            form is tried in such a process first.
    """

    prune: float = 3.0
    reach: float = 8.0
    keep: int = 8
    heavy_us: float = 150_000.0
    rounds: int = 5
    final_rounds: int = 21
    least_rounds: int = 9
    finalists: int = 5
    run_offs: int = 1
    round_s: float = 0.02
    total_s: float = 5.0
    limit_s: float = 60.0
    memory: float = 0.25
    compile_s: float = 0.0


@dataclass
class Session:
    """What tuning several ops shares: verdicts on cut problems, which many ops have in common, and those problems.

    ``paces`` are the seconds of `pace_s` around the timing of each op, the longer of before and after.
    """

    effort: Effort = field(default_factory=Effort)
    verdicts: dict[Any, Verdict] = field(default_factory=dict)
    problems: Problems = field(default_factory=dict, repr=False)
    paces: dict[AttentionOp, float] = field(default_factory=dict)

    def slowdown_of(self, op: AttentionOp) -> float:
        """How many times slower the machine was while it timed an op than in the better quarter of this session."""
        known = sorted(pace for pace in self.paces.values() if pace > 0)
        return slowdown(self.paces.get(op, 0.0), known[len(known) // 4] if known else 0.0)


def tune(op: AttentionOp, registry: Registry, session: Session | None = None) -> Entry:
    """Measure the candidates of an op.

    Args:
        op: a canonical op at its true size. registry: what competes. session: shared with other ops.

    Returns:
        An entry; its ranking is empty when no candidate passed the gate.

    Raises:
        NoBackendError: nothing can run the op.
    """
    session = session or Session()
    start = time.perf_counter()
    legal, refused = ranked(op, registry)
    if not legal:
        raise NoBackendError(f"nothing to tune: no backend can run {op}", {n: list(r) for n, r in refused.items()})
    with _undisturbed(op):
        tried, records = _prune(legal, op, session.effort)
        passed, failed = _gate(tried, op, registry, session)
        before = pace_s(op.device)
        near, far, broken = _time(passed, op, session.effort)
        session.paces[op] = max(before, pace_s(op.device))
    ranking, why = choose([candidate.name for candidate in passed], near, far)
    timings = near | far
    measured = [
        Record(name, "ok", timing.median_us, timing.spread_us, passed[_candidate(passed, name)].errors)
        for name, timing in sorted(timings.items(), key=lambda named: named[1].median_us)
    ]
    records = [replace(r, version=version_of(r.name, registry)) for r in (*measured, *broken, *failed, *records)]
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    seconds = time.perf_counter() - start
    return Entry(op.bucketed(), op, tuple(records), ranking, environment(op.device), when, seconds, why)


def _candidate(passed: Mapping[Candidate, Verdict], name: str) -> Candidate:
    return next(candidate for candidate in passed if candidate.name == name)


def version_of(name: str, registry: Registry) -> str:
    """What a candidate is made of: the distributions of its parts, the version of its backend's library, and those of
    the backend's options that are not at their defaults: what was measured with others says nothing."""
    parts = name.split(" > ")
    origins = [registry.origins.get(part, "given in code") for part in parts]
    backend = registry.backends.get(parts[-1])
    library = _library_version(backend) if backend is not None else "gone"
    return ", ".join(dict.fromkeys([*origins, f"{parts[-1]} {library}"]))


def _library_version(backend: Any) -> str:
    try:
        version, options = str(backend.version()), options_text(backend)
    except Exception as error:  # noqa: BLE001 - a stranger's code; an unknown version must not look like a known one
        return f"unknown ({type(error).__name__}: {error})"
    return f"{version} ({options})" if options else version


def choose(
    order: Sequence[str], timings: Mapping[str, Timing], far: Mapping[str, Timing] | None = None
) -> tuple[tuple[str, ...], str]:
    """Rank by time; the first place goes to the earliest in ``order`` that is within the margin of the fastest.

    Args:
        order: names as the heuristic likes them. timings: of those that ran, in one session.
        far: of those that were not in that session; they come last.

    Returns:
        The ranking, and the reason for its first place in one line.

    Example:
        >>> choose(["a", "b"], {"a": Timing(102.0, 1.0), "b": Timing(100.0, 1.0)})[0]
        ('a', 'b')
        >>> choose(["a", "b"], {"a": Timing(150.0, 1.0), "b": Timing(100.0, 1.0)})[0]
        ('b', 'a')
    """
    by_time = sorted(timings, key=lambda name: (timings[name].median_us, order.index(name)))
    if not by_time:
        return (), "no candidate passed"
    best = by_time[0]
    winner = next(n for n in order if n in timings and _is_as_fast(timings[n], timings[best]))
    slower = far or {}
    others = [*(n for n in by_time if n != winner), *sorted(slower, key=lambda name: slower[name].median_us)]
    took = f"{timings[winner].median_us:,.0f} us"
    if not others:
        why = f"{took}, the only one that passed"
    elif winner != best:
        why = f"{took}; {best} took {timings[best].median_us:,.0f} us, less than the margin apart"
    else:
        second = {**slower, **timings}[others[0]]
        why = f"{took}, {second.median_us / timings[winner].median_us:.2f}x faster than {others[0]}"
    return (winner, *others), why


def _is_as_fast(timing: Timing, best: Timing) -> bool:
    """Within max(3 %, the spread) of the fastest.

    The spread is that of the median: twice its standard error, of the ratio within rounds, which both shared. The
    spread of single rounds would keep a choice that loses by a fifth, whenever the machine is busy.
    """
    saved = 1.0 - best.median_us / timing.median_us
    if timing.samples and len(timing.samples) == len(best.samples):
        ratios = [theirs / mine for mine, theirs in zip(timing.samples, best.samples, strict=True)]
        saved, noise = 1.0 - statistics.median(ratios), _TWO_ERRORS * spread(ratios) / math.sqrt(len(ratios))
    else:
        noise = max(timing.spread_us, best.spread_us) / timing.median_us
    return saved <= max(MARGIN, noise)


# --- the steps -----------------------------------------------------------------------------------------------------


@contextmanager
def _undisturbed(op: AttentionOp) -> Iterator[None]:
    """The state that the caller may have set around a call does not reach the measurement, nor the other way round."""
    devices = range(torch.cuda.device_count()) if op.device == "cuda" else ()
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.set_grad_enabled(bool(op.grad)))
        stack.enter_context(torch.autocast(op.device, enabled=False))
        stack.enter_context(torch._C.DisableTorchFunction())
        try:
            yield
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


def _prune(
    legal: Sequence[tuple[Candidate, float]], op: AttentionOp, effort: Effort
) -> tuple[list[Candidate], list[Record]]:
    """Who is tried; a record with the reason for who is not."""
    best = legal[0][1]
    halved = 2.0 if best > effort.heavy_us else 1.0
    prune, reach, keep = effort.prune / halved, effort.reach / halved, int(effort.keep / halved)
    tried: list[Candidate] = []
    records: list[Record] = []
    seen: set[str] = set()
    for candidate, estimate in legal:
        first_form = candidate.backend.name not in seen or not candidate.chain.steps  # the best form, and the plain one
        seen.add(candidate.backend.name)
        limit = reach if first_form else prune
        if candidate.backend.compile_s > 0:
            if candidate.backend.compile_s <= effort.compile_s and first_form:
                tried.append(candidate)
            else:
                note = f"compiling takes about {candidate.backend.compile_s:g} s; the limit is {effort.compile_s:g} s"
                records.append(Record(candidate.name, "pruned", note=note))
            continue
        estimated = f"estimated {estimate:,.0f} us, {estimate / max(best, 1e-9):.1f}x the best"
        if estimate > limit * best:
            records.append(Record(candidate.name, "pruned", note=f"{estimated}; the limit is {limit:g}x"))
        elif len(tried) >= keep and not (first_form and len(tried) < 2 * keep):
            records.append(Record(candidate.name, "pruned", note=f"{estimated}; {keep} better ones are tried"))
        else:
            tried.append(candidate)
    return tried, records


def _gate(
    tried: Sequence[Candidate], op: AttentionOp, registry: Registry, session: Session
) -> tuple[dict[Candidate, Verdict], list[Record]]:
    """Who is right, in the heuristic's order, and records of those who are not."""
    passed: dict[Candidate, Verdict] = {}
    failed: list[Record] = []
    for candidate in tried:
        name = candidate.name
        if _is_risky(candidate, registry, session.effort):
            failure = try_apart(name, op, registry, session.effort.limit_s)
            if failure is not None:
                failed.append(failure)
                continue
        try:
            verdict = run_gate(name, op, registry, session.verdicts, session.problems)
        except Exception as error:  # noqa: BLE001 - a candidate's failure is its record
            failed.append(failure_of(name, error))
            continue
        if verdict.problem:
            failed.append(Record(name, verdict.status, errors=verdict.errors, note=verdict.problem))
        else:
            passed[candidate] = verdict
    return passed, failed


def _is_risky(candidate: Candidate, registry: Registry, effort: Effort) -> bool:
    """Whether it could take this process down: code of strangers, or more memory than is there."""
    if not registry.is_builtin(candidate.backend.name):
        return True
    traffic = candidate.backend.estimate(candidate.chain.op).bytes
    return traffic / 2 > effort.memory * device.free_memory(candidate.chain.op.device)


def _time(
    passed: Mapping[Candidate, Verdict], op: AttentionOp, effort: Effort
) -> tuple[dict[str, Timing], dict[str, Timing], list[Record]]:
    """Those close to the best, measured again with more rounds by themselves; the others, as measured first.

    Only times of one session compare, so the choice is made among the former.
    """
    if not passed:
        return {}, {}, []
    sample = make_sample(op, "typical", seed=2)
    steps: dict[str, Any] = {}
    broken: list[Record] = []
    for candidate in passed:
        try:
            made = step(build(candidate, op).run, op, sample)
            made()
            steps[candidate.name] = made
        except Exception as error:  # noqa: BLE001 - a candidate's failure is its record
            broken.append(failure_of(candidate.name, error))
    if not steps:
        return {}, {}, broken
    first = interleaved(steps, effort.rounds, effort.round_s, effort.total_s, op.device)
    by_time = sorted(first, key=lambda name: first[name].median_us)
    best = first[by_time[0]].median_us
    close = [n for n in by_time if (t := first[n]).median_us <= best * 1.5 or t.median_us - t.spread_us <= best]
    near = {name: steps[name] for name in steps if name in close[: effort.finalists]}
    far = {name: timing for name, timing in first.items() if name not in near}
    if len(near) == 1:
        return {name: first[name] for name in near}, far, broken
    least = min(effort.least_rounds, effort.final_rounds)
    final = interleaved(near, effort.final_rounds, effort.round_s, effort.total_s, op.device, least)
    for _ in range(effort.run_offs):
        torn = undecided(list(steps), final)
        if not torn:
            break
        far |= {name: timing for name, timing in final.items() if name not in torn}
        near = {name: near[name] for name in torn}
        final = interleaved(near, 2 * effort.final_rounds, effort.round_s, effort.total_s, op.device, 2 * least)
    return final, far, broken


def undecided(order: Sequence[str], timings: Mapping[str, Timing]) -> list[str]:
    """Who runs off: the choice and all within the margin of the fastest, where that is faster by more than the margin.

    Example:
        >>> undecided(["a", "b", "c"], {"a": Timing(110.0, 20.0), "b": Timing(100.0, 20.0), "c": Timing(112.0, 1.0)})
        ['a', 'b']
        >>> undecided(["a", "b"], {"a": Timing(102.0, 20.0), "b": Timing(100.0, 20.0)})
        []
    """
    winner = choose(order, timings)[0][0]
    fastest = min(timing.median_us for timing in timings.values())
    limit = fastest / (1.0 - MARGIN)
    if timings[winner].median_us <= limit:
        return []
    return [name for name in timings if name == winner or timings[name].median_us <= limit]
