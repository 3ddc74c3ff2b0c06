"""What every form of the lowering is made of: the call, its grid, mask, bias and scale as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from attn_dispatch.ir.atoms import Full
from attn_dispatch.ir.masks import Mask
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias, SoftCap
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.lowering.masks import Grid, allowed, key_columns
from attn_dispatch.lowering.nodes import Nodes, Value
from attn_dispatch.lowering.target import Target

__all__ = ["Call", "Results", "accumulated", "needs_wide_scores"]


@dataclass(frozen=True)
class Results:
    """The values of an op's results; those of a state when it returns one."""

    out: Value
    lse: Value | None = None
    weights: Value | None = None
    state: tuple[Value, ...] = ()

    def flat(self) -> tuple[Value, ...]:
        """Those that are there, in the order in which `torch_op` returns them."""
        return tuple(x for x in (self.out, self.lse, self.weights, *self.state) if x is not None)


@dataclass(frozen=True)
class Call:
    """An op with the values of its tensors.

    Args:
        query, key, value: ``[B, H, S, D]``; operands: by name.
    """

    op: AttentionOp
    query: Value
    key: Value
    value: Value
    operands: Mapping[str, Value]
    nodes: Nodes
    target: Target

    @cached_property
    def batch(self) -> Value:
        """B, int64 ``[1]``."""
        return self.nodes.size(self.query, 0)

    @cached_property
    def sq(self) -> Value:
        """Sq, int64 ``[1]``."""
        return self.nodes.size(self.query, 2)

    @cached_property
    def skv(self) -> Value:
        """Skv, int64 ``[1]``."""
        return self.nodes.size(self.key, 2)

    @cached_property
    def grid(self) -> Grid:
        """The positions of the call."""
        return Grid.of(self.op, self.nodes, self.batch, self.sq, self.skv, self.operands)

    @cached_property
    def allowed(self) -> Value | None:
        """The mask, bool, broadcastable to ``[B, Hq, Sq, Skv]``; None when every pair attends."""
        return None if isinstance(self.op.mask, Full) else self.allowed_by(self.op.mask)

    def allowed_by(self, mask: Mask) -> Value:
        """The pairs of a mask at this call's positions."""
        return allowed(mask, self.grid)

    @property
    def softcap(self) -> float:
        """The soft cap, 0 for none."""
        return next((term.cap for term in self.op.score if isinstance(term, SoftCap)), 0.0)

    @property
    def sinks(self) -> str | None:
        """The name of the sinks."""
        weight = self.op.weight
        return weight.sinks.name if isinstance(weight, Softmax) and weight.sinks is not None else None

    def operand(self, name: str, dtype: str) -> Value:
        """An operand in a dtype."""
        return self.nodes.cast(self.operands[name], self.op.operand(name).dtype, dtype)

    def bias(self, dtype: str) -> Value | None:
        """The sum of all biases, ALiBi among them, broadcastable to ``[B, Hq, Sq, Skv]``."""
        n, total = self.nodes, None
        for term in self.op.score:
            if isinstance(term, Bias):
                part = self.operand(term.bias.name, dtype)
            elif isinstance(term, Alibi):
                slopes = n("Reshape", self.operand(term.slopes.name, dtype), n.const([-1, 1, 1]))
                distance = n("Abs", n("Sub", self.grid.queries, self.grid.keys))
                part = n("Neg", n("Mul", slopes, n.cast(distance, "int64", dtype)))
            else:
                continue
            total = part if total is None else n("Add", total, part)
        return total

    def inputs(self, dtype: str) -> tuple[Value, Value, Value]:
        """Query, key and value in a dtype; a key that no query may attend is 0, so that no NaN in it shows."""
        n, columns = self.nodes, key_columns(self.op)
        q, k, v = (n.cast(x, self.op.dtype, dtype) for x in (self.query, self.key, self.value))
        if columns is None or not self.target.hides:
            return q, k, v
        keep = n("Transpose", self._four(allowed(columns, self.grid)), perm=[0, 1, 3, 2])
        zero = n.const(0, dtype)
        return q, n("Where", keep, k, zero), n("Where", keep, v, zero)

    def _four(self, mask: Value) -> Value:
        n = self.nodes
        result: Value = n("Expand", mask, n.const([1, 1, 1, 1]))
        return result


def accumulated(dtype: str) -> str:
    """The dtype in which sums are taken."""
    return "float64" if dtype == "float64" else "float32"


def needs_wide_scores(op: AttentionOp) -> bool:
    """Whether a bias would lose digits in the dtype of the query."""
    if op.dtype not in ("float16", "bfloat16"):
        return False
    biases = [op.operand(term.bias.name).dtype for term in op.score if isinstance(term, Bias)]
    return any(isinstance(term, Alibi) for term in op.score) or any(dtype != op.dtype for dtype in biases)
