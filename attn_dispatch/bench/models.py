"""The workload files of ``configs/workloads``: real model configurations, run with random weights, and captured.

``python -m attn_dispatch.bench.models OUT_DIR [NAME ...]`` writes them. What counts is the attention: heads, head
sizes, lengths, windows, caps and sinks are the published ones, and where one is not, the file's ``model`` line says so.
Two layers run instead of all; vocabulary, MLP and (where a configuration allows it) hidden size are small. Nothing is
downloaded.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attn_dispatch.capture import Workload, capture
from attn_dispatch.integrations.transformers import register

__all__ = ["FAMILIES", "Family", "capture_family", "main"]

_OURS: dict[str, Any] = {"attn_implementation": "attn_dispatch"}
_SMALL: dict[str, Any] = {"vocab_size": 64, "num_hidden_layers": 2, **_OURS}


@dataclass(frozen=True)
class Family:
    """A workload file: what its ``model`` line says, and what to run."""

    about: str
    run: Callable[[], None]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' notices about its own renamed arguments, and without moving the caller's random state."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore", FutureWarning)
        yield


def capture_family(name: str) -> Workload:
    """Run a family's models and record their attention.

    Example:
        >>> [use.op.Skv for use in capture_family("vit-b-16").ops()]
        [197]
    """
    family = FAMILIES[name]
    register()
    with _quiet(), capture() as workload:
        family.run()
    workload.model = family.about
    return workload


# --- how models are run ----------------------------------------------------------------------------------------------


def _tokens(batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.long)


def _prefill(model: Any, length: int, batch: int = 1, **inputs: Any) -> None:
    with torch.no_grad():
        model(_tokens(batch, length), use_cache=False, **inputs)


def _decode(model: Any, keys: int, batch: int = 1, **inputs: Any) -> None:
    """One token after ``keys - 1`` cached ones; what the cache holds does not matter."""
    from transformers import DynamicCache

    config = model.config
    cache = DynamicCache(config=config)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = torch.zeros(batch, config.num_key_value_heads, keys - 1, size, dtype=model.dtype)
    with torch.no_grad():
        for layer in range(config.num_hidden_layers):
            cache.update(cached, cached, layer)
        model(_tokens(batch, 1), past_key_values=cache, use_cache=True, **inputs)


def _right_padded(lengths: Sequence[int], longest: int) -> torch.Tensor:
    return (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()


def _left_padded(lengths: Sequence[int], longest: int) -> torch.Tensor:
    return _right_padded(lengths, longest).flip(-1)


def _bert(heads: int, size: int, **options: Any) -> Any:
    from transformers import BertConfig, BertModel

    hidden: dict[str, Any] = {"hidden_size": heads * size, "num_attention_heads": heads, "intermediate_size": 64}
    return BertModel(BertConfig(**_SMALL, **hidden, **options), add_pooling_layer=False).eval()


def _llama(heads: int, kv_heads: int, size: int, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size}
    config = LlamaConfig(**_SMALL, **shape, hidden_size=heads * size, intermediate_size=64, **options)
    return LlamaForCausalLM(config).eval()


# --- the families ----------------------------------------------------------------------------------------------------

_SENTENCES = (128, 96, 71, 54, 40, 33, 21, 12)  # tokens of a batch of sentences, longest first


def _run_bert_base() -> None:
    model = _bert(12, 64)
    with torch.no_grad():
        model(_tokens(8, 128), attention_mask=_right_padded(_SENTENCES, 128))
        model(_tokens(1, 512))


def _run_minilm() -> None:
    model = _bert(12, 32)
    with torch.no_grad():
        model(_tokens(16, 128), attention_mask=_right_padded(_SENTENCES * 2, 128))
        model(_tokens(4, 64))


def _run_smollm2() -> None:
    model = _llama(9, 3, 64)
    lengths = (512, 380, 240, 96)
    _prefill(model, 512)
    _prefill(model, 512, 4, attention_mask=_left_padded(lengths, 512))
    _decode(model, 513)
    _decode(model, 513, 4, attention_mask=_left_padded([n + 1 for n in lengths], 513))
    model = model.to(torch.bfloat16)
    _prefill(model, 512)
    _decode(model, 513)


def _run_llama_8b() -> None:
    model = _llama(32, 8, 128)
    _prefill(model, 1024)
    _prefill(model, 2048)
    _decode(model, 4096)
    _decode(model, 8192)
    _decode(model.to(torch.bfloat16), 4096)


def _run_mistral() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    shape: dict[str, Any] = {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "sliding_window": 4096,
    }
    config = MistralConfig(**_SMALL, **shape, hidden_size=64, intermediate_size=64, max_position_embeddings=32768)
    model = MistralForCausalLM(config).eval()
    _prefill(model, 6144)
    _decode(model, 6144)


def _run_gemma2() -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    shape: dict[str, Any] = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
    }
    config = Gemma2Config(**_SMALL, **shape, hidden_size=64, intermediate_size=64, sliding_window=512)
    model = Gemma2ForCausalLM(config).eval()
    _prefill(model, 1024)
    _decode(model, 1025)


def _run_gpt_oss() -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    shape: dict[str, Any] = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
    experts: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1}
    config = GptOssConfig(**_SMALL, **shape, **experts, hidden_size=64, intermediate_size=64)
    model = GptOssForCausalLM(config).eval()
    _prefill(model, 1024)
    _decode(model, 1025)


def _run_whisper() -> None:
    from transformers import WhisperConfig, WhisperModel

    ends: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(
        vocab_size=64, **_OURS, d_model=512, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=64, decoder_ffn_dim=64, **ends,
    )  # fmt: skip
    model = WhisperModel(config).eval()
    with torch.no_grad():
        model(torch.zeros(1, 80, 3000), decoder_input_ids=_tokens(1, 448), use_cache=False)
        heard = (torch.zeros(1, 1500, 512),)
        said = model(encoder_outputs=heard, decoder_input_ids=_tokens(1, 223), use_cache=True)
        cache = said.past_key_values
        model(encoder_outputs=heard, decoder_input_ids=_tokens(1, 1), past_key_values=cache, use_cache=True)


def _run_vit() -> None:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(num_hidden_layers=2, intermediate_size=64, **_OURS)
    with torch.no_grad():
        ViTModel(config, add_pooling_layer=False).eval()(torch.zeros(4, 3, 224, 224))


def _run_t5() -> None:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(vocab_size=64, **_OURS, d_model=768, d_kv=64, num_heads=12, d_ff=64, num_layers=2)
    model = T5EncoderModel(config).eval()
    with torch.no_grad():
        model(_tokens(1, 512))
        model(_tokens(8, 128), attention_mask=_right_padded(_SENTENCES, 128))


def _run_packed() -> None:
    lengths = (702, 90, 1310, 44, 512, 1024, 158, 256)  # 4096 in all
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    _prefill(_llama(9, 3, 64), 4096, position_ids=positions)


def _run_training() -> None:
    none: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    _bert(12, 64, **none).train()(_tokens(8, 128))
    _llama(32, 8, 128).train()(_tokens(1, 512), use_cache=False)


FAMILIES: dict[str, Family] = {
    "bert-base": Family("BERT-base, 12 layers: a padded batch 8 x 128, and 1 x 512", _run_bert_base),
    "minilm": Family("MiniLM-L6 and -L12: a padded batch 16 x 128, and 4 x 64", _run_minilm),
    "smollm2-135m": Family("SmolLM2-135M, 30 layers: 512 tokens and the next, alone and left-padded", _run_smollm2),
    "llama-8b": Family("Llama-3.1-8B, 32 layers: prompts, and decode behind 4k and 8k", _run_llama_8b),
    "mistral-7b": Family(
        "Mistral-7B-v0.1, 32 layers, one of 4 tensor-parallel ranks (8/2 of 32/8 heads)", _run_mistral
    ),
    "gemma2-2b": Family("Gemma-2-2B, 26 layers, local and global in turn; window 512 instead of 4096", _run_gemma2),
    "gpt-oss-20b": Family("gpt-oss-20b, 24 layers, local and global in turn", _run_gpt_oss),
    "whisper-base": Family("Whisper-base, 6 + 6 layers: 30 s of audio, a whole text and one token", _run_whisper),
    "vit-b-16": Family("ViT-B/16, 12 layers: 4 images", _run_vit),
    "t5-base": Family("T5-base's encoder, 12 layers: 1 x 512, and a padded batch 8 x 128", _run_t5),
    "packed-documents": Family("SmolLM2-135M, 30 layers: 8 documents packed into 4096 tokens", _run_packed),
    "training": Family("Training steps without dropout: BERT-base 8 x 128, Llama-3.1-8B 1 x 512", _run_training),
}


def main(arguments: Sequence[str]) -> int:
    """Write workload files: ``OUT_DIR [NAME ...]``; without names, all."""
    if not arguments or any(name not in FAMILIES for name in arguments[1:]):
        print(f"usage: python -m attn_dispatch.bench.models OUT_DIR [{' | '.join(FAMILIES)}]", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments[1:] or FAMILIES:
        path = folder / f"{name}.yaml"
        workload = capture_family(name)
        workload.save(path)
        print(f"{path}: {len(workload.ops())} ops", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
