"""FlashInfer without FlashInfer: refusals word for word, and every argument against a stand-in on the CPU.

The stand-in has the real signatures and computes what the documentation says, so the whole contract suite runs through
the plugin's mapping. The kernels themselves are untested.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import fake_flashinfer
import pytest
import torch
from attn_dispatch_flashinfer import FlashInfer, attn_dispatch_backends, wrappers
from attn_dispatch_flashinfer.pages import plan_pages

from attn_dispatch import BackendError, dispatch, masks, testing
from attn_dispatch.plugin import AttentionOp, TensorDesc
from attn_dispatch.registry import Registry, current
from attn_dispatch.testing import CASES, Case, Result, Verdict, check
from attn_dispatch.testing.cases import Sizes


class OnCpu(FlashInfer):
    """The backend over the stand-in, on the CPU and for every head size; its other facts are what they are."""

    compile_s = 0.0

    def __init__(self, version="0.6.18", library=fake_flashinfer):
        super().__init__(version)
        self.library = library
        (facts,) = self.capabilities
        dtypes = facts.dtypes | {"float32", "float64"}
        self.capabilities = (replace(facts, devices=frozenset({"cpu"}), dtypes=dtypes),)

    def unavailable(self):
        return None

    def extra_reasons(self, op):
        return [reason for reason in super().extra_reasons(op) if reason.field != "head_dim" or op.Dv != op.D]

    def load(self):
        return self.library


# trim_lengths runs its inner op at lengths of the data, for the CPU alone: on a GPU it refuses
REWRITES = {name: rewrite for name, rewrite in current().rewrites.items() if name != "trim_lengths"}
REGISTRY = Registry({"eager": current().backends["eager"], "flashinfer": OnCpu()}, REWRITES)


@functools.cache
def results(case: Case) -> dict[str, Result]:
    """Every candidate of a case that ends in FlashInfer; a wrong one raises."""
    found = testing.candidates_of(case, REGISTRY)
    return {c.name: check(c.name, case, REGISTRY) for c in found if c.backend.name == "flashinfer"}


EXTRA = (
    Case("decode_lse", sizes=Sizes(3, 4, 2, 1, 9, 64, 64), lse=True),
    Case("decode_lengths", "key_lengths", sizes=Sizes(3, 4, 2, 1, 9, 64, 64), lse=True),
    Case("decode_window", "window_causal", sizes=Sizes(2, 6, 1, 1, 20, 64, 64), lse=True),
    Case("decode_lengths_zero", "key_lengths_zero", sizes=Sizes(2, 4, 2, 1, 9, 64, 64), lse=True),
    Case("prefill_lengths", "key_lengths_zero", sizes=Sizes(2, 4, 2, 5, 9, 64, 64), lse=True),
    Case("sinks_lengths", "key_lengths", sizes=Sizes(2, 4, 2, 5, 9, 64, 64), sinks=True),
    Case("sinks_window", "window_causal", sizes=Sizes(2, 4, 2, 5, 9, 64, 64), sinks=True),
    Case("sinks_decode", sizes=Sizes(2, 4, 2, 1, 9, 64, 64), sinks=True),
)


@pytest.mark.parametrize("case", [*CASES, *EXTRA], ids=lambda case: case.id)
def test_flashinfer_is_right_or_refuses_alone_and_in_every_chain(case):
    found = results(case)
    assert "flashinfer" in found
    assert all(result.verdict is Verdict.VERIFIED or result.reasons for result in found.values())
    assert case not in EXTRA or found["flashinfer"].verdict is Verdict.VERIFIED


def test_every_feature_that_it_claims_is_in_a_case_that_it_is_verified_on():
    shown: set[str] = set()
    for case in (*CASES, *EXTRA):
        good = {name for name, result in results(case).items() if result.verdict is Verdict.VERIFIED}
        for candidate in testing.candidates_of(case, REGISTRY):
            shown |= candidate.chain.op.features if candidate.name in good else set()
    assert REGISTRY.backends["flashinfer"].capabilities[0].features <= shown


# --- what is said where it cannot run --------------------------------------------------------------------------------


def an_op(d: int = 64, **changes) -> AttentionOp:
    desc = TensorDesc((1, 4, 16, d), "bfloat16", "cuda")
    return AttentionOp(desc, desc, desc, **changes)


def test_here_it_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backend = FlashInfer("0")
    backend._version = None
    said = [str(reason) for reason in backend.reasons_against(an_op())]
    assert said == ["flashinfer-python is not installed; there is no CUDA device (pip install flashinfer-python)"]


def test_an_old_version_and_another_gpu_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    words = "flashinfer-python 0.1.6 < 0.2.5; compute capability 7.x, has kernels for 8.x, 9.x, 10.x, 12.x"
    assert str(FlashInfer("0.1.6").unavailable()) == words


def test_it_calls_itself_untested():
    assert [(b.name, b.tested) for b in attn_dispatch_backends()] == [("flashinfer", "untested")]


def test_sinks_are_refused_by_name_before_the_version_that_brought_them():
    q = torch.randn(1, 2, 4, 64)
    op = dispatch.plan(q, q, q, sinks=torch.ones(2)).op
    assert [str(reason) for reason in OnCpu("0.3.1").reasons_against(op)] == ["no sinks"]
    assert OnCpu("0.4.0").reasons_against(op) == []


@pytest.mark.parametrize(
    ("d", "call", "words"),
    [
        (80, {}, "head_dim 80 is none of 64, 128, 256 (pad_head_dim > flashinfer)"),
        (64, {"window": (3, 2)}, "no window that looks ahead"),
        (64, {"sinks": torch.ones(2), "return_lse": True}, "no sinks with lse"),
        (64, {"sinks": torch.ones(2), "softcap": 2.0}, "no sinks with softcap"),
        (64, {"bias": torch.ones(2)}, "no ALiBi"),
        (64, {"is_causal": True, "q_offset": 3}, 'q_offset 3, counts from the last key (0) (backend="flex")'),
        (64, {"attn_mask": masks.causal(), "key_lengths": torch.tensor([4])}, "no key lengths with another mask"),
        (
            *(64, {"attn_mask": masks.key_lengths([4]) & masks.key_lengths([2])}),
            "no key lengths with another mask",
        ),
        (
            *(64, {"is_causal": True, "q_offset": -2}),
            'rows without a key (6 queries over 4 keys) before 0.6.19 (backend="flex")',
        ),
    ],
)
def test_what_it_does_not_serve_is_refused_by_name(d, call, words):
    class Strict(OnCpu):
        extra_reasons = FlashInfer.extra_reasons

    q = torch.randn(1, 2, 6, d)
    said = [str(reason) for reason in Strict().reasons_against(dispatch.plan(q, q, q, **call).op)]
    assert words in said


# --- plan and run ----------------------------------------------------------------------------------------------------


def test_a_plan_serves_until_a_size_changes():
    fake_flashinfer.plans.clear()
    q = torch.randn(2, 2, 6, 64)
    run = OnCpu().compile(dispatch.plan(q, q, q, is_causal=True).op).run
    run(q, q, q, {})
    run(q, q, q, {})
    assert fake_flashinfer.plans == ["BatchPrefillWithRaggedKVCacheWrapper"]
    longer = torch.randn(2, 2, 7, 64)
    want = dispatch.attention(longer, longer, longer, is_causal=True, backend="eager")
    torch.testing.assert_close(run(longer, longer, longer, {}), want)
    assert len(fake_flashinfer.plans) == 2


def test_a_plan_serves_all_layers_of_a_step_and_not_the_next_step():
    fake_flashinfer.plans.clear()
    q, k = torch.randn(2, 2, 1, 64), torch.randn(2, 2, 9, 64)
    lengths = torch.tensor([3, 9])
    op = dispatch.plan(q, k, k, key_lengths=lengths).op
    (name,) = [name for name, _ in op.operands]
    run = OnCpu().compile(op).run

    def is_right() -> bool:
        want = dispatch.attention(q, k, k, key_lengths=lengths, backend="eager")
        return torch.allclose(run(q, k, k, {name: lengths}), want, atol=1e-6)

    assert is_right()
    assert is_right()
    assert fake_flashinfer.plans == ["BatchDecodeWithPagedKVCacheWrapper"]
    lengths.sub_(1)  # in place: the same tensor
    assert is_right()
    assert len(fake_flashinfer.plans) == 2
    with torch.inference_mode():
        lengths = torch.tensor([4, 4])  # counts no versions: planned at every call
    assert is_right()
    assert is_right()
    assert len(fake_flashinfer.plans) == 4


@pytest.mark.parametrize("offset", ["end", -2])
def test_rows_without_a_key_are_empty_since_the_version_that_masks_with_infinity(monkeypatch, offset):
    monkeypatch.setattr(fake_flashinfer, "MASKED", -math.inf)
    q, k = torch.randn(2, 2, 6, 64), torch.randn(2, 2, 4, 64)
    options = {"is_causal": True, "q_offset": -2, "return_lse": True}
    op = dispatch.plan(q, k, k, **options).op.with_(q_offset=offset)
    assert [reason.field for reason in OnCpu("0.6.18").reasons_against(op)] == ["Sq"]
    assert OnCpu("0.6.19").reasons_against(op) == []
    got, want = OnCpu("0.6.19").compile(op).run(q, k, k, {}), dispatch.attention(q, k, k, backend="eager", **options)
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got.lse, want.lse)
    with pytest.raises(BackendError, match=r"6 queries and 4 keys: rows without a key need flashinfer 0\.6\.19"):
        OnCpu("0.6.18").compile(op).run(q, k, k, {})


def test_two_streams_share_neither_plan_nor_workspace_and_a_captured_graph_plans_nothing(monkeypatch):
    fake_flashinfer.plans.clear()
    fake_flashinfer.workspaces.clear()
    q = torch.randn(2, 2, 6, 64)
    run = OnCpu().compile(dispatch.plan(q, q, q, is_causal=True).op).run
    for stream in (1, 2, 1, 2):
        monkeypatch.setattr(wrappers, "_stream", lambda device, stream=stream: stream)
        run(q, q, q, {})
    assert len(fake_flashinfer.plans) == 2
    assert fake_flashinfer.workspaces[0] is not fake_flashinfer.workspaces[1]
    monkeypatch.setattr(wrappers, "_stream", lambda device: 3)
    monkeypatch.setattr(wrappers, "_is_capturing", lambda device: True)
    run(q, q, q, {})
    assert len(fake_flashinfer.plans) == 2


@pytest.mark.parametrize("b", [1, 2])
def test_keys_and_values_that_lie_differently_are_brought_to_the_same_strides(b):
    q, k = torch.randn(b, 2, 1, 64), torch.randn(2 * b, 2, 9, 64)[::2]
    v = torch.randn(b, 9, 2, 64).transpose(1, 2) if b > 1 else torch.randn(b, 2, 9, 64)
    assert k.stride() != v.stride()
    lengths = torch.tensor([3, 9][:b])
    plan = dispatch.plan(q, k, v, key_lengths=lengths)
    got = OnCpu().compile(plan.op).run(q, k, v, plan.binding.operands(plan.tensors))
    torch.testing.assert_close(got, dispatch.attention(q, k, v, key_lengths=lengths, backend="eager"))


def test_sinks_of_two_head_sizes_do_not_meet_in_one_compiled_library():
    fake_flashinfer.libraries.clear()
    sinks = torch.tensor([0.5, -1.0])
    for d in (64, 128):
        q = torch.randn(1, 2, 6, d)
        plan = dispatch.plan(q, q, q, sinks=sinks)
        got = OnCpu().compile(plan.op).run(q, q, q, plan.binding.operands(plan.tensors))
        torch.testing.assert_close(got, dispatch.attention(q, q, q, sinks=sinks, backend="eager"))
    assert [name.rsplit("_", 1)[1] for name in fake_flashinfer.libraries] == ["64", "128"]


def test_a_library_without_the_sink_wrapper_is_named():
    q = torch.randn(1, 2, 4, 64)
    op = dispatch.plan(q, q, q, sinks=torch.ones(2)).op
    (name,) = [name for name, _ in op.operands]
    with pytest.raises(BackendError, match=r"no BatchAttentionWithAttentionSinkWrapper; sinks need 0\.4"):
        OnCpu(library=object()).compile(op).run(q, q, q, {name: torch.ones(2)})


def test_pages_give_what_gathered_rows_give():
    keys, values = torch.randn(6, 4, 2, 64), torch.randn(6, 4, 2, 64)
    query, table, lengths = torch.randn(2, 3, 4, 64), torch.tensor([[4, 0, 5], [2, 3, 0]]), torch.tensor([9, 4])
    plan = plan_pages(OnCpu(), query, keys, table, lengths)
    out, lse = plan.run(query, keys, values)
    want = dispatch.attention(
        query,
        keys,
        values,
        attn_mask=masks.causal(),
        enable_gqa=True,
        block_table=table,
        key_lengths=lengths,
        layout="bshd",
        return_lse=True,
    )
    torch.testing.assert_close(out, want.out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, want.lse, atol=1e-5, rtol=1e-5)


def test_pages_of_a_sequence_without_keys_are_refused():
    query, keys = torch.randn(2, 1, 2, 64), torch.randn(2, 4, 2, 64)
    with pytest.raises(BackendError, match=r"at least one key, got key_lengths \[0, 2\]"):
        plan_pages(OnCpu(), query, keys, torch.tensor([[0], [1]]), torch.tensor([0, 2]))
    with pytest.raises(
        BackendError, match=r"rows without a key need flashinfer 0\.6\.19: 3 queries, key_lengths \[3, 2\]"
    ):
        plan_pages(OnCpu(), query.expand(2, 3, 2, 64), keys, torch.tensor([[0], [1]]), torch.tensor([3, 2]))


# --- where the hardware is -------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_it_is_right_on_this_gpu():
    backend = FlashInfer()
    if backend.unavailable() is not None:
        pytest.skip(str(backend.unavailable()))
    k, v = (torch.randn(2, 2, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = torch.tensor([128, 40], device="cuda")
    for sq, call in ((128, {"is_causal": True}), (128, {"window": (31, 0)}), (1, {}), (1, {"key_lengths": lengths})):
        q = torch.randn(2, 8, sq, 64, device="cuda", dtype=torch.bfloat16)
        options = {"return_lse": True, "enable_gqa": True, **call}
        got = dispatch.attention(q, k, v, backend="flashinfer", **options)
        want = dispatch.attention(q.double(), k.double(), v.double(), backend="eager", **options)
        torch.testing.assert_close(got.out.double(), want.out, atol=1e-2, rtol=2e-2)
        torch.testing.assert_close(got.lse.double(), want.lse, atol=1e-3, rtol=1e-3)
