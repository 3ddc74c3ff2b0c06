"""Discovery: find the plugins, ask each for its backends and rewrites, set the broken ones aside.

1. Entry points are loaded one by one (pluggy's own loader stops at the first broken one), in the order of their names,
   the built-in ones first. Nothing depends on the order of installation.
2. What fails to import, to answer, or to validate is quarantined with its traceback.
3. A name that several claim: a built-in keeps it, and of strangers all lose it, since no order may decide.
4. A plugin is loaded inside a `Watch`: what it does to the process is put back, and said in `Registry.notes`.
"""

from __future__ import annotations

import os
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import EntryPoint, distributions
from typing import Any

import pluggy

from attn_dispatch.backend import OPTION_TYPES, Backend
from attn_dispatch.capability import Capability
from attn_dispatch.errors import PluginWarning, UnknownBackendError
from attn_dispatch.registry import hookspecs
from attn_dispatch.registry.guarding import Watch
from attn_dispatch.rewrites.base import Rewrite

__all__ = ["Quarantined", "Registry", "Source", "current", "discover", "on_reset", "reset"]

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
class Source:
    """A plugin that was loaded.

    Args:
        name: of the entry point. distribution: package and version. entry_point: ``"mine = my_package.attention"``.
        offers: names of its backends and rewrites. load_ms: how long it took to import and to ask.
        notes: what it did to the process while it was loaded; each was put back.
    """

    name: str
    distribution: str
    entry_point: str
    offers: tuple[str, ...] = ()
    load_ms: float = field(default=0.0, compare=False)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Registry:
    """What is registered, in order; frozen, so that a plan made with it stays true.

    Args:
        backends, rewrites: by name. origins: distribution and version by backend or rewrite name.
        known_bad: ``(distribution, entry or path of a file)`` of known-bad combinations; see `selection.known_bad`.
        configs: paths of configuration files that plugins bring. sources: the plugins that were loaded.
    """

    backends: dict[str, Backend] = field(default_factory=dict)
    rewrites: dict[str, Rewrite] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    quarantined: tuple[Quarantined, ...] = ()
    known_bad: tuple[tuple[str, dict[str, Any] | str], ...] = ()
    configs: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()

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
    points = sorted(_entry_points(collector), key=_order)
    first: dict[str, str] = {}
    for point in points:
        origin = _origin(point)
        known = first.setdefault(point.value, origin)
        if collector.has(point.value):  # one distribution may be listed twice, by a wheel and an editable install
            if known.split()[0] != origin.split()[0]:
                collector.set_aside(point.name, origin, f"its module {point.value} is the plugin of {known} already")
            continue
        collector.load(Source(point.name, origin, f"{point.name} = {point.value}"), point.load)
    for name, plugin in extra:
        collector.load(Source(name, f"{name} (given in code)", "given in code"), partial(_given, plugin))
    return collector.finish()


def _entry_points(collector: _Collector) -> list[EntryPoint]:
    """Those of the group, of one distribution after the other: one whose metadata cannot be read is set aside alone."""
    found: list[EntryPoint] = []
    names: set[Any] = set()
    for distribution in distributions():
        name = "unknown distribution"
        try:
            # the first of a name hides the others, as for imports; the private one costs less
            key = getattr(distribution, "_normalized_name", None) or distribution.name
            name = str(key)
            if key not in names:
                found += [point for point in distribution.entry_points if point.group == hookspecs.GROUP]
                names.add(key)
        except Exception as error:  # noqa: BLE001 - a stranger's file; importlib raises what its parser does
            problem = f"its entry points cannot be read: {type(error).__name__}: {error}"
            collector.set_aside(name, name, problem, traceback.format_exc())
    return found


def _order(point: EntryPoint) -> tuple[bool, str, str, str]:
    origin = _origin(point)
    return (origin.split()[0] != _BUILTIN, point.name, origin, point.value)


def _given(plugin: Any) -> Any:
    return plugin


def _origin(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown distribution"


@dataclass(frozen=True)
class _Offer:
    """What one plugin offers, asked for and validated."""

    backends: list[Backend]
    rewrites: list[Rewrite]
    known_bad: list[dict[str, Any] | str]
    configs: list[str]


def _ask(name: str, get: Callable[[], Any]) -> _Offer:
    """Import a plugin, call its hooks, and check what they return."""
    manager = pluggy.PluginManager(hookspecs.GROUP)
    manager.add_hookspecs(hookspecs)
    plugin = get()
    manager.register(plugin, name)
    manager.check_pending()
    if not manager.get_hookcallers(plugin):
        raise ValueError("it implements no hook: mark its functions with attn_dispatch.plugin.hookimpl")
    offer = _Offer(
        [b for part in manager.hook.attn_dispatch_backends() for b in part],
        [r for part in manager.hook.attn_dispatch_rewrites() for r in part],
        [e for part in manager.hook.attn_dispatch_known_bad() for e in part],
        [str(path) for part in manager.hook.attn_dispatch_configs() for path in part],
    )
    for backend in offer.backends:
        _validate(backend, Backend)
    for rewrite in offer.rewrites:
        _validate(rewrite, Rewrite)
    for entry in offer.known_bad:
        if not isinstance(entry, dict) and not (isinstance(entry, (str, os.PathLike)) and os.path.isfile(entry)):
            raise TypeError(f"a known-bad entry must be a dict, or the path of a YAML file, got {entry!r}")
    return offer


class _Collector:
    def __init__(self) -> None:
        self.claims: dict[str, list[tuple[Any, Source]]] = {}  # by name, of backends and rewrites alike
        self.known_bad: list[tuple[str, dict[str, Any] | str]] = []
        self.configs: list[str] = []
        self.quarantined: list[Quarantined] = []
        self.sources: list[Source] = []
        self.seen: set[str] = set()

    def has(self, value: str) -> bool:
        """Whether an entry point of that value was loaded, or tried."""
        return value in self.seen

    def load(self, source: Source, get: Callable[[], Any]) -> None:
        """Load one plugin and take what it offers; whatever goes wrong is set aside under its name."""
        self.seen.add(source.entry_point.partition(" = ")[2])
        with Watch() as watch:
            try:
                offer: _Offer | None = _ask(source.name, get)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # noqa: BLE001 - a plugin may raise anything, SystemExit included; it is recorded
                problem, details, offer = f"{type(error).__name__}: {error}", traceback.format_exc(), None
        who = f"attn_dispatch plugin {source.name!r} ({source.distribution})"
        if watch.changes:
            warnings.warn(f"{who} {' and '.join(watch.changes)} when it was loaded", PluginWarning, stacklevel=3)
        if offer is None:
            self.set_aside(source.name, source.distribution, problem, details)
            return
        things: list[Any] = [*offer.backends, *offer.rewrites]
        names = tuple(thing.name for thing in things)
        source = replace(source, offers=names, load_ms=watch.seconds * 1e3, notes=tuple(watch.changes))
        self.sources.append(source)
        for thing in things:
            self.claims.setdefault(thing.name, []).append((thing, source))
        self.known_bad += [(source.distribution, e if isinstance(e, dict) else str(e)) for e in offer.known_bad]
        self.configs += offer.configs

    def set_aside(self, name: str, origin: str, error: str, details: str = "") -> None:
        self.quarantined.append(Quarantined(name, origin, error, details))
        text = f"attn_dispatch plugin {name!r} ({origin}) is not used: {error}. Details: attn-dispatch doctor"
        warnings.warn(text, PluginWarning, stacklevel=2)

    def finish(self) -> Registry:
        """Settle who has which name. Built-in things keep their order, strangers come by name after them."""
        owners: dict[str, tuple[Any, str]] = {}
        for name, claims in self.claims.items():
            kept = [claim for claim in claims if claim[1].distribution.split()[0] == _BUILTIN][:1]
            kept = kept or (claims if len(claims) == 1 else [])
            for claim in kept:
                owners[name] = (claim[0], claim[1].distribution)
            for thing, source in claims:
                if kept and thing is not kept[0][0]:
                    text = f"the name {name} is already taken by {kept[0][1].distribution}"
                    self.set_aside(name, source.distribution, text)
                elif not kept:
                    others = [other.distribution for _, other in claims if other is not source] or ["itself, twice"]
                    text = f"the name {name} is also taken by {', '.join(dict.fromkeys(others))}"
                    self.set_aside(name, source.distribution, text)
        place = {name: n for n, name in enumerate(self.claims)}
        own = {name for name, (_, origin) in owners.items() if origin.split()[0] == _BUILTIN}
        ordered = sorted(
            owners.items(), key=lambda item: (item[0] not in own, place[item[0]] if item[0] in own else 0, item[0])
        )
        return Registry(
            {name: thing for name, (thing, _) in ordered if isinstance(thing, Backend)},
            dict(
                sorted(
                    ((name, thing) for name, (thing, _) in ordered if isinstance(thing, Rewrite)),
                    key=lambda item: (item[1].order, item[0]),
                )
            ),
            {name: origin for name, (_, origin) in ordered},
            tuple(sorted(self.quarantined, key=lambda q: (q.name, q.distribution))),
            tuple(sorted(self.known_bad, key=lambda pair: pair[0])),
            tuple(self.configs),
            tuple(self.sources),
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
        _validate_options(thing)


def _validate_options(backend: Backend) -> None:
    for name in ("configure", "configured"):
        if getattr(type(backend), name) is not getattr(Backend, name):
            raise TypeError(f"backend {backend.name!r}: {name} is how options reach it, and may not be overridden")
    if not isinstance(backend.options, Mapping):
        raise TypeError(f"backend {backend.name!r}: options must map names to defaults, got {backend.options!r}")
    for name, default in backend.options.items():
        if not (isinstance(name, str) and name.isidentifier()):
            raise ValueError(f"backend {backend.name!r}: the name of an option must be an identifier, got {name!r}")
        if type(default) not in OPTION_TYPES:  # a subclass, as of an enum, is no value that YAML has
            known = ", ".join(kind.__name__ for kind in OPTION_TYPES)
            text = f"the default of option {name!r} must be one of {known}, got {default!r}"
            raise TypeError(f"backend {backend.name!r}: {text}")
