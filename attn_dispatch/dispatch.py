"""`attention`, `plan`, `explain`: the public calls, and the path from one to a kernel. Read this first.

One call, top to bottom: `attention` looks for a route (options, then tensors) and runs it. Without one it collects the
tensors, `frontend.describe` s the call as an op, `passes.canonicalise` s it, `selection.decide` s among all candidates,
compiles the winner into a `Plan`, keeps a route to it and runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from attn_dispatch import context, tracing
from attn_dispatch.context import use
from attn_dispatch.errors import InputTypeError
from attn_dispatch.frontend import Binding, Options, collect_tensors, describe
from attn_dispatch.ir.masks import Mask
from attn_dispatch.ir.ops import AttentionOp, bucket
from attn_dispatch.ir.recognise import recognise
from attn_dispatch.passes import canonicalise
from attn_dispatch.plan import Plan, make_plan
from attn_dispatch.registry import current
from attn_dispatch.report import Report, make_report
from attn_dispatch.routes import Route, make_guard, routes
from attn_dispatch.selection.candidates import rebuild
from attn_dispatch.selection.decide import Request
from attn_dispatch.variants import Softmax, Variant

__all__ = ["attention", "capture", "explain", "plan", "replace_sdpa", "use"]

_SOFTMAX = Softmax()
_NO_OPERANDS: dict[str, torch.Tensor] = {}
_table = routes.table  # the same dict for ever; a name of this module is one lookup less
_context = context.active.get
_deterministic = torch._C._get_deterministic_algorithms
_tracing = torch.compiler.is_dynamo_compiling


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool | None = False,
    *,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    query_lengths: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
    q_offset: int | torch.Tensor | None = None,
    variant: Variant = _SOFTMAX,
    layout: str = "bhsd",
    return_lse: bool = False,
    return_weights: bool = False,
    backend: str | Sequence[str] | None = None,
) -> Any:
    """Attention on the fastest kernel here that is proven correct for it; a superset of torch's SDPA.

    Shapes: query ``[B, Hq, Sq, D]``, key ``[B, Hkv, Skv, D]``, value ``[B, Hkv, Skv, Dv]`` -> ``[B, Hq, Sq, Dv]``.
    2-D (``[S, D]``), 3-D (``[H, S, D]``) and 5-D inputs work as in torch; ``layout="bshd"`` takes ``[B, S, H, D]``.

    Args:
        attn_mask: a bool tensor (True = attend) or a float tensor (added to the scores; -inf masks), broadcastable to
            ``[B, Hq, Sq, Skv]``, or a `Mask` from `attn_dispatch.masks`.
        dropout_p: probability in [0, 1] that a weight is dropped; always applied, as in torch.
        is_causal: query i sees keys j <= i, counted from key 0 as in torch, unless ``q_offset`` is given.
        scale: factor of ``q @ k.T``; default ``D ** -0.5``.
        enable_gqa: False (as torch) refuses unequal head counts, True and None accept them; query head h uses kv head
            ``h // (Hq / Hkv)``.
        window: ``(left, right)`` inclusive distances, None or -1 for unbounded; counted from the last key unless
            ``q_offset`` is given: W keys including the query's own is ``(W - 1, 0)``.
        softcap: ``cap * tanh(scores / cap)`` after the scale; 0 or None for none.
        bias: float tensor added to the scores, or ALiBi slopes ``[Hq]``.
        sinks: one learned logit per query head in the softmax denominator, ``[Hq]``.
        query_lengths, key_lengths: true lengths ``[B]`` of a right-padded batch; rows beyond are 0.
        q_offset: key position of query 0, an int or an int tensor ``[B]``; default 0 for ``is_causal``, else Skv - Sq.
        variant: from `attn_dispatch.variants`; default softmax.
        return_lse: return ``(out, lse)``; lse ``[B, Hq, Sq]`` is -inf for an empty row.
        return_weights: return ``(out, weights)``, or ``(out, lse, weights)`` with both.
        backend: a backend or chain to use, or a list in order of preference; never falls back.

    Returns:
        The output, in the query's dtype and layout. A query that may attend nothing gives 0.

    Raises:
        InputError, InputTypeError: a wrong argument; NoBackendError: the backend asked for cannot run this.

    Source: Vaswani et al. 2017; semantics in docs/semantics.md.

    Example:
        >>> import torch
        >>> q, k = torch.randn(1, 8, 4, 16), torch.randn(1, 2, 4, 16)
        >>> attention(q, k, k, is_causal=True, enable_gqa=True).shape
        torch.Size([1, 8, 4, 16])
    """
    if _tracing():
        return tracing.compiled(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window, softcap, bias, sinks,
            query_lengths, key_lengths, q_offset, variant, layout, return_lse, return_weights, backend,
        )  # fmt: skip
    if (
        attn_mask is None
        and bias is None
        and sinks is None
        and key_lengths is None
        and query_lengths is None
        and variant is _SOFTMAX
    ):
        options = (
            is_causal, dropout_p, scale, enable_gqa, window, softcap, q_offset, layout, return_lse, return_weights,
            backend, _context(), _deterministic(), forward_ad._current_level,
        )  # fmt: skip
        try:
            for route in _table.get(options, ()):
                if route.check(query, key, value) and (route.hi == 0 or route.in_span(key, value)):
                    return route.run(query, key, value, _NO_OPERANDS)
        except TypeError:  # an unhashable or non-tensor argument: the slow path knows what to say about it
            options = ()
    else:
        options = ()
    return _slow(
        options, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window, softcap, bias, sinks,
        query_lengths, key_lengths, q_offset, variant, layout, return_lse, return_weights, backend,
    )  # fmt: skip


def plan(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool | None = False,
    **options: Any,
) -> Plan:
    """Decide now, run later: takes what `attention` takes and returns a `Plan` to call with tensors of these shapes.

    Raises:
        InputError, NoBackendError: as `attention`.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 2, 8, 16)
        >>> p = plan(x, x, x, is_causal=True)
        >>> p(x, x, x).shape
        torch.Size([1, 2, 8, 16])
    """
    call = _Call.of(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **options)
    made = make_plan(call.bind(), call.requests())
    made.tensors.update(call.named)
    return made


def explain(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool | None = False,
    **options: Any,
) -> Report:
    """What `attention` would do with these arguments, and why; runs nothing.

    Returns:
        A `Report`: print it, or read ``chosen``, ``source``, ``legal`` and ``refused``.

    Example:
        >>> import torch
        >>> x = torch.randn(1, 2, 8, 16)
        >>> explain(x, x, x, backend="eager").chosen
        'eager'
    """
    call = _Call.of(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **options)
    return make_report(call.bind(), call.requests(), current(), call.notes)


# --- the slow path -------------------------------------------------------------------------------------------------


class _Call:
    """The arguments of one call, sorted into tensors and options."""

    def __init__(
        self, tensors: tuple[Any, ...], named: dict[str, torch.Tensor], options: Options, backend: Any
    ) -> None:
        self.tensors, self.named, self.options, self.backend = tensors, named, options, backend
        self.notes: list[str] = []

    @classmethod
    def of(
        cls, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False,
        scale: Any = None, enable_gqa: Any = False, *, window: Any = None, softcap: Any = None, bias: Any = None,
        sinks: Any = None, query_lengths: Any = None, key_lengths: Any = None, q_offset: Any = None,
        variant: Any = _SOFTMAX, layout: Any = "bhsd", return_lse: Any = False, return_weights: Any = False,
        backend: Any = None,
    ) -> _Call:  # fmt: skip
        variant = _SOFTMAX if variant is None else variant
        if not isinstance(variant, Variant):
            raise InputTypeError(f"variant must be from attn_dispatch.variants, got {variant!r}")
        notes: list[str] = []
        positions_free = window is None and not is_causal and q_offset is None
        if isinstance(attn_mask, torch.Tensor) and positions_free and _worth_recognising(attn_mask, query, value):
            found, offset = recognise(attn_mask)
            if found.feature != "mask:Dense":
                attn_mask, q_offset = found, offset
                notes.append(f"attn_mask recognised as {found} at q_offset {offset}")
        named, mask = collect_tensors(attn_mask, bias, sinks, query_lengths, key_lengths, q_offset, variant)
        options = Options(
            mask, dropout_p, bool(is_causal), scale, enable_gqa, tuple(window) if isinstance(window, list) else window,
            softcap, None if isinstance(q_offset, torch.Tensor) else q_offset,
            None if variant == _SOFTMAX else variant, False, layout, bool(return_lse), bool(return_weights),
        )  # fmt: skip
        call = cls((query, key, value), named, options, backend)
        call.notes = notes
        return call

    def bind(self) -> Binding:
        """Describe the call."""
        query, key, value = self.tensors
        transformed = tracing.is_transformed(query, key, value, *self.named.values())
        return describe(
            query, key, value, self.named, self.options,
            higher_order=transformed or forward_ad._current_level >= 0, traced=transformed,
        )  # fmt: skip

    def requests(self) -> list[Request]:
        """Explicit wishes, strongest first."""
        around = _context()
        wishes = [Request(context.as_names(self.backend), "backend=", True)] if self.backend is not None else []
        if around.backends:
            wishes.append(Request(around.backends, "dispatch.use", around.require))
        return wishes


def _slow(options: tuple[Any, ...], query: Any, key: Any, value: Any, *rest: Any) -> Any:
    """A call without a route: describe, decide, compile, keep a route, run. ``rest`` are `attention`'s arguments."""
    if isinstance(query, torch.Tensor):
        if torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return tracing.exported(query, key, value, *rest)
        if torch.is_autocast_enabled(query.device.type):
            return _under_autocast(query, key, value, *rest)
    names = (
        "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "window", "softcap", "bias", "sinks",
        "query_lengths", "key_lengths", "q_offset", "variant", "layout", "return_lse", "return_weights", "backend",
    )  # fmt: skip
    call = _Call.of(query, key, value, **dict(zip(names, rest, strict=True)))
    key_of_call = options or _key_with_operands(call)
    if not options and key_of_call:
        tensors = (query, key, value, *call.named.values())
        for route in _table.get(key_of_call, ()):
            if route.check(*tensors):
                return route.run(query, key, value, route.operands(call.named))
    made = make_plan(call.bind(), call.requests())
    record = _context().record
    if record is not None:
        record(made, query, key, value)
    elif key_of_call and not (made.op.traced or made.op.higher_order):
        _keep_route(key_of_call, call, made)
    return made.run(query, key, value, made.binding.operands(call.named))


def _under_autocast(query: Any, key: Any, value: Any, *rest: Any) -> Any:
    """As torch's SDPA under autocast: query, key and value in the autocast dtype, and no autocast inside."""
    device = query.device.type
    dtype = torch.get_autocast_dtype(device)

    def cast(x: Any) -> Any:
        eligible = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if eligible else x

    with torch.autocast(device, enabled=False):
        return _slow((), cast(query), cast(key), cast(value), *rest)


def _key_with_operands(call: _Call) -> tuple[Any, ...]:
    """The key of a call that has more tensors than query, key and value; () when it cannot be one."""
    variant = call.options.variant
    key = (
        call.options if variant is None or not hasattr(variant, "decay") else (type(variant), call.options.mask),
        call.backend if not isinstance(call.backend, list) else tuple(call.backend),
        tuple(call.named), _context(), _deterministic(), forward_ad._current_level,
    )  # fmt: skip
    try:
        hash(key)
    except TypeError:
        return ()
    return key


def _keep_route(options: tuple[Any, ...], call: _Call, made: Plan) -> None:
    """Remember the way to a plan; the second key length opens the length within its bucket."""
    query, key, value = call.tensors
    tensors = (query, key, value, *call.named.values())
    operands = made.binding.operands if call.named else None
    if not call.named and any(
        not r.hi and _differs_in_key_length(r, query, key, value) for r in _table.get(options, ())
    ):
        span = _open_span(made)
        if span is not None:
            check = make_guard(tensors, open_key_length=True)
            routes.add(options, Route(check, made.run, operands, span))
            return
    route = Route(make_guard(tensors), made.run, operands)
    routes.add(options, route)


def _differs_in_key_length(route: Route, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a route is for the same call at another key length: it accepts the keys once they are cut or repeated."""
    if key.ndim != 4 or key.size(2) < 2:
        return False
    for length in (key.size(2) - 1, key.size(2) + 1):
        like = [x.new_empty((*x.shape[:2], length, x.shape[3])) for x in (key, value)]
        if route.check(query, *like):
            return True
    return False


def _open_span(made: Plan) -> tuple[int, int] | None:
    """The range of key lengths in which this plan stays right, or None.

    It must be one canonical op and one decision at both ends; the passes only ever change their mind once in between.
    """
    op = made.op
    hi = bucket(op.Skv)
    lo = hi // 2 + 1
    if op.Skv <= 16 or lo <= op.Sq <= hi or not made.binding.form.is_plain:
        return None
    for length in (lo, hi):
        other, _ = canonicalise(made.binding.op.resized(op.B, op.Sq, length))
        if _without_lengths(other) != _without_lengths(op):
            return None
        if rebuild(made.name, other, current()) is None:
            return None
    return lo, hi


def _without_lengths(op: AttentionOp) -> AttentionOp:
    return op.resized(op.B, op.Sq, 1 << 20)


def _worth_recognising(mask: torch.Tensor, query: Any, value: Any) -> bool:
    """Recognition reads the mask once; that must be little beside the attention it saves."""
    if mask.dtype != torch.bool or mask.device.type != "cpu" or mask.ndim < 2 or not isinstance(query, torch.Tensor):
        return False
    if not isinstance(value, torch.Tensor) or query.ndim != 4 or tracing.is_transformed(query, mask):
        return False
    if mask.shape[-2] == 1:
        return mask.shape[0] == query.shape[0] > 1 and query.shape[2] >= 64  # padding: lengths can be trimmed
    work = query.shape[0] * query.shape[1] * (query.shape[3] + value.shape[3])  # multiply-adds per pair
    return mask.shape[-1] * mask.shape[-2] >= 1 << 16 and work >= 256


def capture() -> Any:
    """Record every attention that runs inside: ``with dispatch.capture() as workload: model(x)``.

    See `attn_dispatch.capture.capture`.
    """
    from attn_dispatch.capture import capture as start

    return start()


def replace_sdpa() -> Any:
    """Send ``F.scaled_dot_product_attention`` of unmodified models through the dispatcher, inside a ``with``.

    See `attn_dispatch.integrations.sdpa.replace_sdpa`.
    """
    from attn_dispatch.integrations.sdpa import replace_sdpa as start

    return start()
