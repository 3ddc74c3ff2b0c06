"""The tuned store: what was measured on this machine, one file per op, inside one folder per environment.

::

    <cache>/tuned-1/<environment hash>/environment.json
    <cache>/tuned-1/<environment hash>/<op digest>.json

A file is published by `os.replace`, so that a reader sees a whole entry or none, whoever is killed when. It holds its
full key, which is compared on reading: neither the hash nor the name of a file is trusted. What is corrupt, foreign or
of another schema is a miss and one warning; it is never written over, but renamed (``.aside``) when a new entry takes
its place. No lock is taken: two processes that tune one op waste time, and lose nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attn_dispatch.errors import StoreWarning
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.selection.environment import Environment, environment

__all__ = ["SCHEMA", "Entry", "Miss", "Record", "Store", "explain_miss"]

SCHEMA = 1
_FOLDER = f"tuned-{SCHEMA}"


@dataclass(frozen=True)
class Record:
    """What is known of one candidate on one op.

    Args:
        name: the candidate. status: ``ok``, ``pruned`` (not tried, by estimate), ``wrong`` (failed the numerics gate),
            ``unverified`` (what it should give is too dear to know), ``crashed``, ``timeout``, ``memory`` or ``error``.
        median_us, spread_us: of the timed step; None when it was not timed. errors: largest error by quantity, in units
            of the budget. version: of what the candidate is made of; another version makes the entry stale.
        note: why it was pruned or what went wrong.
    """

    name: str
    status: str
    median_us: float | None = None
    spread_us: float | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    version: str = ""
    note: str = ""


@dataclass(frozen=True)
class Entry:
    """The outcome of tuning one op.

    Args:
        op: the key, an op at the top of its bucket. measured: the op that was timed. records: one per candidate.
        ranking: names that may run, best first. environment: where. when: UTC time. seconds: what tuning it took.
        why: the choice in one line.
    """

    op: AttentionOp
    measured: AttentionOp
    records: tuple[Record, ...]
    ranking: tuple[str, ...]
    environment: Environment
    when: str
    seconds: float = 0.0
    why: str = ""

    @property
    def winner(self) -> str:
        """The candidate to run; empty when none passed."""
        return self.ranking[0] if self.ranking else ""

    def record(self, name: str) -> Record | None:
        """The record of a candidate."""
        return next((r for r in self.records if r.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain types for JSON and YAML."""
        return {
            "schema": SCHEMA,
            "environment": self.environment.to_dict(),
            "key": self.op.key_text,
            "op": self.op.to_dict(),
            "measured": self.measured.to_dict(),
            "ranking": list(self.ranking),
            "records": [_record_dict(r) for r in self.records],
            "when": self.when,
            "seconds": round(self.seconds, 2),
            "why": self.why,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Entry:
        """The inverse of `to_dict`.

        Raises:
            ValueError: another schema, or not an entry; the message says what is wrong.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"it holds {type(data).__name__}, not an entry")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {data.get('schema')!r}; this version reads {SCHEMA}")
        try:
            op = AttentionOp.from_dict(data["op"])
            if op.key_text != data["key"]:
                raise ValueError("its op does not agree with its key")
            records = tuple(_record_of(r) for r in data["records"])
            ranking = tuple(data["ranking"])
            if unknown := [name for name in ranking if name not in {r.name for r in records}]:
                raise ValueError(f"its ranking names {unknown[0]!r}, of which it has no record")
            place = Environment(**data["environment"])
            measured = AttentionOp.from_dict(data["measured"])
            seconds, why = _number(data["seconds"], "seconds"), _text(data["why"], "why")
            return cls(op, measured, records, ranking, place, _text(data["when"], "when"), seconds, why)
        except KeyError as error:
            raise ValueError(f"{error} is missing") from None
        except (TypeError, AttributeError) as error:
            raise ValueError(f"it is no entry: {error}") from None


def _record_of(data: Mapping[str, Any]) -> Record:
    """A record, of which every value has its type: a time that is text or NaN would fail wherever it is read."""
    record = Record(**{**data, "errors": dict(data.get("errors", {}))})
    for name in ("name", "status", "version", "note"):
        _text(getattr(record, name), name)
    for name in ("median_us", "spread_us"):
        if (value := getattr(record, name)) is not None:
            _number(value, name)
    for name, value in record.errors.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):  # one that gave NaN may be off by infinity
            raise ValueError(f"errors.{name} is {value!r}, not a number")
    return record


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, not a finite number")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}, not text")
    return value


def _record_dict(record: Record) -> dict[str, Any]:
    plain = {k: v for k, v in asdict(record).items() if v not in (None, "", {})}
    for name in ("median_us", "spread_us"):
        if name in plain:
            plain[name] = round(plain[name], 3)
    if "errors" in plain:
        plain["errors"] = {k: float(f"{v:.3g}") for k, v in plain["errors"].items()}
    return plain


@dataclass(frozen=True)
class Miss:
    """Why there is nothing: one line per difference to the nearest entry, or what is wrong with the file.

    Args:
        wrong: candidates of an entry for which nobody passed that were found wrong.
    """

    reasons: tuple[str, ...]
    wrong: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join(self.reasons)


class Store:
    """Entries on disk, and in memory what was read or could not be written.

    Args:
        root: the cache folder; None keeps everything in memory.
    """

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self._memory: dict[tuple[str, str], Entry | Miss] = {}  # (environment, op digest); a miss is remembered too
        self._said: set[str] = set()

    # --- one entry -------------------------------------------------------------------------------------------------

    def get(self, op: AttentionOp, place: Environment | None = None) -> Entry | Miss:
        """The entry of an op in its bucket, for this environment; never raises.

        Args:
            op: a canonical op. place: the environment; default this process's.
        """
        key = op.bucketed()
        place = place or environment(op.device)
        index = (place.digest(), key.digest())
        if index not in self._memory:
            self._memory[index] = self._read(key, place)
        return self._memory[index]

    def put(self, entry: Entry) -> Path | None:
        """Keep an entry; returns its file, or None when it could only be kept in memory (said once)."""
        self._memory[entry.environment.digest(), entry.op.digest()] = entry
        if self.root is None:
            text = "there is no folder for the tuned store, so results are kept in this process only"
            self._warn("unwritable", f"{text}. Set ATTN_DISPATCH_CACHE to a folder")
            return None
        path = self._path(entry.op, entry.environment)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            place = path.parent / "environment.json"
            if not place.exists():
                _publish(place, json.dumps(entry.environment.to_dict(), indent=1))
            _set_invalid_aside(path)
            _publish(path, json.dumps(entry.to_dict(), indent=1))
        except OSError as error:
            text = f"the tuned store {self.root} cannot be written ({error}); results are kept in this process only"
            self._warn("unwritable", f"{text}. Set ATTN_DISPATCH_CACHE to a folder that can be")
            return None
        return path

    def forget(self) -> None:
        """Forget what was read, so that files written by others are seen."""
        self._memory.clear()

    def _path(self, op: AttentionOp, place: Environment) -> Path:
        assert self.root is not None
        return self.root / _FOLDER / place.digest() / f"{op.digest()}.json"

    def _read(self, key: AttentionOp, place: Environment) -> Entry | Miss:
        if self.root is None:
            return Miss(("nothing was measured in this process",))
        path = self._path(key, place)
        try:
            entry = _load(path)
        except FileNotFoundError:
            return Miss(("no entry",))
        except (PermissionError, NotADirectoryError) as error:  # of the folder, and so of every entry
            text = f"the tuned store {self.root} cannot be read ({error}); nothing that was measured is used"
            self._warn("unreadable", f"{text}. Set ATTN_DISPATCH_CACHE to a folder that can be")
            return Miss((str(error),))
        except (OSError, ValueError, RecursionError) as error:
            return self._invalid(path, str(error))
        if entry.op != key or entry.environment != place:  # two keys of one digest: not to be expected
            return self._invalid(path, f"it is an entry for another op: {entry.op}")
        return entry

    def _invalid(self, path: Path, problem: str) -> Miss:
        self._warn(str(path), f"{path} is not used: {problem}. `attn-dispatch cache clear --invalid` removes it")
        return Miss((f"{path.name}: {problem}",))

    def _warn(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            warnings.warn(text, StoreWarning, stacklevel=4)

    # --- all entries -----------------------------------------------------------------------------------------------

    def files(self) -> Iterator[Path]:
        """Every file that should hold an entry, of all environments."""
        folder = self.root / _FOLDER if self.root is not None else None
        if folder is not None and os.path.isdir(folder):  # Path.is_dir raises where a parent may not be entered
            yield from sorted(p for p in folder.glob("*/*.json") if p.name != "environment.json")

    def entries(self) -> Iterator[tuple[Path, Entry | Miss]]:
        """Every file with its entry, or what is wrong with it."""
        for path in self.files():
            try:
                yield path, _load(path)
            except (OSError, ValueError, RecursionError) as error:
                yield path, Miss((str(error),))

    def clear(self, invalid_only: bool = False) -> int:
        """Remove entries, and what killed writers left; returns how many files went."""
        gone = [
            path
            for path, found in self.entries()
            if not invalid_only or (isinstance(found, Miss) and os.access(path, os.R_OK))  # unreadable is not invalid
        ]
        if self.root is not None:
            leftovers = (f"*/*{_UNFINISHED}", f"*/*{_ASIDE}*")
            gone += [p for pattern in leftovers for p in sorted((self.root / _FOLDER).glob(pattern))]
        gone = [path for path in gone if not path.is_dir()]  # a folder that somebody put there is theirs
        for path in gone:
            path.unlink(missing_ok=True)
        self.forget()
        return len(gone)

    def merge(self, other: Store) -> tuple[int, int]:
        """Take the entries of another store that are newer or new; returns (taken, left alone)."""
        taken = left = 0
        for _, theirs in other.entries():
            if isinstance(theirs, Miss):
                left += 1
                continue
            ours = self.get(theirs.op, theirs.environment)
            if isinstance(ours, Entry) and ours.when >= theirs.when:
                left += 1
                continue
            self.put(theirs)
            taken += 1
        return taken, left


_UNFINISHED = ".unfinished"
_ASIDE = ".aside"


def _load(path: Path) -> Entry:
    """The entry in a file.

    Raises:
        OSError: it cannot be read. ValueError, RecursionError: it holds no entry, or one that belongs elsewhere.
    """
    entry = Entry.from_dict(json.loads(path.read_text(encoding="utf-8")))
    if entry.op.digest() != path.stem:
        raise ValueError(f"it is an entry for another op: {entry.op}")
    if entry.environment.digest() != path.parent.name:
        raise ValueError("it is an entry for another environment")
    return entry


def _set_invalid_aside(path: Path) -> None:
    """Rename a file that is no entry of ours (corrupt, of a later schema) instead of writing over it."""
    try:
        _load(path)
    except FileNotFoundError:
        return
    except (ValueError, RecursionError):
        free = (path.with_name(f"{path.name}{_ASIDE}{n or ''}") for n in itertools.count())
        os.replace(path, next(place for place in free if not place.exists()))


def _publish(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all; the temporary lies beside it, so that replace is atomic."""
    name = path.with_name(f"{path.stem}.{secrets.token_hex(6)}{_UNFINISHED}")
    try:
        with open(name, "x", encoding="utf-8") as file:  # with the user's umask, so that a shared folder can be shared
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def explain_miss(store: Store, op: AttentionOp) -> Miss:
    """Why an op has no entry, field by field against the nearest entry of this environment, then of others."""
    key, place = op.bucketed(), environment(op.device)
    found = store.get(op)
    if isinstance(found, Entry):
        return Miss(())
    if found.reasons != ("no entry",):
        return found
    wanted = _flat(key.to_dict())
    best: tuple[int, tuple[str, ...]] | None = None
    for _, entry in store.entries():
        if isinstance(entry, Miss):
            continue
        here, there = asdict(place), asdict(entry.environment)
        lines = [f"{name}: measured {there[name]}, here {here[name]}" for name in here if here[name] != there[name]]
        have = _flat(entry.op.to_dict())
        for name in sorted(wanted.keys() | have.keys()):
            if wanted.get(name) != have.get(name):
                lines.append(f"{name}: measured {have.get(name, 'none')}, asked {wanted.get(name, 'none')}")
        if best is None or len(lines) < best[0]:
            best = (len(lines), tuple(lines))
    if best is None:
        return Miss(("the store is empty: attn-dispatch tune WORKLOAD, or dispatch.use(autotune='on')",))
    return Miss(("the nearest entry differs", *best[1]))


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out
