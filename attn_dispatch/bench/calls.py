"""From an op back to the call: the arguments of `dispatch.attention` whose canonical op is a given one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from attn_dispatch import dispatch
from attn_dispatch.errors import InputError
from attn_dispatch.ir.atoms import Causal, Columns, Dense, Full, KeyLengths, QueryLengths, Window
from attn_dispatch.ir.masks import And, Mask
from attn_dispatch.ir.operands import Held, Operand
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Alibi, Bias, SoftCap
from attn_dispatch.ir.tensors import Ref
from attn_dispatch.ir.weights import Linear, Softmax
from attn_dispatch.selection.samples import Sample
from attn_dispatch.variants import LinearAttention, LinearState, Retention

__all__ = ["Call", "call_of", "op_of", "written_out"]


class Call(NamedTuple):
    """Arguments of `dispatch.attention`: query, key and value in the op's layout, and the rest."""

    args: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    kwargs: dict[str, Any]


def call_of(op: AttentionOp, sample: Sample) -> Call:
    """The call that an op describes, with a sample's tensors, written as a person would.

    Args:
        op: a canonical op. sample: tensors that fit it.

    Raises:
        InputError: no call gives this op: it was traced, or its tensors have names that no argument gives.

    Example:
        >>> from attn_dispatch.ir.tensors import TensorDesc
        >>> from attn_dispatch.selection.samples import make_sample
        >>> x = TensorDesc((1, 2, 5, 8), "float32")
        >>> op = AttentionOp(x, x, x, scale=1.0, mask=Causal())
        >>> call_of(op, make_sample(op)).kwargs
        {'scale': 1.0, 'is_causal': True}
    """
    for word in ("traced", "higher_order"):
        if getattr(op, word):
            raise InputError(f"no plain call gives an op that is {word}", asked=str(op))
    kwargs: dict[str, Any] = {}
    if op.scale is not None and op.scale != (op.D**-0.5 if op.D else 1.0):
        kwargs["scale"] = op.scale
    kwargs |= {"enable_gqa": True} if op.groups != 1 else {}
    kwargs |= {"dropout_p": op.dropout_p} if op.dropout_p else {}
    kwargs |= {"layout": op.layout} if op.layout != "bhsd" else {}
    kwargs |= {"return_lse": True} if op.outputs.lse else {}
    kwargs |= {"return_weights": True} if op.outputs.weights else {}
    kwargs |= _scores(op, sample) | _weight(op, sample)
    kwargs |= _mask(op, sample, kwargs)
    q, k, v = sample.query, sample.key, sample.value
    if op.layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return Call((q, k, v), kwargs)


def written_out(call: Call) -> Callable[[], Any]:
    """``lambda: attention(q, k, v, scale=scale)``, as it stands in a model, and as the others are called.

    Keywords from a dict, by ``**`` or `functools.partial`, cost half a microsecond, which is nobody's attention.

    Example:
        >>> x = torch.ones(1, 2, 4, 8)
        >>> written_out(Call((x, x, x), {"is_causal": True, "return_lse": True}))().lse.shape
        torch.Size([1, 2, 4])
    """
    words = ", ".join(["q", "k", "v", *(f"{name}={name}" for name in call.kwargs)])
    q, k, v = call.args
    known = {"attention": dispatch.attention, "q": q, "k": k, "v": v, **call.kwargs}
    return eval(f"lambda: attention({words})", known)  # the names of our own arguments, and nothing of a caller's


def op_of(call: Call) -> AttentionOp:
    """The canonical op of a call, as the dispatcher sees it; runs nothing."""
    return dispatch.explain(*call.args, **call.kwargs).op


def _scores(op: AttentionOp, sample: Sample) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for term in op.score:
        if isinstance(term, SoftCap):
            found["softcap"] = term.cap
        elif isinstance(term, Bias) and term.bias.name in ("bias", "attn_mask"):
            found[term.bias.name] = sample.operands[term.bias.name]
        elif isinstance(term, Alibi) and term.slopes.name == "bias":
            found["bias"] = sample.operands["bias"]
        else:
            raise InputError(f"no argument gives the score term {term}", asked=str(op))
    return found


def _weight(op: AttentionOp, sample: Sample) -> dict[str, Any]:
    weight = op.weight
    if isinstance(weight, Softmax):
        return {} if weight.sinks is None else {"sinks": sample.operands[weight.sinks.name]}
    assert isinstance(weight, Linear)
    found: dict[str, Any] = {"return_state": True} if op.outputs.state else {}
    if weight.state is not None:
        z = None if weight.state_z is None else sample.operands[weight.state_z.name]
        length = 0 if weight.state_length is None else sample.operands[weight.state_length.name]
        found["state"] = LinearState(sample.operands[weight.state.name], z, length)
    if weight.decay is not None:
        return {"variant": Retention(sample.operands[weight.decay.name]), **found}
    return {"variant": LinearAttention(weight.feature_map, weight.normalizer_eps), **found}


# --- masks -----------------------------------------------------------------------------------------------------------


def _mask(op: AttentionOp, sample: Sample, given: dict[str, Any]) -> dict[str, Any]:
    """``attn_mask``, ``is_causal``, ``window``, lengths and ``q_offset``: the plainest that say the same."""
    parts = list(op.mask.args) if isinstance(op.mask, And) else [op.mask]
    found: dict[str, Any] = {}
    rest: list[Mask] = []
    for part in parts:
        name = _argument(part)
        if name == "attn_mask":
            found[name] = _mask_tensor(part, sample.operands[name])
        elif name:
            found[name] = sample.operands[name]
        elif not isinstance(part, Full):
            rest.append(part)
    found |= _positions(op, rest, sample, taken="attn_mask" in found or "attn_mask" in given)
    if isinstance(op.q_offset, Ref):
        return {**found, "q_offset": sample.operands[op.q_offset.name]}
    positional = op.mask.positional or any(isinstance(t, Alibi) for t in op.score) or _decays(op)
    if not positional:
        return found
    wanted = op.static_offset()
    default = 0 if found.get("is_causal") else op.Skv - op.Sq
    both = found.get("is_causal") and op.Sq != op.Skv and len(rest) > 1
    return found if default == wanted and not both else {**found, "q_offset": wanted}


def _decays(op: AttentionOp) -> bool:
    return isinstance(op.weight, Linear) and op.weight.decay is not None


def _argument(part: Mask) -> str:
    """The argument of `attention` that this part of a conjunction comes from, "" for a part of a person's mask."""
    for kind, name, operand in (
        (KeyLengths, "key_lengths", getattr(part, "lengths", None)),
        (QueryLengths, "query_lengths", getattr(part, "lengths", None)),
        (Columns, "attn_mask", getattr(part, "kept", None)),
        (Dense, "attn_mask", getattr(part, "mask", None)),
    ):
        if isinstance(part, kind) and operand == Ref(name):
            return name
    return ""


def _mask_tensor(part: Mask, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor argument behind `Columns` (``[Skv]`` or ``[B, Skv]``) or `Dense`."""
    if not isinstance(part, Columns):
        return tensor
    return tensor[None] if tensor.ndim == 1 else tensor[:, None, None, :]


def _positions(op: AttentionOp, rest: list[Mask], sample: Sample, taken: bool) -> dict[str, Any]:
    """The parts without an argument of their own: flags where they suffice, else a `Mask`."""
    kinds = {type(part) for part in rest}
    if kinds <= {Causal, Window} and len(rest) == len(kinds):
        window = next((part for part in rest if isinstance(part, Window)), None)
        if window is None:
            return {"is_causal": True} if rest else {}
        if Causal not in kinds:
            return {"window": (window.left, window.right)}
        if window.right is None:
            return {"window": (window.left, 0)}
    if taken:
        raise InputError("attn_mask cannot be a tensor and a Mask in one call", asked=str(op))
    held = And.of(*rest).map_operands(lambda _where, operand: _hold(operand, sample))
    return {"attn_mask": held}


def _hold(operand: Operand, sample: Sample) -> Operand:
    return Held(sample.operands[operand.name]) if isinstance(operand, Ref) else operand
