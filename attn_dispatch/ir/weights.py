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

    def refs(self) -> list[Ref]:
        """The tensors that it needs at run time."""
        return []

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

    def refs(self) -> list[Ref]:
        """The tensors that it needs at run time."""
        return [] if self.sinks is None else [self.sinks]

    def __str__(self) -> str:
        return "Softmax" if self.sinks is None else f"Softmax(sinks={self.sinks})"


@dataclass(frozen=True)
class Linear(Weight):
    """``feature(q) . feature(k)`` without an exponential, ``decay[h] ** |p - j|`` on each pair when decay is given.

    A state stands for keys before key 0, the nearest of them at position -1: a query at position p adds
    ``decay[h] ** (p + 1) * feature(q) . S`` (``z`` likewise, to the sum of weights), unless the mask has segments and
    the query is not in that of key 0.

    Args:
        feature_map: ``"identity"`` or ``"elu1"`` (elu + 1).
        decay: float32 ``[Hq]`` in [0, 1]; None for none.
        normalizer_eps: divide by the sum of weights plus this; None does not divide.
        state: the state that goes in, ``[B, H, D, Dv]``, H being Hq with a decay and Hkv without; None for none.
        state_z: ``[B, H, D]``, with a normaliser. state_length: integers ``[B]`` or ``[1]``.
    """

    feature_map: str = "identity"
    decay: Ref | None = None
    normalizer_eps: float | None = None
    state: Ref | None = None
    state_z: Ref | None = None
    state_length: Ref | None = None

    def refs(self) -> list[Ref]:
        """The tensors that it needs at run time."""
        return [ref for ref in (self.decay, *self.state_refs()) if ref is not None]

    def state_refs(self) -> list[Ref]:
        """The tensors of the state that goes in."""
        return [ref for ref in (self.state, self.state_z, self.state_length) if ref is not None]

    def __str__(self) -> str:
        parts = [self.feature_map]
        parts += [f"decay={self.decay}"] if self.decay is not None else []
        parts += [f"normalizer_eps={self.normalizer_eps:g}"] if self.normalizer_eps is not None else []
        parts += [f"state={self.state}"] if self.state is not None else []
        return f"Linear({', '.join(parts)})"
