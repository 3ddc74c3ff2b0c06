"""`attn-dispatch bench`: run the cases, print ratios, write JSON. Nothing here asserts a time."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from attn_dispatch.bench.cases import CASES, GROWING_STEPS, Case
from attn_dispatch.selection.timing import interleaved

__all__ = ["SUITES", "Row", "cases_of", "import_cost_ms", "run_bench", "run_case"]


@dataclass(frozen=True)
class Row:
    """One measured case; times are medians in microseconds, ratios are SDPA's time over ours."""

    name: str
    ours_us: float
    as_given_us: float
    best_us: float
    spread_us: float
    target: str
    dense: bool
    extra_mib: float | None = None

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
    """Measure one case: ours, SDPA as given and SDPA's best form, in turn."""
    made = case.make()
    contenders = {"ours": made.ours, "as given": made.as_given}
    if made.best is not None:
        contenders["best"] = made.best
    times = interleaved(contenders, rounds)
    best = min(t.median_us for name, t in times.items() if name != "ours")
    ours = times["ours"]
    extra = _extra_memory_mib() if case.name.startswith("window") else None
    return Row(
        case.name, ours.median_us, times["as given"].median_us, best, ours.spread_us, case.target, case.dense, extra
    )


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


def run_bench(json_path: Path | None = None, only: str | None = None, rounds: int = 7, suite: str = "core") -> None:
    """Run a suite and print its table.

    Args:
        json_path: where to write the rows as JSON. only: run the cases whose name holds this. rounds: rounds a case.
        suite: of `SUITES`.
    """
    console = Console(width=None if sys.stdout.isatty() else 150)  # a pipe would be cut at 80 columns
    table = Table(title=f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {rounds} rounds")
    for column in ("case", "ours", "SDPA as given", "SDPA best form", "over given", "over best", "", "target"):
        table.add_column(column, justify="left" if column in ("case", "target") else "right")
    rows = []
    for case in cases_of(suite):
        if only and only not in case.name:
            continue
        with torch.set_grad_enabled(case.name.startswith("training")), console.status(case.name):
            row = run_case(case, rounds)
        rows.append(row)
        times = [f"{t:,.1f} us" for t in (row.ours_us, row.as_given_us, row.best_us)]
        table.add_row(row.name, *times, f"{row.over_given:.2f}x", f"{row.over_best:.2f}x", row.note, row.target)
        if json_path is not None:  # a run that is killed leaves what it has
            json_path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")
    console.print(table)
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
