"""``residue_classes`` and ``same_blocks``: masks under which positions fall into groups that never see each other.

1. ``Stride(l)`` in a conjunction: the positions ``c, c + l, c + 2l, ...`` are a sequence of their own, so that the l
   classes run as a batch of sequences of length ``S / l``; what is left of ``Causal`` and ``Window(a, b)`` there is
   ``Causal`` and ``Window(a // l, b // l)``, which `bands` may cut further (dilated windows).
2. ``SameBlock(l)`` in a conjunction, square and from position 0: the blocks run as a batch of sequences of length l.
3. Lengths that l does not divide are padded at the end. Where every query stands before the pads, ``Causal`` hides
   them; elsewhere, and for masks over keys, each sequence has its own ``Columns``.
4. Queries that do not start at a multiple of l get rows in front of them, whose results are dropped.
5. One query row alone (decode) reads the keys of its class, a slice with step l, and no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from attn_dispatch import reference
from attn_dispatch.backend import Cost, Operands, Raw, Run
from attn_dispatch.capability import Reason
from attn_dispatch.ir.atoms import Causal, Columns, Full, KeyLengths, KeyRange, SameBlock, Stride, Window
from attn_dispatch.ir.masks import And, Mask
from attn_dispatch.ir.ops import END, AttentionOp
from attn_dispatch.ir.pointwise import kept_columns
from attn_dispatch.ir.scores import SoftCap
from attn_dispatch.ir.tensors import Ref, TensorDesc
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.rewrites.base import Rewrite, Rewritten, not_useful

__all__ = ["ResidueClasses", "SameBlocks", "why_not_split"]

_KEPT = "group_columns"


@dataclass(frozen=True)
class _Parts:
    """A conjunction, taken apart: the lattice's step, what moves with the query, and what looks at keys alone."""

    step: int
    moving: tuple[Mask, ...]
    columns: tuple[Mask, ...]


def why_not_split(op: AttentionOp) -> Reason | None:
    """What speaks against any form that regroups rows and keys; None when nothing does."""
    for word, wrong, text in (
        ("traced", op.traced, "the groups depend on the lengths, which are not known here"),
        (op.weight.feature, not isinstance(op.weight, Softmax), "only softmax rows are independent of their order"),
        ("q_offset:tensor", isinstance(op.q_offset, Ref), "q_offset per batch puts each batch on another lattice"),
        ("weights", op.outputs.weights, "weights of all keys are wanted"),
        ("empty", "empty" in op.features, "there is nothing to group"),
    ):
        if wrong:
            return Reason("feature", word, True, False, text=text)
    for term in op.score:
        if not isinstance(term, SoftCap):
            text = f"{term} counts keys from 0, and the groups count their own"
            return Reason("feature", term.feature, True, False, text=text)
    return None


def _take_apart(op: AttentionOp, lattice: type[Mask], moving: tuple[type[Mask], ...]) -> _Parts | Reason:
    parts = op.mask.args if isinstance(op.mask, And) else (op.mask,)
    steps = [part for part in parts if isinstance(part, lattice)]
    if len(steps) != 1:
        return not_useful(f"{op.mask} is not a conjunction with one {lattice.__name__}")
    rest = [part for part in parts if part is not steps[0]]
    columns = tuple(part for part in rest if isinstance(part, (Columns, KeyLengths, KeyRange)))
    moves = tuple(part for part in rest if isinstance(part, moving))
    if len(columns) + len(moves) < len(rest):
        other = next(part for part in rest if part not in columns and part not in moves)
        return Reason("feature", other.feature, text=f"{other} is not the same in every group of {steps[0]}")
    step = steps[0].step if isinstance(steps[0], Stride) else steps[0].size  # type: ignore[attr-defined]
    return _Parts(step, moves, columns)


class ResidueClasses(Rewrite):
    """The residue classes of a stride as a batch."""

    name = "residue_classes"
    order = 16

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        parts = _take_apart(op, Stride, (Causal, Window))
        if isinstance(parts, Reason):
            return parts
        if (reason := why_not_split(op)) is not None:
            return reason
        if op.Sq == 1:
            return _one_row(op, parts)
        if op.Sq < parts.step:
            return not_useful(f"Sq {op.Sq} < stride {parts.step}: most classes have no query")
        return _grouped(op, parts, classes=True)


class SameBlocks(Rewrite):
    """The blocks of chunked attention as a batch."""

    name = "same_blocks"
    order = 14

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        parts = _take_apart(op, SameBlock, (Causal, Window, Stride))
        if isinstance(parts, Reason):
            return parts
        if (reason := why_not_split(op)) is not None:
            return reason
        if op.Sq != op.Skv or op.q_offset != 0:
            return not_useful("only where queries and keys start at position 0 and are equally many")
        if op.Sq < 2 * parts.step:
            return not_useful(f"Sq {op.Sq} < 2 blocks of {parts.step}")
        return _grouped(op, parts, classes=False)


def _grouped(op: AttentionOp, parts: _Parts, classes: bool) -> Rewritten:
    step = parts.step
    offset = op.static_offset() or 0
    front = offset % step if classes else 0
    counts = [-(-(front + op.Sq) // step), -(-op.Skv // step)]  # of rows and keys: what is not the group's number
    rows, keys = counts if classes else (step, step)
    groups = step if classes else counts[1]
    causal = any(isinstance(part, Causal) for part in parts.moving)
    square = op.Sq == op.Skv and offset == 0
    hidden = (causal and (square or op.q_offset == END)) or (square and op.Skv % step == 0)
    with_columns = bool(parts.columns) or not hidden  # decided from what holds for every length of a route
    moving = [_in_class(part, step) if classes else part for part in parts.moving]
    mask = And.of(*moving) if moving else Full()
    inner = op.with_(
        query=op.query.with_shape(op.B * groups, op.Hq, rows, op.D),
        key=op.key.with_shape(op.B * groups, op.Hkv, keys, op.D),
        value=op.value.with_shape(op.B * groups, op.Hkv, keys, op.Dv),
        q_offset=(op.q_offset if op.q_offset == END else offset // step) if classes and mask.positional else 0,
        operands=tuple((n, d) for n, d in op.operands if n not in op.mask.refs()),
        mask=mask,
    )
    if with_columns:
        mask = Columns(Ref(_KEPT)) if isinstance(mask, Full) else mask & Columns(Ref(_KEPT))
        kept = TensorDesc((op.B * groups, keys), "bool", op.device)
        inner = inner.with_(mask=mask, operands=(*inner.operands, (_KEPT, kept)))

    def adapt(run: Run) -> Run:
        return lambda q, k, v, t: _run_grouped(op, parts, classes, with_columns, run, q, k, v, t)

    moved = op.query.itemsize * op.B * (2.0 * op.Hq * op.Sq * op.Dv + op.Hkv * op.Skv * (op.D + op.Dv))
    return Rewritten(inner, adapt, 1.0, Cost(0.0, moved, 6.0))


def _in_class(part: Mask, step: int) -> Mask:
    """What a mask of distances becomes among the positions of one class, which are ``step`` apart."""
    if isinstance(part, Window):
        ends = (None if end is None else end // step for end in (part.left, part.right))
        return Window(*ends)
    return part


def _run_grouped(
    op: AttentionOp,
    parts: _Parts,
    classes: bool,
    with_columns: bool,
    inner: Run,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    t: Operands,
) -> Any:
    b, _, sq, _ = q.shape
    skv, step = k.shape[2], parts.step
    offset = reference.offset_of(op, sq, skv, t)
    assert isinstance(offset, int)
    front = offset % step if classes else 0

    def split(x: torch.Tensor, ahead: int) -> torch.Tensor:
        """``[B, H, S, E]`` -> ``[B * groups, H, rows, E]``."""
        behind = -(x.shape[2] + ahead) % step
        x = F.pad(x, (0, 0, ahead, behind)) if ahead or behind else x
        x = x.unflatten(2, (-1, step))  # [B, H, S / step, step, E]
        x = x.permute(0, 3, 1, 2, 4) if classes else x.transpose(1, 2)
        return x.reshape(-1, *x.shape[2:])

    def join(x: torch.Tensor) -> torch.Tensor:
        """The inverse, without the rows that were put in."""
        x = x.unflatten(0, (b, -1))
        x = (x.movedim(1, 3) if classes else x.transpose(1, 2)).flatten(2, 3)
        return x[:, :, front : front + sq]

    if parts.columns or with_columns:
        kept = kept_columns(And.of(*parts.columns) if parts.columns else Full(), skv, t, q.device)
        # [B, S] -> [B * groups, keys], the pads being excluded
        kept = F.pad(kept.expand(b, skv), (0, -skv % step), value=False).unflatten(1, (-1, step))
        kept = (kept.transpose(1, 2) if classes else kept).flatten(0, 1)
        t = {**t, _KEPT: kept}
    result = inner(split(q, front), split(k, 0), split(v, 0), t)
    if not op.outputs.lse:
        return join(result)
    return Raw(join(result.out), join(result.lse[..., None])[..., 0])


def _one_row(op: AttentionOp, parts: _Parts) -> Rewritten:
    """Rule 5: a row at position p sees keys ``p % step + n * step``."""
    step = parts.step
    offset = op.static_offset() or 0
    keys = max(1, -(-(op.Skv - offset % step) // step))
    mask = And.of(*(_in_class(part, step) for part in parts.moving)) if parts.moving else Full()
    inner = op.with_(
        key=op.key.with_shape(op.B, op.Hkv, keys, op.D),
        value=op.value.with_shape(op.B, op.Hkv, keys, op.Dv),
        q_offset=(op.q_offset if op.q_offset == END else offset // step) if mask.positional else 0,
        operands=tuple((n, d) for n, d in op.operands if n not in op.mask.refs()),
        mask=mask,
    )
    if parts.columns:
        mask = Columns(Ref(_KEPT)) if isinstance(mask, Full) else mask & Columns(Ref(_KEPT))
        kept = TensorDesc((op.B, keys), "bool", op.device)
        inner = inner.with_(mask=mask, operands=(*inner.operands, (_KEPT, kept)))

    def adapt(run: Run) -> Run:
        def outer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
            at = reference.offset_of(op, 1, k.shape[2], t)
            assert isinstance(at, int)
            first = at % step
            if first >= k.shape[2]:  # a class without any key
                raw = reference.attention(op, q, k, v, t)
                return raw if op.outputs.lse else raw.out
            if parts.columns:
                kept = kept_columns(And.of(*parts.columns), k.shape[2], t, q.device)[:, first::step]
                t = {**t, _KEPT: kept.expand(q.shape[0], -1)}
            return run(q, k[:, :, first::step], v[:, :, first::step], t)

        return outer

    return Rewritten(inner, adapt, 1.0, Cost(0.0, 0.0, 2.0))
