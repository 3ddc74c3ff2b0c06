"""The optional C++ half of the warm path: `build` compiles ``lookup.cpp``, `load` finds what was built.

It is compiled on the machine that runs it, by ``attn-dispatch build``: it reads tensors through torch's C++ headers,
which fit one version of torch. The file that results stands beside its source, and its name says for what it was
built (source, torch, Python), so that another torch in the same place finds nothing and runs in Python instead.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from attn_dispatch.errors import BuildError
from attn_dispatch.settings import child_environment, wants_compiled_lookup

__all__ = ["Lookup", "build", "built_path", "load", "lookup"]

_SOURCE = Path(__file__).with_name("lookup.cpp")
_NAME = "attn_dispatch.native._lookup"
_HAS_NO_GIL = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


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
    if _HAS_NO_GIL:
        return Lookup(None, "Python: the compiled lookup relies on the GIL, which this Python is built without")
    path = built_path()
    if not path.is_file():
        return Lookup(None, "Python: not built; `attn-dispatch build` spares a microsecond a call")
    try:
        return Lookup(load(path), f"compiled: {path.name}")
    except ImportError as error:
        return Lookup(None, f"Python: {' '.join(str(error).split())}; `attn-dispatch build --force` builds it anew")


def load(path: Path) -> ModuleType:
    """Import what `build` made.

    Raises:
        ImportError: it does not fit this torch or Python.
    """
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
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
        BuildError: no compiler, one that failed, or a result that does not load.
        OSError: the folder cannot be written to.

    Source: https://docs.pytorch.org/docs/stable/cpp_extension.html
    """
    if _HAS_NO_GIL:
        raise BuildError("the compiled lookup relies on the GIL, which this Python is built without")
    path = built_path(folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        try:
            made = _compile(Path(scratch))
            _try_out(made)
        except Exception as error:  # a compiler and its tools may fail in any way
            raise BuildError(
                f"lookup.cpp cannot be built against torch {torch.__version__}: {error}. It takes setuptools and a C++ "
                "compiler (g++, clang++ or MSVC; CXX names it). Without it everything works, and a call costs a "
                "microsecond more"
            ) from error
        os.replace(made, path)  # whole or not at all: another process may be looking
    for old in folder.glob(re.sub(r"^lookup-\w+-", "lookup-*-", path.name)):
        if old != path:
            with contextlib.suppress(OSError):  # Windows keeps what another process has loaded
                old.unlink()
    return path


def _compile(scratch: Path) -> Path:
    from setuptools import Distribution
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    source = shutil.copy(_SOURCE, scratch)  # else the object file would go into the source's folder
    extension = CppExtension("_lookup", [str(source)], extra_compile_args=[] if os.name == "nt" else ["-O2", "-g0"])
    command = BuildExtension.with_options(use_ninja=False, no_python_abi_suffix=True)(
        Distribution({"name": "attn-dispatch-lookup", "ext_modules": [extension]})
    )
    command.build_lib, command.build_temp = str(scratch), str(scratch / "objects")
    command.ensure_finalized()
    command.run()
    return next(p for p in scratch.rglob("_lookup*") if p.suffix in (".so", ".pyd"))


def _try_out(made: Path) -> None:
    """Load it in another process: a bad one may end its process, and Windows does not move a file that is loaded."""
    code = f"from pathlib import Path; from attn_dispatch.native import load; load(Path({str(made)!r})).find"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:]
        raise ImportError(f"it does not load (exit code {done.returncode}): {' '.join(said)}")
