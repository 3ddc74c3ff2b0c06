"""The cases of `attn-dispatch bench`: what we run, and what a user would write with torch alone for the same result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from attn_dispatch.dispatch import attention

__all__ = ["CASES", "Case", "Contenders", "make_qkv"]

sdpa = F.scaled_dot_product_attention


@dataclass(frozen=True)
class Contenders:
    """Callables of one case.

    Args:
        ours: the dispatcher's call. as_given: torch's SDPA fed what the caller has. best: the best form of it that
            we know a careful user could write by hand; None when that is ``as_given``.
    """

    ours: Callable[[], Any]
    as_given: Callable[[], Any]
    best: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Case:
    """A named case.

    Args:
        target: what the issue asks for, as text. dense: SDPA's own ground.
        differs: why its contenders rightly compute different things; empty when their results are compared.
    """

    name: str
    make: Callable[[], Contenders]
    target: str = ""
    dense: bool = False
    differs: str = ""


def make_qkv(
    b: int, hq: int, hkv: int, sq: int, skv: int, d: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random query, key and value of these sizes, the same at every call."""
    g = torch.Generator().manual_seed(0)
    shapes = ((b, hq, sq, d), (b, hkv, skv, d), (b, hkv, skv, d))
    q, k, v = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    return q, k, v


def _dense(
    name: str, sizes: tuple[int, int, int, int, int, int], causal: bool = False, dtype: torch.dtype = torch.float32
) -> Case:
    def make() -> Contenders:
        q, k, v = make_qkv(*sizes, dtype)
        return Contenders(lambda: attention(q, k, v, is_causal=causal), lambda: sdpa(q, k, v, is_causal=causal))

    return Case(name, make, "<= 1.05x SDPA's time", dense=True)


def _warm() -> Contenders:
    q, k, v = make_qkv(1, 8, 8, 1, 16, 64)
    return Contenders(lambda: attention(q, k, v), lambda: sdpa(q, k, v))


def _growing() -> Contenders:
    q, k, v = make_qkv(1, 8, 8, 1, 384, 64)
    steps = [(k[:, :, :n], v[:, :, :n]) for n in range(65, 385)]

    def ours() -> None:
        for key, value in steps:
            attention(q, key, value)

    def theirs() -> None:
        for key, value in steps:
            sdpa(q, key, value)

    return Contenders(ours, theirs)


GROWING_STEPS = 320


def _gqa_decode() -> Contenders:
    q, k, v = make_qkv(1, 32, 8, 1, 8192, 128)
    groups = (1, 8, 4, 128)
    return Contenders(
        lambda: attention(q, k, v, enable_gqa=True),
        lambda: sdpa(q, k, v, enable_gqa=True),
        lambda: sdpa(q.view(groups), k, v).view(1, 32, 1, 128),
    )


def _gqa_prefill() -> Contenders:
    q, k, v = make_qkv(1, 9, 3, 512, 512, 64)
    return Contenders(
        lambda: attention(q, k, v, is_causal=True, enable_gqa=True),
        lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True),
    )


def _window() -> Contenders:
    q, k, v = make_qkv(1, 8, 8, 8192, 8192, 64)
    i = torch.arange(8192)
    mask = (i[None] <= i[:, None]) & (i[None] > i[:, None] - 256)
    return Contenders(lambda: attention(q, k, v, window=(255, 0)), lambda: sdpa(q, k, v, attn_mask=mask))


_LENGTHS = (1024, 100, 300, 512)
_ROWS = "SDPA fills the rows of padding queries, which ours leaves zero"


def _padded(queries: bool) -> Callable[[], Contenders]:
    def make() -> Contenders:
        q, k, v = make_qkv(4, 12, 12, 1024, 1024, 64)
        lengths = torch.tensor(_LENGTHS)
        mask = (torch.arange(1024) < lengths[:, None])[:, None, None]
        rows = lengths if queries else None

        def by_hand() -> list[torch.Tensor]:
            """A loop over the sequences at their true lengths, without putting the results back into one tensor."""
            spans = [(slice(i, i + 1), n, n if queries else 1024) for i, n in enumerate(_LENGTHS)]
            return [sdpa(q[i, :, :rows], k[i, :, :n], v[i, :, :n]) for i, n, rows in spans]

        return Contenders(
            lambda: attention(q, k, v, key_lengths=lengths, query_lengths=rows),
            lambda: sdpa(q, k, v, attn_mask=mask),
            by_hand,
        )

    return make


def _causal_tensor() -> Contenders:
    q, k, v = make_qkv(1, 8, 8, 2048, 2048, 64)
    mask = torch.ones(2048, 2048, dtype=torch.bool).tril()
    return Contenders(
        lambda: attention(q, k, v, attn_mask=mask),
        lambda: sdpa(q, k, v, attn_mask=mask),
        lambda: sdpa(q, k, v, is_causal=True),
    )


def _training() -> Contenders:
    q, k, v = (x.requires_grad_() for x in make_qkv(2, 8, 8, 512, 512, 64))

    def step(f: Callable[..., torch.Tensor]) -> None:
        f(q, k, v, is_causal=True).sum().backward()

    return Contenders(lambda: step(attention), lambda: step(sdpa))


CASES: tuple[Case, ...] = (
    Case("warm call", _warm, "<= 2 us over SDPA"),
    Case("growing decode", _growing, "<= 4 us a step over SDPA"),
    Case("gqa decode 32/8 D128 S8192", _gqa_decode, ">= 2x as given"),
    Case("gqa prefill 9/3 S512", _gqa_prefill, dense=True),
    Case("window 256 S8192", _window, ">= 8x as given"),
    Case("padded keys 4x1024", _padded(queries=False), ">= 2x as given"),
    Case("padded keys+queries 4x1024", _padded(queries=True), ">= 3.5x as given", differs=_ROWS),
    Case("causal tensor S2048", _causal_tensor, ">= 1.7x as given"),
    _dense("bert-base S512", (1, 12, 12, 512, 512, 64)),
    _dense("bert-base S128 B8", (8, 12, 12, 128, 128, 64)),
    _dense("minilm S64 B4", (4, 12, 12, 64, 64, 32)),
    _dense("vit-b/16 S197", (1, 12, 12, 197, 197, 64)),
    _dense("causal S2048", (1, 8, 8, 2048, 2048, 64), causal=True),
    _dense("cross 64x1500", (1, 8, 8, 64, 1500, 64)),
    _dense("decode S4096", (1, 8, 8, 1, 4096, 64)),
    _dense("bf16 causal S512", (1, 8, 8, 512, 512, 64), causal=True, dtype=torch.bfloat16),
    Case("training step causal S512", _training, "<= 1.05x SDPA's time", dense=True),
)
