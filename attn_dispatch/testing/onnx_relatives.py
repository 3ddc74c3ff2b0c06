"""The node tests of ONNX's operators next to Attention, run by what this package has for them.

========================  ==================================================  ======================================
operator                  by                                                  not expressed (`not_expressed`)
========================  ==================================================  ======================================
LinearAttention-27        ``variants.LinearAttention("identity", None)`` and  the delta rules: they subtract what the
                          its state; a decay per token is folded into query   state already holds for a key
                          and key
RotaryEmbedding-23        `attn_dispatch.nn.Rotary.turn` with the test's      nothing
                          tables
TensorScatter-24          `attn_dispatch.nn.KVCache.append` with lengths      mode circular: a `KVCache` that rolls
                                                                              keeps its keys in order
========================  ==================================================  ======================================

`run` answers a test with its outputs by name. Compare them with `onnx_nodes.error_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attn_dispatch import dispatch
from attn_dispatch.errors import InputError
from attn_dispatch.nn import KVCache, Rotary
from attn_dispatch.testing.onnx_nodes import NodeCase, pack, unpack
from attn_dispatch.variants import LinearAttention, LinearState

__all__ = ["NOT_EXPRESSED", "not_expressed", "run"]

_DELTA = "writes beta * (v - S^T k), what the state does not hold yet; a variant here adds k v^T whatever it holds"

# Why a test has no counterpart here, by operator, attribute and the attribute's value.
NOT_EXPRESSED: dict[tuple[str, str, Any], str] = {
    ("LinearAttention", "update_rule", "delta"): _DELTA,
    ("LinearAttention", "update_rule", "gated_delta"): _DELTA,
    ("TensorScatter", "mode", "circular"): "writes past the end to the front; KVCache(window=) keeps its keys in order",
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LinearAttention": {"update_rule": "gated_delta"},
    "TensorScatter": {"mode": "linear"},
}


def not_expressed(case: NodeCase) -> str:
    """Why nothing here computes this test; empty when something does.

    Example:
        >>> from attn_dispatch.testing.onnx_nodes import load
        >>> [case.name for case in load("TensorScatter") if not_expressed(case)]
        ['test_tensorscatter_circular']
    """
    attributes = _DEFAULTS.get(case.op_type, {}) | dict(case.attributes)
    reasons = [
        why for (op, name, value), why in NOT_EXPRESSED.items() if op == case.op_type and value == attributes[name]
    ]
    return "; ".join(reasons)


def run(case: NodeCase, backend: str | None = None) -> dict[str, torch.Tensor]:
    """Compute a test by what this package has for its operator.

    Args:
        case: of LinearAttention, RotaryEmbedding or TensorScatter. backend: for LinearAttention, as in `attention`.

    Returns:
        The test's outputs by name. Of a TensorScatter the rows that the cache has by its lengths; the others, which no
        query attends, are taken from the test.

    Raises:
        InputError: the test is not expressed here, or has an attribute that no rule here knows.

    Example:
        >>> from attn_dispatch.testing.onnx_nodes import error_of, load
        >>> case = load("RotaryEmbedding")[0]
        >>> error_of(case, run(case)["Y"]) <= 1.0
        True
    """
    runs: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        "LinearAttention": lambda: _linear(case, backend),
        "RotaryEmbedding": lambda: _rotary(case),
        "TensorScatter": lambda: _scatter(case),
    }
    if case.op_type not in runs:
        raise InputError(f"{case.name} tests {case.op_type}", remedy=f"one of {', '.join(runs)}, or onnx_nodes.call")
    if why := not_expressed(case):
        raise InputError(f"{case.name} has no counterpart: it {why}")
    return runs[case.op_type]()


def _linear(case: NodeCase, backend: str | None) -> dict[str, torch.Tensor]:
    """The rules linear and gated.

    A decay is ``exp(g_t)`` per token, head and perhaps feature, which multiplies the state before token t is added.
    With ``G`` the sum of g up to and with t, ``q_t * exp(G_t)`` and ``k_t * exp(-G_t)`` make it plain linear attention,
    and the last state is ``exp(G_T)`` times the plain one. Exact, and fit for short sequences: exp(-G) grows.
    """
    attributes = dict(case.attributes)
    rule, hq, hkv = (attributes.pop(name) for name in ("update_rule", "q_num_heads", "kv_num_heads"))
    scale = attributes.pop("scale", 0.0) or None
    attributes.pop("chunk_size", None)  # how long a piece to compute at once; no part of the result
    _no_more(case, attributes)
    given = case.inputs
    query, key, value = unpack(given["query"], hq), unpack(given["key"], hkv), unpack(given["value"], hkv)
    total = torch.zeros_like(key[..., :1])
    if rule == "gated":
        total = unpack(given["decay"], hkv).cumsum(2)  # [B, Hkv, T, 1] or [B, Hkv, T, D]
        query, key = query * total.exp().repeat_interleave(hq // hkv, 1), key * (-total).exp()
    state = LinearState(given["past_state"].float(), None, 0) if "past_state" in given else None
    found = dispatch.attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True, variant=LinearAttention("identity", None),
        state=state, return_state=True, backend=backend,
    )  # fmt: skip
    present = found.state.S * total[:, :, -1].exp()[..., None]
    return {"output": pack(found.out), "present_state": present.to(case.outputs["present_state"].dtype)}


def _rotary(case: NodeCase) -> dict[str, torch.Tensor]:
    attributes = dict(case.attributes)
    heads, dim, interleaved = (attributes.pop(n, 0) for n in ("num_heads", "rotary_embedding_dim", "interleaved"))
    _no_more(case, attributes)
    x = unpack(case.inputs["X"], heads) if case.packed else case.inputs["X"]
    at = case.inputs.get("position_ids")
    cos, sin = (case.inputs[name] for name in ("cos_cache", "sin_cache"))
    cos, sin = (table if at is None else table[at] for table in (cos, sin))  # [B, S, dim / 2]
    turned = Rotary(dim or x.shape[-1], interleaved=bool(interleaved)).turn(x, cos[:, None], sin[:, None])
    return {"Y": pack(turned) if case.packed else turned}


def _scatter(case: NodeCase) -> dict[str, torch.Tensor]:
    attributes = dict(case.attributes)
    attributes.pop("mode", None)
    if attributes.pop("axis", -2) != -2:
        raise InputError(f"{case.name} writes along axis {case.attributes['axis']}; a KVCache writes along axis -2")
    _no_more(case, attributes)
    past, update = (x if x.ndim == 4 else x[:, None] for x in (case.inputs["past_cache"], case.inputs["update"]))
    at = case.inputs["write_indices"]
    cache = KVCache(max_length=past.shape[2])
    cache.append(past, past, at)
    stored = cache.append(update, update)
    assert stored.key_lengths is not None
    want = case.outputs["present_cache"]
    present = (want if want.ndim == 4 else want[:, None]).clone()
    for row, length in enumerate(stored.key_lengths.tolist()):
        present[row, :, :length] = stored.key[row, :, :length]
    return {"present_cache": present if want.ndim == 4 else present[:, 0]}


def _no_more(case: NodeCase, attributes: dict[str, Any]) -> None:
    if attributes:
        raise InputError(f"{case.name} has {', '.join(attributes)}, for which onnx_relatives.run has no rule")
