"""transformers: ``attn_implementation="attn_dispatch"``, attention and its mask function as one registration.

transformers asks a registered mask function for a mask once per forward, and hands what it returned to the attention
function of every layer, untouched. Ours returns a `ModelMask`: the model's rule as a `Mask` where it is known (causal,
sliding window, chunks, bidirectional, packed sequences, padding), or the boolean tensor that transformers itself would
build where it is not. A mask is never dropped: an attention that gets none though its module is causal is causal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attn_dispatch.capture import current_layer
from attn_dispatch.dispatch import attention
from attn_dispatch.errors import InputError
from attn_dispatch.ir.atoms import Causal, Columns, Full, KeyLengths, SameBlock, Segments, Window
from attn_dispatch.ir.masks import Mask

__all__ = ["ModelMask", "attention_forward", "make_mask", "register"]

NAME = "attn_dispatch"

# Arguments that models hand to every attention function and that say nothing about this attention: positions were
# applied by the rotary embedding, the cache was updated, cumulative lengths repeat what the mask says.
_SAYS_NOTHING = frozenset(
    {
        *(
            "position_ids",
            "position_embeddings",
            "use_cache",
            "cache_position",
            "past_key_values",
            "output_hidden_states",
        ),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "num_items_in_batch", "return_dict"),
        *("deterministic", "layer_idx", "head_mask", "sliding_window", "is_training", "logits_to_keep", "cache"),
    }
)


@dataclass(frozen=True)
class ModelMask:
    """What the mask function hands to the attention function.

    Args:
        mask: the rule; q_offset: position of query 0 among the keys at hand.
    """

    mask: Mask
    q_offset: int


def register() -> None:
    """Register with transformers, for ``from_pretrained(..., attn_implementation="attn_dispatch")``.

    Raises:
        ImportError: transformers is not installed, or older than 5.

    Example:
        >>> from attn_dispatch.integrations import transformers
        >>> transformers.register()
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionMaskInterface.register(NAME, make_mask)
    AttentionInterface.register(NAME, attention_forward)


# --- masks -----------------------------------------------------------------------------------------------------------


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    """transformers' mask function: a `ModelMask`, or the boolean tensor of `transformers.masking_utils.sdpa_mask`.

    Args:
        q_offset, kv_offset: positions of the first query and of the first key. mask_function: the model's rule over
        indices. attention_mask: padding ``[B, keys seen so far]``, True for real tokens.
    """
    from transformers.masking_utils import causal_mask_function

    rule = mask_function or causal_mask_function
    offset = q_offset - kv_offset if isinstance(q_offset, int) and isinstance(kv_offset, int) else None
    mask = _rule_as_mask(rule, kv_offset) if offset is not None and not torch.compiler.is_compiling() else None
    if mask is None or offset is None:
        return _dense(batch_size, q_length, kv_length, q_offset, kv_offset, rule, attention_mask, options)
    if attention_mask is not None:
        mask = mask & _padding(attention_mask, kv_length, kv_offset)
    return ModelMask(mask, offset)


def _dense(
    batch: int, sq: int, skv: int, q_offset: Any, kv_offset: Any, rule: Any, padding: Any, options: dict[str, Any]
) -> torch.Tensor:
    """The mask as transformers builds it for SDPA, always as a tensor."""
    from transformers.masking_utils import sdpa_mask

    kept = {name: options[name] for name in ("device", "use_vmap") if name in options}
    dense = sdpa_mask(
        batch_size=batch, q_length=sq, kv_length=skv, q_offset=q_offset, kv_offset=kv_offset, mask_function=rule,
        attention_mask=padding, allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **kept,
    )  # fmt: skip
    assert isinstance(dense, torch.Tensor)
    return dense


def _rule_as_mask(rule: Callable[..., Any], kv_offset: int) -> Mask | None:
    """A mask function of transformers as a `Mask`, or None when it is not one that we know.

    The factories of `transformers.masking_utils` return closures; a closure is known by its qualified name and its
    cells, and anything unexpected there (another version, a user's overlay) makes the answer None, never a guess.
    """
    from transformers import masking_utils as hf

    if rule is hf.causal_mask_function:
        return Causal()
    if rule is hf.bidirectional_mask_function:
        return Full()
    if getattr(rule, "__module__", "") != hf.__name__:
        return None
    name = getattr(rule, "__qualname__", "").partition(".")[0]
    cells = dict(zip(rule.__code__.co_freevars, (c.cell_contents for c in rule.__closure__ or ()), strict=False))
    if name == "and_masks" and set(cells) == {"mask_functions"}:
        parts = [_rule_as_mask(part, kv_offset) for part in cells["mask_functions"]]
        mask: Mask = Full()
        for part in parts:
            if part is None:
                return None
            mask = part if isinstance(mask, Full) else mask & part
        return mask
    return _overlay_as_mask(name, cells, kv_offset)


def _overlay_as_mask(name: str, cells: dict[str, Any], kv_offset: int) -> Mask | None:
    size = cells.get("sliding_window")
    if name == "sliding_window_overlay" and isinstance(size, int) and size >= 1:
        return Window(size - 1, None)  # kv > q - size
    if name == "sliding_window_bidirectional_overlay" and isinstance(size, int) and size >= 0:
        return Window(size, size)
    if name == "chunked_overlay" and isinstance(cells.get("chunk_size"), int) and kv_offset == 0:
        left = cells.get("left_padding")
        shifted = isinstance(left, torch.Tensor) and bool(left.any())  # chunks that start elsewhere per sequence
        return None if shifted or left is None else SameBlock(cells["chunk_size"])
    if name == "packed_sequence_mask_function" and isinstance(cells.get("packed_sequence_mask"), torch.Tensor):
        ids = cells["packed_sequence_mask"]
        return Segments(ids, ids)  # type: ignore[arg-type]
    return None


def _padding(attention_mask: torch.Tensor, kv_length: int, kv_offset: int) -> Mask:
    """2-D padding as key lengths (right padding, so that work can be cut off), columns, or nothing at all."""
    kept = attention_mask.bool()[:, kv_offset : kv_offset + kv_length]
    if kept.shape[1] < kv_length:  # transformers pads what it has not seen with False
        kept = torch.nn.functional.pad(kept, (0, kv_length - kept.shape[1]))
    if kept.device.type != "cpu":
        return Columns(kept)  # type: ignore[arg-type]
    lengths = kept.sum(-1)
    if bool((lengths == kv_length).all()):
        return Full()
    right_padded = torch.equal(kept, torch.arange(kv_length) < lengths[:, None])
    return KeyLengths(lengths) if right_padded else Columns(kept)  # type: ignore[arg-type]


# --- attention -------------------------------------------------------------------------------------------------------


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention function: ``[B, H, S, D]`` in, ``[B, S, H, Dv]`` and weights (or None) out.

    Raises:
        InputError: an argument that this function does not know, so that none is ever dropped.
    """
    unknown = {name: given for name, given in kwargs.items() if name not in _SAYS_NOTHING and given is not None}
    if unknown:
        problem = f"{type(module).__name__} hands {', '.join(sorted(unknown))} to attention, which attn_dispatch does not know"
        raise InputError(problem, remedy='attn_implementation="sdpa" or "eager" for this model')
    sinks = s_aux if s_aux is not None else kwargs.pop("sinks", None)
    mask, q_offset, causal = _mask_arguments(module, query, key, attention_mask, is_causal)
    token = current_layer.set(_layer_name(module))
    try:
        result = attention(
            query, key, value, mask, dropout, causal, scaling, None, q_offset=q_offset, softcap=softcap,
            sinks=sinks, bias=position_bias, return_weights=output_attentions,
        )  # fmt: skip
    finally:
        current_layer.reset(token)
    out, weights = (result.out, result.weights) if output_attentions else (result, None)
    return out.transpose(1, 2), weights


def _mask_arguments(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, attention_mask: Any, is_causal: bool | None
) -> tuple[Any, int | None, bool]:
    """``attn_mask, q_offset, is_causal`` of the call."""
    if isinstance(attention_mask, ModelMask):
        mask, offset = attention_mask.mask, attention_mask.q_offset
        sq, skv = query.shape[2], key.shape[2]
        if isinstance(mask, Full) or (isinstance(mask, Causal) and sq == 1 and offset >= skv - 1):
            return None, None, False  # the plain call, which is the warmest path
        if isinstance(mask, Causal) and offset == 0:
            return None, None, True
        return mask, offset, False
    if attention_mask is not None:
        return attention_mask[..., : key.shape[2]], None, False  # a model's own 4-D mask, possibly of a longer cache
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    return None, None, bool(causal) and query.shape[2] > 1


def _layer_name(module: torch.nn.Module) -> str:
    index = getattr(module, "layer_idx", None)
    return type(module).__name__ if index is None else f"{type(module).__name__}.{index}"
