"""FlashAttention as three backends, ``flash_attn_2 flash_attn_3 flash_attn_4``: whichever libraries are installed.

The facts of each line by version are data in `attn_dispatch_flash_attn.facts`; the calls are in
`attn_dispatch_flash_attn.calls`. Pages, which attn_dispatch gathers before it describes an op, have functions of their
own in `attn_dispatch_flash_attn.pages`.
"""

from __future__ import annotations

from attn_dispatch.plugin import Backend, hookimpl
from attn_dispatch_flash_attn.backends import FlashAttn
from attn_dispatch_flash_attn.facts import LINES, Line

__all__ = ["LINES", "FlashAttn", "Line", "attn_dispatch_backends"]


@hookimpl
def attn_dispatch_backends() -> list[Backend]:
    """One backend for each line."""
    return [FlashAttn(line) for line in LINES]
