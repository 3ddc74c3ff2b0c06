"""``sdpa_efficient``: the memory-efficient CUDA kernel (CUTLASS), the fused one there that takes a mask tensor."""

from __future__ import annotations

from typing import Any

import torch

from attn_dispatch.backend import Backend, Cost, Executable, Operands, Raw, dense_cost
from attn_dispatch.backends.sdpa import (
    MASK_FEATURES,
    additive_mask,
    capability_reasons,
    is_causal_only,
    patch_dead_rows,
)
from attn_dispatch.capability import Capability, Limit, Reason
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Bias
from attn_dispatch.ir.tensors import short_dtype

__all__ = ["SdpaEfficient"]

_BIAS_ALIGNMENT = 16  # elements; the kernel reads the bias in aligned vectors


class SdpaEfficient(Backend):
    """``aten::_scaled_dot_product_efficient_attention``."""

    name = "sdpa_efficient"
    tested = "untested"
    capabilities = (
        Capability(
            devices=frozenset({"cuda"}),
            dtypes=frozenset({"float16", "bfloat16", "float32"}),
            features=MASK_FEATURES | {"weight:Softmax", "score:Bias", "dropout", "lse", "grad", "dv_differs", "gqa"},
            limits=(
                *(Limit(name, minimum=1) for name in ("B", "Hq", "Sq", "Skv", "D")),
                Limit("D", multiple_of=8, hint="pad_head_dim > sdpa_efficient"),
                Limit("Dv", multiple_of=8, hint="pad_head_dim > sdpa_efficient"),
            ),
            deterministic=False,
            notes="untested here",
        ),
    )

    def extra_reasons(self, op: AttentionOp) -> list[Reason]:
        found = capability_reasons(op, (8, 0) if op.dtype == "bfloat16" else (5, 0), (12, 1))
        for name in (term.bias.name for term in op.score if isinstance(term, Bias)):
            dtype = op.operand(name).dtype
            if dtype != op.dtype:  # the kernel adds a bias of its own dtype, and half precision would round this one
                text = f"a {short_dtype(dtype)} bias beside {short_dtype(op.dtype)}"
                found.append(Reason("dtype", "bias", dtype, op.dtype, "upcast > sdpa_efficient", text))
        return found

    def compile(self, op: AttentionOp) -> Executable:
        kernel = torch._scaled_dot_product_efficient_attention
        scale, causal, dropout_p = op.effective_scale, is_causal_only(op) and not op.score, op.dropout_p
        wants_lse = op.outputs.lse or bool(op.grad)
        mask_of = additive_mask(op)
        groups = op.groups

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
            mask = None if causal else mask_of(q, k, t)
            bias = None if mask is None else _aligned(mask, q, k)
            if groups != 1:  # the kernel knows no groups, and torch's own wrapper repeats the heads too
                k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            out, lse, *_ = kernel(q, k, v, bias, wants_lse, dropout_p, causal, scale=scale)
            return Raw(out, patch_dead_rows(lse[..., : q.shape[2]], mask)) if op.outputs.lse else out

        return Executable(run)

    def estimate(self, op: AttentionOp) -> Cost:
        cost = dense_cost(op, 0.5 if is_causal_only(op) else 1.0)
        repeated = 2.0 * op.query.itemsize * op.B * op.Hq * op.Skv * (op.D + op.Dv) if op.groups != 1 else 0.0
        return Cost(cost.flops, cost.bytes + repeated)


def _aligned(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The mask expanded to ``[B, H, Sq, Skv]`` inside a buffer whose rows are aligned, as torch's own wrapper does."""
    skv = k.shape[2]
    padded = torch.nn.functional.pad(mask.expand(*mask.shape[:-1], skv), (0, -skv % _BIAS_ALIGNMENT))
    return padded[..., :skv].expand(q.shape[0], q.shape[1], q.shape[2], skv)
