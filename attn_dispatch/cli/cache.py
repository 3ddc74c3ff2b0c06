"""``attn-dispatch cache``: look at the tuned store, clear it, merge another one, export it as a lock file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(help="The store of what was measured on this machine.", no_args_is_help=True)

Digest = Annotated[str, typer.Argument(help="Op digest, or enough of its first characters; see `cache ls`.")]


@app.command("ls")
def list_command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False) -> None:
    """Every entry: op, choice, median, when, and what is wrong with files that are no entries."""
    from rich.console import Console
    from rich.table import Table

    from attn_dispatch.selection.store import Entry, Miss
    from attn_dispatch.selection.tuned import store

    found = list(store().entries())
    if as_json:
        rows = [e.to_dict() if isinstance(e, Entry) else {"file": str(path), "invalid": str(e)} for path, e in found]
        typer.echo(json.dumps(rows, indent=1))
        return
    typer.echo(f"store {store().root}: {len(found)} files")
    table = Table()
    for column in ("digest", "op", "choice", "median", "environment", "when"):
        table.add_column(column, overflow="fold")
    for path, entry in found:
        if isinstance(entry, Miss):
            table.add_row(path.stem, f"invalid: {entry}", "", "", path.parent.name, "")
            continue
        best = entry.record(entry.winner)
        took = f"{best.median_us:,.0f} us" if best is not None and best.median_us is not None else "-"
        place = f"{entry.environment.name}, {entry.environment.threads} threads, torch {entry.environment.torch}"
        table.add_row(path.stem, str(entry.op), entry.winner or "none passed", took, place, entry.when[:10])
    if found:
        Console(width=160).print(table)


@app.command("show")
def show_command(digest: Digest) -> None:
    """One entry with every candidate: time, spread, error, or why it did not run."""
    from attn_dispatch.errors import InputError
    from attn_dispatch.selection.store import Entry
    from attn_dispatch.selection.tuned import store

    if not digest.strip("/ "):
        raise InputError("an empty digest is the beginning of every entry", remedy="attn-dispatch cache ls")
    entries = {f"{path.parent.name}/{path.stem}": e for path, e in store().entries() if isinstance(e, Entry)}
    found = {
        name: entry
        for name, entry in entries.items()
        if (name if "/" in digest else name.partition("/")[2]).startswith(digest)
    }
    if not found:
        raise InputError(f"the store {store().root} has no entry {digest!r}", remedy="attn-dispatch cache ls")
    if len(found) > 1:
        lines = "".join(f"\n  {name}  {e.environment.name}  {e.op}" for name, e in sorted(found.items()))
        remedy = "more characters; of one op measured in several environments, the folder too, as above"
        raise InputError(f"{digest!r} is the beginning of {len(found)} entries:{lines}", remedy=remedy)
    (entry,) = found.values()
    typer.echo(json.dumps(entry.to_dict(), indent=1))


@app.command("clear")
def clear_command(
    invalid: Annotated[bool, typer.Option("--invalid", help="Only files that are no entries, and leftovers.")] = False,
) -> None:
    """Remove entries."""
    from attn_dispatch.selection.tuned import store

    typer.echo(f"removed {store().clear(invalid_only=invalid)} files from {store().root}")


@app.command("merge")
def merge_command(
    folder: Annotated[Path, typer.Argument(help="Another store: what ATTN_DISPATCH_CACHE was elsewhere.")],
) -> None:
    """Take the entries of another store that are new or newer; entries of other machines stay apart."""
    from attn_dispatch.errors import InputError
    from attn_dispatch.selection.store import Store
    from attn_dispatch.selection.tuned import store

    if not folder.is_dir():
        raise InputError(f"{folder} is no folder", remedy="the folder that `attn-dispatch cache ls` names first")
    taken, left = store().merge(Store(folder))
    typer.echo(f"took {taken} entries, left {left} that are older or no entries")


@app.command("export")
def export_command(
    out: Annotated[Path, typer.Option("-o", "--out", help="Lock file to write.")],
    device: Annotated[str, typer.Option("--device", help="Device type whose entries are exported.")] = "cpu",
) -> None:
    """Write the entries of this machine as a lock file, to be read, committed and deployed."""
    from attn_dispatch.cli.tune import hardware_of, provenance_of
    from attn_dispatch.errors import InputError
    from attn_dispatch.selection.environment import environment
    from attn_dispatch.selection.lock import entry_dict, lock_dict, read_lock, write_lock
    from attn_dispatch.selection.store import Entry
    from attn_dispatch.selection.tuned import store

    place = environment(device)
    entries = [e for _, e in store().entries() if isinstance(e, Entry) and e.environment == place and e.ranking]
    if not entries:
        raise InputError(f"the store {store().root} has nothing for this machine", remedy="attn-dispatch tune WORKLOAD")
    digests = {entry.op.digest() for entry in entries}
    kept = [e for e in (read_lock(out, hardware_of(place)) if out.exists() else []) if e.get("digest") not in digests]
    rows = [*kept, *(entry_dict(entry) for entry in entries)]
    seconds = sum(entry.seconds for entry in entries)
    write_lock(out, lock_dict(rows, hardware_of(place), provenance_of("attn-dispatch cache export", place, seconds)))
    typer.echo(f"wrote {out}: {len(entries)} ops")
