"""`tensor_scatter`: write new keys or values into a cache of fixed size, each sequence at its own place."""

from __future__ import annotations

from typing import Any

import torch

from attn_dispatch.errors import InputError

__all__ = ["OPERATOR", "tensor_scatter"]


def tensor_scatter(past_cache: torch.Tensor, update: torch.Tensor, write_indices: torch.Tensor) -> torch.Tensor:
    """A copy of a cache with new rows in it: the linear ``TensorScatter`` of ONNX, which an exported model has for it.

    With a cache of fixed size a decode step has fixed shapes, and a ragged batch needs no padding: attend it with
    ``key_lengths=write_indices + n`` and ``q_offset=write_indices``.

    Args:
        past_cache: ``[B, H, S, D]``. update: ``[B, H, n, D]``. write_indices: int64 ``[B]``, the row of the first new
            one, so that ``write_indices + n <= S``.

    Returns:
        The new cache, ``[B, H, S, D]``.

    Raises:
        InputError: sizes that do not fit, or rows beyond the cache.

    Source: ONNX TensorScatter-24, https://onnx.ai/onnx/operators/onnx__TensorScatter.html

    Example:
        >>> cache = torch.zeros(2, 1, 4, 1)
        >>> tensor_scatter(cache, torch.ones(2, 1, 1, 1), torch.tensor([0, 2]))[:, 0, :, 0].tolist()
        [[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
    """
    if past_cache.ndim != 4 or update.ndim != 4 or past_cache.shape[1] != update.shape[1]:
        problem = (
            f"past_cache {list(past_cache.shape)} and update {list(update.shape)} must be [B, H, S, D], [B, H, n, D]"
        )
        raise InputError(problem)
    for name, ok in (
        ("update must have past_cache's head size", past_cache.shape[3] == update.shape[3]),
        ("update must have past_cache's dtype", past_cache.dtype == update.dtype),
        (
            "past_cache, update and write_indices must have one B",
            past_cache.shape[0] == update.shape[0] == write_indices.shape[0],
        ),
        ("write_indices must be int64 [B]", write_indices.dtype == torch.int64 and write_indices.ndim == 1),
    ):
        if not ok:
            asked = (
                f"past_cache {list(past_cache.shape)} {past_cache.dtype}   update {list(update.shape)} {update.dtype}"
            )
            raise InputError(f"{name}, got {write_indices.dtype} {list(write_indices.shape)}", asked=asked)
    result: torch.Tensor = torch.ops.attn_dispatch.tensor_scatter(past_cache, update, write_indices)
    return result


def _rows(update: torch.Tensor, write_indices: torch.Tensor) -> torch.Tensor:
    """Where each new row goes, ``[B, H, n, D]``."""
    at = write_indices[:, None] + torch.arange(update.shape[2], device=update.device)
    return at[:, None, :, None].expand(update.shape)


@torch.library.custom_op("attn_dispatch::tensor_scatter", mutates_args=())
def _tensor_scatter(past_cache: torch.Tensor, update: torch.Tensor, write_indices: torch.Tensor) -> torch.Tensor:
    rows = _rows(update, write_indices)
    if write_indices.device.type == "cpu" and rows.numel():
        first, last = int(write_indices.min()), int(write_indices.max()) + update.shape[2] - 1
        if first < 0 or last >= past_cache.shape[2]:
            problem = f"rows {first} .. {last} do not fit into a cache of {past_cache.shape[2]}"
            raise InputError(problem, remedy="a longer cache, or fewer tokens")
    return past_cache.scatter(2, rows, update)


@_tensor_scatter.register_fake
def _tensor_scatter_fake(past_cache: torch.Tensor, update: torch.Tensor, write_indices: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(past_cache, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(_rows(inputs[1], inputs[2]))


def _differentiate(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    (rows,) = ctx.saved_tensors
    return grad.scatter(2, rows, 0.0), grad.gather(2, rows), None


_tensor_scatter.register_autograd(_differentiate, setup_context=_setup_context)
OPERATOR = torch.ops.attn_dispatch.tensor_scatter.default  # what stands in a graph
