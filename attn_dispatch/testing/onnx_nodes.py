"""The node tests of the onnx wheel: small models with inputs and right outputs that nobody here wrote.

They are no files: the wheel computes them when its test modules are imported, from its own numpy reference. `load`
reads them once as frozen `NodeCase` s; `call` turns one of operator Attention into a call of `dispatch.attention`. The
operators next to it (LinearAttention, RotaryEmbedding, TensorScatter) are in `onnx_relatives`.

The mapping, rule by rule (ONNX Attention 23 to 25 as onnx 1.23 words it):

1. 3-D inputs ``[B, S, H * D]`` are unpacked by ``q_num_heads`` and ``kv_num_heads``, and the result is packed again.
2. past_key and past_value stand before key and value; query 0 stands behind them: ``q_offset`` is their length.
3. nonpad_kv_seqlen is ``key_lengths``; the last query stands at the last true key: ``q_offset = lengths - Sq``.
4. Without either ``q_offset`` is 0, also when Sq != Skv, for ``is_causal`` and for the windows alike.
5. A mask of rank 3 is ``[H, Sq, Skv]``; one shorter than the keys is padded with False or -inf.
6. ``left_window_size`` and ``right_window_size`` are ``window``; -1 is unbounded in both.
7. qk_matmul_output is no output of ours, except mode 3, the weights (`unanswered` says so by case).

An input or attribute outside these rules is an error: nothing of a test is dropped.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from attn_dispatch.errors import InputError

__all__ = [
    "MODULES",
    "TOLERANCES",
    "WITHOUT_EFFECT",
    "Call",
    "NodeCase",
    "answer",
    "call",
    "error_of",
    "load",
    "pack",
    "unanswered",
    "unpack",
]

# The module under onnx.backend.test.case.node that computes the tests of an operator.
MODULES = {
    "Attention": "attention",
    "LinearAttention": "linear_attention",
    "RotaryEmbedding": "rotaryembedding",
    "TensorScatter": "tensorscatter",
}

# rtol, atol by dtype. float32: a hundredth of what the tests ask, and zeros may be rounded. Half precision: the wheel
# rounds between the steps, we accumulate in float32; these are a few units in the last place of a sum of weights.
TOLERANCES = {torch.float32: (1e-5, 2e-6), torch.float16: (1e-2, 2e-3), torch.bfloat16: (3e-2, 2e-2)}

# Attributes that ask for nothing which `attention` could do otherwise, and why.
WITHOUT_EFFECT = {
    "q_num_heads": "used to unpack 3-D inputs",
    "kv_num_heads": "used to unpack 3-D inputs",
    "qk_matmul_output_mode": "says what qk_matmul_output is, see `unanswered`",
    "softmax_precision": "the least precision of the softmax; ours is float32, within the tolerance of float64",
}
_BETWEEN = "scores between the steps are no output of attention"
_MODES = {0: f"{_BETWEEN}: q k^T * scale", 1: f"{_BETWEEN}: after the softcap", 2: f"{_BETWEEN}: after bias and mask"}


@dataclass(frozen=True, eq=False)
class NodeCase:
    """One node test.

    Args:
        name: as the wheel calls it. op_type: the ONNX operator. opset: the version that the test was written for.
        inputs, outputs: tensors by the names of the operator's schema, those that the node has; ``"Y"``, ``"Q"``.
        attributes: those that the node sets.
        rtol, atol: what a result may differ by, from `TOLERANCES` by the dtype of the first output.
    """

    name: str
    op_type: str
    opset: int
    inputs: Mapping[str, torch.Tensor]
    attributes: Mapping[str, Any]
    outputs: Mapping[str, torch.Tensor]
    rtol: float
    atol: float

    @property
    def packed(self) -> bool:
        """Whether heads and features share one dimension, ``[B, S, H * D]``."""
        return next(iter(self.inputs.values())).ndim == 3


class Call(NamedTuple):
    """A node test as a call: ``dispatch.attention(query, key, value, **options)``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    options: dict[str, Any]


# --- loading ---------------------------------------------------------------------------------------------------------


@cache
def load(op_type: str = "Attention") -> tuple[NodeCase, ...]:
    """The node tests of an operator, by name, without the twins that spell out its function body.

    Costs half a second and leaves numpy's random state alone, which the wheel sets. The quick way reads a private list
    of the wheel; where that is gone, the public call loads the tests of all operators (8 s).

    Args:
        op_type: one of `MODULES`.

    Raises:
        ImportError: onnx is not installed. InputError: an operator without tests here or in this wheel.

    Example:
        >>> case = load("Attention")[0]
        >>> case.name
        'test_attention_23_boolmask_fullymasked_row_nan_robustness'
        >>> sorted(case.inputs), case.opset, case.outputs["Y"].dtype
        (['K', 'Q', 'V', 'attn_mask'], 23, torch.float32)
    """
    if op_type not in MODULES:
        raise InputError(f"no node tests are read for {op_type!r}", remedy=f"one of {', '.join(MODULES)}")
    import onnx

    tests = [test for test in _collect(op_type) if test.model.graph.node[0].op_type == op_type]
    if not tests:
        problem = f"onnx {onnx.__version__} gives no node tests for {op_type}"
        remedy = "onnx >= 1.23.2, in a process that has not called collect_testcases for one operator before"
        raise InputError(problem, remedy=remedy)
    unique = {test.name: _node_case(test) for test in tests}
    return tuple(unique[name] for name in sorted(unique))


def _collect(op_type: str) -> list[Any]:
    """All tests that the wheel has made so far, those of the operator among them."""
    import numpy

    state = numpy.random.get_state()
    try:
        cases = importlib.import_module("onnx.backend.test.case.node")
        try:
            importlib.import_module(f"onnx.backend.test.case.node.{MODULES[op_type]}")
            return list(cases._NodeTestCases)
        except (ImportError, AttributeError):  # the wheel has moved what is private
            return list(cases.collect_testcases())
    finally:
        numpy.random.set_state(state)


def _node_case(test: Any) -> NodeCase:
    from onnx import defs, helper

    node = test.model.graph.node[0]
    opset = next(o.version for o in test.model.opset_import if o.domain == node.domain)
    schema = defs.get_schema(node.op_type, opset, node.domain)
    arrays, results = test.data_sets[0]
    outputs = _named(schema.outputs, node.output, results)
    rtol, atol = TOLERANCES[next(iter(outputs.values())).dtype]
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    attributes = {name: x.decode() if isinstance(x, bytes) else x for name, x in attributes.items()}
    inputs = _named(schema.inputs, node.input, arrays)
    return NodeCase(test.name, node.op_type, opset, inputs, attributes, outputs, rtol, atol)


def _named(formal: Any, actual: Any, arrays: Any) -> dict[str, torch.Tensor]:
    """Tensors by the schema's names; an empty name in the node is an argument that is left out, and has no array."""
    given = [parameter.name for parameter, name in zip(formal, actual, strict=False) if name]
    return {name: _tensor(array) for name, array in zip(given, arrays, strict=True)}


def _tensor(array: Any) -> torch.Tensor:
    import numpy

    if array.dtype.name == "bfloat16":  # ml_dtypes' type, which torch does not know
        return torch.from_numpy(array.view(numpy.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(numpy.array(array, order="C"))


# --- Attention -------------------------------------------------------------------------------------------------------


def call(case: NodeCase) -> Call:
    """An Attention test as a call of `dispatch.attention`, by the rules at the top of this module.

    Returns:
        query ``[B, Hq, Sq, D]``, key ``[B, Hkv, Skv, D]``, value ``[B, Hkv, Skv, Dv]`` and the other arguments.

    Raises:
        InputError: another operator, or an input or attribute that no rule here knows.

    Example:
        >>> case = next(c for c in load() if c.name == "test_attention_4d_gqa_with_past_and_present")
        >>> made = call(case)
        >>> tuple(made.query.shape), tuple(made.key.shape), sorted(made.options)
        ((2, 9, 4, 8), (2, 3, 18, 8), ['attn_mask', 'enable_gqa'])
    """
    if case.op_type != "Attention":
        raise InputError(
            f"{case.name} tests {case.op_type}, not Attention", remedy="attn_dispatch.testing.onnx_relatives"
        )
    given, attributes = dict(case.inputs), dict(case.attributes)
    heads = attributes.get("q_num_heads", 0), attributes.get("kv_num_heads", 0)
    query, key, value = (given.pop(name) for name in ("Q", "K", "V"))
    if case.packed:
        query, key, value = unpack(query, heads[0]), unpack(key, heads[1]), unpack(value, heads[1])
    options: dict[str, Any] = {"enable_gqa": True}
    offset: int | torch.Tensor = 0
    if "past_key" in given:
        past = given.pop("past_key")
        key, value, offset = torch.cat([past, key], 2), torch.cat([given.pop("past_value"), value], 2), past.shape[2]
    if "nonpad_kv_seqlen" in given:
        options["key_lengths"] = given.pop("nonpad_kv_seqlen")
        offset = options["key_lengths"] - query.shape[2]
    if "attn_mask" in given:
        options["attn_mask"] = _padded(given.pop("attn_mask"), key.shape[2])
    window = attributes.pop("left_window_size", -1), attributes.pop("right_window_size", -1)
    if window != (-1, -1):
        options["window"] = window
    if attributes.pop("is_causal", 0):
        options["is_causal"] = True
    if "window" in options or "is_causal" in options:
        options["q_offset"] = offset
    scale, softcap = attributes.pop("scale", None), attributes.pop("softcap", 0.0)
    options |= ({} if scale is None else {"scale": scale}) | ({"softcap": softcap} if softcap else {})
    unknown = [*given, *(name for name in attributes if name not in WITHOUT_EFFECT)]
    if unknown:
        raise InputError(f"{case.name} has {', '.join(unknown)}, for which onnx_nodes.call has no rule")
    return Call(query, key, value, options)


def unpack(x: torch.Tensor, heads: int) -> torch.Tensor:
    """``[B, S, H * D]`` as ``[B, H, S, D]``."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def pack(x: torch.Tensor) -> torch.Tensor:
    """``[B, H, S, D]`` as ``[B, S, H * D]``."""
    return x.transpose(1, 2).flatten(2)


def _padded(mask: torch.Tensor, skv: int) -> torch.Tensor:
    missing = skv - mask.shape[-1]
    if missing:
        mask = F.pad(mask, (0, missing), value=False if mask.dtype == torch.bool else -torch.inf)
    return mask[None] if mask.ndim == 3 else mask


def answer(case: NodeCase, out: torch.Tensor) -> torch.Tensor:
    """What `attention` returned, ``[B, Hq, Sq, Dv]``, in the shape of the test's Y."""
    return pack(out) if case.packed else out


def unanswered(case: NodeCase) -> dict[str, str]:
    """The outputs of an Attention test that a call of `attention` does not give, and why.

    present_key and present_value are not among them: they are the key and value of `call`.

    Example:
        >>> sum(bool(unanswered(case)) for case in load())
        12
    """
    mode = case.attributes.get("qk_matmul_output_mode", 0)
    return {"qk_matmul_output": _MODES[mode]} if "qk_matmul_output" in case.outputs and mode in _MODES else {}


def error_of(case: NodeCase, got: torch.Tensor, name: str = "Y") -> float:
    """The largest error of a result in units of what it may differ by: at most 1.0 is right.

    Args:
        got: the result, in the shape of the test's output. name: which output it is.

    Returns:
        inf where shape or dtype differ, or a NaN or an infinity stands in one of the two alone.

    Example:
        >>> case = load()[0]
        >>> error_of(case, case.outputs["Y"]), error_of(case, case.outputs["Y"].double())
        (0.0, inf)
    """
    want = case.outputs[name]
    if got.shape != want.shape or got.dtype != want.dtype:
        return torch.inf
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    error = (got - want).abs() / (case.atol + case.rtol * want.abs())
    error = torch.where(same, 0.0, error.nan_to_num(nan=torch.inf, posinf=torch.inf))
    return float(error.max()) if error.numel() else 0.0
