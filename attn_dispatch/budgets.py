"""Error budgets, as data: how far from float64 a result may be, by dtype and quantity."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BUDGETS", "Budget", "budget"]


class Budget(NamedTuple):
    """An element may be off by ``absolute + relative * |wanted|``."""

    absolute: float
    relative: float


# Inputs are standard normal. The number behind each line is the largest error seen over all cases and candidates (CPU
# with AVX-512, torch 2.13), in units of the budget: a factor of 4 or more is left for other machines.
BUDGETS: dict[tuple[str, str], Budget] = {
    ("float64", "out"): Budget(1e-14, 1e-14),  # 0.07
    ("float64", "lse"): Budget(1e-14, 1e-14),  # 0.05
    ("float64", "grad"): Budget(1e-13, 1e-13),  # 0.01
    ("float32", "out"): Budget(4e-6, 4e-6),  # 0.15
    ("float32", "lse"): Budget(4e-6, 4e-6),  # 0.03
    ("float32", "grad"): Budget(1e-5, 1e-5),  # 0.14
    ("bfloat16", "out"): Budget(1e-2, 2e-2),  # 0.28, of the math kernel with a bias
    ("bfloat16", "lse"): Budget(5e-4, 5e-4),  # 0.10
    ("bfloat16", "grad"): Budget(4e-2, 4e-2),  # 0.2
    ("float16", "out"): Budget(2e-3, 2e-3),  # 0.49, of the math kernel with a bias
    ("float16", "lse"): Budget(1e-4, 1e-4),  # 0.12
    ("float16", "grad"): Budget(6e-3, 6e-3),  # 0.2
}


def budget(dtype: str, quantity: str) -> Budget:
    """The error budget of a quantity, ``out lse weights grad``; weights have that of the output.

    Example:
        >>> budget("float64", "weights").absolute
        1e-14
    """
    return BUDGETS[dtype, "out" if quantity == "weights" else quantity]
