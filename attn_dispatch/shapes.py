"""Ranks, layouts and sizes of a call: what is legal, and how it becomes ``[B, H, S, D]`` and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attn_dispatch.errors import InputError, InputTypeError
from attn_dispatch.ir import atoms
from attn_dispatch.ir.listed import listed_problem
from attn_dispatch.ir.masks import Mask
from attn_dispatch.ir.operands import Table
from attn_dispatch.ir.tensors import Ref, TensorDesc, dtype_name, short_dtype

__all__ = ["Form", "asked", "check_tensors", "checked_indices", "form_of", "mask_problem"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAYOUTS = ("bhsd", "bshd")


def asked(query: Any, key: Any, value: Any) -> str:
    """The call in one line, for errors."""

    def one(name: str, x: Any) -> str:
        if not isinstance(x, torch.Tensor):
            return f"{name} {type(x).__name__}"
        if x.is_nested:  # a strided one has no sizes
            return f"{name} nested {short_dtype(dtype_name(x.dtype))}"
        return f"{name} {list(x.shape)} {short_dtype(dtype_name(x.dtype))}"

    where = f"   {query.device}" if isinstance(query, torch.Tensor) else ""
    return "   ".join([one("q", query), one("k", key), one("v", value)]) + where


def check_tensors(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, named: Mapping[str, torch.Tensor], text: str
) -> None:
    """Types, dtypes and devices of all tensors of a call."""
    main = {"query": query, "key": key, "value": value}
    for name, x in main.items():
        if not isinstance(x, torch.Tensor):
            raise InputTypeError(f"{name} must be a tensor, got {type(x).__name__}", asked=text)
        if x.is_nested:
            problem = f"{name} is a nested tensor ({x.layout}): each of its sequences is a call of its own"
            raise InputTypeError(problem, asked=text, remedy="dispatch.attention takes it; ask about one sequence")
        if x.layout != torch.strided:
            raise InputTypeError(f"{name} has layout {x.layout}; it must be strided", asked=text)
    dtypes = [x.dtype for x in main.values()]
    if len(set(dtypes)) > 1:
        names = ", ".join(f"{n} {dtype_name(x.dtype)}" for n, x in main.items())
        raise InputTypeError(
            f"query, key and value must have one dtype, got {names}", asked=text, remedy="x.to(query.dtype)"
        )
    if query.dtype not in _FLOATS:
        remedy = "x.float()"
        raise InputTypeError(
            f"dtype {dtype_name(query.dtype)} is not a floating-point type of attention", asked=text, remedy=remedy
        )
    for name, x in named.items():
        if x.layout != torch.strided:
            raise InputTypeError(f"{name} has layout {x.layout}; it must be strided", asked=text, remedy="x.to_dense()")
    for name, x in {**main, **named}.items():
        if x.device != query.device:
            remedy = f"{name}.to({str(query.device)!r})"
            raise InputError(f"{name} is on {x.device} and query on {query.device}", asked=text, remedy=remedy)


@dataclass(frozen=True)
class Form:
    """How the caller's tensors become ``[B, H, S, D]`` and the results become the caller's shape.

    Args:
        rank: number of dimensions of the caller's query, 2 to 5.
        layout: ``"bhsd"`` or ``"bshd"``.
        lead: leading sizes of a 5-D call, which are flattened into one batch.
        batch: batch size to which broadcast batches are expanded; None when all agree.
    """

    rank: int = 4
    layout: str = "bhsd"
    lead: tuple[int, ...] = ()
    batch: int | None = None

    @property
    def is_plain(self) -> bool:
        """Nothing to do: 4-D, bhsd, equal batches."""
        return self.rank == 4 and self.layout == "bhsd" and self.batch is None

    def pack(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """The caller's tensors as ``[B, H, S, D]`` views."""
        return [self._pack(x) for x in tensors]

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        if self.layout == "bshd":
            x = x.transpose(1, 2)
        if self.rank == 2:
            x = x[None, None]
        elif self.rank == 3:
            x = x[None]
        elif self.rank == 5:
            x = x.expand(*self.lead, *x.shape[2:]).flatten(0, 1)
        return x if self.batch is None or x.shape[0] == self.batch else x.expand(self.batch, *x.shape[1:])

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        """A result (output, lse or weights; batch and heads lead) in the caller's rank and layout."""
        if self.rank == 2:
            return x[0, 0]
        if self.rank == 3:
            return x[0]
        if self.rank == 5:
            return x.unflatten(0, self.lead)
        return x

    def unpack_out(self, x: torch.Tensor) -> torch.Tensor:
        """The output ``[B, H, S, Dv]`` in the caller's rank and layout."""
        return x.transpose(1, 2) if self.layout == "bshd" else self.unpack(x)

    def pack_mask(
        self, mask: torch.Tensor, name: str, sizes: tuple[int, int, int, int], text: str
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """How a mask or bias becomes four-dimensional, once it is known to broadcast to ``[B, Hq, Sq, Skv]``.

        Rank 2 is ``[Sq, Skv]``, rank 1 ``[Skv]``, rank 4 (5 for 5-D calls) has batch and heads in front. Rank 3 with
        4-D inputs is refused unless its first size is 1: ``[B, Sq, Skv]`` and ``[H, Sq, Skv]`` look alike.
        """
        b, h, sq, skv = sizes
        shape = tuple(mask.shape)
        if self.rank >= 4 and mask.ndim == 3 and shape[0] != 1:
            remedy = f"{name}[:, None] for [B, 1, Sq, Skv], {name}[None] for [1, H, Sq, Skv]"
            problem = f"{name} {list(shape)} of rank 3 is ambiguous: its first size may mean batch or heads"
            raise InputError(problem, asked=text, remedy=remedy)
        want: tuple[int, ...] = {2: (sq, skv), 3: (h, sq, skv), 5: (*self.lead, h, sq, skv)}.get(
            self.rank, (b, h, sq, skv)
        )
        pairs = zip(reversed(shape), reversed(want), strict=False)
        if mask.ndim > len(want) or any(m not in (1, w) for m, w in pairs):
            problem = f"{name} {list(shape)} does not broadcast to {list(want)}"
            raise InputError(problem, asked=text, remedy="every size of it must be 1 or the one wanted")
        if self.rank == 5 and (mask.ndim == 5 or (mask.ndim == 4 and shape[0] != 1)):
            lead, missing = self.lead, 5 - mask.ndim

            def flat(m: torch.Tensor) -> torch.Tensor:
                m = m[(None,) * missing]
                return (m.expand(*lead, *m.shape[2:]) if m.shape[:2] != (1, 1) else m).flatten(0, 1)

            return flat
        pad = 4 - mask.ndim
        return (lambda m: m[(None,) * pad]) if pad else (lambda m: m)


def form_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: str, enable_gqa: bool | None, text: str
) -> Form:
    """Check ranks and sizes of query, key and value, and say how they become ``[B, H, S, D]``."""

    def fail(problem: str, remedy: str = "") -> None:
        raise InputError(problem, asked=text, remedy=remedy)

    rank = query.ndim
    if layout not in LAYOUTS:
        fail(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if not 2 <= rank <= 5:
        fail(f"query must have 2 to 5 dimensions, got {rank}", "[B, H, S, D]")
    if key.ndim != rank or value.ndim != rank:
        fail(f"query, key and value must have the same number of dimensions, got {rank}, {key.ndim}, {value.ndim}")
    if layout == "bshd" and rank != 4:
        fail(f"layout='bshd' means 4-D inputs [B, S, H, D], got {rank}-D")
    h, s = (-2, -3) if layout == "bshd" else (-3, -2)
    if query.shape[-1] != key.shape[-1]:
        fail(f"query head_dim {query.shape[-1]} != key head_dim {key.shape[-1]}: the last sizes must be equal")
    if key.shape[s] != value.shape[s]:
        fail(
            f"key length {key.shape[s]} != value length {value.shape[s]}: sizes of the sequence dimension must be equal"
        )
    if rank > 2:
        _check_heads(query.shape[h], key.shape[h], value.shape[h], enable_gqa, fail)
    batches = [tuple(x.shape[: max(rank - 3, 0)]) for x in (query, key, value)]
    try:
        lead = tuple(torch.broadcast_shapes(*batches))
    except RuntimeError:
        fail(f"batch sizes {', '.join(str(list(b)) for b in batches)} of query, key and value do not broadcast")
    if rank == 5:
        return Form(5, layout, lead)
    same = batches[0] == batches[1] == batches[2]
    return Form(rank, layout, (), None if same else lead[0])


def _check_heads(hq: int, hk: int, hv: int, enable_gqa: bool | None, fail: Callable[..., None]) -> None:
    if hk != hv:
        fail(f"key has {hk} heads and value {hv}: kv heads must be equal", "repeat the smaller with repeat_interleave")
    if hq == hk:
        return
    if hk == 0 or hq % hk:
        fail(f"query heads {hq} are not a multiple of kv heads {hk}")
    if enable_gqa is False:
        problem = f"query has {hq} heads and key {hk}, and enable_gqa is False"
        fail(problem, "enable_gqa=True for grouped-query attention (None accepts both)")


def mask_problem(atom: Mask, operands: Mapping[str, TensorDesc], b: int, hq: int, sq: int, skv: int) -> str:
    """What is wrong with the tensor of a mask's atom for these sizes; empty when nothing is."""

    def shape(operand: Any) -> tuple[int, ...] | None:
        if isinstance(operand, Table):  # an atom that was made from lists
            return operand.shape
        return operands[operand.name].shape if isinstance(operand, Ref) else None

    def wrong(got: tuple[int, ...] | None, *allowed: tuple[int, ...]) -> str:
        if got is None or got in allowed:
            return ""
        return f"its tensor has shape {list(got)}, must be {' or '.join(str(list(a)) for a in allowed)}"

    if isinstance(atom, atoms.Columns):
        return wrong(shape(atom.kept), (skv,), (b, skv), (1, skv))
    if isinstance(atom, atoms.Rows):
        return wrong(shape(atom.kept), (sq,), (b, sq), (1, sq))
    if isinstance(atom, (atoms.KeyLengths, atoms.QueryLengths)):
        return wrong(shape(atom.lengths), (b,), (1,))
    if isinstance(atom, atoms.Segments):
        for name, got, length in (("queries", shape(atom.queries), sq), ("keys", shape(atom.keys), skv)):
            if got is not None and got[-1] != length:
                return f"its segments add up to {got[-1]} {name}, there are {length}"
            if problem := wrong(got, (length,), (b, length), (1, length)):
                return problem
    if isinstance(atom, atoms.Selected):
        got = shape(atom.indices)
        if got is not None and (len(got) not in (3, 4) or got[0] not in (1, b) or got[-2] != sq):
            return f"its tensor has shape {list(got)}, must be [B, Sq, K] or [B, Hq, Sq, K] with B {b}, Sq {sq}"
        if got is not None and len(got) == 4 and got[1] not in (1, hq):
            return f"its tensor has shape {list(got)}, must be [B, Hq, Sq, K] with Hq {hq} or 1"
    if isinstance(atom, atoms.Dense):
        got = shape(atom.mask)
        pairs = zip(reversed(got or ()), (skv, sq, hq, b), strict=False)
        if got is not None and (len(got) > 4 or any(m not in (1, w) for m, w in pairs)):
            return f"its tensor {list(got)} does not broadcast to {[b, hq, sq, skv]}"
    if isinstance(atom, atoms.BlockTable):
        got = shape(atom.table)
        if got is not None and (len(got) not in (2, 3) or (len(got) == 3 and got[0] not in (1, hq))):
            return f"its table has shape {list(got)}, must be [nq, nk] or [H, nq, nk] with H {hq}"
        if got is not None and got[-1] * atom.block < skv:
            return f"its table covers {got[-1]} x {atom.block} = {got[-1] * atom.block} keys, there are {skv}"
        if got is not None and sq == skv and got[-2] * atom.block < sq:
            return f"its table covers {got[-2]} x {atom.block} = {got[-2] * atom.block} query rows, there are {sq}"
    return ""


def checked_indices(atom: Mask, skv: int, text: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A step that hands on the indices of a `Selected` mask, after a look at every call: wrong ones would read
    somewhere else. Only on the CPU and only with values at hand; elsewhere looking would wait for the device."""

    def check(indices: torch.Tensor) -> torch.Tensor:
        if indices.dtype not in (torch.int32, torch.int64):
            problem = f"attn_mask {atom}: indices have dtype {dtype_name(indices.dtype)}; they must be int32 or int64"
            raise InputTypeError(problem, asked=text)
        plain = type(indices) in (torch.Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
        plain = plain and not torch._C._functorch.is_functorch_wrapped_tensor(indices)
        problem = listed_problem(indices, skv) if plain and indices.device.type == "cpu" else ""
        if problem:
            raise InputError(f"attn_mask {atom}: {problem}", asked=text)
        return indices

    return check
