"""The mask algebra: every answer a mask gives is compared with its dense tensor, on random expressions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_dispatch import masks
from attn_dispatch.errors import InputError, InputTypeError
from attn_dispatch.ir.masks import And, Mask, Not, Or
from attn_dispatch.ir.operands import Held
from attn_dispatch.ir.recognise import recognise

HEADS = 2


@dataclass(frozen=True)
class Drawn:
    """A random mask and the sizes it is for."""

    mask: Mask
    batch: int
    sq: int
    skv: int
    q_offset: int

    def dense(self) -> torch.Tensor:
        return self.mask.dense(self.sq, self.skv, self.q_offset).expand(self.batch, HEADS, self.sq, self.skv)


def random_bool(draw, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return torch.rand(shape, generator=generator) < draw(st.sampled_from([0.2, 0.5, 0.9]))


def random_ints(draw, low: int, high: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return torch.randint(low, high, shape, generator=generator)


def key_range(draw, n) -> Mask:
    start, length = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    period = draw(st.one_of(st.none(), st.integers(max(1, start + length), start + length + 5)))
    return masks.KeyRange(start, start + length, period)


def per_key(draw, n, size: int) -> torch.Tensor:
    return random_bool(draw, size) if draw(st.booleans()) else random_bool(draw, n.batch, size)


def segments(draw, n) -> Mask:
    lead = draw(st.sampled_from([(), (n.batch,)]))
    return masks.Segments(random_ints(draw, 0, 3, *lead, n.sq), random_ints(draw, 0, 3, *lead, n.skv))


def block_table(draw, n) -> Mask:
    block = draw(st.integers(1, 5))
    lead = draw(st.sampled_from([(), (HEADS,)]))
    return masks.BlockTable(block, random_bool(draw, *lead, -(-n.sq // block), -(-n.skv // block)))


def selected(draw, n) -> Mask:
    lead = draw(st.sampled_from([(n.batch,), (n.batch, HEADS)]))
    return masks.Selected(random_ints(draw, -1, n.skv, *lead, n.sq, draw(st.integers(0, 4))))


def dense(draw, n) -> Mask:
    shape = draw(st.sampled_from([(n.sq, n.skv), (HEADS, n.sq, n.skv), (n.batch, 1, 1, n.skv), (1, HEADS, n.sq, 1)]))
    return masks.Dense(random_bool(draw, *shape))


SIDE = st.one_of(st.none(), st.integers(0, 9))
ATOMS = {
    "Full": lambda draw, n: masks.Full(),
    "Causal": lambda draw, n: masks.Causal(),
    "Window": lambda draw, n: masks.Window(draw(SIDE), draw(SIDE)),
    "Stride": lambda draw, n: masks.Stride(draw(st.integers(1, 5))),
    "SameBlock": lambda draw, n: masks.SameBlock(draw(st.integers(1, 6))),
    "KeyRange": key_range,
    "Columns": lambda draw, n: masks.Columns(per_key(draw, n, n.skv)),
    "Rows": lambda draw, n: masks.Rows(per_key(draw, n, n.sq)),
    "KeyLengths": lambda draw, n: masks.KeyLengths(random_ints(draw, 0, n.skv + 1, n.batch)),
    "QueryLengths": lambda draw, n: masks.QueryLengths(random_ints(draw, 0, n.sq + 1, n.batch)),
    "Segments": segments,
    "BlockTable": block_table,
    "Selected": selected,
    "Dense": dense,
}


@st.composite
def drawn_masks(draw, atoms=tuple(ATOMS)) -> Drawn:
    """A random expression of up to four atoms over random lengths."""
    n = Drawn(
        masks.Full(),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 13)),
        draw(st.integers(1, 13)),
        draw(st.integers(-8, 9)),
    )

    def expression(depth: int) -> Mask:
        kind = draw(st.sampled_from(["atom", "and", "or", "not"])) if depth else "atom"
        if kind == "atom":
            return ATOMS[draw(st.sampled_from(atoms))](draw, n)
        if kind == "not":
            return ~expression(depth - 1)
        left, right = expression(depth - 1), expression(depth - 1)
        return left & right if kind == "and" else left | right

    return Drawn(expression(2), n.batch, n.sq, n.skv, n.q_offset)


def test_the_atoms_drawn_here_are_all_there_are():
    from attn_dispatch.ir import atoms

    assert set(ATOMS) == set(atoms.__all__)


# --- what a mask says of itself is true of its dense tensor ----------------------------------------------------------


@pytest.mark.parametrize("atom", ATOMS)
@settings(max_examples=25)
@given(data=st.data(), bq=st.integers(1, 6), bk=st.integers(1, 6))
def test_tiles_of_an_atom_are_sound(atom, data, bq, bk):
    assert_tiles_are_sound(data.draw(drawn_masks(atoms=(atom,))), bq, bk)


@given(n=drawn_masks(), bq=st.integers(1, 6), bk=st.integers(1, 6))
def test_tiles_of_an_expression_are_sound(n, bq, bk):
    assert_tiles_are_sound(n, bq, bk)


def assert_tiles_are_sound(n: Drawn, bq: int, bk: int) -> None:
    states = n.mask.tiles(bq, bk, n.sq, n.skv, n.q_offset)
    assert states.shape[-2:] == (-(-n.sq // bq), -(-n.skv // bk))
    states = states.repeat_interleave(bq, -2)[..., : n.sq, :].repeat_interleave(bk, -1)[..., : n.skv]
    states = states.expand(n.batch, HEADS, n.sq, n.skv)
    allowed = n.dense()
    assert not allowed[states == masks.EMPTY].any(), "a tile said EMPTY holds an allowed pair"
    assert allowed[states == masks.FULL].all(), "a tile said FULL holds a pair that is not allowed"


@given(n=drawn_masks(), a=st.integers(0, 12), b=st.integers(0, 13))
def test_key_interval_covers_every_key_that_a_query_block_may_attend(n, a, b):
    start, stop = min(a, b, n.sq), min(max(a, b), n.sq)
    lo, hi = n.mask.key_interval((start, stop), n.skv, n.q_offset)
    assert 0 <= lo <= hi <= n.skv
    outside = n.dense()[:, :, start:stop].clone()
    outside[..., lo:hi] = False
    assert not outside.any()


@given(n=drawn_masks(), a=st.integers(0, 12), b=st.integers(0, 13))
def test_dense_of_some_rows_is_those_rows_of_dense(n, a, b):
    rows = (min(a, b, n.sq), min(max(a, b), n.sq))
    part = n.mask.dense(n.sq, n.skv, n.q_offset, rows=rows)
    want = n.dense()[:, :, rows[0] : rows[1]]
    assert torch.equal(part.expand(want.shape), want)


@given(n=drawn_masks(), m=st.data())
def test_dense_with_an_offset_per_batch_is_dense_at_each_offset(n, m):
    offsets = [n.q_offset, m.draw(st.integers(-5, 5))][: n.batch]
    both = n.mask.dense(n.sq, n.skv, torch.tensor(offsets)).expand(n.batch, HEADS, n.sq, n.skv)
    for b, offset in enumerate(offsets):
        one = n.mask.dense(n.sq, n.skv, offset).expand(n.batch, HEADS, n.sq, n.skv)
        assert torch.equal(both[b], one[b])


@given(n=drawn_masks())
def test_positional_per_query_and_operators_say_what_the_dense_mask_shows(n):
    if not n.mask.positional:
        moved = n.mask.dense(n.sq, n.skv, n.q_offset + 3)
        assert torch.equal(moved.expand(n.dense().shape), n.dense())
    if not n.mask.per_query:
        assert torch.equal(n.dense(), n.dense()[:, :, :1].expand(n.dense().shape))
    inverted = (~n.mask).dense(n.sq, n.skv, n.q_offset)
    assert torch.equal(inverted.expand(n.dense().shape), ~n.dense())
    assert ~~n.mask == n.mask


# --- text, equality, digests -----------------------------------------------------------------------------------------


@given(n=drawn_masks())
def test_the_text_of_a_bound_mask_reads_back_as_the_same_mask(n):
    bound, tensors = n.mask.bind()
    again = masks.parse_mask(str(bound))
    assert again == bound
    assert str(again) == str(bound)
    assert torch.equal(again.dense(n.sq, n.skv, n.q_offset, tensors).expand(n.dense().shape), n.dense())
    assert set(bound.refs()) == set(tensors)


@given(n=drawn_masks(), data=st.data())
def test_and_and_or_do_not_depend_on_the_order_of_their_parts(n, data):
    parts = [part for _, part in zip(range(3), pieces(n.mask), strict=False)]
    for a, b in itertools.product(parts, parts):
        assert a & b == b & a
        assert a | b == b | a
        assert (a & b).digest() == (b & a).digest()
        assert hash(a | b) == hash(b | a)


def pieces(mask: Mask):
    yield mask
    for part in getattr(mask, "args", ()) or ((mask.arg,) if isinstance(mask, Not) else ()):
        yield from pieces(part)


def test_two_held_tensors_of_one_shape_do_not_make_and_depend_on_the_order():
    a, b = masks.Columns(torch.tensor([True, False])), masks.Columns(torch.tensor([False, True]))
    assert a & b == b & a


def test_names_given_by_bind_keep_the_canonical_order_of_text():
    a, b = torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)
    mask = (masks.Columns(b) & masks.Rows(b)) | masks.Columns(a) | masks.Columns(b)
    bound, _ = mask.bind()
    assert masks.parse_mask(str(bound)) == bound


def copied(mask: Mask) -> Mask:
    """The same expression over copies of its tensors."""
    return mask.map_operands(lambda _, o: Held(o.tensor.clone()) if isinstance(o, Held) else o)


@given(n=drawn_masks())
def test_masks_of_equal_content_have_equal_digests(n):
    assert copied(n.mask).digest() == n.mask.digest()


@given(data=st.data())
def test_masks_that_allow_different_pairs_have_different_digests(data):
    n = data.draw(drawn_masks())
    seen: dict[str, torch.Tensor] = {}
    for mask in (n.mask, ~n.mask, n.mask & masks.Causal(), n.mask | masks.KeyRange(0, 1), n.mask & masks.Window(2, 2)):
        pairs = mask.dense(n.sq, n.skv, n.q_offset).expand(n.dense().shape)
        assert torch.equal(seen.setdefault(mask.digest(), pairs), pairs)


def test_one_changed_element_of_a_held_tensor_changes_the_digest():
    keep = torch.ones(5, dtype=torch.bool)
    before = masks.Columns(keep.clone()).digest()
    keep[3] = False
    assert masks.Columns(keep).digest() != before


@pytest.mark.parametrize(
    "text",
    ["Causal &", "Caus", "Window(1)", "Window(left=1, right=2)", "Causal + Full", "Stride(0)", "1", "Window(x.y, 0)"],
)
def test_text_that_is_not_a_mask_is_refused_with_the_part_that_is_not(text):
    with pytest.raises(ValueError, match=r"not a mask|not a value|must be"):
        masks.parse_mask(text)


def test_nested_parts_are_flattened_and_repeats_dropped():
    c, w, s = masks.Causal(), masks.Window(3, None), masks.Stride(2)
    assert (c & w) & (s & c) == And((c, s, w))
    assert (c | w) | c == Or((c, w))
    assert (c & c) == c


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.Window(-1, 0),
        lambda: masks.Stride(0),
        lambda: masks.SameBlock(0),
        lambda: masks.KeyRange(3, 2),
        lambda: masks.KeyRange(0, 5, 4),
        lambda: masks.BlockTable(0, [[True]]),
    ],
    ids=["window", "stride", "same_block", "key_range", "key_range_period", "block_table"],
)
def test_an_atom_refuses_numbers_that_make_no_sense(make):
    with pytest.raises(ValueError, match=r"must be|need|period"):
        make()


# --- recognition -----------------------------------------------------------------------------------------------------


def band(sq: int, skv: int, lower: int | None, upper: int | None) -> torch.Tensor:
    i, j = torch.arange(sq)[:, None], torch.arange(skv)[None, :]
    out = torch.ones(sq, skv, dtype=torch.bool)
    out = out & (j - i >= lower) if lower is not None else out
    return out & (j - i <= upper) if upper is not None else out


@st.composite
def mask_tensors(draw) -> torch.Tensor:
    sq, skv, batch = draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["band", "padding", "lengths", "columns", "blocks", "random", "rows"]))
    if kind == "band":
        ends = st.one_of(st.none(), st.integers(-12, 12))
        out = band(sq, skv, draw(ends), draw(ends))
    elif kind == "padding":
        out = (torch.arange(skv) < draw(st.integers(0, 40))).expand(sq, skv)
    elif kind == "lengths":
        out = torch.arange(skv) < random_ints(draw, 0, skv + 1, batch)[:, None, None, None]
    elif kind == "columns":
        out = random_bool(draw, batch, 1, 1, skv)
    elif kind == "blocks":
        table = random_bool(draw, 3, 3)
        out = table.repeat_interleave(16, 0).repeat_interleave(16, 1)[: sq + 7, : skv + 7]
    elif kind == "rows":
        out = random_bool(draw, sq, 1).expand(sq, skv)
    else:
        out = random_bool(draw, *draw(st.sampled_from([(sq, skv), (1, HEADS, sq, skv), (batch, 1, sq, skv)])))
    if draw(st.integers(0, 3)) == 0:  # nearly the pattern: one element is flipped
        out = out.clone()
        flat = out.reshape(-1)
        flat[draw(st.integers(0, flat.numel() - 1))] ^= True
        out = flat.reshape(out.shape)
    lead = draw(st.integers(0, 2)) if out.ndim == 2 else 0
    return out[(None,) * lead]


@settings(max_examples=400)
@given(tensor=mask_tensors())
def test_what_is_recognised_allows_exactly_the_pairs_of_the_tensor(tensor):
    found, offset = recognise(tensor)
    again = found.dense(tensor.shape[-2], tensor.shape[-1], offset)
    assert torch.equal(
        again.broadcast_to(torch.broadcast_shapes(again.shape, tensor.shape)),
        tensor.expand(torch.broadcast_shapes(again.shape, tensor.shape)),
    )


@settings(max_examples=200)
@given(tensor=mask_tensors())
def test_from_tensor_means_the_tensor_at_q_offset_0(tensor):
    again = masks.from_tensor(tensor).dense(tensor.shape[-2], tensor.shape[-1])
    shape = torch.broadcast_shapes(again.shape, tensor.shape)
    assert torch.equal(again.expand(shape), tensor.expand(shape))


RECOGNISED = {
    "all_true": (torch.ones(6, 9, dtype=torch.bool), "Full", 0),
    "causal": (band(6, 6, None, 0), "Causal", 0),
    "causal_end_aligned": (band(6, 9, None, 3), "Causal", 3),
    "sliding_window": (band(9, 9, -2, 0), "Causal & Window(2, None)", 0),
    "two_sided_window": (band(9, 9, -2, 1), "Window(2, 1)", 0),
    "shared_padding": ((torch.arange(9) < 5).expand(6, 9), "KeyRange(0, 5, None)", 0),
    "padding_per_batch": (
        torch.arange(4)[None, None, None, :] < torch.tensor([2, 4])[:, None, None, None],
        "KeyLengths(<int64[2]>)",
        0,
    ),
    "blocks": (
        torch.tensor([[1, 0], [0, 1]]).bool().repeat_interleave(16, 0).repeat_interleave(16, 1),
        'BlockTable(16, "bool 2x2 1001")',
        0,
    ),
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_a_known_pattern_is_recognised(name):
    tensor, text, offset = RECOGNISED[name]
    found, at = recognise(tensor)
    assert (str(found), at) == (text, offset)


def test_from_tensor_refuses_a_float_tensor():
    with pytest.raises(ValueError, match="bool"):
        masks.from_tensor(torch.zeros(2, 2))


# --- named constructors against predicates ---------------------------------------------------------------------------


def table_of(length: int, predicate) -> torch.Tensor:
    return torch.tensor([[bool(predicate(i, j)) for j in range(length)] for i in range(length)])


GLOBAL = torch.tensor([j in (0, 7) for j in range(17)])
NAMED = {
    "full": (masks.full(), lambda i, j: True),
    "causal": (masks.causal(), lambda i, j: j <= i),
    "window": (masks.window(3, 2), lambda i, j: i - 3 <= j <= i + 2),
    "window_unbounded_left": (masks.window(None, 2), lambda i, j: j <= i + 2),
    "window_minus_one": (masks.window(3, -1), lambda i, j: j >= i - 3),
    "sliding_window_of_4": (masks.sliding_window(4), lambda i, j: j <= i and i - j < 4),
    "sliding_window_of_1": (masks.sliding_window(1), lambda i, j: i == j),
    "dilated": (masks.dilated(2, 3), lambda i, j: i - j in (-6, -3, 0, 3, 6)),
    "strided": (masks.strided(4), lambda i, j: j <= i and (i - j) % 4 == 0),
    "fixed": (masks.fixed(5, 2), lambda i, j: j <= i and (j // 5 == i // 5 or j % 5 >= 3)),
    "fixed_without_summary": (masks.fixed(5, 0), lambda i, j: j <= i and j // 5 == i // 5),
    "chunked": (masks.chunked(4), lambda i, j: j <= i and i // 4 == j // 4),
    "prefix_lm": (masks.prefix_lm(6), lambda i, j: j <= i or j < 6),
    "columns": (masks.columns(3), lambda i, j: j < 3),
    "columns_kept": (masks.columns(keep=GLOBAL), lambda i, j: j in (0, 7)),
    "documents": (masks.documents([0, 4, 4, 9, 17]), lambda i, j: (i < 4) == (j < 4) and (i < 9) == (j < 9)),
    "longformer": (
        masks.longformer(2, GLOBAL),
        lambda i, j: abs(i - j) <= 2 or i in (0, 7) or j in (0, 7),
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_named_mask_allows_what_its_definition_says(name):
    mask, predicate = NAMED[name]
    assert torch.equal(mask.dense(17, 17), table_of(17, predicate))


def test_longformer_hides_padded_keys_even_from_global_queries():
    valid = torch.arange(17) < torch.tensor([[17], [9]])
    allowed = masks.longformer(2, GLOBAL, valid).dense(17, 17)
    assert not allowed[1, 0, :, 9:].any()
    assert torch.equal(allowed[0, 0], table_of(17, NAMED["longformer"][1]))


def test_dilated_counts_keys_so_row_4_sees_0_2_4_6_8():
    assert masks.dilated(2, 2).dense(9, 9)[4].nonzero()[:, 0].tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("width", [1, 2, 5])
def test_a_window_of_w_keys_is_left_w_minus_1_and_right_0(width):
    ours = masks.sliding_window(width).dense(11, 11)
    assert torch.equal(ours, masks.window(width - 1, 0).dense(11, 11))
    assert ours.sum(-1).tolist() == [min(i + 1, width) for i in range(11)]


def test_a_window_of_no_keys_is_refused():
    with pytest.raises(ValueError, match=">= 1"):
        masks.sliding_window(0)


@pytest.mark.parametrize("bad", [[1, 2], [0], [0, 3, 2]], ids=["not_from_0", "too_short", "falling"])
def test_documents_refuses_lengths_that_are_not_cumulative(bad):
    with pytest.raises(ValueError, match="cu_seqlens"):
        masks.documents(bad)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"prefix": [1, 2, 3]}, "prefix must be an integer or 2 of them, one for each document"),
        ({"prefix": [1]}, "prefix must be an integer or 2 of them"),
        ({"prefix": 1.5}, "prefix must be an integer"),
        ({"chunk": 0}, "chunk"),
        ({"chunk": -2}, "chunk"),
        ({"cu_seqlens_k": [0, 2]}, "cu_seqlens has 2 documents and cu_seqlens_k 1"),
    ],
)
def test_documents_names_a_wrong_prefix_chunk_or_number_of_documents(arguments, words):
    with pytest.raises(ValueError, match=words):
        masks.documents([0, 3, 5], **arguments)


def test_key_lengths_and_selected_allow_what_their_tensors_say():
    lengths = masks.key_lengths([2, 0]).dense(1, 3)
    assert lengths[:, 0, 0].int().tolist() == [[1, 1, 0], [0, 0, 0]]
    picked = masks.Selected(torch.tensor([[[2, 0, 2], [-1, -1, -1]]])).dense(2, 3)
    assert picked[0, 0].int().tolist() == [[1, 0, 1], [0, 0, 0]]


def test_bigbird_is_the_same_for_a_seed_and_differs_between_seeds():
    first, second = (masks.bigbird(512, 32, 2, seed=s) for s in (5, 6))
    assert masks.bigbird(512, 32, 2, seed=5) == first
    assert first.digest() != second.digest()


def test_bigbird_does_not_touch_the_global_random_state():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    masks.bigbird(512, 32, 2, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_bigbird_has_window_global_and_random_blocks():
    n, block, random_blocks = 12, 8, 2
    allowed = masks.bigbird(n * block, block, random_blocks, seed=1, heads=3).dense(n * block, n * block)
    table = allowed[:, ::block, ::block]
    assert torch.equal(table.repeat_interleave(block, 1).repeat_interleave(block, 2), allowed)
    always = table_of(n, lambda i, j: i in (0, n - 1) or j in (0, n - 1) or abs(i - j) <= 1)
    assert table[:, always].all()
    extra = (table & ~always).sum(-1)
    free = (~always).sum(-1).clamp(max=random_blocks)
    assert torch.equal(extra, free.expand(3, n))
    assert not torch.equal(table[0], table[1])


def test_columns_given_as_a_tensor_where_a_number_belongs_say_where_they_belong():
    with pytest.raises(InputError, match="keep=tensor"):
        masks.columns(torch.ones(2, 4, dtype=torch.bool))


@pytest.mark.parametrize(
    "other",
    [torch.ones(2, 4, dtype=torch.bool), torch.ones(4), None, True],
    ids=["bool tensor", "float tensor", "None", "True"],
)
@pytest.mark.parametrize("sign", ["&", "|"])
@pytest.mark.parametrize("first", [True, False], ids=["mask first", "mask last"])
def test_what_is_no_mask_is_named_where_masks_are_combined(first, sign, other):
    """The message was about an attribute of the tensor, `_held_ids`."""
    pair = (masks.causal(), other) if first else (other, masks.causal())
    with pytest.raises(InputTypeError, match=rf"\{sign} combines a mask with another mask, got") as error:
        _ = pair[0] & pair[1] if sign == "&" else pair[0] | pair[1]
    if isinstance(other, torch.Tensor):
        assert f"got a tensor {list(other.shape)}" in str(error.value)
        assert "masks.columns(keep=tensor)" in str(error.value)
        assert "masks.Dense(tensor)" in str(error.value)
