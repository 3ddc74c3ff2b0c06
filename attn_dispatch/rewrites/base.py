"""What a rewrite is: another form of an op, with adapters for what goes in and comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from attn_dispatch.backend import Cost, Run
from attn_dispatch.capability import Reason
from attn_dispatch.ir.ops import AttentionOp

__all__ = ["Rewrite", "Rewritten", "not_useful"]


@dataclass(frozen=True)
class Rewritten:
    """The other form.

    Args:
        inner: the op that the next rewrite or the backend gets; for a loop, its largest turn.
        adapt: turns the inner ``run`` into the outer one.
        repeat: how often the inner op runs.
        extra: what the adapters cost beside it.
        cuts_excluded: keys that the outer mask excludes and the inner one does not know are not handed on, so that
            nothing in them can leak.
    """

    inner: AttentionOp
    adapt: Callable[[Run], Run]
    repeat: float = 1.0
    extra: Cost = field(default_factory=lambda: Cost(launches=0.0))
    cuts_excluded: bool = False


class Rewrite:
    """Base class of rewrites: exact up to rounding, legal where `apply` says so.

    Attributes:
        name: unique; it stands in candidate names, ``fold_groups > sdpa_flash``.
        order: place in a chain; a chain is written outermost first and goes up in this number.
        carries_state: whether it hands on the state of the linear family, in and out; an op with one is kept from all
            others.
    """

    name: str = ""
    order: int = 0
    carries_state: bool = False

    def apply(self, op: AttentionOp) -> Rewritten | Reason:
        """The other form, or the reason why there is none or why it is of no use."""
        raise NotImplementedError


def not_useful(text: str) -> Reason:
    """The reason of a rewrite that has nothing to do here."""
    return Reason("not_useful", "rewrite", text=text)
