"""Constants of a module that no cast may round and no load may leave empty: retention's decays, ALiBi's slopes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["PerDevice"]


class PerDevice:
    """A table that lies on the CPU, and a copy of it on each device that asks.

    It is no buffer of its module: ``module.bfloat16()`` would round it, and a module that is made on ``meta``, emptied
    onto a device and filled from a state dict would be left with whatever lay in that memory.

    Args:
        table: its values; copied.
        wrap: what is made of each copy; None hands out the tensor itself.
        device: where a copy is wanted at once.

    Example:
        >>> slopes = PerDevice(torch.tensor([0.5, 0.25]))
        >>> slopes.on(torch.device("cpu")).tolist(), slopes.on(torch.device("meta")).device.type
        ([0.5, 0.25], 'meta')
    """

    def __init__(self, table: torch.Tensor, wrap: Any = None, device: torch.device | None = None) -> None:
        with torch.inference_mode(False):  # what is made in inference mode would fail in every later training step
            self.table, self._wrap = table.detach().to("cpu", copy=True), wrap
        self._made = {self.table.device: self._wrapped(self.table)}
        self.on(device or self.table.device)

    def follow(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Copy it to where a module goes, for its ``_apply(fn)``: a compiled call would copy it every time."""
        self.on(fn(torch.empty(0, device="cpu")).device)

    def on(self, device: torch.device) -> Any:
        """The table on a device."""
        found = self._made.get(device)
        if found is not None:
            return found
        with torch.inference_mode(False):
            copy = self.table.to(device)
        made = self._wrapped(copy)
        if type(copy) is torch.Tensor and not torch.compiler.is_compiling():  # not a tracer's, which ends with it
            self._made[device] = made
        return made

    def _wrapped(self, table: torch.Tensor) -> Any:
        return table if self._wrap is None else self._wrap(table)
