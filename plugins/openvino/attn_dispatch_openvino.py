"""``openvino``: the ScaledDotProductAttention op of OpenVINO's opset 13, compiled for the CPU.

What was found by running it (OpenVINO 2026.4.1, AVX-512 with bf16), and what follows here:

1. Without a precision hint a float32 model is computed in bfloat16 where the CPU has it (error 8e-3). The hint is f32.
2. A bfloat16 model takes the bf16 kernel whatever the hint says, and that one's errors reach 0.94 of the budget, those
   of float32 inside the graph 0.28. A float16 model is computed in bfloat16 unless the hint is f32. So both are
   converted to float32 inside the graph.
3. Grouped heads fail in four dimensions ("Shape inference of MatMul failed") and are right in five,
   ``[B, Hkv, groups, S, D]`` against ``[B, Hkv, 1, S, D]``.
4. ``causal`` counts from the first key, as torch's does, and makes the op ignore its mask: only a mask that is Causal
   and nothing else uses it.
5. An empty row is NaN; it is set to 0 here. NaN in a query row stays in that row. ``scale <= 0`` is right.
6. A compiled model is length-polymorphic (all sizes are dynamic) and takes 20 to 40 ms to make; one is kept for each
   `Form`. Requests are not thread-safe, so each thread has its own.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import threading
from dataclasses import dataclass
from typing import Any

import torch

from attn_dispatch.plugin import (
    AttentionOp,
    Backend,
    Bias,
    Capability,
    Causal,
    Cost,
    Executable,
    Full,
    Limit,
    Operands,
    Reason,
    dense_cost,
    hookimpl,
)

__all__ = ["Form", "OpenVino", "attn_dispatch_backends", "compiled"]

_MASKS = {"Full", "Causal", "Dense", "Columns", "KeyLengths", "KeyRange", "QueryLengths"}
_FEATURES = {"weight:Softmax", "score:Bias", "combine:And", "gqa", "dv_differs", "scattered", "scale<=0"}


class OpenVino(Backend):
    """``openvino.opset13.scaled_dot_product_attention`` through a compiled model; forward only."""

    name = "openvino"
    tested = "cpu"
    hints = {  # noqa: RUF012
        "grad": 'backend="sdpa_flash"',
        "lse": 'backend="sdpa_flash"',
        "weights": 'backend="eager"',
        "q_offset:nonzero": "densify_mask > openvino",
        "mask:Window": "densify_mask > openvino",
    }
    capabilities = (
        Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({"float32", "bfloat16", "float16"}),
            features=frozenset(_FEATURES | {f"mask:{word}" for word in _MASKS}),
            limits=tuple(Limit(name, minimum=1) for name in ("B", "Hq", "Sq", "Skv", "D", "Dv")),
            notes="forward only; dynamic shapes; an input that is not contiguous is copied",
        ),
    )

    def version(self) -> str:
        """OpenVINO's version; ``"none"`` when it is not installed."""
        try:
            return importlib.metadata.version("openvino")
        except importlib.metadata.PackageNotFoundError:
            return "none"

    def unavailable(self) -> Reason | None:
        if _is_installed():
            return None
        text = "openvino is not installed"
        return Reason("device", "library", None, "openvino", "pip install attn-dispatch-openvino", text)

    def compile(self, op: AttentionOp) -> Executable:
        compiled(Form.of(op))  # so that an op that OpenVINO cannot compile fails here, not in a call
        return Executable(_Runner(op))

    def estimate(self, op: AttentionOp) -> Cost:
        # the causal flag becomes a mask inside the graph: nothing is skipped
        cost = dense_cost(op)
        copies = 2.0 * op.key.itemsize * op.B * op.Hkv * op.Skv * (op.D + op.Dv) if "scattered" in op.features else 0.0
        return Cost(cost.flops, cost.bytes + copies, 3.0)


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("openvino") is not None


# --- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """All that can change the compiled model.

    Args:
        dtype: of query, key, value and output; inside the graph everything is float32.
        mask: dtype of the mask input, ``"boolean"`` or ``"f32"``; "" for none.
        causal: the op's own flag. grouped: heads have two dimensions. scale: a constant of the graph.
        threads: what torch uses.
    """

    dtype: str
    mask: str
    causal: bool
    grouped: bool
    scale: float
    threads: int

    @classmethod
    def of(cls, op: AttentionOp) -> Form:
        """The form of an op, on as many threads as torch has now."""
        has_bias = any(isinstance(term, Bias) for term in op.score)
        causal = isinstance(op.mask, Causal) and not has_bias
        mask = "f32" if has_bias else "" if causal or isinstance(op.mask, Full) else "boolean"
        return cls(op.dtype, mask, causal, op.groups > 1, op.effective_scale, torch.get_num_threads())


_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@functools.lru_cache(maxsize=256)
def compiled(form: Form) -> Any:
    """The compiled model of a form, kept; every size of its inputs is dynamic.

    Returns:
        an ``openvino.CompiledModel`` with the inputs query, key, value and, if ``form.mask``, a mask.
    """
    import openvino
    from openvino import opset13 as ops
    from openvino import properties
    from openvino.properties import hint

    kind = getattr(openvino.Type, _TYPES[form.dtype])
    shape = [-1] * (5 if form.grouped else 4)
    inputs = [ops.parameter(shape, kind, name=name) for name in ("query", "key", "value")]
    mask = ops.parameter(shape, getattr(openvino.Type, form.mask), name="mask") if form.mask else None
    inner = inputs if form.dtype == "float32" else [ops.convert(x, "f32") for x in inputs]
    scale = ops.constant(form.scale, openvino.Type.f32)
    out = ops.scaled_dot_product_attention(*inner, mask, scale, form.causal)
    out = out if form.dtype == "float32" else ops.convert(out, _TYPES[form.dtype])
    model = openvino.Model([out], inputs + ([mask] if mask is not None else []), "attention")
    config = {
        hint.inference_precision: openvino.Type.f32,
        hint.performance_mode: hint.PerformanceMode.LATENCY,
        hint.enable_cpu_pinning: False,  # the cores are torch's too
        properties.num_streams: 1,
        properties.inference_num_threads: form.threads,
    }
    return _core().compile_model(model, "CPU", config)


@functools.cache
def _core() -> Any:
    import openvino

    return openvino.Core()


# --- a call ----------------------------------------------------------------------------------------------------------


class _Runner:
    """``run`` of an op. OpenVINO reads torch's memory and writes the result into torch's memory."""

    def __init__(self, op: AttentionOp) -> None:
        self._op = op
        self._form = Form.of(op)
        self._local = threading.local()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> torch.Tensor:
        op = self._op
        out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype)
        mask, empty = _mask_of(op, q, k, t) if self._form.mask else (None, None)
        inputs = [x.detach().contiguous() for x in (q, k, v)]
        result = out
        if self._form.grouped:
            heads = (k.shape[1], q.shape[1] // k.shape[1])
            inputs = [inputs[0].unflatten(1, heads), *(x.unsqueeze(2) for x in inputs[1:])]
            result = out.unflatten(1, heads)
            if mask is not None:
                mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, heads)
        request = self._request()
        views = [_view(x) for x in (*inputs, *(() if mask is None else (mask,)))]
        for i, view in enumerate(views):
            request.set_input_tensor(i, view)
        request.set_output_tensor(0, _view(result))
        request.infer()
        if empty is not None and bool(empty.any()):
            out.masked_fill_(empty[..., None], 0.0)
        return out

    def _request(self) -> Any:
        """This thread's request, of a model for as many threads as torch has now."""
        threads = torch.get_num_threads()
        if getattr(self._local, "threads", None) != threads:
            self._local.request = compiled(Form.of(self._op)).create_infer_request()
            self._local.threads = threads
        return self._local.request


def _view(x: torch.Tensor) -> Any:
    """A contiguous CPU tensor as OpenVINO sees it, on the same memory."""
    import openvino

    if x.dtype == torch.bfloat16:  # numpy has no such type: its bits, and what they mean
        return openvino.Tensor(x.view(torch.int16).numpy(), openvino.Shape(list(x.shape)), openvino.Type.bf16)
    return openvino.Tensor(x.numpy(), shared_memory=True)


def _mask_of(
    op: AttentionOp, q: torch.Tensor, k: torch.Tensor, t: Operands
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Masks and biases as one contiguous tensor ``[B|1, H|1, Sq|1, Skv]``, and the empty rows ``[B|1, H|1, Sq|1]``."""
    sq, skv = q.shape[2], k.shape[2]
    allowed = None
    if not isinstance(op.mask, Full):
        rows = sq if op.mask.per_query else 1
        offset = op.static_offset()
        assert offset is not None, "a tensor offset is not declared"
        allowed = op.mask.dense(rows, skv, offset, t, q.device)
        allowed = allowed[(None,) * (4 - allowed.ndim)]
    biases = [t[term.bias.name].detach().float() for term in op.score if isinstance(term, Bias)]
    if not biases:
        assert allowed is not None
        return allowed.contiguous(), ~allowed.any(-1)
    total = functools.reduce(torch.add, biases)
    total = total[(None,) * (4 - total.ndim)]
    total = total if allowed is None else torch.where(allowed, total, -torch.inf)
    return total.contiguous(), torch.isneginf(total).all(-1)


@hookimpl
def attn_dispatch_backends() -> list[Backend]:
    """The one backend of this distribution."""
    return [OpenVino()]
