"""What the pages say is run: examples, links, commands, targets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from attn_dispatch.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_examples_run(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    for code in blocks(page):
        exec(compile(code, str(page), "exec"), {})


def test_the_readme_has_an_example_and_the_page_shows_a_chosen_candidate(capsys):
    (code,) = blocks(ROOT / "README.md")
    exec(compile(code, "README.md", "exec"), {})
    assert "chosen    bands > " in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"


def test_commands_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    named = re.search(r"`attn-dispatch ([a-z| ]+)`", text)
    assert named is not None
    assert {word.strip() for word in named[1].split("|")} == set(get_command(app).commands)


def test_make_targets_in_the_readme_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", (ROOT / "README.md").read_text())) <= targets


def test_the_readme_fits_one_screen():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 60
