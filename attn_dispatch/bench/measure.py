"""Measure one op: everybody is verified against float64, and who is right is timed in turn with the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attn_dispatch.bench.by_hand import by_hand, parts_of
from attn_dispatch.bench.contenders import Contender, NotApplicable, candidates, graded, ours
from attn_dispatch.bench.peers import peers
from attn_dispatch.bench.truth import Truth
from attn_dispatch.ir import atoms
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias, SoftCap
from attn_dispatch.ir.tensors import short_dtype
from attn_dispatch.ir.weights import Linear, Softmax
from attn_dispatch.registry import Registry, current
from attn_dispatch.selection.samples import Sample, make_sample
from attn_dispatch.selection.timing import Timing, interleaved, waiter

__all__ = ["MIN_ROUNDS", "Effort", "Line", "Row", "label", "measure"]

MIN_ROUNDS = 5
_FINAL_ROUNDS = 9  # at least, of those that are close to the fastest
_CLOSE = 1.25  # this many times the fastest's time
_HOPELESS = 10.0  # this many times slower than the fastest: one call says enough
_HEAVY_S = 0.2  # and only where its turns would take long
_ALWAYS = {"ours", "sdpa"}  # ratios are of these


@dataclass(frozen=True)
class Effort:
    """How long an op is measured.

    Args:
        rounds: rounds in which all contenders take turns; those that are close to the fastest then take twice as many
            turns by themselves. total_s: fewer rounds (never under `MIN_ROUNDS`) where either would take longer.
        turn_s: calls are repeated within a turn until they take about this long.
    """

    rounds: int = 15
    total_s: float = 30.0
    turn_s: float = 0.02


@dataclass(frozen=True)
class Line:
    """What one contender did.

    Args:
        name, kind: see `Contender`; names are unique in a row.
        median_us, spread_us: over rounds; None when it was not timed.
        note: why it was not (``n/a: ...``, ``wrong: ...``, ``failed: ...``), or ``one call``.
        make_s: seconds it took to prepare: compilation, a session; not part of the time.
        samples: what each round said, of those that were in the second timing.
    """

    name: str
    kind: str
    median_us: float | None = None
    spread_us: float | None = None
    note: str = ""
    make_s: float = 0.0
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class Row:
    """All that was measured of one op; ratios say how many times faster ours is.

    Args:
        name: unique in its suite. chosen, source: what `dispatch.attention` runs, and where that choice comes from.
        rounds: how many were taken, in the second timing.
        count, layers: how often the op runs in its workload, and in how many layers.
    """

    name: str
    op: AttentionOp
    chosen: str
    source: str
    lines: tuple[Line, ...]
    rounds: int = 0
    count: int = 1
    layers: int = 1

    def fastest(self, *kinds: str) -> Line | None:
        """The fastest timed contender of some kinds."""
        timed = [line for line in self.lines if line.kind in kinds and line.median_us is not None]
        return min(timed, key=lambda line: line.median_us or 0.0, default=None)

    @property
    def ours_us(self) -> float | None:
        """The time of our call."""
        return next((line.median_us for line in self.lines if line.kind == "ours"), None)

    @property
    def noise(self) -> float:
        """The largest spread of ours, the choice and the fastest, as a part of its time; 0 where none took rounds."""
        fastest = self.fastest("ours", "candidate", "torch", "peer")
        judged = [line for line in self.lines if line.kind == "ours" or line is fastest or line.name == self.chosen]
        return max((x.spread_us / x.median_us for x in judged if x.spread_us and x.median_us), default=0.0)

    @property
    def over_given(self) -> float | None:
        """Over SDPA as given."""
        return self._over(next((line for line in self.lines if line.name == "sdpa"), None))

    @property
    def over_best(self) -> float | None:
        """Over the fastest form with torch that we know by hand, SDPA as given among them."""
        return self._over(self.fastest("torch"))

    @property
    def over_peer(self) -> float | None:
        """Over the fastest other library."""
        return self._over(self.fastest("peer"))

    @property
    def regret(self) -> float | None:
        """How much slower the chosen candidate is than the fastest of all, each run by itself; 0.1 is 10 %.

        By itself a candidate finds its operands prepared, and nobody looks it up: that is part of `behind` alone.
        The fastest is picked by one half of the rounds and compared with the choice in the other, both ways: the lowest
        of many medians from the same rounds would be below anybody's true time. None where the choice was not timed.
        """
        mine = next((line for line in self.lines if line.kind == "candidate" and line.name == self.chosen), None)
        return self._behind(mine, "candidate", "torch", "peer")

    @property
    def behind(self) -> float | None:
        """How much slower `dispatch.attention` is, with the call, than the fastest of all, each run by itself."""
        mine = next((line for line in self.lines if line.kind == "ours"), None)
        return self._behind(mine, "ours", "candidate", "torch", "peer")

    def _over(self, line: Line | None) -> float | None:
        mine = self.ours_us
        return None if mine is None or line is None or line.median_us is None else line.median_us / mine

    def _behind(self, mine: Line | None, *kinds: str) -> float | None:
        if mine is None or mine.median_us is None:
            return None
        close = [line for line in self.lines if line.kind in kinds and line.samples]
        if not mine.samples or not close:
            fastest = self.fastest(*kinds)
            best = None if fastest is None else fastest.median_us
            return None if best is None else max(0.0, mine.median_us / best - 1.0)
        count = len(mine.samples)
        width = 2 if count >= 4 else 1  # rounds come in pairs, one in either order
        halves = [[i for i in range(count) if i // width % 2 == part] for part in (0, 1)]
        found: list[float] = []
        for picks, judges in (halves, halves[::-1]):
            best_line = min(close, key=lambda line: statistics.median(line.samples[i] for i in picks))
            found.append(statistics.median(mine.samples[i] / best_line.samples[i] for i in judges))
        return max(0.0, statistics.fmean(found) - 1.0)


def label(op: AttentionOp) -> str:
    """A short name, unique among ops that one model runs: ``"4 x prefill 512 padded bf16"``."""
    sizes = {"decode": f"decode {op.Skv}", "cross": f"cross {op.Sq} x {op.Skv}"}.get(op.phase, f"prefill {op.Sq}")
    words = [sizes if op.B == 1 else f"{op.B} x {sizes}"]
    for part in parts_of(op.mask):
        if isinstance(part, (atoms.KeyLengths, atoms.Columns)):
            words.append("padded")
        elif isinstance(part, atoms.Window):
            words.append(f"window {(part.left or 0) + 1}")
        elif isinstance(part, atoms.Segments):
            words.append("documents")
        elif not isinstance(part, (atoms.Causal, atoms.Full)):
            words.append(type(part).__name__.lower())
    names = {SoftCap: "capped", Bias: "bias", Alibi: "alibi"}
    words += [names.get(type(term), str(term)) for term in op.score]
    words += ["sinks"] if isinstance(op.weight, Softmax) and op.weight.sinks is not None else []
    words += ["linear"] if isinstance(op.weight, Linear) else []
    words += [short_dtype(op.dtype)] if op.dtype != "float32" else []
    words += ["training"] if op.grad else []
    return " ".join(words)


def measure(
    name: str,
    op: AttentionOp,
    effort: Effort | None = None,
    peer_names: Iterable[str] = (),
    registry: Registry | None = None,
    extra: Callable[[AttentionOp, Sample], list[Contender]] | None = None,
) -> Row:
    """Verify and time everybody on one op.

    Args:
        name: of the row. op: a canonical op. peer_names: of `attn_dispatch.bench.peers.PEERS`.
        registry: whose candidates are timed. extra: more contenders.

    Raises:
        InputError: no call of `dispatch.attention` gives this op.
    """
    effort = effort or Effort()
    sample = make_sample(op)
    truth = Truth(op, sample)
    mine, chosen, source = ours(op, sample)
    everybody = [mine]
    for form, make in candidates(op, registry or current(), chosen):
        everybody.append(Contender(form, "candidate", lambda make=make: make(sample)))  # type: ignore[misc]
    everybody += by_hand(op, sample) + peers(op, sample, tuple(peer_names)) + (extra(op, sample) if extra else [])
    with torch.set_grad_enabled(bool(op.grad)):
        tried = [_try(contender, op, sample, truth) for contender in everybody]
        lines, rounds = _time(tried, effort, op.device, chosen)
    return Row(name, op, chosen, source, tuple(lines), rounds)


@dataclass
class _Tried:
    line: Line
    step: Callable[[], Any] | None = None
    once_s: float = 0.0


def _try(contender: Contender, op: AttentionOp, sample: Sample, truth: Truth) -> _Tried:
    """Prepare a contender and compare its first result; whatever it raises is its note and ends nothing."""

    def noted(note: str) -> _Tried:
        return _Tried(Line(contender.name, contender.kind, note=note))

    if op.grad and not contender.differentiable:
        return noted("n/a: forward only")
    start = time.perf_counter()
    try:
        step = graded(contender.make(), op, sample)
        made_s = time.perf_counter() - start
        out, *grads = step()
        problem = truth.problem(out, grads)
        del out, grads
        if problem:
            return noted(f"wrong: {problem}")
        once_s = _once(step, op.device)
    except NotApplicable as reason:
        return noted(f"n/a: {reason}")
    except Exception as error:  # noqa: BLE001 - any contender may break in any way; the error is its result
        said = " ".join(str(error).split())
        return noted(f"failed: {type(error).__name__}: {said[:160]}")
    return _Tried(Line(contender.name, contender.kind, make_s=round(made_s, 3)), step, once_s)


def _once(step: Callable[[], Any], device: str = "cpu") -> float:
    """Seconds of one call, the least of three unless they are long: a busy machine must not make one look hopeless."""
    found: list[float] = []
    wait = waiter(device)
    while not found or (len(found) < 3 and sum(found) < 1.0):
        wait()
        start = time.perf_counter()
        step()
        wait()
        found.append(time.perf_counter() - start)
    return min(found)


def _time(tried: list[_Tried], effort: Effort, device: str, chosen: str) -> tuple[list[Line], int]:
    """Time all that were right, except those that are too slow to matter, whose one call is taken."""
    ready = [one for one in tried if one.step is not None]
    if not ready:
        return [one.line for one in tried], 0
    fastest = min(one.once_s for one in ready)
    always = _ALWAYS | {chosen}
    slow = {one.line.name for one in ready if one.once_s > max(_HOPELESS * fastest, _HEAVY_S)} - always
    taking = {one.line.name: one.step for one in ready if one.step is not None and one.line.name not in slow}
    once = {one.line.name: max(one.once_s, effort.turn_s) for one in ready}

    def rounds_of(names: Iterable[str], wanted: int, least: int) -> int:
        return min(wanted, max(least, int(effort.total_s / sum(once[name] for name in names))))

    rounds = rounds_of(taking, effort.rounds, min(effort.rounds, MIN_ROUNDS))
    times = interleaved(taking, rounds, effort.turn_s, device=device)
    close = _close(times, {one.line.name: one.line.kind for one in ready}, always)
    finals = rounds_of(close, 2 * effort.rounds, min(2 * effort.rounds, _FINAL_ROUNDS))
    again = interleaved({name: taking[name] for name in close}, finals, effort.turn_s, device=device)
    lines = []
    for one in tried:
        line = one.line
        if line.name in times:
            timing = again.get(line.name, times[line.name])
            samples = timing.samples if line.name in again else ()
            line = Line(line.name, line.kind, timing.median_us, timing.spread_us, "", line.make_s, samples)
        elif line.name in slow:
            line = Line(line.name, line.kind, one.once_s * 1e6, None, "one call", line.make_s)
        lines.append(line)
    return lines, finals


def _close(times: Mapping[str, Timing], kinds: Mapping[str, str], always: Collection[str]) -> list[str]:
    """Who is timed again: who always is, and those that may be the fastest, of all or of their kind."""
    best = {kind: min(t.median_us for n, t in times.items() if kinds[n] == kind) for kind in {kinds[n] for n in times}}
    fastest = min(best.values())
    return [
        name
        for name, timing in times.items()
        if name in always or timing.median_us <= _CLOSE * fastest or timing.median_us == best[kinds[name]]
    ]
