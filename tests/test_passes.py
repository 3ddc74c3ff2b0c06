"""Passes: one test for each numbered rule of each docstring, and what the whole pipeline promises."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ir import ops, plain_op
from test_masks import drawn_masks

from attn_dispatch.ir import END, Alibi, AttentionOp, Bias, Linear, Mask, Ref, SoftCap, Softmax, TensorDesc
from attn_dispatch.ir import verify as verify_op
from attn_dispatch.ir.atoms import Causal, Full, KeyLengths, KeyRange, SameBlock, Segments, Stride, Window
from attn_dispatch.passes import PIPELINE, canonicalise
from attn_dispatch.passes.default_scale import default_scale
from attn_dispatch.passes.drop_noops import drop_noops
from attn_dispatch.passes.normalise_offset import normalise_offset
from attn_dispatch.passes.simplify_mask import simplify_mask

NOTHING = ~Full()
IDS = Segments(Ref("ids"), Ref("ids"))
OPERANDS = (("ids", TensorDesc((2, 7), "int64")),)


def op_of(mask: Mask, sq: int = 7, skv: int = 9, q_offset=0, **more) -> AttentionOp:
    desc = TensorDesc((2, 2, sq, 8), "float32")
    keys = desc.with_shape(2, 2, skv, 8)
    return AttentionOp(desc, keys, keys, mask=mask, q_offset=q_offset, operands=OPERANDS, **more)


# --- default_scale ---------------------------------------------------------------------------------------------------


def test_default_scale_rule_1_writes_out_the_scale_of_the_head_size():
    op, changed = default_scale(plain_op())
    assert (op.scale, changed) == (16**-0.5, True)


def test_default_scale_rule_1_is_1_for_a_head_size_of_0():
    keys = TensorDesc((1, 1, 3, 0), "float32")
    assert default_scale(AttentionOp(keys, keys, keys))[0].scale == 1.0


@pytest.mark.parametrize("scale", [0.0, 1.0, -2.0])
def test_default_scale_leaves_a_scale_that_is_given(scale):
    assert default_scale(plain_op(scale=scale)) == (plain_op(scale=scale), False)


# --- drop_noops ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0.0, math.inf])
def test_drop_noops_rule_1_drops_a_soft_cap_that_caps_nothing(cap):
    op, changed = drop_noops(plain_op(score=(SoftCap(cap), SoftCap(3.0))))
    assert (op.score, changed) == ((SoftCap(3.0),), True)


def test_drop_noops_rule_2_forgets_operands_that_nothing_refers_to():
    desc = TensorDesc((2,), "float32")
    used = plain_op(
        mask=KeyLengths(Ref("lengths")),
        score=(Bias(Ref("bias")), Alibi(Ref("slopes"))),
        weight=Softmax(Ref("sinks")),
        q_offset=Ref("where"),
        operands=tuple((n, desc) for n in ("lengths", "bias", "slopes", "sinks", "where", "spare")),
        grad=("query", "bias", "spare"),
    )
    op, changed = drop_noops(used)
    assert changed
    assert [name for name, _ in op.operands] == ["bias", "lengths", "sinks", "slopes", "where"]
    assert op.grad == ("query", "bias")


def test_drop_noops_keeps_the_decay_of_linear_attention():
    op = plain_op(weight=Linear("identity", Ref("decay")), operands=(("decay", TensorDesc((4,), "float32")),))
    assert drop_noops(op) == (op, False)


# --- simplify_mask ---------------------------------------------------------------------------------------------------

# rule -> (mask, sizes and offset, what becomes of it)
SIMPLER = {
    "1 full and": (Full() & IDS, {}, IDS),
    "1 full or": (Full() | IDS, {}, Full()),
    "1 only full": (Full() & ~NOTHING, {}, Full()),
    "2 not not": (~(~IDS), {}, IDS),
    "2 nothing and": (NOTHING & IDS, {}, NOTHING),
    "2 nothing or": (NOTHING | IDS, {}, IDS),
    "2 not of what became full": (~Stride(1), {}, NOTHING),
    "3 causal in decode": (Causal(), {"sq": 1, "skv": 9, "q_offset": END}, Full()),
    "3 causal behind the keys": (Causal(), {"q_offset": 8}, Full()),
    "3 causal before the last key": (Causal(), {"q_offset": 7}, Causal()),
    "4 left beyond all keys": (Window(6, 1), {}, Window(None, 1)),
    "4 left just reaches": (Window(5, 1), {}, Window(5, 1)),
    "4 right beyond all keys": (Window(2, 8), {}, Window(2, None)),
    "4 right just reaches": (Window(2, 7), {}, Window(2, 7)),
    "4 both": (Window(6, 8), {}, Full()),
    "4 no offset known": (Window(60, 80), {"q_offset": Ref("ids")}, Window(60, 80)),
    "5 right 0": (Window(3, 0), {}, Causal() & Window(3, None)),
    "5 right 0 without left": (Window(None, 0), {}, Causal()),
    "6 causal and window": (Causal() & Window(3, 2), {}, Causal() & Window(3, None)),
    "6 causal and window without left": (Causal() & Window(None, 2), {}, Causal()),
    "7 key range over all keys": (KeyRange(0, 9), {}, Full()),
    "7 key range short of one": (KeyRange(0, 8), {}, KeyRange(0, 8)),
    "7 key range from 1": (KeyRange(1, 9), {}, KeyRange(1, 9)),
    "7 key range with a period": (KeyRange(0, 9, 12), {}, KeyRange(0, 9, 12)),
    "8 one block": (SameBlock(9), {}, Full()),
    "8 two blocks": (SameBlock(8), {}, SameBlock(8)),
    "8 before block 0": (SameBlock(9), {"q_offset": -1}, SameBlock(9)),
    "9 stride 1": (Stride(1), {}, Full()),
    "9 stride 2": (Stride(2), {}, Stride(2)),
}


@pytest.mark.parametrize("rule", SIMPLER)
def test_simplify_mask_follows_its_rule(rule):
    mask, where, want = SIMPLER[rule]
    op = op_of(mask, **where)
    got, changed = simplify_mask(op)
    assert got.mask == want
    assert changed == (want != mask)


# --- normalise_offset ------------------------------------------------------------------------------------------------

OFFSETS = {
    "1 no positions": (op_of(IDS, q_offset=5), 0),
    "1 a tensor nobody needs": (op_of(Full(), q_offset=Ref("ids")), 0),
    "1 alibi has positions": (op_of(Full(), q_offset=5, score=(Alibi(Ref("ids")),)), 5),
    "1 decay has positions": (op_of(Full(), q_offset=5, weight=Linear("identity", Ref("ids"))), 5),
    "2 end of equal lengths": (op_of(Causal(), sq=9, q_offset=END), 0),
    "3 a number that is the end": (op_of(Causal(), q_offset=2), END),
    "3 another number": (op_of(Causal(), q_offset=3), 3),
    "3 a negative end": (op_of(Causal(), sq=11, q_offset=-2), END),
    "3 a tensor": (op_of(Causal(), q_offset=Ref("ids")), Ref("ids")),
}


@pytest.mark.parametrize("rule", OFFSETS)
def test_normalise_offset_follows_its_rule(rule):
    op, want = OFFSETS[rule]
    got, changed = normalise_offset(op)
    assert got.q_offset == want
    assert changed == (op.q_offset != want)


# --- the pipeline ----------------------------------------------------------------------------------------------------


def test_every_numbered_rule_has_a_test_here():
    import inspect
    import sys

    this = inspect.getsource(sys.modules[__name__])
    tables = {"simplify_mask": SIMPLER, "normalise_offset": OFFSETS}
    for step in PIPELINE:
        rules = re.findall(r"^(\d+)\. ", inspect.getmodule(step).__doc__, re.M)
        assert rules
        for n in rules:
            named = any(key.startswith(f"{n} ") for key in tables.get(step.__name__, ()))
            assert named or f"def test_{step.__name__}_rule_{n}_" in this, (step.__name__, n)


@settings(max_examples=400)
@given(n=drawn_masks(), wide=st.integers(0, 3))
def test_canonicalise_keeps_exactly_the_pairs_that_attend(n, wide):
    mask, tensors = n.mask.bind()
    operands = tuple((name, TensorDesc.of(tensor)) for name, tensor in tensors.items())
    desc = TensorDesc((n.batch, 2, n.sq, 8), "float32")
    keys = desc.with_shape(n.batch, 2, n.skv, 8)
    op = AttentionOp(desc, keys, keys, mask=mask, q_offset=n.q_offset if wide else END, operands=operands)
    after, _ = canonicalise(op)
    shape = (n.batch, 2, n.sq, n.skv)
    before = op.mask.dense(n.sq, n.skv, op.static_offset(), tensors).expand(shape)
    got = after.mask.dense(n.sq, n.skv, after.static_offset(), tensors).expand(shape)
    assert torch.equal(got, before)


@settings(max_examples=400)
@given(op=ops())
def test_canonicalise_is_idempotent_valid_and_touches_nothing_else(op):
    once, trace = canonicalise(op)
    verify_op(once)
    twice, nothing = canonicalise(once)
    assert (twice, nothing) == (once, ())
    assert (trace == ()) == (once == op)
    assert not trace or trace[-1].after == once
    same = ("query", "key", "value", "weight", "dropout_p", "outputs", "higher_order", "deterministic", "traced")
    assert all(getattr(once, name) == getattr(op, name) for name in same)
    assert once.effective_scale == op.effective_scale


@given(op=ops())
def test_every_pass_says_truly_whether_it_changed_the_op(op):
    for step in PIPELINE:
        after, changed = step(op)
        assert changed == (after != op)


def test_canonicalise_names_the_passes_when_one_makes_an_invalid_op(monkeypatch):
    from attn_dispatch import passes

    def breaks(op: AttentionOp) -> tuple[AttentionOp, bool]:
        return op.with_(dropout_p=2.0), op.dropout_p != 2.0

    monkeypatch.setattr(passes, "PIPELINE", (default_scale, breaks))
    with pytest.raises(ValueError, match="after the passes default_scale, breaks"):
        canonicalise(plain_op())
