"""The linear family against fla-core's naive files, and its growth with the length.

fla-core's package imports triton; its naive files need torch and einops alone, so they are loaded by their path.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from attn_dispatch import variants
from attn_dispatch.bench.cases import Case, Contenders, make_qkv
from attn_dispatch.dispatch import attention
from attn_dispatch.selection.timing import interleaved

__all__ = ["CASES", "fla_naive", "measure_slopes", "slope"]

_HEADS, _D = 8, 64
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


def fla_naive(topic: str) -> Any:
    """The module ``fla/ops/<topic>/naive.py`` of fla-core.

    Raises:
        ModuleNotFoundError: fla-core is not installed.
    """
    package = importlib.util.find_spec("fla")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("fla-core is not installed: pip install --no-deps fla-core==0.6.0 einops")
    path = Path(package.submodule_search_locations[0]) / "ops" / topic / "naive.py"
    spec = importlib.util.spec_from_file_location(f"fla_naive_{topic}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _inputs(length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return make_qkv(1, _HEADS, _HEADS, length, length, _D)


def _rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """As fla takes them, ``[B, T, H, D]``, contiguous."""
    return [x.transpose(1, 2).contiguous() for x in tensors]


def _linear(length: int, normalised: bool) -> Callable[[], Contenders]:
    def make() -> Contenders:
        q, k, v = _inputs(length)
        rows = _rows(q, k, v)
        naive = fla_naive("linear_attn").naive_chunk_linear_attn
        variant = variants.LinearAttention() if normalised else variants.LinearAttention("identity", None)

        def theirs() -> Any:
            if not normalised:
                return naive(*rows)
            return naive(F.elu(rows[0]) + 1, F.elu(rows[1]) + 1, rows[2], normalize=True)

        return Contenders(lambda: attention(q, k, v, is_causal=True, variant=variant), theirs)

    return make


def _retention(length: int) -> Callable[[], Contenders]:
    def make() -> Contenders:
        q, k, v = _inputs(length)
        rows = _rows(q, k, v)
        variant = variants.Retention(variants.retention_decay(_HEADS))
        log_decay = variant.decay.log().expand(1, length, _HEADS)
        parallel, chunked = fla_naive("retention").naive_retention, fla_naive("simple_gla").naive_chunk_simple_gla
        return Contenders(
            lambda: attention(q, k, v, is_causal=True, variant=variant),
            lambda: parallel(q, k, v),
            lambda: chunked(*rows, log_decay),
        )

    return make


def _decode() -> Contenders:
    """64 steps of the recurrence: one token in, one out, the state between them."""
    q, k, v = _inputs(64)
    rows = _rows(q, k, v)
    variant = variants.Retention(variants.retention_decay(_HEADS))
    steps = [(q[:, :, i : i + 1], k[:, :, i : i + 1], v[:, :, i : i + 1]) for i in range(64)]
    log_decay = variant.decay.log().expand(1, 64, _HEADS)

    def ours() -> None:
        state = None
        for q1, k1, v1 in steps:
            _, state = attention(q1, k1, v1, is_causal=True, variant=variant, state=state, return_state=True)

    recurrent = fla_naive("simple_gla").naive_recurrent_simple_gla  # one loop, without a call per token
    return Contenders(ours, lambda: recurrent(*rows, log_decay))


def slope(lengths: Sequence[int], times: Sequence[float]) -> float:
    """Exponent p of ``time ~ length ** p``, by least squares on logarithms: 1 is linear, 2 quadratic.

    Example:
        >>> round(slope([1, 2, 4], [3.0, 6.0, 12.0]), 6)
        1.0
    """
    x, y = [math.log(n) for n in lengths], [math.log(t) for t in times]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread


def measure_slopes(lengths: Sequence[int] = LENGTHS, rounds: int = 3) -> dict[str, float]:
    """Growth of linear attention and retention with the length, as the exponent of a power."""
    kinds = {"linear": variants.LinearAttention(), "retention": variants.Retention(variants.retention_decay(_HEADS))}
    found = {}
    for name, variant in kinds.items():
        inputs = {n: _inputs(n) for n in lengths}

        def run(n: int, variant: Any = variant, inputs: Any = inputs) -> Callable[[], Any]:
            q, k, v = inputs[n]
            return lambda: attention(q, k, v, is_causal=True, variant=variant)

        timings = interleaved({str(n): run(n) for n in lengths}, rounds)
        found[name] = slope(lengths, [timings[str(n)].median_us for n in lengths])
    return found


CASES: tuple[Case, ...] = (
    Case("linear attention S4096", _linear(4096, normalised=True), ">= 2x fla naive"),
    Case("linear attention S16384", _linear(16384, normalised=True), ">= 2x fla naive"),
    Case("linear, unnormalised S4096", _linear(4096, normalised=False), ">= 2x fla naive"),
    Case("retention S2048", _retention(2048), ">= 2x fla naive"),
    Case("retention 64 steps", _decode),
)

if __name__ == "__main__":
    for kind, exponent in measure_slopes().items():
        print(f"{kind}: time ~ length ** {exponent:.2f}, {LENGTHS[0]} to {LENGTHS[-1]} tokens")
