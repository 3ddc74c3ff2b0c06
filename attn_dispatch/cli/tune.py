"""``attn-dispatch tune``: measure the ops of workloads on this machine, and write a lock file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from attn_dispatch.capture import Use, Workload, workload_files
from attn_dispatch.errors import InputError, NoBackendError
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.registry import Registry, current
from attn_dispatch.selection.decide import ranked
from attn_dispatch.selection.environment import Environment, environment
from attn_dispatch.selection.lock import entry_dict, lock_dict, read_lock, write_lock
from attn_dispatch.selection.pace import LIMIT
from attn_dispatch.selection.ranks import tune_together
from attn_dispatch.selection.store import Entry
from attn_dispatch.selection.tuned import has_ranks, stale, store
from attn_dispatch.selection.tuner import Effort, Session, version_of

__all__ = ["Outcome", "hardware_of", "provenance_of", "run", "tune_uses"]


@dataclass
class Outcome:
    """What a run of the command has done so far.

    Args:
        entries: one per bucket, with the uses that fall into it. reused: how many were in the store already.
        skipped: op and reason of what could not be tuned. interrupted: Ctrl-C ended it.
        again: op and how many times slower than usual the machine had been, of those that were measured twice.
    """

    entries: list[tuple[Entry, Use]] = field(default_factory=list)
    reused: int = 0
    skipped: list[tuple[AttentionOp, str]] = field(default_factory=list)
    interrupted: bool = False
    again: list[tuple[AttentionOp, float]] = field(default_factory=list)


def run(files: Sequence[Path], out: Path | None, effort: Effort, force: bool, device: str, as_json: bool) -> int:
    """Tune the workloads' ops, print what was found, and write the lock file.

    Returns:
        The exit code: 0; 1 when nothing was tuned, and no file written; or 130 after Ctrl-C (what was done is kept and
        written).

    Raises:
        InputError: a file is no workload, or ``out`` holds pins, which would be lost.
    """
    console = Console(stderr=as_json, width=None if sys.stdout.isatty() else 150)  # a pipe would be cut at 80 columns
    uses = _uses(files, device)
    kinds = sorted({use.op.device for use in uses})
    if out is not None and len(kinds) > 1:
        raise InputError(f"-o {out} is one file for one machine kind, and the ops are for {', '.join(kinds)}")
    place = environment(kinds[0])
    if out is not None and out.exists():
        read_lock(out, hardware_of(place))  # what must not be written over is named before the work
    start = time.perf_counter()
    outcome = tune_uses(uses, Session(effort), force, console)
    seconds = time.perf_counter() - start
    by = " ".join(["attn-dispatch tune", *(str(file) for file in files)])
    try:
        wrote = _write(out, outcome, place, by, seconds) if out is not None else ""
    finally:  # written first, and shown where it cannot be written too
        if as_json:
            typer.echo(_json(outcome))
        else:
            console.print(_table(outcome))
            console.print(_summary(outcome, seconds), markup=False, highlight=False)
    if wrote:
        console.print(wrote, markup=False, highlight=False)
    if outcome.interrupted:
        return 130
    return 0 if any(entry.ranking for entry, _ in outcome.entries) else 1


def _write(out: Path, outcome: Outcome, place: Environment, by: str, seconds: float) -> str:
    """Bring the lock file up to date; what was done, for people."""
    fresh = [entry_dict(entry, use.layers, use.count) for entry, use in outcome.entries if entry.ranking]
    if not fresh:
        return f"nothing was tuned: {out} was not written"
    digests = {entry["digest"] for entry in fresh}
    existing = read_lock(out, hardware_of(place)) if out.exists() else []  # as others left it meanwhile
    kept = [entry for entry in existing if entry.get("digest") not in digests]
    write_lock(out, lock_dict([*kept, *fresh], hardware_of(place), provenance_of(by, place, seconds)))
    return f"wrote {out}: {len(fresh)} ops measured, {len(kept)} kept from before"


def tune_uses(uses: Sequence[Use], session: Session, force: bool, console: Console) -> Outcome:
    """Tune each op and keep it in the store at once, so that an end in between loses nothing.

    Args:
        uses: one per bucket. session: effort and what ops share. force: measure what the store has too.
    """
    outcome, registry = Outcome(), current()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("tuning", total=len(uses))
        try:
            for use in uses:
                progress.update(task, description=_short(use.op))
                known = store().get(use.op)
                if isinstance(known, Entry) and not force and _serves(known, registry, session.effort):
                    outcome.entries.append((known, use))
                    outcome.reused += 1
                else:
                    _tune_one(use, session, outcome)
                progress.advance(task)
            slow = [] if has_ranks() else _of_slow_minutes(outcome, session)
            progress.update(task, total=len(uses) + len(slow))
            for entry, use in slow:
                progress.update(task, description=f"again: {_short(use.op)}")
                _tune_again(entry, use, session, outcome)
                progress.advance(task)
        except KeyboardInterrupt:
            outcome.interrupted = True
    return outcome


def _of_slow_minutes(outcome: Outcome, session: Session) -> list[tuple[Entry, Use]]:
    """What was measured while the machine was slower than usual by more than `LIMIT`."""
    return [(entry, use) for entry, use in outcome.entries if session.slowdown_of(use.op) > LIMIT]


def _tune_again(entry: Entry, use: Use, session: Session, outcome: Outcome) -> None:
    """Measure an op once more, and keep what was measured at the better pace."""
    pace, slowdown = session.paces[use.op], session.slowdown_of(use.op)
    second = _measured(use.op, session)
    outcome.again.append((use.op, slowdown))
    if not isinstance(second, Entry) or not second.ranking or (entry.ranking and session.paces[use.op] >= pace):
        session.paces[use.op] = min(pace, session.paces[use.op])
        return
    store().put(second)
    outcome.entries[outcome.entries.index((entry, use))] = (second, use)
    outcome.skipped = [(op, why) for op, why in outcome.skipped if op != use.op]


def _serves(entry: Entry, registry: Registry, effort: Effort) -> bool:
    """Whether measuring again finds nothing new: somebody passed, and nobody is new, mended, or allowed only now."""
    if not entry.ranking or stale(entry.records, registry):
        return False
    for candidate, _ in ranked(entry.measured, registry)[0]:
        record = entry.record(candidate.name)
        if record is None:
            return False
        if record.status not in ("ok", "pruned") and record.version != version_of(candidate.name, registry):
            return False
        compile_s, backend = candidate.backend.compile_s, candidate.backend.name
        tried = any(r.status != "pruned" and r.name.split(" > ")[-1] == backend for r in entry.records)
        if 0 < compile_s <= effort.compile_s and not tried:
            return False
    return True


def _tune_one(use: Use, session: Session, outcome: Outcome) -> None:
    entry = _measured(use.op, session)
    if isinstance(entry, str):
        outcome.skipped.append((use.op, entry))
        return
    store().put(entry)
    outcome.entries.append((entry, use))
    if not entry.ranking:
        outcome.skipped.append(
            (use.op, "no candidate passed: " + "; ".join(f"{r.name} {r.status}" for r in entry.records))
        )


def _measured(op: AttentionOp, session: Session) -> Entry | str:
    """What was found of an op, or why it could not be measured: one op must not lose the others."""
    if op.device == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device here"
    try:
        entry = tune_together(op, current(), session)
    except NoBackendError as error:
        return str(error).splitlines()[0]
    except Exception as error:  # noqa: BLE001 - whatever it is, it is said of this op
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return entry if entry is not None and entry.when else "the ranks cannot tune together"


def _uses(files: Sequence[Path], device: str) -> list[Use]:
    """One use per bucket: the op that runs most often stands for its bucket, with the counts and layers of all."""
    buckets: dict[AttentionOp, list[Use]] = {}
    for file in (file for place in files for file in workload_files(place)):
        for use in Workload.load(file).ops():
            moved = use.moved(device)
            buckets.setdefault(moved.op.bucketed(), []).append(moved)
    if not buckets:
        raise InputError(f"{', '.join(map(str, files))}: no op to tune", remedy="dispatch.capture() writes workloads")
    found = []
    for uses in buckets.values():
        layers = dict.fromkeys(layer for use in uses for layer in use.layers)
        found.append(Use(max(uses, key=lambda use: use.count).op, sum(use.count for use in uses), tuple(layers)))
    return found


def hardware_of(place: Environment) -> dict[str, Any]:
    """A machine, as the head of a lock file names it."""
    hardware = {"device": place.device, "name": place.name, "arch": place.arch}
    return hardware | ({"threads": place.threads} if place.threads else {})


def provenance_of(by: str, place: Environment, seconds: float) -> dict[str, Any]:
    """When, with what and by which command a lock file was measured."""
    now = datetime.now(timezone.utc).date()
    return {"when": now, "torch": place.torch, "driver": place.runtime or None, "seconds": round(seconds), "by": by}


# --- what is printed -----------------------------------------------------------------------------------------------


def _short(op: AttentionOp) -> str:
    return f"{op.phase} q {list(op.query.shape)} k {list(op.key.shape)} {op.dtype}"


def _gain(entry: Entry) -> float | None:
    """How many times faster the choice is than what would run untuned."""
    legal, _ = ranked(entry.measured, current())
    untuned = entry.record(legal[0][0].name) if legal else None
    best = entry.record(entry.winner)
    if untuned is None or best is None or not untuned.median_us or not best.median_us:
        return None
    return untuned.median_us / best.median_us


def _table(outcome: Outcome) -> Table:
    table = Table(title=escape(f"tuned on {_place(outcome)}") if outcome.entries else "nothing was tuned")
    for column in ("op", "runs", "choice", "median", "spread", "over untuned", "why"):
        table.add_column(column, justify="left" if column in ("op", "choice", "why") else "right", overflow="fold")
    for entry, use in outcome.entries:
        best = entry.record(entry.winner)
        gain = _gain(entry)
        times = ["-", "-"]
        if best is not None and best.median_us is not None and best.spread_us is not None:
            times = [f"{best.median_us:,.0f} us", f"{best.spread_us:,.0f} us"]
        ratio = "-" if gain is None else f"{gain:.2f}x"
        cells = (_short(entry.measured), str(use.count), entry.winner or "none", *times, ratio, entry.why)
        table.add_row(*map(escape, cells))
    return table


def _place(outcome: Outcome) -> str:
    place = outcome.entries[0][0].environment
    return f"{place.name}, {place.threads} threads, torch {place.torch}"


def _summary(outcome: Outcome, seconds: float) -> str:
    lines = [f"{len(outcome.entries)} ops, {outcome.reused} from the store, {seconds:.0f} s"]
    lines += [f"not tuned: {op}: {why}" for op, why in outcome.skipped]
    lines += [f"failed: {name}" for name in _failures(entry for entry, _ in outcome.entries)]
    if outcome.again:
        worst = max(slowdown for _, slowdown in outcome.again)
        lines.append(
            f"{len(outcome.again)} ops measured twice: the machine had been up to {worst:.1f}x slower than usual"
        )
    lines += ["interrupted: what was done is kept"] if outcome.interrupted else []
    return "\n".join(lines)


def _failures(entries: Iterable[Entry]) -> list[str]:
    bad = ("wrong", "unverified", "crashed", "timeout", "memory", "error")
    return [
        f"{r.name} on {_short(e.measured)}: {r.status}, {r.note}" for e in entries for r in e.records if r.status in bad
    ]


def _json(outcome: Outcome) -> str:
    import json

    entries = [entry.to_dict() | {"count": use.count, "layers": list(use.layers)} for entry, use in outcome.entries]
    skipped = [{"op": op.to_dict(), "why": why} for op, why in outcome.skipped]
    return json.dumps({"entries": entries, "skipped": skipped, "interrupted": outcome.interrupted}, indent=1)
