"""Run an exported model on onnxruntime beside the torch model, at sizes it was not exported with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from attn_dispatch.errors import ExportError
from attn_dispatch.export.report import Check
from attn_dispatch.export.sizes import Sizes, resized, tensors_of

__all__ = ["open_session", "other_sizes", "run_session", "verify"]

# Of the largest value of an output: a whole model adds up many rounded sums.
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_BFLOAT16 = "tensor(bfloat16)"
_SMALL = 1e-2  # an output of less is compared as if it had this size: what it was computed from may be larger
_ODD = (3, 5, 7, 9, 11, 13)


def other_sizes(sizes: Sizes, may_be_empty: frozenset[str]) -> list[dict[str, int]]:
    """The sizes to check at: as given, all 1, odd and all different, and each size that may be 0 at 0.

    Args:
        may_be_empty: symbols that may be 0, those of a past.
    """
    if not sizes.example:
        return [{}]
    # two symbols of one name are one size, though torch may not know that they must be equal
    names = {symbol: sizes.names.get(symbol, symbol) for symbol in sizes.example}
    free = [name for name in dict.fromkeys(names.values()) if "+" not in name]
    odd = {name: _ODD[i % len(_ODD)] for i, name in enumerate(free)}
    chosen = [dict.fromkeys(free, 1), odd]
    chosen += [{**odd, names[symbol]: 0} for symbol in names if symbol in may_be_empty and names[symbol] in odd]
    picked = [{symbol: _valued(name, values) for symbol, name in names.items()} for values in chosen]
    return [dict(sizes.example), *(values for i, values in enumerate(picked) if values not in picked[:i])]


def _valued(name: str, values: Mapping[str, int]) -> int:
    """The value of a size by its name, which may be a sum of others: ``"past + seq"``."""
    parts = [part.strip() for part in name.split("+")]
    if unknown := [part for part in parts if not part.isdigit() and part not in values]:
        raise ExportError(f"the size {name!r} is a sum with {unknown[0]!r}, and no size is called so: {sorted(values)}")
    return sum(int(part) if part.isdigit() else values[part] for part in parts)


def open_session(path: Path, threads: int = 0) -> Any:
    """A session on the CPU provider for a model file.

    Raises:
        ExportError: onnxruntime is not installed, or refuses the model.
    """
    try:
        import onnxruntime
    except ImportError as error:
        remedy = "pip install onnxruntime, or verify=False"
        raise ExportError(f"verify=True runs the model on onnxruntime, which is not installed: {remedy}") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or torch.get_num_threads()
    # threads that spin would slow whoever runs next: torch, or another session
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # what it says comes as an exception too
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        text = str(error).strip().splitlines()[0]
        raise ExportError(f"onnxruntime {onnxruntime.__version__} refuses the exported model: {text}") from error


def run_session(session: Any, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a session for torch tensors, whatever their dtypes."""
    import onnxruntime

    names = [x.name for x in session.get_inputs()]
    feed = {}
    for name, x in zip(names, tensors, strict=True):
        x = x.detach().cpu().contiguous()
        if x.dtype == torch.bfloat16:  # numpy has none
            feed[name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(x.view(torch.int16).numpy(), 16)
        else:
            feed[name] = onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy())
    results = session.run_with_ort_values([x.name for x in session.get_outputs()], feed)
    # DLPack for what numpy lacks and for that alone: until 1.31 onnxruntime's knows no bool
    return [torch.from_dlpack(x) if x.data_type() == _BFLOAT16 else torch.from_numpy(x.numpy()) for x in results]


def verify(
    path: Path, model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: Sizes,
    chosen: Sequence[Mapping[str, int]], more: Sequence[tuple[Any, ...]] = (),
) -> list[Check]:  # fmt: skip
    """A `Check` for each choice of sizes.

    Args:
        model: run in torch for the right answer. chosen: values of the symbols. more: further positional arguments.

    Raises:
        ExportError: onnxruntime fails where torch does not.
    """
    session = open_session(path)
    leaves, tree = _pytree.tree_flatten((args, dict(kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    example = [leaves[i] for i in places]
    checks = []
    for values in chosen:
        filled = list(leaves)
        for i, x in zip(places, resized(example, sizes.at(values)), strict=True):
            filled[i] = x
        run_args, run_kwargs = _pytree.tree_unflatten(filled, tree)
        checks.append(_check(session, model, run_args, run_kwargs, sizes.named(values)))
    for i, run_args in enumerate(more):
        checks.append(_check(session, model, tuple(run_args), dict(kwargs), {"given": i + 1}))
        if checks[-1].skipped:
            raise ExportError(f"verify: torch does not run the arguments number {i + 1}: {checks[-1].skipped}")
    return checks


def _results(result: Any, count: int) -> list[torch.Tensor]:
    """The results that an exported program has: tensors, and sizes as integers where it has those too."""
    leaves = [x for x in _pytree.tree_leaves(result) if isinstance(x, torch.Tensor) or type(x) is int]
    leaves = leaves if len(leaves) == count else [x for x in leaves if isinstance(x, torch.Tensor)]
    return [x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in leaves]


def _check(session: Any, model: Callable[..., Any], args: Any, kwargs: Any, named: dict[str, int]) -> Check:
    given = tensors_of((args, kwargs))
    try:
        with torch.no_grad():
            result = model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            want = _results(result, len(session.get_outputs()))
    except Exception as error:  # noqa: BLE001 - whatever a user's model raises: it does not run at these sizes
        return Check(named, skipped=f"torch: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    try:
        got = run_session(session, given)
    except Exception as error:
        sizes = ", ".join(f"{name}={size}" for name, size in named.items())
        text = str(error).strip().splitlines()[0]
        raise ExportError(f"torch runs the model at {sizes}, onnxruntime does not: {text}") from error
    names = [x.name for x in session.get_outputs()]
    if len(names) != len(want):
        raise ExportError(f"the exported model has {len(names)} outputs, the torch model {len(want)}")
    errors, limits = {}, {}
    for name, mine, right in zip(names, got, want, strict=True):
        if tuple(mine.shape) != tuple(right.shape):
            raise ExportError(f"output {name} is {list(mine.shape)} on onnxruntime and {list(right.shape)} in torch")
        errors[name], limits[name] = _difference(mine, right)
    return Check(named, errors, limits)


def _difference(mine: torch.Tensor, right: torch.Tensor) -> tuple[float, float]:
    """The largest difference, and what is allowed; a NaN or Inf on one side alone is an infinite difference."""
    mine, right = mine.cpu(), right.detach().cpu()
    if right.numel() == 0:
        return 0.0, 0.0
    if not right.is_floating_point():
        return float((mine.to(right.dtype) != right).sum()), 0.0
    limit = LIMITS[right.dtype]
    x, y = mine.double(), right.double()
    finite = torch.isfinite(y)
    same = torch.where(finite, torch.isfinite(x), (x == y) | (x.isnan() & y.isnan()))
    if not bool(same.all()):
        return float("inf"), limit
    top = float(torch.where(finite, y, 0.0).abs().max())
    return float(torch.where(finite, x - y, 0.0).abs().max()), limit * max(_SMALL, top)
