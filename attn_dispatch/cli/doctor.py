"""``attn-dispatch doctor``: what is here, as data and as text."""

from __future__ import annotations

import json
import os
import platform
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

__all__ = ["examine", "run"]

_LIBRARIES = ("torch", "transformers", "onnx", "onnxruntime", "onnxruntime-gpu", "triton", "numpy")


def run(as_json: bool) -> None:
    """Print the findings."""
    found = examine()
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))


def examine() -> dict[str, Any]:
    """Everything that `doctor` says, in plain types."""
    import torch

    from attn_dispatch import __version__
    from attn_dispatch.device import facts
    from attn_dispatch.errors import ConfigWarning, PluginWarning
    from attn_dispatch.native import decode, lookup
    from attn_dispatch.registry import current
    from attn_dispatch.selection.pins import settle
    from attn_dispatch.settings import settings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # said below, with the traceback
        warnings.simplefilter("ignore", ConfigWarning)  # attn-dispatch pins check tells of pin files
        registry = current()
        settle(registry)
    points = {name: source for source in registry.sources for name in source.offers}
    cuda = torch.cuda.is_available()
    devices = [vars(facts("cpu")), *([vars(facts("cuda"))] if cuda else [])]
    cache = settings().cache_dir
    return {
        "attn_dispatch": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "devices": devices,
        "torch": {"cuda": torch.version.cuda, "cuda_available": cuda, "cpu_capability": _cpu_capability()},
        "lookup": lookup().why,
        "decode": decode().why,
        "libraries": {name: version for name in _LIBRARIES if (version := _version(name)) is not None},
        "backends": [
            _backend(b, registry.origins[b.name]) | {"entry_point": _entry_point(points.get(b.name))}
            for b in registry.backends.values()
        ],
        "rewrites": [{"name": name, "distribution": registry.origins[name]} for name in registry.rewrites],
        "quarantined": [vars(entry) for entry in registry.quarantined],
        "plugins": [
            {**vars(source), "offers": list(source.offers), "load_ms": round(source.load_ms, 1)}
            for source in registry.sources
        ],
        "known_bad": _known_bad(registry),
        "config_files": [str(path) for path in settings().config_files],
        "autotune": settings().autotune,
        "cache_dir": {
            "path": str(cache) if cache is not None else "none: there is no home folder",
            "exists": cache is not None and cache.is_dir(),
            "writable": cache is not None and _writable(cache),
        },
        "problems": problems(),
    }


def problems() -> list[str]:
    """What is wrong with this installation."""
    if _version("onnxruntime") is not None and _version("onnxruntime-gpu") is not None:
        both = "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files"
        return [f"{both}: pip uninstall -y onnxruntime onnxruntime-gpu, then install one of them"]
    return []


def _backend(backend: Any, distribution: str) -> dict[str, Any]:
    from attn_dispatch.backend import options_text

    try:
        missing = backend.unavailable()
        version = str(backend.version())
    except Exception as error:  # noqa: BLE001 - a stranger's backend; doctor has to say so and go on
        missing, version = f"{type(error).__name__}: {error}", "unknown"
    devices = sorted(frozenset().union(*(c.devices for c in backend.capabilities)))
    if missing is None and not any(_is_here(device) for device in devices):
        missing = f"it runs on {', '.join(devices)}, and there is none here"
    said = {"name": backend.name, "version": version, "distribution": distribution, "devices": devices}
    said["options"] = options_text(backend)
    return {**said, "available": missing is None, "reason": "" if missing is None else str(missing)}


def _entry_point(source: Any) -> str:
    return source.entry_point if source is not None else ""


def _known_bad(registry: Any) -> list[dict[str, Any]]:
    from attn_dispatch.errors import ConfigWarning
    from attn_dispatch.selection.known_bad import allowed, entries

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)  # attn-dispatch pins check tells of pin files
        found, permitted = entries(registry), allowed(registry)
    words = ("id", "backend", "version", "why", "link", "where", "origin")
    return [
        {
            **{word: getattr(entry, word) for word in words},
            "when": str(entry.when),
            "here": entry.holds_here(),
            "allowed": entry.id in permitted,
        }
        for entry in found
    ]


def _is_here(device_type: str) -> bool:
    from attn_dispatch import device

    return device_type in ("cpu", "meta") or device.facts(device_type).arch not in ("none", "unknown")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_capability() -> str:
    import torch

    return torch.backends.cpu.get_cpu_capability()


def _writable(folder: Path) -> bool:
    """Whether the folder can be written, or made; nothing is written to find out."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK)


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [f"attn_dispatch  {found['attn_dispatch']}   python {found['python']}   {found['executable']}"]
    for device in found["devices"]:
        threads = f"   {device['threads']} threads" if device["threads"] else ""
        lines.append(f"{device['type']:<14} {device['name']}   {device['arch']}{threads}")
    torch_facts = found["torch"]
    if not torch_facts["cuda_available"]:
        built = (
            f"torch is built for CUDA {torch_facts['cuda']}" if torch_facts["cuda"] else "torch is built without CUDA"
        )
        lines.append(f"{'cuda':<14} not here: {built}")
    libraries = "   ".join(f"{name} {version}" for name, version in found["libraries"].items())
    lines += [f"libraries      {libraries}   (torch uses {torch_facts['cpu_capability']})"]
    lines += [f"{name:<15}{found[name]}" for name in ("lookup", "decode")]
    lines += ["", "backends"]
    for b in found["backends"]:
        state = "ready" if b["available"] else f"not available: {b['reason']}"
        state += f", with {b['options']}" if b["options"] else ""
        lines.append(
            f"  {b['name']:<16} {b['version']:<14} {', '.join(b['devices']):<24} {b['distribution']}   {state}"
        )
    lines += ["", "plugins"]
    for source in found["plugins"]:
        offers = ", ".join(source["offers"]) or "nothing"
        lines.append(f"  {source['entry_point']} ({source['distribution']}), {source['load_ms']:.1f} ms: {offers}")
        lines += [f"    it {note} when it was loaded" for note in source["notes"]]
    lines += ["", "known bad"]
    for entry in found["known_bad"]:
        state = "allowed" if entry["allowed"] else "barred here" if entry["here"] else "not this machine"
        lines.append(f"  {entry['id']} ({entry['backend']}), {state}: {entry['why']}, {entry['link']}")
    lines += ["", f"rewrites       {', '.join(r['name'] for r in found['rewrites'])}", "", "plugins set aside"]
    for entry in found["quarantined"]:
        lines.append(f"  {entry['name']} ({entry['distribution']}): {entry['error']}")
        lines += [f"    {line}" for line in entry["details"].rstrip().splitlines()]
    lines += [] if found["quarantined"] else ["  none"]
    files = found["config_files"] or ["none found"]
    lines += ["", *(f"{'config files' if n == 0 else '':<14} {path}" for n, path in enumerate(files))]
    cache = found["cache_dir"]
    state = "writable" if cache["writable"] else "NOT writable: set ATTN_DISPATCH_CACHE"
    lines.append(f"cache dir      {cache['path']}   {state}{'' if cache['exists'] else ', not made yet'}")
    lines += [f"problem        {text}" for text in found["problems"]]
    return lines
