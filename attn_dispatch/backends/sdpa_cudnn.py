"""``sdpa_cudnn``: cuDNN's attention through torch."""

from __future__ import annotations

from typing import Any

import torch

from attn_dispatch.backend import Backend, Cost, Executable, Operands, dense_cost
from attn_dispatch.backends.sdpa import capability_reasons, is_causal_only
from attn_dispatch.capability import Capability, Limit, Reason
from attn_dispatch.ir.ops import AttentionOp

__all__ = ["SdpaCudnn"]

# As torch's own dispatcher asks before it takes this kernel (``sdp_utils.cpp``); the operator itself does not ask.
_DROPOUT_STEPS = 16  # the rate is rounded to this many steps, and the rest scaled for the one that was asked for
_NO_DROPOUT = range(91100, 91400)
_TILES_LENGTHS = 91501  # older ones read beyond lengths that are no multiple of 128 (pytorch issues 169849, 171627)
_MOST_HEADS = 65535


def _of_version(op: AttentionOp, version: int) -> list[Reason]:
    """What a version of cuDNN (91501 is 9.15.1) does not do; 0 is none, of which nothing is known."""
    found = []
    if op.dropout_p and version in _NO_DROPOUT:
        found.append(Reason("version", "cudnn", version, "without dropout", text=f"cuDNN {version} has no dropout"))
    if 0 < version < _TILES_LENGTHS and (op.Sq % 128 or op.Skv % 128):
        text = f"cuDNN {version} reads beyond Sq {op.Sq}, Skv {op.Skv}: no multiples of 128"
        found.append(Reason("version", "cudnn", version, f">= {_TILES_LENGTHS}", text=text))
    return found


class SdpaCudnn(Backend):
    """``aten::_scaled_dot_product_cudnn_attention``."""

    name = "sdpa_cudnn"
    tested = "untested"
    capabilities = (
        Capability(
            devices=frozenset({"cuda"}),
            dtypes=frozenset({"float16", "bfloat16"}),
            features=frozenset({"weight:Softmax", "mask:Full", "mask:Causal", "gqa", "dropout", "grad"}),
            limits=(
                *(Limit(name, minimum=1, maximum=_MOST_HEADS) for name in ("B", "Hq")),
                Limit("D", minimum=1),
                Limit("Sq", minimum=2),
                Limit("Skv", minimum=2),
                Limit("D", multiple_of=8, maximum=128),
            ),
            deterministic=False,
            notes="untested here; compute capability 8.0 to 12.1",
        ),
    )

    def extra_reasons(self, op: AttentionOp) -> list[Reason]:
        found = capability_reasons(op, (8, 0), (12, 1)) + _of_version(op, torch.backends.cudnn.version() or 0)
        if is_causal_only(op) and op.Sq != op.Skv:
            text = f"is_causal with Sq {op.Sq} != Skv {op.Skv}"
            found.append(Reason("limit", "Sq", op.Sq, op.Skv, "", text))
        if op.dropout_p and (op.dropout_p * _DROPOUT_STEPS) % 1:
            text = f"dropout_p {op.dropout_p:g} is no multiple of 1/{_DROPOUT_STEPS}: it would drop another share"
            found.append(Reason("limit", "dropout_p", op.dropout_p, f"multiples of 1/{_DROPOUT_STEPS}", text=text))
        return found  # what else is wrong on some machines is data: known_bad.yaml

    def compile(self, op: AttentionOp) -> Executable:
        kernel = torch._scaled_dot_product_cudnn_attention
        scale, causal, dropout_p, needs_lse = op.effective_scale, is_causal_only(op), op.dropout_p, bool(op.grad)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
            return kernel(q, k, v, None, needs_lse, dropout_p, causal, False, scale=scale)[0]

        return Executable(run)

    def estimate(self, op: AttentionOp) -> Cost:
        return dense_cost(op, 0.5 if is_causal_only(op) else 1.0)
