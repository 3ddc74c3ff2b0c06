"""What a measurement depends on beside the op: the machine, torch, the way of measuring."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attn_dispatch import device
from attn_dispatch.selection.timing import policy

__all__ = ["Environment", "environment"]


@dataclass(frozen=True)
class Environment:
    """The facts that must be equal for a measurement to be of use.

    Args:
        device: the device type. name: the model. arch: its architecture. threads: torch's, 0 where it means nothing.
        torch: version. runtime: CUDA or ROCm and cuDNN versions, "" on a CPU. policy: how times were taken.
        precision: of float32 matrix products, ``torch.get_float32_matmul_precision()``.
    """

    device: str
    name: str
    arch: str
    threads: int
    torch: str
    runtime: str
    policy: str
    precision: str = "highest"

    def to_dict(self) -> dict[str, Any]:
        """Plain types; a default is left out, so that what was written before its field was there still counts."""
        return {name: value for name, value in asdict(self).items() if (name, value) != ("precision", "highest")}

    def digest(self) -> str:
        """A short hash, equal across processes: the name of the folder of all that was measured here."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def environment(device_type: str) -> Environment:
    """The environment of this process for a device type; asked anew each time, since threads may change.

    Example:
        >>> environment("cpu").device
        'cpu'
    """
    facts = device.facts(device_type)
    return Environment(
        device_type,
        facts.name,
        facts.arch,
        facts.threads,
        str(torch.__version__),
        _runtime(device_type),
        policy(device_type),
        torch.get_float32_matmul_precision(),
    )


def _runtime(device_type: str) -> str:
    if device_type != "cuda":
        return ""
    toolkit = f"hip {torch.version.hip}" if torch.version.hip else f"cuda {torch.version.cuda}"
    return f"{toolkit}, cudnn {torch.backends.cudnn.version()}"
