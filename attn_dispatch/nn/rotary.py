"""Rotary positions (Su et al. 2021): each pair of features is turned by an angle that grows with the position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attn_dispatch.errors import InputError

__all__ = ["Rotary", "turn_pairs"]


@dataclass(frozen=True)
class Rotary:
    """How queries and keys are turned.

    Angles are float32 (float64 for float64 inputs): in half precision a late position would be rounded to another.

    Args:
        dim: number of features that are turned, from the first; even. The rest is left alone.
        base: frequency of pair i is ``base ** (-2 i / dim)``.
        interleaved: pairs are neighbours ``(0, 1), (2, 3), ...`` (GPT-J) instead of ``(i, i + dim / 2)`` (Llama).
        scaling: divides positions (linear interpolation).

    Raises:
        InputError: ``dim`` is odd or not positive; ``base`` or ``scaling`` is not positive.

    Example:
        >>> x = torch.ones(1, 1, 2, 4)
        >>> bool(torch.equal(Rotary(4)(x, torch.tensor([0, 1]))[:, :, 0], x[:, :, 0]))
        True
    """

    dim: int
    base: float = 10_000.0
    interleaved: bool = False
    scaling: float = 1.0

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise InputError(f"Rotary turns pairs of features: dim must be even and > 0, got {self.dim}")
        if self.base <= 0 or self.scaling <= 0:
            raise InputError(f"base and scaling must be > 0, got {self.base} and {self.scaling}")

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Turn ``x [B, H, S, D]`` by ``positions``, integers ``[S]`` or ``[B, S]``.

        Raises:
            InputError: fewer features than are to be turned.
        """
        return self.turn(x, *self.table(positions, x.dtype))

    def table(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for `turn`, in ``dtype``: made once where queries and keys share their positions."""
        angles = self.angles(positions, torch.float64 if dtype == torch.float64 else torch.float32)
        angles = angles if angles.ndim == 2 else angles[:, None]
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def turn(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Turn ``x [B, H, S, D]`` by a `table`.

        Raises:
            InputError: fewer features than are to be turned.
        """
        if x.shape[-1] < self.dim:
            raise InputError(f"x has {x.shape[-1]} features, Rotary turns the first {self.dim}")
        turned, rest = x[..., : self.dim], x[..., self.dim :]
        turned = turn_pairs(turned, cos, sin, self.interleaved)
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned

    def angles(self, positions: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The angle of each pair: ``[S, dim / 2]`` or ``[B, S, dim / 2]``."""
        pairs = torch.arange(0, self.dim, 2, device=positions.device, dtype=dtype)
        frequencies = 1.0 / self.base ** (pairs / self.dim)
        return (positions.to(dtype) / self.scaling)[..., None] * frequencies


def turn_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Turn the pairs of features of ``x [..., D]`` by the angles of ``cos`` and ``sin [..., D / 2]``.

    Args:
        interleaved: pairs are neighbours; else a feature of the first half pairs with one of the second.
    """
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
