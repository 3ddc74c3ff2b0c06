"""What torch's CUDA kernels take, by GPU and library: facts of ``sdp_utils.cpp``, asked of GPUs that are not here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_dispatch.backends.sdpa_cudnn import SdpaCudnn
from attn_dispatch.backends.sdpa_efficient import SdpaEfficient
from attn_dispatch.backends.sdpa_flash import SdpaFlash
from attn_dispatch.capability import compare
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.scores import Bias
from attn_dispatch.ir.tensors import Ref, TensorDesc

GRAD = ("query", "key", "value")


def op_of(d: int = 64, s: int = 256, hkv: int = 8, dtype: str = "float16", **changes: Any) -> AttentionOp:
    q, kv = (TensorDesc((2, h, s, d), dtype, "cuda") for h in (8, hkv))
    return AttentionOp(q, kv, kv, scale=d**-0.5, **changes)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend a GPU of a compute capability, and a version of cuDNN."""

    def put(capability: tuple[int, int], cudnn: int = 91900) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)

    return put


def reasons(backend: Any, op: AttentionOp) -> list[str]:
    capability = next(one for one in backend.capabilities if op.device in one.devices)
    return [str(reason) for reason in (*compare(capability, op), *backend.extra_reasons(op))]


@pytest.mark.parametrize("backend", [SdpaFlash(), SdpaCudnn()], ids=lambda b: b.name)
@pytest.mark.parametrize(("capability", "runs"), [((7, 5), False), ((8, 0), True), ((9, 0), True), ((13, 0), False)])
def test_flash_and_cudnn_run_on_the_gpus_that_torch_gives_them(backend, capability, runs, gpu):
    gpu(capability)
    against = reasons(backend, op_of())
    assert not against if runs else f"compute capability {capability[0]}.{capability[1]}, takes 8.0 to 12.1" in against


def test_bfloat16_on_the_efficient_kernel_needs_8_0(gpu):
    gpu((7, 5))
    assert not reasons(SdpaEfficient(), op_of())
    assert "compute capability 7.5, takes 8.0 to 12.1" in reasons(SdpaEfficient(), op_of(dtype="bfloat16"))


@pytest.mark.parametrize(
    ("capability", "d", "dropout_p", "grad", "runs"),
    [
        ((8, 6), 200, 0.0, GRAD, False), ((8, 7), 200, 0.0, GRAD, False),
        ((8, 9), 256, 0.1, GRAD, False), ((12, 0), 256, 0.0, GRAD, True),
        ((8, 6), 256, 0.1, (), True), ((8, 0), 200, 0.1, GRAD, True), ((9, 0), 256, 0.1, GRAD, True),
    ],
)  # fmt: skip
def test_gradients_of_large_heads_need_shared_memory(capability, d, dropout_p, grad, runs, gpu):
    gpu(capability)
    assert bool(reasons(SdpaFlash(), op_of(d, dropout_p=dropout_p, grad=grad))) is not runs


@pytest.mark.parametrize(
    ("p", "cudnn", "runs"), [(0.1, 91900, False), (0.25, 91900, True), (0.25, 91200, False), (0.0, 91600, True)]
)
def test_cudnn_drops_in_sixteenths(p, cudnn, runs, gpu):
    gpu((9, 0), cudnn)
    assert bool(reasons(SdpaCudnn(), op_of(dropout_p=p))) is not runs


@pytest.mark.parametrize(("s", "cudnn", "runs"), [(256, 91000, True), (250, 91000, False), (250, 91501, True)])
def test_an_old_cudnn_gets_multiples_of_128(s, cudnn, runs, gpu):
    gpu((9, 0), cudnn)
    assert bool(reasons(SdpaCudnn(), op_of(s=s))) is not runs


def test_dropping_all_is_not_for_flash(gpu):
    gpu((9, 0))
    assert reasons(SdpaFlash(), op_of(dropout_p=1.0)) == ["dropout_p 1, takes less than 1"]


def test_the_efficient_kernel_takes_groups_and_a_bias_of_its_own_dtype(gpu):
    gpu((9, 0))
    assert not reasons(SdpaEfficient(), op_of(hkv=2))
    for dtype, against in (("float16", []), ("float32", ["a f32 bias beside f16 (upcast > sdpa_efficient)"])):
        bias = TensorDesc((1, 8, 256, 256), dtype, "cuda")
        op = op_of(score=(Bias(Ref("bias")),), operands=(("bias", bias),))
        assert reasons(SdpaEfficient(), op) == against
