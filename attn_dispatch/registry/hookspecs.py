"""The hooks of a plugin. This file is the plugin API page; `attn_dispatch.plugin` re-exports what a plugin needs.

A plugin is a module (or object) named by an entry point of the group ``attn_dispatch``::

    [project.entry-points.attn_dispatch]
    mine = "my_package.attention"

Hooks are called once, at first use: never at import and never per call. A plugin that fails is quarantined, with its
distribution, version and traceback in `attn-dispatch doctor`; everything else works on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from attn_dispatch.backend import Backend
    from attn_dispatch.rewrites.base import Rewrite

__all__ = ["GROUP", "hookimpl", "hookspec"]

GROUP = "attn_dispatch"
hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


@hookspec
def attn_dispatch_backends() -> list[Backend]:  # type: ignore[empty-body]
    """Return the backends to register; each name must be new."""


@hookspec
def attn_dispatch_rewrites() -> list[Rewrite]:  # type: ignore[empty-body]
    """Return the rewrites to register; each name must be new."""


@hookspec
def attn_dispatch_known_bad() -> list[dict[str, Any] | str]:  # type: ignore[empty-body]
    """Return known-bad combinations, ``{id, backend, version, hardware, when, why, link}``, or paths of YAML files."""


@hookspec
def attn_dispatch_configs() -> list[str]:  # type: ignore[empty-body]
    """Return paths of configuration files to search after the user's own."""
