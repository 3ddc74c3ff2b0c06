"""``upcast``: compute half precision in float32 and round the output once.

1. bfloat16 and float16 inputs are converted; the output is converted back; the lse stays float32.
2. Worth it where the half-precision kernel is slower than the float32 one (CPU prefill); never for a long cache, whose
   conversion costs more than reading it. Which, is measured, not ruled.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_dispatch.backend import Cost, Operands, Raw, Run
from attn_dispatch.capability import Reason
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.tensors import TensorDesc
from attn_dispatch.rewrites.base import Rewrite, Rewritten, not_useful

__all__ = ["Upcast"]

_HALF = ("float16", "bfloat16")


class Upcast(Rewrite):
    """Half precision through float32."""

    name = "upcast"
    order = 50

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        if op.dtype not in _HALF:
            return not_useful(f"dtype {op.dtype} needs no upcast")

        def single(desc: TensorDesc) -> TensorDesc:
            return replace(desc, dtype="float32") if desc.dtype in _HALF else desc

        inner = op.with_(
            query=single(op.query),
            key=single(op.key),
            value=single(op.value),
            operands=tuple((name, single(desc)) for name, desc in op.operands),
        )

        def adapt(run: Run) -> Run:
            def outer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
                halves = (torch.float16, torch.bfloat16)
                t = {name: x.float() if x.dtype in halves else x for name, x in t.items()}
                result = run(q.float(), k.float(), v.float(), t)
                if not (op.outputs.lse or op.outputs.weights):
                    return result.to(q.dtype)
                weights = None if result.weights is None else result.weights.to(q.dtype)
                return Raw(result.out.to(q.dtype), result.lse, weights)

            return outer

        elements = op.B * (op.Hq * op.Sq * (op.D + op.Dv) + op.Hkv * op.Skv * (op.D + op.Dv))
        return Rewritten(inner, adapt, 1.0, Cost(0.0, 6.0 * elements, 4.0))
