"""``attn-dispatch build``: compile the C++ lookup for the torch that is installed."""

from __future__ import annotations

import typer

__all__ = ["run"]


def run(force: bool) -> None:
    """Build it, or say that it was built."""
    from attn_dispatch import native

    path = native.built_path()
    if not force and native.lookup().module is not None:
        typer.echo(f"built already: {path}")
        return
    typer.echo("compiling lookup.cpp, some 20 seconds ...", err=True)
    typer.echo(f"built: {native.build()}")
