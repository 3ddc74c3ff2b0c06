"""``fold_groups``: the query heads that share a kv head become rows of one head.

1. ``q [B, Hq, Sq, D]`` -> ``[B, Hkv, g * Sq, D]``: the keys of a group are read once, not g times.
2. A mask that is the same for every query row stays as it is.
3. A mask or bias per row is repeated (or regrouped, when it has heads) for the rows of a group.
4. Measured on 2 cores, fp32: 1.6 to 2.8 times faster than ``enable_gqa=True`` for decode; no gain for long prefill,
   where a causal flag would be lost, so rows per kv head are bounded.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_dispatch import reference
from attn_dispatch.backend import Cost, Operands, Raw, Run
from attn_dispatch.capability import Reason
from attn_dispatch.ir.atoms import Dense, Full
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias
from attn_dispatch.ir.tensors import Ref, TensorDesc
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.rewrites.base import Rewrite, Rewritten, not_useful

__all__ = ["FoldGroups"]

_MAX_MASK_ELEMENTS = 1 << 22
_MASK = "folded_mask"


class FoldGroups(Rewrite):
    """Grouped query heads as rows."""

    name = "fold_groups"
    order = 30

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        if op.groups == 1:
            return not_useful(f"Hq {op.Hq} = Hkv {op.Hkv}: no groups")
        for word, wrong in {
            "sinks": isinstance(op.weight, Softmax) and op.weight.sinks is not None,
            op.weight.feature: not isinstance(op.weight, Softmax),
            "dropout": op.dropout_p > 0,
            "score:Alibi": any(isinstance(term, Alibi) for term in op.score),
        }.items():
            if wrong:
                return Reason("feature", word, text=f"{word} belongs to a query head, and heads become rows")
        rows = op.groups * op.Sq
        makes_mask = op.mask.per_query and not isinstance(op.mask, Full)
        if makes_mask and rows * op.Skv > _MAX_MASK_ELEMENTS:
            return not_useful(f"{op.mask} would be written out for {rows} x {op.Skv} pairs")
        return _fold(op, rows, makes_mask)


def _fold(op: AttentionOp, rows: int, makes_mask: bool) -> Rewritten:
    biases = {term.bias.name for term in op.score if isinstance(term, Bias)}
    operands = tuple((n, _folded_desc(op, d) if n in biases else d) for n, d in op.operands)
    inner = op.with_(query=op.query.with_shape(op.B, op.Hkv, rows, op.D), operands=operands)
    if makes_mask:
        mask = TensorDesc((op.B, op.Hkv, rows, op.Skv), "bool", op.device)
        kept = tuple((n, d) for n, d in operands if n in biases)
        inner = inner.with_(mask=Dense(Ref(_MASK)), q_offset=0, operands=(*kept, (_MASK, mask)))
    bias_bytes = 8.0 * rows * op.Skv if makes_mask or biases else 0.0
    query_bytes = 2.0 * op.query.itemsize * op.B * op.Hq * op.Sq * (op.D + op.Dv) if op.Sq > 1 else 0.0

    def adapt(run: Run) -> Run:
        return lambda q, k, v, t: _run_folded(op, biases, makes_mask, run, q, k, v, t)

    return Rewritten(inner, adapt, 1.0, Cost(0.0, bias_bytes + query_bytes, 2.0 + 2.0 * makes_mask))


def _folded_desc(op: AttentionOp, desc: TensorDesc) -> TensorDesc:
    b, h, sq, skv = desc.shape
    if h == 1 and sq == 1:
        return desc
    return desc.with_shape(b, op.Hkv if h != 1 else 1, op.groups * op.Sq, skv)


def _run_folded(
    op: AttentionOp,
    biases: set[str],
    makes_mask: bool,
    inner: Run,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    t: Operands,
) -> Any:
    b, hq, sq, d = q.shape
    hkv = k.shape[1]
    groups = hq // hkv
    folded = q.reshape(b, hkv, groups * sq, d)
    if biases or makes_mask:
        t = {name: _fold_rows(x, hkv, groups, sq) if name in biases else x for name, x in t.items()}
    if makes_mask:
        allowed = reference.allowed_pairs(op, q, k, t)
        assert allowed is not None
        t = {**t, _MASK: _fold_rows(allowed[(None,) * (4 - allowed.ndim)], hkv, groups, sq)}
    result = inner(folded, k, v, t)
    if op.outputs.lse or op.outputs.weights:
        rest = [None if x is None else x.reshape(b, hq, sq, *x.shape[3:]) for x in (result.lse, result.weights)]
        return Raw(result.out.reshape(b, hq, sq, v.shape[3]), *rest)
    return result.reshape(b, hq, sq, v.shape[3])


def _fold_rows(x: torch.Tensor, hkv: int, groups: int, sq: int) -> torch.Tensor:
    """A mask or bias ``[B|1, Hq|1, Sq|1, Skv|1]`` for folded rows ``[B|1, Hkv|1, g * Sq, Skv|1]``."""
    b, h, rows, skv = x.shape
    if h == 1 and rows == 1:
        return x
    x = x.expand(b, h, sq, skv)
    if h == 1:
        return x.repeat(1, 1, groups, 1)
    return x.reshape(b, hkv, groups * sq, skv)
