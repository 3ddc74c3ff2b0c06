"""The picture of a run: per op, how many times faster than SDPA as given ours is, and the fastest other library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attn_dispatch.bench.measure import Row
from attn_dispatch.bench.report import Report
from attn_dispatch.errors import InputError

__all__ = ["draw", "need_matplotlib"]


def _ours(row: Row) -> float | None:
    return row.over_given


def _hand(row: Row) -> float | None:
    return None if row.over_given is None or row.over_best is None else row.over_given / row.over_best


def _peer(row: Row) -> float | None:
    return None if row.over_given is None or row.over_peer is None else row.over_given / row.over_peer


_OURS = "#1b6ca8"
# what a bar is called, its length, its shift and thickness within a row, its colour
_BARS: tuple[tuple[str, Callable[[Row], float | None], float, float, str], ...] = (
    ("ours", _ours, -0.26, 0.36, _OURS),
    ("best form by hand", _hand, 0.06, 0.22, "#8d99a6"),
    ("fastest other library", _peer, 0.3, 0.22, "#e08e2b"),
)


def need_matplotlib() -> None:
    """Import it, with a backend that needs no screen.

    Raises:
        InputError: it cannot be imported.
    """
    try:
        import matplotlib
    except ImportError as error:
        remedy = "pip install 'attn-dispatch[viz]'"
        raise InputError(f"--picture needs matplotlib, which cannot be imported: {error}", remedy=remedy) from None
    matplotlib.use("Agg")


def draw(report: Report, path: Path) -> None:
    """Write the picture; the file's ending says of which kind.

    Raises:
        InputError: matplotlib is not installed.
    """
    need_matplotlib()
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter

    rows = [row for row in report.rows if row.over_given is not None]
    figure, axes = pyplot.subplots(figsize=(10, 1.6 + 0.34 * max(len(rows), 1)), layout="constrained")
    try:
        places = range(len(rows))
        for name, value_of, shift, size, colour in _BARS:
            bars = [(place + shift, value) for place, row in zip(places, rows, strict=True) if (value := value_of(row))]
            widths = [value - 1.0 for _, value in bars]
            axes.barh([where for where, _ in bars], widths, size, left=1.0, color=colour, label=name)
        for place, row in zip(places, rows, strict=True):
            value = row.over_given or 1.0
            axes.annotate(
                f"{value:.2f}x", (max(value, 1.0), place - 0.26), xytext=(4, 0), textcoords="offset points",
                va="center", fontsize=8, color=_OURS,
            )  # fmt: skip
        axes.set_yticks(list(places), [row.name for row in rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.margins(x=0.12, y=0.01)
        axes.grid(axis="x", alpha=0.3)
        axes.set_xlabel("times faster than torch's SDPA as given (log scale)")
        place_text = f"{report.place.get('device', '')}, {report.place.get('threads', '')} threads"
        axes.set_title(f"suite {report.suite}: {place_text}, torch {_torch(report)}", fontsize=10)
        if rows:
            axes.legend(loc="lower right", fontsize=8)
        figure.savefig(path, dpi=110)
    finally:
        pyplot.close(figure)


def _torch(report: Report) -> str:
    return str(report.place.get("libraries", {}).get("torch", ""))
