"""What a wrong result is: which part of the op it was computed without.

A result that misses its budget is compared with float64 goldens of the same inputs with one thing changed: the scale
dropped, the mask ignored, a key too many, the groups in another order. When one fits, the backend did not compute
badly; it claims something that it does not do.

Example:
    >>> from attn_dispatch.testing import BY_ID
    >>> from attn_dispatch.testing.cases import make_inputs
    >>> from attn_dispatch.testing.goldens import golden
    >>> case = BY_ID["scale"]
    >>> unscaled = golden(replace(case, scale=1.0), make_inputs(case))
    >>> diagnose(case, unscaled.out, None).claim
    'scale'
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from attn_dispatch.budgets import budget
from attn_dispatch.testing.cases import Case, Inputs, make_inputs
from attn_dispatch.testing.goldens import Golden, as_four, golden

__all__ = ["Diagnosis", "diagnose"]

_LOOSE = 4.0  # an alternative is recognised within so many budgets


@dataclass(frozen=True)
class Diagnosis:
    """What explains a wrong result.

    Args:
        claim: the part of the op that was not honoured, ``scale mask groups "dead rows" lse ...``; empty when nothing
            fits. text: the finding for people.
    """

    claim: str = ""
    text: str = ""


def diagnose(case: Case, out: torch.Tensor, lse: torch.Tensor | None) -> Diagnosis:
    """Explain a result that is wrong.

    Args:
        out: ``[B, Hq, Sq, Dv]``. lse: ``[B, Hq, Sq]``, or None.
    """
    case = replace(case, grad=())
    inputs = make_inputs(case)
    want = golden(case, inputs)
    if out.shape != want.out.shape:
        return Diagnosis()
    out = out.double()
    if not _is(out, want.out, case.dtype):
        return _of_dead_rows(out, want, inputs, case) or _of_alternatives(case, inputs, out)
    return _of_lse(lse.double(), want.lse, case.dtype) if lse is not None else Diagnosis()


def _is(got: torch.Tensor, want: torch.Tensor, dtype: str, quantity: str = "out") -> bool:
    limit = budget(dtype, quantity)
    return torch.allclose(got, want, atol=_LOOSE * limit.absolute, rtol=_LOOSE * limit.relative, equal_nan=True)


def _of_dead_rows(out: torch.Tensor, want: Golden, inputs: Inputs, case: Case) -> Diagnosis | None:
    """Rows that may attend nothing, when all others are right."""
    dead = torch.isneginf(want.lse)[..., None]
    if case.linear or case.sinks or not dead.any():
        return None
    if not _is(torch.where(dead, 0.0, out), torch.where(dead, 0.0, want.out), case.dtype):
        return None
    got = out[dead.expand(out.shape)]
    if torch.isnan(got).any():
        return Diagnosis("dead rows", "a row that may attend nothing is NaN where it must be 0")
    value = as_four(inputs.value, case).double()
    mean = value.mean(2, keepdim=True).repeat_interleave(out.shape[1] // value.shape[1], 1).expand(out.shape)
    if _is(torch.where(dead, out, 0.0), torch.where(dead, mean, 0.0), case.dtype):
        return Diagnosis("dead rows", "a row that may attend nothing is the mean of all values where it must be 0")
    return Diagnosis("dead rows", "a row that may attend nothing is not 0")


def _of_alternatives(case: Case, inputs: Inputs, out: torch.Tensor) -> Diagnosis:
    for claim, text, other, changed in _alternatives(case, inputs):
        alternative = golden(other, changed).out
        if _is(out, alternative, case.dtype):
            return Diagnosis(claim, text)
        # what to do with empty rows is another question, answered by a case of its own
        alive = ~torch.isnan(out)
        if (
            alive.any()
            and not alive.all()
            and _is(torch.where(alive, out, 0), torch.where(alive, alternative, 0), case.dtype)
        ):
            return Diagnosis(claim, f"{text}, and some rows are NaN")
    return Diagnosis()


def _alternatives(case: Case, inputs: Inputs) -> Iterator[tuple[str, str, Case, Inputs]]:
    """``(claim, text, case, inputs)``: the op with one thing changed."""
    if case.scale is not None:
        yield "scale", "the scale is dropped: 1/sqrt(head_dim) is used", replace(case, scale=None), inputs
    yield "scale", "the scale is dropped: scores are not scaled at all", replace(case, scale=1.0), inputs
    if case.scale is not None and case.scale < 0:
        yield "scale", "the sign of the scale is dropped", replace(case, scale=-case.scale), inputs
    if case.softcap:
        yield "softcap", "the softcap is dropped", replace(case, softcap=None), inputs
    if case.sinks:
        yield "sinks", "the sinks are dropped", replace(case, sinks=False), inputs
    if inputs.bias is not None:
        yield "bias", "the bias is dropped", case, replace(inputs, bias=None)
    yield from _masks(case, inputs)
    yield from _groups(case, inputs)


def _masks(case: Case, inputs: Inputs) -> Iterator[tuple[str, str, Case, Inputs]]:
    n, allowed = case.sizes, inputs.allowed
    if bool(allowed.all()):
        return
    i, j = torch.arange(n.Sq)[:, None], torch.arange(n.Skv)
    others = {
        "the mask is ignored": torch.ones_like(allowed),
        "the mask is taken as causal, counted from key 0": (j <= i).expand(allowed.shape),
        "the mask is taken as causal, counted from the end": (j <= i + n.Skv - n.Sq).expand(allowed.shape),
        "a row attends one key too many at its end": allowed | _shifted(allowed, 1),
        "a row attends one key too many at its start": allowed | _shifted(allowed, -1),
        "a row misses its last key": allowed & _shifted(allowed, -1),
        "a row misses its first key": allowed & _shifted(allowed, 1),
        "the mask is upside down: True is taken for hidden": ~allowed,
    }
    if n.B > 1:
        others["the first batch's mask is used for all"] = allowed[:1].expand(allowed.shape)
    if n.Hq > 1:
        others["the first head's mask is used for all"] = allowed[:, :1].expand(allowed.shape)
    for text, mask in others.items():
        yield "mask", text, case, replace(inputs, allowed=mask)


def _shifted(allowed: torch.Tensor, by: int) -> torch.Tensor:
    """The mask moved along the keys; what moves in is hidden."""
    out = torch.zeros_like(allowed)
    if by > 0:
        out[..., by:] = allowed[..., :-by]
    else:
        out[..., :by] = allowed[..., -by:]
    return out


def _groups(case: Case, inputs: Inputs) -> Iterator[tuple[str, str, Case, Inputs]]:
    n = case.sizes
    if n.Hq == n.Hkv or case.rank != 4 or n.Hkv == 0 or case.linear:
        return
    heads = 1 if case.layout == "bhsd" else 2
    tiled = [x.repeat(*(n.Hq // n.Hkv if d == heads else 1 for d in range(4))) for x in (inputs.key, inputs.value)]
    own = replace(case, sizes=replace(n, Hkv=n.Hq))
    text = "query head h uses kv head h % Hkv where it must be h // (Hq / Hkv)"
    yield "groups", text, own, replace(inputs, key=tiled[0], value=tiled[1])
    first = [
        x.narrow(heads, 0, 1).expand(*(n.Hq if d == heads else s for d, s in enumerate(x.shape)))
        for x in (inputs.key, inputs.value)
    ]
    yield "groups", "all query heads use kv head 0", own, replace(inputs, key=first[0], value=first[1])


def _of_lse(lse: torch.Tensor, want: torch.Tensor, dtype: str) -> Diagnosis:
    if lse.shape != want.shape:
        return Diagnosis()
    dead = torch.isneginf(want)
    if _is(torch.where(dead, 0.0, lse), torch.where(dead, 0.0, want), dtype, "lse"):
        if bool(torch.isneginf(lse[dead]).all()):
            return Diagnosis()
        return Diagnosis("lse", "the lse of a row that may attend nothing is not -inf, which corrupts every merge")
    if _is(lse * math.log(2), want, dtype, "lse"):
        return Diagnosis("lse", "the lse is in base 2 where it must be natural")
    return Diagnosis("lse", "the output is right and the lse is not")
