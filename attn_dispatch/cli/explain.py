"""``attn-dispatch explain``: an op from flags, or ops from a file, and what would run them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from attn_dispatch.ir.masks import Mask
    from attn_dispatch.ir.ops import AttentionOp

__all__ = ["Flags", "op_from_flags", "read_op", "run"]

_LONG = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}


@dataclass(frozen=True)
class Flags:
    """The flags of the command, as typed; see ``attn-dispatch explain --help``."""

    q: str
    kv: str = ""
    dv: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    mask: str = ""
    causal: bool = False
    window: str = ""
    q_offset: int | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    lse: bool = False
    weights: bool = False
    grad: bool = False


def run(file: Path | None, flags: Flags, backends: tuple[str, ...], as_json: bool) -> None:
    """Print the report, or one for each op of a workload file.

    Raises:
        InputError: a flag or a file that describes no op. typer.Exit: code 2 when nothing can run an op as asked.
    """
    from attn_dispatch.errors import InputError
    from attn_dispatch.registry import current
    from attn_dispatch.report import explain_op
    from attn_dispatch.selection.decide import Request

    if file is not None and file.suffix == ".onnx":
        if backends:
            problem = f"--backend asks what would run an op, and {file} holds what an export wrote"
            raise InputError(problem, remedy="leave --backend out")
        return _explain_model(file, as_json)
    if file is not None and _is_workload(file):
        return _explain_workload(file, backends, as_json)
    op = read_op(file) if file is not None else op_from_flags(flags)
    requests = (Request(backends, "--backend"),) if backends else ()
    report = explain_op(op, requests, current())
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
    if report.error:
        raise typer.Exit(2)


def _explain_workload(file: Path, backends: tuple[str, ...], as_json: bool) -> None:
    """Print a report for each distinct op of a captured workload, in order of their first run.

    Raises:
        InputError: the file is no workload. typer.Exit: code 2 when nothing can run one of them as asked.
    """
    from attn_dispatch.capture import Workload
    from attn_dispatch.registry import current
    from attn_dispatch.report import explain_op
    from attn_dispatch.selection.decide import Request

    requests = (Request(backends, "--backend"),) if backends else ()
    uses = Workload.load(file).ops()
    reports = [explain_op(use.op, requests, current()) for use in uses]
    if as_json:
        rows = [
            {"count": use.count, "layers": list(use.layers), **report.to_dict()}
            for use, report in zip(uses, reports, strict=True)
        ]
        typer.echo(json.dumps(rows, indent=2))
    else:
        for number, (use, report) in enumerate(zip(uses, reports, strict=True), 1):
            layers = ", ".join(filter(None, use.layers)) or "layers without names"
            typer.echo(f"{number} of {len(uses)}: {use.count} calls in {layers}\n{report}\n")
    if any(report.error for report in reports):
        raise typer.Exit(2)


def _is_workload(file: Path) -> bool:
    """Whether a file is one that `capture` writes; `read_op` says what is wrong with one that cannot be read."""
    import yaml

    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(data, dict) and "ops" in data


def _explain_model(file: Path, as_json: bool) -> None:
    """Print the attention calls that an exported model says it has, and what runs each here.

    Raises:
        ExportError: the file is no ONNX model, or is not one of ours.
    """
    from attn_dispatch.export.read import read_model

    found = read_model(file)
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))


def read_op(file: Path) -> AttentionOp:
    """The op in a YAML or JSON file.

    Raises:
        InputError: the file cannot be read or holds no op; the message names it.
    """
    import yaml

    from attn_dispatch.errors import InputError
    from attn_dispatch.ir.ops import AttentionOp, verify

    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))  # JSON is YAML
        if not isinstance(data, dict):
            raise ValueError(f"it holds {type(data).__name__}, not a mapping")
        op = AttentionOp.from_dict(data)
        verify(op)
    except KeyError as error:
        raise InputError(
            f"{file}: not an op: {error} is missing", remedy="the output of AttentionOp.to_dict()"
        ) from None
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise InputError(f"{file}: not an op: {error}", remedy="the output of AttentionOp.to_dict()") from None
    return op


def op_from_flags(flags: Flags) -> AttentionOp:
    """Describe the flags' call, by the rules of `dispatch.attention`.

    Raises:
        InputError: a flag that is wrong.
    """
    import torch

    from attn_dispatch.errors import InputError
    from attn_dispatch.frontend import Options, describe
    from attn_dispatch.ir.tensors import TensorDesc

    b, hq, sq, d = _numbers("--q", flags.q, 4, "B,Hq,Sq,D")
    hkv, skv = _numbers("--kv", flags.kv, 2, "Hkv,Skv") if flags.kv else (hq, sq)
    name = _LONG.get(flags.dtype, flags.dtype)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"--dtype {flags.dtype} is no dtype of torch", remedy="--dtype float32, bfloat16, float16")
    if flags.grad and not dtype.is_floating_point:
        raise InputError(f"--grad with --dtype {flags.dtype}: only floating-point tensors have gradients")
    sizes = ((b, hq, sq, d), (b, hkv, skv, d), (b, hkv, skv, flags.dv or d))
    # meta tensors: shapes without memory, so that an op of any size and for any device can be explained here
    query, key, value = (torch.empty(size, dtype=dtype, device="meta", requires_grad=flags.grad) for size in sizes)
    options = Options(
        _mask(flags.mask), flags.dropout, flags.causal, flags.scale, None, _window(flags.window), flags.softcap,
        flags.q_offset, return_lse=flags.lse, return_weights=flags.weights,
    )  # fmt: skip
    with torch.enable_grad():
        op = describe(query, key, value, {}, options).op
    descs = {role: getattr(op, role) for role in ("query", "key", "value")}
    moved = {role: TensorDesc(desc.shape, desc.dtype, flags.device, desc.strides) for role, desc in descs.items()}
    return op.with_(**moved)


def _numbers(flag: str, text: str, count: int, form: str) -> list[int]:
    from attn_dispatch.errors import InputError

    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count or any(n < 0 for n in numbers):
        raise InputError(f"{flag} takes {form}, got {text!r}", remedy="sizes >= 0 with commas, as in 1,8,1024,64")
    return numbers


def _window(text: str) -> tuple[Any, Any] | None:
    from attn_dispatch.errors import InputError

    if not text:
        return None
    ends = [part.strip().lower() for part in text.split(",")]
    try:
        left, right = (None if end in ("none", "-1", "") else int(end) for end in ends)
    except ValueError:
        raise InputError(
            f"--window takes L,R, got {text!r}", remedy="--window 255,0 is 256 keys, self included"
        ) from None
    return left, right


def _mask(text: str) -> Mask | None:
    from attn_dispatch.errors import InputError
    from attn_dispatch.ir.mask_text import parse_mask

    if not text:
        return None
    try:
        mask = parse_mask(text)
    except ValueError as error:
        raise InputError(f"--mask {text!r}: {error}", remedy='--mask "Causal & Window(255, 0)"') from None
    if mask.refs():
        names = ", ".join(mask.refs())
        raise InputError(
            f"--mask names the tensors {names}, which flags cannot describe", remedy="give the op as a file"
        )
    return mask
