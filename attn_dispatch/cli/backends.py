"""``attn-dispatch backends``: the support matrix, read off the declared capabilities."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from attn_dispatch.backend import Backend
    from attn_dispatch.capability import Capability

__all__ = ["COLUMNS", "markdown", "rows", "run"]

# Column -> the feature word behind it; masks and dtypes have columns of their own.
_WORDS = {
    "gqa": "gqa",
    "lse": "lse",
    "grad": "grad",
    "weights": "weights",
    "dropout": "dropout",
    "bias": "score:Bias",
    "softcap": "score:SoftCap",
    "alibi": "score:Alibi",
    "sinks": "sinks",
    "Dv != D": "dv_differs",
    "linear": "weight:Linear",
}
COLUMNS = ("backend", "device", "dtypes", "masks", *_WORDS, "limits", "deterministic", "hides NaN", "tested")

_INTRO = """\
# What each backend can do

Written by `python -m attn_dispatch.cli.docs` from the facts that the backends declare; do not edit it by hand.
A rewrite can turn an op that a backend refuses into one that it runs: `attn-dispatch explain` shows the chains.
What is not listed is refused, never dropped. "tested" names the devices on which the contract suite has run.
"""


def run(as_json: bool, as_markdown: bool) -> None:
    """Print the matrix."""
    from attn_dispatch.registry import current

    table = rows(current().backends)
    if as_json:
        typer.echo(json.dumps(table, indent=2))
    elif as_markdown:
        typer.echo(markdown(table), nl=False)
    else:
        typer.echo("\n".join(_text(table)))


def rows(backends: dict[str, Backend]) -> list[dict[str, str]]:
    """One row per backend and set of devices whose facts differ."""
    return [_row(b, capability) for b in backends.values() for capability in b.capabilities]


def _row(backend: Backend, capability: Capability) -> dict[str, str]:
    from attn_dispatch.capability import MASK_WORDS
    from attn_dispatch.ir.tensors import short_dtype

    served = capability.features
    masks = [word for word in MASK_WORDS if f"mask:{word}" in served]
    row = {
        "backend": backend.name,
        "device": ", ".join(sorted(capability.devices)),
        "dtypes": " ".join(sorted(short_dtype(d) for d in capability.dtypes)),
        "masks": "all" if len(masks) == len(MASK_WORDS) else " ".join(masks),
    }
    row |= {column: "yes" if word in served else "" for column, word in _WORDS.items()}
    tested = sorted(capability.devices & set(backend.tested.replace(",", " ").split()))
    return row | {
        "limits": " ".join(text for limit in capability.limits if (text := _limit(limit))),
        "deterministic": "yes" if capability.deterministic else "",
        "hides NaN": "yes" if capability.hides_nan else "",
        "tested": ", ".join(tested) or "no",
    }


def _limit(limit: Any) -> str:
    parts = [f"{limit.name}>={limit.minimum}"] if limit.minimum is not None and limit.minimum > 1 else []
    parts += [f"{limit.name}<={limit.maximum}"] if limit.maximum is not None else []
    parts += [f"{limit.name}%{limit.multiple_of}=0"] if limit.multiple_of is not None else []
    return " ".join(parts)


def markdown(table: list[dict[str, str]]) -> str:
    """The page docs/support_matrix.md."""
    lines = [_INTRO, f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(row[column] for column in COLUMNS)} |" for row in table]
    return "\n".join(lines) + "\n"


def _text(table: list[dict[str, str]]) -> list[str]:
    """A table of the short columns, then what is long, one line each."""
    short = [column for column in COLUMNS if column not in ("masks", "limits")]
    width = {column: max(len(column), *(len(row[column]) for row in table)) for column in short}
    lines = ["  ".join(f"{column:<{width[column]}}" for column in short).rstrip()]
    lines += ["  ".join(f"{row[column]:<{width[column]}}" for column in short).rstrip() for row in table]
    names = [f"{row['backend']} ({row['device']})" for row in table]
    pad = max(map(len, names))
    lines += ["", "masks", *(f"  {name:<{pad}}  {row['masks']}" for name, row in zip(names, table, strict=True))]
    limited = [(name, row["limits"]) for name, row in zip(names, table, strict=True) if row["limits"]]
    return [*lines, "", "limits", *(f"  {name:<{pad}}  {text}" for name, text in limited)] if limited else lines
