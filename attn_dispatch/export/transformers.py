"""transformers models as `export_onnx` takes them: what goes in and out, and which sizes are dynamic."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["Exportable", "decoder", "encoder"]


class Exportable(NamedTuple):
    """A model with example inputs: ``export_onnx(**exportable._asdict(), path=...)``."""

    model: torch.nn.Module
    args: tuple[Any, ...]
    dynamic_shapes: Any = None
    input_names: list[str] | None = None
    output_names: list[str] | None = None
    kwargs: dict[str, Any] | None = None


def encoder(model: Any) -> Exportable:
    """A text encoder: ``input_ids [B, S], attention_mask [B, S] -> last_hidden_state [B, S, E]``, B and S dynamic.

    Args:
        model: from ``AutoModel.from_pretrained(..., attn_implementation="attn_dispatch")``.
    """
    ids = torch.arange(2 * 6).reshape(2, 6) % min(model.config.vocab_size, 100)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    shapes = {0: "batch", 1: "seq"}
    names = ["input_ids", "attention_mask"]
    return Exportable(_Encoder(model).eval(), (ids, mask), (shapes, shapes), names, ["last_hidden_state"])


def decoder(model: Any) -> Exportable:
    """A causal language model with a past: prefill and decode in one file.

    ``input_ids [B, S], attention_mask [B, P + S], past (key, value) [B, Hkv, P, D] per layer -> logits [B, S, V],
    present (key, value) [B, Hkv, P + S, D] per layer``; B, S and P are dynamic, P may be 0. Positions are counted
    over the real tokens of ``attention_mask``, so that a batch may be padded on the left.

    Args:
        model: from ``AutoModelForCausalLM.from_pretrained(..., attn_implementation="attn_dispatch")``.
    """
    config = model.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    layers = config.num_hidden_layers
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    batch, rows, past = 2, 3, 4
    ids = torch.arange(batch * rows).reshape(batch, rows) % min(config.vocab_size, 100)
    mask = torch.ones(batch, past + rows, dtype=torch.int64)
    angles = torch.arange(batch * heads * past * size, dtype=torch.float32).reshape(batch, heads, past, size)
    cache = [(angles.add(i).sin().to(model.dtype), angles.add(i).cos().to(model.dtype)) for i in range(layers)]
    stored = {0: "batch", 2: "past"}
    shapes = ({0: "batch", 1: "seq"}, {0: "batch", 1: "past + seq"}, [(stored, stored)] * layers)
    names = ["input_ids", "attention_mask", *_cache_names("past", layers)]
    outputs = ["logits", *_cache_names("present", layers)]
    return Exportable(_Decoder(model).eval(), (ids, mask, cache), shapes, names, outputs)


def _cache_names(kind: str, layers: int) -> list[str]:
    return [f"{kind}.{i}.{part}" for i in range(layers) for part in ("key", "value")]


class _Encoder(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return hidden


class _Decoder(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, past: list[Any]) -> tuple[Any, Any]:
        from transformers import DynamicCache

        cache = DynamicCache()
        for i, (key, value) in enumerate(past):
            cache.update(key, value, i)
        positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
        positions = positions[:, attention_mask.shape[1] - input_ids.shape[1] :]
        result = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, past_key_values=cache,
            use_cache=True,
        )  # fmt: skip
        layers: list[Any] = list(cache.layers)
        return result.logits, [(layer.keys, layer.values) for layer in layers]
