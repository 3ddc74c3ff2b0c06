"""Known-bad combinations: backend x version x hardware x op, as data in YAML, each with the report that it rests on.

Entries come from three places: the package (``known_bad.yaml``), plugins (hook ``attn_dispatch_known_bad``), and the
``known_bad:`` of pin files. An entry that matches refuses its backend with its text and link, in every chain: ``when``
is matched after rewriting, on the op that the backend gets.

Naming a backend does not override an entry: whoever writes ``backend=`` asks for a kernel, not for wrong numbers.
Naming the entry does: ``allow_known_bad: [ID]`` in a pin file, or ``ATTN_DISPATCH_ALLOW_KNOWN_BAD=ID``.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_dispatch.capability import Reason
from attn_dispatch.errors import ConfigWarning
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.registry import Registry, current
from attn_dispatch.registry.discover import on_reset
from attn_dispatch.selection.pins import When, current_pins
from attn_dispatch.settings import settings

if TYPE_CHECKING:
    from attn_dispatch.selection.pin_models import HardwareModel

__all__ = ["KnownBad", "allowed", "entries", "looks_at_lengths", "reason_against"]


@dataclass(frozen=True)
class KnownBad:
    """One entry.

    Args:
        id: its name, which allows it. backend: whom it bars. when: on which ops.
        why, link: what is wrong in one line, and the report.
        version: specifier of the backend's version, ``">=2.11,<2.14"``; any when empty. instead: what to run.
        hardware: on which machine; None for any. where: ``"known_bad.yaml:4"``. origin: who brought it.
    """

    id: str
    backend: str
    when: When
    why: str
    link: str
    version: str = ""
    instead: str = ""
    hardware: HardwareModel | None = None
    where: str = ""
    origin: str = ""

    def holds_here(self) -> bool:
        """Whether this machine is one of those that it speaks of."""
        from attn_dispatch.selection.pin_files import mismatch

        return not mismatch(self.hardware)

    def matches(self, op: AttentionOp, version: str) -> bool:
        """Whether it speaks of a canonical op and a version of its backend, on this machine."""
        if self.hardware is not None and self.hardware.device != op.device:
            return False
        return self.when.matches(op) and _in_range(version, self.version) and self.holds_here()

    def reason(self) -> Reason:
        """The refusal, with the link and the way to allow it."""
        instead = f"{self.instead}; " if self.instead else ""
        hint = f"{instead}{self.link}; allow_known_bad: [{self.id}] runs it all the same"
        return Reason("known_bad", self.id, self.backend, self.link, hint, f"known bad, {self.id}: {self.why}")


def _in_range(version: str, wanted: str) -> bool:
    """Whether a version is meant; one that cannot be read is, since nobody can say that it is not."""
    if not wanted:
        return True
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return SpecifierSet(wanted).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


_by_registry: dict[
    int, tuple[Registry, tuple[KnownBad, ...]]
] = {}  # the registry is kept, so that its id stays its own
_MAX_REGISTRIES = 16
on_reset.append(_by_registry.clear)


def entries(registry: Registry) -> tuple[KnownBad, ...]:
    """All entries that count with a registry: those of its plugins, and for the process's own those of pin files.

    A source that cannot be used is one `ConfigWarning`, and is ignored.
    """
    known = _by_registry.get(id(registry))
    if known is None:
        if len(_by_registry) >= _MAX_REGISTRIES:
            _by_registry.clear()
        found = [entry for origin, source in registry.known_bad for entry in _read(origin, source)]
        found.sort(key=lambda entry: (entry.id, entry.origin))  # not in the order in which plugins were found
        known = _by_registry[id(registry)] = (registry, tuple(found))
    if registry is not current():
        return known[1]
    return (*current_pins().known_bad, *known[1])


def _read(origin: str, source: Any) -> tuple[KnownBad, ...]:
    from dataclasses import replace

    from attn_dispatch.selection.pin_files import parse, parse_data

    if isinstance(source, (str, Path)):
        parsed = parse(Path(source))
    else:
        parsed = parse_data(origin, {"schema": 1, "known_bad": [source]})
    if parsed.errors:
        text = f"known-bad entries of {origin} are ignored: {parsed.errors[0]}"
        warnings.warn(text, ConfigWarning, stacklevel=5)
        return ()
    return tuple(replace(entry, origin=origin) for entry in parsed.known_bad)


def allowed(registry: Registry) -> frozenset[str]:
    """Ids of entries that the user allows: by the environment, and by pin files for the process's own registry."""
    given = settings().allow_known_bad
    return given | current_pins().allow_known_bad if registry is current() else given


def reason_against(backend: str, version: str, op: AttentionOp, registry: Registry) -> Reason | None:
    """The refusal of the first entry that speaks of a backend on an op; None when there is none, or it is allowed."""
    mine = [entry for entry in entries(registry) if entry.backend == backend]
    if not mine:
        return None
    permitted = allowed(registry)
    found = (entry for entry in mine if entry.id not in permitted and entry.matches(op, version))
    return next((entry.reason() for entry in found), None)


def looks_at_lengths(registry: Registry) -> bool:
    """Whether any entry looks at the exact key length: then no plan may serve another length unasked."""
    return any(entry.when.key_length or entry.when.op for entry in entries(registry))
