"""Whether a candidate drops weights as it is told: not at all alike, on average right, and backward as forward.

What is dropped is random, so no element can be compared. Three things hold of every draw or of many of them: the
output is not that without dropout; its mean over draws is, within what the variance of dropout allows; and the output
is linear in the values, so the gradient of the values knows the output, if the backward drops what the forward dropped.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from attn_dispatch import reference
from attn_dispatch.backend import Raw, Run
from attn_dispatch.budgets import budget
from attn_dispatch.ir.ops import AttentionOp, Outputs
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.selection.samples import Sample, as_double

__all__ = ["dropout_problem"]

_DRAWS = (16, 256)
_PAIRS = 1 << 24  # of all draws together; the longer cuts get fewer draws, and have more rows that tell


def dropout_problem(op: AttentionOp, run: Run, sample: Sample, plain: torch.Tensor) -> tuple[str, float]:
    """What is wrong with how an executable drops weights; it seeds the random state, so that two runs say the same.

    Args:
        op: with ``dropout_p`` > 0. run: what to ask. sample: tensors that fit the op.
        plain: the output in float64 without dropout ``[B, Hq, Sq, Dv]``.

    Returns:
        The problem, or "", and how far off the mean is: its squared error in units of its variance, over the limit.
    """
    torch.manual_seed(6)
    out = _out(run, sample)
    problem = _is_undropped(op, out.detach().double().cpu(), plain) or _backward_problem(op, out, sample)
    return (problem, 0.0) if problem or op.dropout_p == 1 else _mean_problem(op, run, sample, plain)


def _out(run: Run, sample: Sample) -> torch.Tensor:
    result: Any = run(sample.query, sample.key, sample.value, sample.operands)
    return result.out if isinstance(result, Raw) else result


def _is_undropped(op: AttentionOp, out: torch.Tensor, plain: torch.Tensor) -> str:
    """A weight is either dropped or grows by 1 / (1 - p), so every output that is not 0 differs from the plain one."""
    p = op.dropout_p
    if not reference.finite(out):
        return f"the output with dropout_p {p:g} is not finite"
    if p == 1:
        return "" if not out.any() else "the output with dropout_p 1 is not 0"
    limit = budget(op.dtype, "out")
    allowed = limit.absolute + limit.relative * plain.abs()
    tells = plain.abs() * p / (1 - p) > 4 * allowed  # else rounding alone hides the difference
    if tells.any() and bool(((out - plain).abs() <= allowed)[tells].all()):
        return f"dropout_p {p:g} is ignored: the output is that without dropout"
    return ""


def _backward_problem(op: AttentionOp, out: torch.Tensor, sample: Sample) -> str:
    """``sum(out * up)`` is ``sum(value * gradient of value)``, for whatever was dropped."""
    if "value" not in op.grad or not isinstance(op.weight, Softmax) or not out.requires_grad:
        return "" if out.requires_grad or not op.grad else "the output with dropout has no gradient"
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out)
    (gradient,) = torch.autograd.grad(out, [sample.value], up)
    forward, backward = out.detach().double() * up.double(), sample.value.detach().double() * gradient.double()
    off = float((forward.sum() - backward.sum()).abs()) / max(float(forward.norm()), 1e-30)
    limit = 0.02 if op.dtype in ("bfloat16", "float16") else 1e-3
    return "" if off <= limit else f"the backward drops other weights than the forward: off by {off:.2g} of its norm"


def _mean_problem(op: AttentionOp, run: Run, sample: Sample, plain: torch.Tensor) -> tuple[str, float]:
    """The mean over draws against what it should be, in units of its own variance, over all elements."""
    p = op.dropout_p
    least, most = _DRAWS
    most = min(most, _PAIRS // max(op.B * op.Hq * op.Sq * op.Skv, 1))
    draws = max(least, min(most, math.ceil(16 / (p * (1 - p)))))
    wide = sample.double()
    weighing = as_double(op).with_(outputs=Outputs(weights=True), grad=())
    weights = reference.attention(weighing, wide.query, wide.key, wide.value, wide.operands).weights
    assert weights is not None
    variance = reference.grouped_matmul(weights**2, wide.value**2) * (p / (1 - p)) / draws
    with torch.no_grad():
        total = sum((_out(run, sample).double().cpu() for _ in range(draws)), torch.zeros_like(plain))
    limit = budget(op.dtype, "out")
    rounding = limit.absolute + limit.relative * plain.abs()
    squares = (total / draws - plain) ** 2 / (variance + rounding**2)
    rows = op.B * op.Hq * op.Sq
    # the mean square is 1 when all is well; rows are independent, the elements of one row are not
    allowed = 2.0 + 8.0 / math.sqrt(rows)
    off = float(squares.mean()) / allowed
    if off <= 1.0:
        return "", off
    said = (
        f"the mean of {draws} draws with dropout_p {p:g} is {off:.2g} times as far from the plain output as chance is"
    )
    return said, off
