"""What an op costs by its shape and mask alone: FLOPs, bytes, memory, path length, sequential steps, and the O(...).

Nothing is measured and no tensor is looked at: a mask tensor counts as full where it only restricts (a conjunction) and
as nothing where it only adds (a union). What a candidate should take on this machine is the heuristic's business.

``python -m attn_dispatch.complexity`` prints the page docs/complexity.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from attn_dispatch.ir.atoms import (
    BlockTable,
    Causal,
    Columns,
    Full,
    KeyRange,
    Rows,
    SameBlock,
    Selected,
    Stride,
    Window,
)
from attn_dispatch.ir.masks import EMPTY, And, Mask, Not, Or
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.select_op import SelectOp
from attn_dispatch.ir.tensors import Ref, TensorDesc
from attn_dispatch.ir.weights import Linear

__all__ = ["Complexity", "allowed_pairs", "complexity", "layer", "page", "path_length"]

_CHUNK = 64  # rows of a chunk of the linear family
_SAMPLED_ROWS = 256
_NODES = 256  # size of the graph in which paths are followed; longer sequences go block by block


@dataclass(frozen=True)
class Complexity:
    """The cost of one op, or of one layer of another kind.

    Args:
        flops: floating-point operations of the matrix products, two to a multiply-add, forward only.
        bytes: each tensor read or written once, which no implementation can undercut.
        memory_bytes: what must be kept to go on by one token: the keys and values that later queries may attend, or
            the state.
        max_path_length: layers until information from one position can have reached another, for the farthest pair that
            is ever connected; None where that depends on the data.
        sequential_steps: steps that cannot run side by side.
        per_layer: growth of the FLOPs in the sequence length n and the head size d; r is the window, l the block or
            stride, w the keys of a row of a block table, k the selected keys, g the global tokens.
    """

    flops: float
    bytes: float
    memory_bytes: float
    max_path_length: int | None
    sequential_steps: int
    per_layer: str

    def __str__(self) -> str:
        path = "depends on the data" if self.max_path_length is None else str(self.max_path_length)
        words = [f"{self.per_layer}", f"{_short(self.flops)}FLOP", f"{_short(self.bytes)}B moved"]
        words += [f"{_short(self.memory_bytes)}B kept", f"path {path}", f"{self.sequential_steps} sequential"]
        return "   ".join(words)


def complexity(op: AttentionOp | SelectOp) -> Complexity:
    """The cost of an op.

    Args:
        op: an attention, or the selection of DSA.

    Example:
        >>> q = TensorDesc((1, 8, 1024, 64), "float32")
        >>> print(complexity(AttentionOp(q, q, q)))
        O(n^2 d)   2.15 GFLOP   8.39 MB moved   4.19 MB kept   path 1   1 sequential
        >>> complexity(AttentionOp(q, q, q, mask=Causal(), weight=Linear("elu1"))).per_layer
        'O(n d^2)'
    """
    if not isinstance(op, AttentionOp):
        return _select(op)
    rows = op.query.itemsize * op.B * op.Hq * op.Sq * (op.D + op.Dv)
    if isinstance(op.weight, Linear):
        return _linear(op, op.weight, rows)
    pairs = allowed_pairs(op)
    kept = min(op.Skv, _kept_keys(op.mask, op.Skv))
    read = _read_keys(op)
    row_bytes = op.key.itemsize * op.B * op.Hkv * (op.D + op.Dv)
    growth = _growth(op.mask)
    return Complexity(
        flops=2.0 * op.B * op.Hq * pairs * (op.D + op.Dv),
        bytes=float(rows + read * row_bytes),
        memory_bytes=float(kept * row_bytes),
        max_path_length=path_length(op),
        sequential_steps=1,
        per_layer=_big_o(growth, "d", op.Sq),
    )


def _linear(op: AttentionOp, weight: Linear, rows: float) -> Complexity:
    heads = op.Hkv if weight.decay is None else op.Hq
    state = op.query.itemsize if op.dtype == "float64" else 4
    kept = state * op.B * heads * (op.D * op.Dv + (op.D if weight.normalizer_eps is not None else 0))
    keys = op.key.itemsize * op.B * op.Hkv * op.Skv * (op.D + op.Dv)
    chunk = min(_CHUNK, op.Sq) if op.mask.positional else 0
    # a chunk's own pairs, its state, and the state read by each row
    flops = 2.0 * op.B * op.Hq * (op.Sq * chunk * (op.D + op.Dv) + (op.Sq + op.Skv) * op.D * op.Dv)
    moves = (weight.state is not None) + op.outputs.state
    steps = -(-op.Sq // chunk) if chunk else 1
    text = "O(n d^2)" if op.Sq > 1 or op.Skv > 1 else "O(d^2)"
    return Complexity(flops, float(rows + keys + moves * kept), float(kept), 1, steps, text)


def _select(op: SelectOp) -> Complexity:
    b, skv, di = op.key.shape[0], op.key.shape[-2], op.key.shape[-1]
    hi, sq = op.query.shape[1:3] if len(op.query.shape) == 4 else (1, op.query.shape[-2])
    flops = 2.0 * b * sq * skv * hi * (di + 1)
    keys = op.key.itemsize * b * skv * di
    moved = keys + op.query.itemsize * b * sq * hi * (di + 1) + 8 * b * sq * op.top_k
    return Complexity(flops, float(moved), float(keys), 1, 1, "O(n^2 d)" if sq > 1 else "O(n d)")


# --- pairs -----------------------------------------------------------------------------------------------------------


def allowed_pairs(op: AttentionOp) -> float:
    """Number of (query, key) pairs of one head of one sequence that the mask allows.

    Exact for causal masks, windows and blocks; otherwise counted in 256 evenly spaced rows.

    Example:
        >>> q = TensorDesc((1, 1, 1000, 8), "float32")
        >>> allowed_pairs(AttentionOp(q, q, q, mask=Causal()))
        500500.0
    """
    selected = [part for part in _conjunction(op.mask) if isinstance(part, Selected)]
    offset = op.static_offset() or 0
    mask = _known(op.mask, restricts=True)
    if not op.Sq or not op.Skv:
        return 0.0
    ends = _intervals(mask, torch.arange(op.Sq) + offset, op.Skv)
    if ends is not None:
        per_row = (ends[1] - ends[0]).clamp(min=0).double()
    else:
        rows = torch.linspace(0, op.Sq - 1, min(op.Sq, _SAMPLED_ROWS)).round().long().tolist()
        counts = []
        for row in rows:
            allowed = mask.dense(op.Sq, op.Skv, offset, {}, rows=(row, row + 1))
            counts.append(float(allowed.double().sum(-1).mean()))
        per_row = torch.tensor(counts, dtype=torch.float64)
    if selected and isinstance(selected[0].indices, Ref):
        per_row = per_row.clamp(max=op.operand(selected[0].indices.name).shape[-1])
    return float(per_row.mean() * op.Sq)


def _conjunction(mask: Mask) -> tuple[Mask, ...]:
    return mask.args if isinstance(mask, And) else (mask,)


def _known(mask: Mask, restricts: bool) -> Mask:
    """The mask without what only a tensor knows: everything where it restricts, nothing where it adds."""
    if isinstance(mask, And):
        return And.of(*(_known(arg, True) for arg in mask.args))
    if isinstance(mask, Or):
        return Or.of(*(_known(arg, False) for arg in mask.args))
    if isinstance(mask, Not):
        return ~_known(mask.arg, not restricts)
    return (Full() if restricts else ~Full()) if mask.refs() else mask


def _intervals(mask: Mask, at: torch.Tensor, skv: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """First and one past the last key of each row, when the mask leaves one stretch of keys; else None."""
    lo, hi = torch.zeros_like(at), torch.full_like(at, skv)
    for part in _conjunction(mask):
        if isinstance(part, Causal):
            hi = torch.minimum(hi, at + 1)
        elif isinstance(part, Window):
            lo = lo if part.left is None else torch.maximum(lo, at - part.left)
            hi = hi if part.right is None else torch.minimum(hi, at + part.right + 1)
        elif isinstance(part, KeyRange) and part.period is None:
            lo, hi = lo.clamp(min=part.start), hi.clamp(max=part.stop)
        elif isinstance(part, SameBlock):
            block = torch.div(at, part.size, rounding_mode="floor") * part.size
            lo, hi = torch.maximum(lo, block), torch.minimum(hi, block + part.size)
        elif not isinstance(part, Full):
            return None
    return lo, hi


def _read_keys(op: AttentionOp) -> int:
    lo, hi = _known(op.mask, True).key_interval((0, op.Sq), op.Skv, op.static_offset() or 0)
    return hi - lo


def _kept_keys(mask: Mask, skv: int) -> int:
    """Keys that a later query may attend: those of the last query's window or block, else all."""
    left = [part.left for part in _conjunction(mask) if isinstance(part, Window) and part.left is not None]
    size = [part.size for part in _conjunction(mask) if isinstance(part, SameBlock)]
    return min([skv, *(reach + 1 for reach in left), *size])


# --- growth and paths ------------------------------------------------------------------------------------------------

_RANK = ("g", "k", "r", "l", "w", "n / l", "n")


def _growth(mask: Mask) -> str:
    """How the keys per query grow: ``n`` all, ``r`` a window, ``l`` a block ... ``r + g`` for a union."""
    if isinstance(mask, Or):
        found = {symbol for arg in mask.args for symbol in _added(arg).split(" + ")}
        return "n" if "n" in found else " + ".join(sorted(found, key=_RANK.index))
    parts = _conjunction(mask)
    symbols = ["n"]
    for part in parts:
        if isinstance(part, Or):
            symbols.append(_growth(part))
        elif isinstance(part, Window):
            sides = {part.left is not None, part.right is not None or any(isinstance(p, Causal) for p in parts)}
            symbols.append("r" if sides == {True} else "n")
        else:
            kinds = {SameBlock: "l", Stride: "n / l", BlockTable: "w", Selected: "k"}
            symbols.append(next((symbol for kind, symbol in kinds.items() if isinstance(part, kind)), "n"))
            if isinstance(part, KeyRange):
                symbols.append("g" if part.period is None else "n / l")
    return min(symbols, key=lambda symbol: max(_RANK.index(s) for s in symbol.split(" + ")))


def _added(arg: Mask) -> str:
    return "g" if isinstance(arg, (Columns, Rows)) else _growth(arg)


def _big_o(growth: str, size: str, sq: int) -> str:
    """``O(growth n d)``, without n for a single query."""
    rows = "" if sq == 1 else "n "
    if growth == "n":
        return f"O(n {size})" if sq == 1 else f"O(n^2 {size})"
    if growth == "n / l":
        return f"O(n {size} / l)" if sq == 1 else f"O(n^2 {size} / l)"
    return f"O(({growth}) {rows}{size})" if " " in growth else f"O({growth} {rows}{size})"


def path_length(op: AttentionOp) -> int | None:
    """Layers until what stands at one position can have reached every position that it ever reaches.

    Example:
        >>> q = TensorDesc((1, 1, 1025, 8), "float32")
        >>> path_length(AttentionOp(q, q, q, mask=Causal() & Window(64, None)))
        16
    """
    parts = _conjunction(op.mask)
    if any(isinstance(part, Selected) for part in parts):
        return None
    n = op.Skv
    if isinstance(op.weight, Linear) or op.Sq != n or n < 2:
        return 1
    windows = [part for part in parts if isinstance(part, Window)]
    if windows and not any(isinstance(part, (Or, Not, BlockTable, SameBlock)) for part in parts):
        is_causal = any(isinstance(part, Causal) for part in parts)
        sides = [[w.left for w in windows], [0] if is_causal else [w.right for w in windows]]
        step = max([part.step for part in parts if isinstance(part, Stride)], default=1)
        span = (n - 1) // step * step
        reaches = [min(span if end is None else end for end in side) // step * step for side in sides]
        return max([-(-span // reach) for reach in reaches if reach], default=1)  # each direction by its own side
    union = next((part for part in parts if isinstance(part, Or)), None)
    if union is not None and any(isinstance(arg, (Columns, Rows)) and arg.refs() for arg in union.args):
        return 2  # over a global token, of which there is at least one
    return _hops(_known(op.mask, True), n)


def _hops(mask: Mask, n: int) -> int:
    """The longest of all shortest paths in the graph of the mask, by blocks where the sequence is long."""
    block = -(-n // _NODES)
    seen = (mask.tiles(block, block, n, n) != EMPTY) if block > 1 else mask.dense(n, n)
    step = seen.reshape(-1, *seen.shape[-2:])[0].float()
    reached, hops = step > 0, 1
    while hops < n:
        further = reached | ((reached.float() @ step) > 0)
        if bool((further == reached).all()):
            break
        reached, hops = further, hops + 1
    return hops


# --- layers of other kinds, and the page -----------------------------------------------------------------------------

KINDS = ("self-attention", "recurrent", "convolutional", "self-attention (restricted)")


def layer(kind: str, n: int, d: int, *, kernel: int = 3, reach: int = 64) -> Complexity:
    """A layer of width d over n positions, as the table of Vaswani et al. 2017 compares them, float32, one head.

    Args:
        kind: of `KINDS`; the convolution is dilated, which gives it its short paths.
        kernel: width k of the convolution. reach: keys to one side that restricted self-attention sees.

    Raises:
        ValueError: a kind that there is not.
    """
    x = TensorDesc((1, 1, n, d), "float32")
    if kind == "self-attention":
        return complexity(AttentionOp(x, x, x))
    if kind == "self-attention (restricted)":
        return complexity(AttentionOp(x, x, x, mask=Window(reach, reach)))
    moved = 8.0 * n * d
    if kind == "recurrent":  # a matrix for the input, one for the state
        return Complexity(4.0 * n * d * d, moved + 8.0 * d * d, 4.0 * d, n - 1, n, "O(n d^2)")
    if kind == "convolutional":
        path = max(1, math.ceil(round(math.log(max(n, 2), kernel), 9)))
        weights = 4.0 * kernel * d * d
        return Complexity(2.0 * kernel * n * d * d, moved + weights, 4.0 * kernel * d, path, 1, "O(k n d^2)")
    raise ValueError(f"unknown kind {kind!r}; there are {', '.join(KINDS)}")


_CLASSIC = {  # the O(...) of path length and of sequential steps
    "self-attention": ("O(1)", "O(1)"),
    "recurrent": ("O(n)", "O(n)"),
    "convolutional": ("O(log_k n)", "O(1)"),
    "self-attention (restricted)": ("O(n / r)", "O(1)"),
}
_N, _D, _K, _R = 4096, 64, 3, 64


def _ops() -> dict[str, AttentionOp | SelectOp]:
    x = TensorDesc((1, 8, _N, _D), "float32")
    step = TensorDesc((1, 8, 1, _D), "float32")
    chosen = TensorDesc((1, _N, 512), "int64")
    decay = (("decay", TensorDesc((8,), "float32")),)
    retention = Linear("identity", Ref("decay"))
    state = ("state", TensorDesc((1, 8, _D, _D), "float32"))
    running = Linear("identity", Ref("decay"), None, Ref("state"))
    tokens = (("globals", TensorDesc((_N,), "bool")),)
    is_global = Columns(Ref("globals")) | Rows(Ref("globals"))
    selected = Selected(Ref("chosen"))
    index = (x.with_shape(1, 4, _N, _D), x.with_shape(1, _N, _D), x.with_shape(1, _N, 4))
    return {
        "softmax": AttentionOp(x, x, x),
        "softmax, causal": AttentionOp(x, x, x, mask=Causal()),
        "softmax, one new token": AttentionOp(step, x, x),
        "causal window of 256": AttentionOp(x, x, x, mask=Causal() & Window(255, None)),
        "strided, l = 64": AttentionOp(x, x, x, mask=Causal() & Stride(64)),
        "fixed, l = 64, c = 8": AttentionOp(x, x, x, mask=Causal() & (SameBlock(64) | KeyRange(56, 64, 64))),
        "chunks of 512": AttentionOp(x, x, x, mask=Causal() & SameBlock(512)),
        "Longformer, 256 to each side": AttentionOp(x, x, x, mask=Window(256, 256) | is_global, operands=tokens),
        "DSA: indexer, 4 heads": SelectOp(*index, 512),
        "DSA: attention to 512 keys": AttentionOp(x, x, x, mask=Causal() & selected, operands=(("chosen", chosen),)),
        "linear attention": AttentionOp(x, x, x, weight=Linear("elu1", None, 1e-6)),
        "linear attention, causal": AttentionOp(x, x, x, mask=Causal(), weight=Linear("elu1", None, 1e-6)),
        "retention": AttentionOp(x, x, x, mask=Causal(), weight=retention, operands=decay),
        "retention, one new token": AttentionOp(step, step, step, weight=running, operands=(*decay, state)),
    }


def page() -> str:
    """The page docs/complexity.md."""
    lines = [
        "# What attention costs",
        "",
        "Written by `python -m attn_dispatch.complexity`; do not edit it by hand. Shapes and masks decide, nothing is",
        "measured; `attn_dispatch.complexity.complexity(op)` gives the same for any op.",
        "",
        "## Kinds of layers",
        "",
        "Width d, n positions, kernel k, r keys to each side (Vaswani et al. 2017, table 1); the numbers are for",
        f"n = {_N}, d = {_D}, k = {_K}, r = {_R}, float32.",
        "",
        "| layer | per layer | sequential | max path | GFLOP | steps | path |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        cost = layer(kind, _N, _D, kernel=_K, reach=_R)
        path, steps = _CLASSIC[kind]
        numbers = f"{cost.flops / 1e9:.3g} | {cost.sequential_steps} | {cost.max_path_length}"
        lines.append(f"| {kind} | {cost.per_layer} | {steps} | {path} | {numbers} |")
    lines += [
        "",
        "## Ops",
        "",
        f"8 heads of {_D}, n = {_N}, float32. Moved: every tensor once. Kept: what the next token needs. Steps: what",
        f"cannot run side by side; the linear family goes in chunks of {_CHUNK}. Path: layers between the farthest",
        "positions that are ever connected.",
        "",
        "| op | per layer | GFLOP | MB moved | MB kept | steps | path |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, op in _ops().items():
        cost = complexity(op)
        sizes = f"{cost.flops / 1e9:.3g} | {cost.bytes / 1e6:.3g} | {cost.memory_bytes / 1e6:.3g}"
        path = "data" if cost.max_path_length is None else str(cost.max_path_length)
        lines.append(f"| {name} | {cost.per_layer} | {sizes} | {cost.sequential_steps} | {path} |")
    return "\n".join(lines) + "\n"


def _short(number: float) -> str:
    """``2147483648`` -> ``"2.15 G"``."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 1000 or unit == "T":
            return f"{number:.3g} {unit}"
        number /= 1000
    raise AssertionError("the last unit takes what is left")


if __name__ == "__main__":
    print(page(), end="")
