"""Attention inside a traced program: ``torch.compile``, ``torch.export``, ONNX export, functorch transforms.

==================  ============================================================================================
torch.compile       what torch's SDPA does as asked is traced as SDPA, so Inductor sees it and one graph serves all
                    lengths; everything else, and everything once somebody has chosen (`dispatch.use`, a pin, a
                    tuned result, a mode that measures), is the opaque operator ``attn_dispatch::attention``, which
                    dispatches at run time as an eager call would
torch.export        SDPA where it does what was asked, otherwise the specification in plain ATen ops: portable
ONNX export         always the specification: exporters and runtimes disagree about SDPA's masks, dead rows and scales
vmap, grad, jvp     an ordinary call whose op says ``traced`` and ``higher_order``; backends that cannot, refuse
==================  ============================================================================================
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from attn_dispatch import context, reference, shapes
from attn_dispatch.errors import InputError, InputTypeError, NoBackendError
from attn_dispatch.ir.atoms import Causal, Dense, Full, KeyLengths, QueryLengths, Window
from attn_dispatch.ir.masks import Mask
from attn_dispatch.ir.ops import END, AttentionOp, Outputs
from attn_dispatch.ir.scores import Alibi, Bias, ScoreTerm, SoftCap
from attn_dispatch.ir.tensors import Ref, TensorDesc, dtype_name
from attn_dispatch.ir.weights import Softmax as SoftmaxWeight
from attn_dispatch.variants import Softmax

__all__ = ["compiled", "exported", "is_transformed"]


def is_transformed(*tensors: Any) -> bool:
    """Whether a functorch transform (vmap, grad, jvp, functionalize) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _is_sdpa(query: Any, attn_mask: Any, is_causal: Any, scale: Any, layout: Any, extras: tuple[Any, ...]) -> bool:
    """Whether torch's SDPA computes this by the rules of DESIGN section 2, for every length and kernel of it."""
    if layout != "bhsd" or any(extra is not None and extra is not False for extra in extras):
        return False
    if scale is not None and scale <= 0:
        return False  # the fused CPU kernel gives NaN with its causal flag
    if attn_mask is None:
        return True
    if is_causal or not isinstance(attn_mask, torch.Tensor):
        return False
    if attn_mask.ndim == 3 and query.ndim >= 4:
        return False  # ambiguous; the frontend says so
    return attn_mask.dtype == torch.bool or attn_mask.dtype == query.dtype


@torch.compiler.assume_constant_result
def _somebody_chose() -> bool:
    """Whether a file or an earlier measurement may choose: read once, while the graph is traced."""
    from attn_dispatch.selection.tuned import may_choose

    return may_choose()


def compiled(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any,
    window: Any, softcap: Any, bias: Any, sinks: Any, query_lengths: Any, key_lengths: Any, q_offset: Any,
    variant: Any, layout: Any, return_lse: Any, return_weights: Any, backend: Any,
) -> Any:  # fmt: skip
    """`dispatch.attention` while Dynamo traces it."""
    softmax = None if isinstance(variant, Softmax) else variant
    extras = (window, softcap or None, bias, sinks, query_lengths, key_lengths, q_offset, softmax, return_lse,
              return_weights, backend, context.in_use)  # fmt: skip
    grouped = query.ndim > 2 and query.shape[-3] != key.shape[-3]
    refused = grouped and enable_gqa is False  # by the frontend, inside the operator: Dynamo cannot raise our errors
    if not refused and not _somebody_chose() and _is_sdpa(query, attn_mask, is_causal, scale, layout, extras):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
        )
    from attn_dispatch import torch_op

    return torch_op.call(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, window, softcap, bias, sinks,
        query_lengths, key_lengths, q_offset, variant, layout, return_lse, return_weights, backend,
    )  # fmt: skip


def exported(
    query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any,
    window: Any, softcap: Any, bias: Any, sinks: Any, query_lengths: Any, key_lengths: Any, q_offset: Any,
    variant: Any, layout: Any, return_lse: Any, return_weights: Any, backend: Any,
) -> Any:  # fmt: skip
    """`dispatch.attention` while torch.export or the ONNX exporter traces it: plain ATen ops, no test of a length."""
    if backend not in (None, "eager"):
        text = f"backend={backend!r} cannot be honoured in an export: it would have to be an operator of its own"
        raise NoBackendError(f"{text}\n  try  leave it out, or backend='eager'", {str(backend): []})
    if not isinstance(variant, Softmax):
        raise InputError(
            f"variant {type(variant).__name__} cannot be exported yet", remedy="export a model with softmax attention"
        )
    extras = (window, softcap or None, bias, sinks, query_lengths, key_lengths, q_offset, return_lse, return_weights)
    heads = -2 if layout == "bshd" else -3
    grouped = query.ndim > 2 and query.shape[heads] != key.shape[heads]
    if grouped and enable_gqa is False:
        problem = f"query has {query.shape[heads]} heads and key {key.shape[heads]}, and enable_gqa is False"
        raise InputError(problem, remedy="enable_gqa=True for grouped-query attention (None accepts both)")
    if isinstance(attn_mask, torch.Tensor):
        _check_exported_mask(query, attn_mask)
    onnx = torch.onnx.is_in_onnx_export()
    if not onnx and backend is None and _is_sdpa(query, attn_mask, is_causal, scale, layout, extras):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=grouped
        )
    rank = query.ndim
    if rank > 4:
        raise InputError(f"{rank}-D inputs cannot be exported", remedy="flatten the leading dimensions")
    form = shapes.Form(rank, layout)
    q, k, v = form.pack(query, key, value)
    op, tensors = _export_op(
        q, k, v, attn_mask, dropout_p, is_causal, scale, window, softcap, bias, sinks, query_lengths, key_lengths,
        q_offset, return_lse, return_weights,
    )  # fmt: skip
    raw = reference.attention(op, q, k, v, tensors)
    out = form.unpack_out(raw.out)
    results = [out]
    if return_lse and raw.lse is not None:
        results.append(form.unpack(raw.lse))
    if return_weights and raw.weights is not None:
        results.append(form.unpack(raw.weights))
    return tuple(results) if len(results) > 1 else out


def _check_exported_mask(query: torch.Tensor, mask: torch.Tensor) -> None:
    """The two mistakes of a mask that no operator would notice; the frontend's words, without a test of a length."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        remedy = "attn_mask.bool() (True = attend), or a float tensor, which is added to the scores"
        raise InputTypeError(f"attn_mask has dtype {dtype_name(mask.dtype)}; it must be bool or float", remedy=remedy)
    if query.ndim >= 4 and mask.ndim == 3 and mask.shape[0] != 1:
        problem = f"attn_mask {list(mask.shape)} of rank 3 is ambiguous: its first size may mean batch or heads"
        raise InputError(problem, remedy="attn_mask[:, None] for [B, 1, Sq, Skv], attn_mask[None] for [1, H, Sq, Skv]")


def _export_op(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, window: Any, softcap: Any,
    bias: Any, sinks: Any, query_lengths: Any, key_lengths: Any, q_offset: Any, return_lse: Any, return_weights: Any,
) -> tuple[AttentionOp, dict[str, torch.Tensor]]:  # fmt: skip
    """The op without any test of a length: lengths are symbols here, and a test would pin them."""
    mask: Mask = Full()
    score: list[ScoreTerm] = []
    tensors: dict[str, torch.Tensor] = {}
    mask = mask & Causal() if is_causal else mask
    end_aligned = False
    if window is not None:
        ends = [None if end in (None, -1) else int(end) for end in window]
        mask, end_aligned = mask & Window(*ends), True
    if isinstance(attn_mask, Mask):
        bound, tensors = attn_mask.bind()
        tensors = dict(tensors)
        mask, end_aligned = mask & bound, end_aligned or bound.positional
    elif isinstance(attn_mask, torch.Tensor):
        four = attn_mask[(None,) * (4 - attn_mask.ndim)]
        tensors["attn_mask"] = four
        if attn_mask.dtype == torch.bool:
            mask = mask & Dense(Ref("attn_mask"))
        else:
            score.append(Bias(Ref("attn_mask")))
    for name, value, atom in (
        ("query_lengths", query_lengths, QueryLengths),
        ("key_lengths", key_lengths, KeyLengths),
    ):
        if value is not None:
            tensors[name] = value
            mask = mask & atom(Ref(name))
    if softcap:
        score.insert(0, SoftCap(float(softcap)))
    if bias is not None:
        tensors["bias"] = bias if bias.ndim == 1 else bias[(None,) * (4 - bias.ndim)]
        score.append(Alibi(Ref("bias")) if bias.ndim == 1 else Bias(Ref("bias")))
    weight = SoftmaxWeight(Ref("sinks") if sinks is not None else None)
    tensors |= {"sinks": sinks} if sinks is not None else {}
    offset: int | str | Ref = END if end_aligned and not is_causal else 0
    if isinstance(q_offset, torch.Tensor):
        tensors["q_offset"] = q_offset
        offset = Ref("q_offset")
    elif q_offset is not None:
        offset = q_offset
    query, key, value = (TensorDesc(tuple(x.shape), dtype_name(x.dtype), x.device.type) for x in (q, k, v))
    op = AttentionOp(
        query, key, value, scale=q.shape[-1] ** -0.5 if scale is None else float(scale), score=tuple(score), mask=mask,
        q_offset=offset, weight=weight, dropout_p=dropout_p, outputs=Outputs(return_lse, return_weights), traced=True,
    )  # fmt: skip
    return op, tensors
