"""Pins: which ops a line of a YAML file speaks of, and what it asks for. The files are read by `pin_files`.

What holds when several files and lines speak of one op:

1. Files come strongest first: those of ``ATTN_DISPATCH_CONFIG`` in their order and no others; without it
   ``attn_dispatch.yaml`` of the project, the same of the user's config folder, files of plugins, files of this package.
2. Pins of a stronger file come before those of a weaker one, and inside a file they come in the order of its lines.
3. The first pin that matches the op and has ``use`` is the wish; later ones are not asked.
4. ``avoid`` of every pin that matches counts, in the same order. What an earlier pin bars a later one cannot use, and
   what an earlier pin uses a later one cannot bar: a weaker file never overrides a stronger one.
5. A file whose ``hardware`` is not this machine says nothing here, and a pin of a file for a device says nothing of ops
   on another.
6. Options of backends merge one by one, those of a stronger file before those of a weaker one.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_dispatch import device
from attn_dispatch.backend import Backend
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.weights import Linear
from attn_dispatch.registry import Registry, current
from attn_dispatch.registry.discover import on_reset
from attn_dispatch.selection.decide import Request
from attn_dispatch.settings import settings

if TYPE_CHECKING:
    from attn_dispatch.selection.known_bad import KnownBad
    from attn_dispatch.selection.pin_files import Parsed

__all__ = ["Pin", "PinFile", "Pins", "Span", "When", "config_paths", "current_pins", "settle", "unmatched"]


@dataclass(frozen=True)
class Span:
    """A range of sizes, both ends included; None is open.

    Example:
        >>> 4096 in Span.parse("1024..8192"), str(Span.parse("> 7")), str(Span(64, 64))
        (True, '>=8', '64')
    """

    low: int | None = None
    high: int | None = None

    @classmethod
    def parse(cls, text: str) -> Span:
        """Read ``"64"``, ``"1024..8192"``, ``"1024.."``, ``"..8192"``, ``">=1024"``, ``"<=64"``, ``">63"``, ``"<65"``.

        Raises:
            ValueError: the text is no range.
        """
        packed = re.sub(r"\s+", "", text)
        if packed.isascii() and packed.isdigit():
            return cls(int(packed), int(packed))
        if found := re.fullmatch(r"(\d*)\.\.(\d*)", packed, re.ASCII):
            low, high = (int(end) if end else None for end in found.groups())
            if (low, high) != (None, None):
                return cls(low, high)
        if found := re.fullmatch(r"([<>]=?)(\d+)", packed, re.ASCII):
            end = int(found[2])
            by_sign = {">=": (end, None), ">": (end + 1, None), "<=": (None, end), "<": (None, end - 1)}
            return cls(*by_sign[found[1]])
        raise ValueError(f'{text!r} is no size: write 64, "1024..8192", ">=1024" or {{min: 1024, max: 8192}}')

    @property
    def is_empty(self) -> bool:
        """Whether no size lies in it."""
        low = max(self.low or 0, 0)
        return self.high is not None and self.high < low

    def __contains__(self, size: int) -> bool:
        return (self.low is None or size >= self.low) and (self.high is None or size <= self.high)

    def covers(self, other: Span) -> bool:
        """Whether all of another range lies in this one."""
        above = (self.low or 0) <= (other.low or 0)
        return above and (self.high is None or (other.high is not None and other.high <= self.high))

    def __str__(self) -> str:
        if self.low is not None and self.low == self.high:
            return str(self.low)
        if self.high is None:
            return f">={self.low or 0}"
        return f"<={self.high}" if self.low is None else f"{self.low}..{self.high}"


@dataclass(frozen=True)
class When:
    """What an op must be. Each field is a set of alternatives, sorted; an empty one asks nothing.

    Only ``features`` is a set that must be present as a whole. `pin_models.WhenModel` says what each field means.
    """

    phase: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    heads: tuple[Span, ...] = ()
    kv_heads: tuple[Span, ...] = ()
    head_dim: tuple[Span, ...] = ()
    value_head_dim: tuple[Span, ...] = ()
    mask: tuple[str, ...] = ()
    query_length: tuple[Span, ...] = ()
    key_length: tuple[Span, ...] = ()
    batch: tuple[Span, ...] = ()
    grad: tuple[bool, ...] = ()
    layers: tuple[str, ...] = ()
    variant: tuple[str, ...] = ()
    op: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    layout: tuple[str, ...] = ()
    lse: tuple[bool, ...] = ()
    dropout: tuple[bool, ...] = ()

    @cached_property
    def asked(self) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        """The fields that ask something, with what they ask."""
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self))
        return tuple((name, wanted) for name, wanted in pairs if wanted)

    def matches(self, op: AttentionOp, layer: str = "") -> bool:
        """Whether a canonical op of a layer is meant."""
        return all(_HOLDS[name](op, layer, wanted) for name, wanted in self.asked)

    def covers(self, other: When) -> bool:
        """Whether everything that another matches is matched here, as far as the text of both tells."""
        mine, theirs = dict(self.asked), dict(other.asked)
        if not mine.keys() <= theirs.keys():
            return False
        return all(_covers(name, wanted, theirs[name]) for name, wanted in mine.items())

    def __str__(self) -> str:
        parts = (f"{name} {' | '.join(_word(w) for w in wanted)}" for name, wanted in self.asked)
        return ", ".join(parts) or "every op"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _covers(name: str, mine: tuple[Any, ...], theirs: tuple[Any, ...]) -> bool:
    if name == "features":
        return set(mine) <= set(theirs)
    if isinstance(mine[0], Span):
        return all(any(span.covers(other) for span in mine) for other in theirs)
    return set(theirs) <= set(mine)


# --- how each field is compared ------------------------------------------------------------------------------------

_Holds = Callable[[AttentionOp, str, tuple[Any, ...]], bool]


def _equal(read: Callable[[AttentionOp], Any]) -> _Holds:
    return lambda op, layer, wanted: read(op) in wanted


def _sized(read: Callable[[AttentionOp], int]) -> _Holds:
    def holds(op: AttentionOp, layer: str, wanted: tuple[Any, ...]) -> bool:
        size = read(op)
        return any(size in span for span in wanted)

    return holds


def _mask_holds(op: AttentionOp, layer: str, wanted: tuple[str, ...]) -> bool:
    kinds = {atom.feature.removeprefix("mask:").lower() for atom in op.mask.atoms()}
    for text in wanted:
        words = set(text.split(" & "))
        if words == kinds:
            return True
        # a lone query at the end sees what a causal mask lets it see, so passes have taken ``Causal`` off the op
        if op.Sq == 1 and "causal" in words and (words - {"causal"} or {"full"}) == kinds:
            return True
    return False


def _variant(op: AttentionOp) -> str:
    if not isinstance(op.weight, Linear):
        return type(op.weight).__name__.lower()
    return "linear" if op.weight.decay is None else "retention"


_HOLDS: dict[str, _Holds] = {
    "phase": _equal(lambda op: op.phase),
    "dtype": _equal(lambda op: op.dtype),
    "device": _equal(lambda op: op.device),
    "heads": _sized(lambda op: op.Hq),
    "kv_heads": _sized(lambda op: op.Hkv),
    "head_dim": _sized(lambda op: op.D),
    "value_head_dim": _sized(lambda op: op.Dv),
    "mask": _mask_holds,
    "query_length": _sized(lambda op: op.Sq),
    "key_length": _sized(lambda op: op.Skv),
    "batch": _sized(lambda op: op.B),
    "grad": _equal(lambda op: bool(op.grad)),
    "layers": lambda op, layer, wanted: any(fnmatchcase(layer, pattern) for pattern in wanted),
    "variant": _equal(_variant),
    "op": lambda op, layer, wanted: op.digest() in wanted or op.bucketed().digest() in wanted,
    "features": lambda op, layer, wanted: op.features.issuperset(wanted),
    "layout": _equal(lambda op: op.layout),
    "lse": _equal(lambda op: op.outputs.lse),
    "dropout": _equal(lambda op: op.dropout_p > 0),
}


# --- pins ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pin:
    """One entry of ``pins:``.

    Args:
        when: the ops it speaks of. use: backends or chains, best first. avoid: backends or chains that it bars.
        mode: ``"prefer"`` falls through, ``"require"`` never falls back. where: ``"configs/x.yaml:4"``.
        device: the device type of the file's ``hardware``; empty when the file is for any.
        unknown: names of ``use`` or ``avoid`` that nobody registered here, left out of them (of ``use`` only when
            ``mode`` is ``"prefer"``: a required name stays, so that the call raises).
    """

    when: When
    use: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    mode: str = "prefer"
    where: str = ""
    device: str = ""
    unknown: tuple[str, ...] = field(default=(), compare=False)

    def matches(self, op: AttentionOp, layer: str = "") -> bool:
        """Whether the pin speaks of a canonical op in a layer (``""`` when nobody said which).

        Example:
            >>> from attn_dispatch.ir.tensors import TensorDesc
            >>> x = TensorDesc((1, 8, 128, 64), "float32")
            >>> Pin(When(head_dim=(Span(64, 128),)), ("eager",)).matches(AttentionOp(x, x, x))
            True
        """
        return (not self.device or op.device == self.device) and self.when.matches(op, layer)


@dataclass(frozen=True)
class PinFile:
    """A file that was searched.

    Args:
        path: as it is shown. pins, tuned: how many entries it has. hardware: the machine it is for, in words.
        skipped: why it says nothing here; empty when it does.
    """

    path: str
    pins: int = 0
    tuned: int = 0
    hardware: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class Pins:
    """All pins that hold on this machine, strongest first, by the rules of the module.

    Args:
        pins: in order. files: all that were read, those that were skipped included.
        tuned: entries of ``tuned:`` as they stand in the files, each with its ``where``.
        known_bad: entries of ``known_bad:``. allow_known_bad: ids of entries that may run all the same.
        options: of ``backends:``, backend -> option -> value.
    """

    pins: tuple[Pin, ...] = ()
    files: tuple[PinFile, ...] = ()
    tuned: tuple[dict[str, Any], ...] = ()
    known_bad: tuple[KnownBad, ...] = ()
    allow_known_bad: frozenset[str] = frozenset()
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    @cached_property
    def has_layers(self) -> bool:
        """Whether any pin looks at the layer's name: then the name is part of what decides."""
        return any(pin.when.layers for pin in self.pins)

    @cached_property
    def has_lengths(self) -> bool:
        """Whether any pin looks at the exact key length: then no plan may serve another length unasked."""
        return any(pin.when.key_length or pin.when.op for pin in self.pins)

    def requests(self, op: AttentionOp, layer: str = "") -> tuple[Request, ...]:
        """What the pins ask for an op: no request or one.

        Args:
            op: a canonical op. layer: the name of the layer that runs it, ``""`` when unknown.

        Returns:
            The wish of the first matching pin with ``use``, with all that is barred; a request without names when
            matching pins only bar something.
        """
        if not self.pins:
            return ()
        matching = [pin for pin in self.pins if pin.matches(op, layer)]
        avoid: dict[str, None] = {}
        names: tuple[str, ...] = ()
        chosen: Pin | None = None
        for pin in matching:
            avoid |= dict.fromkeys(name for name in pin.avoid if not any(_bars(name, used) for used in names))
            if chosen is None:
                names = tuple(name for name in pin.use if not any(_bars(bar, name) for bar in avoid))
                chosen = pin if names else None
        if chosen is not None:
            return (Request(names, f"pin {chosen.where}", chosen.mode == "require", tuple(avoid)),)
        if avoid:
            first = next(pin for pin in matching if pin.avoid)
            return (Request((), f"pin {first.where}", False, tuple(avoid)),)
        return ()


def _bars(bar: str, name: str) -> bool:
    """Whether an entry of ``avoid`` bars a name of ``use``: the chain itself, or the backend in it."""
    return bar in (name, name.rpartition(" > ")[2])


def unmatched(pins: Pins, ops: Iterable[tuple[AttentionOp, str]]) -> list[Pin]:
    """The pins that match none of these canonical ops, given as ``(op, layer)``."""
    left = list(pins.pins)
    for op, layer in ops:
        left = [pin for pin in left if not pin.matches(op, layer)]
    return left


# --- the pins of this process --------------------------------------------------------------------------------------

_lock = threading.RLock()
_parsed: tuple[Parsed, ...] | None = None
_selected: dict[tuple[device.DeviceFacts, ...], Pins] = {}  # by machine: two GPUs of one process may differ
_configured: list[Backend] = []  # whose options the files set: back to their defaults when the files are forgotten


def _forget() -> None:
    global _parsed
    with _lock:
        _parsed = None
        _selected.clear()
        while _configured:
            _configured.pop().configure({})


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it when the process forked


on_reset.append(_forget)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def config_paths(registry: Registry) -> tuple[Path, ...]:
    """The files to search, strongest first; each once."""
    found = settings()
    paths: Sequence[Path] = found.config_files
    if not found.is_given:
        own = [path for path in paths if path not in found.shipped]
        paths = [*own, *(Path(path) for path in getattr(registry, "configs", ())), *found.shipped]
    first: dict[Path, Path] = {}
    for path in paths:
        first.setdefault(path.resolve(), path)
    return tuple(first.values())


def current_pins() -> Pins:
    """The pins of this process: its files are read at the first call, and anew after `registry.reset`.

    The first call also gives the backends their options, once: an executable keeps those that it was compiled with. A
    file that cannot be used is one `ConfigWarning`, and is ignored.

    Example:
        >>> isinstance(current_pins(), Pins)
        True
    """
    global _parsed
    registry = current()
    parsed = _parsed
    if parsed is None:
        with _lock:
            if _parsed is None:
                paths = config_paths(registry)
                if paths:  # without files neither YAML nor pydantic is imported
                    from attn_dispatch.selection.pin_files import parse

                    _parsed = tuple(parse(path) for path in paths)
                else:
                    _parsed = ()
            parsed = _parsed
    if not parsed:
        return _NONE
    here = tuple(device.facts(kind) for kind in sorted({p.device for p in parsed if p.device}))
    known = _selected.get(here)
    if known is None:
        with _lock:
            known = _selected.get(here)
            if known is None:
                from attn_dispatch.selection.pin_files import select

                known = select(parsed, registry)
                if not _selected:
                    _configure(known, registry)
                _selected[here] = known
    return known


def settle(registry: Registry) -> None:
    """See that backends have their options before any is asked; those of another registry have the defaults."""
    if registry is current():
        current_pins()


def _configure(pins: Pins, registry: Registry) -> None:
    for name, given in pins.options.items():
        _configured.append(registry.backends[name])
        registry.backends[name].configure(given)


_NONE = Pins()
