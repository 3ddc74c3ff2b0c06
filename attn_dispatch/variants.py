"""The weight kinds of attention, for ``dispatch.attention(..., variant=...)``, and what comes out of cutting them up.

Retention and linear attention are constructors of one `Linear` kind. Both run from a state and return one
(``state=``, ``return_state=True``), a `LinearState`; `combine` merges partial results of either family.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from attn_dispatch.errors import InputError, InputTypeError
from attn_dispatch.state import LinearState, WithState, combine_states

__all__ = [
    "LinearAttention",
    "LinearState",
    "Retention",
    "Softmax",
    "Stateful",
    "Variant",
    "WithState",
    "combine",
    "retention_decay",
    "stateful",
    "variant_key",
]


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
        feature_map: ``"elu1"`` (elu + 1) or ``"identity"``, computed in float32.
        normalizer_eps: added to the row sum of ``scale * phi(q) phi(k)^T``; None does not divide. The paper has no
            scale: with ``scale=1.0`` its eps is exactly this one, otherwise the scale cancels all but in eps.
    """

    feature_map: str = "elu1"
    normalizer_eps: float | None = 1e-6


@dataclass(frozen=True, eq=False)
class Retention(Variant):
    """Retention (Sun et al. 2023): ``scale * q k^T * decay[h] ** |p - j|``, no normaliser; causal by ``is_causal``.

    RetNet's norm, gate and rotation stand outside: see `attn_dispatch.nn.Retention`.

    Args:
        decay: ``[Hq]`` in (0, 1], float32 whatever the inputs are (bfloat16 would round 1 - 2^-9 to no decay at all);
            see `retention_decay`.
    """

    decay: torch.Tensor

    @cached_property
    def in_range(self) -> bool:
        """Whether every decay lies in (0, 1]; looked at once."""
        return not bool(((self.decay <= 0) | (self.decay > 1) | self.decay.isnan()).any())


@dataclass(frozen=True, eq=False)
class Stateful(Variant):
    """A variant that runs from a state, or returns one: ``state=`` and ``return_state=`` of a call in one value.

    Args:
        inner: the variant. state: what goes in, None to start from nothing. returns: whether the state comes out.
    """

    inner: Variant
    state: LinearState | None = None
    returns: bool = False


def stateful(variant: Any, state: Any, return_state: bool) -> Stateful:
    """The variant of a call with ``state=`` or ``return_state=``.

    Raises:
        InputError, InputTypeError: softmax, which has no such state; a state that is not a `LinearState`.
    """
    if not isinstance(variant, Variant):
        raise InputTypeError(f"variant must be from attn_dispatch.variants, got {variant!r}")
    if isinstance(variant, Softmax):
        asked = "state=" if state is not None else "return_state=True"
        remedy = "return_lse=True and variants.combine, or keep the keys; variant=LinearAttention() has a state"
        raise InputError(f"{asked} means nothing for softmax attention: its state is its keys", remedy=remedy)
    if state is not None and not isinstance(state, LinearState):
        remedy = "pass what return_state=True returned, or variants.LinearState(S, z, length)"
        raise InputTypeError(f"state must be a LinearState, got {type(state).__name__}", remedy=remedy)
    if state is not None:
        wrong = {"S": not isinstance(state.S, torch.Tensor)}
        wrong |= {"z": not (state.z is None or isinstance(state.z, torch.Tensor))}
        wrong |= {"length": not isinstance(state.length, (int, torch.Tensor))}
        for name in [name for name, bad in wrong.items() if bad]:
            got = type(getattr(state, name)).__name__
            raise InputTypeError(f"state.{name} must be a tensor{' or an int' * (name == 'length')}, got {got}")
    return Stateful(variant, state, bool(return_state))


def variant_key(variant: Any) -> Any:
    """What of a variant is no tensor, hashable: a part of the key of a warm call."""
    if isinstance(variant, Stateful):
        return (variant_key(variant.inner), variant.returns)
    return Retention if isinstance(variant, Retention) else variant


def retention_decay(heads: int, *, first: int = 0) -> torch.Tensor:
    """RetNet's decay per head, ``1 - 2^(-5 - h)``, float32 ``[heads]``.

    Args:
        heads: number of heads here.
        first: global number of the first of them, when the heads of a layer are spread over devices.

    Example:
        >>> retention_decay(2).tolist()
        [0.96875, 0.984375]
        >>> bool((retention_decay(8)[6:] == retention_decay(2, first=6)).all())
        True
    """
    return 1.0 - torch.exp2(-5.0 - torch.arange(first, first + heads, dtype=torch.float32))


def combine(*parts: Any, decay: torch.Tensor | None = None) -> Any:
    """One partial result from several over disjoint keys: of softmax ``(out, lse)``, or `LinearState` s in order.

    Both are monoids: how the keys were cut does not change the result. It serves split-KV, chunked prefill, unions of
    disjoint masks and sharded sequences.

    Args:
        parts: pairs ``(out [B, H, S, Dv], lse [B, H, S])`` over disjoint keys, in any order, without sinks (apply
            these once, at the end); or states of neighbouring stretches of keys, earliest first.
        decay: ``[Hq]``, for states of retention.

    Returns:
        ``(out, lse)``, or a `LinearState`.

    Example:
        >>> from attn_dispatch import dispatch
        >>> q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 10, 8)
        >>> halves = [dispatch.attention(q, x, x, return_lse=True) for x in (k[:, :, :4], k[:, :, 4:])]
        >>> torch.allclose(combine(*halves)[0], dispatch.attention(q, k, k), atol=1e-5)
        True
    """
    if not parts:
        raise InputError("combine needs at least one partial result")
    if isinstance(parts[0], LinearState):
        if not all(isinstance(part, LinearState) for part in parts):
            raise InputTypeError("combine takes states, or (out, lse) pairs, not both")
        total = parts[0]
        for part in parts[1:]:
            total = combine_states(total, part, decay)
        return total
    if decay is not None:
        raise InputError("decay belongs to states of retention; (out, lse) pairs do not fade")
    from attn_dispatch.backend import Raw
    from attn_dispatch.rewrites.merge_parts import merge

    merged = merge([Raw(part[0], part[1]) for part in parts])
    return merged.out, merged.lse
