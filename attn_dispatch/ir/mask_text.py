"""Masks as one line of text, and back: ``Causal & Window(255, 0)``, ``(Causal | KeyRange(0, 8, None)) & ~Stride(2)``.

The text is what people read in `explain`, what YAML stores, and (with tensor contents) what a digest hashes.
"""

from __future__ import annotations

import ast
from typing import Any

from attn_dispatch.ir import atoms
from attn_dispatch.ir.masks import Mask
from attn_dispatch.ir.operands import Table
from attn_dispatch.ir.tensors import Ref

__all__ = ["parse_mask"]

_ATOMS = {name: getattr(atoms, name) for name in atoms.__all__}


def parse_mask(text: str) -> Mask:
    """Read a mask from its text form; the inverse of ``str(mask)`` for masks that hold no tensor.

    Raises:
        ValueError: the text is not a mask; the message shows the part that is not.

    Example:
        >>> str(parse_mask("Window(3, 0) & Causal"))
        'Causal & Window(3, 0)'
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"not a mask: {text!r} ({error.msg})") from None
    return _mask(tree, text)


def _mask(node: ast.expr, text: str) -> Mask:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        return _mask(node.left, text) & _mask(node.right, text)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _mask(node.left, text) | _mask(node.right, text)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_mask(node.operand, text)
    if isinstance(node, ast.Name) and node.id in _ATOMS:
        return _build(node.id, [], text)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ATOMS and not node.keywords:
        return _build(node.func.id, [_value(arg, text) for arg in node.args], text)
    raise ValueError(f"not a mask: {ast.unparse(node)!r} in {text!r}; atoms are {', '.join(_ATOMS)}")


def _build(name: str, args: list[Any], text: str) -> Mask:
    try:
        return _ATOMS[name](*args)
    except TypeError as error:
        raise ValueError(f"not a mask: {name} in {text!r}: {error}") from None


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        return Ref(node.id)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return Table(node.value)
    if isinstance(node, ast.Constant):
        return node.value
    raise ValueError(f"not a value: {ast.unparse(node)!r} in {text!r}")
