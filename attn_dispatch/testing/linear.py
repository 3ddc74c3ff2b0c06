"""The float64 golden of the linear family: the recurrence, one key after the other, as its papers write it.

It shares nothing with the specification, which is quadratic, nor with the backend, which works in chunks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attn_dispatch.testing.cases import Case, Inputs

__all__ = ["golden_linear"]

_EPS = 1e-6  # of the normalised cases


def golden_linear(
    case: Case, inputs: Inputs, t: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Output, weights and state of a case.

    Args:
        t: float64 tensors by name, query, key and value as ``[B, H, S, D]``.

    Returns:
        out ``[B, Hq, Sq, Dv]``, weights ``[B, Hq, Sq, Skv]``, and ``S``, ``z``, ``length`` where there is a state.
    """
    n, allowed = case.sizes, inputs.allowed
    bad = torch.isnan(t["key"]).any(-1)[:, :1].any(1)  # [B, Skv]; poisoned keys
    q, k, v = t["query"], *(torch.where(bad[:, None, :, None], 0.0, t[x]) for x in ("key", "value"))
    head = torch.arange(n.Hq) // (n.Hq // n.Hkv)
    phi = _elu1 if case.linear == "elu1" else lambda x: x
    q, k, v = phi(q), phi(k)[:, head], v[:, head]
    decay = t["decay"] if "decay" in t else torch.ones(n.Hq, dtype=torch.float64)
    place = _places(case, inputs)  # [B, Sq], position of each row
    gone = (place[:, None, :, None] - torch.arange(n.Skv)).abs()
    scale = case.scale if case.scale is not None else n.D**-0.5
    weights = torch.where(allowed, torch.einsum("bhid,bhjd->bhij", q, k) * scale, 0.0) * decay[:, None, None] ** gone
    out, total = torch.einsum("bhij,bhje->bhie", weights, v), weights.sum(-1)
    if case.state:
        sees = (decay[:, None] ** (place[:, None] + 1)) * _first_document(case, place)[:, None]  # [B, Hq, Sq]
        rows = inputs.arguments.get("query_lengths", torch.full((n.B,), n.Sq))
        sees = sees * (torch.arange(n.Sq) < rows[:, None])[:, None]
        before = _spread(t["state"], head)
        out = out + torch.einsum("bhid,bhde,bhi->bhie", q, before, sees) * scale
        if "state_z" in t:
            total = total + torch.einsum("bhid,bhd,bhi->bhi", q, _spread(t["state_z"], head), sees) * scale
    if case.linear == "elu1":
        out, weights = out / (total + _EPS)[..., None], weights / (total + _EPS)[..., None]
    out = torch.where((allowed & bad[:, None, None, :]).any(-1, keepdim=True), math.nan, out)
    return out, weights, _state(case, inputs, t, k, v, decay, head) if case.state else {}


def _elu1(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0)))


def _spread(x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return x if x.shape[1] == len(head) else x[:, head]


def _places(case: Case, inputs: Inputs) -> torch.Tensor:
    n, offset = case.sizes, inputs.arguments.get("q_offset", 0)
    if case.mask == "causal_end" or (case.mask in ("none", "bool", "columns", "bool_padding") and n.Sq != n.Skv):
        offset = n.Skv - n.Sq
    start = offset if isinstance(offset, torch.Tensor) else torch.full((n.B,), offset)
    return start[:, None] + torch.arange(n.Sq)


def _first_document(case: Case, place: torch.Tensor) -> torch.Tensor:
    """Which rows see the state that goes in: with documents those of the first, otherwise all."""
    return (place < case.sizes.Skv // 3) if case.mask == "documents" else torch.ones_like(place, dtype=torch.bool)


def _state(
    case: Case,
    inputs: Inputs,
    t: dict[str, torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    head: torch.Tensor,
) -> dict[str, torch.Tensor]:
    n = case.sizes
    lengths = inputs.arguments.get("key_lengths", torch.full((n.B,), n.Skv))
    counts = torch.ones(n.B, n.Skv, dtype=torch.bool)
    if case.mask in ("columns", "bool_padding"):
        counts = inputs.allowed.any(1).any(1)
    rows = []
    for b in range(n.B):
        s, z = _spread(t["state"], head)[b], None
        z = _spread(t["state_z"], head)[b] if "state_z" in t else torch.zeros(n.Hq, n.D, dtype=torch.float64)
        for j in range(int(lengths[b])):
            if case.mask == "documents" and j in (n.Skv // 3, n.Skv // 3 + 1):
                s, z = torch.zeros_like(s), torch.zeros_like(z)
            s, z = s * decay[:, None, None], z * decay[:, None]
            if counts[b, j]:
                s, z = s + k[b, :, j, :, None] * v[b, :, j, None, :], z + k[b, :, j]
        rows.append((s, z))
    s, z = (torch.stack(parts) for parts in zip(*rows, strict=True))
    own = slice(None) if case.linear == "retention" else slice(None, None, n.Hq // n.Hkv)  # heads of a group agree
    found = {"S": s[:, own], "length": lengths + 3}
    return found | ({"z": z[:, own]} if case.linear == "elu1" else {})
