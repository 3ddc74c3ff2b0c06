"""Write attention once; it runs on the fastest kernel proven correct for that op on that hardware.

``from attn_dispatch import dispatch, masks, variants``; `attention` is ``dispatch.attention``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_dispatch import biases, dispatch, integrations, masks, nn, variants
    from attn_dispatch.dispatch import attention, explain, plan, use
    from attn_dispatch.errors import (
        AttnDispatchError,
        BackendError,
        ConfigError,
        ExportError,
        InputError,
        InputTypeError,
        NoBackendError,
        UnknownBackendError,
    )
    from attn_dispatch.export import export_onnx

__all__ = [
    "AttnDispatchError",
    "BackendError",
    "ConfigError",
    "ExportError",
    "InputError",
    "InputTypeError",
    "NoBackendError",
    "UnknownBackendError",
    "__version__",
    "attention",
    "biases",
    "dispatch",
    "explain",
    "export_onnx",
    "integrations",
    "masks",
    "nn",
    "plan",
    "use",
    "variants",
]

__version__ = "0.1.0"

_MODULES = ("biases", "dispatch", "integrations", "masks", "nn", "variants")
_FUNCTIONS = ("attention", "explain", "plan", "use")
_ERRORS = tuple(name for name in __all__ if name.endswith("Error"))


def __getattr__(name: str) -> Any:  # importing the package costs nothing until a name of it is used
    if name in _MODULES:
        return importlib.import_module(f"attn_dispatch.{name}")
    if name in _FUNCTIONS:
        return getattr(importlib.import_module("attn_dispatch.dispatch"), name)
    if name == "export_onnx":
        return importlib.import_module("attn_dispatch.export").export_onnx
    if name in _ERRORS:
        return getattr(importlib.import_module("attn_dispatch.errors"), name)
    raise AttributeError(f"module 'attn_dispatch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
