"""Attention as modules: projections and state around `dispatch.attention`. Names load when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_dispatch.nn.cache import KVCache
    from attn_dispatch.nn.indexer import LightningIndexer
    from attn_dispatch.nn.linear_attention import LinearAttention
    from attn_dispatch.nn.longformer import LongformerSelfAttention
    from attn_dispatch.nn.multihead import MultiheadAttention
    from attn_dispatch.nn.retention import Retention
    from attn_dispatch.nn.rotary import Rotary
    from attn_dispatch.nn.static_cache import tensor_scatter

__all__ = [
    "KVCache",
    "LightningIndexer",
    "LinearAttention",
    "LongformerSelfAttention",
    "MultiheadAttention",
    "Retention",
    "Rotary",
    "tensor_scatter",
]

_HOME = {
    "KVCache": "cache",
    "LightningIndexer": "indexer",
    "LinearAttention": "linear_attention",
    "LongformerSelfAttention": "longformer",
    "MultiheadAttention": "multihead",
    "Retention": "retention",
    "Rotary": "rotary",
    "tensor_scatter": "static_cache",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"attn_dispatch.nn.{_HOME[name]}"), name)
    raise AttributeError(f"module 'attn_dispatch.nn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
