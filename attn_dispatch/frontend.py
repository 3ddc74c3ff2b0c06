"""From a call to an `AttentionOp`: every mistake of the caller is raised here, before any backend is asked.

`describe` is the slow and careful half: it checks, normalises rank and layout, and names every tensor. What has to be
done again at every call with the same description (views, mask reshapes, dtype of a bias) is kept in the `Binding`
that it returns, so that a warm call repeats that and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attn_dispatch import shapes
from attn_dispatch.errors import InputError, InputTypeError
from attn_dispatch.ir.atoms import Causal, Columns, Dense, Full, KeyLengths, QueryLengths, Selected, Window
from attn_dispatch.ir.masks import Mask
from attn_dispatch.ir.ops import END, AttentionOp, Outputs, verify
from attn_dispatch.ir.scores import Alibi, Bias, ScoreTerm, SoftCap
from attn_dispatch.ir.tensors import Ref, TensorDesc, dtype_name, has_no_values
from attn_dispatch.ir.weights import Softmax, Weight
from attn_dispatch.linear_call import linear_weight
from attn_dispatch.state import spread_state
from attn_dispatch.variants import LinearAttention, Retention, Stateful, Variant
from attn_dispatch.variants import Softmax as SoftmaxVariant

__all__ = ["Binding", "Options", "collect_tensors", "describe"]

Prepare = Callable[[torch.Tensor], torch.Tensor]
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Options:
    """The arguments of `dispatch.attention` that are not tensors; names, meanings and defaults are the same."""

    mask: Mask | str | None = None  # a bound mask, "tensor" for a mask tensor, None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool | None = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    q_offset: int | None = None
    variant: Variant | None = None
    layout: str = "bhsd"
    return_lse: bool = False
    return_weights: bool = False


@dataclass(frozen=True)
class Binding:
    """What to do with the tensors of a call that matches this description.

    Args:
        op: the description.
        form: how query, key and value become ``[B, H, S, D]`` and the results the caller's shape.
        prepare: per operand name, what to do with its tensor (None: nothing).
        notes: what the frontend recognised, for `explain`.
    """

    op: AttentionOp
    form: shapes.Form
    prepare: tuple[tuple[str, Prepare | None], ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    def operands(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The op's operands from the tensors of a call."""
        return {name: tensors[name] if step is None else step(tensors[name]) for name, step in self.prepare}


def collect_tensors(
    attn_mask: Any, bias: Any, sinks: Any, query_lengths: Any, key_lengths: Any, q_offset: Any, variant: Any, query: Any
) -> tuple[dict[str, torch.Tensor], Mask | str | None]:
    """All tensors of a call beside query, key and value, by the names that the op will use, and the bound mask."""
    named: dict[str, torch.Tensor] = {}
    mask: Mask | str | None = None
    if attn_mask is None:
        pass
    elif isinstance(attn_mask, torch.Tensor):
        named["attn_mask"], mask = attn_mask, "tensor"
    elif isinstance(attn_mask, Mask):
        mask, held = attn_mask.bind()
        named |= held
    else:
        problem = f"attn_mask must be a tensor or a Mask, got {type(attn_mask).__name__}"
        raise InputTypeError(problem, remedy="a bool tensor (True = attend), a float bias, or attn_dispatch.masks")
    # line by line and not in a loop: every padded decode step comes here
    if bias is not None:
        named["bias"] = bias if isinstance(bias, torch.Tensor) else _as_tensor("bias", bias, query)
    if sinks is not None:
        named["sinks"] = sinks if isinstance(sinks, torch.Tensor) else _as_tensor("sinks", sinks, query)
    if query_lengths is not None:
        is_tensor = isinstance(query_lengths, torch.Tensor)
        named["query_lengths"] = query_lengths if is_tensor else _as_tensor("query_lengths", query_lengths, query)
    if key_lengths is not None:
        is_tensor = isinstance(key_lengths, torch.Tensor)
        named["key_lengths"] = key_lengths if is_tensor else _as_tensor("key_lengths", key_lengths, query)
    if isinstance(q_offset, torch.Tensor):
        named["q_offset"] = q_offset
    for name, x in named.items():
        if x.is_nested:  # here and not with other mistakes: torch's guard of a warm call ends the process for one
            raise InputTypeError(f"{name} is a nested tensor", remedy="a padded tensor, or lengths")
    if variant is None or isinstance(variant, SoftmaxVariant):
        return named, mask
    if isinstance(variant, Stateful):
        named |= {} if variant.state is None else spread_state(variant.state)
        variant = variant.inner
    if isinstance(variant, Retention):
        if not isinstance(variant.decay, torch.Tensor):
            kind = type(variant.decay).__name__
            raise InputTypeError(f"decay must be a tensor [Hq], got {kind}", remedy="retention_decay(Hq)")
        if not has_no_values(variant.decay) and variant.decay.device.type == "cpu" and not variant.in_range:
            raise InputError(f"decay must be in (0, 1], got {variant.decay.tolist()}", remedy="retention_decay(Hq)")
        named["decay"] = variant.decay
    return named, mask


def _as_tensor(name: str, value: Any, query: Any) -> torch.Tensor:
    """Lengths given as a list; nothing else may be one."""
    if isinstance(value, Alibi):
        raise InputTypeError("bias=Alibi(...) needs its slopes as a tensor", remedy="bias=alibi_slopes(Hq), rank 1")
    if name in ("bias", "sinks") or not hasattr(value, "__len__"):
        raise InputTypeError(f"{name} must be a tensor, got {type(value).__name__}", remedy=f"torch.tensor({name})")
    return torch.as_tensor(value, device=getattr(query, "device", None))


def describe(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    named: Mapping[str, torch.Tensor],
    options: Options,
    *,
    higher_order: bool = False,
    traced: bool = False,
) -> Binding:
    """Check a call and describe it.

    Args:
        query, key, value: as the caller gave them, 2-D to 5-D, after autocast.
        named: the other tensors of the call, see `collect_tensors`.
        options: everything that is not a tensor.
        higher_order, traced: see `AttentionOp`.

    Raises:
        InputError, InputTypeError: which argument's value broke which limit, and what to do.
    """
    asked = shapes.asked(query, key, value)
    shapes.check_tensors(query, key, value, named, asked)
    form = shapes.form_of(query, key, value, options.layout, options.enable_gqa, asked)
    q, k, v = form.pack(query, key, value)
    descs = {"query": TensorDesc.of(q), "key": TensorDesc.of(k), "value": TensorDesc.of(v)}
    build = _Builder(descs["query"], descs["key"], descs["value"].shape[3], form, asked, options, named)
    build.check_numbers()
    build.add_mask()
    build.add_lengths()
    build.add_scores()
    grads = [n for n, t in {"query": query, "key": key, "value": value, **named}.items() if t.requires_grad]
    op = AttentionOp(
        **descs,
        scale=None if options.scale is None else float(options.scale),
        score=tuple(build.score),
        mask=build.mask,
        q_offset=build.resolve_offset(),
        weight=build.weight(),
        dropout_p=float(options.dropout_p),
        outputs=Outputs(bool(options.return_lse), bool(options.return_weights), build.returns_state),
        operands=tuple(build.operands.items()),
        grad=tuple(n for n in grads if n in descs or n in build.operands) if torch.is_grad_enabled() else (),
        higher_order=higher_order,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        traced=traced,
        layout=options.layout,
    )
    verify(op)
    return Binding(op, form, tuple(build.prepare.items()))


@dataclass
class _Builder:
    """Collects the parts of an op while the arguments are checked one by one."""

    query: TensorDesc
    key: TensorDesc
    dv: int
    form: shapes.Form
    asked: str
    options: Options
    named: Mapping[str, torch.Tensor]
    mask: Mask = field(default_factory=Full)
    score: list[ScoreTerm] = field(default_factory=list)
    operands: dict[str, TensorDesc] = field(default_factory=dict)
    prepare: dict[str, Prepare | None] = field(default_factory=dict)
    end_aligned: list[str] = field(default_factory=list)  # arguments whose positions count from the last key

    @property
    def variant(self) -> Variant | None:
        """The variant itself, whether or not it runs from a state."""
        given = self.options.variant
        return given.inner if isinstance(given, Stateful) else given

    @property
    def returns_state(self) -> bool:
        return isinstance(self.options.variant, Stateful) and self.options.variant.returns

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, Hq, Sq, Skv."""
        b, hq, sq, _ = self.query.shape
        return b, hq, sq, self.key.shape[2]

    def fail(self, problem: str, remedy: str = "", kind: type[InputError] = InputError) -> None:
        raise kind(problem, asked=self.asked, remedy=remedy)

    def bind(self, name: str, step: Prepare | None = None) -> Ref:
        """Name a tensor of the call as an operand, and remember how to prepare it."""
        tensor = self.named[name] if step is None else step(self.named[name])
        self.operands[name] = TensorDesc.of(tensor)
        self.prepare[name] = step
        return Ref(name)

    def restrict(self, mask: Mask) -> None:
        """Attend only what this mask allows too."""
        self.mask = mask if isinstance(self.mask, Full) else self.mask & mask

    # --- numbers ---------------------------------------------------------------------------------------------------

    def check_numbers(self) -> None:
        options = self.options
        if not (isinstance(options.dropout_p, (int, float)) and 0.0 <= options.dropout_p <= 1.0):
            self.fail(f"dropout_p must be in [0, 1], got {options.dropout_p}")
        for name, number, limit, remedy in (
            ("scale", options.scale, "a finite number", "leave it out for D ** -0.5"),
            ("softcap", options.softcap, "a finite number >= 0", "0 or None for no soft cap"),
        ):
            if number is None:
                continue
            if isinstance(number, torch.Tensor):  # its first value would be kept, and its gradient dropped
                self.fail(f"{name} must be {limit}, got a tensor", f"{name}.item()", InputTypeError)
            if not hasattr(number, "__float__"):
                self.fail(f"{name} must be {limit}, got {number!r}", remedy, InputTypeError)
            if not math.isfinite(number) or (name == "softcap" and number < 0):
                self.fail(f"{name} must be {limit}, got {number}", remedy)
        if options.q_offset is not None and not isinstance(options.q_offset, int):
            kind = type(options.q_offset).__name__
            self.fail(f"q_offset must be an integer or an int tensor [B], got {kind}", kind=InputTypeError)

    # --- masks -----------------------------------------------------------------------------------------------------

    def add_mask(self) -> None:
        options = self.options
        if options.is_causal:
            self.restrict(Causal())
        if options.window is not None:
            self.add_window(options.window)
        if options.mask == "tensor":
            self.add_mask_tensor(self.named["attn_mask"])
        elif isinstance(options.mask, Mask):
            self.check_mask_operands(options.mask)
            self.restrict(options.mask)
            if options.mask.positional:
                self.end_aligned.append("attn_mask")

    def add_window(self, window: Any) -> None:
        ends = window if isinstance(window, (tuple, list)) and len(window) == 2 else None
        if ends is None or any(not (e is None or (isinstance(e, int) and e >= -1)) for e in ends):
            remedy = "W keys including the query's own: window=(W - 1, 0)"
            self.fail(f"window must be (left, right), each >= 0, or None (or -1) for unbounded; got {window}", remedy)
        left, right = (None if end in (None, -1) else end for end in window)
        if (left, right) != (None, None):
            self.restrict(Window(left, right))
            self.end_aligned.append("window")

    def add_mask_tensor(self, mask: torch.Tensor) -> None:
        if mask.dtype != torch.bool and mask.dtype not in _FLOATS:
            remedy = "attn_mask.bool() (True = attend), or a float tensor, which is added to the scores"
            self.fail(f"attn_mask has dtype {dtype_name(mask.dtype)}; it must be bool or float", remedy, InputTypeError)
        view = self.form.pack_mask(mask, "attn_mask", self.sizes, self.asked)
        if mask.dtype != torch.bool:
            self.score.append(Bias(self.bind("attn_mask", _as_bias(self.query.dtype, view))))
            return
        packed = view(mask)
        if packed.shape[2] == 1 and packed.shape[1] == 1:  # says something of keys alone: a whole column is in or out
            shared, narrow, skv = packed.shape[0] == 1, packed.shape[3] != self.sizes[3], self.sizes[3]

            def columns(m: torch.Tensor) -> torch.Tensor:
                kept = view(m)[0, 0, 0] if shared else view(m).flatten(1)
                return kept.expand(*kept.shape[:-1], skv) if narrow else kept

            def of_rank_4(m: torch.Tensor) -> torch.Tensor:  # in one step: each padded decode step comes here
                return m.view(sizes)

            sizes = (skv,) if shared else (packed.shape[0], skv)
            plain = mask.ndim == 4 and self.form.rank == 4 and not narrow
            self.restrict(Columns(self.bind("attn_mask", of_rank_4 if plain else columns)))
        else:
            self.restrict(Dense(self.bind("attn_mask", view)))

    def check_mask_operands(self, mask: Mask) -> None:
        selected = {a.indices: a for a in mask.atoms() if isinstance(a, Selected)}
        for name in mask.refs():
            lists = selected.get(Ref(name))
            self.bind(name, None if lists is None else shapes.checked_indices(lists, self.sizes[3], self.asked))
        b, hq, sq, skv = self.sizes
        for atom in mask.atoms():
            problem = shapes.mask_problem(atom, self.operands, b, hq, sq, skv)
            if problem:
                self.fail(f"attn_mask {atom}: {problem}")

    def add_lengths(self) -> None:
        b, _, sq, skv = self.sizes
        for name, limit, atom in (("query_lengths", sq, QueryLengths), ("key_lengths", skv, KeyLengths)):
            if name not in self.named:
                continue
            lengths = self.named[name]
            if lengths.dtype not in (torch.int32, torch.int64):
                self.fail(
                    f"{name} has dtype {dtype_name(lengths.dtype)}; it must be int32 or int64", kind=InputTypeError
                )
            if tuple(lengths.shape) != (b,):
                self.fail(f"{name} must have shape [B] = [{b}], got {list(lengths.shape)}")
            if lengths.device.type == "cpu" and not has_no_values(lengths) and b:
                lo, hi = int(lengths.min()), int(lengths.max())
                if lo < 0 or hi > limit:
                    self.fail(f"{name} must be in [0, {limit}], got {lo if lo < 0 else hi}")
            self.restrict(atom(self.bind(name)))

    def resolve_offset(self) -> int | str | Ref:
        """Where query row 0 stands, by DESIGN section 2; 0 when no part of the mask has positions."""
        if "q_offset" in self.named:
            offset = self.named["q_offset"]
            if offset.dtype not in (torch.int32, torch.int64):
                kind = dtype_name(offset.dtype)
                self.fail(f"q_offset has dtype {kind}; it must be int32 or int64", kind=InputTypeError)
            if tuple(offset.shape) not in ((self.sizes[0],), (1,), ()):
                self.fail(f"q_offset must be an int or a tensor [B] = [{self.sizes[0]}], got {list(offset.shape)}")
            return self.bind("q_offset", lambda t: t.reshape(-1))
        positional = self.mask.positional or any(isinstance(term, Alibi) for term in self.score)
        positional = positional or isinstance(self.variant, Retention)
        if not positional:
            return 0
        _, _, sq, skv = self.sizes
        if self.options.q_offset is not None:
            return int(self.options.q_offset)  # as given: it stays where it is when the keys grow
        if self.options.is_causal and self.end_aligned and sq != skv:
            others = " and ".join(self.end_aligned)
            remedy = f"q_offset={skv - sq} (the last query sees the last key), or q_offset=0 (torch's is_causal)"
            self.fail(
                f"is_causal=True counts from key 0 but {others} from the last key, and Sq {sq} != Skv {skv}", remedy
            )
        return 0 if self.options.is_causal or sq == skv else END

    # --- scores and weights ----------------------------------------------------------------------------------------

    def add_scores(self) -> None:
        cap = self.options.softcap
        if cap:
            self.score.insert(0, SoftCap(float(cap)))
        if "bias" not in self.named:
            return
        bias = self.named["bias"]
        if bias.dtype not in _FLOATS:
            problem = f"bias has dtype {dtype_name(bias.dtype)}; it must be float"
            self.fail(problem, "attn_mask= takes a bool mask", InputTypeError)
        if bias.ndim == 1:
            if tuple(bias.shape) != (self.sizes[1],):
                self.fail(f"bias of rank 1 is ALiBi slopes [Hq] = [{self.sizes[1]}], got {list(bias.shape)}")
            self.score.append(Alibi(self.bind("bias")))
            return
        view = self.form.pack_mask(bias, "bias", self.sizes, self.asked)
        self.score.append(Bias(self.bind("bias", _as_bias(self.query.dtype, view))))

    def weight(self) -> Weight:
        if isinstance(self.variant, (LinearAttention, Retention)):
            return linear_weight(self)
        if "sinks" not in self.named:
            return Softmax()
        sinks = self.named["sinks"]
        if tuple(sinks.shape) != (self.sizes[1],):
            self.fail(f"sinks must have shape [Hq] = [{self.sizes[1]}], got {list(sinks.shape)}")
        return Softmax(self.bind("sinks"))


def _as_bias(dtype: str, view: Prepare) -> Prepare:
    """A bias in a dtype that every kernel takes beside a query of ``dtype``, without turning finite into infinite."""
    target = getattr(torch, dtype)

    def prepare(bias: torch.Tensor) -> torch.Tensor:
        bias = view(bias)
        if bias.dtype == target or (target in (torch.float16, torch.bfloat16) and bias.dtype == torch.float32):
            return bias
        wide = target if target == torch.float64 else torch.float32
        lowest = torch.finfo(wide).min
        if bias.dtype == torch.float64:  # float64's lowest would become -inf and mask what was not masked
            bias = torch.where(torch.isinf(bias), bias, bias.clamp(lowest, -lowest))
        return bias.to(wide)

    return prepare
