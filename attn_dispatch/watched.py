"""A stranger's backend, watched: what it raises has its name, its first result is checked,
and the process stays as it was."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch

from attn_dispatch.backend import Backend, Executable, Operands, Raw
from attn_dispatch.errors import BackendError, PluginWarning
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.registry.discover import on_reset
from attn_dispatch.registry.guarding import Watch
from attn_dispatch.state import LinearState

__all__ = ["Watched"]

_told: set[str] = set()  # what was warned of, once each; a new registry starts anew
on_reset.append(_told.clear)


class Watched(Backend):
    """A stranger's backend: what it raises is a `BackendError` with its name, and its first result is checked.

    Args:
        backend: the stranger's. origin: its distribution and version.
    """

    def __init__(self, backend: Backend, origin: str) -> None:
        self.name, self._backend = backend.name, backend
        self._who = f"backend {backend.name!r} ({origin})"

    def compile(self, op: AttentionOp) -> Executable:
        with Watch() as watch:
            try:
                executable = self._backend.compile(op)
            except (Exception, SystemExit) as error:
                raise BackendError(f"{self._who} raised {type(error).__name__} when compiled: {error}") from error
        self._tell(watch, "compiled")
        run = getattr(executable, "run", None)
        if not isinstance(executable, Executable) or not callable(run):
            raise BackendError(f"{self._who}: compile must return an Executable, got {executable!r}")
        run = executable.behind_rewrites or run  # right in either place
        checked = False

        def watched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
            nonlocal checked
            # random numbers are its right where there is dropout; a graph cannot hold what the watch does
            watch = nullcontext() if checked or op.traced or op.dropout_p > 0 else Watch()
            before = {} if checked or op.traced else _marks(q, k, v, t)
            with watch:
                try:
                    result = run(q, k, v, t)
                except torch.OutOfMemoryError:  # callers catch it, and the backend is not at fault
                    raise
                except (Exception, SystemExit) as error:
                    raise BackendError(f"{self._who} raised {type(error).__name__} when run: {error}") from error
            if not checked:
                if isinstance(watch, Watch):
                    self._tell(watch, "run")
                problem = _changed(before, _marks(q, k, v, t)) or _broken_contract(result, op, q, k, v, t)
                if problem:
                    raise BackendError(f"{self._who} broke its contract: {problem}")
                checked = True
            return result

        return Executable(watched)

    def _tell(self, watch: Watch, when: str) -> None:
        """Name the backend for what it did to the process, once for each thing."""
        ending = "; it was put back" if watch.put_back else ""
        text = f"{self._who} {' and '.join(watch.changes)} when it was {when}{ending}"
        if watch.changes and text not in _told:
            _told.add(text)
            warnings.warn(text, PluginWarning, stacklevel=4)


def _marks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> dict[str, int]:
    """How often each input was written to, as autograd counts it; nothing for those of inference mode."""
    named = {"query": q, "key": k, "value": v, **t}
    return {name: x._version for name, x in named.items() if isinstance(x, torch.Tensor) and not x.is_inference()}


def _changed(before: dict[str, int], after: dict[str, int]) -> str:
    names = [name for name, version in before.items() if after.get(name) != version]
    return f"it changes its input {', '.join(names)}; work on a copy" if names else ""


def _broken_contract(
    result: Any, op: AttentionOp, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands
) -> str:
    """What is wrong with a result; empty when nothing is."""
    wanted = op.outputs
    rows = tuple(q.shape[:3])
    accumulated = torch.float64 if q.dtype == torch.float64 else torch.float32
    parts: list[tuple[str, Any, tuple[int, ...], torch.dtype | None]] = []
    if wanted.lse or wanted.weights or wanted.state:
        if not isinstance(result, Raw):
            if wanted.state:
                return f"run must return Raw(out, state=...) for return_state, got {_kind(result)}"
            return f"run must return Raw(out, lse, weights) for return_lse or return_weights, got {_kind(result)}"
        if wanted.state and not isinstance(result.state, LinearState):
            return f"state must be a LinearState, got {_kind(result.state)}"
        parts += [("lse", result.lse, rows, accumulated)] if wanted.lse else []
        parts += [("weights", result.weights, (*rows, k.shape[2]), None)] if wanted.weights else []
        result = result.out
    for name, x, shape, dtype in [("out", result, (*rows, v.shape[3]), q.dtype), *parts]:
        if not isinstance(x, torch.Tensor):
            return f"{name} must be a tensor, got {_kind(x)}"
        if tuple(x.shape) != shape:
            return f"{name} must have shape {list(shape)}, got {list(x.shape)}"
        if dtype is not None and x.dtype != dtype:
            return f"{name} must have dtype {dtype}, got {x.dtype}"
        if x.device != q.device:
            return f"{name} must be on {q.device}, got {x.device}"
    if op.traced:  # tensors without storage
        return ""
    for name, x in {"query": q, "key": k, "value": v, **t}.items():
        if result.numel() and x.untyped_storage().data_ptr() == result.untyped_storage().data_ptr():
            return f"out shares its memory with {name}; return a tensor of its own"
    return ""


def _kind(x: Any) -> str:
    return f"a tensor of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
