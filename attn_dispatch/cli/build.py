"""``attn-dispatch build``: compile what is in C++ for the torch that is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from attn_dispatch.native import Source

__all__ = ["run"]


def run(force: bool) -> None:
    """Build each part, or say that it was built.

    Raises:
        BuildError: the parts that could not be built; the others are.
    """
    from attn_dispatch import native
    from attn_dispatch.errors import BuildError

    failed: list[BuildError] = []
    for source in native.SOURCES:
        try:
            _build(source, force)
        except BuildError as error:
            failed.append(error)
    if failed:
        raise BuildError("; ".join(map(str, failed))) from failed[0]


def _build(source: Source, force: bool) -> None:
    from attn_dispatch import native

    path = native.built_path(source)
    if path.is_file() and not force:
        try:
            native.load(source, path)  # whether or not this process uses it
        except ImportError as error:
            typer.echo(f"{path.name} does not load ({error}) and is built anew", err=True)
        else:
            typer.echo(f"built already: {path}")
            return
    typer.echo(f"compiling {source.files[0]}, some 30 seconds ...", err=True)
    typer.echo(f"built: {native.build(source)}")
