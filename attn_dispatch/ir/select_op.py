"""`SelectOp`: learned key selection, described. DSA's lightning indexer and its top-k (DeepSeek-V3.2).

``I[t, s] = sum_h weights[t, h] * act(scale * query[t, h] . key[s])``, and per query the ``top_k`` allowed keys with the
highest ``I``. What the result is, on every implementation:

1. Indices ``[B, Sq, top_k]`` (int64), ascending, then -1 where a row has fewer allowed keys. They are a set.
2. Of equal scores the lower index is taken first. A NaN score ranks below all others.
3. Scores accumulate in float32 (float64 for float64 inputs), whatever the inputs are.
4. A key that the mask excludes is never selected: a selection needs no second masking.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from attn_dispatch.ir.atoms import Full
from attn_dispatch.ir.mask_text import parse_mask
from attn_dispatch.ir.masks import Mask
from attn_dispatch.ir.tensors import Ref, TensorDesc, short_dtype

__all__ = ["ACTIVATIONS", "SelectOp", "verify_select"]

ACTIVATIONS = ("relu", "identity")
_PLAIN = ("top_k", "scale", "activation", "scores", "traced")


@dataclass(frozen=True)
class SelectOp:
    """One selection, described; tensors appear as descriptors and names, as in `AttentionOp`.

    Args:
        query: index queries ``[B, Hi, Sq, Di]``; key: index keys ``[B, Skv, Di]``, shared by the index heads.
        weights: ``[B, Sq, Hi]``, of any sign.
        top_k: keys per query.
        scale: factor of the dot products; None is ``Di ** -0.5``.
        activation: ``"relu"`` or ``"identity"``, applied per index head before the weighted sum.
        mask: which pairs may be selected, the same for all heads.
        q_offset: key position of query row 0: an integer, ``"end"`` (Skv - Sq), or the name of an int tensor ``[B]``.
        operands: descriptors of the mask's tensors, by name.
        scores: the scores of the selected keys are wanted too.
        traced: run on tensors without values: no step may read data.
    """

    query: TensorDesc
    key: TensorDesc
    weights: TensorDesc
    top_k: int
    scale: float | None = None
    activation: str = "relu"
    mask: Mask = field(default_factory=Full)
    q_offset: int | str | Ref = 0
    operands: tuple[tuple[str, TensorDesc], ...] = ()
    scores: bool = False
    traced: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "operands", tuple(sorted(self.operands, key=lambda named: named[0])))

    @property
    def B(self) -> int:
        """Batch size."""
        return self.query.shape[0]

    @property
    def Hi(self) -> int:
        """Index heads."""
        return self.query.shape[1]

    @property
    def Sq(self) -> int:
        """Query length."""
        return self.query.shape[2]

    @property
    def Skv(self) -> int:
        """Key length."""
        return self.key.shape[1]

    @property
    def Di(self) -> int:
        """Size of an index head."""
        return self.query.shape[3]

    @property
    def effective_scale(self) -> float:
        """The scale as a number."""
        return self.scale if self.scale is not None else (self.Di**-0.5 if self.Di else 1.0)

    def with_(self, **changes: Any) -> SelectOp:
        """A copy with fields replaced."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain types for YAML and JSON; defaults are left out."""
        out: dict[str, Any] = {name: getattr(self, name).to_dict() for name in ("query", "key", "weights")}
        plain = {f.name: f.default for f in fields(self) if f.name in _PLAIN}
        out |= {name: getattr(self, name) for name, default in plain.items() if getattr(self, name) != default}
        if not isinstance(self.mask, Full):
            out["mask"] = str(self.mask)
        if self.q_offset != 0:
            out["q_offset"] = self.q_offset if not isinstance(self.q_offset, Ref) else f"@{self.q_offset.name}"
        if self.operands:
            out["operands"] = {name: desc.to_dict() for name, desc in self.operands}
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SelectOp:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a key that no selection has.
        """
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"a selection has no {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        args: dict[str, Any] = {name: data[name] for name in _PLAIN if name in data}
        args |= {name: TensorDesc.from_dict(data[name]) for name in ("query", "key", "weights")}
        args["mask"] = parse_mask(data["mask"]) if "mask" in data else Full()
        offset = data.get("q_offset", 0)
        args["q_offset"] = Ref(offset[1:]) if isinstance(offset, str) and offset.startswith("@") else offset
        args["operands"] = tuple((n, TensorDesc.from_dict(d)) for n, d in data.get("operands", {}).items())
        return cls(**args)

    @cached_property
    def key_text(self) -> str:
        """The op as canonical JSON: equal for equal ops, in every process."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    def digest(self) -> str:
        """A short hash of `key_text`, equal across processes."""
        return hashlib.sha256(self.key_text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        words = [f"top {self.top_k}", f"q {list(self.query.shape)} {short_dtype(self.query.dtype)}"]
        words += [f"k {list(self.key.shape)}"]
        words += [str(self.mask)] if not isinstance(self.mask, Full) else []
        words += [f"q_offset {self.q_offset}"] if self.mask.positional else []
        words += [self.activation] if self.activation != "relu" else []
        words += ["scores"] if self.scores else []
        return "   ".join([*words, self.query.device])


def verify_select(op: SelectOp) -> None:
    """Check what every selection must satisfy.

    Raises:
        ValueError: which rule the op breaks.
    """
    q, k, w = op.query.shape, op.key.shape, op.weights.shape
    if (len(q), len(k), len(w)) != (4, 3, 3):
        raise ValueError(f"not a valid selection: query {q}, key {k} and weights {w} do not have 4, 3 and 3 dimensions")
    needed = {*op.mask.refs(), *([op.q_offset.name] if isinstance(op.q_offset, Ref) else [])}
    names = {name for name, _ in op.operands}
    rules = [
        (q[0] == k[0] == w[0], f"batch sizes {q[0]}, {k[0]}, {w[0]} are equal"),
        (q[3] == k[2], f"index head sizes of query {q[3]} and key {k[2]} are equal"),
        (w[1:] == (q[2], q[1]), f"weights {w} are [B, Sq, Hi] of query {q}"),
        (isinstance(op.top_k, int) and op.top_k >= 1, f"top_k {op.top_k} is an integer >= 1"),
        (op.activation in ACTIVATIONS, f"activation {op.activation!r} is one of {', '.join(ACTIVATIONS)}"),
        (op.scale is None or math.isfinite(op.scale), f"scale {op.scale} is finite"),
        (needed <= names, f"operands {sorted(needed - names)} are described"),
    ]
    for holds, rule in rules:
        if not holds:
            raise ValueError(f"not a valid selection: it does not hold that {rule}")
