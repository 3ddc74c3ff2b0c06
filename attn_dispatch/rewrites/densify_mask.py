"""``densify_mask``: the last resort, the mask written out.

1. Any mask becomes one boolean tensor ``[B|1, H|1, Sq, Skv]``, at the cost of writing and reading it.
2. ALiBi becomes a bias tensor of the same size.
3. What the mask hid by structure (NaN in excluded keys) is hidden by the guard that every candidate has.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_dispatch import reference
from attn_dispatch.backend import Cost, Operands, Run
from attn_dispatch.capability import Reason
from attn_dispatch.ir.atoms import BlockTable, Dense, Full, Selected
from attn_dispatch.ir.masks import Not
from attn_dispatch.ir.operands import Table
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias
from attn_dispatch.ir.tensors import Ref, TensorDesc
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.passes.drop_noops import used_names
from attn_dispatch.rewrites.base import Rewrite, Rewritten, not_useful
from attn_dispatch.rewrites.materialise_bias import bias_dtype, written_bias

__all__ = ["DensifyMask"]

_MASK, _BIAS = "dense_mask", "alibi_bias"


class DensifyMask(Rewrite):
    """Mask and ALiBi as tensors."""

    name = "densify_mask"
    order = 70

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        alibi = next((term for term in op.score if isinstance(term, Alibi)), None)
        has_mask = not isinstance(op.mask, (Full, Dense))
        if not has_mask and alibi is None:
            return not_useful(f"mask {op.mask} has nothing to write out")
        if not isinstance(op.weight, Softmax):
            return Reason("feature", op.weight.feature, text="the linear family has no additive masks")
        score = tuple(Bias(Ref(_BIAS)) if isinstance(term, Alibi) else term for term in op.score)
        extra = [(_BIAS, TensorDesc((1, op.Hq, op.Sq, op.Skv), bias_dtype(op), op.device))] if alibi else []
        heads = _mask_heads(op)
        extra += [(_MASK, TensorDesc((op.B, heads, op.Sq, op.Skv), "bool", op.device))] if has_mask else []
        grad = tuple(_BIAS if alibi and name == alibi.slopes.name else name for name in op.grad)
        inner = op.with_(
            mask=Dense(Ref(_MASK)) if has_mask else op.mask,
            score=score,
            q_offset=0,
            operands=(*op.operands, *extra),
            grad=grad,
        )
        inner = inner.with_(operands=tuple((n, d) for n, d in inner.operands if n in used_names(inner)))

        def adapt(run: Run) -> Run:
            def outer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
                made = dict(t)
                if alibi:
                    made[_BIAS] = written_bias(op, alibi, q, k, t)
                if has_mask:
                    allowed = reference.allowed_pairs(op, q, k, t)
                    assert allowed is not None
                    made[_MASK] = allowed[(None,) * (4 - allowed.ndim)]
                return run(q, k, v, made)

            return outer

        elements = (op.B if op.mask.refs() else 1) * op.Sq * op.Skv * (op.Hq if alibi else heads)
        return Rewritten(inner, adapt, 1.0, Cost(0.0, 16.0 * elements, 4.0))


def _mask_heads(op: AttentionOp) -> int:
    """Hq when a part of the mask differs by head, else 1: what is written out then has a size for each."""
    for atom in op.mask.atoms():
        if isinstance(atom, Not):  # its part comes on its own
            continue
        shapes = [op.operand(name).shape for name in atom.refs()]
        if isinstance(atom, BlockTable) and isinstance(atom.table, Table):
            shapes.append(tuple(atom.table.tensor().shape))
        least = (
            4 if isinstance(atom, Selected) else 3
        )  # indices [B, Sq, K] have no heads; a mask or table of rank 3 has
        if any(len(shape) >= least and shape[-3] != 1 for shape in shapes):
            return op.Hq
    return 1
