"""One spelling of the offset.

1. No part of the op has positions -> ``q_offset`` 0 (and a tensor offset is not needed).
2. ``"end"`` with Sq = Skv -> 0.
3. An integer equal to ``Skv - Sq`` and not 0 -> ``"end"``, so that growing keys stay one op per bucket.
"""

from __future__ import annotations

from attn_dispatch.ir.ops import END, AttentionOp
from attn_dispatch.ir.scores import Alibi
from attn_dispatch.ir.tensors import Ref
from attn_dispatch.ir.weights import Linear

__all__ = ["normalise_offset"]


def normalise_offset(op: AttentionOp) -> tuple[AttentionOp, bool]:
    """Rules 1 to 3 of the module."""
    decays = isinstance(op.weight, Linear) and op.weight.decay is not None
    positional = op.mask.positional or decays or any(isinstance(term, Alibi) for term in op.score)
    offset = op.q_offset
    if not positional:
        offset = 0  # rule 1
    elif not isinstance(offset, Ref):
        number = op.Skv - op.Sq if offset == END else offset
        offset = END if number == op.Skv - op.Sq and number != 0 else number  # rules 2 and 3
    return (op, False) if offset == op.q_offset else (op.with_(q_offset=offset), True)
