"""The backend `flash_decode`: what its C++ kernel computes is what the specification says, whoever shares the work."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

from attn_dispatch import AttnDispatchError, dispatch, masks, native
from attn_dispatch.backends.flash_decode import FlashDecode
from attn_dispatch.ir import Alibi, AttentionOp, Bias, Ref, SoftCap, TensorDesc
from attn_dispatch.ir.atoms import QueryLengths
from attn_dispatch.ir.scores import alibi_slopes
from attn_dispatch.plan import PlanCache

built = native.decode()
pytestmark = pytest.mark.skipif(built.module is None, reason=built.why)
TILE = 64


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """So many that a head is cut among several of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(before)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def qkv(b=1, hq=4, hkv=2, sq=1, skv=200, d=32, dv=None, dtype=torch.float32) -> list[torch.Tensor]:
    shapes = ((b, hq, sq, d), (b, hkv, skv, d), (b, hkv, skv, dv or d))
    return [drawn(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]


def exact(tensors: list[torch.Tensor], **options) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    options = {
        n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()
    }
    return dispatch.attention(*(x.double() for x in tensors), **options, enable_gqa=True, backend="eager")


def ours(tensors: list[torch.Tensor], **options):
    return dispatch.attention(*tensors, **options, enable_gqa=True, backend="flash_decode")


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[got.dtype]
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance, equal_nan=True)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("skv", [1, TILE - 1, TILE, TILE + 1, 1000])
@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (3, 1), (8, 1), (1, 5), (4, 16)], ids=str)
def test_every_block_of_rows_and_border_between_tiles_and_threads(dtype, skv, rows):
    groups, sq = rows
    tensors = qkv(b=2, hq=3 * groups, hkv=3, sq=sq, skv=skv, d=64, dtype=dtype)
    close(ours(tensors), exact(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("d", [1, 7, 8, 20, 130])
@pytest.mark.parametrize("dv", [1, 9, 64, 130])
def test_every_head_size(dtype, d, dv):
    tensors = qkv(d=d, dv=dv, dtype=dtype)
    close(ours(tensors), exact(tensors))


MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.window(40, 3),
    "two windows": masks.window(90, None) & masks.window(40, 30) & masks.causal(),
    "lengths": masks.key_lengths(torch.tensor([0, 70, 500])),
    "columns": masks.columns(keep=torch.rand(3, 200, generator=torch.Generator().manual_seed(1)) < 0.3),
    "range": masks.columns(keep=torch.arange(200) % 7 < 2) & masks.causal(),
    "pairs": masks.Dense(torch.rand(3, 4, 6, 200, generator=torch.Generator().manual_seed(2)) < 0.1),
    "pairs of a batch, and lengths": masks.Dense(torch.rand(6, 200, generator=torch.Generator().manual_seed(3)) < 0.5)
    & masks.key_lengths(torch.tensor([3, 70, 200]))
    & QueryLengths(torch.tensor([6, 2, 0])),
}
SCORES = {
    "none": {},
    "cap": {"softcap": 3.0},
    "bias": {"bias": drawn(1, 4, 6, 200)},
    "half a bias": {"bias": drawn(3, 1, 1, 200, dtype=torch.bfloat16)},
    "alibi": {"bias": alibi_slopes(4)},
    "sinks": {"sinks": drawn(4)},
    "cap, bias and sinks": {"softcap": 5.0, "bias": drawn(6, 200), "sinks": drawn(4) * 3},
    "cap, alibi and sinks": {"softcap": 5.0, "bias": alibi_slopes(4), "sinks": drawn(4) * 3},
}


@pytest.mark.parametrize("offset", [0, 100, 194, torch.tensor([0, 60, 194])], ids=["0", "100", "end", "per batch"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_masks_scores_offsets_and_lse_together(mask, score, offset):
    tensors = qkv(b=3, sq=6, d=128)
    options = {"attn_mask": MASKS[mask], **SCORES[score], "q_offset": offset, "scale": 0.3, "return_lse": True}
    for got, want in zip(ours(tensors, **options), exact(tensors, **options), strict=True):
        close(got, want)


@given(
    b=st.integers(1, 3),
    hkv=st.integers(1, 3),
    groups=st.integers(1, 5),
    sq=st.integers(1, 9),
    skv=st.integers(1, 300),
    d=st.integers(1, 150),
    left=st.none() | st.integers(0, 80),
    right=st.none() | st.integers(0, 80),
    offset=st.integers(-20, 320),
    lengths=st.none() | st.lists(st.integers(0, 400), min_size=3, max_size=3),
)
def test_any_sizes_windows_and_lengths(b, hkv, groups, sq, skv, d, left, right, offset, lengths):
    tensors = qkv(b, groups * hkv, hkv, sq, skv, d)
    mask = masks.window(left, right)
    mask = mask if lengths is None else mask & masks.key_lengths(torch.tensor(lengths[:b]).clamp(max=skv))
    options = {"attn_mask": mask, "q_offset": offset, "return_lse": True}
    for got, want in zip(ours(tensors, **options), exact(tensors, **options), strict=True):
        close(got, want)


def test_several_biases_are_added_up():
    options = {"attn_mask": drawn(1, 1, 1, 200), "bias": drawn(1, 4, 1, 200), "softcap": 4.0}
    close(ours(qkv(), **options), exact(qkv(), **options))


@pytest.mark.parametrize("per_batch", [True, False])
@pytest.mark.parametrize("offset", [1 << 41, 1 << 58, -(1 << 41)])
def test_an_offset_far_beyond_every_key(offset, per_batch):
    tensors = qkv(sq=3)
    for mask in (masks.causal(), masks.window(1 << 50, 1 << 50), masks.window(5, None)):
        options = {"attn_mask": mask, "q_offset": torch.tensor([offset]) if per_batch else offset}
        close(ours(tensors, **options), exact(tensors, **options))


def test_a_last_dimension_of_one_element_may_have_any_stride():
    q, k, v = (x.transpose(2, 3) for x in (drawn(1, 4, 1, 1), drawn(1, 2, 1, 200), drawn(1, 2, 1, 200)))
    assert k.stride(3) != 1
    close(ours([q, k, v]), exact([q, k, v]))


@pytest.mark.parametrize("shape", [(1, 1, 1, 200), (1, 4, 1, 200)])
def test_a_bool_may_hold_any_byte(shape):
    """torch reads such as True; they come from views of other integers."""
    odd = torch.tensor([0, 1, 2, 128, 255], dtype=torch.uint8).repeat(160)[: math.prod(shape)].view(shape)
    tensors = qkv()
    close(ours(tensors, attn_mask=odd.view(torch.bool)), exact(tensors, attn_mask=odd != 0))


@pytest.mark.parametrize("lie", ["bshd", "every second", "expanded", "negated view", "zero tensor"])
def test_views(lie):
    q, k, v = qkv(skv=300, d=64)
    changed = {
        "bshd": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "every second": lambda x: x[:, :, ::2],
        "expanded": lambda x: x[:, :1].expand(-1, 2, -1, -1),
        "negated view": torch._neg_view,
        "zero tensor": lambda x: torch._efficientzerotensor(x.shape),
    }[lie]
    tensors = [q, changed(k), changed(v)]
    close(ours(tensors), exact([x.clone() for x in tensors]))


# --- what no key says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("how", ["columns", "lengths", "window", "pairs", "bias"])
def test_what_stands_at_a_key_that_a_row_may_not_attend_never_shows(how, poison):
    tensors = qkv(b=2, hq=8, sq=3, skv=900, d=64)
    hidden = torch.arange(900) >= 500
    options = {
        "columns": {"attn_mask": masks.columns(keep=~hidden)},
        "lengths": {"attn_mask": masks.key_lengths(torch.tensor([500, 500]))},
        "window": {"attn_mask": masks.window(None, 400), "q_offset": 97},
        "pairs": {"attn_mask": masks.Dense((~hidden).expand(3, 900))},
        "bias": {"bias": torch.where(hidden, -math.inf, 0.0).expand(3, 900)},
    }[how]
    want = exact(tensors, **options)
    for x in tensors[1:]:
        x[:, :, 500:] = poison
    close(ours(tensors, **options), want)


@pytest.mark.parametrize("place", ["query", "key", "value", "bias", "sinks"])
def test_a_nan_that_is_attended_shows_in_its_rows_alone(place):
    q, k, v = qkv(b=2, sq=3, skv=900, d=64)
    given = {"query": q, "key": k, "value": v, "bias": torch.zeros(2, 4, 3, 900), "sinks": torch.zeros(4)}
    at = {"query": (0, 1, 2), "key": (0, 1, 802), "value": (0, 1, 802), "bias": (0, 1, 2, 7), "sinks": (1,)}[place]
    given[place][at] = math.nan
    options = {"bias": given["bias"], "sinks": given["sinks"], "attn_mask": masks.causal(), "q_offset": 800}
    got, want = ours([q, k, v], **options), exact([q, k, v], **options)
    assert torch.isnan(got).any()
    assert not torch.isnan(got).all()
    close(got, want)


def test_a_row_without_keys_is_0_with_minus_infinity_or_its_sink_for_lse():
    tensors = qkv(b=2, sq=3, skv=900)
    mask = masks.key_lengths(torch.tensor([0, 900]))
    sinks = torch.tensor([1.0, 2.0, 3.0, 4.0])
    for logits, told in ((None, [-math.inf] * 4), (sinks, sinks.tolist())):
        out, lse = ours(tensors, attn_mask=mask, return_lse=True, sinks=logits)
        assert (out[0] == 0).all()
        assert (out[1] != 0).any()
        assert lse[0, :, 0].tolist() == told


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_any_number_of_threads_gives_the_same(threads):
    torch.set_num_threads(threads)
    for skv, hkv in ((5000, 1), (900, 7), (64, 40)):
        tensors = qkv(hq=2 * hkv, hkv=hkv, skv=skv, d=64)
        close(ours(tensors), exact(tensors))


@pytest.mark.parametrize("size", [1e4, -1e4, 1e18])
def test_large_logits(size):
    q, k, v = qkv(skv=900, d=64)
    k = k * size
    close(ours([q, k, v]), exact([q, k, v]))


def test_infinite_scores_are_those_of_a_softmax():
    q, k, v = torch.ones(1, 1, 1, 8), torch.ones(1, 1, 200, 8), drawn(1, 1, 200, 8)
    k[0, 0, :100] = -math.inf
    close(ours([q, k, v]), exact([q, k[:, :, 100:], v[:, :, 100:]]))  # weights of 0
    k[0, 0, 150] = math.inf
    assert torch.isnan(ours([q, k, v])).all()  # inf less inf, as torch.softmax has it


# --- whom it serves --------------------------------------------------------------------------------------------------


def test_it_is_chosen_for_decode_steps_and_not_for_many_rows():
    one, many = qkv(skv=512, d=64), qkv(sq=64, skv=512, d=64)
    assert dispatch.plan(*one, enable_gqa=True).name == "flash_decode"
    assert "flash_decode" not in dispatch.plan(*many, enable_gqa=True).name


def test_gradients_are_refused_and_a_tensor_that_may_have_one_is_taken_without():
    tensors = [x.requires_grad_() for x in qkv()]
    with pytest.raises(AttnDispatchError, match="no gradients"):
        ours(tensors)
    with torch.no_grad():
        got = ours(tensors)
    assert not got.requires_grad
    with pytest.raises(RuntimeError, match="query requires a gradient"):
        native.decode().module.decode(*tensors, 1.0, None, None, None, None, False)


def test_a_transform_and_a_compiled_model_run_elsewhere():
    tensors = qkv(b=3)
    want = exact(tensors)
    with pytest.raises(AttnDispatchError, match="no functorch transforms"):
        torch.vmap(lambda q, k, v: ours([q[None], k[None], v[None]]))(*tensors)
    one_by_one = torch.vmap(lambda q, k, v: dispatch.attention(q[None], k[None], v[None], enable_gqa=True)[0])(*tensors)
    close(one_by_one, want)
    compiled = torch.compile(lambda *x: dispatch.attention(*x, enable_gqa=True), backend="eager", fullgraph=True)
    close(compiled(*tensors), want)


def test_tensors_that_wrap_others_are_computed_by_operators():
    tensors = qkv()
    wrapped = [TwoTensor(x, x.clone()) for x in tensors]
    assert dispatch.plan(*wrapped, enable_gqa=True).name == "flash_decode"
    for _ in range(2):  # without a route and with one
        got = ours(wrapped, attn_mask=masks.key_lengths(torch.tensor([70])))
        assert isinstance(got, TwoTensor)
        close(got.a, exact(tensors, attn_mask=masks.key_lengths(torch.tensor([70]))))


def test_a_dispatch_mode_sees_what_is_computed():
    tensors = qkv()
    with FlopCounterMode(display=False) as counted:
        close(ours(tensors), exact(tensors))
        assert counted.get_total_flops() >= 2 * 2 * 4 * 200 * 32
        ours(tensors, return_lse=True, softcap=2.0)


@pytest.mark.parametrize(
    "score",
    [
        (Bias(Ref("bias")), SoftCap(3.0)),
        (SoftCap(3.0), SoftCap(3.0)),
        (Alibi(Ref("bias")), SoftCap(3.0)),
        (Alibi(Ref("bias")), Alibi(Ref("bias"))),
    ],
    ids=str,
)
def test_terms_in_another_order_or_number_than_its_own_are_refused(score):
    names = ("query", "key", "value")
    described = {name: TensorDesc.of(x) for name, x in zip(names, qkv(), strict=True)}
    op = AttentionOp(**described, score=score, operands=(("bias", TensorDesc.of(torch.ones(4))),))
    (reason,) = FlashDecode().reasons_against(op)
    assert "takes one soft cap before all else, and slopes once" in str(reason)


def test_the_kernel_refuses_what_it_would_read_wrongly():
    decode = native.decode().module.decode
    q, k, v = qkv()
    rest = (1.0, None, None, None, None, False)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
    assert decode(*fakes, *rest) is NotImplemented
    assert decode(q, k, v, *rest, None, None, fakes[0]) is NotImplemented
    for wrong, error, text in [
        ([q, None, v], TypeError, "key must be a tensor, got a NoneType"),
        ([q, k.to_sparse(), v], TypeError, "key must be a strided tensor"),
        ([x.double() for x in (q, k, v)], TypeError, "takes float32, bfloat16 and float16"),
        ([q.half(), k, v], TypeError, "differ in dtype"),
        ([q[0], k, v], RuntimeError, "four dimensions"),
        ([q, k[:, :, :9], v], RuntimeError, "do not fit each other"),
        ([q[:, :3], k, v], RuntimeError, "Hq 3 is not a multiple of Hkv 2"),
        ([q, k.transpose(2, 3).contiguous().transpose(2, 3), v], RuntimeError, "must be contiguous"),
        ([q[:0], k[:0], v[:0]], RuntimeError, "must have elements"),
    ]:
        with pytest.raises(error, match=text):
            decode(*wrong, *rest)
    with pytest.raises(TypeError, match="takes 9 to 15 arguments"):
        decode(q, k, v)
    with pytest.raises(TypeError, match="real number"):
        decode(q, k, v, "1", *rest[1:])
    with pytest.raises(RuntimeError, match=r"lengths must be \[1\]"):
        decode(q, k, v, *rest, None, torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="expand"):
        decode(q, k, v, *rest, None, None, torch.ones(3, 7, dtype=torch.bool))


def test_the_profiler_sees_it():
    tensors = qkv()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        ours(tensors)
    assert "attn_dispatch::flash_decode" in {event.key for event in seen.key_averages()}


def test_threads_of_python_may_call_it_at_once():
    tensors = qkv(b=2, skv=3000, d=64)
    want, got = ours(tensors), []

    def call() -> None:
        got.extend(ours(tensors) for _ in range(20))

    workers = [threading.Thread(target=call) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(got) == 80
    for one in got:
        torch.testing.assert_close(one, want, atol=1e-6, rtol=1e-6)


def test_where_it_is_not_built_it_says_so_and_others_run(monkeypatch):
    told = "not built; `attn-dispatch build` does"
    monkeypatch.setattr(native, "decode", lambda: native.Built(None, told))
    monkeypatch.setattr("attn_dispatch.plan.decisions", PlanCache())
    tensors = qkv(skv=513)
    assert dispatch.plan(*tensors, enable_gqa=True).name != "flash_decode"
    with pytest.raises(AttnDispatchError, match=told):
        ours(tensors, softcap=1.5)
