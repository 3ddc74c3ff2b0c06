"""The contract suite: every case of the table on every backend and every chain, verified against fp64 or refused."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from attn_dispatch import NoBackendError, testing
from attn_dispatch.device import DeviceFacts
from attn_dispatch.registry import current
from attn_dispatch.rewrites import merge_parts
from attn_dispatch.testing import BY_ID, CASES, Case, Result, Verdict, check
from attn_dispatch.testing.cases import MASKS, Sizes, make_inputs

BACKENDS = [name for name, backend in current().backends.items() if backend.compile_s == 0]
HERE = [
    name
    for name, backend in current().backends.items()
    if backend.compile_s == 0 and backend.unavailable() is None and "cpu" in backend.capability_on("cpu").devices
]
candidates_of = functools.cache(testing.candidates_of)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tensors are small: threads would only wait for each other, long where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _four_threads(monkeypatch):
    """`merge_parts` splits keys between threads: say that there are four, wherever the suite runs."""
    monkeypatch.setattr(merge_parts, "facts", lambda device: DeviceFacts(device, "test", "test", 4))


@functools.cache
def results(case: Case) -> dict[str, Result | AssertionError]:
    """What `check` says of every candidate of a case; run once in a session, whichever test asks first."""
    found: dict[str, Result | AssertionError] = {}
    for candidate in candidates_of(case):
        try:
            found[candidate.name] = check(candidate.name, case)
        except AssertionError as error:
            found[candidate.name] = error
    return found


def verified(case: Case) -> list[str]:
    return [n for n, r in results(case).items() if isinstance(r, Result) and r.verdict is Verdict.VERIFIED]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_backend_alone_is_right_or_refuses_with_a_declared_reason(case, backend):
    result = results(case)[backend]
    if isinstance(result, AssertionError):
        raise result
    assert result.verdict is Verdict.VERIFIED or result.reasons


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_chain_is_right_or_refuses_with_a_declared_reason(case):
    wrong = [str(r) for n, r in results(case).items() if " > " in n and isinstance(r, AssertionError)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_candidate_is_verified_exactly_when_nothing_speaks_against_it(case):
    legal = [c.name for c in candidates_of(case) if not c.reasons]
    assert sorted(legal) == sorted(verified(case))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_eager_refuses_nothing(case):
    assert results(case)["eager"].verdict is Verdict.VERIFIED


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_dispatcher_is_right_at_the_first_and_at_the_second_call(case):
    assert testing.check_dispatch(case).verdict is Verdict.VERIFIED


# --- the table proves what it is there to prove ----------------------------------------------------------------------


@pytest.mark.parametrize("rewrite", list(current().rewrites))
def test_every_rewrite_stands_in_a_verified_chain(rewrite):
    assert any(rewrite in name.split(" > ")[:-1] for case in CASES for name in verified(case))


def test_bands_then_fold_groups_then_sdpa_flash_is_verified_for_a_windowed_gqa_case():
    case = BY_ID["long_window_gqa"]
    assert case.sizes.Hq > case.sizes.Hkv
    assert "bands > fold_groups > sdpa_flash" in verified(case)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_every_dtype_is_verified_on_every_backend_that_runs_here(dtype):
    for backend in HERE:
        if (backend, dtype) != ("flash_decode", "float64"):
            assert any(backend in verified(case) for case in CASES if case.dtype == dtype), backend


# Words that no case of the table can bring: random results and transforms have tests of their own,
# and a combined mask is named by its combinators ("combine:And"), never as an atom.
ELSEWHERE = {"dropout", "higher_order", "traced"}


@pytest.mark.parametrize("backend", HERE)
def test_every_feature_that_a_backend_claims_is_in_a_case_that_it_is_verified_on(backend):
    shown: set[str] = set()
    for case in CASES:
        good = set(verified(case))
        for candidate in candidates_of(case):
            if candidate.backend.name == backend and candidate.name in good:
                shown |= candidate.chain.op.features
    claimed = current().backends[backend].capability_on("cpu").features
    assert claimed - shown <= ELSEWHERE


def test_every_mask_of_the_table_is_used_by_a_case():
    assert {case.mask for case in CASES} == set(MASKS)


def test_the_inputs_of_a_case_are_the_same_at_every_call():
    for case in CASES[:20]:
        first, second = make_inputs(case), make_inputs(case)
        assert torch.equal(first.query, second.query)
        assert torch.equal(first.allowed, second.allowed)


@pytest.mark.parametrize(("strides", "broken"), [("scattered", -1), ("expanded", 0)])
def test_the_strides_of_a_case_are_what_its_name_says(strides, broken):
    q = make_inputs(BY_ID[f"{strides}_causal"]).query
    assert q.stride(broken) == {"scattered": 2, "expanded": 0}[strides]


def test_empty_rows_nan_rows_and_poisoned_keys_do_occur_in_the_goldens():
    dead = testing.golden(BY_ID["dead_rows_float64"], make_inputs(BY_ID["dead_rows_float64"]))
    assert torch.isneginf(dead.lse).any()
    assert (dead.out[torch.isneginf(dead.lse)] == 0).all()
    assert all(torch.isfinite(g).all() for g in dead.grads.values())
    nan = testing.golden(BY_ID["nan_query_causal"], make_inputs(BY_ID["nan_query_causal"]))
    assert torch.isnan(nan.out).any()
    assert torch.isfinite(nan.out).any()
    poisoned = make_inputs(BY_ID["nan_keys_window_causal"])
    assert torch.isnan(poisoned.key).any()


def test_the_golden_agrees_with_torch_where_torch_can_say_it():
    case = BY_ID["gqa_causal"]
    inputs = make_inputs(case)
    q, k, v = (x.double() for x in (inputs.query, inputs.key, inputs.value))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(testing.golden(case, inputs).out, want, atol=1e-12, rtol=1e-12)


# --- what check says when it is asked for something else -------------------------------------------------------------


def test_a_refused_case_carries_the_reason_of_the_backend():
    result = check("sdpa_math", BY_ID["softcap"])
    assert result.verdict is Verdict.REFUSED
    assert [reason.field for reason in result.reasons] == ["score:SoftCap"]


def test_a_chain_whose_rewrite_does_not_apply_is_refused_with_the_reason_of_the_rewrite():
    result = check("fold_groups > sdpa_flash", BY_ID["causal"])
    assert result.verdict is Verdict.REFUSED
    assert "no groups" in str(result.reasons[0])


def test_the_dispatcher_refuses_a_pinned_backend_with_the_same_reasons():
    with pytest.raises(NoBackendError) as error:
        testing.check_dispatch(BY_ID["softcap"], backend="sdpa_math")
    assert [reason.field for reason in error.value.refusals["sdpa_math"]] == ["score:SoftCap"]


def test_every_dtype_and_quantity_has_a_budget():
    for dtype in ("float64", "float32", "bfloat16", "float16"):
        for quantity in ("out", "lse", "grad", "weights"):
            assert testing.budget(dtype, quantity).absolute > 0


def test_a_case_that_is_not_in_the_table_can_be_checked_too():
    case = replace(BY_ID["causal"], id="mine", sizes=Sizes(1, 1, 1, 4, 4, 8, 8))
    assert check("eager", case).verdict is Verdict.VERIFIED
