"""``gather``: attend listed keys by fetching their rows, instead of masking all the others (DSA).

1. For a mask with ``Selected(indices)`` in a conjunction: the selected key and value rows are copied out once per kv
   head, and each query row becomes a batch of its own over its ``K`` keys, for any backend.
2. Query rows run in chunks whose rows fit into the cache; one decode step is one chunk.
3. -1, repeats of a key (set semantics), and what the rest of the mask excludes (causal, lengths, documents ...) are
   masked by a small ``[rows, K]`` mask; nothing of the size Sq x Skv is made, unless the rest of the mask lists pairs
   itself (``Dense``, more lists), which are looked up chunk by chunk.
4. Gradients of query, key and value go through the copies; indices have none.
5. Useless where the lists are not much shorter than the keys; a selection per head shares nothing: left to masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from attn_dispatch import reference
from attn_dispatch.backend import Cost, Operands, Raw, Run
from attn_dispatch.capability import Reason
from attn_dispatch.ir import atoms
from attn_dispatch.ir.listed import first_of_each
from attn_dispatch.ir.masks import And, Grid, Mask
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.pointwise import allowed_at, is_pointwise
from attn_dispatch.ir.scores import SoftCap
from attn_dispatch.ir.tensors import Ref, TensorDesc
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.passes.drop_noops import used_names
from attn_dispatch.rewrites.base import Rewrite, Rewritten, not_useful

__all__ = ["Gather"]

_KEEP = "gathered_keep"
_CHUNK_BYTES = 4 << 20  # of gathered rows: measured best on 2 cores, twice as fast as 32 MiB, which misses the cache


@dataclass(frozen=True)
class _Lists:
    """What is left of the mask beside the lists: parts to be asked about listed keys, and parts to be looked up."""

    name: str
    pointwise: Mask | None
    looked_up: Mask | None


class Gather(Rewrite):
    """Selected keys, fetched."""

    name = "gather"
    order = 22

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        lists = _split(op)
        if lists is None:
            return not_useful(f"mask {op.mask} has no lists of selected keys")
        for word, wrong in {
            "traced": op.traced,
            "weights": op.outputs.weights,
            op.weight.feature: not isinstance(op.weight, Softmax),
            **{term.feature: not isinstance(term, SoftCap) for term in op.score},
        }.items():
            if wrong:
                return Reason("feature", word, text=f"not with {word}: it speaks of all keys, in their order")
        shape = op.operand(lists.name).shape
        if len(shape) == 4 and shape[1] != 1:
            return not_useful(f"the {shape[1]} heads select different keys")
        if 0 in (op.B, op.Sq, op.Skv, op.Hkv, op.D, op.Dv, shape[-1]):
            return Reason("feature", "empty", text="nothing to gather from a size of 0")
        if 2 * shape[-1] > op.Skv:
            return not_useful(f"lists of {shape[-1]} keys are not much shorter than Skv {op.Skv}")
        return _gathered(op, lists, shape[-1])


def _split(op: AttentionOp) -> _Lists | None:
    parts = list(op.mask.args) if isinstance(op.mask, And) else [op.mask]
    listed = [p for p in parts if isinstance(p, atoms.Selected) and isinstance(p.indices, Ref)]
    if not listed:
        return None
    first = listed[0]
    rest = [p for p in parts if p is not first]
    near = [p for p in rest if is_pointwise(p)]
    far = [p for p in rest if p not in near]
    assert isinstance(first.indices, Ref)
    return _Lists(first.indices.name, And.of(*near) if near else None, And.of(*far) if far else None)


def _gathered(op: AttentionOp, lists: _Lists, count: int) -> Rewritten:
    rows = _chunk_rows(op, count)
    n = op.B * rows
    sinks = [(name, desc) for name, desc in op.operands if name in used_names(op.with_(mask=atoms.Full()))]
    per_head = any(_may_have_heads(op, part) for part in (lists.pointwise, lists.looked_up) if part is not None)
    keep = TensorDesc((n, op.Hq, 1, count) if per_head else (n, count), "bool", op.device)
    inner = op.with_(
        query=replace(op.query, shape=(n, op.Hq, 1, op.D), strides="rows"),
        key=replace(op.key, shape=(n, op.Hkv, count, op.D), strides="rows"),
        value=replace(op.value, shape=(n, op.Hkv, count, op.Dv), strides="rows"),
        mask=atoms.Dense(Ref(_KEEP)) if per_head else atoms.Columns(Ref(_KEEP)),
        q_offset=0,
        operands=(*sinks, (_KEEP, keep)),
    )
    chunks = -(-op.Sq // rows)

    def adapt(run: Run) -> Run:
        return lambda q, k, v, t: _run(op, lists, rows, per_head, run, q, k, v, t)

    moved = 2.0 * op.key.itemsize * op.B * op.Sq * op.Hkv * count * (op.D + op.Dv)
    small = 40.0 * op.B * op.Sq * count  # the lists: bounds, repeats, row numbers
    looked_up = 2.0 * op.B * op.Sq * op.Skv if lists.looked_up is not None else 0.0
    last = (op.Sq - (chunks - 1) * rows) / rows  # the last chunk is as large as what is left
    extra = Cost(0.0, moved + small + looked_up, 12.0 * chunks)
    # keys that only a mask per head excludes are handed on, under a mask that promises nothing about NaN
    return Rewritten(inner, adapt, chunks - 1 + last, extra, cuts_excluded=not per_head)


def _chunk_rows(op: AttentionOp, count: int) -> int:
    row = op.B * op.Hkv * count * (op.D + op.Dv) * op.key.itemsize
    return max(1, min(op.Sq, _CHUNK_BYTES // max(row, 1)))


def _may_have_heads(op: AttentionOp, mask: Mask) -> bool:
    """Whether a tensor of the mask has a size per query head."""
    shapes = [op.operand(name).shape for name in mask.refs()]
    tables = [a for a in mask.atoms() if isinstance(a, atoms.BlockTable)]
    return bool(tables) or any(len(shape) >= 3 and shape[-3] != 1 for shape in shapes)


def _run(
    op: AttentionOp,
    lists: _Lists,
    rows: int,
    per_head: bool,
    inner: Run,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    t: Operands,
) -> Any:
    b, hq, sq, d = q.shape
    indices = t[lists.name]
    indices = (indices[:, 0] if indices.ndim == 4 else indices).long().expand(b, sq, -1)
    differentiable = bool(op.grad) or op.higher_order
    keys, values = (_Rows(x, differentiable) for x in (k, v))
    rest = {name: x for name, x in t.items() if name not in op.mask.refs()}
    sizes = [rows * indices.shape[-1] * table.row_bytes for table in (keys, values)]
    split = -(-sizes[0] // 64) * 64
    outs, sums = [], []
    with nullcontext() if differentiable or q.device.type != "cpu" else _space(split + sizes[1]) as space:
        for start in range(0, sq, rows):
            stop = min(sq, start + rows)
            listed = indices[:, start:stop]
            n = b * (stop - start)
            rest[_KEEP] = _as_batch(_kept(op, lists, (start, stop), listed, q, k, t), n, hq, per_head)
            listed = listed.clamp(min=0)
            queries = q[:, :, start:stop].transpose(1, 2).reshape(n, hq, 1, d)
            spaces = (None, None) if space is None else (space[:split], space[split:])
            raw = inner(queries, keys.fetch(listed, spaces[0]), values.fetch(listed, spaces[1]), rest)
            out, lse = (raw.out, raw.lse) if op.outputs.lse else (raw, None)
            outs.append(out.reshape(b, stop - start, hq, v.shape[3]))
            if lse is not None:
                sums.append(lse.reshape(b, stop - start, hq))
    out = (outs[0] if len(outs) == 1 else torch.cat(outs, 1)).transpose(1, 2)
    return Raw(out, torch.cat(sums, 1).transpose(1, 2)) if op.outputs.lse else out


def _as_batch(keep: torch.Tensor, n: int, hq: int, per_head: bool) -> torch.Tensor:
    """``[B, 1|Hq, rows, K]`` as the inner op's mask: ``[B * rows, K]``, or ``[B * rows, Hq, 1, K]`` per head."""
    if not per_head:
        return keep[:, 0].reshape(n, keep.shape[-1])
    return keep.expand(-1, hq, -1, -1).transpose(1, 2).reshape(n, hq, 1, keep.shape[-1])


class _Rows:
    """Fetches key or value rows ``[B, H, S, D]`` by their lists, whatever the layout, without copying the rest.

    All rows are one table ``[storage rows, D]``, so that fetching is one `index_select`, a copy of whole rows: five
    times faster than indexing the dimension in place. With gradients the table is a reshape, which autograd knows.
    """

    def __init__(self, x: torch.Tensor, differentiable: bool) -> None:
        b, h, s, d = x.shape
        strides = x.stride()
        if not differentiable and strides[3] == 1 and all(step % d == 0 for step in strides[:3]):
            steps = [step // d for step in strides[:3]]
            last = sum(step * (size - 1) for step, size in zip(steps, (b, h, s), strict=True))
            self._table = x.as_strided((last + 1, d), (d, 1))
        else:
            steps = [h * s, s, 1]
            self._table = x.reshape(b * h * s, d)
        self._step = steps[2]
        heads = torch.arange(h, device=x.device).view(1, 1, h, 1) * steps[1]
        self._start = heads + torch.arange(b, device=x.device).view(b, 1, 1, 1) * steps[0]
        self._h, self._d = h, d
        self.row_bytes = b * h * d * x.element_size()

    def fetch(self, listed: torch.Tensor, space: torch.Tensor | None) -> torch.Tensor:
        """Rows ``[B * rows, H, K, D]`` of ``listed [B, rows, K]``, in ``space`` (bytes) where there is some."""
        b, rows, count = listed.shape
        flat = (listed[:, :, None] * self._step + self._start).flatten()
        out = None if space is None else space[: rows * count * self.row_bytes].view(self._table.dtype)
        found = torch.index_select(self._table, 0, flat, out=out if out is None else out.view(-1, self._d))
        return found.view(b * rows, self._h, count, self._d)


# Memory for fetched rows, kept between calls: what is allocated and freed at every call goes back to the system each
# time, and its page faults cost three times as much as the copy (1.7 ms instead of 0.6 ms for a decode step of 8 kv
# heads with 256 keys). Who takes a space is its only user until it is put back. At most 64 MiB stay: `_MOST` spaces
# of `_LARGEST` bytes.
_spaces: list[torch.Tensor] = []
_LARGEST, _MOST = 4 * _CHUNK_BYTES, 4


@contextmanager
def _space(size: int) -> Iterator[torch.Tensor]:
    try:
        space = _spaces.pop()
    except IndexError:
        space = None
    if space is None or space.numel() < size:
        with torch.inference_mode(False):  # a tensor born in inference mode could not be written outside it
            space = torch.empty(size, dtype=torch.uint8)
    try:
        yield space
    finally:
        if space.numel() <= _LARGEST and len(_spaces) < _MOST:
            _spaces.append(space)


def _kept(
    op: AttentionOp,
    lists: _Lists,
    rows: tuple[int, int],
    listed: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    t: Operands,
) -> torch.Tensor:
    """Which listed keys a query attends, ``[B, 1|Hq, rows, K]``: not -1, not listed before, in the rest of the mask."""
    sq, skv = q.shape[2], k.shape[2]
    keep = first_of_each(listed)[:, None]
    if lists.pointwise is not None:
        grid = Grid.make(sq, skv, reference.offset_of(op, sq, skv, t), t, q.device, rows)
        at, queries = grid.rows[None, None], grid.queries[(None,) * (4 - grid.queries.ndim)]
        keep = keep & allowed_at(lists.pointwise, replace(grid, rows=at, queries=queries, keys=listed[:, None]))
    if lists.looked_up is not None:
        allowed = lists.looked_up.dense(sq, skv, reference.offset_of(op, sq, skv, t), t, q.device, rows=rows)
        allowed = allowed[(None,) * (4 - allowed.ndim)].expand(listed.shape[0], -1, -1, -1)
        at = listed.clamp(min=0)[:, None].expand(-1, allowed.shape[1], -1, -1)
        keep = keep & allowed.gather(-1, at)
    return keep
