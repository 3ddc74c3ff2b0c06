"""The distributions in plugins/ as this repository has them: they register, are valid, and say why they refuse here.

What each computes is tested in its own folder. Here their libraries count as missing, whether they are or not.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from attn_dispatch import NoBackendError, dispatch, registry, variants
from attn_dispatch.plugin import ALL_FEATURES, AttentionOp, Linear, TensorDesc
from attn_dispatch.registry import discover as discovery

PLUGINS = Path(__file__).resolve().parents[1] / "plugins"
VENDORS = ("fla", "flash_attn", "flashinfer", "openvino")
WORDS = {
    "openvino": "openvino is not installed (pip install attn-dispatch-openvino)",
    "flash_attn_2": "flash-attn is not installed; there is no CUDA device "
    "(pip install flash-attn --no-build-isolation)",
    "flash_attn_3": "flash_attn_3 is not installed; there is no CUDA device "
    "(build hopper/ of github.com/Dao-AILab/flash-attention)",
    "flash_attn_4": "flash-attn-4 is not installed; there is no CUDA device (pip install flash-attn-4)",
    "flashinfer": "flashinfer-python is not installed; there is no CUDA device (pip install flashinfer-python)",
    "fla": "fla-core is not installed; triton is not installed; there is no CUDA device (pip install fla-core)",
}


def section(vendor: str, name: str) -> dict[str, str]:
    """The ``key = "value"`` lines of a table of its pyproject.toml (Python 3.10 has no reader for it)."""
    text = (PLUGINS / vendor / "pyproject.toml").read_text(encoding="utf-8")
    body = text.split(f"\n[{name}]\n")[1].split("\n[")[0]
    return dict(re.findall(r'^(\w+) = "(.*)"$', body, re.MULTILINE))


def points(vendor: str) -> dict[str, str]:
    return section(vendor, "project.entry-points.attn_dispatch")


def sources(vendor: str) -> list[Path]:
    return sorted(p for p in (PLUGINS / vendor).rglob("attn_dispatch_*.py") if "tests" not in p.parts) + sorted(
        p for folder in (PLUGINS / vendor).glob("attn_dispatch_*") if folder.is_dir() for p in folder.glob("*.py")
    )


@pytest.fixture
def found(monkeypatch):
    """A registry of the built-in backends and the four plugins from their folders, on a machine that has nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    built_in = [p for p in entry_points(group="attn_dispatch") if p.dist is not None and p.dist.name == "attn-dispatch"]
    monkeypatch.setattr(discovery, "_entry_points", lambda collector: built_in)
    modules = []
    for vendor in VENDORS:
        monkeypatch.syspath_prepend(str(PLUGINS / vendor))
        modules += [(name, importlib.import_module(module)) for name, module in points(vendor).items()]
    missing = {
        "attn_dispatch_openvino": ("_is_installed", lambda: False),
        "attn_dispatch_flash_attn.backends": ("installed_version", lambda line: None),
        "attn_dispatch_flashinfer.backend": ("installed_version", lambda: None),
        "attn_dispatch_fla": ("_installed_version", lambda: None),
    }
    for module, (name, value) in missing.items():
        monkeypatch.setattr(sys.modules[module], name, value)
    monkeypatch.setattr(sys.modules["attn_dispatch_fla"], "_has_triton", lambda: False)
    before = registry.current()
    made = discovery.discover(extra=modules)
    registry.reset(made)
    yield made
    registry.reset(before)


def test_all_of_them_register_and_none_is_set_aside(found):
    assert found.quarantined == ()
    assert set(WORDS) <= set(found.backends)


@pytest.mark.parametrize("name", WORDS)
def test_its_facts_are_words_that_the_ir_has(found, name):
    backend = found.backends[name]
    assert backend.tested == ("cpu" if name == "openvino" else "untested")
    for facts in backend.capabilities:
        assert facts.features
        assert facts.features <= ALL_FEATURES
        assert all(hasattr(torch, dtype) for dtype in facts.dtypes)
        assert facts.devices == ({"cpu"} if name == "openvino" else {"cuda"})


@pytest.mark.parametrize("name", WORDS)
def test_it_says_exactly_what_is_missing_here(found, name):
    device = "cpu" if name == "openvino" else "cuda"
    desc = TensorDesc((1, 4, 16, 64), "bfloat16", device)
    op = AttentionOp(desc, desc, desc, **({"weight": Linear()} if name == "fla" else {}))
    assert [str(reason) for reason in found.backends[name].reasons_against(op)] == [WORDS[name]]


@pytest.mark.parametrize("name", WORDS)
def test_asked_for_by_name_it_raises_with_the_same_words_and_everything_else_works(found, name):
    q = torch.randn(1, 2, 4, 16)
    options = {"variant": variants.LinearAttention(), "is_causal": True} if name == "fla" else {}
    with pytest.raises(NoBackendError) as error:
        dispatch.attention(q, q, q, backend=name, **options)
    assert [str(reason) for reason in error.value.refusals[name]] == [WORDS[name]]
    assert dispatch.attention(q, q, q, **options).shape == q.shape
    assert WORDS[name] in str(dispatch.explain(q, q, q, **options))


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_distribution_has_what_it_needs(vendor):
    facts = section(vendor, "project")
    assert facts["name"] == f"attn-dispatch-{vendor.replace('_', '-')}"
    readme = (PLUGINS / vendor / "README.md").read_text(encoding="utf-8")
    assert f"pip install {facts['name']}" in readme
    assert "untested" in readme
    assert list((PLUGINS / vendor / "tests").glob("test_*.py"))
    tops = {path.relative_to(PLUGINS / vendor).parts[0].removesuffix(".py") for path in sources(vendor)}
    assert set(points(vendor).values()) == tops


@pytest.mark.parametrize("vendor", VENDORS)
def test_of_attn_dispatch_it_imports_the_plugin_module_alone(vendor):
    own = set(points(vendor).values())
    for path in sources(vendor):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert (
                    not name.startswith("attn_dispatch") or name == "attn_dispatch.plugin" or name.split(".")[0] in own
                )


@pytest.mark.parametrize("vendor", VENDORS)
def test_no_module_imports_its_library_when_it_is_imported(vendor):
    libraries = {"openvino", "flash_attn", "flash_attn_interface", "flashinfer", "fla", "triton", "numpy"}
    for path in sources(vendor):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & libraries, path


def test_no_module_of_a_plugin_is_longer_than_the_house_allows():
    assert [path for vendor in VENDORS for path in sources(vendor) if len(path.read_text().splitlines()) > 450] == []
