"""``attn-dispatch export``: a model as an ONNX file, and how it compares with torch and with torch's own export."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from attn_dispatch.export.transformers import Exportable

__all__ = ["Wanted", "run"]


@dataclass(frozen=True)
class Wanted:
    """The flags of the command; see ``attn-dispatch export --help``."""

    model: str
    out: Path
    opset: int = 24
    forms: tuple[str, ...] = ("standard",)
    verify: bool = True
    replace_sdpa: bool = False
    external_data: bool = False
    runtime: str = "installed"
    compare: bool = False
    tokens: int = 32
    as_json: bool = False


def run(wanted: Wanted) -> int:
    """Export, print the report, and compare when asked; the exit code.

    Raises:
        InputError: there is no such model. ExportError: it cannot be exported as asked.
    """
    from attn_dispatch.export import export_onnx

    exportable = load(wanted.model)
    report = export_onnx(
        **exportable._asdict(), path=wanted.out, opset=wanted.opset, form=wanted.forms, verify=wanted.verify,
        replace_sdpa=wanted.replace_sdpa, runtime=wanted.runtime, external_data=True if wanted.external_data else None,
    )  # fmt: skip
    data = report.to_dict()
    if not wanted.as_json:
        typer.echo(str(report))
    ok = True
    if wanted.compare:
        from attn_dispatch.cli.export_compare import compare

        found = compare(wanted.model, exportable, wanted.out, wanted.tokens)
        data["compared"] = found.to_dict()
        ok = found.ok
        if not wanted.as_json:
            typer.echo(str(found))
    if wanted.as_json:
        typer.echo(json.dumps(data, indent=2))
    return 0 if ok else 1


def load(name: str) -> Exportable:
    """The model of a name: ``minilm``, ``smollm2``, a folder of transformers, or ``module:function``.

    Raises:
        InputError: none of these, with what was tried.
    """
    from attn_dispatch.errors import InputError

    if name in ("minilm", "smollm2") or Path(name).is_dir():
        from attn_dispatch.export.transformers import decoder, encoder
        from attn_dispatch.integrations import transformers

        model = _transformers_model(name)  # first: it says what to install where transformers is not
        transformers.register()
        model.set_attn_implementation("attn_dispatch")
        causal = type(model).__name__.endswith("ForCausalLM")
        return decoder(model) if causal else encoder(model)
    module, _, function = name.partition(":")
    remedy = "minilm, smollm2, a folder that transformers can load, or module:function"
    if not function:
        raise InputError(f"there is no model {name!r}", remedy=remedy)
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{name}: {error}", remedy=remedy) from None
    finally:
        sys.path.remove(os.getcwd())
    return _as_exportable(name, make())


def _transformers_model(name: str) -> Any:
    from attn_dispatch.cli.models import load_minilm, load_smollm2

    if name == "minilm":
        return load_minilm().model
    if name == "smollm2":
        return load_smollm2().model
    from attn_dispatch.errors import InputError

    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError as error:
        problem = f"the folder {name} needs transformers, which cannot be imported: {error}"
        raise InputError(problem, remedy="pip install 'attn-dispatch[transformers]'") from None
    config = AutoConfig.from_pretrained(name)
    causal = any(kind.endswith("ForCausalLM") for kind in config.architectures or ())
    return (AutoModelForCausalLM if causal else AutoModel).from_pretrained(name).eval()


def _as_exportable(name: str, made: Any) -> Exportable:
    from attn_dispatch.errors import InputError
    from attn_dispatch.export.transformers import Exportable

    if isinstance(made, Exportable):
        return made
    if isinstance(made, dict) and {"model", "args"} <= set(made):
        rest = {"kwargs": None, "dynamic_shapes": None, "input_names": None, "output_names": None}
        if not (unknown := set(made) - {"model", "args", *rest}):
            return Exportable(**{**rest, **made})
        raise InputError(
            f"{name} returned unknown keys {', '.join(sorted(unknown))}", remedy=f"model, args, {', '.join(rest)}"
        )
    if isinstance(made, tuple) and len(made) in (2, 3):
        return Exportable(made[0], tuple(made[1]), made[2] if len(made) == 3 else None)
    problem = f"{name} returned {type(made).__name__}"
    raise InputError(
        problem, remedy="(model, args), (model, args, dynamic_shapes), or a dict of export_onnx's arguments"
    )
