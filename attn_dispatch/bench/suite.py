"""`attn-dispatch bench`: run the cases, print ratios, write JSON. Nothing here asserts a time."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attn_dispatch.bench.cases import CASES, GROWING_STEPS, Case, Contenders
from attn_dispatch.bench.main import Wanted
from attn_dispatch.errors import AttnDispatchError, InputError
from attn_dispatch.selection.timing import interleaved

__all__ = ["SUITES", "Row", "cases_of", "disagreement", "import_cost_ms", "run_bench", "run_case"]

# How far two right results may be apart, in parts of the larger of 1 and the largest value: a row may contain the
# projections of a whole module, which each side adds up in its own order.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Row:
    """One measured case; times are medians in microseconds, ratios are SDPA's time over ours.

    Args:
        problem: who computed something else than the others; empty when all agree, or nothing was compared.
        compared: who gave a result that was compared with that of SDPA as given.
    """

    name: str
    ours_us: float
    as_given_us: float
    best_us: float
    spread_us: float
    target: str
    dense: bool
    extra_mib: float | None = None
    problem: str = ""
    compared: tuple[str, ...] = ()

    @property
    def over_given(self) -> float:
        """How many times faster than SDPA as given."""
        return self.as_given_us / self.ours_us

    @property
    def over_best(self) -> float:
        """How many times faster than SDPA's best form."""
        return self.best_us / self.ours_us

    @property
    def note(self) -> str:
        """The absolute difference where that is what counts."""
        if self.name == "warm call":
            return f"{self.ours_us - self.as_given_us:+.2f} us"
        if self.name == "growing decode":
            return f"{(self.ours_us - self.as_given_us) / GROWING_STEPS:+.2f} us a step"
        return f"+{self.extra_mib:.0f} MiB" if self.extra_mib is not None else ""


def run_case(case: Case, rounds: int) -> Row:
    """Compare the first results of a case and measure it: ours, SDPA as given and SDPA's best form, in turn."""
    return _measured(case, case.make(), rounds)


def _measured(case: Case, made: Contenders, rounds: int) -> Row:
    contenders = {"ours": made.ours, "as given": made.as_given}
    if made.best is not None:
        contenders["best"] = made.best
    compared, problem = ((), "") if case.differs else _compared({name: run() for name, run in contenders.items()})
    times = interleaved(contenders, rounds)
    best = min(t.median_us for name, t in times.items() if name != "ours")
    ours = times["ours"]
    extra = _extra_memory_mib() if case.name.startswith("window") else None
    return Row(
        case.name, ours.median_us, times["as given"].median_us, best, ours.spread_us, case.target, case.dense, extra,
        problem, compared,
    )  # fmt: skip


def disagreement(results: Mapping[str, torch.Tensor]) -> str:
    """Who computed something else: whom the others contradict, or of two that differ, who is not SDPA as given.

    Args:
        results: by contender, all of one shape.

    Example:
        >>> right, wrong = torch.zeros(2), torch.ones(2)
        >>> disagreement({"ours": right, "as given": right}), disagreement({"ours": wrong, "as given": right})
        ('', 'ours is 1 at [0], not 0')
    """
    want = results["as given"]
    others = [name for name in results if name != "as given"]
    wrong = [name for name in others if not _is_close(results[name], want)]
    if not wrong:
        return ""
    if wrong == others and len(others) > 1 and _is_close(results[others[0]], results[others[1]]):
        return f"as given {_first_difference(want, results[others[0]])}"
    return "; ".join(f"{name} {_first_difference(results[name], want)}" for name in wrong)


def _compared(results: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """Whose first result could be compared with that of SDPA as given, and what `disagreement` says of them."""
    tensors = {name: _tensor(result) for name, result in results.items()}
    want = tensors["as given"]
    if want is None:
        return (), ""
    alike = {name: x for name, x in tensors.items() if x is not None and (x.shape, x.dtype) == (want.shape, want.dtype)}
    names = tuple(name for name in alike if name != "as given")
    return names, disagreement(alike)


def _tensor(result: Any) -> torch.Tensor | None:
    """The output of a contender: a tensor, the first of a tuple, or the parts of a sequence behind each other."""
    if isinstance(result, tuple) and result:
        result = result[0]
    if isinstance(result, list) and result and all(isinstance(x, torch.Tensor) and x.ndim == 4 for x in result):
        result = torch.cat(result, 2)
    return result if isinstance(result, torch.Tensor) and result.dtype in _TOLERANCE else None


def _is_close(got: torch.Tensor, want: torch.Tensor) -> bool:
    tolerance = _TOLERANCE[want.dtype]
    room = tolerance * max(1.0, float(want.abs().nan_to_num(0.0, 0.0, 0.0).max())) if want.numel() else 0.0
    try:
        torch.testing.assert_close(got, want, rtol=tolerance, atol=room, equal_nan=True)
    except AssertionError:
        return False
    return True


def _first_difference(got: torch.Tensor, want: torch.Tensor) -> str:
    error = (got.double() - want.double()).abs().nan_to_num(nan=torch.inf)
    at = tuple((error == error.max()).nonzero()[0].tolist())
    return f"is {float(got[at]):.4g} at {list(at)}, not {float(want[at]):.4g}"


def _extra_memory_mib() -> float | None:
    """Peak extra resident memory of our window call, in a fresh process; None where the kernel does not tell.

    ``clear_refs`` resets the high-water mark, which otherwise still stands where importing torch left it.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None
    code = (
        "import torch\n"
        "from attn_dispatch.bench.cases import attention, make_qkv\n"
        "def kib(field):\n"
        "    return next(int(x.split()[1]) for x in open('/proc/self/status') if x.startswith(field))\n"
        "small, large = make_qkv(1, 8, 8, 1024, 1024, 64), make_qkv(1, 8, 8, 8192, 8192, 64)\n"
        "attention(*small, window=(255, 0))\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"
        "before = kib('VmRSS')\n"
        "attention(*large, window=(255, 0))\n"
        "print((kib('VmHWM') - before) / 1024)\n"
    )
    return _stdout_number(code)


def import_cost_ms(rounds: int = 5) -> float:
    """What ``import attn_dispatch`` and its `attention` cost beyond torch, median of fresh processes."""
    code = (
        "import time, torch\n"
        "start = time.perf_counter()\n"
        "import attn_dispatch; attn_dispatch.attention\n"
        "print((time.perf_counter() - start) * 1e3)\n"
    )
    # an installed package has its bytecode; where writing it is forbidden, a first run could not leave any
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times = [_stdout_number(code, environment) for _ in range(rounds + 1)]
    return statistics.median(times[1:])


def _stdout_number(code: str, environment: dict[str, str] | None = None) -> float:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return float(run.stdout)


SUITES = ("core", "variants")


def cases_of(suite: str) -> tuple[Case, ...]:
    """The cases of a suite written by hand: ``"core"``, or ``"variants"`` (sparse, DSA, linear, decoders)."""
    if suite == "core":
        return CASES
    from attn_dispatch.bench import variants_dsa, variants_linear, variants_nn, variants_sparse

    parts = (variants_sparse, variants_dsa, variants_linear, variants_nn)
    return tuple(case for part in parts for case in part.CASES)


def run_bench(json_path: Path | None = None, only: str | None = None, rounds: int = 7, suite: str = "core") -> int:
    """Run a suite and print its table.

    Args:
        json_path: where to write the rows as JSON. only: run the cases whose name holds this. rounds: rounds a case.
        suite: of `SUITES`.

    Returns:
        The exit code: 0, or 1 where ours computed something else than the others, or a case could not be measured. A
        case whose library is not installed is skipped with a note, and is no failure.

    Raises:
        InputError: no case has ``only`` in its name, or there is no folder for the file.
    """
    Wanted(json_path).check()
    cases = [case for case in cases_of(suite) if not only or only in case.name]
    if not cases:
        names = ", ".join(case.name for case in cases_of(suite))
        raise InputError(f"no case of suite {suite} has {only!r} in its name", remedy=f"one of: {names}")
    console = Console(width=None if sys.stdout.isatty() else 150)  # a pipe would be cut at 80 columns
    table = Table(title=f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {rounds} rounds")
    for column in ("case", "ours", "SDPA as given", "SDPA best form", "over given", "over best", "", "target"):
        table.add_column(column, justify="left" if column in ("case", "target") else "right")
    rows: list[Row] = []
    notes: list[str] = []
    failed = False
    for case in cases:
        with torch.set_grad_enabled(case.name.startswith("training")), console.status(escape(case.name)):
            try:
                made = case.make()
            except ImportError as error:
                notes.append(f"{case.name}: skipped: {error}")
                continue
            try:
                row = _measured(case, made, rounds)
            except (AttnDispatchError, RuntimeError, ValueError, MemoryError) as error:
                notes.append(f"{case.name}: not measured: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
                failed = True
                continue
        rows.append(row)
        times = [f"{t:,.1f} us" for t in (row.ours_us, row.as_given_us, row.best_us)]
        cells = (row.name, *times, f"{row.over_given:.2f}x", f"{row.over_best:.2f}x", row.note, row.target)
        table.add_row(*map(escape, cells))
        if json_path is not None:  # a run that is killed leaves what it has
            json_path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    console.print(table)
    wrong = [row for row in rows if row.problem]
    failed = failed or any("ours" in row.problem for row in wrong)
    notes += [f"{row.name}: wrong: {row.problem}" for row in wrong]
    apart = {case.name: case.differs for case in cases if case.differs}
    unlike = [row.name for row in rows if "ours" not in row.compared and row.name not in apart]
    notes += [f"{row.name}: not compared: {apart[row.name]}" for row in rows if row.name in apart]
    notes += [f"ours not compared, results of another kind: {', '.join(unlike)}"] if unlike else []
    for note in notes:
        console.print(note, markup=False, highlight=False)
    _closing(console, suite, only, json_path, rows)
    return 1 if failed else 0


def _closing(console: Console, suite: str, only: str | None, json_path: Path | None, rows: list[Row]) -> None:
    """What a suite says beyond its cases."""
    if suite == "variants":
        from attn_dispatch.bench.variants_linear import LENGTHS, measure_slopes

        if not only:
            for kind, exponent in measure_slopes().items():
                console.print(f"{kind}: time ~ length ** {exponent:.2f}, {LENGTHS[0]} to {LENGTHS[-1]} tokens")
        return
    import_ms = import_cost_ms()
    console.print(f"import attn_dispatch beyond torch: {import_ms:.0f} ms (target <= 60 ms)")
    if json_path is not None:
        data = {"torch": torch.__version__, "import_ms": import_ms, "rows": [asdict(row) for row in rows]}
        json_path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
