"""Try a candidate in a process of its own: a crash, a hang or a lack of memory there is a record here.

The parent starts ``python -m attn_dispatch.selection.probe FILE``; the file holds the op, the candidate's name and the
pickled backends and rewrites it is made of. The child runs the numerics gate and one timed step, and writes a verdict.
"""

from __future__ import annotations

import json
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from attn_dispatch import device
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.registry import Registry
from attn_dispatch.selection.candidates import build, rebuild
from attn_dispatch.selection.gate import run_gate, step
from attn_dispatch.selection.known_bad import allowed
from attn_dispatch.selection.samples import make_sample
from attn_dispatch.selection.store import Record
from attn_dispatch.settings import child_environment

__all__ = ["failure_of", "try_apart"]


def try_apart(name: str, op: AttentionOp, registry: Registry, limit_s: float) -> Record | None:
    """Run a candidate's gate in a child process.

    Args:
        name: the candidate. op: a canonical op. limit_s: seconds after which the child is ended.

    Returns:
        The record of its failure (``crashed timeout memory wrong unverified error``); None when it passed.
    """
    try:
        parts = pickle.dumps(_parts(name, registry))
    except Exception as error:  # noqa: BLE001 - whatever a stranger's class raises
        note = f"it cannot be tried in a process of its own, since it cannot be pickled ({error})"
        return Record(name, "error", note=note)
    with tempfile.TemporaryDirectory(prefix="attn-dispatch-probe-") as folder:
        task, answer = Path(folder, "task"), Path(folder, "answer")
        memory = device.free_memory("cpu") * 9 // 10
        threads = torch.get_num_threads()
        index = torch.cuda.current_device() if op.device == "cuda" and torch.cuda.is_available() else -1
        task.write_bytes(pickle.dumps((name, op.to_dict(), parts, memory, threads, index)))
        around = child_environment() | {"ATTN_DISPATCH_ALLOW_KNOWN_BAD": ",".join(sorted(allowed(registry)))}
        command = [sys.executable, "-m", "attn_dispatch.selection.probe", str(task), str(answer)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=around, check=False)
        except subprocess.TimeoutExpired:
            return Record(name, "timeout", note=f"it took more than {limit_s:g} s in a process of its own")
        if answer.exists():
            found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return Record(name, **found) if found["status"] != "ok" else None
    if run.returncode < 0:
        how = signal.Signals(-run.returncode).name
        status = "memory" if how == "SIGKILL" else "crashed"
        return Record(name, status, note=f"its process was ended by {how}")
    last = (run.stderr.strip().splitlines() or ["nothing was printed"])[-1]
    return Record(name, "crashed", note=f"its process exited with {run.returncode}: {last}")


def failure_of(name: str, error: BaseException) -> Record:
    """The record of a candidate that raised."""
    text = f"{type(error).__name__}: {error}"
    out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate" in str(error)
    return Record(name, "memory" if out_of_memory else "error", note=text.splitlines()[0][:300])


def _parts(name: str, registry: Registry) -> Registry:
    """A registry with what the candidate is made of, and the built-in backends that the guards need."""
    *rewrites, backend = name.split(" > ")
    kept = {n: b for n, b in registry.backends.items() if n == backend or n == "eager"}
    rest = {n: registry.rewrites[n] for n in rewrites}
    return Registry(kept, rest, registry.origins, known_bad=registry.known_bad)


def _verdict(name: str, op: AttentionOp, registry: Registry) -> Record:
    with torch.set_grad_enabled(bool(op.grad)):
        verdict = run_gate(name, op, registry)
        if verdict.problem:
            return Record(name, verdict.status, errors=verdict.errors, note=verdict.problem)
        candidate = rebuild(name, op, registry)
        assert candidate is not None  # the gate has built it
        step(build(candidate, op).run, op, make_sample(op, "typical", seed=2))()
    return Record(name, "ok")


def _main(task: Path, answer: Path) -> None:
    name, op, parts, memory, threads, index = pickle.loads(task.read_bytes())
    torch.set_num_threads(threads)
    if index >= 0:
        torch.cuda.set_device(index)  # and no limit: CUDA reserves addresses for all memory of host and device
    else:
        _limit_memory(memory)
    try:
        record = _verdict(name, AttentionOp.from_dict(op), pickle.loads(parts))
    except Exception as error:  # noqa: BLE001 - a candidate's failure is its record
        record = failure_of(name, error)
    found = {"status": record.status, "note": record.note, "errors": dict(record.errors)}
    unfinished = answer.with_suffix(".part")
    unfinished.write_text(json.dumps(found), encoding="utf-8")
    unfinished.replace(answer)


def _limit_memory(extra: int) -> None:
    """Let an allocation beyond what is free fail, where the system's killer would otherwise choose somebody."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    limit = pages * resource.getpagesize() + extra
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
