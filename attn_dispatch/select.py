"""`select`: DSA's lightning indexer and top-k, which keys each query attends (DeepSeek-V3.2).

``select`` checks the call and describes it as a `SelectOp`; `compile_select` makes that runnable: blocks of query rows,
and inside a block as many index heads at once as fit, so that what is in memory is a block of scores and never
``[B, Sq, Hi, Skv]`` nor ``[B, Sq, Skv]``. A block looks only at the keys that its mask's interval names, and a block
with no more keys than ``top_k`` is not scored at all: all that it may attend is selected.

An exported program holds a selection as one operator, ``attn_dispatch::select`` (see `torch_select`), and so serves all
lengths. torch.compile and torch.onnx.export trace the plain operators, for the lengths of the example.

What the result is stands in `attn_dispatch.ir.select_op`. No gradient flows through the indices; with
``return_scores=True`` the scores of the selected keys carry it (the indexer's KL training).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from attn_dispatch import shapes
from attn_dispatch.errors import InputError, InputTypeError
from attn_dispatch.ir.atoms import Causal, Dense, Full, KeyLengths, Window
from attn_dispatch.ir.masks import Mask
from attn_dispatch.ir.ops import END
from attn_dispatch.ir.select_op import ACTIVATIONS, SelectOp, verify_select
from attn_dispatch.ir.tensors import Ref, TensorDesc, dtype_name, has_no_values

__all__ = ["Selection", "compile_select", "merge_selections", "select"]

_BLOCK = 1 << 20  # scores in memory at once, over all index heads: 4 MiB of float32 stay in the cache
_MIN_PAIRS = 64  # (row, head) pairs in a matmul, however long the keys: fewer would only read the keys more often


class Selection(NamedTuple):
    """What ``return_scores=True`` returns: indices and scores ``[B, Sq, top_k]``; the score of a -1 is -inf."""

    indices: torch.Tensor
    scores: torch.Tensor


def select(
    query_idx: torch.Tensor,
    key_idx: torch.Tensor,
    weights: torch.Tensor,
    top_k: int,
    *,
    attn_mask: torch.Tensor | Mask | None = None,
    is_causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: torch.Tensor | None = None,
    q_offset: int | torch.Tensor | None = None,
    scale: float | None = None,
    activation: str | None = "relu",
    layout: str = "bhsd",
    return_scores: bool = False,
) -> torch.Tensor | Selection:
    """The ``top_k`` keys of each query by the lightning indexer: exact, ties to the lowest index, -1 for none.

    Shapes: query_idx ``[B, Hi, Sq, Di]`` (``[B, Sq, Hi, Di]`` with ``layout="bshd"``), key_idx ``[B, Skv, Di]``,
    weights ``[B, Sq, Hi]`` -> int64 ``[B, Sq, top_k]``, ascending, then -1. Give it to `masks.selected`, in as many
    layers as share it.

    Args:
        top_k: keys per query, >= 1. A row with fewer allowed keys gets all of them and -1.
        attn_mask: a `Mask` (``masks.documents(...)``, ``masks.Segments(...)``) or a bool tensor ``[Sq, Skv]`` or
            ``[B, Sq, Skv]``: what may be selected, the same for all index heads.
        is_causal: no key behind the query's own position. Unlike in `attention`, the last query stands at the last key
            unless ``q_offset`` is given, so that a decode step needs no argument.
        window: ``(left, right)`` inclusive distances, None or -1 for unbounded.
        key_lengths: true lengths ``[B]`` of right-padded keys.
        q_offset: key position of query 0, an int or an int tensor ``[B]``; default Skv - Sq.
        scale: factor of the dot products; default ``Di ** -0.5``. Other factors (``Hi ** -0.5``) go into the weights.
        activation: ``"relu"``, or None for none, per index head before the weighted sum.
        return_scores: return ``Selection(indices, scores)``; only the scores have gradients.

    Raises:
        InputError, InputTypeError: a wrong argument.

    Source: DeepSeek-AI 2025, DeepSeek-V3.2 (DeepSeek Sparse Attention).

    Example:
        >>> import torch
        >>> q, k, w = torch.ones(1, 1, 2, 4), torch.tensor([[[0.0] * 4, [2.0] * 4, [1.0] * 4]]), torch.ones(1, 2, 1)
        >>> select(q, k, w, 2).tolist()
        [[[0, 1], [1, 2]]]
    """
    if isinstance(q_offset, torch.SymInt):  # a length of an exported model: a value of the graph
        q_offset = torch.full((1,), q_offset, dtype=torch.int64, device=query_idx.device)
    named: dict[str, Any] = {"key_lengths": key_lengths, "q_offset": q_offset}
    op, tensors = _describe(
        query_idx,
        key_idx,
        weights,
        top_k,
        attn_mask,
        is_causal,
        window,
        named,
        scale,
        activation,
        layout,
        return_scores,
    )
    q = query_idx if layout == "bhsd" else query_idx.transpose(1, 2)
    if torch.compiler.is_exporting() and not torch.onnx.is_in_onnx_export():
        from attn_dispatch import torch_select

        found = torch_select.call(op, q, key_idx, weights, tensors)
        return Selection(*found) if return_scores else found[0]
    run = compile_select(op)
    device = q.device.type
    if torch.is_autocast_enabled(device):  # scores accumulate in float32 whatever the autocast dtype is
        with torch.autocast(device, enabled=False):
            return run(q, key_idx, weights, tensors)
    return run(q, key_idx, weights, tensors)


def merge_selections(parts: Sequence[Selection], top_k: int) -> Selection:
    """Combine selections from disjoint sets of keys (shards, pages), exactly: the best ``top_k`` of all of them.

    Args:
        parts: with indices into all the keys; each the best ``top_k`` of its own.

    Example:
        >>> a = Selection(torch.tensor([[[0, 1]]]), torch.tensor([[[3.0, 1.0]]]))
        >>> b = Selection(torch.tensor([[[4, -1]]]), torch.tensor([[[2.0, -torch.inf]]]))
        >>> merge_selections([a, b], 2).indices.tolist()
        [[[0, 4]]]
    """
    indices = torch.cat([part.indices for part in parts], -1)
    scores = torch.cat([part.scores for part in parts], -1)
    indices, order = indices.sort(-1)  # ties go to the lowest index: the sort by score below is stable
    scores = scores.gather(-1, order)
    rank = torch.where(indices < 0, -math.inf, _ranked(scores))
    best = torch.argsort(rank, dim=-1, descending=True, stable=True)[..., :top_k]
    indices, scores = indices.gather(-1, best), scores.gather(-1, best)
    last = torch.iinfo(indices.dtype).max
    indices, order = torch.where(indices < 0, last, indices).sort(-1)
    short = (0, max(0, top_k - indices.shape[-1]))
    padded = F.pad(torch.where(indices == last, -1, indices), short, value=-1)
    return Selection(padded, F.pad(scores.gather(-1, order), short, value=-math.inf))


# --- from the call to the op ---------------------------------------------------------------------------------------


def _describe(
    query: Any, key: Any, weights: Any, top_k: Any, attn_mask: Any, is_causal: Any, window: Any, named: dict[str, Any],
    scale: Any, activation: Any, layout: Any, scores: Any,
) -> tuple[SelectOp, dict[str, torch.Tensor]]:  # fmt: skip
    """Check a call, describe it, and name its tensors."""
    asked = "" if torch.compiler.is_dynamo_compiling() else _asked(query, key, weights)  # it cannot join symbols
    _check_tensors(query, key, weights, layout, asked)
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
        raise InputError(f"top_k must be an integer >= 1, got {top_k!r}", asked=asked)
    if scale is not None and not (hasattr(scale, "__float__") and math.isfinite(scale)):
        raise InputError(f"scale must be a finite number, got {scale!r}", asked=asked, remedy="leave it out")
    activation = "identity" if activation is None else activation
    if activation not in ACTIVATIONS:
        raise InputError(f"activation must be one of {', '.join(ACTIVATIONS)} or None, got {activation!r}", asked=asked)
    shape = query.shape if layout == "bhsd" else (query.shape[0], query.shape[2], query.shape[1], query.shape[3])
    b, _, sq, _ = shape
    mask, tensors = _mask(b, sq, key.shape[1], attn_mask, is_causal, window, named["key_lengths"], asked)
    offset = _offset(b, named["q_offset"], mask, tensors, asked)
    used = {"query_idx": query, "key_idx": key, "weights": weights, **tensors}
    for name, x in used.items():
        if x.device != query.device:
            problem = f"{name} is on {x.device} and query_idx on {query.device}"
            raise InputError(problem, asked=asked, remedy=f"{name}.to({str(query.device)!r})")
    op = SelectOp(
        TensorDesc.of(query).with_shape(*shape),
        TensorDesc.of(key),
        TensorDesc.of(weights),
        top_k,
        scale=None if scale is None else float(scale),
        activation=activation,
        mask=mask,
        q_offset=offset,
        operands=tuple((name, TensorDesc.of(x)) for name, x in tensors.items()),
        scores=bool(scores),
        traced=any(has_no_values(x) for x in used.values()),
    )
    if not torch.compiler.is_dynamo_compiling():  # its messages would make numbers of symbols
        verify_select(op)
    return op, tensors


def _asked(*tensors: Any) -> str:
    names = ("q_idx", "k_idx", "weights")
    shown = [
        f"{name} {list(x.shape)} {dtype_name(x.dtype)}" if isinstance(x, torch.Tensor) else f"{name} {type(x).__name__}"
        for name, x in zip(names, tensors, strict=True)
    ]
    return "   ".join(shown)


def _check_tensors(query: Any, key: Any, weights: Any, layout: Any, asked: str) -> None:
    if layout not in shapes.LAYOUTS:
        raise InputError(f"layout must be one of {', '.join(shapes.LAYOUTS)}, got {layout!r}", asked=asked)
    wanted = {"query_idx": (query, 4), "key_idx": (key, 3), "weights": (weights, 3)}
    for name, (x, rank) in wanted.items():
        if not isinstance(x, torch.Tensor):
            raise InputTypeError(f"{name} must be a tensor, got {type(x).__name__}", asked=asked)
        if not x.is_floating_point():
            raise InputTypeError(f"{name} has dtype {dtype_name(x.dtype)}; it must be float", asked=asked)
        if x.ndim != rank:
            remedy = "query_idx [B, Hi, Sq, Di], key_idx [B, Skv, Di] (one key for all heads), weights [B, Sq, Hi]"
            raise InputError(f"{name} must have {rank} dimensions, got {x.ndim}", asked=asked, remedy=remedy)
    b, h, s, d = query.shape if layout == "bhsd" else (query.shape[i] for i in (0, 2, 1, 3))
    if key.shape[0] != b or key.shape[2] != d:
        raise InputError(f"key_idx must be [B, Skv, Di] = [{b}, Skv, {d}], got {list(key.shape)}", asked=asked)
    if tuple(weights.shape) != (b, s, h):
        hint = 'layout="bshd"' if layout == "bhsd" and tuple(weights.shape) == (b, h, s) else ""
        problem = f"weights must be [B, Sq, Hi] = [{b}, {s}, {h}], got {list(weights.shape)}"
        raise InputError(problem, asked=asked, remedy=hint)


def _mask(
    b: int, sq: int, skv: int, attn_mask: Any, is_causal: Any, window: Any, key_lengths: Any, asked: str
) -> tuple[Mask, dict[str, torch.Tensor]]:
    """Everything that restricts the selection, as one mask, and its tensors by name."""
    mask: Mask = Causal() if is_causal else Full()
    tensors: dict[str, torch.Tensor] = {}
    if window is not None:
        ends = window if isinstance(window, (tuple, list)) and len(window) == 2 else None
        if ends is None or any(not (e is None or (isinstance(e, int) and e >= -1)) for e in ends):
            raise InputError(f"window must be (left, right), each >= 0, -1 or None; got {window!r}", asked=asked)
        mask = mask & Window(*(None if end in (None, -1) else end for end in window))
    if isinstance(attn_mask, torch.Tensor):
        if attn_mask.dtype != torch.bool:
            problem = f"attn_mask has dtype {dtype_name(attn_mask.dtype)}; a selection takes a bool mask"
            raise InputTypeError(problem, asked=asked, remedy="True = may be selected")
        four = attn_mask[:, None] if attn_mask.ndim == 3 else attn_mask
        sizes = zip(reversed(four.shape), (skv, sq, 1, b), strict=False)
        if four.ndim > 4 or any(got not in (1, want) for got, want in sizes):
            problem = f"attn_mask {list(attn_mask.shape)} does not broadcast to {[b, sq, skv]}"
            raise InputError(problem, asked=asked, remedy="one mask for all index heads, [Sq, Skv] or [B, Sq, Skv]")
        tensors["attn_mask"] = four
        mask = mask & Dense(Ref("attn_mask"))
    elif isinstance(attn_mask, Mask):
        # Dynamo cannot enter the lock of the cached one
        bound, held = attn_mask.bind("traced") if torch.compiler.is_dynamo_compiling() else attn_mask.bind()
        tensors |= held
        described = {name: TensorDesc.of(x) for name, x in held.items()}
        for atom in bound.atoms():
            if problem := shapes.mask_problem(atom, described, b, 1, sq, skv):
                raise InputError(f"attn_mask {atom}: {problem}", asked=asked)
        mask = mask & bound
    elif attn_mask is not None:
        raise InputTypeError(f"attn_mask must be a bool tensor or a Mask, got {type(attn_mask).__name__}", asked=asked)
    if key_lengths is not None:
        tensors["key_lengths"] = _checked_lengths(key_lengths, b, skv, asked)
        mask = mask & KeyLengths(Ref("key_lengths"))
    return mask, tensors


def _checked_lengths(lengths: Any, b: int, skv: int, asked: str) -> torch.Tensor:
    if not isinstance(lengths, torch.Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        raise InputTypeError("key_lengths must be an int32 or int64 tensor", asked=asked)
    if tuple(lengths.shape) != (b,):
        raise InputError(f"key_lengths must have shape [B] = [{b}], got {list(lengths.shape)}", asked=asked)
    if lengths.device.type == "cpu" and b and not has_no_values(lengths):
        lo, hi = int(lengths.min()), int(lengths.max())
        if lo < 0 or hi > skv:
            raise InputError(f"key_lengths must be in [0, {skv}], got {lo if lo < 0 else hi}", asked=asked)
    return lengths


def _offset(b: int, given: Any, mask: Mask, tensors: dict[str, torch.Tensor], asked: str) -> int | str | Ref:
    if isinstance(given, torch.Tensor):
        if given.dtype not in (torch.int32, torch.int64) or tuple(given.shape) not in ((b,), (1,), ()):
            problem = f"q_offset must be an int or an int tensor [B] = [{b}], got {list(given.shape)} {given.dtype}"
            raise InputError(problem, asked=asked)
        tensors["q_offset"] = given.reshape(-1)
        return Ref("q_offset")
    if given is not None and not isinstance(given, int):
        raise InputTypeError(f"q_offset must be an int or an int tensor, got {type(given).__name__}", asked=asked)
    return 0 if not mask.positional else END if given is None else int(given)


# --- from the op to the indices ------------------------------------------------------------------------------------


def compile_select(op: SelectOp) -> Callable[..., torch.Tensor | Selection]:
    """Make a selection runnable: ``run(query [B, Hi, Sq, Di], key, weights, operands)``, for the op's sizes."""

    def run(
        q: torch.Tensor, k: torch.Tensor, w: torch.Tensor, t: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | Selection:
        acc = torch.float64 if torch.float64 in (q.dtype, k.dtype, w.dtype) else torch.float32
        k = k.to(acc)  # once for all rows, which become acc block by block
        with torch.no_grad():
            parts = [_select_rows(op, acc, rows, q, k, w, t) for rows in _blocks(op, op.Skv)]
            indices = torch.cat(parts, 1) if parts else torch.empty((op.B, 0, op.top_k), dtype=torch.int64)
            indices = indices.to(q.device)
        if not op.scores:
            return indices
        scored = [_scores_at(op, acc, rows, indices, q, k, w) for rows in _blocks(op, op.top_k)]
        return Selection(indices, torch.cat(scored, 1) if scored else indices.to(acc))

    return run


def _blocks(op: SelectOp, keys: int) -> list[tuple[int, int]]:
    """Query rows that are scored together, so that a block of scores over ``keys`` keys stays small."""
    pairs = max(_MIN_PAIRS, _BLOCK // max(op.B * keys, 1))
    step = max(1, pairs // max(op.Hi, 1))
    return [(start, min(op.Sq, start + step)) for start in range(0, op.Sq, step)]


def _select_rows(
    op: SelectOp,
    acc: torch.dtype,
    rows: tuple[int, int],
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    t: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Indices ``[B, rows, top_k]`` of a block of query rows."""
    offset = _static_offset(op, t)
    lo, hi = (0, op.Skv) if isinstance(offset, torch.Tensor) else op.mask.key_interval(rows, op.Skv, offset, t)
    shape = (op.B, rows[1] - rows[0], op.top_k)
    if lo >= hi:
        return torch.full(shape, -1, dtype=torch.int64, device=q.device)
    allowed = None
    if not isinstance(op.mask, Full):
        allowed = op.mask.dense(op.Sq, op.Skv, offset, t, q.device, rows=rows)[..., lo:hi]
        allowed = allowed[(None,) * (4 - allowed.ndim)][:, 0]
    if hi - lo <= op.top_k:  # every allowed key is among the best: no score is needed
        at = torch.arange(hi - lo, device=q.device)
        found = at if allowed is None else torch.where(allowed, at, op.Skv).sort(-1).values
    else:
        scores = _ranked(_score_block(op, q[:, :, slice(*rows)].to(acc), k[:, lo:hi], w[:, slice(*rows)].to(acc)))
        scores = scores if allowed is None else torch.where(allowed, scores, -math.inf)
        found = _best(scores, op.top_k, op.Skv, op.traced)
    found = torch.where(found == op.Skv, -1, found + lo).expand(*shape[:2], -1)
    return F.pad(found, (0, op.top_k - found.shape[-1]), value=-1)


def _static_offset(op: SelectOp, t: Mapping[str, torch.Tensor]) -> int | torch.Tensor:
    if isinstance(op.q_offset, Ref):
        return t[op.q_offset.name]
    return op.Skv - op.Sq if op.q_offset == END else int(op.q_offset)


def _score_block(op: SelectOp, q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Index scores ``[B, rows, n]`` of a block of rows, over as many index heads at a time as fit."""
    n = q.shape[2]
    heads = max(1, max(_MIN_PAIRS, _BLOCK // max(op.B * k.shape[1], 1)) // n)
    keys = k.transpose(-1, -2)
    total = None
    for h in range(0, op.Hi, heads):
        some = q[:, h : h + heads].transpose(1, 2)  # [B, rows, heads, Di]
        dots = (some.flatten(1, 2) * op.effective_scale) @ keys
        part = _weighted(op, dots.unflatten(1, some.shape[1:3]), w[:, :, h : h + heads])
        total = part if total is None else total + part
    assert total is not None
    return total


def _weighted(op: SelectOp, dots: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``dots [B, rows, heads, n]``, ``w [B, rows, heads]`` -> ``[B, rows, n]``: activation, weights, sum over heads."""
    if op.activation == "relu":
        dots = F.relu(dots) if dots.requires_grad or op.traced else F.relu_(dots)
    return (w[..., None, :] @ dots)[..., 0, :]


def _ranked(scores: torch.Tensor) -> torch.Tensor:
    """Scores by which keys are ranked: NaN and -inf become the lowest number, so that only -inf means excluded."""
    lowest = torch.finfo(scores.dtype).min
    return torch.nan_to_num(scores, nan=lowest, posinf=math.inf, neginf=lowest)


def _best(scores: torch.Tensor, k: int, skv: int, traced: bool) -> torch.Tensor:
    """Ascending positions of the ``k`` highest scores of each row, lowest first among equals; ``skv`` where excluded.

    topk takes any of the keys that tie for the last place, so rows with more of them than places are done again. With
    ReLU that is common for few index heads (many scores are exactly 0) and rare for many.
    """
    values, found = scores.topk(k, -1, sorted=True)
    found = torch.where(values == -math.inf, skv, found)
    last = values[..., -1:]
    if traced:
        found = _lowest_of_ties(scores, last, k, skv)
    else:
        surplus = ((scores >= last).sum(-1, keepdim=True) > k) & (last > -math.inf)
        rows = surplus[..., 0].nonzero(as_tuple=True)
        if rows[0].numel():
            found[rows] = _lowest_of_ties(scores[rows], last[rows], k, skv)
    return found.sort(-1).values


def _lowest_of_ties(scores: torch.Tensor, last: torch.Tensor, k: int, skv: int) -> torch.Tensor:
    """Positions of the scores above ``last``, and of the first that equal it until there are ``k``."""
    above, level = scores > last, scores == last
    places = k - above.sum(-1, keepdim=True)
    taken = (above | (level & (level.cumsum(-1) <= places))) & (scores > -math.inf)
    at = torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(taken, at, skv).topk(k, -1, largest=False, sorted=False).values


def _scores_at(
    op: SelectOp,
    acc: torch.dtype,
    rows: tuple[int, int],
    indices: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
) -> torch.Tensor:
    """Scores of the selected keys of a block, differentiable: the keys are gathered and scored again."""
    chosen = indices[:, rows[0] : rows[1]]
    start = torch.arange(op.B, device=q.device)[:, None, None] * op.Skv
    flat = (chosen.clamp(min=0) + start).flatten()
    if op.Skv == 0:
        return torch.full(chosen.shape, -math.inf, dtype=acc, device=q.device)
    keys = k.flatten(0, 1).index_select(0, flat).unflatten(0, chosen.shape)  # [B, rows, top_k, Di]
    some = q[:, :, rows[0] : rows[1]].transpose(1, 2).to(acc) * op.effective_scale
    scores = _weighted(op, some @ keys.transpose(-1, -2), w[:, rows[0] : rows[1]].to(acc))
    return scores.masked_fill(chosen < 0, -math.inf)
