"""The tuned store: one atomic file per op, keys that say everything, misses that say why, and no data lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attn_dispatch.errors import StoreWarning
from attn_dispatch.ir.atoms import Causal, Window
from attn_dispatch.ir.ops import AttentionOp, Outputs, bucket
from attn_dispatch.ir.scores import SoftCap
from attn_dispatch.ir.tensors import TensorDesc
from attn_dispatch.ir.weights import Linear
from attn_dispatch.selection.environment import environment
from attn_dispatch.selection.store import Entry, Miss, Record, Store, explain_miss


def op_of(b: int = 1, hq: int = 2, hkv: int = 2, sq: int = 16, skv: int = 16, d: int = 8, **changes) -> AttentionOp:
    dtype = changes.pop("dtype", "float32")
    q, kv = TensorDesc((b, hq, sq, d), dtype), TensorDesc((b, hkv, skv, d), dtype)
    return AttentionOp(q, kv, kv, scale=d**-0.5, **changes)


def entry_of(op: AttentionOp, winner: str = "eager", when: str = "2026-01-01T00:00:00+00:00", **changes) -> Entry:
    records = (Record(winner, "ok", 10.0, 1.0, {"out": 0.1}, "torch 1"), Record("other", "wrong", note="off by one"))
    made = Entry(op.bucketed(), op, records, (winner,), environment("cpu"), when, 1.5, "the fastest")
    return replace(made, **changes)


# --- one entry -------------------------------------------------------------------------------------------------------


def test_an_entry_comes_back_whole(tmp_path):
    entry = entry_of(op_of(mask=Causal() & Window(3, None), score=(SoftCap(2.0),)))
    path = Store(tmp_path).put(entry)
    assert path is not None
    assert path.read_text().startswith("{")
    assert Store(tmp_path).get(entry.measured) == entry  # another store: from the file, not from memory


def test_an_entry_serves_its_bucket_and_no_other(tmp_path):
    store = Store(tmp_path)
    store.put(entry_of(op_of(sq=9, skv=9)))
    assert isinstance(store.get(op_of(sq=13, skv=13)), Entry)
    assert isinstance(store.get(op_of(sq=17, skv=17)), Miss)


@given(b=st.integers(1, 70), sq=st.integers(1, 5000), skv=st.integers(1, 5000))
def test_tuning_and_lookup_bucket_alike(b, sq, skv):
    """Peer bug (FlashInfer, two bucket functions): what tuning files an op under is where lookup searches."""
    op = op_of(b=b, sq=sq, skv=skv)
    assert entry_of(op).op == op.bucketed() == op.bucketed().bucketed()
    assert bucket(b) == op.bucketed().B


CHANGES = {
    "query": op_of(d=16).query,
    "key": op_of(hkv=1).key,
    "value": TensorDesc((1, 2, 16, 4), "float32"),
    "scale": 0.5,
    "score": (SoftCap(3.0),),
    "mask": Causal(),
    "q_offset": 4,
    "weight": Linear(),
    "dropout_p": 0.25,
    "outputs": Outputs(lse=True),
    "operands": (("bias", TensorDesc((1, 1, 16, 16), "float32")),),
    "grad": ("query",),
    "higher_order": True,
    "deterministic": True,
    "traced": True,
    "layout": "bshd",
}


@pytest.mark.parametrize("name", [f.name for f in fields(AttentionOp)])
def test_every_field_of_an_op_changes_its_key(name):
    """Peer bug (FlashInfer #3363, a key without the extras): a field that is added must be thought of here."""
    plain = op_of()
    changed = plain.with_(**{name: CHANGES[name]})
    assert changed.key_text != plain.key_text
    assert changed.digest() != plain.digest()


@pytest.mark.parametrize("name", ["dtype", "device", "strides"])
def test_every_field_of_a_tensor_changes_the_key(name):
    plain = op_of()
    other = {"dtype": "bfloat16", "device": "cuda", "strides": "scattered"}[name]
    assert plain.with_(key=replace(plain.key, **{name: other})).digest() != plain.digest()


def test_the_key_is_equal_in_another_process():
    """Peer bug (AlphaFold 3 #609): an address in the key."""
    op = op_of(mask=Causal() & Window(3, None), score=(SoftCap(2.0),))
    code = (
        "import json, sys\n"
        "from attn_dispatch.ir.ops import AttentionOp\n"
        "from attn_dispatch.selection.environment import environment\n"
        "print(AttentionOp.from_dict(json.loads(sys.argv[1])).digest(), environment('cpu').digest())\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, json.dumps(op.to_dict())],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in (1, 2)
    }  # fmt: skip
    assert {line.split()[0] for line in outputs} == {op.digest()}
    assert len(outputs) == 1


def test_another_machine_is_another_key(tmp_path):
    """Peer bugs (Triton, flashinfer-bench): a record of one GPU used on another."""
    here = environment("cpu")
    store = Store(tmp_path)
    for name, winner in (("GPU A", "fast_on_a"), ("GPU B", "fast_on_b")):
        store.put(entry_of(op_of(), winner, environment=replace(here, name=name)))
    for name, winner in (("GPU A", "fast_on_a"), ("GPU B", "fast_on_b")):
        found = store.get(op_of(), replace(here, name=name))
        assert isinstance(found, Entry)
        assert found.winner == winner
    assert isinstance(store.get(op_of()), Miss)


@pytest.mark.parametrize("name", [f.name for f in fields(environment("cpu"))])
def test_every_field_of_the_environment_counts(name, tmp_path):
    here = environment("cpu")
    other = replace(here, **{name: 99 if name == "threads" else "other"})
    store = Store(tmp_path)
    store.put(entry_of(op_of(), environment=other))
    assert isinstance(Store(tmp_path).get(op_of()), Miss)


# --- misses that say why ----------------------------------------------------------------------------------------------


def test_a_miss_is_explained_field_by_field(tmp_path):
    store = Store(tmp_path)
    assert "the store is empty" in str(explain_miss(store, op_of()))
    store.put(entry_of(op_of(mask=Causal())))
    assert "mask: measured Causal, asked none" in str(explain_miss(store, op_of()))
    far = explain_miss(store, op_of(mask=Causal(), dtype="bfloat16", skv=64, sq=64))
    assert any("query.dtype: measured float32, asked bfloat16" in reason for reason in far.reasons)
    assert any("key.shape: measured [1, 2, 16, 8], asked [1, 2, 64, 8]" in reason for reason in far.reasons)
    assert explain_miss(store, op_of(mask=Causal())).reasons == ()


def test_a_miss_names_the_environment_that_was_measured(tmp_path):
    store = Store(tmp_path)
    store.put(entry_of(op_of(), environment=replace(environment("cpu"), torch="1.0")))
    assert "torch: measured 1.0, here" in str(explain_miss(store, op_of()))


# --- files that are no entries ----------------------------------------------------------------------------------------

BROKEN = {
    "empty": lambda text: "",
    "truncated": lambda text: text[: len(text) // 2],
    "binary": lambda text: "\x00\x01\x02",
    "a list": lambda text: "[]",
    "another schema": lambda text: text.replace('"schema": 1', '"schema": 7'),
    "no ranking": lambda text: text.replace('"ranking"', '"rankings"'),
    "a foreign key": lambda text: text.replace('"dtype": "float32"', '"dtype": "float64"'),
    "an unknown field": lambda text: text.replace('"records": [', '"records": [{"name": "x", "colour": 1},'),
    "deeply nested": lambda text: "[" * 100_000,
    "a time that is text": lambda text: text.replace('"median_us": 10.0', '"median_us": "fast"'),
    "a time that is no number": lambda text: text.replace('"median_us": 10.0', '"median_us": NaN'),
    "an error that is text": lambda text: text.replace('"out": 0.1', '"out": "small"'),
    "seconds that are text": lambda text: text.replace('"seconds": 1.5', '"seconds": "long"'),
    "a note that is a number": lambda text: text.replace('"note": "off by one"', '"note": 1'),
    "a ranking of nobody": lambda text: text.replace('"ranking": [\n  "eager"', '"ranking": [\n  "nobody"'),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_a_miss_and_one_warning_and_is_not_lost(kind, tmp_path):
    entry = entry_of(op_of())
    path = Store(tmp_path).put(entry)
    assert path is not None
    broken = BROKEN[kind](path.read_text())
    path.write_text(broken)
    store = Store(tmp_path)
    with pytest.warns(StoreWarning, match=path.name) as said:  # noqa: PT031 - one warning for both
        assert isinstance(store.get(op_of()), Miss)
        store.forget()
        assert isinstance(store.get(op_of()), Miss)
    assert len(said) == 1
    store.put(entry)  # what was there is renamed, not written over
    assert Store(tmp_path).get(op_of()) == entry
    assert path.with_name(path.name + ".aside").read_text() == broken


def test_an_entry_under_another_name_is_not_believed(tmp_path):
    store = Store(tmp_path)
    path = store.put(entry_of(op_of()))
    assert path is not None
    other = op_of(mask=Causal())
    path.rename(path.with_name(f"{other.bucketed().digest()}.json"))
    with pytest.warns(StoreWarning, match="another op"):
        assert isinstance(Store(tmp_path).get(other), Miss)


@pytest.mark.parametrize("where", ["a file", "read only", "none"])
def test_a_store_that_cannot_be_written_works_in_memory_and_says_so_once(where, tmp_path):
    root: Path | None = tmp_path / "store"
    if where == "a file":
        (tmp_path / "store").write_text("in the way")
    elif where == "read only":
        root = Path("/proc/attn_dispatch")
    else:
        root = None
    store = Store(root)
    with pytest.warns(StoreWarning, match="kept in this process only") as said:  # noqa: PT031 - one for both
        assert store.put(entry_of(op_of())) is None
        store.put(entry_of(op_of(mask=Causal())))
    assert len(said) == 1
    assert isinstance(store.get(op_of()), Entry)


# --- many entries ----------------------------------------------------------------------------------------------------


def test_entries_can_be_read_by_who_shares_the_folder(tmp_path):
    before = os.umask(0o022)
    try:
        path = Store(tmp_path).put(entry_of(op_of()))
    finally:
        os.umask(before)
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o644


def test_what_may_not_be_read_is_not_called_invalid_and_removed(tmp_path, monkeypatch):
    store = Store(tmp_path)
    path = store.put(entry_of(op_of()))
    assert path is not None
    monkeypatch.setattr(
        "attn_dispatch.selection.store._load", lambda _: (_ for _ in ()).throw(PermissionError(13, "no"))
    )
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert store.clear(invalid_only=True) == 0
    assert path.exists()


@given(b=st.sampled_from([1, 2, 3]), sq=st.integers(1, 300), skv=st.integers(1, 300), offset=st.integers(-300, 300))
def test_a_bucket_is_a_fixed_point_for_any_offset(b, sq, skv, offset):
    op = op_of(b=b, sq=sq, skv=skv, mask=Causal(), q_offset=offset).bucketed()
    assert op.bucketed() == op


def test_each_step_over_a_static_cache_is_not_a_bucket_of_its_own():
    """At lengths that are powers of two the offset was not bucketed."""
    keys = {op_of(sq=1, skv=2048, mask=Causal(), q_offset=i).bucketed() for i in range(1, 2048)}
    assert len(keys) <= 13
    near = op_of(sq=1, skv=2000, mask=Causal(), q_offset=100).bucketed()
    assert near == op_of(sq=1, skv=2048, mask=Causal(), q_offset=100).bucketed()


def test_a_file_in_the_folders_place_is_one_warning_for_all_ops(tmp_path):
    place = tmp_path / "cache"
    place.write_text("not a folder")
    store = Store(place)
    with pytest.warns(StoreWarning, match="cannot be read") as said:  # noqa: PT031 - one warning for both
        assert isinstance(store.get(op_of()), Miss)
        assert isinstance(store.get(op_of(mask=Causal())), Miss)
    assert len(said) == 1


def test_a_folder_in_an_entrys_place_is_left_by_clear(tmp_path):
    store = Store(tmp_path)
    path = store.put(entry_of(op_of()))
    assert path is not None
    path.unlink()
    path.mkdir()
    assert store.clear(invalid_only=True) == 0
    assert path.is_dir()


def test_clear_removes_entries_leftovers_and_what_was_set_aside(tmp_path):
    store = Store(tmp_path)
    path = store.put(entry_of(op_of()))
    store.put(entry_of(op_of(mask=Causal())))
    assert path is not None
    path.with_name("x.unfinished").write_text("{")
    path.write_text("broken")
    assert store.clear(invalid_only=True) == 2
    assert len(list(store.files())) == 1
    assert store.clear() == 1
    assert not list(store.files())


def test_merge_takes_what_is_new_or_newer(tmp_path):
    ours, theirs = Store(tmp_path / "a"), Store(tmp_path / "b")
    ours.put(entry_of(op_of(), "old", "2026-01-01"))
    ours.put(entry_of(op_of(mask=Causal()), "newest", "2026-03-01"))
    theirs.put(entry_of(op_of(), "new", "2026-02-01"))
    theirs.put(entry_of(op_of(mask=Causal()), "older", "2026-02-01"))
    theirs.put(entry_of(op_of(d=16), "only_there", "2026-02-01"))
    assert ours.merge(theirs) == (2, 1)
    found = [ours.get(op) for op in (op_of(), op_of(mask=Causal()), op_of(d=16))]
    assert [entry.winner for entry in found if isinstance(entry, Entry)] == ["new", "newest", "only_there"]


def _write_for_ever(root: str, seed: int, finished: str) -> None:
    generator = random.Random(seed)
    store = Store(Path(root))
    done = os.open(finished, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while True:
        d = generator.randint(1, 12)
        store.put(entry_of(op_of(d=d), f"winner_{seed}"))
        os.write(done, f"{d}\n".encode())


def test_sixteen_writers_that_are_killed_lose_no_finished_entry(tmp_path):
    root, finished = tmp_path / "store", tmp_path / "finished"
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=_write_for_ever, args=(str(root), n, str(finished))) for n in range(16)]
    for writer in writers:
        writer.start()
    generator = random.Random(0)
    deadline = time.monotonic() + 60
    while not finished.exists() or len(finished.read_text().splitlines()) < 100:
        assert time.monotonic() < deadline, "nothing was written"
        time.sleep(0.05)
    for writer in sorted(writers, key=lambda _: generator.random()):
        time.sleep(generator.random() * 0.05)
        os.kill(writer.pid, signal.SIGKILL)
    for writer in writers:
        writer.join()
    store = Store(root)
    for d in {int(line) for line in finished.read_text().split()}:
        found = store.get(op_of(d=d))
        assert isinstance(found, Entry), f"the entry of d {d} was lost: {found}"
        assert found.winner.startswith("winner_")
    assert all(isinstance(entry, Entry) for _, entry in store.entries())


@pytest.mark.parametrize("wrong", ["name", "folder"])
def test_an_entry_in_a_wrong_place_is_no_entry_for_anybody(wrong, tmp_path):
    """`get` looked, and listing, merging and exporting did not: a copied file came back as this machine's."""
    ours, theirs = Store(tmp_path / "a"), Store(tmp_path / "b")
    path = theirs.put(entry_of(op_of()))
    assert path is not None
    if wrong == "name":
        path.rename(path.with_name("0123456789abcdef.json"))
    else:
        (path.parent.parent / "0123456789abcdef").mkdir()
        path.rename(path.parent.parent / "0123456789abcdef" / path.name)
    ((_, found),) = theirs.entries()
    assert isinstance(found, Miss)
    assert ("another op" if wrong == "name" else "another environment") in str(found)
    assert ours.merge(theirs)[0] == 0
    assert not list(ours.files())
    assert theirs.clear(invalid_only=True) == 1


def test_what_is_set_aside_a_second_time_does_not_replace_the_first(tmp_path):
    store = Store(tmp_path)
    path = store.put(entry_of(op_of()))
    assert path is not None
    for text in ("first", "second"):
        path.write_text(text)
        store.put(entry_of(op_of()))
    kept = sorted(p.read_text() for p in path.parent.glob("*.aside*"))
    assert kept == ["first", "second"]
    assert store.clear() == 3
    assert not list(path.parent.glob("*.aside*"))


def test_a_folder_that_may_not_be_entered_is_one_warning_and_a_miss(tmp_path, monkeypatch):
    """As root every folder may be entered, so the refusal is made here."""
    store = Store(tmp_path)

    def refused(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.warns(StoreWarning, match="cannot be read") as said:  # noqa: PT031 - one warning for both
        assert isinstance(store.get(op_of()), Miss)
        assert isinstance(store.get(op_of(mask=Causal())), Miss)
    assert len(said) == 1
    monkeypatch.setattr(os, "stat", refused)
    assert list(store.files()) == []


def test_an_entry_from_before_precision_counted_is_still_one(tmp_path):
    """Such entries were called invalid, and `cache clear --invalid` removed them."""
    store = Store(tmp_path)
    path = store.put(entry_of(op_of()))
    assert path is not None
    assert "precision" not in path.read_text()
    assert isinstance(Store(tmp_path).get(op_of()), Entry)
    assert Store(tmp_path).clear(invalid_only=True) == 0
