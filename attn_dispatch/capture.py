"""`capture`: which attention ops a model really runs, by layer and phase, with counts; and the file that keeps them.

A workload file is YAML without any tensor data::

    schema: 1
    model: bert-base, 12 layers (2 run)              # for people
    captured: {when: 2026-11-29, torch: 2.13.0, by: attn-dispatch 0.1.0}
    ops:
    - {layer: encoder.layer.0.attention.self, phase: prefill, count: 1, op: {...}}   # AttentionOp.to_dict

`Workload.load` reads it strictly: a key that no workload has is an error that names file, entry and key.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from attn_dispatch import context
from attn_dispatch.context import current_layer
from attn_dispatch.errors import InputError
from attn_dispatch.ir.ops import AttentionOp, verify
from attn_dispatch.passes import canonicalise
from attn_dispatch.plan import Plan
from attn_dispatch.yaml_text import yaml_text

__all__ = ["SCHEMA", "Entry", "Use", "Workload", "capture", "current_layer", "workload_files"]

SCHEMA = 1
_REMEDY = "give a workload file: dispatch.capture() writes one"
PHASES = ("prefill", "decode", "cross")


@dataclass
class Entry:
    """One op as one layer runs it.

    Args:
        op: the canonical op. layer: the layer's name, "" when nobody said. phase: ``prefill``, ``decode`` or ``cross``.
        candidate: what ran it; source, why: where that choice came from; all three are empty in a file.
        count: how often.
    """

    op: AttentionOp
    layer: str
    phase: str
    candidate: str = field(default="", compare=False)
    source: str = field(default="", compare=False)
    why: str = field(default="", compare=False)
    count: int = 1


@dataclass(frozen=True)
class Use:
    """One distinct op of a workload: how often it runs in all layers together, and in which, in order of first run."""

    op: AttentionOp
    count: int
    layers: tuple[str, ...]

    def moved(self, device: str) -> Use:
        """The same on another device type, ``"cuda"``; ``""`` moves nothing."""
        if not device:
            return self
        named = {name: replace(getattr(self.op, name), device=device) for name in ("query", "key", "value")}
        operands = tuple((name, replace(desc, device=device)) for name, desc in self.op.operands)
        return replace(self, op=self.op.with_(**named, operands=operands))


@dataclass
class Workload:
    """All ops that ran inside a `capture`, in the order of their first run. No tensor data.

    Args:
        entries: one for each op and layer. model: what ran, for people.
        captured: when and with which versions, for people; part of a file, not of what is compared.

    Example:
        >>> import torch
        >>> from attn_dispatch import dispatch
        >>> x = torch.ones(1, 1, 4, 8)
        >>> with dispatch.capture() as workload:
        ...     _ = dispatch.attention(x, x, x)
        >>> Workload.from_dict(workload.to_dict()) == workload
        True
    """

    entries: list[Entry] = field(default_factory=list)
    model: str = ""
    captured: dict[str, Any] = field(default_factory=dict, compare=False)
    _index: dict[tuple[AttentionOp, str], Entry] = field(default_factory=dict, repr=False, compare=False)

    def record(self, plan: Plan, *_tensors: torch.Tensor) -> None:
        """Count one run of a plan under the layer that an integration named."""
        self.count(plan, current_layer.get())

    def count(self, plan: Plan, layer: str) -> None:
        """Count one run of a plan in a layer."""
        known = self._index.get((plan.op, layer))
        if known is not None:
            known.count += 1
            return
        decision = plan.decision
        entry = Entry(plan.op, layer, plan.op.phase, plan.name, decision.source, decision.why)
        self._index[plan.op, layer] = entry
        self.entries.append(entry)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def ops(self) -> list[Use]:
        """The distinct ops in order of their first run, with the count and the layers of all that run them."""
        found: dict[AttentionOp, tuple[int, dict[str, None]]] = {}
        for entry in self.entries:
            op, _ = canonicalise(entry.op)
            count, layers = found.get(op, (0, {}))
            found[op] = (count + entry.count, {**layers, entry.layer: None})
        return [Use(op, count, tuple(layers)) for op, (count, layers) in found.items()]

    # --- the file ---------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain types for YAML."""
        ops = [{"layer": e.layer, "phase": e.phase, "count": e.count, "op": e.op.to_dict()} for e in self.entries]
        head: dict[str, Any] = {"schema": SCHEMA}
        head |= {"model": self.model} if self.model else {}
        head |= {"captured": dict(self.captured)} if self.captured else {}
        return {**head, "ops": ops}

    @classmethod
    def from_dict(cls, data: Any, where: str = "workload") -> Workload:
        """The inverse of `to_dict`.

        Args:
            where: what to call the data in errors: the file.

        Raises:
            InputError: not a workload; the message names the entry and the key.
        """
        head = _mapping(data, where, ("schema", "ops"), ("model", "captured"))
        if type(head["schema"]) is not int or head["schema"] != SCHEMA:
            newer = isinstance(head["schema"], int) and head["schema"] > SCHEMA
            remedy = "update attn_dispatch" if newer else f"schema: {SCHEMA}"
            raise InputError(f"{where}: schema is {head['schema']!r}, this version reads {SCHEMA}", remedy=remedy)
        if not isinstance(head["ops"], list):
            raise InputError(f"{where}: ops must be a list of entries, got {_kind(head['ops'])}")
        made = cls(model=_text(head.get("model", ""), f"{where}: model"))
        made.captured = dict(_mapping(head.get("captured", {}), f"{where}: captured", (), None))
        for number, item in enumerate(head["ops"]):
            entry = _entry(item, f"{where}: ops[{number}]")
            if (entry.op, entry.layer) in made._index:
                first = made.entries.index(made._index[entry.op, entry.layer])
                problem = f"{where}: ops[{number}] repeats ops[{first}]: the same op of the same layer"
                raise InputError(problem, remedy="add their counts and keep one")
            made._index[entry.op, entry.layer] = entry
            made.entries.append(entry)
        return made

    def save(self, path: str | Path) -> None:
        """Write the workload as YAML, with the date and the versions if it has none yet.

        Args:
            path: a ``.yaml`` file; the same run on the same day gives the same bytes.
        """
        head = self.to_dict()
        ordered = {"schema": SCHEMA, "model": self.model, "captured": self.captured or provenance(), "ops": head["ops"]}
        if not self.model:
            del ordered["model"]
        text = yaml_text(ordered)
        Path(path).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Read a workload file.

        Raises:
            InputError: the file is missing, is not YAML or not a workload; the message names file, entry and key.
        """
        import yaml

        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}", remedy=_REMEDY) from None
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            raise InputError(f"{path}: not YAML: {error}") from None
        return cls.from_dict(data, str(path))


def workload_files(place: Path) -> list[Path]:
    """A file itself; of a folder the workload files in it, by name.

    Raises:
        InputError: a folder without any.
    """
    if not place.is_dir():
        return [place]
    found = sorted(place.glob("*.yaml"))
    if not found:
        raise InputError(f"{place} holds no workload files (*.yaml)", remedy=_REMEDY)
    return found


def provenance() -> dict[str, Any]:
    """When (UTC) and with which versions a workload is captured."""
    from attn_dispatch import __version__

    transformers = sys.modules.get("transformers")
    versions = {"torch": str(torch.__version__)}
    versions |= {"transformers": str(transformers.__version__)} if transformers is not None else {}
    return {"when": datetime.now(timezone.utc).date().isoformat(), **versions, "by": f"attn-dispatch {__version__}"}


# --- reading strictly ------------------------------------------------------------------------------------------------

_DESC = ("shape", "dtype", "device", "strides")


def _entry(item: Any, where: str) -> Entry:
    fields = _mapping(item, where, ("layer", "phase", "count", "op"), ())
    layer, phase, count = _text(fields["layer"], f"{where}: layer"), fields["phase"], fields["count"]
    if type(count) is not int or count < 1:
        raise InputError(f"{where}: count must be a whole number from 1 on, got {count!r}")
    op = _op(fields["op"], f"{where}: op")
    if phase not in PHASES or phase != op.phase:
        raise InputError(f"{where}: phase is {phase!r}, its op is {op.phase!r}", remedy=f"phase: {op.phase}")
    return Entry(op, layer, phase, count=count)


def _op(data: Any, where: str) -> AttentionOp:
    parts = _mapping(data, where, ("query", "key", "value"), None)
    operands = _mapping(parts.get("operands", {}), f"{where}: operands", (), None)
    named = {name: parts[name] for name in ("query", "key", "value")}
    named |= {f"operands: {name}": desc for name, desc in operands.items()}
    for name, desc in named.items():
        _check_desc(desc, f"{where}: {name}")
    try:
        op = AttentionOp.from_dict(parts)
        verify(op)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        said = f"no {error} here" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{where}: not an op: {said}") from None
    return op


def _check_desc(desc: Any, where: str) -> None:
    fields = _mapping(desc, where, ("shape", "dtype"), _DESC[2:])
    sizes = fields["shape"]
    if not isinstance(sizes, (list, tuple)) or any(type(n) is not int or n < 0 for n in sizes):
        raise InputError(f"{where}: shape must be a list of sizes, got {sizes!r}")
    if not isinstance(getattr(torch, str(fields["dtype"]), None), torch.dtype):
        raise InputError(f"{where}: dtype {fields['dtype']!r} is none of torch's", remedy="float32, bfloat16 ...")
    if fields.get("strides", "rows") not in ("rows", "bshd", "scattered"):
        raise InputError(f"{where}: strides must be rows, bshd or scattered, got {fields['strides']!r}")


def _mapping(data: Any, where: str, needed: tuple[str, ...], optional: tuple[str, ...] | None) -> Mapping[str, Any]:
    """A mapping with all needed keys and no others than the optional ones (None: any)."""
    if not isinstance(data, Mapping):
        raise InputError(f"{where}: must be a mapping, got {_kind(data)}")
    for key in needed:
        if key not in data:
            raise InputError(f"{where}: {key} is missing")
    if optional is not None:
        known = (*needed, *optional)
        for key in (key for key in data if key not in known):
            raise InputError(f"{where}: unknown key {key!r}", remedy=f"keys are {', '.join(known)}")
    return data


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{where} must be text, got {_kind(value)}", remedy="quote it")
    return value


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {value!r}"[:80]


# --- which module is running -----------------------------------------------------------------------------------------

_running: ContextVar[tuple[torch.nn.Module, ...]] = ContextVar("attn_dispatch_running", default=())


class _Names:
    """Names of the modules that run, from hooks that see every module of the process while a capture lasts.

    A module's name is the one that ``named_modules`` of the model gives it; without a model, that of the outermost
    module running when it is first seen. The model itself goes by the name of its class.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self.known: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        if model is not None:
            self.learn(model)

    def learn(self, model: torch.nn.Module) -> None:
        """Keep the names of a model's modules; one that has a name keeps it."""
        for name, module in model.named_modules():
            self.known.setdefault(module, name or type(module).__name__)

    def innermost(self) -> str:
        """The name of the innermost running module, "" outside all."""
        modules = _running.get()
        if not modules:
            return ""
        for module in modules:  # outermost first, so that names are as long as can be
            if module not in self.known:
                self.learn(module)
        return self.known[modules[-1]]


def _enter(module: torch.nn.Module, _args: Any) -> None:
    if torch.compiler.is_compiling() or context.surrounding().record is None:  # in a graph; in another thread
        return
    _running.set((*_running.get(), module))


def _leave(module: torch.nn.Module, _args: Any, _out: Any) -> None:
    if torch.compiler.is_compiling():
        return
    modules = _running.get()
    for index in range(len(modules) - 1, -1, -1):  # an exception elsewhere may have left others behind
        if modules[index] is module:
            _running.set(modules[:index])
            return


@contextmanager
def capture(model: torch.nn.Module | None = None) -> Iterator[Workload]:
    """Record every attention that runs in this thread or task while the ``with`` lasts.

    The layer of an op is the name of the innermost module of ``model`` whose forward is running; without a model what
    an integration says (`attn_dispatch.integrations.transformers` does), else the innermost running module.

    What is recorded is what the dispatcher is asked: calls of `dispatch.attention`, and of SDPA inside
    `dispatch.replace_sdpa`. A forward that checkpointing runs again in the backward pass counts again. A graph of
    ``torch.compile`` calls the dispatcher at run time and is recorded, under the innermost module outside the graph:
    modules inside one have no calls. Threads started inside are not recorded.

    Args:
        model: where layer names come from, ``model.named_modules()``; None takes the outermost module that runs, so
            give it when several models run and their layers have the same names.

    Example:
        >>> import torch
        >>> from attn_dispatch import dispatch
        >>> x = torch.ones(1, 1, 4, 8)
        >>> with dispatch.capture() as workload:
        ...     _ = dispatch.attention(x, x, x, is_causal=True)
        >>> [(entry.phase, entry.count) for entry in workload]
        [('prefill', 1)]
    """
    workload, names = Workload(), _Names(model)

    def record(plan: Plan, *_tensors: torch.Tensor) -> None:
        own = names.innermost() if model is not None else ""
        workload.count(plan, own or current_layer.get() or names.innermost())

    # always_call: a forward that raises must leave the stack too
    hooks = [register_module_forward_pre_hook(_enter), register_module_forward_hook(_leave, always_call=True)]
    outside = _running.set(())
    try:
        with context.recording(record):
            yield workload
    finally:
        for hook in hooks:
            hook.remove()
        _running.reset(outside)
