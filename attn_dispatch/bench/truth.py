"""What is right for an op, in float64, and whether a contender's result is that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attn_dispatch import reference
from attn_dispatch.budgets import budget
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.tensors import TensorDesc
from attn_dispatch.selection.gate import SLACK, places
from attn_dispatch.selection.samples import Sample, golden_rows

__all__ = ["Truth"]

_WHOLE = 1 << 24  # pairs up to which all rows are compared


@dataclass(frozen=True)
class _Part:
    rows: slice
    want: torch.Tensor
    allowed: torch.Tensor


class Truth:
    """The right output of an op for a sample, and its gradients when it has any; made once, asked per contender.

    Args:
        op: a canonical op. sample: tensors that fit it.
    """

    def __init__(self, op: AttentionOp, sample: Sample) -> None:
        self.op = op
        pairs = op.B * op.Hq * op.Sq * op.Skv
        own = getattr(torch, op.dtype)
        self._parts: list[_Part] = []
        for start, stop in [(0, op.Sq)] if pairs <= _WHOLE else places(op.Sq):
            want = golden_rows(op, sample, (start, stop)).out
            usual = golden_rows(op, sample, (start, stop), own).out
            self._parts.append(_Part(slice(start, stop), want, _allowed(op.dtype, "out", want, usual)))
        self._grads: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        if op.grad:
            wide, plain = _gradients(op, sample, torch.float64), _gradients(op, sample, own)
            for name, want, usual in zip(op.grad, wide, plain, strict=True):
                self._grads.append((name, want, _allowed(op.dtype, "grad", want, usual)))

    def problem(self, out: torch.Tensor, grads: Sequence[torch.Tensor] = ()) -> str:
        """What is wrong with a result ``[B, Hq, Sq, Dv]`` and its gradients; empty when nothing is."""
        op = self.op
        wanted = (op.B, op.Hq, op.Sq, op.Dv)
        if tuple(out.shape) != wanted:
            return f"shape {list(out.shape)}, not {list(wanted)}"
        for part in self._parts:
            if problem := _off("output", out[:, :, part.rows], part.want, part.allowed):
                return problem
        for (name, want, allowed), got in zip(self._grads, grads, strict=True):
            if problem := _off(f"gradient of {name}", got, want, allowed):
                return problem
        return ""


def _allowed(dtype: str, quantity: str, want: torch.Tensor, usual: torch.Tensor) -> torch.Tensor:
    limit = budget(dtype, quantity)
    own = (usual.double() - want).abs().nan_to_num(0.0).max() if want.numel() else torch.zeros(())
    return torch.maximum(limit.absolute + limit.relative * want.abs(), SLACK * own)


def _off(what: str, got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor) -> str:
    error = (got.detach().double().cpu() - want).abs() / allowed
    error = torch.where(error.isnan(), math.inf, error)
    if not error.numel() or bool((error <= 1.0).all()):
        return ""
    at = (error == error.max()).nonzero()[0].tolist()
    return f"{what} is {float(got[tuple(at)]):.4g} at {at}, not {float(want[tuple(at)]):.4g}"


def _gradients(op: AttentionOp, sample: Sample, dtype: torch.dtype) -> list[torch.Tensor]:
    """Gradients of the sum of the output, through the specification."""
    tensors = {name: x.detach().cpu() for name, x in sample.named().items()}
    tensors = {n: x.to(dtype) if x.is_floating_point() else x for n, x in tensors.items()}
    leaves = [tensors[name].requires_grad_() for name in op.grad]

    def as_(desc: TensorDesc) -> TensorDesc:
        name = desc.dtype if desc.dtype in ("bool", "int32", "int64") else str(dtype).removeprefix("torch.")
        return TensorDesc(desc.shape, name, "cpu", desc.strides)

    cast = op.with_(query=as_(op.query), key=as_(op.key), value=as_(op.value))
    q, k, v = (tensors[name] for name in ("query", "key", "value"))
    with torch.enable_grad():
        out = reference.attention(cast, q, k, v, tensors).out
        return [g.double() for g in torch.autograd.grad(out.sum(), leaves)]
