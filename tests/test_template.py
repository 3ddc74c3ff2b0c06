"""The plugin template: rendered, installed into a fresh environment, and proven there by its own suite."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import attn_dispatch

ROOT = Path(__file__).parents[1]
TEMPLATE = ROOT / "plugins" / "template"


def test_the_template_imports_nothing_of_ours_but_plugin_and_its_test_testing():
    imported: dict[str, set[str]] = {}
    for file in TEMPLATE.glob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        names = {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported[file.name] = {name for name in names if name.split(".")[0] == "attn_dispatch"}
    assert imported["attn_dispatch_my_backend.py"] == {"attn_dispatch.plugin"}
    assert imported["test_my_backend.py"] == {"attn_dispatch", "attn_dispatch.testing.conformance"}
    assert {file.name for file in TEMPLATE.iterdir() if file.is_file()} == {
        *imported,
        "pyproject.toml",
        "README.md",
    }


def test_a_backend_in_the_template_has_fewer_than_40_lines():
    assert len((TEMPLATE / "attn_dispatch_my_backend.py").read_text(encoding="utf-8").splitlines()) < 40


def render(folder: Path, name: str) -> Path:
    """The template under another name, by the commands of its README."""
    shutil.copytree(TEMPLATE, folder / "template", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
    (commands,) = re.findall(r"((?:    .*\n)+)", (TEMPLATE / "README.md").read_text(encoding="utf-8"))[:1]
    script = commands.replace("NAME", name).replace("Name", name.title())
    subprocess.run(["bash", "-euc", script], cwd=folder, check=True, capture_output=True, timeout=60)
    return folder / name


def fresh_environment(folder: Path) -> Path:
    """A virtual environment that sees this one's packages, and this checkout before them; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "parent.pth").write_text(f"{ROOT}\n{sysconfig.get_paths()['purelib']}\n", encoding="utf-8")
    return folder / "bin" / "python"


@pytest.mark.slow
def test_the_template_renders_installs_and_passes_its_own_suite(tmp_path):
    plugin = render(tmp_path, "granite")
    python = fresh_environment(tmp_path / "venv")
    assert "my_backend" not in "".join(f.read_text(encoding="utf-8") for f in plugin.iterdir() if f.is_file())
    assert (plugin / "attn_dispatch_granite.py").is_file()

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(python), *arguments], cwd=plugin, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert Path(run("-c", "import attn_dispatch; print(attn_dispatch.__file__)").strip()) == Path(
        attn_dispatch.__file__
    )
    run("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", ".")
    assert "2 passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider")
    cli = "import sys; from attn_dispatch.cli import main; sys.argv = ['attn-dispatch', *sys.argv[1:]]; main()"
    said = run("-c", cli, "doctor")
    assert re.search(r"granite .* attn-dispatch-granite 0\.1\.0 .* ready", said), said
    assert run("-c", cli, "conformance", "granite", "--no-try", "--only", "causal").rstrip().endswith("passed")
