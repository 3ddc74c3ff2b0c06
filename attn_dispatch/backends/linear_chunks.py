"""The arithmetic of the `linear` backend: one sequence, from a state to its outputs and the next state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attn_dispatch import reference
from attn_dispatch.ir.weights import Linear

__all__ = ["BATCH_BYTES", "Sequence", "State", "chunk_size", "run_sequence", "state_by_length"]

BATCH_BYTES = 1 << 20  # scores of the chunks that run as one batch: they should stay in the cache
_ABSORB_ROWS = 2048  # keys that become a state at once


def chunk_size(d: int, dv: int) -> int:
    """Rows of a chunk: its scores cost ``C (D + Dv)`` per row, its state ``D Dv / C``; 64 measured best up to D 128.

    Example:
        >>> chunk_size(64, 64), chunk_size(256, 256)
        (64, 128)
    """
    return 128 if min(d, dv) > 128 else 64


State = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class Sequence:
    """One run over keys that belong together, and all that is the same for each of its chunks.

    Args:
        q: ``[B, Hq, Sq, D]``, k: ``[B, H, Skv, D]``, v: ``[B, H, Skv, Dv]``; H is Hkv, or Hq with a decay.
        keep: bool ``[B|1, 1, Skv, 1]``, keys that count; None for all.
        decay: ``[H]`` in the accumulating dtype. offset: key position of query row 0.
        in_place: no graph is kept, so what was just made may be overwritten.
    """

    weight: Linear
    scale: float
    acc: torch.dtype
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keep: torch.Tensor | None
    decay: torch.Tensor | None
    offset: int
    is_causal: bool
    in_place: bool

    @property
    def normalised(self) -> bool:
        return self.weight.normalizer_eps is not None

    def queries(self, start: int, stop: int) -> torch.Tensor:
        """Rows ``start .. stop`` with their feature map."""
        return self._map(self.q[:, :, start:stop].to(self.acc))

    def keys(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``start .. stop``, zero where they do not count; beyond the last key all are zero."""
        k, v = self._map(self.k[:, :, start:stop].to(self.acc)), self.v[:, :, start:stop].to(self.acc)
        if self.keep is not None:
            keep = self.keep[:, :, start:stop]
            k, v = torch.where(keep, k, 0.0), torch.where(keep, v, 0.0)
        return k, v

    def _map(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.feature_map == "elu1" and self.in_place:
            return F.elu(x).add_(1)
        return reference.apply_feature_map(self.weight.feature_map, x)

    def powers(self, count: int) -> torch.Tensor | None:
        """``decay ** 0 .. decay ** (count - 1)``, ``[H, count]``."""
        if self.decay is None:
            return None
        return self.decay[:, None] ** torch.arange(count, device=self.decay.device)

    def empty_state(self) -> State:
        b, h, _, d = self.k.shape
        z = self.q.new_zeros((b, h, d), dtype=self.acc) if self.normalised else None
        return self.q.new_zeros((b, h, d, self.v.shape[3]), dtype=self.acc), z

    def divide(self, out: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        eps = self.weight.normalizer_eps
        if eps is None or total is None:
            return out
        total = total + eps
        return out / (torch.where(total == 0, 1.0, total) if eps == 0 else total)  # an empty row gives 0

    def divide_into(self, place: torch.Tensor, out: torch.Tensor, total: torch.Tensor | None) -> torch.Tensor:
        """As `divide`, written to its place."""
        eps = self.weight.normalizer_eps
        if eps is None or total is None:
            return place.copy_(out)
        total = total.add_(eps)
        return torch.div(out, torch.where(total == 0, 1.0, total) if eps == 0 else total, out=place)

    def into_rows(self, x: torch.Tensor) -> torch.Tensor:
        """``[B, Hq, n * C, X]`` as ``[B, H, g, n * C, X]``, g query heads to a state."""
        return x.unflatten(1, (self.k.shape[1], -1))

    # --- the three steps -------------------------------------------------------------------------------------------

    def absorb(self, state: State | None, start: int, stop: int) -> State | None:
        """The state after keys ``start .. stop``."""
        for lo in range(start, stop, _ABSORB_ROWS):
            hi = min(lo + _ABSORB_ROWS, stop)
            k, v = self.keys(lo, hi)
            powers = self.powers(hi - lo + 1)
            if powers is not None and hi - lo > 1:
                k = k * powers[:, :-1].flip(1)[..., None]
            s, z = k.transpose(-1, -2) @ v, k.sum(2) if self.normalised else None
            if state is None:
                state = s, z
                continue
            faded, faded_z = state
            if powers is not None:
                faded = faded * powers[:, -1, None, None]
                faded_z = None if faded_z is None else faded_z * powers[:, -1, None]
            state = faded + s, None if z is None or faded_z is None else faded_z + z
        return state

    def read(self, state: State | None, start: int, stop: int, behind: int) -> torch.Tensor:
        """Rows ``start .. stop`` from a state alone; row ``start`` stands ``behind`` positions after its last key."""
        if state is None or start >= stop:
            return self.zeros(start, stop)
        q = self.queries(start, stop)
        s, z = state
        out = reference.grouped_matmul(q, s) * self.scale
        total = None if z is None else reference.grouped_matmul(q, z[..., None]) * self.scale
        if self.decay is not None:
            ahead = torch.arange(behind, behind + stop - start, device=q.device)
            fade = (self.decay[:, None] ** ahead)[..., None]
            out, total = out * fade, None if total is None else total * fade
        return self.divide(out, total).to(self.q.dtype)

    def zeros(self, start: int, stop: int) -> torch.Tensor:
        """Rows that see nothing: 0, and still connected to the query, so that its gradient is 0."""
        rows = self.q[:, :, start:stop, :0].sum(-1, keepdim=True)
        return rows.expand(*rows.shape[:3], self.v.shape[3])


@dataclass(frozen=True)
class _Tables:
    """Decays between the rows of n chunks of length C; all None without a decay.

    Args:
        inside: ``[H|1, 1, 1, C, C]``, ``scale * decay ** (i - j)`` and 0 above the diagonal.
        to_end: ``[H, 1, C, 1]``, what a key keeps until the end of its chunk.
        from_state: ``[H, 1, 1, C, 1]``, what a row keeps of the state before its chunk, times scale.
        between: ``[H|1, n + 1, n + 1]``, states before each chunk from the state before all and the chunks' own.
    """

    inside: torch.Tensor
    to_end: torch.Tensor | None
    from_state: torch.Tensor | None
    between: torch.Tensor

    @classmethod
    def of(cls, seq: Sequence, n: int, c: int) -> _Tables:
        at = torch.arange(c, device=seq.k.device)
        distance = at[:, None] - at
        step = torch.arange(n + 1, device=seq.k.device)
        chunks = step[:, None] - step  # state r takes part m, m = 0 being the state before all, chunk m - 1 the others
        if seq.decay is None:
            ones = torch.ones((c, c), dtype=seq.acc, device=seq.k.device) * seq.scale
            between = torch.ones((1, n + 1, n + 1), dtype=seq.acc, device=seq.k.device).tril()
            return cls(ones.tril()[None, None, None], None, None, between)
        inside = (seq.decay[:, None, None] ** distance.clamp(min=0)).tril() * seq.scale
        to_end = seq.decay[:, None] ** (c - 1 - at)
        from_state = seq.decay[:, None] ** (at + 1) * seq.scale
        between = (seq.decay[:, None, None] ** (chunks.clamp(min=0) * c)).tril()
        return cls(inside[:, None, None], to_end[:, None, :, None], from_state[:, None, None, :, None], between)


def _chunks(
    seq: Sequence, tables: _Tables, state: State | None, row: int, key: int, n: int, c: int, into: torch.Tensor | None
) -> tuple[torch.Tensor, State]:
    """n causal chunks of c rows, from row ``row`` at key ``key``: out ``[B, Hq, n * c, Dv]`` and the state after.

    Args:
        into: where the rows are written; None makes a tensor.
    """
    q = seq.into_rows(seq.queries(row, row + n * c)).unflatten(3, (n, c)).transpose(2, 3)  # [B, H, n, g, C, D]
    k, v = (x.unflatten(2, (n, c)).contiguous() for x in seq.keys(key, key + n * c))  # [B, H, n, C, D]
    b, h, _, g, _, _ = q.shape
    q = q.reshape(b, h, n, g * c, q.shape[-1]).contiguous()  # once here, not in each product
    scores = (q @ k.transpose(-1, -2)).unflatten(3, (g, c))
    scores = scores.mul_(tables.inside) if seq.in_place else scores * tables.inside
    scores = scores.flatten(3, 4)  # [B, H, n, g * C, C]
    out = scores @ v
    total = scores.sum(-1, keepdim=True) if seq.normalised else None
    late = k if tables.to_end is None else k * tables.to_end
    before, after = _states(tables, state, late.transpose(-1, -2) @ v, late.sum(3) if seq.normalised else None)
    if before is not None:
        alpha = seq.scale
        if tables.from_state is not None:  # which has the scale in it
            q, alpha = q * tables.from_state.expand(-1, -1, g, -1, -1).flatten(2, 3), 1.0
        out = _add_product(out, q, before[0], alpha, seq.in_place)
        if total is not None and before[1] is not None:
            total = torch.add(total, q @ before[1][..., None], alpha=alpha)
    out = out.unflatten(3, (g, c)).transpose(2, 3)  # [B, H, g, n, C, Dv]
    total = None if total is None else total.unflatten(3, (g, c)).transpose(2, 3)
    if into is None:
        return seq.divide(out, total).flatten(3, 4).flatten(1, 2).to(seq.q.dtype), after
    return seq.divide_into(into.unflatten(1, (h, g)).unflatten(3, (n, c)), out, total), after


def _add_product(out: torch.Tensor, q: torch.Tensor, s: torch.Tensor, alpha: float, in_place: bool) -> torch.Tensor:
    """``out + alpha * (q @ s)`` in one product, of ``[B, H, n, ..]`` each."""
    flat, parts = out.flatten(0, 2), (q.flatten(0, 2), s.flatten(0, 2))
    done = flat.baddbmm_(*parts, alpha=alpha) if in_place else torch.baddbmm(flat, *parts, alpha=alpha)
    return done.view(out.shape)


def _states(
    tables: _Tables, state: State | None, s: torch.Tensor, z: torch.Tensor | None
) -> tuple[State | None, State]:
    """States before each chunk ``[B, H, n, D, Dv]``, and the one after all, from what each chunk adds."""
    if s.shape[2] == 1 and state is None:
        return None, (s[:, :, 0], None if z is None else z[:, :, 0])

    def scan(parts: torch.Tensor, first: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        first = torch.zeros_like(parts[:, :, 0]) if first is None else first
        stacked = torch.cat([first[:, :, None], parts], 2).flatten(3)
        before, after = tables.between[:, :-1] @ stacked, tables.between[:, -1:] @ stacked
        return before.unflatten(3, parts.shape[3:]), after[:, :, 0].unflatten(2, parts.shape[3:])

    before, after = scan(s, None if state is None else state[0])
    if z is None:
        return (before, None), (after, None)
    before_z, after_z = scan(z, None if state is None else state[1])
    return (before, before_z), (after, after_z)


def run_sequence(seq: Sequence, state: State | None, wants_state: bool) -> tuple[torch.Tensor, State | None]:
    """All rows of a sequence, and the state after all its keys when it is wanted."""
    sq, skv = seq.q.shape[2], seq.k.shape[2]
    if not seq.is_causal:
        state = seq.absorb(state, 0, skv)
        return seq.read(state, 0, sq, max(seq.offset - (skv - 1), 0)), state
    row = min(max(-seq.offset, 0), sq)  # rows before the first key
    key = min(max(seq.offset, 0), skv)
    whole = seq.q.new_empty((*seq.q.shape[:3], seq.v.shape[3])) if seq.in_place else None
    pieces: list[torch.Tensor] = []

    def put(start: int, stop: int, rows: torch.Tensor) -> None:
        if whole is None:
            pieces.append(rows)
        else:
            whole[:, :, start:stop] = rows

    if row:
        put(0, row, seq.zeros(0, row))
    state = seq.absorb(state, 0, key)
    end = min(sq, row + skv - key)
    if end - row == 1:
        state = seq.absorb(state, key, key + 1)
        put(row, end, seq.read(state, row, end, 0))
        row, key = end, key + 1
    c = chunk_size(seq.q.shape[3], seq.v.shape[3])
    most = max(1, BATCH_BYTES // (seq.acc.itemsize * seq.q.shape[0] * seq.q.shape[1] * c * max(c, *seq.v.shape[3:])))
    tables: dict[tuple[int, int], _Tables] = {}
    while row < end:
        left = end - row
        n, length = (min(most, left // c), c) if left >= c else (1, left)
        found = tables.get((n, length)) or tables.setdefault((n, length), _Tables.of(seq, n, length))
        into = None if whole is None else whole[:, :, row : row + n * length]
        out, state = _chunks(seq, found, state, row, key, n, length, into)
        if into is None:
            pieces.append(out)
        row, key = row + n * length, key + n * length
    if row < sq:  # rows behind the last key
        put(row, sq, seq.read(state, row, sq, seq.offset + row - (skv - 1)))
    if wants_state:
        state = seq.absorb(state, key, skv)
    if whole is not None:
        return whole, state
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)), state


def state_by_length(seq: Sequence, state: State | None, count: torch.Tensor) -> State:
    """The state as of each sequence's last true key: padding does not fade it.

    From the state after all keys it would follow by ``decay ** -padding``, which overflows; so it is summed anew.
    """
    assert seq.decay is not None
    decay, skv = seq.decay.view(1, -1, 1), seq.k.shape[2]
    s, z = seq.empty_state()
    for lo in range(0, skv, _ABSORB_ROWS):
        hi = min(lo + _ABSORB_ROWS, skv)
        k, v = seq.keys(lo, hi)
        behind = count.view(-1, 1, 1) - 1 - torch.arange(lo, hi, device=count.device)
        k = k * (decay ** behind.clamp(min=0))[..., None]
        s = s + k.transpose(-1, -2) @ v
        z = None if z is None else z + k.sum(2)
    if state is None:
        return s, z
    faded = decay ** count.view(-1, 1, 1)
    return s + state[0] * faded[..., None], None if z is None or state[1] is None else z + state[1] * faded
