"""``sdpa_flash``: torch's fused flash kernels, on the CPU and on CUDA. Their facts have little in common.

The CPU kernel needs guarding (measured on torch 2.13): it kills the process for a size of 0, reads a non-contiguous
last dimension wrongly, says lse 0.0 for an empty row, gives NaN for ``scale <= 0`` with its causal flag, and loses the
NaN of a query row when there are fewer keys than one vector register holds. The limits and the executable below see to
each.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from attn_dispatch.backend import Backend, Cost, Executable, Operands, Raw, Run, dense_cost
from attn_dispatch.backends.sdpa import (
    MASK_FEATURES,
    additive_mask,
    capability_reasons,
    differentiable_twice,
    is_causal_only,
    patch_dead_rows,
)
from attn_dispatch.capability import Capability, Limit, Reason
from attn_dispatch.ir.atoms import Causal, Full
from attn_dispatch.ir.ops import AttentionOp

__all__ = ["SdpaFlash"]

_CORE_CACHE_BYTES = 384 << 10  # of a core's 512 KiB; an estimate for the order, as the speed-up, not a measurement
_CORE_CACHE_SPEEDUP = 4.0
# The CPU kernel takes 512 keys at a time and skips whole blocks of them alone: a causal square of up to 512 it computes
# whole. Below 256 that is cheaper than what `bands` does instead (measured), and the order is what estimates are for.
_COMPUTED_WHOLE = range(257, 513)
_WIDEST_VECTOR = 16  # float32 lanes of AVX-512
_FLASH_GPUS = ((8, 0), (12, 1))  # as torch's ``check_flash_attention_hardware_support``
_ONES = tuple(Limit(name, minimum=1) for name in ("B", "Hq", "Sq", "Skv", "D"))


class SdpaFlash(Backend):
    """``aten::_scaled_dot_product_flash_attention_for_cpu`` and ``aten::_scaled_dot_product_flash_attention``."""

    name = "sdpa_flash"
    tested = "cpu"
    hints = {  # noqa: RUF012
        "weights": 'backend="eager"',
        "lse": 'backend="eager"',
        "dropout": 'backend="sdpa_math"',
        "grad:operands": 'backend="sdpa_math"',
        "higher_order": 'backend="sdpa_math"',
        "dv_differs": "pad_head_dim > sdpa_flash",
    }
    capabilities = (
        Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            features=MASK_FEATURES | {"weight:Softmax", "score:Bias", "gqa", "lse", "grad", "scattered", "scale<=0"},
            limits=_ONES,
            notes="gradients of gradients by recomputation in eager; a scattered input is copied",
        ),
        Capability(
            devices=frozenset({"cuda"}),
            dtypes=frozenset({"float16", "bfloat16"}),
            features=frozenset({"weight:Softmax", "mask:Full", "mask:Causal", "gqa", "dropout", "lse", "grad"}),
            limits=(*_ONES, Limit("D", multiple_of=8, maximum=256, hint="pad_head_dim > sdpa_flash")),
            notes="untested here; compute capability 8.0 to 12.1",
        ),
    )

    def extra_reasons(self, op: AttentionOp) -> list[Reason]:
        if op.device != "cuda":
            return []
        found = capability_reasons(op, *_FLASH_GPUS)
        if is_causal_only(op) and op.Sq != op.Skv:
            text = f"is_causal with Sq {op.Sq} != Skv {op.Skv}"
            found.append(Reason("limit", "Sq", op.Sq, op.Skv, "", text))
        if op.dropout_p >= 1.0:
            found.append(Reason("limit", "dropout_p", op.dropout_p, "< 1", text="dropout_p 1, takes less than 1"))
        gpu = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
        if op.grad and _has_little_shared_memory(gpu) and (192 < op.D <= 224 or (op.D > 192 and op.dropout_p)):
            what = f"gradients at head_dim {op.D} > 192{' with dropout' if op.dropout_p else ''}"
            text = f"{what} on compute capability {gpu[0]}.{gpu[1]}"
            found.append(Reason("limit", "head_dim", op.D, "<= 192", text=text))
        return found

    def compile(self, op: AttentionOp) -> Executable:
        return _compile_cpu(op) if op.device == "cpu" else Executable(_compile_cuda(op))

    def estimate(self, op: AttentionOp) -> Cost:
        # each query head reads its own keys again: the kernel does not share them inside a group. On the CPU heads of a
        # group follow each other, and read them from the cache where those of one head fit into it
        skips = is_causal_only(op) and op.Sq == op.Skv
        if op.device == "cpu" and op.Skv in _COMPUTED_WHOLE and not op.grad:
            skips = False
        cost = dense_cost(op, 0.5 if skips else 1.0)
        again = 1.0 * op.query.itemsize * op.B * (op.Hq - op.Hkv) * op.Skv * (op.D + op.Dv)
        if op.device == "cpu" and op.key.itemsize * op.Skv * (op.D + op.Dv) <= _CORE_CACHE_BYTES:
            again /= _CORE_CACHE_SPEEDUP
        masked = not isinstance(op.mask, (Full, Causal))
        copies = 2.0 * op.key.itemsize * op.B * op.Hkv * op.Skv * (op.D + op.Dv) if "scattered" in op.features else 0.0
        return Cost(cost.flops, cost.bytes + again + copies, 2.0 if masked else 1.0)


def _has_little_shared_memory(gpu: tuple[int, int]) -> bool:
    """Whether the backward of large heads has no room, as torch's ``check_requires_grad_and_head_dim_gt192`` has it."""
    return (8, 6) <= gpu <= (8, 9) or (12, 0) <= gpu <= (12, 1)


def _compile_cpu(op: AttentionOp) -> Executable:
    kernel = torch._scaled_dot_product_flash_attention_for_cpu
    scale, causal = op.effective_scale, is_causal_only(op)
    plain = isinstance(op.mask, (Full, Causal)) and not op.score
    scattered = "scattered" in op.features
    flag = causal and not op.score
    mask_of = additive_mask(op)

    def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        if scattered:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        mask = None if flag else mask_of(q, k, t)
        if mask is None and k.size(2) < _WIDEST_VECTOR:  # with a mask tensor it keeps the NaN of a query row
            mask = q.new_zeros((1, k.size(2)))
        out, lse = kernel(q, k, v, 0.0, flag, attn_mask=mask, scale=scale)
        if op.grad:
            out = differentiable_twice(op, out, q, k, v, t)
        return Raw(out, patch_dead_rows(lse, mask)) if op.outputs.lse else out

    def only_masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        return kernel(q, k, v, 0.0, False, attn_mask=mask_of(q, k, t), scale=scale)[0]

    if scattered or op.outputs.lse or (op.grad and not plain):
        return Executable(masked)
    if not plain:
        return Executable(only_masked)

    def unmasked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        return kernel(q, k, v, 0.0, causal, scale=scale)[0]

    def bare(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        return kernel(q, k, v)[0]  # what the kernel takes for granted anyway costs 0.3 us to say

    def graded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        return differentiable_twice(op, unmasked(q, k, v, t), q, k, v, t)

    def short(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        return (plenty if k.size(2) >= _WIDEST_VECTOR else masked)(q, k, v, t)

    is_default = not causal and abs(scale * math.sqrt(op.D) - 1.0) < 1e-15  # D ** -0.5 is 1 / sqrt(D) but for one bit
    plenty = graded if op.grad else bare if is_default else unmasked
    # looking at the length costs a hundredth of a short decode step, and the buckets above are (16, 32], (32, 64] ...
    return Executable(plenty if op.Skv > _WIDEST_VECTOR else short, short)


def _compile_cuda(op: AttentionOp) -> Run:
    kernel = torch._scaled_dot_product_flash_attention
    scale, causal, dropout_p = op.effective_scale, is_causal_only(op), op.dropout_p

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        result = kernel(q, k, v, dropout_p, causal, False, scale=scale)
        out = differentiable_twice(op, result[0], q, k, v, t) if op.grad and not dropout_p else result[0]
        return Raw(out, result[1]) if op.outputs.lse else out

    return run
