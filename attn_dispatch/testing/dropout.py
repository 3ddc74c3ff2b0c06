"""Dropout has no golden: what can be said of it is said here."""

from __future__ import annotations

import torch

from attn_dispatch import dispatch
from attn_dispatch.passes import canonicalise
from attn_dispatch.registry import Registry

__all__ = ["dropout_problem"]

_P = 0.5
_DRAWS = 64


def dropout_problem(backend: str, registry: Registry) -> str:
    """What is wrong with a backend's dropout; empty when nothing is.

    Two seeds must give different outputs and one seed the same; the mean over many draws must be near the output
    without dropout, as it is only where the kept weights are scaled by 1 / (1 - p).
    """
    gen = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, 16, 8, generator=gen) for _ in range(3))
    v = v + 2.0  # a mean that is far from 0, so that a missing 1 / (1 - p) shows
    op, _ = canonicalise(dispatch.plan(q, k, v, dropout_p=_P).binding.op)
    thing = registry.backend(backend)
    if reasons := thing.reasons_against(op):
        return f"it declares dropout and refuses a plain case of it: {reasons[0]}"
    run = thing.compile(op).run

    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return run(q, k, v, {})

    with torch.random.fork_rng(devices=[]):
        first, same, other = draw(1), draw(1), draw(2)
        mean = torch.stack([draw(seed) for seed in range(_DRAWS)]).mean()
    without = (torch.softmax(q @ k.mT / 8**0.5, -1) @ v).mean()
    if torch.equal(first, other):
        return "two seeds give the same output: dropout is ignored, or takes no notice of torch.manual_seed"
    if not torch.equal(first, same):
        return "one seed gives two outputs: draw from torch's default generator"
    if abs(float(mean / without) - 1.0) > 0.1:
        return f"the mean over {_DRAWS} draws is {float(mean):.3g}, and without dropout {float(without):.3g}"
    return ""
