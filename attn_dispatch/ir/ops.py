"""`AttentionOp`, the op of the IR that computes attention; `select_op` has the other one, for learned key selection.

An op is a frozen value without tensors: cache key, pin matcher, workload line, ONNX metadata and test id are all this
one value. What a tensor-valued argument is called inside an op: ``query key value`` and the names of `operands`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from attn_dispatch.ir.atoms import Full
from attn_dispatch.ir.mask_text import parse_mask
from attn_dispatch.ir.masks import Mask
from attn_dispatch.ir.naming import named_by_role
from attn_dispatch.ir.scores import Alibi, Bias, ScoreTerm, SoftCap
from attn_dispatch.ir.tensors import Ref, TensorDesc, short_dtype
from attn_dispatch.ir.weights import Linear, Softmax, Weight

__all__ = ["END", "AttentionOp", "Outputs", "bucket", "verify"]

END = "end"  # q_offset = Skv - Sq: the last query sees the last key, whatever the lengths are


@dataclass(frozen=True)
class Outputs:
    """What is wanted beside the output: each row's log-sum-exp, the attention weights, the linear family's state."""

    lse: bool = False
    weights: bool = False
    state: bool = False


def bucket(length: int) -> int:
    """The bucket of a batch size or length: the next power of two. The one function that buckets anything.

    Decisions are kept per bucket, and an executable compiled for one op serves every op of its bucket that the
    backend's capability accepts. 0 and 1 are buckets of their own.

    Example:
        >>> [bucket(n) for n in (0, 1, 2, 3, 9, 16, 17)]
        [0, 1, 2, 4, 16, 16, 32]
    """
    return 1 << (length - 1).bit_length() if length > 0 else 0


@dataclass(frozen=True)
class AttentionOp:
    """One attention call, described.

    Args:
        query: ``[B, Hq, Sq, D]``; key: ``[B, Hkv, Skv, D]``; value: ``[B, Hkv, Skv, Dv]``.
        scale: factor of ``q @ k.T``; None is ``D ** -0.5`` until the pass `default_scale` writes it out.
        score: soft cap and biases, in order.
        mask: which pairs attend.
        q_offset: key position of query row 0: an integer, ``"end"`` (Skv - Sq), or the name of an int tensor ``[B]``.
        weight: softmax or the linear family.
        dropout_p: probability that a weight is dropped; the rest is scaled by ``1 / (1 - p)``.
        outputs: lse and weights, when wanted.
        operands: descriptors of all tensors beside query, key and value, by name.
        grad: names of the tensors that need a gradient.
        higher_order: run under a functorch transform or forward-mode AD: needs a twice and forward differentiable form.
        deterministic: ``torch.use_deterministic_algorithms`` is on.
        traced: run on tensors without values (vmap, export): no decision may read data.
        layout: ``"bhsd"`` or ``"bshd"``, how query, key and value lie in memory; shapes above are always ``bhsd``.
    """

    query: TensorDesc
    key: TensorDesc
    value: TensorDesc
    scale: float | None = None
    score: tuple[ScoreTerm, ...] = ()
    mask: Mask = field(default_factory=Full)
    q_offset: int | str | Ref = 0
    weight: Weight = field(default_factory=Softmax)
    dropout_p: float = 0.0
    outputs: Outputs = field(default_factory=Outputs)
    operands: tuple[tuple[str, TensorDesc], ...] = ()
    grad: tuple[str, ...] = ()
    higher_order: bool = False
    deterministic: bool = False
    traced: bool = False
    layout: str = "bhsd"

    def __post_init__(self) -> None:
        # names have no order: equal ops must have equal keys
        object.__setattr__(self, "operands", tuple(sorted(self.operands, key=lambda named: named[0])))

    # --- sizes, in the one alphabet --------------------------------------------------------------------------------

    @property
    def B(self) -> int:
        """Batch size."""
        return self.query.shape[0]

    @property
    def Hq(self) -> int:
        """Query heads."""
        return self.query.shape[1]

    @property
    def Hkv(self) -> int:
        """Key and value heads."""
        return self.key.shape[1]

    @property
    def Sq(self) -> int:
        """Query length."""
        return self.query.shape[2]

    @property
    def Skv(self) -> int:
        """Key length."""
        return self.key.shape[2]

    @property
    def D(self) -> int:
        """Head size of query and key."""
        return self.query.shape[3]

    @property
    def Dv(self) -> int:
        """Head size of value and output."""
        return self.value.shape[3]

    @property
    def groups(self) -> int:
        """Query heads per kv head."""
        return self.Hq // self.Hkv if self.Hkv else 1

    @property
    def dtype(self) -> str:
        """Dtype of query, key, value and output."""
        return self.query.dtype

    @property
    def device(self) -> str:
        """Device type."""
        return self.query.device

    @property
    def phase(self) -> str:
        """``"decode"`` for one query row over longer keys, ``"cross"`` for unequal lengths, else ``"prefill"``."""
        if self.Sq == 1 and self.Skv > 1:
            return "decode"
        return "prefill" if self.Sq == self.Skv or self.mask.positional else "cross"

    @property
    def effective_scale(self) -> float:
        """The scale as a number."""
        return self.scale if self.scale is not None else (self.D**-0.5 if self.D else 1.0)

    def operand(self, name: str) -> TensorDesc:
        """The descriptor of a named operand."""
        return dict(self.operands)[name]

    def static_offset(self) -> int | None:
        """q_offset as a number, or None when it is a tensor."""
        if isinstance(self.q_offset, Ref):
            return None
        return self.Skv - self.Sq if self.q_offset == END else int(self.q_offset)

    # --- what a backend must be able to do -------------------------------------------------------------------------

    @cached_property
    def features(self) -> frozenset[str]:
        """Every word that a backend must have declared to run this op. A word that nobody declared is refused.

        New fields of the IR add words here, so a backend written before them refuses them by itself.
        """
        words = {self.weight.feature, *(term.feature for term in self.score)}
        words |= {atom.feature for atom in self.mask.atoms()}
        words |= {f"combine:{kind}" for kind in _combinators(self.mask)}
        if self.mask.positional and self.q_offset != 0:
            words.add("q_offset:tensor" if isinstance(self.q_offset, Ref) else "q_offset:nonzero")
        if isinstance(self.weight, Softmax) and self.weight.sinks is not None:
            words.add("sinks")
        if isinstance(self.weight, Linear) and self.weight.decay is not None:
            words.add("decay")
        if isinstance(self.weight, Linear) and self.weight.state is not None:
            words.add("state:in")
        flags = {
            "gqa": self.groups != 1,
            "dv_differs": self.Dv != self.D,
            "dropout": self.dropout_p > 0,
            "lse": self.outputs.lse,
            "weights": self.outputs.weights,
            "state:out": self.outputs.state,
            "grad": any(name in ("query", "key", "value") for name in self.grad),
            "grad:operands": any(name not in ("query", "key", "value") for name in self.grad),
            "grad:lse": bool(self.grad) and self.outputs.lse,
            "higher_order": self.higher_order,
            "traced": self.traced,
            "empty": 0 in (self.B, self.Hq, self.Sq, self.Skv, self.D, self.Dv),
            "scattered": "scattered" in (self.query.strides, self.key.strides, self.value.strides),
            "scale<=0": self.effective_scale <= 0,
        }
        return frozenset(words | {word for word, on in flags.items() if on})

    # --- keys and text ---------------------------------------------------------------------------------------------

    def with_(self, **changes: Any) -> AttentionOp:
        """A copy with fields replaced."""
        return replace(self, **changes)

    def drop_operands(self, *names: str) -> AttentionOp:
        """The op without the named operands."""
        return replace(self, operands=tuple((n, d) for n, d in self.operands if n not in names))

    def resized(self, b: int, sq: int, skv: int) -> AttentionOp:
        """The op at other batch and lengths; operands follow their roles, not a size that happens to be equal."""
        q, k, v = self.query.shape, self.key.shape, self.value.shape
        sizes = {self.B: b} if self.B > 1 else {}
        lengths = {"Sq": sq, "Skv": skv}
        roles = _roles(self)

        def resize(name: str, desc: TensorDesc) -> TensorDesc:
            if name not in roles:  # a dense mask or bias
                return _resize(desc, sizes, (self.Sq, sq), (self.Skv, skv))
            shape = list(desc.shape)
            for axis, role in roles[name]:
                if role in lengths and -len(shape) <= axis and shape[axis] == getattr(self, role):
                    shape[axis] = lengths[role]
                elif role == "B" and (axis == 0 < len(shape) or len(shape) > 1):
                    shape[0] = sizes.get(shape[0], shape[0])
            return desc.with_shape(*shape)

        operands = tuple((name, resize(name, desc)) for name, desc in self.operands)
        return replace(
            self,
            query=self.query.with_shape(b, q[1], sq, q[3]),
            key=self.key.with_shape(b, k[1], skv, k[3]),
            value=self.value.with_shape(b, v[1], skv, v[3]),
            operands=operands,
        )

    def bucketed(self) -> AttentionOp:
        """The op at the top of its bucket: exact in everything but batch, lengths, which way the rows of a tensor lie,
        and what its tensors are called.

        Columns are the same op whether they came as ``attn_mask`` or inside a `Mask`.
        """
        return named_by_role(self).in_rows()._at_bucket()

    def in_rows(self) -> AttentionOp:
        """The op whichever way the rows of its tensors lie."""
        named = {name: getattr(self, name).in_rows() for name in ("query", "key", "value")}
        return replace(self, **named, operands=tuple((name, desc.in_rows()) for name, desc in self.operands))

    def _at_bucket(self) -> AttentionOp:
        b, sq, skv = bucket(self.B), bucket(self.Sq), bucket(self.Skv)
        if (sq == skv) != (self.Sq == self.Skv):  # square and rectangular never share a bucket
            skv = skv * 2 if self.Skv > self.Sq else skv
            sq = sq * 2 if self.Sq > self.Skv else sq
        offset = self.q_offset
        if isinstance(offset, int) and offset != 0:
            at_end = offset == self.Skv - self.Sq
            offset = bucket(offset) if offset > 0 else -bucket(-offset)
            offset = END if at_end or offset == skv - sq else offset  # once in its bucket, an op stays there
        return replace(self.resized(b, sq, skv), q_offset=offset)

    def to_dict(self) -> dict[str, Any]:
        """Plain types for YAML and JSON; defaults are left out."""
        out: dict[str, Any] = {name: getattr(self, name).to_dict() for name in ("query", "key", "value")}
        if self.score:
            out["score"] = [str(term) for term in self.score]
        if not isinstance(self.mask, Full):
            out["mask"] = str(self.mask)
        if self.q_offset != 0:
            out["q_offset"] = self.q_offset if not isinstance(self.q_offset, Ref) else f"@{self.q_offset.name}"
        if self.weight != Softmax():
            out["weight"] = _weight_dict(self.weight)
        if self.operands:
            out["operands"] = {name: desc.to_dict() for name, desc in self.operands}
        if self.outputs != Outputs():
            out["outputs"] = {"lse": self.outputs.lse, "weights": self.outputs.weights}
            out["outputs"] |= {"state": True} if self.outputs.state else {}
        if self.grad:
            out["grad"] = list(self.grad)
        plain = {f.name: f.default for f in fields(self) if f.name in _PLAIN}
        out |= {name: getattr(self, name) for name, default in plain.items() if getattr(self, name) != default}
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionOp:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a key that no op has.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"an op has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        args: dict[str, Any] = {name: data[name] for name in _PLAIN if name in data}
        args |= {name: TensorDesc.from_dict(data[name]) for name in ("query", "key", "value")}
        args["score"] = tuple(_parse_term(text) for text in data.get("score", ()))
        args["mask"] = parse_mask(data["mask"]) if "mask" in data else Full()
        offset = data.get("q_offset", 0)
        args["q_offset"] = Ref(offset[1:]) if isinstance(offset, str) and offset.startswith("@") else offset
        args["weight"] = _parse_weight(data.get("weight", {}))
        args["operands"] = tuple((n, TensorDesc.from_dict(d)) for n, d in data.get("operands", {}).items())
        args["outputs"] = Outputs(**data.get("outputs", {}))
        args["grad"] = tuple(data.get("grad", ()))
        return cls(**args)

    @cached_property
    def key_text(self) -> str:
        """The op as canonical JSON: equal for equal ops, in every process."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """A short hash of the op, equal across processes, and whichever way the rows of its tensors lie."""
        return hashlib.sha256(self.in_rows().key_text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        dtype = short_dtype(self.dtype)
        sizes = [f"q {list(self.query.shape)} {dtype}"]
        sizes += [f"k, v {list(self.key.shape)}"] if self.Dv == self.D else []
        sizes += [] if self.Dv == self.D else [f"k {list(self.key.shape)}", f"v {list(self.value.shape)}"]
        words = [_LONG_TABLE.sub(r"\1...", str(self.mask))] if not isinstance(self.mask, Full) else []
        words += [f"q_offset {self.q_offset}"] if self.mask.positional else []
        words += [str(term) for term in self.score]
        words += [str(self.weight)] if self.weight != Softmax() else []
        usual = self.D**-0.5 if self.D else 1.0
        words += [f"scale {self.scale:g}"] if self.scale not in (None, usual) else []
        words += [f"dropout {self.dropout_p:g}"] if self.dropout_p else []
        words += ["lse"] if self.outputs.lse else []
        words += ["weights"] if self.outputs.weights else []
        words += ["state out"] if self.outputs.state else []
        words += [f"grad of {', '.join(self.grad)}"] if self.grad else []
        words += [w for w in ("higher_order", "deterministic", "traced") if getattr(self, w)]
        words += ["scattered strides"] if "scattered" in self.features else []
        return "   ".join([*sizes, *words, self.device])


_LONG_TABLE = re.compile(r'("(?:bool|int) \S+ [^" ]{32})[^" ]+')  # for people; keys have every element
_PLAIN = ("scale", "dropout_p", "higher_order", "deterministic", "traced", "layout")


def _combinators(mask: Mask) -> set[str]:
    kinds = {type(mask).__name__} if type(mask).__name__ in ("And", "Or", "Not") else set()
    parts = getattr(mask, "args", ()) or ((mask.arg,) if hasattr(mask, "arg") else ())
    return kinds.union(*(_combinators(part) for part in parts)) if parts else kinds


def _roles(op: AttentionOp) -> dict[str, tuple[tuple[int, str], ...]]:
    """What the axes of an operand are, where its place in the op says so: ``(0, "B")`` is a batch of any rank, and
    ``(-2, "B")`` one that only more than one axis has. Nothing is listed for slopes and sinks: they know no lengths.
    """
    found: dict[str, tuple[tuple[int, str], ...]] = {ref.name: () for ref in op.weight.refs()}
    found |= {term.slopes.name: () for term in op.score if isinstance(term, Alibi)}
    batched = op.weight.state_refs() if isinstance(op.weight, Linear) else []
    found |= {ref.name: ((0, "B"),) for ref in (*batched, op.q_offset) if isinstance(ref, Ref)}
    per_key, per_query = ((-1, "Skv"), (-2, "B")), ((-1, "Sq"), (-2, "B"))
    axes = {
        **{("KeyLengths", "lengths"): ((0, "B"),), ("QueryLengths", "lengths"): ((0, "B"),)},
        **{("Columns", "kept"): per_key, ("Segments", "keys"): per_key, ("BlockTable", "table"): ()},
        **{("Rows", "kept"): per_query, ("Segments", "queries"): per_query},
        ("Selected", "indices"): ((-2, "Sq"), (0, "B")),
    }
    for atom in op.mask.atoms():
        for (kind, name), roles in axes.items():
            operand = getattr(atom, name, None) if type(atom).__name__ == kind else None
            if isinstance(operand, Ref):
                found[operand.name] = roles
    return found


def _resize(desc: TensorDesc, sizes: dict[int, int], sq: tuple[int, int], skv: tuple[int, int]) -> TensorDesc:
    """A dense operand, right-aligned to ``[B, H, Sq, Skv]``."""
    shape = list(desc.shape)
    if len(shape) >= 2:
        shape[-1] = skv[1] if shape[-1] == skv[0] else shape[-1]
        shape[-2] = sq[1] if shape[-2] == sq[0] else shape[-2]
    elif shape and shape[0] == skv[0]:
        shape[0] = skv[1]
    if len(shape) > 2:
        shape[0] = sizes.get(shape[0], shape[0])
    return desc.with_shape(*shape)


def _weight_dict(weight: Weight) -> dict[str, Any]:
    values = {f.name: getattr(weight, f.name) for f in fields(weight)}
    values = {k: v for k, v in values.items() if v is not None or not k.startswith("state")}
    plain = {k: f"@{v.name}" if isinstance(v, Ref) else v for k, v in values.items()}
    return {"kind": type(weight).__name__, **plain}


def _parse_weight(data: Mapping[str, Any]) -> Weight:
    values: dict[str, Any] = {
        k: Ref(v[1:]) if isinstance(v, str) and v.startswith("@") else v for k, v in data.items() if k != "kind"
    }
    return Linear(**values) if data.get("kind") == "Linear" else Softmax(**values)


def _parse_term(text: str) -> ScoreTerm:
    name, _, argument = text.removesuffix(")").partition("(")
    if name == "SoftCap":
        return SoftCap(float(argument))
    return {"Bias": Bias, "Alibi": Alibi}[name](Ref(argument))


def _wrong_state(op: AttentionOp, names: set[str]) -> str:
    """What the state would have to be; empty when it is, or when there is none."""
    weight = op.weight
    if not isinstance(weight, Linear) or weight.state is None or weight.state.name not in names:
        return ""
    heads = op.Hkv if weight.decay is None else op.Hq
    want = (op.B, heads, op.D, op.Dv)
    has_sum = weight.state_z is not None
    if has_sum != (weight.normalizer_eps is not None):
        return "given with its sum z exactly when there is a normaliser"
    return "" if op.operand(weight.state.name).shape == want else f"[B, H, D, Dv] = {list(want)}"


def verify(op: AttentionOp) -> None:
    """Check what every op must satisfy; passes and rewrites are verified with it before and after.

    Raises:
        ValueError: which rule the op breaks.
    """
    q, k, v = op.query.shape, op.key.shape, op.value.shape
    if not len(q) == len(k) == len(v) == 4:
        raise ValueError(f"not a valid op: query {q}, key {k} and value {v} do not have four dimensions")
    names = {name for name, _ in op.operands}
    needed = {*op.mask.refs(), *(t.bias.name for t in op.score if isinstance(t, Bias))}
    needed |= {t.slopes.name for t in op.score if isinstance(t, Alibi)}
    needed |= {r.name for r in (op.q_offset, *op.weight.refs()) if isinstance(r, Ref)}
    rules = [
        (q[0] == k[0] == v[0], f"batch sizes {q[0]}, {k[0]}, {v[0]} are equal"),
        (k[:3] == v[:3], f"key {k} and value {v} agree in all but the last size"),
        (q[3] == k[3], f"head sizes of query {q[3]} and key {k[3]} are equal"),
        (k[1] == 0 or q[1] % k[1] == 0, f"query heads {q[1]} are a multiple of kv heads {k[1]}"),
        (needed <= names, f"operands {sorted(needed - names)} are described"),
        (isinstance(op.weight, Linear) or not op.outputs.state, "only the linear family has a state to return"),
        (not _wrong_state(op, names), f"the state is {_wrong_state(op, names)}"),
        (0.0 <= op.dropout_p <= 1.0, f"dropout_p {op.dropout_p} is in [0, 1]"),
        (all(hasattr(torch, d.dtype) for d in (op.query, op.key, op.value)), "dtypes are torch's"),
    ]
    for holds, rule in rules:
        if not holds:
            raise ValueError(f"not a valid op: it does not hold that {rule}")
