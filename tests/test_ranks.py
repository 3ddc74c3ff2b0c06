"""Tuning on several ranks: one choice for all, or a named difference and one deterministic order; never a deadlock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from attn_dispatch.errors import RankWarning
from attn_dispatch.selection import ranks, tuned
from attn_dispatch.selection.store import Entry, Record

sys.path.insert(0, str(Path(__file__).parent))
from test_tuner import Toy, entry_for, op_of, registry_of


class Room:
    """Threads in place of ranks: an exchange returns when everybody has said something."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier, self.said = size, threading.Barrier(size, timeout=20), {}
        self.exchanges = [0] * size

    def gather(self, rank: int):
        def exchange(value: Any) -> list[Any]:
            step = self.exchanges[rank]
            self.exchanges[rank] += 1
            self.said[step, rank] = json.loads(json.dumps(value))
            try:
                self.barrier.wait()
            except threading.BrokenBarrierError:
                raise RuntimeError(f"rank {1 - rank} did not answer within 20 s") from None
            return [self.said[step, other] for other in range(self.size)]

        return exchange


def agree_all(ops, registries, medians, known=((), ())) -> tuple[list[Entry | None], Room]:
    """Each rank's entry, its op, registry and medians given by rank."""
    room, found = Room(len(ops)), [None] * len(ops)

    def measure(rank: int):
        def run(registry) -> Entry:
            names = medians[rank]
            records = tuple(Record(n, "ok", us, 0.1) for n, us in names.items() if us is not None)
            return Entry(ops[rank].bucketed(), ops[rank], records, (), entry_for(ops[rank]).environment, "now")

        return run

    def one(rank: int) -> None:
        found[rank] = ranks.agree(ops[rank], registries[rank], room.gather(rank), measure(rank), known[rank])

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(ops))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found, room


@pytest.fixture(autouse=True)
def fresh() -> None:
    ranks._forget()


def toys(*names: str, version: str = "1"):
    return registry_of(*(Toy(name, 10.0 + i, version=version) for i, name in enumerate(names)))


def test_all_ranks_take_what_is_fastest_on_the_slowest_of_them():
    same = toys("a", "b", "c")
    medians = [{"a": 100.0, "b": 10.0, "c": 50.0}, {"a": 100.0, "b": 90.0, "c": 60.0}]
    found, room = agree_all([op_of()] * 2, [same] * 2, medians)
    assert [entry.ranking for entry in found if entry] == [("c", "b", "a")] * 2
    assert [entry.record("c").median_us for entry in found] == [60.0, 60.0]
    assert room.exchanges == [3, 3]


def test_a_candidate_that_failed_on_one_rank_is_out_on_all():
    same = toys("a", "b")
    found, _ = agree_all([op_of()] * 2, [same] * 2, [{"a": 100.0, "b": 1.0}, {"a": 100.0, "b": None}])
    assert [entry.ranking for entry in found if entry] == [("a",)] * 2


@pytest.mark.parametrize(
    ("ops", "registries", "words"),
    [
        (
            [op_of()] * 2,
            [toys("a", "b", "c"), toys("a", "c")],
            "rank 1 has b in version none, rank 0 attn-dispatch 0, b 1",
        ),
        ([op_of()] * 2, [toys("a", "c"), toys("a", "c", version="2")], "rank 1 has"),
        ([op_of(), op_of(64, 64)], [toys("a", "c")] * 2, "rank 1 asks for another op"),
    ],
)
def test_a_difference_is_named_and_all_take_one_order_without_measuring(ops, registries, words):
    with pytest.warns(RankWarning, match=words):
        found, room = agree_all(ops, registries, [{"a": 9.0, "c": 1.0}] * 2)
    assert [entry.ranking for entry in found if entry] == [("a", "c")] * 2
    assert room.exchanges == [1, 1]  # no later exchange, in which one could wait for ever


def test_a_rank_that_never_comes_is_named_and_nobody_measures_any_more():
    def nobody(value):
        raise RuntimeError("rank 1 did not answer within 5 s")

    with pytest.warns(RankWarning, match="rank 1 did not answer within 5 s"):
        assert ranks.agree(op_of(), toys("a"), nobody, lambda registry: pytest.fail("measured")) is None
    assert ranks._given_up


@pytest.mark.parametrize(
    ("known", "measured"),
    [
        ([("b", "a"), ("b", "a")], False),
        ([("b", "a"), ("a", "b")], True),  # each has measured something of its own before
        ([("b", "a"), ()], True),  # one rank's store was on another disk: it would have waited for ever
        ([(), ()], True),
    ],
)
def test_what_the_ranks_know_from_before_is_exchanged_first(known, measured):
    same = toys("a", "b")
    found, room = agree_all([op_of()] * 2, [same] * 2, [{"a": 1.0, "b": 9.0}] * 2, known)
    assert [entry.ranking for entry in found if entry] == [("a", "b") if measured else ("b", "a")] * 2
    assert room.exchanges == [3 if measured else 1] * 2
    assert all(bool(entry.when) is measured for entry in found if entry)
    assert measured or "known to all 2 ranks" in found[0].why


@pytest.mark.parametrize("mode", ["on", "force"])
def test_a_rank_that_has_an_entry_asks_the_others_nevertheless(mode, monkeypatch):
    """It returned its own at once, and a rank without one waited for it."""
    asked: list[tuple[str, ...]] = []

    def together(op, registry, session=None, known=()):
        asked.append(known)
        return replace(entry_for(op, *known), when="", why="known to all 2 ranks")

    monkeypatch.setattr(tuned, "has_ranks", lambda: True)
    monkeypatch.setattr(tuned, "find", lambda op, registry: tuned.Tuned(("b", "a"), "measured before"))
    monkeypatch.setattr("attn_dispatch.selection.ranks.tune_together", together)
    monkeypatch.setattr(tuned, "_tried", {op_of().bucketed().digest()})
    monkeypatch.setattr(tuned, "_agreed", {})
    found = tuned.look_up(op_of(), toys("a", "b"), mode)
    assert asked == [("b", "a")]
    assert found is not None
    assert (found.names, found.source) == (("b", "a"), "ranks")


PROGRAM = """
import sys, warnings
rank, port, missing, absent = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "missing", sys.argv[3] == "absent"
import torch
import torch.distributed as dist
from attn_dispatch import dispatch, registry
from attn_dispatch.registry import Registry
from attn_dispatch.selection import ranks, tuned
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
if missing and rank == 1:
    real = registry.current()
    backends = {n: b for n, b in real.backends.items() if n != "sdpa_flash"}
    registry.reset(Registry(backends, real.rewrites, real.origins))
if absent:
    ranks.TIMEOUT_S = 3.0
q = torch.randn(1, 2, 64, 16)
said = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with dispatch.use(autotune="on"):
        if not (absent and rank == 1):
            plan = dispatch.plan(q, q, q, is_causal=True)
            print("CHOSE", plan.name, "|", plan.decision.source)
            dispatch.attention(q, q, q, is_causal=True)
    said = [str(w.message) for w in caught if w.category.__name__ == "RankWarning"]
print("SAID", " ".join(said))
dist.barrier()  # the user's own collectives go on working
dist.destroy_process_group()
"""


def _run_two(kind: str, tmp_path: Path) -> list[str]:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), port, kind],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "ATTN_DISPATCH_CACHE": str(tmp_path / str(rank))},
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = []
    for process in processes:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        outputs.append(out)
    return outputs


def _line(output: str, word: str) -> str:
    return next(line for line in output.splitlines() if line.startswith(word))


def test_two_processes_choose_alike(tmp_path):
    one, two = _run_two("same", tmp_path)
    assert _line(one, "CHOSE") == _line(two, "CHOSE")
    assert "tuned" in _line(one, "CHOSE")
    assert _line(one, "SAID") == _line(two, "SAID") == "SAID "


def test_two_processes_one_with_a_package_missing_choose_alike(tmp_path):
    one, two = _run_two("missing", tmp_path)
    assert _line(one, "CHOSE") == _line(two, "CHOSE")
    assert "sdpa_flash" not in _line(one, "CHOSE")
    assert "rank 1 has" in _line(one, "SAID")
    assert "in version none" in _line(one, "SAID")


def test_a_process_that_never_asks_does_not_hang_the_other(tmp_path):
    one, _ = _run_two("absent", tmp_path)
    assert "heuristic" in _line(one, "CHOSE")
    assert "rank 1 did not answer within 3 s" in _line(one, "SAID")
