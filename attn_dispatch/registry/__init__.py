"""Backends and rewrites: which there are, where each came from, and what could not be loaded."""

from attn_dispatch.registry.discover import Quarantined, Registry, current, reset

__all__ = ["Quarantined", "Registry", "current", "reset"]
