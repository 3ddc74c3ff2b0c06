"""Biases by the names people use, for ``dispatch.attention(..., bias=...)``: ALiBi's slopes, T5's relative buckets.

A bias of rank 1 is ALiBi (slopes ``[Hq]``); every other one is a float tensor that broadcasts to ``[B, Hq, Sq, Skv]``,
with gradients, summed over what was broadcast.

Example:
    >>> import torch
    >>> from attn_dispatch import biases, dispatch
    >>> x = torch.randn(1, 12, 5, 16)
    >>> dispatch.attention(x, x, x, is_causal=True, bias=biases.alibi_slopes(12)).shape
    torch.Size([1, 12, 5, 16])
"""

from __future__ import annotations

import math

import torch

from attn_dispatch.errors import InputError
from attn_dispatch.ir.scores import alibi_slopes

__all__ = ["alibi_slopes", "relative_buckets", "t5_relative_bias"]


def relative_buckets(
    distance: torch.Tensor, buckets: int = 32, max_distance: int = 128, *, bidirectional: bool = True
) -> torch.Tensor:
    """T5's bucket of each distance ``k_position - q_position``: exact when near, logarithmic up to ``max_distance``.

    Args:
        distance: integers of any shape. buckets: how many there are; half of them for each direction when both exist.
        bidirectional: False for a decoder: keys behind the query only, those ahead share bucket 0.

    Returns:
        int64, of the shape of ``distance``, in ``[0, buckets)``.

    Raises:
        InputError: too few buckets, or a ``max_distance`` that the exact ones already reach.

    Source: Raffel et al. 2020.

    Example:
        >>> relative_buckets(torch.tensor([-200, -8, -1, 0, 1, 8, 200])).tolist()
        [15, 8, 1, 0, 17, 24, 31]
    """
    sides = 2 if bidirectional else 1
    each = buckets // sides
    exact = each // 2
    if buckets < 2 * sides or buckets % sides:
        kind = "an even number >= 4" if bidirectional else ">= 2"
        raise InputError(f"buckets must be {kind}, got {buckets}", remedy="T5 has 32")
    if max_distance <= exact:
        raise InputError(f"max_distance must be > {exact}, which {buckets} buckets count exactly, got {max_distance}")
    first = torch.where(distance > 0, each, 0) if bidirectional else torch.zeros_like(distance)
    away = distance.abs() if bidirectional else (-distance).clamp(min=0)
    # the logarithm in float32, as T5's own tables were made: a border that rounds differently is another bucket
    far = torch.log(away.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (each - exact)
    return first + torch.where(away < exact, away, (exact + far.long()).clamp(max=each - 1))


def t5_relative_bias(
    table: torch.Tensor,
    query_length: int,
    key_length: int,
    *,
    bidirectional: bool = True,
    max_distance: int = 128,
    q_offset: int | None = None,
) -> torch.Tensor:
    """T5's relative position bias ``[1, Hq, Sq, Skv]``, with gradients to its table.

    Args:
        table: learned ``[buckets, Hq]`` (``relative_attention_bias.weight`` of T5's first layer).
        query_length, key_length: Sq and Skv. q_offset: key position of query 0; default Skv - Sq.

    Raises:
        InputError: a table that is not ``[buckets, Hq]``; see `relative_buckets` for the rest.

    Example:
        >>> t5_relative_bias(torch.randn(32, 8), 4, 6).shape
        torch.Size([1, 8, 4, 6])
    """
    if table.ndim != 2:
        raise InputError(f"table must be [buckets, Hq], got {list(table.shape)}")
    offset = key_length - query_length if q_offset is None else q_offset
    rows = torch.arange(query_length, device=table.device)[:, None] + offset
    distance = torch.arange(key_length, device=table.device) - rows
    found = relative_buckets(distance, table.shape[0], max_distance, bidirectional=bidirectional)
    return torch.nn.functional.embedding(found, table).permute(2, 0, 1)[None]
