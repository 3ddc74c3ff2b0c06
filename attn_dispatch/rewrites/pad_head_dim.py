"""``pad_head_dim``: pad head sizes with zeros for kernels that want a multiple, or equal sizes.

1. D and Dv become the next multiple of 8 of the larger of both; what has that size already (MLA's 192 beside 128) is
   not copied.
2. Zeros in query and key add nothing to a score; zeros in value give output columns that are cut off.
3. The scale is that of the true D.
4. Not for the linear family, whose feature map need not keep zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from attn_dispatch.backend import Cost, Operands, Raw, Run
from attn_dispatch.capability import Reason
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.weights import Linear
from attn_dispatch.rewrites.base import Rewrite, Rewritten, not_useful

__all__ = ["PadHeadDim"]

_MULTIPLE = 8


class PadHeadDim(Rewrite):
    """Head sizes as kernels like them."""

    name = "pad_head_dim"
    order = 60

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        size = -(-max(op.D, op.Dv, 1) // _MULTIPLE) * _MULTIPLE
        if op.D == op.Dv == size:
            return not_useful(f"head_dim {op.D} is a multiple of {_MULTIPLE}")
        if isinstance(op.weight, Linear):
            return Reason(
                "feature", op.weight.feature, text="a feature map need not keep zeros: elu + 1 makes them ones"
            )
        if op.outputs.weights or op.D == 0 or op.Dv == 0:
            return Reason("feature", "weights", text="not with return_weights or a head_dim of 0")
        inner = op.with_(
            query=op.query.with_shape(*op.query.shape[:3], size),
            key=op.key.with_shape(*op.key.shape[:3], size),
            value=op.value.with_shape(*op.value.shape[:3], size),
            scale=op.effective_scale,
        )

        def adapt(run: Run) -> Run:
            def outer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
                q, k, wide = (_pad(x, size) for x in (q, k, v))
                result = run(q, k, wide, t)
                if op.outputs.lse:
                    return Raw(result.out[..., : v.shape[3]], result.lse)
                return result[..., : v.shape[3]]

            return outer

        padded = sum(d != size for d in (op.D, op.Dv))
        rows = padded * (op.Hq * op.Sq + op.Hkv * op.Skv)
        moved = 2.0 * op.query.itemsize * size * op.B * rows
        return Rewritten(inner, adapt, 1.0, Cost(0.0, moved, 3.0))


def _pad(x: torch.Tensor, size: int) -> torch.Tensor:
    return x if x.shape[3] == size else F.pad(x, (0, size - x.shape[3]))  # padding by nothing would still copy
