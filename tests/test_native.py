"""What is in C++: built for this torch, Python and CPU, found again, and done without where it is not there."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from attn_dispatch import native
from attn_dispatch.errors import BuildError, ConfigError
from attn_dispatch.native import DECODE, LOOKUP, SOURCES, Source
from attn_dispatch.routes import Route

each_source = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
needs_lookup = pytest.mark.skipif(native.lookup().module is None, reason=native.lookup().why)


def find(source: Source) -> native.Built:
    """What a process finds that looks for the first time."""
    return {LOOKUP: native.lookup, DECODE: native.decode}[source].__wrapped__()


@pytest.fixture(autouse=True)
def _no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTN_DISPATCH_LOOKUP", raising=False)


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler")
def test_build_makes_one_file_that_loads_and_removes_that_of_another_source(tmp_path):
    source = LOOKUP  # the other takes a minute, and `make test` has just built it
    path = native.built_path(source, tmp_path)
    old = tmp_path / path.name.replace(path.name.split("-")[1], "0123abcd")  # of another source
    other_torch = tmp_path / path.name.replace("-torch", "-torch1.")
    for file in (old, other_torch):
        file.write_bytes(b"")
    assert native.build(source, tmp_path) == path
    assert set(tmp_path.iterdir()) == {path, other_torch}
    module, x = native.load(source, path), torch.zeros(2, 3, 4, 8)
    assert module.find({(): (Route(module.Guard((x, x, x)), "run"),)}, (), (x, x, x)) == "run"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64" or not shutil.which("g++"), reason="no g++ for x86_64")
def test_the_kernel_compiles_for_vectors_that_may_not_be_here(monkeypatch):
    """The headers of each kind differ: one that AVX2 brings along was missing with AVX-512."""
    from torch.utils.cpp_extension import include_paths

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    folders = [f"-I{folder}" for folder in (*include_paths(), sysconfig.get_paths()["include"])]
    source = Path(native.__file__).with_name(DECODE.files[0])
    command = ["g++", "-std=c++20", "-fsyntax-only", *native._flags(DECODE), *folders, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@each_source
def test_what_compiles_and_does_not_work_is_not_kept(tmp_path, monkeypatch, source):
    def broken(source: Source, scratch: Path) -> Path:
        (scratch / "_lookup.so").write_bytes(b"not a library")
        return scratch / "_lookup.so"

    monkeypatch.setattr(native, "_compile", broken)
    with pytest.raises(BuildError, match=r"it does not work \(exit code 1\).*ImportError"):
        native.build(source, tmp_path)
    assert not list(tmp_path.iterdir())


@each_source
def test_build_without_a_compiler_says_so_and_leaves_nothing(tmp_path, monkeypatch, source):
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, str(tmp_path / "no-compiler"))
    with pytest.raises(
        BuildError, match=r"(?s)cannot be built against torch .*It takes setuptools and a C\+\+"
    ) as told:
        native.build(source, tmp_path)
    assert source.files[0] in str(told.value)
    assert source.without in str(told.value)
    assert not list(tmp_path.iterdir())


@each_source
def test_what_was_built_for_another_torch_is_not_looked_at(monkeypatch, source):
    here = native.built_path(source)
    monkeypatch.setattr(torch, "__version__", "2.99.0+strange/build")
    assert native.built_path(source) != here
    assert native.built_path(source).parent == here.parent
    assert "not built" in find(source).why


def test_a_kernel_is_built_for_the_vectors_that_torch_uses_and_the_lookup_for_none(monkeypatch):
    names = []
    for kind in ("AVX2", "AVX512", "NO AVX"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda kind=kind: kind)
        names.append((native.built_path(LOOKUP).name, native.built_path(DECODE).name))
        flags = native._flags(DECODE)
        assert any(flag.startswith("-mavx512") for flag in flags) == (kind == "AVX512")
        assert (f"-DCPU_CAPABILITY={kind}" in flags) == (kind != "NO AVX")
        assert native._flags(LOOKUP) == ["-O2", "-g0"]
    assert len({lookup for lookup, _ in names}) == 1
    assert len({decode for _, decode in names}) == 3
    assert all(" " not in name for pair in names for name in pair)


@each_source
def test_a_python_without_gil_does_without(tmp_path, monkeypatch, source):
    monkeypatch.setattr(native, "_HAS_NO_GIL", True)
    assert "relies on the GIL" in find(source).why
    with pytest.raises(BuildError, match="relies on the GIL"):
        native.build(source, tmp_path)


@each_source
def test_a_broken_file_is_told_of_and_not_used(tmp_path, monkeypatch, source):
    broken = native.built_path(source, tmp_path)
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(native, "built_path", lambda source: broken)
    found = find(source)
    assert found.module is None
    assert broken.name in found.why
    assert "attn-dispatch build --force" in found.why


def test_the_environment_can_ask_for_the_lookup_in_python():
    code = (
        "import sys, torch; from attn_dispatch import dispatch, native, routes\n"
        "x = torch.ones(1, 2, 3, 8); a, b = dispatch.attention(x, x, x), dispatch.attention(x, x, x)\n"
        "assert torch.equal(a, b) and len(routes.routes.table) == 1 and routes.find is routes.find_in_python\n"
        "print(native.lookup().why)"
    )
    environment = {**os.environ, "ATTN_DISPATCH_LOOKUP": "python"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Python: ATTN_DISPATCH_LOOKUP=python"


def test_another_word_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv("ATTN_DISPATCH_LOOKUP", "off")
    with pytest.raises(ConfigError, match="ATTN_DISPATCH_LOOKUP='off' is no lookup; there is python"):
        native.lookup.__wrapped__()


@needs_lookup
def test_the_compiled_module_takes_nobodys_name():
    code = "import sys; from attn_dispatch import dispatch; assert 'lookup' not in sys.modules, sys.modules['lookup']"
    subprocess.run([sys.executable, "-c", code], check=True)
