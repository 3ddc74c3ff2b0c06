"""What an exported model says of its attention: read back from its metadata, for ``attn-dispatch explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attn_dispatch.errors import ExportError
from attn_dispatch.export.report import Call

__all__ = ["Model", "read_model"]


@dataclass(frozen=True)
class Model:
    """An exported model.

    Args:
        path: its file. domains: version by domain. calls: its attention, as written down when it was exported.
        here: what the dispatcher would run on this machine for each.
    """

    path: Path
    domains: Mapping[str, int]
    calls: tuple[Call, ...]
    here: tuple[str, ...]

    def __str__(self) -> str:
        domains = ", ".join(f"{name or 'ai.onnx'} {version}" for name, version in self.domains.items())
        lines = [f"{self.path}: {len(self.calls)} attention calls, {domains}"]
        for i, (call, here) in enumerate(zip(self.calls, self.here, strict=True)):
            made = ", ".join(f"{count} {name}" for name, count in call.nodes.items())
            lines += [f"{i:>3}  {call.layer}", f"     op        {call.op}", f"     form      {call.form}: {made}"]
            lines += [f"     exported  {call.decision}", f"     here      {here}"]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for ``--json``."""
        return {**asdict(self), "path": str(self.path)}


def read_model(path: Path) -> Model:
    """The attention calls of a model file.

    Raises:
        ExportError: the file cannot be read, is no ONNX model, or was not exported by `export_onnx`.
    """
    try:
        import onnx
        import onnx_ir as ir
    except ImportError as error:
        raise ExportError(f"reading an ONNX file needs {error.name}: pip install 'attn-dispatch[onnx]'") from error
    try:
        proto = onnx.load(str(path), load_external_data=False)
        model = ir.from_proto(proto)
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # protobuf raises its own DecodeError, onnx_ir ValueErrors of many kinds
        raise ExportError(f"{path} is not an ONNX model: {type(error).__name__}: {error}") from error
    if not proto.graph.node:
        raise ExportError(f"{path} is not an ONNX model: it has no nodes")
    from attn_dispatch.export.place import METADATA, decide_here, read_calls

    calls = read_calls(model, str(path))
    if not calls:
        raise ExportError(f"{path} has no {METADATA!r} in its metadata: export_onnx did not write it")
    return Model(
        path, dict(model.opset_imports), tuple(c for c, _ in calls), tuple(decide_here(op, []) for _, op in calls)
    )
