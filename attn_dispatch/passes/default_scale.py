"""Write out the default scale.

1. ``scale=None`` -> ``D ** -0.5``, D being the head size of query and key (1 when D is 0).
"""

from __future__ import annotations

from attn_dispatch.ir.ops import AttentionOp

__all__ = ["default_scale"]


def default_scale(op: AttentionOp) -> tuple[AttentionOp, bool]:
    """Rule 1 of the module."""
    if op.scale is not None:
        return op, False
    return op.with_(scale=op.effective_scale), True
