"""From an op to FlashInfer's wrappers: which one, what it plans with, and its results in our terms.

1. Without key lengths and sinks: `BatchPrefillWithRaggedKVCacheWrapper` over packed rows ``[B * S, H, D]``.
2. With key lengths or sinks, and for one query row: a paged wrapper over the keys where they lie. ``[B, Hkv, Skv, D]``
   is a cache of B pages of Skv keys in its ``HND`` layout, so nothing is copied; sequence b has page b alone, with
   ``key_lengths[b]`` keys in it. One row goes to the decode wrapper, sinks to the sink wrapper.
3. ``plan`` runs again when a size or the key lengths change. Lengths count as the same while they lie in the same
   memory with the same version counter, the mark that autograd knows changed tensors by: all layers of a decode step
   share one plan. Planning reads the lengths on the host, so it waits for the device.
4. Its lse is in base 2. An empty row is 0 with lse -inf (before 0.6.19 about -5e4, which is -inf here); a row of NaN
   loses it in lse and gets it back here.
5. A workspace and a plan belong to one thread, device and stream: two streams may run at once. While a CUDA graph is
   captured nothing can be planned, so the plan of the warm-up serves, whatever stream that ran on.
"""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import torch

from attn_dispatch.plugin import AttentionOp, BackendError, KeyLengths, Operands, Raw, Ref, SoftCap, Softmax
from attn_dispatch_flashinfer.backend import (
    has_sinks,
    is_causal,
    key_end,
    leaves_rows_empty,
    mask_parts,
    window_left,
)

__all__ = ["Planned", "in_our_terms", "workspace"]

WORKSPACE_BYTES = 128 << 20  # what FlashInfer recommends
_buffers = threading.local()


def workspace(device: torch.device) -> torch.Tensor:
    """The workspace of this thread and stream on a device; zeroed, as the decode wrapper wants it for its first use."""
    if not hasattr(_buffers, "by_stream"):
        _buffers.by_stream = {}
    key = (device, _stream(device))
    if key not in _buffers.by_stream:
        _buffers.by_stream[key] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return _buffers.by_stream[key]


def _stream(device: torch.device) -> int:
    """The handle of the stream that work for a device is queued on."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def in_our_terms(out: torch.Tensor, lse: torch.Tensor, masks_with_finite: bool) -> torch.Tensor:
    """lse of rows ``[..., H]`` in base e, NaN where out ``[..., H, D]`` is; rule 4."""
    lse = lse.float()
    if masks_with_finite:
        lse = torch.where(lse <= -4e4, -math.inf, lse)
    return torch.where(torch.isnan(out[..., 0]), math.nan, lse * math.log(2))


class _Plan(NamedTuple):
    """A planned wrapper, what it was planned for, and the lengths, so that no other tensor gets their memory."""

    key: tuple[Any, ...]
    wrapper: Any
    lengths: torch.Tensor | None = None


class Planned:
    """``run`` of an op: a wrapper for each thread, device and stream, planned when that is needed."""

    def __init__(self, library: Any, op: AttentionOp, masks_with_finite: bool) -> None:
        self._library, self._op, self._masks_with_finite = library, op, masks_with_finite
        self._lengths = next((p.lengths for p in mask_parts(op.mask) if isinstance(p, KeyLengths)), None)
        self._sinks = op.weight.sinks if isinstance(op.weight, Softmax) else None
        self._cap = next((term.cap for term in op.score if isinstance(term, SoftCap)), None)
        self._local = threading.local()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
        b, hq, sq, d = q.shape
        end = key_end(self._op, sq, k.shape[2])
        if end is None or (self._masks_with_finite and leaves_rows_empty(self._op, sq, end)):
            # a rewrite that changes lengths after the op was checked
            problem = f"q_offset {self._op.q_offset} with {sq} queries and {k.shape[2]} keys"
            why = "positions count from the last key" if end is None else "rows without a key need flashinfer 0.6.19"
            raise BackendError(f"compiled for {self._op}, and run with {problem}: {why}")
        if end < k.shape[2]:
            k, v = k[:, :, :end], v[:, :, :end]
        rows = q.transpose(1, 2).reshape(b * sq, hq, d)
        wants_lse = self._op.outputs.lse
        if self._lengths is None and not has_sinks(self._op) and sq > 1:
            packed = (x.transpose(1, 2).reshape(b * x.shape[2], x.shape[1], x.shape[3]) for x in (k, v))
            result = self._ragged(q, k).run(rows, *packed, return_lse=wants_lse)
        elif self._sinks is not None:
            sinks = t[self._sinks.name].detach().float().contiguous()
            result = self._paged(q, k, t).run(rows, _alike(k, v), sinks, self._op.effective_scale)
        else:
            result = self._paged(q, k, t).run(rows, _alike(k, v), return_lse=wants_lse)
        out, lse = result if wants_lse else (result, None)
        ours = out.unflatten(0, (b, sq)).transpose(1, 2)
        if lse is None:
            return ours
        lse = in_our_terms(out, lse, self._masks_with_finite)
        return Raw(ours, lse.unflatten(0, (b, sq)).transpose(1, 2))

    # --- plans -----------------------------------------------------------------------------------------------------

    def _common(self, q: torch.Tensor) -> dict[str, Any]:
        """What every plan is told."""
        found = {"window_left": window_left(self._op), "q_data_type": q.dtype, "kv_data_type": q.dtype}
        if has_sinks(self._op):  # its kernel takes the scale at run time
            return found
        return found | {"sm_scale": self._op.effective_scale, "logits_soft_cap": self._cap}

    def _kept(self, device: torch.device, key: tuple[Any, ...]) -> Any:
        """The wrapper that is planned for this, or None; rule 5."""
        plans, here = self._plans(), (device, _stream(device))
        found = list(plans.values()) if _is_capturing(device) else [plans[here]] if here in plans else []
        return next((plan.wrapper for plan in found if plan.key == key), None)

    def _keep(self, device: torch.device, plan: _Plan) -> Any:
        self._plans()[device, _stream(device)] = plan
        return plan.wrapper

    def _plans(self) -> dict[tuple[torch.device, int], _Plan]:
        if not hasattr(self._local, "plans"):
            self._local.plans = {}
        return self._local.plans

    def _ragged(self, q: torch.Tensor, k: torch.Tensor) -> Any:
        b, hq, sq, d = q.shape
        skv, hkv = k.shape[2], k.shape[1]
        key = (b, sq, skv, q.device)
        kept = self._kept(q.device, key)
        if kept is not None:
            return kept
        wrapper = self._wrapper("BatchPrefillWithRaggedKVCacheWrapper", q.device, kv_layout="NHD")
        ends_q, ends_k = (_ends(b, n, q.device) for n in (sq, skv))
        wrapper.plan(ends_q, ends_k, hq, hkv, d, causal=is_causal(self._op), **self._common(q))
        return self._keep(q.device, _Plan(key, wrapper))

    def _paged(self, q: torch.Tensor, k: torch.Tensor, t: Operands) -> Any:
        b, hq, sq, d = q.shape
        skv, hkv = k.shape[2], k.shape[1]
        lengths = None if self._lengths is None else _of(self._lengths, t, q.device)
        key = (b, sq, skv, q.device, _mark(lengths))
        kept = None if key[-1] is None else self._kept(q.device, key)
        if kept is not None:
            return kept
        pages = _ends(b, 1, q.device), torch.arange(b, dtype=torch.int32, device=q.device)
        used = torch.full((b,), skv, dtype=torch.int32, device=q.device)
        if lengths is not None:
            used = lengths.clamp(0, skv).to(torch.int32).expand(b).contiguous()
        common = self._common(q)
        if has_sinks(self._op):
            sizes = {"head_dim_qk": d, "head_dim_vo": d, "window_left": common["window_left"]}
            kinds = {"q_data_type": q.dtype, "kv_data_type": q.dtype}
            name = "BatchAttentionWithAttentionSinkWrapper"
            wrapper = self._wrapper(name, q.device, kv_layout="HND", **kinds, **sizes)
        elif sq == 1:
            tensor_cores = hq // hkv > 2  # the other kernel has few group sizes
            name = "BatchDecodeWithPagedKVCacheWrapper"
            wrapper = self._wrapper(name, q.device, kv_layout="HND", use_tensor_cores=tensor_cores)
            wrapper.plan(*pages, used, hq, hkv, d, skv, **common)
        else:
            wrapper = self._wrapper("BatchPrefillWithPagedKVCacheWrapper", q.device, kv_layout="HND")
        if has_sinks(self._op) or sq > 1:
            ends_q = _ends(b, sq, q.device)
            wrapper.plan(ends_q, *pages, used, hq, hkv, d, skv, causal=is_causal(self._op), **common)
        return self._keep(q.device, _Plan(key, wrapper, lengths))

    def _wrapper(self, name: str, device: torch.device, **options: Any) -> Any:
        """A wrapper of the library.

        Raises:
            BackendError: the installed version has none of that name.
        """
        kind = getattr(self._library, name, None)
        if kind is None:
            raise BackendError(f"the installed flashinfer has no {name}; sinks need 0.4")
        kind = _named_by_size(self._library, kind, options["head_dim_qk"]) if "head_dim_qk" in options else kind
        return kind(workspace(device), **options)


def _named_by_size(library: Any, kind: Any, head_dim: int) -> Any:
    """The sink wrapper with the head size in the name of its kernels.

    Its own name for them has dtype and window alone, so that in one process and on disk a second head size would meet
    the library that was built for the first. The name passes through the constructor of its base, ``jit_args[0]``.
    """

    class Named(library.BatchPrefillWithPagedKVCacheWrapper):
        def __init__(self, *args: Any, jit_args: Any = None, **options: Any) -> None:
            if jit_args is not None:
                jit_args = [f"{jit_args[0]}_head_dim_{head_dim}", *jit_args[1:]]
            super().__init__(*args, jit_args=jit_args, **options)

    return type(kind.__name__, (kind, Named), {})  # the constructor of kind calls that of Named, which calls the base's


def _alike(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with the same strides, which the paged kernels take one set of; copied when they differ."""
    if k.stride() == v.stride():
        return k, v
    # flat and back, since dimensions of size 1 keep strides of their own in what counts as contiguous
    return k.contiguous().view(-1).view(k.shape), v.contiguous().view(-1).view(v.shape)


def _ends(count: int, length: int, device: torch.device) -> torch.Tensor:
    """``[0, length, 2 * length, ...]``, int32."""
    return torch.arange(count + 1, dtype=torch.int32, device=device) * length


def _mark(lengths: torch.Tensor | None) -> Any:
    """What changes when the lengths do; None where that cannot be told (inference tensors count no versions)."""
    if lengths is None:
        return ()
    return None if lengths.is_inference() else (lengths.data_ptr(), lengths._version, tuple(lengths.shape))


def _of(operand: Any, t: Operands, device: torch.device) -> torch.Tensor:
    """The tensor of a mask's operand: named, or a constant table."""
    return t[operand.name] if isinstance(operand, Ref) else operand.tensor(device)
