"""What the backends over torch's SDPA kernels share: masks as they take them, dead rows, gradients of gradients.

Each kernel is called by its own operator. The alternative, ``torch.nn.attention.sdpa_kernel``, costs 13 us a call and
sets flags that are global to the process, so it would leak into other threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from attn_dispatch import reference
from attn_dispatch.backend import Operands
from attn_dispatch.capability import Reason
from attn_dispatch.ir.atoms import Causal, Columns, Dense, Full, KeyLengths, KeyRange, QueryLengths
from attn_dispatch.ir.masks import And, Mask
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Bias
from attn_dispatch.ir.tensors import Ref

MakeMask = Callable[[torch.Tensor, torch.Tensor, Operands], torch.Tensor | None]

__all__ = [
    "MASK_FEATURES",
    "additive_mask",
    "boolean_mask",
    "capability_reasons",
    "differentiable_twice",
    "is_causal_only",
    "mask_parts",
    "patch_dead_rows",
]

# The masks that these backends turn into one mask tensor themselves, at the cost of [.., Sq or 1, Skv] elements.
# Whatever would cost Sq x Skv to build goes through the rewrite densify_mask, so that explain shows it.
MASK_FEATURES = frozenset(
    {
        *("mask:Full", "mask:Causal", "mask:Dense", "mask:Columns", "mask:KeyLengths", "mask:KeyRange"),
        *("mask:QueryLengths", "combine:And"),
    }
)


def capability_reasons(op: AttentionOp, least: tuple[int, int], most: tuple[int, int]) -> list[Reason]:
    """Whether the current GPU is one that torch's own dispatcher would run a kernel on; its operator does not ask.

    Args:
        least, most: compute capabilities, ``(8, 0)``, both included.
    """
    if op.device != "cuda" or not torch.cuda.is_available() or torch.version.hip is not None:
        return []
    here = torch.cuda.get_device_capability()
    if least <= here <= most:
        return []
    got, first, last = (f"{major}.{minor}" for major, minor in (here, least, most))
    text = f"compute capability {got}, takes {first} to {last}"
    return [Reason("device", "compute capability", got, f"{first} to {last}", text=text)]


def is_causal_only(op: AttentionOp) -> bool:
    """The mask is Causal, or Causal with nothing else: the kernel's own flag serves it."""
    return isinstance(op.mask, Causal)


def mask_parts(op: AttentionOp) -> list[Mask]:
    """The parts of a conjunction, without Full."""
    parts = op.mask.args if isinstance(op.mask, And) else (op.mask,)
    return [part for part in parts if not isinstance(part, Full)]


def boolean_mask(op: AttentionOp) -> MakeMask:
    """All masks of the op as one boolean tensor ``[B|1, H|1, Sq|1, Skv]``; None when there is none.

    Returns:
        ``(q, k, operands) -> mask``: what of it depends on the op alone is done here, and not at every call.
    """
    parts = mask_parts(op)
    first = parts[0] if parts else None
    if len(parts) == 1 and isinstance(first, Columns) and isinstance(first.kept, Ref):
        columns = first.kept.name
        return lambda _q, _k, t: _columns(t[columns])

    def make(q: torch.Tensor, k: torch.Tensor, t: Operands) -> torch.Tensor | None:
        out = None
        for part in parts:
            assert isinstance(part, (Causal, Dense, Columns, KeyLengths, KeyRange, QueryLengths)), part
            if isinstance(part, Columns) and isinstance(part.kept, Ref):
                allowed = _columns(t[part.kept.name])
            else:
                allowed = part.allowed(reference.positions(op, q, k, t))
            out = allowed if out is None else out & allowed
        return out if out is None or out.ndim == 4 else out[(None,) * (4 - out.ndim)]

    return make


def _columns(kept: torch.Tensor) -> torch.Tensor:
    """Columns ``[Skv]`` or ``[B, Skv]`` as a mask, without a grid of positions: every layer of every padded decode step
    comes here."""
    return kept.view(-1, 1, 1, kept.size(-1))


def _constants(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """0 and -inf as tensors, which spares making them of numbers at each call."""
    with torch.inference_mode(False):
        return torch.zeros((), dtype=dtype, device="cpu"), torch.full((), -math.inf, dtype=dtype, device="cpu")


_CONSTANTS = {d: _constants(d) for d in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}


def additive_mask(op: AttentionOp) -> MakeMask:
    """All masks and biases of the op as one float tensor in the op's dtype (fp32 biases stay fp32 for half precision).

    Returns:
        ``(q, k, operands) -> mask``, which gives None when the op has neither.
    """
    allowed_of = boolean_mask(op)
    names = [term.bias.name for term in op.score if isinstance(term, Bias)]
    dtype, on_cpu = getattr(torch, op.dtype), op.device == "cpu" and not op.traced
    seen, hidden = _CONSTANTS[dtype]

    def of_booleans(q: torch.Tensor, k: torch.Tensor, t: Operands) -> torch.Tensor | None:
        allowed = allowed_of(q, k, t)
        if allowed is None:
            return None
        if type(allowed) is torch.Tensor and on_cpu:
            return torch.where(allowed, seen, hidden)
        mask = torch.where(allowed, 0.0, -math.inf)  # constants would be strangers to a fake or traced tensor
        return mask if mask.dtype is dtype else mask.to(dtype)

    def make(q: torch.Tensor, k: torch.Tensor, t: Operands) -> torch.Tensor | None:
        allowed = allowed_of(q, k, t)
        total = t[names[0]]
        for name in names[1:]:
            total = total + t[name]
        total = total if total.ndim == 4 else total[(None,) * (4 - total.ndim)]
        return total if allowed is None else torch.where(allowed, total, -math.inf)

    return make if names else of_booleans


def patch_dead_rows(lse: torch.Tensor, additive: torch.Tensor | None) -> torch.Tensor:
    """Set the log-sum-exp of empty rows to -inf. The CPU flash kernel says 0.0 there, which would corrupt a merge."""
    if additive is None:
        return lse
    return torch.where(torch.isneginf(additive).all(-1), -math.inf, lse)


def differentiable_twice(
    op: AttentionOp, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands
) -> torch.Tensor:
    """Give a fused kernel's output gradients of gradients, by recomputing in eager when they are asked for.

    The fused backward is not differentiable itself ("derivative for ... is not implemented"). A hook on its autograd
    node sees ``create_graph=True`` as grad mode being on, and only then hands back differentiable gradients.
    """
    node = out.grad_fn
    if node is None:
        return out
    inputs = (q, k, v)

    def recompute(
        grad_inputs: tuple[torch.Tensor | None, ...], grad_outputs: tuple[torch.Tensor | None, ...]
    ) -> tuple[torch.Tensor | None, ...] | None:
        if not torch.is_grad_enabled() or grad_outputs[0] is None:
            return None
        # each through a name of its own: one tensor may stand in several places, or be made of another
        own = [x.view_as(x) for x in inputs]
        again = reference.attention(op, own[0], own[1], own[2], t).out
        wanted = [i for i, g in enumerate(grad_inputs[:3]) if g is not None]
        grads = torch.autograd.grad(again, [own[i] for i in wanted], grad_outputs[0], create_graph=True)
        found = dict(zip(wanted, grads, strict=True))
        return tuple(found.get(i, g) for i, g in enumerate(grad_inputs))

    register: Callable[..., object] = node.register_hook
    register(recompute)
    return out
