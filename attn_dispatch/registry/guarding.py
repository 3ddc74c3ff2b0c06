"""What a stranger's code may not do to the process: noticed, put back, and named.

A plugin is imported, asked and compiled inside a `Watch`. What it changed is put back, what it
printed is kept apart from the host's output, and ``changes`` says all of it, so that the culprit can be named.
What the whole process shares (a default dtype, the working directory, random numbers) is left as it is while other
threads live: what they change cannot be told from what the plugin does, and to undo it would break them.
"""

from __future__ import annotations

import io
import os
import random
import sys
import threading
import time
from types import TracebackType
from typing import Any

import torch

__all__ = ["Watch"]

_sinks = threading.local()  # .stack: what this thread prints goes to the last of these
_lock = threading.RLock()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it when the process forked


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class _Shared:
    """Stands for the host's stdout while any thread is watched; all but what watched threads print goes to the host."""

    def __init__(self, host: Any) -> None:
        self.host, self.users = host, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["host"], name)  # buffer, fileno, reconfigure, encoding ...

    def write(self, text: str) -> int:
        to = self._here()
        return len(text) if to is None else to.write(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        to = self._here()
        if to is not None:
            to.flush()

    def _here(self) -> Any:
        stack = getattr(_sinks, "stack", None)
        return stack[-1] if stack else self.host


def _begin() -> tuple[_Shared, io.StringIO]:
    """Keep what this thread prints from now on; one proxy serves all threads, whose ends may come in any order."""
    sink = io.StringIO()
    with _lock:
        shared = sys.stdout if isinstance(sys.stdout, _Shared) else _Shared(sys.stdout)
        shared.users += 1
        sys.stdout = shared
        _sinks.stack = [*getattr(_sinks, "stack", ()), sink]
    return shared, sink


def _end(shared: _Shared, sink: io.StringIO, alone: bool) -> bool:
    """Undo `_begin`; whether somebody put another stream in the proxy's place, which is taken out when no other thread
    can have done it."""
    with _lock:
        _sinks.stack = [other for other in _sinks.stack if other is not sink]
        shared.users -= 1
        replaced = sys.stdout is not shared and alone
        if replaced:
            sys.stdout = shared
        if shared.users <= 0 and sys.stdout is shared:
            sys.stdout = shared.host
    return replaced


class Watch:
    """A context that notices and undoes what its body does to the process.

    It does not see ``os.environ``, warning filters, numpy's random state, nor what the body's own threads do later.

    Attributes:
        changes: what was changed, ``"moved torch's random number generator"``; each was put back unless it says else.
        put_back: whether all of it was.
        seconds: how long it took.

    Example:
        >>> with Watch() as watch:
        ...     _ = torch.set_grad_enabled(False)
        >>> watch.changes, torch.is_grad_enabled()
        (["changed torch's grad mode from True to False"], True)
    """

    def __init__(self) -> None:
        self.changes: list[str] = []
        self.put_back = True
        self.seconds = 0.0

    def __enter__(self) -> Watch:
        self._state = {name: read() for name, (read, _, _) in _STATE.items()}
        self._random, self._torch = random.getstate(), torch.get_rng_state()
        self._stdout = _begin()  # last: whatever raises before it leaves the stream alone
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self._began
        alone = threading.active_count() == 1
        replaced = _end(*self._stdout, alone)
        for name in _STATE:
            self._restore(name, alone)
        if alone and not torch.equal(self._torch, torch.get_rng_state()):
            torch.set_rng_state(self._torch)
            self.changes.append("moved torch's random number generator")
        if alone and self._random != random.getstate():
            random.setstate(self._random)
            self.changes.append("moved Python's random number generator")
        if replaced:
            self.changes.append("replaced sys.stdout")
        if printed := self._stdout[1].getvalue():
            first = printed.strip().splitlines() or [""]
            self.changes.append(f"printed {first[0][:80]!r}")

    def _restore(self, name: str, alone: bool) -> None:
        """Put one thing back; that it cannot be is said, and does not hide what the body raised."""
        read, restore, words = _STATE[name]
        before, after, ending = self._state[name], read(), ""
        if before == after:
            return
        try:
            if not alone and name not in _OF_ONE_THREAD:
                ending = ", which was left so since other threads live"
            else:
                restore(before)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the rest must be put back too
            ending = f", which cannot be put back ({type(failure).__name__}: {failure})"
        self.put_back = self.put_back and not ending
        self.changes.append(f"changed {words} from {before} to {after}{ending}")


_OF_ONE_THREAD = frozenset({"grad", "device"})  # others have their own


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # "cpu" would leave a mode on every call


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed; there is nothing to go back to
        return None


def _set_folder(folder: str | None) -> None:
    if folder is not None:
        os.chdir(folder)


def _set_deterministic(state: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(state[0], warn_only=state[1])


_STATE: dict[str, tuple[Any, Any, str]] = {
    "dtype": (torch.get_default_dtype, torch.set_default_dtype, "torch's default dtype"),
    "device": (torch.get_default_device, _set_device, "torch's default device"),
    "threads": (torch.get_num_threads, torch.set_num_threads, "torch's number of threads"),
    "grad": (torch.is_grad_enabled, torch.set_grad_enabled, "torch's grad mode"),
    "deterministic": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
        "torch's deterministic mode",
    ),
    "precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        "torch's matmul precision",
    ),
    "folder": (_folder, _set_folder, "the working directory"),
    "limit": (sys.getrecursionlimit, sys.setrecursionlimit, "Python's recursion limit"),
}
