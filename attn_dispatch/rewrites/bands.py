"""``bands`` and ``tile_queries``: run blocks of query rows against the only keys that they may attend.

1. Rows are cut into blocks; the keys of a block are the mask's `key_interval`, a slice without a copy.
2. A block that attends nothing is not computed: its rows are 0, its lse -inf (or the sink's logit).
3. What the mask still excludes inside a block becomes an additive tensor, built once for all blocks that look alike,
   or like a part of another. Small ones, and where the blocks are, are kept for the next call with these lengths.
4. Causal chunks (``Causal & SameBlock(n)`` from row 0) become small causal squares without any tensor.
5. `bands` is for masks whose blocks need far fewer keys than there are; `tile_queries` for long queries whose full
   score matrix would not fit, whatever the mask.
6. ALiBi becomes part of the tile's tensor, with gradients of its slopes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from attn_dispatch import reference, tiling
from attn_dispatch.backend import Cost, Operands, Raw, Run
from attn_dispatch.capability import Reason
from attn_dispatch.ir.atoms import Causal, Full, SameBlock, Stride, Window
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias
from attn_dispatch.ir.tensors import Ref, TensorDesc
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.rewrites.base import Rewrite, Rewritten, not_useful

__all__ = ["Bands", "TileQueries"]

_BIAS = "tile_bias"


class Bands(Rewrite):
    """Blocks of rows for masks that leave each block a narrow interval of keys."""

    name = "bands"
    order = 20

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        if (reason := _illegal(op)) is not None:
            return reason
        block = _block_size(op)
        _, mean = tiling.key_span(op, block)
        if mean > 0.75 * op.Skv:
            return not_useful(f"blocks of {block} rows need {mean:.0f} of {op.Skv} keys")
        return _tiled(op, block)


class TileQueries(Rewrite):
    """Blocks of rows so that the scores of one block fit, for backends that write them to memory."""

    name = "tile_queries"
    order = 21
    block = 128

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        if (reason := _illegal(op)) is not None:
            return reason
        if op.Sq < 2 * self.block:
            return not_useful(f"Sq {op.Sq} < {2 * self.block}")
        if not isinstance(Bands().apply(op), Reason):
            return not_useful("bands cuts this mask better")
        return _tiled(op, self.block)


def _illegal(op: AttentionOp) -> Reason | None:
    if op.traced:
        return Reason(
            "feature", "traced", True, False, text="the tiles depend on the lengths, which are not known here"
        )
    if not isinstance(op.weight, Softmax):
        return Reason("feature", op.weight.feature, text="only softmax rows are independent of how keys are cut")
    if isinstance(op.q_offset, Ref):
        return Reason("feature", "q_offset:tensor", text="q_offset per batch has no common key interval")
    if op.outputs.weights:
        return Reason("feature", "weights", text="weights of all keys are wanted")
    return None


def _block_size(op: AttentionOp) -> int:
    if tiling.is_causal_blocks(op):
        return next(atom.size for atom in op.mask.atoms() if isinstance(atom, SameBlock))
    return tiling.tile_by_block(op)


def _tiled(op: AttentionOp, block: int) -> Rewritten:
    widest, mean = tiling.key_span(op, block)
    rows = min(block, op.Sq)
    squares = tiling.is_causal_blocks(op) and block == _block_size(op)  # rule 4
    inner = op.with_(
        query=op.query.with_shape(op.B, op.Hq, rows, op.D),
        key=op.key.with_shape(op.B, op.Hkv, widest, op.D),
        value=op.value.with_shape(op.B, op.Hkv, widest, op.Dv),
        mask=Causal() if squares else Full(),
        q_offset=0,
        score=tuple(term for term in op.score if not isinstance(term, Alibi)),
        operands=tuple((n, _tile_desc(op, n, d, rows, widest)) for n, d in op.operands if n in _kept(op)),
    )
    slopes = _slopes(op)
    needs_bias = not squares and not isinstance(op.mask, Full)
    if needs_bias or slopes:
        dtype = "float32" if slopes and op.dtype != "float64" else op.dtype
        bias = TensorDesc((1, op.Hq if slopes else 1, rows, widest), dtype, op.device)
        inner = inner.with_(
            score=(*inner.score, Bias(Ref(_BIAS))),
            operands=(*inner.operands, (_BIAS, bias)),
            grad=tuple(_BIAS if name == slopes else name for name in op.grad),  # rule 6
        )
    tiles = -(-op.Sq // rows)
    cut_of = tiling.cutting(op, block)

    def adapt(inner_run: Run) -> Run:
        return lambda q, k, v, t: _run_tiles(op, inner_run, cut_of, squares, needs_bias, q, k, v, t)

    share = mean / widest if widest else 1.0  # the inner op is the widest tile; most are narrower at the border
    copies = 2.0 * op.query.itemsize * op.B * op.Hq * op.Sq * op.Dv + (8.0 * op.Hq * op.Sq * mean if slopes else 0.0)
    if needs_bias and not all(isinstance(atom, (Causal, Window, Stride)) for atom in op.mask.atoms()):
        copies += 16.0 * (op.B if op.mask.refs() else 1) * op.Sq * mean  # no two tiles look alike: each is written out
    return Rewritten(inner, adapt, tiles * share, Cost(0.0, copies, 6.0 * tiles))


def _kept(op: AttentionOp) -> set[str]:
    """Operands that the inner op still refers to: biases and sinks; those of the mask are used up by the tiles."""
    sinks = {op.weight.sinks.name} if isinstance(op.weight, Softmax) and op.weight.sinks else set()
    return sinks | {term.bias.name for term in op.score if isinstance(term, Bias)}


def _slopes(op: AttentionOp) -> str:
    """The operand that holds ALiBi's slopes; empty when there is none."""
    return next((term.slopes.name for term in op.score if isinstance(term, Alibi)), "")


class _Distances:
    """ALiBi of tiles, which depends on distances alone: tiles that look alike share one tensor (rule 6)."""

    def __init__(self, op: AttentionOp, acc: torch.dtype, t: Operands) -> None:
        name = _slopes(op)
        self.slopes = t[name].to(acc).view(1, -1, 1, 1) if name else None
        self._seen: dict[tuple[int, int, int], torch.Tensor] = {}

    def added_to(self, bias: torch.Tensor | None, tile: tiling.Tile) -> torch.Tensor | None:
        """A tile's other bias and its ALiBi."""
        if self.slopes is None:
            return bias
        rows, keys = tile.rows[1] - tile.rows[0], tile.keys[1] - tile.keys[0]
        looks = (rows, keys, tile.q_offset)
        if looks not in self._seen:
            self._seen.clear()  # a causal mask without a window has no two tiles alike: one is enough to keep
            at = torch.arange(rows, device=self.slopes.device)[:, None] + tile.q_offset
            distance = (at - torch.arange(keys, device=self.slopes.device)).abs()
            self._seen[looks] = -self.slopes * distance
        return self._seen[looks] if bias is None else self._seen[looks] + bias


def _tile_desc(op: AttentionOp, name: str, desc: TensorDesc, rows: int, keys: int) -> TensorDesc:
    if len(desc.shape) < 2:
        return desc
    sizes = list(desc.shape)
    sizes[-2] = rows if sizes[-2] != 1 else 1
    sizes[-1] = keys if sizes[-1] != 1 else 1
    return desc.with_shape(*sizes)


def _run_tiles(
    op: AttentionOp,
    inner: Run,
    cut_of: tiling.Cutting,
    squares: bool,
    needs_bias: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    t: Operands,
) -> Any:
    sq, skv = q.shape[2], k.shape[2]
    offset = reference.offset_of(op, sq, skv, t)
    assert isinstance(offset, int)
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    cut = cut_of(sq, skv, offset, t)
    bias_of = tiling.TileBias(op, q, k, t, cut)
    distances = _Distances(op, acc, t)
    log_sums: list[tuple[tiling.Tile, torch.Tensor]] = []

    def results() -> Iterator[tuple[tiling.Tile, torch.Tensor | None]]:
        for tile in cut.tiles:
            if tile.is_empty:
                shape = (q.shape[0], q.shape[1], tile.rows[1] - tile.rows[0])
                log_sums.append((tile, reference.empty_lse(op, shape, t, acc, q.device)))
                yield tile, None
                continue
            lo, hi = tile.keys
            operands = tiling.slice_terms(op, tile, t)
            if needs_bias or distances.slopes is not None:
                bias = distances.added_to(bias_of(tile) if needs_bias else None, tile)
                operands[_BIAS] = q.new_zeros((1, 1, 1, hi - lo)) if bias is None else bias
            part = inner(q[:, :, tile.rows[0] : tile.rows[1]], k[:, :, lo:hi], v[:, :, lo:hi], operands)
            if op.outputs.lse:
                log_sums.append((tile, part.lse))
                part = part.out
            yield tile, part

    keep_graph = bool(op.grad) or op.higher_order
    out = tiling.join_rows(results(), q, v.shape[3], 0.0, keep_graph, (k, v, *tiling.differentiated(op, t)))
    if not op.outputs.lse:
        return out
    return Raw(out, tiling.join_rows(iter(log_sums), q, 0, float("-inf"), keep_graph))
