"""`export_onnx`: trace, lower each attention, check, write, and run beside torch."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch

from attn_dispatch.errors import ExportError, ExportWarning
from attn_dispatch.export.place import choose_form, place
from attn_dispatch.export.report import Call, ExportReport
from attn_dispatch.export.sizes import Sizes
from attn_dispatch.export.trace import DOMAIN, Traced, to_onnx_graph, trace
from attn_dispatch.export.verify import other_sizes, verify
from attn_dispatch.lowering.target import FORMS, SPECIFIED, Target

__all__ = ["export_onnx"]

_TORCH_OPSETS = range(18, 26)  # what torch's exporter and onnxscript's converter really write
_NEWEST_OPSET = 28
_LARGE = 1_900_000_000  # a protobuf ends at 2 GiB
_OPEN_DOMAINS = {"": "ai.onnx", "com.microsoft": "com.microsoft", DOMAIN: DOMAIN}


def export_onnx(
    model: torch.nn.Module | torch.export.ExportedProgram,
    args: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    opset: int = 24,
    form: str | Sequence[str] = "standard",
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    replace_sdpa: bool = False,
    external_data: bool | None = None,
    runtime: str = "installed",
    verify: bool | Sequence[Sequence[Any]] = True,
) -> ExportReport:
    """Write a model as ONNX, each `dispatch.attention` in it lowered from its op and not from traced tensor code.

    Works for models that call `dispatch.attention`, through `attn_dispatch.nn`, through transformers with
    ``attn_implementation="attn_dispatch"``, and with ``replace_sdpa``. Nothing is left at ``path`` when it fails.

    Args:
        model: in the mode in which it shall run, usually ``model.eval()``; or what `torch.export.export` returned.
        args: example inputs. A size that is dynamic must be 2 or more in them. kwargs: more of them, by name.
        path: the file to write, ``"model.onnx"``.
        opset: version of ai.onnx, 18 to 28. The Attention node needs 23.
        form: how attention is written: ``"standard"`` (Attention of ai.onnx), ``"decomposed"`` (MatMul and Softmax),
            ``"contrib"`` (com.microsoft), ``"function"`` (an operator of our own with its body in the file); or several
            in order of preference, tried for each call. Never falls back to one that is not named.
        dynamic_shapes: as for `torch.export.export`; a name may stand for a ``Dim``: ``{"x": {0: "batch", 1: "seq"}}``.
            A size that must be a sum of others is named so, ``"past + seq"``; a name with "past" in it may be 0.
        input_names, output_names: names in the graph.
        replace_sdpa: send ``F.scaled_dot_product_attention`` of the model through the dispatcher while tracing.
        external_data: weights in a file of their own beside it; None does so above 1.9 GB.
        runtime: ``"installed"`` works around what the onnxruntime here was seen to do wrongly on the CPU (half
            precision goes through float32, masks are tensors); ``"specification"`` writes what ONNX says, for another.
        verify: run on onnxruntime beside torch at the sizes given, at 1, at odd ones, and with an empty past; or
            further arguments to run with, a list of ``args``. False runs nothing.

    Returns:
        An `ExportReport`: print it.

    Raises:
        ExportError: torch cannot trace the model, an opset or form cannot be honoured, or the results differ.

    Source: ONNX 1.23 Attention, https://onnx.ai/onnx/operators/onnx__Attention.html

    Example:
        >>> import tempfile
        >>> from attn_dispatch.nn import MultiheadAttention
        >>> module = MultiheadAttention(32, 4).eval()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_onnx(module, (torch.randn(2, 5, 32),), f"{folder}/mha.onnx")
        >>> len(report.calls), report.nodes["Attention"]
        (1, 1)
    """
    forms = _forms(form)
    if runtime not in ("installed", "specification"):
        raise ExportError(f"runtime must be 'installed' or 'specification', got {runtime!r}")
    _check_opset(opset)
    target_path = Path(path)
    if target_path.is_dir():
        raise ExportError(f"{target_path} is a folder; path is the file to write")
    if not target_path.parent.is_dir():
        raise ExportError(f"there is no folder {target_path.parent} to write {target_path.name} into")
    args, named = tuple(args), dict(kwargs or {})
    traced = trace(model, args, named, dynamic_shapes, replace_sdpa)
    told = _told(traced)
    proven, here = _proven(runtime)
    targets = choose_form(traced.calls, forms, lambda name: Target(name, opset, proven, here))
    try:
        graph = to_onnx_graph(traced, min(opset, _TORCH_OPSETS[-1]), input_names, output_names)
    finally:
        traced.unmark()
    _raise_opset(graph, opset)
    calls = place(graph, traced.calls, targets, opset)
    sizes = traced.sizes
    _rename_symbols(graph, sizes)
    with tempfile.TemporaryDirectory(dir=target_path.parent, prefix=".export") as folder:
        written = _write(graph, Path(folder) / target_path.name, external_data)
        _check_file(written[0], graph, calls, opset)
        checks = []
        if verify is not False:
            run = traced.program.module() if isinstance(model, torch.export.ExportedProgram) else model
            more = () if verify is True else tuple(tuple(x) for x in verify)
            checks = _verified(written[0], run, args, named, sizes, more)
        total = sum(file.stat().st_size for file in written)
        for file in reversed(written):  # the model last: it names its data
            os.replace(file, target_path.parent / file.name)
    if checks and sizes.example and not [check for check in checks[1:] if not check.skipped]:
        told.append(f"no other sizes than the example's could be checked: {checks[-1].skipped or 'none were chosen'}")
    for text in told:
        warnings.warn(ExportWarning(text), stacklevel=2)
    counts = Counter(node.op_type for node in graph.graph.all_nodes())
    name = form if isinstance(form, str) else ", ".join(form)
    return ExportReport(
        target_path, opset, name, dict(graph.opset_imports), tuple(calls), counts, total, tuple(checks),
        _runtime_here() if checks else "", tuple(told),
    )  # fmt: skip


# --- what was asked --------------------------------------------------------------------------------------------------


def _forms(form: str | Sequence[str]) -> tuple[str, ...]:
    forms = (form,) if isinstance(form, str) else tuple(form)
    unknown = [name for name in forms if name not in FORMS]
    if unknown or not forms:
        raise ExportError(f"form must be of {', '.join(FORMS)}, got {form!r}")
    return forms


def _check_opset(opset: int) -> None:
    if not isinstance(opset, int) or not _TORCH_OPSETS[0] <= opset <= _NEWEST_OPSET:
        raise ExportError(f"opset must be {_TORCH_OPSETS[0]} to {_NEWEST_OPSET}, got {opset!r}")


def _raise_opset(graph: ir.Model, opset: int) -> None:
    """Above what torch writes: the same nodes mean the same there, or it is refused."""
    if opset <= _TORCH_OPSETS[-1]:
        return
    if opset > onnx.defs.onnx_opset_version():
        raise ExportError(f"opset {opset} is newer than onnx {onnx.__version__} ({onnx.defs.onnx_opset_version()})")
    changed = set()
    for node in graph.graph.all_nodes():
        if node.domain == "" and onnx.defs.get_schema(node.op_type, opset).since_version > _TORCH_OPSETS[-1]:
            changed.add(node.op_type)
    if changed:
        names = ", ".join(sorted(changed))
        raise ExportError(
            f"torch's exporter writes opset {_TORCH_OPSETS[-1]}, and {names} changed since: opset={_TORCH_OPSETS[-1]}"
        )
    graph.opset_imports[""] = opset


def _told(traced: Traced) -> list[str]:
    """What the caller should know of the model."""
    told = []
    if traced.others:
        names = ", ".join(traced.others[:4]) + (" ..." if len(traced.others) > 4 else "")
        told.append(
            f"{names} call torch's scaled_dot_product_attention, which torch's exporter writes: its masks, empty rows "
            "and scales may differ on runtimes; replace_sdpa=True sends them through the dispatcher"
        )
    if not traced.calls and not traced.others:
        told.append("the model calls no attention")
    return told


def _runtime_here() -> str:
    from attn_dispatch.backends.ort_sessions import runtime

    return str(runtime("cpu"))


def _proven(wanted: str) -> tuple[frozenset[str], str]:
    """What the onnxruntime here does rightly; the specification where there is none, or where it is wanted."""
    from attn_dispatch.backends.onnxruntime import OnnxRuntime

    if wanted == "specification" or OnnxRuntime().unavailable() is not None:
        return SPECIFIED, "a runtime that follows the specification"
    from attn_dispatch.backends.ort_probes import proven
    from attn_dispatch.backends.ort_sessions import runtime

    return proven("cpu"), str(runtime("cpu"))


# --- what is written -------------------------------------------------------------------------------------------------


def _rename_symbols(graph: ir.Model, sizes: Sizes) -> None:
    """The caller's names for the dynamic sizes, on all values."""
    for value in [*graph.graph.inputs, *(x for node in graph.graph.all_nodes() for x in node.outputs)]:
        if value.shape is not None:
            known = [getattr(size, "value", size) for size in value.shape]
            value.shape = ir.Shape(sizes.renamed(size) if isinstance(size, str) else size for size in known)


def _write(graph: ir.Model, path: Path, external_data: bool | None) -> list[Path]:
    """The model file, and the file of its weights where they lie apart."""
    weights = sum(x.const_value.nbytes for x in graph.graph.initializers.values() if x.const_value is not None)
    apart = weights > _LARGE if external_data is None else external_data
    if not apart:
        ir.save(graph, path)
        return [path]
    data = path.with_name(f"{path.name}.data")
    ir.save(graph, path, external_data=data.name)
    return [path, data] if data.exists() else [path]


def _check_file(path: Path, graph: ir.Model, calls: Sequence[Call], opset: int) -> None:
    """The checker of onnx, the opset, the domains, and one Attention node for each standard call.

    Raises:
        ExportError: what is wrong.
    """
    try:
        onnx.checker.check_model(str(path), full_check=DOMAIN not in graph.opset_imports)
    except Exception as error:
        text = str(error).strip().splitlines()[0]
        raise ExportError(f"onnx's checker refuses the exported model: {type(error).__name__}: {text}") from error
    found = {entry.domain: entry.version for entry in onnx.load(str(path), load_external_data=False).opset_import}
    if found.get("") != opset:
        raise ExportError(f"asked for opset {opset}, the model has {found.get('')}")
    if strange := sorted(set(found) - set(_OPEN_DOMAINS)):
        raise ExportError(f"the model needs operators of {', '.join(strange)}, which no ONNX runtime has")
    for call in calls:
        count = call.nodes.get("Attention", 0)
        if call.form == "standard" and "LinearAttention" not in call.nodes and count > 1:
            raise ExportError(f"{call.layer} became {count} Attention nodes")


def _verified(
    path: Path, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Any, more: Any
) -> list[Any]:
    empty = frozenset(s for s in sizes.example if "past" in sizes.names.get(s, s))
    checks = verify(path, model, args, kwargs, sizes, other_sizes(sizes, empty), more)
    wrong = [check for check in checks if not check.ok]
    if wrong:
        lines = "\n".join(f"  {check}" for check in wrong)
        raise ExportError(f"the exported model computes something else than torch:\n{lines}")
    if all(check.skipped for check in checks):
        raise ExportError(f"the model ran at none of the sizes: {checks[0].skipped}")
    return checks
