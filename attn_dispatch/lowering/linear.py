"""The linear family in ONNX: a LinearAttention node where it says the same, plain operators elsewhere.

The node, of ai.onnx from opset 27 on and of com.microsoft before, computes the causal recurrence
``S <- exp(g) S + k v^T``, ``o = scale * q S`` over as many queries as keys. So it expresses a causal mask over equal
lengths, with whole rows and whole keys left out, a decay (as ``g = log(decay)``; a decay belongs to a query head, so
keys are repeated to the query heads for it) and a state. A normaliser is one more column of values, all 1: its output
is the sum of the weights, and its state is z. What it does not express takes the quadratic form: scores, mask, powers
of the decay, sum; the form ``contrib`` is that node alone and refuses it.
"""

from __future__ import annotations

from typing import Any

from attn_dispatch.capability import Reason
from attn_dispatch.ir.atoms import Causal, Columns, KeyLengths, KeyRange, QueryLengths, Rows, Segments
from attn_dispatch.ir.masks import And, Mask
from attn_dispatch.ir.ops import END, AttentionOp
from attn_dispatch.ir.weights import Linear
from attn_dispatch.lowering.masks import allowed, key_columns
from attn_dispatch.lowering.nodes import Value
from attn_dispatch.lowering.parts import Call, Results, accumulated
from attn_dispatch.lowering.target import Target

__all__ = ["lower", "node_lacks", "reasons_against"]

_OLDEST = 18
_WITH_NODE = 27
_CONTRIB = "com.microsoft"
_KEY_PARTS = (Columns, KeyLengths, KeyRange)
_ROW_PARTS = (QueryLengths, Rows)


def reasons_against(op: AttentionOp, target: Target) -> list[Reason]:
    """Why an op of the linear family cannot be lowered for a target."""
    reasons = _against_contrib(op, target) if target.form == "contrib" else []
    if target.opset < _OLDEST:
        text = f"opset {target.opset}: the linear family needs {_OLDEST}"
        reasons.append(Reason("version", "opset", target.opset, f">= {_OLDEST}", f"opset={_OLDEST}", text))
    for term in op.score:
        text = f"{term} with {op.weight}: the linear family has no score terms"
        reasons.append(Reason("feature", term.feature, str(term), False, "leave it out", text))
    if op.outputs.lse:
        reasons.append(Reason("feature", "lse", True, False, "return_state=True", f"no log-sum-exp of {op.weight}"))
    return reasons


def _against_contrib(op: AttentionOp, target: Target) -> list[Reason]:
    elsewhere = "form='standard' or 'decomposed'"
    reasons = [
        Reason("feature", field, True, False, elsewhere, f"no {text} in com.microsoft's LinearAttention")
        for field, text in node_lacks(op)
    ]
    if "contrib_linear" not in target.proven:
        text = f"com.microsoft's LinearAttention was not seen to be right on {target.runtime}"
        reasons.append(Reason("version", "contrib_linear", False, True, elsewhere, text))
    return reasons


def node_lacks(op: AttentionOp) -> list[tuple[str, str]]:
    """What an op asks that one LinearAttention node does not express, as pairs of a field and words; empty if none."""
    assert isinstance(op.weight, Linear)
    parts = _parts(op.mask)
    lacks = [("weights", "return_weights")] if op.outputs.weights else []
    # the specification's own reference computes in float32, whatever its inputs are
    lacks += [("dtype", "float64")] if op.dtype == "float64" else []
    known = all(isinstance(part, (Causal, *_KEY_PARTS, *_ROW_PARTS)) for part in parts)
    if not known or not any(isinstance(part, Causal) for part in parts):
        lacks.append(("mask", f"mask {op.mask}: causal, with keys and rows left out"))
    if op.Sq != op.Skv or op.q_offset not in (0, END):
        lacks.append(("q_offset", f"{op.Sq} rows at q_offset {op.q_offset} over {op.Skv} keys"))
    # the node's state fades once per key, padding included; ours once per key that counts
    if op.weight.decay is not None and op.outputs.state and any(isinstance(part, KeyLengths) for part in parts):
        lacks.append(("state:out", "state that stops fading at the key lengths"))
    return lacks


def lower(call: Call) -> Results:
    """One LinearAttention node, or the quadratic form with its state beside it."""
    target = call.target
    if target.form == "contrib":
        return _node(call, _CONTRIB)
    with_node = target.form == "standard" and target.opset >= _WITH_NODE and "linear_attention" in target.proven
    return _node(call, "") if with_node and not node_lacks(call.op) else _quadratic(call)


def _parts(mask: Mask) -> tuple[Mask, ...]:
    return mask.args if isinstance(mask, And) else (mask,)


def _weight(call: Call) -> Linear:
    assert isinstance(call.op.weight, Linear)
    return call.op.weight


def _mapped(call: Call, x: Value, dtype: str) -> Value:
    """The feature map. Both branches of elu + 1 are computed: what overflows in one is not taken from it."""
    n = call.nodes
    if _weight(call).feature_map == "identity":
        return x
    above = n("Greater", x, n.const(0, dtype))
    result: Value = n("Where", above, n("Add", x, n.const(1, dtype)), n("Exp", x))
    return result


def _grouped(call: Call, rows: Value, shared: Value, width: int | Value, length: Value) -> Value:
    """``rows [B, Hq, M, K] @ shared [B, Hkv, K, width]``: the rows of a group lie behind each other, M = ``length``."""
    n, op = call.nodes, call.op
    if op.groups == 1:
        plain: Value = n("MatMul", rows, shared)
        return plain
    count = n("Mul", length, n.const([op.groups]))
    folded = n("Reshape", rows, n("Concat", n.shape(call.batch, op.Hkv, count), n("Shape", rows, start=3), axis=0))
    result: Value = n("Reshape", n("MatMul", folded, shared), n.shape(call.batch, op.Hq, length, width))
    return result


# --- the quadratic form ----------------------------------------------------------------------------------------------


def _quadratic(call: Call) -> Results:
    op, n, weight = call.op, call.nodes, _weight(call)
    acc = accumulated(op.dtype)
    q, k, v = call.inputs(acc)
    phi_q = n.scale(_mapped(call, q, acc), op.effective_scale, op.D, acc)
    phi_k = _mapped(call, k, acc)
    weights = _grouped(call, phi_q, n("Transpose", phi_k, perm=[0, 1, 3, 2]), call.skv, call.sq)
    if call.allowed is not None:
        weights = n("Where", call.allowed, weights, n.const(0, acc))
    if weight.decay is not None:
        distance = n("Abs", n("Sub", call.grid.queries, call.grid.keys))
        weights = n("Mul", weights, _power(call, n.cast(distance, "int64", acc), acc))
    total = n("ReduceSum", weights, n.const([-1]), keepdims=1) if weight.normalizer_eps is not None else None
    carried = None
    if weight.state is not None:
        carried, total = _carried(call, phi_q, total, acc)
    if total is not None:
        divisor = _divisor(call, total, acc)
        weights = n("Div", weights, divisor)
        carried = None if carried is None else n("Div", carried, divisor)
    out = _grouped(call, weights, v, op.Dv, call.sq)
    out = out if carried is None else n("Add", out, carried)
    shown = n.cast(weights, acc, op.dtype) if op.outputs.weights else None
    state = _state(call, phi_k, v, acc) if op.outputs.state else ()
    return Results(n.cast(out, acc, op.dtype), None, shown, state)


def _power(call: Call, exponent: Value, acc: str) -> Value:
    """``decay ** exponent``, ``[Hq, 1, 1]`` against ``[.., n, m]``; ``0 ** 0`` is the 1 that is meant."""
    n, decay = call.nodes, _weight(call).decay
    assert decay is not None
    result: Value = n("Pow", n("Reshape", call.operand(decay.name, acc), n.const([-1, 1, 1])), exponent)
    return result


def _divisor(call: Call, total: Value, acc: str) -> Value:
    """The sum of weights plus eps; without an eps, 1 for a row that attends nothing, so that it gives 0."""
    n, eps = call.nodes, _weight(call).normalizer_eps
    divisor: Value = n("Add", total, n.const(eps, acc))
    if eps == 0:
        divisor = n("Where", n("Equal", divisor, n.const(0, acc)), n.const(1, acc), divisor)
    return divisor


def _carried(call: Call, phi_q: Value, total: Value | None, acc: str) -> tuple[Value, Value | None]:
    """What the state that goes in adds to the output, and to the sum of weights."""
    op, n, weight = call.op, call.nodes, _weight(call)
    assert weight.state is not None
    seen = phi_q
    if weight.decay is not None:
        steps = n("Max", n("Add", call.grid.queries, n.const([1])), n.const([0]))
        seen = n("Mul", seen, _power(call, n.cast(steps, "int64", acc), acc))
    zero = n.const(0, acc)
    for part in _parts(op.mask):
        if isinstance(part, _ROW_PARTS):  # an empty row sees no state either
            seen = n("Where", allowed(part, call.grid), seen, zero)
    segments = _segments(call)
    if segments is not None:
        queries, keys = segments
        first = n("Equal", queries, n.slice(keys, 0, 1, 1))  # [B|1, Sq]
        seen = n("Where", n("Unsqueeze", first, n.const([1, 3])), seen, zero)
    s = call.operand(weight.state.name, acc)
    out = n("MatMul", seen, s) if weight.decay is not None else _grouped(call, seen, s, op.Dv, call.sq)
    if weight.state_z is not None and total is not None:
        z = n("Unsqueeze", call.operand(weight.state_z.name, acc), n.const([3]))
        more = n("MatMul", seen, z) if weight.decay is not None else _grouped(call, seen, z, 1, call.sq)
        total = n("Add", total, more)
    return out, total


def _segments(call: Call) -> tuple[Value, Value] | None:
    """Segment numbers of queries ``[B|1, Sq]`` and keys ``[B|1, Skv]``; None when the mask has none of its own."""
    n = call.nodes
    for part in _parts(call.op.mask):
        if isinstance(part, Segments):
            found = []
            for operand in (part.queries, part.keys):
                ids, rank = call.grid.of_type(operand, "int64")
                found.append(n("Unsqueeze", ids, n.const([0])) if rank == 1 else ids)
            return found[0], found[1]
    return None


# --- the state after the last key ------------------------------------------------------------------------------------


def _count(call: Call) -> Value:
    """Keys of each sequence, int64 ``[B]``: Skv, or fewer where the mask has key lengths."""
    n = call.nodes
    count: Value = n("Expand", call.skv, call.batch)
    for part in _parts(call.op.mask):
        if isinstance(part, KeyLengths):
            lengths = n("Reshape", call.grid.of_type(part.lengths, "int64")[0], n.const([-1]))
            count = n("Min", count, lengths)
    return count


def _kept(call: Call) -> tuple[Value | None, Value | None]:
    """Keys that count, ``[B|1, 1, Skv]``, and whether the state that goes in does, ``[B|1, 1, 1]``; None for all."""
    n = call.nodes
    columns, keep, carries = key_columns(call.op), None, None
    if columns is not None:
        keep = n("Reshape", allowed(columns, call.grid), n("Concat", n.const([-1, 1]), call.skv, axis=0))
    segments = _segments(call)
    if segments is not None:  # only the segment of the last key goes on
        ids = segments[1]
        last = n.slice(ids, -1, 1 << 62, 1)
        same = n("Unsqueeze", n("Equal", ids, last), n.const([1]))
        keep = same if keep is None else n("And", keep, same)
        carries = n("Unsqueeze", n("Equal", n.slice(ids, 0, 1, 1), last), n.const([2]))
    return keep, carries


def _state(call: Call, phi_k: Value, v: Value, acc: str) -> tuple[Value, ...]:
    """S ``[B, H, D, Dv]``, z ``[B, H, D]`` with a normaliser, and the length ``[B]``."""
    n, weight = call.nodes, _weight(call)
    count = _count(call)
    keep, carries = _kept(call)
    zero = n.const(0, acc)
    if keep is not None:
        wide = n("Unsqueeze", keep, n.const([3]))
        phi_k, v = n("Where", wide, phi_k, zero), n("Where", wide, v, zero)
    carry = None if carries is None else n.cast(carries, "bool", acc)  # [B|1, 1, 1]
    faded = phi_k
    if weight.decay is not None:
        faded, v = _faded(call, phi_k, v, count, acc)
        behind = n.cast(n("Reshape", count, n.const([-1, 1, 1, 1])), "int64", acc)
        power = n("Squeeze", _power(call, behind, acc), n.const([3]))  # [B, Hq, 1]
        carry = power if carry is None else n("Mul", carry, power)
    s = n("MatMul", n("Transpose", faded, perm=[0, 1, 3, 2]), v)
    z = n("ReduceSum", faded, n.const([2]), keepdims=0) if weight.normalizer_eps is not None else None
    if weight.state is not None:
        before = call.operand(weight.state.name, acc)
        s = n("Add", s, before if carry is None else n("Mul", before, n("Unsqueeze", carry, n.const([3]))))
    if weight.state_z is not None and z is not None:
        before = call.operand(weight.state_z.name, acc)
        z = n("Add", z, before if carry is None else n("Mul", before, carry))
    return tuple(x for x in (s, z, _length(call, count)) if x is not None)


def _faded(call: Call, phi_k: Value, v: Value, count: Value, acc: str) -> tuple[Value, Value]:
    """Keys of every query head, each by its decay until the last key, and the values of every query head."""
    op, n = call.op, call.nodes
    last = n("Sub", n("Reshape", count, n.const([-1, 1, 1, 1])), n.const([1]))
    rows = n("Reshape", call.grid.keys, n.const([-1, 1]))  # [Skv, 1]
    behind = n("Max", n("Sub", last, rows), n.const([0]))  # [B, 1, Skv, 1]
    phi_k, v = (_repeated(call, x, size) for x, size in ((phi_k, op.D), (v, op.Dv)))
    return n("Mul", phi_k, _power(call, n.cast(behind, "int64", acc), acc)), v


def _repeated(call: Call, x: Value, size: int) -> Value:
    """``[B, Hkv, Skv, size]`` for every query head."""
    op, n = call.op, call.nodes
    if op.groups == 1:
        return x
    wide = n("Expand", n("Unsqueeze", x, n.const([2])), n.shape(1, 1, op.groups, 1, 1))
    result: Value = n("Reshape", wide, n.shape(call.batch, op.Hq, call.skv, size))
    return result


def _length(call: Call, count: Value) -> Value:
    """The length of the state that comes out: keys of this call, and those before it."""
    n, before = call.nodes, _weight(call).state_length
    if before is None:
        return count
    given = n("Reshape", call.operand(before.name, "int64"), n.const([-1]))
    result: Value = n("Add", count, given)
    return result


# --- the node --------------------------------------------------------------------------------------------------------


def _node(call: Call, domain: str) -> Results:
    """One LinearAttention node on packed heads; see the top of this file for what it is told, and how."""
    op, n, weight = call.op, call.nodes, _weight(call)
    q, k, v = call.inputs("float32")
    phi_q, phi_k = _mapped(call, q, "float32"), _mapped(call, k, "float32")
    keep, _ = _kept(call)
    if keep is not None:  # a feature map makes 1 of the 0 of a hidden key
        phi_k = n("Where", n("Unsqueeze", keep, n.const([3])), phi_k, n.const(0, "float32"))
    scale = op.effective_scale
    if scale == 0:  # the node takes 0 as unset
        phi_q, scale = n("Mul", phi_q, n.const(0, "float32")), 1.0
    normalised = weight.normalizer_eps is not None
    if normalised:
        ones = n("Expand", n.const(1, "float32"), n.shape(call.batch, op.Hkv, call.skv, 1))
        v = n("Concat", v, ones, axis=3)
    heads, width = op.Hkv, op.Dv + normalised
    gate = None
    if weight.decay is not None:
        phi_k, v, heads = _repeated(call, phi_k, op.D), _repeated(call, v, width), op.Hq
        logs = n("Log", n("Reshape", call.operand(weight.decay.name, "float32"), n.const([1, 1, -1])))
        gate = n("Expand", logs, n.shape(call.batch, call.skv, op.Hq))
    packed = [n("Reshape", n("Transpose", x, perm=[0, 2, 1, 3]), n.const([0, 0, -1])) for x in (phi_q, phi_k, v)]
    rule = "linear" if gate is None else "gated"
    attributes: dict[str, Any] = {"q_num_heads": op.Hq, "kv_num_heads": heads, "scale": scale, "update_rule": rule}
    made = n("LinearAttention", *packed, _before(call), gate, domain=domain, outputs=2, **attributes)
    out = n("Transpose", n("Reshape", made[0], n.const([0, 0, op.Hq, width])), perm=[0, 2, 1, 3])
    for part in _parts(op.mask):
        if isinstance(part, _ROW_PARTS):
            out = n("Where", allowed(part, call.grid), out, n.const(0, "float32"))
    if normalised:
        divisor = _divisor(call, n.slice(out, op.Dv, width, 3), "float32")
        out = n("Div", n.slice(out, 0, op.Dv, 3), divisor)
    state = _after(call, made[1]) if op.outputs.state else ()
    return Results(n.cast(out, "float32", op.dtype), None, None, state)


def _before(call: Call) -> Value | None:
    """The state that goes in, with z as its last column."""
    n, weight = call.nodes, _weight(call)
    if weight.state is None:
        return None
    s = call.operand(weight.state.name, "float32")
    if weight.state_z is None:
        return s
    z = n("Unsqueeze", call.operand(weight.state_z.name, "float32"), n.const([3]))
    result: Value = n("Concat", s, z, axis=3)
    return result


def _after(call: Call, s: Value) -> tuple[Value, ...]:
    op, n = call.op, call.nodes
    length = _length(call, _count(call))
    if _weight(call).normalizer_eps is None:
        return s, length
    z = n("Squeeze", n.slice(s, op.Dv, op.Dv + 1, 3), n.const([3]))
    return n.slice(s, 0, op.Dv, 3), z, length
