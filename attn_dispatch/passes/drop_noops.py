"""Drop what changes nothing.

1. ``SoftCap(0)`` and ``SoftCap(inf)`` -> nothing.
2. A named operand that no part of the op refers to -> not described, so it is no part of the key.
"""

from __future__ import annotations

import math

from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias, SoftCap
from attn_dispatch.ir.tensors import Ref

__all__ = ["drop_noops", "used_names"]


def used_names(op: AttentionOp) -> set[str]:
    """Names of all operands that the op refers to."""
    names = set(op.mask.refs())
    for term in op.score:
        names |= {term.bias.name} if isinstance(term, Bias) else set()
        names |= {term.slopes.name} if isinstance(term, Alibi) else set()
    refs: list[object] = [op.q_offset, *op.weight.refs()]
    return names | {ref.name for ref in refs if isinstance(ref, Ref)}


def drop_noops(op: AttentionOp) -> tuple[AttentionOp, bool]:
    """Rules 1 and 2 of the module."""
    score = tuple(t for t in op.score if not (isinstance(t, SoftCap) and (t.cap == 0 or math.isinf(t.cap))))
    used = used_names(op)
    operands = tuple((name, desc) for name, desc in op.operands if name in used)
    grad = tuple(n for n in op.grad if n in used or n in ("query", "key", "value"))
    if (score, operands, grad) == (op.score, op.operands, op.grad):
        return op, False
    return op.with_(score=score, operands=operands, grad=grad), True
