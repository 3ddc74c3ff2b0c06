"""The optional C++ half of the warm path: `build` compiles ``lookup.cpp``, `load` finds what was built.

It is compiled on the machine that runs it, by ``attn-dispatch build``: it reads tensors through torch's C++ headers,
which fit one version of torch. The file that results stands beside its source, and its name says for what it was
built (source, torch, Python), so that another torch in the same place finds nothing and runs in Python instead.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from attn_dispatch.errors import BuildError
from attn_dispatch.settings import wants_compiled_lookup

__all__ = ["Lookup", "build", "built_path", "load", "lookup"]

_SOURCE = Path(__file__).with_name("lookup.cpp")


@dataclass(frozen=True)
class Lookup:
    """What looks calls up in this process.

    Args:
        module: the compiled module; None when the lookup runs in Python.
        why: where the module is from, or why there is none, for `attn-dispatch doctor`.
    """

    module: ModuleType | None
    why: str


def built_path(folder: Path = _SOURCE.parent) -> Path:
    """The file that `build` makes for this source, torch and Python.

    Args:
        folder: where it stands; beside its source by default.
    """
    source = hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:8]
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    made_for = re.sub(r"[^\w.+]", "_", str(torch.__version__))
    return folder / f"lookup-{source}-torch{made_for}{suffix}"


@functools.cache
def lookup() -> Lookup:
    """The lookup of this process: compiled if it was built and ``ATTN_DISPATCH_LOOKUP`` is not ``python``."""
    if not wants_compiled_lookup():
        return Lookup(None, "Python: ATTN_DISPATCH_LOOKUP=python")
    try:
        path = built_path()
        if not path.is_file():
            return Lookup(None, "Python: not built; `attn-dispatch build` spares a microsecond a call")
        return Lookup(load(path), f"compiled: {path.name}")
    except (ImportError, OSError) as error:
        return Lookup(None, f"Python: {' '.join(str(error).split())}; `attn-dispatch build --force` builds it anew")


def load(path: Path) -> ModuleType:
    """Import what `build` made.

    Raises:
        ImportError: it does not fit this torch or Python.
    """
    loader = importlib.machinery.ExtensionFileLoader("lookup", str(path))
    spec = importlib.util.spec_from_file_location("lookup", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def build(folder: Path = _SOURCE.parent) -> Path:
    """Compile the lookup for the torch that is installed; takes some 20 seconds and a C++ compiler.

    Args:
        folder: where the file goes; beside its source, where `lookup` looks for it, by default.

    Returns:
        The file. Files of other versions of the source for the same torch are removed.

    Raises:
        BuildError: no compiler, or one that failed; OSError: the folder cannot be written to.

    Source: https://docs.pytorch.org/docs/stable/cpp_extension.html
    """
    path = built_path(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        made = _compile(Path(scratch))
        os.replace(made, path)  # whole or not at all: another process may be looking
    pattern = re.sub(r"^lookup-\w+-", "lookup-*-", path.name)
    _remove(old for old in folder.glob(pattern) if old != path)
    return path


def _compile(scratch: Path) -> Path:
    from setuptools import Distribution
    from setuptools.errors import BaseError, CompileError, LinkError
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    source = shutil.copy(_SOURCE, scratch)  # else the object file would go into the source's folder
    extension = CppExtension("lookup", [str(source)], extra_compile_args=[] if os.name == "nt" else ["-O2", "-g0"])
    command = BuildExtension.with_options(use_ninja=False, no_python_abi_suffix=True)(
        Distribution({"name": "lookup", "ext_modules": [extension]})
    )
    command.build_lib, command.build_temp = str(scratch), str(scratch / "objects")
    try:
        command.ensure_finalized()
        command.run()
    except (BaseError, CompileError, LinkError, OSError, RuntimeError) as error:
        raise BuildError(
            f"lookup.cpp does not compile against torch {torch.__version__}: {error}. A C++ compiler is needed (g++, "
            "clang++ or MSVC; CXX names it). Without it everything works, and a call costs a microsecond more"
        ) from error
    return next(p for p in scratch.iterdir() if p.is_file() and p.name != _SOURCE.name)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
