"""``linear``: linear attention and retention in time and memory that grow linearly with the length, in plain torch.

1. Causal: the keys are cut into chunks. Inside a chunk the weights are written out (``C x C``); what lies before it
   comes as one state ``S [D, Dv]``. Several chunks run as one batch; their states follow from one small product with
   a triangle of decays. The last chunk has its true length.
2. Not causal: ``phi(q) (phi(k)^T v)``. One query with one key (a decode step): the recurrence, state first.
3. Decay appears only as a power ``decay ** (i - j)`` with ``0 <= i - j <= C``. It is never factored into
   ``decay ** i * decay ** -j``, whose second half overflows; powers are right for a decay of 0 and of 1.
4. Keys beyond their length are zeroed after the feature map, so they count in no sum.
5. Documents run one by one; the first takes the state that goes in, the last gives the one that comes out. Segment
   numbers that are not in rising order are no documents: the specification runs them.

Never is anything as large as ``Sq x Skv`` or ``T x D x Dv`` made. Gradients are autograd's.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from attn_dispatch import reference
from attn_dispatch.backend import Backend, Cost, Executable, Operands, Raw, Run
from attn_dispatch.backends.linear_chunks import BATCH_BYTES, Sequence, State, chunk_size, run_sequence, state_by_length
from attn_dispatch.capability import Capability, Limit, Reason
from attn_dispatch.ir.atoms import Causal, Full, KeyLengths, QueryLengths, Segments
from attn_dispatch.ir.masks import And
from attn_dispatch.ir.operands import resolve
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.weights import Linear
from attn_dispatch.state import LinearState, state_dtype

__all__ = ["LinearBackend"]

_FEATURES = frozenset(
    {
        *("weight:Linear", "decay", "state:in", "state:out", "gqa", "dv_differs", "grad", "grad:operands"),
        *("higher_order", "traced", "scattered", "scale<=0", "q_offset:nonzero", "combine:And"),
        *("mask:Full", "mask:Causal", "mask:KeyLengths", "mask:QueryLengths", "mask:Columns", "mask:KeyRange"),
        "mask:Segments",
    }
)


class LinearBackend(Backend):
    """Chunks, states and the recurrence."""

    name = "linear"
    tested = "cpu"
    hints = {"weights": 'backend="eager"', "q_offset:tensor": 'backend="eager"'}  # noqa: RUF012
    capabilities = (
        Capability(
            devices=frozenset({"cpu", "cuda"}),
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            features=_FEATURES,
            limits=tuple(Limit(name, minimum=1) for name in ("B", "Hq", "Sq", "Skv", "D", "Dv")),
            notes="chunks of 64 or 128 keys; linear in the length",
        ),
    )

    def extra_reasons(self, op: AttentionOp) -> list[Reason]:
        parts = op.mask.args if isinstance(op.mask, And) else (op.mask,)
        segments = [part for part in parts if isinstance(part, Segments)]
        is_causal = any(isinstance(part, Causal) for part in parts)
        assert isinstance(op.weight, Linear)
        if op.weight.decay is not None and not is_causal and _first(op) < op.Skv - 1:
            text = "decay without a causal mask, which fades to both sides"
            return [Reason("feature_pair", "decay", "not causal", "causal", 'backend="eager"', text)]
        if not segments:
            return []
        ids = segments[0]
        if len(segments) > 1 or ids.queries != ids.keys or op.Sq != op.Skv or (is_causal and _first(op) != 0):
            text = "segments that are no documents: queries and keys need the same numbers, from position 0"
            return [Reason("feature_pair", "mask:Segments", str(ids), "one tensor for both", 'backend="eager"', text)]
        if op.outputs.state and any(isinstance(part, KeyLengths) for part in parts):
            text = "a state behind padded documents: which one is the last is not said"
            return [Reason("feature_pair", "state:out", "key lengths", "none", 'backend="eager"', text)]
        if op.traced or op.device != "cpu":
            text = "documents whose borders cannot be read here"
            return [Reason("feature_pair", "mask:Segments", "traced" if op.traced else op.device, "cpu", text=text)]
        return []

    def compile(self, op: AttentionOp) -> Executable:
        if op.Sq == op.Skv == 1 and isinstance(op.mask, Full) and _first(op) == 0:
            return Executable(_step(op))  # 1 is a bucket of its own

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
            raw = _run(op, q, k, v, t)
            return raw if op.outputs.state else raw.out

        return Executable(run)

    def estimate(self, op: AttentionOp) -> Cost:
        c, d, dv = min(chunk_size(op.D, op.Dv), op.Sq), op.D, op.Dv
        io = op.query.itemsize * (op.B * op.Hq * op.Sq * (d + dv) + op.B * op.Hkv * op.Skv * (d + dv))
        rows, keys = float(op.B * op.Hq * op.Sq), float(op.B * op.Hq * op.Skv)
        if op.Sq == 1 and op.Skv == 1:
            return Cost(4.0 * rows * d * dv, io + 12.0 * rows * d * dv, 8.0)
        flops = 2.0 * keys * d * dv + 2.0 * rows * d * dv
        if op.mask.positional:
            flops += 2.0 * rows * c * (d + dv)
        batches = max(1.0, 4.0 * op.B * op.Hq * op.Sq * max(c, d, dv) / BATCH_BYTES)
        # in a batch of chunks nearly everything is read from the cache, a few times over
        return Cost(flops, 3.0 * io, 8.0 + 12.0 * batches)


def _first(op: AttentionOp) -> int:
    """Key position of query row 0; far before the keys when it is not a number, so that nothing is assumed."""
    first = op.static_offset()
    return -(1 << 40) if first is None else first


# --- a call ----------------------------------------------------------------------------------------------------------


def _run(op: AttentionOp, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Raw:
    weight = op.weight
    assert isinstance(weight, Linear)
    parts = op.mask.args if isinstance(op.mask, And) else (op.mask,)
    acc = state_dtype(q.dtype)
    b, skv = k.shape[0], k.shape[2]
    decay = None if weight.decay is None else t[weight.decay.name].to(acc)
    if decay is not None and k.shape[1] != q.shape[1]:  # a decay belongs to a query head, and so does its state
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    columns = reference.column_masks(op.mask)
    keep = None if columns is None else columns.dense(1, skv, 0, t, k.device).reshape(-1, 1, skv, 1)
    offset = reference.offset_of(op, q.shape[2], skv, t)
    assert isinstance(offset, int)
    is_causal = any(isinstance(part, Causal) for part in parts)
    in_place = not (op.grad or op.higher_order or op.traced)
    seq = Sequence(weight, op.effective_scale, acc, q, k, v, keep, decay, offset, is_causal, in_place)
    state: State | None = None
    if weight.state is not None:
        state = t[weight.state.name].to(acc), None if weight.state_z is None else t[weight.state_z.name].to(acc)
    segments = next((part for part in parts if isinstance(part, Segments)), None)
    if segments is None:
        out, after = run_sequence(seq, state, op.outputs.state)
    else:
        ids = resolve(segments.keys, t)
        if bool((ids.diff(dim=-1) < 0).any()):  # rule 5
            return reference.attention(op, q, k, v, t)
        out, after = _documents(seq, state, ids, op.outputs.state)
    for part in parts:
        if isinstance(part, QueryLengths):
            rows = torch.arange(q.shape[2], device=q.device)[:, None]
            out = torch.where(rows < resolve(part.lengths, t, q.device).view(-1, 1, 1, 1), out, 0.0)
    if not op.outputs.state:
        return Raw(out)
    count = reference.key_count(op, b, skv, t, k.device)
    if decay is not None and any(isinstance(part, KeyLengths) for part in parts):
        after = state_by_length(seq, state, count)
    elif after is None:
        after = seq.empty_state()
    s, z = after
    if weight.state is not None and skv == 0:
        s, z = s.clone(), None if z is None else z.clone()
    length = count if weight.state_length is None else count + t[weight.state_length.name]
    return Raw(out, state=LinearState(s, z, length))


def _step(op: AttentionOp) -> Run:
    """One token: write its key and value into the state, read it with the query. Nothing else, it runs per token."""
    weight, scale = op.weight, op.effective_scale
    assert isinstance(weight, Linear)
    eps, groups, acc = weight.normalizer_eps, op.groups, state_dtype(getattr(torch, op.dtype))
    refs = (weight.state, weight.state_z, weight.state_length, weight.decay)
    name_s, name_z, name_n, name_d = (None if ref is None else ref.name for ref in refs)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        dtype = q.dtype
        q, k, v = q.to(acc), k.to(acc), v.to(acc)
        if weight.feature_map != "identity":
            q, k = (reference.apply_feature_map(weight.feature_map, x) for x in (q, k))
        if name_d is not None and groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        column = k.transpose(-1, -2)
        z = column if eps is not None else None
        if name_s is None:
            s = column * v
        else:
            s, old_z = t[name_s], None if name_z is None else t[name_z][..., None]
            if name_d is not None:
                faded = t[name_d].to(acc).view(-1, 1, 1)
                s, old_z = s * faded, None if old_z is None else old_z * faded
            s = torch.addcmul(s, column, v)
            z = z if z is None or old_z is None else old_z + z
        q = q * scale
        out = reference.grouped_matmul(q, s)
        if z is not None and eps is not None:
            total = reference.grouped_matmul(q, z) + eps
            out = out / (torch.where(total == 0, 1.0, total) if eps == 0 else total)
        out = out.to(dtype)
        if not op.outputs.state:
            return out
        b = q.shape[0]
        if name_n is None:
            length = torch.ones(b, dtype=torch.int64, device=q.device)
        else:
            length = (t[name_n] + 1).to(torch.int64).expand(b)
        z = None if z is None else z[..., 0]
        z = z.clone() if z is not None and name_z is None else z  # the key itself, which is the caller's
        return Raw(out, state=LinearState(s, z, length))

    return run


def _documents(
    seq: Sequence, state: State | None, ids: torch.Tensor, wants_state: bool
) -> tuple[torch.Tensor, State | None]:
    """Documents one by one; with numbers per batch, sequence by sequence."""
    b = seq.q.shape[0]
    if ids.ndim == 2 and ids.shape[0] > 1:
        outs, states = [], []
        for i in range(b):
            mine = None if state is None else _pick(state, i)
            out, after = _documents(_cut(seq, slice(None), slice(i, i + 1)), mine, ids[i], wants_state)
            outs.append(out)
            states.append(after)
        return torch.cat(outs), _stack(states) if wants_state else None
    borders = (ids.reshape(-1).diff() != 0).nonzero()[:, 0] + 1
    starts = [0, *borders.tolist(), seq.k.shape[2]]
    outs, after = [], state
    for n, (start, stop) in enumerate(pairwise(starts)):
        is_last = stop == starts[-1]
        out, after = run_sequence(_cut(seq, slice(start, stop)), state if n == 0 else None, wants_state and is_last)
        outs.append(out)
    return torch.cat(outs, 2), after


def _cut(seq: Sequence, at: slice, batch: slice = slice(None)) -> Sequence:
    """A stretch of a sequence, or one sequence of a batch."""
    q, k, v = (x[batch, :, at] for x in (seq.q, seq.k, seq.v))
    keep = seq.keep
    if keep is not None:
        keep = keep[batch if keep.shape[0] > 1 else slice(None), :, at]
    return replace(seq, q=q, k=k, v=v, keep=keep)


def _pick(state: State, i: int) -> State:
    return state[0][i : i + 1], None if state[1] is None else state[1][i : i + 1]


def _stack(states: list[State | None]) -> State:
    known = [state for state in states if state is not None]
    sums = [z for _, z in known if z is not None]
    return torch.cat([s for s, _ in known]), torch.cat(sums) if sums else None
