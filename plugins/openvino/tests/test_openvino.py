"""OpenVINO against the contract suite, and what its module promises beyond it. OpenVINO must be installed."""

from __future__ import annotations

import functools
import threading

import attn_dispatch_openvino as plugin
import pytest
import torch
from attn_dispatch_openvino import Form, OpenVino, compiled

from attn_dispatch import dispatch, registry, testing
from attn_dispatch.registry.discover import discover
from attn_dispatch.testing import CASES, Result, Verdict, check

REGISTRY = registry.current() if "openvino" in registry.current().backends else discover([("openvino", plugin)])


@pytest.fixture(autouse=True)
def _registered():
    before = registry.current()
    registry.reset(REGISTRY)
    yield
    registry.reset(before)


@functools.cache
def results(case: testing.Case) -> dict[str, Result]:
    """Every candidate of a case that ends in OpenVINO; a wrong one raises."""
    chains = [c for c in testing.candidates_of(case, REGISTRY) if c.backend.name == "openvino"]
    return {c.name: check(c.name, case, REGISTRY) for c in chains}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_openvino_is_right_or_refuses_alone_and_in_every_chain(case):
    found = results(case)
    assert "openvino" in found
    assert all(result.verdict is Verdict.VERIFIED or result.reasons for result in found.values())


def test_every_feature_that_it_claims_is_in_a_case_that_it_is_verified_on():
    shown: set[str] = set()
    for case in CASES:
        good = {name for name, result in results(case).items() if result.verdict is Verdict.VERIFIED}
        for candidate in testing.candidates_of(case, REGISTRY):
            shown |= candidate.chain.op.features if candidate.name in good else set()
    assert OpenVino.capabilities[0].features <= shown


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_error_is_above_half_of_its_budget(dtype):
    errors = [r.errors["out"] for c in CASES if c.dtype == dtype for r in results(c).values() if r.errors]
    assert errors
    assert max(errors) < 0.5


def qkv(*sizes: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, hq, hkv, sq, skv, d = sizes
    shapes = ((b, hq, sq, d), (b, hkv, skv, d), (b, hkv, skv, d))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def test_float32_stays_float32():
    q, k, v = qkv(1, 4, 4, 64, 64, 64)
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(dispatch.attention(q, k, v, backend="openvino").double(), want, atol=4e-6, rtol=4e-6)


def test_one_compiled_model_serves_every_length():
    plan = dispatch.plan(*qkv(1, 2, 2, 5, 9, 16), backend="openvino")
    before = compiled.cache_info().currsize
    for sq, skv in ((1, 9), (7, 9), (9, 30), (31, 31)):
        q, k, v = qkv(2, 2, 2, sq, skv, 16)
        want = dispatch.attention(q, k, v, backend="eager")
        torch.testing.assert_close(dispatch.attention(q, k, v, backend="openvino"), want, atol=1e-5, rtol=1e-5)
    assert compiled.cache_info().currsize == before
    assert plan.name == "openvino"


def test_the_result_lies_in_memory_of_its_own():
    q, k, v = qkv(1, 2, 2, 4, 4, 16)
    first = dispatch.attention(q, k, v, backend="openvino")
    kept = first.clone()
    dispatch.attention(*qkv(1, 2, 2, 4, 4, 16), backend="openvino")
    assert torch.equal(first, kept)


def test_a_tensor_that_requires_a_gradient_runs_where_none_is_recorded():
    q, k, v = qkv(1, 2, 2, 4, 4, 16)
    q.requires_grad_(True)
    with torch.no_grad():
        assert not dispatch.attention(q, k, v, backend="openvino").requires_grad


def test_threads_run_at_once_and_each_gets_its_own_result():
    plan = dispatch.plan(*qkv(1, 2, 2, 40, 40, 16), backend="openvino")
    wrong: list[float] = []

    def work(seed: int) -> None:
        gen = torch.Generator().manual_seed(seed)
        for _ in range(20):
            q, k, v = (torch.randn(1, 2, 40, 16, generator=gen) for _ in range(3))
            want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            difference = (plan(q, k, v) - want).abs().max().item()
            wrong.extend([difference] if not difference < 1e-5 else [])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_another_number_of_threads_makes_another_model():
    op = dispatch.plan(*qkv(1, 2, 2, 4, 4, 16), backend="openvino").op
    before, now = Form.of(op), torch.get_num_threads()
    torch.set_num_threads(now + 1)
    try:
        assert Form.of(op) != before
        q, k, v = qkv(1, 2, 2, 4, 4, 16)
        want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(dispatch.attention(q, k, v, backend="openvino"), want, atol=1e-5, rtol=1e-5)
    finally:
        torch.set_num_threads(now)


def test_an_empty_row_is_zero_and_a_row_of_nan_stays_one():
    q, k, v = qkv(1, 2, 2, 4, 6, 16)
    q[0, 0, 2] = torch.nan
    mask = torch.ones(4, 6, dtype=torch.bool)
    mask[1] = False
    out = dispatch.attention(q, k, v, attn_mask=mask, backend="openvino")
    assert (out[:, :, 1] == 0).all()
    assert out[0, 0, 2].isnan().all()
    assert out[0, 1].isfinite().all()


def test_what_it_does_not_do_is_refused_with_a_way_out():
    reasons = OpenVino().reasons_against(dispatch.plan(*qkv(1, 2, 2, 4, 4, 16)).op.with_(grad=("query",)))
    assert [str(reason) for reason in reasons] == ['no gradients (backend="sdpa_flash")']
