"""The one place that asks what hardware is here."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["DeviceFacts", "cuda_arch", "facts"]


@dataclass(frozen=True)
class DeviceFacts:
    """What is known of one device kind.

    Args:
        type: ``"cpu"``, ``"cuda"`` ...
        name: the model, ``"AMD EPYC"``, ``"NVIDIA H200"``.
        arch: ``"x86_64"``, ``"sm90"``.
        threads: threads that torch uses; 0 where it means nothing.
    """

    type: str
    name: str
    arch: str
    threads: int = 0


@functools.cache
def facts(device_type: str) -> DeviceFacts:
    """Facts of a device type, asked once.

    Example:
        >>> facts("cpu").type
        'cpu'
    """
    if device_type == "cuda" and torch.cuda.is_available():
        return DeviceFacts("cuda", torch.cuda.get_device_name(), cuda_arch())
    if device_type == "cpu":
        return DeviceFacts("cpu", _cpu_name(), platform.machine(), torch.get_num_threads())
    return DeviceFacts(device_type, device_type, "unknown")


@functools.cache
def cuda_arch() -> str:
    """``"sm90"`` for the current CUDA device, ``"none"`` without one."""
    if not torch.cuda.is_available():
        return "none"
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
