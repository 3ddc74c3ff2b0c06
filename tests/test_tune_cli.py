"""`attn-dispatch tune` and `cache`: from a captured workload to a lock file that decides calls, and back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_tuner import QUICK
from typer.testing import CliRunner

from attn_dispatch import dispatch, registry
from attn_dispatch.cli import app
from attn_dispatch.device import facts
from attn_dispatch.errors import InputError, StoreWarning
from attn_dispatch.selection import tuned
from attn_dispatch.selection.environment import environment
from attn_dispatch.selection.lock import read_lock
from attn_dispatch.selection.store import Entry, Store
from attn_dispatch.selection.tuner import Effort, tune
from attn_dispatch.settings import settings


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A folder, a store and settings of its own; sdpa_math is the fastest here."""

    monkeypatch.setenv("ATTN_DISPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ATTN_DISPATCH_CONFIG", raising=False)
    monkeypatch.setenv("ATTN_DISPATCH_AUTOTUNE", "cached")
    monkeypatch.setattr("attn_dispatch.selection.tuner.Effort", lambda **_: QUICK)
    monkeypatch.setattr("attn_dispatch.selection.tuner.interleaved", math_is_fastest)
    monkeypatch.setattr("attn_dispatch.selection.tuner.pace_s", lambda device: 1.0)
    monkeypatch.chdir(tmp_path)
    again()
    yield tmp_path
    monkeypatch.undo()
    again()


def math_is_fastest(steps: dict[str, Any], *_: Any) -> Any:
    from attn_dispatch.selection.timing import Timing

    for step in steps.values():
        step()
    return {name: Timing(50.0 if name == "sdpa_math" else 100.0, 1.0) for name in steps}


def again() -> None:
    """As a new process: settings, registry, decisions and files are read anew."""
    settings.cache_clear()
    registry.reset()


def x(sq: int = 24) -> torch.Tensor:
    return torch.randn(1, 2, sq, 8, dtype=torch.float64)  # so that few backends take it, and none is pruned


def captured(path: Path, *lengths: int) -> Path:
    with dispatch.capture() as workload:
        for sq in lengths or (24, 20, 100):
            dispatch.attention(x(sq), x(sq), x(sq), is_causal=True)
    workload.save(path)
    return path


def run(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_from_a_workload_to_a_lock_file_that_decides(machine):
    workload = captured(machine / "w.yaml")
    said = run("tune", str(workload), "-o", "attn_dispatch.yaml")
    assert "2 ops, 0 from the store" in said  # 20 and 24 are one bucket
    lock = yaml.safe_load((machine / "attn_dispatch.yaml").read_text())
    assert lock["schema"] == 1
    assert lock["hardware"]["device"] == "cpu"
    assert lock["measured"]["by"] == f"attn-dispatch tune {workload}"
    first = lock["tuned"][0]
    assert first["use"][0] == "sdpa_math"
    assert first["count"] == 2
    assert first["medians_us"]["sdpa_math"] == 50.0
    assert 0 <= first["errors"]["sdpa_math"]["out"] < 1
    assert "sdpa_math" in first["versions"]["sdpa_math"]
    Store(machine / "cache").clear()  # what decides now is the file alone
    again()
    decision = dispatch.plan(x(), x(), x(), is_causal=True).decision
    assert decision.chosen.name == "sdpa_math"
    assert decision.source.startswith("tuned")
    assert "attn_dispatch.yaml" in decision.source
    with dispatch.use(autotune="assert"):
        dispatch.attention(x(100), x(100), x(100), is_causal=True)


def test_a_second_run_measures_nothing_and_brings_the_file_up_to_date(machine):
    run("tune", str(captured(machine / "a.yaml", 24)), "-o", "attn_dispatch.yaml")
    again()
    said = run(
        "tune",
        str(captured(machine / "a.yaml", 24)),
        str(captured(machine / "b.yaml", 100)),
        "-o",
        "attn_dispatch.yaml",
    )
    assert "2 ops, 1 from the store" in said
    assert len(yaml.safe_load((machine / "attn_dispatch.yaml").read_text())["tuned"]) == 2
    again()
    run("tune", str(captured(machine / "c.yaml", 300)), "-o", "attn_dispatch.yaml")
    assert len(yaml.safe_load((machine / "attn_dispatch.yaml").read_text())["tuned"]) == 3
    assert "1 ops, 0 from the store" in run("tune", str(machine / "a.yaml"), "--force")


def test_a_candidate_that_is_new_or_mended_is_measured_again(machine, monkeypatch):
    """What is in the store hid a plugin that was installed since."""
    workload = str(captured(machine / "w.yaml", 24))
    run("tune", workload)
    store = Store(machine / "cache")
    ((path, entry),) = store.entries()
    assert "1 from the store" in run("tune", workload)
    for changed in (
        replace(entry, records=tuple(r for r in entry.records if r.name != "eager")),
        replace(entry, records=tuple(replace(r, status="crashed", version="older") if r.name == "eager" else r
                                     for r in entry.records)),
        replace(entry, ranking=()),
    ):  # fmt: skip
        path.write_text(json.dumps(changed.to_dict()))
        again()
        assert "0 from the store" in run("tune", workload)
        assert "1 from the store" in run("tune", workload)


def test_what_others_write_into_the_lock_file_meanwhile_is_kept(machine, monkeypatch):
    out = machine / "attn_dispatch.yaml"
    run("tune", str(captured(machine / "a.yaml", 100)), "-o", "other.yaml")
    other = (machine / "other.yaml").read_text()

    def meanwhile(op: Any, *rest: Any) -> Any:
        out.write_text(other)
        return tune(op, *rest)

    again()
    monkeypatch.setattr("attn_dispatch.cli.tune.tune_together", meanwhile)
    run("tune", str(captured(machine / "b.yaml", 24)), "-o", str(out))
    lengths = [entry["op"]["query"]["shape"][2] for entry in yaml.safe_load(out.read_text())["tuned"]]
    assert sorted(lengths) == [24, 100]
    assert not list(machine.glob("*.unfinished"))


@pytest.mark.parametrize(
    ("paces", "winner"),
    [
        ((2.0, 2.0, 1.0, 1.0, 1.0, 1.0), "sdpa_flash"),  # the second time at the better pace: it is kept
        ((1.0, 2.0, 1.0, 1.0, 1.0, 3.0), "sdpa_math"),  # slower still: the first is kept
        ((1.2, 1.2, 1.0, 1.0), "sdpa_math"),  # as fast as the best, or nearly
    ],
)
def test_what_was_measured_in_a_slow_minute_is_measured_again(machine, monkeypatch, paces, winner):
    from attn_dispatch.selection.timing import Timing

    left, tuned_ops = list(paces), []

    def other_times_at_another_pace(steps: dict[str, Any], *_: Any) -> Any:
        fast = "sdpa_math" if len(tuned_ops) < 3 else "sdpa_flash"
        return {name: Timing(50.0 if name == fast else 100.0, 1.0) for name in steps}

    def counted(op: Any, *rest: Any) -> Any:
        tuned_ops.append(op)
        return tune(op, *rest)

    monkeypatch.setattr("attn_dispatch.selection.tuner.interleaved", other_times_at_another_pace)
    monkeypatch.setattr("attn_dispatch.selection.tuner.pace_s", lambda device: left.pop(0))
    monkeypatch.setattr("attn_dispatch.cli.tune.tune_together", counted)
    said = run("tune", str(captured(machine / "w.yaml", 24, 100)), "-o", "attn_dispatch.yaml")
    assert ("1 ops measured twice: the machine had been up to 2.0x slower than usual" in " ".join(said.split())) == (
        paces[1] == 2
    )
    first = tuned_ops[0]
    assert (tuned_ops.count(first), left) == (2 if paces[1] == 2 else 1, [])
    entry = Store(machine / "cache").get(first)
    assert isinstance(entry, Entry)
    assert entry.winner == winner
    written = yaml.safe_load((machine / "attn_dispatch.yaml").read_text())["tuned"]
    assert [e["use"][0] for e in written if e["op"]["query"]["shape"][2] == first.Sq] == [winner]


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()], ids=["broken", "Ctrl-C"])
def test_a_second_measuring_that_fails_loses_nothing(machine, monkeypatch, error):
    left, calls = [2.0, 2.0, 1.0, 1.0], []

    def once(op: Any, *rest: Any) -> Any:
        calls.append(op)
        if calls.count(op) > 1:
            raise error
        return tune(op, *rest)

    monkeypatch.setattr("attn_dispatch.selection.tuner.pace_s", lambda device: left.pop(0))
    monkeypatch.setattr("attn_dispatch.cli.tune.tune_together", once)
    stopped = isinstance(error, KeyboardInterrupt)
    workload = captured(machine / "w.yaml", 24, 100)
    said = run("tune", str(workload), "-o", "attn_dispatch.yaml", code=130 if stopped else 0)
    assert ("interrupted" in said) == stopped
    assert len(calls) == 3
    assert len(yaml.safe_load((machine / "attn_dispatch.yaml").read_text())["tuned"]) == 2


def test_the_pace_of_a_machine_tells_a_slow_minute():
    from attn_dispatch.selection.pace import pace_s, slowdown
    from attn_dispatch.selection.tuner import Session

    assert pace_s("cpu") > 0.0 == pace_s("cuda")
    assert [slowdown(*pair) for pair in ((3.0, 2.0), (1.0, 2.0), (0.0, 2.0), (2.0, 0.0))] == [1.5, 1.0, 1.0, 1.0]
    assert Session().slowdown_of(None) == 1.0
    paces = {"slow": 3.0, "a": 2.0, "b": 2.0, "c": 2.2, "lucky": 1.0, "on a GPU": 0.0}
    assert {op: Session(paces=paces).slowdown_of(op) for op in paces} == {
        "slow": 1.5, "a": 1.0, "b": 1.0, "c": pytest.approx(1.1), "lucky": 1.0, "on a GPU": 1.0
    }  # fmt: skip


def test_ctrl_c_keeps_what_is_done(machine, monkeypatch):
    workload = captured(machine / "w.yaml", 24, 100, 300)
    calls: list[Any] = []

    def interrupted(op: Any, *rest: Any) -> Any:
        calls.append(op)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return tune(op, *rest)

    monkeypatch.setattr("attn_dispatch.cli.tune.tune_together", interrupted)
    assert "interrupted: what was done is kept" in run("tune", str(workload), "-o", "attn_dispatch.yaml", code=130)
    assert len(yaml.safe_load((machine / "attn_dispatch.yaml").read_text())["tuned"]) == 1
    assert len(list(Store(machine / "cache").files())) == 1


def test_an_op_for_hardware_that_is_not_here_is_named(machine):
    here = torch.cuda.is_available()
    said = run("tune", str(captured(machine / "w.yaml", 24)), "--device", "cuda", code=0 if here else 1)
    assert "not tuned" in said or here


def test_a_file_with_pins_is_not_written_over(machine):
    (machine / "attn_dispatch.yaml").write_text("schema: 1\npins:\n  - use: [eager]\n")
    workload = captured(machine / "w.yaml", 24)
    with pytest.raises(InputError, match="holds more than tuned results"):
        run("tune", str(workload), "-o", "attn_dispatch.yaml")
    assert "pins" in (machine / "attn_dispatch.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "must be a mapping"), ("schema: 1\nops: []\n", "no op to tune"), ("schema: 9\nops: []\n", "reads 1")],
)
def test_a_workload_that_is_none_is_named(machine, text, words):
    (machine / "w.yaml").write_text(text)
    with pytest.raises(InputError, match=words) as caught:
        run("tune", "w.yaml")
    assert "w.yaml" in str(caught.value)


def test_cache_ls_show_export_merge_clear(machine):
    run("tune", str(captured(machine / "w.yaml", 24)))
    assert "sdpa_math" in run("cache", "ls")
    (row,) = json.loads(run("cache", "ls", "--json"))
    digest = next(Store(machine / "cache").files()).stem
    assert json.loads(run("cache", "show", digest[:6])) == row
    assert row["ranking"][0] == "sdpa_math"
    run("cache", "export", "-o", "attn_dispatch.yaml")
    assert yaml.safe_load((machine / "attn_dispatch.yaml").read_text())["tuned"][0]["digest"] == digest
    other = machine / "other"
    tuned.store().root.rename(other)
    again()
    assert "took 1 entries" in run("cache", "merge", str(other))
    assert "removed 1 files" in run("cache", "clear")
    assert "0 files" in run("cache", "ls")
    with pytest.raises(InputError, match="has no entry"):
        run("cache", "show", "abc")
    with pytest.raises(InputError, match="has nothing for this machine"):
        run("cache", "export", "-o", "x.yaml")


def test_a_lock_file_of_other_versions_is_not_used_and_said_once(machine):
    run("tune", str(captured(machine / "w.yaml", 24)), "-o", "attn_dispatch.yaml")
    text = (machine / "attn_dispatch.yaml").read_text()
    (machine / "attn_dispatch.yaml").write_text(text.replace(f"sdpa_math {torch.__version__}", "sdpa_math 1.0"))
    Store(machine / "cache").clear()
    again()
    with pytest.warns(StoreWarning, match="sdpa_math was measured with .*sdpa_math 1.0"):
        assert dispatch.plan(x(), x(), x(), is_causal=True).decision.source == "heuristic"


def test_json_says_all(machine):
    code = "import sys; from attn_dispatch.cli import main; main()"
    args = ["tune", str(captured(machine / "w.yaml", 24)), "--json"]
    run_ = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True)
    data = json.loads(run_.stdout)
    assert data["entries"][0]["ranking"]
    assert {r["status"] for r in data["entries"][0]["records"]} <= {"ok", "pruned"}


def test_the_default_effort_is_the_documented_one():
    page = (Path(__file__).parent.parent / "docs" / "tuning.md").read_text()
    assert (Effort().prune, Effort().reach) == (3.0, 8.0)
    assert "three times the best estimate (eight times" in page


HERE = {"device": "cpu", "name": "this", "arch": "x86_64", "threads": 2}
HEAD = "schema: 1\nhardware: {device: cpu, name: this, arch: x86_64, threads: 2}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "no lock file of schema 1"),
        ("tuned: []\n", "no lock file of schema 1"),
        ("schema: 2\n", "no lock file of schema 1"),
        ("notes: mine\nschema: 1\n", r"more than tuned results \(notes\)"),
        ("schema: 1\npins: []\n", r"more than tuned results \(pins\)"),
        (HEAD + "# why we keep this\ntuned: []\n", r"more than tuned results \(comments\)"),
        (HEAD + "tuned: 3\n", "no list of entries"),
        (HEAD + "tuned: [3]\n", "no list of entries"),
        (HEAD.replace("this", "another") + "tuned: [{use: [eager]}]\n", "is for .*another.*, this is"),
        (HEAD.replace("threads: 2", "threads: 4") + "tuned: [{use: [eager]}]\n", "is for .*4.*, this is"),
        ("schema: 1\ntuned: [{use: [eager]}]\n", "is for None"),
        ("a: [", "is no lock file"),
    ],
)
def test_a_file_that_writing_anew_would_harm_is_refused_and_left(text, words, tmp_path):
    path = tmp_path / "lock.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_lock(path, HERE)
    assert path.read_text() == text


@pytest.mark.parametrize(
    "text", ["", HEAD, HEAD + "tuned: []\n", HEAD + "measured: {by: me}\ntuned: [{use: [eager]}]\n"]
)
def test_a_lock_file_of_this_machine_is_brought_up_to_date(text, tmp_path):
    path = tmp_path / "lock.yaml"
    path.write_text(text)
    assert read_lock(path, HERE) == ([{"use": ["eager"]}] if "eager" in text else [])


def test_a_lock_file_of_another_machine_is_refused_before_anything_is_measured(machine, monkeypatch):
    run("tune", str(captured(machine / "w.yaml", 24)), "-o", "lock.yaml")
    text = (machine / "lock.yaml").read_text().replace("threads: ", "threads: 9")
    (machine / "lock.yaml").write_text(text)
    monkeypatch.setattr("attn_dispatch.cli.tune.tune_together", lambda *_: pytest.fail("measured"))
    for command in (["tune", "w.yaml", "-o", "lock.yaml", "--force"], ["cache", "export", "-o", "lock.yaml"]):
        with pytest.raises(InputError, match=r"lock\.yaml is for"):
            run(*command)
    assert (machine / "lock.yaml").read_text() == text


def test_one_lock_file_is_for_one_machine(machine, monkeypatch):
    monkeypatch.setattr("attn_dispatch.cli.tune.tune_together", lambda *_: pytest.fail("measured"))
    captured(machine / "a.yaml", 24)
    text = (machine / "a.yaml").read_text()
    (machine / "b.yaml").write_text(text.replace("device: cpu", "device: cuda"))
    with pytest.raises(InputError, match="one file for one machine kind, and the ops are for cpu, cuda"):
        run("tune", "a.yaml", "b.yaml", "-o", "lock.yaml")


def test_an_op_that_cannot_be_measured_does_not_lose_the_others(machine, monkeypatch):
    def sometimes(op: Any, *rest: Any) -> Any:
        if op.Sq == 24:
            raise MemoryError("no room")
        return tune(op, *rest)

    monkeypatch.setattr("attn_dispatch.cli.tune.tune_together", sometimes)
    said = run("tune", str(captured(machine / "w.yaml", 24, 100)), "-o", "lock.yaml")
    assert "MemoryError: no room" in said
    assert "1 ops, 0 from the store" in said
    assert len(yaml.safe_load((machine / "lock.yaml").read_text())["tuned"]) == 1


def test_export_takes_the_entries_of_one_device(machine):
    run("tune", str(captured(machine / "w.yaml", 24)))
    with pytest.raises(InputError, match="has nothing for this machine"):
        run("cache", "export", "-o", "x.yaml", "--device", "cuda")
    run("cache", "export", "-o", "x.yaml", "--device", "cpu")
    assert yaml.safe_load((machine / "x.yaml").read_text())["hardware"]["device"] == "cpu"


def test_the_number_of_threads_may_be_set_at_any_time():
    """It was asked once, so results of one number were filed and used under another."""
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append((facts("cpu").threads, environment("cpu").threads))
        assert found == [(1, 1), (3, 3)]
    finally:
        torch.set_num_threads(before)


def test_a_folder_stands_for_its_workload_files(machine):
    (machine / "mine").mkdir()
    with pytest.raises(InputError, match="mine holds no workload files"):
        run("tune", "mine")
    captured(machine / "mine" / "a.yaml", 24)
    captured(machine / "mine" / "b.yaml", 100)
    assert "2 ops, 0 from the store" in run("tune", "mine", "-o", "lock.yaml")
    assert yaml.safe_load((machine / "lock.yaml").read_text())["measured"]["by"] == "attn-dispatch tune mine"


def test_a_file_that_is_not_there_is_named_with_a_remedy_of_no_command(machine):
    with pytest.raises(InputError) as caught:
        run("tune", "nowhere.yaml")
    assert "nowhere.yaml: No such file" in str(caught.value)
    assert "give a workload file: dispatch.capture() writes one" in str(caught.value)


def test_where_nothing_was_tuned_nothing_is_written_and_the_command_fails(machine, monkeypatch):
    def fails(*_: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr("attn_dispatch.cli.tune.tune_together", fails)
    said = run("tune", str(captured(machine / "w.yaml", 24)), "-o", "lock.yaml", code=1)
    assert "nothing was tuned: lock.yaml was not written" in said
    assert not (machine / "lock.yaml").exists()
    run("tune", "w.yaml", code=1)


def test_words_in_brackets_are_shown_as_they_are_and_cost_no_lock_file(machine, monkeypatch):
    """rich read them as markup: an error's text with ``[/]`` raised before the file was written."""

    def sometimes(op: Any, *rest: Any) -> Any:
        if op.Sq == 24:
            raise RuntimeError("the kernel says [/red] and [bold]")
        return replace(tune(op, *rest), why="fast [/so]")

    monkeypatch.setattr("attn_dispatch.cli.tune.tune_together", sometimes)
    said = run("tune", str(captured(machine / "w.yaml", 24, 100)), "-o", "lock.yaml")
    assert "the kernel says [/red] and [bold]" in " ".join(said.split())
    assert "fast [/so]" in said
    assert len(yaml.safe_load((machine / "lock.yaml").read_text())["tuned"]) == 1


def test_the_lock_file_is_written_before_anything_is_printed(machine, monkeypatch):
    def breaks(*_: Any) -> Any:
        raise RuntimeError("the terminal is gone")

    monkeypatch.setattr("attn_dispatch.cli.tune._table", breaks)
    with pytest.raises(RuntimeError, match="the terminal is gone"):
        run("tune", str(captured(machine / "w.yaml", 24)), "-o", "lock.yaml")
    assert len(yaml.safe_load((machine / "lock.yaml").read_text())["tuned"]) == 1


def test_cache_show_wants_the_beginning_of_one_entry(machine):
    run("tune", str(captured(machine / "w.yaml", 24, 100)))
    names = [f"{path.parent.name}/{path.stem}" for path in Store(machine / "cache").files()]
    with pytest.raises(InputError, match="has no entry 'zz'"):
        run("cache", "show", "zz")
    for empty in ("", " ", "/"):
        with pytest.raises(InputError, match="an empty digest is the beginning of every entry"):
            run("cache", "show", empty)
    folder = names[0].partition("/")[0]
    with pytest.raises(InputError, match=f"'{folder}/' is the beginning of 2 entries") as caught:
        run("cache", "show", f"{folder}/")
    assert all(name in str(caught.value) for name in names)
    entry = next(entry for _, entry in Store(machine / "cache").entries())
    assert isinstance(entry, Entry)
    elsewhere = replace(entry, environment=replace(entry.environment, threads=entry.environment.threads + 1))
    Store(machine / "cache").put(elsewhere)
    digest = entry.op.digest()
    with pytest.raises(InputError, match=f"'{digest}' is the beginning of 2 entries"):
        run("cache", "show", digest)
    for one in (entry, elsewhere):
        shown = json.loads(run("cache", "show", f"{one.environment.digest()}/{digest}"))
        assert shown["environment"]["threads"] == one.environment.threads
