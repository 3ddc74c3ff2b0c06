"""`capture`: layers, counts, and the workload file: what is written is read back, and what is wrong is named."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import nn
from torch.utils.checkpoint import checkpoint

from attn_dispatch import dispatch, masks
from attn_dispatch.capture import Workload, capture
from attn_dispatch.errors import InputError


class Attention(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16)
        self.causal = causal
        self.attend: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.project(x)[:, None]
        attend = self.attend or F.scaled_dot_product_attention
        return attend(q, q, q, is_causal=self.causal)[:, 0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention(causal=True)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(self.norm(x))


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.pool = Attention()
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.pool(x)


def layers(workload: Workload) -> dict[str, int]:
    return {entry.layer: entry.count for entry in workload}


WANTED = {"layers.0.attn": 1, "layers.1.attn": 1, "pool": 1}


@pytest.mark.parametrize("named", [True, False], ids=["model given", "no model"])
def test_layers_are_the_modules_whose_forward_runs(named):
    model = Model()
    with torch.no_grad(), dispatch.replace_sdpa(), capture(model if named else None) as workload:
        model(torch.randn(2, 5, 16))
    assert layers(workload) == WANTED


def test_a_part_of_a_given_model_keeps_the_name_that_the_model_has_for_it():
    model = Model()
    with dispatch.replace_sdpa(), capture(model) as workload:
        model.layers[1](torch.randn(1, 5, 16))
    assert list(layers(workload)) == ["layers.1.attn"]


def test_a_module_that_is_the_whole_model_goes_by_its_class():
    with dispatch.replace_sdpa(), capture() as workload:
        Attention()(torch.randn(1, 5, 16))
    assert list(layers(workload)) == ["Attention"]


def test_outside_every_module_there_is_no_layer():
    x = torch.randn(1, 2, 5, 16)
    with capture() as workload:
        Model()
        dispatch.attention(x, x, x)
    assert list(layers(workload)) == [""]


def test_training_records_gradients_and_checkpointing_counts_the_second_forward():
    plain, again = Model(), Model(recompute=True)
    with dispatch.replace_sdpa(), capture() as first:
        plain(torch.randn(2, 5, 16)).sum().backward()
    for module in again.modules():
        module.attend = dispatch.attention
    with capture() as second:
        again(torch.randn(2, 5, 16)).sum().backward()
    assert layers(first) == WANTED
    assert all(entry.op.grad == ("query", "key", "value") for entry in first)
    assert layers(second) == {"layers.0.attn": 2, "layers.1.attn": 2, "pool": 1}


def _hooks() -> int:
    from torch.nn.modules import module

    return len(module._global_forward_pre_hooks) + len(module._global_forward_hooks)


def test_hooks_go_when_the_model_raises_and_later_names_are_right():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner(x)
            raise RuntimeError("no")

    before = _hooks()
    with pytest.raises(RuntimeError, match="no"), dispatch.replace_sdpa(), capture():
        Broken()(torch.randn(1, 5, 16))
    assert _hooks() == before
    model = Model()
    with dispatch.replace_sdpa(), capture() as workload:
        with pytest.raises(RuntimeError):
            Broken()(torch.randn(1, 5, 16))
        model.pool(torch.randn(1, 5, 16))
    assert list(layers(workload))[-1] == "Attention"  # the stack was left, though a forward raised


def test_an_inner_capture_takes_over_and_hands_back():
    model, x = Model(), torch.randn(1, 5, 16)
    with dispatch.replace_sdpa(), capture() as outer:
        model.layers[0](x)
        with capture(model) as inner:
            model(x)
        model.layers[0](x)
    assert layers(inner) == WANTED
    assert layers(outer) == {"attn": 2}


def test_another_thread_is_not_recorded_and_does_not_disturb_the_names():
    model, other = Model(), Model()
    stop = threading.Event()

    def work() -> None:
        with dispatch.replace_sdpa(), torch.no_grad():
            while not stop.is_set():
                other(torch.randn(1, 7, 16))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with torch.no_grad(), dispatch.replace_sdpa(), capture() as workload:
            for _ in range(20):
                model(torch.randn(2, 5, 16))
    finally:
        stop.set()
        thread.join()
    assert layers(workload) == dict.fromkeys(WANTED, 20)


def test_a_compiled_graph_is_recorded_under_the_module_around_it():
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Explicit()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.run(x)

    class Explicit(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return dispatch.attention(x, x, x, window=(1, 0))

    model = Around()
    model.run = torch.compile(model.inside.forward, backend="eager")
    with torch.no_grad(), capture() as workload:
        model(torch.randn(1, 2, 5, 16))
        model(torch.randn(1, 2, 5, 16))
    assert layers(workload) == {"Around": 2}


def test_an_integrations_layer_wins():
    from attn_dispatch.capture import current_layer

    model = Model()
    token = current_layer.set("model.layers.7.self_attn")
    try:
        with dispatch.replace_sdpa(), capture() as workload:
            model.pool(torch.randn(1, 5, 16))
    finally:
        current_layer.reset(token)
    assert list(layers(workload)) == ["model.layers.7.self_attn"]


# --- the workload ----------------------------------------------------------------------------------------------------


def recorded() -> Workload:
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    with dispatch.replace_sdpa(), capture() as workload:
        Model()(torch.randn(2, 5, 16))
        dispatch.attention(
            q, k, k, masks.causal() & masks.key_lengths([6, 2]), enable_gqa=True, softcap=3.0, sinks=torch.zeros(4)
        )
        dispatch.attention(q, q, q, bias=torch.zeros(4, 6, 6)[None], return_lse=True)
        dispatch.attention(q[:, :, :1], q, q)
    return workload


def test_a_workload_is_read_back_as_it_was(tmp_path):
    workload = recorded()
    workload.model = "a model: of two layers"
    path = tmp_path / "w.yaml"
    workload.save(path)
    again = Workload.load(path)
    assert again == workload
    assert [(e.op, e.layer, e.phase, e.count) for e in again] == [(e.op, e.layer, e.phase, e.count) for e in workload]
    assert set(again.captured) == {"when", "torch", "by"} | ({"transformers"} & set(again.captured))
    other = tmp_path / "again.yaml"
    again.save(other)
    assert other.read_bytes() == path.read_bytes()
    recorded_anew = recorded()
    recorded_anew.model, recorded_anew.captured = workload.model, again.captured
    recorded_anew.save(other)
    assert other.read_bytes() == path.read_bytes(), "the same run gives the same bytes"


def test_a_workload_file_holds_no_data(tmp_path):
    path = tmp_path / "w.yaml"
    secret = torch.full((2,), 4242, dtype=torch.int64).clamp(max=6)
    x = torch.full((2, 1, 6, 8), 0.123456)
    with capture() as workload:
        dispatch.attention(x, x, x, key_lengths=secret)
        dispatch.attention(x, x, x, masks.documents([0, 4, 6]))
    workload.save(path)
    text = path.read_text()
    assert "0.123456" not in text
    assert "KeyLengths(key_lengths)" in text
    assert "Segments(mask0, mask0)" in text


def test_ops_are_distinct_with_total_counts_and_all_layers():
    model = Model()
    with torch.no_grad(), dispatch.replace_sdpa(), capture() as workload:
        model(torch.randn(2, 5, 16))
        model(torch.randn(2, 5, 16))
        model(torch.randn(3, 5, 16))
    assert len(workload) == 6
    assert [(use.op.B, use.count, use.layers) for use in workload.ops()] == [
        (2, 4, ("layers.0.attn", "layers.1.attn")),
        (2, 2, ("pool",)),
        (3, 2, ("layers.0.attn", "layers.1.attn")),
        (3, 1, ("pool",)),
    ]


def test_two_spellings_of_one_op_are_one_op():
    x = torch.randn(1, 2, 5, 16)
    with capture() as workload:
        dispatch.attention(x, x, x)
    data = workload.to_dict()
    data["ops"].append(copy.deepcopy(data["ops"][0]))
    data["ops"][1]["op"].pop("scale")  # the default, not written out
    (use,) = Workload.from_dict(data).ops()
    assert use.count == 2


def _set(*path: Any, to: Any) -> Any:
    def change(data: dict[str, Any]) -> None:
        for step in path[:-1]:
            data = data[step]
        data[path[-1]] = to

    return change


def _drop(*path: Any) -> Any:
    def change(data: dict[str, Any]) -> None:
        for step in path[:-1]:
            data = data[step]
        del data[path[-1]]

    return change


WRONG = {
    "no schema": (_drop("schema"), "w.yaml: schema is missing"),
    "future schema": (_set("schema", to=2), "w.yaml: schema is 2, this version reads 1"),
    "schema true": (_set("schema", to=True), "w.yaml: schema is True"),
    "no ops": (_drop("ops"), "w.yaml: ops is missing"),
    "ops is a mapping": (_set("ops", to={}), "w.yaml: ops must be a list of entries, got dict"),
    "unknown key": (_set("pins", to=[]), "w.yaml: unknown key 'pins'"),
    "entry is text": (_set("ops", 1, to="x"), "w.yaml: ops[1]: must be a mapping, got str"),
    "unknown entry key": (_set("ops", 1, "layers", to="x"), "w.yaml: ops[1]: unknown key 'layers'"),
    "no count": (_drop("ops", 0, "count"), "w.yaml: ops[0]: count is missing"),
    "count 0": (_set("ops", 0, "count", to=0), "w.yaml: ops[0]: count must be a whole number from 1 on, got 0"),
    "layer a number": (_set("ops", 0, "layer", to=3), "w.yaml: ops[0]: layer must be text, got int 3"),
    "wrong phase": (_set("ops", 0, "phase", to="decode"), "w.yaml: ops[0]: phase is 'decode', its op is 'prefill'"),
    "unknown op key": (_set("ops", 0, "op", "colour", to=1), "w.yaml: ops[0]: op: not an op: an op has no colour"),
    "unknown desc key": (
        _set("ops", 0, "op", "query", "dtpye", to=1),
        "w.yaml: ops[0]: op: query: unknown key 'dtpye'",
    ),
    "no dtype": (_drop("ops", 0, "op", "key", "dtype"), "w.yaml: ops[0]: op: key: dtype is missing"),
    "dtype": (_set("ops", 0, "op", "key", "dtype", to="float33"), "w.yaml: ops[0]: op: key: dtype 'float33' is none"),
    "shape": (_set("ops", 0, "op", "value", "shape", to=[1, -2]), "w.yaml: ops[0]: op: value: shape must be a list"),
    "rank": (_set("ops", 0, "op", "value", "shape", to=[1, 2]), "w.yaml: ops[0]: op: not an op: not a valid op"),
    "mask": (_set("ops", 0, "op", "mask", to="Casual"), "w.yaml: ops[0]: op: not an op: not a mask: 'Casual'"),
    "operand": (_set("ops", 0, "op", "mask", to="KeyLengths(n)"), "operands ['n'] are described"),
    "operand key": (
        _set("ops", 0, "op", "operands", to={"n": {"shape": [1], "dtype": "int64", "x": 1}}),
        "w.yaml: ops[0]: op: operands: n: unknown key 'x'",
    ),
    "score": (_set("ops", 0, "op", "score", to=["Cap(3)"]), "w.yaml: ops[0]: op: not an op: no 'Cap' here"),
    "weight": (_set("ops", 0, "op", "weight", to={"kind": "Softmax", "sink": 1}), "w.yaml: ops[0]: op: not an op"),
    "outputs": (_set("ops", 0, "op", "outputs", to={"lse": True, "x": 1}), "w.yaml: ops[0]: op: not an op"),
    "repeated": (lambda data: data["ops"].append(data["ops"][0]), "repeats ops[0]: the same op of the same layer"),
    "captured": (_set("captured", to="today"), "w.yaml: captured: must be a mapping, got str"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_named_with_entry_and_key(tmp_path: Path, name: str) -> None:
    change, words = WRONG[name]
    data = copy.deepcopy(recorded().to_dict())
    change(data)
    path = tmp_path / "w.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    with pytest.raises(InputError) as stopped:
        Workload.load(path)
    assert words in str(stopped.value).replace(str(tmp_path) + "/", "")
    assert str(path) in str(stopped.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "not YAML"),
        ('a: "\\U00110000"', "not YAML"),
        ("", "must be a mapping, got nothing"),
        ("- 1", "got list"),
    ],
)
def test_a_file_that_is_no_workload_is_named(tmp_path, text, words):
    path = tmp_path / "w.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        Workload.load(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nowhere\.yaml: No such file"):
        Workload.load(tmp_path / "nowhere.yaml")
