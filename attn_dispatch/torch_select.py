"""``attn_dispatch::select``: a key selection as one opaque torch operator, for exported programs.

As with ``attn_dispatch::attention``, the graph holds the tensors and one string that says everything else. So one
program serves all lengths, where the blocks of `attn_dispatch.select` would be unrolled for those of the example, and
`export_onnx` finds the selection as one node, which it lowers.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attn_dispatch.ir.mask_text import parse_mask
from attn_dispatch.ir.select_op import SelectOp
from attn_dispatch.ir.tensors import Ref, TensorDesc

__all__ = ["OPERATOR", "call", "describe_traced_select"]

_OFFSET = "q_offset"


def call(
    op: SelectOp, query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, tensors: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Call the operator for a selection whose sizes may be symbols; they are not written down."""
    names = [name for name, _ in op.operands]
    offset = None if isinstance(op.q_offset, Ref) else op.q_offset
    spec = (
        f"{{'names': {names!r}, 'mask': {str(op.mask)!r}, 'q_offset': {offset!r}, 'top_k': {op.top_k!r}, "
        f"'scale': {op.scale!r}, 'activation': {op.activation!r}, 'scores': {op.scores!r}}}"
    )
    made: list[torch.Tensor] = torch.ops.attn_dispatch.select(
        query, key, weights, [tensors[name] for name in names], spec
    )
    return made


def describe_traced_select(
    query: TensorDesc, key: TensorDesc, weights: TensorDesc, others: Sequence[TensorDesc], spec: str
) -> SelectOp:
    """The op behind a spec, for descriptors of the operator's tensors; their lengths are not looked at."""
    options = ast.literal_eval(spec)
    operands = dict(zip(options.pop("names"), others, strict=True))
    mask, offset = parse_mask(options.pop("mask")), options.pop("q_offset")
    options.pop("call", None)  # the exporter's own mark
    return SelectOp(
        query, key, weights, mask=mask, q_offset=Ref(_OFFSET) if offset is None else offset,
        operands=tuple(operands.items()), **options,
    )  # fmt: skip


def _run(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, tensors: list[torch.Tensor], spec: str
) -> list[torch.Tensor]:
    """The selection at the lengths that are there; its scores are differentiable."""
    from attn_dispatch.select import compile_select

    q, k, w, *others = (TensorDesc.of(x) for x in (query, key, weights, *tensors))
    op = describe_traced_select(q, k, w, others, spec)
    named = dict(zip(ast.literal_eval(spec)["names"], tensors, strict=True))
    found = compile_select(op)(query, key, weights, named)
    return list(found) if isinstance(found, tuple) else [found]


@torch.library.custom_op("attn_dispatch::select", mutates_args=())
def _select(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, tensors: list[torch.Tensor], spec: str
) -> list[torch.Tensor]:
    with torch.no_grad():
        return [x.contiguous() for x in _run(query, key, weights, tensors, spec)]


@_select.register_fake
def _select_fake(
    query: torch.Tensor, key: torch.Tensor, weights: torch.Tensor, tensors: list[torch.Tensor], spec: str
) -> list[torch.Tensor]:
    options = ast.literal_eval(spec)
    shape = (query.shape[0], query.shape[2], options["top_k"])
    acc = torch.float64 if torch.float64 in (query.dtype, key.dtype, weights.dtype) else torch.float32
    indices = query.new_empty(shape, dtype=torch.int64)
    return [indices, query.new_empty(shape, dtype=acc)] if options["scores"] else [indices]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    query, key, weights, tensors, spec = inputs
    ctx.save_for_backward(query, key, weights, *tensors)
    ctx.spec = spec


def _differentiate(ctx: Any, grads: list[torch.Tensor]) -> tuple[Any, ...]:
    """Only scores have gradients: the selection once more, with autograd."""
    query, key, weights, *tensors = ctx.saved_tensors
    if len(grads) < 2 or grads[1] is None:
        return None, None, None, [None] * len(tensors), None
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (query, key, weights)]
        scores = _run(inputs[0], inputs[1], inputs[2], tensors, ctx.spec)[1]
        found = torch.autograd.grad(scores, inputs, grads[1])
    return found[0], found[1], found[2], [None] * len(tensors), None


_select.register_autograd(_differentiate, setup_context=_setup_context)
OPERATOR = torch.ops.attn_dispatch.select.default  # what stands in a graph
