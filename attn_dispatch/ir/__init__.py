"""The intermediate representation: frozen, hashable values without tensors.

`ops` (AttentionOp), `select_op` (SelectOp), `masks` and `atoms` (the mask algebra), `scores`, `weights`, `tensors`.
"""

from attn_dispatch.ir.masks import EMPTY, FULL, PARTIAL, Mask
from attn_dispatch.ir.ops import END, AttentionOp, Outputs, bucket, verify
from attn_dispatch.ir.scores import Alibi, Bias, ScoreTerm, SoftCap
from attn_dispatch.ir.select_op import SelectOp, verify_select
from attn_dispatch.ir.tensors import Ref, TensorDesc
from attn_dispatch.ir.weights import Linear, Softmax, Weight

__all__ = [
    "EMPTY",
    "END",
    "FULL",
    "PARTIAL",
    "Alibi",
    "AttentionOp",
    "Bias",
    "Linear",
    "Mask",
    "Outputs",
    "Ref",
    "ScoreTerm",
    "SelectOp",
    "SoftCap",
    "Softmax",
    "TensorDesc",
    "Weight",
    "bucket",
    "verify",
    "verify_select",
]
