"""Known-bad combinations: data that refuses a backend with its link, from the core, plugins and pin files."""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from attn_dispatch import NoBackendError, dispatch, reference, registry
from attn_dispatch.capability import ALL_FEATURES, Capability
from attn_dispatch.cli import app
from attn_dispatch.device import DeviceFacts
from attn_dispatch.errors import ConfigWarning
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.tensors import TensorDesc
from attn_dispatch.plugin import Backend, Executable, hookimpl
from attn_dispatch.registry.discover import discover
from attn_dispatch.selection import pin_files
from attn_dispatch.selection.candidates import enumerate_candidates, rebuild
from attn_dispatch.selection.known_bad import entries, reason_against
from attn_dispatch.selection.pin_files import parse
from attn_dispatch.settings import settings

CORE = Path(reference.__file__).with_name("known_bad.yaml")


class Toy(Backend):
    name = "toy"
    capabilities = (Capability(frozenset({"cpu"}), frozenset({"float32"}), ALL_FEATURES),)
    library = "1.5.2"

    def version(self) -> str:
        return self.library

    def compile(self, op):
        return Executable(lambda q, k, v, t: reference.attention(op, q, k, v, t).out)


ENTRY = {
    "id": "toy-decode",
    "backend": "toy",
    "when": {"query_length": 1},
    "why": "decode is off by one",
    "link": "https://example.org/issues/7",
}


def plugin(*known: Any, backend: Backend | None = None) -> Any:
    made = types.ModuleType("toy_plugin")
    made.attn_dispatch_backends = hookimpl(specname="attn_dispatch_backends")(lambda: [backend or Toy()])
    made.attn_dispatch_known_bad = hookimpl(specname="attn_dispatch_known_bad")(lambda: list(known))
    return made


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Use a plugin with these entries, and a pin file of this text, until the test ends."""
    before = registry.current()

    def put(*known: Any, pins: str = "schema: 1\n", allow: str = "", backend: Backend | None = None) -> Any:
        file = tmp_path / "pins.yaml"
        file.write_text(pins)
        monkeypatch.setenv("ATTN_DISPATCH_CONFIG", str(file))
        monkeypatch.setenv("ATTN_DISPATCH_ALLOW_KNOWN_BAD", allow)
        settings.cache_clear()
        made = discover([("toy_plugin", plugin(*known, backend=backend))])
        registry.reset(made)
        return made

    yield put
    monkeypatch.undo()
    settings.cache_clear()
    registry.reset(before)


def x(sq: int = 1, skv: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(1, 2, sq, 8), torch.randn(1, 2, skv, 8)


def asked(sq: int = 1) -> AttentionOp:
    q, k = x(sq)
    return AttentionOp(TensorDesc.of(q), TensorDesc.of(k), TensorDesc.of(k))


def test_an_entry_refuses_its_backend_with_its_text_and_link_and_nothing_else(install):
    install(ENTRY)
    q, k = x()
    with pytest.raises(NoBackendError) as caught:
        dispatch.attention(q, k, k, backend="toy")
    (reason,) = caught.value.refusals["toy"]
    assert (reason.code, reason.field) == ("known_bad", "toy-decode")
    assert "known bad, toy-decode: decode is off by one (https://example.org/issues/7" in str(caught.value)
    q, k = x(2)
    assert dispatch.plan(q, k, k, backend="toy").name == "toy"


def test_explain_shows_the_entry_its_link_and_how_to_allow_it(install):
    install(ENTRY)
    report = dispatch.explain(*x(), x()[1])
    assert "- toy" in str(report)
    for words in ("known bad, toy-decode", "https://example.org/issues/7", "allow_known_bad: [toy-decode]"):
        assert words in str(report)
    assert [r["code"] for r in report.to_dict()["refused"]["toy"]] == ["known_bad"]


def test_an_entry_holds_behind_rewrites_and_for_a_remembered_choice(install):
    made = install(ENTRY)
    found, _ = enumerate_candidates(asked(), made)
    assert {c.name for c in found if c.backend.name == "toy" and not c.reasons} == set()
    assert rebuild("toy", asked(), made) is None
    assert rebuild("toy", asked(2), made) is not None


@pytest.mark.parametrize("road", ["environment", "pin file"])
def test_naming_the_entry_allows_it_and_naming_the_backend_does_not(install, road):
    by_file = "schema: 1\nallow_known_bad: toy-decode\n" if road == "pin file" else "schema: 1\n"
    install(ENTRY, pins=by_file, allow="other, toy-decode" if road == "environment" else "")
    q, k = x()
    assert dispatch.plan(q, k, k, backend="toy").name == "toy"
    install(ENTRY, pins=by_file.replace("toy-decode", "another"), allow="another")
    with pytest.raises(NoBackendError, match="known bad"):
        dispatch.plan(q, k, k, backend="toy")


def test_a_users_own_entry_stands_in_a_pin_file(install):
    install(pins=yaml.safe_dump({"schema": 1, "known_bad": [ENTRY]}))
    q, k = x()
    with pytest.raises(NoBackendError, match="known bad, toy-decode"):
        dispatch.plan(q, k, k, backend="toy")


def test_a_plugin_may_give_a_file(install, tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump({"schema": 1, "known_bad": [ENTRY]}))
    made = install(str(file))
    (entry,) = [e for e in entries(made) if e.backend == "toy"]
    assert (entry.origin, entry.where) == ("toy_plugin (given in code)", f"{file}:2")


@pytest.mark.parametrize(
    ("wanted", "version", "is_meant"),
    [
        (">=1.5,<2", "1.5.2", True),
        (">=1.5,<2", "2.0", False),
        (">=2.11", "2.13.0+cpu", True),
        (">=2.11", "2.14.0.dev20261101", True),
        ("<1.5", "1.5.2", False),
        (">=1.5", "a version that nobody can read", True),
    ],
)
def test_a_range_of_versions(install, wanted, version, is_meant):
    toy = Toy()
    toy.library = version
    made = install({**ENTRY, "version": wanted}, backend=toy)
    assert bool(rebuild("toy", asked(), made) is None) is is_meant


def test_hardware_is_compared_with_this_machine(install, monkeypatch):
    made = install({**ENTRY, "hardware": {"device": "cpu", "arch": "sm100"}})
    assert rebuild("toy", asked(), made) is not None
    monkeypatch.setattr(pin_files.device, "facts", lambda kind: DeviceFacts(kind, "B200", "sm100"))
    assert rebuild("toy", asked(), made) is None
    made = install({**ENTRY, "hardware": {"device": "cuda", "arch": "sm100"}})
    assert rebuild("toy", asked(), made) is not None, "the op is on the CPU"


BROKEN = {
    "an unknown key": ({**ENTRY, "versoin": ">=1"}, "there is no key 'versoin'; did you mean 'version'?"),
    "no link": ({k: v for k, v in ENTRY.items() if k != "link"}, "key 'link' is missing"),
    "a link that is none": ({**ENTRY, "link": "issue 7"}, "'issue 7' is no link"),
    "a version that is none": ({**ENTRY, "version": "new"}, "'new' is no range of versions"),
    "an id with spaces": ({**ENTRY, "id": "Toy Decode"}, "'Toy Decode' is no name of an entry"),
    "a mask that is none": ({**ENTRY, "when": {"mask": "casual"}}, "did you mean 'causal'"),
    "layers": ({**ENTRY, "when": {"layers": "a.*"}}, "a known-bad entry cannot look at layers"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_an_entry_that_is_wrong_is_named_with_its_plugin_and_ignored(install, kind):
    entry, words = BROKEN[kind]
    made = install(entry)
    with pytest.warns(ConfigWarning) as caught:
        assert [e for e in entries(made) if e.backend == "toy"] == []
    assert words in str(caught[0].message)
    assert "known-bad entries of toy_plugin (given in code) are ignored" in str(caught[0].message)
    q, k = x()
    assert dispatch.plan(q, k, k, backend="toy").name == "toy"


# --- what the package ships ------------------------------------------------------------------------------------------


def test_the_shipped_file_is_right_and_every_entry_has_a_backend_and_a_link():
    parsed = parse(CORE)
    assert [str(p) for p in parsed.problems] == []
    assert len({e.id for e in parsed.known_bad}) == len(parsed.known_bad) >= 3
    own = set(registry.current().backends)
    assert {e.backend for e in parsed.known_bad} <= own
    assert all(e.link.startswith("https://github.com/") for e in parsed.known_bad)


def test_the_cpu_flash_kernel_is_barred_where_it_gives_nan_and_its_remedy_is_right():
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    bad = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, k, 0.0, True, scale=-0.3)[0]
    assert bad.isnan().any(), "the entry is out of date: the kernel is right"
    options: dict[str, Any] = {"is_causal": True, "scale": -0.3}
    report = dispatch.explain(q, k, k, **options)
    assert [r.field for r in report.refused["sdpa_flash"]] == ["cpu-flash-causal-scale"]
    out = dispatch.attention(q, k, k, **options, backend="densify_mask > sdpa_flash")
    torch.testing.assert_close(out, dispatch.attention(q, k, k, **options, backend="eager"))


def test_cudnn_is_barred_on_b200_below_eight_kv_heads(monkeypatch):
    def refusal(heads: int, arch: str) -> Any:
        monkeypatch.setattr(pin_files.device, "facts", lambda kind: DeviceFacts(kind, "GPU", arch))
        desc = TensorDesc((1, heads, 64, 64), "bfloat16", "cuda")
        return reason_against("sdpa_cudnn", "2.13.0", AttentionOp(desc, desc, desc), registry.current())

    assert "pytorch/issues/193893" in str(refusal(4, "sm100"))
    assert refusal(8, "sm100") is None
    assert refusal(4, "sm90") is None


def test_doctor_lists_the_entries_and_says_which_hold_here(install):
    install(ENTRY, allow="toy-decode")
    said = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["known_bad"]
    by_id = {entry["id"]: entry for entry in said}
    assert by_id["toy-decode"]["allowed"] is True
    assert by_id["toy-decode"]["origin"] == "toy_plugin (given in code)"
    assert by_id["cpu-flash-causal-scale"]["here"] is True
    assert by_id["cudnn-few-kv-heads"]["link"].endswith("193893")
    text = CliRunner().invoke(app, ["doctor"]).stdout
    assert "toy-decode" in text
    assert "https://example.org/issues/7" in text
