"""The public case bank: bug reports of other libraries as checks, on the dispatcher and on every eligible backend.

A case without a `check` is about plugins, configuration, caches or variants; the tests of those cover it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import attn_dispatch
from attn_dispatch import NoBackendError, variants
from attn_dispatch.registry import current

BANK = yaml.safe_load((Path(__file__).parent / "data" / "cases.yaml").read_text())
CASES = [case for case in BANK["cases"] if "check" in case]


def linear_attn(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Normalised linear attention, for the cases that ask for it."""
    variant = variants.LinearAttention(normalizer_eps=0.0)
    return attn_dispatch.attention(q, k, v, is_causal=causal, variant=variant, backend="linear")


def run_case(case: dict[str, Any], attn: Any) -> None:
    """Run a check as the bank's header says: prelude, then the check, with `attn` bound."""
    space: dict[str, Any] = {}
    exec(BANK["prelude"], space)
    space["attn"] = attn
    space["linear_attn"] = linear_attn
    exec(case["check"], space)


@pytest.fixture
def one_thread():
    """Two OpenMP threads that wait for each other on a busy machine turn 10 us into ms, ours and SDPA's alike."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# The rows that run a model on onnxruntime say so: `make test-onnxruntime` runs them on another one.
MARKED = [pytest.param(c, marks=pytest.mark.onnx if "onnx_run" in c["check"] else (), id=c["id"]) for c in CASES]


@pytest.mark.parametrize("case", MARKED)
def test_case_passes_on_the_dispatcher(case, request):
    if case["id"] == "select-overhead-per-call":
        request.getfixturevalue("one_thread")
    run_case(case, attn_dispatch.attention)


# The bank's checks are softmax attention; what serves another kind alone would refuse each of them.
ELIGIBLE = [
    n
    for n, b in current().backends.items()
    if b.unavailable() is None
    and "cpu" in b.capability_on("cpu").devices
    and "weight:Softmax" in b.capability_on("cpu").features
    and b.compile_s == 0
]


# An ONNX export cannot honour a backend, and the overhead case times the dispatcher's own choice: both run above.
PINNABLE = [c for c in CASES if "onnx_run" not in c["check"] and c["id"] != "select-overhead-per-call"]


@pytest.mark.parametrize("backend", ELIGIBLE)
@pytest.mark.parametrize("case", PINNABLE, ids=lambda c: c["id"])
def test_case_passes_on_every_eligible_backend(case, backend):
    """A pinned backend computes what the case wants, or refuses with its reasons: `NoBackendError`, nothing else.

    A case fails here when a backend runs a call and is wrong. A call that it refuses is left to the dispatcher, so that
    the rest of the case still runs; at least the plain dispatcher passes the whole of it.
    """

    def attn(*args: Any, **kwargs: Any) -> Any:
        try:
            return attn_dispatch.attention(*args, **kwargs, backend=backend)
        except NoBackendError as error:
            if backend not in error.refusals:
                raise AssertionError(f"{backend} refused without a reason") from error
            return attn_dispatch.attention(*args, **kwargs)

    run_case(case, attn)
    torch._dynamo.reset()
