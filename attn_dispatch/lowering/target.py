"""What a lowering is for: a form, an opset, and what the runtime at hand has been seen to compute rightly."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FORMS", "MAX_OPSET", "PROVABLE", "SPECIFIED", "Target"]

FORMS = ("standard", "decomposed", "contrib", "function")
MAX_OPSET = 28

# What the specification promises and not every runtime keeps; `attn_dispatch.backends.ort_probes` asks it.
PROVABLE = {
    "causal_start": "is_causal counts from the first key, whatever the lengths are",
    "causal_end": "is_causal with nonpad_kv_seqlen counts from the last key",
    "lengths": "nonpad_kv_seqlen hides the keys behind it",
    "lengths_and_mask": "nonpad_kv_seqlen beside a boolean attn_mask",
    "lengths_and_bias": "nonpad_kv_seqlen beside an attn_mask that is added, the lowest finite numbers included",
    "empty_rows": "a row that may attend nothing gives 0",
    "softcap": "the soft cap comes before the mask",
    "gqa": "query head h uses kv head h // (Hq / Hkv)",
    "weights": "qk_matmul_output after the softmax, in the size of the scores",
    "float16": "float16, with scores that float16 itself cannot hold",
    "bfloat16": "bfloat16 without a conversion in the graph",
    "float64": "float64, empty rows and lengths included",
    "linear_attention": "LinearAttention of opset 27",
    "contrib_gqa": "com.microsoft GroupQueryAttention",
    "contrib_mha": "com.microsoft MultiHeadAttention",
    "contrib_linear": "com.microsoft LinearAttention",
}
SPECIFIED = frozenset(word for word in PROVABLE if not word.startswith("contrib_"))


@dataclass(frozen=True)
class Target:
    """Where lowered nodes are to run.

    Args:
        form: ``"standard"`` (the Attention node of ai.onnx), ``"decomposed"`` (MatMul and Softmax), ``"contrib"``
            (com.microsoft), or ``"function"`` (a node of our own with its body beside it).
        opset: version of ai.onnx.
        proven: words of `PROVABLE` that hold on the runtime; what does not hold is lowered another way or refused.
        runtime: its name and version, for reasons.
        hides: zero keys and values that no query may attend, so that no NaN in them shows. Whoever looks at the output
            instead, as the dispatcher does on the CPU, saves two copies.
    """

    form: str = "standard"
    opset: int = 24
    proven: frozenset[str] = SPECIFIED
    runtime: str = "any runtime that follows the specification"
    hides: bool = True

    def __str__(self) -> str:
        return f"{self.form} at opset {self.opset} for {self.runtime}"
