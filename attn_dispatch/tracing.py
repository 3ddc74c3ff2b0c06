"""Attention inside a traced program: ``torch.compile``, ``torch.export``, ONNX export, functorch transforms.

==================  ============================================================================================
torch.compile       what torch's SDPA does as asked is traced as SDPA, so Inductor sees it and one graph serves all
                    lengths; everything else, and everything once somebody has chosen (`dispatch.use`, a pin, a
                    tuned result, a mode that measures), is the opaque operator ``attn_dispatch::attention``, which
                    dispatches at run time as an eager call would
torch.export        the opaque operator, which `export_onnx` lowers and a loaded program dispatches; with
                    ``backend="eager"`` the specification in plain ATen ops, which runs without this package unless
                    the model itself returns our named results
torch.onnx.export,  the specification: exporters and runtimes disagree about SDPA's masks, dead rows and scales
torch.jit.trace
vmap, grad, jvp     an ordinary call whose op says ``traced`` and ``higher_order``; backends that cannot, refuse
==================  ============================================================================================
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from attn_dispatch import context, reference, shapes
from attn_dispatch.autocast import cast
from attn_dispatch.errors import InputError, InputTypeError, NoBackendError
from attn_dispatch.ir.atoms import Causal, Dense, Full, KeyLengths, QueryLengths, Window
from attn_dispatch.ir.masks import And, Mask
from attn_dispatch.ir.ops import END, AttentionOp, Outputs
from attn_dispatch.ir.scores import Alibi, Bias, ScoreTerm, SoftCap
from attn_dispatch.ir.tensors import Ref, TensorDesc, dtype_name
from attn_dispatch.ir.weights import Softmax as SoftmaxWeight
from attn_dispatch.ir.weights import Weight
from attn_dispatch.results import named_results
from attn_dispatch.state import WithState
from attn_dispatch.variants import Softmax

_MOST = sys.float_info.max

__all__ = ["are_fake", "compiled", "describe_traced", "exported", "is_transformed"]


def is_transformed() -> bool:
    """Whether a functorch transform (vmap, grad, jvp, functionalize) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def are_fake(*tensors: Any) -> bool:
    """Whether any tensor is a stand-in of ``FakeTensorMode``, which has no values to look at."""
    if all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in tensors):
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    return any(isinstance(x, FakeTensor) for x in tensors)


def _is_sdpa(
    query: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, layout: Any, extras: tuple[Any, ...]
) -> bool:
    """Whether torch's SDPA computes this by the rules of DESIGN section 2, for every length and kernel of it."""
    if layout != "bhsd" or any(extra is not None and extra is not False for extra in extras):
        return False
    if scale is not None and not 0 < scale <= _MOST:
        return False  # the fused CPU kernel gives NaN with its causal flag; what is no number is named at run time
    if not 0 <= dropout_p <= 1:
        return False
    if attn_mask is None:
        return True
    if is_causal or not isinstance(attn_mask, torch.Tensor):
        return False
    if attn_mask.ndim == 3 and query.ndim >= 4:
        return False  # ambiguous; the frontend says so
    if attn_mask.ndim >= 2 and attn_mask.shape[-2] == 1:
        return False  # a mask over keys: what it excludes must not leak NaN, which the operator looks for
    return attn_mask.dtype == torch.bool or attn_mask.dtype == query.dtype


def _somebody_chose() -> bool:
    """Whether a file or an earlier measurement may choose: read once, while the graph is traced."""
    from attn_dispatch.selection.tuned import may_choose

    return may_choose()


# What `torch.compiler.assume_constant_result` does, which imports Dynamo for it: a second of every ``import``.
_somebody_chose._dynamo_marked_constant = True  # type: ignore[attr-defined]


def compiled(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any,
    window: Any, softcap: Any, bias: Any, sinks: Any, query_lengths: Any, key_lengths: Any, q_offset: Any,
    variant: Any, layout: Any, return_lse: Any, return_weights: Any, backend: Any,
) -> Any:  # fmt: skip
    """`dispatch.attention` while Dynamo traces it."""
    if torch.compiler.is_exporting():
        if q_offset is not None and not isinstance(q_offset, torch.Tensor):  # Dynamo tells no symbol from a number
            q_offset = torch.full((1,), q_offset, dtype=torch.int64, device=query.device)
        return exported(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window, softcap, bias, sinks,
            query_lengths, key_lengths, q_offset, variant, layout, return_lse, return_weights, backend,
        )  # fmt: skip
    softmax = None if isinstance(variant, Softmax) else variant
    extras = (window, softcap or None, bias, sinks, query_lengths, key_lengths, q_offset, softmax, return_lse,
              return_weights, backend, context.in_use)  # fmt: skip
    grouped = query.ndim > 2 and query.shape[-3] != key.shape[-3]
    refused = grouped and enable_gqa is False  # by the frontend, inside the operator: Dynamo cannot raise our errors
    if (
        not refused
        and not _somebody_chose()
        and _is_sdpa(query, attn_mask, dropout_p, is_causal, scale, layout, extras)
    ):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
        )
    from attn_dispatch import torch_op

    query, key, value = cast(query, key, value)  # no autocast reaches into an operator of ours
    return torch_op.call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window, softcap, bias, sinks,
        query_lengths, key_lengths, q_offset, variant, layout, return_lse, return_weights, backend,
    )  # fmt: skip


def exported(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any,
    window: Any, softcap: Any, bias: Any, sinks: Any, query_lengths: Any, key_lengths: Any, q_offset: Any,
    variant: Any, layout: Any, return_lse: Any, return_weights: Any, backend: Any,
) -> Any:  # fmt: skip
    """`dispatch.attention` while torch.export or the ONNX exporter traces it; it tests no length: that would pin it."""
    heads = -2 if layout == "bshd" else -3
    if query.ndim > 2 and query.shape[heads] != key.shape[heads] and enable_gqa is False:
        problem = f"query has {query.shape[heads]} heads and key {key.shape[heads]}, and enable_gqa is False"
        raise InputError(problem, remedy="enable_gqa=True for grouped-query attention (None accepts both)")
    if query.ndim > 4:
        raise InputError(f"{query.ndim}-D inputs cannot be exported", remedy="flatten the leading dimensions")
    if isinstance(attn_mask, torch.Tensor):
        _check_exported_mask(query, attn_mask)
        attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    if isinstance(bias, torch.Tensor) and bias.ndim > 1:
        bias = bias[(None,) * (4 - bias.ndim)]
    form = shapes.Form(query.ndim, layout)
    q, k, v = form.pack(*cast(query, key, value))
    if isinstance(q_offset, torch.SymInt):  # a length of the model: a value of the graph, not a number in it
        q_offset = torch.full((1,), q_offset, dtype=torch.int64, device=q.device)  # type: ignore[call-overload]
    window = None if window is None else tuple(None if end is None else _number("window", end, int) for end in window)
    scale, softcap = (
        None if x is None else _number(name, x, float) for name, x in (("scale", scale), ("softcap", softcap))
    )
    query_lengths, key_lengths = (torch.as_tensor(x, device=q.device) if isinstance(x, (list, tuple)) else x
                                  for x in (query_lengths, key_lengths))  # fmt: skip
    arguments = (attn_mask, float(dropout_p), bool(is_causal), scale, None, window, softcap, bias, sinks, query_lengths,
                 key_lengths, q_offset, variant)  # fmt: skip
    if torch.onnx.is_in_onnx_export() or torch.jit.is_tracing() or backend == "eager":
        results = _in_plain_operators(q, k, v, arguments, return_lse, return_weights, backend)
    else:
        from attn_dispatch import torch_op

        results = torch_op.call(q, k, v, *arguments, "bhsd", return_lse, return_weights, backend)
    return _unpacked(results, form, bool(return_lse), bool(return_weights))


def _number(name: str, value: Any, kind: type) -> Any:
    """A number of the call as one of Python's own: it is written into the graph."""
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        problem = f"{name} depends on a length of the model, which an exported call cannot hold"
        raise InputError(problem, remedy=f"a number for {name}; q_offset and lengths may be tensors")
    return kind(value)


def _unpacked(results: Any, form: shapes.Form, lse: bool, weights: bool) -> Any:
    """The results of a packed call in the caller's shape."""
    if isinstance(results, WithState):
        return WithState(form.unpack_out(results.out), results.state)
    if not isinstance(results, tuple):
        return form.unpack_out(results)
    return named_results([form.unpack_out(results[0]), *(form.unpack(x) for x in results[1:])], lse, weights)


def _in_plain_operators(
    q: Any, k: Any, v: Any, arguments: tuple[Any, ...], return_lse: Any, return_weights: Any, backend: Any
) -> Any:
    """The specification in ATen ops, for exporters that know no operator of ours."""
    if backend not in (None, "eager"):
        by = "torch.jit.trace" if torch.jit.is_tracing() else "torch.onnx.export"
        text = f"backend={backend!r} cannot be honoured by {by}"
        raise NoBackendError(f"{text}\n  try  attn_dispatch.export_onnx, or leave it out", {str(backend): []})
    mask, dropout_p, causal, scale, _, window, softcap, bias, sinks, query_lengths, key_lengths, offset, variant = (
        arguments
    )
    if not isinstance(variant, Softmax):
        name = type(getattr(variant, "inner", variant)).__name__
        raise InputError(f"torch.onnx.export cannot export {name}", remedy="attn_dispatch.export_onnx exports it")
    tensors = {"bias": bias, "sinks": sinks, "query_lengths": query_lengths, "key_lengths": key_lengths}
    tensors |= {"q_offset": offset} if isinstance(offset, torch.Tensor) else {}
    bound: Mask | None = None
    if isinstance(mask, Mask):
        bound, held = mask.bind("traced")  # not the cached one: Dynamo cannot enter cached_property's lock
        tensors |= held
    else:
        tensors |= {"attn_mask": mask}
    named = {name: x for name, x in tensors.items() if x is not None}
    descs = {name: TensorDesc(tuple(x.shape), dtype_name(x.dtype), x.device.type) for name, x in named.items()}
    query, key, value = (TensorDesc(tuple(x.shape), dtype_name(x.dtype), x.device.type) for x in (q, k, v))
    op = describe_traced(
        query, key, value, descs, mask=bound, dropout_p=dropout_p, is_causal=causal, scale=scale, window=window,
        softcap=softcap, q_offset=None if "q_offset" in named else offset, return_lse=return_lse,
        return_weights=return_weights,
    )  # fmt: skip
    raw = reference.attention(op, q, k, v, named)
    wanted = [raw.out, *([raw.lse] if return_lse else []), *([raw.weights] if return_weights else [])]
    results = [x for x in wanted if x is not None]
    return named_results(results, return_lse, return_weights)


def _check_exported_mask(query: torch.Tensor, mask: torch.Tensor) -> None:
    """The two mistakes of a mask that no operator would notice; the frontend's words, without a test of a length."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        remedy = "attn_mask.bool() (True = attend), or a float tensor, which is added to the scores"
        raise InputTypeError(f"attn_mask has dtype {dtype_name(mask.dtype)}; it must be bool or float", remedy=remedy)
    if query.ndim >= 4 and mask.ndim == 3 and mask.shape[0] != 1:
        problem = f"attn_mask {list(mask.shape)} of rank 3 is ambiguous: its first size may mean batch or heads"
        raise InputError(problem, remedy="attn_mask[:, None] for [B, 1, Sq, Skv], attn_mask[None] for [1, H, Sq, Skv]")


def describe_traced(
    query: TensorDesc,
    key: TensorDesc,
    value: TensorDesc,
    tensors: Mapping[str, TensorDesc],
    *,
    mask: Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    window: Any = None,
    softcap: float | None = None,
    q_offset: int | None = None,
    weight: Weight | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    return_state: bool = False,
) -> AttentionOp:
    """The op of a traced call, without any test of a length: lengths are symbols there, and a test would pin them.

    Args:
        query, key, value: four-dimensional; sizes may be symbols.
        tensors: descriptors of all other tensors by the names of `dispatch.attention`'s arguments, four-dimensional
            where they are a mask or bias, and those of the mask's own names.
        mask: a bound mask. weight: of the linear family; None is softmax.
    """
    whole: Mask = Causal() if is_causal else Full()
    if window is not None:
        ends = [None if end in (None, -1) else int(end) for end in window]
        whole = whole & (Causal() if ends == [None, 0] else Window(*ends))
    if mask is not None:
        whole = whole & mask
    score: list[ScoreTerm] = [SoftCap(float(softcap))] if softcap else []
    if "attn_mask" in tensors:
        if tensors["attn_mask"].dtype == "bool":
            whole = whole & Dense(Ref("attn_mask"))
        else:
            score.append(Bias(Ref("attn_mask")))
    for name, atom in (("query_lengths", QueryLengths), ("key_lengths", KeyLengths)):
        whole = whole & atom(Ref(name)) if name in tensors else whole
    if "bias" in tensors:
        score.append(Alibi(Ref("bias")) if len(tensors["bias"].shape) == 1 else Bias(Ref("bias")))
    # as the frontend resolves it, for any lengths: what has positions counts from the last key, is_causal from key 0
    decays = weight is not None and getattr(weight, "decay", None) is not None
    positional = whole.positional or decays or any(isinstance(term, Alibi) for term in score)
    offset: int | str | Ref = END if positional and not is_causal else 0
    if "q_offset" in tensors:
        offset = Ref("q_offset")
    elif q_offset is not None:
        offset = q_offset
    parts = [part for part in (whole.args if isinstance(whole, And) else (whole,)) if not isinstance(part, Full)]
    softmax = SoftmaxWeight(Ref("sinks") if "sinks" in tensors else None)
    return AttentionOp(
        query, key, value, scale=None if scale is None else float(scale), score=tuple(score),
        mask=And.of(*parts) if parts else Full(), q_offset=offset, weight=weight or softmax, dropout_p=dropout_p,
        outputs=Outputs(bool(return_lse), bool(return_weights), return_state), operands=tuple(tensors.items()),
        traced=True,
    )  # fmt: skip
