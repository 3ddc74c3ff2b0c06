"""The bench: suites load, ops become calls and back, and a run says who was right, who was fast and who broke."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from attn_dispatch import dispatch, masks, variants
from attn_dispatch.bench import by_hand as hand
from attn_dispatch.bench import main, measure, models, peers, report, suite, variants_nn
from attn_dispatch.bench.by_hand import by_hand, float_mask
from attn_dispatch.bench.calls import call_of, op_of
from attn_dispatch.bench.cases import Case, Contenders
from attn_dispatch.bench.contenders import Contender, NotApplicable, candidates, graded, ours
from attn_dispatch.bench.measure import Effort, Line, Row, label
from attn_dispatch.bench.picture import draw
from attn_dispatch.bench.truth import Truth
from attn_dispatch.capture import Use, Workload
from attn_dispatch.cli import app
from attn_dispatch.errors import InputError
from attn_dispatch.ir.atoms import Columns
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.registry import current
from attn_dispatch.selection.samples import make_sample
from attn_dispatch.selection.timing import Timing

FILES = sorted(main.workload_folder().glob("*.yaml"))
JOBS = main.jobs_of("main")
QUICK = Effort(rounds=2, total_s=0.1, turn_s=1e-4)


@pytest.fixture(autouse=True)
def _own_choice(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is measured on this machine does not change what these tests see."""
    with dispatch.use(autotune="off"):
        yield


def op(*args: Any, **kwargs: Any) -> AttentionOp:
    return dispatch.explain(*args, **kwargs).op


# --- the suite -------------------------------------------------------------------------------------------------------


def test_the_main_suite_has_enough_distinct_ops_with_names_of_their_own():
    assert len({job.use.op for job in JOBS}) >= 24
    assert len({job.name for job in JOBS}) == len(JOBS)
    assert all(job.use.count >= 1 and job.use.layers for job in JOBS)


def test_the_main_suite_covers_what_models_do():
    ops = [job.use.op for job in JOBS]
    words = set().union(*(o.features for o in ops))
    wanted = ("mask:Causal", "mask:Window", "mask:KeyLengths", "mask:Columns", "mask:Segments", "score:SoftCap")
    assert {*wanted, "score:Bias", "sinks", "gqa", "grad"} <= words
    assert {o.phase for o in ops} == {"prefill", "decode", "cross"}
    assert {o.dtype for o in ops} == {"float32", "bfloat16"}


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_every_op_becomes_a_call_and_the_call_that_op_again(job):
    assert op_of(call_of(job.use.op, make_sample(job.use.op))) == job.use.op


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_a_workload_file_is_a_family_and_is_written_as_save_writes(file, tmp_path):
    assert file.stem in models.FAMILIES
    workload = Workload.load(file)
    assert workload.model == models.FAMILIES[file.stem].about
    workload.save(tmp_path / "again.yaml")
    assert (tmp_path / "again.yaml").read_text() == file.read_text()


def test_every_family_has_its_file():
    assert {file.stem for file in FILES} == set(models.FAMILIES)


@pytest.mark.parametrize("name", ["vit-b-16", "minilm"])
def test_capturing_a_family_anew_gives_the_same_file_apart_from_provenance(name, tmp_path):
    pytest.importorskip("transformers")
    assert models.main([str(tmp_path), name]) == 0

    def without_provenance(path: Path) -> list[str]:
        return [line for line in path.read_text().splitlines() if not line.startswith("captured:")]

    fresh = without_provenance(tmp_path / f"{name}.yaml")
    assert fresh == without_provenance(main.workload_folder() / f"{name}.yaml")


def test_models_wants_a_folder_and_names_that_exist(capsys):
    assert models.main([]) == 2
    assert models.main(["somewhere", "bert-huge"]) == 2
    assert "bert-base | minilm" in capsys.readouterr().err


def test_a_suite_is_main_a_file_or_a_folder(tmp_path):
    folder = main.workload_folder()
    assert [job.name for job in main.jobs_of(str(folder))] == [job.name for job in JOBS]
    assert [job.name for job in main.jobs_of(str(folder / "vit-b-16.yaml"))] == ["vit-b-16 4 x prefill 197"]
    assert [job.name for job in main.jobs_of("main", "vit")] == ["vit-b-16 4 x prefill 197"]
    with pytest.raises(InputError, match="there is no suite 'mian'"):
        main.jobs_of("mian")
    with pytest.raises(InputError, match="holds no workload files"):
        main.jobs_of(str(tmp_path))
    with pytest.raises(InputError, match=r"no row of suite main has 'vitt' in its name(?s:.*)vit-b-16 4 x prefill 197"):
        main.jobs_of("main", "vitt")
    with pytest.raises(InputError, match="--peers 'flux' is no peer"):
        main.peers_named("flux")
    assert main.peers_named("all") == tuple(peers.PEERS)
    assert main.peers_named("none") == ()


# --- calls -----------------------------------------------------------------------------------------------------------

Q, K = torch.empty(2, 4, 6, 8), torch.empty(2, 2, 9, 8)
CALLS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "causal at the end": {"attn_mask": masks.causal()},
    "causal at 2": {"is_causal": True, "q_offset": 2},
    "window": {"window": (3, 1)},
    "causal window": {"window": (3, 0)},
    "causal window at 0": {"window": (3, 0), "q_offset": 0},
    "offsets": {"attn_mask": masks.causal(), "q_offset": torch.tensor([1, 3])},
    "lengths": {"key_lengths": torch.tensor([9, 4]), "query_lengths": torch.tensor([6, 2])},
    "causal lengths": {"is_causal": True, "key_lengths": torch.tensor([9, 4])},
    "mask tensor": {"attn_mask": torch.rand(2, 1, 6, 9) < 0.5},
    "mask tensor, causal": {"attn_mask": torch.rand(2, 1, 6, 9) < 0.5, "is_causal": True},
    "float mask": {"attn_mask": torch.zeros(6, 9)},
    "bias": {"bias": torch.zeros(1, 4, 6, 9), "key_lengths": torch.tensor([9, 4])},
    "alibi": {"bias": torch.ones(4), "is_causal": True},
    "sinks": {"sinks": torch.zeros(4), "softcap": 5.0, "scale": 0.3},
    "prefix": {"attn_mask": masks.prefix_lm(3)},
    "blocks": {"attn_mask": masks.causal() & masks.chunked(4)},
    "documents": {"attn_mask": masks.Segments(torch.zeros(6).long(), torch.zeros(9).long())},
    "not": {"attn_mask": ~masks.Columns(torch.ones(2, 9).bool())},
    "selected": {"attn_mask": masks.selected(torch.arange(3).expand(2, 6, 3))},
    "outputs": {"return_lse": True, "return_weights": True},
    "dropout": {"dropout_p": 0.5},
    "linear": {"variant": variants.LinearAttention()},
    "retention": {"variant": variants.Retention(variants.retention_decay(4)), "is_causal": True},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_described_and_written_again_is_the_same_op(name):
    want = op(Q, K, K, enable_gqa=True, **CALLS[name])
    assert op_of(call_of(want, make_sample(want))) == want


def test_a_call_in_the_other_layout_dtype_and_with_gradients():
    q = torch.empty(2, 6, 4, 8, dtype=torch.bfloat16).requires_grad_()
    want = op(q, q, q, layout="bshd", window=(2, 0))
    call = call_of(want, make_sample(want))
    assert op_of(call) == want
    assert want.grad == ("query", "key", "value")
    assert call.kwargs["layout"] == "bshd"


def test_an_op_that_no_call_gives_is_refused():
    want = op(Q, K, K, enable_gqa=True)
    with pytest.raises(InputError, match="traced"):
        call_of(want.with_(traced=True), make_sample(want))


# --- who competes ----------------------------------------------------------------------------------------------------

x4 = torch.empty(2, 4, 96, 16)
SMALL: dict[str, AttentionOp] = {
    "full": op(x4, x4, x4),
    "causal": op(x4, x4, x4, is_causal=True),
    "gqa decode": op(Q[:, :, :1], K, K, enable_gqa=True),
    "gqa prefill": op(x4, x4[:, :2], x4[:, :2], enable_gqa=True, is_causal=True),
    "padded": op(x4, x4, x4, key_lengths=torch.tensor([96, 30])),
    "padded queries": op(x4, x4, x4, key_lengths=torch.tensor([96, 30]), query_lengths=torch.tensor([96, 20])),
    "padded decode": op(x4[:, :, :1], x4, x4, attn_mask=masks.key_lengths([96, 30])),
    "documents": op(x4[:1], x4[:1], x4[:1], attn_mask=masks.causal() & masks.documents([0, 10, 70, 96])),
    "window": op(x4, x4, x4, window=(15, 0)),
    "sinks": op(x4, x4[:, :2], x4[:, :2], enable_gqa=True, is_causal=True, sinks=torch.zeros(4)),
    "sinks decode": op(Q[:, :, :1], K, K, enable_gqa=True, sinks=torch.zeros(4)),
    "capped": op(x4, x4[:, :2], x4[:, :2], enable_gqa=True, window=(15, 0), softcap=5.0),
    "bias": op(x4, x4, x4, bias=torch.zeros(1, 4, 96, 96), key_lengths=torch.tensor([96, 30])),
    "alibi": op(x4, x4, x4, bias=torch.ones(4), is_causal=True),
    "bf16": op(*[x4.to(torch.bfloat16)] * 3, is_causal=True),
    "training": op(*[torch.empty(2, 4, 96, 16).requires_grad_()] * 3, is_causal=True),
}
FORMS = {
    "gqa decode": {"fold groups", "repeat kv"},
    "gqa prefill": {"repeat kv"},
    "padded": {"per sequence"},
    "padded queries": {"per sequence"},
    "padded decode": {"per sequence"},
    "documents": {"per document"},
    "window": {"window blocks"},
    "sinks": {"sink key"},
    "sinks decode": {"sink key"},
    "capped": {"eager, folded"},
    "bias": {"per sequence"},
    "bf16": {"in float32"},
}


@pytest.mark.parametrize("name", SMALL)
def test_everybody_is_right(name):
    want = SMALL[name]
    sample = make_sample(want)
    truth = Truth(want, sample)
    everybody = [ours(want, sample)[0], *by_hand(want, sample)]
    everybody += [
        Contender(form, "candidate", lambda make=make: make(sample)) for form, make in candidates(want, current())
    ]
    for contender in everybody:
        with torch.set_grad_enabled(bool(want.grad)):
            out, *grads = graded(contender.make(), want, sample)()
        assert truth.problem(out, grads) == "", contender.name


@pytest.mark.parametrize("name", SMALL)
def test_the_careful_forms_are_those_that_apply(name):
    want = SMALL[name]
    names = [contender.name for contender in by_hand(want, make_sample(want))]
    assert names[0] == "sdpa"
    assert {n.removeprefix("hand: ") for n in names[1:]} == FORMS.get(name, set())


@pytest.mark.parametrize("name", [name for name in SMALL if name not in ("training", "bf16")])
def test_onnxruntime_is_right_or_says_why_not(name):
    pytest.importorskip("onnxruntime")
    want = SMALL[name]
    sample = make_sample(want)
    (peer,) = peers.peers(want, sample, ("onnxruntime",))
    if name.startswith("sinks"):
        with pytest.raises(NotApplicable, match="ONNX Attention has no sinks"):
            peer.make()
        return
    assert Truth(want, sample).problem(peer.make()()) == ""


@pytest.mark.parametrize("name", ["gqa prefill", "padded queries"])
def test_onnxruntime_reads_heads_side_by_side_where_they_lie(name):
    """It was handed copies of them, and its result was copied back, in its time."""
    pytest.importorskip("onnxruntime")
    want = SMALL[name]
    named = {role: replace(getattr(want, role), strides="bshd") for role in ("query", "key", "value")}
    want = want.with_(**named)
    sample = make_sample(want)
    (peer,) = peers.peers(want, sample, ("onnxruntime",))
    forward = peer.make()
    out = forward()
    assert Truth(want, sample).problem(out) == ""
    assert out.transpose(1, 2).is_contiguous()
    assert {x.data_ptr() for x in (sample.query, sample.key, sample.value)} <= {
        x.data_ptr() for x in forward.tensors.values()
    }


@pytest.mark.parametrize("name", ["bf16", "sinks"])
def test_a_peer_refuses_what_it_does_not_do(name):
    want = SMALL[name]
    (peer,) = peers.peers(want, make_sample(want), ("onnxruntime",))
    with pytest.raises(NotApplicable):
        peer.make()


def test_openvino_is_right_where_it_is_installed_and_says_so_where_not():
    want = SMALL["gqa prefill"]
    sample = make_sample(want)
    (peer,) = peers.peers(want, sample, ("openvino",))
    if importlib.util.find_spec("openvino") is None:
        with pytest.raises(NotApplicable, match="openvino is not installed"):
            peer.make()
        return
    assert Truth(want, sample).problem(peer.make()()) == ""


@pytest.mark.parametrize("name", ["padded queries", "documents", "window", "padded", "capped", "bias", "alibi"])
def test_flex_gets_the_same_mask_and_scores(name):
    """Uncompiled, so that no compiler is needed: what is compared is what we hand to flex_attention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    want = SMALL[name]
    sample = make_sample(want)
    mod = peers._mask_mod(want.mask, want, sample)
    block_mask = create_block_mask(mod, want.B, None, want.Sq, want.Skv, device="cpu")
    score_mod = peers._score_mod(want, sample)
    out = flex_attention(
        sample.query, sample.key, sample.value, score_mod, block_mask, want.scale, enable_gqa=want.groups != 1
    )
    assert Truth(want, sample).problem(out) == ""


@pytest.mark.parametrize("spoil", ["value", "shape", "nan", "gradient"])
def test_a_wrong_result_is_seen(spoil):
    want = SMALL["training"]
    sample = make_sample(want)
    truth = Truth(want, sample)
    out, *grads = graded(by_hand(want, sample)[0].make(), want, sample)()
    assert truth.problem(out, grads) == ""
    out = out.detach().clone()
    if spoil == "value":
        out[1, 2, 50, 3] += 1e-3
    elif spoil == "nan":
        out[0, 0, 0, 0] = torch.nan
    elif spoil == "shape":
        out = out[:, :, 1:]
    else:
        grads[1] = grads[1] * 1.001
    words = {"shape": "shape [2, 4, 95, 16]", "gradient": "gradient of key", "value": "output", "nan": "output is nan"}
    assert truth.problem(out, grads).startswith(words[spoil])


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    from attn_dispatch.capture import capture

    q, k = torch.randn(1, 4, 16, 8), torch.randn(1, 2, 16, 8)
    with capture() as workload:
        dispatch.attention(q, k, k, is_causal=True, enable_gqa=True)
        dispatch.attention(q[:, :, :1], k, k, enable_gqa=True)
    path = tmp_path / "tiny.yaml"
    workload.save(path)
    return path


def test_a_run_prints_its_table_and_writes_json_markdown_and_a_picture(tiny, tmp_path, capsys):
    wanted = main.Wanted(tmp_path / "o.json", tmp_path / "o.md", tmp_path / "o.png")
    assert main.run_suite(str(tiny), None, QUICK, "onnxruntime,openvino", wanted) == 0
    printed = capsys.readouterr().out
    names = ("tiny prefill 16", "tiny decode 16")
    for words in (*names, "over SDPA", "regret", "geometric mean of 2 ops"):
        assert words in printed
    assert "stopped" not in printed
    data = json.loads((tmp_path / "o.json").read_text())
    assert set(data) == {"schema", "suite", "is_whole", "environment", "summary", "rows", "problems"}
    assert {"device", "threads", "libraries", "when", "load"} <= set(data["environment"])
    assert data["is_whole"]
    assert [row["name"] for row in data["rows"]] == list(names)
    for row in data["rows"]:
        assert AttentionOp.from_dict(row["op"]).digest() == row["digest"]
        by_name = {line["name"]: line for line in row["contenders"]}
        assert {"ours", "sdpa", "hand: repeat kv", "sdpa_flash", "eager", "onnxruntime"} <= set(by_name)
        assert {"peer: onnxruntime", "peer: openvino"} <= set(by_name)
        assert len(by_name) == len(row["contenders"]), "a name that two have hides one of them"
        for line in row["contenders"]:
            assert (line["median_us"] is not None) == (line["note"] in ("", "one call")), line
        assert row["rounds"] == 4
        assert {"ours", "sdpa"} <= {line["name"] for line in row["contenders"] if len(line["samples"]) == 4}
    table = (tmp_path / "o.md").read_text()
    assert [line.count("|") for line in table.splitlines() if line.startswith("|")] == [10] * 4
    assert (tmp_path / "o.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command_runs_a_suite(tiny, tmp_path):
    path = tmp_path / "o.json"
    flags = ("--rounds", "1", "--seconds", "0", "--peers", "none", "--only", "decode", "--json", str(path))
    done = CliRunner().invoke(app, ["bench", str(tiny), *flags])
    assert done.exit_code == 0, done.output
    assert [row["name"] for row in json.loads(path.read_text())["rows"]] == ["tiny decode 16"]


def test_a_broken_contender_is_reported_and_ends_nothing():
    want = SMALL["full"]

    def raising() -> Any:
        raise RuntimeError("two\nlines")

    def missing() -> Any:
        raise NotApplicable("not today")

    def extra(op: AttentionOp, sample: Any) -> list[Contender]:
        return [
            Contender("raises when made", "peer", raising),
            Contender("raises when run", "peer", lambda: raising),
            Contender("is wrong", "peer", lambda: lambda: sample.value + 1),
            Contender("is not here", "peer", missing),
        ]

    row = measure.measure("row", want, QUICK, extra=extra)
    notes = {line.name: line.note for line in row.lines if line.kind == "peer"}
    assert notes["raises when made"] == notes["raises when run"] == "failed: RuntimeError: two lines"
    assert notes["is wrong"].startswith("wrong: output is ")
    assert notes["is not here"] == "n/a: not today"
    assert row.fastest("peer") is None
    assert row.ours_us is not None


def test_a_peer_without_a_backward_takes_no_part_in_training():
    row = measure.measure("row", SMALL["training"], QUICK, ("onnxruntime",))
    assert {line.name: line.note for line in row.lines}["peer: onnxruntime"] == "n/a: forward only"
    assert row.over_given is not None


def test_an_op_that_cannot_be_measured_is_named_and_the_rest_goes_on(tiny, monkeypatch, capsys):
    real = main.measure

    def sometimes(name: str, *rest: Any) -> Row:
        if "decode" in name:
            raise RuntimeError("out of\nmemory")
        return real(name, *rest)

    monkeypatch.setattr(main, "measure", sometimes)
    assert main.run_suite(str(tiny), None, QUICK, "none") == 1
    printed = capsys.readouterr().out
    assert "tiny decode 16: not measured: RuntimeError: out of memory" in printed
    assert "tiny prefill 16" in printed


def test_a_noisy_row_is_measured_again_and_the_quieter_time_counts_whatever_it_says(tiny, monkeypatch, capsys):
    spreads = {"tiny prefill 16": [50.0, 5.0], "tiny decode 16": [5.0, 1.0]}
    medians = {"tiny prefill 16": [100.0, 130.0], "tiny decode 16": [100.0, 50.0]}
    turns: list[str] = []

    def measured(name: str, op: AttentionOp, *rest: Any) -> Row:
        turn = turns.count(name)
        turns.append(name)
        return Row(name, op, "eager", "", (Line("ours", "ours", medians[name][turn], spreads[name][turn]),))

    monkeypatch.setattr(main, "measure", measured)
    report: list[Any] = []
    monkeypatch.setattr(main, "_show", lambda found, console: report.append(found))
    assert main.run_suite(str(tiny), None, QUICK, "none") == 0
    assert sorted(turns) == ["tiny decode 16", "tiny prefill 16", "tiny prefill 16"]
    assert {row.name: row.ours_us for row in report[0].rows} == {"tiny prefill 16": 130.0, "tiny decode 16": 100.0}


def test_a_run_that_is_killed_leaves_the_rows_that_it_has(tiny, tmp_path, monkeypatch):
    real = main.measure

    def killed(name: str, *rest: Any) -> Row:
        if "decode" in name:
            raise SystemExit(143)
        return real(name, *rest)

    monkeypatch.setattr(main, "measure", killed)
    path = tmp_path / "o.json"
    with pytest.raises(SystemExit):
        main.run_suite(str(tiny), None, QUICK, "none", main.Wanted(path))
    data = json.loads(path.read_text())
    assert (data["is_whole"], [row["name"] for row in data["rows"]]) == (False, ["tiny prefill 16"])


def test_an_interrupted_run_prints_and_writes_what_is_done(tiny, tmp_path, monkeypatch, capsys):
    real = main.measure

    def interrupted(name: str, *rest: Any) -> Row:
        if "decode" in name:
            raise KeyboardInterrupt
        return real(name, *rest)

    monkeypatch.setattr(main, "measure", interrupted)
    path = tmp_path / "o.json"
    assert main.run_suite(str(tiny), None, QUICK, "none", main.Wanted(path)) == 130
    printed = capsys.readouterr().out
    assert "interrupted" in printed
    assert "stopped before the end" in printed
    data = json.loads(path.read_text())
    assert (data["is_whole"], [row["name"] for row in data["rows"]]) == (False, ["tiny prefill 16"])


def test_what_is_hopelessly_slow_is_called_once_but_never_ours(monkeypatch):
    monkeypatch.setattr(measure, "_HEAVY_S", 0.0)
    monkeypatch.setattr(measure, "_HOPELESS", 0.0)  # everybody is
    row = measure.measure("row", SMALL["full"], QUICK)
    notes = {line.name: line.note for line in row.lines}
    assert (notes["ours"], notes["sdpa"], notes["eager"]) == ("", "", "one call")


# --- what it says ----------------------------------------------------------------------------------------------------


def made_row(name: str, **times: float) -> Row:
    kinds = {"ours": "ours", "sdpa": "torch", "hand": "torch", "sdpa_flash": "candidate", "flex": "peer"}
    lines = tuple(Line(n, kinds[n], us, 1.0) for n, us in times.items())
    return Row(name, SMALL["full"], "sdpa_flash", "heuristic", lines)


def made_report() -> report.Report:
    rows = [
        made_row("a", ours=100.0, sdpa=200.0, hand=100.0, sdpa_flash=80.0, flex=50.0),
        made_row("b", ours=1000.0, sdpa=500.0, hand=2000.0),
    ]
    place = {"when": "2026-11-29", "device": "a CPU", "threads": 2, "libraries": {"torch": "2.13"}}
    return report.Report("main", place, rows, [], True)


def test_regret_is_judged_by_other_rounds_than_those_that_picked_the_fastest():
    """Of two equals that are lucky in turn, the lower median is below the time of either."""

    def row(**samples: tuple[float, ...]) -> Row:
        kinds = {"ours": "ours", "lucky_even": "candidate", "lucky_odd": "candidate", "faster": "candidate"}
        lines = tuple(Line(n, kinds[n], statistics.median(s), 1.0, samples=s) for n, s in samples.items())
        return Row("row", SMALL["full"], "lucky_even", "", lines, 4)

    lucky = {"lucky_even": (90.0, 90.0, 100.0, 100.0), "lucky_odd": (100.0, 100.0, 90.0, 90.0)}
    assert row(ours=(100.0,) * 4, **lucky).behind == 0.0
    assert row(ours=(100.0,) * 4, **lucky, faster=(80.0,) * 4).behind == pytest.approx(0.25)
    assert row(ours=(100.0,) * 4).behind == 0.0
    assert row(ours=(100.0,) * 4, **lucky).regret == 0.0
    assert row(ours=(100.0,) * 4, **lucky, faster=(80.0,) * 4).regret == pytest.approx(0.1875)
    assert row(ours=(100.0,) * 4, faster=(80.0,) * 4).regret is None  # the choice was not timed


def test_who_is_close_to_the_fastest_or_the_best_of_its_kind_is_timed_again():
    times = {n: Timing(us, 1.0) for n, us in {"ours": 300, "sdpa": 400, "a": 100, "b": 124, "c": 126, "p": 900}.items()}
    kinds = {"ours": "ours", "sdpa": "torch", "a": "candidate", "b": "candidate", "c": "candidate", "p": "peer"}
    assert measure._close(times, kinds, {"ours", "sdpa"}) == ["ours", "sdpa", "a", "b", "p"]
    assert "c" in measure._close(times, kinds, {"c"})


def test_ratios_and_regret():
    a, b = made_report().rows
    assert (a.over_given, a.over_best, a.over_peer) == (2.0, 1.0, 0.5)
    assert (a.regret, a.behind) == (pytest.approx(0.6), pytest.approx(1.0))
    assert (b.over_given, b.over_best, b.over_peer) == (0.5, 0.5, None)
    assert (b.regret, b.behind) == (None, pytest.approx(1.0))
    found = made_report().summary()
    assert found.over_given == pytest.approx(1.0)
    assert found.over_best == pytest.approx(0.5**0.5)
    assert (found.worst_regret, found.worst_row) == (pytest.approx(0.6), "a")
    assert (found.regret, found.behind) == (pytest.approx(0.6), pytest.approx(1.0))
    assert (found.worst_behind, found.worst_row_behind) == (pytest.approx(1.0), "b")


def test_the_markdown_of_a_report():
    assert made_report().markdown().splitlines() == [
        "Measured on 2026-11-29: a CPU, 2 threads, torch 2.13.",
        "",
        "| op | ours | chosen | over SDPA | over its best form | best peer | over it | regret | with the call |",
        "|---|---|---|---:|---:|---|---:|---:|---:|",
        "| a | 100 us | sdpa_flash | 2.00x | 1.00x | flex | 0.50x | 60 % | 100 % |",
        "| b | 1 ms | sdpa_flash | 0.50x | 0.50x | n/a | n/a | n/a | 100 % |",
        "",
        "- geometric mean of 2 ops: 1.00x over SDPA as given, 0.71x over its best form by hand",
        "- geometric mean of the 2 ops that SDPA computes: 1.00x over it as given, 0.71x over its best form by hand",
        "- regret of the choice to the fastest of all, each run by itself: mean 60.0 %, worst 60 % (a), "
        "without 1 of 2 ops whose choice was not timed by itself",
        "- our call, which looks the choice up, behind the fastest of all: mean 100.0 %, worst 100 % (b)",
    ]


def test_a_report_without_rows_says_so(capsys, tmp_path):
    empty = report.Report("main", report.environment())
    main._show(empty, Console(width=100))
    assert "geometric mean of 0 ops: n/a" in capsys.readouterr().out
    draw(empty, tmp_path / "o.png")
    assert json.loads(empty.to_json())["summary"]["over_given"] is None


def test_a_row_whose_own_call_failed_shows_why():
    row = Row(
        "a", SMALL["full"], "x", "tuned", (Line("ours", "ours", note="wrong: output"), Line("sdpa", "torch", 1.0))
    )
    made = report.Report("main", {}, [row], [], True)
    assert made.cells() == [("a", "wrong: output", "x (tuned)", "n/a", "n/a", "n/a", "n/a", "n/a", "n/a")]
    assert "a: ours wrong: output" in made.closing()


def test_labels():
    assert label(SMALL["padded"]) == "2 x prefill 96 padded"
    assert label(SMALL["capped"]) == "2 x prefill 96 window 16 capped"
    assert label(SMALL["sinks decode"]) == "2 x decode 9 sinks"
    assert label(SMALL["bf16"]) == "2 x prefill 96 bf16"
    assert label(SMALL["training"]) == "2 x prefill 96 training"
    assert label(op(x4, x4[:, :, :7], x4[:, :, :7])) == "2 x cross 96 x 7"


def test_workload_files_are_no_pin_files():
    for file in FILES:
        assert set(yaml.safe_load(file.read_text())) == {"schema", "model", "captured", "ops"}


def test_a_bias_that_stands_alone_is_handed_to_sdpa_as_it_lies():
    """It was copied into rows first, which is not what a user of T5 does."""
    q = torch.randn(1, 4, 16, 8)
    bias = torch.randn(1, 16, 16, 4).permute(0, 3, 1, 2)  # T5's: heads last
    described = op(q, q, q, bias=bias)
    sample = make_sample(described)
    (name,) = sample.operands
    sample.operands[name] = bias
    assert float_mask(described, sample).stride() == bias.stride()
    masked = op(q, q, q, bias=bias, is_causal=True)
    both = float_mask(masked, sample)
    torch.testing.assert_close(both, bias.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf))


def test_a_backend_that_compiles_for_seconds_is_no_candidate_of_the_bench():
    wanted = op(*(torch.randn(1, 2, 300, 16) for _ in range(3)), is_causal=True)
    slow = {name for name, backend in current().backends.items() if backend.compile_s > 0}
    assert slow  # flex
    names = {name.split(" > ")[-1] for name, _ in candidates(wanted, current(), most=1000)}
    assert names
    assert not names & slow


def test_the_means_over_what_sdpa_computes_leave_out_caps_and_sinks():
    made = made_report()
    capped = Row("c", SMALL["capped"], "", "", made_row("c", ours=10.0, sdpa=80.0).lines)
    sinks = Row("d", SMALL["sinks"], "", "", made_row("d", ours=10.0, sdpa=20.0).lines)
    made.rows += [capped, sinks]
    found = made.summary()
    assert (found.rows, found.sdpa_rows) == (4, 2)
    assert found.over_given == pytest.approx(2.0)
    assert (found.over_given_sdpa, found.over_best_sdpa) == (pytest.approx(1.0), pytest.approx(0.5**0.5))
    assert "geometric mean of 4 ops: 2.00x over SDPA as given" in made.closing()[0]
    assert "geometric mean of the 2 ops that SDPA computes: 1.00x over it as given" in made.closing()[1]
    assert made.closing()[1].endswith("(2 with soft caps or sinks are plain torch as given)")
    keys = json.loads(made.to_json())["summary"]
    assert {"rows", "over_given", "over_best", "worst_row", "over_given_sdpa", "over_best_sdpa", "sdpa_rows"} <= set(
        keys
    )


# --- other devices ---------------------------------------------------------------------------------------------------


def test_windows_by_hand_have_their_masks_on_the_ops_device(monkeypatch):
    """They lay on the CPU, so that the form was broken on CUDA."""
    want = Use(SMALL["window"], 1, ()).moved("meta").op
    (made,) = (c for c in by_hand(want, make_sample(want)) if c.name == "hand: window blocks")
    seen: list[str] = []
    monkeypatch.setattr(hand, "_sdpa", lambda q, *_, attn_mask, **__: seen.append(attn_mask.device.type) or q)
    made.make()()
    assert set(seen) == {"meta"}


def test_left_padding_by_hand_is_compared_on_the_device_of_its_mask():
    """Another default device stands for a mask on CUDA: what is made without a device lies on the wrong one."""
    kept = torch.arange(96).flip(0) < torch.tensor([96, 30])[:, None]
    want = op(x4, x4, x4, attn_mask=kept[:, None, None])
    assert isinstance(want.mask, Columns)
    sample = make_sample(want)
    with torch.device("meta"):
        made = {contender.name: contender.make() for contender in by_hand(want, sample)}
    assert Truth(want, sample).problem(made["hand: per sequence"]()) == ""


def test_a_run_on_another_device_moves_the_ops_and_names_that_device(tiny, monkeypatch, tmp_path):
    seen: list[Any] = []
    monkeypatch.setattr(main, "waiter", lambda kind: seen.append(kind))
    monkeypatch.setattr(main, "environment", lambda kind: seen.append(kind) or report.environment())

    def measured(name: str, moved: AttentionOp, *_: Any) -> Row:
        seen.append(moved.device)
        return made_row(name, ours=1.0, sdpa=1.0)

    monkeypatch.setattr(main, "measure", measured)
    done = CliRunner().invoke(app, ["bench", str(tiny), "--device", "npu", "--peers", "none"])
    assert done.exit_code == 0, done.output
    assert set(seen) == {"npu"}
    assert len(seen) >= 4  # a row that is noisy is measured again


def test_a_device_that_cannot_be_timed_is_refused_before_the_first_row(tiny, monkeypatch):
    monkeypatch.setattr(main, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(InputError, match="meta cannot be timed"):
        main.run_suite(str(tiny), None, QUICK, "none", device="meta")
    mixed = [main.Job(str(n), use) for n, use in enumerate(JOBS[0].use.moved(kind) for kind in ("cpu", "meta"))]
    monkeypatch.setattr(main, "jobs_of", lambda *_: mixed)
    with pytest.raises(InputError, match="one run is of one device type, and the ops are for cpu, meta"):
        main.run_suite("main", None, QUICK, "none")


def test_one_call_is_timed_from_an_idle_device_to_an_idle_device(monkeypatch):
    order: list[str] = []
    monkeypatch.setattr(measure, "waiter", lambda kind: lambda: order.append(f"{kind} is idle"))
    measure._once(lambda: order.append("call"), "npu")
    assert order == ["npu is idle", "call", "npu is idle"] * 3


# --- what is known before the first row, and exit codes --------------------------------------------------------------


@pytest.mark.parametrize("flag", ["json", "markdown", "picture"])
def test_a_file_that_cannot_be_written_is_named_before_the_first_row(tiny, tmp_path, monkeypatch, flag):
    monkeypatch.setattr(main, "measure", lambda *_: pytest.fail("measured"))
    for path, words in ((tmp_path / "nowhere" / "o.png", "there is no folder"), (tmp_path, "is a folder")):
        with pytest.raises(InputError, match=f"--{flag}.*{words}"):
            main.run_suite(str(tiny), None, QUICK, "none", main.Wanted(**{flag: path}))
    with pytest.raises(InputError, match="--json: there is no folder"):
        suite.run_bench(tmp_path / "nowhere" / "o.json", "warm", 1)


def test_a_picture_without_matplotlib_is_refused_before_the_first_row(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(main, "measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"(?s)needs matplotlib.*attn-dispatch\[viz\]"):
        main.run_suite(str(tiny), None, QUICK, "none", main.Wanted(picture=tmp_path / "o.png"))


def test_a_run_in_which_ours_was_wrong_fails(tiny, monkeypatch):
    wrong = Row(
        "a", SMALL["full"], "x", "tuned", (Line("ours", "ours", note="wrong: output"), Line("sdpa", "torch", 1.0))
    )
    monkeypatch.setattr(main, "measure", lambda *_: wrong)
    assert main.run_suite(str(tiny), None, QUICK, "none") == 1


# --- suites written by hand ------------------------------------------------------------------------------------------

ONE, TWO = torch.ones(1, 2, 3, 4), torch.full((1, 2, 3, 4), 2.0)


def by(value: Any) -> Any:
    return lambda: value


def cases(**contenders: Contenders) -> tuple[Case, ...]:
    return tuple(Case(name, by(made)) for name, made in contenders.items())


def run_cases(monkeypatch: pytest.MonkeyPatch, *made: Case, code: int = 0) -> str:
    monkeypatch.setattr(suite, "cases_of", lambda _: made)
    monkeypatch.setattr(suite, "import_cost_ms", lambda: 0.0)
    done = CliRunner().invoke(app, ["bench", "core", "--rounds", "1"])
    assert done.exit_code == code, (done.output, done.exception)
    return done.output


def test_a_suite_names_who_is_wrong_and_fails_when_it_is_ours(monkeypatch):
    ours_wrong = cases(a=Contenders(by(TWO), by(ONE)), b=Contenders(by(ONE), by(ONE), by(ONE)))
    said = run_cases(monkeypatch, *ours_wrong, code=1)
    assert "a: wrong: ours is 2 at [0, 0, 0, 0], not 1" in said
    assert "b: wrong" not in said
    said = run_cases(
        monkeypatch, *cases(a=Contenders(by(ONE), by(ONE), by(TWO)), b=Contenders(by(ONE), by(TWO), by(ONE)))
    )
    assert "a: wrong: best is 2 at [0, 0, 0, 0], not 1" in said
    assert "b: wrong: as given is 2 at [0, 0, 0, 0], not 1" in said


def test_a_suite_compares_what_is_alike_and_says_what_is_not(monkeypatch):
    parts = [ONE[:, :, :1], ONE[:, :, 1:]]
    said = run_cases(
        monkeypatch,
        *cases(tuple_=Contenders(by((ONE, None)), by(ONE)), nothing=Contenders(by(None), by(None))),
        *cases(other=Contenders(by(ONE[0]), by(ONE)), parts=Contenders(by(ONE), by(ONE), by(parts))),
        Case("apart", by(Contenders(by(TWO), by(ONE))), differs="for a reason"),
    )
    assert "wrong" not in said
    assert "apart: not compared: for a reason" in said
    assert "ours not compared, results of another kind: nothing, other" in said
    parts[1] = parts[1] * 3
    said = run_cases(monkeypatch, *cases(parts=Contenders(by(ONE), by(ONE), by(parts))))
    assert "parts: wrong: best is 3 at [0, 0, 1, 0], not 1" in said


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-3), (torch.bfloat16, 0.1)])
def test_results_are_compared_by_their_dtype(dtype, off):
    near, far = (ONE.to(dtype) * (1 + part) for part in (off / 20, off))
    assert suite.disagreement({"ours": near, "as given": ONE.to(dtype)}) == ""
    assert suite.disagreement({"ours": far, "as given": ONE.to(dtype)}).startswith("ours is 1.")


def test_a_case_whose_library_is_missing_is_skipped_and_one_that_breaks_fails(monkeypatch):
    def missing() -> Contenders:
        raise ModuleNotFoundError("No module named 'transformers'")

    def broken() -> Any:
        raise RuntimeError("two\nlines")

    (fine,) = cases(fine=Contenders(by(ONE), by(ONE)))
    assert "a: skipped: No module named 'transformers'" in run_cases(monkeypatch, Case("a", missing), fine)
    said = run_cases(monkeypatch, Case("b", by(Contenders(broken, by(ONE)))), fine, code=1)
    assert "b: not measured: RuntimeError: two lines" in said
    assert "fine" in said


@pytest.mark.parametrize("name", ["core", "variants"])
@pytest.mark.parametrize("flag", ["--peers", "--seconds", "--markdown", "--picture", "--device"])
def test_a_suite_written_by_hand_refuses_what_is_for_workloads(name, flag, monkeypatch):
    monkeypatch.setattr(suite, "run_bench", lambda *_: pytest.fail("ran"))
    done = CliRunner().invoke(app, ["bench", name, flag, "30"])
    assert isinstance(done.exception, InputError), done.output
    assert f"takes no {flag}: {flag} " in str(done.exception)
    assert "of a workload" in str(done.exception) or "a workload's" in str(done.exception)


def test_a_suite_without_the_case_asked_for_lists_its_cases():
    with pytest.raises(
        InputError, match=r"(?s)no case of suite core has 'wram' in its name.*warm call, growing decode"
    ):
        suite.run_bench(None, "wram", 1)


def test_the_bias_of_alibi_is_ready_before_the_clock_runs(monkeypatch):
    made = variants_nn._alibi_decode()
    monkeypatch.setattr(variants_nn, "_alibi", lambda *_: pytest.fail("made inside the timed call"))
    torch.testing.assert_close(made.as_given(), made.ours(), rtol=1e-4, atol=1e-4)
