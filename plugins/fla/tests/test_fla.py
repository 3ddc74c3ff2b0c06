"""flash-linear-attention without a GPU: refusals word for word, and every argument against a stand-in on the CPU.

The stand-in has the signatures of fla-core 0.6.0 and is the recurrence, so the contract suite of the linear family runs
through the plugin's mapping. The Triton kernels themselves are untested.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import attn_dispatch_fla as plugin
import pytest
import torch
from attn_dispatch_fla import Fla, form_of

from attn_dispatch import BackendError, dispatch, masks, testing, variants
from attn_dispatch.registry import Registry, current
from attn_dispatch.testing import BY_ID, CASES, Case, Result, Verdict, check

calls: list[str] = []


def recurrence(q, k, v, g_gamma, scale, state, wants_state):
    """``[B, T, H, D]``, token by token, float64; float32 state out."""
    b, length, h, d = k.shape
    assert q.dtype == k.dtype == v.dtype
    assert k.shape[2] == v.shape[2] == q.shape[2]
    s = torch.zeros(b, h, d, v.shape[-1], dtype=torch.float64) if state is None else state.double()
    assert s.shape == (b, h, d, v.shape[-1])
    decay = torch.ones(h, dtype=torch.float64) if g_gamma is None else g_gamma.double().exp()
    outs = []
    for i in range(length):
        s = s * decay[:, None, None] + k[:, i].double()[..., :, None] * v[:, i].double()[..., None, :]
        outs.append(torch.einsum("bhd,bhde->bhe", q[:, i].double() * scale, s))
    return torch.stack(outs, 1).to(q.dtype), s.float() if wants_state else None


def chunk_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    cu_seqlens_cpu: torch.LongTensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert g is None
    assert cu_seqlens is None
    assert not kwargs
    calls.append("chunk")
    return recurrence(q, k, v, g_gamma, scale, initial_state, output_final_state)


def fused_recurrent_simple_gla(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    g_gamma: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.LongTensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert g is None
    assert cu_seqlens is None
    assert not reverse
    assert not kwargs
    calls.append("fused_recurrent")
    return recurrence(q, k, v, g_gamma, scale, initial_state, output_final_state)


STAND_IN = SimpleNamespace(chunk_simple_gla=chunk_simple_gla, fused_recurrent_simple_gla=fused_recurrent_simple_gla)


class OnCpu(Fla):
    """The backend over the stand-in, on the CPU, where its facts are otherwise what they are."""

    compile_s = 0.0

    def __init__(self):
        super().__init__("0.6.0")
        self.capabilities = (replace(self.capabilities[0], devices=frozenset({"cpu"})),)

    def unavailable(self):
        return None

    def load(self):
        return STAND_IN


REGISTRY = Registry({"eager": current().backends["eager"], "fla": OnCpu()}, current().rewrites)
LONG_GQA = replace(BY_ID["retention_bfloat16"].sizes, Sq=70, Skv=70)
EXTRA = (
    *(replace(BY_ID["elu1_causal"], id=f"elu1_chunk_{d}", dtype=d, sizes=LONG_GQA) for d in ("bfloat16", "float16")),
    replace(BY_ID["retention_causal"], id="retention_chunk", dtype="bfloat16", sizes=LONG_GQA, scale=0.02),
    replace(
        BY_ID["elu1_causal"], id="elu1_state_grads", state=True, grad=("query", "key", "value", "state", "state_z")
    ),
)


@functools.cache
def results(case: Case) -> dict[str, Result]:
    """Every candidate of a case that ends in fla; a wrong one raises."""
    found = testing.candidates_of(case, REGISTRY)
    return {c.name: check(c.name, case, REGISTRY) for c in found if c.backend.name == "fla"}


@pytest.mark.parametrize("case", [*CASES, *EXTRA], ids=lambda case: case.id)
def test_fla_is_right_or_refuses_alone_and_in_every_chain(case):
    found = results(case)
    assert "fla" in found
    assert all(result.verdict is Verdict.VERIFIED or result.reasons for result in found.values())
    assert case not in EXTRA or found["fla"].verdict is Verdict.VERIFIED


def test_every_feature_that_it_claims_is_in_a_case_that_it_is_verified_on():
    shown: set[str] = set()
    for case in (*CASES, *EXTRA):
        good = {name for name, result in results(case).items() if result.verdict is Verdict.VERIFIED}
        for candidate in testing.candidates_of(case, REGISTRY):
            shown |= candidate.chain.op.features if candidate.name in good else set()
    assert OnCpu().capabilities[0].features <= shown


def test_the_stand_in_has_the_signatures_of_the_wheel_that_is_installed():
    root = Path(importlib.util.find_spec("fla").submodule_search_locations[0]) / "ops" / "simple_gla"
    for function, file in ((chunk_simple_gla, "chunk.py"), (fused_recurrent_simple_gla, "fused_recurrent.py")):
        tree = ast.parse((root / file).read_text(encoding="utf-8"))
        real = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function.__name__)
        names = [a.arg for a in (*real.args.args, real.args.kwarg)]
        assert names == list(inspect.signature(function).parameters)
        defaults = [ast.literal_eval(d) for d in real.args.defaults]
        assert defaults == [
            p.default for p in inspect.signature(function).parameters.values() if p.default is not p.empty
        ]


# --- forms -----------------------------------------------------------------------------------------------------------


def an_op(length: int = 70, dtype: torch.dtype = torch.bfloat16, causal: bool = True, **call):
    q = torch.randn(1, 2, length, 16).to(dtype)
    return dispatch.plan(q, q, q, is_causal=causal, variant=variants.LinearAttention("identity", None), **call).op


def a_step_at(offset: int):
    q = torch.randn(1, 2, 1, 16)
    return dispatch.plan(q, q, q, q_offset=offset, variant=variants.Retention(torch.tensor([0.5, 1.0]))).op


@pytest.mark.parametrize(
    ("op", "form"),
    [
        (an_op(), "chunk"),
        (an_op(return_state=True), "fused_recurrent"),
        (an_op(dtype=torch.float32), "fused_recurrent"),
        (an_op(length=8), "fused_recurrent"),
    ],
    ids=["half", "a state out", "float32", "short"],
)
def test_the_form_is_the_fast_one_where_it_is_exact_enough(op, form):
    calls.clear()
    x = torch.randn(op.query.shape).to(getattr(torch, op.dtype))
    OnCpu().compile(op).run(x, x, x, {})
    assert calls == [form] == [form_of(op)]


def test_a_decay_of_zero_keeps_the_key_itself_and_nothing_before_it():
    q = torch.randn(1, 2, 5, 16)
    op = dispatch.plan(q, q, q, is_causal=True, variant=variants.Retention(torch.tensor([0.5, 1.0]))).op
    (name,) = [name for name, _ in op.operands]
    got = OnCpu().compile(op).run(q, q, q, {name: torch.zeros(2)})
    torch.testing.assert_close(got, (q * q).sum(-1, keepdim=True) * q.shape[-1] ** -0.5 * q)


def test_every_one_of_several_key_lengths_counts():
    q, k, v = (torch.randn(2, 2, 5, 16) for _ in range(3))
    first, second = masks.key_lengths(torch.tensor([2, 5])), masks.key_lengths(torch.tensor([4, 3]))
    call = {"attn_mask": first & second, "is_causal": True, "variant": variants.LinearAttention()}
    plan = dispatch.plan(q, k, v, **call)
    assert OnCpu().reasons_against(plan.op) == []
    got = OnCpu().compile(plan.op).run(q, k, v, plan.binding.operands(plan.tensors))
    torch.testing.assert_close(got, dispatch.attention(q, k, v, backend="eager", **call))


# --- what is said where it cannot run --------------------------------------------------------------------------------


def test_here_it_says_that_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(plugin, "_has_triton", lambda: False)
    assert str(Fla("0.6.0").unavailable()) == "triton is not installed; there is no CUDA device"
    monkeypatch.setattr(plugin, "_has_triton", lambda: True)
    assert str(Fla("0.6.0").unavailable()) == "there is no CUDA device"
    monkeypatch.setattr(plugin, "_installed_version", lambda: None)
    assert str(Fla().unavailable()) == "fla-core is not installed; there is no CUDA device (pip install fla-core)"


def test_an_old_version_and_an_old_gpu_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(plugin, "_has_triton", lambda: True)
    assert str(Fla("0.2.2").unavailable()) == "fla-core 0.2.2 < 0.3; compute capability 7.x < 8.0"
    assert Fla("0.2.2").capabilities[0].features == frozenset()


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (an_op(causal=False), 'no linear attention that is not causal (backend="linear")'),
        (an_op(q_offset=2), "no a mask at q_offset 2"),
        (a_step_at(3), 'no positions at q_offset 3 (backend="linear")'),
    ],
    ids=["not causal", "offset", "a step that fades"],
)
def test_what_it_does_not_serve_is_refused_by_name(op, words):
    assert words in [str(reason) for reason in OnCpu().reasons_against(op)]


def test_softmax_is_refused_and_its_own_hooks_are_not_asked():
    q = torch.randn(1, 2, 4, 16)
    assert "no softmax" in [str(reason) for reason in OnCpu().reasons_against(dispatch.plan(q, q, q).op)]


def test_lengths_for_which_it_was_not_checked_raise():
    x = torch.randn(1, 2, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(BackendError, match="run with 4 and 3"):
        OnCpu().compile(an_op()).run(x, x[:, :, :3], x[:, :, :3], {})


# --- where the hardware is -------------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_it_is_right_on_this_gpu():
    backend = Fla()
    if backend.unavailable() is not None:
        pytest.skip(str(backend.unavailable()))
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    decay = torch.tensor([0.5, 0.9, 0.97, 1.0], device="cuda")
    for variant in (variants.LinearAttention(), variants.Retention(decay)):
        options = {"is_causal": True, "variant": variant, "scale": 0.02}
        got = dispatch.attention(q, k, v, backend="fla", **options)
        want = dispatch.attention(q.double(), k.double(), v.double(), backend="eager", **options)
        torch.testing.assert_close(got.double(), want, atol=2e-2, rtol=2e-2)
