"""transformers: ``attn_implementation="attn_dispatch"``, attention and its mask function as one registration.

transformers asks a registered mask function for a mask once per forward, and hands what it returned to the attention
function of every layer, untouched. Ours returns a `ModelMask`: the model's rule as a `Mask` where it is known (causal,
sliding window, chunks, bidirectional, packed sequences, padding), or the boolean tensor that transformers itself would
build where it is not. A mask is never dropped: an attention that gets none though its module is causal is causal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from attn_dispatch.context import at_layer
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
        *("deterministic", "layer_idx", "sliding_window", "is_training", "logits_to_keep", "cache"),
        *("output_router_logits", "seq_idx"),
    }
)


class ModelMask(torch.Tensor):
    """What the mask function hands to the attention function: a rule, in the shape of the tensor that it stands for.

    It is a bool tensor ``[B, 1, Sq, Skv]`` without memory. Our attention function reads the rule. A model (or
    `generate` with a static cache) that looks at its mask finds a tensor, and one that computes with it gets the
    values: whatever operator touches it is run on the dense mask.

    Args:
        mask: the rule; parts that forbid nothing at these sizes are left out.
        q_offset: position of query 0 among the keys at hand.
        shape: ``(B, 1, Sq, Skv)``.
    """

    mask: Mask
    q_offset: int

    # properties and methods act as on any tensor; operators arrive in __torch_dispatch__
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, mask: Mask, q_offset: int, shape: tuple[int, ...], device: Any = "cpu") -> ModelMask:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        made.mask, made.q_offset = mask, q_offset
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ModelMask({self.mask}, q_offset={self.q_offset}, shape={tuple(self.shape)})"

    def values(self) -> torch.Tensor:
        """The mask as an ordinary tensor."""
        return self.mask.dense(self.shape[2], self.shape[3], self.q_offset, device=self.device).expand(self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._schema.is_mutable and any(isinstance(x, cls) for x in args[:1]):
            raise InputError(f"{func} would write into a mask of attn_dispatch", remedy="mask.clone() first")
        args, kwargs = tree_map_only(cls, cls.values, (args, kwargs or {}))
        return func(*args, **kwargs)


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
    parts = _parts_of(rule, kv_offset) if offset is not None and not torch.compiler.is_compiling() else None
    # a compiled decode step takes its mask as an input, and transformers says so by forbidding the causal shortcut
    compiled = q_length == 1 and not options.get("allow_is_causal_skip", True)
    if parts is None or offset is None or compiled:
        return _dense(batch_size, q_length, kv_length, q_offset, kv_offset, rule, attention_mask, options)
    if attention_mask is not None:
        parts.append(_padding(attention_mask, kv_length, kv_offset))
    mask: Mask = Full()
    for part in parts:
        if not _forbids_nothing(part, offset, q_length, kv_length):
            mask = part if isinstance(mask, Full) else mask & part
    return ModelMask(mask, offset, (batch_size, 1, q_length, kv_length), options.get("device", "cpu"))


def _forbids_nothing(part: Mask, offset: int, q_length: int, kv_length: int) -> bool:
    """Whether a part allows every pair at these sizes, so that decode and short prompts take the plain warm path.

    Without cached keys ``Causal`` is the one part that stays in a prefill, and that call is ``is_causal=True``.
    """
    last = offset + q_length - 1  # position of the last query
    if isinstance(part, Causal):
        return offset >= kv_length - 1
    if isinstance(part, Window):
        left = part.left is None or last <= part.left
        return left and (part.right is None or offset + part.right >= kv_length - 1)
    if isinstance(part, SameBlock):
        return offset >= 0 and max(last, kv_length - 1) < part.size
    return isinstance(part, Full)


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


def _parts_of(rule: Callable[..., Any], kv_offset: int) -> list[Mask] | None:
    """A mask function of transformers as the parts of a conjunction, or None when it is not one that we know.

    The factories of `transformers.masking_utils` return closures; a closure is known by its qualified name and its
    cells, and anything unexpected there (another version, a user's overlay) makes the answer None, never a guess.
    """
    from transformers import masking_utils as hf

    if rule is hf.causal_mask_function:
        return [Causal()]
    if rule is hf.bidirectional_mask_function:
        return []
    if getattr(rule, "__module__", "") != hf.__name__:
        return None
    name, cells = _closure(rule)
    if name != "and_masks" or set(cells) != {"mask_functions"}:
        one = _overlay_as_mask(name, cells, kv_offset)
        return None if one is None else [one]
    functions = _without_remap(tuple(cells["mask_functions"]))
    nested = [_parts_of(function, kv_offset) for function in functions]
    known = [parts for parts in nested if parts is not None]
    return [part for parts in known for part in parts] if len(known) == len(nested) else None


def _closure(rule: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """The factory that made a closure, and the variables that it closes over."""
    name = getattr(rule, "__qualname__", "").partition(".")[0]
    names = getattr(getattr(rule, "__code__", None), "co_freevars", ())
    return name, dict(zip(names, (c.cell_contents for c in getattr(rule, "__closure__", None) or ()), strict=False))


def _without_remap(functions: tuple[Callable[..., Any], ...]) -> tuple[Callable[..., Any], ...]:
    """Packed sequences: ``remap(rule, position_ids) & packed(ids)`` as ``rule & packed(ids)``, where that is the same.

    It is when positions rise by one inside each sequence and the rule depends on distances alone.
    """
    if len(functions) != 2:
        return functions
    (first, inner), (second, packed) = _closure(functions[0]), _closure(functions[1])
    if first != "remap_positions_for_packed_sequence" or second != "packed_sequence_mask_function":
        return functions
    if set(inner) != {"mask_function", "position_ids"} or set(packed) != {"packed_sequence_mask"}:
        return functions
    positions, ids = inner["position_ids"], packed["packed_sequence_mask"]
    parts = _parts_of(inner["mask_function"], 0)
    by_distance = parts is not None and all(isinstance(part, (Causal, Window)) for part in parts)
    if not by_distance or positions.shape != ids.shape:
        return functions
    same = ids[:, 1:] == ids[:, :-1]
    rises = (positions[:, 1:] - positions[:, :-1]) == 1
    contiguous = bool((ids[:, 1:] >= ids[:, :-1]).all())  # an id never comes back, so equal ids are neighbours
    return (inner["mask_function"], functions[1]) if contiguous and bool((rises | ~same).all()) else functions


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
        return Segments(ids, ids)
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
    sinks: torch.Tensor | None = None,
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
        names = ", ".join(sorted(unknown))
        problem = f"{type(module).__name__} hands {names} to attention, which attn_dispatch does not know"
        # a head_mask scales weights, which only eager has: sdpa would drop it
        remedy = '"eager"' if "head_mask" in unknown else '"sdpa" or "eager"'
        raise InputError(problem, remedy=f"attn_implementation={remedy} for this model")
    mask, q_offset, causal = _mask_arguments(module, query, key, attention_mask, is_causal)
    with at_layer(_layer_name(module)):
        result = attention(
            query, key, value, mask, dropout, causal, scaling, None, q_offset=q_offset, softcap=softcap,
            sinks=s_aux if s_aux is not None else sinks, bias=position_bias, return_weights=output_attentions,
        )  # fmt: skip
    out, weights = (result.out, result.weights) if output_attentions else (result, None)
    return out.transpose(1, 2), weights


def _mask_arguments(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, attention_mask: Any, is_causal: bool | None
) -> tuple[Any, int | None, bool]:
    """``attn_mask, q_offset, is_causal`` of the call."""
    if isinstance(attention_mask, ModelMask):
        mask, offset = attention_mask.mask, attention_mask.q_offset
        sizes = (query.shape[2], key.shape[2])
        if sizes != attention_mask.shape[2:]:
            was = f"{attention_mask.shape[2]} queries and {attention_mask.shape[3]} keys"
            problem = f"{type(module).__name__} has {sizes[0]} queries and {sizes[1]} keys, its mask is for {was}"
            raise InputError(problem, remedy='attn_implementation="eager" for this model')
        if isinstance(mask, Full):
            return None, None, False  # the plain call, which is the warmest path
        if isinstance(mask, Causal) and offset == 0:
            return None, None, True
        return mask, offset if mask.positional else None, False
    if attention_mask is not None:
        return attention_mask[..., : key.shape[2]], None, False  # a model's own 4-D mask, possibly of a longer cache
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    return None, None, bool(causal) and query.shape[2] > 1


def _layer_name(module: torch.nn.Module) -> str:
    index = getattr(module, "layer_idx", None)
    return type(module).__name__ if index is None else f"{type(module).__name__}.{index}"
