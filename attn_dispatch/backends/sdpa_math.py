"""``sdpa_math``: torch's composite SDPA, matmul and softmax; differentiable to any order, takes every mask tensor."""

from __future__ import annotations

from typing import Any

import torch

from attn_dispatch.backend import Backend, Cost, Executable, Operands, dense_cost
from attn_dispatch.backends.sdpa import MASK_FEATURES, additive_mask, is_causal_only
from attn_dispatch.capability import Capability, Limit
from attn_dispatch.ir.ops import AttentionOp

__all__ = ["SdpaMath"]

_ONES = tuple(Limit(name, minimum=1) for name in ("B", "Hq", "Sq", "Skv", "D"))


class SdpaMath(Backend):
    """``aten::_scaled_dot_product_attention_math``."""

    name = "sdpa_math"
    tested = "cpu"
    hints = {"lse": 'backend="eager"', "weights": 'backend="eager"'}  # noqa: RUF012
    capabilities = (
        Capability(
            devices=frozenset({"cpu", "cuda"}),
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            features=MASK_FEATURES
            | {
                *("weight:Softmax", "score:Bias", "gqa", "dv_differs", "dropout", "grad", "grad:operands"),
                *("higher_order", "traced", "scattered", "scale<=0"),
            },
            limits=_ONES,
            exportable=True,
            notes="materialises [B, Hq, Sq, Skv] and repeats kv heads",
        ),
    )

    def compile(self, op: AttentionOp) -> Executable:
        scale, gqa, dropout_p, causal = op.effective_scale, op.groups != 1, op.dropout_p, is_causal_only(op)
        flag = causal and not op.score
        mask_of = additive_mask(op)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
            # the operator adds whatever mask it gets: the wrapper's conversion of a boolean one is ours to make
            mask, dtype = None if flag else mask_of(q, k, t), q.dtype
            if mask is not None and mask.dtype != dtype:  # a float32 bias, of which half precision may hold nothing
                q, k, v = q.to(mask.dtype), k.to(mask.dtype), v.to(mask.dtype)
            out = torch._scaled_dot_product_attention_math(
                q, k, v, mask, dropout_p, flag, None, scale=scale, enable_gqa=gqa
            )[0]
            return out if out.dtype == dtype else out.to(dtype)

        return Executable(run)

    def estimate(self, op: AttentionOp) -> Cost:
        cost = dense_cost(op, materialised=6)
        repeated = 2.0 * op.query.itemsize * op.B * op.Hq * op.Skv * (op.D + op.Dv) if op.groups != 1 else 0.0
        return Cost(cost.flops, cost.bytes + repeated, 6)
