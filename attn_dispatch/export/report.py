"""What an export made: its attention calls, its operators, and how far its results are from torch's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Call", "Check", "ExportReport"]


@dataclass(frozen=True)
class Call:
    """One attention of the model.

    Args:
        layer: the module that made it, ``"model.layers.0.self_attn"``. op: the op in one line, at the example's sizes.
        form: how it was lowered. nodes: how many nodes of which operator stand for it alone, shared masks left out.
        decision: what the dispatcher runs for it here, and why.
    """

    layer: str
    op: str
    form: str
    nodes: Mapping[str, int]
    decision: str


@dataclass(frozen=True)
class Check:
    """One run on onnxruntime beside torch.

    Args:
        sizes: the value of each dynamic size. errors: largest absolute difference by output. limits: what was allowed.
        skipped: why torch itself does not run these sizes; empty when it does.
    """

    sizes: Mapping[str, int]
    errors: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    skipped: str = ""

    @property
    def ok(self) -> bool:
        """Whether every output is within its limit."""
        return all(error <= self.limits[name] for name, error in self.errors.items())

    def __str__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items()) or "as given"
        if self.skipped:
            return f"{sizes}: not run ({self.skipped})"
        worst = max(self.errors, key=lambda name: self.errors[name] / max(self.limits[name], 1e-300))
        count = f"{len(self.errors)} outputs" if len(self.errors) > 1 else "1 output"
        return f"{sizes}: {count}, worst {worst} {self.errors[worst]:.1e} (limit {self.limits[worst]:.1e})"


@dataclass(frozen=True)
class ExportReport:
    """What was written.

    Args:
        path: the model file. opset: of ai.onnx. form: as asked for. domains: version by domain.
        calls: the attention calls in the order of the graph. nodes: count by operator of the whole graph.
        file_bytes: of the model and its external data. checks: runs beside torch; empty without ``verify``.
        runtime: what they ran on. warnings: what else there is to know.
    """

    path: Path
    opset: int
    form: str
    domains: Mapping[str, int]
    calls: tuple[Call, ...]
    nodes: Mapping[str, int]
    file_bytes: int
    checks: tuple[Check, ...] = ()
    runtime: str = ""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        domains = ", ".join(f"{name or 'ai.onnx'} {version}" for name, version in self.domains.items())
        lines = [
            f"wrote     {self.path}   {self.file_bytes / 1e6:,.1f} MB, {sum(self.nodes.values())} nodes, {domains}",
            f"attention {len(self.calls)} calls, form {self.form}",
        ]
        groups: dict[tuple[str, str, str], list[Call]] = {}
        for call in self.calls:
            made = ", ".join(f"{count} {name}" for name, count in call.nodes.items())
            groups.setdefault((call.op, call.form, made), []).append(call)
        for (op, form, made), calls in groups.items():
            layers = calls[0].layer if len(calls) == 1 else f"{calls[0].layer} ... {calls[-1].layer}"
            lines.append(f"  {len(calls):>3} x {op}")
            lines.append(f"        {form}: {made}   {layers}")
        lines += [f"checked   {check}" for check in self.checks]
        lines += [f"          on {self.runtime}"] if self.checks else []
        return "\n".join([*lines, *(f"warning   {text}" for text in self.warnings)])

    def to_dict(self) -> dict[str, Any]:
        """Plain types, for ``--json``."""
        return {**asdict(self), "path": str(self.path)}
