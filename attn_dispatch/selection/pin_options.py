"""Options of backends: the ``backends:`` of a pin file, checked against what the registered backends declare.

A wrong option is a problem of that option alone: the others of its backend, and the rest of the file, count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attn_dispatch.backend import OPTION_TYPES, Backend
from attn_dispatch.registry import Registry
from attn_dispatch.selection.pin_yaml import Document, Problem

__all__ = ["Options", "merge_options", "read_options"]

Options = dict[str, dict[str, Any]]  # backend -> option -> value


def read_options(
    given: Mapping[str, Mapping[str, Any]], document: Document, registry: Registry, is_error: bool
) -> tuple[Options, list[Problem]]:
    """The options of one file that backends have, and what is wrong with the others.

    Args:
        given: backend -> option -> value, as YAML has them. document: where they stand. registry: whose backends count.
        is_error: whether what is wrong is an error: a file for another machine may be right there.
    """
    good: Options = {}
    problems: list[Problem] = []
    for name, options in given.items():
        backend = registry.backends.get(name)
        if backend is None:
            text = registry.unknown(name)
            if name in registry.rewrites:
                text = f"{name!r} is a rewrite, and only backends have options"
            problems.append(
                document.problem(("backends", name), f"backends.{name}: {text}", key=True, is_error=is_error)
            )
            continue
        for option, value in options.items():
            path = ("backends", name, option)
            if text := _wrong(backend, path, value, document):
                at_key = option not in backend.options
                text = f"{'.'.join(path)}: {text}"
                problems.append(document.problem(path, text, key=at_key, is_error=is_error))
            else:
                kind = type(backend.options[option])
                good.setdefault(name, {})[option] = kind(value)  # a whole number becomes the float that is wanted
    return good, problems


def merge_options(stronger: Options, weaker: Options) -> Options:
    """Both, option by option.

    Example:
        >>> merge_options({"a": {"x": 1}}, {"a": {"x": 2, "y": 3}, "b": {"z": 4}})
        {'a': {'x': 1, 'y': 3}, 'b': {'z': 4}}
    """
    names = {**stronger, **weaker}
    return {name: {**weaker.get(name, {}), **stronger.get(name, {})} for name in names}


def _wrong(backend: Backend, path: tuple[str, ...], value: Any, document: Document) -> str:
    """What is wrong with an option; empty when nothing is."""
    from attn_dispatch.selection.pin_values import no_such

    option = path[-1]
    if not backend.options:
        return f"{backend.name} has no options"
    if option not in backend.options:
        return no_such("option", option, tuple(backend.options))
    kind = type(backend.options[option])
    if type(value) is kind or (kind is float and type(value) is int):
        return ""
    if value is None:
        return "it has no value: leave the key out"
    wanted = OPTION_TYPES[kind]
    if isinstance(value, (dict, list)):
        return f"{wanted} is wanted, got {'a mapping' if isinstance(value, dict) else 'a list'}"
    source = document.texts.get(path, str(value))
    if kind is str:
        read_as = {bool: "boolean", int: "number", float: "number"}.get(type(value), "date")
        return f'{source} is read as a {read_as}, and text is wanted: quote it, "{source}"'
    return f"{wanted} is wanted, got {repr(value) if isinstance(value, str) else source}"
