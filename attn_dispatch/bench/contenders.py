"""Who competes on an op: our call, each of our candidates, and what a person would write with torch's SDPA.

A contender is a callable that is ready to be timed. What it returns may need putting together before it is an output
``[B, Hq, Sq, Dv]``; whatever a user would have to do to get the tensor is inside the callable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from attn_dispatch import dispatch
from attn_dispatch.backend import Raw
from attn_dispatch.bench.calls import call_of, written_out
from attn_dispatch.ir.ops import AttentionOp, Outputs
from attn_dispatch.registry import Registry
from attn_dispatch.selection.candidates import build
from attn_dispatch.selection.decide import ranked
from attn_dispatch.selection.gate import as_used
from attn_dispatch.selection.samples import Sample

__all__ = ["Contender", "NotApplicable", "candidates", "graded", "ours"]

Forward = Callable[[], torch.Tensor]


class NotApplicable(Exception):  # noqa: N818 - not an error: a contender does not do this, and says why
    """A contender that does not take part in this op; the text is the reason."""


@dataclass(frozen=True)
class Contender:
    """Who runs an op.

    Args:
        name: ``"ours"``, ``"sdpa"``, a candidate ``"bands > sdpa_flash"``.
        kind: ``"ours"``, ``"candidate"``, ``"torch"`` (what a person writes) or ``"peer"`` (another library).
        make: prepares everything that is not timed and returns the forward.
        differentiable: whether it can be timed with a backward pass.
    """

    name: str
    kind: str
    make: Callable[[], Forward]
    differentiable: bool = True


def graded(forward: Forward, op: AttentionOp, sample: Sample) -> Callable[[], tuple[torch.Tensor, ...]]:
    """The forward, its result as the model takes it, and for a training op the backward: ``(out, *gradients)``."""
    if not op.grad:
        return (lambda: (as_used(op, forward()),)) if op.query.strides == "bshd" else lambda: (forward(),)
    leaves = [sample.named()[name] for name in op.grad]

    def step() -> tuple[torch.Tensor, ...]:
        out = as_used(op, forward())
        return (out, *torch.autograd.grad(out, leaves, torch.ones_like(out)))

    return step


def ours(op: AttentionOp, sample: Sample) -> tuple[Contender, str, str]:
    """`dispatch.attention` as a user calls it, with the candidate that it picks and where the choice comes from."""
    call = call_of(op, sample)
    report = dispatch.explain(*call.args, **call.kwargs)

    forward = written_out(call)

    def in_bhsd() -> torch.Tensor:
        result = forward()
        out = result if isinstance(result, torch.Tensor) else result[0]
        return out.transpose(1, 2) if op.layout == "bshd" else out

    is_plain = op.layout == "bhsd" and op.outputs == Outputs()
    made = Contender("ours", "ours", lambda: forward if is_plain else in_bhsd)
    return made, str(report.chosen), str(report.source)


def candidates(
    op: AttentionOp, registry: Registry, chosen: str = "", most: int = 6
) -> Iterator[tuple[str, Callable[[Sample], Forward]]]:
    """Our candidates worth timing: the best by estimate, each backend's best and plain form, and the choice.

    Args:
        chosen: the name of the choice. most: how many of the best by estimate.

    Yields:
        Names, and what makes a forward of a sample.
    """
    legal, _ = ranked(op, registry)
    seen: set[str] = set()
    for place, (candidate, _) in enumerate(legal):
        backend = candidate.backend.name
        if candidate.backend.compile_s > 0 and candidate.name != chosen:
            continue  # seconds for each op; compiled flex_attention is among the peers
        if place < most or backend not in seen or not candidate.chain.steps or candidate.name == chosen:
            yield candidate.name, _maker(candidate, op)
        seen.add(backend)


def _maker(candidate: Any, op: AttentionOp) -> Callable[[Sample], Forward]:
    def make(sample: Sample) -> Forward:
        run = build(candidate, op).run

        def forward() -> torch.Tensor:
            result = run(sample.query, sample.key, sample.value, sample.operands)
            return result.out if isinstance(result, Raw) else result

        return forward

    return make
