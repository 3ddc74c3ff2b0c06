"""What a backend can do, as data, and the one function that compares it with an op.

A backend declares a `Capability`. `compare` turns capability and op into every reason against, each with the value and
the limit. Whatever is not declared is refused: a word that the IR learns tomorrow is refused by a backend of today.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.tensors import short_dtype

__all__ = ["ALL_FEATURES", "Capability", "Limit", "Reason", "compare", "feature_text"]


@dataclass(frozen=True)
class Reason:
    """Why a backend or rewrite declines an op.

    Args:
        code: a stable word for programs: ``device dtype feature limit determinism version
            known_bad not_useful barred error``.
        field: what was looked at, ``"head_dim"``, ``"mask:Window"``.
        got: the op's value; allowed: what would be accepted.
        hint: what to do about it; empty when there is nothing to say.
        text: the reason for people; made from the other fields when empty.
    """

    code: str
    field: str
    got: Any = None
    allowed: Any = None
    hint: str = ""
    text: str = ""

    def __str__(self) -> str:
        words = self.text or f"{self.field} {self.got}, takes {self.allowed}"
        return f"{words} ({self.hint})" if self.hint else words


@dataclass(frozen=True)
class Limit:
    """A bound on one number of the op: ``D Dv Sq Skv B Hq Hkv groups`` or any integer property of it."""

    name: str
    minimum: int | None = None
    maximum: int | None = None
    multiple_of: int | None = None
    hint: str = ""

    def broken_by(self, op: AttentionOp) -> Reason | None:
        """The reason when the op breaks this limit."""
        got = getattr(op, self.name)
        label = {"D": "head_dim", "Dv": "value head_dim"}.get(self.name, self.name)
        if self.minimum is not None and got < self.minimum:
            return Reason("limit", label, got, f">= {self.minimum}", self.hint, f"{label} {got} < {self.minimum}")
        if self.maximum is not None and got > self.maximum:
            return Reason("limit", label, got, f"<= {self.maximum}", self.hint, f"{label} {got} > {self.maximum}")
        if self.multiple_of is not None and got % self.multiple_of:
            text = f"{label} {got} is not a multiple of {self.multiple_of}"
            return Reason("limit", label, got, f"multiple of {self.multiple_of}", self.hint, text)
        return None


@dataclass(frozen=True)
class Capability:
    """The facts that a backend declares.

    Args:
        devices: device types it runs on.
        dtypes: dtypes of query, key and value, by name.
        features: the words of `AttentionOp.features` that it serves; all others are refused.
        limits: bounds on sizes.
        deterministic: same input, same bits, forward and backward.
        hides_nan: keys that a dense mask excludes never leak NaN or Inf (keys excluded by length, segment, window or
            block never may, on any backend).
        twice_differentiable: gradients of gradients; forward_mode: jvp. Both follow from ``"higher_order"``.
        exportable: its executable traces into plain ATen ops.
    """

    devices: frozenset[str]
    dtypes: frozenset[str]
    features: frozenset[str]
    limits: tuple[Limit, ...] = ()
    deterministic: bool = True
    hides_nan: bool = False
    exportable: bool = False
    notes: str = ""


# Every word there is, for backends that serve all of it and for the support matrix. The IR makes the words
# (AttentionOp.features); a test keeps this list complete.
MASK_WORDS = (
    *("Full", "Causal", "Window", "Stride", "SameBlock", "KeyRange", "Columns", "KeyLengths", "QueryLengths", "Rows"),
    *("Segments", "BlockTable", "Selected", "Dense", "Not"),
)
_TEXT = {
    "gqa": "grouped heads (Hq {op.Hq}, Hkv {op.Hkv})",
    "dv_differs": "value head_dim {op.Dv} != head_dim {op.D}",
    "dropout": "dropout {op.dropout_p}",
    "lse": "return_lse",
    "weights": "return_weights",
    "grad": "gradients",
    "grad:operands": "gradients of {operands_with_grad}",
    "grad:lse": "gradients through lse",
    "higher_order": "functorch transforms or forward-mode AD",
    "traced": "vmap or export",
    "empty": "a size of 0",
    "scattered": "a last dimension that is not contiguous",
    "scale<=0": "scale {op.effective_scale:g} <= 0",
    "sinks": "sinks",
    "decay": "decay",
    "state:in": "a state to start from",
    "state:out": "return_state",
    "q_offset:nonzero": "a mask at q_offset {op.q_offset}",
    "q_offset:tensor": "q_offset per batch",
    "score:SoftCap": "softcap",
    "score:Bias": "a bias or float mask",
    "score:Alibi": "ALiBi",
    "weight:Softmax": "softmax",
    "weight:Linear": "linear attention",
}
ALL_FEATURES = frozenset(
    [*_TEXT, *(f"mask:{word}" for word in MASK_WORDS), *(f"combine:{word}" for word in ("And", "Or", "Not"))]
)


def feature_text(word: str, op: AttentionOp) -> str:
    """A feature word in the caller's terms, with the op's values."""
    if word in _TEXT:
        named = ", ".join(name for name in op.grad if name not in ("query", "key", "value"))
        return _TEXT[word].format(op=op, operands_with_grad=named)
    if word.startswith("mask:"):
        atom = next((a for a in op.mask.atoms() if a.feature == word), None)
        return f"mask {atom if atom is not None else word[5:]}"
    return word.replace("combine:", "masks combined with ")


def compare(capability: Capability, op: AttentionOp, hints: dict[str, str] | None = None) -> list[Reason]:
    """Every reason against running ``op`` with this capability; an empty list means it can.

    Args:
        hints: remedy by feature word, for backends that know one.
    """
    hints = hints or {}
    reasons = []
    if op.device not in capability.devices:
        allowed = _listed(capability.devices)
        reasons.append(Reason("device", "device", op.device, allowed, text=f"device {op.device}, runs on {allowed}"))
    if op.dtype not in capability.dtypes:
        allowed = _listed(short_dtype(d) for d in capability.dtypes)
        got = short_dtype(op.dtype)
        reasons.append(Reason("dtype", "dtype", got, allowed, hints.get("dtype", ""), f"dtype {got}, takes {allowed}"))
    for word in sorted(op.features - capability.features):
        text = f"no {feature_text(word, op)}"
        reasons.append(Reason("feature", word, True, False, hints.get(word, ""), text))
    reasons += [reason for limit in capability.limits if (reason := limit.broken_by(op)) is not None]
    if op.deterministic and op.grad and not capability.deterministic:
        text = "not deterministic, and torch.use_deterministic_algorithms is on"
        reasons.append(Reason("determinism", "deterministic", False, True, text=text))
    return reasons


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(words))
