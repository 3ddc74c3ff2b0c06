"""`attn-dispatch bench`: which suite, which rows, and what is written. Nothing here asserts a time."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import attn_dispatch
from attn_dispatch.bench.measure import Effort, Row, label, measure
from attn_dispatch.bench.peers import PEERS
from attn_dispatch.bench.picture import draw, need_matplotlib
from attn_dispatch.bench.report import Report, columns, environment
from attn_dispatch.capture import Use, Workload, workload_files
from attn_dispatch.errors import AttnDispatchError, InputError
from attn_dispatch.selection.timing import waiter

__all__ = ["Job", "Wanted", "jobs_of", "peers_named", "run_suite", "workload_folder"]


_NOISY = 0.1  # of a time: where the middle half of the rounds is further apart, a row is measured again


@dataclass(frozen=True)
class Job:
    """A row to measure: its name, and the op with its count and layers."""

    name: str
    use: Use


@dataclass(frozen=True)
class Wanted:
    """What is to be written beside the table on the screen; None is not."""

    json: Path | None = None
    markdown: Path | None = None
    picture: Path | None = None

    def check(self) -> None:
        """What can be known before anything is measured.

        Raises:
            InputError: a folder that is not there, or no matplotlib for the picture.
        """
        for flag, path in (("--json", self.json), ("--markdown", self.markdown), ("--picture", self.picture)):
            if path is not None and path.is_dir():
                raise InputError(f"{flag} {path} is a folder", remedy="name the file to write")
            if path is not None and not path.parent.is_dir():
                raise InputError(f"{flag}: there is no folder {path.parent} to write {path.name} into")
        if self.picture is not None:
            need_matplotlib()


def workload_folder() -> Path:
    """The workload files that come with this package, suite ``main``."""
    package = Path(attn_dispatch.__file__).parent
    places = (package / "configs" / "workloads", package.parent / "configs" / "workloads")
    return next((place for place in places if place.is_dir()), places[0])


def jobs_of(suite: str, only: str | None = None, device: str = "") -> list[Job]:
    """The rows of a suite.

    Args:
        suite: ``"main"``, a workload file, or a folder of them. only: rows whose name contains this.
        device: the device type to run all on; each op's own when empty.

    Raises:
        InputError: no such suite or file, a file that is no workload, or no row with such a name.
    """
    place = workload_folder() if suite == "main" else Path(suite)
    if suite != "main" and not place.exists():
        problem = f"there is no suite {suite!r} and no such file"
        raise InputError(problem, remedy="main, core, variants, a workload file (dispatch.capture) or a folder of them")
    loaded = [(file.stem, use) for file in workload_files(place) for use in Workload.load(file).ops()]
    jobs = [Job(f"{stem} {label(use.op)}", use.moved(device)) for stem, use in loaded]
    found = [job for job in jobs if not only or only in job.name]
    if only and not found:
        names = ", ".join(job.name for job in jobs)
        raise InputError(f"no row of suite {suite} has {only!r} in its name", remedy=f"one of: {names}")
    return found


def peers_named(text: str) -> tuple[str, ...]:
    """``"all"``, ``"none"`` or names with commas between.

    Raises:
        InputError: a name that is no peer.

    Example:
        >>> peers_named("flex, onnxruntime")
        ('flex', 'onnxruntime')
    """
    if text in ("all", "none", ""):
        return tuple(PEERS) if text == "all" else ()
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in PEERS:
            raise InputError(f"--peers {name!r} is no peer", remedy=f"all, none, or of {', '.join(PEERS)}")
    return names


def run_suite(
    suite: str,
    only: str | None = None,
    effort: Effort | None = None,
    peers: str = "all",
    wanted: Wanted | None = None,
    device: str = "",
) -> int:
    """Measure a suite and print its table.

    Args:
        suite, only, device: see `jobs_of`. peers: see `peers_named`. wanted: files to write.

    Returns:
        The exit code: 0; 1 where ours was wrong or failed, or a row could not be measured; or 130 when it was
        interrupted, with all rows until then printed and written.

    Raises:
        InputError: what was asked for cannot be measured or written, which is known before the first row.
    """
    wanted = wanted or Wanted()
    wanted.check()
    console = Console(width=None if sys.stdout.isatty() else 190)  # a pipe would be cut at 80 columns
    jobs, names = jobs_of(suite, only, device), peers_named(peers)
    report = Report(suite, environment(_device_of(jobs)))
    try:
        for number, job in enumerate(jobs, 1):
            row = _measure_one(f"{number} of {len(jobs)}", job, effort or Effort(), names, report, console)
            report.rows += [] if row is None else [row]
            _write_json(report, wanted)  # after every row: a run that is killed leaves what it has
        _measure_noisy_again({job.name: job for job in jobs}, effort or Effort(), names, report, console)
        report.is_whole = True
    except KeyboardInterrupt:
        console.print("interrupted: what follows is what was measured until then", markup=False)
    _show(report, console)
    _write_json(report, wanted)
    if wanted.markdown is not None:
        wanted.markdown.write_text(report.markdown(), encoding="utf-8")
    if wanted.picture is not None:
        draw(report, wanted.picture)
    if not report.is_whole:
        return 130
    return 1 if report.problems or any(row.ours_us is None for row in report.rows) else 0


def _device_of(jobs: list[Job]) -> str:
    """The one device type that the rows run on."""
    kinds = sorted({job.use.op.device for job in jobs}) or ["cpu"]
    if len(kinds) > 1:
        problem = f"one run is of one device type, and the ops are for {', '.join(kinds)}"
        raise InputError(problem, remedy=f"--device {kinds[0]}")
    if kinds[0] == "cuda" and not torch.cuda.is_available():
        raise InputError("the ops are for cuda, and there is no CUDA device here", remedy="--device cpu")
    waiter(kinds[0])  # raises where the device cannot be timed
    return kinds[0]


def _measure_one(
    place: str, job: Job, effort: Effort, peers: tuple[str, ...], report: Report, console: Console
) -> Row | None:
    """Measure a row, or tell the report why it could not be."""
    if not console.is_terminal:  # where a status line cannot be seen
        console.print(f"{place}: {job.name}", markup=False, highlight=False)
    with console.status(escape(f"{place}: {job.name}")):
        try:
            return _with_counts(measure(job.name, job.use.op, effort, peers), job.use)
        except (AttnDispatchError, RuntimeError, ValueError, MemoryError) as error:
            report.problems.append((job.name, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
            return None


def _measure_noisy_again(
    jobs: dict[str, Job], effort: Effort, peers: tuple[str, ...], report: Report, console: Console
) -> None:
    """Rows that another job on the machine has disturbed, once more: the quieter time counts, whatever it says."""
    for at, row in enumerate(report.rows):
        if row.noise > _NOISY:
            again = _measure_one("again, it was noisy", jobs[row.name], effort, peers, report, console)
            report.rows[at] = again if again is not None and again.noise < row.noise else row


def _write_json(report: Report, wanted: Wanted) -> None:
    if wanted.json is not None:
        wanted.json.write_text(report.to_json(), encoding="utf-8")


def _with_counts(row: Row, use: Use) -> Row:
    return Row(row.name, row.op, row.chosen, row.source, row.lines, row.rounds, use.count, len(use.layers))


def _show(report: Report, console: Console) -> None:
    place = report.place
    title = f"suite {report.suite}: {place['device']}, {place['threads']} threads, torch {place['libraries']['torch']}"
    table = Table(title=escape(title))
    for head, side in columns():
        table.add_column(head, justify="left" if side == "left" else "right", overflow="fold")
    for cells in report.cells():
        table.add_row(*map(escape, cells))
    console.print(table)
    for line in report.closing():
        console.print(line, markup=False, highlight=False)
