"""Lists of selected keys, ``[..., K]`` integers: which entries count, and what is wrong with them.

An entry of -1 is padding. A key that is listed twice counts once: the list is a set.
"""

from __future__ import annotations

import torch

__all__ = ["first_of_each", "listed_problem"]


def first_of_each(listed: torch.Tensor) -> torch.Tensor:
    """True for the keys of each list, once each; False for -1 and for repeats.

    Example:
        >>> first_of_each(torch.tensor([[4, 2, 4, -1]])).int().tolist()
        [[1, 1, 0, 0]]
    """
    real = listed >= 0
    if listed.device.type == "cpu":
        earlier, later = listed[..., :-1], listed[..., 1:]
        if bool((((later > earlier) & real[..., :-1]) | ~real[..., 1:]).all()):  # ascending, as `select` makes them
            return real
    ordered, order = torch.sort(listed, dim=-1, stable=True)
    fresh = torch.ones_like(real)
    fresh[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return real & torch.empty_like(real).scatter_(-1, order, fresh)


def listed_problem(listed: torch.Tensor, skv: int) -> str:
    """What is wrong with lists over ``skv`` keys; empty when nothing is. Reads the data.

    Example:
        >>> listed_problem(torch.tensor([[0, 7]]), 5)
        'index 7 is out of range: Skv is 5, so indices are 0 to 4, and -1 for padding'
    """
    if listed.numel() == 0:
        return ""
    lo, hi = (int(end) for end in torch.aminmax(listed))
    if lo >= -1 and hi < skv:
        return ""
    valid = f"0 to {skv - 1}" if skv else "none"
    return f"index {lo if lo < -1 else hi} is out of range: Skv is {skv}, so indices are {valid}, and -1 for padding"
