"""The values of a pin file: readers that get what YAML gave and return what a `When` holds, each with its JSON Schema.

Imported when a file is read, never by an import of the package.
"""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainValidator, WithJsonSchema

from attn_dispatch.capability import ALL_FEATURES, MASK_WORDS
from attn_dispatch.ir.tensors import short_dtype
from attn_dispatch.selection.pins import Span

__all__ = [
    "DEVICES",
    "DEVICE_SCHEMA",
    "SCHEMA",
    "TEXT_SCHEMA",
    "Booleans",
    "ChainText",
    "Chains",
    "Counts",
    "Devices",
    "Dtypes",
    "Features",
    "Id",
    "Ids",
    "Layouts",
    "Lengths",
    "Link",
    "Masks",
    "Phases",
    "Text",
    "Texts",
    "UnquotedError",
    "Variants",
    "Versions",
    "chain_of",
    "date_of",
    "device_of",
    "enum",
    "no_such",
    "not_none",
    "nothing_is_none",
    "schema_number",
    "strange_device",
]


SCHEMA = 1
PHASES = ("prefill", "decode", "cross")
VARIANTS = ("softmax", "linear", "retention")
LAYOUTS = ("bhsd", "bshd")
DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla", "meta")
_DEVICE = "[a-z][a-z0-9_]*"
DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_SHORT = {short_dtype(name): name for name in DTYPES[:4]} | {"fp64": "float64", "fp32": "float32", "fp16": "float16"}
_MASKS = {word.lower(): word for word in MASK_WORDS}


class UnquotedError(ValueError):
    """Text was wanted and YAML read a boolean, number or date."""


def no_such(what: str, word: str, known: Sequence[str], guess: str = "") -> str:
    """``there is no mask 'casual'; did you mean 'causal'? There are: ...``; a long list only where nothing is near."""
    by_lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(word.lower(), list(by_lower), n=1)
    guess = guess if guess in known else by_lower[near[0]] if near else ""
    text = f"there is no {what} {word!r}" + (f"; did you mean {guess!r}?" if guess else ".")
    return text if guess and len(known) > 20 else f"{text} There are: {', '.join(known)}"


# --- readers of values: each gets what YAML gave and returns what a `When` holds --------------------------------------


def _as_list(value: Any) -> list[Any]:
    if value is None:
        raise ValueError("it has no value: leave the key out to ask nothing")
    found = value if isinstance(value, list) else [value]
    if not found:
        raise ValueError("an empty list matches nothing: leave the key out to ask nothing")
    return found


def _text(value: Any) -> str:
    if isinstance(value, (bool, int, float, datetime.date)):
        raise UnquotedError(value)
    if not isinstance(value, str):
        raise ValueError(f"it must be text, got {_kind(value)}")
    if not value.strip():
        raise ValueError("it is empty")
    return value.strip()


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", type(None): "nothing", bool: "a boolean", str: "text"}
    return names.get(type(value), f"the number {value}")


def _word(what: str, known: Sequence[str]) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        word = _text(value)
        if word not in known:
            raise ValueError(no_such(what, word, known))
        return word

    return read


def device_of(value: Any) -> str:
    """Read a device type: any identifier, since a vendor's torch has types of its own; see `strange_device`."""
    word = _text(value)
    kind, colon, index = word.partition(":")
    if colon and re.fullmatch(_DEVICE, kind):
        raise ValueError(f"a device type is wanted, and {index!r} is an index: write {kind}")
    if not re.fullmatch(_DEVICE, word):
        raise ValueError(no_such("device", word, DEVICES))
    return word


def strange_device(word: str) -> str:
    """What to say of a device type that torch does not know here; empty when it does.

    Example:
        >>> strange_device("cuda"), strange_device("cdua")
        ('', "torch here knows no device type 'cdua'; did you mean 'cuda'?")
    """
    import torch

    if word in DEVICES:
        return ""
    try:
        torch.device(word)
    except RuntimeError:
        near = difflib.get_close_matches(word, DEVICES, n=1)
        return f"torch here knows no device type {word!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    return ""


def _dtype(value: Any) -> str:
    word = _text(value).removeprefix("torch.")
    if word not in DTYPES and word not in _SHORT:
        raise ValueError(no_such("dtype", word, (*DTYPES, *_SHORT)))
    return _SHORT.get(word, word)


def _mask(value: Any) -> str:
    text = _text(value)
    if set(text) & set("|~("):
        how = "features: [combine:Or] or [combine:Not] tells how they are combined"
        raise ValueError(f"write the atoms of {text!r} without arguments and with &, as in causal & window; {how}")
    words = {part.strip().lower() for part in text.split("&")}
    for word in sorted(words - set(_MASKS)):
        raise ValueError(no_such("mask", word, tuple(_MASKS)))
    return " & ".join(sorted(words))


def _size(minimum: int) -> Callable[[Any], Span]:
    def read(value: Any) -> Span:
        span = _span(value)
        if span.is_empty:
            raise ValueError(f"no size lies in {span.low}..{span.high}: min must not be above max")
        if span.high is not None and span.high < minimum:
            raise ValueError(f"{span} never matches: this size is at least {minimum}")
        return span

    return read


def _span(value: Any) -> Span:
    if isinstance(value, bool):
        raise ValueError(f"a size is wanted, got {str(value).lower()}")
    if isinstance(value, int):
        return Span(value, value)
    if isinstance(value, str):
        return Span.parse(value)
    if isinstance(value, dict):
        for key, end in value.items():
            if key not in ("min", "max"):
                raise ValueError(no_such("key", str(key), ("min", "max")))
            if isinstance(end, bool) or not isinstance(end, int):
                raise ValueError(f"{key} must be a whole number, got {end!r}")
        if not value:
            raise ValueError("a range without min and max asks nothing: leave the key out")
        return Span(value.get("min"), value.get("max"))
    raise ValueError(f'a size is wanted: 64, "1024..8192", ">=1024" or {{min: 1024, max: 8192}}; got {_kind(value)}')


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"it must be true or false, got {value!r}")
    return value


def chain_of(value: Any) -> str:
    """Read a backend or a chain of rewrites before one."""
    parts = [part.strip() for part in _text(value).split(">")]
    if not all(parts):
        raise ValueError(f"{value!r} is no chain: write backend, or rewrite > backend")
    return " > ".join(parts)


def _id(value: Any) -> str:
    text = _text(value)
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", text):
        raise ValueError(f"{text!r} is no name of an entry: lower case, digits and - . _ only")
    return text


def _link(value: Any) -> str:
    text = _text(value)
    if not text.startswith(("https://", "http://")):
        raise ValueError(f"{text!r} is no link: write the report's address, https://...")
    return text


def _specifier(value: Any) -> str:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    text = _text(value)
    try:
        return str(SpecifierSet(text))
    except InvalidSpecifier:
        raise ValueError(f'{text!r} is no range of versions: write ">=2.11,<2.14"') from None


def _distinct(names: list[str]) -> list[str]:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name!r} stands twice: keep the first")
    return names


def schema_number(value: Any) -> int:
    """Read the version of the format."""
    if value == SCHEMA and type(value) is int:
        return SCHEMA
    if type(value) is int and value > SCHEMA:
        raise ValueError(
            f"{value} is of a later attn_dispatch; this one reads {SCHEMA}: upgrade it, or rewrite the file"
        )
    raise ValueError(f"it must be {SCHEMA}, which is what this version reads, got {value!r}")


def nothing_is_none(value: Any) -> Any:
    """An empty list for nothing."""
    return [] if value is None else value  # a key whose entries are all commented out


def not_none(value: Any) -> Any:
    """Refuse a key without a value."""
    if value is None:
        raise ValueError("it has no value: leave the key out")
    return value


def date_of(value: Any) -> Any:
    """Read a date, or text."""
    return value if isinstance(value, datetime.date) else _text(value)


def _one_or_more(item: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [item, {"type": "array", "items": item, "minItems": 1}]}


def enum(words: Sequence[str]) -> dict[str, Any]:
    """The JSON Schema of one of some words."""
    return {"enum": list(words)}


def _size_schema(minimum: int) -> dict[str, Any]:
    end = {"type": "integer", "minimum": 0}
    text = {"type": "string", "pattern": r"^\s*(\d+|\d+\s*\.\.\s*\d*|\.\.\s*\d+|[<>]=?\s*\d+)\s*$"}
    span = {"type": "object", "properties": {"min": end, "max": end}, "additionalProperties": False, "minProperties": 1}
    return {"anyOf": [{"type": "integer", "minimum": minimum}, text, span]}


TEXT_SCHEMA = {"type": "string", "minLength": 1}
_MASK_SCHEMA = {"anyOf": [enum(list(_MASKS)), {"type": "string", "pattern": "^[A-Za-z]+(\\s*&\\s*[A-Za-z]+)*$"}]}

_List = BeforeValidator(_as_list)
Phases = Annotated[
    list[Annotated[str, PlainValidator(_word("phase", PHASES))]], _List, WithJsonSchema(_one_or_more(enum(PHASES)))
]
Variants = Annotated[
    list[Annotated[str, PlainValidator(_word("variant", VARIANTS))]],
    _List,
    WithJsonSchema(_one_or_more(enum(VARIANTS))),
]
Layouts = Annotated[
    list[Annotated[str, PlainValidator(_word("layout", LAYOUTS))]], _List, WithJsonSchema(_one_or_more(enum(LAYOUTS)))
]
Dtypes = Annotated[
    list[Annotated[str, PlainValidator(_dtype)]], _List, WithJsonSchema(_one_or_more(enum((*DTYPES, *_SHORT))))
]
DEVICE_SCHEMA = {"anyOf": [enum(DEVICES), {"type": "string", "pattern": f"^{_DEVICE}$"}]}
Devices = Annotated[list[Annotated[str, PlainValidator(device_of)]], _List, WithJsonSchema(_one_or_more(DEVICE_SCHEMA))]
Masks = Annotated[list[Annotated[str, PlainValidator(_mask)]], _List, WithJsonSchema(_one_or_more(_MASK_SCHEMA))]
Counts = Annotated[list[Annotated[Any, PlainValidator(_size(1))]], _List, WithJsonSchema(_one_or_more(_size_schema(1)))]
Lengths = Annotated[
    list[Annotated[Any, PlainValidator(_size(0))]], _List, WithJsonSchema(_one_or_more(_size_schema(0)))
]
Booleans = Annotated[
    list[Annotated[bool, PlainValidator(_bool)]], _List, WithJsonSchema(_one_or_more({"type": "boolean"}))
]
Texts = Annotated[list[Annotated[str, PlainValidator(_text)]], _List, WithJsonSchema(_one_or_more(TEXT_SCHEMA))]
Features = Annotated[
    list[Annotated[str, PlainValidator(_word("feature", sorted(ALL_FEATURES)))]],
    _List,
    WithJsonSchema(_one_or_more(enum(sorted(ALL_FEATURES)))),
]
ChainText = Annotated[str, PlainValidator(chain_of)]
Chains = Annotated[list[ChainText], _List, AfterValidator(_distinct), WithJsonSchema(_one_or_more(TEXT_SCHEMA))]


Id = Annotated[str, PlainValidator(_id), WithJsonSchema(TEXT_SCHEMA)]
Text = Annotated[str, PlainValidator(_text), WithJsonSchema(TEXT_SCHEMA)]
Link = Annotated[str, PlainValidator(_link), WithJsonSchema(TEXT_SCHEMA)]
Versions = Annotated[str, PlainValidator(_specifier), WithJsonSchema(TEXT_SCHEMA)]
Ids = Annotated[list[Id], _List, WithJsonSchema(_one_or_more(TEXT_SCHEMA))]
