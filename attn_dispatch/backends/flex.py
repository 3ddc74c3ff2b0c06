"""``flex``: torch's flex_attention, compiled; the block mask from the mask algebra, the score terms as a score_mod.

Compiling takes 5 to 30 seconds for each new shape, so the heuristic never chooses it: it is for pins, for measured
decisions, and for `dispatch.use`. What the compiled CPU kernel of torch 2.13 lacks, by running it: gradients, the
log-sum-exp, float64, sizes of 0 (they end the process), and key lengths of 8 modulo 16, for which rows of the last
head come out as 0. The last is avoided here: keys are padded to whole tiles, and the pads are masked.
"""

from __future__ import annotations

import shutil
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from attn_dispatch import reference
from attn_dispatch.backend import Backend, Cost, Executable, Operands, Raw, dense_cost
from attn_dispatch.capability import ALL_FEATURES, Capability, Limit, Reason
from attn_dispatch.ir import atoms
from attn_dispatch.ir.masks import EMPTY, FULL, PARTIAL, And, Mask, Not, Or
from attn_dispatch.ir.operands import Operand, resolve
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias, SoftCap
from attn_dispatch.ir.tensors import Ref

__all__ = ["Flex"]

_TILE = 128
_COMPILE_S = 20.0
_NEVER = {"weights", "traced", "empty", "q_offset:tensor", "weight:Linear", "decay", "dropout", "sinks", "higher_order"}
_NEVER |= {"grad", "grad:operands", "grad:lse", "mask:Selected"}
_ONES = tuple(Limit(name, minimum=1) for name in ("B", "Hq", "Sq", "Skv", "D", "Dv"))

# fn(b, h, q, kv) on scalar index tensors, as flex_attention calls it
MaskMod = Callable[[Any, Any, Any, Any], Any]


class Flex(Backend):
    """``torch.nn.attention.flex_attention`` under ``torch.compile``."""

    name = "flex"
    tested = "cpu"
    compile_s = _COMPILE_S
    start_s = _COMPILE_S
    hints = {  # noqa: RUF012
        "grad": "bands, gather_columns, gather_blocks and residue_classes have gradients before any backend",
        "lse": 'backend="blocked"',
        "weights": 'backend="eager"',
        "sinks": "apply_sinks > blocked",
        "dtype": 'backend="blocked"',
    }
    capabilities = (
        Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({"float16", "bfloat16", "float32"}),
            features=ALL_FEATURES - _NEVER - {"lse"},
            limits=_ONES,
            notes="compiles for each new shape; forward only; needs a C++ compiler; inputs with NaN run in eager",
        ),
        Capability(
            devices=frozenset({"cuda"}),
            dtypes=frozenset({"float16", "bfloat16", "float32"}),
            features=ALL_FEATURES - _NEVER,
            limits=(*_ONES, Limit("D", minimum=16), Limit("Dv", minimum=16)),
            notes="untested here; compiles for each new shape; forward only",
        ),
    )

    def extra_reasons(self, op: AttentionOp) -> list[Reason]:
        if op.device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            text = "not compiled here: no C++ compiler found"
            return [Reason("version", "compiler", None, "g++ or clang++", "install g++", text)]
        return []

    def compile(self, op: AttentionOp) -> Executable:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(_own_code(flex_attention), dynamic=False)

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
            return _run(op, compiled, q, k, v, t)

        _warm_up(op, run)
        return Executable(run)

    def estimate(self, op: AttentionOp) -> Cost:
        # compiling stands in the launches, so that no estimate of a run is ever below it
        cost = dense_cost(op)
        return Cost(cost.flops, cost.bytes, 1e5 * _COMPILE_S)


def _own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a code object of its own: torch counts recompilations by code object, and gives up after 8."""
    code = function.__code__.replace()
    own = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _warm_up(op: AttentionOp, run: Callable[..., Any]) -> None:
    """Compile now and not in the first run."""

    def zeros(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=op.device)

    tensors = {name: zeros(desc.shape, desc.dtype) for name, desc in op.operands}
    with torch.no_grad():
        run(*(zeros(desc.shape, desc.dtype) for desc in (op.query, op.key, op.value)), tensors)


def _run(
    op: AttentionOp, compiled: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands
) -> Any:
    sq, skv = q.shape[2], k.shape[2]
    if op.device == "cpu" and not all(reference.finite(x) for x in (q, k, v)):
        raw = reference.attention(op, q, k, v, t)  # the kernel's maximum passes over NaN: a NaN row came out finite
        return raw if op.outputs.lse else raw.out
    offset = reference.offset_of(op, sq, skv, t)
    assert isinstance(offset, int)
    missing = -skv % _TILE
    if missing:
        k, v = F.pad(k, (0, 0, 0, missing)), F.pad(v, (0, 0, 0, missing))
        over_keys = _names_over_keys(op)
        t = {name: F.pad(x, (0, missing)) if name in over_keys and x.shape[-1] == skv else x for name, x in t.items()}
    mods = _Mods(op, t, offset, skv, q.device)
    masked = missing > 0 or not isinstance(op.mask, atoms.Full)
    arguments: dict[str, Any] = {"scale": op.effective_scale, "enable_gqa": op.groups != 1}
    arguments["score_mod"] = mods.score if op.score else None
    arguments["block_mask"] = mods.block_mask(sq, skv + missing) if masked else None
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if not op.outputs.lse:
        return compiled(q, k, v, **arguments)
    out, lse = compiled(q, k, v, **arguments, return_lse=True)
    return Raw(out, lse)


def _names_over_keys(op: AttentionOp) -> set[str]:
    """Operands with an element for each key, which must be padded with the keys so that no index runs beyond them."""
    held = [a.kept for a in op.mask.atoms() if isinstance(a, atoms.Columns)]
    held += [a.keys for a in op.mask.atoms() if isinstance(a, atoms.Segments)]
    held += [a.mask for a in op.mask.atoms() if isinstance(a, atoms.Dense)]
    held += [term.bias for term in op.score if isinstance(term, Bias)]
    return {operand.name for operand in held if isinstance(operand, Ref)}


class _Mods:
    """mask_mod, score_mod and block mask of one call. Numbers that change with the lengths are tensors: a number in
    a traced function would be part of the compiled code."""

    def __init__(self, op: AttentionOp, t: Operands, offset: int, skv: int, device: torch.device) -> None:
        self.op, self.t, self.offset, self.skv, self.device = op, t, offset, skv, device
        self.at = torch.full((), offset, device=device)  # filled there: a copy from the host would wait for the device
        self.limit = torch.full((), skv, device=device)
        inner, limit = self._mask_mod(op.mask), self.limit
        self.mask: MaskMod = lambda b, h, q, kv: inner(b, h, q, kv) & (kv < limit)
        self.score = self._score_mod()

    def block_mask(self, sq: int, skv: int) -> Any:
        """The mask's tiles as torch's BlockMask."""
        from torch.nn.attention.flex_attention import BlockMask

        states = self.op.mask.tiles(_TILE, _TILE, sq, self.skv, self.offset, self.t)
        if self.skv < skv:
            states = states.clone()
            states[..., -1] = torch.where(states[..., -1] == FULL, PARTIAL, states[..., -1])
        states = states[(None,) * (4 - states.ndim)].to(self.device)
        lists = [_listed(states == state) for state in (PARTIAL, FULL)]
        assert EMPTY not in (PARTIAL, FULL)
        return BlockMask.from_kv_blocks(
            *lists[0], *lists[1], BLOCK_SIZE=_TILE, mask_mod=self.mask, seq_lengths=(sq, skv)
        )

    # --- score -------------------------------------------------------------------------------------------------------

    def _score_mod(self) -> Callable[..., Any]:
        steps = [self._term(term) for term in self.op.score]

        def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            for step in steps:
                s = step(s, b, h, q, kv)
            return s

        return score

    def _term(self, term: Any) -> Callable[..., Any]:
        if isinstance(term, SoftCap):
            cap = term.cap
            return lambda s, b, h, q, kv: cap * torch.tanh(s / cap)
        if isinstance(term, Alibi):
            slopes, at = self.t[term.slopes.name].float(), self.at
            return lambda s, b, h, q, kv: s - slopes[h] * (q + at - kv).abs()
        assert isinstance(term, Bias)
        at_pair = _indexed(self.t[term.bias.name].float())
        return lambda s, b, h, q, kv: s + at_pair(b, h, q, kv)

    # --- mask --------------------------------------------------------------------------------------------------------

    def _mask_mod(self, mask: Mask) -> MaskMod:
        if isinstance(mask, (And, Or)):
            parts = [self._mask_mod(arg) for arg in mask.args]
            both = isinstance(mask, And)

            def combined(b: Any, h: Any, q: Any, kv: Any) -> Any:
                out = parts[0](b, h, q, kv)
                for part in parts[1:]:
                    out = out & part(b, h, q, kv) if both else out | part(b, h, q, kv)
                return out

            return combined
        if isinstance(mask, Not):
            inner = self._mask_mod(mask.arg)
            return lambda b, h, q, kv: ~inner(b, h, q, kv)
        return self._atom(mask)

    def _atom(self, mask: Mask) -> MaskMod:
        at = self.at
        if isinstance(mask, atoms.Full):
            return lambda b, h, q, kv: kv >= 0
        if isinstance(mask, atoms.Causal):
            return lambda b, h, q, kv: kv <= q + at
        if isinstance(mask, atoms.Window):
            left = mask.left if mask.left is not None else 1 << 30
            right = mask.right if mask.right is not None else 1 << 30
            return lambda b, h, q, kv: (kv >= q + at - left) & (kv <= q + at + right)
        if isinstance(mask, atoms.Stride):
            step = mask.step
            return lambda b, h, q, kv: (q + at - kv) % step == 0
        if isinstance(mask, atoms.SameBlock):
            size = mask.size
            return lambda b, h, q, kv: (q + at) // size == kv // size
        if isinstance(mask, atoms.KeyRange):
            start, stop, period = mask.start, mask.stop, mask.period
            if period is None:
                return lambda b, h, q, kv: (kv >= start) & (kv < stop)
            return lambda b, h, q, kv: (kv % period >= start) & (kv % period < stop)
        return self._held_atom(mask)

    def _held_atom(self, mask: Mask) -> MaskMod:
        if isinstance(mask, atoms.Columns):
            kept = self._per_batch(mask.kept).bool()
            return lambda b, h, q, kv: kept[_row(kept, b), kv]
        if isinstance(mask, atoms.Rows):
            rows = self._per_batch(mask.kept).bool()
            return lambda b, h, q, kv: rows[_row(rows, b), q]
        if isinstance(mask, (atoms.KeyLengths, atoms.QueryLengths)):
            lengths = self._tensor(mask.lengths).reshape(-1)
            of_keys = isinstance(mask, atoms.KeyLengths)
            return lambda b, h, q, kv: (kv if of_keys else q) < lengths[_row(lengths, b)]
        if isinstance(mask, atoms.Segments):
            own, other = self._per_batch(mask.queries), self._per_batch(mask.keys)
            return lambda b, h, q, kv: own[_row(own, b), q] == other[_row(other, b), kv]
        if isinstance(mask, atoms.BlockTable):
            return self._table(mask)
        assert isinstance(mask, atoms.Dense), mask
        return _indexed(self._tensor(mask.mask).bool())

    def _table(self, mask: atoms.BlockTable) -> MaskMod:
        table = self._tensor(mask.table).bool()
        table = table if table.ndim == 3 else table[None]
        # one row and column of False beyond the table, and one row before it, instead of a comparison
        table = F.pad(table, (0, 1, 1, 1), value=False)
        block, at, last = mask.block, self.at, table.shape[1] - 1
        columns = table.shape[2] - 1

        def allowed(b: Any, h: Any, q: Any, kv: Any) -> Any:
            row = torch.clamp((q + at) // block + 1, 0, last)
            return table[_row(table, h), row, torch.clamp(kv // block, 0, columns)]

        return allowed

    def _tensor(self, operand: Operand) -> torch.Tensor:
        return resolve(operand, self.t, self.device)

    def _per_batch(self, operand: Operand) -> torch.Tensor:
        x = self._tensor(operand)
        return x if x.ndim == 2 else x[None]


def _row(x: torch.Tensor, index: Any) -> Any:
    """The index into the first dimension, which may stand for all."""
    return index if x.shape[0] > 1 else index * 0


def _indexed(x: torch.Tensor) -> MaskMod:
    """A tensor that broadcasts to ``[B, H, Sq, Skv]`` as a function of the pair."""
    x = x[(None,) * (4 - x.ndim)]
    sizes = x.shape

    def at_pair(b: Any, h: Any, q: Any, kv: Any) -> Any:
        b, h, q, kv = (i if size > 1 else i * 0 for i, size in zip((b, h, q, kv), sizes, strict=True))
        return x[b, h, q, kv]

    return at_pair


def _listed(wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts ``[.., nq]`` and the key blocks ``[.., nq, nk]`` that are wanted, those first."""
    order = wanted.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return wanted.sum(-1).to(torch.int32), order.to(torch.int32).contiguous()
