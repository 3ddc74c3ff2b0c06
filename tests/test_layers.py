"""Pins by layer: the right layer gets its own kernel, warm calls too, and nobody pays for it without such pins."""

from __future__ import annotations

import pytest
import torch

from attn_dispatch import InputError, context, dispatch, registry
from attn_dispatch.integrations.layers import name_layers
from attn_dispatch.routes import routes
from attn_dispatch.selection.pins import Pin, Pins, When


class Block(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dispatch.attention(x, x, x)


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def pinned(monkeypatch):
    """``layers.1`` runs eager, everything else what the heuristic likes."""
    pins = Pins((Pin(When(layers=("layers.1",)), ("eager",), where="pins.yaml:3"),))
    registry.reset()
    monkeypatch.setattr("attn_dispatch.plan.current_pins", lambda: pins)
    yield
    registry.reset()
    context.layers_matter = False


def ran(model: torch.nn.Module, x: torch.Tensor, where: object = None) -> list[tuple[str, str]]:
    with dispatch.capture(where) as workload:
        model(x)
    return [(entry.layer, entry.candidate) for entry in workload]


def test_a_layer_gets_what_is_pinned_for_it(pinned):
    model, x = Decoder(), torch.randn(1, 2, 24, 8)
    with name_layers(model):
        unpinned = dispatch.plan(x, x, x).name  # outside every layer
        assert unpinned != "eager"
        assert ran(model, x) == [("layers.0", unpinned), ("layers.1", "eager")]


def test_warm_calls_of_two_layers_are_kept_apart(pinned, monkeypatch):
    model, x = Decoder(), torch.randn(1, 2, 24, 8)
    with name_layers(model):
        first = model(x)
        model(x)  # the pins are known now, and both layers have their routes
        kept = {options[-3] for options in routes.table}
        assert {c.layer for c in kept if c is not None} == {"layers.0", "layers.1"}
        assert torch.equal(model(x), first)
    eager = torch.nn.Sequential(*(Block() for _ in range(1)))
    with dispatch.use(backend="eager"):
        second = eager(Block()(x))
    assert torch.allclose(first, second, atol=1e-5)


def test_without_pins_by_layer_all_layers_share_a_route(monkeypatch):
    registry.reset()
    model, x = Decoder(), torch.randn(1, 2, 24, 8)
    with name_layers(model):
        model(x)
        model(x)
    assert not context.layers_matter
    assert [len(kept) for kept in routes.table.values()] == [1]
    registry.reset()


def test_names_go_when_the_hooks_do_and_when_a_layer_raises():
    model, x = Decoder(), torch.randn(1, 2, 24, 8)
    names = name_layers(model, "layers.*")
    with pytest.raises(InputError), names:
        model(torch.randn(3))
    assert context.current_layer.get() == ""
    assert [layer for layer, _ in ran(model, x)] == ["layers.0", "layers.1"]  # capture has names of its own


def test_transformers_layers_can_be_pinned_by_their_path(pinned, monkeypatch):
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, attn_implementation="attn_dispatch",
    )  # fmt: skip
    import attn_dispatch.integrations.transformers as integration

    integration.register()
    model = LlamaModel(config).eval()
    pins = Pins((Pin(When(layers=("layers.*.self_attn",)), ("eager",), where="pins.yaml:3"),))
    monkeypatch.setattr("attn_dispatch.plan.current_pins", lambda: pins)
    ids = torch.arange(12)[None]
    with torch.no_grad(), name_layers(model), dispatch.capture() as workload:
        model(ids)
    assert {(e.layer, e.candidate) for e in workload} == {(f"layers.{n}.self_attn", "eager") for n in (0, 1)}
    with torch.no_grad(), dispatch.capture(model) as workload:
        model(ids)
    assert [e.layer for e in workload] == ["layers.0.self_attn", "layers.1.self_attn"]
