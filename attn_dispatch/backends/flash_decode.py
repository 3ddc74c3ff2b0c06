"""``flash_decode``: this package's own kernel for few query rows over many keys, in C++, on the CPU.

A decode step reads each key once and computes little with it. torch's fused CPU kernel reads the keys of a group once
for each of its heads, takes one thread for each head, and is slow at half precision; two matrix products write the
scores out between them. `attn_dispatch/native/decode.h` does neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial, reduce
from typing import Any

import torch

from attn_dispatch import native, reference, tiling
from attn_dispatch.backend import Backend, Cost, Executable, Operands, Raw, Run, dense_cost
from attn_dispatch.backends.sdpa import MASK_FEATURES, boolean_mask, mask_parts
from attn_dispatch.capability import Capability, Limit, Reason
from attn_dispatch.ir.atoms import Causal, KeyLengths, Window
from attn_dispatch.ir.masks import And
from attn_dispatch.ir.operands import resolve
from attn_dispatch.ir.ops import END, AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias, SoftCap
from attn_dispatch.ir.tensors import Ref
from attn_dispatch.ir.weights import Softmax

__all__ = ["FlashDecode"]

_MOST_ROWS = 64  # from 16 on matrix products are as fast; so many are still worth the memory of a thread
_KERNEL = 1  # its version: what was measured with another is measured anew
_FEW_ROWS = 8  # of a group: what the rates of the other backends promise they reach with many rows alone
_FEATURES = MASK_FEATURES | {"mask:Window", "q_offset:nonzero", "q_offset:tensor", "score:SoftCap", "score:Bias"}
_FEATURES |= {"score:Alibi", "weight:Softmax", "sinks", "gqa", "dv_differs", "lse", "scale<=0"}


class FlashDecode(Backend):
    """Keys split among the threads, read once for the heads of a group (Flash-Decoding, Dao et al. 2023)."""

    name = "flash_decode"
    tested = "cpu"
    hints = {  # noqa: RUF012
        "weights": 'backend="eager"',
        "grad": 'backend="sdpa_flash"',
        "dtype": 'backend="blocked"',
        "scattered": "call .contiguous() on it",
    }
    capabilities = (
        Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({"float16", "bfloat16", "float32"}),
            features=_FEATURES,
            limits=(
                *(Limit(name, minimum=1) for name in ("B", "Hq", "Sq", "Skv", "D", "Dv")),
                Limit("Sq", maximum=_MOST_ROWS, hint='backend="sdpa_flash"'),
            ),
            hides_nan=True,
            notes="in C++, there after `attn-dispatch build`; forward only; seen with AVX2 alone; tensors that wrap "
            "others, and calls under a dispatch mode, run in eager",
        ),
    )

    def version(self) -> str:
        return f"{_KERNEL} on torch {torch.__version__}"

    def unavailable(self) -> Reason | None:
        built = native.decode()
        return None if built.module is not None else Reason("version", "decode.cpp", None, "built", text=built.why)

    def extra_reasons(self, op: AttentionOp) -> list[Reason]:
        kinds = [type(term) for term in op.score]
        if SoftCap not in kinds[1:] and kinds.count(Alibi) <= 1:
            return []
        order = " then ".join(map(str, op.score))
        text = f"scores of {order}; takes one soft cap before all else, and slopes once"
        return [Reason("limit", "score", order, "SoftCap, Bias, Alibi", 'backend="eager"', text)]

    def compile(self, op: AttentionOp) -> Executable:
        return Executable(_compile(op))

    def estimate(self, op: AttentionOp) -> Cost:
        cost, (_, seen) = dense_cost(op), tiling.key_span(op, op.Sq)
        visited = 1.0 if op.static_offset() is None else seen / op.Skv
        return Cost(cost.flops * visited * max(1.0, op.groups * op.Sq / _FEW_ROWS), cost.bytes * visited, 1.0)


def _compile(op: AttentionOp) -> Run:
    module = native.decode().module
    assert module is not None
    decode, scale, wants_lse = module.decode, op.effective_scale, op.outputs.lse
    cap = next((term.cap for term in op.score if isinstance(term, SoftCap)), None)
    offset = None if op.q_offset == END or isinstance(op.q_offset, Ref) else int(op.q_offset)
    parts = mask_parts(op)
    windows = [Window(None, 0) if isinstance(part, Causal) else part for part in parts]
    left, right = (_nearest(getattr(x, side) for x in windows if isinstance(x, Window)) for side in ("left", "right"))
    lengths = [part for part in parts if isinstance(part, KeyLengths)]
    kept = [part for part in parts if not isinstance(part, (Causal, Window, KeyLengths))]
    keep_of = boolean_mask(op.with_(mask=And.of(*kept))) if kept else None
    offsets = op.q_offset.name if isinstance(op.q_offset, Ref) else None
    biases = [term.bias.name for term in op.score if isinstance(term, Bias)]
    slopes = next((term.slopes.name for term in op.score if isinstance(term, Alibi)), None)
    sinks = op.weight.sinks.name if isinstance(op.weight, Softmax) and op.weight.sinks is not None else None

    def by_operators(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        raw = reference.attention(op, q, k, v, t)
        return raw if wants_lse else raw.out

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        result = decode(
            *(q, k, v, scale, cap, left, right, offset, wants_lse),
            None if offsets is None else t[offsets],
            _least(lengths, t),
            None if keep_of is None else keep_of(q, k, t),
            _sum([t[name] for name in biases]),
            None if slopes is None else t[slopes],
            None if sinks is None else t[sinks],
        )
        if result is NotImplemented:
            return by_operators(q, k, v, t)
        return Raw(*result) if wants_lse else result

    if wants_lse or offsets or lengths or kept or biases or slopes or sinks:
        return run
    return partial(module.plain, by_operators, scale, cap, left, right, offset)


def _nearest(limits: Iterable[int | None]) -> int | None:
    """The tightest of some distances; None is no limit."""
    return min((n for n in limits if n is not None), default=None)


def _least(lengths: list[KeyLengths], t: Operands) -> torch.Tensor | None:
    return reduce(torch.minimum, (resolve(part.lengths, t, "cpu") for part in lengths)) if lengths else None


def _sum(biases: list[torch.Tensor]) -> torch.Tensor | None:
    return reduce(torch.add, (x.float() for x in biases)) if biases else None
