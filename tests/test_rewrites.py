"""Rewrites: one test for each numbered rule of each docstring. That their results are right is the contract suite's."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from attn_dispatch import NoBackendError, dispatch, masks, reference, tiling, variants
from attn_dispatch.backend import Raw
from attn_dispatch.capability import Reason
from attn_dispatch.device import DeviceFacts
from attn_dispatch.ir import AttentionOp, Bias, Ref, SoftCap, TensorDesc, verify
from attn_dispatch.ir.atoms import Causal, Dense, Full, KeyLengths, KeyRange, Window
from attn_dispatch.passes import canonicalise
from attn_dispatch.registry import current
from attn_dispatch.rewrites import MAX_CHAIN, Rewritten, merge_parts, trim_lengths
from attn_dispatch.rewrites.bands import Bands, TileQueries
from attn_dispatch.rewrites.densify_mask import DensifyMask
from attn_dispatch.rewrites.fold_groups import FoldGroups
from attn_dispatch.rewrites.gather import Gather
from attn_dispatch.rewrites.materialise_bias import MaterialiseBias
from attn_dispatch.rewrites.merge_parts import ApplySinks, MergeParts, merge
from attn_dispatch.rewrites.pad_head_dim import PadHeadDim
from attn_dispatch.rewrites.trim_lengths import TrimLengths
from attn_dispatch.rewrites.upcast import Upcast
from attn_dispatch.selection.candidates import chains


@pytest.fixture(autouse=True)
def _four_threads(monkeypatch):
    monkeypatch.setattr(merge_parts, "facts", lambda device: DeviceFacts(device, "test", "test", 4))


class Call:
    """A call, its canonical op, and what one rewrite makes of it while its inner runs are watched."""

    def __init__(self, b=1, hq=2, hkv=2, sq=8, skv=8, d=8, dv=8, dtype=torch.float32, **arguments):
        gen = torch.Generator().manual_seed(1)
        shapes = ((b, hq, sq, d), (b, hkv, skv, d), (b, hkv, skv, dv))
        self.tensors = [torch.randn(s, generator=gen).to(dtype) for s in shapes]
        plan = dispatch.plan(*self.tensors, enable_gqa=hq != hkv, **arguments)
        self.op, _ = canonicalise(plan.binding.op)
        self.operands = plan.binding.operands(plan.tensors)
        self.inner: list[tuple[list[torch.Tensor], dict[str, torch.Tensor]]] = []

    def apply(self, rewrite) -> Rewritten:
        done = rewrite.apply(self.op)
        assert isinstance(done, Rewritten), str(done)
        verify(done.inner)
        return done

    def run(self, rewrite):
        """The result by the rewrite, inner runs done by the reference at their own sizes."""
        done = self.apply(rewrite)
        inner = done.inner

        def run(q, k, v, t):
            self.inner.append(([q, k, v], dict(t)))
            raw = reference.attention(inner, q, k, v, t)
            return raw if inner.outputs.lse or inner.outputs.weights else raw.out

        return done.adapt(run)(*self.tensors, self.operands)

    def want(self) -> Raw:
        return reference.attention(self.op, *self.tensors, self.operands)

    def key_lengths_seen(self) -> list[int]:
        return [tensors[1].shape[2] for tensors, _ in self.inner]


def refusal(rewrite, call: Call) -> str:
    reason = rewrite.apply(call.op)
    assert isinstance(reason, Reason)
    return str(reason)


def close(got: torch.Tensor, want: torch.Tensor, atol: float = 2e-6) -> None:
    torch.testing.assert_close(got, want, atol=atol, rtol=1e-5)


# --- the list --------------------------------------------------------------------------------------------------------


def test_the_rewrites_stand_in_the_order_of_their_numbers_and_chains_rise():
    orders = [rewrite.order for rewrite in current().rewrites.values()]
    assert orders == sorted(set(orders))
    call = Call(b=2, hq=4, sq=200, skv=200, d=12, window=(15, 0), key_lengths=torch.tensor([200, 90]))
    found, _ = chains(call.op, current())
    assert max(len(chain.names) for chain in found) == MAX_CHAIN
    for chain in found:
        numbers = [current().rewrites[name].order for name in chain.names]
        assert numbers == sorted(set(numbers))


def test_every_numbered_rule_has_a_test_here():
    this = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*rewrites.py"))
    for rewrite in current().rewrites.values():
        module = inspect.getmodule(type(rewrite))
        for n in re.findall(r"^(\d+)\. ", module.__doc__, re.M):
            assert f"def test_{module.__name__.rpartition('.')[2]}_rule_{n}_" in this, (rewrite.name, n)


# --- gather ----------------------------------------------------------------------------------------------------------


def lists(b: int, sq: int, skv: int, count: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(2)
    rows = [torch.randperm(skv, generator=gen)[:count] for _ in range(b * sq)]
    return torch.stack(rows).view(b, sq, count)


@pytest.mark.parametrize("layout", ["bhsd", "cache", "bshd"])
def test_gather_rule_1_copies_the_selected_rows_once_per_kv_head(layout):
    call = Call(b=2, hq=4, hkv=2, sq=3, skv=20, attn_mask=masks.causal() & masks.selected(lists(2, 3, 20, 5)))
    if layout == "cache":  # the front of a longer cache
        call.tensors[1:] = [torch.cat([x, x], 2)[:, :, :20] for x in call.tensors[1:]]
    if layout == "bshd":
        call.tensors[1:] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in call.tensors[1:]]
    close(call.run(Gather()), call.want().out)
    assert [tuple(x.shape) for x in call.inner[0][0]] == [(6, 4, 1, 8), (6, 2, 5, 8), (6, 2, 5, 8)]


def test_gather_rule_2_runs_chunks_that_fit_and_a_decode_step_at_once(monkeypatch):
    decode = Call(hq=4, hkv=2, sq=1, skv=20, attn_mask=masks.selected(lists(1, 1, 20, 5)))
    close(decode.run(Gather()), decode.want().out)
    assert len(decode.inner) == 1
    monkeypatch.setattr("attn_dispatch.rewrites.gather._CHUNK_BYTES", 3 * 2 * 5 * 16 * 4)  # three rows
    call = Call(hq=4, hkv=2, sq=8, skv=20, return_lse=True, attn_mask=masks.selected(lists(1, 8, 20, 5)))
    got = call.run(Gather())
    close(got.out, call.want().out)
    close(got.lse, call.want().lse)
    assert [inner[0][0].shape[0] for inner in call.inner] == [3, 3, 2]
    assert call.apply(Gather()).repeat == pytest.approx(8 / 3)


def test_gather_rule_3_masks_padding_repeats_and_what_the_rest_excludes():
    indices = torch.tensor([[[3, -1, 3, 7], [-1, -1, -1, -1], [9, 2, 19, 2]]])
    rest = masks.causal() & masks.columns(keep=torch.arange(20) != 2) & masks.key_lengths([19])
    call = Call(sq=3, skv=20, q_offset=15, attn_mask=masks.Selected(indices) & rest)
    close(call.run(Gather()), call.want().out)
    keep = call.inner[0][1]["gathered_keep"]
    assert keep.int().tolist() == [[1, 0, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]


def test_gather_rule_3_looks_up_a_mask_per_head():
    per_head = torch.rand(1, 4, 3, 20, generator=torch.Generator().manual_seed(3)) < 0.5
    mask = masks.selected(lists(1, 3, 20, 6)) & masks.Dense(per_head)
    call = Call(hq=4, hkv=2, sq=3, skv=20, attn_mask=mask)
    close(call.run(Gather()), call.want().out)
    assert call.inner[0][1]["gathered_keep"].shape == (3, 4, 1, 6)


def test_gather_rule_4_has_the_gradients_of_the_masked_form():
    call = Call(hq=4, hkv=2, sq=3, skv=20, attn_mask=masks.causal() & masks.selected(lists(1, 3, 20, 5)))
    for x in call.tensors:
        x.requires_grad_()
    call.op = call.op.with_(grad=("query", "key", "value"))
    got = torch.autograd.grad(call.run(Gather()).square().sum(), call.tensors)
    for mine, theirs in zip(got, torch.autograd.grad(call.want().out.square().sum(), call.tensors), strict=True):
        close(mine, theirs, 1e-5)


def test_gather_rule_5_is_refused_without_short_lists_that_heads_share():
    assert "no lists" in refusal(Gather(), Call(is_causal=True))
    long = Call(sq=3, skv=20, attn_mask=masks.selected(lists(1, 3, 20, 11)))
    assert "lists of 11 keys are not much shorter than Skv 20" in refusal(Gather(), long)
    heads = lists(2, 3, 20, 4)[None]
    assert "select different keys" in refusal(Gather(), Call(sq=3, skv=20, attn_mask=masks.selected(heads)))
    weights = Call(sq=3, skv=20, attn_mask=masks.selected(lists(1, 3, 20, 4)), return_weights=True)
    assert "weights" in refusal(Gather(), weights)


# --- fold_groups -----------------------------------------------------------------------------------------------------


def test_fold_groups_rule_1_makes_rows_of_the_heads_of_a_group():
    call = Call(hq=6, hkv=2, sq=3)
    close(call.run(FoldGroups()), call.want().out)
    assert call.inner[0][0][0].shape == (1, 2, 9, 8)


def test_fold_groups_rule_2_keeps_a_mask_that_is_the_same_for_every_row():
    call = Call(b=2, hq=4, key_lengths=torch.tensor([3, 8]))
    assert isinstance(call.apply(FoldGroups()).inner.mask, KeyLengths)
    close(call.run(FoldGroups()), call.want().out)


@pytest.mark.parametrize("bias", [(1, 4, 8, 8), (1, 1, 8, 8), (1, 4, 1, 8), (1, 1, 1, 8)], ids=str)
def test_fold_groups_rule_3_repeats_or_regroups_a_mask_or_bias_per_row(bias):
    call = Call(hq=4, is_causal=True, bias=torch.randn(bias))
    assert isinstance(call.apply(FoldGroups()).inner.mask, Dense)
    close(call.run(FoldGroups()), call.want().out)


def test_fold_groups_rule_4_declines_where_the_written_out_mask_would_be_too_large():
    call = Call(hq=4, sq=8, is_causal=True)
    long = call.op.resized(1, 4096, 4096)
    assert "written out" in str(FoldGroups().apply(long))
    assert isinstance(FoldGroups().apply(long.with_(mask=Full())), Rewritten)


@pytest.mark.parametrize(
    ("word", "arguments"),
    [("sinks", {"sinks": torch.zeros(4)}), ("dropout", {"dropout_p": 0.5}), ("Alibi", {"bias": torch.ones(4)})],
)
def test_fold_groups_refuses_what_belongs_to_a_query_head(word, arguments):
    assert word in refusal(FoldGroups(), Call(hq=4, **arguments))


def test_fold_groups_has_nothing_to_do_without_groups():
    assert "no groups" in refusal(FoldGroups(), Call())


def test_fold_groups_gives_back_lse_and_weights_of_the_query_heads():
    call = Call(hq=4, return_lse=True, return_weights=True)
    got, want = call.run(FoldGroups()), call.want()
    close(got.lse, want.lse)
    close(got.weights, want.weights)


# --- trim_lengths ----------------------------------------------------------------------------------------------------


def test_trim_lengths_rule_1_never_reads_padded_keys():
    call = Call(b=3, key_lengths=torch.tensor([3, 8, 5]))
    call.tensors[1][0, :, 3:] = math.nan
    call.tensors[2][0, :, 3:] = math.nan
    close(call.run(TrimLengths()), call.want().out)
    assert sorted(call.key_lengths_seen()) == [3, 5, 8]


def test_trim_lengths_rule_2_gives_padded_queries_0_and_minus_infinity():
    call = Call(b=2, query_lengths=torch.tensor([3, 0]), return_lse=True)
    got = call.run(TrimLengths())
    close(got.out, call.want().out)
    assert (got.out[0, :, 3:] == 0).all()
    assert torch.isneginf(got.lse[1]).all()
    assert [tensors[0].shape[2] for tensors, _ in call.inner] == [3]


def kept_between(*spans, size=8):
    at = torch.arange(size)
    return torch.stack([(at >= lo) & (at < hi) for lo, hi in spans])[:, None, None]


def with_columns(kept, **arguments):
    """A causal call under key padding, as transformers' masks are: the columns are an operand of the op."""
    return Call(b=kept.shape[0], attn_mask=masks.causal() & masks.columns(keep=kept[:, 0, 0]), **arguments)


def test_trim_lengths_rule_1_cuts_off_the_columns_on_either_side():
    call = Call(b=3, attn_mask=kept_between((3, 8), (0, 6), (2, 5)))
    call.tensors[1][0, :, :3] = math.nan
    close(call.run(TrimLengths()), call.want().out)
    assert sorted(call.key_lengths_seen()) == [3, 5, 6]


def test_trim_lengths_rule_3_cuts_off_the_queries_before_a_left_padded_sequence():
    call = with_columns(kept_between((0, 8), (3, 8), (3, 8), (8, 8)), return_lse=True, window=(3, 0))
    for tensor in call.tensors[1:]:
        tensor[1, :, :3] = math.nan
    got, want = call.run(TrimLengths()), call.want()
    close(got.out, want.out)
    close(got.lse, want.lse)
    assert [(q.shape[0], q.shape[2], k.shape[2]) for (q, k, _), _ in call.inner] == [(1, 8, 8), (2, 5, 5)]


def test_trim_lengths_rule_3_refuses_masks_that_look_at_the_number_of_a_key():
    """A prefix beside padding was counted from the first key that was kept."""
    kept = kept_between((3, 8), (0, 8))[:, 0, 0]
    for other in (masks.columns(4), masks.columns(2) | masks.causal(), ~masks.columns(2), masks.strided(2)):
        text = refusal(TrimLengths(), Call(b=2, attn_mask=other & masks.columns(keep=kept)))
        assert "would move" in text, other


def test_trim_lengths_tells_strides_that_there_may_be_fewer_keys_than_rows():
    """As a square op it let `residue_classes` drop the mask of what that pads to whole classes."""
    lengths = torch.tensor([5, 40])
    call = Call(b=2, sq=40, skv=40, attn_mask=masks.causal() & masks.Stride(2), key_lengths=lengths,
                query_lengths=torch.tensor([40, 40]))  # fmt: skip
    inner = call.apply(TrimLengths()).inner
    assert inner.Sq != inner.Skv
    close(call.run(TrimLengths()), call.want().out)


def test_trim_lengths_without_keys_or_rows_gives_zeros_and_gradients_of_zero():
    call = Call(b=2, skv=0, attn_mask=torch.zeros(2, 1, 1, 0, dtype=torch.bool))
    assert (call.run(TrimLengths()) == 0).all()
    bias = torch.zeros(1, 1, 8, 8, requires_grad=True)
    call = Call(b=2, attn_mask=kept_between((8, 8), (8, 8)), bias=bias)
    out = call.run(TrimLengths())
    assert torch.equal(torch.autograd.grad(out.sum(), bias)[0], torch.zeros_like(bias))


def test_flash_behind_trim_lengths_keeps_the_nan_of_a_query_for_few_keys():
    """Whether there are too few keys for it was decided by the length that the plan was made for."""
    q, k, v = Call(b=2, sq=40, skv=40).tensors
    q[0, :, 3] = math.nan
    kept = kept_between((35, 40), (0, 40), size=40)
    out = dispatch.attention(q, k, v, attn_mask=kept, backend="trim_lengths > sdpa_flash")
    assert out[0, :, 3].isnan().all()
    assert out.isfinite().sum() == out.numel() - out[0, :, 3].numel()


def test_trim_lengths_rule_3_needs_causal_and_a_square():
    kept = kept_between((0, 8), (3, 8))[:, 0, 0]
    assert "would move" in refusal(TrimLengths(), Call(b=2, attn_mask=masks.window(2, 2) & masks.columns(keep=kept)))
    assert "would move" in refusal(
        TrimLengths(), Call(b=2, attn_mask=masks.causal() & masks.chunked(4) & masks.columns(keep=kept))
    )
    assert "square" in refusal(TrimLengths(), Call(b=2, sq=4, attn_mask=masks.causal() & masks.columns(keep=kept)))


def test_trim_lengths_rule_4_gathers_keys_with_gaps_and_asks_the_reference_where_positions_count(monkeypatch):
    kept = kept_between((1, 8), (0, 8))
    kept[0, ..., 4] = False
    call = Call(b=2, attn_mask=kept)
    close(call.run(TrimLengths()), call.want().out)
    assert sorted(call.key_lengths_seen()) == [6, 8]
    for end, rows in ((8, 256), (7, 3)):  # in one part and in several, padded on the right too
        monkeypatch.setattr(trim_lengths, "_ROWS_AT_ONCE", rows)
        kept[0, ..., end:] = False
        call = with_columns(kept, return_lse=True)
        call.tensors[1][0, :, 4] = math.nan
        got, want = call.run(TrimLengths()), call.want()
        close(got.out, want.out)
        close(got.lse, want.lse)
        assert call.key_lengths_seen() == [8]


def test_trim_lengths_rule_5_runs_equal_lengths_as_one_batch():
    call = Call(b=4, key_lengths=torch.tensor([5, 2, 5, 5]))
    close(call.run(TrimLengths()), call.want().out)
    assert sorted(tensors[0].shape[0] for tensors, _ in call.inner) == [1, 3]


def test_trim_lengths_rule_5_gathers_only_small_sequences_that_stand_apart(monkeypatch):
    monkeypatch.setattr(trim_lengths, "_GATHERED_BYTES", 0)
    call = Call(b=5, key_lengths=torch.tensor([5, 2, 5, 5, 2]))
    close(call.run(TrimLengths()), call.want().out)
    assert [tensors[0].shape[0] for tensors, _ in call.inner] == [1, 1, 2, 1]


def test_trim_lengths_copies_a_bias_that_all_sequences_share_once():
    call = Call(b=3, key_lengths=torch.tensor([5, 2, 8]), bias=torch.randn(8, 8, 2).permute(2, 0, 1)[None])
    close(call.run(TrimLengths()), call.want().out)
    seen = [operands["bias"] for _, operands in call.inner]
    assert {x.stride(-1) for x in seen} == {1}
    assert len({x.untyped_storage().data_ptr() for x in seen}) == 1


def test_a_window_stays_at_the_last_key_while_keys_and_lengths_grow():
    q = torch.randn(2, 2, 1, 8)
    for skv in (40, 41, 50, 51):
        k, v = torch.randn(2, 2, skv, 8), torch.randn(2, 2, skv, 8)
        options = {"window": (15, 0), "key_lengths": torch.tensor([skv, skv])}
        got = dispatch.attention(q, k, v, **options, backend="trim_lengths > blocked")
        close(got, dispatch.attention(q, k, v, **options, backend="eager"))


def test_trim_lengths_rule_6_is_not_for_a_gpu_nor_for_tensors_without_values():
    op = Call(b=2, key_lengths=torch.tensor([3, 8])).op
    on_gpu = op.with_(query=TensorDesc(op.query.shape, "float32", "cuda"))
    for other in (on_gpu, op.with_(traced=True)):
        assert "read on the host" in str(TrimLengths().apply(other))


def test_trim_lengths_keeps_the_positions_of_the_padded_call():
    call = Call(b=2, sq=4, skv=8, attn_mask=masks.causal(), key_lengths=torch.tensor([6, 8]))
    close(call.run(TrimLengths()), call.want().out)


def test_trim_lengths_refuses_the_lse_of_empty_sequences_with_sinks():
    assert "sinks" in refusal(
        TrimLengths(), Call(b=2, key_lengths=torch.tensor([0, 8]), sinks=torch.zeros(2), return_lse=True)
    )


def test_merge_parts_of_fewer_keys_than_parts_runs_them_whole():
    """Behind `trim_lengths` a sequence may have one key; flash on none of them ends the process."""
    call = Call(hq=1, hkv=1, sq=1, skv=2048)
    done = call.apply(MergeParts())
    short = [call.tensors[0], *(x[:, :, :2] for x in call.tensors[1:])]

    def run(q, k, v, t):
        assert k.shape[2] > 0
        return reference.attention(done.inner, q, k, v, t)

    close(done.adapt(run)(*short, {}), reference.attention(call.op, *short, {}).out)


# --- bands and tile_queries ------------------------------------------------------------------------------------------


@pytest.fixture
def blocks_of_64(monkeypatch):
    monkeypatch.setattr(tiling, "tile_by_block", lambda op: 64)


def test_bands_rule_1_hands_each_block_of_rows_only_the_keys_that_it_may_attend(blocks_of_64):
    call = Call(sq=200, skv=200, window=(9, 0))
    close(call.run(Bands()), call.want().out)
    assert call.key_lengths_seen() == [64, 73, 73, 17]
    storage = call.tensors[1].untyped_storage().data_ptr()
    assert all(tensors[1].untyped_storage().data_ptr() == storage for tensors, _ in call.inner)


def test_bands_rule_2_does_not_compute_blocks_that_attend_nothing(blocks_of_64):
    call = Call(sq=200, skv=200, window=(9, 0), q_offset=-140, return_lse=True)
    got, want = call.run(Bands()), call.want()
    assert len(call.inner) == 2
    close(got.out, want.out)
    close(got.lse, want.lse)
    assert (got.out[:, :, :128] == 0).all()


@pytest.mark.parametrize("backend", [None, "blocked", "eager"])
@pytest.mark.parametrize("slopes", [False, True])
def test_where_no_pair_attends_each_gradient_is_0_and_none_is_missing(backend, slopes):
    q = torch.randn(1, 4, 200, 8, requires_grad=True)
    k = torch.randn(1, 4, 700, 8, requires_grad=True)
    bias = torch.rand(4, requires_grad=True) if slopes else torch.randn(1, 4, 200, 700, requires_grad=True)
    mask = Causal() & KeyRange(5, 120) & Window(30, None)
    if slopes and backend == "blocked":
        backend = "materialise_bias > blocked"
    out = dispatch.attention(q, k, k, mask, q_offset=-225, bias=bias, backend=backend)
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), [q, k, bias]))


def test_bands_rule_2_gives_rows_that_attend_nothing_the_lse_of_their_sink():
    sinks = torch.tensor([0.5, -1.0])
    call = Call(sq=200, skv=200, window=(9, 0), q_offset=-140, return_lse=True, sinks=sinks)
    got = call.run(Bands())
    close(got.lse, call.want().lse)
    close(got.lse[0, :, 0], sinks)


def test_bands_rule_3_builds_the_bias_of_blocks_that_look_alike_once(blocks_of_64, monkeypatch):
    monkeypatch.setattr(tiling, "_KEPT_PAIRS", 0)
    call = Call(sq=320, skv=320, window=(70, 0))
    close(call.run(Bands()), call.want().out)
    biases = [t["tile_bias"] for _, t in call.inner]
    assert [b.shape[-1] for b in biases] == [64, 128, 134, 134, 134]
    assert len({b.untyped_storage().data_ptr() for b in biases}) == 1  # the first ones are parts of the others


def test_bands_rule_3_keeps_small_biases_and_where_the_blocks_are_for_the_next_call(blocks_of_64, monkeypatch):
    """They took as long as the kernel: 1.7 ms of Python in 4.6 ms of a causal prefill of 448."""
    call = Call(sq=320, skv=320, window=(70, 0))
    made = Bands().apply(call.op)
    seen: list[torch.Tensor] = []

    def inner(q, k, v, t):
        seen.append(t["tile_bias"])
        return reference.attention(made.inner, q, k, v, t).out

    run = made.adapt(inner)
    with torch.inference_mode():
        close(run(*call.tensors, {}), call.want().out)
    monkeypatch.setattr(type(call.op.mask), "key_interval", None)  # is not asked again
    close(run(*call.tensors, {}), call.want().out)
    first, second = seen[:5], seen[5:]
    assert [b.data_ptr() for b in first] == [b.data_ptr() for b in second]
    assert not any(b.is_inference() for b in first)
    doubles = [x.double() for x in call.tensors]
    close(run(*doubles, {}), reference.attention(call.op, *doubles, {}).out)


def test_bands_rule_3_keeps_no_bias_that_a_mode_around_the_call_made():
    call = Call(sq=200, skv=200, window=(70, 0))
    cut = tiling.cutting(call.op, 64)(200, 200, 0, {})

    def biases() -> list[torch.Tensor | None]:
        bias_of = tiling.TileBias(call.op, call.tensors[0], call.tensors[1], {}, cut)
        return [bias_of(tile) for tile in cut.tiles]

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert all(isinstance(bias, FakeTensor) for bias in biases())
    assert not any(isinstance(bias, FakeTensor) for bias in biases())


def test_bands_rule_3_keeps_a_bounded_number_of_lengths_and_is_right_at_each(blocks_of_64):
    call = Call(sq=320, skv=320, is_causal=True)
    made = Bands().apply(call.op)
    run = made.adapt(lambda q, k, v, t: reference.attention(made.inner, q, k, v, t).out)
    for n in (*range(257, 321, 3), 257, 320):
        tensors = [x[:, :, :n] for x in call.tensors]
        close(run(*tensors, {}), F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True))


def test_bands_are_chosen_for_a_causal_square_that_the_flash_kernel_computes_whole():
    """The CPU kernel takes 512 keys at a time and skips whole blocks alone."""
    chosen = {}
    for n in (128, 448, 512, 1024):
        x = torch.randn(1, 8, n, 64)
        chosen[n] = dispatch.explain(x, x, x, is_causal=True).chosen
    assert chosen == {128: "sdpa_flash", 448: "bands > sdpa_flash", 512: "bands > sdpa_flash", 1024: "sdpa_flash"}


def test_bands_cuts_wide_bands_into_larger_blocks_and_a_single_short_head_into_few():
    """Sizes that were best when measured (tiling.tile_by_block)."""
    best = {}
    for heads, dim, window, keys in (
        (64, 64, 128, 1024),
        (12, 64, 256, 4096),
        (8, 128, 1024, 3072),
        (8, 128, 4096, 6144),
    ):
        x = TensorDesc((1, heads, keys, dim), "float32")
        best[window] = tiling.tile_by_block(AttentionOp(x, x, x, mask=Causal() & Window(window - 1, None)))
    assert best == {128: 64, 256: 64, 1024: 128, 4096: 256}
    x = TensorDesc((1, 1, 1024, 64), "float32")
    assert tiling.tile_by_block(AttentionOp(x, x, x, mask=Causal() & Window(127, None))) == 128
    many, far = TensorDesc((4096, 64, 1024, 128), "float32"), TensorDesc((4096, 64, 64, 128), "float32")
    nothing = AttentionOp(many, far, far, mask=Causal() & Window(0, None), q_offset=4096)  # the middle row sees no key
    assert tiling.tile_by_block(nothing) == 32


def test_bands_rule_4_makes_small_causal_squares_of_causal_chunks():
    call = Call(sq=160, skv=160, attn_mask=masks.chunked(64))
    assert call.apply(Bands()).inner.mask == Causal()
    close(call.run(Bands()), call.want().out)
    assert call.key_lengths_seen() == [64, 64, 32]
    assert all("tile_bias" not in t for _, t in call.inner)


def test_bands_rule_5_is_for_narrow_masks_and_tile_queries_for_long_queries_of_any():
    wide, narrow = Call(sq=300, skv=40), Call(sq=300, skv=300, window=(9, 0))
    assert "of 40 keys" in refusal(Bands(), wide)
    assert "bands cuts this mask better" in refusal(TileQueries(), narrow)
    assert "Sq 8 < 256" in refusal(TileQueries(), Call())
    close(wide.run(TileQueries()), wide.want().out)
    assert [tensors[0].shape[2] for tensors, _ in wide.inner] == [128, 128, 44]


# --- merge_parts and apply_sinks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("skv", [1024, 1027])
def test_merge_parts_rule_1_splits_the_keys_of_a_decode_step_into_extra_heads(skv):
    call = Call(hq=4, hkv=1, sq=1, skv=skv, return_lse=True)
    got, want = call.run(MergeParts()), call.want()
    close(got.out, want.out)
    close(got.lse, want.lse)
    assert call.inner[0][0][1].shape == (1, 4, 256, 8)
    assert len(call.inner) == (1 if skv % 4 == 0 else 2)


def test_merge_parts_rule_2_applies_the_sinks_to_the_final_lse_once():
    call = Call(sinks=torch.tensor([0.3, -2.0]), is_causal=True, return_lse=True)
    got, want = call.run(ApplySinks()), call.want()
    close(got.out, want.out)
    close(got.lse, want.lse)
    assert call.inner[0][1] == {}


def test_a_row_without_keys_and_a_sink_of_minus_infinity_give_0():
    x, allowed = torch.randn(1, 2, 20, 8), torch.ones(20, 20, dtype=torch.bool)
    allowed[3] = False
    sinks = torch.tensor([-math.inf, 0.5])
    got = dispatch.attention(x, x, x, allowed, sinks=sinks, backend="apply_sinks > sdpa_flash")
    close(got, dispatch.attention(x, x, x, allowed, sinks=sinks, backend="eager"))
    assert (got[0, :, 3] == 0).all()


@pytest.mark.parametrize("backend", ["bands > sdpa_flash", "tile_queries > sdpa_flash", "blocked", None])
def test_a_block_or_what_is_before_it_is_no_causal_square(backend):
    x, mask = torch.randn(1, 2, 1024, 8), masks.causal() | masks.SameBlock(128)
    try:
        got = dispatch.attention(x, x, x, mask, backend=backend)
    except NoBackendError:
        assert backend not in (None, "blocked")
        return
    close(got, dispatch.attention(x, x, x, mask, backend="eager"))


@pytest.mark.parametrize("backend", ["blocked", "bands > eager"])
def test_gradients_are_0_where_no_tile_attends_anything(backend):
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (512, 600, 600))
    out = dispatch.attention(q, k, v, window=(4, 0), q_offset=2000, backend=backend)
    assert all((x == 0).all() for x in (out, *torch.autograd.grad(out.sum(), (q, k, v))))


@pytest.mark.parametrize(
    ("rewrite", "call"),
    [(MergeParts(), Call(hkv=1, sq=1, skv=1024)), (ApplySinks(), Call(sinks=torch.zeros(2)))],
    ids=["merge_parts", "apply_sinks"],
)
def test_merge_parts_rule_3_is_illegal_with_gradients(rewrite, call):
    assert isinstance(rewrite.apply(call.op), Rewritten)
    for changes in ({"grad": ("query",)}, {"higher_order": True}):
        assert "lse" in str(rewrite.apply(call.op.with_(**changes)))


def parts_of(call: Call, cuts: list[int]) -> list[Raw]:
    q, k, v = call.tensors
    op = call.op
    ends = [0, *cuts, k.shape[2]]
    return [reference.attention(op, q, k[:, :, a:b], v[:, :, a:b], {}) for a, b in itertools.pairwise(ends)]


def test_merging_is_associative_commutative_and_has_a_neutral_element():
    call = Call(return_lse=True)
    a, b, c = parts_of(call, [2, 5])
    whole = call.want()
    nothing = Raw(torch.zeros_like(a.out), torch.full_like(a.lse, -math.inf))
    ways = (merge([a, b, c]), merge([merge([a, b]), c]), merge([c, merge([b, a])]), merge([nothing, a, b, c, nothing]))
    for got in ways:
        close(got.out, whole.out)
        close(got.lse, whole.lse)
    empty = merge([nothing, nothing])
    assert (empty.out == 0).all()
    assert torch.isneginf(empty.lse).all()


# --- upcast ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_upcast_rule_1_computes_in_float32_and_rounds_the_output_once(dtype):
    call = Call(dtype=dtype, return_lse=True, return_weights=True, attn_mask=torch.randn(8, 8).to(dtype))
    got = call.run(Upcast())
    tensors, operands = call.inner[0]
    assert {x.dtype for x in (*tensors, *operands.values())} == {torch.float32}
    assert (got.out.dtype, got.lse.dtype, got.weights.dtype) == (dtype, torch.float32, dtype)
    exact = reference.attention(call.op, *(x.float() for x in call.tensors), operands)
    assert torch.equal(got.out, exact.out.to(dtype))


def test_upcast_rule_2_is_a_candidate_for_half_precision_only():
    assert "needs no upcast" in refusal(Upcast(), Call())
    assert isinstance(Upcast().apply(Call(dtype=torch.bfloat16).op), Rewritten)


# --- pad_head_dim ----------------------------------------------------------------------------------------------------


def test_pad_head_dim_rule_1_pads_to_the_next_multiple_of_8_of_the_larger_size():
    inner = Call(d=5, dv=11).apply(PadHeadDim()).inner
    assert (inner.D, inner.Dv) == (16, 16)
    assert "multiple of 8" in refusal(PadHeadDim(), Call(d=16, dv=16))
    call = Call(d=192, dv=128)  # MLA
    close(call.run(PadHeadDim()), call.want().out)
    assert [mine is theirs for mine, theirs in zip(call.inner[0][0], call.tensors, strict=True)] == [True, True, False]


def test_pad_head_dim_rule_2_adds_zeros_and_cuts_the_output():
    call = Call(d=5, dv=11, return_lse=True)
    got = call.run(PadHeadDim())
    close(got.out, call.want().out)
    close(got.lse, call.want().lse)
    assert all((x[..., size:] == 0).all() for x, size in zip(call.inner[0][0], (5, 5, 11), strict=True))


def test_pad_head_dim_rule_3_keeps_the_scale_of_the_true_head_size():
    op = Call(d=5).op
    assert PadHeadDim().apply(op.with_(scale=None)).inner.scale == 5**-0.5


def test_pad_head_dim_rule_4_leaves_the_linear_family_alone():
    call = Call(d=5, variant=variants.LinearAttention())
    assert "need not keep zeros" in refusal(PadHeadDim(), call)


def test_bands_rule_6_adds_alibi_to_the_tensor_of_a_tile():
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    for mask, rewrite in (
        (masks.sliding_window(16), Bands()),
        (masks.chunked(64), Bands()),
        (masks.causal(), TileQueries()),
    ):
        call = Call(sq=300, skv=310, bias=slopes, attn_mask=mask, return_lse=True)
        got = call.run(rewrite)
        close(got.out, call.want().out)
        close(got.lse, call.want().lse)
        assert all(t["tile_bias"].shape[1] == 2 for _, t in call.inner)
        (grad,) = torch.autograd.grad(got.out.square().sum(), slopes)
        (want,) = torch.autograd.grad(call.want().out.square().sum(), slopes)
        close(grad, want, 1e-4)
    call = Call(sq=300, skv=300, bias=slopes, is_causal=True, attn_mask=masks.chunked(64))
    close(call.run(Bands()), call.want().out)


# --- materialise_bias ------------------------------------------------------------------------------------------------


def test_materialise_bias_rule_1_writes_slopes_out_and_leaves_the_mask():
    call = Call(hq=4, bias=torch.tensor([0.5, 0.25, 0.1, 0.0]), softcap=3.0, attn_mask=masks.causal(), sq=5)
    inner = call.apply(MaterialiseBias()).inner
    assert inner.score == (SoftCap(3.0), Bias(Ref("written_bias")))
    assert inner.mask == Causal()
    assert dict(inner.operands)["written_bias"].shape == (1, 4, 5, 8)
    close(call.run(MaterialiseBias()), call.want().out)
    assert isinstance(FoldGroups().apply(inner), Rewritten)
    assert "no ALiBi" in refusal(MaterialiseBias(), Call())
    per_batch = Call(b=2, bias=torch.tensor([0.5, 0.25]), is_causal=True, q_offset=torch.tensor([1, 3]))
    close(per_batch.run(MaterialiseBias()), per_batch.want().out)
    assert per_batch.inner[0][1]["written_bias"].shape == (2, 2, 8, 8)


def test_materialise_bias_rule_2_has_gradients_of_the_slopes():
    slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    call = Call(bias=slopes, attn_mask=masks.causal())
    assert call.apply(MaterialiseBias()).inner.grad == ("written_bias",)
    (got,) = torch.autograd.grad(call.run(MaterialiseBias()).square().sum(), slopes)
    (want,) = torch.autograd.grad(call.want().out.square().sum(), slopes)
    assert want.abs().min() > 0
    close(got, want)


def test_materialise_bias_rule_3_is_bounded():
    op = Call(bias=torch.tensor([0.5, 0.25])).op.resized(1, 1 << 14, 1 << 14)
    assert str(MaterialiseBias().apply(op)) == f"{1 << 29} elements of bias"


# --- densify_mask ----------------------------------------------------------------------------------------------------


def test_densify_mask_rule_1_writes_any_mask_out_as_one_boolean_tensor():
    call = Call(b=2, attn_mask=masks.strided(3) | masks.key_lengths([2, 4]))
    close(call.run(DensifyMask()), call.want().out)
    assert [name for name, _ in call.apply(DensifyMask()).inner.operands] == ["dense_mask"]
    assert call.inner[0][1]["dense_mask"].shape == (2, 1, 8, 8)
    assert call.inner[0][1]["dense_mask"].dtype == torch.bool


def _draw(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("make", "heads"),
    [
        (lambda: masks.causal() & masks.from_tensor(_draw(2, 2, 8, 8) < 0.6), 2),
        (lambda: masks.causal() & masks.from_tensor(_draw(2, 1, 8, 8) < 0.6), 1),
        (lambda: masks.causal() & ~masks.from_tensor(_draw(1, 2, 8, 8) < 0.6), 2),
        (lambda: masks.causal() & masks.from_tensor(_draw(8, 8) < 0.6), 1),
        (lambda: masks.causal() & masks.block_table(2, _draw(2, 4, 4) < 0.6), 2),
        (lambda: masks.block_table(2, _draw(4, 4) < 0.6), 1),
        (lambda: ~masks.selected(_draw(2, 8, 8).topk(3).indices), 1),
        (lambda: masks.selected(_draw(2, 2, 8, 8).topk(3).indices), 2),
        (lambda: masks.key_lengths([2, 4]), 1),
    ],
    ids=[
        "mask of heads",
        "mask",
        "not mask of heads",
        "rows",
        "table of heads",
        "table",
        "not keys",
        "keys of heads",
        "len",
    ],
)
def test_densify_mask_rule_1_says_how_many_heads_its_tensor_has(make, heads):
    """A backend that fixes a size of 1 when it compiles takes the description at its word; an ONNX node test saw it."""
    call = Call(b=2, attn_mask=make())
    close(call.run(DensifyMask()), call.want().out)
    assert call.apply(DensifyMask()).inner.operand("dense_mask").shape == (2, heads, 8, 8)
    assert call.inner[0][1]["dense_mask"].shape[1] == heads


def test_densify_mask_rule_2_writes_alibi_out_as_a_bias():
    call = Call(bias=torch.tensor([0.5, 0.25]), softcap=3.0, attn_mask=masks.causal())
    inner = call.apply(DensifyMask()).inner
    assert inner.score == (SoftCap(3.0), Bias(Ref("alibi_bias")))
    close(call.run(DensifyMask()), call.want().out)


def test_densify_mask_rule_3_leaves_nan_in_excluded_keys_to_the_guard():
    call = Call(attn_mask=masks.sliding_window(2))
    q, k, v = call.tensors
    k[:, :, 2] = math.nan
    v[:, :, 2] = math.nan
    out = dispatch.attention(q, k, v, attn_mask=masks.sliding_window(2), backend="densify_mask > sdpa_math")
    rows = torch.isnan(out).any(-1).any(1)[0]
    assert rows.tolist() == [False, False, True, True, False, False, False, False]


def test_densify_mask_has_nothing_to_do_for_full_and_dense_masks():
    for arguments in ({}, {"attn_mask": torch.rand(8, 8) < 0.5}):
        assert "nothing to write out" in refusal(DensifyMask(), Call(**arguments))


def test_a_rewrite_that_raises_is_refused_with_its_error_and_not_silently():
    class Raises(Upcast):
        name = "raises"

        def apply(self, op: AttentionOp) -> Rewritten | Reason:
            raise RuntimeError("broken rewrite")

    registry = current()
    broken = type(registry)(registry.backends, {"raises": Raises()})
    _, refused = chains(Call().op, broken)
    assert "broken rewrite" in str(refused["raises"])
