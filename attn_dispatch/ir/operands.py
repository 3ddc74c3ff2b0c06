"""Operands of a mask: a tensor held by the person's mask, a name in an op, or a small constant table."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_dispatch.errors import InputTypeError
from attn_dispatch.ir.tensors import Ref

__all__ = ["Held", "Operand", "Table", "as_operand", "no_mask", "resolve"]


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor that a person's mask carries. Equal only to itself: content is never compared behind your back."""

    tensor: torch.Tensor

    def content_digest(self) -> str:
        """Digest of the values; this reads the tensor (and waits for its device)."""
        data = self.tensor.detach().cpu().contiguous()
        raw = _bytes_of(data)
        return f"<{data.dtype} {list(data.shape)} {hashlib.sha256(raw).hexdigest()}>"

    def __str__(self) -> str:
        kind = str(self.tensor.dtype).removeprefix("torch.")
        return f"<{kind}{list(self.tensor.shape)}>"


@dataclass(frozen=True)
class Table:
    """A constant array of integers or booleans, stored in the IR itself, so that it counts by value.

    Text form: ``"bool 2x2 0110"`` for booleans, ``"int 3 5,1,2"`` for integers.
    """

    text: str

    @classmethod
    def of(cls, values: torch.Tensor | Sequence[Any]) -> Table:
        """From a tensor or nested lists.

        Example:
            >>> Table.of([[True, False]]).text
            'bool 1x2 10'
        """
        data = torch.as_tensor(values).detach().cpu()
        shape = "x".join(map(str, data.shape)) or "1"
        flat = data.reshape(-1)
        if data.dtype == torch.bool:  # as bytes: a loop over a table of a million blocks takes half a second
            return cls(f"bool {shape} {_bytes_of(flat.to(torch.uint8) + ord('0')).decode()}")
        return cls(f"int {shape} {','.join(map(str, flat.long().tolist()))}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the array, read from the text.

        Example:
            >>> Table("int 2x1 5,1").shape
            (2, 1)
        """
        return tuple(int(n) for n in self.text.split(" ")[1].split("x"))

    def tensor(self, device: Any = None) -> torch.Tensor:
        """The array, bool or int64; to be read, not written to: it is made once for each text."""
        place = torch.device("cpu" if device is None else device)
        found = _tables.get((self.text, place))
        if found is None:
            found = _parse_table(self.text).to(place)
            if type(found) is torch.Tensor and not torch.compiler.is_compiling():  # not a tracer's, which ends with it
                if len(_tables) >= _MAX_TABLES:
                    _tables.clear()
                _tables[self.text, place] = found
        return found

    def __str__(self) -> str:
        return f'"{self.text}"'


def _bytes_of(data: torch.Tensor) -> bytes:
    """The memory of a tensor on the CPU; without numpy, which torch can do without and this package does too."""
    data = data.contiguous()
    return ctypes.string_at(data.data_ptr(), data.numel() * data.itemsize) if data.numel() else b""


# Made once for each device: to a GPU, each copy from the host waits for the device.
_tables: dict[tuple[str, torch.device], torch.Tensor] = {}
_MAX_TABLES = 256


def _parse_table(text: str) -> torch.Tensor:
    kind, shape_text, body = (text + " ").split(" ")[:3]
    shape = [int(n) for n in shape_text.split("x")]
    traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()  # Dynamo cannot ask the second
    if kind == "bool" and body and not traced:  # under a mode this would not be its own
        return torch.frombuffer(bytearray(body.encode()), dtype=torch.uint8).eq(ord("1")).reshape(shape)
    dtype = torch.bool if kind == "bool" else torch.int64
    values = body if kind == "bool" else (x for x in body.split(",") if x)
    return torch.tensor([int(x) for x in values], dtype=dtype, device="cpu").reshape(shape)


Operand = Ref | Held | Table


def as_operand(value: Any) -> Operand:
    """A tensor is held, lists become a `Table`, names and operands stay what they are."""
    if isinstance(value, (Ref, Held, Table)):
        return value
    if isinstance(value, torch.Tensor):
        return Held(value)
    if isinstance(value, str):
        return Ref(value) if " " not in value else Table(value)
    return Table.of(value)


def resolve(operand: Operand, tensors: Mapping[str, torch.Tensor], device: Any = None) -> torch.Tensor:
    """The tensor of an operand.

    Raises:
        KeyError: a name for which no tensor was handed over; the message lists those that were.
    """
    if isinstance(operand, Held):
        return operand.tensor.to(device) if device is not None else operand.tensor
    if isinstance(operand, Table):
        return operand.tensor(device)
    if operand.name not in tensors:
        raise KeyError(f"no tensor was handed over for {operand.name!r}; there are {sorted(tensors)}")
    return tensors[operand.name]


def no_mask(node: str, got: Any) -> InputTypeError:
    """What to say when ``&`` or ``|`` is given something that is no mask.

    Args:
        node: the name of what they would have made, ``"And"`` or ``"Or"``.
    """
    sign = "&" if node == "And" else "|"
    if not isinstance(got, torch.Tensor):
        return InputTypeError(f"{sign} combines a mask with another mask, got {got!r}")
    remedy = "masks.columns(keep=tensor) for keys [Skv] or [B, Skv], masks.Dense(tensor) for pairs; True = attend"
    text = f"a tensor {list(got.shape)} {str(got.dtype).removeprefix('torch.')}"
    return InputTypeError(f"{sign} combines a mask with another mask, got {text}", remedy=remedy)
