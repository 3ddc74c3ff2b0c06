"""Whole models as ONNX files, with standard operators for every attention: `export_onnx`."""

from __future__ import annotations

from attn_dispatch.export.main import export_onnx
from attn_dispatch.export.report import Call, Check, ExportReport

__all__ = ["Call", "Check", "ExportReport", "export_onnx"]
