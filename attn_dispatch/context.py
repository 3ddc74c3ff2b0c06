"""What `dispatch.use` and `dispatch.capture` set around calls: one frozen value in a ContextVar."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from typing import Any

from attn_dispatch.errors import InputError
from attn_dispatch.settings import AUTOTUNE_MODES

__all__ = [
    "AUTOTUNE_MODES",
    "DEFAULT",
    "Context",
    "active",
    "as_names",
    "at_layer",
    "current_layer",
    "recording",
    "surrounding",
    "use",
]


@dataclass(frozen=True)
class Context:
    """The settings that surround a call.

    Args:
        backends: names or chains asked for; empty for none.
        require: whether they may not be fallen back from.
        autotune: one of `AUTOTUNE_MODES`; empty for what ``ATTN_DISPATCH_AUTOTUNE`` says, ``"cached"`` without it.
        record: called with each plan that runs, and the call's tensors; None when nobody listens.
        layer: the layer that runs, where a pin asks for it; see `at_layer`.
    """

    backends: tuple[str, ...] = ()
    require: bool = True
    autotune: str = ""
    record: Callable[..., None] | None = None
    layer: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.backends, self.require, self.autotune, self.record, self.layer)))

    def __hash__(self) -> int:  # computed once: it is part of the key of every call
        return self._hash  # type: ignore[attr-defined]


DEFAULT = Context()

# Whether any thread is inside `use` or `capture`. Dynamo cannot read a ContextVar but guards on a module's global, so
# a compiled graph is traced once for "nobody" and once for "somebody", and the latter asks the ContextVar at run time.
in_use = False
_depth = 0
_depth_lock = threading.Lock()
# None outside any `use`: it is part of the key of every call, and None hashes without a Python call
active: ContextVar[Context | None] = ContextVar("attn_dispatch", default=None)

# The module whose forward is running, as far as an integration knows it; "" outside one.
current_layer: ContextVar[str] = ContextVar("attn_dispatch_layer", default="")
# Whether a pin looks at layers: only then does the layer belong to the key of a call. Set when the pins are read.
layers_matter = False


def surrounding() -> Context:
    """The settings that surround this call."""
    return active.get() or DEFAULT


def as_names(backend: str | Sequence[str] | None) -> tuple[str, ...]:
    """``backend=`` as names: None is none, a string one, a list an order of preference."""
    if backend is None:
        return ()
    names = (backend,) if isinstance(backend, str) else tuple(backend)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InputError(f"backend must be a name or a non-empty list of names, got {backend!r}")
    return names


@contextmanager
def use(
    backend: str | Sequence[str] | None = None, *, autotune: str | None = None, require: bool = True
) -> Iterator[None]:
    """Ask for backends around calls; restored on leaving, on exceptions too, and seen by this thread or task alone.

    Args:
        backend: a backend (``"sdpa_flash"``), a chain (``"fold_groups > sdpa_flash"``) or a list, best first.
        autotune: ``"off"`` (nothing measured is used), ``"cached"`` (what was measured before is), ``"on"`` (a miss is
            measured now), ``"force"`` (measured anew), ``"assert"`` (a miss raises); None keeps what is set.
        require: raise when none of them can run a call; False falls back and warns once.

    Raises:
        InputError: a mode that does not exist; UnknownBackendError: a name that nobody registered.

    Example:
        >>> import torch
        >>> from attn_dispatch import dispatch
        >>> x = torch.ones(1, 1, 2, 8)
        >>> with dispatch.use(backend="eager"):
        ...     dispatch.plan(x, x, x).name
        'eager'
    """
    from attn_dispatch.registry import current
    from attn_dispatch.selection.candidates import parse_name

    names = as_names(backend)
    for name in names:
        parse_name(name, current())
    if autotune is not None and autotune not in AUTOTUNE_MODES:
        raise InputError(f"autotune must be one of {', '.join(AUTOTUNE_MODES)}, got {autotune!r}")
    changes: dict[str, Any] = {"autotune": autotune} if autotune is not None else {}
    changes |= {"backends": names, "require": require} if names else {}
    with _entered(replace(surrounding(), **changes)):
        yield


class at_layer:  # noqa: N801 - used like a function; a class enters faster, and this runs at every call of a layer
    """Say which layer runs inside, for pins by layer and for `capture`.

    Args:
        name: the layer, ``"model.layers.3.self_attn"``. over: whether it replaces a name that was set further out.
    """

    __slots__ = ("_name", "_over", "_settings", "_token")

    def __init__(self, name: str, over: bool = False) -> None:
        self._name, self._over = name, over
        self._token: Token[str] | None = None
        self._settings: Token[Context | None] | None = None

    def __enter__(self) -> None:
        if not self._over and current_layer.get():
            return
        self._token = current_layer.set(self._name)
        if layers_matter:
            self._settings = active.set(replace(surrounding(), layer=self._name))

    def __exit__(self, *_: object) -> None:
        if self._settings is not None:
            active.reset(self._settings)
        if self._token is not None:
            current_layer.reset(self._token)


@contextmanager
def _entered(settings: Context) -> Iterator[None]:
    token = active.set(settings)
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        active.reset(token)


def _renew_lock() -> None:
    global _depth_lock
    _depth_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _count(step: int) -> None:
    global in_use, _depth
    with _depth_lock:
        _depth += step
        in_use = _depth > 0


@contextmanager
def recording(record: Callable[..., None]) -> Iterator[None]:
    """Have ``record`` called with every plan that runs inside; for `attn_dispatch.capture`."""
    with _entered(replace(surrounding(), record=record)):
        yield
