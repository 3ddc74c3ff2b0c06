"""The weight kinds of attention, for ``dispatch.attention(..., variant=...)``.

Retention and linear attention are constructors of one `Linear` kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["LinearAttention", "Retention", "Softmax", "Variant", "retention_decay"]


@dataclass(frozen=True)
class Variant:
    """Base of the variants."""


@dataclass(frozen=True)
class Softmax(Variant):
    """Softmax attention (Vaswani et al. 2017); the default."""


@dataclass(frozen=True)
class LinearAttention(Variant):
    """Linear attention (Katharopoulos et al. 2020): ``phi(q) phi(k)^T``, divided by its row sum.

    Args:
        feature_map: ``"elu1"`` or ``"identity"``.
        normalizer_eps: added to the row sum; None does not divide.
    """

    feature_map: str = "elu1"
    normalizer_eps: float | None = 1e-6


@dataclass(frozen=True, eq=False)
class Retention(Variant):
    """Retention (Sun et al. 2023), the parallel form: ``scale * q k^T * decay[h] ** (p - j)``, no normaliser.

    Args:
        decay: float32 ``[Hq]`` in (0, 1]; see `retention_decay`.
    """

    decay: torch.Tensor


def retention_decay(heads: int) -> torch.Tensor:
    """RetNet's decay per head, ``1 - 2^(-5 - h)``, float32 ``[heads]``.

    Example:
        >>> retention_decay(2).tolist()
        [0.96875, 0.984375]
    """
    return 1.0 - torch.exp2(-5.0 - torch.arange(heads, dtype=torch.float32))
