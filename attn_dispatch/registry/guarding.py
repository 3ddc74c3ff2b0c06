"""What a stranger's code may not do to the process: noticed, put back, and named.

A plugin is imported, asked and compiled inside a `Watch`. What it changed is put back, what it
printed is kept apart from the host's output, and ``changes`` says all of it, so that the culprit can be named.
Random numbers are left alone while other threads live: theirs cannot be told from the plugin's.
"""

from __future__ import annotations

import contextlib
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


class _OwnThread(io.StringIO):
    """Keeps what this thread prints, and hands on what others do."""

    def __init__(self, host: Any) -> None:
        super().__init__()
        self._host, self._thread = host, threading.get_ident()

    def write(self, text: str) -> int:
        return super().write(text) if threading.get_ident() == self._thread else self._host.write(text)


class Watch:
    """A context that notices and undoes what its body does to the process.

    Attributes:
        changes: what was changed, ``"moved torch's random number generator"``; each was put back.
        seconds: how long it took.

    Example:
        >>> with Watch() as watch:
        ...     torch.set_default_dtype(torch.float64)
        >>> watch.changes, torch.get_default_dtype()
        (["changed torch's default dtype from torch.float32 to torch.float64"], torch.float32)
    """

    def __init__(self) -> None:
        self.changes: list[str] = []
        self.seconds = 0.0

    def __enter__(self) -> Watch:
        self._printed = _OwnThread(sys.stdout)
        self._streams = contextlib.ExitStack()
        self._streams.enter_context(contextlib.redirect_stdout(self._printed))
        self._state = {name: read() for name, (read, _, _) in _STATE.items()}
        self._random, self._torch = random.getstate(), torch.get_rng_state()
        self._began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.seconds = time.perf_counter() - self._began
        self._streams.close()
        for name, (read, restore, words) in _STATE.items():
            before, after = self._state[name], read()
            if before != after:
                restore(before)
                self.changes.append(f"changed {words} from {before} to {after}")
        alone = threading.active_count() == 1
        if alone and not torch.equal(self._torch, torch.get_rng_state()):
            torch.set_rng_state(self._torch)
            self.changes.append("moved torch's random number generator")
        if alone and self._random != random.getstate():
            random.setstate(self._random)
            self.changes.append("moved Python's random number generator")
        if self._printed.getvalue():
            first = self._printed.getvalue().strip().splitlines() or [""]
            self.changes.append(f"printed {first[0][:80]!r}")


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # "cpu" would leave a mode on every call


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
    "folder": (os.getcwd, os.chdir, "the working directory"),
    "limit": (sys.getrecursionlimit, sys.setrecursionlimit, "Python's recursion limit"),
}
