"""Lock files: tuned results as YAML that a person reads, commits and deploys; the ``tuned:`` part of a pin file."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attn_dispatch.errors import InputError
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.registry import current
from attn_dispatch.registry.discover import on_reset
from attn_dispatch.selection.pins import current_pins
from attn_dispatch.selection.store import Entry, Record
from attn_dispatch.settings import settings
from attn_dispatch.yaml_text import yaml_text

__all__ = ["LockEntry", "entry_dict", "lock_dict", "locked", "parse_lock", "read_lock", "write_lock"]


@dataclass(frozen=True)
class LockEntry:
    """One tuned op of a lock file.

    Args:
        key: the op at the top of its bucket. ranking: names, best first. records: what was measured.
        why: the choice in one line. where: ``file:line``. shipped: it comes with the package.
    """

    key: AttentionOp
    ranking: tuple[str, ...]
    records: tuple[Record, ...]
    why: str
    where: str
    shipped: bool


_locked: tuple[Any, tuple[LockEntry, ...]] | None = None  # the pins that they were read from, and the entries


def _forget() -> None:
    global _locked
    _locked = None


on_reset.append(_forget)


def locked() -> tuple[LockEntry, ...]:
    """The entries of all files in force, strongest first; read once."""
    global _locked
    pins = current_pins()
    if _locked is None or _locked[0] is not pins:
        # nobody here chose those of plugins either
        shipped = {str(path) for path in (*settings().shipped, *getattr(current(), "configs", ()))}
        _locked = (pins, tuple(parse_lock(entry, entry.get("file") in shipped) for entry in pins.tuned))
    return _locked[1]


def parse_lock(data: Mapping[str, Any], shipped: bool = False) -> LockEntry:
    """The inverse of `entry_dict`; its shape was checked when its file was read."""
    medians, spreads = data.get("medians_us", {}), data.get("spreads_us", {})
    errors, versions, refused = data.get("errors", {}), data.get("versions", {}), data.get("refused", {})
    records = [
        Record(name, "ok", medians.get(name), spreads.get(name), errors.get(name, {}), versions.get(name, ""))
        for name in data["use"]
    ]
    records += [Record(name, note.partition(": ")[0], note=note.partition(": ")[2]) for name, note in refused.items()]
    op = AttentionOp.from_dict(data["op"])
    where = data.get("where", "a lock file")
    return LockEntry(op.bucketed(), tuple(data["use"]), tuple(records), data.get("why", ""), where, shipped)


def entry_dict(entry: Entry, layers: Sequence[str] = (), count: int = 0) -> dict[str, Any]:
    """An entry as a line of a lock file.

    Args:
        entry: with a ranking. layers: that ran the op. count: how often.
    """
    by_name = {record.name: record for record in entry.records}
    kept = [by_name[name] for name in entry.ranking]
    data: dict[str, Any] = {"op": entry.measured.to_dict(), "digest": entry.op.digest()}
    data |= {"layers": list(layers)} if any(layers) else {}
    data |= {"count": count} if count else {}
    data |= {"use": list(entry.ranking), "why": entry.why}
    data["medians_us"] = {r.name: round(r.median_us, 2) for r in kept if r.median_us is not None}
    data["spreads_us"] = {r.name: round(r.spread_us, 2) for r in kept if r.spread_us is not None}
    data["errors"] = {r.name: {q: float(f"{e:.3g}") for q, e in r.errors.items()} for r in kept if r.errors}
    data["versions"] = {r.name: r.version for r in kept}
    failed = {r.name: f"{r.status}: {r.note}" for r in entry.records if r.status not in ("ok", "pruned")}
    return data | ({"refused": failed} if failed else {})


def lock_dict(entries: Sequence[dict[str, Any]], hardware: Mapping[str, Any], measured: Mapping[str, Any]) -> dict:
    """A whole lock file.

    Args:
        entries: from `entry_dict`. hardware: which machine it is for. measured: where it comes from.
    """
    return {"schema": 1, "hardware": dict(hardware), "measured": dict(measured), "tuned": list(entries)}


def read_lock(path: Path, hardware: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tuned entries of a lock file that is to be written anew.

    Args:
        path: the file. hardware: the machine whose entries are to be added.

    Raises:
        InputError: it is no lock file, is for another machine, or holds what writing it anew would lose: pins, other
            keys, comments of a person.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        data = yaml.safe_load(text) or {}
    except (OSError, ValueError, OverflowError, yaml.YAMLError) as error:
        raise InputError(f"{path} is no lock file: {error}", remedy="give -o another name") from None
    remedy = "give -o another name; several files merge"
    if not isinstance(data, dict) or (data and data.get("schema") != 1):
        raise InputError(f"{path} is no lock file of schema 1, and would be lost", remedy=remedy)
    others = [key for key in data if key not in ("schema", "hardware", "measured", "tuned")]
    others += ["comments"] if any(line.lstrip().startswith("#") for line in text.splitlines()) else []
    tuned = data.get("tuned") or []
    if others or not isinstance(tuned, list) or not all(isinstance(entry, dict) for entry in tuned):
        what = ", ".join(map(str, others)) or "a tuned: that is no list of entries"
        raise InputError(f"{path} holds more than tuned results ({what}), which would be lost", remedy=remedy)
    if tuned and data.get("hardware") != dict(hardware):
        raise InputError(f"{path} is for {data.get('hardware')}, this is {dict(hardware)}", remedy=remedy)
    return tuned


def write_lock(path: Path, data: Mapping[str, Any]) -> None:
    """Write a lock file, whole or not at all."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(6)}.unfinished")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        unfinished.write_text(yaml_text(data), encoding="utf-8")
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
