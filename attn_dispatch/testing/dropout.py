"""Dropout has no golden: what can be said of it is said by the gate, on small problems of the contract suite."""

from __future__ import annotations

import torch

from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.tensors import TensorDesc
from attn_dispatch.passes import canonicalise
from attn_dispatch.registry import Registry
from attn_dispatch.selection import gate_dropout
from attn_dispatch.selection.samples import golden, make_sample

__all__ = ["dropout_problem"]

_TRIED = (("float32", 0.1), ("float32", 0.5), ("bfloat16", 0.1), ("bfloat16", 0.01))


def dropout_problem(backend: str, registry: Registry) -> str:
    """What is wrong with a backend's dropout; empty when nothing is. The random state is left as it was.

    Args:
        backend: its name, of one that declares dropout on the CPU. registry: where it is registered.
    """
    thing = registry.backend(backend)
    capability = thing.capability_on("cpu")
    grad = ("query", "key", "value") if "grad" in capability.features else ()
    tried = [(dtype, p) for dtype, p in _TRIED if dtype in capability.dtypes]
    for dtype, p in tried or [(min(capability.dtypes), 0.1)]:
        x = TensorDesc((2, 4, 64, 64), dtype)
        op, _ = canonicalise(AttentionOp(x, x, x, dropout_p=p, grad=grad))
        if reasons := thing.reasons_against(op):
            return f"it declares dropout and refuses a plain case of it: {reasons[0]}"
        sample = make_sample(op, "typical", seed=3)
        with torch.random.fork_rng(devices=[]):
            problem, _ = gate_dropout.dropout_problem(op, thing.compile(op).run, sample, golden(op, sample).out)
        if problem:
            return f"{problem} ({dtype}, dropout_p {p:g})"
    return ""
