"""The backend ``onnxruntime`` beyond the contract suite: sessions, threads, lengths, what is missing or broken."""

from __future__ import annotations

import builtins
import threading

import pytest
import torch
from packaging.version import Version

from attn_dispatch import BackendError, NoBackendError, dispatch, masks
from attn_dispatch.backends import onnxruntime as backend
from attn_dispatch.backends import ort_probes, ort_sessions

pytestmark = pytest.mark.onnx


def attend(q, k, v, **options):
    return dispatch.attention(q, k, v, backend="onnxruntime", enable_gqa=True, **options)


def qkv(sq: int, skv: int, hq: int = 4, hkv: int = 2):
    return torch.randn(2, hq, sq, 16), torch.randn(2, hkv, skv, 16), torch.randn(2, hkv, skv, 16)


def right(q, k, v, **options):
    return dispatch.attention(q.double(), k.double(), v.double(), backend="eager", enable_gqa=True, **options).float()


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"window": (3, 0)}, {"attn_mask": masks.chunked(8)}, {"softcap": 2.0}],
    ids=["plain", "causal", "window", "chunked", "softcap"],
)
def test_all_lengths_share_one_session(options, monkeypatch):
    made = []
    make = ort_sessions.make_session
    monkeypatch.setattr(ort_sessions, "make_session", lambda *a, **k: made.append(1) or make(*a, **k))
    ort_sessions.make_runner.cache_clear()
    for n in range(20, 60):
        inputs = qkv(n, n + 3)
        torch.testing.assert_close(attend(*inputs, **options), right(*inputs, **options), rtol=1e-4, atol=1e-5)
    assert len(made) == 1


def test_results_are_tensors_of_their_own_and_inputs_may_move():
    inputs = qkv(5, 9)
    first = attend(*inputs)
    kept = first.clone()
    moved = [x.clone() for x in inputs]
    other = attend(*(x * 0.5 for x in moved))
    assert torch.equal(first, kept)
    assert not torch.equal(first, other)
    torch.testing.assert_close(attend(*inputs), kept)


def test_threads_run_one_op_at_the_same_time():
    inputs = [qkv(32, 48) for _ in range(6)]
    want = [right(*x) for x in inputs]
    wrong = []

    def work(i: int) -> None:
        for _ in range(20):
            if not torch.allclose(attend(*inputs[i]), want[i], rtol=1e-4, atol=1e-5):
                wrong.append(i)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_a_session_has_as_many_threads_as_torch(monkeypatch):
    asked = []
    make = ort_sessions.make_session
    monkeypatch.setattr(ort_sessions, "make_session", lambda *a, **k: asked.append(a[2]) or make(*a, **k))
    ort_sessions.make_runner.cache_clear()
    inputs = qkv(6, 7)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 1, 2):
            torch.set_num_threads(threads)
            torch.testing.assert_close(attend(*inputs), right(*inputs), rtol=1e-4, atol=1e-5)
    finally:
        torch.set_num_threads(before)
    assert sorted(set(asked)) == [1, 2]
    assert len(asked) == 2


def test_views_of_every_kind_are_read_as_torch_reads_them():
    q, k, v = qkv(5, 7)
    views = {
        "negated": torch._neg_view(q),
        "transposed": q.transpose(1, 2).contiguous().transpose(1, 2),
        "strided": torch.stack([q, q], -1)[..., 0],
        "expanded": q[:1].expand(2, -1, -1, -1),
    }
    for name, view in views.items():
        torch.testing.assert_close(attend(view, k, v), right(view, k, v), rtol=1e-4, atol=1e-5, msg=name)


def test_the_default_device_of_the_caller_does_not_reach_the_probes():
    ort_probes._asked.cache_clear()
    before = [str(v) for v in ort_probes.verdicts("cpu")]
    ort_probes._asked.cache_clear()
    with torch.device("meta"):
        assert [str(v) for v in ort_probes.verdicts("cpu")] == before


def test_the_version_is_a_version():
    assert Version(backend.OnnxRuntime().version())
    assert len(backend.installed()) == 1


def test_a_library_that_cannot_be_imported_is_a_reason(monkeypatch):
    original = builtins.__import__

    def broken(name, *args, **kwargs):
        if name == "onnxruntime":
            raise ImportError("libfoo.so: cannot open shared object file")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(backend, "_broken", [])
    monkeypatch.setattr(builtins, "__import__", broken)
    q, k, v = torch.randn(1, 3, 4, 8), torch.randn(1, 3, 5, 8), torch.randn(1, 3, 5, 8)
    with pytest.raises(BackendError, match=r"onnxruntime cannot be imported: ImportError: libfoo.so"):
        dispatch.attention(q, k, v, softcap=3.25, backend="onnxruntime")
    with pytest.raises(NoBackendError, match=r"onnxruntime cannot be imported: ImportError: libfoo.so"):
        dispatch.attention(q, k, v, softcap=3.5, backend="onnxruntime")
    dispatch.attention(q, k, v, softcap=3.75, backend=["onnxruntime", "eager"])


def test_both_distributions_at_once_are_named(monkeypatch):
    backend._missing.cache_clear()
    monkeypatch.setattr(backend, "installed", lambda: {"onnxruntime": "1.32.0", "onnxruntime-gpu": "1.31.1"})
    try:
        (reason,) = [backend.OnnxRuntime().unavailable()]
        assert "onnxruntime and onnxruntime-gpu are both installed" in str(reason)
        assert "pip uninstall onnxruntime onnxruntime-gpu" in str(reason)
    finally:
        backend._missing.cache_clear()


def test_an_estimate_alone_never_starts_it():
    q, k, v = qkv(64, 64)
    report = dispatch.explain(q, k, v, enable_gqa=True, softcap=5.0, window=(7, 0))
    assert "onnxruntime" in [name for name, _ in report.legal]
    assert not report.chosen.endswith("onnxruntime")
    assert any("probes: causal_start" in note for note in report.notes)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the CUDA provider is untested here")
def test_on_cuda_it_runs_on_torchs_stream():
    q, k, v = (x.cuda().half() for x in qkv(64, 96))
    want = right(q, k, v).half()
    torch.testing.assert_close(attend(q, k, v), want, rtol=1e-2, atol=2e-3)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.testing.assert_close(attend(q * 1.0, k, v), want, rtol=1e-2, atol=2e-3)
