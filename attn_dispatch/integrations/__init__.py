"""Other libraries' models through the dispatcher: `transformers`, models that call torch's SDPA (`sdpa`), `layers`."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["layers", "sdpa", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"attn_dispatch.integrations.{name}")
    raise AttributeError(f"module 'attn_dispatch.integrations' has no attribute {name!r}")
