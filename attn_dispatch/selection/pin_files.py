"""Pin files: read, checked with a place for every complaint, and merged into `Pins`.

1. `parse` reads one file: its form (`pin_yaml`), its shape (`pin_models`), two entries that ask for the same ops.
2. `select` keeps what holds on this machine, checks names and options against the registry, and warns of what it
   leaves out.
3. `check` says everything that can be said about files: `parse`, names, contradictions between files, pins that never
   speak, pins that match nothing of a workload.

During a model call a broken file, or a name that nobody registered, is one `ConfigWarning` and is ignored; only a name
under ``mode: require`` stays, so that the call raises as it does for any explicit request.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attn_dispatch import device
from attn_dispatch.errors import ConfigError, ConfigWarning
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.registry import Registry, current
from attn_dispatch.selection.pin_options import Options, merge_options, read_options
from attn_dispatch.selection.pin_yaml import Document, Problem, read_document
from attn_dispatch.selection.pins import Pin, PinFile, Pins, When, unmatched

if TYPE_CHECKING:
    from attn_dispatch.selection.known_bad import KnownBad
    from attn_dispatch.selection.pin_models import FileModel, HardwareModel, KnownBadModel, PinModel, WhenModel

__all__ = ["Parsed", "check", "load_pins", "mismatch", "parse", "parse_data", "select"]


@dataclass(frozen=True)
class Parsed:
    """One file, read and checked by itself; whether it holds here is not yet known.

    Args:
        name: the path as it is shown. document: its text with places. pins, tuned: empty when the file is broken.
        hardware: which machine it is for; None for any. problems: what is wrong, in the order of the file.
        strangers: those of the problems that are device types which torch does not know here.
    """

    name: str
    document: Document
    pins: tuple[Pin, ...] = ()
    tuned: tuple[dict[str, Any], ...] = ()
    hardware: HardwareModel | None = None
    problems: tuple[Problem, ...] = ()
    known_bad: tuple[KnownBad, ...] = ()
    allow_known_bad: tuple[str, ...] = ()
    strangers: tuple[Problem, ...] = ()
    backends: Options = field(default_factory=dict)  # as written: `pin_options` says which of them count

    @property
    def device(self) -> str:
        """The device type of its hardware; empty for any."""
        return self.hardware.device if self.hardware is not None else ""

    @property
    def errors(self) -> list[Problem]:
        """The problems for which it cannot be used."""
        return [problem for problem in self.problems if problem.is_error]


def load_pins(paths: Sequence[Path], registry: Registry | None = None, strict: bool = False) -> Pins:
    """Read files into the pins that hold on this machine.

    Args:
        paths: strongest first. registry: whose names count; the current one when None.
        strict: raise for what is wrong; else warn once a file and ignore it.

    Raises:
        ConfigError: with ``strict``, everything that is wrong in all files, a line each.
    """
    registry = registry or current()
    parsed = tuple(parse(path) for path in paths)
    if strict:
        errors = [e for p in parsed for e in (*p.errors, *_against(p, registry)) if e.is_error]
        if errors:
            raise ConfigError("\n".join(map(str, errors)))
    return select(parsed, registry)


# --- one file --------------------------------------------------------------------------------------------------------


def parse(path: Path) -> Parsed:
    """Read one file; everything wrong with it stands in ``problems``, and nothing is raised."""
    name = _shown(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        problem = Problem(name, 1, 1, f"the file cannot be read: {error.strerror or error}")
        return Parsed(name, Document(name), problems=(problem,))
    document = read_document(name, raw)
    if document.problems or document.data is None:  # an empty file is a file without pins
        return Parsed(name, document, problems=tuple(document.problems))
    return _validated(name, document, str(path))


def parse_data(name: str, data: dict[str, Any]) -> Parsed:
    """As `parse`, of data that a plugin gives in code; its problems stand at line 1."""
    return _validated(name, Document(name, data), name)


def _validated(name: str, document: Document, path: str) -> Parsed:
    from pydantic import ValidationError

    from attn_dispatch.selection.pin_models import FileModel

    try:
        model = FileModel.model_validate(document.data)
    except ValidationError as error:
        found = [_problem(document, dict(detail)) for detail in error.errors(include_url=False)]
        return Parsed(name, document, problems=tuple(sorted(found, key=lambda p: (p.line, p.column))))
    pins = tuple(_pin(pin, n, model, document) for n, pin in enumerate(model.pins))
    strangers = _strange_devices(model, document)
    problems = strangers + _repeated(pins, document) + _unspoken(pins, document) + _no_ops(model, document)
    tuned = tuple(
        {**entry.model_dump(), "file": path, "where": f"{name}:{document.place(('tuned', n))[0]}"}
        for n, entry in enumerate(model.tuned)
    )
    if any(problem.is_error for problem in problems):
        return Parsed(name, document, problems=tuple(problems))
    bad = tuple(_known_bad(entry, n, document) for n, entry in enumerate(model.known_bad))
    allow = tuple(model.allow_known_bad)
    strange = tuple(strangers)
    return Parsed(name, document, pins, tuned, model.hardware, tuple(problems), bad, allow, strange, model.backends)


def _strange_devices(model: FileModel, document: Document) -> list[Problem]:
    """Warnings for device types that torch does not know here: a vendor's that is not installed, or a misspelling."""
    from attn_dispatch.selection.pin_values import strange_device

    places: list[tuple[tuple[Any, ...], str]] = []
    machines = [((), model.hardware), *((("known_bad", n), bad.hardware) for n, bad in enumerate(model.known_bad))]
    places += [((*at, "hardware", "device"), machine.device) for at, machine in machines if machine is not None]
    whens = [(("pins", n), pin.when) for n, pin in enumerate(model.pins)]
    whens += [(("known_bad", n), bad.when) for n, bad in enumerate(model.known_bad)]
    places += [((*at, "when", "device", k), word) for at, when in whens for k, word in enumerate(when.device)]
    return [
        document.problem(path, f"{_label(path)}{text}", is_error=False)
        for path, word in places
        if (text := strange_device(word))
    ]


def _no_ops(model: FileModel, document: Document) -> list[Problem]:
    """Tuned entries whose op is none: pydantic knows a mapping, the IR knows an op."""
    from attn_dispatch.ir.ops import AttentionOp, verify

    found = []
    for n, entry in enumerate(model.tuned):
        try:
            op = AttentionOp.from_dict(entry.op)
            verify(op)
            op.bucketed()
        except Exception as error:  # noqa: BLE001 - whatever a wrong mapping makes of the IR
            said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            found.append(document.problem(("tuned", n, "op"), f"tuned.op: it is no op: {said}"))
    return found


def _shown(path: Path) -> str:
    """Relative to the working directory where it lies there."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _when(model: WhenModel) -> When:
    return When(**{f.name: tuple(sorted(set(getattr(model, f.name)), key=str)) for f in fields(When)})


def _known_bad(model: KnownBadModel, n: int, document: Document) -> KnownBad:
    from attn_dispatch.selection.known_bad import KnownBad

    given = {name: getattr(model, name) for name in ("id", "backend", "why", "link", "version", "instead", "hardware")}
    where = f"{document.name}:{document.place(('known_bad', n))[0]}"
    return KnownBad(**given, when=_when(model.when), where=where, origin=document.name)


def _pin(model: PinModel, n: int, file: FileModel, document: Document) -> Pin:
    where = f"{document.name}:{document.place(('pins', n))[0]}"
    kind = file.hardware.device if file.hardware is not None else ""
    return Pin(_when(model.when), tuple(model.use), tuple(model.avoid), model.mode, where, kind)


def _problem(document: Document, detail: dict[str, Any]) -> Problem:
    """What pydantic says, in our words and at its place."""
    from attn_dispatch.selection.pin_models import keys_of, no_such

    path, kind, given = tuple(detail["loc"]), detail["type"], detail.get("input")
    label = _label(path)
    if kind == "extra_forbidden":
        known = keys_of(path[:-1])
        hint = " (a workload is given to pins check with --workload)" if path == ("ops",) else ""
        text = no_such("key", str(path[-1]), known, _ALIASES.get(str(path[-1]), ""))
        return document.problem(path, f"{_label(path[:-1])}{text}{hint}", key=True)
    if kind == "missing":
        more = ": write schema: 1, which is what this version reads" if path == ("schema",) else ""
        return document.problem(path[:-1], f"key {path[-1]!r} is missing{more}")
    if kind == "value_error":
        error = detail["ctx"]["error"]
        if type(error).__name__ != "UnquotedError":
            return document.problem(path, f"{label}{error}")
        kind, given = "string_type", error.args[0]
    if kind == "string_type" and given is not None and not isinstance(given, (dict, list)):
        source = _source(document, path, given)
        read_as = {bool: "boolean", int: "number", float: "number"}.get(type(given), "date")
        return document.problem(
            path, f'{label}{source} is read as a {read_as}, and text is wanted: quote it, "{source}"'
        )
    if kind == "literal_error":
        words = [word.strip("' ") for word in detail["ctx"]["expected"].replace(" or ", ",").split(",")]
        return document.problem(path, label + no_such(str(path[-1]), str(given), words))
    wanted = {"model_type": "a mapping", "dict_type": "a mapping", "list_type": "a list", "string_type": "text"}
    wanted |= {"int_type": "a whole number", "float_type": "a number", "too_short": "at least one entry"}
    got = "nothing" if given is None else repr(given) if isinstance(given, (str, int, float)) else type(given).__name__
    return document.problem(path, f"{label}{wanted.get(kind, detail['msg'])} is wanted, got {got}")


def _label(path: tuple[Any, ...]) -> str:
    """``"when.dtype: "``: the keys from the pin on; nothing for a whole file."""
    words = [part for part in path if isinstance(part, str)]
    words = words[1:] if len(words) > 1 and words[0] in ("pins", "tuned", "known_bad") else words
    return f"{'.'.join(words)}: " if words else ""


def _source(document: Document, path: tuple[Any, ...], given: Any) -> str:
    while path and path not in document.texts and isinstance(path[-1], int):
        path = path[:-1]
    return document.texts.get(path, str(given))


_ALIASES = {
    **{"Hq": "heads", "Hkv": "kv_heads", "D": "head_dim", "Dv": "value_head_dim", "B": "batch", "batch_size": "batch"},
    **{
        "Sq": "query_length",
        "Skv": "key_length",
        "backend": "use",
        "backends": "use",
        "prefer": "use",
        "layer": "layers",
    },
    **{"require": "mode", "return_lse": "lse", "dropout_p": "dropout", "is_causal": "mask", "head_size": "head_dim"},
}


def _repeated(pins: Sequence[Pin], document: Document) -> list[Problem]:
    first: dict[When, Pin] = {}
    found = []
    for n, pin in enumerate(pins):
        known = first.setdefault(pin.when, pin)
        if known is not pin:
            line = known.where.rpartition(":")[2]
            text = f"line {line} asks for the same ops ({pin.when}): put use and avoid into one pin"
            found.append(document.problem(("pins", n), text))
    return found


def _unspoken(pins: Sequence[Pin], document: Document) -> list[Problem]:
    """Warnings for pins that can never decide."""
    found = []
    for n, pin in enumerate(pins):
        why = _never(pin)
        before = next(
            (p for p in pins[:n] if p.use and pin.use and p.when != pin.when and p.when.covers(pin.when)), None
        )
        if not why and before is not None:
            line = before.where.rpartition(":")[2]
            why = (
                f"line {line} matches all that this pin matches ({before.when}) and comes first: put this one before it"
            )
        if why:
            found.append(document.problem(("pins", n), f"its use never decides: {why}", is_error=False))
    return found


def _never(pin: Pin) -> str:
    """Why no op can match; empty when one can."""
    when = pin.when
    if pin.device and when.device and pin.device not in when.device:
        return f"the file is for {pin.device}, the pin for {' or '.join(when.device)}"
    if when.phase == ("decode",) and when.query_length and not any(1 in span for span in when.query_length):
        return "a decode step has query_length 1"
    if "lse" in when.features and when.lse == (False,):
        return "features ask for lse, and lse is false"
    return ""


# --- this machine ----------------------------------------------------------------------------------------------------


def select(parsed: Iterable[Parsed], registry: Registry) -> Pins:
    """The pins of files that hold here, in order, with one warning for each file or name that is ignored."""
    pins: list[Pin] = []
    files: list[PinFile] = []
    tuned: list[dict[str, Any]] = []
    known_bad: list[KnownBad] = []
    allow: set[str] = set()
    options: Options = {}
    for file in parsed:
        hardware = _hardware_text(file.hardware)
        if file.errors:
            more = len(file.errors) - 1
            tail = f" (and {more} more: attn-dispatch pins check {file.name})" if more else ""
            _warn(f"{file.errors[0]}{tail}. The file is ignored")
            files.append(PinFile(file.name, hardware=hardware, skipped=f"broken: {file.errors[0]}"))
            continue
        for stranger in file.strangers:
            _warn(str(stranger))
        skipped = mismatch(file.hardware)
        files.append(PinFile(file.name, len(file.pins), len(file.tuned), hardware, skipped))
        if skipped:
            continue
        for required, problem in _name_problems(file, registry):
            _warn(f"{problem}. {'A call that the pin matches raises' if required else 'The name is ignored'}")
        mine, wrong = read_options(file.backends, file.document, registry, is_error=True)
        for problem in wrong:
            _warn(f"{problem}. It is ignored")
        options = merge_options(options, mine)
        pins += [_known(pin, registry) for pin in file.pins]
        tuned += file.tuned
        known_bad += file.known_bad
        allow |= set(file.allow_known_bad)
    return Pins(tuple(pins), tuple(files), tuple(tuned), tuple(known_bad), frozenset(allow), options)


def _warn(text: str) -> None:
    warnings.warn(text, ConfigWarning, stacklevel=4)


def mismatch(hardware: HardwareModel | None) -> str:
    """Why a file's hardware is not this machine; empty when it is."""
    if hardware is None:
        return ""
    here = device.facts(hardware.device)
    if hardware.device not in ("cpu", "meta") and here.arch in ("none", "unknown"):
        return f"it is for {hardware.device}, and there is none here"
    machine = here.arch.partition("-")[0]  # a file may be for any vectors
    for key, got, names in (("name", here.name, (here.name,)), ("arch", here.arch, (here.arch, machine))):
        wanted = getattr(hardware, key)
        if wanted and not any(fnmatchcase(name.lower(), pattern.lower()) for pattern in wanted for name in names):
            return f"it is for {hardware.device} {key} {' or '.join(map(repr, wanted))}, and here it is {got!r}"
    if hardware.threads and not any(here.threads in span for span in hardware.threads):
        return f"it is for {' or '.join(map(str, hardware.threads))} threads, and here there are {here.threads}"
    return ""


def _hardware_text(hardware: HardwareModel | None) -> str:
    if hardware is None:
        return "any"
    parts = [hardware.device, *hardware.name, *hardware.arch]
    return " ".join([*parts, *(f"{span} threads" for span in hardware.threads)])


def _known(pin: Pin, registry: Registry) -> Pin:
    """The pin without names that nobody registered; those that it requires stay."""
    unknown = tuple(name for name in (*pin.use, *pin.avoid) if _unknown(name, registry))
    if not unknown:
        return pin
    use = pin.use if pin.mode == "require" else tuple(name for name in pin.use if name not in unknown)
    return replace(pin, use=use, avoid=tuple(n for n in pin.avoid if n not in unknown), unknown=unknown)


def _unknown(name: str, registry: Registry) -> str:
    """What to say of a name that nobody registered; empty when it is known."""
    from attn_dispatch.selection.pin_models import no_such

    *rewrites, backend = name.split(" > ")
    for rewrite in rewrites:
        if rewrite not in registry.rewrites:
            return no_such("rewrite", rewrite, tuple(registry.rewrites))
    if backend in registry.backends:
        return ""
    if backend in registry.rewrites:
        return f"{backend!r} is a rewrite: write which backend it comes before, as in {backend} > eager"
    return registry.unknown(backend)


def _name_problems(file: Parsed, registry: Registry) -> list[tuple[bool, Problem]]:
    """Names that nobody registered: errors, or warnings in a file for another machine, where a plugin may have them.
    Each with whether the pin requires it."""
    found = []
    is_error = not mismatch(file.hardware)
    for n, pin in enumerate(file.pins):
        for key, names in (("use", pin.use), ("avoid", pin.avoid)):
            for k, name in enumerate(names):
                if text := _unknown(name, registry):
                    problem = file.document.problem(("pins", n, key, k), f"{key}: {text}", is_error=is_error)
                    found.append((key == "use" and pin.mode == "require", problem))
    return found


def _against(file: Parsed, registry: Registry) -> list[Problem]:
    """Everything that a registry does not know, in the order of the lines."""
    _, wrong = read_options(file.backends, file.document, registry, is_error=not mismatch(file.hardware))
    found = [*(named for _, named in _name_problems(file, registry)), *wrong]
    return sorted(found, key=lambda p: (p.line, p.column))


# --- everything that can be said -------------------------------------------------------------------------------------


def check(
    paths: Sequence[Path], registry: Registry | None = None, ops: Sequence[tuple[AttentionOp, str]] | None = None
) -> list[Problem]:
    """Everything wrong or doubtful in files, file by file.

    Args:
        paths: strongest first. registry: whose names count. ops: canonical ops of a workload with their layers; each
            pin must match one. None asks nothing.
    """
    registry = registry or current()
    parsed = [parse(path) for path in paths]
    found: list[Problem] = []
    for n, file in enumerate(parsed):
        found += [*file.problems, *_against(file, registry)]
        found += _contradictions(file, parsed[:n])
        missed = unmatched(Pins(file.pins), ops) if ops is not None else []
        for pin in missed:
            text = f"this pin matches none of the workload's {len(ops or ())} ops: {pin.when}"
            found.append(file.document.problem(("pins", file.pins.index(pin)), text, is_error=False))
    return found


def _contradictions(file: Parsed, stronger: Sequence[Parsed]) -> list[Problem]:
    """Warnings where a stronger file for the same machine says something else of the same ops."""
    found = []
    for n, pin in enumerate(file.pins):
        for other in stronger:
            same = (p for p in other.pins if p.when == pin.when) if _overlap(other.hardware, file.hardware) else ()
            for known in same:
                if pin.use and known.use and (pin.use, pin.mode) != (known.use, known.mode):
                    mine, theirs = ", ".join(pin.use), ", ".join(known.use)
                    text = f"{known.where} asks for {theirs} ({known.mode}) for the same ops and wins over {mine}"
                    found.append(file.document.problem(("pins", n), text, is_error=False))
    return found


def _overlap(one: HardwareModel | None, other: HardwareModel | None) -> bool:
    """Whether two files may hold on one machine, as far as their text tells."""
    return one is None or other is None or one == other
