"""Whether a candidate drops weights as it is told; the gate and the contract suite ask it alike.

What is dropped is random, so no element of an output can be compared. What can be said:

1. The output is not that without dropout; one seed gives it again, and another seed does not.
2. Where each value is one-hot the output is the dropped weights themselves: each is 0 or w / (1 - p), the share of
   zeros is near p, and where they stand is independent from row to row, head to head and sequence to sequence. Each key
   stands in two columns, which must agree: dropout on the output would drop them apart.
3. The output is linear in the values, so the gradient of the values knows the output, if the backward drops what the
   forward dropped.
4. The mean over draws is the output without dropout, within what the variance of dropout allows.
"""

from __future__ import annotations

import math
from dataclasses import replace
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
    problem = _is_undropped(op, out.detach().double().cpu(), plain) or _seed_problem(op, run, sample, out)
    problem = problem or _weights_problem(op, run, sample) or _backward_problem(op, out, sample)
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


def _seed_problem(op: AttentionOp, run: Run, sample: Sample, out: torch.Tensor) -> str:
    """``out`` was drawn with the seed 6."""
    if op.dropout_p == 1 or not out.any():
        return ""
    with torch.no_grad():
        torch.manual_seed(6)
        same = _out(run, sample)
        torch.manual_seed(9)
        other = _out(run, sample)
    limit = budget(op.dtype, "out")
    if not torch.allclose(same, out.detach(), rtol=limit.relative, atol=limit.absolute):
        return "one seed gives two outputs: draw from torch's default generator"
    pairs = op.B * op.Hq * op.Sq * op.Skv * op.dropout_p * (1 - op.dropout_p)
    if pairs > 50 and torch.equal(same, other):  # else two seeds may well drop the same
        return "two seeds give the same output: dropout_p is ignored, or takes no notice of torch.manual_seed"
    return ""


# How far a single weight may be off, relatively: biases are added to scores in the op's own dtype by some kernels.
_OFF = {"bfloat16": 0.05, "float16": 0.01}
_FEW = 64  # weights that are too few to say anything


def _weights_problem(op: AttentionOp, run: Run, sample: Sample) -> str:
    """Look at the dropped weights themselves: queries of zeros, so that they are about alike, and one-hot values."""
    p = op.dropout_p
    if p == 1 or not isinstance(op.weight, Softmax) or op.Dv < 2 or 0 in (op.B, op.Hq, op.Sq, op.Skv):
        return ""
    seen = min(op.Dv // 2, op.Skv)  # keys that one run shows, each in two columns
    sample = replace(sample, query=torch.zeros_like(sample.query).detach())
    weights = _weights(op, sample)
    wanted = math.ceil(400 / (p * (1 - p)) / max(op.B * op.Hq * op.Sq * seen, 1))
    kept_ratios: list[torch.Tensor] = []
    drops: list[torch.Tensor] = []
    tells: list[torch.Tensor] = []
    for draw in range(max(2, min(32, wanted))):
        start = 0 if draw % 2 == 0 else op.Skv - seen
        value = torch.zeros(op.Skv, op.Dv)
        keys = torch.arange(seen)
        value[start + keys, keys] = value[start + keys, seen + keys] = 1.0
        hot = torch.empty_like(sample.value).detach().copy_(value.expand(sample.value.shape))
        with torch.no_grad():
            out = _out(run, replace(sample, value=hot)).double().cpu()
        weight = weights[..., start : start + seen]
        tell = weight > (1e-4 if op.dtype == "float16" else 1e-7)
        ratio, twin = (
            torch.where(tell, x * (1 - p) / torch.where(tell, weight, 1.0), 1.0)
            for x in (out[..., :seen], out[..., seen : 2 * seen])
        )
        if bool(((ratio - twin).abs() > 0.5).any()):
            return "it drops elements of the output, not weights: two columns of one key are dropped apart"
        dropped = ratio.abs() < 0.25
        off = torch.where(tell & ~dropped, (ratio - 1).abs(), 0.0)
        if float(off.max()) > _OFF.get(op.dtype, 1e-3):
            found = float(ratio.flatten()[off.argmax()]) / (1 - p)
            return f"a weight is neither dropped nor scaled by 1 / (1 - {p:g}): it is {found:.4g} times what it was"
        kept_ratios.append(ratio[tell & ~dropped])
        drops.append(dropped)
        tells.append(tell)
    return _pattern_problem(op, torch.stack(drops), torch.stack(tells), torch.cat(kept_ratios))


def _pattern_problem(op: AttentionOp, dropped: torch.Tensor, tells: torch.Tensor, kept: torch.Tensor) -> str:
    """Which weights were dropped, and how the others grew.

    Args:
        dropped, tells: bool ``[draws, B, Hq, Sq, keys]``; those that do not tell are excluded by a mask, or tiny.
        kept: weights that were not dropped, in units of what they should be ``[n]``.
    """
    p, count = op.dropout_p, int(tells.sum())
    if count < _FEW:
        return ""
    share = float((dropped & tells).sum()) / count
    # GPU kernels compare a byte with p: the share is one of 256
    slack = 5.0 * math.sqrt(p * (1 - p) / count) + 4.0 / count + (0.0 if op.device == "cpu" else 1 / 255)
    if abs(share - p) > slack:
        return f"it drops {share:.4g} of {count} weights, not {p:g}"
    if kept.numel() >= _FEW and abs(float(kept.mean()) - 1) > max(p / 2, 1e-3):
        return f"kept weights are scaled by {float(kept.mean()) / (1 - p):.5g}, not by 1 / (1 - {p:g})"
    for axis, what in ((1, "sequences"), (2, "heads"), (3, "rows"), (4, "keys")):
        size = dropped.shape[axis]
        one, two = (x.narrow(axis, 0, size - 1) for x in (dropped, tells))
        other, too = (x.narrow(axis, 1, size - 1) for x in (dropped, tells))
        both = two & too
        pairs = int(both.sum())
        if pairs * p * (1 - p) < _FEW:
            continue
        product = torch.where(both, (one.double() - p) * (other.double() - p), 0.0).sum() / (pairs * p * (1 - p))
        # of independent pairs the variance is that of a product: rare drops make it skewed, hence the wide bound
        if float(product) > 0.5:
            return f"neighbouring {what} drop the same: the correlation is {float(product):.2f}"
    return ""


def _weights(op: AttentionOp, sample: Sample) -> torch.Tensor:
    """The weights before dropout, in float64."""
    wide = sample.double()
    weighing = as_double(op).with_(outputs=Outputs(weights=True), grad=())
    weights = reference.attention(weighing, wide.query, wide.key, wide.value, wide.operands).weights
    assert weights is not None
    return weights


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
    variance = reference.grouped_matmul(_weights(op, sample) ** 2, sample.double().value ** 2) * (p / (1 - p)) / draws
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
