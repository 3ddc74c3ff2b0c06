"""Whole models as ONNX files, with standard operators for every attention: `export_onnx`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from attn_dispatch.errors import ExportError
from attn_dispatch.export.report import Call, Check, ExportReport

if TYPE_CHECKING:
    from attn_dispatch.export.main import export_onnx

__all__ = ["Call", "Check", "ExportReport", "export_onnx"]

_EXTRA = ("onnx", "onnx_ir", "onnxscript")


def __getattr__(name: str) -> Any:  # reading a file, and saying what is missing, need less than writing one
    if name != "export_onnx":
        raise AttributeError(f"module 'attn_dispatch.export' has no attribute {name!r}")
    try:
        return importlib.import_module("attn_dispatch.export.main").export_onnx
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _EXTRA:
            raise
        raise ExportError(f"exporting to ONNX needs {error.name}: pip install 'attn-dispatch[onnx]'") from error
