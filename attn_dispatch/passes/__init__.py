"""Passes: ``op -> (op, changed)``, pure, always worth doing. The pipeline is the one list below.

Order, and why: the scale first, since everything after may compare it; no-ops go before the mask, so that a dropped
term cannot keep a mask from being simple; the offset last, since it vanishes when the simplified mask has no positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attn_dispatch.ir.ops import AttentionOp, verify
from attn_dispatch.passes.default_scale import default_scale
from attn_dispatch.passes.drop_noops import drop_noops
from attn_dispatch.passes.normalise_offset import normalise_offset
from attn_dispatch.passes.simplify_mask import simplify_mask

__all__ = ["PIPELINE", "Step", "canonicalise"]

Pass = Callable[[AttentionOp], tuple[AttentionOp, bool]]

PIPELINE: tuple[Pass, ...] = (default_scale, drop_noops, simplify_mask, normalise_offset)


@dataclass(frozen=True)
class Step:
    """One pass that changed something: its name, and the op after it."""

    name: str
    after: AttentionOp


def canonicalise(op: AttentionOp) -> tuple[AttentionOp, tuple[Step, ...]]:
    """Run the pipeline until nothing changes.

    Returns:
        The op, and a step for each pass that changed it, for `explain`.

    Raises:
        ValueError: a pass made an op that is not valid; the message names the passes so far.
    """
    trace: list[Step] = []
    changed = True
    while changed:
        changed = False
        for step in PIPELINE:
            op, did = step(op)
            if did:
                changed = True
                trace.append(Step(step.__name__, op))
                try:
                    verify(op)
                except ValueError as error:
                    names = ", ".join(s.name for s in trace)
                    raise ValueError(f"after the passes {names}: {error}") from None
    return op, tuple(trace)
