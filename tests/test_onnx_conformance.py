"""The node tests that ship in the onnx wheel, as an oracle that nobody here wrote.

All 93 of Attention on every quick built-in backend, on every legal chain, and by the dispatcher's own choice: verified,
or refused for a declared reason. Then the operators next to it, LinearAttention, RotaryEmbedding and TensorScatter.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_dispatch import InputError, NoBackendError, dispatch, native
from attn_dispatch.registry import current
from attn_dispatch.testing.onnx_nodes import NodeCase, answer, call, error_of, load, unanswered
from attn_dispatch.testing.onnx_relatives import NOT_EXPRESSED, not_expressed, run

COUNT = {"Attention": 93, "LinearAttention": 14, "RotaryEmbedding": 8, "TensorScatter": 3}  # the onnx 1.23.2 wheel
EXPRESSED = {"LinearAttention": 4, "RotaryEmbedding": 8, "TensorScatter": 2}

# What each backend verifies of the 93 on a CPU; the rest it refuses. A change in either direction is looked at.
VERIFIED = {"eager": 93, "blocked": 93, "flash_decode": 93, "onnxruntime": 93, "sdpa_math": 82, "sdpa_flash": 82}
# Every test refused, and one reason that is among those of each: what the backend is not for.
REFUSES_ALL = {
    "linear": ("feature", "weight:Softmax"),
    "sdpa_efficient": ("device", "device"),
    "sdpa_cudnn": ("device", "device"),
}
CHAINS = 600  # at least so many pairs of a test and a legal chain that ends in a quick backend; 671 when written

NOT_BUILT = {"flash_decode"} if native.decode().module is None else set()

# Backends that come with the package and compile at once.
QUICK = [
    name
    for name, backend in current().backends.items()
    if type(backend).__module__.startswith("attn_dispatch.backends.")
    and backend.compile_s == 0
    and name not in NOT_BUILT
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tensors are small: threads would only wait for each other, long where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def attend(case: NodeCase, backend: str | None, **changes: Any) -> torch.Tensor:
    query, key, value, options = call(case)
    return answer(case, dispatch.attention(query, key, value, **{**options, **changes}, backend=backend))


@functools.cache
def results(backend: str | None) -> dict[str, Any]:
    """By test name: the error in units of the tolerance, or the reasons of a refusal."""
    found: dict[str, Any] = {}
    for case in load():
        try:
            found[case.name] = error_of(case, attend(case, backend))
        except NoBackendError as error:
            found[case.name] = tuple(error.refusals.get(backend or "", ()))
    return found


def wrong(backend: str | None) -> dict[str, Any]:
    return {name: x for name, x in results(backend).items() if isinstance(x, float) and not x <= 1.0}


# --- the tests themselves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op_type", COUNT)
def test_the_wheel_has_the_node_tests_that_are_counted_here(op_type):
    cases = load(op_type)
    assert len({case.name for case in cases}) == len(cases) == COUNT[op_type]
    assert {case.op_type for case in cases} == {op_type}
    assert not [case.name for case in cases if case.name.endswith("_expanded")]


def test_the_node_tests_cover_what_they_are_here_for():
    cases = [(case, call(case)) for case in load()]
    seen = Counter(name for case, _ in cases for name in (*case.inputs, *case.attributes, *case.outputs))
    assert {n: seen[n] for n in ("attn_mask", "past_key", "nonpad_kv_seqlen", "softcap", "scale", "is_causal")} == {
        "attn_mask": 52, "past_key": 21, "nonpad_kv_seqlen": 13, "softcap": 11, "scale": 6, "is_causal": 32
    }  # fmt: skip
    assert Counter(case.opset for case, _ in cases) == {23: 69, 24: 13, 25: 11}
    assert Counter(made.query.dtype for _, made in cases) == {
        torch.float32: 82, torch.float16: 6, torch.bfloat16: 5
    }  # fmt: skip
    assert sum(case.packed for case, _ in cases) == 25
    assert sum("window" in made.options for _, made in cases) == 10  # one more gives (-1, -1), which is none
    assert sum(made.query.shape[1] != made.key.shape[1] for _, made in cases) == 17
    assert sum(isinstance(made.options.get("q_offset"), torch.Tensor) for _, made in cases) == 11
    masks = [(case, made) for case, made in cases if "attn_mask" in made.options]
    assert Counter(made.options["attn_mask"].dtype == torch.bool for _, made in masks) == {True: 10, False: 42}
    assert sum(case.inputs["attn_mask"].shape[-1] < made.key.shape[2] for case, made in masks) == 3  # padded


def test_only_scores_between_the_steps_have_no_answer():
    left = Counter((name, why) for case in load() for name, why in unanswered(case).items())
    assert sum("qk_matmul_output" in case.outputs for case in load()) == 18
    assert sorted(left.values()) == [2, 3, 7]  # modes 1, 0 and 2; the 6 of mode 3 are the weights, compared below
    assert {name for name, _ in left} == {"qk_matmul_output"}


_TWO_WAYS = """
import sys
import numpy
numpy.random.seed(5)
want = numpy.random.RandomState(5).rand(3).tolist()
from attn_dispatch.testing import onnx_nodes
if sys.argv[1] == "public":
    onnx_nodes.MODULES["Attention"] = "moved_elsewhere"
cases = onnx_nodes.load()
assert numpy.random.rand(3).tolist() == want, "loading moved numpy's random state"
print([(c.name, sorted(c.attributes.items()), [x.double().sum().item() for x in c.inputs.values()],
        [x.double().sum().item() for x in c.outputs.values()]) for c in cases])
"""


@pytest.mark.slow
def test_the_public_way_of_loading_gives_the_same_tests_as_the_quick_one():
    said = [
        subprocess.run([sys.executable, "-c", _TWO_WAYS, way], capture_output=True, text=True, timeout=300, check=True)
        for way in ("quick", "public")
    ]
    quick, public = (done.stdout for done in said)
    assert quick.count("test_attention") == COUNT["Attention"]
    assert quick == public


def test_loading_and_calling_say_what_is_wrong():
    with pytest.raises(InputError, match=r"no node tests are read for 'Conv'[\s\S]*LinearAttention"):
        load("Conv")
    case = load()[0]
    strange = replace(case, attributes={"sliding": 1}, inputs={**case.inputs, "sinks": torch.ones(1)})
    with pytest.raises(InputError, match=r"has sinks, sliding, for which onnx_nodes\.call has no rule"):
        call(strange)
    with pytest.raises(InputError, match="tests RotaryEmbedding, not Attention"):
        call(load("RotaryEmbedding")[0])
    with pytest.raises(InputError, match=r"has sliding, for which onnx_relatives\.run has no rule"):
        run(replace(load("RotaryEmbedding")[0], attributes={"sliding": 1}))
    with pytest.raises(InputError, match="tests Attention"):
        run(case)


# --- Attention -------------------------------------------------------------------------------------------------------


def test_every_quick_backend_has_its_count_here():
    assert {*QUICK, *NOT_BUILT} == {*VERIFIED, *REFUSES_ALL}, "a new backend: say above how many node tests it verifies"


@pytest.mark.parametrize("backend", QUICK)
def test_every_node_test_is_verified_or_refused_for_a_declared_reason(backend):
    assert not wrong(backend)
    refused = {name: reasons for name, reasons in results(backend).items() if not isinstance(reasons, float)}
    assert len(results(backend)) == COUNT["Attention"]
    assert COUNT["Attention"] - len(refused) == VERIFIED.get(backend, 0), refused
    capability = current().backends[backend].capability_on("cpu")
    for name, reasons in refused.items():
        assert reasons, f"{backend} refused {name} without a reason"
        for reason in reasons:
            assert reason.code in ("device", "dtype", "feature", "limit"), (name, reason)
            assert str(reason)
            assert reason.code != "feature" or reason.field not in capability.features, (name, reason)
            assert reason.code != "device" or "cpu" not in capability.devices, (name, reason)


@pytest.mark.parametrize("backend", REFUSES_ALL)
def test_a_backend_that_refuses_every_node_test_does_so_for_what_it_is_not_for(backend):
    for name, reasons in results(backend).items():
        assert REFUSES_ALL[backend] in [(reason.code, reason.field) for reason in reasons], name


@pytest.mark.parametrize("backend", ["sdpa_math", "sdpa_flash"])
def test_sdpa_refuses_the_node_tests_with_a_softcap_and_no_others(backend):
    capped = {case.name for case in load() if "softcap" in case.attributes}
    refused = {name: {r.field for r in x} for name, x in results(backend).items() if not isinstance(x, float)}
    assert set(refused) == capped
    assert all("score:SoftCap" in fields for fields in refused.values())


def test_the_dispatchers_own_choice_is_right_on_every_node_test():
    assert not wrong(None)
    assert sum(isinstance(x, float) for x in results(None).values()) == COUNT["Attention"]


def test_every_legal_chain_is_right_on_every_node_test():
    failed, ran = [], Counter()
    for case in load():
        query, key, value, options = call(case)
        for name, _ in dispatch.explain(query, key, value, **options).legal:
            if name.split(" > ")[-1] not in QUICK:
                continue
            ran[name.split(" > ")[0]] += 1
            error = error_of(case, attend(case, name))
            failed += [] if error <= 1.0 else [f"{case.name}: {name} is {error:.3g} times its tolerance"]
    assert not failed, "\n".join(failed)
    assert sum(ran.values()) >= CHAINS, ran
    assert set(ran) >= {"fold_groups", "pad_head_dim", "upcast", "densify_mask", "trim_lengths", "bands"}


@pytest.mark.parametrize("backend", ["eager", None], ids=str)
def test_the_weights_are_qk_matmul_output_of_mode_3(backend):
    cases = [case for case in load() if case.attributes.get("qk_matmul_output_mode") == 3]
    for case in cases:
        query, key, value, options = call(case)
        weights = dispatch.attention(query, key, value, **options, return_weights=True, backend=backend).weights
        want = case.outputs["qk_matmul_output"]
        assert error_of(case, weights.to(want.dtype), "qk_matmul_output") <= 1.0, case.name
    assert len(cases) == 6


def test_the_keys_of_a_call_with_a_past_are_the_present_of_the_node():
    cases = [case for case in load() if "present_key" in case.outputs]
    for case in cases:
        _, key, value, _ = call(case)
        assert error_of(case, key, "present_key") == error_of(case, value, "present_value") == 0.0, case.name
    assert len(cases) == 21


# --- the oracle can fail ---------------------------------------------------------------------------------------------


def _changed(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda options: {n: change(x) if n == name else x for n, x in options.items()}


def _without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda options: {n: x for n, x in options.items() if n != name}


# What is changed in a call, and how many of the tests that have it see it.
MISTAKES = {
    "the causal offset is one too many": (_changed("q_offset", lambda offset: offset + 1), 29),
    "the causal offset is one too few": (_changed("q_offset", lambda offset: offset - 1), 32),
    "the scale is left out": (lambda options: {**options, "scale": 1.0}, 89),
    "the softcap is left out": (_without("softcap"), 11),
    "the mask is left out": (_without("attn_mask"), 48),
    "the lengths are left out": (_without("key_lengths"), 2),
    "the window is left out": (_without("window"), 9),
    "the window is one key wider": (_changed("window", lambda w: (w[0] + 1, w[1])), 9),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_oracle_sees_a_call_that_is_wrong_in_one_way(mistake):
    change, seen = MISTAKES[mistake]
    caught = 0
    for case in load():
        query, key, value, options = call(case)
        out = dispatch.attention(query, key, value, **change(options), backend="eager")
        caught += error_of(case, answer(case, out)) > 1.0
    assert caught == seen


def test_the_oracle_sees_groups_in_the_wrong_order():
    caught = grouped = 0
    for case in load():
        query, key, value, options = call(case)
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and key.shape[1] > 1:  # one kv head has only one order
            tiled = dispatch.attention(query, key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1), **options)
            grouped, caught = grouped + 1, caught + (error_of(case, answer(case, tiled)) > 1.0)
    assert (grouped, caught) == (16, 16)


def test_the_error_of_a_result_sees_shape_dtype_nan_and_value():
    case = load()[0]
    want = case.outputs["Y"]
    assert error_of(case, want.clone()) == 0.0
    assert error_of(case, want + 1e-3) > 1.0
    assert error_of(case, want[..., :-1]) == error_of(case, want.double()) == torch.inf
    for odd in (torch.nan, torch.inf):
        broken = want.clone()
        broken.view(-1)[3] = odd
        assert error_of(case, broken) == torch.inf


# --- the operators next to it ----------------------------------------------------------------------------------------

RELATIVES = [case for op_type in EXPRESSED for case in load(op_type)]
RUNNABLE = [case for case in RELATIVES if not not_expressed(case)]


def test_what_is_not_expressed_is_counted_and_each_reason_is_met():
    assert Counter(case.op_type for case in RUNNABLE) == EXPRESSED
    left = [case for case in RELATIVES if not_expressed(case)]
    assert {not_expressed(case) for case in left} == set(NOT_EXPRESSED.values())
    for case in left:
        with pytest.raises(InputError, match="has no counterpart"):
            run(case)


# Modules choose no backend: those tests run once.
RUNS = [(c, b) for c in RUNNABLE for b in (("eager", "linear", None) if c.op_type == "LinearAttention" else (None,))]


@pytest.mark.parametrize(("case", "backend"), RUNS, ids=lambda x: getattr(x, "name", str(x)))
def test_a_relative_is_right_in_every_output(case, backend):
    found = run(case, backend)
    assert set(found) == set(case.outputs)
    for name, got in found.items():
        assert error_of(case, got, name) <= 1.0, name


@pytest.mark.parametrize("case", RUNNABLE, ids=lambda case: case.name)
def test_a_relative_sees_a_change_of_every_input(case):
    for name, given in case.inputs.items():
        changed = given.roll(1, 0) if name in ("position_ids", "write_indices") else given + 0.1
        outputs = run(replace(case, inputs={**case.inputs, name: changed}))
        assert max(error_of(case, got, output) for output, got in outputs.items()) > 1.0, name
