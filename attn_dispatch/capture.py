"""`capture`: which attention ops a model really runs, by layer and phase, with counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from attn_dispatch import context
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.plan import Plan

__all__ = ["Entry", "Workload", "capture", "current_layer"]

# The module whose forward is running, as far as an integration knows it; "" outside one.
current_layer: ContextVar[str] = ContextVar("attn_dispatch_layer", default="")


@dataclass
class Entry:
    """One op as one layer runs it.

    Args:
        op: the canonical op. layer: the layer's name, "" when nobody said. phase: ``prefill``, ``decode`` or ``cross``.
        candidate: what ran it; source, why: where that choice came from. count: how often.
    """

    op: AttentionOp
    layer: str
    phase: str
    candidate: str
    source: str
    why: str
    count: int = 1


@dataclass
class Workload:
    """All ops that ran inside a `capture`, in the order of their first run. No tensor data."""

    entries: list[Entry] = field(default_factory=list)
    _index: dict[tuple[AttentionOp, str], Entry] = field(default_factory=dict, repr=False)

    def record(self, plan: Plan, *_tensors: torch.Tensor) -> None:
        """Count one run of a plan."""
        layer = current_layer.get()
        known = self._index.get((plan.op, layer))
        if known is not None:
            known.count += 1
            return
        decision = plan.decision
        entry = Entry(plan.op, layer, plan.op.phase, plan.name, decision.source, decision.why)
        self._index[plan.op, layer] = entry
        self.entries.append(entry)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def to_dict(self) -> dict[str, Any]:
        """Plain types for YAML."""
        ops = [{"layer": e.layer, "phase": e.phase, "count": e.count, "op": e.op.to_dict()} for e in self.entries]
        return {"schema": 1, "ops": ops}

    def save(self, path: str | Path) -> None:
        """Write the workload as YAML."""
        import yaml

        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")


@contextmanager
def capture() -> Iterator[Workload]:
    """Record every attention that runs in this thread or task while the ``with`` lasts.

    Example:
        >>> import torch
        >>> from attn_dispatch import dispatch
        >>> x = torch.ones(1, 1, 4, 8)
        >>> with dispatch.capture() as workload:
        ...     _ = dispatch.attention(x, x, x, is_causal=True)
        >>> [(entry.phase, entry.count) for entry in workload]
        [('prefill', 1)]
    """
    workload = Workload()
    with context.recording(workload.record):
        yield workload
