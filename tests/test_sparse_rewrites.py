"""The rewrites whose cost follows the mask: one test for each numbered rule, the results being the reference's."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from attn_dispatch import dispatch, masks, reference
from attn_dispatch.capability import Reason
from attn_dispatch.ir import verify
from attn_dispatch.ir.masks import Grid, Mask
from attn_dispatch.ir.pointwise import allowed_at
from attn_dispatch.passes import canonicalise
from attn_dispatch.rewrites import Rewritten, gather_blocks, gather_columns
from attn_dispatch.rewrites.gather_blocks import GatherBlocks
from attn_dispatch.rewrites.gather_columns import GatherColumns
from attn_dispatch.rewrites.lattice import ResidueClasses, SameBlocks
from attn_dispatch.rewrites.split_segments import SplitSegments


class Call:
    """A call in float64, and what a rewrite makes of it; inner runs are the reference's and are remembered."""

    def __init__(self, mask, sq=33, skv=None, b=2, hq=4, hkv=2, d=8, dv=6, grad=False, lse=True, **arguments):
        skv = sq if skv is None else skv
        gen = torch.Generator().manual_seed(1)
        shapes = ((b, hq, sq, d), (b, hkv, skv, d), (b, hkv, skv, dv))
        self.tensors = [torch.randn(s, generator=gen, dtype=torch.float64, requires_grad=grad) for s in shapes]
        plan = dispatch.plan(*self.tensors, attn_mask=mask, enable_gqa=True, return_lse=lse, **arguments)
        self.op, _ = canonicalise(plan.binding.op)
        self.operands = plan.binding.operands(plan.tensors)
        self.inner: list[tuple[torch.Tensor, torch.Tensor]] = []

    def apply(self, rewrite) -> Rewritten | Reason:
        done = rewrite.apply(self.op)
        if isinstance(done, Rewritten):
            verify(done.inner)
        return done

    def run(self, rewrite):
        done = self.apply(rewrite)
        assert isinstance(done, Rewritten), str(done)

        def run(q, k, v, t):
            self.inner.append((q, k))
            raw = reference.attention(done.inner, q, k, v, t)
            return raw if done.inner.outputs.lse else raw.out

        return done.adapt(run)(*self.tensors, self.operands)

    def check(self, rewrite) -> None:
        """Output, lse and gradients by the rewrite are the reference's."""
        got, want = self.run(rewrite), reference.attention(self.op, *self.tensors, self.operands)
        out = got.out if self.op.outputs.lse else got
        torch.testing.assert_close(out, want.out, atol=1e-12, rtol=1e-12)
        if self.op.outputs.lse:
            torch.testing.assert_close(got.lse, want.lse, atol=1e-12, rtol=1e-12)
        if self.op.grad:
            up = torch.randn_like(want.out)
            for a, b in zip(*(torch.autograd.grad((x * up).sum(), self.tensors) for x in (out, want.out)), strict=True):
                torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)

    def lengths(self) -> set[tuple[int, int]]:
        return {(q.shape[2], k.shape[2]) for q, k in self.inner}


def refusal(rewrite, call: Call) -> str:
    reason = call.apply(rewrite)
    assert isinstance(reason, Reason)
    return str(reason)


def some(*shape, p=0.6, seed=0) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < p


# --- lattice ---------------------------------------------------------------------------------------------------------


def test_lattice_rule_1_runs_residue_classes_as_a_batch():
    call = Call(masks.strided(3), grad=True)
    call.check(ResidueClasses())
    assert call.lengths() == {(11, 11)}
    assert call.inner[0][0].shape[0] == 2 * 3


def test_lattice_rule_1_leaves_a_window_of_the_classes():
    call = Call(masks.dilated(4, 5), grad=True)
    call.check(ResidueClasses())
    done = call.apply(ResidueClasses())
    assert "Window(4, 4)" in str(done.inner.mask)


def test_lattice_rule_2_runs_blocks_as_a_batch():
    call = Call(masks.chunked(11), grad=True)
    call.check(SameBlocks())
    assert call.lengths() == {(11, 11)}
    assert call.inner[0][0].shape[0] == 2 * 3
    assert "equally many" in refusal(SameBlocks(), Call(masks.chunked(11), sq=22, skv=33))


@pytest.mark.parametrize("step", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("sq", [16, 33])
def test_lattice_rule_3_pads_what_the_step_does_not_divide(step, sq):
    keep = some(2, sq)
    for mask in (masks.strided(step), masks.Stride(step), masks.Stride(step) & masks.columns(keep=keep)):
        if step > 1:
            Call(mask, sq, grad=True).check(ResidueClasses())
    for mask in (masks.chunked(step), masks.SameBlock(step), masks.SameBlock(step) & masks.columns(keep=keep)):
        if 2 * step <= sq:
            Call(mask, sq, grad=True).check(SameBlocks())


@pytest.mark.parametrize("q_offset", [None, 0, 3, -4, 11])
@pytest.mark.parametrize(("sq", "skv"), [(16, 33), (33, 16), (7, 40)])
def test_lattice_rule_4_takes_queries_that_stand_anywhere(q_offset, sq, skv):
    for mask in (masks.strided(5), masks.dilated(2, 5), masks.strided(5) & masks.columns(7)):
        call = Call(mask, sq, skv, q_offset=q_offset, grad=True)
        if "mask:Stride" in call.op.features:
            call.check(ResidueClasses())


@pytest.mark.parametrize("skv", [5, 16, 33, 40])
def test_lattice_rule_5_one_row_reads_the_keys_of_its_class(skv):
    call = Call(masks.strided(7), 1, skv, grad=True)
    call.check(ResidueClasses())
    assert call.lengths() == {(1, (skv - 1) // 7 + 1)}
    Call(masks.strided(7) & masks.columns(keep=some(2, skv)), 1, skv).check(ResidueClasses())
    assert "most classes have no query" in refusal(ResidueClasses(), Call(masks.strided(7), 3, 33))


# --- gather_blocks ---------------------------------------------------------------------------------------------------


def test_gather_blocks_rule_1_reads_the_listed_blocks_only():
    table = torch.eye(8, dtype=torch.bool)
    table[:, 3] = True
    call = Call(masks.BlockTable(4, table), 32, hq=2, hkv=2)
    call.check(GatherBlocks())
    assert max(k.shape[2] for _, k in call.inner) == 8


def test_gather_blocks_rule_2_slices_a_run_that_all_heads_list():
    table = some(2, 8, 8, p=0.3)
    table[:, 0] = True
    call = Call(masks.BlockTable(4, table), 32, hq=2)
    call.check(GatherBlocks())
    assert (4, 32) in call.lengths()


def test_gather_blocks_rule_3_bounds_what_is_gathered_at_a_time(monkeypatch):
    mask = masks.bigbird(64, 4, 2, heads=4)
    whole, parts = Call(mask, 64), Call(mask, 64)
    whole.check(GatherBlocks())
    monkeypatch.setattr(gather_blocks, "_PART_ELEMENTS", 4 * 28 * 14)
    parts.check(GatherBlocks())
    assert len(parts.inner) > len(whole.inner)
    assert max(k.numel() for _, k in parts.inner[1:]) < max(k.numel() for _, k in whole.inner[1:])


@pytest.mark.parametrize("exact", [0, 6])
def test_gather_blocks_rule_4_groups_rows_by_width(exact, monkeypatch):
    monkeypatch.setattr(gather_blocks, "_EXACT_WIDTHS", exact)
    call = Call(masks.BlockTable(4, some(4, 9, 9, p=0.5)), 33, grad=True)
    call.check(GatherBlocks())
    widths = sorted({k.shape[2] for _, k in call.inner})
    assert widths[-1] > widths[0]


@pytest.mark.parametrize("q_offset", [None, 0, 3, -4, 11])
@pytest.mark.parametrize(("sq", "skv"), [(16, 33), (33, 33), (7, 40), (1, 33), (33, 16)])
def test_gather_blocks_rule_5_masks_what_the_rest_excludes(sq, skv, q_offset):
    table = some(4, 12, 12, p=0.3)
    table[:, 4] = False
    for rest in (
        masks.full(),
        masks.causal(),
        masks.columns(keep=some(2, skv)),
        masks.causal() & masks.window(9, None),
    ):
        call = Call(masks.BlockTable(4, table) & rest, sq, skv, q_offset=q_offset, grad=True)
        if isinstance(call.apply(GatherBlocks()), Rewritten):
            call.check(GatherBlocks())
        else:
            assert "of all blocks" in refusal(GatherBlocks(), call)


def test_gather_blocks_rule_6_gathers_a_shared_table_once_for_each_kv_head():
    shared, own = some(8, 8, p=0.4), some(4, 8, 8, p=0.4)
    one, many = (Call(masks.BlockTable(4, table), 32, b=1) for table in (shared, own))
    one.check(GatherBlocks())
    many.check(GatherBlocks())
    assert {q.shape[1] for q, _ in one.inner} == {2}
    assert {q.shape[1] for q, _ in many.inner} == {1}


def test_gather_blocks_leaves_sinks_to_apply_sinks_and_full_tables_alone():
    call = Call(masks.BlockTable(4, some(9, 9, p=0.3)), sinks=torch.zeros(4))
    assert "apply_sinks > gather_blocks" in refusal(GatherBlocks(), call)
    assert "of all blocks" in refusal(GatherBlocks(), Call(masks.BlockTable(4, some(9, 9, p=0.95))))
    assert "no conjunction with a block table" in refusal(GatherBlocks(), Call(masks.causal()))


def test_gather_blocks_keeps_few_plans_over_a_growing_decode_and_stays_right():
    """One layout serves every length of a bucket: a plan per length would be a leak, and the first length, whose row is
    a slice, says nothing of the later ones, which gather."""
    table = torch.ones(40, 40, dtype=torch.bool).tril() & (some(40, 40, p=0.2) | torch.eye(40, dtype=torch.bool))
    table[24] = False
    table[24, 20:25] = True
    call = Call(masks.BlockTable(4, table) & masks.causal(), 1, 97, b=1)
    done = call.apply(GatherBlocks())
    assert isinstance(done, Rewritten)
    layout = next(c.cell_contents for c in done.adapt.__closure__ if isinstance(c.cell_contents, gather_blocks._Layout))
    run = done.adapt(lambda q, k, v, t: reference.attention(done.inner, q, k, v, t))
    for skv in range(97, 129):
        gen = torch.Generator().manual_seed(skv)
        q, k, v = (
            torch.randn(s, generator=gen, dtype=torch.float64) for s in ((1, 4, 1, 8), (1, 2, skv, 8), (1, 2, skv, 6))
        )
        got, want = run(q, k, v, {}), reference.attention(call.op, q, k, v, {})
        torch.testing.assert_close(got.out, want.out, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(got.lse, want.lse, atol=1e-12, rtol=1e-12)
    assert len(layout._plans) == 8


def test_gather_blocks_is_a_candidate_of_a_decode_step():
    """Its one row was counted as a whole block of rows, which made it look dearer than all keys."""
    call = Call(masks.BlockTable(16, some(8, 8, p=0.4)) & masks.causal(), 1, 128, b=1)
    assert isinstance(call.apply(GatherBlocks()), Rewritten)


def test_gather_blocks_gives_a_float32_lse_where_no_block_is_listed():
    """Without a piece the lse took the query's dtype."""
    table = torch.zeros(8, 8, dtype=torch.bool)
    q, k, v = (torch.randn(1, 2, 32, 8, dtype=torch.bfloat16) for _ in range(3))
    made = dispatch.plan(
        q, k, v, attn_mask=masks.BlockTable(4, table), return_lse=True, backend="gather_blocks > eager"
    )
    out, lse = made(q, k, v)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert not out.any()
    assert torch.isneginf(lse).all()


# --- gather_columns --------------------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch):
    """Tiles of four rows, global rows in twos, and few expected marks, so that small cases are worth a rewrite."""
    monkeypatch.setattr(gather_columns, "BLOCK", {"cpu": 4})
    monkeypatch.setattr(gather_columns, "ROWS_AT_ONCE", 2)
    monkeypatch.setattr(gather_columns, "_expected_marks", lambda op: 2)


UNIONS = {
    "window and prefix": masks.window(2, 2) | masks.columns(2),
    "sinks": masks.sliding_window(4) | masks.columns(2) & masks.causal(),
    "fixed": masks.fixed(6, 1),
    "fixed without summary": masks.fixed(6, 0),
    "rows": masks.window(2, 2) | masks.Rows(some(33, p=0.1)),
    "longformer": masks.longformer(2, some(2, 33, p=0.1)),
    "longformer, padded": masks.longformer(2, some(2, 33, p=0.1), some(2, 33, p=0.8, seed=1)),
    "causal longformer": masks.causal() & masks.longformer(2, some(33, p=0.1)),
    "globals alone": masks.global_tokens(some(33, p=0.1)),
    "all rows": masks.window(2, 2) | masks.Rows(torch.ones(33, dtype=torch.bool)),
    "no columns": masks.window(2, 2) | masks.columns(keep=torch.zeros(33, dtype=torch.bool)),
    "all columns": masks.window(2, 2) | masks.columns(keep=torch.ones(33, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", UNIONS)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.usefixtures("small")
def test_gather_columns_rule_1_takes_unions_of_bands_columns_and_rows(name, grad):
    Call(UNIONS[name], grad=grad).check(GatherColumns())


@pytest.mark.usefixtures("small")
def test_gather_columns_rule_2_reads_slices_and_gathered_columns():
    call = Call(masks.window(2, 2) | masks.columns(3), 64)
    call.check(GatherColumns())
    assert {n for _, n in call.lengths()} == {3 + 6, 3 + 8}


@pytest.mark.usefixtures("small")
def test_gather_columns_rule_3_counts_no_key_twice():
    inside = torch.zeros(33, dtype=torch.bool)
    inside[[10, 11, 12, 20]] = True
    for grad in (False, True):
        Call(masks.window(3, 3) | masks.columns(keep=inside), grad=grad).check(GatherColumns())


def test_gather_columns_rule_4_cuts_off_columns_that_nobody_of_a_block_sees():
    call = Call(masks.fixed(64, 2), 512, b=1, hq=1, hkv=1)
    call.check(GatherColumns())
    assert [k.shape[2] for _, k in call.inner] == [64 + 2 * n for n in range(1, 9)]


@pytest.mark.usefixtures("small")
def test_gather_columns_rule_5_runs_global_rows_densely_and_in_parts():
    marked = torch.zeros(33, dtype=torch.bool)
    marked[[1, 5, 9, 30, 32]] = True
    call = Call(masks.window(2, 2) | masks.Rows(marked))
    call.check(GatherColumns())
    assert [q.shape[2] for q, k in call.inner if k.shape[2] == 33] == [2, 2, 1]


@pytest.mark.usefixtures("small")
def test_gather_columns_rule_6_does_not_gather_what_is_padded():
    marked, valid = torch.zeros(33, dtype=torch.bool), torch.ones(1, 33, dtype=torch.bool)
    marked[[0, 31, 32]] = True
    valid[:, 30:] = False
    call = Call(masks.longformer(2, marked, valid), b=1)
    call.check(GatherColumns())
    assert call.inner[0][1].shape[2] == 1 + 6


def test_gather_columns_rule_7_declines_where_reading_marks_would_wait():
    call = Call(masks.longformer(2, some(33, p=0.1)), 33)
    there = {n: getattr(call.op, n) for n in ("query", "key", "value")}
    moved = {n: type(d)(d.shape, d.dtype, "cuda") for n, d in there.items()}
    assert "waited for" in str(GatherColumns().apply(call.op.with_(**moved)))
    assert "no union" in refusal(GatherColumns(), Call(masks.causal()))


def test_a_few_gathered_columns_do_not_make_a_prefix_lm_cheap():
    assert "need" in refusal(GatherColumns(), Call(masks.prefix_lm(5), 300))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "columns",
    [
        masks.columns(12) & ~masks.columns(keep=some(33, p=0.3)),
        masks.columns(12) & (masks.columns(3) | masks.columns(keep=some(33, p=0.2))),
        masks.columns(12) & ~(masks.columns(3) | masks.columns(keep=some(33, p=0.2))),
    ],
    ids=["not", "a union inside", "not a union"],
)
def test_gather_columns_does_not_show_gathered_columns_that_the_part_excludes_again(columns, grad):
    """Gathered is what the part's plain columns name; `Not` and a union inside take some of it away again."""
    call = Call(masks.sliding_window(3) | columns, b=1, grad=grad)
    assert isinstance(call.apply(GatherColumns()), Rewritten)
    call.check(GatherColumns())


def test_a_union_with_not_is_right_by_whatever_is_chosen():
    """The default path, where `gather_columns` is the cheapest: it attended keys that the mask excludes."""
    n, keep = 1024, some(1024, p=0.5)
    mask = masks.sliding_window(8) | masks.columns(16) & ~masks.columns(keep=keep)
    q, k, v = (torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    want = dispatch.attention(q, k, v, attn_mask=mask, backend="eager")
    torch.testing.assert_close(dispatch.attention(q, k, v, attn_mask=mask), want, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("small")
def test_gather_columns_copies_no_keys_for_a_decode_step():
    call = Call(masks.sliding_window(4) | masks.columns(2) & masks.causal(), 1, 64)
    call.check(GatherColumns())
    own = call.tensors[1].numel()
    assert all(k.untyped_storage().nbytes() < own * k.element_size() for _, k in call.inner)


# --- split_segments --------------------------------------------------------------------------------------------------

IDS = torch.tensor([0] * 7 + [1] + [2] * 12 + [5] * 7 + [9] * 6)


@pytest.mark.parametrize("grad", [False, True])
def test_split_segments_rule_1_computes_each_document_alone(grad):
    for rest in (masks.full(), masks.causal(), masks.window(3, 0), masks.window(2, 2)):
        call = Call(masks.Segments(IDS, IDS) & rest, grad=grad)
        call.check(SplitSegments())
        assert call.lengths() == {(n, n) for n in (7, 1, 12, 6)}


def test_split_segments_rule_2_runs_documents_of_one_length_together():
    call = Call(masks.Segments(IDS, IDS) & masks.causal(), b=1)
    call.check(SplitSegments())
    assert sorted(q.shape[0] for q, _ in call.inner) == [1, 1, 1, 2]


@pytest.mark.parametrize("rest", [masks.full(), masks.causal(), masks.window(3, 0)], ids=str)
def test_split_segments_rule_3_puts_documents_in_pieces_together(rest):
    ids = torch.randint(0, 4, (33,), generator=torch.Generator().manual_seed(0))
    for grad in (False, True):
        Call(masks.Segments(ids, ids) & rest, grad=grad).check(SplitSegments())


def test_split_segments_rule_4_splits_batch_by_batch():
    ids = torch.randint(0, 4, (2, 33), generator=torch.Generator().manual_seed(0)).sort(-1).values
    for grad in (False, True):
        Call(masks.Segments(ids, ids) & masks.causal(), grad=grad).check(SplitSegments())


def test_split_segments_rule_5_declines_elsewhere_than_on_the_cpu():
    call = Call(masks.Segments(IDS, IDS) & masks.causal())
    there = {n: getattr(call.op, n) for n in ("query", "key", "value")}
    moved = {n: type(d)(d.shape, d.dtype, "cuda") for n, d in there.items()}
    assert "read on the host" in str(SplitSegments().apply(call.op.with_(**moved)))
    other = masks.Segments(IDS, IDS.clone()) & masks.causal()
    assert "not the same packed sequence" in refusal(SplitSegments(), Call(other))


# --- what they share -------------------------------------------------------------------------------------------------

RNG = torch.Generator().manual_seed(3)
POINTWISE: list[Mask] = [
    masks.causal(),
    masks.window(3, 1),
    masks.strided(3),
    masks.fixed(5, 2),
    masks.columns(keep=some(2, 9)),
    masks.Rows(some(7)),
    masks.Segments(torch.arange(7) // 3, torch.arange(9) // 4),
    masks.BlockTable(2, some(3, 5, 5)),
    masks.BlockTable(4, some(2, 2)),
    masks.key_lengths([4, 9]),
]


@pytest.mark.parametrize("pair", list(itertools.combinations(range(len(POINTWISE)), 2)), ids=str)
def test_a_mask_at_chosen_pairs_is_its_dense_form_there(pair):
    a, b = (POINTWISE[i] for i in pair)
    for mask in (a & b, a | ~b):
        rows, keys = torch.tensor([0, 6, 3]), torch.tensor([8, 1, 1, 5])
        grid = Grid(rows.view(1, 1, -1, 1), rows.view(1, 1, -1, 1) + 2, keys.view(1, 1, 1, -1), {}, 7, 9)
        dense = mask.dense(7, 9, 2)
        want = dense[(None,) * (4 - dense.ndim)][..., rows[:, None], keys]
        got = allowed_at(mask, grid)
        assert torch.equal(got.expand(torch.broadcast_shapes(got.shape, want.shape)), want.expand_as(got | want))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("rewrite", [ResidueClasses, GatherColumns, GatherBlocks, SplitSegments, SameBlocks])
def test_a_bias_that_counts_keys_from_0_is_refused_and_named(rewrite):
    mask = {
        "residue_classes": masks.strided(3),
        "gather_columns": masks.window(2, 2) | masks.columns(2),
        "gather_blocks": masks.BlockTable(4, some(9, 9, p=0.3)),
        "split_segments": masks.Segments(IDS, IDS),
        "same_blocks": masks.chunked(11),
    }[rewrite.name]
    assert "Bias" in refusal(rewrite(), Call(mask, bias=torch.zeros(1, 1, 1, 33)))
    Call(mask, softcap=2.0, scale=-0.3, lse=False).check(rewrite())


def test_rows_that_attend_nothing_are_0_with_lse_minus_infinity():
    empty = masks.BlockTable(4, torch.zeros(9, 9, dtype=torch.bool))
    for call, rewrite in (
        (Call(empty, grad=True), GatherBlocks()),
        (Call(masks.strided(3), q_offset=-50, grad=True), ResidueClasses()),
    ):
        got = call.run(rewrite)
        assert bool((got.out == 0).all())
        assert bool((got.lse == -math.inf).all())
        assert all(bool((g == 0).all()) for g in torch.autograd.grad(got.out.sum(), call.tensors))
