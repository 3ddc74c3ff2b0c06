"""The house rules of DESIGN section 9, read from the source: import arrows, import cost, names, sizes, docstrings."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import attn_dispatch

PACKAGE = Path(attn_dispatch.__file__).parent
MAX_LINES = 450

# The arrows: a part may import itself and the parts listed here, at the top of its modules. A part is a module or a
# folder directly under attn_dispatch; one that is not listed fails, so that a new one is thought about.
ARROWS: dict[str, set[str]] = {
    "__init__": set(),
    "errors": set(),
    "settings": {"errors"},
    "budgets": set(),
    "device": {"errors"},
    "autocast": set(),
    "results": set(),
    "ir": {"errors"},
    "tiling": {"errors", "ir", "backend", "reference"},
    "state": {"errors"},
    "complexity": {"errors", "ir"},
    "variants": {"errors", "ir", "state"},
    "masks": {"errors", "ir"},
    "biases": {"errors", "ir"},
    "paging": {"errors", "ir", "shapes", "variants"},
    "varlen": {"results", "errors", "ir", "shapes", "variants"},
    "shapes": {"errors", "ir"},
    "capability": {"errors", "ir", "device"},
    "backend": {"errors", "ir", "capability", "state"},
    "reference": {"errors", "ir", "backend", "state"},
    "linear_call": {"errors", "ir", "state", "variants"},
    "frontend": {"errors", "ir", "linear_call", "shapes", "state", "variants"},
    "passes": {"errors", "ir"},
    "rewrites": {"errors", "ir", "device", "capability", "backend", "reference", "tiling", "passes"},
    "lowering": {"errors", "ir", "capability"},
    "backends": {
        *("errors", "lowering", "ir", "device", "capability", "backend", "native", "reference", "state", "tiling"),
    },
    "registry": {"errors", "ir", "capability", "backend", "rewrites"},
    "context": {"errors", "settings"},
    "selection": {
        *("errors", "ir", "budgets", "device", "settings", "capability", "backend", "registry", "rewrites", "passes"),
        *("reference", "state", "yaml_text"),
    },
    "yaml_text": set(),
    "watched": {"errors", "ir", "backend", "registry", "state"},
    "plan": {
        *(
            "autocast",
            "errors",
            "ir",
            "backend",
            "results",
            "context",
            "device",
            "reference",
            "frontend",
            "passes",
            "registry",
            "selection",
        ),
        *("settings", "state", "watched"),
    },
    "native": {"errors", "settings"},
    "routes": {"errors", "backend", "context", "ir", "native", "registry", "selection"},
    "keeping": {"errors", "backend", "ir", "passes", "plan", "registry", "routes", "selection"},
    "report": {
        *("capability", "complexity", "context", "errors", "frontend", "ir", "passes", "plan"),
        *("registry", "selection", "settings"),
    },
    "tracing": {"autocast", "results", "errors", "ir", "context", "reference", "shapes", "state", "variants"},
    "patterns": {"ir", "tracing", "variants"},
    "torch_op": {"results", "errors", "ir", "state", "variants"},
    "torch_select": {"errors", "ir"},
    "capture": {"errors", "ir", "context", "passes", "plan", "yaml_text"},
    "select": {"errors", "ir", "shapes", "tracing"},
    "plugin": {"errors", "ir", "capability", "backend", "registry", "rewrites", "state"},
    "dispatch": {
        *(
            "autocast",
            "device",
            "errors",
            "ir",
            "patterns",
            "context",
            "keeping",
            "tracing",
            "frontend",
            "passes",
            "plan",
            "registry",
            "report",
            "routes",
        ),
        *("selection", "variants", "shapes", "masks", "select", "paging", "varlen"),
    },
}
# Above dispatch: these may import anything below them.
TOP = {"bench", "cli", "export", "integrations", "nn", "testing", "visualize", "__main__"}
# What is built in registers through the same hook as a stranger, so it may use the hook's marker.
MARKERS = {("backends", "registry"), ("rewrites", "registry")}


def modules() -> list[str]:
    found = [m.name for m in pkgutil.walk_packages([str(PACKAGE)], "attn_dispatch.")]
    return ["attn_dispatch", *(name for name in sorted(found) if not name.endswith("__main__"))]


def path_of(name: str) -> Path:
    base = PACKAGE.parent / Path(*name.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(path_of(name).read_text(encoding="utf-8"))


def part_of(name: str) -> str:
    return name.split(".")[1] if "." in name else "__init__"


def top_imports(name: str) -> Iterator[tuple[str, int]]:
    """Modules that are imported when a module is, with the line; neither inside functions nor for type checkers."""
    waiting: list[ast.AST] = list(tree(name).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            module = node.module or ""
            for alias in node.names:
                full = f"{module}.{alias.name}"
                yield (full if module == "attn_dispatch" else module), node.lineno
        waiting += list(ast.iter_child_nodes(node))


def test_every_part_has_its_arrows_written_down():
    parts = {part_of(name) for name in modules()}
    assert parts - TOP <= set(ARROWS), "a new part: say in ARROWS what it may import"


@pytest.mark.parametrize("name", modules())
def test_imports_point_one_way(name):
    part = part_of(name)
    if part in TOP:
        return
    wrong = []
    for imported, line in top_imports(name):
        if not imported.startswith("attn_dispatch"):
            continue
        other = part_of(imported)
        marker = (part, other) in MARKERS and imported == "attn_dispatch.registry.hookspecs"
        if other not in {part, *ARROWS[part]} and not marker:
            wrong.append(f"{path_of(name)}:{line} {part} may not import {imported}")
    assert not wrong, "\n".join(wrong)


def test_the_arrows_have_no_circle():
    order: list[str] = []
    waiting = dict(ARROWS)
    while waiting:
        free = [part for part, needs in waiting.items() if needs <= set(order)]
        assert free, f"a circle among {sorted(waiting)}"
        order += free
        for part in free:
            del waiting[part]


HEAVY = (
    "transformers",
    "diffusers",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "pydantic",
    "yaml",
    "rich",
    "typer",
    "numpy.testing",
)


# Modules that are imported inside functions alone, when what they are about is first met.
LATE = {f"attn_dispatch.selection.{name}": "a pin file is read" for name in ("pin_models", "pin_values")}


@pytest.mark.parametrize("name", modules())
def test_no_module_of_the_core_imports_a_heavy_library_at_its_top(name):
    if part_of(name) in TOP or name in LATE:
        return
    late = [f"{imported} (line {line})" for imported, line in top_imports(name) if imported in LATE]
    assert not late, "import it inside the function that needs it"
    heavy = [f"{imported} (line {line})" for imported, line in top_imports(name) if imported.split(".")[0] in HEAVY]
    assert not heavy


_IMPORT = """
import sys
import torch
before = set(sys.modules)
import time
start = time.process_time()
from attn_dispatch import dispatch, masks, variants
dispatch.attention
took_ms = (time.process_time() - start) * 1e3
from attn_dispatch.registry import discover
import threading
slow = {"torch._dynamo", "torch._inductor", "torch.utils.cpp_extension", "torch.utils.benchmark"}
added = set(sys.modules) - before
new = sorted({name.split(".")[0] for name in added} | added & slow)
print(new, discover._current is None, threading.active_count(), took_ms)
"""


def test_importing_the_package_loads_nothing_heavy_discovers_nothing_and_starts_nothing():
    done = subprocess.run([sys.executable, "-c", _IMPORT], capture_output=True, text=True, timeout=120, check=True)
    loaded = set(ast.literal_eval(done.stdout.split("]")[0] + "]"))
    rest = done.stdout.split("]")[1].split()
    assert not loaded & {*HEAVY, "attn_dispatch_plugins", "openvino", "flash_attn", "triton"}, sorted(loaded)
    assert not loaded & {"sympy", "setuptools"}, sorted(loaded)
    assert not [name for name in loaded if "." in name], "parts of torch that take a second to load"
    assert rest[:2] == ["True", "1"], "plugins were discovered, or a thread was started, by an import"


def test_importing_the_package_alone_does_not_import_torch():
    script = "import sys, attn_dispatch; print('torch' in sys.modules, attn_dispatch.__version__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[0] == "False"


@pytest.mark.parametrize("name", modules())
def test_all_says_what_a_module_offers_and_every_name_exists(name):
    module = importlib.import_module(name)
    assert hasattr(module, "__all__") or (path_of(name).name == "__init__.py" and not _defined(name)), name
    for listed in getattr(module, "__all__", ()):
        assert getattr(module, listed, None) is not None, f"{name}.__all__ lists {listed}, which is not there"
    assert len(set(getattr(module, "__all__", ()))) == len(getattr(module, "__all__", ()))


def _defined(name: str) -> list[ast.FunctionDef | ast.ClassDef]:
    return [
        node
        for node in tree(name).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    ]


@pytest.mark.parametrize("name", modules())
def test_a_public_function_or_class_has_a_docstring(name):
    bare = [f"{path_of(name)}:{node.lineno} {node.name}" for node in _defined(name) if not ast.get_docstring(node)]
    assert ast.get_docstring(tree(name)), f"{name} has no docstring"
    assert not bare, "\n".join(bare)


@pytest.mark.parametrize("name", modules())
def test_what_a_module_imports_from_another_is_public_there(name):
    """``__all__`` equals reality from the other side: nobody imports an underscored name of another module."""
    wrong = []
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attn_dispatch"):
            wrong += [f"{node.module}.{a.name}" for a in node.names if a.name.startswith("_") and a.name[1] != "_"]
    assert not wrong


@pytest.mark.parametrize("name", modules())
def test_a_module_is_short_enough_to_read(name):
    lines = len(path_of(name).read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES or name == "attn_dispatch.testing.cases", f"{path_of(name)} has {lines} lines"


@pytest.mark.parametrize("name", modules())
def test_no_module_is_a_drawer(name):
    assert not {"utils", "common", "helpers", "manager", "misc"} & set(name.split("."))


# Modules that touch the environment without reading a setting from it.
PASSES_ON = {
    "attn_dispatch.bench.suite": "hands the environment to a child process",
    "attn_dispatch.cli.models": "sets a variable that huggingface_hub reads",
}


def test_only_settings_reads_the_environment():
    readers = {n for n in modules() if any(_reads_environment(node) for node in ast.walk(tree(n)))}
    assert readers == {"attn_dispatch.settings", *PASSES_ON}


def _reads_environment(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and ast.unparse(node.value) == "os"
