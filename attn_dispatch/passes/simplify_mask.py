"""Simplify the mask for the lengths at hand. Every rule keeps exactly the same set of pairs.

1. ``Full & m`` -> ``m``; ``Full | m`` -> ``Full``.
2. ``~~m`` -> ``m``; ``~Full & m`` -> ``~Full``; ``~Full | m`` -> ``m``.
3. ``Causal`` -> ``Full`` when query row 0 already stands at or behind the last key (decode).
4. A side of ``Window`` that reaches beyond every key -> unbounded; both sides unbounded -> ``Full``.
5. ``Window(l, 0)`` -> ``Causal & Window(l, None)``; ``Window(None, r)`` with r = 0 -> ``Causal``: one spelling each.
6. ``Causal & Window(l, r)`` -> ``Causal & Window(l, None)``: the causal side is the tighter one.
7. ``KeyRange(0, n)`` with ``n >= Skv`` -> ``Full``.
8. ``SameBlock(n)`` -> ``Full`` when all queries and keys stand in block 0.
9. ``Stride(1)`` -> ``Full``.
"""

from __future__ import annotations

from attn_dispatch.ir.atoms import Causal, Full, KeyRange, SameBlock, Stride, Window
from attn_dispatch.ir.masks import And, Mask, Not, Or
from attn_dispatch.ir.ops import AttentionOp

__all__ = ["simplify_mask"]

_NOTHING = Not(Full())


def simplify_mask(op: AttentionOp) -> tuple[AttentionOp, bool]:
    """Rules 1 to 9 of the module."""
    mask = _simplify(op.mask, op)
    return (op, False) if mask == op.mask else (op.with_(mask=mask), True)


def _simplify(mask: Mask, op: AttentionOp) -> Mask:
    if isinstance(mask, (And, Or)):
        parts = [_simplify(part, op) for part in mask.args]
        return _simplify_and(parts) if isinstance(mask, And) else _simplify_or(parts)
    if isinstance(mask, Not):
        return ~_simplify(mask.arg, op)  # rule 2: inverting twice gives the argument
    return _simplify_atom(mask, op)


def _simplify_and(parts: list[Mask]) -> Mask:
    if _NOTHING in parts:
        return _NOTHING  # rule 2
    parts = [part for part in parts if not isinstance(part, Full)] or [Full()]  # rule 1
    if any(isinstance(part, Causal) for part in parts):  # rule 6
        parts = [Window(p.left, None) if isinstance(p, Window) and p.left is not None else p for p in parts]
        parts = [p for p in parts if not (isinstance(p, Window) and p.left is None)]
    return And.of(*parts)


def _simplify_or(parts: list[Mask]) -> Mask:
    if any(isinstance(part, Full) for part in parts):
        return Full()  # rule 1
    return Or.of(*([part for part in parts if part != _NOTHING] or [_NOTHING]))  # rule 2


def _simplify_atom(mask: Mask, op: AttentionOp) -> Mask:
    first = op.static_offset()  # position of the first query, None when it differs per batch
    last = None if first is None else first + op.Sq - 1
    if isinstance(mask, Causal) and first is not None and first >= op.Skv - 1:
        return Full()  # rule 3
    if isinstance(mask, Window) and first is not None and last is not None:
        left = None if mask.left is None or last - mask.left <= 0 else mask.left  # rule 4
        right = None if mask.right is None or first + mask.right >= op.Skv - 1 else mask.right
        if left is None and right is None:
            return Full()
        mask = Window(left, right)
    if isinstance(mask, Window) and mask.right == 0:  # rule 5
        return Causal() if mask.left is None else And.of(Causal(), Window(mask.left, None))
    if isinstance(mask, KeyRange) and mask.period is None and mask.start == 0 and mask.stop >= op.Skv:
        return Full()  # rule 7
    if isinstance(mask, SameBlock) and first is not None and last is not None:
        in_first = first >= 0 and last < mask.size and op.Skv <= mask.size
        return Full() if in_first else mask  # rule 8
    if isinstance(mask, Stride) and mask.step == 1:
        return Full()  # rule 9
    return mask
