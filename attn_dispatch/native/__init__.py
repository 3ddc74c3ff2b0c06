"""What is in C++, and optional: the warm path's lookup, and the kernel of the backend `flash_decode`.

Both are compiled on the machine that runs them, by ``attn-dispatch build``: they read tensors through torch's C++
headers, which fit one version of torch. The file that results stands beside its source, and its name says for what it
was built (source, kind of CPU, torch, Python), so that another torch in the same place finds nothing and does without.
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

__all__ = ["DECODE", "LOOKUP", "SOURCES", "Built", "Source", "build", "built_path", "decode", "load", "lookup"]

_FOLDER = Path(__file__).parent
_HAS_NO_GIL = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
# What torch compiles its own kernels of each kind with (cmake/Codegen.cmake there). A kind that is not here, as that of
# ARM, needs no flag: its vectors come with the compiler's defaults.
_VECTOR_FLAGS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
}


@dataclass(frozen=True)
class Source:
    """One C++ module of this folder.

    Args:
        name: of the module, and of its first file without the suffix.
        files: what it is made of; the first is compiled.
        trial: what a new ``module`` must be able to do, with torch imported.
        without: what is lost where it is not built.
        compilers: those that it is written for.
        computes: it is compiled for this machine's vectors, and runs in torch's threads.
    """

    name: str
    files: tuple[str, ...]
    trial: str
    without: str
    compilers: str
    computes: bool = False


LOOKUP = Source(
    "lookup",
    ("lookup.cpp",),
    "assert module.find({}, (), ()) is None and module.answer(*[None] * 19) is NotImplemented",
    "a call takes two microseconds more",
    "g++, clang++ or MSVC",
)
DECODE = Source(
    "decode",
    ("decode.cpp", "decode.h"),
    "x = torch.ones(1, 1, 1, 99); assert module.decode(x, x, x, 1.0, None, None, None, None, False).sum() == 99; "
    "assert module.plain(None, 1.0, None, None, None, None, x, x, x, {}).sum() == 99",
    "decode steps on the CPU run in other backends, at half the speed",
    "g++ (on a Mac clang++, for one thread)",
    computes=True,
)
SOURCES = (LOOKUP,) if os.name == "nt" else (LOOKUP, DECODE)


@dataclass(frozen=True)
class Built:
    """What is there of a source in this process.

    Args:
        module: the compiled module; None when there is none to use.
        why: where the module is from, or why there is none, for `attn-dispatch doctor`.
    """

    module: ModuleType | None
    why: str


def built_path(source: Source, folder: Path = _FOLDER) -> Path:
    """The file that `build` makes of a source for this torch, Python and, where it computes, kind of CPU.

    Args:
        folder: where it stands; beside its source by default.
    """
    text = b"".join((_FOLDER / name).read_bytes() for name in source.files) + " ".join(_flags(source)).encode()
    suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
    kind = f"-{re.sub(r'[^a-z0-9]', '', _vectors().lower())}" if source.computes else ""
    made_for = re.sub(r"[^\w.+]", "_", str(torch.__version__))
    return folder / f"{source.name}-{hashlib.sha256(text).hexdigest()[:8]}{kind}-torch{made_for}{suffix}"


@functools.cache
def lookup() -> Built:
    """The lookup of this process: compiled if it was built and ``ATTN_DISPATCH_LOOKUP`` is not ``python``."""
    if not wants_compiled_lookup():
        return Built(None, "Python: ATTN_DISPATCH_LOOKUP=python")
    found = _find(LOOKUP)
    return found if found.module is not None else Built(None, f"Python: {found.why}")


@functools.cache
def decode() -> Built:
    """The decode kernel of this process, which the backend `flash_decode` runs."""
    return _find(DECODE)


def _find(source: Source) -> Built:
    if _HAS_NO_GIL:
        return Built(None, "what is compiled relies on the GIL, which this Python is built without")
    if source not in SOURCES:
        return Built(None, f"{source.files[0]} is written for {source.compilers}")
    path = built_path(source)
    if not path.is_file():
        return Built(None, "not built; `attn-dispatch build` does")
    try:
        return Built(load(source, path), f"compiled: {path.name}")
    except ImportError as error:
        return Built(None, f"{' '.join(str(error).split())}; `attn-dispatch build --force` builds it anew")


def load(source: Source, path: Path) -> ModuleType:
    """Import what `build` made.

    Raises:
        ImportError: it does not fit this torch or Python.
    """
    name = f"attn_dispatch.native._{source.name}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def build(source: Source, folder: Path = _FOLDER) -> Path:
    """Compile a source for the torch that is installed; takes some 20 seconds and a C++ compiler.

    Args:
        folder: where the file goes; beside its source, where it is looked for, by default.

    Returns:
        The file. Files of other versions of the source for the same torch are removed.

    Raises:
        BuildError: no compiler, one that failed, or a result that does not load.
        OSError: the folder cannot be written to.

    Source: https://docs.pytorch.org/docs/stable/cpp_extension.html
    """
    if _HAS_NO_GIL:
        raise BuildError("what is compiled relies on the GIL, which this Python is built without")
    path = built_path(source, folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        try:
            made = _compile(source, Path(scratch))
            _try_out(source, made)
        except Exception as error:  # a compiler and its tools may fail in any way
            raise BuildError(
                f"{source.files[0]} cannot be built against torch {torch.__version__}: {error}. It takes setuptools "
                f"and a C++ compiler ({source.compilers}; CXX names it). Without it everything works, and "
                f"{source.without}"
            ) from error
        os.replace(made, path)  # whole or not at all: another process may be looking
    for old in folder.glob(re.sub(rf"^{source.name}-\w+-", f"{source.name}-*-", path.name)):
        if old != path:
            with contextlib.suppress(OSError):  # Windows keeps what another process has loaded
                old.unlink()
    return path


def _compile(source: Source, scratch: Path) -> Path:
    from setuptools import Distribution
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    for name in source.files:  # else the object file would go into the source's folder
        shutil.copy(_FOLDER / name, scratch)
    extension = CppExtension(f"_{source.name}", [str(scratch / source.files[0])], extra_compile_args=_flags(source))
    command = BuildExtension.with_options(use_ninja=False, no_python_abi_suffix=True)(
        Distribution({"name": f"attn-dispatch-{source.name}", "ext_modules": [extension]})
    )
    command.build_lib, command.build_temp = str(scratch), str(scratch / "objects")
    command.ensure_finalized()
    command.run()
    return next(p for p in scratch.rglob(f"_{source.name}*") if p.suffix in (".so", ".pyd"))


def _flags(source: Source) -> list[str]:
    if os.name == "nt":
        return []
    if not source.computes:
        return ["-O2", "-g0"]
    kind = _vectors()
    flags = ["-O3", "-g0", "-Wno-unknown-pragmas", *_VECTOR_FLAGS.get(kind, ())]
    if kind in _VECTOR_FLAGS:
        flags += [f"-DCPU_CAPABILITY={kind}", f"-DCPU_CAPABILITY_{kind}"]
    # Not linked with OpenMP: the names are found in the library that torch has loaded, so that both share its threads
    return [*flags, "-fopenmp"] if sys.platform == "linux" else flags


def _vectors() -> str:
    """The kind of vector instructions that torch uses here, ``"AVX2"``; ``ATEN_CPU_CAPABILITY`` may lower it."""
    return torch.backends.cpu.get_cpu_capability()


def _try_out(source: Source, made: Path) -> None:
    """Use it in another process: a bad one may end its process, and Windows does not move a file that is loaded."""
    code = (
        f"import torch; from pathlib import Path; from attn_dispatch.native import {source.name.upper()}, load; "
        f"module = load({source.name.upper()}, Path({str(made)!r})); {source.trial}"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()[-1:]
        raise ImportError(f"it does not work (exit code {done.returncode}): {' '.join(said)}")
