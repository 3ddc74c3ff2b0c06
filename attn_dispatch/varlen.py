"""Sequences of different lengths in one tensor: packed rows with ``cu_seqlens``, and jagged nested tensors.

Each sequence attends itself alone and has its own positions. Sequences of equal lengths run as one batch, the others
one by one, each an ordinary call: nothing is padded, and no pair of two sequences is computed. The lengths are read on
the host, so on a GPU a call waits for the device; a mask (`masks.documents`) does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from attn_dispatch import shapes
from attn_dispatch.errors import InputError, InputTypeError
from attn_dispatch.ir.masks import Mask
from attn_dispatch.variants import Stateful

__all__ = ["attend_nested", "cumulative_lengths", "varlen_attention"]

# what `dispatch.attention` takes after query, key and value, in its order
ARGUMENTS = (
    *("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "window", "softcap", "bias", "sinks"),
    *("query_lengths", "key_lengths", "q_offset", "variant", "layout", "return_lse", "return_weights", "backend"),
)


def cumulative_lengths(cu_seqlens: Any, name: str, total: int, asked: str = "") -> list[int]:
    """``[0, n1, n1 + n2, ...]`` as numbers, checked against the rows that they cut up.

    Raises:
        InputError, InputTypeError: not integers of rank 1, not starting at 0, falling, or not adding up to ``total``.

    Example:
        >>> cumulative_lengths(torch.tensor([0, 3, 3, 8]), "cu_seqlens_q", 8)
        [0, 3, 3, 8]
    """
    ends = cu_seqlens if isinstance(cu_seqlens, torch.Tensor) else torch.as_tensor(cu_seqlens)
    if ends.dtype not in (torch.int32, torch.int64) or ends.ndim != 1 or ends.numel() == 0:
        kind = f"{str(ends.dtype).removeprefix('torch.')} {list(ends.shape)}"
        raise InputTypeError(f"{name} must be int32 or int64 of rank 1, [0, n1, n1 + n2, ...], got {kind}", asked=asked)
    found = ends.tolist()
    falls = next((i for i, (a, b) in enumerate(pairwise(found)) if b < a), None)
    if found[0] != 0 or falls is not None:
        where = "starts" if falls is None else f"falls at {falls}"
        remedy = "cumulative lengths: torch.cumsum of the lengths, with a 0 in front"
        raise InputError(f"{name} must start at 0 and never fall; it {where}: {found}", asked=asked, remedy=remedy)
    if found[-1] != total:
        problem = f"{name} adds up to {found[-1]} rows, there are {total}"
        raise InputError(problem, asked=asked, remedy=f"its last entry must be {total}")
    return found


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor | Sequence[int],
    cu_seqlens_k: torch.Tensor | Sequence[int] | None = None,
    *,
    enable_gqa: bool | None = None,
    **options: Any,
) -> Any:
    """Attention of packed sequences of different lengths, each on its own, without padding.

    Shapes: query ``[Tq, Hq, D]``, key ``[Tk, Hkv, D]``, value ``[Tk, Hkv, Dv]`` -> ``[Tq, Hq, Dv]``, lse ``[Hq, Tq]``.

    Args:
        cu_seqlens_q, cu_seqlens_k: ``[0, n1, n1 + n2, ...]`` as in FlashAttention; keys default to the queries' own.
        enable_gqa, options: as `dispatch.attention`, but for what has the rows or keys of one batch; positions count
            inside each sequence.

    Raises:
        InputError, InputTypeError: segments that do not add up; ``is_causal`` where a sequence has other keys than
            queries, which FlashAttention and torch count differently.

    Example:
        >>> from attn_dispatch import dispatch
        >>> x = torch.randn(7, 2, 16)
        >>> dispatch.varlen_attention(x, x, x, torch.tensor([0, 3, 7]), is_causal=True).shape
        torch.Size([7, 2, 16])
    """
    options["enable_gqa"] = enable_gqa
    asked = shapes.asked(query, key, value)
    _check_packed(query, key, value, asked)
    _check_options(options, asked)
    queries = cumulative_lengths(cu_seqlens_q, "cu_seqlens_q", query.shape[0], asked)
    if cu_seqlens_k is None and key.shape[0] != query.shape[0]:
        problem = f"key has {key.shape[0]} rows and query {query.shape[0]}: their segments cannot be the same"
        raise InputError(problem, asked=asked, remedy="give cu_seqlens_k")
    keys = queries if cu_seqlens_k is None else cumulative_lengths(cu_seqlens_k, "cu_seqlens_k", key.shape[0], asked)
    if len(queries) != len(keys):
        problem = f"cu_seqlens_q has {len(queries) - 1} segments and cu_seqlens_k {len(keys) - 1}"
        raise InputError(problem, asked=asked, remedy="an empty segment repeats an entry")
    if options.get("is_causal") and options.get("q_offset") is None and _differ(queries, keys):
        problem = (
            "is_causal counts from the first key of a segment, FlashAttention's causal from the last; here they differ"
        )
        raise InputError(problem, asked=asked, remedy="attn_mask=masks.causal() (from the last key), or q_offset=0")
    return _attend_segments(query, key, value, queries, keys, options)


def _differ(queries: Sequence[int], keys: Sequence[int]) -> bool:
    return list(queries) != list(keys)


def _check_packed(query: Any, key: Any, value: Any, asked: str) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise InputTypeError(f"{name} must be a tensor, got {type(x).__name__}", asked=asked)
        if x.ndim != 3:
            raise InputError(f"{name} must be packed rows [T, H, D], got {list(x.shape)}", asked=asked)
    if key.shape[:2] != value.shape[:2]:
        problem = f"key {list(key.shape)} and value {list(value.shape)} must agree in rows and heads"
        raise InputError(problem, asked=asked)


def _check_options(options: dict[str, Any], asked: str) -> None:
    """What belongs to one padded batch cannot be said of segments."""
    mask, bias, offset = (options.get(name) for name in ("attn_mask", "bias", "q_offset"))
    held = isinstance(mask, Mask) and bool(mask.bind()[1])
    if (mask is not None and not isinstance(mask, Mask)) or held:
        problem = "attn_mask must be a Mask without tensors: every segment has its own rows and keys"
        raise InputError(problem, asked=asked, remedy="masks.causal(), masks.sliding_window(W), ... count per segment")
    if bias is not None and (not isinstance(bias, torch.Tensor) or bias.ndim != 1):
        raise InputError("bias must be ALiBi slopes [Hq]: every segment has its own rows and keys", asked=asked)
    if isinstance(offset, torch.Tensor):
        raise InputError("q_offset must be an int: a tensor is per batch, and segments are no batch", asked=asked)
    given = [n for n in ("query_lengths", "key_lengths", "block_table") if options.get(n) is not None]
    given += ["return_weights"] if options.get("return_weights") else []
    given += [f"layout={options['layout']!r}"] if options.get("layout", "bhsd") != "bhsd" else []
    stateful = isinstance(options.get("variant"), Stateful)  # as dispatch.attention hands it on
    given += ["state"] if stateful or options.get("state") is not None or options.get("return_state") else []
    if given:
        raise InputError(f"{', '.join(given)} cannot be given for sequences of different lengths", asked=asked)


def _attend_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    options: dict[str, Any],
) -> Any:
    """Segments of equal lengths together; the results in the order of the rows."""
    from attn_dispatch.dispatch import attention  # which hands nested tensors to this module

    groups: dict[tuple[int, int], list[int]] = {}
    for i in range(len(queries) - 1):
        sizes = (queries[i + 1] - queries[i], keys[i + 1] - keys[i])
        if sizes[0] > 0:
            groups.setdefault(sizes, []).append(i)
    wants_lse = bool(options.get("return_lse"))
    outs: list[torch.Tensor] = [query.new_empty((0, query.shape[1], value.shape[2]))] * (len(queries) - 1)
    acc = torch.float64 if query.dtype == torch.float64 else torch.float32
    sums: list[torch.Tensor] = [query.new_empty((0, query.shape[1]), dtype=acc)] * (len(queries) - 1)
    dtype = query.dtype  # autocast may give another, for the empty segments too
    for (sq, skv), members in groups.items():
        q = _batch(query, [queries[i] for i in members], sq)
        k, v = (_batch(x, [keys[i] for i in members], skv) for x in (key, value))
        result = attention(q, k, v, **{**options, "layout": "bshd"})
        out = result.out if wants_lse else result
        dtype = out.dtype
        for n, i in enumerate(members):
            outs[i] = out[n]
            if wants_lse:
                sums[i] = result.lse[n].transpose(0, 1)
    out = torch.cat([x.to(dtype) for x in outs]) if outs else query.new_empty((0, query.shape[1], value.shape[2]))
    if not wants_lse:
        return out
    from attn_dispatch.results import WithLse

    return WithLse(out, torch.cat(sums).transpose(0, 1) if sums else query.new_empty((query.shape[1], 0), dtype=acc))


def _batch(rows: torch.Tensor, starts: list[int], length: int) -> torch.Tensor:
    """Segments of one length as a batch ``[n, length, H, D]``: a view when they stand side by side."""
    n, first = len(starts), starts[0]
    if length == 0:
        return rows[:0].unflatten(0, (1, 0)).expand(n, 0, *rows.shape[1:])
    if starts == list(range(first, first + n * length, length)):
        return rows[first : first + n * length].unflatten(0, (n, length))
    return torch.stack([rows[start : start + length] for start in starts])


# --- nested tensors ------------------------------------------------------------------------------------------------


def attend_nested(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rest: tuple[Any, ...]) -> Any:
    """`dispatch.attention` of jagged nested tensors ``[B, H, j, D]`` (``[B, j, H, D]``): nested in, nested out.

    Args:
        rest: the other arguments of `dispatch.attention`, in its order.

    Raises:
        InputError, InputTypeError: not all three nested and jagged, another dimension ragged, or batches that differ.
    """
    options = dict(zip(ARGUMENTS, rest, strict=True))
    layout = options.pop("layout")
    asked = "   ".join(f"{n} {_nested_kind(x)}" for n, x in (("q", query), ("k", key), ("v", value)))
    ragged = 1 if layout == "bshd" else 2
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor) or not x.is_nested:
            problem = f"query is a nested tensor and {name} is not"
            raise InputTypeError(problem, asked=asked, remedy="all three nested, or none")
        if x.layout != torch.jagged:
            raise InputTypeError(f"{name} has layout {x.layout}", asked=asked, remedy="layout=torch.jagged")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4 or x._ragged_idx != ragged:  # type: ignore[attr-defined]
            wanted = "[B, j, H, D]" if layout == "bshd" else "[B, H, j, D]"
            remedy = "transpose(1, 2) of [B, j, H, D], or layout='bshd' without it"
            raise InputError(f"{name} must be {wanted} with the ragged dimension j", asked=asked, remedy=remedy)
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        raise InputError("query, key and value must hold equally many sequences", asked=asked)
    _check_options(options, asked)
    rows = [_rows(x, layout) for x in (query, key, value)]
    (q, at), (k, keys), (v, values) = ((x.values(), _offsets(x).tolist()) for x in rows)
    if keys != values:
        raise InputError("key and value must have the same lengths", asked=asked)
    result = _attend_segments(q, k, v, at, keys, options)
    if not options.get("return_lse"):
        return _nest(result, rows[0], layout)
    from attn_dispatch.results import WithLse

    return WithLse(_nest(result.out, rows[0], layout), _nest(result.lse.transpose(0, 1), rows[0], "bhsd"))


def _rows(x: torch.Tensor, layout: str) -> torch.Tensor:
    """``[B, j, H, D]`` without holes."""
    rows = x if layout == "bshd" else x.transpose(1, 2)
    return rows.contiguous() if rows.lengths() is not None else rows  # type: ignore[attr-defined]


def _offsets(x: torch.Tensor) -> torch.Tensor:
    return x.offsets()  # type: ignore[attr-defined]


def _nest(rows: torch.Tensor, like: torch.Tensor, layout: str) -> torch.Tensor:
    """Packed rows as nested tensor with the offsets of another, so that both count as of one shape."""
    found = torch.nested.nested_tensor_from_jagged(rows, offsets=_offsets(like))
    return found if layout == "bshd" else found.transpose(1, 2)


def _nested_kind(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return type(x).__name__
    sizes = f"{x.dim()}-D" if x.layout != torch.jagged else f"[{', '.join(str(n) for n in x.shape)}]"
    return f"nested {sizes}" if x.is_nested else str(list(x.shape))
