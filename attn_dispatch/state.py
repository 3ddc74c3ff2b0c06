"""The state of linear attention and retention, and how two states become one.

A state is a partial result, as softmax's ``(out, lse)`` is: what all keys so far add up to. It goes in before the first
key of a call and comes out after the last, so that a sequence may be cut anywhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["LinearState", "WithState", "combine_states", "spread_state", "state_dtype"]


class LinearState(NamedTuple):
    """What linear attention and retention carry from one call to the next.

    It holds no scale: the scale belongs to the query. The last key counts in full, the one before it with ``decay``.

    Args:
        S: ``sum_j decay ** (length - 1 - j) * phi(k_j) v_j^T``, ``[B, H, D, Dv]``, float32 (float64 for float64
            inputs). H is Hkv without a decay, and Hq with one, since a decay belongs to a query head.
        z: ``sum_j phi(k_j)``, ``[B, H, D]``, for a variant with a normaliser; None without one.
        length: number of keys, an int or an integer tensor ``[B]``; comes back as int64 ``[B]``. Padding by
            ``key_lengths`` does not count.
    """

    S: torch.Tensor
    z: torch.Tensor | None
    length: torch.Tensor | int


class WithState(NamedTuple):
    """What ``return_state=True`` returns."""

    out: torch.Tensor
    state: LinearState


def combine_states(earlier: LinearState, later: LinearState, decay: torch.Tensor | None = None) -> LinearState:
    """The state of two neighbouring stretches of keys: associative; zeros of length 0 are neutral.

    Args:
        earlier, later: states of the stretch before and of the one behind, each computed from nothing.
        decay: ``[H]``, the decay they were computed with; None without one. The earlier one fades by it.
    """
    length = earlier.length + later.length
    if decay is None:
        z = None if earlier.z is None or later.z is None else earlier.z + later.z
        return LinearState(earlier.S + later.S, z, length)
    steps = torch.as_tensor(later.length, device=decay.device).reshape(-1, 1)
    faded = decay.to(earlier.S.dtype) ** steps  # [B, H]; a power: 0 ** 0 is the 1 that is meant
    z = None if earlier.z is None or later.z is None else earlier.z * faded[..., None] + later.z
    return LinearState(earlier.S * faded[..., None, None] + later.S, z, length)


def spread_state(state: Any) -> dict[str, torch.Tensor]:
    """The tensors of a state by the names that an op uses: ``state``, ``state_z``, ``state_length``."""
    length = state.length
    if not isinstance(length, torch.Tensor):
        length = torch.full((1,), length, dtype=torch.int64, device=state.S.device)
    named = {"state": state.S, "state_z": state.z, "state_length": length}
    return {name: x for name, x in named.items() if x is not None}


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a state for inputs of ``dtype``: float32, float64 for float64.

    Example:
        >>> state_dtype(torch.bfloat16)
        torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32
