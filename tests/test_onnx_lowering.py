"""The node tests of ONNX through our own lowering: op -> model -> a runtime, in every form.

The runtimes are onnxruntime, for which a form says what it cannot do there, and the reference evaluator of the onnx
wheel, which follows the specification to the word. A test is right on them or refused for a reason that is named.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch

from attn_dispatch import dispatch
from attn_dispatch.backends.ort_probes import proven
from attn_dispatch.backends.ort_sessions import bind, make_session, runtime
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.lowering.forms import FORMS, reasons_against
from attn_dispatch.lowering.model import build_model, input_names, output_names
from attn_dispatch.lowering.target import SPECIFIED, Target
from attn_dispatch.passes import canonicalise
from attn_dispatch.testing.onnx_nodes import NodeCase, answer, call, error_of, load

COUNT = 93
# How many of them each form computes rightly on onnxruntime; the rest it refuses.
RIGHT = {
    ("standard", 18): 0,
    ("standard", 23): COUNT,
    ("standard", 24): COUNT,
    ("decomposed", 18): COUNT,
    ("decomposed", 24): COUNT,
    ("contrib", 24): 33,
    ("function", 24): COUNT,
}
# What no form knows before it runs, since lengths are open then: the runtime itself refuses, with these words.
REFUSED_AT_RUN_TIME = {
    ("contrib", "test_attention_4d_causal_with_past_and_present"): "batch_size must be 1 when sequence_length > 1",
}
# How often the standard form needs a mask tensor, and says the rest with the node's own words, by opset.
SHORT_WAYS = {
    23: {"mask": 62, "is_causal": 9, "nonpad_kv_seqlen": 0},
    24: {"mask": 61, "is_causal": 10, "nonpad_kv_seqlen": 14},
}


def lowered(case: NodeCase, as_described: bool = False, **options: Any) -> tuple[AttentionOp, list[torch.Tensor]]:
    """The op of a test and its tensors, in the order of a model's inputs."""
    query, key, value, own = call(case)
    plan = dispatch.plan(query, key, value, **{**own, **options})
    operands = plan.binding.operands(plan.tensors)
    op = plan.binding.op if as_described else canonicalise(plan.binding.op)[0]
    return op, [x.contiguous() for x in (query, key, value, *(operands[name] for name, _ in op.operands))]


def results_of(op: AttentionOp) -> list[torch.Tensor]:
    """What a model writes into: NaN, so that what it does not write shows."""
    kind = getattr(torch, op.dtype)
    shapes = [(op.B, op.Hq, op.Sq, op.Dv), *([(op.B, op.Hq, op.Sq, op.Skv)] if op.outputs.weights else [])]
    return [torch.full(shape, torch.nan, dtype=kind) for shape in shapes]


def on_onnxruntime(op: AttentionOp, given: list[torch.Tensor], target: Target) -> list[torch.Tensor]:
    model = onnx_ir.to_proto(build_model(op, target)).SerializeToString()
    session = make_session(model, "cpu", 1, quiet=True)
    results = results_of(op)
    session.run_with_iobinding(bind(session.io_binding(), "cpu", input_names(op), given, output_names(op), results))
    return results


def on_the_reference(op: AttentionOp, given: list[torch.Tensor], target: Target) -> list[torch.Tensor]:
    import ml_dtypes
    from onnx.reference import ReferenceEvaluator

    def array(x: torch.Tensor) -> Any:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()

    def tensor(x: Any) -> torch.Tensor:
        half = x.dtype == ml_dtypes.bfloat16
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if half else torch.from_numpy(x)

    evaluator = ReferenceEvaluator(onnx_ir.to_proto(build_model(op, target)))
    with np.errstate(invalid="ignore"):  # a row of -inf alone, before the model makes it 0
        found = evaluator.run(None, dict(zip(input_names(op), map(array, given), strict=True)))
    return [tensor(np.asarray(x)) for x in found]


Verdicts = dict[str, Any]


def here(form: str, opset: int) -> Target:
    return Target(form, opset, proven("cpu"), str(runtime("cpu")))


def judge(target: Target, run: Callable[..., list[torch.Tensor]], as_described: bool = False) -> Verdicts:
    """By test name: the error in units of the tolerance, or the reasons of a refusal."""
    found: Verdicts = {}
    for case in load():
        op, given = lowered(case, as_described)
        reasons = tuple(reasons_against(op, target))
        expected = REFUSED_AT_RUN_TIME.get((target.form, case.name))
        if reasons:
            found[case.name] = reasons
        elif expected:
            with pytest.raises(RuntimeError, match=expected):
                run(op, given, target)
            found[case.name] = (expected,)
        else:
            found[case.name] = error_of(case, answer(case, run(op, given, target)[0]))
    return found


@functools.cache
def judged(form: str, opset: int) -> Verdicts:
    return judge(here(form, opset), on_onnxruntime)


def test_every_form_is_tried():
    assert {form for form, _ in RIGHT} == set(FORMS)


@pytest.mark.parametrize(("form", "opset"), RIGHT, ids=lambda x: str(x))
def test_a_form_is_right_on_onnxruntime_or_refuses_by_name(form, opset):
    verdicts = judged(form, opset)
    wrong = {name: x for name, x in verdicts.items() if isinstance(x, float) and not x <= 1.0}
    refused = {name: x for name, x in verdicts.items() if not isinstance(x, float)}
    assert not wrong
    assert len(verdicts) == COUNT
    assert all(x and all(map(str, x)) for x in refused.values()), refused
    assert COUNT - len(refused) == RIGHT[form, opset], Counter(str(x[0]) for x in refused.values())


@pytest.mark.parametrize(("form", "opset"), [("standard", 24), ("decomposed", 18)])
def test_an_op_is_lowered_rightly_before_the_passes_have_seen_it_as_well(form, opset):
    verdicts = judge(here(form, opset), on_onnxruntime, as_described=True)
    assert {name: x for name, x in verdicts.items() if not isinstance(x, float) or not x <= 1.0} == {}


@pytest.mark.parametrize(("form", "opset"), [("standard", 23), ("standard", 24), ("decomposed", 18)])
def test_a_form_is_right_on_the_reference_evaluator_in_every_dtype(form, opset):
    verdicts = judge(Target(form, opset, SPECIFIED), on_the_reference)
    assert {name: x for name, x in verdicts.items() if not isinstance(x, float) or not x <= 1.0} == {}
    assert len(verdicts) == COUNT


@pytest.mark.parametrize(("form", "opset"), [("standard", 24), ("decomposed", 18)])
def test_the_weights_of_a_form_are_qk_matmul_output_of_mode_3(form, opset):
    cases = [case for case in load() if case.attributes.get("qk_matmul_output_mode") == 3]
    for case in cases:
        op, given = lowered(case, return_weights=True)
        out, weights = on_the_reference(op, given, Target(form, opset, SPECIFIED))
        want = case.outputs["qk_matmul_output"]
        assert error_of(case, answer(case, out)) <= 1.0, case.name
        assert error_of(case, weights.to(want.dtype), "qk_matmul_output") <= 1.0, case.name
    assert len(cases) == 6


@pytest.mark.parametrize("opset", [23, 24])
def test_the_standard_form_is_one_attention_node_with_its_own_words_where_it_has_them(opset):
    said: Counter[str] = Counter()
    for case in load():
        graph = build_model(lowered(case)[0], Target("standard", opset, SPECIFIED)).graph
        nodes = [node for node in graph if node.op_type == "Attention"]
        assert len(nodes) == 1, case.name
        assert not {"left_window_size", "right_window_size"} & set(nodes[0].attributes), case.name
        inputs = [x is not None for x in nodes[0].inputs] + [False] * 7
        said["is_causal"] += "is_causal" in nodes[0].attributes
        said["mask"] += inputs[3]
        said["nonpad_kv_seqlen"] += inputs[6]
    assert said == SHORT_WAYS[opset]


@pytest.mark.parametrize(
    ("what", "change", "seen"),
    [
        ("the offset is one off", lambda op: {"q_offset": op.q_offset + 1} if type(op.q_offset) is int else {}, 20),
        ("the scale is another", lambda op: {"scale": 1.0}, 89),
        ("the scores have no terms", lambda op: {"score": ()}, 48),
    ],
)  # fmt: skip
def test_a_lowering_that_is_wrong_in_one_way_is_seen(what, change, seen):
    caught = 0
    for case in load():
        op, given = lowered(case)
        names = [name for name, _ in op.operands]
        wrong = replace(op, **change(op))
        kept = given[:3] + [x for name, x in zip(names, given[3:], strict=True) if name in dict(wrong.operands)]
        out = on_onnxruntime(wrong, kept, here("decomposed", 18))[0]
        caught += error_of(case, answer(case, out)) > 1.0
    assert caught == seen, what
