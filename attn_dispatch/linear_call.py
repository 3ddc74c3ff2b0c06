"""What a call of the linear family may look like: the caller's mistakes, and the weight kind that is left.

The part of the frontend behind ``variant=LinearAttention(...)`` and ``variant=Retention(...)``, with and without state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from attn_dispatch.errors import InputTypeError
from attn_dispatch.ir.atoms import Causal, Columns, Full, KeyLengths, KeyRange, QueryLengths, Rows, Segments, Window
from attn_dispatch.ir.masks import And, Mask
from attn_dispatch.ir.ops import END
from attn_dispatch.ir.tensors import Ref, TensorDesc, dtype_name
from attn_dispatch.ir.weights import Linear
from attn_dispatch.state import state_dtype
from attn_dispatch.variants import LinearAttention, Retention, Stateful

__all__ = ["FEATURE_MAPS", "linear_weight"]

FEATURE_MAPS = ("identity", "elu1")
# A state is a sum over keys, so it can follow what is in or out for a whole key, and causality by its place.
_FOLLOWS = (Full, Causal, KeyLengths, QueryLengths, Columns, KeyRange, Rows, Segments)


class Builder(Protocol):
    """What is needed of the frontend's builder."""

    options: Any
    query: TensorDesc
    key: TensorDesc
    dv: int
    form: Any
    named: Mapping[str, torch.Tensor]
    mask: Mask
    score: list[Any]

    @property
    def sizes(self) -> tuple[int, int, int, int]: ...
    @property
    def variant(self) -> Any: ...
    def fail(self, problem: str, remedy: str = "", kind: Any = ...) -> None: ...
    def bind(self, name: str, step: Any = None) -> Ref: ...
    def resolve_offset(self) -> int | str | Ref: ...


def linear_weight(build: Builder) -> Linear:
    """Check the arguments of a call of the linear family.

    Raises:
        InputError, InputTypeError: what means nothing here, or a state of another shape, dtype or variant.
    """
    variant = build.variant
    _refuse_meaningless(build, type(variant).__name__)
    if isinstance(build.options.variant, Stateful):
        _check_stateful(build, build.options.variant)
    if isinstance(variant, Retention):
        decay, heads = variant.decay, build.sizes[1]
        if tuple(decay.shape) != (heads,) or not decay.dtype.is_floating_point:
            got = decay.tolist() if decay.numel() <= 64 else list(decay.shape)
            build.fail(f"decay must be [Hq] = [{heads}] in (0, 1], a float tensor, got {got}", "retention_decay(Hq)")
        return Linear("identity", build.bind("decay"), None, *_state_refs(build, heads, False))
    assert isinstance(variant, LinearAttention)
    eps = variant.normalizer_eps
    if variant.feature_map not in FEATURE_MAPS:
        build.fail(f"feature_map must be 'identity' or 'elu1', got {variant.feature_map!r}")
    if eps is not None and not (isinstance(eps, (int, float)) and math.isfinite(eps) and eps >= 0):
        build.fail(f"normalizer_eps must be a finite number >= 0, got {eps!r}", "None does not divide")
    return Linear(variant.feature_map, None, eps, *_state_refs(build, build.key.shape[1], eps is not None))


def _refuse_meaningless(build: Builder, name: str) -> None:
    """What means nothing without a softmax, and what has no state of fixed size."""
    options = build.options
    refused = {
        "softcap": options.softcap,
        "sinks": "sinks" in build.named,
        "dropout_p": options.dropout_p,
        "bias": "bias" in build.named,
        "a float attn_mask": "bias" not in build.named and not options.softcap and build.score,
        "return_lse": options.return_lse,
        "a window": options.window is not None or any(isinstance(atom, Window) for atom in build.mask.atoms()),
    }
    remedies = {
        "a float attn_mask": "a bool mask (True = attend)",
        "return_lse": "return_state=True, which variants.combine merges",
        "a window": "leave it out (the decay of Retention fades old keys), or variant=Softmax()",
    }
    for what in [n for n, given in refused.items() if given]:
        build.fail(f"{what} means nothing for {name}", remedies.get(what, "leave it out, or variant=Softmax()"))


def _check_stateful(build: Builder, variant: Stateful) -> None:
    """A call with a state: queries behind the state, and a mask that a state can follow."""
    _, _, sq, skv = build.sizes
    if build.form.rank != 4:
        build.fail(f"state and return_state need 4-D inputs, got {build.form.rank}-D", "[B, H, S, D]")
    if build.options.return_weights:
        build.fail("return_weights and return_state exclude each other", "two calls")
    parts = build.mask.args if isinstance(build.mask, And) else (build.mask,)
    for part in parts:
        if not isinstance(part, _FOLLOWS):
            remedy = "is_causal, key_lengths, masks over keys and documents; or run it without a state"
            build.fail(f"a state cannot follow the mask {part}", remedy)
    if {Segments, KeyLengths} <= {type(part) for part in parts}:
        build.fail("a state with documents and key_lengths is ambiguous", "cut the padding off, or use no state")
    if variant.state is None or not (build.mask.positional or isinstance(variant.inner, Retention)):
        return
    offset = build.resolve_offset()
    if isinstance(offset, Ref):
        build.fail("a state with a q_offset per batch is not supported", "one q_offset, or key_lengths")
        return
    first = skv - sq if offset == END else int(offset)
    if first < 0:
        problem = f"with a state the queries stand behind it, and query 0 is at key position {first} of this call"
        build.fail(problem, f"as many keys as queries (Sq {sq}, Skv {skv}), or q_offset=0")


def _state_refs(build: Builder, heads: int, has_sum: bool) -> tuple[Ref, Ref | None, Ref] | tuple[()]:
    """Check the state that goes in, and name its tensors."""
    given = build.options.variant
    if not isinstance(given, Stateful) or given.state is None:
        return ()
    b, d = build.sizes[0], build.query.shape[3]
    acc = state_dtype(getattr(torch, build.query.dtype))
    remedy = "the state that return_state=True gave for the same variant, heads and sizes, or none"
    if has_sum != ("state_z" in build.named):
        wrong = "is None, and this variant has a normaliser" if has_sum else "is given, and nothing is normalised here"
        build.fail(f"state.z {wrong}", remedy)
    wanted: dict[str, tuple[int, ...]] = {"state": (b, heads, d, build.dv)}
    wanted |= {"state_z": (b, heads, d)} if has_sum else {}
    for name, shape in wanted.items():
        x, label = build.named[name], "state.S" if name == "state" else "state.z"
        if tuple(x.shape) != shape:
            axes = "[B, H, D, Dv]" if name == "state" else "[B, H, D]"
            build.fail(f"{label} must be {axes} = {list(shape)}, got {list(x.shape)}", remedy)
        if x.dtype != acc:
            problem = f"{label} must be {dtype_name(acc)} for {build.query.dtype} inputs, got {dtype_name(x.dtype)}"
            build.fail(problem, f"{label}.to(torch.{dtype_name(acc)})", InputTypeError)
    length = build.named["state_length"]
    if length.dtype not in (torch.int32, torch.int64) or tuple(length.shape) not in ((b,), (1,), ()):
        got = f"{dtype_name(length.dtype)} {list(length.shape)}"
        build.fail(f"state.length must be an int or an integer tensor [B] = [{b}], got {got}", remedy)
    z = build.bind("state_z") if has_sum else None
    return build.bind("state"), z, build.bind("state_length", _as_row)


def _as_row(length: torch.Tensor) -> torch.Tensor:
    return length.reshape(-1)
