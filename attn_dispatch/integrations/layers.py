"""Names of layers, for pins by layer: ``layers: "model.layers.*.self_attn"``."""

from __future__ import annotations

import threading
from fnmatch import fnmatchcase
from typing import Any

import torch

from attn_dispatch.context import at_layer

__all__ = ["name_layers"]


class name_layers:  # noqa: N801 - used like a function
    """Tell the dispatcher which layer runs, by the names of ``model.named_modules()``.

    Hooks are put on the modules that match; calls of attention inside one carry its name, which pins can match and
    which `explain` and `capture` show. Use it as a context manager, or keep it and call `remove`.

    Args:
        model: whose modules are named; the innermost that runs counts. patterns: as in the shell,
            ``"model.layers.*.self_attn"``; none names every module.

    Example:
        >>> import torch
        >>> from attn_dispatch import dispatch
        >>> class Block(torch.nn.Module):
        ...     def forward(self, x):
        ...         return dispatch.attention(x, x, x)
        >>> model = torch.nn.Sequential(Block(), Block())
        >>> with name_layers(model), dispatch.capture() as workload:
        ...     _ = model(torch.ones(1, 1, 4, 8))
        >>> [entry.layer for entry in workload]
        ['0', '1']
    """

    def __init__(self, model: torch.nn.Module, *patterns: str) -> None:
        wanted = patterns or ("*",)
        self._handles: list[Any] = []
        self._inside = threading.local()  # checkpointing runs a forward again in a thread of the backward
        for name, module in model.named_modules():
            if name and any(fnmatchcase(name, pattern) for pattern in wanted):
                self._handles.append(module.register_forward_pre_hook(self._entering(name)))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def _entering(self, name: str) -> Any:
        def enter(_module: torch.nn.Module, _args: Any) -> None:
            layer = at_layer(name, over=True)
            layer.__enter__()
            self._stack().append(layer)

        return enter

    def _leave(self, _module: torch.nn.Module, _args: Any, _out: Any) -> None:
        stack = self._stack()
        if stack:  # a pre-hook of somebody else may have raised before ours
            stack.pop().__exit__()

    def _stack(self) -> list[at_layer]:
        if not hasattr(self._inside, "stack"):
            self._inside.stack = []
        return self._inside.stack

    def remove(self) -> None:
        """Take the hooks off again."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> name_layers:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
