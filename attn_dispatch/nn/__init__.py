"""Modules: layers with parameters around the attention of this package. Each is loaded when its name is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_dispatch.nn.longformer import LongformerSelfAttention

__all__ = ["LongformerSelfAttention"]

_HOME = {"LongformerSelfAttention": "longformer"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"attn_dispatch.nn.{_HOME[name]}"), name)
    raise AttributeError(f"module 'attn_dispatch.nn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
