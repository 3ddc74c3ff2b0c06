"""What the tensors of an op are called in its bucket, which many calls share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attn_dispatch.ir.scores import Alibi, Bias, ScoreTerm
from attn_dispatch.ir.tensors import Ref

if TYPE_CHECKING:
    from attn_dispatch.ir.ops import AttentionOp

__all__ = ["named_by_role"]


def named_by_role(op: AttentionOp) -> AttentionOp:
    """The op with the tensors of its mask called mask0, mask1 ... and those of its biases bias0, bias1 ..., in order.

    The other tensors have one argument each, and so one name already.
    """
    names = {name: f"mask{i}" for i, name in enumerate(op.mask.refs())}
    added = [x.slopes if isinstance(x, Alibi) else x.bias for x in op.score if isinstance(x, (Alibi, Bias))]
    biases = dict.fromkeys(ref.name for ref in added if ref.name not in names)
    names |= {name: f"bias{i}" for i, name in enumerate(biases)}
    if all(old == new for old, new in names.items()):
        return op
    others = {name for name, _ in op.operands if name not in names}
    elsewhere = {ref.name for ref in (op.q_offset, *op.weight.refs()) if isinstance(ref, Ref)}
    if others & set(names.values()) or elsewhere & set(names):  # a stranger's op with names of its own: it keeps them
        return op

    def renamed(_where: str, operand: Any) -> Any:
        return Ref(names[operand.name]) if isinstance(operand, Ref) else operand

    def term_of(term: ScoreTerm) -> ScoreTerm:
        if isinstance(term, Alibi):
            return Alibi(Ref(names[term.slopes.name]))
        return Bias(Ref(names[term.bias.name])) if isinstance(term, Bias) else term

    return replace(
        op,
        mask=op.mask.map_operands(renamed),
        score=tuple(term_of(term) for term in op.score),
        operands=tuple((names.get(name, name), desc) for name, desc in op.operands),
        grad=tuple(names.get(name, name) for name in op.grad),
    )
