"""The three lines without their libraries: refusals word for word, and every argument against stand-ins on the CPU.

The stand-ins have the real signatures and compute what the documentation says, so the whole contract suite runs through
the plugin's mapping: alignment, windows, lse of empty rows, packed rows, lengths. The kernels themselves are untested.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import fake_libraries as fakes
import pytest
import torch
from attn_dispatch_flash_attn import LINES, FlashAttn, attn_dispatch_backends
from attn_dispatch_flash_attn.facts import known_at, parse
from attn_dispatch_flash_attn.pages import attend_pages

from attn_dispatch import BackendError, dispatch, masks, testing
from attn_dispatch.plugin import AttentionOp, TensorDesc
from attn_dispatch.registry import Registry, current
from attn_dispatch.testing import CASES, Result, Verdict, check
from attn_dispatch.testing.cases import Case, Sizes

LIBRARIES = {"flash_attn_2": fakes.FLASH_2, "flash_attn_3": fakes.FLASH_3, "flash_attn_4": fakes.FLASH_4}
NEWEST = {"flash_attn_2": "2.8.3", "flash_attn_3": "3.0.0", "flash_attn_4": "4.0.0b27"}
BY_NAME = {line.name: line for line in LINES}


class OnCpu(FlashAttn):
    """A line whose library is a stand-in, on the CPU, where its facts are otherwise what they are."""

    def __init__(self, name, version=None, library=None, gpu=(9, 0)):
        super().__init__(BY_NAME[name], version or NEWEST[name])
        self.library, self._gpu = library or LIBRARIES[name], gpu
        (facts,) = self.capabilities
        features = facts.features - {"dropout"}  # random: no golden
        dtypes = facts.dtypes | {"float32", "float64"}
        self.capabilities = (replace(facts, devices=frozenset({"cpu"}), dtypes=dtypes, features=features),)

    def compute_capability(self):
        return self._gpu

    def unavailable(self):
        return None

    def load(self):
        return self.library


# trim_lengths runs its inner op at lengths of the data, for the CPU alone: on a GPU, where these lines run, it refuses
REWRITES = {name: rewrite for name, rewrite in current().rewrites.items() if name != "trim_lengths"}
REGISTRY = Registry({"eager": current().backends["eager"], **{name: OnCpu(name) for name in BY_NAME}}, REWRITES)


@functools.cache
def results(case: Case, name: str) -> dict[str, Result]:
    """Every candidate of a case that ends in a line; a wrong one raises."""
    found = testing.candidates_of(case, REGISTRY)
    return {c.name: check(c.name, case, REGISTRY) for c in found if c.backend.name == name}


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_line_is_right_or_refuses_alone_and_in_every_chain(case, name):
    found = results(case, name)
    assert name in found
    assert all(result.verdict is Verdict.VERIFIED or result.reasons for result in found.values())


@pytest.mark.parametrize("name", BY_NAME)
def test_every_feature_that_a_line_claims_is_in_a_case_that_it_is_verified_on(name):
    shown: set[str] = set()
    for case in CASES:
        good = {n for n, result in results(case, name).items() if result.verdict is Verdict.VERIFIED}
        for candidate in testing.candidates_of(case, REGISTRY):
            shown |= candidate.chain.op.features if candidate.name in good else set()
    assert REGISTRY.backends[name].capabilities[0].features <= shown


# --- what is said where it cannot run --------------------------------------------------------------------------------


def an_op(d=64, **changes) -> AttentionOp:
    desc = TensorDesc((1, 4, 16, d), "bfloat16", "cuda")
    return AttentionOp(desc, desc, desc, **changes)


def test_here_each_line_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = {line.name: [str(r) for r in _missing(line).reasons_against(an_op())] for line in LINES}
    assert said == {
        "flash_attn_2": [
            "flash-attn is not installed; there is no CUDA device (pip install flash-attn --no-build-isolation)"
        ],
        "flash_attn_3": [
            "flash_attn_3 is not installed; there is no CUDA device "
            "(build hopper/ of github.com/Dao-AILab/flash-attention)"
        ],
        "flash_attn_4": ["flash-attn-4 is not installed; there is no CUDA device (pip install flash-attn-4)"],
    }


def _missing(line) -> FlashAttn:
    backend = FlashAttn(line, "0")
    backend._version = None
    return backend


@pytest.mark.parametrize(
    ("name", "version", "capability", "words"),
    [
        ("flash_attn_2", "2.0.9", (9, 0), "flash-attn 2.0.9 < 2.1"),
        ("flash_attn_2", "2.8.3", (7, 5), "compute capability 7.x, has kernels for 8.x, 9.x, 10.x, 12.x"),
        ("flash_attn_2", "2.7.2.post1", (10, 0), "compute capability 10.x, has kernels for 8.x, 9.x"),
        ("flash_attn_3", "3.0.0", (8, 0), "compute capability 8.x, has kernels for 9.x"),
        ("flash_attn_4", "4.0.0b27", (8, 9), "compute capability 8.x, has kernels for 9.x, 10.x, 11.x, 12.x"),
        ("flash_attn_4", "4.0.0b4", (12, 0), "flash-attn-4 4.0.0b4 < 4.0.0b5"),
    ],
)
def test_an_old_version_or_another_gpu_is_named(monkeypatch, name, version, capability, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert str(FlashAttn(BY_NAME[name], version).unavailable()) == words


def test_three_backends_are_offered_and_call_themselves_untested():
    assert [(b.name, b.tested) for b in attn_dispatch_backends()] == [(name, "untested") for name in BY_NAME]


# --- facts per version -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "version", "features", "can", "majors"),
    [
        ("2.0.9", "2.1.2", None, set(), {8, 9}),
        ("2.1.2", "2.2.5", {"mask:KeyLengths"}, {"cache"}, set()),
        ("2.2.5", "2.3.6", {"mask:Window"}, set(), set()),
        ("2.3.6", "2.4.3", {"score:Alibi"}, {"deterministic"}, set()),
        ("2.4.3", "2.5.4", set(), {"pages"}, set()),
        ("2.5.4", "2.5.9.post1", set(), {"small_256"}, set()),
        ("2.5.9.post1", "2.6.1", {"score:SoftCap"}, {"cache_lse", "packed_lse"}, set()),
        ("2.6.1", "2.6.3", set(), {"small_224"}, set()),
        ("2.7.2.post1", "2.7.3", set(), set(), {10, 12}),
        ("2.8.3.post1", "2.8.4", set(), set(), {11}),
        ("4.0.0b10", "4.0.0b11", set(), {"head_256"}, set()),
        ("4.0.0b25", "4.0.0b26", set(), {"any_sinks"}, set()),
        ("4.0.0b27", "4.0.0", set(), set(), set()),
    ],
)
def test_a_version_can_what_it_added_and_the_one_before_cannot(before, version, features, can, majors):
    line = BY_NAME["flash_attn_2" if version.startswith("2") else "flash_attn_4"]
    old, new = known_at(line, before), known_at(line, version)
    assert features is None or new.features - old.features == features
    assert (new.can - old.can, new.majors - old.majors) == (can, majors)


def test_a_beta_comes_before_the_release_and_after_the_beta_before_it():
    versions = ["2.7.2.post1", "2.7.3", "2.10", "4.0.0b9", "4.0.0.beta10", "4.0.0b10.dev3", "4.0.0", "4.0.1"]
    numbers = [parse(version) for version in versions]
    assert numbers == sorted(numbers)
    assert parse("4.0.0b9") < parse("4.0.0b10") < parse("4.0.0rc1")


def test_a_feature_of_a_later_version_is_refused_by_name():
    backend = OnCpu("flash_attn_2", "2.5.9")
    q = torch.randn(1, 2, 4, 16)
    op = dispatch.plan(q, q, q, softcap=2.0).op
    assert [str(reason) for reason in backend.reasons_against(op)] == ["no softcap"]


def test_an_old_version_is_called_with_the_arguments_that_it_has():
    backend = OnCpu("flash_attn_2", "2.3.6", fakes.FLASH_2_3)
    q = torch.randn(1, 2, 6, 16)
    op = dispatch.plan(q, q, q, window=(2, 0)).op
    assert backend.reasons_against(op) == []
    want = dispatch.attention(q, q, q, window=(2, 0), backend="eager")
    torch.testing.assert_close(backend.compile(op).run(q, q, q, {}), want)


def test_line_3_before_return_attn_probs_gives_its_lse_all_the_same():
    backend = OnCpu("flash_attn_3", library=fakes.OLDER_FLASH_3)
    q = torch.randn(1, 2, 6, 16)
    op = dispatch.plan(q, q, q, is_causal=True, return_lse=True).op
    want = dispatch.attention(q, q, q, is_causal=True, return_lse=True, backend="eager")
    torch.testing.assert_close(backend.compile(op).run(q, q, q, {}).lse, want.lse)


def test_an_argument_that_the_installed_function_lacks_is_an_error_and_never_dropped():
    backend = OnCpu("flash_attn_2", "2.8.3", fakes.FLASH_2_3)  # says 2.8.3 and is older
    q = torch.randn(1, 2, 6, 16)
    with pytest.raises(BackendError, match="old_flash_attn_func of the installed version takes no softcap"):
        backend.compile(dispatch.plan(q, q, q, softcap=2.0).op)


def two_lengths():
    return masks.key_lengths(torch.tensor([4])) & masks.key_lengths(torch.tensor([2]))


# --- what no fact can say --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "call", "words"),
    [
        ("flash_attn_2", {"is_causal": True, "q_offset": 3}, "q_offset 3, counts from the last key (0)"),
        ("flash_attn_2", {"bias": torch.ones(2), "return_lse": True}, "no ALiBi with lse"),
        ("flash_attn_3", {"bias": torch.ones(2)}, "no ALiBi"),
        ("flash_attn_4", {"bias": torch.ones(2)}, "no ALiBi"),
        ("flash_attn_2", {"sinks": torch.ones(2)}, "no sinks"),
        ("flash_attn_2", {"attn_mask": masks.documents([0, 3, 6]) & masks.window(1, 1)}, "no documents with a window"),
        (
            "flash_attn_3",
            {"attn_mask": masks.causal(), "key_lengths": torch.tensor([4])},
            "no key lengths with another mask",
        ),
        *((name, {"attn_mask": two_lengths()}, "no key lengths with another mask") for name in BY_NAME),
        *(
            (name, {"attn_mask": masks.documents([0, 3, 6]) & masks.documents([0, 2, 6])}, "no documents with other")
            for name in BY_NAME
        ),
    ],
)
def test_a_pair_that_a_line_does_not_serve_is_refused_by_name(name, call, words):
    q = torch.randn(1, 2, 6, 16)
    said = [str(reason) for reason in OnCpu(name).reasons_against(dispatch.plan(q, q, q, **call).op)]
    assert any(line.startswith(words) for line in said), said


@pytest.mark.parametrize(
    ("name", "gpu", "d", "dv", "fits"),
    [
        ("flash_attn_2", (9, 0), 256, 256, True),
        ("flash_attn_2", (9, 0), 264, 264, False),
        ("flash_attn_2", (9, 0), 60, 60, False),
        ("flash_attn_3", (9, 0), 192, 128, True),
        ("flash_attn_3", (9, 0), 64, 512, True),
        ("flash_attn_3", (9, 0), 128, 64, False),
        ("flash_attn_4", (9, 0), 256, 256, True),
        ("flash_attn_4", (10, 0), 192, 128, True),
        ("flash_attn_4", (10, 0), 192, 192, False),
        ("flash_attn_4", (10, 0), 256, 256, True),
        ("flash_attn_4", (12, 0), 256, 256, False),
    ],
)
def test_head_sizes_are_taken_as_the_kernels_have_them(name, gpu, d, dv, fits):
    q, v = torch.randn(1, 2, 6, d), torch.randn(1, 2, 6, dv)
    assert (OnCpu(name, gpu=gpu).reasons_against(dispatch.plan(q, q, v).op) == []) is fits


def said_of(name, version, gpu, op) -> list[str]:
    """What its own hook says; dropout, which `OnCpu` does not declare, included."""
    return [str(reason) for reason in OnCpu(name, version, gpu=gpu).extra_reasons(op)]


GRAD = {"grad": ("query", "key", "value")}


@pytest.mark.parametrize(
    ("version", "gpu", "d", "changes", "words"),
    [
        ("2.8.3", (8, 6), 256, {"dropout_p": 0.1}, "with dropout on compute capability 8.6"),
        ("2.8.3", (8, 9), 200, {"dropout_p": 0.1}, "with dropout on compute capability 8.9"),
        ("2.8.3", (12, 0), 256, {"dropout_p": 0.1}, "with dropout on compute capability 12.0"),
        ("2.5.4", (8, 6), 256, {}, "before 2.5.5 on compute capability 8.6"),
        ("2.6.1", (8, 9), 224, {}, "before 2.6.2 on compute capability 8.9"),
        ("2.6.1", (8, 6), 256, {}, None),
        ("2.6.2", (8, 6), 224, {}, None),
        ("2.8.3", (12, 0), 256, {}, None),
        ("2.8.3", (8, 6), 192, {"dropout_p": 0.1}, None),
        ("2.8.3", (8, 6), 256, {"dropout_p": 0.1, "grad": ()}, None),
        ("2.1.0", (8, 0), 256, {"dropout_p": 0.1}, None),
        ("2.8.3", (10, 0), 256, {"dropout_p": 0.1}, None),
    ],
)
def test_gradients_of_wide_heads_are_refused_where_shared_memory_is_small(version, gpu, d, changes, words):
    said = said_of("flash_attn_2", version, gpu, an_op(d=d, **{**GRAD, **changes}))
    assert said == ([] if words is None else [f"gradients at head_dim {d} > 192 {words}"])


def test_deterministic_gradients_of_line_3_end_at_head_dim_192():
    wide, fits = (an_op(d=d, deterministic=True, **GRAD) for d in (200, 192))
    assert said_of("flash_attn_3", "3.0.0", (9, 0), wide) == ["deterministic gradients at head_dim 200 > 192"]
    assert said_of("flash_attn_3", "3.0.0", (9, 0), fits) == []
    assert said_of("flash_attn_3", "3.0.0", (9, 0), an_op(d=200, deterministic=True)) == []


def test_dropout_of_everything_is_refused():
    assert said_of("flash_attn_2", "2.8.3", (8, 0), an_op(dropout_p=1.0)) == [
        'dropout 1, takes less than 1 (backend="eager")'
    ]
    assert said_of("flash_attn_2", "2.8.3", (8, 0), an_op(dropout_p=0.999)) == []


SINKS = {"sinks": torch.ones(4)}


@pytest.mark.parametrize(
    ("version", "gpu", "d", "call", "words"),
    [
        ("4.0.0b27", (10, 0), 256, {"softcap": 2.0}, "no softcap at head_dim 256 on compute capability 10.x"),
        ("4.0.0b27", (11, 0), 256, SINKS, "no sinks at head_dim 256 on compute capability 11.x"),
        ("4.0.0b27", (10, 3), 256, {"window": (2, 0)}, "no window at head_dim 256 on compute capability 10.x"),
        (
            *("4.0.0b27", (10, 0), 256, {"key_lengths": torch.tensor([4])}),
            "no key lengths at head_dim 256 on compute capability 10.x",
        ),
        ("4.0.0b10", (10, 0), 256, {}, "head_dim 256 > 128 on compute capability 10.x"),
        ("4.0.0b27", (10, 0), 256, {"is_causal": True}, None),
        ("4.0.0b27", (9, 0), 256, {"softcap": 2.0, "window": (2, 0), **SINKS}, None),
        ("4.0.0b27", (12, 0), 64, SINKS, "no sinks on compute capability 12.x"),
        ("4.0.0b25", (10, 0), 64, SINKS, "no float32 sinks before 4.0.0b26"),
        ("4.0.0b25", (10, 0), 64, {"sinks": torch.ones(4, dtype=torch.bfloat16)}, None),
        ("4.0.0b27", (10, 0), 64, SINKS, None),
    ],
)
def test_what_line_4_lacks_on_one_gpu_or_in_one_version_is_refused_by_name(version, gpu, d, call, words):
    q = torch.randn(1, 4, 6, d)
    said = said_of("flash_attn_4", version, gpu, dispatch.plan(q, q, q, **call).op)
    assert said == ([] if words is None else [words])


def test_line_4_has_no_gradients_of_grouped_heads_with_other_values_on_hopper():
    q, k, v = (torch.randn(1, h, 6, d, requires_grad=True) for h, d in ((4, 128), (2, 128), (2, 64)))
    op = dispatch.plan(q, k, v, enable_gqa=True).op
    assert op.grad
    words = "no gradients of grouped heads with value head_dim 64 != head_dim 128 on compute capability 9.x"
    assert said_of("flash_attn_4", "4.0.0b27", (9, 0), op) == [words]
    assert said_of("flash_attn_4", "4.0.0b27", (10, 0), op) == []
    assert said_of("flash_attn_4", "4.0.0b27", (9, 0), op.with_(grad=())) == []


@pytest.mark.parametrize(
    ("version", "library", "dtype"),
    [
        ("4.0.0b25", fakes.OLDER_FLASH_4, torch.bfloat16),
        ("4.0.0b27", fakes.FLASH_4, torch.bfloat16),
        ("4.0.0b27", fakes.FLASH_4, torch.float32),
    ],
)
def test_sinks_reach_line_4_in_a_dtype_that_its_version_takes(version, library, dtype):
    backend = OnCpu("flash_attn_4", version, library)
    q, sinks = torch.randn(1, 2, 6, 16), torch.tensor([0.3, -1.2], dtype=dtype)
    plan = dispatch.plan(q, q, q, sinks=sinks)
    assert backend.reasons_against(plan.op) == []
    got = backend.compile(plan.op).run(q, q, q, plan.binding.operands(plan.tensors))
    torch.testing.assert_close(got, dispatch.attention(q, q, q, sinks=sinks, backend="eager"))


@pytest.mark.parametrize("name", BY_NAME)
def test_segments_in_any_order_of_their_numbers_are_right(name):
    q = torch.randn(2, 2, 7, 16)
    ids = torch.tensor([[3, 1, 3, 1, 0, 0, 3], [0, 0, 5, 5, 5, 2, 2]])
    mask = masks.causal() & masks.Segments(ids, ids)
    plan = dispatch.plan(q, q, q, attn_mask=mask, return_lse=True)
    operands = plan.binding.operands(plan.tensors)
    assert REGISTRY.backends[name].reasons_against(plan.op) == []
    got = REGISTRY.backends[name].compile(plan.op).run(q, q, q, operands)
    want = dispatch.attention(q, q, q, attn_mask=mask, return_lse=True, backend="eager")
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got.lse, want.lse)


def test_lengths_beyond_the_keys_are_not_handed_to_the_kernel():
    q = torch.randn(2, 2, 1, 16)
    op = dispatch.plan(q, q, q, key_lengths=torch.tensor([1, 1])).op
    (name,) = [name for name, _ in op.operands]
    got = OnCpu("flash_attn_2").compile(op).run(q, q, q, {name: torch.tensor([5, 1])})
    torch.testing.assert_close(got, q)


@pytest.mark.parametrize(("name", "page"), [("flash_attn_2", 256), ("flash_attn_3", 4), ("flash_attn_4", 4)])
def test_pages_give_what_gathered_rows_give(name, page):
    keys, values = torch.randn(5, page, 2, 16), torch.randn(5, page, 2, 16)
    query, table = torch.randn(2, 3, 4, 16), torch.tensor([[4, 0], [2, 3]])
    lengths = torch.tensor([page + 2, page - 1])
    got = attend_pages(OnCpu(name), query, keys, values, table, lengths)
    want = dispatch.attention(
        query,
        keys,
        values,
        attn_mask=masks.causal(),
        enable_gqa=True,
        block_table=table,
        key_lengths=lengths,
        layout="bshd",
    )
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_pages_that_a_line_cannot_take_are_refused_with_the_size():
    query, keys = torch.randn(1, 1, 2, 16), torch.randn(2, 16, 2, 16)
    with pytest.raises(BackendError, match="takes pages of a multiple of 256 keys, got 16"):
        attend_pages(OnCpu("flash_attn_2"), query, keys, keys, torch.tensor([[0]]), torch.tensor([3]))
    with pytest.raises(BackendError, match=r"2\.4\.1 has no pages"):
        attend_pages(OnCpu("flash_attn_2", "2.4.1"), query, keys, keys, torch.tensor([[0]]), torch.tensor([3]))
    with pytest.raises(BackendError, match=r"flash_attn_4 has no pages on compute capability 12\.x"):
        attend_pages(OnCpu("flash_attn_4", gpu=(12, 0)), query, keys, keys, torch.tensor([[0]]), torch.tensor([3]))
    query, keys = torch.randn(1, 1, 2, 256), torch.randn(2, 16, 2, 256)
    with pytest.raises(BackendError, match=r"no pages at head_dim 256 on compute capability 10\.x"):
        attend_pages(OnCpu("flash_attn_4", gpu=(10, 0)), query, keys, keys, torch.tensor([[0]]), torch.tensor([3]))


@pytest.mark.parametrize(("sq", "skv", "offset"), [(4, 9, 0), (4, 9, 2), (6, 6, -2)])
def test_a_causal_mask_from_another_position_runs_over_the_keys_that_it_sees(sq, skv, offset):
    q, k = torch.randn(1, 2, sq, 16), torch.randn(1, 2, skv, 16)
    op = dispatch.plan(q, k, k, is_causal=True, q_offset=offset).op
    want = dispatch.attention(q, k, k, is_causal=True, q_offset=offset, backend="eager")
    for name in BY_NAME:
        assert REGISTRY.backends[name].reasons_against(op) == []
        torch.testing.assert_close(REGISTRY.backends[name].compile(op).run(q, k, k, {}), want)


def test_lengths_for_which_it_was_not_checked_raise_instead_of_giving_another_result():
    q, k = torch.randn(1, 2, 6, 16), torch.randn(1, 2, 4, 16)
    run = OnCpu("flash_attn_2").compile(dispatch.plan(q, q, q, is_causal=True).op).run
    with pytest.raises(BackendError, match="q_offset 0 with 6 queries and 4 keys: positions count from the last key"):
        run(q, k, k, {})


# --- where the hardware is -------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("name", BY_NAME)
def test_a_line_that_is_installed_is_right_on_this_gpu(name):
    backend = FlashAttn(BY_NAME[name])
    if backend.unavailable() is not None:
        pytest.skip(str(backend.unavailable()))
    q, k, v = (torch.randn(2, h, 128, 64, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    for call in ({}, {"is_causal": True}, {"window": (31, 0)}, {"key_lengths": torch.tensor([128, 40], device="cuda")}):
        got = dispatch.attention(q, k, v, return_lse=True, enable_gqa=True, backend=name, **call)
        want = dispatch.attention(
            q.double(), k.double(), v.double(), return_lse=True, enable_gqa=True, backend="eager", **call
        )
        torch.testing.assert_close(got.out.double(), want.out, atol=1e-2, rtol=2e-2)
        torch.testing.assert_close(got.lse.double(), want.lse, atol=1e-3, rtol=1e-3)


def test_a_case_of_a_head_size_that_the_kernels_have_is_verified_natively():
    case = Case("flash_heads", "causal", sizes=Sizes(2, 4, 2, 17, 17, 64, 64), lse=True)
    for name in BY_NAME:
        assert check(name, case, REGISTRY).verdict is Verdict.VERIFIED
