"""``sdpa_efficient``: the memory-efficient CUDA kernel (CUTLASS), the fused one there that takes a mask tensor."""

from __future__ import annotations

from typing import Any

import torch

from attn_dispatch.backend import Backend, Cost, Executable, Operands, Raw, dense_cost
from attn_dispatch.backends.sdpa import MASK_FEATURES, additive_mask, is_causal_only, patch_dead_rows
from attn_dispatch.capability import Capability, Limit
from attn_dispatch.ir.ops import AttentionOp

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
            features=MASK_FEATURES | {"weight:Softmax", "score:Bias", "dropout", "lse", "grad", "dv_differs"},
            limits=(
                *(Limit(name, minimum=1) for name in ("B", "Hq", "Sq", "Skv", "D")),
                Limit("D", multiple_of=8, hint="pad_head_dim > sdpa_efficient"),
                Limit("Dv", multiple_of=8, hint="pad_head_dim > sdpa_efficient"),
            ),
            deterministic=False,
            notes="untested here",
        ),
    )

    def compile(self, op: AttentionOp) -> Executable:
        kernel = torch._scaled_dot_product_efficient_attention
        scale, causal, dropout_p = op.effective_scale, is_causal_only(op) and not op.score, op.dropout_p
        wants_lse = op.outputs.lse or bool(op.grad)
        mask_of = additive_mask(op)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
            mask = None if causal else mask_of(q, k, t)
            bias = None if mask is None else _aligned(_in_dtype(mask, q.dtype), q, k)
            out, lse, *_ = kernel(q, k, v, bias, wants_lse, dropout_p, causal, scale=scale)
            return Raw(out, patch_dead_rows(lse[..., : q.shape[2]], mask)) if op.outputs.lse else out

        return Executable(run)

    def estimate(self, op: AttentionOp) -> Cost:
        return dense_cost(op, 0.5 if is_causal_only(op) else 1.0)


def _in_dtype(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An additive mask in another dtype, in which what was finite stays finite: -inf would mask what was not masked."""
    if mask.dtype == dtype:
        return mask
    limit = torch.finfo(dtype).max
    return torch.where(torch.isinf(mask), mask, mask.clamp(-limit, limit)).to(dtype)


def _aligned(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The mask expanded to ``[B, H, Sq, Skv]`` inside a buffer whose rows are aligned, as torch's own wrapper does."""
    skv = k.shape[2]
    padded = torch.nn.functional.pad(mask.expand(*mask.shape[:-1], skv), (0, -skv % _BIAS_ALIGNMENT))
    return padded[..., :skv].expand(q.shape[0], q.shape[1], q.shape[2], skv)
