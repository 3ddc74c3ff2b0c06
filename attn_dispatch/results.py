"""What a call returns that asks for more than the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import _register_namedtuple as register_namedtuple

__all__ = ["WithLse", "WithLseWeights", "WithWeights", "named_results"]


class WithLse(NamedTuple):
    """What ``return_lse=True`` returns: lse is ``[B, Hq, Sq]`` in fp32 (fp64 for fp64)."""

    out: torch.Tensor
    lse: torch.Tensor


class WithWeights(NamedTuple):
    """What ``return_weights=True`` returns: weights are ``[B, Hq, Sq, Skv]``, before dropout."""

    out: torch.Tensor
    weights: torch.Tensor


class WithLseWeights(NamedTuple):
    """What both return together."""

    out: torch.Tensor
    lse: torch.Tensor
    weights: torch.Tensor


for _kind in (WithLse, WithWeights, WithLseWeights):  # so that a program that returns one can be saved and loaded
    register_namedtuple(_kind, serialized_type_name=f"attn_dispatch.{_kind.__name__}")


def named_results(results: Sequence[torch.Tensor], wants_lse: bool, wants_weights: bool) -> Any:
    """The results of a call under their names, in the order of `WithLseWeights`; one alone as it is.

    Example:
        >>> named_results([torch.zeros(1), torch.ones(1)], True, False).lse
        tensor([1.])
    """
    if wants_lse and wants_weights:
        return WithLseWeights(results[0], results[1], results[2])
    if wants_lse:
        return WithLse(results[0], results[1])
    return WithWeights(results[0], results[1]) if wants_weights else results[0]
