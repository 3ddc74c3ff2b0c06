"""The Attention node tests that ship in the onnx wheel, as an oracle that nobody here wrote.

Only the output Y is compared: ``qk_matmul_output`` (scores before, between or after the steps) is no output of ours,
and present_key and present_value are the concatenation that this file makes itself.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from attn_dispatch import NoBackendError, dispatch

onnx = pytest.importorskip("onnx", minversion="1.23.2")
numpy = pytest.importorskip("numpy")

COUNT = 93  # Attention node tests in the onnx 1.23.2 wheel
BACKENDS = ("eager", "sdpa_math", "sdpa_flash", None)
TOLERANCE = {"float32": (1e-3, 1e-5), "float16": (1e-2, 2e-3), "bfloat16": (3e-2, 2e-2)}  # rtol, atol; research/onnx.md

# Cases that `attention` cannot express, and why. Data, so that nothing leaves silently; the counts below hold it.
LEFT_OUT: dict[str, str] = {}

# What each backend verifies and refuses of the COUNT; a change in either direction is looked at.
# The fused kernels have no softcap, which 11 tests use; the dispatcher runs those elsewhere.
VERIFIED = {"eager": 93, "sdpa_math": 82, "sdpa_flash": 82, None: 93}


@dataclass
class Node:
    """One node test as a call of `attention`."""

    name: str
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    options: dict[str, Any]
    expected: torch.Tensor
    heads: int = 0  # query heads of a 3-D test, whose result is [B, L, H * D]
    words: set[str] = field(default_factory=set)


def _test_cases() -> list[Any]:
    """All Attention node tests, without the expanded twins."""
    try:  # 0.4 s; the public call imports the tests of all operators and takes 8 s
        module = importlib.import_module("onnx.backend.test.case.node")
        importlib.import_module("onnx.backend.test.case.node.attention")
        found = list(module._NodeTestCases)
    except (ImportError, AttributeError):
        from onnx.backend.test.case.node import collect_testcases

        found = list(collect_testcases("Attention"))
    unique = {case.name: case for case in found if case.model.graph.node[0].op_type == "Attention"}
    return [unique[name] for name in sorted(unique) if not name.endswith("_expanded")]


def _tensor(array: Any) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(numpy.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(numpy.ascontiguousarray(array))


def _heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2) if x.ndim == 3 else x


def _mask(mask: torch.Tensor, skv: int) -> torch.Tensor:
    """ONNX's mask as `attention` takes it: padded to all keys; rank 3, which ONNX reads as [H, L, S], as rank 4."""
    missing = skv - mask.shape[-1]
    if missing:
        mask = torch.nn.functional.pad(mask, (0, missing), value=False if mask.dtype == torch.bool else -torch.inf)
    return mask[None] if mask.ndim == 3 else mask


def as_call(case: Any) -> Node:
    """Map a node's inputs and attributes to the arguments of `dispatch.attention`."""
    node = case.model.graph.node[0]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    arrays, outputs = case.data_sets[0]
    fed = iter(arrays)
    names = ("q", "k", "v", "mask", "past_key", "past_value", "nonpad")
    given = {n: _tensor(next(fed)) for n, x in zip(names, node.input, strict=False) if x}
    words = {*given, *attributes}
    q, k, v = given["q"], given["k"], given["v"]
    hq, hkv = attributes.get("q_num_heads", 0), attributes.get("kv_num_heads", 0)
    packed = hq if q.ndim == 3 else 0
    q, k, v = _heads(q, hq), _heads(k, hkv), _heads(v, hkv)
    offset: int | torch.Tensor = 0
    if "past_key" in given:
        k, v = torch.cat([given["past_key"], k], 2), torch.cat([given["past_value"], v], 2)
        offset = given["past_key"].shape[2]
    options: dict[str, Any] = {"enable_gqa": True}
    if "nonpad" in given:
        options["key_lengths"] = given["nonpad"]
        offset = given["nonpad"] - q.shape[2]
    if "mask" in given:
        options["attn_mask"] = _mask(given["mask"], k.shape[2])
    left, right = attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)
    if (left, right) != (-1, -1):
        options["window"] = (left, right)
    if attributes.get("is_causal"):
        options["is_causal"] = True
    if {"window", "is_causal"} & set(options):
        options["q_offset"] = offset
    if attributes.get("scale") is not None:
        options["scale"] = attributes["scale"]
    if attributes.get("softcap"):
        options["softcap"] = attributes["softcap"]
    return Node(case.name, (q, k, v), options, _tensor(outputs[0]), packed, words)


@functools.cache
def nodes() -> dict[str, Node]:
    return {case.name: as_call(case) for case in _test_cases() if case.name not in LEFT_OUT}


def run(node: Node, backend: str | None) -> torch.Tensor:
    out = dispatch.attention(*node.arguments, **node.options, backend=backend)
    return out.transpose(1, 2).flatten(2) if node.heads else out


@functools.cache
def verdicts(backend: str | None) -> dict[str, str]:
    """``"verified"``, ``"refused: why"`` or ``"wrong: how"`` by test name."""
    found = {}
    for name, node in nodes().items():
        try:
            out = run(node, backend)
        except NoBackendError as error:
            reasons = error.refusals.get(backend or "", [])
            found[name] = f"refused: {'; '.join(map(str, reasons))}" if reasons else f"wrong: no reason in {error}"
            continue
        found[name] = _compare(out, node.expected)
    return found


def _compare(out: torch.Tensor, expected: torch.Tensor) -> str:
    rtol, atol = TOLERANCE[str(expected.dtype).removeprefix("torch.")]
    try:
        torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)
    except AssertionError as error:
        return f"wrong: {error}"
    return "verified"


def test_the_wheel_has_the_node_tests_and_only_the_listed_ones_are_left_out():
    names = {case.name for case in _test_cases()}
    assert len(names) == COUNT
    assert set(LEFT_OUT) <= names
    assert len(nodes()) == COUNT - len(LEFT_OUT)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_every_node_test_is_verified_or_refused_with_a_reason(backend):
    wrong = [f"{name}: {verdict}" for name, verdict in verdicts(backend).items() if verdict.startswith("wrong")]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_the_number_of_verified_node_tests_is_known(backend):
    found = verdicts(backend)
    refused = {name: verdict for name, verdict in found.items() if verdict.startswith("refused")}
    assert sum(verdict == "verified" for verdict in found.values()) == VERIFIED[backend], refused
    assert all("softcap" in nodes()[name].words and "softcap" in why for name, why in refused.items()), refused


def test_the_node_tests_cover_what_they_are_here_for():
    def count(word: str) -> int:
        return sum(word in node.words for node in nodes().values())

    shapes = sum(node.arguments[0].shape[1] != node.arguments[1].shape[1] for node in nodes().values())
    packed = sum(bool(node.heads) for node in nodes().values())
    seen = {word: count(word) for word in ("mask", "past_key", "nonpad", "softcap", "scale")}
    seen |= {"gqa": shapes, "packed": packed, "window": sum("window" in node.options for node in nodes().values())}
    seen |= {"causal": sum("is_causal" in node.options for node in nodes().values())}
    assert seen == {
        "mask": 52, "past_key": 21, "nonpad": 13, "softcap": 11, "scale": 6, "gqa": 17, "packed": 25, "window": 10,
        "causal": 32,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("causal offset", lambda o: {**o, "q_offset": o["q_offset"] + 1} if "q_offset" in o else None),
        ("scale", lambda o: {**o, "scale": 1.0}),
        ("softcap", lambda o: {n: x for n, x in o.items() if n != "softcap"} if "softcap" in o else None),
        ("mask", lambda o: {n: x for n, x in o.items() if n != "attn_mask"} if "attn_mask" in o else None),
        ("lengths", lambda o: {n: x for n, x in o.items() if n != "key_lengths"} if "key_lengths" in o else None),
        ("window", lambda o: {**o, "window": None} if "window" in o else None),
    ],
)
def test_the_oracle_sees_a_call_that_is_wrong_in_one_way(what, change):
    changed = [(node, options) for node in nodes().values() if (options := change(dict(node.options))) is not None]
    caught = 0
    for node, options in changed:
        wrong = Node(node.name, node.arguments, options, node.expected, node.heads)
        caught += _compare(run(wrong, "eager"), node.expected) != "verified"
    assert changed
    assert caught > 0, f"no node test depends on {what}"
