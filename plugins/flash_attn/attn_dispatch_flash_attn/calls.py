"""From an op to a call of FlashAttention: the arguments of each line, and its results in our terms.

Only what an op has is passed, so that a version without an argument is never asked for it. What comes back differs:

1. An empty row has lse +inf in line 2 and -inf in 3 and 4; a row of NaN has ±inf in 2 and 3. Here: -inf and NaN.
2. Line 4 always returns ``(out, lse)``; line 3 did so before it took ``return_attn_probs``.
3. Packed sequences have lse ``[H, total]``.

Positions count from the last key in all of them. Where nothing after a query's own position is attended, keys behind
the last query's position are cut off, so that another ``q_offset`` is served too (torch's ``is_causal`` of more keys
than queries).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from attn_dispatch.plugin import (
    END,
    Alibi,
    And,
    AttentionOp,
    BackendError,
    Causal,
    Full,
    KeyLengths,
    Mask,
    Operands,
    Raw,
    Ref,
    Run,
    Segments,
    SoftCap,
    Softmax,
    Window,
)

__all__ = ["arguments", "compile_cache", "compile_dense", "compile_documents", "key_end", "looks_back", "mask_parts"]

Function = Callable[..., Any]


def mask_parts(mask: Mask) -> tuple[Any, ...]:
    """The parts of a conjunction, without Full."""
    parts = mask.args if isinstance(mask, And) else (mask,)
    return tuple(part for part in parts if not isinstance(part, Full))


def arguments(name: str, op: AttentionOp) -> dict[str, Any]:
    """The constant arguments of an op in the words of a line, ``flash_attn_2 flash_attn_3 flash_attn_4``.

    Returns:
        keyword arguments; lse is not among them, since functions ask for it by different names.
    """
    parts = mask_parts(op.mask)
    found: dict[str, Any] = {"softmax_scale": op.effective_scale, "causal": any(isinstance(p, Causal) for p in parts)}
    windows = [part for part in parts if isinstance(part, Window)]
    if windows:
        unbounded = None if name == "flash_attn_4" else -1
        lefts, rights = ([getattr(w, side) for w in windows] for side in ("left", "right"))
        left, right = (min((x for x in xs if x is not None), default=unbounded) for xs in (lefts, rights))
        found["window_size"] = (left, 0 if found["causal"] else right)
    for term in op.score:
        if isinstance(term, SoftCap):
            found["softcap"] = term.cap
    if op.dropout_p > 0:
        found["dropout_p"] = op.dropout_p
    if op.deterministic and op.grad:
        found["deterministic"] = True
    return found


def looks_back(op: AttentionOp) -> bool:
    """Whether no query attends a key after its own position."""
    return any(isinstance(p, Causal) or (isinstance(p, Window) and p.right == 0) for p in mask_parts(op.mask))


def key_end(op: AttentionOp, sq: int, skv: int) -> int | None:
    """How many keys to hand over so that the last one stands at the last query's position; None: that cannot be."""
    if not op.mask.positional and not any(isinstance(term, Alibi) for term in op.score):
        return skv
    if isinstance(op.q_offset, Ref):
        return None
    end = skv if op.q_offset == END else sq + int(op.q_offset)
    return end if end == skv or (looks_back(op) and 0 < end < skv) else None


def _cut(op: AttentionOp, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    end = key_end(op, q.shape[2], k.shape[2])
    if end is None:  # a rewrite that changes lengths after the op was checked
        problem = f"q_offset {op.q_offset} with {q.shape[2]} queries and {k.shape[2]} keys"
        raise BackendError(f"compiled for {op}, and run with {problem}: positions count from the last key")
    return (k, v) if end == k.shape[2] else (k[:, :, :end], v[:, :, :end])


def _operands(op: AttentionOp) -> dict[str, str]:
    """Which operand goes to which argument."""
    found = {}
    for term in op.score:
        if isinstance(term, Alibi):
            found["alibi_slopes"] = term.slopes.name
    if isinstance(op.weight, Softmax) and op.weight.sinks is not None:
        found["learnable_sink"] = op.weight.sinks.name
    return found


def _checked(function: Function, given: dict[str, Any], optional: str = "") -> dict[str, Any]:
    """The arguments, each one that the installed function takes; one that may be missing is left out then.

    Raises:
        BackendError: it takes no such argument. Dropping it would compute something else.
    """
    known = inspect.signature(function).parameters
    missing = [argument for argument in given if argument not in known and argument != optional]
    if missing:
        name = getattr(function, "__name__", str(function))
        raise BackendError(
            f"{name} of the installed version takes no {', '.join(missing)}; it takes {', '.join(known)}"
        )
    return {argument: value for argument, value in given.items() if argument in known}


def _split(result: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``out`` or ``(out, lse, ...)``."""
    return (result[0], result[1]) if isinstance(result, tuple) else (result, None)


def _in_our_terms(out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """lse ``[B, H, Sq]`` with -inf for an empty row and NaN for a row of NaN; out is ``[B, Sq, H, Dv]``."""
    lse = torch.where(torch.isposinf(lse), -math.inf, lse)
    return torch.where(torch.isnan(out[..., 0]).transpose(1, 2), math.nan, lse)


def _tensors(sources: dict[str, str], t: Operands) -> dict[str, torch.Tensor]:
    """The operands; slopes and sinks in float32, but sinks in bfloat16 stay: every version of line 4 takes those."""
    found = {}
    for argument, operand in sources.items():
        x = t[operand].detach()
        stays = argument == "learnable_sink" and x.dtype == torch.bfloat16
        found[argument] = (x if stays else x.float()).contiguous()
    return found


def compile_dense(name: str, library: Any, op: AttentionOp) -> Run:
    """``flash_attn_func``: batches of equal lengths."""
    function, wants_lse, sources = library.flash_attn_func, op.outputs.lse, _operands(op)
    given = arguments(name, op)
    ask = "return_lse" if name == "flash_attn_4" else "return_attn_probs"
    given |= {ask: True} if wants_lse else {}
    _checked(function, dict.fromkeys(sources))
    given = _checked(function, given, optional="return_attn_probs" if name == "flash_attn_3" else "")

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        rows = (x.transpose(1, 2) for x in (q, *_cut(op, q, k, v)))
        out, lse = _split(function(*rows, **given, **_tensors(sources, t)))
        if not wants_lse:
            return out.transpose(1, 2)
        assert lse is not None
        return Raw(out.transpose(1, 2), _in_our_terms(out, lse))

    return run


def compile_cache(name: str, library: Any, op: AttentionOp) -> Run:
    """Key lengths: ``flash_attn_with_kvcache`` of lines 2 and 3, ``seqused_k`` of line 4. Keys are only read."""
    lengths = next(part for part in mask_parts(op.mask) if isinstance(part, KeyLengths)).lengths
    wants_lse, sources, given = op.outputs.lse, _operands(op), arguments(name, op)
    if name == "flash_attn_4":
        function, count, ask = library.flash_attn_varlen_func, "seqused_k", "return_lse"
    else:
        function, count, ask = library.flash_attn_with_kvcache, "cache_seqlens", "return_softmax_lse"
    given |= {ask: True} if wants_lse else {}
    _checked(function, dict.fromkeys((count, *sources)))
    given = _checked(function, given)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        # the kernel trusts the lengths: beyond the keys it would read what lies behind them
        used = _of(lengths, t, q.device).clamp(0, k.shape[2]).to(torch.int32).expand(q.shape[0]).contiguous()
        rows = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = _split(function(*rows, **{count: used}, **given, **_tensors(sources, t)))
        if not wants_lse:
            return out.transpose(1, 2)
        assert lse is not None
        return Raw(out.transpose(1, 2), _in_our_terms(out, lse))

    return run


def compile_documents(name: str, library: Any, op: AttentionOp) -> Run:
    """Segments: ``flash_attn_varlen_func``. Rows are put into the order of their numbers when they are not.

    A stable order keeps who comes before whom inside a segment, so a causal mask stays what it is. The borders are read
    on the host, so a call waits for the device.
    """
    segments = next(part for part in mask_parts(op.mask) if isinstance(part, Segments))
    function, wants_lse, sources = library.flash_attn_varlen_func, op.outputs.lse, _operands(op)
    given = arguments(name, op)
    ask = "return_lse" if name == "flash_attn_4" else "return_attn_probs"
    given |= {ask: True} if wants_lse else {}
    _checked(function, dict.fromkeys(sources))
    given = _checked(function, given, optional="return_attn_probs" if name == "flash_attn_3" else "")

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        b, sq = q.shape[0], q.shape[2]
        if k.shape[2] != sq:
            raise BackendError(f"compiled for documents of queries and keys alike, and run with {sq} and {k.shape[2]}")
        order, ends = _borders(_of(segments.queries, t, q.device), b)
        rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        rows = rows if order is None else [x[order] for x in rows]
        packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": sq, "max_seqlen_k": sq}
        out, lse = _split(function(*rows, **packed, **given, **_tensors(sources, t)))
        back = None if order is None else torch.argsort(order)
        out = (out if back is None else out[back]).unflatten(0, (b, sq))
        if not wants_lse:
            return out.transpose(1, 2)
        assert lse is not None
        lse = (lse if back is None else lse[:, back]).unflatten(1, (b, sq)).transpose(0, 1)
        return Raw(out.transpose(1, 2), _in_our_terms(out, lse))

    return run


def _borders(ids: torch.Tensor, b: int) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The order of ``B * S`` rows (None: as they are) and ``cu_seqlens``, from numbers ``[S]`` or ``[B, S]``."""
    ids = ids.expand(b, ids.shape[-1]).to(torch.int64)
    ids = ids - ids.min()
    flat = (ids + torch.arange(b, device=ids.device)[:, None] * (ids.max() + 1)).flatten()
    order = None
    if bool((flat.diff() < 0).any()):
        flat, order = torch.sort(flat, stable=True)
    counts = torch.unique_consecutive(flat, return_counts=True)[1]
    ends = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
    return order, ends


def _of(operand: Any, t: Operands, device: torch.device) -> torch.Tensor:
    """The tensor of a mask's operand: named, or a constant table."""
    return t[operand.name] if isinstance(operand, Ref) else operand.tensor(device)
