"""Pin files: matching, order, every complaint with its place, and the commands."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from attn_dispatch import device, dispatch, registry
from attn_dispatch.backend import Backend
from attn_dispatch.capability import Capability
from attn_dispatch.cli.pins import app, differences, read_workload
from attn_dispatch.device import DeviceFacts
from attn_dispatch.errors import ConfigError, ConfigWarning, InputError, NoBackendError, UnknownBackendError
from attn_dispatch.ir.atoms import Causal, Full, Stride, Window
from attn_dispatch.ir.ops import AttentionOp, Outputs
from attn_dispatch.ir.scores import SoftCap
from attn_dispatch.ir.tensors import Ref, TensorDesc
from attn_dispatch.ir.weights import Linear
from attn_dispatch.selection import pins as pins_module
from attn_dispatch.selection.pin_files import check, load_pins, parse
from attn_dispatch.selection.pin_models import FileModel, WhenModel, json_schema
from attn_dispatch.selection.pin_yaml import read_document
from attn_dispatch.selection.pins import Pin, Pins, Span, When, config_paths, current_pins, unmatched
from attn_dispatch.settings import Settings, settings

GOLDEN = Path(__file__).parent / "golden"
DOCS = Path(__file__).parents[1] / "docs" / "pins.md"


def an_op(
    b: int = 2, hq: int = 8, hkv: int = 2, sq: int = 16, skv: int = 32, d: int = 64, dv: int = 64, **more: Any
) -> AttentionOp:
    dtype, kind = more.pop("dtype", "float32"), more.pop("device", "cpu")
    shapes = ((b, hq, sq, d), (b, hkv, skv, d), (b, hkv, skv, dv))
    query, key, value = (TensorDesc(shape, dtype, kind) for shape in shapes)
    return AttentionOp(query, key, value, **more)


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write a file into the working directory, so that it is shown by its name."""
    monkeypatch.chdir(tmp_path)

    def written(text: str, name: str = "pins.yaml") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode("utf-8"))
        return path

    return written


@pytest.fixture
def in_force(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Make files those of this process."""
    before = registry.current()

    def put(*paths: Path) -> None:
        monkeypatch.setenv("ATTN_DISPATCH_CONFIG", ":".join(map(str, paths)))
        settings.cache_clear()
        registry.reset(before)

    yield put
    monkeypatch.delenv("ATTN_DISPATCH_CONFIG", raising=False)
    settings.cache_clear()
    registry.reset(before)


def pinned(text: str, write: Callable[..., Path], name: str = "pins.yaml") -> Pins:
    return load_pins([write(f"schema: 1\npins:\n{text}", name)], strict=True)


def names(pins: Pins, op: AttentionOp, layer: str = "") -> tuple[str, ...]:
    return next((request.names for request in pins.requests(op, layer)), ())


# --- ranges ----------------------------------------------------------------------------------------------------------

SIZES = st.integers(0, 1 << 20)
SPANS = st.one_of(
    st.builds(lambda a: Span(a, a), SIZES),
    st.builds(lambda a, b: Span(min(a, b), max(a, b)), SIZES, SIZES),
    st.builds(lambda a: Span(a, None), SIZES),
    st.builds(lambda a: Span(None, a), SIZES),
)


@given(SPANS, SIZES)
def test_a_range_survives_its_text(span: Span, size: int) -> None:
    again = Span.parse(str(span))
    assert again == span
    assert (size in again) == ((span.low or 0) <= size and (span.high is None or size <= span.high))


@given(SPANS, SPANS, SIZES)
def test_covers_means_that_no_size_is_left_out(one: Span, other: Span, size: int) -> None:
    if one.covers(other):
        assert size not in other or size in one
    else:
        ends = [
            end for end in (other.low or 0, other.high, (other.high or 0) if other.high else 1 << 30) if end is not None
        ]
        assert any(end in other and end not in one for end in ends)


@given(st.text(max_size=12))
def test_a_text_is_a_range_or_is_refused_by_name(text: str) -> None:
    said = ""
    try:
        span = Span.parse(text)
    except ValueError as error:
        said = str(error)
    if said:
        assert repr(text) in said
        return
    assert any(c.isdigit() for c in text)
    assert span.low is not None or span.high is not None


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("64", (64,), (63, 65)),
        ("1024..8192", (1024, 8192), (1023, 8193)),
        ("> 7", (8,), (7,)),
        ("<8", (0, 7), (8,)),
        ("..8", (0, 8), (9,)),
        ("8..", (8, 1 << 40), (7,)),
        (" >= 8 ", (8,), (7,)),
    ],
)
def test_the_spellings_of_a_range(text: str, inside: tuple[int, ...], outside: tuple[int, ...]) -> None:
    span = Span.parse(text)
    assert all(size in span for size in inside)
    assert not any(size in span for size in outside)


# --- matching --------------------------------------------------------------------------------------------------------

LINEAR = Linear("elu1", None, 1e-6)
RETENTION = Linear("identity", Ref("decay"), None)
GRAD = ("query", "key", "value")

# key -> (YAML that matches, YAML that does not, the op)
EVERY_KEY: dict[str, tuple[str, str, AttentionOp]] = {
    "phase": ("decode", "[prefill, cross]", an_op(sq=1)),
    "dtype": ("[f16, bf16]", "float32", an_op(dtype="bfloat16")),
    "device": ("[cpu, cuda]", "cpu", an_op(device="cuda")),
    "heads": ("8", "[1, 2]", an_op()),
    "kv_heads": ("{max: 2}", "{min: 3}", an_op()),
    "head_dim": ('"64..128"', '">64"', an_op()),
    "value_head_dim": ("[16, 32]", "64", an_op(dv=32)),
    "mask": ("Causal & window", "[causal, window, dense]", an_op(mask=Window(3, None) & Causal())),
    "query_length": ("16", '"<16"', an_op()),
    "key_length": ('">=32"', "[16, 31, 33]", an_op()),
    "batch": ("{min: 2, max: 2}", "1", an_op()),
    "grad": ("true", "false", an_op(grad=GRAD)),
    "layers": ('["x.*", "model.layers.*.attn"]', '["layers.1", "*.ATTN"]', an_op()),
    "variant": ("retention", "[softmax, linear]", an_op(weight=RETENTION)),
    "op": (f'"{an_op().digest()}"', f'"{an_op(b=3).digest()}"', an_op()),
    "features": ('[gqa, "score:SoftCap"]', "[gqa, lse]", an_op(score=(SoftCap(30.0),))),
    "layout": ("bshd", "bhsd", an_op(layout="bshd")),
    "lse": ("true", "false", an_op(outputs=Outputs(lse=True))),
    "dropout": ("[true]", "false", an_op(dropout_p=0.1)),
}


def test_the_table_of_keys_is_complete() -> None:
    assert list(EVERY_KEY) == [f.name for f in fields(When)] == list(WhenModel.model_fields)


@pytest.mark.parametrize("key", EVERY_KEY)
def test_every_key_matches_and_does_not(key: str, write: Callable[..., Path]) -> None:
    yes, no, op = EVERY_KEY[key]
    layer = "model.layers.3.attn"
    assert names(pinned(f"  - {{when: {{{key}: {yes}}}, use: eager}}", write), op, layer) == ("eager",)
    assert names(pinned(f"  - {{when: {{{key}: {no}}}, use: eager}}", write), op, layer) == ()


def test_all_keys_must_hold_and_no_key_matches_everything(write: Callable[..., Path]) -> None:
    pins = pinned("  - {when: {heads: 8, head_dim: 32}, use: blocked}\n  - {use: eager}", write)
    assert names(pins, an_op(d=32)) == ("blocked",)
    assert names(pins, an_op(d=64)) == ("eager",)


def test_linear_is_without_decay(write: Callable[..., Path]) -> None:
    pins = pinned("  - {when: {variant: linear}, use: eager}", write)
    assert names(pins, an_op(weight=LINEAR)) == ("eager",)
    assert names(pins, an_op(weight=RETENTION)) == names(pins, an_op()) == ()


def test_a_decode_step_counts_as_causal_and_as_full(write: Callable[..., Path]) -> None:
    step = an_op(sq=1, mask=Full())
    for word in ("causal", "full"):
        assert names(pinned(f"  - {{when: {{mask: {word}}}, use: eager}}", write), step) == ("eager",)
    windowed = replace(step, mask=Window(3, None))
    assert names(pinned("  - {when: {mask: causal & window}, use: eager}", write), windowed) == ("eager",)
    assert names(pinned("  - {when: {mask: causal}, use: eager}", write), windowed) == ()
    assert names(pinned("  - {when: {mask: causal}, use: eager}", write), an_op(mask=Full())) == ()
    assert names(pinned("  - {when: {mask: not & stride}, use: eager}", write), an_op(mask=~Stride(2))) == ("eager",)


WHENS = st.builds(
    When,
    phase=st.sampled_from([(), ("decode",), ("cross", "prefill")]),
    heads=st.lists(SPANS.filter(lambda span: 0 not in span or span.high != 0), max_size=2).map(tuple),
    key_length=st.lists(SPANS, max_size=2).map(tuple),
    mask=st.sampled_from([(), ("causal",), ("causal", "full"), ("causal & window",)]),
    grad=st.sampled_from([(), (True,), (False,), (False, True)]),
    features=st.sampled_from([(), ("gqa",), ("gqa", "lse")]),
)
OPS = st.builds(
    an_op,
    hq=st.sampled_from([2, 8]),
    sq=st.sampled_from([1, 16]),
    skv=st.integers(1, 64),
    mask=st.sampled_from([Full(), Causal(), Window(3, None) & Causal()]),
    grad=st.sampled_from([(), GRAD]),
)


@given(WHENS, WHENS, OPS)
def test_what_covers_another_matches_all_that_it_matches(one: When, other: When, op: AttentionOp) -> None:
    assert one.covers(one)
    if one.covers(other) and other.matches(op):
        assert one.matches(op)


@given(WHENS)
def test_a_when_survives_the_file(when: When) -> None:
    written = {name: [str(w) if isinstance(w, Span) else w for w in wanted] for name, wanted in when.asked}
    text = yaml.safe_dump({"schema": 1, "pins": [{"when": written, "use": "eager"}]})
    data = read_document("x", text.encode()).data
    model = FileModel.model_validate(data)
    for name, wanted in when.asked:
        assert set(getattr(model.pins[0].when, name)) == set(wanted)


# --- requests --------------------------------------------------------------------------------------------------------


def test_the_first_match_with_use_decides_and_every_avoid_counts() -> None:
    pins = Pins(
        (
            Pin(When(heads=(Span(1, 1),)), ("never",), where="f:1"),
            Pin(When(), (), ("sdpa_math",), where="f:2"),
            Pin(When(), ("blocked", "eager"), (), "require", "f:3"),
            Pin(When(), ("sdpa_flash",), ("fold_groups > sdpa_efficient", "sdpa_math"), where="f:4"),
        )
    )
    (request,) = pins.requests(an_op())
    assert (request.names, request.source, request.require) == (("blocked", "eager"), "pin f:3", True)
    assert request.avoid == ("sdpa_math", "fold_groups > sdpa_efficient")


def test_what_is_barred_before_cannot_be_used_after_and_the_other_way_round() -> None:
    op = an_op()
    bar, use = Pin(When(), (), ("eager",), where="f:1"), Pin(When(), ("bands > eager", "blocked"), where="f:2")
    (request,) = Pins((bar, use)).requests(op)
    assert (request.names, request.avoid) == (("blocked",), ("eager",))
    (request,) = Pins((use, bar)).requests(op)
    assert (request.names, request.avoid) == (("bands > eager", "blocked"), ())
    needs = Pin(When(), ("eager",), mode="require", where="f:3")
    (request,) = Pins((bar, needs)).requests(op)
    assert (request.names, request.source, request.require, request.avoid) == ((), "pin f:1", False, ("eager",))
    (request,) = Pins((bar, needs, replace(use, where="f:4"))).requests(op)
    assert (request.names, request.source) == (("blocked",), "pin f:4")


def test_nothing_that_matches_asks_nothing() -> None:
    assert Pins().requests(an_op()) == ()
    assert Pins((Pin(When(heads=(Span(1, 1),)), ("eager",)),)).requests(an_op()) == ()


def test_whether_layers_and_lengths_matter_is_known() -> None:
    assert Pins((Pin(When(layers=("a",)), ("eager",)),)).has_layers
    assert Pins((Pin(When(key_length=(Span(1, 1),)), ("eager",)),)).has_lengths
    assert Pins((Pin(When(op=("0",)), ("eager",)),)).has_lengths
    plain = Pins((Pin(When(heads=(Span(1, 1),)), ("eager",)),))
    assert not plain.has_layers
    assert not plain.has_lengths


def test_unmatched_names_the_pins_that_no_op_meets() -> None:
    hit, missed = Pin(When(layers=("a.*",)), ("eager",)), Pin(When(heads=(Span(3, 3),)), ("eager",))
    assert unmatched(Pins((hit, missed)), [(an_op(), "b"), (an_op(), "a.1")]) == [missed]
    assert unmatched(Pins((hit, missed)), []) == [hit, missed]


# --- what is wrong, and where ----------------------------------------------------------------------------------------

P = "schema: 1\npins:\n"
BAD: dict[str, tuple[str, str]] = {
    "unknown key": (P + "  - {wen: {}, use: eager}", "3:6: pins: there is no key 'wen'; did you mean 'when'?"),
    "unknown key at the top": ("schema: 1\npin: []", "2:1: there is no key 'pin'; did you mean 'pins'?"),
    "unknown key in when": (
        P + "  - when:\n      headdim: 64\n    use: eager",
        "4:7: when: there is no key 'headdim'; did you mean 'head_dim'?",
    ),
    "our letter for a size": (P + "  - {when: {Hkv: 2}, use: eager}", "3:13: when: there is no key 'Hkv'; did you mean 'kv_heads'?"),
    "unknown key in hardware": ("schema: 1\nhardware: {device: cpu, nam: x}", "2:25: hardware: there is no key 'nam'; did you mean 'name'?"),
    "unknown mask": (P + "  - {when: {mask: casual}, use: eager}", "3:19: when.mask: there is no mask 'casual'; did you mean 'causal'?"),
    "mask with arguments": (P + '  - {when: {mask: "Window(3, 0)"}, use: eager}', "3:19: when.mask: write the atoms"),
    "unknown feature": (P + "  - {when: {features: [gqa, sink]}, use: eager}", "3:29: when.features: there is no feature 'sink'; did you mean 'sinks'?"),
    "unknown dtype": (P + "  - {when: {dtype: bf17}, use: eager}", "3:20: when.dtype: there is no dtype 'bf17'; did you mean 'bf16'?"),
    "Norway": (P + "  - {when: {dtype: no}, use: eager}", "3:20: when.dtype: there is no dtype 'no'"),
    "a boolean dtype": (P + "  - {when: {dtype: true}, use: eager}", '3:20: when.dtype: true is read as a boolean, and text is wanted: quote it, "true"'),
    "off is a mode": (P + "  - {use: eager, mode: off}", "3:24: mode: there is no mode 'off'. There are: prefer, require"),
    "yes is no boolean": (P + "  - {when: {grad: yes}, use: eager}", "3:19: when.grad: it must be true or false, got 'yes'"),
    "a version": ("schema: 1\nmeasured: {torch: 2.10}", '2:19: measured.torch: 2.10 is read as a number, and text is wanted: quote it, "2.10"'),
    "a date as text": (P + "  - {when: {layers: 2026-12-01}, use: eager}", '3:21: when.layers: 2026-12-01 is read as a date, and text is wanted: quote it, "2026-12-01"'),
    "a number as backend": (P + "  - {use: [eager, 2]}", '3:19: use: 2 is read as a number, and text is wanted: quote it, "2"'),
    "a device with an index": ("schema: 1\nhardware: {device: 'cuda:0'}", "2:20: hardware.device: a device type is wanted, and '0' is an index: write cuda"),
    "a vendor's device with an index": ("schema: 1\nhardware: {device: 'npu:1'}", "2:20: hardware.device: a device type is wanted, and '1' is an index: write npu"),
    "no device": (P + "  - {when: {device: CUDA}, use: eager}", "3:21: when.device: there is no device 'CUDA'; did you mean 'cuda'?"),
    "empty range": (P + "  - {when: {batch: {min: 9, max: 2}}, use: eager}", "3:20: when.batch: no size lies in 9..2"),
    "empty range as text": (P + '  - {when: {batch: "9..2"}, use: eager}', "3:20: when.batch: no size lies in 9..2"),
    "a size of nothing": (P + "  - {when: {head_dim: [64, 0]}, use: eager}", "3:28: when.head_dim: 0 never matches: this size is at least 1"),
    "a negative size": (P + "  - {when: {batch: -1}, use: eager}", "3:20: when.batch: no size lies in"),
    "a broken size": (P + "  - {when: {batch: 1.5}, use: eager}", "3:20: when.batch: a size is wanted"),
    "a size in words": (P + "  - {when: {batch: many}, use: eager}", "3:20: when.batch: 'many' is no size: write 64"),
    "an octal size": (P + "  - {when: {batch: 0x10}, use: eager}", "3:20: when.batch: '0x10' is no size"),
    "a boolean size": (P + "  - {when: {batch: true}, use: eager}", "3:20: when.batch: a size is wanted, got true"),
    "unknown end": (P + "  - {when: {batch: {mim: 1}}, use: eager}", "3:20: when.batch: there is no key 'mim'; did you mean 'min'?"),
    "no value": (P + "  - when:\n      heads:\n    use: eager", "4:13: when.heads: it has no value: leave the key out"),
    "empty list": (P + "  - {when: {heads: []}, use: eager}", "3:20: when.heads: an empty list matches nothing"),
    "empty when": (P + "  - when:\n    use: eager", "3:10: when: a mapping is wanted, got nothing"),
    "no wish": (P + "  - {when: {heads: 8}}", "3:5: pins: a pin needs use or avoid"),
    "require nothing": (P + "  - {avoid: eager, mode: require}", "3:5: pins: mode require needs use"),
    "used and avoided": (P + "  - {use: [bands > eager], avoid: eager}", "3:5: pins: 'bands > eager' is used and avoided in one pin"),
    "one name twice": (P + "  - {use: [eager, eager]}", "3:11: use: 'eager' stands twice"),
    "a broken chain": (P + "  - {use: '> eager'}", "3:11: use: '> eager' is no chain"),
    "a pin that is none": (P + "  - eager", "3:5: pins: a mapping is wanted, got 'eager'"),
    "pins that are no list": ("schema: 1\npins: {use: eager}", "2:7: pins: a list is wanted, got dict"),
    "hardware of nothing": ("schema: 1\nhardware:", "2:10: hardware: it has no value"),
    "hardware without device": ("schema: 1\nhardware: {name: x}", "2:11: key 'device' is missing"),
    "no schema": ("pins: []", "1:1: key 'schema' is missing: write schema: 1"),
    "a future schema": ("schema: 2", "1:9: schema: 2 is of a later attn_dispatch; this one reads 1: upgrade it, or rewrite the file"),
    "a schema that is none": ("schema: one", "1:9: schema: it must be 1"),
    "a boolean schema": ("schema: true", "1:9: schema: it must be 1"),
    "a list": ("- 1", "1:1: a mapping is wanted, got list"),
    "a workload": ("schema: 1\nops: []", "2:1: there is no key 'ops'"),
    "one key twice": (P + "  - use: eager\n    use: blocked", "4:5: key 'use' stands twice; it is on line 3 already: keep one"),
    "one when twice": (
        P + "  - {when: {dtype: [f32, bf16]}, use: eager}\n  - {when: {dtype: [bfloat16, float32]}, use: blocked}",
        "4:5: line 3 asks for the same ops",
    ),
    "a tab": ("schema: 1\npins:\n\t- use: eager", "3:1: a tab stands where YAML wants spaces"),
    "open bracket": ("schema: [1", "1:11: this is not YAML"),
    "two documents": ("schema: 1\n---\nschema: 1", "2:1: a second document begins here"),
    "a tag": ("schema: 1\npins: !!python/object:os.system []", "2:7: the tag !!python/object:os.system is not read here"),
    "itself": ("schema: 1\npins: &a [*a]", "2:7: this contains itself"),
    "a control character": ("schema: 1\n# \x07", "2:3: the character '\\x07' may not stand in YAML"),
    "unknown tuned key": ("schema: 1\ntuned:\n  - {op: {}, use: [a], median: {}}", "3:24: tuned: there is no key 'median'; did you mean 'medians_us'?"),
    "tuned without use": ("schema: 1\ntuned:\n  - {op: {}}", "3:5: key 'use' is missing"),
    "tuned time in words": ("schema: 1\ntuned:\n  - {op: {}, use: [a], medians_us: {a: fast}}", "3:40: medians_us.a: a number is wanted, got 'fast'"),
    "tuned version": ("schema: 1\ntuned:\n  - {op: {}, use: [a], versions: {a: 2.10}}", "3:38: versions.a: 2.10 is read as a number"),
    "a merged key": (
        "schema: 1\npins:\n  - when: &w {masc: causal}\n    use: eager\n  - {when: {<<: *w, heads: 1}, use: eager}",
        "3:15: when: there is no key 'masc'; did you mean 'mask'?",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_named_with_its_place(name: str, write: Callable[..., Path]) -> None:
    text, words = BAD[name]
    path = write(text)
    with pytest.raises(ConfigError) as raised:
        load_pins([path], strict=True)
    assert any(line.startswith(f"pins.yaml:{words}") for line in str(raised.value).splitlines()), str(raised.value)
    with pytest.warns(ConfigWarning, match=r"pins\.yaml:\d+:\d+: .*The file is ignored") as said:
        pins = load_pins([path])
    assert len(said) == 1
    assert pins.pins == ()
    assert pins.files[0].skipped.startswith("broken: ")


NAMES = {
    "backend": ("use: sdpa_flsh", "3:10: use: there is no backend 'sdpa_flsh'; did you mean 'sdpa_flash'?"),
    "in a list": ("use: [eager, blokced]", "3:18: use: there is no backend 'blokced'; did you mean 'blocked'?"),
    "rewrite": ("use: fold_group > eager", "3:10: use: there is no rewrite 'fold_group'; did you mean 'fold_groups'?"),
    "rewrite alone": ("use: fold_groups", "3:10: use: 'fold_groups' is a rewrite"),
    "avoided": ("avoid: eagre", "3:12: avoid: there is no backend 'eagre'; did you mean 'eager'?"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_nobody_registered_is_an_error_of_check_and_a_warning_of_a_call(
    name: str, write: Callable[..., Path]
) -> None:
    text, words = NAMES[name]
    path = write(f"{P}  - {text}")
    with pytest.raises(ConfigError, match=re.escape(f"pins.yaml:{words}")):
        load_pins([path], strict=True)
    with pytest.warns(ConfigWarning, match="The name is ignored"):
        pins = load_pins([path])
    assert len(pins.pins[0].unknown) == 1
    assert names(pins, an_op()) == (("eager",) if name == "in a list" else ())


def test_a_required_name_stays_so_that_the_call_raises(write: Callable[..., Path]) -> None:
    path = write(f"{P}  - {{use: [nobody, eager], mode: require}}")
    with pytest.warns(ConfigWarning, match="A call that the pin matches raises"):
        pins = load_pins([path])
    assert names(pins, an_op()) == ("nobody", "eager")


def test_all_mistakes_of_all_files_come_together_in_the_order_of_the_lines(write: Callable[..., Path]) -> None:
    one = write(P + "  - {use: eager, mode: x}\n  - {when: {heads: 0, mask: q}, use: eager}", "one.yaml")
    two = write("schema: 3", "two.yaml")
    with pytest.raises(ConfigError) as raised:
        load_pins([one, two], strict=True)
    starts = [":".join(line.split(":")[:3]) for line in str(raised.value).splitlines()]
    assert starts == ["one.yaml:3:24", "one.yaml:4:20", "one.yaml:4:29", "two.yaml:1:9"]
    with pytest.warns(ConfigWarning, match=r"one\.yaml:3:24: .*and 2 more: attn-dispatch pins check one\.yaml"):
        load_pins([one])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.yaml").write_bytes("schema: 1\n# ä".encode("latin-1"))
    for name, words in (("nowhere", "cannot be read"), ("folder", "cannot be read"), ("latin.yaml", "not UTF-8")):
        with pytest.raises(ConfigError, match=words):
            load_pins([tmp_path / name], strict=True)
    assert parse(tmp_path / "latin.yaml").problems[0].line == 2


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "---\n", "schema: 1", "schema: 1\npins:\n", "schema: 1\npins: []\ntuned:"]
)
def test_a_file_without_pins_is_fine(text: str, write: Callable[..., Path]) -> None:
    assert load_pins([write(text)], strict=True).pins == ()


def test_line_ends_byte_order_marks_and_other_scripts_are_read(write: Callable[..., Path]) -> None:
    text = '\ufeffschema: 1\r\npins:\r\n  - when: {layers: "Schicht.ö.*"}\r\n    use: eager\r\n'
    pins = load_pins([write(text)], strict=True)
    assert names(pins, an_op(), "Schicht.ö.1") == ("eager",)
    assert pins.pins[0].where == "pins.yaml:3"
    broken = parse(write('schema: 1\r\npins:\r\n  - {when: {layers: "äöü", masc: causal}, use: eager}'))
    assert str(broken.problems[0]).startswith("pins.yaml:3:28: when: there is no key 'masc'")


def test_anchors_and_merge_keys_work(write: Callable[..., Path]) -> None:
    pins = pinned(
        "  - {when: &small {heads: 8, batch: 1}, use: &best [blocked, eager]}\n"
        "  - {when: {<<: *small, batch: 2}, use: *best}",
        write,
    )
    assert names(pins, an_op()) == ("blocked", "eager")
    assert pins.pins[1].when == When(heads=(Span(8, 8),), batch=(Span(2, 2),))


def test_a_bomb_of_aliases_is_refused_in_time() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "parts: use fewer aliases" in str(read_document("x", "\n".join(lines).encode()).problems[0])


@given(st.text(max_size=60))
def test_any_text_is_data_or_a_problem_with_a_place(text: str) -> None:
    document = read_document("x", text.encode("utf-8", "surrogatepass"))
    assert all(problem.line >= 1 and problem.column >= 1 for problem in document.problems)
    if not document.problems and "\ufeff" not in text:
        assert (document.data is None) == (yaml.safe_load(text) is None)


# --- order and machines ----------------------------------------------------------------------------------------------


def test_stronger_files_come_first_and_inside_a_file_the_order_of_lines(write: Callable[..., Path]) -> None:
    strong = write(P + "  - {when: {heads: 8}, use: blocked}\n  - {when: {batch: 2}, use: sdpa_math}", "strong.yaml")
    weak = write(
        P + "  - {when: {heads: 8}, use: eager}\n  - {use: sdpa_flash, avoid: [sdpa_efficient, blocked]}", "weak.yaml"
    )
    pins = load_pins([strong, weak], strict=True)
    assert [pin.where for pin in pins.pins] == ["strong.yaml:3", "strong.yaml:4", "weak.yaml:3", "weak.yaml:4"]
    (request,) = pins.requests(an_op())
    assert (request.names, request.avoid) == (("blocked",), ("sdpa_efficient",))
    assert names(pins, an_op(hq=4)) == ("sdpa_math",)
    assert names(pins, an_op(hq=4, b=1)) == ("sdpa_flash",)
    assert names(load_pins([weak, strong]), an_op()) == ("eager",)


def test_the_search_is_project_user_plugins_shipped_or_only_what_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {name: tmp_path / f"{name}.yaml" for name in ("project", "user", "plugin", "shipped")}
    kept = (paths["project"], paths["user"], paths["shipped"])
    found = replace(settings(), config_files=kept, shipped=(paths["shipped"],), is_given=False)

    class Fake:
        configs = (str(paths["plugin"]), str(paths["project"]))

    monkeypatch.setattr(pins_module, "settings", lambda: found)
    assert config_paths(Fake()) == tuple(paths.values())  # type: ignore[arg-type]
    monkeypatch.setattr(pins_module, "settings", lambda: replace(found, is_given=True))
    assert config_paths(Fake()) == kept  # type: ignore[arg-type]


def test_settings_finds_the_project_the_user_and_the_shipped_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import platformdirs

    from attn_dispatch import settings as settings_module

    (tmp_path / "user").mkdir()
    for name in ("attn_dispatch.yaml", "user/attn_dispatch.yaml", "b.yaml", "a.yaml", "notes.txt"):
        (tmp_path / name).write_text("schema: 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATTN_DISPATCH_CONFIG", raising=False)
    monkeypatch.setattr(platformdirs, "user_config_path", lambda name: tmp_path / "user")
    monkeypatch.setattr(settings_module, "_shipped_folder", lambda: tmp_path)
    found: Settings = settings.__wrapped__()
    files = [str(path.resolve().relative_to(tmp_path)) for path in found.config_files]
    assert files == ["attn_dispatch.yaml", "user/attn_dispatch.yaml", "a.yaml", "attn_dispatch.yaml", "b.yaml"]
    assert [path.name for path in found.shipped] == ["a.yaml", "attn_dispatch.yaml", "b.yaml"]
    monkeypatch.setenv("ATTN_DISPATCH_CONFIG", "b.yaml:missing.yaml")
    found = settings.__wrapped__()
    assert (found.config_files, found.shipped, found.is_given) == ((Path("b.yaml"), Path("missing.yaml")), (), True)


def machine(monkeypatch: pytest.MonkeyPatch, cuda: DeviceFacts) -> None:
    cpu = DeviceFacts("cpu", "Some CPU", "x86_64-avx2", 2)
    monkeypatch.setattr(device, "facts", lambda kind: cpu if kind == "cpu" else cuda)


H200, A100 = DeviceFacts("cuda", "NVIDIA H200", "sm90"), DeviceFacts("cuda", "NVIDIA A100-SXM4-80GB", "sm80")
NONE = DeviceFacts("cuda", "cuda", "unknown")


@pytest.mark.parametrize(
    ("hardware", "here", "why"),
    [
        ("{device: cuda}", H200, ""),
        ("{device: cuda}", NONE, "it is for cuda, and there is none here"),
        ("{device: cuda, name: 'nvidia h*'}", H200, ""),
        ("{device: cuda, name: [NVIDIA H200, NVIDIA H100]}", A100, "and here it is 'NVIDIA A100-SXM4-80GB'"),
        ("{device: cuda, arch: 'sm9*'}", H200, ""),
        ("{device: cuda, arch: sm90}", A100, "it is for cuda arch 'sm90', and here it is 'sm80'"),
        ("{device: cpu, threads: 2}", NONE, ""),
        ("{device: cpu, arch: x86_64}", NONE, ""),
        ("{device: cpu, arch: [aarch64, x86_64-AVX2]}", NONE, ""),
        ("{device: cpu, arch: x86_64-avx512}", NONE, "arch 'x86_64-avx512', and here it is 'x86_64-avx2'"),
        ("{device: cpu, threads: '>=4'}", NONE, "it is for >=4 threads, and here there are 2"),
    ],
)
def test_a_file_for_another_machine_is_skipped_with_the_reason(
    hardware: str, here: DeviceFacts, why: str, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, here)
    pins = load_pins([write(f"schema: 1\nhardware: {hardware}\npins:\n  - use: eager")])
    assert why in pins.files[0].skipped
    assert bool(pins.files[0].skipped) == bool(why)
    assert len(pins.pins) == (0 if why else 1)


def test_two_devices_of_one_name_pattern_each_get_their_own_file(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, in_force: Callable[..., None]
) -> None:
    """A peer's shipped tuning files never matched, and one file served every device."""
    text = 'schema: 1\nhardware: {{device: cuda, name: "{}"}}\npins:\n  - use: {}'
    in_force(
        write(text.format("NVIDIA H200", "blocked"), "h200.yaml"),
        write(text.format("NVIDIA A100*", "sdpa_math"), "a100.yaml"),
        write("schema: 1\npins:\n  - use: eager", "any.yaml"),
    )
    on_gpu, on_cpu = an_op(device="cuda"), an_op()
    for here, name in ((H200, "blocked"), (A100, "sdpa_math"), (NONE, "eager"), (H200, "blocked")):
        machine(monkeypatch, here)  # another device becomes current while the process runs
        assert names(current_pins(), on_gpu) == (name,)
        assert names(current_pins(), on_cpu) == ("eager",)
    assert current_pins() is current_pins()


# --- what check says beyond errors -----------------------------------------------------------------------------------


def test_two_files_that_contradict_are_both_named(write: Callable[..., Path]) -> None:
    strong = write(P + "  - {when: {heads: 8}, use: blocked}", "strong.yaml")
    weak = write(P + "  - {when: {batch: 1}, use: eager}\n  - {when: {heads: [8]}, use: eager}", "weak.yaml")
    (problem,) = check([strong, weak])
    assert not problem.is_error
    assert str(problem).startswith("weak.yaml:4:5: strong.yaml:3 asks for blocked (prefer) for the same ops and wins")
    other = write("schema: 1\nhardware: {device: meta}\n" + P[10:] + "  - {when: {heads: 8}, use: eager}", "other.yaml")
    same = write(P + "  - {when: {heads: 8}, use: blocked}", "same.yaml")
    assert len(check([strong, other])) == 1
    assert check([strong, same]) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            P + "  - {use: eager}\n  - {when: {heads: 8}, use: blocked}",
            "4:5: its use never decides: line 3 matches all",
        ),
        (P + "  - {when: {batch: '>=2'}, use: eager}\n  - {when: {batch: '4..8', heads: 1}, use: blocked}", "4:5:"),
        (
            P + "  - {when: {phase: decode, query_length: '>1'}, use: eager}",
            "3:5: its use never decides: a decode step",
        ),
        ("schema: 1\nhardware: {device: cpu}\npins:\n  - {when: {device: cuda}, use: eager}", "4:5: its use never"),
    ],
)
def test_a_pin_that_never_decides_is_a_warning(text: str, words: str, write: Callable[..., Path]) -> None:
    path = write(text)
    (problem,) = check([path])
    assert not problem.is_error
    assert str(problem).startswith(f"pins.yaml:{words}")
    load_pins([path], strict=True)  # and no error


@pytest.mark.parametrize(
    "text",
    [
        "  - {avoid: eager}\n  - {when: {heads: 8}, use: blocked}",
        "  - {use: eager}\n  - {when: {heads: 8}, avoid: blocked}",
        "  - {when: {features: [gqa, lse]}, use: eager}\n  - {when: {features: [gqa]}, use: blocked}",
        "  - {when: {batch: '4..8'}, use: eager}\n  - {when: {batch: '4..9'}, use: blocked}",
    ],
)
def test_a_pin_that_can_decide_is_not_complained_of(text: str, write: Callable[..., Path]) -> None:
    assert check([write(P + text)]) == []


STRANGE = "torch here knows no device type"
BAD_HERE = "schema: 1\nknown_bad:\n  - {id: a, backend: eager, why: b, link: 'https://c', "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema: 1\nhardware: {device: npv}\ntuned: []", f"2:20: hardware.device: {STRANGE} 'npv'"),
        (
            P + "  - {when: {device: [cpu, cdua]}, use: eager}",
            f"3:27: when.device: {STRANGE} 'cdua'; did you mean 'cuda'?",
        ),
        (BAD_HERE + "hardware: {device: npv}}", f"3:75: hardware.device: {STRANGE} 'npv'"),
        (BAD_HERE + "when: {device: npv}}", f"3:71: when.device: {STRANGE} 'npv'"),
    ],
)
def test_a_device_type_that_torch_does_not_know_here_is_taken_with_a_warning(
    text: str, words: str, write: Callable[..., Path]
) -> None:
    """A vendor's torch has types of its own: the list was closed, so nobody could pin, lock or bar anything on them."""
    path = write(text)
    (problem,) = check([path])
    assert not problem.is_error
    assert str(problem).startswith(f"pins.yaml:{words}")
    with pytest.warns(ConfigWarning, match=re.escape(words)):
        load_pins([path], strict=True)


@pytest.mark.parametrize("kind", ["xpu", "ipu", "privateuseone"])
def test_a_device_type_that_torch_knows_needs_no_warning(kind: str, write: Callable[..., Path]) -> None:
    path = write(f"schema: 1\nhardware: {{device: {kind}}}\npins:\n  - use: eager")
    assert check([path]) == []
    assert load_pins([path], strict=True).files[0].skipped == f"it is for {kind}, and there is none here"


def test_pins_for_an_accelerator_hold_where_torch_has_it(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("xpu"))
    monkeypatch.setattr(torch.xpu, "get_device_name", lambda: "A Vendor's 1")
    device._facts.cache_clear()
    try:
        pins = load_pins([write("schema: 1\nhardware: {device: xpu, name: 'a vendor*'}\npins:\n  - use: eager")])
        other = load_pins([write("schema: 1\nhardware: {device: hpu}\npins:\n  - use: eager")])
    finally:
        monkeypatch.undo()
        device._facts.cache_clear()
    assert (pins.files[0].skipped, len(pins.pins)) == ("", 1)
    assert other.files[0].skipped == "it is for hpu, and there is none here"


def test_a_name_in_a_file_for_another_machine_is_only_a_warning(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, NONE)
    path = write("schema: 1\nhardware: {device: cuda}\npins:\n  - use: flash_attn_9")
    assert [problem.is_error for problem in check([path])] == [False]
    load_pins([path], strict=True)
    machine(monkeypatch, H200)
    assert [problem.is_error for problem in check([path])] == [True]


# --- options of backends ---------------------------------------------------------------------------------------------


class Wall(Backend):
    """A backend with an option of each type."""

    name = "wall"
    capabilities = (Capability(frozenset({"cpu"}), frozenset({"float32"}), frozenset({"weight:Softmax"})),)
    options = MappingProxyType({"tile": 64, "fast": False})


class Wide(Wall):
    name = "wide"
    options = MappingProxyType({"rate": 1.0, "mode": "auto"})


def with_backend(*backends: Backend) -> registry.Registry:
    here = registry.current()
    return replace(here, backends={**here.backends, **{backend.name: backend for backend in backends}})


def optioned(text: str) -> str:
    return f"schema: 1\nbackends:\n  {text}\npins:\n  - use: eager"


OPTIONS = {
    "unknown": (
        "wall: {tle: 1}",
        "3:10: backends.wall.tle: there is no option 'tle'; did you mean 'tile'? There are: tile, fast",
    ),
    "like nothing": (
        "wall: {warp: 1}",
        "3:10: backends.wall.warp: there is no option 'warp'. There are: tile, fast",
    ),
    "text for a whole number": ("wall: {tile: '32'}", "3:16: backends.wall.tile: a whole number is wanted, got '32'"),
    "a number for a whole one": ("wall: {tile: 2.50}", "3:16: backends.wall.tile: a whole number is wanted, got 2.50"),
    "a boolean for a whole number": (
        "wall: {tile: true}",
        "3:16: backends.wall.tile: a whole number is wanted, got true",
    ),
    "a number for a boolean": ("wall: {fast: 1}", "3:16: backends.wall.fast: true or false is wanted, got 1"),
    "Norway": ("wall: {fast: no}", "3:16: backends.wall.fast: true or false is wanted, got 'no'"),
    "text for a number": ("wide: {rate: fast}", "3:16: backends.wide.rate: a number is wanted, got 'fast'"),
    "a boolean for a number": ("wide: {rate: true}", "3:16: backends.wide.rate: a number is wanted, got true"),
    "a number for text": (
        "wide: {mode: 2.10}",
        '3:16: backends.wide.mode: 2.10 is read as a number, and text is wanted: quote it, "2.10"',
    ),
    "a date for text": (
        "wide: {mode: 2026-01-02}",
        "3:16: backends.wide.mode: 2026-01-02 is read as a date, and text is wanted: quote it",
    ),
    "a list": ("wall: {tile: [32]}", "3:16: backends.wall.tile: a whole number is wanted, got a list"),
    "a mapping for text": ("wide: {mode: {a: 1}}", "3:16: backends.wide.mode: text is wanted, got a mapping"),
    "nothing": ("wall: {tile: }", "backends.wall.tile: it has no value: leave the key out"),
    "backend": ("wal: {tile: 32}", "3:3: backends.wal: there is no backend 'wal'; did you mean 'wall'?"),
    "rewrite": (
        "fold_groups: {tile: 32}",
        "3:3: backends.fold_groups: 'fold_groups' is a rewrite, and only backends have options",
    ),
    "no options": ("eager: {tile: 32}", "3:11: backends.eager.tile: eager has no options"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_option_is_an_error_of_check_and_a_warning_of_a_call_and_the_rest_counts(
    name: str, write: Callable[..., Path]
) -> None:
    text, words = OPTIONS[name]
    here = with_backend(Wall(), Wide())
    path = write(optioned(text))
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_pins([path], here, strict=True)
    (problem,) = check([path], here)
    assert problem.is_error
    assert words in str(problem)
    with pytest.warns(ConfigWarning, match=f"{re.escape(words)}.*It is ignored"):
        pins = load_pins([path], here)
    assert pins.options == {}
    assert names(pins, an_op()) == ("eager",)


def test_options_are_taken_by_type_and_a_wrong_one_leaves_the_others(write: Callable[..., Path]) -> None:
    here = with_backend(Wall(), Wide())
    text = "wall: {tile: 32, fast: true, tle: 1}\n  wide:\n    rate: 2\n    mode: no"
    with pytest.warns(ConfigWarning, match="tle"):
        options = load_pins([write(optioned(text))], here).options
    assert options == {"wall": {"tile": 32, "fast": True}, "wide": {"rate": 2.0, "mode": "no"}}
    assert type(options["wide"]["rate"]) is float


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("backends: [wall]", "2:11: backends: a mapping is wanted, got list"),
        ("backends: {wall: 32}", "2:18: backends.wall: a mapping is wanted, got 32"),
        ("backends: {wall: {tile: 1, tile: 2}}", "2:28: key 'tile' stands twice"),
    ],
)
def test_options_of_a_wrong_form_break_the_file(text: str, words: str, write: Callable[..., Path]) -> None:
    (problem,) = parse(write(f"schema: 1\n{text}")).errors
    assert words in str(problem)


@pytest.mark.parametrize("text", ["backends:", "backends:\n  wall:\n  # tile: 32"])
def test_options_that_are_all_commented_out_are_none(text: str, write: Callable[..., Path]) -> None:
    assert load_pins([write(f"schema: 1\n{text}")], with_backend(Wall()), strict=True).options == {}


def test_files_merge_option_by_option_and_the_stronger_wins(write: Callable[..., Path]) -> None:
    one, two = (
        write(optioned("wall: {tile: 1}"), "one.yaml"),
        write(optioned("wall: {tile: 2, fast: true}"), "two.yaml"),
    )
    here = with_backend(Wall())
    assert load_pins([one, two], here).options == {"wall": {"tile": 1, "fast": True}}
    assert load_pins([two, one], here).options == {"wall": {"tile": 2, "fast": True}}


def test_options_of_a_file_for_another_machine_do_not_hold_and_are_at_most_doubtful(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, NONE)
    text = optioned("wall: {tile: 32, tle: 1}\n  wal: {}").replace("backends", "hardware: {device: cuda}\nbackends", 1)
    path, here = write(text), with_backend(Wall())
    assert load_pins([path], here, strict=True).options == {}
    assert [problem.is_error for problem in check([path], here)] == [False, False]
    machine(monkeypatch, H200)
    with pytest.warns(ConfigWarning, match="wal"):
        assert load_pins([path], here).options == {"wall": {"tile": 32}}
    assert [problem.is_error for problem in check([path], here)] == [True, True]


def test_the_command_names_wrong_options_in_the_order_of_the_lines(write: Callable[..., Path]) -> None:
    text = write("schema: 1\npins:\n  - use: eagre\nbackends:\n  eager: {tile: 32}\n")
    result = run("check", str(text))
    assert isinstance(result.exception, ConfigError)
    lines = str(result.exception).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["pins.yaml:3:10", "pins.yaml:5:11"]
    assert "backends.eager.tile: eager has no options" in lines[1]


# --- a call ----------------------------------------------------------------------------------------------------------


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4, 8)


def test_a_call_follows_a_pin(write: Callable[..., Path], in_force: Callable[..., None]) -> None:
    q, k = tensors()
    in_force(write(P + "  - {when: {heads: 2}, use: blocked}\n  - {use: eager}"))
    assert dispatch.plan(q, k, k).decision.chosen.backend.name == "blocked"
    assert dispatch.plan(q, k, k).decision.source == "pin pins.yaml:3"
    assert dispatch.plan(q[:, :1], k[:, :1], k[:, :1]).name == "eager"


def test_a_call_obeys_avoid(write: Callable[..., Path], in_force: Callable[..., None]) -> None:
    q, k = tensors()
    free = dispatch.plan(q, k, k).decision.chosen.backend.name
    in_force(write(f"{P}  - {{avoid: {free}}}"))
    assert dispatch.plan(q, k, k).decision.chosen.backend.name != free


def test_a_call_survives_a_broken_file_with_one_warning(
    write: Callable[..., Path], in_force: Callable[..., None]
) -> None:
    q, k = tensors()
    in_force(write("schema: 1\npins: [", "broken.yaml"), write(P + "  - use: eager"))
    with pytest.warns(ConfigWarning, match=r"broken\.yaml:2:8: this is not YAML") as said:  # noqa: PT031 - one for both
        assert dispatch.plan(q, k, k).name == "eager"
        dispatch.plan(q[..., :4], k[..., :4], k[..., :4])
    assert len([w for w in said if issubclass(w.category, ConfigWarning)]) == 1


def test_a_required_pin_raises_for_a_stranger_and_for_what_cannot_run(
    write: Callable[..., Path], in_force: Callable[..., None]
) -> None:
    q, k = tensors()
    in_force(write(P + "  - {use: flash_attn_9, mode: require}"))
    with pytest.warns(ConfigWarning, match="flash_attn_9"), pytest.raises(UnknownBackendError, match="flash_attn_9"):
        dispatch.plan(q, k, k)
    in_force(write(P + "  - {use: sdpa_cudnn, mode: require}"))
    with pytest.raises(NoBackendError, match=r"asked for by pin pins\.yaml:3"):
        dispatch.plan(q, k, k)


def test_the_environment_may_not_name_a_file_that_is_not_there(tmp_path: Path, in_force: Callable[..., None]) -> None:
    in_force(tmp_path / "typo.yaml")
    with pytest.warns(ConfigWarning, match=r"typo\.yaml:1:1: the file cannot be read: No such file"):
        assert current_pins().pins == ()


def test_without_files_a_call_imports_neither_yaml_nor_pydantic(tmp_path: Path) -> None:
    code = (
        "import sys, torch, platformdirs; before = set(sys.modules)\n"
        "from pathlib import Path\n"
        "from attn_dispatch import settings as s\n"
        "s._shipped_folder = lambda: Path('nowhere')\n"
        "from attn_dispatch.selection.pins import current_pins\n"
        "assert current_pins().files == ()\n"
        "print({'pydantic', 'attn_dispatch.selection.pin_files'} & (set(sys.modules) - before))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120, check=True
    )
    assert done.stdout.strip() == "set()"


# --- schema and page -------------------------------------------------------------------------------------------------


def test_the_json_schema_is_the_golden_one_and_describes_every_key() -> None:
    text = CliRunner().invoke(app, ["schema"]).stdout
    path = GOLDEN / "pins_schema.json"
    if not path.exists():
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path} was missing; it was written, read it and run again")
    assert text == path.read_text(encoding="utf-8"), f"to accept the new text delete {path} and run again"
    schema = json.loads(text)
    assert schema == json_schema()
    assert list(schema["properties"]) == [
        *("schema", "hardware", "pins", "backends", "tuned", "known_bad", "allow_known_bad", "measured")
    ]
    assert schema["required"] == ["schema"]
    for model in (schema, *schema["$defs"].values()):
        assert model["description"]
        assert model["additionalProperties"] == (model["title"] == "Measured")
        assert all(prop.get("description") for prop in model["properties"].values()), model["title"]
    assert "causal" in json.dumps(schema["$defs"]["WhenModel"]["properties"]["mask"])


def test_the_page_has_every_key_as_the_model_describes_it() -> None:
    page = DOCS.read_text(encoding="utf-8")
    section = page[page.index("## `when`") : page.index("## `tuned`")]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M)
    assert rows == [(name, f.description) for name, f in WhenModel.model_fields.items()]


EXAMPLES = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


def test_the_page_has_examples_and_shows_how_an_editor_is_told() -> None:
    assert len(EXAMPLES) >= 3
    assert EXAMPLES[0].startswith("# yaml-language-server: $schema=")


@pytest.mark.parametrize("text", EXAMPLES)
def test_the_examples_of_the_page_are_right(text: str, write: Callable[..., Path]) -> None:
    assert check([write(text)], with_backend(Wall())) == []


def test_the_messages_on_the_page_are_what_is_said() -> None:
    page = DOCS.read_text(encoding="utf-8")
    section = page[page.index("## When something is wrong") :]
    said = "\n".join(words for table in (BAD, NAMES, OPTIONS) for _, words in table.values())
    rows = re.findall(r"^\| .* \| `(.*)` \|$", section, re.M)
    assert len(rows) >= 6
    for row in rows:
        start = row.split("line")[0].split("a.yaml")[0]
        assert start in said or row in said or "never decides" in row or "wins over" in row, row


# --- commands --------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def workload(tmp_path: Path, *ops: tuple[AttentionOp, str]) -> Path:
    entries = [{"layer": layer, "phase": op.phase, "count": 1, "op": op.to_dict()} for op, layer in ops]
    path = tmp_path / "workload.yaml"
    path.write_text(yaml.safe_dump({"schema": 1, "ops": entries}))
    return path


def test_check_prints_warnings_and_raises_for_errors(write: Callable[..., Path], tmp_path: Path) -> None:
    good = write(P + "  - {when: {heads: 8}, use: eager}\n  - {when: {heads: 3}, use: eager}")
    result = run("check", str(good))
    assert (result.exit_code, result.stdout) == (0, "1 file checked, no warnings\n")
    result = run("check", str(good), "--workload", str(workload(tmp_path, (an_op(), "a"))))
    assert result.exit_code == 0
    assert result.stdout.startswith("warning  pins.yaml:4:5: this pin matches none of the workload's 1 ops: heads 3\n")
    bad = write(P + "  - use: eagre", "bad.yaml")
    result = run("check", str(good), str(bad))
    assert isinstance(result.exception, ConfigError)
    assert "bad.yaml:3:10: use: there is no backend 'eagre'" in str(result.exception)


def test_check_says_when_a_layer_has_the_name_that_a_pin_asks_for(write: Callable[..., Path], tmp_path: Path) -> None:
    """`capture(model)` wrote names that a workload approved and that no call had at run time."""
    path = write(P + "  - {when: {heads: 8}, use: eager}\n  - {when: {layers: model.layers.0.self_attn}, use: eager}")
    captured = workload(tmp_path, (an_op(), "model.layers.0.self_attn"))
    result = run("check", str(path), "--workload", str(captured))
    assert result.exit_code == 0
    note, last = result.stdout.splitlines()
    assert note.startswith("note     pins.yaml:4: layers matches model.layers.0.self_attn")
    for word in ("with name_layers(model):", "attn_dispatch.integrations.layers", "LlamaAttention.0", "capture(model)"):
        assert word in note
        assert word in DOCS.read_text(encoding="utf-8") or word == "LlamaAttention.0"
    assert last == "1 file checked, no warnings"
    assert "note" not in run("check", str(write(P + "  - {use: eager}"))).stdout


def test_check_without_files_checks_those_of_the_search(
    write: Callable[..., Path], in_force: Callable[..., None]
) -> None:
    in_force(write("schema: 9"))
    assert "pins.yaml:1:9: schema: 9 is of a later" in str(run("check").exception)


@pytest.mark.parametrize("text", ["- 1", "ops: 3", "ops: [{}]", "ops: [{op: {query: 1}}]", "a: b: c"])
def test_a_workload_that_is_none_is_named(text: str, write: Callable[..., Path]) -> None:
    path = write(text)
    with pytest.raises(InputError, match=re.escape(f"{path}: ")):
        read_workload(path)


def test_a_captured_workload_is_read_back(tmp_path: Path) -> None:
    q, k = tensors()
    with dispatch.capture() as captured:
        dispatch.attention(q, k, k, is_causal=True)
    captured.save(tmp_path / "w.yaml")
    assert [op for op, _ in read_workload(tmp_path / "w.yaml")] == [entry.op for entry in captured]


def test_show_lists_what_holds_and_what_is_skipped(
    write: Callable[..., Path], in_force: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, NONE)
    in_force(
        write("schema: 1\nhardware: {device: cuda, name: NVIDIA H200}\npins:\n  - use: eager", "h200.yaml"),
        write(P + "  - {when: {phase: decode}, use: [blokced, eager], avoid: sdpa_math}", "mine.yaml"),
        write("schema: 2", "new.yaml"),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what show prints it need not warn of
        result = run("show")
    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    assert lines[1] == "    1  prefer eager; avoid sdpa_math   when phase decode   mine.yaml:3"
    assert lines[2].strip() == "ignored: nobody registered blokced"
    assert "  h200.yaml   skipped: it is for cuda, and there is none here" in lines
    assert "  mine.yaml   1 pins, 0 tuned" in lines
    assert any(line.startswith("  new.yaml   skipped: broken: new.yaml:1:9: ") for line in lines)
    found = json.loads(run("show", "--json").stdout)
    assert found["pins"][0]["where"] == "mine.yaml:3"
    assert [bool(file["skipped"]) for file in found["files"]] == [True, False, True]


def test_show_says_that_there_is_nothing(in_force: Callable[..., None], write: Callable[..., Path]) -> None:
    in_force(write("schema: 1"))
    assert "  none" in run("show").stdout.splitlines()


def test_show_lists_the_options_of_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_dispatch.selection.pins.current_pins", lambda: Pins(options={"wall": {"tile": 32}}))
    lines = run("show").stdout.splitlines()
    assert lines[lines.index("options of backends") + 1] == "  wall.tile = 32"
    assert json.loads(run("show", "--json").stdout)["backends"] == {"wall": {"tile": 32}}


def tuned(winner: str, times: dict[str, float], op: AttentionOp | None = None) -> str:
    entry = {"op": (op or an_op()).to_dict(), "use": [winner], "medians_us": times}
    return yaml.safe_dump({"schema": 1, "tuned": [entry]})


def test_diff_tells_what_only_one_has_and_what_changed(write: Callable[..., Path]) -> None:
    a = write(P + "  - {when: {heads: 1}, use: eager}\n  - {when: {heads: 2}, use: eager}", "a.yaml")
    b = write(P + "  - {when: {heads: 3}, use: eager}\n  - {when: {heads: 2}, use: eager, mode: require}", "b.yaml")
    result = run("diff", str(a), str(b))
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "only in A       pin: heads 1",
        "  A  prefer eager   a.yaml:3",
        "only in B       pin: heads 3",
        "  B  prefer eager   b.yaml:3",
        "changed         pin: heads 2",
        "  A  prefer eager   a.yaml:4",
        "  B  require eager   b.yaml:4",
    ]
    same = run("diff", str(a), str(a))
    assert (same.exit_code, same.stdout) == (0, "no difference\n")


def test_diff_shows_a_changed_winner_with_both_times(write: Callable[..., Path]) -> None:
    a = write(tuned("sdpa_flash", {"sdpa_flash": 10.0, "eager": 20.0}), "a.yaml")
    b = write(tuned("eager", {"sdpa_flash": 30.0, "eager": 21.0}), "b.yaml")
    (found,) = differences(a, b)
    assert found.kind == "changed winner"
    assert found.a == "sdpa_flash   (sdpa_flash 10.0 us, eager 20.0 us)   a.yaml:3"
    assert found.b == "eager   (sdpa_flash 30.0 us, eager 21.0 us)   b.yaml:3"
    slower = write(tuned("sdpa_flash", {"sdpa_flash": 11.0}), "c.yaml")
    assert differences(a, slower) == []
    other = write(tuned("eager", {}, an_op(b=3)), "d.yaml")
    assert [difference.kind for difference in differences(a, other)] == ["only in A", "only in B"]


def test_diff_sees_another_order(write: Callable[..., Path]) -> None:
    one, two = "  - {when: {heads: 1}, use: eager}\n", "  - {when: {batch: 1}, use: blocked}\n"
    a, b = write(P + one + two, "a.yaml"), write(P + two + one, "b.yaml")
    assert [difference.kind for difference in differences(a, b)] == ["other order"]


def test_diff_tells_of_options_of_backends(write: Callable[..., Path]) -> None:
    a = write("schema: 1\nbackends: {vendor: {tile: 32, fast: true}, other: {x: 1}}", "a.yaml")
    b = write("schema: 1\nbackends: {vendor: {tile: 64, fast: true, deep: 2}}", "b.yaml")
    assert [str(difference) for difference in differences(a, b)] == [
        "changed         option: vendor.tile\n  A  32\n  B  64",
        "only in A       option: other.x\n  A  1",
        "only in B       option: vendor.deep\n  B  2",
    ]
    assert differences(a, a) == []


def test_diff_of_a_broken_file_raises(write: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"b\.yaml:1:9"):
        differences(write("schema: 1", "a.yaml"), write("schema: 2", "b.yaml"))


def test_tuned_entries_come_with_their_place(write: Callable[..., Path]) -> None:
    pins = load_pins([write(tuned("eager", {"eager": 1.5}))], strict=True)
    (entry,) = pins.tuned
    assert entry["where"] == "pins.yaml:3"
    assert AttentionOp.from_dict(entry["op"]) == an_op()


BAD_OPS = {
    "nothing": ({}, "'query' is missing"),
    "an unknown key": ({"colour": 1}, "an op has no colour"),
    "a mask that is none": ({"mask": "Diagonal()"}, "Diagonal"),
    "sizes that do not fit": ({"key": {"shape": [1, 1, 4, 9], "dtype": "float32"}}, "not a valid op"),
    "a shape that is none": ({"query": {"shape": "wide", "dtype": "float32"}}, "it is no op"),
}


@pytest.mark.parametrize("kind", BAD_OPS)
def test_a_tuned_entry_whose_op_is_none_is_named_with_its_line(kind: str, write: Callable[..., Path]) -> None:
    """It passed the check, and the first call that looked at the file died of it."""
    change, words = BAD_OPS[kind]
    op = {**an_op().to_dict(), **change} if change else {}
    text = "schema: 1\ntuned:\n  - use: [eager]\n    op: " + json.dumps(op) + "\n"
    with pytest.raises(ConfigError, match=r"pins\.yaml:4:.*tuned.op: it is no op.*") as caught:
        load_pins([write(text)], strict=True)
    assert words in str(caught.value)


def test_what_a_tuned_entry_leaves_out_has_its_default_and_another_spelling_of_a_chain_is_read(
    write: Callable[..., Path],
) -> None:
    """The entry went on as it was written, not as it was understood."""
    entry = {"op": an_op().to_dict(), "use": ["fold_groups>eager"]}
    (found,) = load_pins([write(yaml.safe_dump({"schema": 1, "tuned": [entry]}))], strict=True).tuned
    assert found["use"] == ["fold_groups > eager"]
    assert (found["medians_us"], found["versions"], found["why"]) == ({}, {}, "")


def test_a_home_that_may_not_be_entered_has_no_pins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As root every folder may be entered, so the refusal is made here."""
    real = os.stat

    def refused(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).endswith("attn_dispatch.yaml"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **options)

    monkeypatch.delenv("ATTN_DISPATCH_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    settings.cache_clear()
    monkeypatch.setattr(os, "stat", refused)
    try:
        assert settings().config_files == settings().shipped
    finally:
        monkeypatch.undo()
        settings.cache_clear()
