"""Building ONNX nodes: one call, one node, and equal calls one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

__all__ = ["DTYPES", "Nodes", "Value"]

Value = ir.Value

# dtypes of attention by the IR's names
DTYPES = {
    "float16": ir.DataType.FLOAT16,
    "bfloat16": ir.DataType.BFLOAT16,
    "float32": ir.DataType.FLOAT,
    "float64": ir.DataType.DOUBLE,
    "int32": ir.DataType.INT32,
    "int64": ir.DataType.INT64,
    "bool": ir.DataType.BOOL,
}


class Nodes:
    """Makes nodes of one opset. Two calls with the same inputs and attributes give the same value.

    So a mask that thirty layers share is computed once: sizes that carry the same symbol are the same value, and what
    is built from the same values is the same value again. Nodes must be inserted in the order in which they are made.

    Args:
        opset: version of the domain ``ai.onnx``.
    """

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.domains: dict[str, int] = {"": opset}
        self._made: list[ir.Node] = []
        self._known: dict[Any, tuple[Value, ...]] = {}

    def __call__(
        self,
        op_type: str,
        *inputs: Value | None,
        domain: str = "",
        version: int = 1,
        outputs: int = 1,
        **attributes: Any,
    ) -> Any:
        """One node; its value, or a tuple of them when ``outputs`` is above 1. None among the inputs is absent."""
        given = list(inputs)
        while given and given[-1] is None:
            given.pop()
        attributes = {name: value for name, value in attributes.items() if value is not None}
        key = (domain, op_type, tuple(map(id, given)), tuple(sorted((n, _frozen(v)) for n, v in attributes.items())))
        if key not in self._known:
            attrs = ir.convenience.convert_attributes(attributes)
            node = ir.Node(domain, op_type, given, attrs, num_outputs=outputs, version=None if domain else self.opset)
            self.domains.setdefault(domain, version)
            self._made.append(node)
            self._known[key] = tuple(node.outputs)
        found = self._known[key]
        return found[0] if outputs == 1 else found

    def take(self) -> list[ir.Node]:
        """The nodes made since the last time, in order; what they stand for stays known."""
        made, self._made = self._made, []
        return made

    # --- constants and sizes -----------------------------------------------------------------------------------------

    def const(self, values: Any, dtype: str = "int64") -> Value:
        """A constant of a dtype by the IR's name; a scalar or nested lists."""
        element = DTYPES[dtype]
        array = np.asarray(values).astype(element.numpy())
        key = ("const", dtype, array.shape, array.tobytes())
        if key not in self._known:
            tensor = ir.Tensor(array, dtype=element)
            node = ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], num_outputs=1, version=self.opset)
            self._made.append(node)
            self._known[key] = tuple(node.outputs)
        return self._known[key][0]

    def size(self, x: Value, dim: int) -> Value:
        """The size of a dimension, int64 ``[1]``: a constant where it is one, one value for one symbol."""
        known = None if x.shape is None else x.shape[dim]
        if isinstance(known, int):
            return self.const([known])
        symbol = None if known is None else known.value
        key = ("size", symbol)
        if symbol is not None and key in self._known:
            return self._known[key][0]
        made: Value = self("Shape", x, start=dim, end=dim + 1)
        if symbol is not None:
            self._known[key] = (made,)
        return made

    def shape(self, *parts: Value | int) -> Value:
        """A shape from sizes ``[1]`` and numbers."""
        values = [self.const([part]) if isinstance(part, int) else part for part in parts]
        result: Value = self("Concat", *values, axis=0)
        return result

    # --- what is needed everywhere -----------------------------------------------------------------------------------

    def cast(self, x: Value, source: str, target: str) -> Value:
        """From one dtype to another; nothing where they are the same."""
        result: Value = x if source == target else self("Cast", x, to=int(DTYPES[target]))
        return result

    def both(self, parts: Sequence[Value], word: str = "And") -> Value:
        """All parts joined by And or Or."""
        out = parts[0]
        for part in parts[1:]:
            out = self(word, out, part)
        return out

    def slice(self, x: Value, start: int | Value, stop: int | Value, axis: int) -> Value:
        """``x[start:stop]`` along an axis."""
        ends = [self.const([end]) if isinstance(end, int) else end for end in (start, stop)]
        result: Value = self("Slice", x, *ends, self.const([axis]))
        return result


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
