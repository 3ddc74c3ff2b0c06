"""The contract suite can fail: backends that are wrong in one way each, and the case that catches each.

A wrong backend here is the specification with one step changed, so nothing but that step can be what is caught.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_dispatch import reference
from attn_dispatch.backend import Backend, Executable, Raw
from attn_dispatch.backends.eager import Eager
from attn_dispatch.capability import Reason
from attn_dispatch.ir.atoms import Full
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Bias, SoftCap
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.registry import Registry, current
from attn_dispatch.testing import BY_ID, CASES, Verdict, check

Attention = Callable[..., Raw]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tensors are small: threads would only wait for each other, long where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Toy(Backend):
    """Claims everything and computes what it is given."""

    name = "toy"
    capabilities = Eager.capabilities

    def __init__(self, attention: Attention) -> None:
        self.attention = attention

    def compile(self, op: AttentionOp) -> Executable:
        def run(q, k, v, t) -> Any:
            raw = self.attention(op, q, k, v, t)
            return raw if op.outputs.lse or op.outputs.weights or op.outputs.state else raw.out

        return Executable(run)


def registry_with(backend: Backend) -> Registry:
    registry = current()
    return Registry({**registry.backends, backend.name: backend}, registry.rewrites)


right = reference.attention


def causal_off_by_one(op, q, k, v, t):
    return right(op.with_(q_offset=op.static_offset() + 1) if op.mask.positional else op, q, k, v, t)


def drops_the_scale(op, q, k, v, t):
    return right(op.with_(scale=1.0), q, k, v, t)


def tiles_the_groups(op, q, k, v, t):
    groups = q.shape[1] // k.shape[1]
    return right(op, q, k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1), t)  # head h takes kv head h % Hkv


def ignores_the_mask(op, q, k, v, t):
    return right(op.with_(mask=Full()), q, k, v, t)


def means_the_values_of_dead_rows(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    mean = v.mean(2, keepdim=True).repeat_interleave(q.shape[1] // k.shape[1], 1)
    return raw._replace(out=torch.where(torch.isneginf(raw.lse)[..., None], mean, raw.out))


def makes_dead_rows_nan(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return raw._replace(out=torch.where(torch.isneginf(raw.lse)[..., None], math.nan, raw.out))


def changes_the_query(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    q.mul_(op.effective_scale)
    return raw


def changes_the_bias(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    t["bias"].add_(1)
    return raw


def returns_float64(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return raw._replace(out=raw.out.double())


def returns_a_half_lse(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return raw._replace(lse=raw.lse.to(q.dtype))


def says_lse_0_for_dead_rows(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return raw._replace(lse=raw.lse.masked_fill(torch.isneginf(raw.lse), 0.0))


def says_lse_in_base_2(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return raw._replace(lse=raw.lse / math.log(2))


def drops_the_softcap(op, q, k, v, t):
    return right(op.with_(score=tuple(s for s in op.score if not isinstance(s, SoftCap))), q, k, v, t)


def caps_after_the_bias(op, q, k, v, t):
    return right(op.with_(score=tuple(reversed(op.score))), q, k, v, t)


def drops_the_bias(op, q, k, v, t):
    return right(op.with_(score=tuple(s for s in op.score if not isinstance(s, Bias))), q, k, v, t)


def drops_the_sinks(op, q, k, v, t):
    return right(op.with_(weight=Softmax()), q, k, v, t)


def reads_one_key_too_many(op, q, k, v, t):
    return right(op, q, k, v, {n: x + 1 if n == "key_lengths" else x for n, x in t.items()})


def hides_the_nan_of_a_query(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return raw._replace(out=raw.out.nan_to_num())


def has_no_gradient_for_the_key(op, q, k, v, t):
    return right(op, q, k.detach() + 0 * k, v, t)


def doubles_the_gradient_of_the_value(op, q, k, v, t):
    return right(op, q, k, 2 * v - v.detach(), t)


def gives_dead_rows_a_nan_gradient(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    poison = torch.where(torch.isneginf(raw.lse), 0.0, 1.0)[..., None]
    return raw._replace(out=torch.where(poison == 0, raw.out + torch.sqrt(q.sum(-1, keepdim=True) * 0), raw.out))


def is_a_little_imprecise(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return raw._replace(out=raw.out * (1 + 1e-4))


def swaps_batch_and_heads(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return raw._replace(out=raw.out.transpose(0, 1))


def with_state(raw, **changes):
    return raw._replace(state=raw.state._replace(**changes))


def hands_the_state_back(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return with_state(raw, S=t["state"].copy_(raw.state.S))


def forgets_what_came_before(op, q, k, v, t):
    empty = {n: torch.zeros_like(x) if n in ("state", "state_z") else x for n, x in t.items()}
    return right(op, q, k, v, empty)


def fades_the_state_once_too_little(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return with_state(raw, S=raw.state.S / t["decay"].to(raw.state.S.dtype).view(-1, 1, 1))


def puts_the_scale_into_the_state(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return with_state(raw, S=raw.state.S * op.effective_scale)


def fades_by_the_padding(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    padding = (k.shape[2] - t["key_lengths"]).view(-1, 1, 1, 1)
    return with_state(raw, S=raw.state.S * t["decay"].view(-1, 1, 1) ** padding)


def counts_padded_keys_in_the_sum(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return with_state(raw, z=raw.state.z + (k.shape[2] - t["key_lengths"]).view(-1, 1, 1))


def counts_the_padding_as_length(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return with_state(raw, length=torch.full_like(raw.state.length, k.shape[2] + 3))


def keeps_a_half_state(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return with_state(raw, S=raw.state.S.to(q.dtype))


def transposes_the_state(op, q, k, v, t):
    raw = right(op, q, k, v, t)
    return with_state(raw, S=raw.state.S.transpose(-1, -2))


def drops_the_feature_map(op, q, k, v, t):
    return right(op.with_(weight=replace(op.weight, feature_map="identity")), q, k, v, t)


def gives_no_gradient_to_the_state(op, q, k, v, t):
    return right(op, q, k, v, {n: x.detach() + 0 * x if n == "state" else x for n, x in t.items()})


# mutant -> the case that must catch it, and the words of the report
MUTANTS: dict[Attention, tuple[str, str]] = {
    causal_off_by_one: ("causal", "times its budget"),
    drops_the_scale: ("none", "times its budget"),
    tiles_the_groups: ("gqa_none", "times its budget"),
    ignores_the_mask: ("window_causal", "times its budget"),
    means_the_values_of_dead_rows: ("dead_rows", "times its budget"),
    makes_dead_rows_nan: ("dead_rows", "NaN is or is missing"),
    changes_the_query: ("none", "changed its input query in place"),
    changes_the_bias: ("column_bias", "changed its input bias in place"),
    returns_float64: ("none", "out is torch.float64"),
    returns_a_half_lse: ("lse_bf16", "lse is torch.bfloat16"),
    says_lse_0_for_dead_rows: ("causal_end_tall", "-inf is or is missing"),
    says_lse_in_base_2: ("none_lse", "lse is"),
    drops_the_softcap: ("softcap", "times its budget"),
    caps_after_the_bias: ("softcap_float_mask", "NaN is or is missing|times its budget"),
    drops_the_bias: ("float", "times its budget"),
    drops_the_sinks: ("sinks", "times its budget"),
    reads_one_key_too_many: ("key_lengths", "times its budget"),
    hides_the_nan_of_a_query: ("nan_query_none", "NaN is or is missing"),
    has_no_gradient_for_the_key: ("none_grad", "grad of key"),
    doubles_the_gradient_of_the_value: ("none_grad", "grad of value"),
    gives_dead_rows_a_nan_gradient: ("dead_rows_grad", "grad of query: NaN"),
    is_a_little_imprecise: ("none", "times its budget"),
    swaps_batch_and_heads: ("rank_3", "shape|times its budget"),
    hands_the_state_back: ("identity_state", "changed its input state in place"),
    forgets_what_came_before: ("identity_state", "times its budget"),
    fades_the_state_once_too_little: ("retention_state", "S is .* times its budget"),
    puts_the_scale_into_the_state: ("identity_state", "S is .* times its budget"),
    fades_by_the_padding: ("retention_state_lengths", "S is .* times its budget"),
    counts_padded_keys_in_the_sum: ("elu1_state_lengths", "z is .* times its budget"),
    counts_the_padding_as_length: ("identity_state_lengths", "length"),
    keeps_a_half_state: ("identity_bfloat16", "state.S is torch.bfloat16"),
    transposes_the_state: ("identity_long", "S has shape"),
    drops_the_feature_map: ("elu1_state", "times its budget"),
    gives_no_gradient_to_the_state: ("elu1_grad", "grad of state"),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_backend_that_is_wrong_in_one_way_is_caught(mutant):
    case, words = MUTANTS[mutant]
    with pytest.raises(AssertionError, match=words):
        check("toy", BY_ID[case], registry_with(Toy(mutant)))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_same_backend_without_a_mutation_is_verified(case):
    assert check("toy", case, registry_with(Toy(right))).verdict is Verdict.VERIFIED


@pytest.mark.parametrize(
    "mutant", [causal_off_by_one, drops_the_scale, ignores_the_mask, is_a_little_imprecise], ids=lambda m: m.__name__
)
def test_a_wrong_backend_is_caught_behind_a_rewrite_too(mutant):
    case = BY_ID["gqa_causal" if mutant is not ignores_the_mask else "long_chunked"]
    chain = "upcast > toy" if case.dtype != "float32" else "fold_groups > toy"
    if mutant in (causal_off_by_one, ignores_the_mask):  # the rewrite must leave the mask to the backend
        case, chain = replace(BY_ID["causal_bfloat16"], id="mutant"), "upcast > toy"
    with pytest.raises(AssertionError, match="times its budget"):
        check(chain, case, registry_with(Toy(mutant)))


# --- refusals that are lies ------------------------------------------------------------------------------------------


class Refuses(Toy):
    """Refuses everything for a given reason."""

    name = "refuses"

    def __init__(self, *reasons: Any) -> None:
        super().__init__(right)
        self.reasons = list(reasons)

    def reasons_against(self, op: AttentionOp) -> list[Reason]:
        return self.reasons


LIES = {
    "a feature that the op does not have": Reason("feature", "sinks", True, False),
    "a feature that it declares": Reason("feature", "mask:Causal", True, False),
    "a dtype that it declares": Reason("dtype", "dtype", "f32", "f64"),
    "a device that it declares": Reason("device", "device", "cpu", "cuda"),
    "an error": Reason("error", "capability", text="it broke"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_refusal_for_a_reason_that_is_not_declared_is_caught(lie):
    with pytest.raises(AssertionError, match="refused"):
        check("refuses", BY_ID["causal"], registry_with(Refuses(LIES[lie])))


def test_a_capability_check_that_raises_is_not_a_refusal():
    class Breaks(Toy):
        name = "breaks"

        def reasons_against(self, op: AttentionOp) -> list[Reason]:
            raise RuntimeError("no such thing")

    with pytest.raises(AssertionError, match="no such thing"):
        check("breaks", BY_ID["causal"], registry_with(Breaks(right)))


def test_a_backend_that_raises_while_it_runs_is_not_verified():
    def raises(op, q, k, v, t):
        raise RuntimeError("kernel failed")

    with pytest.raises(RuntimeError, match="kernel failed"):
        check("toy", BY_ID["causal"], registry_with(Toy(raises)))


def test_a_changed_input_does_not_spoil_the_next_check():
    with pytest.raises(AssertionError, match="in place"):
        check("toy", BY_ID["causal"], registry_with(Toy(changes_the_query)))
    assert check("eager", BY_ID["causal"]).verdict is Verdict.VERIFIED
