"""Autocast, as torch's SDPA takes it: query, key and value in its dtype, and no autocast inside."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["cast", "casts"]


def casts(query: Any) -> bool:
    """Whether autocast is on for the device of a query."""
    if not torch._C._is_any_autocast_enabled() or not isinstance(query, torch.Tensor):
        return False
    return _is_on(query.device.type)


def _is_on(kind: str) -> bool:
    """A device type without autocast (meta) has it off."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def cast(*tensors: Any) -> list[Any]:
    """Tensors in autocast's dtype, where it is on for the device of the first; float64 and what is no tensor stay.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     [x.dtype for x in cast(torch.zeros(2), torch.zeros(2, dtype=torch.float64))]
        [torch.bfloat16, torch.float64]
    """
    kind = tensors[0].device.type
    if not _is_on(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [
        x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
        for x in tensors
    ]
