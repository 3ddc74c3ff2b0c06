"""onnxruntime sessions for single ops: how they are made, and how torch's tensors go in and out without a copy."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attn_dispatch.errors import BackendError

__all__ = ["Runtime", "bind", "make_runner", "make_session", "runtime"]

_MOST_SESSIONS = 4  # of one op: numbers of threads, or streams
# ONNX element types by torch dtype: numbers, since numpy has no bfloat16
ELEMENTS = {
    torch.float32: 1,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}

Runner = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


@dataclass(frozen=True)
class Runtime:
    """Which onnxruntime runs here: what a verdict about it depends on.

    Args:
        version: ``"1.31.1"``; build: its build flags, as it prints them. provider: the execution provider.
        device: the name of the device.
    """

    version: str
    build: str
    provider: str
    device: str

    def __str__(self) -> str:
        return f"onnxruntime {self.version} {self.provider.removesuffix('ExecutionProvider')}"


@functools.cache
def runtime(device_type: str) -> Runtime:
    """The runtime for a device type; imports onnxruntime.

    Raises:
        BackendError: its provider for the device is not there.
    """
    import onnxruntime

    from attn_dispatch.device import facts

    provider = PROVIDERS[device_type]
    if provider not in onnxruntime.get_available_providers():
        found = ", ".join(onnxruntime.get_available_providers())
        raise BackendError(f"onnxruntime {onnxruntime.__version__} has no {provider}; it has {found}")
    return Runtime(onnxruntime.__version__, onnxruntime.get_build_info(), provider, facts(device_type).name)


def make_session(
    model: bytes, device_type: str, threads: int, stream: int = 0, quiet: bool = False, index: int = 0
) -> Any:
    """A session that runs on the provider asked for and on no other.

    Args:
        model: a serialised ONNX model.
        threads: threads of the session's own pool; the pool of the process is never touched.
        stream: handle of the CUDA stream to run on; 0 lets onnxruntime take one of its own.
        quiet: log nothing, where a failure is an expected answer. index: of the CUDA device.

    Raises:
        BackendError: the session fell to another provider, which onnxruntime does without an error.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4 if quiet else 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # its threads share the cores with torch's
    provider: Any = PROVIDERS[device_type]
    if device_type == "cuda":
        # what moves shapes belongs on the CPU, so "session.disable_cpu_ep_fallback" would refuse good models
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        own = {"device_id": str(index)}
        provider = (provider, own | ({"user_compute_stream": str(stream)} if stream else {}))
    session = onnxruntime.InferenceSession(model, options, providers=[provider])
    session.disable_fallback()
    used = session.get_providers()
    if used[0] != PROVIDERS[device_type]:
        raise BackendError(
            f"onnxruntime {onnxruntime.__version__} ran {used[0]} where {PROVIDERS[device_type]} was asked"
        )
    if device_type == "cuda" and (stray := _heavy_on_cpu(session)):
        raise BackendError(f"onnxruntime {onnxruntime.__version__} put {', '.join(stray)} on the CPU")
    return session


_HEAVY = {"Attention", "MatMul", "Gemm", "Softmax", "MultiHeadAttention", "GroupQueryAttention", "LinearAttention"}


def _heavy_on_cpu(session: Any) -> list[str]:
    """Operators of an attention that a session put on the CPU; none where the runtime does not tell."""
    tell = getattr(session, "get_provider_graph_assignment_info", None)
    if tell is None:
        return []
    parts = [part for part in tell() if part.ep_name == PROVIDERS["cpu"]]
    return sorted({node.op_type for part in parts for node in part.get_nodes()} & _HEAVY)


@functools.lru_cache(maxsize=256)
def make_runner(model: bytes, device_type: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Runner:
    """``run(inputs, outputs)``: tensors go in by address, results are written into the tensors given.

    One for each model, which serves all lengths. A session is made for each number of torch threads, and on CUDA for
    each stream; the least recently used go first.
    """
    sessions: OrderedDict[Any, Any] = OrderedDict()
    lock = threading.Lock()

    def session_for(key: Any, threads: int, stream: int, index: int = 0) -> Any:
        with lock:
            if key not in sessions:
                sessions[key] = make_session(model, device_type, threads, stream, index=index)
                while len(sessions) > _MOST_SESSIONS:
                    sessions.popitem(last=False)
            sessions.move_to_end(key)
            return sessions[key]

    own = threading.local()  # a binding is one run's at a time, and costs as much to make as to fill

    def on_cpu(given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        threads = torch.get_num_threads()
        session = getattr(own, "session", None)
        if session is None or own.threads != threads:
            own.threads, session = threads, session_for(threads, threads, 0)
            own.session, own.binding, own.bound = session, session.io_binding(), {}
        session.run_with_iobinding(bind(own.binding, "cpu", inputs, given, outputs, results, own.bound))

    def on_cuda(given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        from onnxruntime import RunOptions

        device = given[0].device
        stream = torch.cuda.current_stream(device)
        handle = stream.cuda_stream
        session = session_for((device.index, handle), 1, handle, device.index)
        options = RunOptions()
        if handle:  # it runs on torch's stream, in order with what torch launches before and after
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        else:  # handle 0 reads as "none given": the session has a stream of its own, which waits for nobody
            stream.synchronize()
        session.run_with_iobinding(bind(session.io_binding(), "cuda", inputs, given, outputs, results), options)

    return on_cuda if device_type == "cuda" else on_cpu


def bind(
    binding: Any,
    device_type: str,
    inputs: Sequence[str],
    given: Sequence[torch.Tensor],
    outputs: Sequence[str],
    results: Sequence[torch.Tensor],
    bound: dict[str, tuple[int, torch.Size]] | None = None,
) -> Any:
    """Fill a binding with tensors by address; it holds no reference to them, so keep them until the run is over.

    Args:
        binding: of a session; what it held under the same names is replaced.
        given, results: contiguous tensors on the device.
        bound: what the binding holds, by name, as ``(address, shape)``: the same is not bound again.

    Returns:
        The binding.
    """
    index = given[0].device.index if device_type == "cuda" else 0
    bound = {} if bound is None else bound
    for names, tensors, put in ((inputs, given, binding.bind_input), (outputs, results, binding.bind_output)):
        for name, x in zip(names, tensors, strict=True):
            at = (x.data_ptr(), x.shape)
            if bound.get(name) != at:
                put(name, device_type, index, ELEMENTS[x.dtype], x.shape, at[0])
                bound[name] = at
    return binding
