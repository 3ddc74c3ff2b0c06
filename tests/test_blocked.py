"""The backend `blocked`: what it folds into the product and does in place is what the specification says."""

from __future__ import annotations

import math

import pytest
import torch

from attn_dispatch import dispatch, masks, reference
from attn_dispatch.backends.blocked import Blocked
from attn_dispatch.ir import AttentionOp, Bias, Ref, SoftCap, TensorDesc
from attn_dispatch.passes import canonicalise

SHAPES = {
    "one sequence": ((1, 4, 5, 8), 4, (1, 4, 5, 7)),
    "one sequence, all heads alike": ((1, 4, 5, 8), 4, (1, 1, 5, 7)),
    "one sequence, rows alike": ((1, 4, 5, 8), 4, (1, 4, 1, 7)),
    "groups": ((1, 4, 5, 8), 2, (1, 4, 5, 7)),
    "groups, all alike": ((1, 4, 5, 8), 2, (1, 1, 1, 7)),
    "shared by the batch": ((3, 4, 5, 8), 4, (1, 4, 5, 7)),
    "per batch": ((3, 4, 5, 8), 2, (3, 4, 5, 7)),
    "per batch, all heads alike": ((3, 4, 5, 8), 4, (3, 1, 5, 7)),
    "several tiles": ((2, 2, 150, 8), 1, (1, 2, 150, 7)),
}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def tensors(query_shape: tuple[int, ...], hkv: int, skv: int = 7) -> list[torch.Tensor]:
    b, _, _, d = query_shape
    return [drawn(*query_shape), drawn(b, hkv, skv, d), drawn(b, hkv, skv, d + 1)]


def run(op: AttentionOp, qkv: list[torch.Tensor], operands: dict[str, torch.Tensor]) -> torch.Tensor:
    return Blocked().compile(op).run(*qkv, operands)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_bias_with_an_empty_row_gives_0_there_and_changes_no_input(name, softcap):
    query_shape, hkv, bias_shape = SHAPES[name]
    qkv, bias = tensors(query_shape, hkv), drawn(*bias_shape)
    bias[0, 0, 0] = -math.inf
    before = [x.clone() for x in (*qkv, bias)]
    options = {"bias": bias, "softcap": softcap, "enable_gqa": True, "scale": 0.7}
    got = dispatch.attention(*qkv, **options, backend="blocked")
    want = dispatch.attention(*(x.double() for x in qkv), **options | {"bias": bias.double()}, backend="eager")
    close(got, want.float())
    assert (got[0, 0, 0] == 0).all()
    assert all(torch.equal(x, y) for x, y in zip((*qkv, bias), before, strict=True))


@pytest.mark.parametrize(
    "score",
    [
        (SoftCap(3.0), SoftCap(3.0)),
        (Bias(Ref("bias")), SoftCap(3.0)),
        (SoftCap(2.0), Bias(Ref("bias")), SoftCap(2.0), Bias(Ref("bias"))),
    ],
    ids=str,
)
def test_terms_are_taken_in_the_order_of_the_op(score):
    qkv, bias = tensors((1, 2, 5, 8), 2), drawn(1, 2, 5, 7)
    used = any(isinstance(term, Bias) for term in score)
    described = {name: TensorDesc.of(x) for name, x in zip(("query", "key", "value"), qkv, strict=True)}
    op = AttentionOp(**described, score=score, operands=(("bias", TensorDesc.of(bias)),) if used else ())
    op, _ = canonicalise(op)
    close(run(op, qkv, {"bias": bias}), reference.attention(op, *qkv, {"bias": bias}).out)


def test_a_nan_in_a_query_stays_in_its_row():
    qkv, mask = tensors((2, 2, 150, 8), 2, 150), masks.causal() & masks.window(40, None)
    qkv[0][0, 1, 3] = math.nan
    got = dispatch.attention(*qkv, mask, backend="blocked")
    want = dispatch.attention(*qkv, mask, backend="eager")
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    assert torch.isnan(got).any(-1).sum() == 1
    close(got.nan_to_num(), want.nan_to_num())


def test_gradients_of_rows_that_attend_nothing_are_0():
    qkv = [x.requires_grad_() for x in tensors((1, 2, 5, 8), 2)]
    allowed = torch.ones(5, 7, dtype=torch.bool)
    allowed[2] = False
    out = dispatch.attention(*qkv, allowed, backend="blocked")
    grads = torch.autograd.grad(out.sum(), qkv)
    assert all(torch.isfinite(x).all() for x in grads)
    assert (grads[0][:, :, 2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("bias_dtype", ["same", torch.float32], ids=str)
def test_other_dtypes_and_views(dtype, bias_dtype):
    wide = drawn(2, 3, 40, 4, 32).to(dtype)
    q, k, v = (
        x.transpose(1, 2)[..., ::2] if dtype == torch.float64 else x.transpose(1, 2)[..., 3:] for x in wide.unbind(1)
    )
    bias = drawn(40, 40, 4).to(dtype if bias_dtype == "same" else bias_dtype).permute(2, 0, 1)[None]
    got = dispatch.attention(q, k[:, ::2], v[:, ::2], bias=bias, enable_gqa=True, backend="blocked")
    exact = [x.double() for x in (q, k[:, ::2], v[:, ::2])]
    want = dispatch.attention(*exact, bias=bias.double(), enable_gqa=True, backend="eager")
    assert got.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def test_a_scale_of_0_keeps_the_nan_of_a_query():
    qkv = tensors((1, 4, 40, 64), 4, 64)
    qkv[0][0, 0, 2] = math.nan
    got = dispatch.attention(*qkv, scale=0.0, backend="blocked")
    assert torch.isnan(got[0, 0, 2]).all()
    assert torch.isnan(got).any(-1).sum() == 1
