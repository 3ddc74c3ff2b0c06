"""What `dispatch.use` and `dispatch.capture` set around calls: one frozen value in a ContextVar."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from attn_dispatch.errors import InputError

__all__ = ["AUTOTUNE_MODES", "DEFAULT", "Context", "active", "as_names", "recording", "surrounding", "use"]

AUTOTUNE_MODES = ("off", "cached", "on")


@dataclass(frozen=True)
class Context:
    """The settings that surround a call.

    Args:
        backends: names or chains asked for; empty for none.
        require: whether they may not be fallen back from.
        autotune: ``"off"``, ``"cached"`` (use what was measured before) or ``"on"``.
        record: called with each plan that runs, and the call's tensors; None when nobody listens.
    """

    backends: tuple[str, ...] = ()
    require: bool = True
    autotune: str = "cached"
    record: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.backends, self.require, self.autotune, self.record)))

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
        autotune: ``"off"``, ``"cached"`` or ``"on"``; None keeps what is set.
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
