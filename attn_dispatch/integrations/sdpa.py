"""`replace_sdpa`: unmodified models, whose ``F.scaled_dot_product_attention`` calls go through the dispatcher.

A `TorchFunctionMode` sees the call whichever way a model imported the function, belongs to one thread, nests, and is
restored on exceptions by torch itself. It costs about 2 us for every torch call inside. It sees the outermost call
only: ``F.multi_head_attention_forward`` (of ``nn.MultiheadAttention`` and torch's transformer layers) calls SDPA inside
itself with the mode off, so that one runs as a copy whose SDPA is the dispatcher.
"""

from __future__ import annotations

import functools
import types as python_types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from attn_dispatch.dispatch import attention

__all__ = ["replace_sdpa"]

_SDPA = F.scaled_dot_product_attention
_MULTIHEAD = F.multi_head_attention_forward


class replace_sdpa(TorchFunctionMode):  # noqa: N801 - used as a function: with dispatch.replace_sdpa(): ...
    """Send ``F.scaled_dot_product_attention`` through `dispatch.attention` while the ``with`` lasts.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> from attn_dispatch import dispatch
        >>> x = torch.ones(1, 1, 2, 8)
        >>> with dispatch.replace_sdpa(), dispatch.capture() as workload:
        ...     _ = F.scaled_dot_product_attention(x, x, x)
        >>> len(workload)
        1
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _SDPA and not _is_nested(args):
            return _attend(*args, **(kwargs or {}))
        if func is _MULTIHEAD:
            func = _multihead()
        return func(*args, **(kwargs or {}))


def _sdpa(*args: Any, **kwargs: Any) -> Any:
    return (_SDPA if _is_nested(args) else _attend)(*args, **kwargs)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`attention` as torch's SDPA takes it from a model that is not written for us: it broadcasts a single kv head, and
    a mask of rank 3 is one for each head."""
    if key.ndim > 2 and key.ndim == value.ndim and key.shape[-3] == value.shape[-3] == 1:
        enable_gqa = True
    if isinstance(attn_mask, torch.Tensor) and attn_mask.ndim == 3 and query.ndim > 3:
        attn_mask = attn_mask[None]
    out: torch.Tensor = attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    return out


@functools.cache
def _multihead() -> Callable[..., Any]:
    """``F.multi_head_attention_forward`` with its own globals: nothing of torch is changed, so no thread can notice."""
    names = {**vars(F), "scaled_dot_product_attention": _sdpa}
    copy = python_types.FunctionType(
        _MULTIHEAD.__code__, names, _MULTIHEAD.__name__, _MULTIHEAD.__defaults__, _MULTIHEAD.__closure__
    )
    copy.__kwdefaults__ = _MULTIHEAD.__kwdefaults__
    return copy


def _is_nested(args: tuple[Any, ...]) -> bool:
    """Nested tensors are torch's own business; the dispatcher does not take them."""
    return any(isinstance(x, torch.Tensor) and x.is_nested for x in args[:3])
