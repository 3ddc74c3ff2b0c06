"""``eager``: the specification in plain torch. Every feature, every device, gradients of any order."""

from __future__ import annotations

from typing import Any

import torch

from attn_dispatch import reference
from attn_dispatch.backend import Backend, Cost, Executable, Operands, dense_cost
from attn_dispatch.capability import ALL_FEATURES, Capability
from attn_dispatch.ir.ops import AttentionOp

__all__ = ["Eager"]


class Eager(Backend):
    """Runs `reference.attention`; what it cannot do, nobody here can."""

    name = "eager"
    tested = "cpu"
    capabilities = (
        Capability(
            devices=frozenset({"cpu", "cuda", "mps", "xpu", "meta"}),
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            features=ALL_FEATURES,
            hides_nan=True,
            exportable=True,
            notes="the specification; materialises [B, Hq, Sq, Skv]; hides NaN on the CPU only",
        ),
    )

    def compile(self, op: AttentionOp) -> Executable:
        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
            raw = reference.attention(op, q, k, v, t)
            return raw if op.outputs.lse or op.outputs.weights or op.outputs.state else raw.out

        return Executable(run)

    def estimate(self, op: AttentionOp) -> Cost:
        cost = dense_cost(op, materialised=10)
        return Cost(cost.flops, cost.bytes, 12)
