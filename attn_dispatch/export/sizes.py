"""The dynamic sizes of a traced model: their names, and inputs of other sizes to check it with."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from attn_dispatch.errors import ExportError

__all__ = ["Sizes", "resized", "sizes_of", "tensors_of", "torch_shapes"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the tensor inputs of a traced program.

    Args:
        inputs: per input, each size: a number, or an expression of symbols as text.
        example: the example's value of each symbol. names: what the caller calls a symbol.
    """

    inputs: tuple[tuple[Any, ...], ...]
    example: Mapping[str, int]
    names: Mapping[str, str]

    def at(self, values: Mapping[str, int]) -> list[tuple[int, ...]]:
        """The shapes of the inputs for values of the symbols."""
        return [tuple(_value(size, values) for size in shape) for shape in self.inputs]

    def named(self, values: Mapping[str, int]) -> dict[str, int]:
        """The values by the caller's names."""
        return {self.names.get(symbol, symbol): value for symbol, value in values.items()}

    def renamed(self, text: str) -> str:
        """An expression of torch's symbols in the caller's names."""
        if not self.names:
            return text
        pattern = r"\b(" + "|".join(map(re.escape, self.names)) + r")\b"
        return re.sub(pattern, lambda found: self.names[found[1]], text)


def _value(size: Any, values: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    return int(size.subs({symbol: values[str(symbol)] for symbol in size.free_symbols}))


def torch_shapes(shapes: Any) -> Any:
    """``dynamic_shapes`` as torch.export takes them: a name in place of a ``Dim`` becomes ``Dim.DYNAMIC``."""
    if isinstance(shapes, str):
        return torch.export.Dim.DYNAMIC
    if isinstance(shapes, Mapping):
        return {key: torch_shapes(value) for key, value in shapes.items()}
    if isinstance(shapes, (list, tuple)):
        values = [torch_shapes(value) for value in shapes]
        return type(shapes)(*values) if hasattr(shapes, "_fields") else type(shapes)(values)
    return shapes


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested arguments or results, in torch.export's order."""
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def sizes_of(
    program: torch.export.ExportedProgram, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Any
) -> Sizes:
    """The sizes of a traced program's inputs, with the names that the caller's ``dynamic_shapes`` give them."""
    wanted = set(program.graph_signature.user_inputs)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in wanted]
    found = [node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    inputs, example = [], {}
    for x in found:
        shape: list[Any] = []
        for size in x.shape:
            if isinstance(size, int):
                shape.append(size)
                continue
            shape.append(size.node.expr)
            if size.node.expr.is_Symbol:
                example[str(size.node.expr)] = int(size.node.hint)
        inputs.append(tuple(shape))
    names: dict[str, str] = {}
    for known, given in zip(inputs, _names(model, args, kwargs, shapes), strict=False):
        for dim, name in given.items():
            if dim < len(known) and not isinstance(known[dim], int) and known[dim].is_Symbol:
                names.setdefault(str(known[dim]), name)
    return Sizes(tuple(inputs), example, names)


def _names(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Any) -> Iterator[dict[int, str]]:
    """Per tensor of the arguments, the names that ``dynamic_shapes`` give its dimensions."""
    if shapes is None:
        return
    forward = model.forward if isinstance(model, torch.nn.Module) else model
    if isinstance(shapes, Mapping):
        given = list(inspect.signature(forward).bind_partial(*args).arguments.items())  # positional ones, then as given
        pairs = [(value, shapes.get(name)) for name, value in [*given, *kwargs.items()]]
    else:
        pairs = list(zip((*args, *kwargs.values()), shapes, strict=False))
    for value, shape in pairs:
        yield from _names_in(value, shape)


def _names_in(value: Any, shape: Any) -> Iterator[dict[int, str]]:
    if isinstance(value, torch.Tensor):
        dims = shape.items() if isinstance(shape, Mapping) else enumerate(shape or ())
        yield {dim: _name(size) for dim, size in dims if _name(size)}
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _names_in(part, shape.get(key) if isinstance(shape, Mapping) else None)
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from _names_in(part, shape[i] if isinstance(shape, Sequence) and i < len(shape) else None)


def _name(size: Any) -> str:
    return size if isinstance(size, str) else str(getattr(size, "__name__", "") or "")


def resized(tensors: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """The example's tensors in other shapes: repeated or cut along each dimension, so that values stay legal ones.

    Raises:
        ExportError: an example tensor is empty where the new one is not, so there is no value to take.
    """
    results = []
    for x, shape in zip(tensors, shapes, strict=True):
        for dim, size in enumerate(shape):
            if size > 0 and x.shape[dim] == 0:
                raise ExportError(
                    f"the example has a tensor of shape {list(x.shape)}: its dynamic sizes must be above 0"
                )
            x = x.index_select(dim, torch.arange(size, device=x.device) % max(x.shape[dim], 1))
        results.append(x)
    return results
