"""Cases that a backend refuses, tried all the same in a process of their own: a kernel may kill it.

The parent starts ``python -m attn_dispatch.testing.apart BACKEND PLUGIN ANSWERS CASE...``. The child writes a line
before each case and one after it, so that the case that ended it is known; the parent
goes on with the next in a new child.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from attn_dispatch.errors import InputError, PluginWarning
from attn_dispatch.registry import Registry, current
from attn_dispatch.registry.discover import discover
from attn_dispatch.settings import child_environment
from attn_dispatch.testing.conformance import Try

__all__ = ["apart", "load_plugin", "registry_of"]

_MAX_DEATHS = 6


def load_plugin(plugin: str) -> ModuleType:
    """The module of a plugin that is not installed: a file, or a dotted name.

    Raises:
        InputError: there is none, or it cannot be imported.
    """
    name = f"attn_dispatch_plugin_{Path(plugin).stem}"  # its own name may be that of a library which it imports
    try:
        if not plugin.endswith(".py"):
            return importlib.import_module(plugin)
        spec = importlib.util.spec_from_file_location(name, plugin)
        if spec is None or spec.loader is None or not Path(plugin).is_file():
            raise FileNotFoundError(f"there is no file {plugin}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        problem = f"the plugin {plugin} cannot be imported: {type(error).__name__}: {error}"
        raise InputError(problem, remedy="a Python file, or the dotted name of a module") from error
    return module


def registry_of(plugin: str) -> Registry:
    """The process's registry, with a plugin that is not installed when one is named.

    Raises:
        InputError: the plugin that is named cannot be imported, or is set aside; the message has its traceback.
    """
    if not plugin:
        return current()
    name = Path(plugin).stem
    found = discover([(name, load_plugin(plugin))])
    for broken in found.quarantined:
        if broken.distribution == f"{name} (given in code)":
            problem = f"the plugin {plugin} is not used: {broken.name}: {broken.error}"
            raise InputError(f"{problem}\n{broken.details}".rstrip(), remedy="mend it; docs/writing_a_backend.md")
    return found


def apart(plugin: str = "", limit_s: float = 90.0) -> Try:
    """Attempts in child processes.

    Args:
        plugin: see `load_plugin`; empty for an installed one. limit_s: what is not tried by then is left out.
    """

    def tried(backend: str, cases: Sequence[str]) -> Mapping[str, str]:
        found: dict[str, str] = {}
        end = time.monotonic() + limit_s
        for _ in range(_MAX_DEATHS):
            waiting = [case for case in cases if case not in found]
            if not waiting or time.monotonic() > end:
                break
            new = _one_child(backend, plugin, waiting, end - time.monotonic())
            found |= new
            if not new:  # it never began: another child would not either
                break
        return found

    return tried


def _one_child(backend: str, plugin: str, cases: Sequence[str], limit_s: float) -> dict[str, str]:
    """What one child found; nothing, with a warning, where it ended before its first case."""
    with tempfile.TemporaryDirectory(prefix="attn-dispatch-apart-") as folder:
        answers = Path(folder, "answers")
        command = [sys.executable, "-m", "attn_dispatch.testing.apart", backend, plugin, str(answers), *cases]
        try:
            run = subprocess.run(
                command, capture_output=True, timeout=limit_s, env=child_environment(), check=False, text=True
            )
            said = [
                line for line in run.stderr.splitlines() if line[:1].strip()
            ]  # an indented line goes on with another
            last = (said or ["nothing was printed"])[-1]
            how, code = f"its process ended with code {run.returncode}", run.returncode
        except subprocess.TimeoutExpired:
            how, code, last = "it took too long", -1, f"it had not begun after {limit_s:.0f} s"
        lines = answers.read_text(encoding="utf-8").splitlines() if answers.exists() else []
    if not lines:
        text = (
            f"refused cases of {backend} are not tried: the process for them ended with {code} before the first: {last}"
        )
        warnings.warn(text, PluginWarning, stacklevel=3)
        return {}
    found, begun = {}, cases[0]
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # the process was ended while it wrote it
            break
        begun = entry["case"]
        if "problem" in entry:
            found[begun] = entry["problem"]
    unfinished = begun if begun not in found else ""
    return found | ({unfinished: how} if unfinished else {})


def _main(backend: str, plugin: str, answers: str, cases: Sequence[str]) -> None:
    import torch

    from attn_dispatch.testing import BY_ID
    from attn_dispatch.testing.conformance import attempt

    torch.set_num_threads(1)
    registry = registry_of(plugin)
    with open(answers, "a", encoding="utf-8", buffering=1) as out:
        for case in cases:
            out.write(json.dumps({"case": case}) + "\n")
            out.write(json.dumps({"case": case, "problem": attempt(backend, BY_ID[case], registry)}) + "\n")


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
