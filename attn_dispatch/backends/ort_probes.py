"""What the onnxruntime that runs here computes rightly: small ops with known answers, asked once per process.

The ONNX specification of Attention changed in place, so neither the opset nor the version of a runtime says what a node
means; only running it does. Each word of `lowering.target.PROVABLE` is asked with inputs on which the known mistakes
show (research: onnxruntime issues 29020, 28904, 25966; onnx 7865, 8054, 8068).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from attn_dispatch import reference
from attn_dispatch.backend import Operands
from attn_dispatch.backends.ort_sessions import Runtime, bind, make_session, runtime
from attn_dispatch.ir.atoms import Causal, Dense, Full, KeyLengths
from attn_dispatch.ir.masks import And, Mask
from attn_dispatch.ir.ops import END, AttentionOp, Outputs
from attn_dispatch.ir.scores import Bias, ScoreTerm, SoftCap
from attn_dispatch.ir.tensors import Ref, TensorDesc
from attn_dispatch.ir.weights import Linear, Softmax, Weight
from attn_dispatch.lowering.target import PROVABLE, Target

__all__ = ["Verdict", "proven", "verdicts"]


@dataclass(frozen=True)
class Verdict:
    """What one probe found.

    Args:
        outcome: ``"right"``, ``"wrong"`` (it ran and its result is another), ``"refused"`` (no session, or it raised).
        detail: the error, or the message of the refusal.
    """

    word: str
    outcome: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.word} {self.outcome}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True)
class _Probe:
    """An op, its tensors, and the form in which it is asked."""

    op: AttentionOp
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    operands: Operands
    form: str = "standard"
    opset: int = 24


def verdicts(device_type: str) -> tuple[Verdict, ...]:
    """A verdict for every word of `PROVABLE` on this device type's provider."""
    return _asked(runtime(device_type), device_type)


def proven(device_type: str) -> frozenset[str]:
    """The words that hold."""
    return frozenset(v.word for v in verdicts(device_type) if v.outcome == "right")


@functools.cache
def _asked(here: Runtime, device_type: str) -> tuple[Verdict, ...]:
    with torch.device("cpu"):  # whatever the caller's default device is
        return tuple(_ask_all(word, make(), device_type, str(here)) for word, make in _PROBES.items())


def _ask_all(word: str, probes: _Probe | tuple[_Probe, ...], device_type: str, name: str) -> Verdict:
    """The first answer that is not "right", where a word needs several ops."""
    for probe in probes if isinstance(probes, tuple) else (probes,):
        verdict = _ask(word, probe, device_type, name)
        if verdict.outcome != "right":
            break
    return verdict


def _ask(word: str, probe: _Probe, device_type: str, name: str) -> Verdict:
    """Build, run and compare one probe; a runtime may refuse at any of these, and that is an answer."""
    import onnx_ir

    from attn_dispatch.lowering.model import build_model, input_names, output_names

    hides = isinstance(probe.op.weight, Linear)  # as the backend has it
    target = Target(probe.form, probe.opset, frozenset(PROVABLE), name, hides)
    given = [x.to(device_type) for x in (*probe.tensors, *probe.operands.values())]
    operands = {name: _wide(x) for name, x in probe.operands.items()}
    q, k, v = (x.double() for x in probe.tensors)
    raw = reference.attention(probe.op, q, k, v, operands)
    want = [x for x in (raw.out, raw.weights, *(raw.state or ())) if isinstance(x, torch.Tensor)]
    kinds = [probe.tensors[0].dtype if x.is_floating_point() else x.dtype for x in want]
    got = [torch.zeros(x.shape, dtype=kind, device=device_type) for x, kind in zip(want, kinds, strict=True)]
    for x in got:
        x.fill_(math.nan if x.is_floating_point() else -1)
    model = onnx_ir.to_proto(build_model(probe.op, target)).SerializeToString()
    try:
        index = torch.cuda.current_device() if device_type == "cuda" else 0
        session = make_session(model, device_type, 1, quiet=True, index=index)
        names = (input_names(probe.op), output_names(probe.op))
        session.run_with_iobinding(bind(session.io_binding(), device_type, names[0], given, names[1], got))
    except Exception as error:  # noqa: BLE001 - whatever a foreign runtime raises is its answer
        return Verdict(word, "refused", f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}")
    difference = max(float((x.cpu().double() - y).abs().max()) for x, y in zip(got, want, strict=True))
    limit = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}[probe.op.dtype]
    if math.isfinite(difference) and difference <= limit:
        return Verdict(word, "right")
    return Verdict(word, "wrong", f"off by {difference:.3g}")


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


# --- the questions ---------------------------------------------------------------------------------------------------

_OUT = Outputs()


def _probe(
    mask: Mask | None = None,
    offset: int | str = 0,
    heads: tuple[int, int] = (2, 2),
    dtype: str = "float32",
    score: tuple[ScoreTerm, ...] = (),
    form: str = "standard",
    sq: int = 3,
    outputs: Outputs = _OUT,
    times: float = 1.0,
    operands: Operands | None = None,
    weight: Weight = Softmax(),  # noqa: B008 - frozen
    opset: int = 24,
) -> _Probe:
    """Two sequences, 5 keys, head size 8; sines, so that no generator is asked, and ``times`` in query and key."""
    kind = getattr(torch, dtype)

    def tensor(h: int, s: int, at: float) -> torch.Tensor:
        return (torch.sin(torch.arange(2 * h * s * 8, dtype=torch.float64) * 0.7 + at) * 2).view(2, h, s, 8).to(kind)

    q, k, v = tensor(heads[0], sq, 0.1), tensor(heads[1], 5, 0.5), tensor(heads[1], 5, 0.9)
    q, k = (x * times for x in (q, k))
    operands = operands or {}
    op = AttentionOp(
        TensorDesc.of(q), TensorDesc.of(k), TensorDesc.of(v), score=score, mask=mask or Full(), q_offset=offset,
        outputs=outputs, weight=weight,
        operands=tuple((name, TensorDesc.of(x)) for name, x in operands.items()),
    )  # fmt: skip
    return _Probe(op, (q, k, v), dict(sorted(operands.items())), form, opset)


def _some_rows(
    dtype: str = "float32", score: tuple[ScoreTerm, ...] = (), outputs: Outputs = _OUT, times: float = 1.0
) -> _Probe:
    """A mask with a row that attends nothing."""
    kept = torch.tensor([[True, False, True, False, False], [False] * 5, [True] * 5])
    operands = {"kept": kept[None, None]}
    return _probe(Dense(Ref("kept")), dtype=dtype, score=score, outputs=outputs, times=times, operands=operands)


def _lengths_and(bias: Bias | None) -> _Probe:
    """Lengths, one of them 0, beside a boolean mask or a bias per head.

    One row is left nothing by both together, and one has nothing but the lowest finite number before its length.
    """
    lengths = {"lengths": torch.tensor([4, 0])}
    added = torch.sin(torch.arange(2 * 3 * 5) * 1.3).view(1, 2, 3, 5) * 3
    kept = added > -2
    kept[0, 1, 0] = torch.arange(5) == 4
    if bias is None:
        return _probe(And.of(KeyLengths(Ref("lengths")), Dense(Ref("kept"))), operands=lengths | {"kept": kept})
    masked = torch.where(kept, added, -math.inf)
    masked[0, 0, 1, :4] = torch.finfo(torch.float32).min
    return _probe(KeyLengths(Ref("lengths")), score=(bias,), operands=lengths | {"bias": masked})


def _recurrences(form: str, opset: int) -> tuple[_Probe, ...]:
    """Both rules of the linear family, each with a state in and out: a decay per head (0 among them), grouped heads."""
    state = torch.cos(torch.arange(2 * 2 * 8 * 8) * 0.3).view(2, 2, 8, 8)
    before = {"state": state, "state_length": torch.tensor([3])}
    linear = Linear(state=Ref("state"), state_length=Ref("state_length"))
    gated, decay = replace(linear, decay=Ref("decay")), {"decay": torch.tensor([0.5, 0.0])}
    asked = functools.partial(_probe, Causal(), sq=5, form=form, opset=opset, outputs=Outputs(state=True))
    return (
        asked(weight=gated, operands=before | decay),
        asked(weight=linear, operands=before, heads=(4, 2)),
    )


_PROBES: dict[str, Callable[[], _Probe | tuple[_Probe, ...]]] = {
    "causal_start": lambda: _probe(Causal()),
    "causal_end": lambda: _probe(Causal(), END),
    "lengths": lambda: tuple(
        _probe(KeyLengths(Ref("lengths")), operands={"lengths": torch.tensor(lengths)}) for lengths in ([5, 2], [0, 3])
    ),
    "lengths_and_mask": lambda: _lengths_and(None),
    "lengths_and_bias": lambda: _lengths_and(Bias(Ref("bias"))),
    "empty_rows": _some_rows,
    "softcap": lambda: _some_rows(score=(SoftCap(0.5),)),
    "gqa": lambda: _probe(heads=(4, 2)),
    "weights": lambda: _some_rows(outputs=Outputs(weights=True)),
    "float16": lambda: _some_rows("float16", times=400.0),  # scores beyond 65504
    "bfloat16": lambda: _some_rows("bfloat16"),
    "float64": lambda: _some_rows("float64"),
    "contrib_gqa": lambda: _probe(Causal(), END, heads=(4, 2), form="contrib", sq=1),
    "contrib_mha": lambda: _probe(form="contrib"),
    "linear_attention": lambda: _recurrences("standard", 27),
    "contrib_linear": lambda: _recurrences("contrib", 24),
}
