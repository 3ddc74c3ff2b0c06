"""The case table of the contract suite, as data: sizes, dtype, mask, score terms, strides, poison, outputs.

Each mask has two independent descriptions: the arguments that `dispatch.attention` gets, and a predicate over
``(b, h, i, j)`` that says which pairs attend. The golden result is computed from the predicate alone.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from attn_dispatch import masks, variants

__all__ = ["BY_ID", "CASES", "MASKS", "Case", "Inputs", "MaskCase", "Sizes", "make_inputs"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a case, in the one alphabet."""

    B: int = 2
    Hq: int = 2
    Hkv: int = 2
    Sq: int = 17
    Skv: int = 17
    D: int = 16
    Dv: int = 16


@dataclass(frozen=True)
class Where:
    """Index grids that broadcast to ``[B, Hq, Sq, Skv]``: batch, head, query row, key; and the sizes."""

    b: torch.Tensor
    h: torch.Tensor
    i: torch.Tensor
    j: torch.Tensor
    n: Sizes

    @classmethod
    def of(cls, n: Sizes) -> Where:
        """The grids of these sizes."""
        b, h, i, j = torch.meshgrid(*(torch.arange(size) for size in (n.B, n.Hq, n.Sq, n.Skv)), indexing="ij")
        return cls(b[:, :1, :1, :1], h[:1, :, :1, :1], i[:1, :1, :, :1], j[:1, :1, :1, :], n)

    @property
    def end(self) -> torch.Tensor:
        """Position of a query row when the last query sees the last key."""
        return self.i + self.n.Skv - self.n.Sq


@dataclass(frozen=True)
class MaskCase:
    """A mask: the arguments of `dispatch.attention` for it, and which pairs attend, said independently.

    Args:
        arguments: ``(sizes, generator) -> keyword arguments``; allowed: ``(where, arguments) -> bool tensor``.
        bias: ``(where, arguments) -> float tensor`` that is added to the scores; None for none.
    """

    arguments: Callable[[Sizes, torch.Generator], dict[str, Any]]
    allowed: Callable[[Where, dict[str, Any]], torch.Tensor] | None = None
    bias: Callable[[Where, dict[str, Any]], torch.Tensor] | None = None


def _fixed(**arguments: Any) -> Callable[[Sizes, torch.Generator], dict[str, Any]]:
    return lambda n, gen: dict(arguments)


def _random_bool(*shape_of: str) -> Callable[[Sizes, torch.Generator], dict[str, Any]]:
    """A random bool ``attn_mask``; each size is a name of `Sizes` or ``"1"``."""

    def make(n: Sizes, gen: torch.Generator) -> dict[str, Any]:
        shape = [getattr(n, name) if name != "1" else 1 for name in shape_of]
        return {"attn_mask": torch.rand(shape, generator=gen) < 0.6}

    return make


def _dead_rows(n: Sizes, gen: torch.Generator) -> dict[str, Any]:
    mask = torch.rand(n.B, 1, n.Sq, n.Skv, generator=gen) < 0.6
    mask[:, :, :3] = False
    mask[-1, :, -1] = False
    return {"attn_mask": mask}


def _float_mask(n: Sizes, gen: torch.Generator) -> dict[str, Any]:
    mask = torch.randn(1, n.Hq, n.Sq, n.Skv, generator=gen)
    mask[torch.rand(mask.shape, generator=gen) < 0.3] = -math.inf
    mask[:, :, 1] = -math.inf
    return {"attn_mask": mask}


def _key_lengths(n: Sizes, gen: torch.Generator) -> dict[str, Any]:
    return {"key_lengths": torch.tensor([max(n.Skv - 5 * b, 1) for b in range(n.B)])}


def _zero_lengths(n: Sizes, gen: torch.Generator) -> dict[str, Any]:
    return {"key_lengths": torch.tensor([0 if b == 0 else n.Skv - 2 for b in range(n.B)])}


def _query_lengths(n: Sizes, gen: torch.Generator) -> dict[str, Any]:
    return {"query_lengths": torch.tensor([max(n.Sq - 4 * b, 0) for b in range(n.B)])}


def _both_lengths(n: Sizes, gen: torch.Generator) -> dict[str, Any]:
    return _key_lengths(n, gen) | _query_lengths(n, gen)


def _documents(n: Sizes, gen: torch.Generator) -> dict[str, Any]:
    return {"attn_mask": masks.causal() & masks.documents([0, n.Skv // 3, n.Skv // 3 + 1, n.Skv])}


def _segment_ids(n: Sizes, gen: torch.Generator) -> dict[str, Any]:
    ids = [torch.randint(0, 3, (n.B, s), generator=gen) for s in (n.Sq, n.Skv)]
    return {"attn_mask": masks.Segments(*ids), "_ids": ids}  # type: ignore[arg-type]


def _table(heads: bool) -> Callable[[Sizes, torch.Generator], dict[str, Any]]:
    def make(n: Sizes, gen: torch.Generator) -> dict[str, Any]:
        shape = (*((n.Hq,) if heads else ()), -(-n.Skv // 4), -(-n.Skv // 4))
        table = torch.rand(shape, generator=gen) < 0.5
        return {"attn_mask": masks.BlockTable(4, table), "_table": table}  # type: ignore[arg-type]

    return make


def _in_table(w: Where, a: dict[str, Any]) -> torch.Tensor:
    table = a["_table"] if a["_table"].ndim == 3 else a["_table"][None]
    head = w.h if table.shape[0] > 1 else torch.zeros_like(w.h)
    inside = (w.end >= 0) & (w.end // 4 < table.shape[1])
    return table[head, (w.end // 4).clamp(0, table.shape[1] - 1), w.j // 4] & inside


def _longformer(n: Sizes, gen: torch.Generator) -> dict[str, Any]:
    keep = torch.zeros(n.Skv, dtype=torch.bool)
    keep[[0, n.Skv // 2]] = True
    return {"attn_mask": masks.longformer(2, keep)}


def _selected(n: Sizes, gen: torch.Generator, rest: masks.Mask | None = None) -> dict[str, Any]:
    indices = torch.randint(-1, n.Skv, (n.B, n.Sq, 5), generator=gen)
    indices[:, : n.Sq // 2 : 3] = -1
    mask: masks.Mask = masks.Selected(indices)  # type: ignore[arg-type]
    return {"attn_mask": mask if rest is None else mask & rest, "_indices": indices}


def _is_selected(w: Where, a: dict[str, Any]) -> torch.Tensor:
    return (a["_indices"][:, None, :, None, :] == w.j[..., None]).any(-1)


def _offsets(n: Sizes, gen: torch.Generator) -> dict[str, Any]:
    return {"is_causal": True, "q_offset": torch.tensor([3 * b - 2 for b in range(n.B)])}


def _alibi(n: Sizes, gen: torch.Generator) -> dict[str, Any]:
    return {"bias": torch.tensor([2.0 ** -(h + 1) for h in range(n.Hq)])}


def _column_bias(n: Sizes, gen: torch.Generator) -> dict[str, Any]:
    return {"bias": torch.randn(n.B, 1, 1, n.Skv, generator=gen)}


def _dense(w: Where, a: dict[str, Any]) -> torch.Tensor:
    return a["attn_mask"]


def _in_lengths(w: Where, a: dict[str, Any]) -> torch.Tensor:
    out = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    if "key_lengths" in a:
        out = out & (w.j < a["key_lengths"].reshape(-1, 1, 1, 1))
    if "query_lengths" in a:
        out = out & (w.i < a["query_lengths"].reshape(-1, 1, 1, 1))
    return out


def _band(left: int | None, right: int | None) -> Callable[[Where, dict[str, Any]], torch.Tensor]:
    def allowed(w: Where, a: dict[str, Any]) -> torch.Tensor:
        behind, ahead = w.end - w.j, w.j - w.end
        low = behind <= (left if left is not None else 1 << 40)
        return low & (ahead <= (right if right is not None else 1 << 40))

    return allowed


MASKS: dict[str, MaskCase] = {
    "none": MaskCase(_fixed()),
    "causal": MaskCase(_fixed(is_causal=True), lambda w, a: w.j <= w.i),
    "causal_offset": MaskCase(_fixed(is_causal=True, q_offset=3), lambda w, a: w.j <= w.i + 3),
    "causal_offset_per_batch": MaskCase(_offsets, lambda w, a: w.j <= w.i + 3 * w.b - 2),
    "causal_end": MaskCase(_fixed(attn_mask=masks.causal()), lambda w, a: w.j <= w.end),
    "window_causal": MaskCase(_fixed(window=(7, 0)), _band(7, 0)),
    "window_two_sided": MaskCase(_fixed(window=(5, 3)), _band(5, 3)),
    "window_left": MaskCase(_fixed(window=(4, None)), _band(4, None)),
    "window_ahead": MaskCase(_fixed(window=(4, -1), q_offset=0), lambda w, a: w.i - w.j <= 4),
    "chunked": MaskCase(_fixed(attn_mask=masks.chunked(8)), lambda w, a: (w.j <= w.end) & (w.j // 8 == w.end // 8)),
    "chunked_large": MaskCase(
        _fixed(attn_mask=masks.chunked(64)), lambda w, a: (w.j <= w.end) & (w.j // 64 == w.end // 64)
    ),
    "key_lengths": MaskCase(_key_lengths, _in_lengths),
    "key_lengths_zero": MaskCase(_zero_lengths, _in_lengths),
    "query_lengths": MaskCase(_query_lengths, _in_lengths),
    "both_lengths": MaskCase(_both_lengths, _in_lengths),
    "causal_and_lengths": MaskCase(
        lambda n, gen: {"is_causal": True, **_both_lengths(n, gen)},
        lambda w, a: _in_lengths(w, a) & (w.j <= w.i),
    ),
    "bool": MaskCase(_random_bool("Sq", "Skv"), _dense),
    "bool_per_head": MaskCase(_random_bool("1", "Hq", "Sq", "Skv"), _dense),
    "bool_per_batch": MaskCase(_random_bool("B", "1", "Sq", "Skv"), _dense),
    "bool_padding": MaskCase(_random_bool("B", "1", "1", "Skv"), _dense),
    "dead_rows": MaskCase(_dead_rows, _dense),
    "float": MaskCase(_float_mask, None, lambda w, a: a["attn_mask"]),
    "column_bias": MaskCase(_column_bias, None, lambda w, a: a["bias"]),
    "column_bias_causal": MaskCase(
        lambda n, gen: {**_column_bias(n, gen), "is_causal": True}, lambda w, a: w.j <= w.i, lambda w, a: a["bias"]
    ),
    "alibi": MaskCase(_alibi, None, lambda w, a: -a["bias"].reshape(1, -1, 1, 1) * (w.end - w.j).abs()),
    "alibi_causal": MaskCase(
        lambda n, gen: {**_alibi(n, gen), "attn_mask": masks.causal()},
        lambda w, a: w.j <= w.end,
        lambda w, a: -a["bias"].reshape(1, -1, 1, 1) * (w.end - w.j).abs(),
    ),
    "alibi_lengths": MaskCase(
        lambda n, gen: {**_alibi(n, gen), **_both_lengths(n, gen)},
        _in_lengths,
        lambda w, a: -a["bias"].reshape(1, -1, 1, 1) * (w.end - w.j).abs(),
    ),
    "documents": MaskCase(
        _documents,
        lambda w, a: (w.j <= w.i) & (_document_of(w.i, w.n.Skv) == _document_of(w.j, w.n.Skv)),
    ),
    "segments": MaskCase(_segment_ids, lambda w, a: a["_ids"][0][:, None, :, None] == a["_ids"][1][:, None, None, :]),
    "block_table": MaskCase(_table(heads=False), _in_table),
    "block_table_per_head": MaskCase(_table(heads=True), _in_table),
    "strided": MaskCase(_fixed(attn_mask=masks.strided(3)), lambda w, a: (w.j <= w.end) & ((w.end - w.j) % 3 == 0)),
    "dilated": MaskCase(
        _fixed(attn_mask=masks.dilated(2, 3)), lambda w, a: ((w.end - w.j).abs() <= 6) & ((w.end - w.j) % 3 == 0)
    ),
    "fixed": MaskCase(
        _fixed(attn_mask=masks.fixed(6, 2)),
        lambda w, a: (w.j <= w.end) & ((w.j // 6 == w.end // 6) | (w.j % 6 >= 4)),
    ),
    "prefix_lm": MaskCase(_fixed(attn_mask=masks.prefix_lm(5)), lambda w, a: (w.j <= w.end) | (w.j < 5)),
    "prefix_lm_per_batch": MaskCase(
        lambda n, gen: {"attn_mask": masks.prefix_lm(torch.tensor([b * n.Skv for b in range(n.B)]))},
        lambda w, a: (w.j <= w.end) | (w.j < w.b * w.n.Skv),
    ),
    "columns": MaskCase(_fixed(attn_mask=masks.columns(5)), lambda w, a: w.j < 5),
    "longformer": MaskCase(
        _longformer,
        lambda w, a: ((w.end - w.j).abs() <= 2) | _is_global(w.j, w.n.Skv) | _is_global(w.i, w.n.Skv),
    ),
    "selected": MaskCase(_selected, _is_selected),
    "selected_causal": MaskCase(
        lambda n, gen: _selected(n, gen, masks.causal()), lambda w, a: _is_selected(w, a) & (w.j <= w.end)
    ),
    "selected_documents": MaskCase(
        lambda n, gen: _selected(n, gen, _documents(n, gen)["attn_mask"]),
        lambda w, a: _is_selected(w, a) & (w.j <= w.end) & (_document_of(w.i, w.n.Skv) == _document_of(w.j, w.n.Skv)),
    ),
    "causal_not_window": MaskCase(
        _fixed(attn_mask=masks.causal() & ~masks.window(3, 1)),
        lambda w, a: (w.j <= w.end) & ~((w.end - w.j <= 3) & (w.j - w.end <= 1)),
    ),
    "window_before_keys": MaskCase(
        _fixed(window=(5, 0), q_offset=-6), lambda w, a: (w.j <= w.i - 6) & (w.i - 6 - w.j <= 5)
    ),
    "window_15": MaskCase(_fixed(window=(15, 0)), _band(15, 0)),
    "window_15_before_keys": MaskCase(
        _fixed(window=(15, 0), q_offset=-150), lambda w, a: (w.j <= w.i - 150) & (w.i - 150 - w.j <= 15)
    ),
}


def _document_of(at: torch.Tensor, length: int) -> torch.Tensor:
    return (at >= length // 3).long() + (at >= length // 3 + 1).long()


def _is_global(at: torch.Tensor, length: int) -> torch.Tensor:
    return (at == 0) | (at == length // 2)


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Args:
        id: unique and readable. rank: 2 to 5 dimensions of query, key, value. mask: a name of `MASKS`.
        strides: ``"plain"``, ``"transposed"`` (heads and rows swapped in memory), ``"scattered"`` (the last dimension
            has stride 2), ``"expanded"`` (stride 0 along batch and heads).
        poison: ``"keys"``: NaN in keys that no row attends and in one key that only some rows attend; ``"query"``: one
            NaN query row; ``""``: none.
        grad: names that need gradients, of ``query key value bias sinks decay state state_z``.
        linear: ``"elu1"`` (normalised), ``"identity"`` (not), ``"retention"``; "" for softmax.
        state: one goes in and one comes out.
    """

    id: str
    mask: str = "none"
    dtype: str = "float32"
    sizes: Sizes = field(default_factory=Sizes)
    layout: str = "bhsd"
    rank: int = 4
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    strides: str = "plain"
    poison: str = ""
    grad: tuple[str, ...] = ()
    lse: bool = False
    weights: bool = False
    linear: str = ""
    state: bool = False


@dataclass(frozen=True)
class Inputs:
    """The tensors of a case.

    Args:
        query, key, value: in the case's rank, layout and strides. arguments: the other arguments of the call.
        allowed: bool ``[B, Hq, Sq, Skv]``. bias: float tensor added to the scores, or None.
        linear: ``decay``, ``state``, ``state_z`` of a case of the linear family, where it has them.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    arguments: dict[str, Any]
    allowed: torch.Tensor
    bias: torch.Tensor | None
    linear: dict[str, torch.Tensor] = field(default_factory=dict)

    def named(self) -> dict[str, torch.Tensor]:
        """All tensors of the call by name."""
        found = {"query": self.query, "key": self.key, "value": self.value}
        return found | {n: x for n, x in self.arguments.items() if isinstance(x, torch.Tensor)} | self.linear


def make_inputs(case: Case) -> Inputs:
    """The tensors of a case; the same at every call, drawn from the case's id."""
    n, spec = case.sizes, MASKS[case.mask]
    gen = torch.Generator().manual_seed(zlib.crc32(case.id.encode()))
    arguments = spec.arguments(n, gen)
    where = Where.of(n)
    allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool) if spec.allowed is None else spec.allowed(where, arguments)
    allowed = allowed.expand(n.B, n.Hq, n.Sq, n.Skv)
    shapes = ((n.B, n.Hq, n.Sq, n.D), (n.B, n.Hkv, n.Skv, n.D), (n.B, n.Hkv, n.Skv, n.Dv))
    dtype = getattr(torch, case.dtype)
    q, k, v = (_lay_out(torch.randn(s, generator=gen, dtype=torch.float64).to(dtype), case.strides) for s in shapes)
    if case.poison == "query":
        q[..., n.Sq // 2, :] = math.nan
    elif case.poison == "keys":
        _poison_keys(k, v, allowed)
    if case.sinks:
        arguments["sinks"] = torch.randn(n.Hq, generator=gen)
    bias = None if spec.bias is None else spec.bias(where, arguments)
    tensors = dict(zip(("query", "key", "value"), (_as_called(x, case) for x in (q, k, v)), strict=True))
    arguments = {name: x for name, x in arguments.items() if not name.startswith("_")}
    arguments |= {"scale": case.scale, "softcap": case.softcap, "layout": case.layout, "enable_gqa": n.Hq != n.Hkv}
    arguments |= {"return_lse": case.lse, "return_weights": case.weights}
    linear = _linear_tensors(case, gen)
    for name in case.grad:
        table = tensors if name in tensors else linear if name in linear else arguments
        table[name] = table[name].detach().requires_grad_()
    if case.linear:
        arguments |= {"variant": _variant(case, linear), "return_state": case.state}
    if case.state:
        arguments["state"] = variants.LinearState(linear["state"], linear.get("state_z"), 3)
    return Inputs(**tensors, arguments=arguments, allowed=allowed, bias=bias, linear=linear)


def _linear_tensors(case: Case, gen: torch.Generator) -> dict[str, torch.Tensor]:
    """Decay and state of a case of the linear family; a state is float32 (float64) whatever the inputs are."""
    n, acc = case.sizes, torch.float64 if case.dtype == "float64" else torch.float32
    tensors: dict[str, torch.Tensor] = {}
    if case.linear == "retention":
        tensors["decay"] = torch.linspace(0.5, 1.0, n.Hq, dtype=acc)
    if case.state:
        heads = n.Hq if case.linear == "retention" else n.Hkv
        tensors["state"] = torch.randn(n.B, heads, n.D, n.Dv, generator=gen, dtype=torch.float64).to(acc)
        if case.linear == "elu1":
            tensors["state_z"] = torch.rand(n.B, heads, n.D, generator=gen, dtype=torch.float64).to(acc) * 3
    return tensors


def _variant(case: Case, linear: dict[str, torch.Tensor]) -> variants.Variant:
    if case.linear == "retention":
        return variants.Retention(linear["decay"])
    return variants.LinearAttention(case.linear, 1e-6 if case.linear == "elu1" else None)


def _lay_out(x: torch.Tensor, strides: str) -> torch.Tensor:
    if strides == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if strides == "scattered":
        return torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0]  # a wrong stride reads NaN
    if strides == "expanded":
        return x[:1, :1].expand(x.shape)
    return x


def _poison_keys(k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> None:
    """NaN and Inf where no row of the batch looks, and in the first key that only some rows attend."""
    attended = allowed.any(1).any(1)  # [B, Skv]
    everywhere = allowed.all(1).all(1)
    bad = ~attended
    partly = (attended & ~everywhere).int()
    if not bool(bad.any()):
        bad = bad.clone()
        bad[torch.arange(len(bad)), partly.argmax(-1)] = partly.any(-1)
    assert bool(bad.any()), "nothing to poison: the case proves nothing"
    k[bad[:, None].expand(k.shape[:3])] = math.nan
    v[bad[:, None].expand(v.shape[:3])] = math.nan


def _as_called(x: torch.Tensor, case: Case) -> torch.Tensor:
    if case.rank == 2:
        return x[0, 0]
    if case.rank == 3:
        return x[0]
    if case.rank == 5:
        return x.unflatten(0, (2, -1))
    return x.transpose(1, 2).contiguous() if case.layout == "bshd" else x


_S = Sizes()
_GRAD = ("query", "key", "value")
_RAGGED = replace(_S, Sq=9, Skv=23)
_TALL = replace(_S, Sq=23, Skv=9)
_GQA = replace(_S, Hq=4)
_MQA = replace(_S, Hq=6, Hkv=1, Sq=5, Skv=19)
_LONG = replace(_S, B=1, Hq=4, Sq=200, Skv=200)
_LINEAR = ("elu1", "identity", "retention")
_STEP = replace(_S, Sq=1, Skv=1)
_LONGER = replace(_S, B=1, Sq=500, Skv=500)

CASES: tuple[Case, ...] = (
    # every mask, square and ragged; float32
    *(Case(f"{m}", m) for m in MASKS if m not in ("window_15", "window_15_before_keys", "chunked_large")),
    *(
        Case(f"{m}_wide", m, sizes=_RAGGED)
        for m in ("causal", "causal_end", "window_causal", "window_two_sided", "chunked", "strided", "prefix_lm")
    ),
    *(Case(f"{m}_wide", m, sizes=_RAGGED) for m in ("bool", "float", "block_table", "segments", "alibi_causal")),
    *(
        Case(f"{m}_tall", m, sizes=_TALL, lse=True)  # more queries than keys: the first rows are empty
        for m in ("causal", "causal_end", "window_causal", "window_two_sided", "chunked", "strided", "key_lengths")
    ),
    # dtypes
    *(
        Case(f"{m}_{d}", m, dtype=d, sizes=_GQA)
        for d in ("float64", "bfloat16", "float16")
        for m in ("none", "causal", "bool", "float", "window_causal", "key_lengths")
    ),
    *(Case(f"dead_rows_{d}", "dead_rows", dtype=d, lse=True, grad=_GRAD) for d in ("float64", "bfloat16", "float16")),
    # layout and rank
    *(Case(f"bshd_{m}", m, layout="bshd", sizes=_GQA, lse=True) for m in ("none", "causal", "key_lengths")),
    Case("rank_2", "causal", rank=2, sizes=replace(_S, B=1, Hq=1, Hkv=1), lse=True),
    Case("rank_3", "causal", rank=3, sizes=replace(_GQA, B=1), lse=True),
    Case("rank_5", "bool", rank=5, sizes=replace(_GQA, B=4), lse=True),
    # heads
    *(Case(f"gqa_{m}", m, sizes=_GQA) for m in ("none", "causal", "bool_per_head", "float", "block_table_per_head")),
    *(Case(f"mqa_{m}", m, sizes=_MQA) for m in ("none", "causal_end", "both_lengths", "window_causal", "dead_rows")),
    Case("gqa_decode", sizes=replace(_GQA, Sq=1, Skv=33)),
    Case("mqa_decode_lengths", "key_lengths", sizes=replace(_MQA, Sq=1, Skv=33)),
    # selected keys
    Case("selected_gqa", "selected_causal", sizes=_GQA, lse=True),
    Case("selected_wide", "selected_causal", sizes=replace(_RAGGED, Hq=4), lse=True),
    Case("selected_mqa_dv", "selected", sizes=replace(_MQA, D=24, Dv=16)),
    Case("selected_decode", "selected_causal", sizes=replace(_GQA, Sq=1, Skv=33)),
    Case("selected_grad", "selected_causal", sizes=_GQA, grad=_GRAD),
    Case("selected_grad_dv", "selected_documents", sizes=replace(_GQA, Dv=8), lse=True, grad=_GRAD),
    Case("selected_sinks", "selected_causal", sinks=True, lse=True),
    Case("selected_softcap", "selected", softcap=1.5, sizes=_GQA),
    Case("selected_bshd", "selected_causal", layout="bshd", sizes=_GQA),
    *(Case(f"selected_{s}", "selected_causal", strides=s) for s in ("transposed", "scattered", "expanded")),
    *(Case(f"selected_{d}", "selected_causal", dtype=d, sizes=_GQA) for d in ("float64", "bfloat16", "float16")),
    # sizes
    Case("dv_smaller", "causal", sizes=replace(_S, D=24, Dv=8)),
    Case("dv_larger", "bool", sizes=replace(_S, D=8, Dv=20), lse=True),
    Case("odd_sizes", "causal", sizes=replace(_S, B=3, Hq=3, Hkv=3, Sq=13, Skv=13, D=7, Dv=5)),
    Case("one_of_everything", sizes=Sizes(1, 1, 1, 1, 1, 1, 1), lse=True),
    *(Case(f"empty_{name}", sizes=replace(_S, **{name: 0}), lse=True) for name in ("B", "Sq", "Skv", "D", "Dv")),
    Case("empty_skv_causal_grad", "causal", sizes=replace(_S, Skv=0), grad=("query",)),
    # scores
    Case("softcap", softcap=1.5),
    *(Case(f"alibi_causal_{d}", "alibi_causal", dtype=d, sizes=_GQA, lse=True) for d in ("float64", "bfloat16")),
    Case("alibi_sinks_softcap", "alibi_causal", dtype="float64", sinks=True, softcap=2.0, sizes=_RAGGED),
    Case("alibi_lengths_wide", "alibi_lengths", sizes=replace(_RAGGED, Hq=4), lse=True),
    Case("alibi_decode_gqa", "alibi_causal", sizes=replace(_GQA, Sq=1, Skv=33)),
    Case("prefix_lm_per_batch_gqa_grad", "prefix_lm_per_batch", sizes=_GQA, lse=True, grad=_GRAD),
    Case("mla_heads", "causal", sizes=replace(_S, D=48, Dv=32), lse=True),
    Case("softcap_causal_gqa", "causal", softcap=2.0, sizes=_GQA, grad=_GRAD),
    Case("softcap_float_mask", "float", softcap=1.0),
    Case("scale", "causal", scale=0.7),
    Case("scale_zero", "causal", scale=0.0),
    Case("scale_negative", "causal", scale=-0.4, lse=True),
    Case("scale_negative_grad", "bool", scale=-0.4, grad=_GRAD),
    Case("sinks", sinks=True, lse=True),
    Case("sinks_causal_gqa", "causal", sinks=True, sizes=_GQA, lse=True),
    Case("sinks_dead_rows", "dead_rows", sinks=True, lse=True),
    Case("sinks_zero_lengths", "key_lengths_zero", sinks=True, lse=True),
    Case("sinks_window_bf16", "window_causal", sinks=True, dtype="bfloat16"),
    Case("sinks_grad", "causal", sinks=True, grad=(*_GRAD, "sinks")),
    # gradients and lse
    *(Case(f"{m}_grad", m, grad=_GRAD) for m in ("none", "causal", "window_causal", "both_lengths", "segments")),
    *(Case(f"{m}_grad", m, grad=_GRAD) for m in ("float", "bool_per_head", "strided", "longformer", "dead_rows")),
    *(Case(f"{m}_grad_gqa", m, grad=_GRAD, sizes=_GQA) for m in ("causal", "key_lengths_zero", "chunked")),
    *(Case(f"gqa_grad_{d}", "causal", dtype=d, sizes=_GQA, grad=_GRAD) for d in ("float64", "bfloat16", "float16")),
    Case("window_grad_bf16", "window_causal", dtype="bfloat16", grad=_GRAD),
    Case("query_grad_only", "causal", grad=("query",)),
    Case("bias_grad", "column_bias", grad=(*_GRAD, "bias")),
    Case("bias_grad_gqa", "column_bias_causal", grad=("bias",), sizes=_GQA),
    *(Case(f"{m}_lse", m, lse=True, sizes=_GQA) for m in ("none", "causal", "bool", "float", "both_lengths")),
    *(Case(f"{m}_lse_grad", m, lse=True, grad=_GRAD) for m in ("causal", "dead_rows", "both_lengths")),
    Case("weights", "causal", weights=True, lse=True, sizes=_GQA),
    Case("weights_gqa", "bool", weights=True, sizes=_GQA),
    Case("weights_bf16", "causal", weights=True, dtype="bfloat16"),
    Case("lse_bf16", "causal", lse=True, dtype="bfloat16", sizes=_GQA),
    Case("lse_f16", "float", lse=True, dtype="float16"),
    Case("lse_f64_grad", "bool", lse=True, dtype="float64", grad=_GRAD),
    Case("weights_dead_rows", "dead_rows", weights=True),
    # strides
    *(Case(f"{s}_{m}", m, strides=s) for s in ("transposed", "scattered", "expanded") for m in ("causal", "bool")),
    Case("scattered_grad", "causal", strides="scattered", grad=_GRAD),
    Case("scattered_gqa_lengths", "key_lengths", strides="scattered", sizes=_GQA),
    Case("expanded_grad", strides="expanded", grad=_GRAD),
    # NaN
    *(Case(f"nan_query_{m}", m, poison="query") for m in ("none", "causal", "bool", "window_causal", "both_lengths")),
    Case("nan_query_few_keys", sizes=replace(_S, Skv=3), poison="query", lse=True),
    *(
        Case(f"nan_keys_{m}", m, poison="keys", lse=True)
        for m in ("key_lengths", "bool_padding", "window_causal", "window_two_sided", "chunked", "segments")
    ),
    *(Case(f"nan_keys_{m}", m, poison="keys") for m in ("block_table", "documents", "selected", "causal_and_lengths")),
    Case("nan_keys_gqa", "key_lengths", poison="keys", sizes=_GQA, grad=_GRAD),
    Case("nan_keys_window_grad", "window_before_keys", poison="keys", lse=True, grad=_GRAD),
    Case("nan_keys_window_gqa_grad", "window_before_keys", poison="keys", sizes=_GQA, grad=_GRAD),
    Case("nan_long_window_grad", "window_15_before_keys", sizes=replace(_LONG, Hq=2), poison="keys", grad=_GRAD),
    Case("nan_keys_bf16", "key_lengths", poison="keys", dtype="bfloat16"),
    # long enough that the tiling rewrites apply
    Case("long_window", "window_15", sizes=_LONG, lse=True),
    Case("long_window_gqa", "window_15", sizes=replace(_LONG, Hkv=2)),
    Case("long_window_gqa_grad", "window_15", sizes=replace(_LONG, Hq=2, Hkv=1), grad=_GRAD),
    Case("long_window_bf16", "window_15", sizes=replace(_LONG, Hkv=2), dtype="bfloat16"),
    Case("long_window_sinks", "window_15", sizes=_LONG, sinks=True),
    Case("long_window_dead_tiles", "window_15_before_keys", sizes=_LONG, lse=True, grad=()),
    Case("long_window_dead_tiles_grad", "window_15_before_keys", sizes=replace(_LONG, Hq=1, Hkv=1), grad=_GRAD),
    Case("long_window_dead_tiles_sinks", "window_15_before_keys", sizes=_LONG, sinks=True, lse=True),
    Case("long_alibi", "alibi_causal", sizes=replace(_LONG, Sq=260, Skv=280), lse=True),
    Case("long_chunked", "chunked_large", sizes=replace(_LONG, Hkv=2), lse=True),
    Case("long_chunked_dv", "chunked_large", sizes=replace(_LONG, Dv=8)),
    Case("long_queries", "bool", sizes=replace(_S, B=1, Sq=300, Skv=40), lse=True),
    Case("long_queries_float", "float", sizes=replace(_S, B=1, Hq=4, Sq=300, Skv=40)),
    Case("long_decode", sizes=replace(_S, B=1, Hq=4, Hkv=1, Sq=1, Skv=601), lse=True),
    Case("long_decode_f16", sizes=replace(_S, B=1, Hq=2, Hkv=1, Sq=2, Skv=600), dtype="float16"),
    Case("long_lengths", "both_lengths", sizes=replace(_LONG, B=2, Hq=2), lse=True),
    # unions of a band, columns and rows
    Case("long_longformer", "longformer", sizes=_LONGER, lse=True),
    Case("long_longformer_grad", "longformer", sizes=_LONGER, grad=_GRAD),
    Case("long_longformer_gqa_bf16", "longformer", sizes=replace(_LONGER, Hkv=1), dtype="bfloat16"),
    Case("long_fixed_sinks", "fixed", sizes=_LONGER, sinks=True, lse=True),
    Case("nan_long_longformer", "longformer", sizes=_LONGER, poison="keys"),
    Case("nan_long_window", "window_15", sizes=replace(_LONG, Hq=2), poison="keys"),
    # linear attention and retention
    *(
        Case(f"{kind}_{m}", m, linear=kind)
        for kind in _LINEAR
        for m in ("none", "causal", "causal_and_lengths", "bool")
    ),
    *(Case(f"{kind}_state", "causal", linear=kind, state=True) for kind in _LINEAR),
    *(Case(f"{kind}_state_gqa", "causal", linear=kind, state=True, sizes=_GQA, layout="bshd") for kind in _LINEAR),
    *(Case(f"{kind}_state_step", "causal", linear=kind, state=True, sizes=_STEP) for kind in _LINEAR),
    *(Case(f"{kind}_state_lengths", "causal_and_lengths", linear=kind, state=True) for kind in _LINEAR),
    *(Case(f"{kind}_state_documents", "documents", linear=kind, state=True, sizes=_GQA) for kind in _LINEAR),
    *(Case(f"{kind}_wide", "causal_end", linear=kind, state=True, sizes=_RAGGED) for kind in _LINEAR),
    *(Case(f"{kind}_tall", "causal_end", linear=kind, sizes=_TALL) for kind in _LINEAR),
    *(Case(f"{kind}_before_keys", "causal_offset", linear=kind, state=True, sizes=_TALL) for kind in _LINEAR),
    # a small scale: without a normaliser the output grows with the length, and its error with it
    *(
        Case(f"{kind}_long", "causal", linear=kind, sizes=replace(_LONG, Hkv=2, Dv=24), state=True, scale=0.02)
        for kind in _LINEAR
    ),
    *(
        Case(f"{kind}_{d}", "causal", linear=kind, dtype=d, state=True, sizes=replace(_LONG, Hkv=2), scale=0.02)
        for kind in _LINEAR
        for d in ("float64", "bfloat16", "float16")
    ),
    *(
        Case(f"{kind}_grad", "causal_and_lengths", linear=kind, dtype="float64", state=True, grad=(*_GRAD, "state"))
        for kind in _LINEAR
    ),
    Case("elu1_grad_long", "causal", linear="elu1", sizes=_LONG, state=True, grad=(*_GRAD, "state", "state_z")),
    Case(
        "retention_grad_long",
        "causal",
        linear="retention",
        sizes=_LONG,
        state=True,
        grad=(*_GRAD, "decay", "state"),
        dtype="float64",
        scale=0.02,
    ),
    Case("elu1_columns", "columns", linear="elu1", state=True),
    Case("elu1_padding", "bool_padding", linear="elu1", state=True, sizes=_GQA),
    Case("elu1_nan_keys", "key_lengths", linear="elu1", state=True, poison="keys"),
    Case("retention_nan_documents", "documents", linear="retention", poison="keys"),
    Case("elu1_zero_lengths", "key_lengths_zero", linear="elu1", state=True, grad=_GRAD),
    Case("elu1_weights", "causal", linear="elu1", weights=True),
    Case("identity_scattered", "causal", linear="identity", strides="scattered", scale=-0.5),
    Case("retention_offsets", "causal_offset_per_batch", linear="retention"),
    Case("identity_no_keys", linear="identity", state=True, sizes=replace(_S, Skv=0)),
    Case("elu1_head_dim_5", "causal", linear="elu1", sizes=replace(_S, D=5, Dv=3), state=True),
)
BY_ID = {case.id: case for case in CASES}
if len(BY_ID) != len(CASES):
    raise ValueError(f"case ids repeat: {sorted({c.id for c in CASES if c is not BY_ID[c.id]})}")
