"""How fast the machine is at the moment: the same piece of work, timed before and after what is measured.

Contenders that take turns are hit alike by a busy moment, but not by a slow minute: what takes all threads loses more
than what takes one, and what reads much more than what computes. A choice made then is wrong for all other minutes.
What comes and goes between the two looks is not seen.
"""

from __future__ import annotations

import statistics
import time

import torch

__all__ = ["LIMIT", "pace_s", "slowdown"]

LIMIT = 1.25  # times the usual pace, beyond which a measurement is made again
_ROUNDS = 9
_SIDE, _ELEMENTS = 256, 1 << 20  # a product that fits the second cache, and 4 MiB that do not


def pace_s(device: str) -> float:
    """Seconds of a product and of a pass over memory on all threads, the median of nine; 0 where nothing is told.

    Args:
        device: the device type; a GPU is nobody else's, and is not asked.

    Example:
        >>> pace_s("cpu") > 0.0, pace_s("cuda")
        (True, 0.0)
    """
    if device != "cpu":
        return 0.0
    square, line = torch.ones(_SIDE, _SIDE), torch.zeros(_ELEMENTS)
    found: list[float] = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        torch.mm(square, square)
        line.add_(1.0)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def slowdown(pace: float, usual: float) -> float:
    """How many times slower a pace is than the usual one; 1 where either is not known.

    Example:
        >>> slowdown(0.003, 0.002), slowdown(0.0, 0.002)
        (1.5, 1.0)
    """
    return max(1.0, pace / usual) if pace > 0 and usual > 0 else 1.0
