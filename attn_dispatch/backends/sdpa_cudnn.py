"""``sdpa_cudnn``: cuDNN's attention through torch."""

from __future__ import annotations

from typing import Any

import torch

from attn_dispatch.backend import Backend, Cost, Executable, Operands, dense_cost
from attn_dispatch.backends.sdpa import is_causal_only
from attn_dispatch.capability import Capability, Limit, Reason
from attn_dispatch.ir.ops import AttentionOp

__all__ = ["SdpaCudnn"]


class SdpaCudnn(Backend):
    """``aten::_scaled_dot_product_cudnn_attention``."""

    name = "sdpa_cudnn"
    tested = "untested"
    capabilities = (
        Capability(
            devices=frozenset({"cuda"}),
            dtypes=frozenset({"float16", "bfloat16"}),
            features=frozenset({"weight:Softmax", "mask:Full", "mask:Causal", "gqa", "dropout", "grad"}),
            limits=(
                *(Limit(name, minimum=1) for name in ("B", "Hq", "D")),
                Limit("Sq", minimum=2),
                Limit("Skv", minimum=2),
                Limit("D", multiple_of=8, maximum=128),
            ),
            deterministic=False,
            notes="untested here; SM 8.0 or newer",
        ),
    )

    def extra_reasons(self, op: AttentionOp) -> list[Reason]:
        if is_causal_only(op) and op.Sq != op.Skv:
            text = f"is_causal with Sq {op.Sq} != Skv {op.Skv}"
            return [Reason("limit", "Sq", op.Sq, op.Skv, "", text)]
        return []  # what is wrong on some machines is data: known_bad.yaml

    def compile(self, op: AttentionOp) -> Executable:
        kernel = torch._scaled_dot_product_cudnn_attention
        scale, causal, dropout_p, needs_lse = op.effective_scale, is_causal_only(op), op.dropout_p, bool(op.grad)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
            return kernel(q, k, v, None, needs_lse, dropout_p, causal, False, scale=scale)[0]

        return Executable(run)

    def estimate(self, op: AttentionOp) -> Cost:
        return dense_cost(op, 0.5 if is_causal_only(op) else 1.0)
