"""The one lowering from the IR to ONNX nodes: the onnxruntime backend and the exporter both call `lower`.

Every length is taken as unknown until the model runs: an op is read for its kinds and fixed sizes (heads, head sizes,
sizes of 1), never for its lengths. `reasons_against` says why a form cannot express an op; `lower` is called when it
says nothing.

==============  ===================================================================================================
standard        Attention of opset 23 or 24. Masks by attribute (`is_causal`), by key lengths (`nonpad_kv_seqlen`)
                or as a tensor; a window never as the attribute that opset 25 got after its release. Sinks are one more
                key with a value of 0. No log-sum-exp
decomposed      MatMul, Softmax and what is between, opset 18 and newer. GQA folds the group into query rows, so no key
                is repeated; sums in float32; empty rows are 0
contrib         com.microsoft, see `contrib`
function        the decomposed form as the body of a function of the domain ``attn_dispatch``
==============  ===================================================================================================
"""

from __future__ import annotations

from collections.abc import Mapping

from attn_dispatch.capability import Reason
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.weights import Linear
from attn_dispatch.lowering import contrib, decomposed, linear, standard
from attn_dispatch.lowering.masks import KNOWN_ATOMS
from attn_dispatch.lowering.nodes import Nodes, Value
from attn_dispatch.lowering.parts import Call, Results
from attn_dispatch.lowering.target import FORMS, Target

__all__ = ["FORMS", "Results", "Target", "lower", "reasons_against"]


def reasons_against(op: AttentionOp, target: Target) -> list[Reason]:
    """Why this op cannot be lowered for this target; empty when it can."""
    reasons = []
    if op.dropout_p > 0:
        text = f"dropout {op.dropout_p:g}: a model runs without it"
        reasons.append(Reason("feature", "dropout", op.dropout_p, 0.0, "model.eval()", text))
    for atom in op.mask.atoms():
        if type(atom) not in KNOWN_ATOMS:
            text = f"mask {type(atom).__name__} has no ONNX form"
            reasons.append(Reason("feature", atom.feature, str(atom), "the masks of attn_dispatch.masks", text=text))
    if isinstance(op.weight, Linear):
        return reasons + linear.reasons_against(op, target)
    return reasons + _SOFTMAX[target.form].reasons_against(op, target)


def lower(op: AttentionOp, inputs: tuple[Value, Value, Value], operands: Mapping[str, Value], nodes: Nodes,
          target: Target) -> Results:  # fmt: skip
    """Make the nodes of an op.

    Args:
        op: described; its lengths are not looked at.
        inputs: query ``[B, Hq, Sq, D]``, key ``[B, Hkv, Skv, D]``, value ``[B, Hkv, Skv, Dv]``.
        operands: the op's operands by name.
        nodes: what makes the nodes.
        target: the form, and what the runtime is known to do right.

    Returns:
        The values of out ``[B, Hq, Sq, Dv]``, lse and weights, as the op wants them.
    """
    call = Call(op, *inputs, operands, nodes, target)
    if isinstance(op.weight, Linear):
        return linear.lower(call)
    return _SOFTMAX[target.form].lower(call)


_SOFTMAX = {"standard": standard, "decomposed": decomposed, "contrib": contrib, "function": decomposed}
