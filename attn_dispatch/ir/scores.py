"""Score terms: what happens to ``scale * q @ k.T`` before the mask, in order.

The order of an op is fixed (DESIGN section 2): scale, then soft cap, then biases, then mask, softmax, dropout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attn_dispatch.ir.tensors import Ref

__all__ = ["Alibi", "Bias", "ScoreTerm", "SoftCap", "alibi_slopes"]


@dataclass(frozen=True)
class ScoreTerm:
    """Base of the score terms."""

    @property
    def feature(self) -> str:
        """The word that a backend declares to serve this term."""
        return f"score:{type(self).__name__}"


@dataclass(frozen=True)
class SoftCap(ScoreTerm):
    """``s <- cap * tanh(s / cap)``, as Gemma 2 has it; ``cap > 0``."""

    cap: float

    def __str__(self) -> str:
        return f"SoftCap({self.cap!r})"


@dataclass(frozen=True)
class Bias(ScoreTerm):
    """``s <- s + bias``; an entry of -inf is masked, so a row of -inf is an empty row."""

    bias: Ref

    def __str__(self) -> str:
        return f"Bias({self.bias})"


@dataclass(frozen=True)
class Alibi(ScoreTerm):
    """``s <- s - slope[h] * |q_position - k_position|`` (Press et al. 2022); slopes are float32 ``[Hq]``."""

    slopes: Ref

    def __str__(self) -> str:
        return f"Alibi({self.slopes})"


def alibi_slopes(heads: int) -> torch.Tensor:
    """The slopes of the ALiBi paper for any number of heads, float32 ``[heads]``.

    A power of two H has ``2^(-8(h+1)/H)``; other counts take those of the next lower power P and then every second
    one of 2P, as the authors' code and BLOOM do.

    Example:
        >>> alibi_slopes(6)[:4].tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    if heads < 1:
        raise ValueError(f"slopes are for at least one head, got {heads}")
    lower = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / lower) for h in range(lower)]
    slopes += [2 ** (-8 * (2 * h + 1) / (2 * lower)) for h in range(heads - lower)]
    return torch.tensor(slopes, dtype=torch.float32)
