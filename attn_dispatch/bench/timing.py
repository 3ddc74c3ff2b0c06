"""Interleaved timing: every contender in every round, medians over rounds, so that a noisy machine hits all alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.utils.benchmark import Timer

__all__ = ["Timing", "interleaved"]


@dataclass(frozen=True)
class Timing:
    """Median and spread (interquartile range) over rounds, in microseconds per call."""

    median_us: float
    spread_us: float


def interleaved(
    contenders: Mapping[str, Callable[[], object]], rounds: int = 7, min_round_s: float = 0.02
) -> dict[str, Timing]:
    """Time each contender once per round, in turn.

    Args:
        contenders: what to call, by name. rounds: rounds of all of them. min_round_s: calls are repeated within a round
            until they take about this long.
    """
    threads = torch.get_num_threads()
    timers = {name: Timer("f()", globals={"f": f}, num_threads=threads) for name, f in contenders.items()}
    repeats = {}
    for name, timer in timers.items():
        timer.timeit(1)  # the first call decides and compiles
        once = max(timer.timeit(1).mean, 1e-7)
        repeats[name] = max(1, min(20_000, int(min_round_s / once)))
    samples: dict[str, list[float]] = {name: [] for name in timers}
    for turn in range(rounds):
        order = list(timers) if turn % 2 == 0 else list(timers)[::-1]
        for name in order:
            samples[name].append(timers[name].timeit(repeats[name]).mean * 1e6)
    return {name: Timing(statistics.median(s), _spread(s)) for name, s in samples.items()}


def _spread(samples: list[float]) -> float:
    if len(samples) < 4:
        return max(samples) - min(samples)
    quartiles = statistics.quantiles(samples, n=4)
    return quartiles[2] - quartiles[0]
