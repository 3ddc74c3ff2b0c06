"""The float64 golden of a case, written from DESIGN section 2; it shares no code with the specification."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from attn_dispatch.testing.cases import Case, Inputs
from attn_dispatch.testing.linear import golden_linear

__all__ = ["Golden", "as_four", "golden", "loss_of"]


@dataclass(frozen=True)
class Golden:
    """What is right, float64: out ``[B, Hq, Sq, Dv]``, lse ``[B, Hq, Sq]``, weights, gradients by name, the state."""

    out: torch.Tensor
    lse: torch.Tensor
    weights: torch.Tensor
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def golden(case: Case, inputs: Inputs) -> Golden:
    """Attention of a case in float64, from the dense mask of its predicate; gradients by autograd."""
    leaves = {name: x.detach().double().requires_grad_(name in case.grad) for name, x in _float_tensors(inputs).items()}
    state: dict[str, torch.Tensor] = {}
    if case.linear:
        four = {name: as_four(leaves[name], case) for name in ("query", "key", "value")}
        out, weights, state = golden_linear(case, inputs, leaves | four)
        lse = torch.full(out.shape[:3], math.nan)
    else:
        out, lse, weights = _golden_forward(case, inputs, leaves)
    if not case.grad:
        return Golden(out, lse, weights, {}, state)
    wanted = [leaves[name] for name in case.grad]
    loss = loss_of(case, out, lse, state)
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    grads = {n: torch.zeros_like(leaves[n]) if g is None else g for n, g in zip(case.grad, found, strict=True)}
    state = {name: x.detach() for name, x in state.items()}
    return Golden(out.detach(), lse.detach(), weights.detach(), grads, state)


def _float_tensors(inputs: Inputs) -> dict[str, torch.Tensor]:
    return {name: x for name, x in inputs.named().items() if x.is_floating_point()}


def _golden_forward(
    case: Case, inputs: Inputs, t: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, allowed = case.sizes, inputs.allowed
    q, k, v = (as_four(t[name], case) for name in ("query", "key", "value"))
    bad = torch.isnan(k).any(-1)[:, :1].any(1)  # [B, Skv]: poisoned keys, the same for all heads
    k, v = (torch.where(bad[:, None, :, None], 0.0, x) for x in (k, v))
    kv_head = torch.arange(n.Hq) // max(n.Hq // max(n.Hkv, 1), 1)
    k, v = k[:, kv_head], v[:, kv_head]
    scale = case.scale if case.scale is not None else (1 / math.sqrt(n.D) if n.D else 1.0)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    if case.softcap:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    if inputs.bias is not None:
        # a bias that is an argument itself gets a gradient; one that is derived from it (ALiBi) is a constant
        own = next((t[name] for name in ("bias", "attn_mask") if name in t and t[name].ndim >= 2), None)
        scores = scores + (inputs.bias.double() if own is None else own)
    scores = torch.where(allowed, scores, -math.inf)
    logits = scores
    if case.sinks:
        sink = t["sinks"].reshape(1, -1, 1, 1).expand(n.B, n.Hq, n.Sq, 1)
        logits = torch.cat([scores, sink], -1)
    empty = torch.isneginf(logits).all(-1)
    some = torch.where(empty[..., None], 0.0, logits)  # logsumexp of nothing has a NaN gradient
    lse = torch.logsumexp(some, -1) if logits.shape[-1] else torch.zeros_like(some.sum(-1))
    lse = torch.where(empty, -math.inf, lse)
    weights = torch.exp(scores - torch.where(empty, 0.0, lse)[..., None])
    weights = torch.where(scores == -math.inf, 0.0, weights)
    out = torch.einsum("bhij,bhje->bhie", weights, v)
    poisoned = (allowed & bad[:, None, None, :]).any(-1)
    return torch.where(poisoned[..., None], math.nan, out), torch.where(poisoned, math.nan, lse), weights


def as_four(x: torch.Tensor, case: Case) -> torch.Tensor:
    """A tensor of a case as ``[B, H, S, D]``."""
    if case.layout == "bshd":
        return x.transpose(1, 2)
    if case.rank == 5:
        return x.reshape(-1, *x.shape[2:])
    return x[(None,) * (4 - x.ndim)]


def loss_of(
    case: Case, out: torch.Tensor, lse: torch.Tensor | None, state: dict[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """A scalar that weighs every element of the output, and of a finite lse and a state when asked for, differently."""
    gen = torch.Generator().manual_seed(7)
    up = torch.randn(out.shape, generator=gen, dtype=torch.float64)
    loss = (out.double() * up.to(out.dtype).double()).nan_to_num(0.0).sum()
    if case.lse and lse is not None:
        up = torch.randn(lse.shape, generator=gen, dtype=torch.float64)
        loss = loss + (torch.where(torch.isfinite(lse), lse, 0.0).double() * up).sum()
    for name in ("S", "z"):
        if state and name in state:
            up = torch.randn(state[name].shape, generator=gen, dtype=torch.float64)
            loss = loss + (state[name].double() * up).sum()
    return loss
