"""``blocked``: query-tiled matmul and softmax in plain torch, for what fused kernels do not take.

Only tiles that attend something are computed, with the keys that they may attend; the scores of one tile are all that
is ever in memory. Accumulation is fp32 (fp64), per tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
            if plain and q.shape[2] <= self.block:
                return _run_plain(op, q, k, v)
            return _run(op, self.block, q, k, v, t)

        return Executable(run)

    def estimate(self, op: AttentionOp) -> Cost:
        _, mean = tiling.key_span(op, self.block)
        visited = mean / op.Skv if op.Skv else 1.0
        # every element of the scores is written and read about four times, inside the cache
        cost = dense_cost(op, visited, materialised=2)
        launches = 6.0 if _is_one_tile(op, op.Sq, self.block) else 15.0 * -(-op.Sq // self.block)
        return Cost(cost.flops, cost.bytes, launches)


def _is_plain(op: AttentionOp) -> bool:
    """Whether all pairs attend and nothing but a soft cap happens to them: a decode step."""
    biased = any(isinstance(term, Bias) for term in op.score)
    return isinstance(op.mask, Full) and not (biased or op.outputs.lse or op.dropout_p or op.grad or _sinks(op))


def _run_plain(op: AttentionOp, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One tile of such an op: what surrounds a loop over tiles would cost more than the tile."""
    dtype = q.dtype
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    if dtype != acc:
        q, k, v = q.to(acc), k.to(acc), v.to(acc)
    weights = torch.softmax(_scores(op, q, k.transpose(-1, -2), {}), -1)
    out = reference.grouped_matmul(weights, v)
    return out if dtype == acc else out.to(dtype)


def _run(op: AttentionOp, block: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
    sq, skv = q.shape[2], k.shape[2]
    offset = reference.offset_of(op, sq, skv, t)
    assert isinstance(offset, int)
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    if _is_one_tile(op, sq, block):
        out, _ = _tile(op, tiling.Tile((0, sq), (0, skv), offset), None, q.to(acc), k.to(acc), v, t)
        return out.to(q.dtype)
    bias_of = tiling.TileBias(op, q, k, t)
    sums: list[tuple[tiling.Tile, torch.Tensor | None]] = []

    def results() -> Iterator[tuple[tiling.Tile, torch.Tensor | None]]:
        for tile in tiling.query_tiles(op, sq, skv, offset, block, t):
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
    out = tiling.join_rows(results(), q, v.shape[3], 0.0, keep_graph)
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
    scores = _scores(op, q, k.transpose(-1, -2), tiling.slice_terms(op, tile, t))
    scores = scores if bias is None else scores + bias
    biased = bias is not None or any(isinstance(term, Bias) for term in op.score)
    if not biased and not op.outputs.lse and not _sinks(op):
        weights, lse = torch.softmax(scores, -1), None  # no row can be empty
    else:
        weights, lse = reference.weigh_softmax(op, scores, None, t)
    if op.dropout_p:
        weights = F.dropout(weights, op.dropout_p)
    return reference.grouped_matmul(weights, v.to(scores.dtype)), lse


def _scores(op: AttentionOp, q: torch.Tensor, k: torch.Tensor, t: Operands) -> torch.Tensor:
    """Scaled scores with soft cap and biases; the cap in place where no graph is kept, with the scale in its factor."""
    if op.grad or not op.score or not isinstance(op.score[0], SoftCap):
        return reference.apply_terms(op, reference.grouped_matmul(q * op.effective_scale, k), t)
    cap = op.score[0].cap
    scores = reference.grouped_matmul(q, k).mul_(op.effective_scale / cap).tanh_().mul_(cap)
    return scores if len(op.score) == 1 else reference.apply_terms(op.with_(score=op.score[1:]), scores, t)


def _is_one_tile(op: AttentionOp, sq: int, block: int) -> bool:
    """Whether all rows attend all keys and fit into one tile."""
    return isinstance(op.mask, Full) and sq <= block and not op.outputs.lse


def _sinks(op: AttentionOp) -> bool:
    return isinstance(op.weight, Softmax) and op.weight.sinks is not None
