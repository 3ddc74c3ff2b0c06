"""The linear family in ONNX: refused here until it is lowered."""

from __future__ import annotations

from attn_dispatch.capability import Reason
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.lowering.parts import Call, Results
from attn_dispatch.lowering.target import Target

__all__ = ["lower", "reasons_against"]


def reasons_against(op: AttentionOp, target: Target) -> list[Reason]:
    """Why an op of the linear family cannot be lowered for a target."""
    return [Reason("feature", op.weight.feature, str(op.weight), "softmax", text=f"{op.weight} is not lowered to ONNX")]


def lower(call: Call) -> Results:
    """Never called: `reasons_against` refuses."""
    raise NotImplementedError(str(call.op))
