"""Costs: counted by hand and by torch, paths followed one edge at a time, and the page as it would be written now."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from attn_dispatch import dispatch, masks, variants
from attn_dispatch.complexity import KINDS, Complexity, allowed_pairs, complexity, layer, page, path_length
from attn_dispatch.ir import END, AttentionOp, Linear, Ref, SelectOp, TensorDesc
from attn_dispatch.ir.atoms import Causal, Columns, Full, KeyLengths, Rows, Selected, Window
from attn_dispatch.ir.masks import Mask
from attn_dispatch.passes import canonicalise

MASKS: dict[str, Mask] = {
    "full": Full(),
    "causal": Causal(),
    "window": Causal() & Window(6, None),
    "two-sided": Window(3, 5),
    "left only": Window(4, None),
    "dilated": masks.dilated(2, 3),
    "strided": masks.strided(5),
    "fixed": masks.fixed(8, 2),
    "chunked": masks.chunked(7),
    "prefix": masks.prefix_lm(4),
    "bigbird": masks.bigbird(40, block=4, random_blocks=1),
    "not causal": ~Causal() | Window(0, 0),
}


def op_of(mask: Mask = Full(), sq: int = 40, skv: int = 40, **changes) -> AttentionOp:  # noqa: B008 - a value
    q, k = TensorDesc((2, 4, sq, 16), "float32"), TensorDesc((2, 2, skv, 16), "float32")
    return AttentionOp(q, k, k, mask=mask, **changes)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("sq", "skv"), [(40, 40), (9, 40), (40, 9), (1, 40)])
def test_pairs_are_those_of_the_mask(name, sq, skv):
    mask = MASKS[name]
    want = mask.dense(sq, skv, skv - sq).double().sum()
    assert allowed_pairs(op_of(mask, sq, skv, q_offset=END)) == pytest.approx(float(want))


def test_pairs_of_a_long_union_are_sampled_to_a_few_percent():
    mask = masks.fixed(64, 8)
    want = float(mask.dense(3000, 3000).double().sum())
    assert allowed_pairs(op_of(mask, 3000, 3000)) == pytest.approx(want, rel=0.05)


def farthest(mask: Mask, n: int) -> int:
    """The longest shortest path, by breadth-first search from every position."""
    edges = [row.nonzero()[:, 0].tolist() for row in mask.dense(n, n)]
    longest = 1
    for start in range(n):
        depth, frontier = {start: 0}, [start]
        while frontier:
            found = {j for i in frontier for j in edges[i] if j not in depth}
            depth |= dict.fromkeys(found, depth[frontier[0]] + 1)
            frontier = list(found)
        longest = max(longest, *depth.values())
    return longest


@pytest.mark.parametrize("name", MASKS)
def test_the_path_is_the_longest_of_the_shortest(name):
    assert path_length(op_of(MASKS[name])) == farthest(MASKS[name], 40)


@given(left=st.integers(0, 9), right=st.integers(0, 9), step=st.integers(1, 4), causal=st.booleans())
def test_the_path_of_a_window_is_right_however_it_is_dilated(left, right, step, causal):
    mask: Mask = Window(left, right) & masks.Stride(step)
    mask = mask & Causal() if causal else mask
    op, _ = canonicalise(op_of(mask, 23, 23))
    assert path_length(op) == farthest(mask, 23)


def test_paths_that_depend_on_data_say_so_and_global_tokens_make_two():
    op = op_of(Causal() & Selected(Ref("chosen")), operands=(("chosen", TensorDesc((2, 40, 8), "int64")),))
    assert path_length(op) is None
    assert "depends on the data" in str(complexity(op))
    tokens = (("globals", TensorDesc((40,), "bool")),)
    longformer = op_of(Window(2, 2) | Columns(Ref("globals")) | Rows(Ref("globals")), operands=tokens)
    assert path_length(longformer) == 2


# --- FLOPs, against torch's own counter ------------------------------------------------------------------------------


def counted(*tensors: torch.Tensor, **options) -> float:
    with FlopCounterMode(display=False) as counter:
        dispatch.attention(*tensors, **options)
    return counter.get_total_flops()


def test_the_flops_of_softmax_are_those_that_torch_counts():
    q, k, v = torch.randn(2, 4, 40, 16), torch.randn(2, 4, 50, 16), torch.randn(2, 4, 50, 8)
    op = AttentionOp(*(TensorDesc.of(x) for x in (q, k, v)))
    assert complexity(op).flops == counted(q, k, v, backend="eager")


def test_the_flops_of_linear_attention_are_those_that_torch_counts():
    q = torch.randn(2, 4, 1024, 32)
    variant = variants.LinearAttention("identity", None)
    plain = AttentionOp(*[TensorDesc.of(q)] * 3, weight=Linear())
    assert complexity(plain).flops == counted(q, q, q, variant=variant, backend="linear")
    causal = complexity(plain.with_(mask=Causal())).flops
    q.requires_grad_()  # torch's counter does not know `baddbmm_`, which runs where no graph is kept
    got = counted(q, q, q, variant=variant, is_causal=True, backend="linear")
    assert causal <= got <= 1.2 * causal, "beside the pairs and states only the scan over the chunks"


# --- the other numbers -----------------------------------------------------------------------------------------------


def test_bytes_and_memory():
    full = complexity(op_of())
    assert full.bytes == 4 * (2 * 4 * 40 * 32 + 2 * 2 * 40 * 32)
    assert full.memory_bytes == 4 * 2 * 2 * 40 * 32
    window = complexity(op_of(Causal() & Window(6, None), 1, 40, q_offset=END))
    assert window.memory_bytes == 4 * 2 * 2 * 7 * 32
    assert window.bytes == 4 * (2 * 4 * 32 + 2 * 2 * 7 * 32)
    state = complexity(op_of(Causal(), weight=Linear("elu1", None, 1e-6)))
    assert state.memory_bytes == 4 * 2 * 2 * (16 * 16 + 16)
    decay = (("decay", TensorDesc((4,), "float32")),)
    assert complexity(op_of(weight=Linear("identity", Ref("decay")), operands=decay)).memory_bytes == 4 * 2 * 4 * 256


def test_a_state_does_not_grow_and_the_keys_do():
    def kept(n: int, weight) -> float:
        return complexity(op_of(Causal(), n, n, weight=weight)).memory_bytes

    assert kept(4096, Linear()) == kept(64, Linear())
    assert complexity(op_of(Causal(), 4096, 4096)).memory_bytes == 64 * complexity(op_of(Causal(), 64, 64)).memory_bytes


GROWTH = {
    "O(n^2 d)": Causal(),
    "O(r n d)": Causal() & Window(3, None),
    "O(l n d)": masks.chunked(8),
    "O(n^2 d / l)": masks.strided(4),
    "O((l + n / l) n d)": masks.fixed(8, 2),
    "O(w n d)": masks.bigbird(40, block=4),
    "O(k n d)": Causal() & Selected(Ref("x")),
    "O((g + r) n d)": (Window(2, 2) | Columns(Ref("x")) | Rows(Ref("x"))) & Columns(Ref("y")),
}


@pytest.mark.parametrize("text", GROWTH)
def test_growth(text):
    names = tuple((name, TensorDesc((40,), "bool")) for name in "xy")
    if "k" in text:
        names = (("x", TensorDesc((2, 40, 8), "int64")),)
    assert complexity(op_of(GROWTH[text], operands=names)).per_layer == text
    one = complexity(op_of(GROWTH[text], 1, 40, operands=names, q_offset=END)).per_layer
    assert one == text.replace("n^2", "n") if "n^2" in text else text.replace("n d", "d").replace("(n) ", "")


def test_lengths_count_as_full():
    lengths = (("n", TensorDesc((2,), "int64")),)
    assert complexity(op_of(KeyLengths(Ref("n")), operands=lengths)).flops == complexity(op_of()).flops


def test_a_selection_costs_all_pairs_of_its_index_heads():
    op = SelectOp(
        TensorDesc((2, 3, 40, 8), "float32"), TensorDesc((2, 50, 8), "float32"), TensorDesc((2, 40, 3), "float32"), 5
    )
    cost = complexity(op)
    assert cost.flops == 2 * 2 * 40 * 50 * 3 * (8 + 1)
    assert cost.memory_bytes == 4 * 2 * 50 * 8


def test_the_classic_table():
    small, large = ({kind: layer(kind, n, 32) for kind in KINDS} for n in (1024, 4096))
    growth = {kind: large[kind].flops / small[kind].flops for kind in KINDS}
    assert growth["self-attention"] == 16
    assert growth["recurrent"] == growth["convolutional"] == 4
    assert growth["self-attention (restricted)"] == pytest.approx(4, rel=0.1)
    paths = {kind: large[kind].max_path_length for kind in KINDS}
    assert paths == {
        "self-attention": 1,
        "recurrent": 4095,
        "convolutional": 8,  # 3 ** 8 = 6561 is the first power beyond 4096
        "self-attention (restricted)": 64,
    }
    assert {kind: large[kind].sequential_steps for kind in KINDS if large[kind].sequential_steps > 1} == {
        "recurrent": 4096
    }
    with pytest.raises(ValueError, match="unknown kind 'pooling'"):
        layer("pooling", 8, 8)


def test_the_page_is_what_would_be_written_now():
    kept = Path(__file__).parent.parent / "docs" / "complexity.md"
    assert kept.read_text(encoding="utf-8") == page(), "python -m attn_dispatch.complexity > docs/complexity.md"


def test_it_can_be_printed():
    assert str(Complexity(1.5e12, 999.0, 2e15, 3, 1, "O(n)")).startswith(
        "O(n)   1.5 TFLOP   999 B moved   2e+03 TB kept"
    )
