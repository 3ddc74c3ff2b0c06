"""Everything that a plugin may import, and the only module that it needs besides `attn_dispatch.testing`.

A backend: inherit `Backend`, state its `capabilities`, return an `Executable` from ``compile``. A rewrite: inherit
`Rewrite`, return `Rewritten` or a `Reason` from ``apply``. Offer them from functions marked `hookimpl`; their names
are in `attn_dispatch.registry.hookspecs`. Names not here may change without notice.

Example:
    >>> from attn_dispatch.plugin import Backend, Capability, Executable, hookimpl
    >>> class Mine(Backend):
    ...     name = "mine"
    ...     capabilities = (Capability(frozenset({"cpu"}), frozenset({"float32"}), frozenset({"weight:Softmax"})),)
    >>> @hookimpl
    ... def attn_dispatch_backends():
    ...     return [Mine()]
"""

from __future__ import annotations

from attn_dispatch.backend import Backend, Cost, Executable, Operands, Raw, Run, dense_cost
from attn_dispatch.capability import Capability, Limit, Reason
from attn_dispatch.errors import BackendError
from attn_dispatch.ir import (
    EMPTY,
    END,
    FULL,
    PARTIAL,
    Alibi,
    AttentionOp,
    Bias,
    Linear,
    Mask,
    Outputs,
    Ref,
    ScoreTerm,
    SelectOp,
    SoftCap,
    Softmax,
    TensorDesc,
    Weight,
    bucket,
    verify,
    verify_select,
)
from attn_dispatch.ir.atoms import (
    BlockTable,
    Causal,
    Columns,
    Dense,
    Full,
    KeyLengths,
    KeyRange,
    QueryLengths,
    Rows,
    SameBlock,
    Segments,
    Selected,
    Stride,
    Window,
)
from attn_dispatch.ir.masks import And, Not, Or
from attn_dispatch.registry.hookspecs import hookimpl
from attn_dispatch.rewrites.base import Rewrite, Rewritten, not_useful
from attn_dispatch.state import LinearState

__all__ = [
    "ALL_FEATURES",
    "EMPTY",
    "END",
    "FULL",
    "PARTIAL",
    "Alibi",
    "And",
    "AttentionOp",
    "Backend",
    "BackendError",
    "Bias",
    "BlockTable",
    "Capability",
    "Causal",
    "Columns",
    "Cost",
    "Dense",
    "Executable",
    "Full",
    "KeyLengths",
    "KeyRange",
    "Limit",
    "Linear",
    "LinearState",
    "Mask",
    "Not",
    "Operands",
    "Or",
    "Outputs",
    "QueryLengths",
    "Raw",
    "Reason",
    "Ref",
    "Rewrite",
    "Rewritten",
    "Rows",
    "Run",
    "SameBlock",
    "ScoreTerm",
    "Segments",
    "SelectOp",
    "Selected",
    "SoftCap",
    "Softmax",
    "Stride",
    "TensorDesc",
    "Weight",
    "Window",
    "bucket",
    "dense_cost",
    "hookimpl",
    "not_useful",
    "verify",
    "verify_select",
]

# The words of this version of the plugin API. It never grows: a backend that claims all of them does not claim a word
# that the IR learns later, which would be dropped where it must be refused.
ALL_FEATURES = frozenset(
    """
    combine:And combine:Not combine:Or decay dropout dv_differs empty gqa grad grad:lse grad:operands higher_order lse
    mask:BlockTable mask:Causal mask:Columns mask:Dense mask:Full mask:KeyLengths mask:KeyRange mask:Not
    mask:QueryLengths mask:Rows mask:SameBlock mask:Segments mask:Selected mask:Stride mask:Window q_offset:nonzero
    q_offset:tensor scale<=0 scattered score:Alibi score:Bias score:SoftCap sinks state:in state:out traced
    weight:Linear weight:Softmax weights
    """.split()  # noqa: SIM905 - a table to read
)
