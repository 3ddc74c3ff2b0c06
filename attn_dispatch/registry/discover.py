"""Discovery: find the plugins, ask each for its backends and rewrites, set the broken ones aside.

1. Entry points are loaded one by one (pluggy's own loader stops at the first broken one), in the order of their names,
   so that nothing depends on the order of installation; the built-in ones first.
2. What fails to import, to answer, or to validate is quarantined with its traceback.
3. A name that is already taken is refused to the second plugin: a built-in keeps its name, and of two strangers both
   lose it, since neither order of installation may decide.
"""

from __future__ import annotations

import os
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from attn_dispatch.backend import Backend
from attn_dispatch.capability import Capability
from attn_dispatch.errors import PluginWarning, UnknownBackendError
from attn_dispatch.registry import hookspecs
from attn_dispatch.rewrites.base import Rewrite

__all__ = ["Quarantined", "Registry", "current", "discover", "reset"]

_BUILTIN = "attn-dispatch"


@dataclass(frozen=True)
class Quarantined:
    """A plugin, or a part of it, that is not used.

    Args:
        name: entry point or backend name; distribution: package and version that brought it; error: the cause in one
            line; details: the traceback, empty when there was no exception.
    """

    name: str
    distribution: str
    error: str
    details: str = ""


@dataclass(frozen=True)
class Registry:
    """What is registered, in order; frozen, so that a plan made with it stays true.

    Args:
        backends, rewrites: by name. origins: distribution and version by backend or rewrite name.
        configs: paths of configuration files that plugins bring.
    """

    backends: dict[str, Backend] = field(default_factory=dict)
    rewrites: dict[str, Rewrite] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    quarantined: tuple[Quarantined, ...] = ()
    known_bad: tuple[dict[str, Any], ...] = ()
    configs: tuple[str, ...] = ()

    def is_builtin(self, name: str) -> bool:
        """Whether a backend or rewrite comes from this distribution; what has no origin is a stranger's."""
        return self.origins.get(name, "").split(" ")[0] == _BUILTIN

    def backend(self, name: str) -> Backend:
        """The backend of that name.

        Raises:
            UnknownBackendError: there is none; the message names the nearest, or why its plugin is quarantined.
        """
        if name in self.backends:
            return self.backends[name]
        raise UnknownBackendError(self.unknown(name))

    def unknown(self, name: str) -> str:
        """What to say about a name that is not registered."""
        import difflib

        for broken in self.quarantined:
            if broken.name == name or name in broken.error.split():
                return f"backend {name!r} is quarantined ({broken.distribution}): {broken.error}"
        near = difflib.get_close_matches(name, [*self.backends, *self.rewrites], n=1)
        guess = f"; did you mean {near[0]!r}?" if near else ""
        return f"there is no backend {name!r}{guess} Registered: {', '.join(self.backends)}"


_lock = threading.RLock()
_current: Registry | None = None


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it when the process forked


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def current() -> Registry:
    """The registry of this process; discovery happens at the first call."""
    global _current
    if _current is None:
        with _lock:
            if _current is None:
                _current = discover()
    return _current


def reset(registry: Registry | None = None) -> None:
    """Forget the registry (or put another in its place); for tests and for plugins installed at run time."""
    global _current
    with _lock:
        _current = registry
    for forget in on_reset:
        forget()


on_reset: list[Callable[[], None]] = []  # caches that hold plans of the registry add their clear function here


def discover(extra: Iterable[tuple[str, Any]] = ()) -> Registry:
    """Load all entry points of the group, and the ``(name, plugin object)`` pairs of ``extra``, into a new registry."""
    collector = _Collector()
    points = sorted(entry_points(group=hookspecs.GROUP), key=lambda e: (_origin(e).split()[0] != _BUILTIN, e.name))
    seen: set[str] = set()
    for point in points:
        if point.value in seen:  # one distribution may be listed twice, by a wheel and an editable install
            continue
        seen.add(point.value)
        collector.load(point.name, _origin(point), point.load)
    for name, plugin in extra:
        collector.load(name, f"{name} (given in code)", partial(_given, plugin))
    return collector.finish()


def _given(plugin: Any) -> Any:
    return plugin


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown distribution"


class _Collector:
    def __init__(self) -> None:
        self.backends: dict[str, tuple[Backend, str]] = {}
        self.rewrites: dict[str, tuple[Rewrite, str]] = {}
        self.contested: dict[str, str] = {}  # names that two strangers claimed, with the first claimant
        self.known_bad: list[dict[str, Any]] = []
        self.configs: list[str] = []
        self.quarantined: list[Quarantined] = []

    def load(self, name: str, origin: str, get: Callable[[], Any]) -> None:
        """Load one plugin and take what it offers; whatever goes wrong is set aside under its name."""
        try:
            manager = pluggy.PluginManager(hookspecs.GROUP)
            manager.add_hookspecs(hookspecs)
            plugin = get()
            manager.register(plugin, name)
            manager.check_pending()
            if not manager.get_hookcallers(plugin):
                raise ValueError("it implements no hook: mark its functions with attn_dispatch.plugin.hookimpl")
            backends = [b for part in manager.hook.attn_dispatch_backends() for b in part]
            rewrites = [r for part in manager.hook.attn_dispatch_rewrites() for r in part]
            known_bad = [e for part in manager.hook.attn_dispatch_known_bad() for e in part]
            configs = [str(path) for part in manager.hook.attn_dispatch_configs() for path in part]
            for backend in backends:
                _validate(backend, Backend)
            for rewrite in rewrites:
                _validate(rewrite, Rewrite)
            for entry in known_bad:
                if not isinstance(entry, dict):
                    raise TypeError(f"a known-bad entry must be a dict, got {entry!r}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a plugin may raise anything, SystemExit included; it is recorded
            self.set_aside(name, origin, f"{type(error).__name__}: {error}", traceback.format_exc())
            return
        for backend in backends:
            self._take(backend, self.backends, origin)
        for rewrite in rewrites:
            self._take(rewrite, self.rewrites, origin)
        self.known_bad += known_bad
        self.configs += configs

    def _take(self, thing: Any, table: dict[str, tuple[Any, str]], origin: str) -> None:
        name = thing.name
        other = self.rewrites if table is self.backends else self.backends
        if name in other:  # one name for a backend and a rewrite: a chain and its origin could not be read
            self.set_aside(name, origin, f"the name {name} is already taken by {other[name][1]}")
            return
        if name not in table and name not in self.contested:
            table[name] = (thing, origin)
            return
        first = table[name][1] if name in table else self.contested[name]
        if first.split()[0] != _BUILTIN and name in table:  # of two strangers both lose it, and so does a third
            table.pop(name)
            self.contested[name] = first
            self.set_aside(name, first, f"the name {name} is also taken by {origin}")
        self.set_aside(name, origin, f"the name {name} is already taken by {first}")

    def set_aside(self, name: str, origin: str, error: str, details: str = "") -> None:
        self.quarantined.append(Quarantined(name, origin, error, details))
        text = f"attn_dispatch plugin {name!r} ({origin}) is not used: {error}. Details: attn-dispatch doctor"
        warnings.warn(text, PluginWarning, stacklevel=2)

    def finish(self) -> Registry:
        origins = {name: origin for name, (_, origin) in self.backends.items()}
        origins |= {name: origin for name, (_, origin) in self.rewrites.items()}
        return Registry(
            {name: thing for name, (thing, _) in self.backends.items()},
            {name: thing for name, (thing, _) in sorted(self.rewrites.items(), key=lambda kv: kv[1][0].order)},
            origins,
            tuple(self.quarantined),
            tuple(self.known_bad),
            tuple(self.configs),
        )


def _validate(thing: Any, kind: type) -> None:
    if not isinstance(thing, kind):
        raise TypeError(f"{thing!r} is not a {kind.__name__}")
    name = getattr(thing, "name", None)
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"{type(thing).__name__}.name must be an identifier, got {name!r}")
    if isinstance(thing, Backend):
        if not thing.capabilities:
            raise ValueError(f"backend {thing.name!r} declares no capabilities")
        if wrong := [fact for fact in thing.capabilities if not isinstance(fact, Capability)]:
            raise TypeError(f"backend {thing.name!r}: capabilities must be a tuple of Capability, got {wrong[0]!r}")
