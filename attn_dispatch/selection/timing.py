"""Interleaved timing: every contender in every round, medians over rounds, so that a noisy machine hits all alike.

The CPU is timed by `torch.utils.benchmark.Timer`, a CUDA device by one pair of events per iteration with a cold L2
cache, as `triton.testing.do_bench` does, any other accelerator by the clock, which is read when it has nothing to do.

On the CPU a small operation of torch on all threads comes before each call, and its time is not counted: in a model
attention stands between projections. A library with threads of its own is slower there than in a loop of its own calls,
because torch's threads wait for more work before they sleep, and hold the cores (measured on two cores: onnxruntime's
Attention 4.1 ms alone and 6.2 ms beside torch, torch's flash kernel 4.3 and 4.1 ms).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from attn_dispatch.errors import InputError

__all__ = ["POLICY", "Timing", "interleaved", "policy", "spread", "waiter"]

POLICY = {
    "cpu": "torch Timer, each call after one of torch's, interleaved medians",
    "cuda": "event per iteration, cold L2, interleaved medians",
}
_OTHER = "synchronised before and after each turn, interleaved medians"
_FLUSH_BYTES, _FLUSH_S = 256 << 20, 1e-4  # more than any L2 cache, and about what writing it takes
_BESIDE = 1 << 16  # elements of the operation before each call: twice the least that torch shares out among threads


@dataclass(frozen=True)
class Timing:
    """Median and spread (interquartile range) over rounds, in microseconds per call, and what each round said."""

    median_us: float
    spread_us: float
    samples: tuple[float, ...] = ()


def policy(device_type: str) -> str:
    """How a device type is timed; part of what a tuned record depends on."""
    return POLICY.get(device_type, _OTHER)


def waiter(device_type: str) -> Callable[[], None]:
    """What waits until a device type has done all that it was given; nothing for the CPU.

    Raises:
        InputError: torch cannot wait for it, so that no time of it would mean anything.
    """
    if device_type == "cpu":
        return _nothing
    if device_type == "cuda":
        return torch.cuda.synchronize
    found = getattr(torch, "accelerator", None)
    here = found.current_accelerator(check_available=True) if found is not None else None
    if found is None or here is None or here.type != device_type:
        what = "this torch has no torch.accelerator" if found is None else f"torch's accelerator here is {here}"
        raise InputError(
            f"{device_type} cannot be timed: {what}", remedy="time it where torch.accelerator is that device"
        )
    return found.synchronize


def _nothing() -> None:
    """The CPU has done what it was given."""


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int = 7,
    min_round_s: float = 0.02,
    max_total_s: float | None = None,
    device: str = "cpu",
    least_rounds: int = 3,
) -> dict[str, Timing]:
    """Time each contender once per round, in turn.

    Args:
        contenders: what to call, by name. rounds: rounds of all of them. min_round_s: calls are repeated within a round
            until they take about this long.
        max_total_s: no new round starts after this long, once there are ``least_rounds``.
        device: the device type; on ``"cuda"`` each iteration is timed by events.

    Raises:
        InputError: torch cannot wait for this device.
    """
    if device == "cuda":
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
        timers = {name: _once_cuda(f, flush) for name, f in contenders.items()}
    elif device == "cpu":
        timers = {name: _once_cpu(f) for name, f in contenders.items()}
    else:
        wait = waiter(device)
        timers = {name: _once_waiting(f, wait) for name, f in contenders.items()}
    least = _FLUSH_S if device == "cuda" else 1e-7
    repeats = {}
    for name, timer in timers.items():
        first = timer(1)  # decides and compiles
        once = timer(1 if first > min_round_s else 3)  # of short calls the second is still slow
        repeats[name] = max(1, min(20_000, int(min_round_s / max(once, least))))
    samples: dict[str, list[float]] = {name: [] for name in timers}
    start = time.perf_counter()
    for turn in range(rounds):
        if max_total_s is not None and turn >= least_rounds and time.perf_counter() - start > max_total_s:
            break
        order = list(timers) if turn % 2 == 0 else list(timers)[::-1]
        for name in order:
            samples[name].append(timers[name](repeats[name]) * 1e6)
    return {name: Timing(statistics.median(s), spread(s), tuple(s)) for name, s in samples.items()}


class _Clock:
    """Seconds spent in what is timed, and in nothing around it."""

    seconds = 0.0


def _once_cpu(f: Callable[[], object]) -> Callable[[int], float]:
    """Seconds per call, each after an operation of torch that is not counted."""
    from torch.utils.benchmark import Timer  # late: it loads setuptools, a tenth of a second

    clock, beside = _Clock(), torch.zeros(_BESIDE)
    timer = Timer(
        "beside.add_(1.0)\nbegan = now()\nf()\nclock.seconds += now() - began",
        timer=lambda: clock.seconds,
        globals={"f": f, "clock": clock, "beside": beside, "now": time.perf_counter},
        num_threads=torch.get_num_threads(),
    )

    def timed(repeats: int) -> float:
        if repeats > 1:
            return timer.timeit(repeats).mean
        beside.add_(1.0)  # one long call: the Timer would make two more to warm up, of seconds each
        began = time.perf_counter()
        f()
        return time.perf_counter() - began

    return timed


def _once_cuda(f: Callable[[], object], flush: torch.Tensor) -> Callable[[int], float]:
    """Seconds per call: the median over events, with the L2 cache flushed before each call."""

    def timed(repeats: int) -> float:
        repeats = max(repeats, 5) if repeats > 1 else 1
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
        for begin, end in events:
            flush.zero_()
            begin.record()
            f()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e-3

    return timed


def _once_waiting(f: Callable[[], object], wait: Callable[[], None]) -> Callable[[int], float]:
    """Seconds per call, of calls one after another between two waits."""

    def timed(repeats: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            f()
        wait()
        return (time.perf_counter() - start) / repeats

    return timed


def spread(samples: list[float]) -> float:
    """The interquartile range; of fewer than four samples the whole range."""
    if len(samples) < 4:
        return max(samples) - min(samples)
    quartiles = statistics.quantiles(samples, n=4)
    return quartiles[2] - quartiles[0]
