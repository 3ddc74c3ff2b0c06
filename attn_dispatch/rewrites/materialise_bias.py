"""``materialise_bias``: ALiBi written out as one bias tensor, for kernels that take a bias and no slopes.

1. ``Alibi(slopes)`` -> ``Bias`` ``[B|1, Hq, Sq, Skv]`` in float32 (float64), the mask stays what it is: a causal or
   padded mask is then still the kernel's own to make, and grouped heads can still be folded.
2. Gradients of the slopes flow through the tensor.
3. Bounded: a tensor of more than 2^28 elements is no way to run anything.
"""

from __future__ import annotations

from typing import Any

import torch

from attn_dispatch import reference
from attn_dispatch.backend import Cost, Operands, Run
from attn_dispatch.capability import Reason
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias
from attn_dispatch.ir.tensors import Ref, TensorDesc
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.passes.drop_noops import used_names
from attn_dispatch.rewrites.base import Rewrite, Rewritten, not_useful

__all__ = ["MaterialiseBias", "bias_dtype", "written_bias"]

_BIAS = "written_bias"
_MAX_ELEMENTS = 1 << 28


class MaterialiseBias(Rewrite):
    """ALiBi as a tensor."""

    name = "materialise_bias"
    order = 27

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        term = next((term for term in op.score if isinstance(term, Alibi)), None)
        if term is None:
            return not_useful("no ALiBi")
        if not isinstance(op.weight, Softmax):
            return Reason("feature", op.weight.feature, text="the linear family has no biases")
        batch = op.B if isinstance(op.q_offset, Ref) else 1
        elements = batch * op.Hq * op.Sq * op.Skv
        if elements > _MAX_ELEMENTS:
            return Reason("limit", "bias", elements, f"<= {_MAX_ELEMENTS}", text=f"{elements} elements of bias")
        slopes = term.slopes.name
        bias = TensorDesc((batch, op.Hq, op.Sq, op.Skv), bias_dtype(op), op.device)
        inner = op.with_(
            score=tuple(Bias(Ref(_BIAS)) if t == term else t for t in op.score),
            operands=(*op.operands, (_BIAS, bias)),
            grad=tuple(_BIAS if name == slopes else name for name in op.grad),
            q_offset=op.q_offset if op.mask.positional else 0,
        )
        inner = inner.with_(operands=tuple((n, d) for n, d in inner.operands if n in used_names(inner)))

        def adapt(run: Run) -> Run:
            def outer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
                return run(q, k, v, {**t, _BIAS: written_bias(op, term, q, k, t)})

            return outer

        return Rewritten(inner, adapt, 1.0, Cost(0.0, 12.0 * elements, 5.0))


def bias_dtype(op: AttentionOp) -> str:
    """What a bias is written in; the CPU kernel misreads a float32 one beside float64."""
    return "float64" if op.dtype == "float64" else "float32"


def written_bias(op: AttentionOp, term: Alibi, q: torch.Tensor, k: torch.Tensor, t: Operands) -> torch.Tensor:
    """ALiBi's bias ``[B|1, Hq, Sq, Skv]``."""
    grid = reference.positions(op, q, k, t)
    slopes = t[term.slopes.name].to(getattr(torch, bias_dtype(op))).view(-1, 1, 1)
    bias = slopes * -(grid.queries - grid.keys).abs().to(slopes.dtype)
    return bias[(None,) * (4 - bias.ndim)]
