"""FlashInfer as the backend ``flashinfer``: prefill, decode, key lengths and sinks, forward only.

FlashInfer splits a call in two: ``plan`` schedules lengths on the host, ``run`` launches. An `Executable` here keeps a
planned wrapper and plans anew only when lengths change; see `attn_dispatch_flashinfer.wrappers`. Pages, which
attn_dispatch gathers before it describes an op, have `attn_dispatch_flashinfer.pages`.
"""

from __future__ import annotations

from attn_dispatch.plugin import Backend, hookimpl
from attn_dispatch_flashinfer.backend import FlashInfer

__all__ = ["FlashInfer", "attn_dispatch_backends"]


@hookimpl
def attn_dispatch_backends() -> list[Backend]:
    """The one backend of this distribution."""
    return [FlashInfer()]
