"""``attn-dispatch build``: compile the C++ lookup for the torch that is installed."""

from __future__ import annotations

import typer

__all__ = ["run"]


def run(force: bool) -> None:
    """Build it, or say that it was built."""
    from attn_dispatch import native

    path = native.built_path()
    if path.is_file() and not force:
        try:
            native.load(path)  # whether or not this process uses it
        except ImportError as error:
            typer.echo(f"{path.name} does not load ({error}) and is built anew", err=True)
        else:
            typer.echo(f"built already: {path}")
            return
    typer.echo("compiling lookup.cpp, some 20 seconds ...", err=True)
    typer.echo(f"built: {native.build()}")
