"""`attention`, `plan`, `explain`: the public calls, and the path from one to a kernel. Read this first.

One call, top to bottom: `attention` collects the tensors, looks for a route (options, then tensors) and runs it; the
compiled `answer` does that for the routes found last.
Without one, it `frontend.describe` s the call as an op, `passes.canonicalise` s it, `selection.decide` s among all
candidates, compiles the winner into a `Plan`, keeps a route to it and runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from attn_dispatch import context, device, paging, tracing, varlen
from attn_dispatch.autocast import cast, casts
from attn_dispatch.context import use
from attn_dispatch.errors import InputError, InputTypeError
from attn_dispatch.frontend import Binding, Options, collect_tensors, describe
from attn_dispatch.ir.masks import Mask
from attn_dispatch.keeping import keep_route
from attn_dispatch.patterns import recognised, worth_reading
from attn_dispatch.plan import Plan, make_plan
from attn_dispatch.registry import current
from attn_dispatch.report import Report, make_report
from attn_dispatch.routes import answer, find, routes
from attn_dispatch.select import select
from attn_dispatch.selection.decide import Request
from attn_dispatch.variants import LinearState, Softmax, Variant, stateful, variant_key
from attn_dispatch.varlen import varlen_attention

__all__ = ["attention", "capture", "explain", "plan", "replace_sdpa", "select", "use", "varlen_attention"]

_SOFTMAX = Softmax()
_table = routes.table  # the same dict for ever; a name of this module is one lookup less
_find, _answer = find, answer
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
    block_table: torch.Tensor | None = None,
    q_offset: int | torch.Tensor | None = None,
    variant: Variant = _SOFTMAX,
    state: LinearState | None = None,
    return_state: bool = False,
    layout: str = "bhsd",
    return_lse: bool = False,
    return_weights: bool = False,
    backend: str | Sequence[str] | None = None,
) -> Any:
    """Attention on the fastest kernel here that is proven correct for it; a superset of torch's SDPA.

    Shapes: query ``[B, Hq, Sq, D]``, key ``[B, Hkv, Skv, D]``, value ``[B, Hkv, Skv, Dv]`` -> ``[B, Hq, Sq, Dv]``.
    2-D (``[S, D]``), 3-D (``[H, S, D]``) and 5-D inputs work as in torch; ``layout="bshd"`` takes ``[B, S, H, D]``.
    Jagged nested tensors ``[B, H, j, D]`` give a nested result; packed rows go to `varlen_attention`.

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
        block_table: ``[B, max_pages]``: key and value are pages ``[num_pages, Hkv, page, D]`` (``layout="bshd"``:
            ``[num_pages, page, Hkv, D]``), and ``key_lengths`` says how many keys each sequence has.
        q_offset: key position of query 0, an int or an int tensor ``[B]``; default 0 for ``is_causal``, else Skv - Sq
            (``key_lengths - Sq`` with a ``block_table``).
        variant: from `attn_dispatch.variants`; default softmax.
        state: what linear attention or retention starts from, a `variants.LinearState`; it stands before key 0, is not
            changed, and fits the variant, heads and sizes of the call.
        return_state: return ``(out, state)``, the state after the last key, made of new tensors.
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
    if block_table is not None:
        key, value, attn_mask, bias, q_offset = paging.page_in(
            query, key, value, block_table, key_lengths, attn_mask, bias, is_causal, window, q_offset, layout, variant
        )
    if return_state or state is not None:
        variant = stateful(variant, state, return_state)
    if _tracing():
        return tracing.compiled(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window, softcap, bias, sinks,
            query_lengths, key_lengths, q_offset, variant, layout, return_lse, return_weights, backend,
        )  # fmt: skip
    if _answer is not None and variant is _SOFTMAX:  # a route found lately, before anything is made of the arguments
        result = _answer(
            query, key, value, attn_mask, bias, sinks, query_lengths, key_lengths, q_offset, is_causal, dropout_p,
            scale, enable_gqa, window, softcap, layout, return_lse, return_weights, backend,
        )  # fmt: skip
        if result is not NotImplemented:
            return result
    named, mask = collect_tensors(attn_mask, bias, sinks, query_lengths, key_lengths, q_offset, variant, query)
    given = (query, key, value, *named.values())
    options = (
        mask.text if isinstance(mask, Mask) else mask, tuple(named), None if "q_offset" in named else q_offset,
        None if variant is _SOFTMAX else variant_key(variant), is_causal, dropout_p, scale, enable_gqa, window,
        softcap, layout, return_lse, return_weights, backend,
        _context(), _deterministic(), forward_ad._current_level,
    )  # fmt: skip
    run = _find(_table, options, given)
    if run is not None:
        return run(query, key, value, named)
    return _slow(
        options, named, mask, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window, softcap,
        bias, sinks, query_lengths, key_lengths, q_offset, variant, layout, return_lse, return_weights, backend,
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
    if options.get("block_table") is not None:
        raise InputError("a plan runs on rows, not on pages", remedy="dispatch.attention(..., block_table=...)")
    call = _Call.of(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **options)
    made = call.plan()
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
    with device.current(query):
        return make_report(call.bind(), call.requests(), current(), call.notes)


# --- the slow path -------------------------------------------------------------------------------------------------


class _Call:
    """The arguments of one call, sorted into tensors and options."""

    def __init__(
        self, tensors: tuple[Any, ...], named: dict[str, torch.Tensor], options: Options, backend: Any, notes: list[str]
    ) -> None:
        self.tensors, self.named, self.options, self.backend = tensors, named, options, backend
        self.notes = notes

    @classmethod
    def of(
        cls, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False,
        scale: Any = None, enable_gqa: Any = False, *, window: Any = None, softcap: Any = None, bias: Any = None,
        sinks: Any = None, query_lengths: Any = None, key_lengths: Any = None, q_offset: Any = None,
        variant: Any = _SOFTMAX, layout: Any = "bhsd", return_lse: Any = False, return_weights: Any = False,
        backend: Any = None, block_table: Any = None, state: Any = None,
        return_state: Any = False,
    ) -> _Call:  # fmt: skip
        """Sort the arguments of `attention`."""
        notes: list[str] = []
        if casts(query):
            query, key, value = cast(query, key, value)
        if block_table is not None:
            key, value, attn_mask, bias, q_offset = paging.page_in(
                query,
                key,
                value,
                block_table,
                key_lengths,
                attn_mask,
                bias,
                is_causal,
                window,
                q_offset,
                layout,
                variant,
            )
            notes.append(f"pages gathered into {key.shape[1 if layout == 'bshd' else 2]} rows")
        if return_state or state is not None:
            variant = stateful(variant, state, return_state)
        is_tensor = isinstance(attn_mask, torch.Tensor)
        if is_tensor and worth_reading(attn_mask, query, value, layout, window, is_causal, q_offset):
            attn_mask, q_offset, note = recognised(attn_mask, query, value, bias, variant, layout)
            notes += [note] if note else []
        named, mask = collect_tensors(attn_mask, bias, sinks, query_lengths, key_lengths, q_offset, variant, query)
        return cls.sorted(
            (query, key, value), named, mask, notes, dropout_p, is_causal, scale, enable_gqa, window, softcap,
            q_offset, variant, layout, return_lse, return_weights, backend,
        )  # fmt: skip

    @classmethod
    def sorted(
        cls, tensors: Any, named: dict[str, torch.Tensor], mask: Any, notes: list[str], dropout_p: Any, is_causal: Any,
        scale: Any, enable_gqa: Any, window: Any, softcap: Any, q_offset: Any, variant: Any, layout: Any,
        return_lse: Any, return_weights: Any, backend: Any,
    ) -> _Call:  # fmt: skip
        """From arguments whose tensors are collected already."""
        variant = _SOFTMAX if variant is None else variant
        if not isinstance(variant, Variant):
            raise InputTypeError(f"variant must be from attn_dispatch.variants, got {variant!r}")
        options = Options(
            mask, dropout_p, bool(is_causal), scale, None if enable_gqa is None else bool(enable_gqa),
            tuple(window) if isinstance(window, list) else window, softcap,
            None if isinstance(q_offset, torch.Tensor) else q_offset,
            None if variant == _SOFTMAX else variant, layout, bool(return_lse), bool(return_weights),
        )  # fmt: skip
        return cls(tensors, named, options, backend, notes)

    def bind(self) -> Binding:
        """Describe the call."""
        query, key, value = self.tensors
        transformed = tracing.is_transformed()
        return describe(
            query, key, value, self.named, self.options,
            higher_order=transformed or forward_ad._current_level >= 0,
            traced=transformed or tracing.are_fake(query, key, value, *self.named.values()),
        )  # fmt: skip

    def plan(self) -> Plan:
        """Decide and compile, on the device of the tensors."""
        with device.current(self.tensors[0]):
            return make_plan(self.bind(), self.requests())

    def requests(self) -> list[Request]:
        """Explicit wishes, strongest first."""
        around = context.surrounding()
        wishes = [Request(context.as_names(self.backend), "backend=", True)] if self.backend is not None else []
        if around.backends:
            wishes.append(Request(around.backends, "dispatch.use", around.require))
        return wishes


def _slow(
    options: tuple[Any, ...], named: dict[str, torch.Tensor], mask: Any, query: Any, key: Any, value: Any,
    attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any, window: Any, softcap: Any, bias: Any,
    sinks: Any, query_lengths: Any, key_lengths: Any, q_offset: Any, variant: Any, layout: Any, return_lse: Any,
    return_weights: Any, backend: Any,
) -> Any:  # fmt: skip
    """A call without a route: nested, exported, under autocast, or new. New: describe, decide, compile, keep, run.

    Args:
        options: the key under which `attention` looked for a route; unhashable when it cannot be one.
        named, mask: the other tensors, from `collect_tensors`.
    """
    if isinstance(query, torch.Tensor):
        rest = (
            attn_mask, dropout_p, is_causal, scale, enable_gqa, window, softcap, bias, sinks, query_lengths,
            key_lengths, q_offset, variant, layout, return_lse, return_weights, backend,
        )  # fmt: skip
        if query.is_nested:
            return varlen.attend_nested(query, key, value, rest)
        if torch.compiler.is_compiling() or torch.compiler.is_exporting() or torch.jit.is_tracing():
            return tracing.exported(query, key, value, *rest)
        if casts(query):
            tensors = cast(query, key, value)
            with torch.autocast(query.device.type, enabled=False):
                return _again(tensors, rest)
        if _is_list_of(str, backend) or _is_list_of(int, window):  # as tuples they can be part of a key
            return _again((query, key, value), tuple(tuple(x) if isinstance(x, list) else x for x in rest))
        if mask == "tensor" and worth_reading(attn_mask, query, value, layout, window, is_causal, q_offset):
            read, offset, _ = recognised(attn_mask, query, value, bias, variant, layout)
            if isinstance(read, Mask):
                return _again((query, key, value), rest, attn_mask=read, q_offset=offset)
            options = ("pairs", *options)  # `attention` must not find it: the next mask of these sizes is read as well
            run = _find(_table, options, (query, key, value, *named.values()))
            if run is not None:
                return run(query, key, value, named)
    call = _Call.sorted(
        (query, key, value), named, mask, [], dropout_p, is_causal, scale, enable_gqa, window, softcap, q_offset,
        variant, layout, return_lse, return_weights, backend,
    )  # fmt: skip
    made = call.plan()
    record = context.surrounding().record
    if record is not None:
        record(made, query, key, value)
    elif _is_hashable(options) and not (made.op.traced or made.op.higher_order) and _key_is_whole():
        with device.current(query):
            keep_route(options, query, key, value, named, made)
    return made.run(query, key, value, made.binding.operands(named))


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(x is None or isinstance(x, kind) for x in value)


def _is_hashable(options: tuple[Any, ...]) -> bool:
    try:
        hash(options)
    except TypeError:
        return False
    return True


def _again(tensors: Sequence[torch.Tensor], rest: tuple[Any, ...], **changes: Any) -> Any:
    """`attention` with other tensors or another form of the same options."""
    query, key, value = tensors
    return attention(query, key, value, **dict(zip(varlen.ARGUMENTS, rest, strict=True)) | changes)


def _key_is_whole() -> bool:
    """Whether the key of the call holds its layer, where pins by layer exist: they are read after the first key."""
    return not context.layers_matter or context.surrounding().layer == context.current_layer.get()


def capture(model: torch.nn.Module | None = None) -> Any:
    """Record every attention that runs inside: ``with dispatch.capture() as workload: model(x)``.

    Args:
        model: where the names of layers come from; see `attn_dispatch.capture.capture`.
    """
    from attn_dispatch.capture import capture as start

    return start(model)


def replace_sdpa() -> Any:
    """Send ``F.scaled_dot_product_attention`` of unmodified models through the dispatcher, inside a ``with``.

    See `attn_dispatch.integrations.sdpa.replace_sdpa`.
    """
    from attn_dispatch.integrations.sdpa import replace_sdpa as start

    return start()
