"""The files that come with the package: each loads, each entry can hit, each workload describes real ops.

Peer bug (FlashInfer): shipped configurations whose keys had one element less than lookups, so that none ever hit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attn_dispatch import device, registry
from attn_dispatch.capture import Workload
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.passes import canonicalise
from attn_dispatch.selection import lock, tuned
from attn_dispatch.selection.candidates import rebuild
from attn_dispatch.selection.pin_files import load_pins
from attn_dispatch.selection.tuned import Tuned, find

CONFIGS = Path(__file__).parent.parent / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
WORKLOADS = sorted((CONFIGS / "workloads").glob("*.yaml"))


def test_there_is_a_file_measured_on_this_machine_kind():
    assert FILES
    assert len(WORKLOADS) >= 12


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_entry_of_a_file_can_hit(path, monkeypatch):
    hardware = yaml_of(path)["hardware"]
    there = device.DeviceFacts(hardware["device"], hardware["name"], hardware["arch"], hardware.get("threads", 0))
    monkeypatch.setattr(device, "facts", lambda kind: replace(there, type=kind))
    pins = load_pins([path], strict=True)
    assert [file.skipped for file in pins.files] == [""]
    monkeypatch.setattr(lock, "current_pins", lambda: pins)
    monkeypatch.setattr(tuned, "stale", lambda *_: "")  # the machine that runs this may have another torch
    registry.reset()
    for entry in pins.tuned:
        op, _ = canonicalise(AttentionOp.from_dict(entry["op"]))
        found = find(op, registry.current())
        assert isinstance(found, Tuned), f"{entry['where']}: {found}"
        assert path.name in found.source
        assert rebuild(found.names[0], op, registry.current()) is not None, f"{entry['where']}: {found.names[0]}"
    registry.reset()


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_every_entry_is_whole(path):
    data = yaml_of(path)
    assert data["measured"]["torch"]
    assert "attn-dispatch tune" in data["measured"]["by"]
    for entry in data["tuned"]:
        winner = entry["use"][0]
        assert entry["medians_us"][winner] > 0
        assert max(entry["errors"][winner].values()) < 1.0
        assert entry["versions"][winner]
        assert entry["digest"] == canonicalise(AttentionOp.from_dict(entry["op"]))[0].bucketed().digest()


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda p: p.name)
def test_every_workload_describes_canonical_ops(path):
    for use in Workload.load(path).ops():
        assert canonicalise(use.op)[0] == use.op


def yaml_of(path: Path) -> dict:
    import yaml

    return yaml.safe_load(path.read_text(encoding="utf-8"))
