"""The op as a value: what it says of itself survives YAML and processes, and nothing is left out of its key."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from test_masks import drawn_masks
from torch._subclasses.fake_tensor import FakeTensorMode

from attn_dispatch import dispatch, masks
from attn_dispatch.capability import ALL_FEATURES
from attn_dispatch.ir import (
    END,
    Alibi,
    AttentionOp,
    Bias,
    Linear,
    Outputs,
    Ref,
    SoftCap,
    Softmax,
    TensorDesc,
    bucket,
    verify,
)
from attn_dispatch.ir import atoms as atoms_of
from attn_dispatch.ir.atoms import Causal, Full, KeyLengths, Window
from attn_dispatch.ir.operands import Table
from attn_dispatch.ir.tensors import stride_class

DTYPES = ["float64", "float32", "bfloat16", "float16"]


def plain_op(**changes) -> AttentionOp:
    shape = TensorDesc((2, 4, 7, 16), "float32")
    op = AttentionOp(shape, shape.with_shape(2, 2, 9, 16), shape.with_shape(2, 2, 9, 16))
    return op.with_(**changes)


@st.composite
def ops(draw, scales=(None, 0.25, 0.0, -1.0)) -> AttentionOp:
    """A random valid op: any mask, scores, weight, outputs and flags."""
    n = draw(drawn_masks())
    mask, tensors = n.mask.bind()
    operands = {name: TensorDesc.of(tensor) for name, tensor in tensors.items()}
    hkv = draw(st.sampled_from([1, 2]))
    d, dv = draw(st.integers(0, 9)), draw(st.integers(1, 9))
    strides = draw(st.sampled_from(["rows", "scattered"]))
    query = TensorDesc((n.batch, 2, n.sq, d), draw(st.sampled_from(DTYPES)), "cpu", strides)
    score = draw(st.lists(st.sampled_from(["cap", "bias", "alibi"]), max_size=2, unique=True))
    terms = []
    for kind in score:
        if kind == "cap":
            terms.append(SoftCap(draw(st.sampled_from([0.0, 1.5, 50.0, float("inf")]))))
        elif kind == "bias":
            operands["bias"] = TensorDesc((1, 2, n.sq, n.skv), query.dtype)
            terms.append(Bias(Ref("bias")))
        else:
            operands["slopes"] = TensorDesc((2,), "float32")
            terms.append(Alibi(Ref("slopes")))
    running = Linear("elu1", None, 1e-6, Ref("state"), Ref("state_z"), Ref("state_length"))
    kinds = [Softmax(), Softmax(Ref("sinks")), Linear("elu1", Ref("decay"), 1e-6), Linear(), running]
    weight = draw(st.sampled_from(kinds))
    if weight is running:
        operands["state"] = TensorDesc((n.batch, hkv, d, dv), "float32")
        operands["state_z"] = TensorDesc((n.batch, hkv, d), "float32")
        operands["state_length"] = TensorDesc((draw(st.sampled_from([1, n.batch])),), "int64")
    for ref in (getattr(weight, "sinks", None), getattr(weight, "decay", None)):
        if ref is not None:
            operands[ref.name] = TensorDesc((2,), "float32")
    offset = draw(st.sampled_from([n.q_offset, END, Ref("q_offset")]))
    if isinstance(offset, Ref):
        operands["q_offset"] = TensorDesc((n.batch,), "int64")
    if draw(st.booleans()):
        operands["unused"] = TensorDesc((3,), "float32")
    return AttentionOp(
        query,
        query.with_shape(n.batch, hkv, n.skv, d),
        query.with_shape(n.batch, hkv, n.skv, dv),
        scale=draw(st.sampled_from(scales)),
        score=tuple(terms),
        mask=mask,
        q_offset=offset,
        weight=weight,
        dropout_p=draw(st.sampled_from([0.0, 0.5])),
        outputs=Outputs(draw(st.booleans()), draw(st.booleans()), isinstance(weight, Linear) and draw(st.booleans())),
        operands=tuple(operands.items()),
        grad=draw(st.sampled_from([(), ("query",), ("query", "key", "value"), tuple(operands)[:1]])),
        higher_order=draw(st.booleans()),
        deterministic=draw(st.booleans()),
        traced=draw(st.booleans()),
        layout=draw(st.sampled_from(["bhsd", "bshd"])),
    )


# --- YAML, text, digest ----------------------------------------------------------------------------------------------


@given(op=ops())
def test_an_op_survives_yaml(op):
    again = AttentionOp.from_dict(yaml.safe_load(yaml.safe_dump(op.to_dict())))
    assert again == op
    assert hash(again) == hash(op)
    assert again.digest() == op.digest()


@given(op=ops())
def test_an_op_can_be_printed_and_the_text_names_its_sizes_and_device(op):
    text = str(op)
    assert str(list(op.query.shape)) in text
    assert text.endswith(op.device)


def test_the_order_in_which_operands_are_named_means_nothing():
    a, b = ("a", TensorDesc((2,), "float32")), ("b", TensorDesc((3,), "float32"))
    assert plain_op(operands=(a, b)) == plain_op(operands=(b, a))


def test_a_plain_op_writes_nothing_that_is_a_default():
    assert set(plain_op().to_dict()) == {"query", "key", "value"}


def test_from_dict_refuses_a_key_that_no_op_has():
    with pytest.raises(ValueError, match="no colour"):
        AttentionOp.from_dict({**plain_op().to_dict(), "colour": "red"})


SCRIPT = """
from attn_dispatch.ir import *
from attn_dispatch.ir.atoms import Causal, Window, BlockTable, KeyLengths
q = TensorDesc((2, 4, 7, 16), "float32")
mask = (Causal() & Window(3, None)) | BlockTable(4, [[True, False], [False, True]]) | KeyLengths(Ref("n"))
op = AttentionOp(q, q, q, mask=mask, score=(SoftCap(2.0),), grad=("query",), operands=(("n", q.with_shape(2)),))
print(op.digest(), op.mask.digest())
"""


def test_digests_are_equal_in_every_process():
    def run(seed: str) -> str:
        env = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, check=True, capture_output=True, text=True
        ).stdout

    first = run("1")
    assert len(first.split()) == 2
    assert first == run("2")


CHANGES = {
    "query": TensorDesc((2, 4, 7, 16), "bfloat16"),
    "key": TensorDesc((2, 2, 9, 16), "float32", "cpu", "scattered"),
    "value": TensorDesc((2, 2, 9, 8), "float32"),
    "scale": 0.5,
    "score": (SoftCap(2.0),),
    "mask": Causal(),
    "q_offset": 1,
    "weight": Softmax(Ref("sinks")),
    "dropout_p": 0.1,
    "outputs": Outputs(lse=True),
    "operands": (("bias", TensorDesc((1, 1, 7, 9), "float32")),),
    "grad": ("query",),
    "higher_order": True,
    "deterministic": True,
    "traced": True,
    "layout": "bshd",
}


def test_every_field_of_an_op_has_a_change_here():
    assert set(CHANGES) == {f.name for f in fields(AttentionOp)}


@pytest.mark.parametrize("name", CHANGES)
def test_changing_one_field_changes_the_key(name):
    op, other = plain_op(), plain_op(**{name: CHANGES[name]})
    assert other != op
    assert other.key_text != op.key_text
    assert other.digest() != op.digest()
    assert AttentionOp.from_dict(other.to_dict()) == other


INNER = {
    "shape": replace(plain_op().query, shape=(2, 4, 7, 32)),
    "dtype": replace(plain_op().query, dtype="float16"),
    "device": replace(plain_op().query, device="cuda"),
    "strides": replace(plain_op().query, strides="scattered"),
}


def test_every_field_of_a_descriptor_has_a_change_here():
    assert set(INNER) == {f.name for f in fields(TensorDesc)}


@pytest.mark.parametrize("name", INNER)
def test_changing_one_field_of_a_descriptor_changes_the_key(name):
    assert plain_op(query=INNER[name]).digest() != plain_op().digest()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"q_offset": END}, {"q_offset": Ref("end")}),
        ({"score": (SoftCap(2.0), Bias(Ref("b")))}, {"score": (Bias(Ref("b")), SoftCap(2.0))}),
        ({"mask": Window(3, None)}, {"mask": Window(None, 3)}),
        ({"mask": KeyLengths(Ref("a"))}, {"mask": KeyLengths(Ref("b"))}),
        ({"weight": Linear("elu1")}, {"weight": Linear("identity")}),
        ({"weight": Linear("elu1")}, {"weight": Linear("elu1", None, 1e-6)}),
        ({"outputs": Outputs(lse=True)}, {"outputs": Outputs(weights=True)}),
        ({"score": (SoftCap(2.0),)}, {"score": (SoftCap(2.0000000001),)}),
    ],
    ids=["end_or_name", "order_of_terms", "sides", "names", "feature_map", "normalizer", "outputs", "digits"],
)
def test_two_ops_that_differ_only_in_detail_have_two_keys(one, other):
    assert plain_op(**one).digest() != plain_op(**other).digest()


# --- features --------------------------------------------------------------------------------------------------------


@settings(max_examples=400)
@given(op=ops())
def test_every_word_of_any_op_is_among_all_features(op):
    assert op.features <= ALL_FEATURES


def test_every_atom_has_its_word_among_all_features():
    for name in atoms_of.__all__:
        assert f"mask:{name}" in ALL_FEATURES


WORDS = {
    "gqa": {},
    "dv_differs": {"value": TensorDesc((2, 2, 9, 8), "float32")},
    "dropout": {"dropout_p": 0.1},
    "lse": {"outputs": Outputs(lse=True)},
    "weights": {"outputs": Outputs(weights=True)},
    "grad": {"grad": ("key",)},
    "grad:operands": {"grad": ("bias",)},
    "grad:lse": {"grad": ("key",), "outputs": Outputs(lse=True)},
    "higher_order": {"higher_order": True},
    "traced": {"traced": True},
    "empty": {"query": TensorDesc((2, 4, 0, 16), "float32")},
    "scattered": {"key": CHANGES["key"]},
    "scale<=0": {"scale": 0.0},
    "sinks": {"weight": Softmax(Ref("sinks"))},
    "decay": {"weight": Linear("identity", Ref("decay"))},
    "state:in": {"weight": Linear("identity", None, None, Ref("state"))},
    "state:out": {"weight": Linear(), "outputs": Outputs(state=True)},
    "q_offset:nonzero": {"mask": Causal(), "q_offset": END},
    "q_offset:tensor": {"mask": Causal(), "q_offset": Ref("q_offset")},
    "score:SoftCap": {"score": (SoftCap(1.0),)},
    "score:Bias": {"score": (Bias(Ref("bias")),)},
    "score:Alibi": {"score": (Alibi(Ref("bias")),)},
    "weight:Softmax": {},
    "weight:Linear": {"weight": Linear()},
    "combine:And": {"mask": Causal() & Window(1, None)},
    "combine:Or": {"mask": ~(Causal() | Window(1, None))},
    "combine:Not": {"mask": Causal() & ~Window(1, None)},
    "mask:Not": {"mask": ~Causal()},
}


@pytest.mark.parametrize("word", WORDS)
def test_a_feature_word_stands_for_what_it_says(word):
    assert word in plain_op(**WORDS[word]).features
    same_heads = {"key": TensorDesc((2, 4, 9, 16), "float32"), "value": TensorDesc((2, 4, 9, 16), "float32")}
    if not word.startswith(("weight:Softmax", "gqa")):
        assert word not in plain_op(**same_heads).features


def test_every_feature_word_is_made_by_an_op_of_this_file_or_is_an_atom():
    atoms = {f"mask:{name}" for name in atoms_of.__all__}
    assert set(WORDS) | atoms == ALL_FEATURES


def test_an_offset_that_no_part_of_the_mask_uses_is_no_feature():
    assert "q_offset:nonzero" not in plain_op(mask=Full(), q_offset=3).features


# --- buckets ---------------------------------------------------------------------------------------------------------


@given(n=st.integers(0, 1 << 20), m=st.integers(0, 1 << 20))
def test_a_bucket_is_a_power_of_two_that_holds_its_length_and_never_falls(n, m):
    assert n <= bucket(n) < 2 * max(n, 1)
    assert bucket(n) & (bucket(n) - 1) == 0
    assert bucket(bucket(n)) == bucket(n)
    assert (bucket(n) <= bucket(m)) or n > m


def test_zero_and_one_are_buckets_of_their_own():
    assert [bucket(n) for n in (0, 1, 2, 3)] == [0, 1, 2, 4]


@given(op=ops())
def test_a_bucketed_op_is_valid_keeps_all_but_lengths_and_stays_in_its_bucket(op):
    top = op.bucketed()
    verify(top)
    assert top.bucketed() == top
    assert top.Sq >= op.Sq
    assert top.Skv >= op.Skv
    assert (top.Sq == top.Skv) == (op.Sq == op.Skv)
    same = ("scale", "weight", "dropout_p", "outputs", "layout", "traced")
    assert all(getattr(top, name) == getattr(op, name) for name in same)
    assert (top.Hq, top.Hkv, top.D, top.Dv, top.dtype) == (op.Hq, op.Hkv, op.D, op.Dv, op.dtype)
    assert without_names(top) == without_names(op)


def names_in(op: AttentionOp) -> set[str]:
    """What the tensors of its mask and biases are called."""
    return {*op.mask.refs(), *(str(term).partition("(")[2][:-1] for term in op.score if not isinstance(term, SoftCap))}


def without_names(op: AttentionOp) -> list[list[str]]:
    """Its mask's atoms, score terms, operands and gradients, without those names."""
    names = names_in(op)
    parts = (map(str, op.mask.atoms()), map(str, op.score), (name for name, _ in op.operands), op.grad)
    pattern = re.compile("|".join(rf"\b{name}\b" for name in names) or "$^")
    return [sorted(pattern.sub("_", text) for text in part) for part in parts]


@given(op=ops())
def test_what_a_tensor_is_called_does_not_change_the_bucket(op):
    text = json.dumps(op.to_dict())
    for name in names_in(op):
        text = re.sub(rf"\b{name}\b", f"other_{name}", text)
    other = AttentionOp.from_dict(json.loads(text))
    assert (other == op) == (not names_in(op))
    assert other.bucketed() == op.bucketed()


def test_a_padding_mask_is_one_op_however_it_is_given():
    q, kv, kept = torch.ones(2, 2, 1, 8), torch.ones(2, 2, 20, 8), torch.arange(20) < torch.tensor([[20], [9]])
    masks_ = [kept[:, None, None], masks.columns(keep=kept)]
    given = [dispatch.explain(q, kv, kv, mask).op for mask in masks_]
    assert [str(op.mask) for op in given] == ["Columns(attn_mask)", "Columns(mask0)"]
    assert given[0].bucketed() == given[1].bucketed()


def test_lengths_of_one_bucket_make_one_bucketed_op():
    def decode(length: int) -> AttentionOp:
        keys = TensorDesc((1, 2, length, 16), "float32")
        return AttentionOp(TensorDesc((1, 4, 1, 16), "float32"), keys, keys, mask=Causal(), q_offset=END)

    assert len({decode(n).bucketed() for n in range(129, 257)}) == 1
    assert decode(128).bucketed() != decode(129).bucketed()


# --- verify ----------------------------------------------------------------------------------------------------------


BROKEN = {
    "four dimensions": {"query": TensorDesc((4, 7, 16), "float32")},
    "batch sizes 3, 2, 2": {"query": TensorDesc((3, 4, 7, 16), "float32")},
    "agree in all but the last": {"value": TensorDesc((2, 2, 8, 16), "float32")},
    "head sizes of query 8 and key 16": {"query": TensorDesc((2, 4, 7, 8), "float32")},
    "query heads 3 are a multiple of kv heads 2": {"query": TensorDesc((2, 3, 7, 16), "float32")},
    "operands ['lengths']": {"mask": KeyLengths(Ref("lengths"))},
    "operands ['bias']": {"score": (Bias(Ref("bias")),)},
    "operands ['slopes']": {"score": (Alibi(Ref("slopes")),)},
    "operands ['sinks']": {"weight": Softmax(Ref("sinks"))},
    "operands ['decay']": {"weight": Linear("identity", Ref("decay"))},
    "operands ['state']": {"weight": Linear("identity", None, None, Ref("state"))},
    "only the linear family has a state": {"outputs": Outputs(state=True)},
    "the state is [B, H, D, Dv] = [2, 2, 16, 16]": {
        "weight": Linear("identity", None, None, Ref("state")),
        "operands": (("state", TensorDesc((2, 4, 16, 16), "float32")),),
    },
    "the state is given with its sum z": {
        "weight": Linear("identity", None, 1e-6, Ref("state")),
        "operands": (("state", TensorDesc((2, 2, 16, 16), "float32")),),
    },
    "operands ['where']": {"q_offset": Ref("where")},
    "dropout_p 1.5": {"dropout_p": 1.5},
    "dtypes are torch's": {"value": TensorDesc((2, 2, 9, 16), "float33")},
}


@pytest.mark.parametrize("rule", BROKEN)
def test_verify_names_the_rule_that_an_op_breaks(rule):
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below
        verify(plain_op(**BROKEN[rule]))
    assert rule in str(error.value)


def test_verify_accepts_a_valid_op():
    verify(plain_op())


def test_rows_are_told_from_heads_that_lie_side_by_side_and_share_a_bucket():
    """What a projection leaves is measured as it lies; the decision serves both."""
    base = torch.randn(2, 5, 3, 8)
    kinds = {
        "rows": [base, base[:, :, :2], base[:, :1], base[..., :4], base[:, :, :1].transpose(1, 2)],
        "bshd": [base.transpose(1, 2), torch.randn(2, 5, 9, 8)[:, :, 3:6].transpose(1, 2)],
        "scattered": [base.transpose(-1, -2), base.permute(0, 2, 3, 1)],
    }
    for kind, tensors in kinds.items():
        assert [stride_class(x) for x in tensors] == [kind] * len(tensors)
    assert stride_class(base[:, :1].expand(2, 4, 3, 8)) == "rows"
    x = TensorDesc((1, 2, 24, 8), "float32")
    side_by_side = replace(x, strides="bshd")
    ops = [AttentionOp(desc, desc, desc, scale=1.0) for desc in (x, side_by_side, replace(x, strides="scattered"))]
    assert ops[0] != ops[1]
    assert ops[0].bucketed() == ops[1].bucketed()
    assert ops[0].bucketed() != ops[2].bucketed()
    assert AttentionOp.from_dict(ops[1].to_dict()) == ops[1]


def test_a_table_is_not_kept_as_a_default_device_or_a_mode_made_it():
    table = Table.of([[3, 1], [4, 1]])
    with torch.device("meta"):
        assert table.tensor().tolist() == [[3, 1], [4, 1]]
    other = Table.of([[True, False]])
    with FakeTensorMode():
        other.tensor()
    assert other.tensor().tolist() == [[True, False]]
    assert type(other.tensor()) is torch.Tensor


def test_masks_with_tables_need_no_numpy():
    """A plain install has none, and BigBird failed there with "Numpy is not available"."""
    program = """
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")
import torch
from attn_dispatch import dispatch, masks
q = torch.randn(1, 2, 8, 16)
for mask in (masks.Columns([True] * 7 + [False]), masks.bigbird(8, 2, 1, 1, 1), masks.columns(keep=torch.ones(8) > 0)):
    assert dispatch.attention(q, q, q, mask).shape == q.shape
    assert hash(mask) == hash(mask)
print("done")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "done", done.stderr[-800:]
