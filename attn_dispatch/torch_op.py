"""``attn_dispatch::attention``: the dispatcher as one opaque torch operator, for compiled graphs.

The graph holds the tensors and one string that says everything else; at run time the operator makes an ordinary call,
so a compiled model uses the same candidates, pins and tuned results as an eager one. Its gradient runs the call again
with gradients: one more forward than a fused backward would need.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from attn_dispatch.errors import InputTypeError
from attn_dispatch.ir.mask_text import parse_mask
from attn_dispatch.ir.masks import Mask
from attn_dispatch.ir.operands import Held, Operand
from attn_dispatch.ir.tensors import Ref
from attn_dispatch.results import named_results
from attn_dispatch.state import LinearState, WithState, state_dtype
from attn_dispatch.variants import LinearAttention, Retention, Softmax, Stateful

__all__ = ["OPERATOR", "call"]

_TENSOR_ARGS = ("attn_mask", "bias", "sinks", "query_lengths", "key_lengths", "q_offset")


def call(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any,
    window: Any, softcap: Any, bias: Any, sinks: Any, query_lengths: Any, key_lengths: Any, q_offset: Any,
    variant: Any, layout: Any, return_lse: Any, return_weights: Any, pinned: Any,
) -> Any:  # fmt: skip
    """Call the operator with `dispatch.attention`'s arguments; runs while Dynamo traces, so it stays simple."""
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    linear = None
    returns_state, variant = _add_state(variant, names, tensors)
    if isinstance(variant, Retention):
        names.append("decay")
        tensors.append(variant.decay)
    elif isinstance(variant, LinearAttention):
        linear = (variant.feature_map, variant.normalizer_eps)
    elif variant is not None and not isinstance(variant, Softmax):
        raise InputTypeError(f"variant must be from attn_dispatch.variants, got {variant!r}")
    mask_text = ""
    if isinstance(attn_mask, Mask):
        bound, held = attn_mask.bind("traced")  # not the cached one: Dynamo cannot enter cached_property's lock
        mask_text = str(bound)
        for name, tensor in held.items():
            names.append(name)
            tensors.append(tensor)
    elif attn_mask is not None:
        names.append("attn_mask")
        tensors.append(attn_mask)
    others = (("bias", bias), ("sinks", sinks), ("query_lengths", query_lengths), ("key_lengths", key_lengths))
    for name, given in others:
        if given is not None:
            names.append(name)
            tensors.append(torch.tensor(given, device=query.device) if isinstance(given, (list, tuple)) else given)
    if dropout_p:  # drawn in the graph: the backward runs the call again, and has to drop the same
        names.append("seed")
        tensors.append(torch.randint(0, 2**62, (1,), device="cpu"))
    if isinstance(q_offset, torch.Tensor):
        names.append("q_offset")
        tensors.append(q_offset)
        q_offset = None
    elif q_offset is not None and not torch.compiler.is_exporting():
        names.append("offset")  # a number in the string would be part of the graph, and decode has another at each step
        tensors.append(torch.full((1,), q_offset, dtype=torch.int64, device="cpu"))
        q_offset = None
    window = None if window is None else (window[0], window[1])
    spec = (
        f"{{'names': {names!r}, 'mask': {mask_text!r}, 'dropout_p': {_text(dropout_p)}, 'is_causal': {is_causal!r}, "
        f"'scale': {_text(scale)}, 'enable_gqa': {enable_gqa!r}, 'window': {window!r}, 'softcap': {_text(softcap)}, "
        f"'q_offset': {q_offset!r}, 'layout': {layout!r}, 'return_lse': {return_lse!r}, "
        f"'return_weights': {return_weights!r}, 'return_state': {returns_state!r}, 'linear': {linear!r}, "
        f"'backend': {pinned!r}}}"
    )
    results = torch.ops.attn_dispatch.attention(query, key, value, tensors, spec)
    if returns_state:
        z = results[2] if len(results) == 4 else None
        return WithState(results[0], LinearState(results[1], z, results[-1]))
    return named_results(results, bool(return_lse), bool(return_weights))


def _text(number: Any) -> str:
    """A number as a literal; NaN and infinity, which have none, in quotes."""
    return repr(number) if number is None or -sys.float_info.max <= number <= sys.float_info.max else f"'{number!r}'"


def _add_state(variant: Any, names: list[str], tensors: list[torch.Tensor]) -> tuple[bool, Any]:
    """Name the tensors of a state; whether one comes out, and the variant without it. Dynamo traces this too."""
    if not isinstance(variant, Stateful):
        return False, variant
    state = variant.state
    if state is not None:
        names.append("state")
        tensors.append(state.S)
        if state.z is not None:
            names.append("state_z")
            tensors.append(state.z)
        length = state.length
        names.append("state_length")
        tensors.append(length if isinstance(length, torch.Tensor) else torch.full((1,), length, device=state.S.device))
    return variant.returns, variant.inner


def _arguments(tensors: list[torch.Tensor], spec: str) -> dict[str, Any]:
    """The keyword arguments of `dispatch.attention` behind a spec."""
    options = ast.literal_eval(spec)
    options.pop("call", None)
    named = dict(zip(options.pop("names"), tensors, strict=True))
    named.pop("seed", None)
    offset = named.pop("offset", None)
    options |= {name: float(x) for name in ("scale", "softcap", "dropout_p") if isinstance(x := options.get(name), str)}
    arguments = {name: named.pop(name) for name in list(named) if name in _TENSOR_ARGS}
    if (linear := options.pop("linear")) is not None:
        arguments["variant"] = LinearAttention(*linear)
    if "decay" in named:
        arguments["variant"] = Retention(named.pop("decay"))
    if "state" in named:
        state = (named.pop("state"), named.pop("state_z", None), named.pop("state_length"))
        arguments["state"] = LinearState(*state)
    if text := options.pop("mask"):
        arguments["attn_mask"] = _hold(parse_mask(text), named)
    if arguments.get("q_offset") is not None or offset is not None:
        options.pop("q_offset")
    arguments |= {} if offset is None else {"q_offset": int(offset)}
    return {**options, **arguments}


def _hold(mask: Mask, named: dict[str, torch.Tensor]) -> Mask:
    """The mask with its names replaced by the tensors again."""

    def put(_where: str, operand: Operand) -> Operand:
        return Held(named[operand.name]) if isinstance(operand, Ref) else operand

    return mask.map_operands(put)


@contextmanager
def _seeded(query: torch.Tensor, tensors: list[torch.Tensor], spec: str) -> Iterator[None]:
    """Draw from the seed that the graph drew, if the call drops anything; the generators are left as they were."""
    names = ast.literal_eval(spec)["names"]
    if "seed" not in names:
        yield
        return
    seed, on_gpu = int(tensors[names.index("seed")]), query.device.type == "cuda"
    with torch.random.fork_rng(devices=[query.device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.default_generators[query.device.index].manual_seed(seed)
        yield


@torch.library.custom_op("attn_dispatch::attention", mutates_args=())
def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tensors: list[torch.Tensor], spec: str
) -> list[torch.Tensor]:
    from attn_dispatch.dispatch import attention

    # gradients are this operator's own business, see _differentiate
    with torch.no_grad(), _seeded(query, tensors, spec):
        result = attention(query, key, value, **_arguments(tensors, spec))
    parts = _flat(result)
    inputs = {x.data_ptr() for x in (query, key, value, *tensors)}
    # an operator may not return its inputs or odd strides: the fake below promises contiguous results of their own
    return [x.clone(memory_format=torch.contiguous_format) if x.data_ptr() in inputs else x.contiguous() for x in parts]


def _flat(result: Any) -> list[torch.Tensor]:
    """The tensors of a result, in the order in which `call` takes them."""
    if isinstance(result, WithState):
        return [result.out, *(x for x in result.state if isinstance(x, torch.Tensor))]
    return list(result) if isinstance(result, tuple) else [result]


@_attention.register_fake
def _attention_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tensors: list[torch.Tensor], spec: str
) -> list[torch.Tensor]:
    options = ast.literal_eval(spec)
    if key.dtype != query.dtype or value.dtype != query.dtype:
        raise InputTypeError(f"query, key and value must have one dtype, got {query.dtype}, {key.dtype}, {value.dtype}")
    batches = zip(*(x.shape[: max(query.ndim - 3, 0)] for x in (query, key, value)), strict=True)
    # broadcast without a question about a length of the model, which would pin it
    batch = [next((n for n in sizes if not (isinstance(n, int) and n == 1)), 1) for sizes in batches]
    out = query.new_empty((*batch, *query.shape[len(batch) : -1], value.shape[-1]))
    sq = 1 if options["layout"] == "bshd" else 2
    lead = (*batch, query.shape[2], query.shape[1]) if sq == 1 else out.shape[:-1]
    acc = torch.float64 if query.dtype == torch.float64 else torch.float32
    results = [out]
    if options["return_lse"]:
        results.append(query.new_empty(lead, dtype=acc))
    if options["return_weights"]:
        skv = key.shape[1] if options["layout"] == "bshd" else key.shape[-2]
        results.append(query.new_empty((*lead, skv)))
    if options["return_state"]:
        heads = lead[-2] if "decay" in options["names"] else key.shape[3 - sq]
        sizes = (query.shape[0], heads, query.shape[-1])
        results.append(query.new_empty((*sizes, value.shape[-1]), dtype=state_dtype(query.dtype)))
        if options["linear"] is not None and options["linear"][1] is not None:
            results.append(query.new_empty(sizes, dtype=state_dtype(query.dtype)))
        results.append(query.new_empty((query.shape[0],), dtype=torch.int64))
    return results


def _autograd_inside_an_operator() -> Any:
    """Undo the exclusion of autograd that surrounds an operator's body, so that the call below builds a graph."""
    keys = torch._C.DispatchKey
    autograd = torch._C.DispatchKeySet(keys.AutogradOther)
    for name in ("AutogradCPU", "AutogradCUDA"):
        autograd = autograd | torch._C.DispatchKeySet(getattr(keys, name))
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return torch._C._ForceDispatchKeyGuard(include, exclude - autograd)


@torch.library.custom_op("attn_dispatch::attention_backward", mutates_args=())
def _backward(
    grads: list[torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tensors: list[torch.Tensor],
    spec: str,
) -> list[torch.Tensor]:
    from attn_dispatch.dispatch import attention

    with _autograd_inside_an_operator(), torch.enable_grad(), _seeded(query, tensors, spec):
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        others = [x.detach().requires_grad_() if x.is_floating_point() else x for x in tensors]
        result = attention(inputs[0], inputs[1], inputs[2], **_arguments(others, spec))
        parts = _flat(result)
        wanted = [*inputs, *(x for x in others if x.requires_grad)]
        used = [(p, g) for p, g in zip(parts, grads, strict=True) if p.requires_grad]
        found = torch.autograd.grad([p for p, _ in used], wanted, [g for _, g in used], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g.contiguous() for x, g in zip(wanted, found, strict=True)]


@_backward.register_fake
def _backward_fake(
    grads: list[torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tensors: list[torch.Tensor],
    spec: str,
) -> list[torch.Tensor]:
    wanted = [query, key, value, *(x for x in tensors if x.is_floating_point())]
    return [x.new_empty(x.shape) for x in wanted]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    query, key, value, tensors, spec = inputs
    ctx.save_for_backward(query, key, value, *tensors)
    ctx.spec = spec


def _differentiate(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    query, key, value, *tensors = ctx.saved_tensors
    given = [query.new_zeros(()) if g is None else g for g in grads]  # the length of a state has no gradient
    found = torch.ops.attn_dispatch.attention_backward(given, query, key, value, tensors, ctx.spec)
    rest = iter(found[3:])
    others = [next(rest) if x.is_floating_point() else None for x in tensors]
    return found[0], found[1], found[2], others, None


_attention.register_autograd(_differentiate, setup_context=_setup_context)
OPERATOR = torch.ops.attn_dispatch.attention.default  # what stands in a graph
