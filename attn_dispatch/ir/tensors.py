"""Descriptors of tensors: what the IR may know of a tensor without holding one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

__all__ = ["Ref", "TensorDesc", "dtype_name", "has_no_values", "short_dtype", "stride_class"]

_SHORT = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "bool": "bool",
}


def has_no_values(*tensors: torch.Tensor) -> bool:
    """Whether the values of any tensor cannot be read: while torch traces, under a transform, of a tracer's stand-in.

    Example:
        >>> has_no_values(torch.zeros(1)), has_no_values(torch.zeros(1), torch.zeros(1, device="meta"))
        (False, True)
    """
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return any(
        type(x) not in (torch.Tensor, torch.nn.Parameter)
        or x.device.type == "meta"
        or torch._C._functorch.is_functorch_wrapped_tensor(x)
        for x in tensors
    )


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def short_dtype(name: str) -> str:
    """``"bfloat16"`` -> ``"bf16"``; a name without a short form stays as it is."""
    return _SHORT.get(name, name)


def stride_class(tensor: torch.Tensor) -> str:
    """How a tensor lies in memory, as far as kernels care.

    ``"rows"``: the last dimension is contiguous; ``"scattered"``: it is not; ``"bshd"``: as rows, and the heads of one
    position lie side by side, as a projection leaves them. That does not change which kernels are right, but how fast
    those are that must copy: what is measured, is measured so; a decision serves rows of either class.
    """
    if tensor.ndim and tensor.size(-1) > 1 and tensor.stride(-1) != 1:
        return "scattered"
    return "bshd" if tensor.ndim == 4 and _heads_inside(tensor) else "rows"


def _heads_inside(tensor: torch.Tensor) -> bool:
    """Whether dimension 1 lies inside dimension 2; sizes that are not known yet (tracing) count as rows."""
    facts = (tensor.size(1), tensor.size(2), tensor.stride(1), tensor.stride(2))
    if any(type(n) is not int for n in facts):
        return False
    heads, length, head, row = facts
    return heads > 1 and length > 1 and 0 < head < row


@dataclass(frozen=True)
class Ref:
    """The name of a tensor that is handed over at run time."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class TensorDesc:
    """Shape, dtype, device and stride class of one operand.

    Args:
        shape: sizes; ``[B, H, S, D]`` for query, key and value, whatever layout the caller used.
        dtype: ``"float32"``, ``"bfloat16"`` ...
        device: the device type, ``"cpu"`` or ``"cuda"``; the index does not change a plan.
        strides: ``"rows"``, ``"bshd"`` or ``"scattered"``, see `stride_class`.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    strides: str = "rows"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorDesc:
        """Describe a tensor.

        Example:
            >>> TensorDesc.of(torch.zeros(1, 2, 3, 4)).shape
            (1, 2, 3, 4)
        """
        return cls(tuple(tensor.shape), dtype_name(tensor.dtype), tensor.device.type, stride_class(tensor))

    def with_shape(self, *shape: int) -> TensorDesc:
        """The same tensor with another shape."""
        return TensorDesc(tuple(shape), self.dtype, self.device, self.strides)

    def in_rows(self) -> TensorDesc:
        """The same tensor whichever way its rows lie: what a decision depends on."""
        return replace(self, strides="rows") if self.strides == "bshd" else self

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return getattr(torch, self.dtype).itemsize

    def __str__(self) -> str:
        tail = " scattered" if self.strides == "scattered" else ""
        return f"[{', '.join(map(str, self.shape))}] {short_dtype(self.dtype)}{tail}"

    def to_dict(self) -> dict[str, Any]:
        """Plain types for YAML."""
        return {**asdict(self), "shape": list(self.shape)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> TensorDesc:
        """The inverse of `to_dict`."""
        shape: Sequence[int] = data["shape"]
        return cls(tuple(shape), data["dtype"], data.get("device", "cpu"), data.get("strides", "rows"))
