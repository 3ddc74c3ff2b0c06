"""Tuning under `torch.distributed`: every rank chooses the same candidate, or all fall to one deterministic order.

1. All ranks gather a fingerprint: the op, the environment, and each candidate with its version.
2. Different ops, environments or candidates: nothing is measured, nothing more is exchanged, the rank that differs is
   named once, and everybody uses the heuristic's order over the candidates that exist on every rank.
3. Otherwise all measure what exists everywhere, gather the medians, and take each candidate's worst rank (a failure
   counts as infinite). All compute the choice from the same numbers, and gather it once more to verify it.

Each exchange has a time limit. When it passes, the rank that is late is named, this process measures nothing any more,
and every rank goes on by its heuristic.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from attn_dispatch.errors import RankWarning
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.registry import Registry
from attn_dispatch.registry.discover import on_reset
from attn_dispatch.selection.decide import ranked
from attn_dispatch.selection.environment import environment
from attn_dispatch.selection.store import Entry, Record
from attn_dispatch.selection.timing import Timing
from attn_dispatch.selection.tuned import has_ranks
from attn_dispatch.selection.tuner import Session, choose, tune, version_of

__all__ = ["TIMEOUT_S", "agree", "tune_together"]

TIMEOUT_S = 120.0  # the slowest rank may still be measuring when the first one waits

_number = 0  # of the exchange; equal on all ranks as long as all tune the same ops in the same order
_given_up = False  # after an exchange failed the ranks' numbers may differ: nothing is measured any more
_said: set[str] = set()


def _forget() -> None:
    global _given_up
    _given_up = False
    _said.clear()


on_reset.append(_forget)


def tune_together(
    op: AttentionOp, registry: Registry, session: Session | None = None, known: tuple[str, ...] = ()
) -> Entry | None:
    """Tune an op, on all ranks where there are several.

    Args:
        op: a canonical op, the same on every rank. registry: this rank's. known: the ranking that this rank has from
            before; when all have the same one, it holds and nothing is measured.

    Returns:
        The entry, equal in its ranking on all ranks; None when the ranks cannot tune together and the caller has to use
        the deterministic order.
    """
    global _number
    if not has_ranks():
        return tune(op, registry, session)
    if _given_up:
        return None
    _number += 1
    return agree(op, registry, _Gathering(_number), lambda own: tune(op, own, session), known)


def agree(
    op: AttentionOp,
    registry: Registry,
    gather: Callable[[Any], Sequence[Any]],
    measure: Callable[[Registry], Entry],
    known: tuple[str, ...] = (),
) -> Entry | None:
    """The protocol of the module, over any way to gather.

    Args:
        op: this rank's op. registry: this rank's. gather: one object of each rank, to all. measure: times the
            candidates of a registry. known: this rank's ranking from before.

    Returns:
        The agreed entry. When ranks differ in what they have, its ranking is the heuristic's order over what all
        have, and it has no times. None when an exchange failed.
    """
    legal, _ = ranked(op, registry)
    versions = {c.name: version_of(c.name, registry) for c, _ in legal}
    mine = {"op": op.digest(), "environment": environment(op.device).to_dict(), "candidates": versions, "known": known}
    try:
        everybody = gather(mine)
        problem = _difference(everybody)
        if problem:
            what_now = "all use the heuristic's order over what all have"
            _warn_once(f"ranks differ, so nothing is measured: {problem}; {what_now}")
            return _deterministic(op, everybody)
        if known and all(tuple(other["known"]) == known for other in everybody):
            return _unmeasured(op, known, f"known to all {len(everybody)} ranks from before")
        entry = measure(registry)
        medians = {r.name: r.median_us for r in entry.records if r.median_us is not None}
        slowest = _slowest(gather(medians))
        ranking, why = choose([c.name for c, _ in legal if c.name in slowest], slowest)
        chosen = gather(ranking)
        if any(tuple(other) != ranking for other in chosen):  # cannot be: the same numbers, the same rule
            raise RuntimeError(f"ranks chose differently from the same times: {chosen}")
    except RuntimeError as error:
        _give_up(error)
        return None
    records = tuple(replace(r, median_us=slowest[r.name].median_us) if r.name in slowest else r for r in entry.records)
    return replace(entry, ranking=ranking, records=records, why=f"{why}, on the slowest of {len(everybody)} ranks")


def _difference(everybody: Sequence[dict[str, Any]]) -> str:
    """The first rank that differs from rank 0, and in what; "" when none does."""
    first = everybody[0]
    for rank, other in enumerate(everybody[1:], 1):
        if other["op"] != first["op"]:
            return f"rank {rank} asks for another op ({other['op']}) than rank 0 ({first['op']})"
        for name, value in first["environment"].items():
            if other["environment"][name] != value:
                return f"rank {rank} has {name} {other['environment'][name]!r}, rank 0 {value!r}"
        for name in first["candidates"].keys() | other["candidates"].keys():
            here, there = first["candidates"].get(name), other["candidates"].get(name)
            if here != there:
                return f"rank {rank} has {name} in version {there or 'none'}, rank 0 {here or 'none'}"
    return ""


def _deterministic(op: AttentionOp, everybody: Sequence[dict[str, Any]]) -> Entry:
    """Rank 0's order over what every rank has; made of what all have gathered, so equal everywhere."""
    common = [n for n in everybody[0]["candidates"] if all(n in other["candidates"] for other in everybody)]
    return _unmeasured(op, tuple(common), "the ranks differ: the heuristic's order over what all have")


def _unmeasured(op: AttentionOp, ranking: tuple[str, ...], why: str) -> Entry:
    """An agreement without a measurement, and so without a time: it is not stored."""
    records = tuple(Record(name, "pruned", note="not measured") for name in ranking)
    return Entry(op.bucketed(), op, records, ranking, environment(op.device), "", 0.0, why)


def _slowest(everybody: Sequence[dict[str, float]]) -> dict[str, Timing]:
    """Per candidate the median of its slowest rank; one that failed anywhere is out."""
    names = set(everybody[0]).intersection(*everybody[1:])
    return {name: Timing(max(medians[name] for medians in everybody), 0.0) for name in sorted(names)}


class _Gathering:
    """One exchange after another over the store that the process group was made with.

    A store needs no group of its own, works beside any backend, has a time limit for each wait, and knows who is late.
    """

    def __init__(self, number: int) -> None:
        self._prefix, self._step = f"attn_dispatch/{number}", 0
        self._store = dist.distributed_c10d._get_default_store()

    def __call__(self, value: Any) -> list[Any]:
        """One object of each rank, by rank.

        Raises:
            RuntimeError: a rank did not answer within the time limit; the message names it.
        """
        keys = [f"{self._prefix}/{self._step}/{rank}" for rank in range(dist.get_world_size())]
        self._step += 1
        self._store.set(keys[dist.get_rank()], json.dumps(value))
        try:
            self._store.wait(keys, timedelta(seconds=TIMEOUT_S))
        except RuntimeError:
            late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            who = ", ".join(map(str, late))
            raise RuntimeError(f"rank {who} did not answer within {TIMEOUT_S:g} s") from None
        return [json.loads(self._store.get(key)) for key in keys]


def _give_up(error: Exception) -> None:
    global _given_up
    _given_up = True
    rank = dist.get_rank() if dist.is_initialized() else 0
    text = str(error).splitlines()[0][:200]
    _warn_once(f"rank {rank}: tuning together failed ({text}); this process measures nothing any more")


def _warn_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, RankWarning, stacklevel=5)
