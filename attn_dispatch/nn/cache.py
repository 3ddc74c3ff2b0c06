"""A cache of keys and values for decoding: append, roll, crop, reorder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from attn_dispatch.errors import InputError

__all__ = ["KVCache", "Stored"]

_FIRST = 64  # rows that the first append makes room for


class Stored(NamedTuple):
    """What a query attends after an append.

    Args:
        key: ``[B, Hkv, n, D]``, value: ``[B, Hkv, n, Dv]``; views, valid until the next append.
        start: position of key 0: what a rolling cache has dropped.
        q_offset: place among these keys of the first new one: an int, or ``[B]`` when rows have lengths of their own.
        key_lengths: ``[B]``, how many of the keys each row has; None when all have all.
    """

    key: torch.Tensor
    value: torch.Tensor
    start: int
    q_offset: int | torch.Tensor
    key_lengths: torch.Tensor | None = None


class KVCache:
    """Keys and values of the tokens so far, in storage that doubles, so that an append costs what it appends.

    With ``window=W`` only what a later query can still see is kept: the ``W - 1`` keys before it (none for W = 1), and
    the query's own comes with it. Positions go on counting. With ``lengths`` each row of the batch grows by its own
    number of tokens, as after prompts of different lengths.

    An append writes in place and so is for inference; where gradients are recorded it makes a new tensor instead.

    Args:
        max_length: positions that it may hold in all; None for no limit.
        window: W of a causal window of W keys, the query's own included; None keeps everything.

    Example:
        >>> cache = KVCache(window=2)
        >>> for step in range(3):
        ...     found = cache.append(torch.full((1, 1, 1, 4), float(step)), torch.zeros(1, 1, 1, 4))
        >>> found.key[0, 0, :, 0].tolist(), found.start, cache.length
        ([1.0, 2.0], 1, 3)
    """

    def __init__(self, max_length: int | None = None, *, window: int | None = None) -> None:
        for name, value in (("max_length", max_length), ("window", window)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be >= 1, got {value}", remedy="None for no limit")
        self.max_length, self.window = max_length, window
        self.reset()

    def reset(self) -> None:
        """Forget everything, storage too."""
        self._key: torch.Tensor | None = None
        self._value: torch.Tensor | None = None
        self._begin = 0  # row of the storage where the oldest kept key lies
        self._kept = 0  # rows kept
        self._length = 0
        self._lengths: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens appended so far; of the longest row, when rows have lengths of their own."""
        return self._length

    @property
    def lengths(self) -> torch.Tensor | None:
        """Tokens of each row ``[B]``; None while all rows have the same."""
        return self._lengths

    @property
    def start(self) -> int:
        """Position of the oldest key that is kept."""
        return self._length - self._kept

    @property
    def capacity(self) -> int:
        """Rows of the storage."""
        return 0 if self._key is None else self._key.shape[2]

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the kept keys, int64 ``[kept]``."""
        return torch.arange(self.start, self._length)

    def append(self, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor | None = None) -> Stored:
        """Add tokens and return what their queries attend.

        Args:
            key: ``[B, Hkv, n, D]``. value: ``[B, Hkv, n, Dv]``.
            lengths: how many of the n are real in each row ``[B]``, the first ones; None for all.

        Raises:
            InputError: another batch, heads, size, dtype or device than before; more tokens than ``max_length``;
                lengths outside [0, n], or together with a window.
        """
        self._check(key, value, lengths)
        if lengths is not None or self._lengths is not None:
            return self._append_rows(key, value, lengths)
        n = key.shape[2]
        self._limit(self._length + n)
        before = self._kept if self.window is None else min(self._kept, self.window - 1)
        self._begin += self._kept - before  # what no later query can see
        start, self._length, self._kept = self._length - before, self._length + n, before + n
        self._write(key, value, self._begin + before, before)
        rows = slice(self._begin, self._begin + self._kept)
        assert self._key is not None
        assert self._value is not None
        return Stored(self._key[:, :, rows], self._value[:, :, rows], start, before)

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Keep what is appended inside only if nothing inside raises: a call that failed can be made again.

        Example:
            >>> cache = KVCache()
            >>> try:
            ...     with cache.all_or_nothing():
            ...         _ = cache.append(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4))
            ...         raise RuntimeError("the attention behind it failed")
            ... except RuntimeError:
            ...     cache.length
            0
        """
        # an append writes behind the rows that are kept, or into new storage, so what was there is still whole
        before = self._key, self._value, self._begin, self._kept, self._length, self._lengths
        try:
            yield
        except BaseException:
            self._key, self._value, self._begin, self._kept, self._length, self._lengths = before
            raise

    def crop(self, length: int) -> None:
        """Forget the tokens from position ``length`` on (speculative decoding).

        Raises:
            InputError: it is longer than the cache, reaches into what rolled out, or rows have their own lengths.
        """
        if self._lengths is not None:
            raise InputError("a cache whose rows have lengths of their own cannot be cropped to one length")
        # of a rolling cache the next query needs the window before it, not just its own place
        least = (
            self.start if self.window is None or self.start == 0 else min(self.start + self.window - 1, self._length)
        )
        if not least <= length <= self._length:
            raise InputError(f"can be cropped to {least} .. {self._length} tokens, not to {length}")
        self._kept -= self._length - length
        self._length = length

    def reorder(self, rows: torch.Tensor) -> None:
        """Make row ``rows[i]`` of the batch its row i (beam search); the batch may change its size."""
        if self._key is not None and self._value is not None:
            self._key, self._value = self._key.index_select(0, rows), self._value.index_select(0, rows)
        if self._lengths is not None:
            self._lengths = self._lengths.index_select(0, rows)

    # --- storage ---------------------------------------------------------------------------------------------------

    def _check(self, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor | None) -> None:
        if key.ndim != 4 or value.ndim != 4 or key.shape[:3] != value.shape[:3]:
            problem = f"key {list(key.shape)} and value {list(value.shape)} must be [B, Hkv, n, D] and [B, Hkv, n, Dv]"
            raise InputError(problem)
        for name, new, old in (("key", key, self._key), ("value", value, self._value)):
            if old is None:
                continue
            of_new, of_old = ((list(x.shape[:2]), x.shape[3], x.dtype, x.device) for x in (new, old))
            if of_new != of_old:
                problem = f"{name} has [B, Hkv], D, dtype, device {of_new}, the cache {of_old}"
                raise InputError(problem, remedy="reset(), or another cache for another sequence")
        if lengths is None:
            return
        if self.window is not None:
            raise InputError("a rolling cache drops the same rows of the whole batch: lengths cannot differ")
        if tuple(lengths.shape) != (key.shape[0],) or lengths.is_floating_point():
            raise InputError(f"lengths must be integers [B] = [{key.shape[0]}], got {list(lengths.shape)}")
        if lengths.numel() and not 0 <= int(lengths.min()) <= int(lengths.max()) <= key.shape[2]:
            raise InputError(f"lengths must be in [0, {key.shape[2]}], got {lengths.tolist()}")

    def _limit(self, length: int) -> None:
        if self.max_length is not None and length > self.max_length:
            raise InputError(f"{length} tokens > max_length {self.max_length}", remedy="a longer cache, or window=")

    def _write(self, key: torch.Tensor, value: torch.Tensor, at: int, kept: int) -> None:
        """Put new rows at ``at``, the ``kept`` ones before them; grow or move to the front when there is no room."""
        end = at + key.shape[2]
        recording = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (key, value, self._key, self._value)
        )
        if recording or self._key is None or self._value is None or end > self.capacity:
            room = kept + key.shape[2] if recording else self._room(kept + key.shape[2])
            self._key = _moved(self._key, key, slice(at - kept, at), room, recording)
            self._value = _moved(self._value, value, slice(at - kept, at), room, recording)
            self._begin = 0
            return
        self._key[:, :, at:end] = key
        self._value[:, :, at:end] = value

    def _room(self, needed: int) -> int:
        """Twice what is needed: the next move comes after as many rows again."""
        room = max(2 * needed, _FIRST)
        if self.window is not None:
            return room
        return room if self.max_length is None else max(needed, min(room, self.max_length))

    def _append_rows(self, key: torch.Tensor, value: torch.Tensor, lengths: torch.Tensor | None) -> Stored:
        """Each row at its own length."""
        if self.window is not None:
            raise InputError("a rolling cache drops the same rows of the whole batch: lengths cannot differ")
        b, _, n, _ = key.shape
        new = torch.full((b,), n, device=key.device) if lengths is None else lengths.to(key.device).long()
        before = torch.full((b,), self._length, device=key.device) if self._lengths is None else self._lengths
        after = before + new
        longest = int(after.max()) if b else 0
        self._limit(longest)
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise InputError("lengths are for inference: they write in place", remedy="torch.no_grad()")
        if self.capacity < longest or self._key is None or self._value is None:
            room = self._room(longest)
            self._key = _moved(self._key, key[:, :, :0], slice(0, self._kept), room, False)
            self._value = _moved(self._value, value[:, :, :0], slice(0, self._kept), room, False)
        at = before[:, None] + torch.arange(n, device=key.device)
        real = torch.arange(n, device=key.device) < new[:, None]
        row, column = real.nonzero(as_tuple=True)
        self._key[row, :, at[row, column]] = key[row, :, column]
        self._value[row, :, at[row, column]] = value[row, :, column]
        self._lengths, self._length, self._kept = after, longest, longest
        return Stored(self._key[:, :, :longest], self._value[:, :, :longest], 0, before, after)


def _moved(old: torch.Tensor | None, new: torch.Tensor, kept: slice, room: int, recording: bool) -> torch.Tensor:
    """The kept rows and the new ones at the front of new storage."""
    b, h, _, d = new.shape
    parts = [new] if old is None else [old[:, :, kept], new]
    if recording:
        return torch.cat(parts, 2)
    storage = new.new_zeros((b, h, room, d))  # zeros: rows that no sequence has may be looked at, and must be finite
    at = 0
    for part in parts:
        storage[:, :, at : at + part.shape[2]] = part.detach()
        at += part.shape[2]
    return storage
