"""What was measured for an op: lock files first, then the tuned store; and measuring, where that was asked for.

==========  ===========================================================================================
``off``     nothing measured is looked at
``cached``  what was measured before is used; nothing is measured
``on``      a miss is measured now, and kept
``force``   everything is measured anew, once per process and op
``assert``  a miss raises `NotTunedError`, and says how the nearest entry differs
==========  ===========================================================================================

Lock files are the ``tuned:`` part of the YAML files that `settings` finds. Those of a person (``ATTN_DISPATCH_CONFIG``,
the project, the user's folder) come before the store, the shipped ones after it: what was measured here beats what was
measured on a machine like this.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from attn_dispatch.errors import NotTunedError, StoreWarning
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.registry import Registry
from attn_dispatch.registry.discover import on_reset
from attn_dispatch.selection.store import Entry, Miss, Record, Store, explain_miss
from attn_dispatch.settings import settings

__all__ = ["Tuned", "find", "has_ranks", "known_wrong", "look_up", "may_choose", "on_change", "stale", "store"]


@dataclass(frozen=True)
class Tuned:
    """A measured ranking.

    Args:
        names: candidates, best first. why: the choice in one line. source: ``"tuned"``, with the file when it is a lock
            file. measured_us: medians by name. wrong: who was found wrong, or took its process down.
    """

    names: tuple[str, ...]
    why: str
    source: str = "tuned"
    measured_us: Mapping[str, float] = field(default_factory=dict, hash=False)
    wrong: tuple[str, ...] = ()


_store: Store | None = None
_tried: set[str] = set()  # digests that this process tried to measure, with or without a result
_measured: set[str] = set()  # and those with one
_agreed: dict[str, Tuned] = {}  # by digest: what the ranks agreed on, whatever each of them has in its files
_BAD = ("wrong", "crashed", "timeout")
_said: set[str] = set()
on_change: list[Callable[[], None]] = []  # caches of decisions add their clear function: a new entry may change them


def store() -> Store:
    """The store of this process."""
    global _store
    if _store is None:
        _store = Store(settings().cache_dir)
    return _store


def _forget() -> None:
    global _store
    _store = None
    _tried.clear()
    _measured.clear()
    _agreed.clear()
    _said.clear()


on_reset.append(_forget)


def find(op: AttentionOp, registry: Registry) -> Tuned | Miss:
    """What lock files and the store say of an op; measures nothing and never raises."""
    locked = _locked(op, registry, shipped=False)
    if locked is not None and op.bucketed().digest() not in _measured:  # what was measured on purpose, here, counts
        return locked
    found = store().get(op)
    if isinstance(found, Entry):
        problem = stale(found.records, registry)
        if found.ranking and not problem:
            return _tuned(found, f"{found.why} (measured {found.when[:10]})")
        if found.ranking:
            _warn_once(f"a tuned entry is not used: {problem}. Tune again: attn-dispatch tune, or autotune='on' ({op})")
            found = Miss((problem,))
        else:
            failed = (f"{r.name}: {r.note}" for r in found.records if r.status != "pruned")
            found = Miss(("no candidate passed when it was measured", *failed), _bad(found.records))
    return locked or _locked(op, registry, shipped=True) or found


def _tuned(entry: Entry, why: str) -> Tuned:
    return Tuned(entry.ranking, why, "tuned", _medians(entry.records), _bad(entry.records))


def _bad(records: Sequence[Record]) -> tuple[str, ...]:
    return tuple(record.name for record in records if record.status in _BAD)


def may_choose() -> bool:
    """Whether anything but the heuristic could decide a call outside `dispatch.use`: pins, lock files, the store."""
    from attn_dispatch.selection.pins import current_pins

    pins = current_pins()
    if pins.pins:
        return True
    mode = settings().autotune
    return mode != "off" and (mode != "cached" or bool(pins.tuned) or any(True for _ in store().files()))


def look_up(op: AttentionOp, registry: Registry, mode: str) -> Tuned | None:
    """What `find` finds, and what the mode does about a miss.

    Args:
        op: a canonical op at its true size. registry: what competes. mode: see the module.

    Raises:
        NotTunedError: the mode is ``assert`` and there is nothing.
    """
    if mode == "off" or op.traced:
        return None
    digest = op.bucketed().digest()
    if mode == "force" and digest not in _tried and _may_measure(op):
        return _measure(op, registry)
    found = find(op, registry)
    if mode in ("on", "force") and has_ranks() and (digest in _agreed or _may_measure(op)):
        # what one rank knows, another may not; asked once, since a new result makes all others be looked up again
        return _agreed.get(digest) or _measure(op, registry, found.names if isinstance(found, Tuned) else ())
    if isinstance(found, Tuned):
        return found
    if mode == "assert":
        why = explain_miss(store(), op) if found.reasons == ("no entry",) else found
        lines = "\n".join(f"  {reason}" for reason in why.reasons)
        remedy = "attn-dispatch tune WORKLOAD, or dispatch.use(autotune='on')"
        raise NotTunedError(f"autotune='assert', and nothing usable was measured for {op}\n{lines}\n  try  {remedy}")
    if mode in ("on", "force") and digest not in _tried and _may_measure(op):  # not again and again where nobody passes
        return _measure(op, registry)
    return known_wrong(found)


def known_wrong(miss: Miss) -> Tuned | None:
    """What a miss still says: who was found wrong where nobody passed. It ranks nobody."""
    return Tuned((), "nobody passed", wrong=miss.wrong) if miss.wrong else None


def has_ranks() -> bool:
    """Whether several ranks of `torch.distributed` run this."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _may_measure(op: AttentionOp) -> bool:
    """Never while something else records what runs: a trace, a graph, a transform."""
    if op.traced or op.higher_order or torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    return not (op.device == "cuda" and torch.cuda.is_current_stream_capturing())


def _measure(op: AttentionOp, registry: Registry, known: tuple[str, ...] = ()) -> Tuned | None:
    from attn_dispatch.selection.ranks import tune_together

    digest = op.bucketed().digest()
    _tried.add(digest)
    try:
        entry = tune_together(op, registry, known=known)
    except KeyboardInterrupt:
        _tried.discard(digest)  # the next call may have the time
        raise
    except Exception as error:  # noqa: BLE001 - a measurement that fails must not stop the call that asked for it
        _warn_once(f"tuning failed, so the estimate decides: {type(error).__name__}: {error} ({op})")
        return None
    if entry is None:
        return None
    if not entry.when:  # agreed on by the ranks, not measured by them now
        found = Tuned(entry.ranking, entry.why, "ranks")
    else:
        store().put(entry)
        _measured.add(digest)
        for forget in on_change:
            forget()
        found = _tuned(entry, f"{entry.why} (measured now)")
    if has_ranks():
        _agreed[digest] = found
    return found if found.names or found.wrong else None


def stale(records: tuple[Record, ...], registry: Registry) -> str:
    """Which measured candidate is made of other versions now; "" when all are as they were, or are gone."""
    from attn_dispatch.selection.tuner import version_of

    for record in records:
        parts = record.name.split(" > ")
        here = parts[-1] in registry.backends and all(p in registry.rewrites for p in parts[:-1])
        stated = record.status == "ok" and here and record.version  # a person's entry may leave versions out
        if stated and record.version != (now := version_of(record.name, registry)):
            return f"{record.name} was measured with {record.version}, here is {now}"
    return ""


def _medians(records: tuple[Record, ...]) -> dict[str, float]:
    return {r.name: r.median_us for r in records if r.median_us is not None}


def _locked(op: AttentionOp, registry: Registry, shipped: bool) -> Tuned | None:
    from attn_dispatch.selection.lock import locked

    key = op.bucketed()
    for entry in locked():
        if entry.shipped != shipped or entry.key != key:
            continue
        problem = stale(entry.records, registry)
        if not problem:
            source = f"tuned {entry.where}"
            return Tuned(entry.ranking, entry.why, source, _medians(entry.records), _bad(entry.records))
        if not shipped:  # nobody here asked for those that come with the package
            _warn_once(f"{entry.where} is not used: {problem}. Tune again: attn-dispatch tune")
    return None


def _warn_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, StoreWarning, stacklevel=5)
