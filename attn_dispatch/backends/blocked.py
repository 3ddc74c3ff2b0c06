"""``blocked``: query-tiled matmul and softmax in plain torch, for what fused kernels do not take.

Only tiles that attend something are computed, with the keys that they may attend; the scores of one tile are all that
is ever in memory. Accumulation is fp32 (fp64), per tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from attn_dispatch import reference, tiling
from attn_dispatch.backend import Backend, Cost, Executable, Operands, Raw, dense_cost
from attn_dispatch.capability import ALL_FEATURES, Capability, Limit
from attn_dispatch.ir.atoms import Full
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Bias, SoftCap
from attn_dispatch.ir.weights import Softmax

__all__ = ["Blocked"]

_LEAST_FACTOR = 1e-30  # of a matrix product in float32: times 0 its operands are not read, and their NaN is lost

_REFUSED = {"weights", "traced", "empty", "q_offset:tensor", "weight:Linear", "decay", "score:Alibi", "higher_order"}
_REFUSED |= {"state:in", "state:out"}


class Blocked(Backend):
    """Tiles of query rows in plain torch."""

    name = "blocked"
    tested = "cpu"
    hints = {"weights": 'backend="eager"', "higher_order": 'backend="sdpa_math"'}  # noqa: RUF012
    block = 128
    capabilities = (
        Capability(
            devices=frozenset({"cpu", "cuda"}),
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            features=ALL_FEATURES - _REFUSED,
            limits=tuple(Limit(name, minimum=1) for name in ("B", "Hq", "Sq", "Skv", "D")),
            notes="tiles of 128 query rows; only keys inside the mask's interval",
        ),
    )

    def compile(self, op: AttentionOp) -> Executable:
        plain = _is_plain(op)
        bare = _bare(op) if plain else None
        cut_of = tiling.cutting(op, self.block)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
            if plain and q.shape[2] <= self.block:
                if bare is not None and not _keeps_graph(q, k, v):
                    return bare(q, k, v)
                return _run_plain(op, q, k, v, t)
            return _run(op, self.block, cut_of, q, k, v, t)

        return Executable(run)

    def estimate(self, op: AttentionOp) -> Cost:
        _, mean = tiling.key_span(op, self.block)
        visited = mean / op.Skv if op.Skv else 1.0
        # every element of the scores is written and read about four times, inside the cache
        cost = dense_cost(op, visited, materialised=2)
        launches = 6.0 if _is_one_tile(op, op.Sq, self.block) else 15.0 * -(-op.Sq // self.block)
        return Cost(cost.flops, cost.bytes, launches)


def _is_plain(op: AttentionOp) -> bool:
    """Whether all pairs attend, and the output alone is wanted: a decode step, or a padded sequence at its length."""
    return isinstance(op.mask, Full) and not (op.outputs.lse or op.dropout_p or op.grad or _sinks(op))


def _bare(op: AttentionOp) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """One tile of a plain op without biases, each step written out: in a decode step of 100 us all else is dear."""
    caps = [term.cap for term in op.score if isinstance(term, SoftCap)]
    scale, cap = op.effective_scale / (caps[0] if caps else 1.0), caps[0] if caps else None
    if len(op.score) != len(caps) or len(caps) > 1 or op.dtype not in ("float32", "float64"):
        return None
    if abs(scale) < _LEAST_FACTOR:
        return None

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        b, hq, sq, d = q.shape
        hkv, skv = k.shape[1:3]
        rows, keys = q.reshape(b * hkv, hq // hkv * sq, d), k.reshape(b * hkv, skv, d).transpose(1, 2)
        scores = q.new_empty((b * hkv, rows.shape[1], skv))
        scores.baddbmm_(rows, keys, beta=0, alpha=scale)  # beta 0: what was there is not read
        if cap is not None:
            scores.tanh_().mul_(cap)
        torch.softmax(scores, -1, out=scores)
        return torch.bmm(scores, v.reshape(b * hkv, skv, -1)).view(b, hq, sq, -1)

    return run


def _run_plain(op: AttentionOp, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> torch.Tensor:
    """One tile of such an op: what surrounds a loop over tiles would cost more than the tile."""
    dtype = q.dtype
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    if dtype != acc:
        q, k, v = q.to(acc), k.to(acc), v.to(acc)
    out = _weighted(_weights(op, q, k, None, t), v)
    return out if dtype == acc else out.to(dtype)


def _run(
    op: AttentionOp, block: int, cut_of: tiling.Cutting, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands
) -> Any:
    sq, skv = q.shape[2], k.shape[2]
    offset = reference.offset_of(op, sq, skv, t)
    assert isinstance(offset, int)
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    if _is_one_tile(op, sq, block):
        out, _ = _tile(op, tiling.Tile((0, sq), (0, skv), offset), None, q.to(acc), k.to(acc), v, t)
        return out.to(q.dtype)
    cut = cut_of(sq, skv, offset, t)
    bias_of = tiling.TileBias(op, q, k, t, cut)
    sums: list[tuple[tiling.Tile, torch.Tensor | None]] = []

    def results() -> Iterator[tuple[tiling.Tile, torch.Tensor | None]]:
        for tile in cut.tiles:
            if tile.is_empty:
                shape = (q.shape[0], q.shape[1], tile.rows[1] - tile.rows[0])
                sums.append((tile, reference.empty_lse(op, shape, t, acc, q.device)))
                yield tile, None
                continue
            rows, keys = slice(*tile.rows), slice(*tile.keys)
            out, lse = _tile(op, tile, bias_of(tile), q[:, :, rows].to(acc), k[:, :, keys].to(acc), v[:, :, keys], t)
            sums.append((tile, lse))
            yield tile, out.to(q.dtype)

    keep_graph = bool(op.grad)
    out = tiling.join_rows(results(), q, v.shape[3], 0.0, keep_graph, (k, v, *tiling.differentiated(op, t)))
    return Raw(out, tiling.join_rows(iter(sums), q, 0, -math.inf, keep_graph)) if op.outputs.lse else out


def _tile(
    op: AttentionOp,
    tile: tiling.Tile,
    bias: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    t: Operands,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one tile, q and k already in the accumulating dtype."""
    terms = tiling.slice_terms(op, tile, t)
    if op.outputs.lse or _sinks(op):
        weights, lse = reference.weigh_softmax(op, _scores(op, q, k, bias, terms), None, t)
    else:
        weights, lse = _weights(op, q, k, bias, terms), None
    if op.dropout_p:
        weights = F.dropout(weights, op.dropout_p)
    return _weighted(weights, v.to(q.dtype)), lse


def _weights(op: AttentionOp, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, t: Operands) -> torch.Tensor:
    """Softmax without sinks; 0 in rows that attend nothing, which a mask or -inf in a bias may leave.

    torch's softmax takes one pass where the specification takes seven. It gives NaN in all of such a row, so that one
    column tells whether there is any. On a GPU looking would wait for the device.
    """
    maybe_empty = bias is not None or any(isinstance(term, Bias) for term in op.score)
    scores = _scores(op, q, k, bias, t)
    if maybe_empty and q.device.type != "cpu":
        return reference.weigh_softmax(op, scores, None, t)[0]
    weights = torch.softmax(scores, -1, out=None if scores.requires_grad else scores)
    if not maybe_empty or reference.finite(weights[..., 0]):
        return weights
    return reference.weigh_softmax(op, _scores(op, q, k, bias, t), None, t)[0]


def _scores(op: AttentionOp, q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, t: Operands) -> torch.Tensor:
    """Scaled scores ``[B, Hq, Sq, Skv]`` with soft cap and biases; ``bias`` is the mask's.

    Where no graph is kept, scale and first bias are part of the matrix product, and the rest is done in place: a pass
    over the scores costs about a tenth of the product.
    """
    no_factor = abs(op.effective_scale) < _LEAST_FACTOR
    if op.grad or no_factor or _keeps_graph(q, k, *t.values()):
        scores = reference.grouped_matmul(q * op.effective_scale, k.transpose(-1, -2))
        scores = reference.apply_terms(op, scores, t)
        return scores if bias is None else scores + bias
    b, hq, sq, _ = q.shape
    hkv, skv = k.shape[1:3]
    rows = q.reshape(b * hkv, hq // hkv * sq, -1)  # the query heads of a kv head are rows of one product
    keys = k.reshape(b * hkv, skv, -1).transpose(1, 2)
    steps: list[float | torch.Tensor] = [x.cap if isinstance(x, SoftCap) else t[x.bias.name] for x in op.score]  # type: ignore[attr-defined]
    steps += [] if bias is None else [bias]
    scale, first = op.effective_scale, steps[0] if steps else None
    capped = first is not None and not isinstance(first, torch.Tensor)
    if isinstance(first, torch.Tensor) and _fits_product(first, q, hkv):
        added = first.expand(b, hq, sq, skv).reshape(b * hkv, -1, skv)
        product, steps = torch.baddbmm(added, rows, keys, alpha=scale), steps[1:]
    else:
        scale = scale / float(first) if capped else scale  # type: ignore[arg-type]
        product = q.new_empty((b * hkv, rows.shape[1], skv))
        product.baddbmm_(rows, keys, beta=0, alpha=scale)  # beta 0: what was there is not read
    scores = product.view(b, hq, sq, skv)
    for i, step in enumerate(steps):
        if isinstance(step, torch.Tensor):
            scores = scores.add_(step)
        else:  # the first one's division is part of the scale
            scores = (scores if i == 0 and capped else scores.div_(step)).tanh_().mul_(step)
    return scores


def _keeps_graph(*tensors: torch.Tensor) -> bool:
    """Whether gradients are wanted after all: of a plan that was made for tensors without them."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _fits_product(bias: torch.Tensor, q: torch.Tensor, hkv: int) -> bool:
    """Whether a bias can be what a product is added to, without writing it out for each sequence and head."""
    sizes, (b, hq) = tuple(bias.shape), q.shape[:2]
    per_head = sizes[1:2] == (hq,)
    return len(sizes) == 4 and bias.dtype == q.dtype and (per_head or (b == 1 and hq == hkv)) and sizes[0] == b


def _weighted(weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``weights [B, Hq, Sq, Skv] @ v [B, Hkv, Skv, Dv]`` -> ``[B, Hq, Sq, Dv]``."""
    b, hq, sq, skv = weights.shape
    rows = weights.reshape(b * v.shape[1], -1, skv)
    return torch.bmm(rows, v.reshape(b * v.shape[1], skv, -1)).view(b, hq, sq, -1)


def _is_one_tile(op: AttentionOp, sq: int, block: int) -> bool:
    """Whether all rows attend all keys and fit into one tile."""
    return isinstance(op.mask, Full) and sq <= block and not op.outputs.lse


def _sinks(op: AttentionOp) -> bool:
    return isinstance(op.weight, Softmax) and op.weight.sinks is not None
