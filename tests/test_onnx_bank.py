"""The two ONNX rows of the case bank that come without a check, on a plain `torch.onnx.export` of our call.

The others run in test_case_bank.py, marked ``onnx``; here is only that none of them goes missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import attn_dispatch

BANK = yaml.safe_load((Path(__file__).parent / "data" / "cases.yaml").read_text())
OPSETS = (18, 23)


def prelude() -> dict[str, Any]:
    space: dict[str, Any] = {"attn": attn_dispatch.attention}
    exec(BANK["prelude"], space)
    return space | {"attn": attn_dispatch.attention}


class Step(torch.nn.Module):
    """A decode step that keeps its own cache: past and new keys put together, only the output given back."""

    def forward(self, q, k, v, past_k, past_v):
        keys, values = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        return attn_dispatch.attention(q, keys, values, is_causal=True, q_offset=4)


def test_the_bank_has_the_onnx_rows_that_are_run():
    checked = {case["id"] for case in BANK["cases"] if "onnx_run" in case.get("check", "")}
    bare = {case["id"] for case in BANK["cases"] if case["id"].startswith("onnx-") and "check" not in case}
    assert checked == {"onnx-gqa", "onnx-padding-mask-opset23", "onnx-scale-zero-or-negative", "onnx-v-head-dim"}
    assert bare == {"onnx-past-without-present", "onnx-softcap-padding-leak"}


@pytest.mark.parametrize("opset", OPSETS)
def test_past_without_present_a_decode_step_of_a_cache_exports_with_only_its_output(opset):
    space = prelude()
    q, k, v, past_k, past_v = (torch.randn(1, 2, n, 8) for n in (3, 3, 3, 4, 4))

    keys, values = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    out = run_exported(Step(), (q, k, v, past_k, past_v), opset)
    want = space["ref64"](q, keys, values, causal=True, align="bottom_right")
    space["close"](out, want, 1e-4)
    assert (want - space["ref64"](q, keys, values, causal=True)).abs().max() > 1e-2  # top-left would be seen


@pytest.mark.parametrize("opset", OPSETS)
def test_softcap_padding_leak_padded_keys_get_no_weight_under_a_softcap(opset):
    space = prelude()
    q, k, v = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    real = (torch.arange(5) < torch.tensor([[3], [5]]))[:, None, None]
    v = torch.where(real.transpose(-1, -2), v, 1000.0)
    out = space["onnx_run"](
        lambda a, b, c, m: attn_dispatch.attention(a, b, c, attn_mask=m, softcap=1.0), (q, k, v, real), opset=opset
    )
    assert out.abs().max() < 10
    space["close"](out, space["ref64"](q, k, v, mask=real, softcap=1.0), 1e-4)


def run_exported(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], opset: int) -> torch.Tensor:
    """What onnxruntime says of a plain export."""
    import onnxruntime

    program = torch.onnx.export(module.eval(), inputs, dynamo=True, opset_version=opset, verbose=False)
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {given.name: x.numpy() for given, x in zip(session.get_inputs(), inputs, strict=True)}
    return torch.from_numpy(session.run(None, feeds)[0])
