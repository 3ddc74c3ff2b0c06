"""`attn-dispatch conformance`: every kind of lie is found and named, hints are hints, and the exit code says it."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attn_dispatch import UnknownBackendError, reference
from attn_dispatch.capability import ALL_FEATURES, Capability, Limit, Reason
from attn_dispatch.cli import app
from attn_dispatch.errors import InputError, PluginWarning
from attn_dispatch.ir.atoms import Full
from attn_dispatch.plugin import Backend, Executable
from attn_dispatch.registry import Registry, current
from attn_dispatch.testing import BY_ID, CASES
from attn_dispatch.testing.apart import apart, load_plugin
from attn_dispatch.testing.conformance import Outcome, conform, try_here

right = reference.attention
DTYPES = frozenset({"float64", "float32", "bfloat16", "float16"})


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Toy(Backend):
    """The specification with one step changed; claims everything unless it is told otherwise."""

    name = "toy"

    def __init__(self, attention: Callable[..., Any] = right, **facts: Any) -> None:
        given = {"devices": frozenset({"cpu"}), "dtypes": DTYPES, "features": ALL_FEATURES} | facts
        self.attention, self.capabilities = attention, (Capability(**given),)

    def compile(self, op):
        def run(q, k, v, t):
            raw = self.attention(op, q, k, v, t)
            return raw if op.outputs.lse or op.outputs.weights or op.outputs.state else raw.out

        return Executable(run)


def among(*backends: Backend) -> Registry:
    return replace(current(), backends={**current().backends, **{b.name: b for b in backends}})


def line_of(backend: Backend, case: str, **options: Any):
    return conform(backend.name, among(backend), (BY_ID[case],), **options).lines[0]


# --- lies ------------------------------------------------------------------------------------------------------------


def changed(**fields: Any) -> Callable[..., Any]:
    return lambda op, q, k, v, t: right(op.with_(**fields), q, k, v, t)


def tiled(op, q, k, v, t):
    groups = q.shape[1] // k.shape[1]
    return right(op, q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), t)


def dead(fill: Callable[..., Any]) -> Callable[..., Any]:
    def attention(op, q, k, v, t):
        raw = right(op, q, k, v, t)
        return raw._replace(out=torch.where(torch.isneginf(raw.lse)[..., None], fill(v), raw.out))

    return attention


def mutates(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    k.add_(1)
    return raw


def after(change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda op, q, k, v, t: change(right(op, q, k, v, t))


def reads_scattered_memory_wrongly(op, q, k, v, t):
    flat = torch.as_strided(q, q.shape, q.contiguous().stride(), q.storage_offset()) if q.stride(-1) != 1 else q
    return right(op, flat, k, v, t)


def loses_the_gradient(op, q, k, v, t):
    return right(op, q, k.detach() + 0 * k, v, t)


def one_key_more(op, q, k, v, t):
    return right(op.with_(q_offset=op.static_offset() + 1), q, k, v, t)


LIES: dict[str, tuple[Callable[..., Any], str, str]] = {
    "scale": (changed(scale=None), "scale", "the scale is dropped: 1/sqrt(head_dim) is used"),
    "scale of 1": (changed(scale=1.0), "causal", "the scale is dropped: scores are not scaled at all"),
    "window": (changed(mask=Full()), "window_causal", "the mask is ignored"),
    "causal": (changed(mask=Full()), "causal", "the mask is ignored"),
    "a key too many": (one_key_more, "causal", "a row attends one key too many at its end"),
    "softcap": (changed(score=()), "softcap", "the softcap is dropped"),
    "bias": (changed(score=()), "column_bias", "the bias is dropped"),
    "group order": (tiled, "gqa_causal", "query head h uses kv head h % Hkv"),
    "dead rows, mean": (dead(lambda v: v.mean(2, keepdim=True)), "dead_rows", "the mean of all values"),
    "dead rows, NaN": (dead(lambda v: math.nan), "dead_rows", "is NaN where it must be 0"),
    "mutation": (mutates, "causal", "changed its input key in place"),
    "dtype": (after(lambda raw: raw._replace(out=raw.out.double())), "causal", "out is torch.float64 for a query of"),
    "lse base": (after(lambda raw: raw._replace(lse=raw.lse / math.log(2))), "causal_lse", "in base 2"),
    "lse dtype": (after(lambda raw: raw._replace(lse=raw.lse.double())), "causal_lse", "lse is torch.float64, not"),
    "lse of dead rows": (
        after(lambda raw: raw._replace(lse=raw.lse.masked_fill(torch.isneginf(raw.lse), 0.0))),
        "dead_rows_lse_grad",
        "not -inf, which corrupts every merge",
    ),
    "gradient": (loses_the_gradient, "causal_grad", "grad of key"),
    "strides": (reads_scattered_memory_wrongly, "scattered_causal", "the strides are not read"),
    "shape": (after(lambda raw: raw._replace(out=raw.out.transpose(1, 2))), "causal_wide", "out has shape"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found_named_and_comes_with_a_remedy(lie):
    attention, case, words = LIES[lie]
    line = line_of(Toy(attention), case)
    assert (line.outcome, words in line.text) == (Outcome.LIED, True), line
    assert line.fix


def test_numbers_that_nothing_explains_are_wrong():
    line = line_of(Toy(after(lambda raw: raw._replace(out=raw.out * 1.001))), "causal")
    assert (line.outcome, line.text.startswith("out is")) == (Outcome.WRONG, True)


def test_what_raises_is_wrong_with_its_exception():
    line = line_of(Toy(lambda *a: 1 / 0), "causal")
    assert (line.outcome, line.text) == (Outcome.WRONG, "ZeroDivisionError: division by zero")


def test_a_refusal_of_what_is_declared_is_a_lie():
    toy = Toy()
    toy.extra_reasons = lambda op: [Reason("feature", "mask:Causal", True, False)]
    line = line_of(toy, "causal")
    assert (line.outcome, "a feature that it declares" in line.text) == (Outcome.LIED, True)


PROCESS = {
    "random numbers": (lambda: torch.rand(1), "moved torch's random number generator"),
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), "changed torch's default dtype"),
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "changed torch's number of threads"),
    "output": (lambda: print("hello"), "printed 'hello'"),
}


@pytest.mark.parametrize("kind", PROCESS)
def test_a_change_of_the_process_is_a_lie_and_is_undone(kind, capsys, monkeypatch):
    # a thread that an earlier test left behind would make the guard spare the random numbers
    monkeypatch.setattr("attn_dispatch.registry.guarding.threading.active_count", lambda: 1)
    change, words = PROCESS[kind]

    def attention(op, q, k, v, t):
        change()
        return right(op, q, k, v, t)

    before = (torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads())
    line = line_of(Toy(attention), "causal")
    assert (line.outcome, words in line.text) == (Outcome.LIED, True), line
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_default_dtype(), torch.get_num_threads()) == before[1:]
    assert capsys.readouterr().out == ""


class Reusing(Toy):
    """Right for the first run of an executable; what it keeps for later ones is in `kind`."""

    def __init__(self, kind: str, **facts: Any) -> None:
        super().__init__(**facts)
        self.kind = kind

    def compile(self, op):
        inner, kept = super().compile(op).run, {}

        def run(q, k, v, t):
            if self.kind == "buffer":
                out = inner(q, k, v, t)
                return kept.setdefault(out.shape, torch.empty_like(out)).copy_(out)
            if self.kind == "address":
                key = (q.data_ptr(), k.data_ptr(), v.data_ptr())
                if key not in kept:
                    kept[key] = inner(q, k, v, t)
                return kept[key]
            if self.kind == "size" and (q.shape[0], q.shape[2], k.shape[2]) != (op.B, op.Sq, op.Skv):
                raise RuntimeError("baked size")
            if self.kind == "batch" and q.shape[0] != op.B:
                raise RuntimeError("baked batch")
            if self.kind == "keys":
                k, v = k[:, :, : op.Skv], v[:, :, : op.Skv]
            return inner(q, k, v, t)

        return Executable(run)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("buffer", "a later run changed the out that the first returned"),
        ("address", "run again with fresh values in the same tensors: out is"),
        ("size", "it raised RuntimeError: baked size"),
        ("batch", "run again at B 4, Sq 17, Skv 17 (compiled for 3, 17, 17), it raised RuntimeError: baked batch"),
        ("keys", "run again at B 2, Sq 20, Skv 20 (compiled for 2, 17, 17): out is"),
    ],
)
def test_an_executable_that_is_right_once_alone_is_a_lie(kind, words):
    line = line_of(Reusing(kind), "none")
    assert (line.outcome, words in line.text) == (Outcome.LIED, True), line


def test_a_length_that_a_limit_bars_is_not_asked_for():
    barred = Reusing(
        "size", limits=tuple(Limit(name, maximum=most) for name, most in (("B", 2), ("Sq", 17), ("Skv", 17)))
    )
    assert line_of(barred, "none").outcome is Outcome.VERIFIED


def test_a_claim_of_determinism_is_tried():
    calls = itertools.cycle(range(100))
    noisy = Toy(after(lambda raw: raw._replace(out=raw.out + 1e-8 * next(calls))))
    line = line_of(noisy, "causal")
    assert (line.outcome, line.fix) == (Outcome.LIED, "declare deterministic=False")
    honest = Toy(noisy.attention, deterministic=False)
    assert line_of(honest, "causal").outcome is Outcome.VERIFIED


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        (changed(dropout_p=0.0), "is ignored"),
        (lambda op, q, k, v, t: _unscaled(op, q, k, v, t), "a weight is neither dropped nor scaled"),
    ],
)
def test_dropout_that_is_ignored_or_not_scaled_is_a_lie(attention, words):
    found = conform("toy", among(Toy(attention)), (BY_ID["causal"],))
    (line,) = [line for line in found.lines if line.case == "dropout"]
    assert (line.outcome, words in line.text) == (Outcome.LIED, True), line


def _unscaled(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return raw._replace(out=raw.out * (1 - op.dropout_p))


# --- the whole -------------------------------------------------------------------------------------------------------


def test_a_backend_that_is_right_passes_every_case():
    found = conform("toy", among(Toy()))
    assert [line.case for line in found.lines if line.outcome is not Outcome.VERIFIED] == []
    assert len(found.lines) == len(CASES) + 1
    assert (found.exit_code, found.unproven, found.suspects()) == (0, (), ())


def test_words_that_only_failing_cases_have_are_suspected():
    cases = tuple(BY_ID[case] for case in ("causal", "none", "softcap", "softcap_causal_gqa"))
    found = conform("toy", among(Toy(changed(score=()))), cases)
    assert (found.exit_code, found.suspects()) == (
        1,
        ("score:SoftCap",) if BY_ID["gqa_none"] in cases else found.suspects(),
    )
    assert "score:SoftCap" in found.suspects()
    assert "mask:Causal" not in found.suspects()


def test_a_claim_that_no_case_shows_is_listed():
    found = conform("toy", among(Toy()), (BY_ID["causal"],))
    assert "sinks" in found.unproven
    assert "mask:Causal" not in found.unproven


def test_a_needless_refusal_is_a_hint_and_no_failure():
    timid = Toy(features=ALL_FEATURES - {"score:SoftCap", "sinks"})
    cases = tuple(BY_ID[case] for case in ("causal", "softcap", "sinks"))
    found = conform("toy", among(timid), cases, try_here(among(timid)))
    assert {line.case: line.outcome for line in found.lines if line.case != "dropout"} == {
        "causal": Outcome.VERIFIED,
        "softcap": Outcome.NEEDLESS,
        "sinks": Outcome.NEEDLESS,
    }
    assert dict(found.hints) == {"score:SoftCap": 1, "sinks": 1}
    assert found.exit_code == 0


def test_a_refusal_that_protects_is_no_hint():
    careful = Toy(changed(score=()), features=ALL_FEATURES - {"score:SoftCap"})
    found = conform("toy", among(careful), (BY_ID["causal"], BY_ID["softcap"]), try_here(among(careful)))
    assert (found.hints, found.lines[1].outcome) == ((), Outcome.REFUSED)


def test_what_cannot_run_here_proves_nothing():
    away = Toy(devices=frozenset({"cuda"}))
    found = conform("toy", among(away), CASES[:5])
    assert (found.exit_code, found.unavailable) == (3, "it runs on cuda, and the suite's tensors are on the CPU")
    missing = Toy()
    missing.unavailable = lambda: Reason("version", "toylib", text="toylib is not installed", hint="pip install toylib")
    assert "pip install toylib" in conform("toy", among(missing), CASES[:5]).unavailable


def test_an_unknown_name_is_an_error():
    with pytest.raises(UnknownBackendError, match="sdpa_math"):
        conform("sdpa_mat", among())


# --- in a process of its own, and the command ------------------------------------------------------------------------

PLUGIN = """
import os
import torch
from attn_dispatch.plugin import Backend, Capability, Executable, hookimpl

class Fragile(Backend):
    name = "fragile"
    capabilities = (Capability(frozenset({"cpu"}), frozenset({"float32"}), frozenset({"weight:Softmax", "mask:Full"})),)

    def compile(self, op):
        if op.score:
            os.abort()
        def run(q, k, v, t):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, scale=SCALE, enable_gqa=q.shape[1] != k.shape[1])
        return Executable(run)

@hookimpl
def attn_dispatch_backends():
    return [Fragile()]
"""


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    file = tmp_path / "fragile_plugin.py"
    file.write_text(PLUGIN.replace("SCALE", "op.effective_scale"))
    return file


def test_a_kernel_that_kills_its_process_leaves_the_suite_standing(plugin):
    problems = apart(str(plugin))("fragile", ["softcap", "gqa_none", "dv_larger"])
    assert "ended with code -6" in problems["softcap"]
    assert problems["gqa_none"] == ""
    assert "wanted" in problems["dv_larger"], "it is asked for lse and returns a tensor"


def call(*arguments: str):
    return CliRunner().invoke(app, ["conformance", *arguments])


def test_the_command_prints_the_matrix_the_hints_and_the_verdict(plugin):
    result = call("fragile", "--plugin", str(plugin), "--only", "none")
    assert result.exit_code == 0, result.output
    assert "fragile   fragile_plugin (given in code)" in result.output
    assert "needlessly refused: these were right" in result.output
    assert "  gqa  (" in result.output
    assert result.output.rstrip().endswith("passed")


def test_the_command_fails_for_a_lie_and_says_how_to_mend_it(plugin):
    plugin.write_text(PLUGIN.replace("SCALE", "None"))
    result = call("fragile", "--plugin", str(plugin), "--no-try", "--only", "scale")
    assert result.exit_code == 3, "no case of scale is claimed"
    plugin.write_text(PLUGIN.replace("SCALE", "1.0"))
    result = call("fragile", "--plugin", str(plugin), "--no-try", "--only", "none")
    assert result.exit_code == 1
    assert "lied: none\n  the scale is dropped: scores are not scaled at all" in result.output
    assert "  fix: honour it" in result.output
    assert "FAILED: 2 cases are wrong or lies" in result.output


def test_the_command_speaks_json(plugin):
    said = json.loads(call("fragile", "--plugin", str(plugin), "--no-try", "--only", "none", "--json").stdout)
    assert (said["backend"], said["passed"], said["counts"]["verified"]) == ("fragile", True, 2)
    assert {case["outcome"] for case in said["cases"]} == {"verified", "refused rightly"}
    assert said["by_word"]["mask:Full"]["verified"] == 2


def test_a_broken_plugin_file_is_an_error_with_its_cause(plugin):
    plugin.write_text(PLUGIN.replace("return [Fragile()]", "raise ZeroDivisionError('at registration')"))
    error = call("fragile", "--plugin", str(plugin)).exception
    assert isinstance(error, InputError)
    assert "ZeroDivisionError: at registration" in str(error)
    assert "Traceback" in str(error)


def test_a_plugin_file_that_quits_is_an_error_and_leaves_no_module(plugin):
    import sys

    plugin.write_text("raise SystemExit('no licence')")
    with pytest.raises(InputError, match="SystemExit: no licence"):
        load_plugin(str(plugin))
    assert "attn_dispatch_plugin_fragile_plugin" not in sys.modules


def test_a_plugin_file_may_have_the_name_of_a_library(tmp_path):
    import sys

    file, torch_ = tmp_path / "torch.py", sys.modules["torch"]
    file.write_text("import torch\nx = torch.ones(1)")
    assert load_plugin(str(file)).x == 1
    assert sys.modules["torch"] is torch_


def test_a_child_that_ends_before_its_first_case_blames_none(tmp_path):
    with pytest.warns(PluginWarning, match="ended with 1 before the first: .*there is no file"):
        assert apart(str(tmp_path / "gone.py"))("eager", ["causal", "none"]) == {}


def test_a_line_that_a_dying_child_wrote_by_half_is_no_trouble(tmp_path, monkeypatch):
    def run(command, **options):
        Path(command[5]).write_text('{"case": "causal"}\n{"case": "causal", "prob')
        return subprocess.CompletedProcess(command, -9, "", "")

    monkeypatch.setattr("attn_dispatch.testing.apart.subprocess.run", run)
    assert apart()("eager", ["causal"]) == {"causal": "its process ended with code -9"}


def test_a_plugin_that_is_not_there_and_a_case_that_is_not_there_are_errors(plugin):
    assert isinstance(call("fragile", "--plugin", "nowhere.py").exception, InputError)
    assert isinstance(call("eager", "--only", "no such case").exception, InputError)
