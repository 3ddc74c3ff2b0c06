"""``onnxruntime``: single ops lowered to ONNX, on onnxruntime's CPU and CUDA providers.

Which form an op takes is decided when it is compiled, by what the runtime here was seen to do (`ort_probes`): the
Attention node where it is right, plain operators otherwise. The library is imported then and not before.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch

from attn_dispatch.backend import Backend, Cost, Executable, Operands, Raw, dense_cost
from attn_dispatch.capability import ALL_FEATURES, Capability, Limit, Reason
from attn_dispatch.errors import BackendError
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.ir.tensors import TensorDesc
from attn_dispatch.ir.weights import Linear
from attn_dispatch.state import LinearState, state_dtype

__all__ = ["OnnxRuntime", "form_for", "installed"]

_NEVER = {"dropout", "grad", "grad:operands", "grad:lse", "higher_order", "traced", "empty"}
_ONES = tuple(Limit(name, minimum=1) for name in ("B", "Hq", "Sq", "Skv", "D", "Dv"))
_OPSET = 24
_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu")


_broken: list[Reason] = []  # why onnxruntime, though installed, could not be imported in this process


class OnnxRuntime(Backend):
    """An op as a model of its own, in sessions that take torch's tensors by address."""

    name = "onnxruntime"
    tested = "cpu"
    start_s = 1.0
    hints = {  # noqa: RUF012
        "grad": "it runs forward only",
        "dropout": 'backend="sdpa_math"',
    }
    capabilities = (
        Capability(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({"float16", "bfloat16", "float32", "float64"}),
            features=ALL_FEATURES - _NEVER,
            limits=_ONES,
            notes="forward only; inputs that are not contiguous are copied",
        ),
        Capability(
            devices=frozenset({"cuda"}),
            dtypes=frozenset({"float16", "bfloat16", "float32"}),
            features=ALL_FEATURES - _NEVER,
            limits=_ONES,
            notes="untested here; needs onnxruntime-gpu; forward only",
        ),
    )

    def version(self) -> str:
        return next(iter(installed().values()), "not installed")

    def unavailable(self) -> Reason | None:
        return _broken[0] if _broken else _missing()

    def extra_reasons(self, op: AttentionOp) -> list[Reason]:
        if op.device == "cuda" and "onnxruntime-gpu" not in installed():
            text = "onnxruntime without CUDA is installed"
            return [Reason("version", "onnxruntime", "cpu", "onnxruntime-gpu", "pip install onnxruntime-gpu", text)]
        return []

    def remarks(self, op: AttentionOp) -> list[str]:
        from attn_dispatch.backends.ort_probes import verdicts
        from attn_dispatch.backends.ort_sessions import runtime

        target = self.target_for(op)
        said = "; ".join(str(verdict).partition(" (")[0] for verdict in verdicts(op.device))
        where = f"{runtime(op.device)} ({', '.join(installed())})"
        return [f"{self.name}: {target.form} form at opset {target.opset} on {where}; probes: {said}"]

    def target_for(self, op: AttentionOp) -> Any:
        """What `compile` lowers an op for, a `lowering.target.Target`."""
        return form_for(op)

    def runner_for(self, op: AttentionOp, model: bytes) -> Any:
        """``run(inputs, outputs)`` of an op's model."""
        from attn_dispatch.backends.ort_sessions import make_runner
        from attn_dispatch.lowering.model import input_names, output_names

        return make_runner(model, op.device, tuple(input_names(op)), tuple(output_names(op)))

    def compile(self, op: AttentionOp) -> Executable:
        names = [name for name, _ in op.operands]

        def runner_of(now: AttentionOp) -> Any:
            opened = _opened(now)
            return self.runner_for(opened, _model_of(opened, self.target_for(opened)))

        # A model is open in batch and lengths. Heads and sizes of 1 are fixed in it, and rewrites run their op at
        # others too (merge_parts its last part, trim_lengths rows of a bias): each set gets a model when it comes.
        described = [op.query.shape, op.key.shape, *(desc.shape for _, desc in op.operands)]
        runners = {_fixed(op, described): runner_of(op)}
        lse, weights, state = op.outputs.lse, op.outputs.weights, op.outputs.state

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, t: Operands) -> Any:
            rows = q.shape[:3]
            given = [x.resolve_neg().contiguous() for x in (q, k, v, *(t[name] for name in names))]
            results = [q.new_empty((*rows, v.shape[3]))]
            results += [q.new_empty(rows, dtype=state_dtype(q.dtype))] if lse else []
            results += [q.new_empty((*rows, k.shape[2]))] if weights else []
            after = _new_state(op, q, k, v) if state else None
            fixed = _fixed(op, [q.shape, k.shape, *(x.shape for x in given[3:])])
            if fixed not in runners:
                runners[fixed] = runner_of(_at_sizes(op, given))
            carried = [x for x in after or () if isinstance(x, torch.Tensor)]
            runners[fixed](given, [*results, *carried])
            if not (lse or weights or state):
                return results[0]
            return Raw(results[0], results[1] if lse else None, results[-1] if weights else None, after)

        return Executable(run)

    def estimate(self, op: AttentionOp) -> Cost:
        cost = dense_cost(op, materialised=3)
        copied = sum(_bytes(desc) for desc in (op.query, op.key, op.value) if desc.strides == "scattered")
        return Cost(cost.flops, cost.bytes + 2.0 * copied, 3.0)


def _fixed(op: AttentionOp, shapes: Sequence[Sequence[int]]) -> tuple[Any, ...]:
    """What a model fixes: the heads of query and key, and which sizes of the operands are 1.

    One of the linear family also takes another form when there are as many queries as keys.
    """
    query, key, *operands = shapes
    square = isinstance(op.weight, Linear) and query[2] == key[2]
    return (query[1], key[1], square, *(tuple(size == 1 for size in shape) for shape in operands))


def _new_state(op: AttentionOp, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> LinearState:
    """Room for the state that comes out."""
    assert isinstance(op.weight, Linear)
    acc = state_dtype(q.dtype)
    sizes = (q.shape[0], k.shape[1] if op.weight.decay is None else q.shape[1], q.shape[3])
    z = None if op.weight.normalizer_eps is None else q.new_empty(sizes, dtype=acc)
    length = q.new_empty(q.shape[:1], dtype=torch.int64)
    return LinearState(q.new_empty((*sizes, v.shape[3]), dtype=acc), z, length)


def _opened(op: AttentionOp) -> AttentionOp:
    """The op at sizes that stand for all: its model is the same for every batch and length.

    What a model fixes stays: heads, sizes of 1 in operands, and whether the linear family has as many queries as keys.
    """
    square = isinstance(op.weight, Linear) and op.Sq == op.Skv
    return op.resized(2, 4, 4) if square else op.resized(2, 3, 5)


@functools.lru_cache(maxsize=256)
def _model_of(op: AttentionOp, target: Any) -> bytes:
    """The serialised model of an opened op."""
    import onnx_ir

    from attn_dispatch.lowering.model import build_model

    return onnx_ir.to_proto(build_model(op, target)).SerializeToString()


def _at_sizes(op: AttentionOp, given: Sequence[torch.Tensor]) -> AttentionOp:
    """The op as these tensors have it, query, key, value and the operands in order."""
    query, key, value, *operands = (tuple(x.shape) for x in given)
    return op.with_(
        query=op.query.with_shape(*query),
        key=op.key.with_shape(*key),
        value=op.value.with_shape(*value),
        operands=tuple(
            (name, desc.with_shape(*shape)) for (name, desc), shape in zip(op.operands, operands, strict=True)
        ),
    )


def _bytes(desc: TensorDesc) -> float:
    return float(torch.Size(desc.shape).numel() * desc.itemsize)


def form_for(op: AttentionOp) -> Any:
    """The target for an op on this machine: the first form that expresses it and is right here.

    Raises:
        BackendError: no form is; the probes of plain operators failed.
    """
    _import()
    from attn_dispatch.backends.ort_probes import proven
    from attn_dispatch.backends.ort_sessions import runtime
    from attn_dispatch.lowering.forms import reasons_against
    from attn_dispatch.lowering.target import Target

    forms = ("contrib", "standard", "decomposed") if isinstance(op.weight, Linear) else ("standard", "decomposed")
    # `plan._guard_excluded` sees to NaN in excluded keys for every backend; what it looks at is the output, not a state
    here, hides = str(runtime(op.device)), isinstance(op.weight, Linear)
    targets = [Target(form, _OPSET, proven(op.device), here, hides) for form in forms]
    for target in targets:
        if not reasons_against(op, target):
            return target
    reasons = "; ".join(str(reason) for target in targets for reason in reasons_against(op, target))
    raise BackendError(f"no ONNX form of {op} is right on {runtime(op.device)}: {reasons}")


def _import() -> None:
    """Import the libraries; a failure is a reason from then on, so that nothing chooses the backend again.

    Raises:
        BackendError: they are installed and cannot be imported.
    """
    try:
        import onnx_ir  # noqa: F401
        import onnxruntime  # noqa: F401
    except Exception as error:
        text = f"onnxruntime cannot be imported: {type(error).__name__}: {error}"
        _broken.append(Reason("version", "onnxruntime", None, "importable", "reinstall it", text))
        raise BackendError(f"{text}\n  try  reinstall {' or '.join(installed()) or 'onnxruntime'}") from error


@functools.cache
def installed() -> dict[str, str]:
    """The onnxruntime distributions here, with their versions, without importing any."""
    names: tuple[str, ...] = _DISTRIBUTIONS
    if not any(map(_version_of, names)):  # one of another vendor, or a nightly build
        names = tuple(metadata.packages_distributions().get("onnxruntime", ()))
    return {name: number for name in names if (number := _version_of(name))}


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def _missing() -> Reason | None:
    found = installed()
    for library, remedy in (("onnxruntime", "onnxruntime"), ("onnx_ir", "onnxscript")):
        if importlib.util.find_spec(library) is None:
            text = f"{library} is not installed"
            return Reason("version", library, None, "installed", f"pip install {remedy}", text)
    if len(found) > 1:
        text = f"{' and '.join(found)} are both installed: they overwrite each other's files"
        remedy = f"pip uninstall {' '.join(found)}, then install one"
        return Reason("version", "onnxruntime", sorted(found), "one of them", remedy, text)
    return None
