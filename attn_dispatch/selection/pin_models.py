"""The shape of a pin file, as pydantic models: what `pin_files` checks and what ``attn-dispatch pins schema`` prints.

Imported when a file is read, never by an import of the package. The description of each field is the field's
documentation: the JSON Schema and the table in docs/pins.md are made from it.
"""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from attn_dispatch.capability import ALL_FEATURES, MASK_WORDS
from attn_dispatch.ir.tensors import short_dtype
from attn_dispatch.selection.pins import Span

__all__ = [
    "SCHEMA",
    "FileModel",
    "HardwareModel",
    "KnownBadModel",
    "MeasuredModel",
    "PinModel",
    "TunedModel",
    "UnquotedError",
    "WhenModel",
    "json_schema",
    "keys_of",
    "no_such",
]

SCHEMA = 1
PHASES = ("prefill", "decode", "cross")
VARIANTS = ("softmax", "linear", "retention")
LAYOUTS = ("bhsd", "bshd")
DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla", "meta")
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


def _device(value: Any) -> str:
    kind, colon, index = _text(value).partition(":")
    if colon and kind in DEVICES:
        raise ValueError(f"a device type is wanted, and {index!r} is an index: write {kind}")
    return _word("device", DEVICES)(value)


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


def _chain(value: Any) -> str:
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


def _schema_number(value: Any) -> int:
    if value == SCHEMA and type(value) is int:
        return SCHEMA
    if type(value) is int and value > SCHEMA:
        raise ValueError(
            f"{value} is of a later attn_dispatch; this one reads {SCHEMA}: upgrade it, or rewrite the file"
        )
    raise ValueError(f"it must be {SCHEMA}, which is what this version reads, got {value!r}")


def _nothing_is_none(value: Any) -> Any:
    return [] if value is None else value  # a key whose entries are all commented out


def _not_none(value: Any) -> Any:
    if value is None:
        raise ValueError("it has no value: leave the key out")
    return value


def _date(value: Any) -> Any:
    return value if isinstance(value, datetime.date) else _text(value)


def _one_or_more(item: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [item, {"type": "array", "items": item, "minItems": 1}]}


def _enum(words: Sequence[str]) -> dict[str, Any]:
    return {"enum": list(words)}


def _size_schema(minimum: int) -> dict[str, Any]:
    end = {"type": "integer", "minimum": 0}
    text = {"type": "string", "pattern": r"^\s*(\d+|\d+\s*\.\.\s*\d*|\.\.\s*\d+|[<>]=?\s*\d+)\s*$"}
    span = {"type": "object", "properties": {"min": end, "max": end}, "additionalProperties": False, "minProperties": 1}
    return {"anyOf": [{"type": "integer", "minimum": minimum}, text, span]}


_TEXT = {"type": "string", "minLength": 1}
_MASK_SCHEMA = {"anyOf": [_enum(list(_MASKS)), {"type": "string", "pattern": "^[A-Za-z]+(\\s*&\\s*[A-Za-z]+)*$"}]}

_List = BeforeValidator(_as_list)
Phases = Annotated[
    list[Annotated[str, PlainValidator(_word("phase", PHASES))]], _List, WithJsonSchema(_one_or_more(_enum(PHASES)))
]
Variants = Annotated[
    list[Annotated[str, PlainValidator(_word("variant", VARIANTS))]],
    _List,
    WithJsonSchema(_one_or_more(_enum(VARIANTS))),
]
Layouts = Annotated[
    list[Annotated[str, PlainValidator(_word("layout", LAYOUTS))]], _List, WithJsonSchema(_one_or_more(_enum(LAYOUTS)))
]
Dtypes = Annotated[
    list[Annotated[str, PlainValidator(_dtype)]], _List, WithJsonSchema(_one_or_more(_enum((*DTYPES, *_SHORT))))
]
Devices = Annotated[list[Annotated[str, PlainValidator(_device)]], _List, WithJsonSchema(_one_or_more(_enum(DEVICES)))]
Masks = Annotated[list[Annotated[str, PlainValidator(_mask)]], _List, WithJsonSchema(_one_or_more(_MASK_SCHEMA))]
Counts = Annotated[list[Annotated[Any, PlainValidator(_size(1))]], _List, WithJsonSchema(_one_or_more(_size_schema(1)))]
Lengths = Annotated[
    list[Annotated[Any, PlainValidator(_size(0))]], _List, WithJsonSchema(_one_or_more(_size_schema(0)))
]
Booleans = Annotated[
    list[Annotated[bool, PlainValidator(_bool)]], _List, WithJsonSchema(_one_or_more({"type": "boolean"}))
]
Texts = Annotated[list[Annotated[str, PlainValidator(_text)]], _List, WithJsonSchema(_one_or_more(_TEXT))]
Features = Annotated[
    list[Annotated[str, PlainValidator(_word("feature", sorted(ALL_FEATURES)))]],
    _List,
    WithJsonSchema(_one_or_more(_enum(sorted(ALL_FEATURES)))),
]
_ChainText = Annotated[str, PlainValidator(_chain)]
Chains = Annotated[list[_ChainText], _List, AfterValidator(_distinct), WithJsonSchema(_one_or_more(_TEXT))]


_Id = Annotated[str, PlainValidator(_id), WithJsonSchema(_TEXT)]
_Name = Annotated[str, PlainValidator(_text), WithJsonSchema(_TEXT)]
_Link = Annotated[str, PlainValidator(_link), WithJsonSchema(_TEXT)]
_Versions = Annotated[str, PlainValidator(_specifier), WithJsonSchema(_TEXT)]
Ids = Annotated[list[_Id], _List, WithJsonSchema(_one_or_more(_TEXT))]


# --- the models ------------------------------------------------------------------------------------------------------


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class WhenModel(_Strict):
    """Which ops: every key that is given must hold. A key takes a value or a list, of which one must hold."""

    phase: Phases = Field(
        default=[], description="decode: one query over more keys; prefill; cross: other unequal lengths."
    )
    dtype: Dtypes = Field(default=[], description="Of query, key and value; short names (bf16, f32) too.")
    device: Devices = Field(default=[], description="Device type.")
    heads: Counts = Field(default=[], description="Query heads Hq.")
    kv_heads: Counts = Field(default=[], description="Key and value heads Hkv.")
    head_dim: Counts = Field(default=[], description="Head size D of query and key.")
    value_head_dim: Counts = Field(default=[], description="Head size Dv of value.")
    mask: Masks = Field(
        default=[],
        description="Exactly these mask atoms, as explain prints them, with & between them; upper or lower case. "
        "A decode step that sees every key counts as causal and as full.",
    )
    query_length: Lengths = Field(default=[], description="Query length Sq.")
    key_length: Lengths = Field(default=[], description="Key length Skv.")
    batch: Lengths = Field(default=[], description="Batch size B.")
    grad: Booleans = Field(default=[], description="Whether any gradient is wanted.")
    layers: Texts = Field(default=[], description="Patterns over the layer's name: * ? [abc].")
    variant: Variants = Field(default=[], description="The weight kind; retention is linear with a decay.")
    op: Texts = Field(default=[], description="Digest of one exact op (AttentionOp.digest()).")
    features: Features = Field(default=[], description="Words of AttentionOp.features; all of them must be there.")
    layout: Layouts = Field(default=[], description="How query, key and value lie in memory.")
    lse: Booleans = Field(default=[], description="Whether the log-sum-exp is wanted.")
    dropout: Booleans = Field(default=[], description="Whether the dropout probability is above 0.")


class HardwareModel(_Strict):
    """Which machine a file is for; on any other it says nothing. Its pins speak of ops on this device alone."""

    device: Annotated[str, PlainValidator(_device), WithJsonSchema(_enum(DEVICES))] = Field(description="Device type.")
    name: Texts = Field(default=[], description="Patterns over the device's name as doctor prints it: * ? [abc].")
    arch: Texts = Field(default=[], description="Patterns over the architecture: sm90, x86_64.")
    threads: Counts = Field(default=[], description="Threads that torch uses.")


class PinModel(_Strict):
    """One pin: which ops, and what runs them."""

    when: WhenModel = Field(default_factory=WhenModel, description="Which ops; every op when left out.")
    use: Chains = Field(default=[], description="Backends or chains (fold_groups > sdpa_flash), best first.")
    avoid: Chains = Field(default=[], description="Backends or chains that must not run.")
    mode: Literal["prefer", "require"] = Field(
        default="prefer", description="prefer falls through and warns once; require never falls back."
    )

    @model_validator(mode="after")
    def _says_something(self) -> PinModel:
        if not self.use and not self.avoid:
            raise ValueError("a pin needs use or avoid")
        if self.mode == "require" and not self.use:
            raise ValueError("mode require needs use")
        barred = [name for name in self.use if {name, name.rpartition(" > ")[2]} & set(self.avoid)]
        if barred:
            raise ValueError(f"{barred[0]!r} is used and avoided in one pin: keep one")
        return self


class KnownBadModel(_Strict):
    """A combination that is known to be wrong: it is refused, with its text and link."""

    id: _Id = Field(description="Its name; allow_known_bad names it.")
    backend: _Name = Field(description="The backend that it bars, in every chain.")
    version: _Versions = Field(
        default="", description="Versions of the backend, as pip writes them; all when left out."
    )
    hardware: HardwareModel | None = Field(default=None, description="On which machine; any when left out.")
    when: WhenModel = Field(default_factory=WhenModel, description="Which ops; every op when left out.")
    why: _Name = Field(description="What is wrong, in one line.")
    link: _Link = Field(description="The report.")
    instead: Annotated[str, PlainValidator(_chain), WithJsonSchema(_TEXT)] = Field(
        default="", description="Backend or chain to run instead."
    )

    @model_validator(mode="after")
    def _knows_what_is_compared(self) -> KnownBadModel:
        if self.when.layers:
            raise ValueError("a known-bad entry cannot look at layers: it is about the op")
        return self


class TunedModel(_Strict):
    """A measured result, written by attn-dispatch tune; its shape is checked and nothing else."""

    op: dict[str, Any] = Field(description="The op (AttentionOp.to_dict()).")
    digest: str = Field(default="", description="Its digest.")
    use: list[_ChainText] = Field(description="Candidates that may run, best first.", min_length=1)
    why: str = Field(default="", description="The choice in one line.")
    medians_us: dict[str, float] = Field(default={}, description="Median time by candidate, in microseconds.")
    spreads_us: dict[str, float] = Field(default={}, description="Spread of those times.")
    errors: dict[str, Any] = Field(default={}, description="Largest errors by candidate, in units of the budget.")
    versions: dict[str, str] = Field(default={}, description="Version by candidate.")
    layers: list[str] = Field(default=[], description="Layers that ran the op.")
    count: int = Field(default=1, description="How often the workload ran it.")
    refused: dict[str, Any] = Field(default={}, description="Why other candidates cannot run it.")


class MeasuredModel(BaseModel):
    """Where the file comes from. Other keys may be added here, and nowhere else."""

    model_config = ConfigDict(extra="allow", strict=True)

    when: Annotated[datetime.date | str | None, PlainValidator(_date), WithJsonSchema({"type": "string"})] = Field(
        default=None, description="Date."
    )
    torch: str | None = Field(default=None, description="Version of torch, in quotes where it has one dot.")
    driver: str | None = Field(default=None, description="Version of the driver, in quotes where it has one dot.")
    by: str | None = Field(default=None, description="What wrote the file.")


class FileModel(_Strict):
    """A pin file of attn_dispatch: which backend runs which attention."""

    number: Annotated[int, PlainValidator(_schema_number), WithJsonSchema({"const": SCHEMA})] = Field(
        alias="schema", description="Version of this format."
    )
    hardware: Annotated[HardwareModel | None, BeforeValidator(_not_none)] = Field(
        default=None, description="Which machine the file is for; any when left out."
    )
    pins: Annotated[list[PinModel], BeforeValidator(_nothing_is_none)] = Field(
        default=[],
        description="The first pin that matches an op and has use decides; avoid of each that matches counts.",
    )
    tuned: Annotated[list[TunedModel], BeforeValidator(_nothing_is_none)] = Field(
        default=[], description="Measured results."
    )
    known_bad: Annotated[list[KnownBadModel], BeforeValidator(_nothing_is_none)] = Field(
        default=[], description="Combinations that are known to be wrong and are refused."
    )
    allow_known_bad: Ids = Field(default=[], description="Names of known-bad entries that may run all the same.")
    measured: Annotated[MeasuredModel | None, BeforeValidator(_not_none)] = Field(
        default=None, description="Where the file comes from."
    )


_BY_PLACE: dict[tuple[str, ...], type[BaseModel]] = {
    (): FileModel,
    ("hardware",): HardwareModel,
    ("pins",): PinModel,
    ("pins", "when"): WhenModel,
    ("tuned",): TunedModel,
    ("known_bad",): KnownBadModel,
    ("known_bad", "when"): WhenModel,
    ("known_bad", "hardware"): HardwareModel,
    ("measured",): MeasuredModel,
}


def keys_of(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The keys that the mapping at a path may have.

    Example:
        >>> keys_of(("pins", 0))
        ('when', 'use', 'avoid', 'mode')
    """
    model = _BY_PLACE.get(tuple(part for part in path if isinstance(part, str)))
    return tuple(f.alias or name for name, f in model.model_fields.items()) if model is not None else ()


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a pin file, for editors."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **FileModel.model_json_schema()}
    for model in (schema, *schema["$defs"].values()):
        model["title"] = model["title"].removesuffix("Model")
        for prop in model["properties"].values():
            prop.pop("title", None)
            if not prop.get("default"):  # an empty list or nothing means that the key is left out
                prop.pop("default", None)
    return schema
