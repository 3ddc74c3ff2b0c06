"""Inputs for an op that exists only as a description, and what is right for them in float64.

The tuner and the benchmarks have ops, not tensors. `make_sample` makes tensors that fit an op; `golden` and
`golden_rows` compute what is right, the latter for a few query rows of an op that is too large for the former.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from attn_dispatch import reference
from attn_dispatch.backend import Raw
from attn_dispatch.ir.atoms import Columns, Dense, KeyLengths, QueryLengths, Rows, Segments, Selected
from attn_dispatch.ir.masks import Mask, Not, Or
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Bias
from attn_dispatch.ir.tensors import Ref, TensorDesc
from attn_dispatch.ir.weights import Linear

__all__ = ["KINDS", "Sample", "as_double", "golden", "golden_rows", "make_sample"]

# How a sample is filled. typical: what a model would have; large: logits of some hundreds, so that a softmax without
# its maximum overflows; ragged: lengths from 0 to full and rows that attend nothing; views: tensors that are views
# into larger ones, with gaps and permuted outer dimensions.
KINDS = ("typical", "large", "ragged", "views")


@dataclass(frozen=True)
class Sample:
    """Tensors that fit an op.

    Args:
        query: ``[B, Hq, Sq, D]``; key: ``[B, Hkv, Skv, D]``; value: ``[B, Hkv, Skv, Dv]``.
        operands: the other tensors, by the op's names.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    operands: dict[str, torch.Tensor] = field(default_factory=dict)

    def named(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return {"query": self.query, "key": self.key, "value": self.value, **self.operands}

    def double(self) -> Sample:
        """The same values in float64, on the CPU, without a graph."""
        plain = {n: x.detach().cpu() for n, x in self.named().items()}
        plain = {n: x.double() if x.is_floating_point() else x for n, x in plain.items()}
        return Sample(plain.pop("query"), plain.pop("key"), plain.pop("value"), plain)


def make_sample(op: AttentionOp, kind: str = "typical", seed: int = 0, device: str | None = None) -> Sample:
    """Tensors for an op; the same for the same arguments, and the global random state is left alone.

    Args:
        op: what they must fit. kind: one of `KINDS`. seed: of the private generator. device: default the op's own.

    Example:
        >>> from attn_dispatch.ir.tensors import TensorDesc
        >>> x = TensorDesc((1, 2, 5, 8), "float32")
        >>> make_sample(AttentionOp(x, x, x)).key.shape
        torch.Size([1, 2, 5, 8])
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    with torch.device("cpu"):  # a default device that the caller set must not draw the numbers
        return _sample(_Maker(op, kind, torch.Generator().manual_seed(seed), device or op.device))


def _sample(make: _Maker) -> Sample:
    op, kind = make.op, make.kind
    parts = {name: make.dense(getattr(op, name)) for name in ("query", "key", "value")}
    if kind == "large":
        parts["query"] = parts["query"] * (100.0 / max(abs(op.effective_scale) * math.sqrt(max(op.D, 1)), 1e-6))
    operands = {name: make.operand(name, desc) for name, desc in op.operands}
    tensors = {**parts, **operands}
    for name in op.grad:
        tensors[name] = tensors[name].detach().requires_grad_()
    return Sample(tensors.pop("query"), tensors.pop("key"), tensors.pop("value"), tensors)


def _unions(mask: Mask) -> list[Or]:
    """The unions in a mask."""
    parts = (*getattr(mask, "args", ()), *([mask.arg] if isinstance(mask, Not) else []))
    inside = [union for part in parts for union in _unions(part)]
    return [mask] if isinstance(mask, Or) else inside


class _Maker:
    """Makes the tensors of one sample; what a name stands for is read from the op."""

    def __init__(self, op: AttentionOp, kind: str, generator: torch.Generator, device: str) -> None:
        self.op, self.kind, self.generator, self.device = op, kind, generator, device
        self.atoms = {ref: atom for atom in op.mask.atoms() for ref in atom.refs()}
        self.in_unions = {ref for union in _unions(op.mask) for ref in union.refs()}

    def dense(self, desc: TensorDesc) -> torch.Tensor:
        """Standard normal values of this shape, dtype and stride class."""
        shape = desc.shape
        x = torch.randn(shape, generator=self.generator, dtype=torch.float32).to(getattr(torch, desc.dtype))
        if desc.strides == "scattered":
            return x.to(self.device).transpose(-1, -2).contiguous().transpose(-1, -2)
        if (self.kind == "views" or "bshd" in (self.op.layout, desc.strides)) and x.ndim == 4:
            wide = x.new_zeros((shape[0], shape[2], shape[1] + 1, shape[3])).to(self.device)
            view = (wide if self.kind == "views" else wide[:, :, :-1].contiguous()).transpose(1, 2)[:, : shape[1]]
            return view.copy_(x)
        return x.to(self.device)

    def operand(self, name: str, desc: TensorDesc) -> torch.Tensor:
        """The tensor of a named operand: what its place in the op says that it means."""
        op, shape = self.op, desc.shape
        atom = self.atoms.get(name)
        if isinstance(op.q_offset, Ref) and op.q_offset.name == name:
            values = torch.full(shape, max(op.Skv - op.Sq, 0))
        elif isinstance(op.weight, Linear) and op.weight.decay is not None and op.weight.decay.name == name:
            values = 1.0 - torch.exp2(-5.0 - torch.arange(shape[0], dtype=torch.float64) % 8)
        elif isinstance(op.weight, Linear) and op.weight.state_z is not None and op.weight.state_z.name == name:
            values = torch.rand(shape, generator=self.generator) * 8  # a sum of features, none of them negative
        elif isinstance(atom, (KeyLengths, QueryLengths)):
            values = self.lengths(shape[0], op.Skv if isinstance(atom, KeyLengths) else op.Sq)
        elif isinstance(atom, (Columns, Rows)):
            values = self.marks(shape, atom, is_global=name in self.in_unions)
        elif isinstance(atom, Segments):
            values = self.segments(shape)
        elif isinstance(atom, Selected):
            values = self.selection(shape)
        elif isinstance(atom, Dense):
            values = self.pairs(shape)
        elif desc.dtype == "bool":
            values = torch.rand(shape, generator=self.generator) < 0.5
        elif not getattr(torch, desc.dtype).is_floating_point:
            values = torch.zeros(shape, dtype=torch.int64)
        else:
            values = self.floats(name, shape)
        values = values.to(getattr(torch, desc.dtype)).to(self.device)
        return values.transpose(-1, -2).contiguous().transpose(-1, -2) if desc.strides == "scattered" else values

    def floats(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A bias, slopes or sinks."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float32)
        is_bias = any(isinstance(term, Bias) and term.bias.name == name for term in self.op.score)
        if is_bias and self.kind == "ragged" and len(shape) >= 2:
            values = torch.where(torch.rand(shape, generator=self.generator) < 0.3, -math.inf, values)
        return values if is_bias or len(shape) != 1 else values.abs() / 4  # ALiBi slopes are positive

    def lengths(self, b: int, limit: int) -> torch.Tensor:
        """True lengths: falling from full to a quarter; ragged ones reach 0."""
        if self.kind == "ragged":
            return torch.tensor([(0, limit, 1, limit // 2, max(limit - 1, 0))[i % 5] for i in range(b)])
        return torch.tensor([max(1, round(limit * (1.0 - 0.75 * i / max(b - 1, 1)))) for i in range(b)])

    def marks(self, shape: tuple[int, ...], atom: Mask, is_global: bool) -> torch.Tensor:
        """Keys or rows that count: a few global tokens in a union, else what is not padding.

        A padded batch is padded on the left; on the right its columns would be `KeyLengths`. A ragged one is padded on
        either side, and has gaps.
        """
        size = shape[-1]
        at = torch.arange(size)
        lengths = self.lengths(shape[0] if len(shape) == 2 else 1, size)[:, None]
        if is_global and self.kind != "ragged":
            lengths = (lengths // 64).clamp(min=1)
        values = at < lengths
        if isinstance(atom, Columns) and len(shape) == 2 and not is_global:
            left = at >= size - lengths
            if self.kind == "ragged":
                left[::2] = values[::2]
                left[1::4, size // 2] = False  # a gap
            values = left
        return values if len(shape) == 2 else values[0]

    def segments(self, shape: tuple[int, ...]) -> torch.Tensor:
        """About eight documents of different lengths, the same for queries and keys of one length."""
        n = shape[-1]
        parts = torch.tensor([5.0, 1.0, 3.0, 8.0, 2.0, 1.0, 6.0, 4.0])
        ends = (parts.cumsum(0) / parts.sum() * n).round()
        ids = (torch.arange(n)[:, None] >= ends).sum(-1)
        return ids.expand(shape)

    def selection(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Distinct keys per query, ascending, -1 where there are fewer keys than asked for."""
        skv, k = self.op.Skv, shape[-1]
        order = torch.rand((*shape[:-1], skv), generator=self.generator).argsort(-1)[..., : min(k, skv)]
        picked = order.sort(-1).values
        return torch.nn.functional.pad(picked, (0, k - picked.shape[-1]), value=-1)

    def pairs(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A mask without a pattern; ragged ones have rows that attend nothing."""
        keep = torch.rand(shape, generator=self.generator) < 0.7
        if self.kind == "ragged":
            keep[..., :1, :] = False
        return keep


def as_double(op: AttentionOp) -> AttentionOp:
    """The op in float64 on the CPU, without dropout."""

    def wide(desc: TensorDesc) -> TensorDesc:
        floating = getattr(torch, desc.dtype).is_floating_point
        return TensorDesc(desc.shape, "float64" if floating else desc.dtype, "cpu", desc.strides)

    named = {name: wide(getattr(op, name)) for name in ("query", "key", "value")}
    return op.with_(**named, operands=tuple((n, wide(d)) for n, d in op.operands), dropout_p=0.0, traced=False)


def golden(op: AttentionOp, sample: Sample, dtype: torch.dtype = torch.float64) -> Raw:
    """What is right for a sample, by the specification on the CPU; dropout is left out.

    Args:
        dtype: what to compute in; the op's own gives the error that the specification itself makes.
    """
    own = _in_dtype(sample, dtype)
    part = as_double(op) if dtype == torch.float64 else op.with_(dropout_p=0.0, traced=False)
    return reference.attention(part, own.query, own.key, own.value, own.operands)


def _in_dtype(sample: Sample, dtype: torch.dtype) -> Sample:
    wide = sample.double()
    if dtype == torch.float64:
        return wide
    # what was wider than the query (a state, slopes) stays so
    cast = {n: x.to(torch.promote_types(dtype, sample.named()[n].dtype)) if x.is_floating_point() else x
            for n, x in wide.named().items()}  # fmt: skip
    return Sample(cast.pop("query"), cast.pop("key"), cast.pop("value"), cast)


def golden_rows(op: AttentionOp, sample: Sample, rows: tuple[int, int], dtype: torch.dtype = torch.float64) -> Raw:
    """As `golden`, for query rows ``rows[0] .. rows[1]`` alone, so that an op of any size can be checked.

    Args:
        dtype: what to compute in; the op's own gives the error that the specification itself makes.
    """
    wide = _in_dtype(sample, dtype)
    start, stop = rows
    offset = reference.offset_of(op, op.Sq, op.Skv, wide.operands)
    allowed = op.mask.dense(op.Sq, op.Skv, offset, wide.operands, "cpu", rows=rows)
    allowed = allowed[(None,) * (4 - allowed.ndim)]
    tensors = {**wide.operands, "_allowed": allowed}
    for term in op.score:
        if isinstance(term, Bias) and tensors[term.bias.name].shape[-2] != 1:
            tensors[term.bias.name] = tensors[term.bias.name][..., start:stop, :]
    here: int | str | Ref = op.q_offset
    if isinstance(offset, torch.Tensor):
        tensors["_offset"], here = offset + start, Ref("_offset")
    else:
        here = offset + start
    part = as_double(op) if dtype == torch.float64 else op.with_(dropout_p=0.0, traced=False)
    block = part.with_(
        query=part.query.with_shape(op.B, op.Hq, stop - start, op.D), mask=Dense(Ref("_allowed")), q_offset=here
    )
    return reference.attention(block, wide.query[:, :, start:stop], wide.key, wide.value, tensors)
