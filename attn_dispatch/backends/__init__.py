"""The built-in backends, registered through the same hook as a stranger's plugin."""

from __future__ import annotations

from pathlib import Path

from attn_dispatch.backend import Backend
from attn_dispatch.registry.hookspecs import hookimpl

__all__ = ["attn_dispatch_backends", "attn_dispatch_known_bad"]


@hookimpl
def attn_dispatch_known_bad() -> list[str]:
    """The file of what is known to be wrong in backends of this package and of others."""
    return [str(Path(__file__).parents[1] / "known_bad.yaml")]


@hookimpl
def attn_dispatch_backends() -> list[Backend]:
    """All built-in backends. Importing them imports torch and nothing else."""
    from attn_dispatch.backends.blocked import Blocked
    from attn_dispatch.backends.eager import Eager
    from attn_dispatch.backends.flash_decode import FlashDecode
    from attn_dispatch.backends.flex import Flex
    from attn_dispatch.backends.linear import LinearBackend
    from attn_dispatch.backends.onnxruntime import OnnxRuntime
    from attn_dispatch.backends.sdpa_cudnn import SdpaCudnn
    from attn_dispatch.backends.sdpa_efficient import SdpaEfficient
    from attn_dispatch.backends.sdpa_flash import SdpaFlash
    from attn_dispatch.backends.sdpa_math import SdpaMath

    return [
        SdpaFlash(),
        SdpaCudnn(),
        SdpaEfficient(),
        SdpaMath(),
        FlashDecode(),
        Blocked(),
        LinearBackend(),
        OnnxRuntime(),
        Flex(),
        Eager(),
    ]
