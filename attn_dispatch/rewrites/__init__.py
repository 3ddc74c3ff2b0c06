"""Rewrites: other forms of an op, exact up to rounding, each a candidate like any other.

A chain applies rewrites from the outside in, in the order of this list, at most `MAX_CHAIN` of them. Why this order:
what drops work that nobody sees comes first (padding, other documents, keys out of the band), then what changes the
shape of what is left (groups, parts, dtypes, head sizes), and the mask is only made dense when nothing else is left
to say about it.
"""

from __future__ import annotations

from attn_dispatch.registry.hookspecs import hookimpl
from attn_dispatch.rewrites.base import Rewrite, Rewritten

__all__ = ["MAX_CHAIN", "Rewrite", "Rewritten", "attn_dispatch_rewrites"]

MAX_CHAIN = 3


@hookimpl
def attn_dispatch_rewrites() -> list[Rewrite]:
    """All built-in rewrites, outermost first."""
    from attn_dispatch.rewrites.bands import Bands, TileQueries
    from attn_dispatch.rewrites.densify_mask import DensifyMask
    from attn_dispatch.rewrites.fold_groups import FoldGroups
    from attn_dispatch.rewrites.gather import Gather
    from attn_dispatch.rewrites.gather_blocks import GatherBlocks
    from attn_dispatch.rewrites.gather_columns import GatherColumns
    from attn_dispatch.rewrites.lattice import ResidueClasses, SameBlocks
    from attn_dispatch.rewrites.materialise_bias import MaterialiseBias
    from attn_dispatch.rewrites.merge_parts import ApplySinks, MergeParts
    from attn_dispatch.rewrites.pad_head_dim import PadHeadDim
    from attn_dispatch.rewrites.split_segments import SplitSegments
    from attn_dispatch.rewrites.trim_lengths import TrimLengths
    from attn_dispatch.rewrites.upcast import Upcast

    return [
        TrimLengths(),
        SplitSegments(),
        SameBlocks(),
        ResidueClasses(),
        GatherColumns(),
        Bands(),
        TileQueries(),
        Gather(),
        ApplySinks(),
        GatherBlocks(),
        MaterialiseBias(),
        FoldGroups(),
        MergeParts(),
        Upcast(),
        PadHeadDim(),
        DensifyMask(),
    ]
