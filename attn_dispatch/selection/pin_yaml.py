"""YAML with places: the plain data of a file, where each part of it stands, and everything wrong with its form.

Read here and not by `yaml.safe_load`, because that

1. takes the last of two equal keys in silence;
2. reads ``no``, ``off``, ``on`` and ``yes`` as booleans, ``010`` as 8 and ``1:30`` as 90. Here they are text;
3. forgets where things stood.

Anchors, aliases and merge keys work; tags are refused, so that a file constructs nothing.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

__all__ = ["Document", "Problem", "read_document"]

Path = tuple[Any, ...]  # keys and indices from the top
_MAX_NODES = 200_000  # aliases of aliases of aliases
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True)
class Problem:
    """Something wrong in a file. Lines and columns count from 1.

    Args:
        file: as it is shown. text: what is wrong and what to do. is_error: False for what only deserves a warning.
    """

    file: str
    line: int
    column: int
    text: str
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.text}"


@dataclass
class Document:
    """A file that was read.

    Args:
        name: as it is shown. data: dicts with text keys, lists, text, numbers, booleans, dates and None.
        problems: what is wrong with its form; ``data`` then means nothing.
    """

    name: str
    data: Any = None
    problems: list[Problem] = field(default_factory=list)
    places: dict[Path, tuple[int, int]] = field(default_factory=dict)
    keys: dict[Path, tuple[int, int]] = field(default_factory=dict)
    texts: dict[Path, str] = field(default_factory=dict)

    def place(self, path: Path, key: bool = False) -> tuple[int, int]:
        """Line and column of a value (or of its key); of the nearest part around it where it is not written."""
        if key and path in self.keys:
            return self.keys[path]
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, (1, 1))

    def problem(self, path: Path, text: str, *, key: bool = False, is_error: bool = True) -> Problem:
        """A problem at a path."""
        return Problem(self.name, *self.place(path, key), text, is_error)

    def say(self, line: int, column: int, text: str) -> None:
        """Note a problem with the form."""
        self.problems.append(Problem(self.name, line, column, text))


def read_document(name: str, raw: bytes) -> Document:
    """Read YAML; what is wrong with it stands in ``problems``.

    Example:
        >>> document = read_document("x.yaml", b"a: 1\\nb: [no, 2.10]\\na: 2\\n")
        >>> document.data["b"], str(document.problems[0])
        (['no', 2.1], "x.yaml:3:1: key 'a' stands twice; it is on line 1 already: keep one")
    """
    import yaml

    document = Document(name)
    text = _decode(document, raw)
    if text is None:
        return document
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            document.data = _Reader(document).value(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
        document.say(*at, _syntax(error))
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        column = error.position - (before.rfind("\n") + 1) + 1
        document.say(
            before.count("\n") + 1, column, f"the character {chr(int(error.character))!r} may not stand in YAML"
        )
    except RecursionError:
        document.say(1, 1, "it is nested too deeply to be read")
    except (ValueError, OverflowError) as error:  # an escape or a number that PyYAML takes and Python does not
        document.say(1, 1, f"it holds a value that cannot be read: {error}")
    return document


def _decode(document: Document, raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start]
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8", "replace")) + 1
        document.say(before.count(b"\n") + 1, column, "this is not UTF-8: save the file as UTF-8")
        return None


def _syntax(error: yaml.MarkedYAMLError) -> str:
    problem = str(error.problem or error.context or error)
    if "'\\t'" in problem:
        return "a tab stands where YAML wants spaces: indent with spaces"
    if "expected a single document" in str(error.context or "") + problem:
        return "a second document begins here: keep one document in a file"
    context = f" {error.context}" if error.context and error.problem else ""
    return f"this is not YAML: {problem}{context}"


class _Reader:
    """Turns nodes into data and notes where each stood."""

    def __init__(self, document: Document) -> None:
        self.document, self.left = document, _MAX_NODES
        self.open: list[Any] = []  # the collections around the node at hand

    def value(self, node: Any, path: Path) -> Any:
        """The data of a node."""
        import yaml

        self.left -= 1
        if self.left <= 0:
            if self.left == 0:
                self.say(node, f"the file has more than {_MAX_NODES} parts: use fewer aliases")
            return None
        self.document.places[path] = _at(node)
        if isinstance(node, yaml.ScalarNode):
            self.document.texts[path] = node.value
            return self.scalar(node)
        if any(node is outer for outer in self.open):
            self.say(node, "this contains itself: an alias may not stand inside its anchor")
            return None
        if not node.tag.startswith(_TAG) or node.tag.removeprefix(_TAG) not in ("map", "seq"):
            self.say(node, f"the tag {node.tag.replace(_TAG, '!!')} is not read here: leave it out")
        self.open.append(node)
        try:
            if isinstance(node, yaml.SequenceNode):
                return [self.value(item, (*path, n)) for n, item in enumerate(node.value)]
            out = {}
            for key, (key_node, value_node) in self.pairs(node).items():
                self.document.keys[(*path, key)] = _at(key_node)
                out[key] = self.value(value_node, (*path, key))
            return out
        finally:
            self.open.pop()

    def pairs(self, mapping: Any, depth: int = 0) -> dict[str, tuple[Any, Any]]:
        """The key and value nodes of a mapping by key; those of ``<<`` where it has none itself."""
        import yaml

        own: dict[str, tuple[Any, Any]] = {}
        merged: list[Any] = []
        for key_node, value_node in mapping.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.say(key_node, "a key must be plain text")
            elif key_node.tag == f"{_TAG}merge":
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            elif key_node.value in own:
                line = _at(own[key_node.value][0])[0]
                self.say(key_node, f"key {key_node.value!r} stands twice; it is on line {line} already: keep one")
            else:
                own[key_node.value] = (key_node, value_node)
        for source in merged:
            if not isinstance(source, yaml.MappingNode):
                self.say(source, "<< takes a mapping, or a list of them")
            elif depth > 20 or source is mapping or any(source is outer for outer in self.open):
                self.say(source, "this contains itself: an alias may not stand inside its anchor")
            else:
                own = self.pairs(source, depth + 1) | own
        return own

    def scalar(self, node: Any) -> Any:
        """The data of a scalar, by the rules of the module."""
        kind, text = node.tag.removeprefix(_TAG), node.value
        if kind not in ("null", "bool", "int", "float", "timestamp", "str", "value"):
            self.say(node, f"the tag {node.tag.replace(_TAG, '!!')} is not read here: leave it out")
        if kind == "null":
            return None
        if kind == "bool" and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind == "int" and re.fullmatch(r"[-+]?(0|[1-9][0-9]{0,17})", text):
            return int(text)
        if kind == "float" and re.fullmatch(r"[-+]?[0-9]*\.?[0-9]*(e[-+]?[0-9]+)?", text, re.IGNORECASE):
            return float(text)
        if kind == "timestamp" and re.fullmatch(r"\d{4}-\d\d-\d\d", text):
            try:
                return datetime.date.fromisoformat(text)
            except ValueError as error:
                self.say(node, f"{text!r} is no date: {error}")
        return text

    def say(self, node: Any, text: str) -> None:
        """Note a problem at a node, once however often an alias leads there."""
        problem = Problem(self.document.name, *_at(node), text)
        if problem not in self.document.problems:
            self.document.problems.append(problem)


def _at(node: Any) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1
