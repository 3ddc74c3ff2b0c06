"""What a candidate should cost, from FLOPs, bytes and launches and measured rates. Used when nothing was tuned.

The rates below are data. They were measured with `attn-dispatch bench` on the machine kind that `measured_on` names;
they need to be right in their order, not in their third digit, and the tuner replaces them by measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from attn_dispatch.backend import Cost
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.selection.candidates import Candidate

__all__ = ["RATES", "Rates", "estimate_us"]


@dataclass(frozen=True)
class Rates:
    """Speed of one backend on one device type.

    Args:
        gflops: sustained GFLOP/s by dtype; the entry ``""`` is for all others.
        gbytes: GB/s for its memory traffic.
        launch_us: fixed cost of one launch or Python-level step, in microseconds.
    """

    gflops: dict[str, float]
    gbytes: float
    launch_us: float


measured_on = {"cpu": "AMD EPYC, 2 cores, AVX2, torch 2.13.0", "cuda": "not measured: datasheet proportions"}

_CUDA_HALF = {"": 400_000.0}

RATES: dict[str, dict[str, Rates]] = {
    "cpu": {
        "sdpa_flash": Rates({"": 70.0, "float32": 85.0, "float64": 35.0}, 15.0, 10.0),
        "sdpa_math": Rates({"": 45.0, "float64": 22.0}, 8.0, 9.0),
        "flash_decode": Rates({"": 90.0}, 15.0, 4.0),
        "blocked": Rates({"": 50.0, "float64": 22.0}, 12.0, 11.0),
        "eager": Rates({"": 45.0, "float64": 20.0}, 8.0, 12.0),
        "": Rates({"": 50.0, "float64": 20.0}, 10.0, 15.0),
    },
    "cuda": {
        "sdpa_cudnn": Rates({"": 550_000.0}, 3500.0, 12.0),
        "sdpa_flash": Rates(_CUDA_HALF, 3500.0, 10.0),
        "sdpa_efficient": Rates({"": 200_000.0, "float32": 40_000.0}, 3000.0, 10.0),
        "sdpa_math": Rates({"": 100_000.0, "float32": 40_000.0, "float64": 30_000.0}, 2500.0, 6.0),
        "blocked": Rates({"": 60_000.0, "float64": 30_000.0}, 2500.0, 8.0),
        "eager": Rates({"": 40_000.0, "float64": 30_000.0}, 2500.0, 6.0),
        "": Rates({"": 100_000.0}, 2500.0, 10.0),
    },
}
_ADAPTERS = {"cpu": Rates({"": 50.0}, 20.0, 6.0), "cuda": Rates({"": 10_000.0}, 2500.0, 5.0)}
_BACKWARD = 2.5  # a backward pass does about two and a half times the work of the forward

# What fits into the cache is read faster; for a decode step over a short cache that decides between two forms.
_CACHE_BYTES = 3 << 20
_CACHE_SPEEDUP = 4.0

# A rewrite must promise more than the estimate's own error before it displaces the plain form.
REWRITE_MARGIN = 1.15


def estimate_us(candidate: Candidate, op: AttentionOp) -> float:
    """Estimated microseconds of a candidate: the backend on the inner op, times the turns, and the adapters."""
    device = op.device if op.device in RATES else "cpu"
    table = RATES[device]
    rates = table.get(candidate.backend.name, table[""])
    total = _time_us(candidate.backend.estimate(candidate.chain.op), rates, candidate.chain.op.dtype)
    if op.grad:
        total *= 1 + _BACKWARD
    for step in reversed(candidate.chain.steps):
        total = total * step.repeat + _time_us(step.extra, _ADAPTERS[device], op.dtype)
    return total * (REWRITE_MARGIN if candidate.chain.steps else 1.0)


def _time_us(cost: Cost, rates: Rates, dtype: str) -> float:
    """The longer of computing and moving, and the launches on top."""
    gflops = rates.gflops.get(dtype, rates.gflops[""])
    gbytes = rates.gbytes * (_CACHE_SPEEDUP if cost.bytes < _CACHE_BYTES else 1.0)
    return max(cost.flops / gflops, cost.bytes / gbytes) * 1e-3 + cost.launches * rates.launch_us
