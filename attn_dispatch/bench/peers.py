"""Other libraries on the same op: compiled flex_attention, onnxruntime, OpenVINO; forward only.

Each maker prepares everything that is not timed (a block mask, a compiled graph, a session) and raises
`NotApplicable` with the reason where the library is missing, does not do this op, or fails while it prepares.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from attn_dispatch.bench.by_hand import allowed_pairs, float_mask, is_causal_square
from attn_dispatch.bench.contenders import Contender, Forward, NotApplicable
from attn_dispatch.ir import atoms
from attn_dispatch.ir.masks import And, Mask, Not, Or
from attn_dispatch.ir.operands import resolve
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias, SoftCap
from attn_dispatch.ir.weights import Softmax
from attn_dispatch.selection.samples import Sample

__all__ = ["PEERS", "peers"]


def peers(op: AttentionOp, sample: Sample, names: tuple[str, ...]) -> list[Contender]:
    """The peers of these names, whether or not they can run the op: they say so when they are made.

    A library may be one of our backends too; as a peer it is called "peer: " and its name.
    """
    return [
        Contender(f"peer: {name}", "peer", lambda make=PEERS[name]: make(op, sample), differentiable=False)  # type: ignore[misc]
        for name in names
    ]


def _need_softmax_output(op: AttentionOp, device: str = "") -> None:
    if device and op.device != device:
        raise NotApplicable(f"it runs on {device} here, not on {op.device}")
    if not isinstance(op.weight, Softmax):
        raise NotApplicable("no linear attention")
    if op.dropout_p or op.outputs.lse or op.outputs.weights:
        raise NotApplicable("no dropout, lse or weights")


# --- flex_attention --------------------------------------------------------------------------------------------------

Index = torch.Tensor
MaskMod = Callable[[Index, Index, Index, Index], torch.Tensor]


def _flex(op: AttentionOp, sample: Sample) -> Forward:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    _need_softmax_output(op)
    q, k, v = sample.query, sample.key, sample.value
    block_mask = None
    if not isinstance(op.mask, atoms.Full):
        mod = _mask_mod(op.mask, op, sample)
        batched = any(name for name in op.mask.refs() if op.operand(name).shape[0] == op.B > 1)
        block_mask = create_block_mask(mod, op.B if batched else None, None, op.Sq, op.Skv, device=op.device)
    score_mod = _score_mod(op, sample)
    weight = op.weight
    assert isinstance(weight, Softmax)
    sinks = None if weight.sinks is None else sample.operands[weight.sinks.name].view(1, -1, 1)
    gqa, scale = op.groups != 1, op.scale

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"score_mod": score_mod, "block_mask": block_mask, "scale": scale, "enable_gqa": gqa}
        if sinks is None:
            return flex_attention(q, k, v, **options)
        out, lse = flex_attention(q, k, v, return_lse=True, **options)
        return out * torch.sigmoid(lse - sinks)[..., None].to(out.dtype)

    torch._dynamo.reset()  # each op is a graph of its own; the limit of recompilations is not the peer's fault
    compiled = torch.compile(plain, dynamic=False, fullgraph=True)
    compiled(q, k, v)
    return lambda: compiled(q, k, v)


def _mask_mod(mask: Mask, op: AttentionOp, sample: Sample) -> MaskMod:
    """The mask as flex_attention takes it, a function of indices."""
    offset = op.static_offset()
    if offset is None:
        raise NotApplicable("an offset per sequence")
    if isinstance(mask, (And, Or)):
        mods = [_mask_mod(part, op, sample) for part in mask.args]
        return _all_of(mods) if isinstance(mask, And) else _any_of(mods)
    if isinstance(mask, Not):
        inner = _mask_mod(mask.arg, op, sample)
        return lambda b, h, i, j: ~inner(b, h, i, j)
    if isinstance(mask, atoms.Causal):
        return lambda b, h, i, j: j <= i + offset
    if isinstance(mask, atoms.Window):
        left, right = (op.Sq + op.Skv if end is None else end for end in (mask.left, mask.right))
        return lambda b, h, i, j: (j >= i + offset - left) & (j <= i + offset + right)
    if isinstance(mask, (atoms.KeyLengths, atoms.QueryLengths)):
        lengths = resolve(mask.lengths, sample.operands).expand(op.B).contiguous()
        if isinstance(mask, atoms.KeyLengths):
            return lambda b, h, i, j: j < lengths[b]
        return lambda b, h, i, j: i < lengths[b]
    if isinstance(mask, atoms.Columns):
        kept = resolve(mask.kept, sample.operands)
        rows = (kept[None] if kept.ndim == 1 else kept).expand(op.B, op.Skv).contiguous()
        return lambda b, h, i, j: rows[b, j]
    if isinstance(mask, atoms.Segments):
        ids = [resolve(x, sample.operands) for x in (mask.queries, mask.keys)]
        mine, theirs = ((x[None] if x.ndim == 1 else x).expand(op.B, -1).contiguous() for x in ids)
        return lambda b, h, i, j: mine[b, i] == theirs[b, j]
    raise NotApplicable(f"{mask} is not written as a mask_mod here")


def _all_of(mods: list[MaskMod]) -> MaskMod:
    from torch.nn.attention.flex_attention import and_masks

    return and_masks(*mods)


def _any_of(mods: list[MaskMod]) -> MaskMod:
    from torch.nn.attention.flex_attention import or_masks

    return or_masks(*mods)


def _score_mod(op: AttentionOp, sample: Sample) -> Callable[..., torch.Tensor] | None:
    if not op.score:
        return None
    offset = op.static_offset() or 0
    steps: list[Callable[..., torch.Tensor]] = []
    for term in op.score:
        if isinstance(term, SoftCap):
            steps.append(lambda s, b, h, i, j, cap=term.cap: cap * torch.tanh(s / cap))
        elif isinstance(term, Bias):
            bias = sample.operands[term.bias.name].expand(-1, op.Hq, op.Sq, op.Skv)
            one = bias.shape[0] == 1
            steps.append(lambda s, b, h, i, j, bias=bias, one=one: s + (bias[0, h, i, j] if one else bias[b, h, i, j]))
        elif isinstance(term, Alibi):
            slopes = sample.operands[term.slopes.name]
            steps.append(lambda s, b, h, i, j, slopes=slopes: s - slopes[h] * (i + offset - j).abs())

    def score_mod(score: Any, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
        for step in steps:
            score = step(score, b, h, i, j)
        return score

    return score_mod


# --- onnxruntime -----------------------------------------------------------------------------------------------------


def _onnxruntime(op: AttentionOp, sample: Sample) -> Forward:
    for name in ("onnx", "onnxruntime"):
        if importlib.util.find_spec(name) is None:
            raise NotApplicable(f"{name} is not installed")
    import numpy as np
    import onnxruntime

    _need_softmax_output(op, "cpu")
    assert isinstance(op.weight, Softmax)
    if op.weight.sinks is not None:
        raise NotApplicable("ONNX Attention has no sinks")
    kinds = {"float32": np.float32, "float16": np.float16}
    if op.dtype not in kinds:
        raise NotApplicable(f"its CPU kernels have no {op.dtype}")
    if op.effective_scale <= 0:
        raise NotApplicable("it wants a positive scale")
    named = {"Q": sample.query.detach(), "K": sample.key.detach(), "V": sample.value.detach()}
    causal = is_causal_square(op) and not any(isinstance(term, (Bias, Alibi)) for term in op.score)
    if not causal and (mask := _onnx_mask(op, sample)) is not None:
        named["M"] = mask
    in_rows = all(x.transpose(1, 2).is_contiguous() for x in list(named.values())[:3])
    if in_rows:  # heads side by side: the node takes [B, S, H * D] as they lie, and returns the same
        named |= {name: named[name].transpose(1, 2).flatten(2) for name in "QKV"}
    named, refresh = _made_contiguous(named)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # spinning would slow the others' turns
    shape = (op.B, op.Sq, op.Hq * op.Dv) if in_rows else (op.B, op.Hq, op.Sq, op.Dv)
    model = _onnx_model(op, named, causal, shape)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, x in named.items():
        kind = np.bool_ if x.dtype == torch.bool else kinds[op.dtype]
        binding.bind_input(name, "cpu", 0, kind, tuple(x.shape), x.data_ptr())

    def forward() -> torch.Tensor:
        refresh()
        out = named["Q"].new_empty(shape)  # a result of its own, as everybody's
        binding.bind_output("Y", "cpu", 0, kinds[op.dtype], shape, out.data_ptr())
        session.run_with_iobinding(binding)
        return out.unflatten(2, (op.Hq, op.Dv)).transpose(1, 2) if in_rows else out

    forward.tensors = named  # type: ignore[attr-defined]  # a binding keeps no tensor alive
    return forward


def _made_contiguous(given: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], Callable[[], None]]:
    """What a library that reads by address gets, and what copies the present values into it at every call.

    Only what cannot be read in place is copied; a mask that is broadcast is written out once, beforehand.
    """
    named = {name: x.contiguous() for name, x in given.items()}
    copied = [(named[name], x) for name, x in given.items() if not x.is_contiguous() and 0 not in x.stride()]

    def refresh() -> None:
        for place, x in copied:
            place.copy_(x)

    return named, refresh


def _onnx_mask(op: AttentionOp, sample: Sample) -> torch.Tensor | None:
    """``[B|1, H|1, Sq, Skv]``; its CPU kernel does not broadcast over queries."""
    if any(isinstance(term, (Bias, Alibi)) for term in op.score):
        mask = float_mask(op, sample)
    else:
        allowed = allowed_pairs(op, sample)
        if allowed is None:
            return None
        mask = allowed
    return mask.expand(mask.shape[0], mask.shape[1], op.Sq, op.Skv)


def _onnx_model(op: AttentionOp, named: dict[str, torch.Tensor], causal: bool, shape: tuple[int, ...]) -> bytes:
    from onnx import TensorProto, helper

    kind = TensorProto.FLOAT if op.dtype == "float32" else TensorProto.FLOAT16

    def info(name: str, x: torch.Tensor) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.BOOL if x.dtype == torch.bool else kind, list(x.shape))

    cap = next((term.cap for term in op.score if isinstance(term, SoftCap)), 0.0)
    heads: dict[str, Any] = {"q_num_heads": op.Hq, "kv_num_heads": op.Hkv} if len(shape) == 3 else {}
    node = helper.make_node(
        "Attention", list(named), ["Y"], is_causal=int(causal), scale=op.effective_scale, softcap=float(cap), **heads
    )
    out = helper.make_tensor_value_info("Y", kind, list(shape))
    graph = helper.make_graph([node], "attention", [info(name, x) for name, x in named.items()], [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=10)
    return model.SerializeToString()


# --- OpenVINO --------------------------------------------------------------------------------------------------------


def _openvino(op: AttentionOp, sample: Sample) -> Forward:
    if importlib.util.find_spec("openvino") is None:
        raise NotApplicable("openvino is not installed")
    import openvino
    from openvino import opset15 as ops

    _need_softmax_output(op, "cpu")
    assert isinstance(op.weight, Softmax)
    if op.weight.sinks is not None or any(isinstance(term, SoftCap) for term in op.score):
        raise NotApplicable("no sinks or soft caps")
    kinds = {"float32": openvino.Type.f32, "float16": openvino.Type.f16}
    if op.dtype not in kinds:
        raise NotApplicable(f"no {op.dtype} from torch")
    kind = kinds[op.dtype]
    given = {"Q": sample.query.detach(), "K": sample.key.detach(), "V": sample.value.detach()}
    inputs = [ops.parameter(list(x.shape), kind) for x in given.values()]
    q, k, v = inputs[0], *(_repeated(ops, x, op) for x in inputs[1:])
    causal = is_causal_square(op) and not op.score
    mask = None if causal or (op.mask == atoms.Full() and not op.score) else float_mask(op, sample)
    if mask is not None:
        given["M"] = mask.expand(mask.shape[0], mask.shape[1], op.Sq, op.Skv)
        inputs.append(ops.parameter(list(given["M"].shape), kind))
    named, refresh = _made_contiguous(given)
    values = list(named.values())
    scale = ops.constant(op.effective_scale, kind)
    zero = ops.constant(0.0, kind)  # a scale without a mask: the operator wants a zero in the mask's place
    node = ops.scaled_dot_product_attention(q, k, v, inputs[3] if mask is not None else zero, scale, causal=causal)
    # float32 stays float32: the CPU plugin would take bfloat16 where the processor has it
    config = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": kind.get_type_name()}
    config |= {"PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(openvino.Model([node], inputs, "attention"), "CPU", config)
    request = compiled.create_infer_request()
    for index, x in enumerate(values):
        request.set_input_tensor(index, openvino.Tensor(x.numpy(), shared_memory=True))

    def forward() -> torch.Tensor:
        refresh()
        out = values[0].new_empty((op.B, op.Hq, op.Sq, op.Dv))
        request.set_output_tensor(0, openvino.Tensor(out.numpy(), shared_memory=True))
        request.infer()
        return out

    forward.tensors = values  # type: ignore[attr-defined]  # the request shares their memory
    return forward


def _repeated(ops: Any, x: Any, op: AttentionOp) -> Any:
    """Keys or values repeated to the query heads, inside the graph: the operator does not group heads."""
    if op.groups == 1:
        return x
    b, h, s, d = list(x.shape)
    apart = ops.reshape(x, ops.constant([b, h, 1, s, d]), False)
    wide = ops.broadcast(apart, ops.constant([b, h, op.groups, s, d]))
    return ops.reshape(wide, ops.constant([b, op.Hq, s, d]), False)


PEERS: dict[str, Callable[[AttentionOp, Sample], Forward]] = {
    "flex": _flex,
    "onnxruntime": _onnxruntime,
    "openvino": _openvino,
}
