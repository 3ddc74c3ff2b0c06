"""What a run of a suite says: a table for a terminal, the same in Markdown, and JSON with every number."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

import torch

from attn_dispatch.bench.by_hand import is_sdpa
from attn_dispatch.bench.measure import Row
from attn_dispatch.device import facts
from attn_dispatch.native import decode, lookup

__all__ = ["Report", "Summary", "environment", "geomean"]

HEADS = ("op", "ours", "chosen", "over SDPA", "over its best form", "best peer", "over it", "regret", "with the call")


@dataclass(frozen=True)
class Summary:
    """A suite in numbers: geometric means of ratios, and of regret its mean and worst with the row that has it.

    The first means are over all ops, ``..._sdpa`` over the ``sdpa_rows`` ops that SDPA computes: in the others, with
    soft caps or sinks, what a person writes is plain torch. ``regret`` is that of the choice, each contender run by
    itself, and ``behind`` that of our call, which has to find the choice first.
    """

    rows: int
    over_given: float | None
    over_best: float | None
    regret: float | None
    worst_regret: float | None
    worst_row: str
    behind: float | None
    worst_behind: float | None
    worst_row_behind: str
    sdpa_rows: int
    over_given_sdpa: float | None
    over_best_sdpa: float | None


@dataclass
class Report:
    """The rows measured so far, and where.

    Args:
        suite: its name. place: see `environment`. rows: in order. problems: rows that could not be measured, with why.
        is_whole: whether the run reached its end.
    """

    suite: str
    place: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)
    is_whole: bool = False

    def summary(self) -> Summary:
        """The means and the worst."""

        def worst(name: str) -> tuple[float | None, str]:
            found = [(value, row.name) for row in self.rows if (value := getattr(row, name)) is not None]
            return max(found, default=(None, ""))

        def mean_of(name: str) -> float | None:
            mean = geomean(1.0 + value for row in self.rows if (value := getattr(row, name)) is not None)
            return None if mean is None else mean - 1.0

        by_sdpa = [row for row in self.rows if is_sdpa(row.op)]
        return Summary(
            len(self.rows),
            geomean(row.over_given for row in self.rows),
            geomean(row.over_best for row in self.rows),
            mean_of("regret"),
            *worst("regret"),
            mean_of("behind"),
            *worst("behind"),
            len(by_sdpa),
            geomean(row.over_given for row in by_sdpa),
            geomean(row.over_best for row in by_sdpa),
        )

    def cells(self) -> list[tuple[str, ...]]:
        """The table, one tuple of `HEADS` per row."""
        return [_cells(row) for row in self.rows]

    def closing(self) -> list[str]:
        """The lines under the table."""
        found = self.summary()
        others = found.rows - found.sdpa_rows
        missing = sum(row.regret is None for row in self.rows)
        lines = [
            f"geometric mean of {found.rows} ops: {_times(found.over_given)} over SDPA as given, "
            f"{_times(found.over_best)} over its best form by hand",
            f"geometric mean of the {found.sdpa_rows} ops that SDPA computes: {_times(found.over_given_sdpa)} over it "
            f"as given, {_times(found.over_best_sdpa)} over its best form by hand"
            + (f" ({others} with soft caps or sinks are plain torch as given)" if others else ""),
            f"regret of the choice to the fastest of all, each run by itself: mean {_percent(found.regret, 1)}, "
            f"worst {_percent(found.worst_regret)} ({found.worst_row})"
            + (f", without {missing} of {found.rows} ops whose choice was not timed by itself" if missing else ""),
            f"our call, which looks the choice up, behind the fastest of all: mean {_percent(found.behind, 1)}, "
            f"worst {_percent(found.worst_behind)} ({found.worst_row_behind})",
        ]
        for row in self.rows:
            lines += [
                f"{row.name}: {line.name} {line.note}"
                for line in row.lines
                if line.note.startswith(("wrong", "failed")) or (line.kind == "ours" and line.note)
            ]
        lines += [f"{name}: not measured: {why}" for name, why in self.problems]
        return lines + ([] if self.is_whole else ["stopped before the end"])

    def markdown(self) -> str:
        """The table and what stands under it, for docs/benchmarks.md."""
        place = self.place
        libraries = ", ".join(f"{name} {version}" for name, version in place.get("libraries", {}).items())
        head = f"Measured on {place.get('when')}: {place.get('device')}, {place.get('threads')} threads, {libraries}."
        lines = [head, "", f"| {' | '.join(HEADS)} |", f"|{'---|' * 3}{'---:|' * 2}---|{'---:|' * 3}"]
        lines += [f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |" for cells in self.cells()]
        return "\n".join([*lines, "", *(f"- {line}" for line in self.closing())]) + "\n"

    def to_json(self) -> str:
        """Everything: each contender of each op with median, spread and note."""
        rows = [
            {
                "name": row.name,
                "op": row.op.to_dict(),
                "digest": row.op.digest(),
                "count": row.count,
                "layers": row.layers,
                "chosen": row.chosen,
                "source": row.source,
                "rounds": row.rounds,
                "over_given": row.over_given,
                "over_best": row.over_best,
                "over_peer": row.over_peer,
                "regret": row.regret,
                "behind": row.behind,
                "contenders": [asdict(line) for line in row.lines],
            }
            for row in self.rows
        ]
        data = {
            "schema": 2,
            "suite": self.suite,
            "is_whole": self.is_whole,
            "environment": self.place,
            "summary": asdict(self.summary()),
            "rows": rows,
            "problems": [{"name": name, "why": why} for name, why in self.problems],
        }
        return json.dumps(data, indent=2) + "\n"


def environment(device: str = "cpu") -> dict[str, Any]:
    """Where a run takes place: processor, threads, versions, and how busy the machine is when it starts."""
    libraries = {"torch": str(torch.__version__)}
    for name in ("attn-dispatch", "onnxruntime", "onnxruntime-gpu", "openvino"):
        try:
            libraries[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    here = facts(device)
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    when = datetime.now(timezone.utc).isoformat(timespec="minutes")
    return {
        "when": when,
        "device": here.name,
        "arch": here.arch,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load": load,
        "lookup": "compiled" if lookup().module is not None else "Python",
        "decode": "compiled" if decode().module is not None else "missing",
        "libraries": libraries,
    }


def geomean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of those that are there; None of none.

    Example:
        >>> geomean([1.0, None, 4.0])
        2.0
    """
    known = [math.log(value) for value in values if value is not None and value > 0]
    return math.exp(statistics.fmean(known)) if known else None


# --- cells -----------------------------------------------------------------------------------------------------------


def _cells(row: Row) -> tuple[str, ...]:
    peer = row.fastest("peer")
    chosen = row.chosen if row.source == "heuristic" else f"{row.chosen} ({row.source})"
    return (
        row.name,
        _duration(row.ours_us) or next((line.note for line in row.lines if line.kind == "ours"), ""),
        chosen,
        _times(row.over_given),
        _times(row.over_best),
        "n/a" if peer is None else peer.name.removeprefix("peer: "),
        _times(row.over_peer),
        _percent(row.regret),
        _percent(row.behind),
    )


def _duration(us: float | None) -> str:
    if us is None:
        return ""
    for limit, factor, unit in ((1e3, 1.0, "us"), (1e6, 1e-3, "ms"), (math.inf, 1e-6, "s")):
        if us < limit:
            return f"{us * factor:.3g} {unit}" if us * factor < 100 else f"{us * factor:.0f} {unit}"
    return ""


def _times(ratio: float | None) -> str:
    return "n/a" if ratio is None else f"{ratio:.2f}x"


def _percent(part: float | None, digits: int = 0) -> str:
    return "n/a" if part is None else f"{100 * part:.{digits}f} %"


def columns() -> Sequence[tuple[str, str]]:
    """The heads, with the side to which a terminal aligns them."""
    return [(head, "left" if head in ("op", "chosen", "best peer") else "right") for head in HEADS]
