"""When the mask tensor of a call is taken for the pattern that it holds."""

from __future__ import annotations

from typing import Any

import torch

from attn_dispatch import tracing
from attn_dispatch.ir.atoms import Window
from attn_dispatch.ir.masks import Mask
from attn_dispatch.ir.recognise import recognise
from attn_dispatch.variants import LinearAttention, Retention, Stateful

__all__ = ["recognised", "worth_reading"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)  # tensors of no other kind


def recognised(
    attn_mask: torch.Tensor, query: Any, value: Any, bias: Any, variant: Any, layout: Any
) -> tuple[torch.Tensor | Mask, int | None, str]:
    """A mask tensor as the pattern that it holds, the offset at which it holds it, and a note; as given without one.

    Args:
        attn_mask: one that is `worth_reading`.
    """
    inner = variant.inner if isinstance(variant, Stateful) else variant
    linear = isinstance(inner, (LinearAttention, Retention))
    if linear and attn_mask.size(-2) == 1:
        # lengths would be the state's too, where columns are left out alone
        return attn_mask, None, ""
    found, offset = recognise(attn_mask)
    if found.feature == "mask:Dense":
        return attn_mask, None, ""
    if linear and any(isinstance(atom, Window) for atom in found.atoms()):
        return attn_mask, None, ""  # who asks for a window there is refused, and a tensor of pairs is not
    if not found.positional:
        return found, None, f"attn_mask recognised as {found}"
    _, _, sq, skv = _sizes(query, value, layout)
    fades = isinstance(inner, Retention) or (isinstance(bias, torch.Tensor) and bias.ndim == 1)
    if fades and offset != skv - sq:  # a decay and ALiBi count distances from the last key, if nothing else is said
        return attn_mask, None, ""
    return found, offset, f"attn_mask recognised as {found} at q_offset {offset}"


def worth_reading(
    mask: torch.Tensor, query: Any, value: Any, layout: Any, window: Any, is_causal: Any, q_offset: Any
) -> bool:
    """Whether a mask is read at each call of this shape, which must be possible, and little beside what it saves."""
    if window is not None or is_causal or q_offset is not None:
        return False  # the call has positions of its own, which a pattern's might contradict
    if mask.dtype is not torch.bool or type(mask) is not torch.Tensor or mask.layout is not torch.strided:
        return False
    if type(query) not in _PLAIN or type(value) not in _PLAIN:  # none without values: a model that is exported
        return False
    if not 2 <= mask.ndim <= 4 or query.is_nested or not query.ndim == value.ndim == 4:
        return False
    b, hq, sq, skv = _sizes(query, value, layout)
    of_keys = mask.size(-2) == 1
    if of_keys and not (sq >= 64 and mask.size(0) == b > 1):
        return False  # asked first: a padded decode step comes here at every layer
    if mask.device.type != "cpu" or tracing.is_transformed():
        return False
    lead = {2: (), 3: (1,), 4: (b, hq)}[mask.ndim]  # of rank 3 the first size may mean batch or heads
    fits = mask.size(-1) == skv and mask.size(-2) in (1, sq)
    fits = fits and all(m in (1, w) for m, w in zip(mask.shape[:-2], lead, strict=True))
    if not fits:
        return False  # wrong, or to be broadcast: what describes the call sees to either
    if of_keys:
        return True  # padding: lengths can be trimmed
    return sq * skv >= 1 << 16 and b * hq * (query.shape[3] + value.shape[3]) >= 256  # multiply-adds per pair


def _sizes(query: torch.Tensor, value: torch.Tensor, layout: Any) -> tuple[int, int, int, int]:
    """B, Hq, Sq, Skv of a 4-D call."""
    heads, rows = (2, 1) if layout == "bshd" else (1, 2)
    return query.size(0), query.size(heads), query.size(rows), value.size(rows)
