"""How scores become weights: softmax, or the linear (kernel) family with or without decay.

Retention and linear attention are constructors of `Linear`, not kinds of their own: see `attn_dispatch.variants`.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.ir.tensors import Ref

__all__ = ["Linear", "Softmax", "Weight"]


@dataclass(frozen=True)
class Weight:
    """Base of the weight kinds."""

    @property
    def feature(self) -> str:
        """The word that a backend declares to serve this kind."""
        return f"weight:{type(self).__name__}"


@dataclass(frozen=True)
class Softmax(Weight):
    """``softmax(scores)``, optionally with one more learned logit per head in the denominator.

    Args:
        sinks: float ``[Hq]``, neither scaled nor capped (gpt-oss); None for none.
    """

    sinks: Ref | None = None

    def __str__(self) -> str:
        return "Softmax" if self.sinks is None else f"Softmax(sinks={self.sinks})"


@dataclass(frozen=True)
class Linear(Weight):
    """``feature(q) . feature(k)`` without an exponential, ``decay[h] ** (p - j)`` on each pair when decay is given.

    Args:
        feature_map: ``"identity"`` or ``"elu1"`` (elu + 1).
        decay: float32 ``[Hq]`` in (0, 1]; None for none.
        normalizer_eps: divide by the sum of weights plus this; None does not divide.
    """

    feature_map: str = "identity"
    decay: Ref | None = None
    normalizer_eps: float | None = None

    def __str__(self) -> str:
        parts = [self.feature_map]
        parts += [f"decay={self.decay}"] if self.decay is not None else []
        parts += [f"normalizer_eps={self.normalizer_eps:g}"] if self.normalizer_eps is not None else []
        return f"Linear({', '.join(parts)})"
