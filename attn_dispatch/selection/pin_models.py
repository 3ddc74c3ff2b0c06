"""The shape of a pin file, as pydantic models: what `pin_files` checks and what ``attn-dispatch pins schema`` prints.

Imported when a file is read, never by an import of the package. The description of each field is the field's
documentation: the JSON Schema and the table in docs/pins.md are made from it.
"""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from attn_dispatch.selection.pin_values import (
    DEVICE_SCHEMA,
    SCHEMA,
    TEXT_SCHEMA,
    Booleans,
    Chains,
    ChainText,
    Counts,
    Devices,
    Dtypes,
    Features,
    Id,
    Ids,
    Layouts,
    Lengths,
    Link,
    Masks,
    Phases,
    Text,
    Texts,
    UnquotedError,
    Variants,
    Versions,
    chain_of,
    date_of,
    device_of,
    no_such,
    not_none,
    nothing_is_none,
    schema_number,
)

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

    device: Annotated[str, PlainValidator(device_of), WithJsonSchema(DEVICE_SCHEMA)] = Field(description="Device type.")
    name: Texts = Field(default=[], description="Patterns over the device's name as doctor prints it: * ? [abc].")
    arch: Texts = Field(default=[], description="Patterns over the architecture: sm90, x86_64, x86_64-avx2.")
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

    id: Id = Field(description="Its name; allow_known_bad names it.")
    backend: Text = Field(description="The backend that it bars, in every chain.")
    version: Versions = Field(default="", description="Versions of the backend, as pip writes them; all when left out.")
    hardware: HardwareModel | None = Field(default=None, description="On which machine; any when left out.")
    when: WhenModel = Field(default_factory=WhenModel, description="Which ops; every op when left out.")
    why: Text = Field(description="What is wrong, in one line.")
    link: Link = Field(description="The report.")
    instead: Annotated[str, PlainValidator(chain_of), WithJsonSchema(TEXT_SCHEMA)] = Field(
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
    use: list[ChainText] = Field(description="Candidates that may run, best first.", min_length=1)
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

    when: Annotated[datetime.date | str | None, PlainValidator(date_of), WithJsonSchema({"type": "string"})] = Field(
        default=None, description="Date."
    )
    torch: str | None = Field(default=None, description="Version of torch, in quotes where it has one dot.")
    driver: str | None = Field(default=None, description="Version of the driver, in quotes where it has one dot.")
    by: str | None = Field(default=None, description="What wrote the file.")


def _nothing_is_empty(value: Any) -> Any:
    return {} if value is None else value  # a key whose entries are all commented out


# which options there are, and of which type, only the registry knows: `pin_options`
_Option = Annotated[Any, WithJsonSchema({"type": ["boolean", "number", "string"]})]
_Options = Annotated[dict[str, _Option], BeforeValidator(_nothing_is_empty)]


class FileModel(_Strict):
    """A pin file of attn_dispatch: which backend runs which attention."""

    number: Annotated[int, PlainValidator(schema_number), WithJsonSchema({"const": SCHEMA})] = Field(
        alias="schema", description="Version of this format."
    )
    hardware: Annotated[HardwareModel | None, BeforeValidator(not_none)] = Field(
        default=None, description="Which machine the file is for; any when left out."
    )
    pins: Annotated[list[PinModel], BeforeValidator(nothing_is_none)] = Field(
        default=[],
        description="The first pin that matches an op and has use decides; avoid of each that matches counts.",
    )
    backends: Annotated[dict[str, _Options], BeforeValidator(_nothing_is_empty)] = Field(
        default={}, description="Options of backends, by the backend's name."
    )
    tuned: Annotated[list[TunedModel], BeforeValidator(nothing_is_none)] = Field(
        default=[], description="Measured results."
    )
    known_bad: Annotated[list[KnownBadModel], BeforeValidator(nothing_is_none)] = Field(
        default=[], description="Combinations that are known to be wrong and are refused."
    )
    allow_known_bad: Ids = Field(default=[], description="Names of known-bad entries that may run all the same.")
    measured: Annotated[MeasuredModel | None, BeforeValidator(not_none)] = Field(
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
