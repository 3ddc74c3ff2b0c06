"""``attn-dispatch pins``: the schema of pin files, what is wrong with some, what holds here, how two differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from attn_dispatch.ir.ops import AttentionOp
    from attn_dispatch.selection.pins import Pin, Pins

__all__ = ["Difference", "app", "differences", "read_workload"]

app = typer.Typer(
    name="pins",
    help="YAML files that say which backend runs which attention.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


_LAYERS = (
    "layers matches model.layers.0.self_attn and the like only inside `with name_layers(model):` "
    "(attn_dispatch.integrations.layers); without it a layer is called LlamaAttention.0 through transformers, and has "
    "no name elsewhere, whatever capture(model) wrote into a workload"
)


@app.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of a pin file, for editors."""
    from attn_dispatch.selection.pin_models import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@app.command("check")
def check_command(
    files: Annotated[list[Path] | None, typer.Argument(help="Strongest first; the files that are searched.")] = None,
    workload: Annotated[
        list[Path] | None, typer.Option("--workload", help="Warn of pins that match none of its ops; may be repeated.")
    ] = None,
) -> None:
    """Name everything wrong or doubtful in pin files; exit code 2 for errors."""
    from attn_dispatch.errors import ConfigError
    from attn_dispatch.registry import current
    from attn_dispatch.selection.pin_files import check, parse
    from attn_dispatch.selection.pins import config_paths

    registry = current()
    paths = files or list(config_paths(registry))
    ops = [pair for path in workload for pair in read_workload(path)] if workload else None
    found = check(paths, registry, ops)
    for problem in found:
        if not problem.is_error:
            typer.echo(f"warning  {problem}")
    by_layer = [pin.where for path in paths for pin in parse(path).pins if pin.when.layers]
    if by_layer:
        typer.echo(f"note     {', '.join(by_layer)}: {_LAYERS}")
    errors = [problem for problem in found if problem.is_error]
    if errors:
        raise ConfigError("\n".join(map(str, errors)))
    noun = "file" if len(paths) == 1 else "files"
    typer.echo(f"{len(paths)} {noun} checked, {len(found) or 'no'} warning{'' if len(found) == 1 else 's'}")


@app.command("show")
def show_command(as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False) -> None:
    """What holds here, in order, and the files that say nothing here, with the reason."""
    import warnings

    from attn_dispatch.errors import ConfigWarning
    from attn_dispatch.selection.pins import current_pins

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConfigWarning)  # each is shown below
        pins = current_pins()
    typer.echo(json.dumps(_shown(pins), indent=2) if as_json else "\n".join(_lines(pins)))


@app.command("diff")
def diff_command(
    a: Annotated[Path, typer.Argument(help="A pin file.")], b: Annotated[Path, typer.Argument(help="Another.")]
) -> None:
    """How two pin files differ in pins and in measured winners; exit code 1 when they do."""
    found = differences(a, b)
    for difference in found:
        typer.echo(str(difference))
    if found:
        raise typer.Exit(1)
    typer.echo("no difference")


# --- show ------------------------------------------------------------------------------------------------------------


def _shown(pins: Pins) -> dict[str, Any]:
    def one(pin: Pin) -> dict[str, Any]:
        parts = {"where": pin.where, "when": str(pin.when), "device": pin.device, "mode": pin.mode}
        return {**parts, "use": list(pin.use), "avoid": list(pin.avoid), "unknown": list(pin.unknown)}

    files = [vars(file) for file in pins.files]
    return {"pins": [one(pin) for pin in pins.pins], "backends": pins.options, "files": files}


def _lines(pins: Pins) -> list[str]:
    lines = ["pins, the first that matches and has use decides"]
    for n, pin in enumerate(pins.pins, 1):
        when = f"{pin.when}{f' on {pin.device}' if pin.device else ''}"
        lines.append(f"  {n:>3}  {_wish(pin)}   when {when}   {pin.where}")
        lines += [f"       ignored: nobody registered {', '.join(pin.unknown)}"] if pin.unknown else []
    lines += [] if pins.pins else ["  none"]
    if pins.options:
        lines += ["", "options of backends", *(f"  {name} = {value!r}" for name, value in _flat(pins.options).items())]
    lines += ["", "files, strongest first"]
    for file in pins.files:
        state = f"skipped: {file.skipped}" if file.skipped else f"{file.pins} pins, {file.tuned} tuned"
        lines.append(f"  {file.path}   {state}")
    return lines if pins.files else [*lines, "  none"]


def _flat(options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """``{"tiled.tile": 32}``"""
    return {f"{name}.{option}": value for name, given in options.items() for option, value in given.items()}


def _wish(pin: Pin) -> str:
    parts = [f"{pin.mode} {', '.join(pin.use)}"] if pin.use else []
    return "; ".join([*parts, *([f"avoid {', '.join(pin.avoid)}"] if pin.avoid else [])]) or "nothing"


# --- workloads -------------------------------------------------------------------------------------------------------


def read_workload(path: Path) -> list[tuple[AttentionOp, str]]:
    """The ops of a workload file (`dispatch.capture`, ``Workload.save``) with their layers.

    Raises:
        InputError: the file cannot be read or is no workload; the message names it.
    """
    from attn_dispatch.capture import Workload

    return [(entry.op, entry.layer) for entry in Workload.load(path)]


# --- diff ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One way in which two files differ.

    Args:
        kind: ``"only in A"``, ``"only in B"``, ``"changed"``, ``"changed winner"`` or ``"other order"``.
        subject: the ops. a, b: what each file says; empty where it says nothing.
    """

    kind: str
    subject: str
    a: str = ""
    b: str = ""

    def __str__(self) -> str:
        sides = [f"  {side}  {text}" for side, text in (("A", self.a), ("B", self.b)) if text]
        return "\n".join([f"{self.kind:<15} {self.subject}", *sides])


def differences(a: Path, b: Path) -> list[Difference]:
    """How two pin files differ, whatever hardware they are for.

    Pins differ in what they ask of the same ops, or in order; options of backends in their value; tuned entries in
    their winner: times always differ.

    Raises:
        ConfigError: a file that cannot be used.
    """
    from attn_dispatch.errors import ConfigError
    from attn_dispatch.selection.pin_files import parse

    files = [parse(path) for path in (a, b)]
    if errors := [problem for file in files for problem in file.errors]:
        raise ConfigError("\n".join(map(str, errors)))
    wishes = [{f"pin: {pin.when}": f"{_wish(pin)}   {pin.where}" for pin in file.pins} for file in files]
    meanings = [{f"pin: {pin.when}": (pin.use, pin.avoid, pin.mode) for pin in file.pins} for file in files]
    found = _sides(wishes[0], wishes[1])
    both = [key for key in wishes[0] if key in wishes[1]]
    changed = [key for key in both if meanings[0][key] != meanings[1][key]]
    found += [Difference("changed", key, wishes[0][key], wishes[1][key]) for key in changed]
    if both != [key for key in wishes[1] if key in wishes[0]]:
        found.append(Difference("other order", "pins that both have stand in another order; the first match decides"))
    options = [_flat(file.backends) for file in files]
    for name in {**options[0], **options[1]}:
        texts = [repr(given[name]) if name in given else "" for given in options]
        if texts[0] != texts[1]:
            kind = "changed" if all(texts) else "only in A" if texts[0] else "only in B"
            found.append(Difference(kind, f"option: {name}", *texts))
    tuned = _by_op([file.tuned for file in files])
    found += _sides(*({k: _times(e, [e["use"][0]]) for k, e in entries.items()} for entries in tuned))
    for key in (key for key in tuned[0] if key in tuned[1]):
        winners = [entries[key]["use"][0] for entries in tuned]
        if winners[0] != winners[1]:
            texts = [_times(entries[key], winners) for entries in tuned]
            found.append(Difference("changed winner", key, *texts))
    return found


def _sides(a: dict[str, str], b: dict[str, str]) -> list[Difference]:
    found = [Difference("only in A", key, a=text) for key, text in a.items() if key not in b]
    return found + [Difference("only in B", key, b=text) for key, text in b.items() if key not in a]


def _by_op(files: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, dict[str, Any]]]:
    """Each file's entries by their op in one line, with its digest where ops differ in what the line does not say."""
    keys = [[_key(entry) for entry in entries] for entries in files]
    digests: dict[str, set[str]] = {}
    for text, digest in {pair for pairs in keys for pair in pairs}:
        digests.setdefault(text, set()).add(digest)
    return [
        {
            text if len(digests[text]) == 1 else f"{text}  {digest}": entry
            for (text, digest), entry in zip(pairs, entries, strict=True)
        }
        for pairs, entries in zip(keys, files, strict=True)
    ]


def _key(entry: dict[str, Any]) -> tuple[str, str]:
    """The op of a tuned entry in one line and its digest; its description where this version cannot read it."""
    from attn_dispatch.ir.ops import AttentionOp

    try:
        op = AttentionOp.from_dict(entry["op"])
        return f"op: {op}", op.bucketed().digest()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return f"op: {json.dumps(entry['op'], sort_keys=True, default=str)}", ""


def _times(entry: dict[str, Any], names: list[str]) -> str:
    """The winner, and the median of each name in this file."""
    times = entry.get("medians_us", {})
    parts = [f"{name} {times[name]:.1f} us" if name in times else f"{name} not timed" for name in dict.fromkeys(names)]
    return f"{entry['use'][0]}   ({', '.join(parts)})   {entry['where']}"
