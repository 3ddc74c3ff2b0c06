"""`replace_sdpa`: unmodified models, whose ``F.scaled_dot_product_attention`` calls go through the dispatcher.

A `TorchFunctionMode` sees the call whichever way a model imported the function, belongs to one thread, nests, and is
restored on exceptions by torch itself. It costs about 2 us for every torch call inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from attn_dispatch.dispatch import attention

__all__ = ["replace_sdpa"]

_SDPA = F.scaled_dot_product_attention


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
            return attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_nested(args: tuple[Any, ...]) -> bool:
    """Nested tensors are torch's own business; the dispatcher does not take them."""
    return any(isinstance(x, torch.Tensor) and x.is_nested for x in args[:3])
