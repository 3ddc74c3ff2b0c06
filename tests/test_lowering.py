"""Every form of the lowering to ONNX: each contract case right or refused by a reason, and nothing refused anew.

The forms run on the onnxruntime that is here. What the specification says and no runtime here does (LinearAttention of
opset 27), and whether a node means what we think, is asked of the reference evaluator that ships in the onnx wheel.
"""

from __future__ import annotations

import collections
import functools
import io
import math
from dataclasses import replace

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

onnx = pytest.importorskip("onnx", minversion="1.23.2")
pytest.importorskip("onnxruntime")
import onnx_ir  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from attn_dispatch import dispatch, export_onnx, masks, reference, torch_select, variants  # noqa: E402
from attn_dispatch.backends.onnxruntime import OnnxRuntime  # noqa: E402
from attn_dispatch.backends.ort_probes import proven, verdicts  # noqa: E402
from attn_dispatch.backends.ort_sessions import make_session  # noqa: E402
from attn_dispatch.export.read import read_model  # noqa: E402
from attn_dispatch.ir import atoms  # noqa: E402
from attn_dispatch.ir.masks import Not  # noqa: E402
from attn_dispatch.ir.ops import AttentionOp, Outputs  # noqa: E402
from attn_dispatch.ir.scores import Bias, SoftCap  # noqa: E402
from attn_dispatch.ir.select_op import SelectOp  # noqa: E402
from attn_dispatch.ir.tensors import Ref, TensorDesc  # noqa: E402
from attn_dispatch.ir.weights import Linear, Softmax  # noqa: E402
from attn_dispatch.lowering import masks as lowered_masks  # noqa: E402
from attn_dispatch.lowering.forms import lower, reasons_against  # noqa: E402
from attn_dispatch.lowering.masks import Grid  # noqa: E402
from attn_dispatch.lowering.model import build_model, build_select_model, input_names, output_names  # noqa: E402
from attn_dispatch.lowering.nodes import DTYPES, Nodes  # noqa: E402
from attn_dispatch.lowering.target import PROVABLE, SPECIFIED, Target  # noqa: E402
from attn_dispatch.registry import Registry, current  # noqa: E402
from attn_dispatch.select import compile_select  # noqa: E402
from attn_dispatch.testing import BY_ID, CASES, Result, Verdict, check  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tensors are small: threads would only wait for each other, long where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Forced(OnnxRuntime):
    """The onnxruntime backend held to one form."""

    name = "forced"

    def __init__(self, target: Target) -> None:
        self.target = target

    def extra_reasons(self, op):
        found = super().extra_reasons(op) or reasons_against(op, self.target)
        # the backend declares the feature, and the form has not got it: a reason of the form's own
        return [replace(reason, code="form") if reason.code == "feature" else reason for reason in found]

    def target_for(self, op):
        return self.target


class Evaluated(Forced):
    """A form on the reference evaluator of the onnx wheel: what the specification says, slowly."""

    name = "evaluated"

    def runner_for(self, op, model):
        evaluator = ReferenceEvaluator(onnx.load_from_string(model))
        inputs, outputs = input_names(op), output_names(op)

        def run(given, results):
            feeds = {name: as_numpy(x) for name, x in zip(inputs, given, strict=True)}
            for into, made in zip(results, evaluator.run(outputs, feeds), strict=True):
                into.copy_(as_torch(made).reshape(into.shape))

        return run


def as_numpy(x):
    if x.dtype == torch.bfloat16:
        return onnx_ir.tensor(x).numpy()
    return x.detach().numpy()


def as_torch(x):
    return torch.from_numpy(x.astype("float32") if x.dtype.name == "bfloat16" else x.copy())


def registry_with(backend: OnnxRuntime) -> Registry:
    registry = current()
    return Registry({**registry.backends, backend.name: backend}, registry.rewrites)


@functools.cache
def outcomes(backend: type[Forced], target: Target) -> tuple[dict[str, Result], list[str]]:
    """What `check` says of every case on a form: the verdicts, and what was wrong."""
    forced, verdicts, wrong = backend(target), {}, []
    registry = registry_with(forced)
    for case in CASES:
        try:
            verdicts[case.id] = check(forced.name, case, registry)
        except Exception as error:  # noqa: BLE001 - a runtime's own exceptions are wrong results too
            wrong.append(f"{case.id}: {type(error).__name__}: {str(error)[:200]}")
    return verdicts, wrong


def here(form: str, opset: int = 24) -> Target:
    return Target(form, opset, proven("cpu"))


# How many of the contract's cases each form is verified on; what is missing is refused, by a reason. 55 of the 295
# are refused by every form: gradients and sizes of 0. The standard form has no lse, and does not say what the runtime
# here does wrongly. The last three run on the reference evaluator and may say all that the specification does.
FORMS = {
    "standard": (Forced, lambda: here("standard"), 177),
    "standard at opset 23": (Forced, lambda: here("standard", 23), 177),
    "decomposed": (Forced, lambda: here("decomposed"), 240),
    "decomposed at opset 18": (Forced, lambda: here("decomposed", 18), 240),
    "contrib": (Forced, lambda: here("contrib"), 45),
    "function": (Forced, lambda: here("function"), 240),
    "standard as specified": (Evaluated, lambda: Target("standard", 24), 188),
    "standard as specified, opset 27": (Evaluated, lambda: Target("standard", 27), 188),
    "function as specified": (Evaluated, lambda: Target("function", 18), 240),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name", FORMS)
def test_every_case_is_right_in_a_form_or_refused_for_a_reason(name):
    backend, target, least = FORMS[name]
    verdicts, wrong = outcomes(backend, target())
    assert not wrong, "\n".join(wrong)
    verified = [id for id, result in verdicts.items() if result.verdict is Verdict.VERIFIED]
    assert len(verdicts) == len(CASES)
    assert len(verified) >= least, f"{len(verified)} cases are verified; {least} were"
    assert all(verdicts[id].reasons for id in set(verdicts) - set(verified))


def test_no_form_refuses_what_the_backend_as_a_whole_runs():
    alone = [case for case in CASES if check("onnxruntime", case).verdict is Verdict.VERIFIED]
    verdicts, _ = outcomes(Forced, here("decomposed"))
    assert len(alone) >= 240
    assert all(verdicts[case.id].verdict is Verdict.VERIFIED for case in alone)


@pytest.mark.parametrize(
    ("mistake", "case"),
    [("causal", "causal_wide"), ("window", "window_causal"), ("key_lengths", "key_lengths"), ("segments", "segments")],
)
def test_an_off_by_one_in_a_lowered_mask_fails_the_contract(monkeypatch, mistake, case):
    atom, wrong = MISTAKES[mistake]
    monkeypatch.setitem(lowered_masks._ATOMS, atom, wrong)
    forced = Forced(here("decomposed"))
    with pytest.raises(AssertionError, match="times its budget"):
        check("forced", BY_ID[case], registry_with(forced))


@pytest.mark.parametrize("form", ["decomposed", "function"])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("d", [1, 5, 12])  # sizes whose root is no power of two: a rounded scale shows
def test_float64_keeps_its_digits_though_onnxruntime_folds_factors_into_float32_attributes(form, softcap, d):
    gen = torch.Generator().manual_seed(d)
    q, k, v = (torch.randn(2, 2, 7, d, generator=gen, dtype=torch.float64) for _ in range(3))
    for weight in (Softmax(), Linear("elu1", None, 1e-6)):
        score = (SoftCap(softcap),) if softcap and isinstance(weight, Softmax) else ()
        op = AttentionOp(*(TensorDesc.of(x) for x in (q, k, v)), score=score, weight=weight)
        model = onnx_ir.to_proto(build_model(op, here(form))).SerializeToString()
        out = torch.full((2, 2, 7, d), math.nan, dtype=torch.float64)
        OnnxRuntime().runner_for(op, model)([q, k, v], [out])
        assert (out - reference.attention(op, q, k, v, {}).out).abs().max() < 1e-13


# --- masks, atom by atom ---------------------------------------------------------------------------------------------


def _one_more(mask, grid):
    n = grid.nodes
    return n("LessOrEqual", grid.keys, n("Add", grid.queries, n.const([1])))


def _left_is_exclusive(mask, grid):
    n = grid.nodes
    distance = n("Sub", grid.keys, grid.queries)
    near = n("Greater", distance, n.const(-mask.left))
    return near if mask.right is None else n("And", near, n("LessOrEqual", distance, n.const(mask.right)))


def _last_key_too_many(mask, grid):
    n = grid.nodes
    return n("LessOrEqual", grid.keys, n("Reshape", grid.of_type(mask.lengths, "int64")[0], n.const([-1, 1, 1, 1])))


def _next_segment_too(mask, grid):
    n = grid.nodes
    queries, keys = (grid.of_type(operand, "int64")[0] for operand in (mask.queries, mask.keys))
    return n("LessOrEqual", n("Unsqueeze", queries, n.const([1, 3])), n("Unsqueeze", keys, n.const([1, 2])))


def _rounds_to_zero(mask, grid):
    n, size = grid.nodes, grid.nodes.const(mask.size)
    return n("Equal", n("Div", grid.queries, size), n("Div", grid.keys, size))


MISTAKES = {
    "causal": (atoms.Causal, _one_more),
    "window": (atoms.Window, _left_is_exclusive),
    "key_lengths": (atoms.KeyLengths, _last_key_too_many),
    "segments": (atoms.Segments, _next_segment_too),
    "same_block": (atoms.SameBlock, _rounds_to_zero),
}


def lowered_mask(mask, batch, sq, skv, offset, tensors, heads=2):
    """A mask by its nodes on onnxruntime, ``[B, H, Sq, Skv]``."""
    nodes = Nodes(18)
    given = dict(tensors) | ({"q_offset": offset} if isinstance(offset, torch.Tensor) else {})
    inputs = {"sizes": onnx_ir.val("sizes", onnx_ir.DataType.INT64, [4])}
    inputs |= {
        name: onnx_ir.val(name, DTYPES[str(x.dtype).removeprefix("torch.")], [None] * x.ndim)
        for name, x in given.items()
    }
    known = {name: (inputs[name], x.ndim, str(x.dtype).removeprefix("torch.")) for name, x in given.items()}
    batch_size, sq_size, skv_size = (nodes.slice(inputs["sizes"], i, i + 1, 0) for i in (0, 2, 3))
    at = Ref("q_offset") if isinstance(offset, torch.Tensor) else offset
    grid = Grid(nodes, batch_size, sq_size, skv_size, at, known)
    out = nodes("Expand", lowered_masks.allowed(mask, grid), inputs["sizes"])
    out.name, out.type = "out", onnx_ir.TensorType(onnx_ir.DataType.BOOL)
    graph = onnx_ir.Graph([*inputs.values()], [out], nodes=nodes.take(), opset_imports=nodes.domains, name="mask")
    model = onnx_ir.to_proto(onnx_ir.Model(graph, ir_version=10)).SerializeToString()
    feeds = {name: x.numpy() for name, x in given.items()}
    feeds["sizes"] = torch.tensor([batch, heads, sq, skv]).numpy()
    session = make_session(model, "cpu", 1, quiet=True)
    used = {x.name for x in session.get_inputs()}
    return torch.from_numpy(session.run(None, {name: x for name, x in feeds.items() if name in used})[0])


def expect_equal(mask, batch, sq, skv, offset, tensors):
    got = lowered_mask(mask, batch, sq, skv, offset, tensors)
    number = skv - sq if offset == "end" else offset
    want = mask.dense(sq, skv, number, tensors)
    assert torch.equal(got, want.expand(got.shape)), f"{mask} at {sq}x{skv}, offset {offset}"


@st.composite
def calls(draw, kinds=None):
    """A mask, batch, lengths, an offset and the tensors behind the mask's names."""
    b, sq, skv = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tensors = {}

    def ints(name, high, *shape):
        tensors[name] = torch.randint(-1, high, shape, generator=gen, dtype=draw(st.sampled_from(INTS)))
        return Ref(name)

    def bools(name, *shape):
        tensors[name] = torch.rand(shape, generator=gen) < 0.5
        return Ref(name)

    n, small, some = lambda: len(tensors), st.integers(0, 6), st.integers(1, 5)
    lead = (b,) if draw(st.booleans()) else ()
    end = st.one_of(st.none(), small)

    def heads():
        return (2,) if draw(st.booleans()) else ()

    makers = {
        "Full": lambda: atoms.Full(),
        "Causal": lambda: atoms.Causal(),
        "Window": lambda: atoms.Window(draw(end), draw(end)),
        "Stride": lambda: atoms.Stride(draw(some)),
        "SameBlock": lambda: atoms.SameBlock(draw(some)),
        "KeyRange": lambda: atoms.KeyRange(*sorted((draw(small), draw(small))), draw(st.sampled_from([None, 6, 9]))),
        "Columns": lambda: atoms.Columns(bools(f"t{n()}", *lead, skv)),
        "Rows": lambda: atoms.Rows(bools(f"t{n()}", *lead, sq)),
        "KeyLengths": lambda: atoms.KeyLengths(ints(f"t{n()}", skv + 2, b)),
        "QueryLengths": lambda: atoms.QueryLengths(ints(f"t{n()}", sq + 2, b)),
        "Segments": lambda: atoms.Segments(ints(f"t{n()}", 3, *lead, sq), ints(f"t{n()}", 3, *lead, skv)),
        "BlockTable": lambda: atoms.BlockTable(draw(some), torch.rand(*heads(), 3, 2, generator=gen) < 0.5),
        "Selected": lambda: atoms.Selected(ints(f"t{n()}", skv + 2, b, *heads(), sq, 4)),
        "Dense": lambda: atoms.Dense(bools(f"t{n()}", b, 1, sq, skv)),
    }

    def one(depth):
        if depth and draw(st.booleans()):
            kind = draw(st.sampled_from(["and", "or", "not"]))
            if kind == "not":
                return ~one(depth - 1)
            return one(depth - 1) & one(depth - 1) if kind == "and" else one(depth - 1) | one(depth - 1)
        return makers[draw(st.sampled_from(kinds or sorted(makers)))]()

    mask = one(0 if kinds else 2)
    offset = draw(st.one_of(st.integers(-9, 9), st.just("end"), st.just("each")))
    if offset == "each":
        offset = torch.randint(-9, 9, (b,), generator=gen, dtype=draw(st.sampled_from(INTS)))
    return mask, b, sq, skv, offset, tensors


INTS = (torch.int32, torch.int64)
ATOMS = sorted(atom.__name__ for atom in lowered_masks.KNOWN_ATOMS if atom is not Not)


@pytest.mark.parametrize("kind", ATOMS)
@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(data=st.data())
def test_a_lowered_atom_is_the_dense_mask(kind, data):
    expect_equal(*data.draw(calls([kind])))


@hypothesis.settings(max_examples=120, deadline=None)
@hypothesis.given(calls())
def test_a_lowered_combination_is_the_dense_mask(call):
    expect_equal(*call)


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_in_a_lowered_atom_is_seen(monkeypatch, kind):
    atom, wrong = MISTAKES[kind]
    monkeypatch.setitem(lowered_masks._ATOMS, atom, wrong)
    segments = {"q": torch.tensor([[0, 0, 1, 1, 2]]), "k": torch.tensor([[0, 1, 1, 2, 2, 2, 3]])}
    examples = {
        atoms.Causal: (atoms.Causal(), {}),
        atoms.Window: (atoms.Window(2, 0), {}),
        atoms.KeyLengths: (atoms.KeyLengths(Ref("l")), {"l": torch.tensor([3, 5])}),
        atoms.Segments: (atoms.Segments(Ref("q"), Ref("k")), segments),
        atoms.SameBlock: (atoms.SameBlock(3), {}),
    }
    mask, tensors = examples[atom]
    batch = max([x.shape[0] for x in tensors.values()], default=1)
    with pytest.raises(AssertionError, match="offset -2"):
        expect_equal(mask, batch, 5, 7, -2, tensors)


# --- one session for all lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["standard", "decomposed", "function"])
def test_one_session_serves_all_batches_and_lengths(form):
    def tensors(b, sq, skv):
        gen = torch.Generator().manual_seed(b + sq + skv)
        return [torch.randn(b, h, s, 8, generator=gen) for h, s in ((4, sq), (2, skv), (2, skv))]

    mask = atoms.Causal() & atoms.KeyLengths(Ref("lengths"))
    described = [TensorDesc.of(x) for x in tensors(2, 3, 5)]
    op = AttentionOp(*described, mask=mask, q_offset="end", operands=(("lengths", TensorDesc((2,), "int64")),))
    assert not reasons_against(op, here(form))
    model = onnx_ir.to_proto(build_model(op, here(form))).SerializeToString()
    run = OnnxRuntime().runner_for(op, model)
    for b, sq, skv in ((2, 3, 5), (1, 1, 9), (3, 6, 6), (2, 7, 4)):
        q, k, v = tensors(b, sq, skv)
        lengths = torch.arange(b) % skv + 1
        out = torch.full((b, 4, sq, 8), math.nan)
        run([q, k, v, lengths], [out])
        want = reference.attention(op, q.double(), k.double(), v.double(), {"lengths": lengths}).out
        assert (out - want).abs().max() < 1e-5, (b, sq, skv)


def test_equal_calls_are_one_node_and_nodes_are_taken_once():
    nodes = Nodes(18)
    x = onnx_ir.val("x", onnx_ir.DataType.FLOAT, ["B", 2])
    y = onnx_ir.val("y", onnx_ir.DataType.FLOAT, ["B", 3])
    assert nodes.size(x, 0) is nodes.size(y, 0)  # one symbol, one value
    assert nodes("Add", x, nodes.const(1.0, "float32")) is nodes("Add", x, nodes.const(1.0, "float32"))
    assert nodes("Add", x, nodes.const(1.0, "float32")) is not nodes("Add", x, nodes.const(2.0, "float32"))
    assert nodes.const([0.0], "float32") is not nodes.const([-0.0], "float32")
    assert nodes.const(1, "int64") is not nodes.const([1], "int64")
    assert nodes("Softmax", x, axis=0) is not nodes("Softmax", x, axis=1)
    taken = nodes.take()
    assert [node.op_type for node in taken].count("Softmax") == 2
    assert nodes.take() == []
    again = nodes("Softmax", x, axis=0)
    assert again.producer() in taken, "what was taken is still known"
    assert nodes.take() == []


# --- the linear family -----------------------------------------------------------------------------------------------


def nodes_of(case, target):
    """The nodes of a case's op, counted."""
    found = []

    class Seen(Forced):
        def runner_for(self, op, model):
            found.append(onnx.load_from_string(model))
            return super().runner_for(op, model)

    check("forced", case, registry_with(Seen(target)))
    return collections.Counter(node.op_type for node in found[0].graph.node)


@pytest.mark.parametrize(
    ("shape", "is_copied"), [((1, 2, 3, 7), False), ((2, 1, 3, 7), False), ((1, 2, 1, 7), True), ((3, 7), True)]
)
def test_a_bias_with_every_row_and_key_is_not_expanded_which_would_copy_it(shape, is_copied):
    bias = (("bias", TensorDesc(shape, "float32")),)
    op = causal_op(operands=bias, score=(Bias(Ref("bias")),)).with_(mask=atoms.Full(), q_offset=0)
    names = [node.op_type for node in build_model(op, here("standard")).graph]
    assert ("Expand" in names) == is_copied
    assert "Shape" not in names or is_copied


def test_linear_attention_is_one_node_where_the_node_says_the_same():
    cases = ["elu1_causal", "identity_state_gqa", "retention_state_gqa", "elu1_state_lengths", "retention_long"]
    for case in cases:
        counts = nodes_of(BY_ID[case], here("contrib"))
        assert counts["LinearAttention"] == 1 and not counts["MatMul"], case  # noqa: PT018
    assert nodes_of(BY_ID["elu1_causal"], here("decomposed"))["LinearAttention"] == 0


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("elu1_none", "causal, with keys and rows left out"),
        ("retention_state_documents", "causal, with keys and rows left out"),
        ("elu1_wide", "9 rows at q_offset end over 23 keys"),
        ("retention_state_lengths", "stops fading at the key lengths"),
        ("elu1_weights", "return_weights"),
        ("identity_float64", "float64"),
    ],
)
def test_what_the_node_does_not_say_is_refused_by_contrib_and_decomposed_elsewhere(case, words):
    refused = check("forced", BY_ID[case], registry_with(Forced(here("contrib"))))
    assert any(words in str(reason) for reason in refused.reasons), refused.reasons
    assert check("forced", BY_ID[case], registry_with(Forced(here("standard")))).verdict is Verdict.VERIFIED


def test_score_terms_and_lse_of_the_linear_family_are_refused():
    x = TensorDesc((1, 2, 4, 8), "float32")
    op = AttentionOp(x, x, x, weight=Linear(), score=(SoftCap(2.0),), outputs=Outputs(lse=True))
    assert [reason.field for reason in reasons_against(op, Target("decomposed", 18))] == ["score:SoftCap", "lse"]


def test_the_node_of_opset_27_is_asked_of_this_runtime_and_its_answer_is_used():
    found = {verdict.word: verdict for verdict in verdicts("cpu")}
    assert set(found) == set(PROVABLE)
    assert found["linear_attention"].outcome in ("right", "refused")
    assert found["contrib_linear"].outcome == "right"
    x = TensorDesc((1, 2, 4, 8), "float32")
    op = AttentionOp(x, x, x, mask=atoms.Causal(), weight=Linear())
    made = [
        {node.op_type for node in build_model(op, Target("standard", opset, proven)).graph}
        for opset, proven in ((26, SPECIFIED), (27, SPECIFIED), (27, SPECIFIED - {"linear_attention"}))
    ]
    assert [("LinearAttention" in kinds, "MatMul" in kinds) for kinds in made] == [
        (False, True),
        (True, False),
        (False, True),
    ]


# --- contrib ---------------------------------------------------------------------------------------------------------


def causal_op(b=2, sq=3, skv=7, d=8, dv=8, offset="end", **more):
    q, k, v = (TensorDesc((b, h, s, size), "float32") for h, s, size in ((4, sq, d), (2, skv, d), (2, skv, dv)))
    return AttentionOp(q, k, v, **{"mask": atoms.Causal(), "q_offset": offset, **more})


@pytest.mark.parametrize(
    ("op", "field"),
    [
        (causal_op(), "B"),
        (causal_op(b=1, sq=9), "Sq"),
        (causal_op(offset=0), "q_offset"),
        (causal_op(sq=1, d=12, dv=12), "head_dim"),
        (causal_op(sq=1, dv=16), "value head_dim"),
    ],
)
def test_what_group_query_attention_fails_on_at_run_time_is_refused_before(op, field):
    target = here("contrib")
    assert field in [reason.field for reason in reasons_against(op, target)]
    model = onnx_ir.to_proto(build_model(op, target)).SerializeToString()
    q, k, v = (torch.zeros(x.shape) for x in (op.query, op.key, op.value))
    with pytest.raises(RuntimeError, match="GroupQueryAttention"):
        OnnxRuntime().runner_for(op, model)([q, k, v], [torch.zeros(*op.query.shape[:3], op.Dv)])


def test_a_mask_that_the_operators_do_not_have_is_refused():
    op = causal_op(sq=1, mask=atoms.Causal() & atoms.Stride(2))
    assert [reason.field for reason in reasons_against(op, here("contrib"))] == ["mask"]


@pytest.mark.parametrize("op", [causal_op(sq=1), causal_op(b=1), causal_op(sq=7), causal_op(sq=7, offset=0)])
def test_what_group_query_attention_takes_is_not_refused(op):
    assert not reasons_against(op, here("contrib"))


# --- functions -------------------------------------------------------------------------------------------------------


def test_ops_of_one_kind_share_one_function_and_other_kinds_have_another():
    nodes = Nodes(24)
    target = Target("function")
    for layer in range(3):
        for op in (causal_op(sq=3 + layer), causal_op(offset=0), causal_op(mask=atoms.Full(), offset=0)):
            shapes = zip("qkv", (op.query, op.key, op.value), strict=True)
            q, k, v = (
                onnx_ir.val(f"{n}{layer}", onnx_ir.DataType.FLOAT, [None, *x.shape[1:2], None, 8]) for n, x in shapes
            )
            lower(op, (q, k, v), {}, nodes, target)
    made = nodes.take()
    assert len(made) == 9
    assert len(nodes.functions) == 3
    assert {(node.domain, node.op_type) for node in made} == set(nodes.functions)
    assert all(name.startswith("SoftmaxAttention_") for _, name in nodes.functions)
    assert nodes.domains == {"": 24, "attn_dispatch": 1}


@pytest.mark.parametrize("opset", [18, 24])
def test_a_function_passes_the_checker_and_imports_the_opset_of_the_model(opset):
    op = causal_op(outputs=Outputs(lse=True, weights=True))
    model = onnx_ir.to_proto(build_model(op, Target("function", opset)))
    onnx.checker.check_model(model, full_check=True)
    (function,) = model.functions
    imports = [{x.domain: x.version for x in imported} for imported in (function.opset_import, model.opset_import)]
    assert imports == [{"": opset}, {"": opset, "attn_dispatch": 1}]
    assert [node.op_type for node in model.graph.node] == [function.name]
    assert not function.value_info, "what was known of one call does not belong to the function"


# --- key selection ---------------------------------------------------------------------------------------------------


def select_tensors(b, sq, skv, dtype=torch.float32, hi=3, di=4, ties=True):
    gen = torch.Generator().manual_seed(100 * b + 10 * sq + skv)
    tensors = [torch.randn(shape, generator=gen) for shape in ((b, hi, sq, di), (b, skv, di), (b, sq, hi))]
    return [(x.round() if ties else x).to(dtype) for x in tensors]  # whole numbers: many scores are equal, and exact


def run_select(op, tensors, operands, evaluate=False):
    model = onnx_ir.to_proto(build_select_model(op, Target("standard", 18)))
    onnx.checker.check_model(model, full_check=True)
    names = ("query", "key", "weights", *(name for name, _ in op.operands))
    feeds = {name: as_numpy(x) for name, x in zip(names, (*tensors, *(operands[n] for n in names[3:])), strict=True)}
    if evaluate:
        made = ReferenceEvaluator(model).run(None, feeds)
    else:
        made = make_session(model.SerializeToString(), "cpu", 1, quiet=True).run(None, feeds)
    return [torch.from_numpy(x) for x in made]


def select_op(tensors, operands=None, **more):
    described = tuple((name, TensorDesc.of(x)) for name, x in (operands or {}).items())
    return SelectOp(*(TensorDesc.of(x) for x in tensors), **{"top_k": 4, "operands": described, **more})


SELECTIONS = {
    "every key": ({}, {}),
    "causal": ({"mask": atoms.Causal()}, {}),
    "causal from the last key": ({"mask": atoms.Causal(), "q_offset": "end"}, {}),
    "before the keys": ({"mask": atoms.Causal(), "q_offset": -3}, {}),
    "an offset each": ({"mask": atoms.Causal(), "q_offset": Ref("at")}, {"at": torch.tensor([-2, 3])}),
    "lengths": ({"mask": atoms.Causal() & atoms.KeyLengths(Ref("n"))}, {"n": torch.tensor([2, 7])}),
    "a window": ({"mask": atoms.Window(2, 1), "q_offset": "end"}, {}),
    "a dense mask": ({"mask": atoms.Dense(Ref("m"))}, {"m": torch.arange(2 * 6 * 9).view(2, 1, 6, 9) % 5 < 2}),
    "more places than keys": ({"top_k": 40, "mask": atoms.Causal()}, {}),
    "one place": ({"top_k": 1}, {}),
    "no activation": ({"activation": "identity", "scale": -1.0}, {}),
}


@pytest.mark.parametrize("evaluate", [False, True], ids=["onnxruntime", "as specified"])
@pytest.mark.parametrize("name", SELECTIONS)
def test_a_lowered_selection_is_the_selection_ties_and_order_included(name, evaluate):
    more, operands = SELECTIONS[name]
    tensors = select_tensors(2, 6, 9)
    op = select_op(tensors, operands, scores=True, **more)
    want = compile_select(op)(*tensors, operands)
    got = run_select(op, tensors, operands, evaluate)
    assert torch.equal(got[0], want.indices)
    torch.testing.assert_close(got[1], want.scores)
    (alone,) = run_select(op.with_(scores=False), tensors, operands, evaluate)
    assert torch.equal(alone, want.indices)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_selection_accumulates_as_the_specification_does(dtype):
    tensors = select_tensors(2, 5, 17, dtype, di=5, ties=False)
    op = select_op(tensors, scores=True)
    want = compile_select(op)(*tensors, {})
    got = run_select(op, tensors, {})
    assert torch.equal(got[0], want.indices)
    assert got[1].dtype == want.scores.dtype
    torch.testing.assert_close(got[1], want.scores, rtol=1e-13 if dtype == torch.float64 else 1e-5, atol=0.0)


def test_nan_and_infinite_scores_rank_as_in_a_selection():
    tensors = select_tensors(1, 3, 8)
    tensors[1][0, 2], tensors[1][0, 5], tensors[1][0, 6] = math.nan, math.inf, -math.inf
    op = select_op(tensors, mask=atoms.Causal(), q_offset="end", scores=True, top_k=7)
    want = compile_select(op)(*tensors, {})
    got = run_select(op, tensors, {})
    assert torch.equal(got[0], want.indices)
    torch.testing.assert_close(got[1], want.scores, equal_nan=True)


def test_one_session_of_a_selection_serves_all_lengths():
    op = select_op(select_tensors(2, 6, 9), mask=atoms.Causal(), q_offset="end")
    model = onnx_ir.to_proto(build_select_model(op, Target("standard", 18))).SerializeToString()
    session = make_session(model, "cpu", 1, quiet=True)
    for sizes in ((1, 1, 2), (3, 5, 5), (2, 1, 40), (1, 8, 3)):
        tensors = select_tensors(*sizes)
        feeds = dict(zip(("query", "key", "weights"), map(as_numpy, tensors), strict=True))
        want = compile_select(select_op(tensors, mask=op.mask, q_offset="end"))(*tensors, {})
        assert torch.equal(torch.from_numpy(session.run(None, feeds)[0]), want), sizes


@pytest.mark.parametrize("top_k", [1, 3, 64, 700])  # onnxruntime chooses among three algorithms by k and length
@pytest.mark.parametrize("skv", [65, 1000, 5000])
def test_ties_go_to_the_lowest_index_at_every_size(skv, top_k):
    tensors = select_tensors(1, 2, skv, hi=1, di=1)
    op = select_op(tensors, top_k=top_k)
    assert torch.equal(run_select(op, tensors, {})[0], compile_select(op)(*tensors, {}))


def test_ties_that_go_to_the_highest_index_are_seen(monkeypatch):
    plain = Nodes.__call__

    def last_of_equals(self, op_type, *inputs, **more):
        if op_type == "TopK" and more["largest"]:  # TopK of the reversed row takes the highest index of equal scores
            back = plain(self, "Slice", inputs[0], *(self.const([x]) for x in (-1, -(1 << 62), 2, -1)))
            values, at = plain(self, "TopK", back, inputs[1], **more)
            last = plain(self, "Sub", plain(self, "Shape", back, start=2, end=3), self.const([1]))
            return values, plain(self, "Sub", last, at)
        return plain(self, op_type, *inputs, **more)

    tensors = select_tensors(2, 6, 9)
    op = select_op(tensors)
    want = compile_select(op)(*tensors, {})
    assert torch.equal(run_select(op, tensors, {})[0], want)
    monkeypatch.setattr(Nodes, "__call__", last_of_equals)
    assert not torch.equal(run_select(op, tensors, {})[0], want)


def test_a_selection_is_refused_below_opset_18():
    op = select_op(select_tensors(1, 2, 3))
    assert [str(reason) for reason in reasons_against(op, Target("standard", 17))] == [
        "opset 17: a selection needs 18 (opset=18)"
    ]
    assert not reasons_against(op, Target("contrib", 18))


# --- exported programs -----------------------------------------------------------------------------------------------


class Sparse(torch.nn.Module):
    """Two layers that share one selection of keys."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value, index_query, index_key, weights):
        chosen = dispatch.select(index_query, index_key, weights, 4, **self.options)
        indices, *scores = chosen if self.options.get("return_scores") else (chosen,)
        mask = masks.causal() & masks.selected(indices)
        first = dispatch.attention(query, key, value, mask, enable_gqa=True)
        return dispatch.attention(first, key, value, mask, enable_gqa=True), indices, *scores


def sparse_inputs(b=2, s=6):
    gen = torch.Generator().manual_seed(b * s)
    heads = [torch.randn(b, h, s, 8, generator=gen) for h in (4, 2, 2)]
    return (*heads, *select_tensors(b, s, s, ties=False))


DYNAMIC = ({0: "batch", 2: "length"}, {0: "batch", 2: "length"}, {0: "batch", 2: "length"})
DYNAMIC_INDEX = ({0: "batch", 2: "length"}, {0: "batch", 1: "length"}, {0: "batch", 1: "length"})


class Select(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, weights):
        made = dispatch.select(query, key, weights, 4, **self.options)
        return tuple(made) if self.options.get("return_scores") else made


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"return_scores": True}, {"window": (2, 0), "q_offset": 1}, {"attn_mask": masks.Stride(2)}],
    ids=lambda options: ", ".join(options) or "plain",
)  # fmt: skip
def test_an_exported_selection_is_one_operator_for_all_lengths(options, strict):
    free = torch.export.Dim.DYNAMIC
    shapes = ({0: free, 2: free}, {0: free, 1: free}, {0: free, 1: free})
    module = Select(**options)
    program = torch.export.export(module, tuple(select_tensors(2, 5, 9)), dynamic_shapes=shapes, strict=strict)
    assert [node.target for node in program.graph.nodes].count(torch_select.OPERATOR) == 1
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for sizes in ((2, 5, 9), (3, 7, 7), (2, 1, 40)):
        tensors = select_tensors(*sizes)
        for got, want in zip(as_tuple(loaded(*tensors)), as_tuple(module(*tensors)), strict=True):
            torch.testing.assert_close(got, want)


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def test_scores_of_an_exported_selection_have_their_gradients():
    module = Select(return_scores=True)
    tensors = select_tensors(2, 5, 9, ties=False)
    program = torch.export.export(module, tuple(tensors)).module()
    found = []
    for run in (program, module):
        leaves = [x.clone().requires_grad_() for x in tensors]
        scores = run(*leaves)[1]
        loss = torch.where(torch.isfinite(scores), scores, 0.0).square().sum()
        found.append(torch.autograd.grad(loss, leaves))
    assert all(x.abs().sum() > 0 for x in found[1])
    torch.testing.assert_close(found[0], found[1])


def test_the_fake_of_the_operator_says_what_it_returns():
    tensors = select_tensors(2, 5, 9)
    for scores in (False, True):
        op = select_op(tensors, scores=scores, mask=atoms.Causal())
        with torch.device("meta"):
            fake = torch_select.call(op, *(torch.empty_like(x, device="meta") for x in tensors), {})
        real = torch_select.call(op, *tensors, {})
        assert [(x.shape, x.dtype, x.stride()) for x in fake] == [(x.shape, x.dtype, x.stride()) for x in real]


@pytest.mark.parametrize("form", ["standard", "decomposed", "function"])
@pytest.mark.parametrize("scores", [False, True])
def test_a_model_with_a_selection_exports_and_the_layers_share_its_mask(tmp_path, form, scores):
    options = {"return_scores": True} if scores else {}
    path = tmp_path / "sparse.onnx"
    report = export_onnx(Sparse(**options), sparse_inputs(), path, form=form, dynamic_shapes=(*DYNAMIC, *DYNAMIC_INDEX))
    assert len(report.calls) == 3
    assert len(report.checks) == 3
    assert all(check.ok and not check.skipped for check in report.checks)
    assert report.nodes["TopK"] == 2, "one by score, one that sorts the indices"
    if form == "standard":
        assert report.nodes["Attention"] == 2
        assert report.nodes["ScatterElements"] == 1
        assert report.calls[2].nodes == {"Attention": 1}
    found = read_model(path)
    assert [call.op.partition(" ")[0] for call in found.calls] == ["top", "q", "q"]


class Recurrent(torch.nn.Module):
    def __init__(self, variant):
        super().__init__()
        self.variant = variant

    def forward(self, query, key, value, s, z):
        state = variants.LinearState(s, z if self.variant == "linear" else None, 3)
        decay = torch.tensor([0.5, 0.9, 0.1, 1.0])
        variant = variants.LinearAttention() if self.variant == "linear" else variants.Retention(decay)
        out, after = dispatch.attention(
            query, key, value, is_causal=True, variant=variant, state=state, return_state=True
        )
        return (out, after.S) if after.z is None else (out, after.S, after.z)


@pytest.mark.parametrize("form", ["standard", "decomposed", "function", "contrib"])
@pytest.mark.parametrize("variant", ["linear", "retention"])
def test_the_linear_family_exports_with_its_state(tmp_path, form, variant):
    gen = torch.Generator().manual_seed(3)
    tensors = [torch.randn(2, 4, 6, 8, generator=gen) for _ in range(3)]
    tensors += [torch.randn(2, 4, 8, 8, generator=gen), torch.rand(2, 4, 8, generator=gen)]
    shapes = (*DYNAMIC, {0: "batch"}, {0: "batch"})
    report = export_onnx(Recurrent(variant), tensors, tmp_path / "x.onnx", form=form, dynamic_shapes=shapes)
    assert all(check.ok and not check.skipped for check in report.checks)
    assert len(report.checks) == 3
    assert report.nodes["LinearAttention"] == (form == "contrib")
    assert (report.calls[0].nodes.get("MatMul", 0) > 0) == (form in ("standard", "decomposed"))


def test_layers_of_one_kind_share_one_function_in_a_file(tmp_path):
    path = tmp_path / "two.onnx"
    report = export_onnx(Sparse(), sparse_inputs(), path, form="function", dynamic_shapes=(*DYNAMIC, *DYNAMIC_INDEX))
    model = onnx.load(path)
    calls = [node.op_type for node in model.graph.node if node.domain == "attn_dispatch"]
    assert len(calls) == 2
    assert [function.name for function in model.functions] == [calls[0]]
    assert set(calls) == {calls[0]}
    onnx.checker.check_model(model)
    assert report.calls[1].form == "function"
    inputs = sparse_inputs(3, 9)
    feeds = {x.name: as_numpy(t) for x, t in zip(model.graph.input, inputs, strict=True)}
    made = ReferenceEvaluator(model).run(None, feeds)
    want = Sparse()(*inputs)
    torch.testing.assert_close(torch.from_numpy(made[0]), want[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.from_numpy(made[1]), want[1])


def test_lengths_beside_a_bias_are_numbers_of_the_node_where_the_runtime_knows_both():
    x = TensorDesc((2, 2, 4, 8), "float32")
    operands = (("lengths", TensorDesc((2,), "int64")), ("bias", TensorDesc((1, 2, 4, 4), "float32")))
    op = AttentionOp(x, x, x, mask=atoms.KeyLengths(Ref("lengths")), score=(Bias(Ref("bias")),), operands=operands)

    def wheres(**changes) -> int:
        model = build_model(op, Target("standard", 24, **changes))
        return [node.op_type for node in model.graph].count("Where")

    known, less = SPECIFIED, SPECIFIED - {"lengths_and_bias"}
    assert [wheres(proven=words, hides=hides) for words in (known, less) for hides in (False, True)] == [0, 2, 1, 3]


@pytest.mark.parametrize("padding", ["lengths", "columns"])
@pytest.mark.parametrize("biased", [False, True])
def test_the_backend_leaves_nan_in_padding_to_the_dispatcher(padding, biased):
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    lengths = torch.tensor([3, 5])
    columns = {"attn_mask": (torch.arange(5) < lengths[:, None])[:, None, None]}
    options = {"key_lengths": lengths} if padding == "lengths" else columns
    options |= {"bias": torch.randn(1, 2, 5, 5)} if biased else {}
    op = dispatch.explain(q, k, v, **options).op
    assert not OnnxRuntime().target_for(op).hides
    want = dispatch.attention(q, k, v, **options, backend="eager")
    k[0, :, 3:] = v[0, :, 3:] = torch.nan
    got = dispatch.attention(q, k, v, **options, backend="onnxruntime")
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_nan_in_padded_values_does_not_reach_a_state():
    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    lengths = torch.tensor([3, 5])
    options = {"is_causal": True, "key_lengths": lengths, "query_lengths": lengths, "return_state": True}
    options["variant"] = variants.LinearAttention("elu1")
    v[0, :, 3:] = torch.nan
    got, want = (dispatch.attention(q, k, v, **options, backend=name) for name in ("onnxruntime", "eager"))
    torch.testing.assert_close(got.out, want.out, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got.state.S, want.state.S, atol=1e-4, rtol=1e-4)


def test_a_mask_may_say_more_keys_than_there_are():
    q, k, v = (torch.randn(3, 2, 5, 8) for _ in range(3))
    mask = masks.key_lengths(torch.tensor([9, 5, 2])) & masks.causal()
    got, want = (dispatch.attention(q, k, v, mask, backend=name) for name in ("onnxruntime", "eager"))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_row_that_length_and_window_leave_nothing_gives_0():
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
    options = {"key_lengths": torch.tensor([2, 6]), "window": (1, 0)}
    got, want = (dispatch.attention(q, k, v, **options, backend=name) for name in ("onnxruntime", "eager"))
    assert (want[0, :, 3:] == 0).all()
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
