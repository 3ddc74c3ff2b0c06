"""Attention as modules: projections and state around `dispatch.attention`. Names load when they are used."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["KVCache", "MultiheadAttention", "Rotary"]

_WHERE = {"KVCache": "cache", "MultiheadAttention": "multihead", "Rotary": "rotary"}


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"attn_dispatch.nn.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'attn_dispatch.nn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
