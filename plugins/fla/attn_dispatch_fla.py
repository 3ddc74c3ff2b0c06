"""``fla``: linear attention and retention by the Triton kernels of flash-linear-attention.

Both are `simple_gla` there: ``S_t = decay * S_{t-1} + k_t v_t^T``, read with ``scale * q_t``. Read from the sources of
fla-org/flash-linear-attention, the tags v0.2.2 to v0.5.2, and of the wheel fla-core 0.6.0; no kernel was run by us.

1. ``chunk_simple_gla`` computes in the dtype of its inputs, float32 as tf32, and keeps the states between chunks in
   that dtype. It serves bfloat16 and float16 where no state is wanted.
2. ``fused_recurrent_simple_gla`` is float32 inside and goes token by token. It serves float32, every state that comes
   out (a state is float32 whatever the inputs are), and short calls.
3. The library's own normaliser has its own epsilon. Ours is one more column of values, all ones: what the kernel makes
   of it is the sum of weights, decay and state included.
4. A decay of 0 has no logarithm; it is taken as 1e-30, whose powers are 0 in float32.
5. Heads of a group are repeated: the kernels know no groups.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import re
from typing import Any

import torch
import torch.nn.functional as F

from attn_dispatch.plugin import (
    And,
    AttentionOp,
    Backend,
    BackendError,
    Capability,
    Causal,
    Cost,
    Executable,
    Full,
    KeyLengths,
    Limit,
    Linear,
    LinearState,
    Mask,
    Operands,
    QueryLengths,
    Raw,
    Reason,
    Ref,
    hookimpl,
)

__all__ = ["FEATURES_SINCE", "Fla", "attn_dispatch_backends", "form_of"]

# Words of `AttentionOp.features` by the version that brought them: 0.3 has ``g_gamma``, a decay per head.
FEATURES_SINCE: tuple[tuple[tuple[int, ...], frozenset[str]], ...] = (
    (
        (0, 3),
        frozenset(
            {"weight:Linear", "decay", "state:in", "state:out", "gqa", "dv_differs", "grad", "grad:operands"}
            | {"mask:Full", "mask:Causal", "mask:KeyLengths", "mask:QueryLengths", "combine:And", "scale<=0"}
            | {"scattered"}
        ),
    ),
)
_DISTRIBUTIONS = ("fla-core", "flash-linear-attention")
_FIRST_MAJOR = 8
_SHORT = 32  # rows up to which the recurrent form is taken; not measured


class Fla(Backend):
    """flash-linear-attention.

    Args:
        version: of the library; default what is installed. When it is not, its newest facts are shown, and every op is
            refused.
    """

    name = "fla"
    tested = "untested"
    compile_s = 10.0  # Triton compiles and tries its configurations at the first call of a kind
    hints = {"dtype": 'backend="linear"', "mask:Segments": 'backend="linear"', "weights": 'backend="eager"'}  # noqa: RUF012

    def __init__(self, version: str | None = None) -> None:
        self._version = version if version is not None else _installed_version()
        known = FEATURES_SINCE[-1][0] if self._version is None else _parse(self._version)
        self.capabilities = (
            Capability(
                devices=frozenset({"cuda"}),
                dtypes=frozenset({"float16", "bfloat16", "float32"}),
                features=frozenset[str]().union(*(words for since, words in FEATURES_SINCE if since <= known)),
                limits=(
                    *(Limit(name, minimum=1) for name in ("B", "Hq", "Sq", "Skv", "D", "Dv")),
                    *(Limit(name, maximum=256) for name in ("D", "Dv")),
                ),
                notes=f"untested here; read from the source; version {self._version or 'not installed'}",
            ),
        )

    def version(self) -> str:
        return self._version or "none"

    def unavailable(self) -> Reason | None:
        """All that is missing, in one reason: the library, Triton, a newer version, a GPU."""
        problems = []
        if self._version is None:
            problems.append("fla-core is not installed")
        elif _parse(self._version) < FEATURES_SINCE[0][0]:
            problems.append(f"fla-core {self._version} < {'.'.join(map(str, FEATURES_SINCE[0][0]))}")
        if not _has_triton():
            problems.append("triton is not installed")
        if not torch.cuda.is_available():
            problems.append("there is no CUDA device")
        elif (major := torch.cuda.get_device_capability()[0]) < _FIRST_MAJOR:
            problems.append(f"compute capability {major}.x < {_FIRST_MAJOR}.0")
        if not problems:
            return None
        hint = "pip install fla-core" if self._version is None else ""
        return Reason("device", "library", self._version, "fla-core, triton and a GPU", hint, "; ".join(problems))

    def extra_reasons(self, op: AttentionOp) -> list[Reason]:
        weight = op.weight
        assert isinstance(weight, Linear)
        kinds = {type(part) for part in _parts(op.mask)}
        one_step = op.Sq == op.Skv == 1
        decay = None if weight.decay is None else weight.decay.name
        table = {
            "linear attention that is not causal": Causal not in kinds and not one_step,
            f"{op.Sq} queries over {op.Skv} keys": op.Sq != op.Skv,
            f"positions at q_offset {op.q_offset}": op.static_offset() != 0,
            "gradients of the decay": decay is not None and decay in op.grad,
            "state that fades behind key lengths": op.outputs.state and decay is not None and KeyLengths in kinds,
        }
        hint = 'backend="linear"'
        return [Reason("feature_pair", text, True, False, hint, f"no {text}") for text, wrong in table.items() if wrong]

    def load(self) -> Any:
        """``fla.ops.simple_gla``.

        Raises:
            BackendError: it cannot be imported, with the cause.
        """
        try:
            return importlib.import_module("fla.ops.simple_gla")
        except ImportError as error:
            raise BackendError(f"fla-core {self._version} is installed and cannot be imported: {error}") from error

    def compile(self, op: AttentionOp) -> Executable:
        library, form = self.load(), form_of(op)
        kernel = getattr(library, f"{form}_simple_gla")

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
            return _run(op, form, kernel, q, k, v, t)

        return Executable(run)

    def estimate(self, op: AttentionOp) -> Cost:
        rows, d, dv = float(op.B * op.Hq * op.Sq), op.D, op.Dv
        io = op.query.itemsize * rows * 2.0 * (d + dv)
        if form_of(op) == "fused_recurrent":
            return Cost(4.0 * rows * d * dv, io, 1.0 + op.Sq / 64)  # token by token: what it waits for is itself
        return Cost(2.0 * rows * (2.0 * d * dv + 64.0 * (d + dv)), 3.0 * io, 3.0)


def form_of(op: AttentionOp) -> str:
    """``"chunk"`` or ``"fused_recurrent"``; rules 1 and 2 of the module."""
    exact = op.dtype == "float32" or op.outputs.state
    return "fused_recurrent" if exact or op.Sq <= _SHORT else "chunk"


def _run(
    op: AttentionOp, form: str, kernel: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands
) -> Any:
    weight, groups = op.weight, q.shape[1] // k.shape[1]
    assert isinstance(weight, Linear)
    if q.shape[2] != k.shape[2]:
        raise BackendError(f"compiled for as many queries as keys, and run with {q.shape[2]} and {k.shape[2]}")
    dtype = torch.float32 if form == "fused_recurrent" else q.dtype
    keep = _kept(op, k, t)
    rows = [_mapped(weight, q).to(dtype), _mapped(weight, k).to(dtype), v.to(dtype)]
    if keep is not None:
        rows[1:] = (torch.where(keep, x, 0.0) for x in rows[1:])
    if weight.normalizer_eps is not None:  # rule 3
        rows[2] = torch.cat([rows[2], torch.ones_like(rows[2][..., :1])], -1)
    rows[1:] = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in rows[1:])  # rule 5
    given: dict[str, Any] = {"scale": op.effective_scale, "output_final_state": op.outputs.state}
    if weight.decay is not None:
        given["g_gamma"] = t[weight.decay.name].detach().float().clamp(min=1e-30).log()  # rule 4
    if weight.state is not None:
        given["initial_state"] = _state_in(weight, q.shape[1], t)
    out, state = kernel(*(x.transpose(1, 2).contiguous() for x in rows), **given)
    out = out.transpose(1, 2)
    if weight.normalizer_eps is not None:
        total = out[..., -1:].float() + weight.normalizer_eps
        out = out[..., :-1] / torch.where(total == 0, 1.0, total)
    out = out.to(q.dtype)
    for part in _parts(op.mask):
        if isinstance(part, QueryLengths):
            at = torch.arange(q.shape[2], device=q.device)[:, None]
            out = torch.where(at < _of(part.lengths, t, q.device).view(-1, 1, 1, 1), out, 0.0)
    return Raw(out, state=_state_out(op, weight, state, groups, k, t)) if op.outputs.state else out


def _mapped(weight: Linear, x: torch.Tensor) -> torch.Tensor:
    """The feature map, in float32."""
    if weight.feature_map == "identity":
        return x
    if weight.feature_map != "elu1":
        raise BackendError(f"fla knows the feature maps identity and elu1, not {weight.feature_map!r}")
    return F.elu(x.float()) + 1


def _kept(op: AttentionOp, k: torch.Tensor, t: Operands) -> torch.Tensor | None:
    """Which keys count, ``[B, 1, Skv, 1]``; a feature map of 0 is not 0, so they are zeroed after it."""
    lengths = [_of(part.lengths, t, k.device) for part in _parts(op.mask) if isinstance(part, KeyLengths)]
    if not lengths:
        return None
    at = torch.arange(k.shape[2], device=k.device)[:, None]
    return functools.reduce(torch.logical_and, (at < length.view(-1, 1, 1, 1) for length in lengths))


def _state_in(weight: Linear, heads: int, t: Operands) -> torch.Tensor:
    """The state ``[B, Hq, D, Dv]``, its sum as one more column, float32."""
    assert weight.state is not None
    state = t[weight.state.name].float()
    if weight.state_z is not None:
        state = torch.cat([state, t[weight.state_z.name].float()[..., None]], -1)
    return state.repeat_interleave(heads // state.shape[1], 1).contiguous()


def _state_out(
    op: AttentionOp, weight: Linear, state: torch.Tensor, groups: int, k: torch.Tensor, t: Operands
) -> LinearState:
    """The state as attn_dispatch has it: a head for each kv head where there is no decay."""
    state = state if weight.decay is not None else state[:, ::groups]
    z = None
    if weight.normalizer_eps is not None:
        state, z = state[..., :-1].contiguous(), state[..., -1].contiguous()
    b, skv = k.shape[0], k.shape[2]
    count = torch.full((b,), skv, dtype=torch.int64, device=k.device)
    for part in _parts(op.mask):
        if isinstance(part, KeyLengths):
            count = torch.minimum(count, _of(part.lengths, t, k.device).to(count.dtype).expand(b))
    if weight.state_length is not None:
        count = count + t[weight.state_length.name]
    return LinearState(state.contiguous(), z, count)


def _parts(mask: Mask) -> tuple[Any, ...]:
    parts = mask.args if isinstance(mask, And) else (mask,)
    return tuple(part for part in parts if not isinstance(part, Full))


def _of(operand: Any, t: Operands, device: torch.device) -> torch.Tensor:
    return t[operand.name] if isinstance(operand, Ref) else operand.tensor(device)


def _parse(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in found.group().split(".")) if found else ()


@functools.cache
def _installed_version() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@hookimpl
def attn_dispatch_backends() -> list[Backend]:
    """The one backend of this distribution."""
    return [Fla()]
