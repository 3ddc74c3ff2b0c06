"""The one place that asks what hardware is here."""

from __future__ import annotations

import functools
import platform
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["DeviceFacts", "cuda_arch", "current", "facts", "free_memory"]


_VECTORS = ("AVX2", "AVX512", "SVE256")  # of torch's words those that tell CPUs of one architecture apart


@dataclass(frozen=True)
class DeviceFacts:
    """What is known of one device kind.

    Args:
        type: ``"cpu"``, ``"cuda"`` ...
        name: the model, ``"AMD EPYC"``, ``"NVIDIA H200"``.
        arch: ``"x86_64-avx2"``, ``"sm90"``; that of a CPU with the vectors that torch's kernels use on it.
        threads: threads that torch uses; 0 where it means nothing.
    """

    type: str
    name: str
    arch: str
    threads: int = 0


def facts(device_type: str) -> DeviceFacts:
    """Facts of a device type, of the current device where there are several of different kinds.

    Example:
        >>> facts("cpu").type
        'cpu'
    """
    on_cuda = device_type == "cuda" and torch.cuda.is_available()
    threads = torch.get_num_threads() if device_type == "cpu" else 0  # may be set at any time
    return _facts(device_type, torch.cuda.current_device() if on_cuda else -1, threads)


@functools.cache
def _facts(device_type: str, index: int, threads: int) -> DeviceFacts:
    """Asked once per device and number of threads."""
    if index >= 0:
        return DeviceFacts("cuda", torch.cuda.get_device_name(index), cuda_arch())
    if device_type == "cpu":
        return DeviceFacts("cpu", _cpu_name(), _cpu_arch(), threads)
    return _accelerator(device_type) or DeviceFacts(device_type, device_type, "unknown")


def _cpu_arch() -> str:
    kind = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()}-{kind.lower()}" if kind in _VECTORS else platform.machine()


def _accelerator(device_type: str) -> DeviceFacts | None:
    """Another accelerator that torch has here; its type stands for the architecture, which torch has no word for."""
    found = getattr(torch, "accelerator", None)
    here = found.current_accelerator(check_available=True) if found is not None else None
    if here is None or here.type != device_type:
        return None
    named = getattr(getattr(torch, device_type, None), "get_device_name", None)
    return DeviceFacts(device_type, str(named()) if callable(named) else device_type, device_type)


def current(tensor: object) -> AbstractContextManager[object]:
    """The CUDA device of a tensor as the current one, whose facts then count; nothing where it is already.

    Example:
        >>> with current(torch.zeros(1)):
        ...     facts("cpu").type
        'cpu'
    """
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def free_memory(device_type: str) -> int:
    """Bytes that can be had now; a large number where nobody tells."""
    if device_type == "cuda" and torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    info = Path("/proc/meminfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) << 10
    return 1 << 62


def cuda_arch() -> str:
    """``"sm90"`` for the current CUDA device, ``"none"`` without one."""
    if not torch.cuda.is_available():
        return "none"
    return _arch_of(torch.cuda.current_device())


@functools.cache
def _arch_of(index: int) -> str:
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm{major}{minor}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
