"""`MultiheadAttention`: projections, grouped heads, rotary positions and a cache around `dispatch.attention`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import reduce
from operator import and_
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from attn_dispatch import dispatch
from attn_dispatch.biases import alibi_slopes
from attn_dispatch.errors import InputError, InputTypeError
from attn_dispatch.ir.atoms import Causal, Columns, Dense, Full, Stride, Window
from attn_dispatch.ir.masks import Mask
from attn_dispatch.nn.cache import KVCache
from attn_dispatch.nn.per_device import PerDevice
from attn_dispatch.nn.rotary import Rotary
from attn_dispatch.variants import Softmax, Variant

__all__ = ["Attended", "MultiheadAttention"]


class Attended(NamedTuple):
    """What a `MultiheadAttention` returns: the output, and the weights when they are wanted."""

    out: torch.Tensor
    weights: torch.Tensor | None = None


class MultiheadAttention(nn.Module):
    """Multi-head attention; a superset of ``torch.nn.MultiheadAttention``, whose state dict it loads and saves.

    Parameters have torch's names: ``in_proj_weight`` (query, key and value stacked) while key and value have
    ``embed_dim`` features, else ``q_proj_weight k_proj_weight v_proj_weight``; ``in_proj_bias``; ``out_proj``. They are
    drawn as torch draws them, so one seed gives both modules the same. Three things differ: ``need_weights`` is False
    unless asked for, since weights rule out the fused kernels; weights are those before dropout, where torch gives
    them after it; and a row that may attend nothing gives the output projection of 0 where torch gives NaN.

    Shapes: query ``[S, B, E]``, ``[B, S, E]`` with ``batch_first``, or ``[S, E]``; jagged nested ``[B, j, E]``.

    Args:
        embed_dim: E, of the query and the output. num_heads: Hq.
        kv_heads: Hkv, a divisor of ``num_heads``; default ``num_heads``.
        head_dim: D; default ``embed_dim // num_heads``. value_head_dim: Dv; default D.
        kdim, vdim: features of key and value; default ``embed_dim``.
        bias: add biases to the projections. dropout: of the weights, while training.
        batch_first: as in torch.
        rotary: how queries and keys are turned; True, or the base as a float, is a `Rotary` over the whole head.
        is_causal, window, softcap, scale, variant: of every call, as in `dispatch.attention`. mask: a `Mask`.
        alibi: ALiBi slopes. sinks: one learned logit per head.

    Raises:
        InputError: sizes that do not divide.

    Example:
        >>> attend = MultiheadAttention(32, 4, kv_heads=2, rotary=10_000.0, is_causal=True, batch_first=True)
        >>> attend(torch.randn(2, 5, 32)).out.shape
        torch.Size([2, 5, 32])
    """

    # what torch.nn.TransformerEncoderLayer asks before its fused inference path, which would do torch's attention
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        batch_first: bool = False,
        rotary: Rotary | float | bool | None = None,
        is_causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        mask: Mask | None = None,
        variant: Variant | None = None,
        alibi: bool = False,
        sinks: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_proj_weight: nn.Parameter | None
        self.in_proj_bias: nn.Parameter | None
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.kv_heads = num_heads if kv_heads is None else kv_heads
        if num_heads < 1 or self.kv_heads < 1 or num_heads % self.kv_heads:
            raise InputError(f"num_heads {num_heads} must be a multiple of kv_heads {self.kv_heads}, both >= 1")
        if head_dim is None and embed_dim % num_heads:
            raise InputError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}", remedy="head_dim=...")
        self.head_dim = head_dim or embed_dim // num_heads
        self.value_head_dim = value_head_dim or self.head_dim
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.dropout, self.batch_first = dropout, batch_first
        if isinstance(rotary, bool):  # before int, which it is too: a base of 1 turns every pair alike
            rotary = Rotary(self.head_dim) if rotary else None
        self.rotary = Rotary(self.head_dim, rotary) if isinstance(rotary, (int, float)) else rotary
        self.is_causal, self.window, self.softcap, self.scale, self.mask = is_causal, window, softcap, scale, mask
        self.variant = variant
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        # query, key, value
        self._sizes = (num_heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.value_head_dim)
        self.is_packed = self.kdim == self.vdim == embed_dim
        inputs = (embed_dim, self.kdim, self.vdim)
        packed = torch.empty((sum(self._sizes), embed_dim), **where) if self.is_packed else None
        self.register_parameter("in_proj_weight", None if packed is None else nn.Parameter(packed))
        for name, rows, columns in zip(_SEPARATE, self._sizes, inputs, strict=True):
            own = None if self.is_packed else nn.Parameter(torch.empty((rows, columns), **where))
            self.register_parameter(name, own)
        stacked = nn.Parameter(torch.empty(sum(self._sizes), **where)) if bias else None
        self.register_parameter("in_proj_bias", stacked)
        self.out_proj = nn.Linear(num_heads * self.value_head_dim, embed_dim, bias=bias, **where)
        self.sinks = nn.Parameter(torch.zeros(num_heads, **where)) if sinks else None
        with torch.device("cpu"):  # wherever the weights are made: on meta there would be no values
            self._slopes = PerDevice(alibi_slopes(num_heads), device=self.out_proj.weight.device) if alibi else None
        self._reset_inputs()
        self.register_load_state_dict_pre_hook(_as_ours)

    @property
    def alibi(self) -> torch.Tensor | None:
        """ALiBi slopes ``[num_heads]``, float32 on the CPU; None without."""
        return None if self._slopes is None else self._slopes.table

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self._slopes is not None:
            self._slopes.follow(fn)
        return super()._apply(fn, recurse)

    def reset_parameters(self) -> None:
        """Draw all parameters anew, in torch's order: one seed, one module."""
        self.out_proj.reset_parameters()
        self._reset_inputs()

    def _reset_inputs(self) -> None:
        for name in ("in_proj_weight", *_SEPARATE):
            weight = getattr(self, name)
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias, self.sinks):
            if bias is not None:
                nn.init.zeros_(bias)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> MultiheadAttention:
        """The attention of a ``torch.nn.MultiheadAttention``, with a copy of its parameters, frozen where those are.

        Raises:
            InputError: it has ``bias_k``, ``bias_v`` or ``add_zero_attn``.

        Example:
            >>> theirs = nn.MultiheadAttention(16, 4, batch_first=True)
            >>> x = torch.randn(1, 3, 16)
            >>> torch.allclose(MultiheadAttention.from_torch(theirs)(x).out, theirs(x, x, x)[0], atol=1e-6)
            True
        """
        if module.add_zero_attn:
            raise InputError("add_zero_attn adds a key of zeros", remedy="sinks=True has the same use")
        weight = module.out_proj.weight
        ours = cls(
            module.embed_dim, module.num_heads, kdim=module.kdim, vdim=module.vdim,
            bias=module.in_proj_bias is not None, dropout=module.dropout, batch_first=module.batch_first,
            device=weight.device, dtype=weight.dtype,
        )  # fmt: skip
        ours.load_state_dict(module.state_dict())
        for name, parameter in ours.named_parameters():
            parameter.requires_grad_(module.get_parameter(name).requires_grad)
        return ours.train(module.training)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | Mask | None = None,
        average_attn_weights: bool = True,
        is_causal: bool | None = None,
        *,
        cache: KVCache | None = None,
        lengths: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        backend: Any = None,
        **options: Any,
    ) -> Any:
        """Attend.

        Args:
            key, value: of another sequence (cross-attention); default the query, and the key.
            key_padding_mask: ``[B, Skv]``; bool, **True = ignore this key** as in torch, or float, added.
            need_weights: also return the weights, ``[B, Sq, Skv]`` or, not averaged over heads, ``[B, Hq, Sq, Skv]``.
            attn_mask: a tensor as in torch: bool with **True = may not attend**, or float, added; ``[Sq, Skv]`` or
                ``[B * Hq, Sq, Skv]``. A `Mask` says as everywhere in this package who *may* attend.
            is_causal: this call's, instead of the module's; no ``attn_mask`` is needed for it.
            cache: keys and values so far; this call's are appended, and positions go on from them.
            lengths: ``[B]``, how many tokens of each row are real: of a padded prompt, or of a step with a cache.
            positions: of the query's tokens for `Rotary`, ``[S]`` or ``[B, S]``; default from 0, or from the cache on.
            backend, options: of `dispatch.attention`.

        Returns:
            ``(out, weights)``; weights are None unless wanted. With ``return_lse`` or ``return_state`` among the
            options: ``(out, lse)``, ``(out, state)``.

        Raises:
            InputError, InputTypeError: a mask of the wrong shape or dtype, a cache for cross-attention, and whatever
                `dispatch.attention` raises.
        """
        unbatched = query.dim() == 2 and not query.is_nested
        key = query if key is None else key
        value = key if value is None else value
        if cache is not None and key is not query:
            raise InputError("a cache holds the keys of the query's own sequence", remedy="cross-attention without it")
        self._check_call(cache, attn_mask, positions, options)
        q, k, v = self._project(query, key, value, unbatched)
        arguments: dict[str, Any] = {"softcap": self.softcap, "scale": self.scale, "backend": backend, **options}
        arguments |= {} if self.variant is None else {"variant": self.variant}
        causal = self.is_causal if is_causal is None else is_causal
        with nullcontext() if cache is None else cache.all_or_nothing():
            q, k, v = self._place(q, k, v, key is query, cache, lengths, positions, arguments)
            self._mask(arguments, q, k, causal, attn_mask, key_padding_mask, cache is not None, unbatched)
            if self.training and self.dropout > 0:
                arguments["dropout_p"] = self.dropout
            result = dispatch.attention(
                q, k, v, enable_gqa=True, sinks=self.sinks, return_weights=need_weights, **arguments
            )
            out, *more = result if isinstance(result, tuple) else (result,)
            out = self.out_proj(out.transpose(1, 2).flatten(2))
        out = out[0] if unbatched else out if self.batch_first or out.is_nested else out.transpose(0, 1)
        if need_weights:  # the last of what `dispatch.attention` returns
            more[-1] = more[-1].mean(1) if average_attn_weights else more[-1]
        if arguments.get("return_state"):
            return (out, *more)
        more = [x[0] if unbatched else x for x in more]
        return (out, *more) if arguments.get("return_lse") else Attended(out, *more)

    # --- the steps -------------------------------------------------------------------------------------------------

    def _check_call(
        self, cache: KVCache | None, attn_mask: Any, positions: torch.Tensor | None, options: dict[str, Any]
    ) -> None:
        """What would be said twice or to nobody, and what a rolling cache cannot serve."""
        twice = [name for name in ("window", "variant") if getattr(self, name) is not None and name in options]
        taken = {"key_lengths": "lengths=", "sinks": "sinks=True of the module", "return_weights": "need_weights=True"}
        taken |= {"enable_gqa": "kv_heads= of the module", "layout": "batch_first= of the module"}
        wrong = [name for name in taken if name in options]
        if twice or wrong:
            remedy = taken[wrong[0]] if wrong else "leave one of them out"
            raise InputError(f"{', '.join([*twice, *wrong])} of the call is said by the module already", remedy=remedy)
        if self.dropout > 0 and "dropout_p" in options:
            problem = f"dropout_p={options['dropout_p']} of the call, and the module has dropout={self.dropout}"
            raise InputError(problem, remedy="leave dropout_p out, or a module with dropout=0")
        if positions is not None and self.rotary is None:
            problem = f"positions {list(positions.shape)} are for Rotary, and the module has rotary=None"
            raise InputError(problem, remedy="rotary=True of the module; q_offset= is for masks and ALiBi")
        if cache is not None and options.get("q_offset") is not None:
            problem = f"q_offset={options['q_offset']} beside a cache, which puts the queries behind what it holds"
            raise InputError(f"{problem} ({cache.length} tokens)", remedy="leave it out, or cache.crop(...) first")
        if cache is None or cache.window is None:
            return
        left = (self.window or options.get("window") or (None, None))[0]
        if left in (None, -1) or left + 1 > cache.window:
            problem = f"a cache of window {cache.window} keeps {cache.window} keys, and the module's window is {left}"
            raise InputError(
                f"{problem} to the left", remedy=f"window=({cache.window - 1}, 0), or KVCache() for all keys"
            )
        for mask in (self.mask, attn_mask):
            atoms = mask.atoms() if isinstance(mask, Mask) else ()
            if absolute := [str(a) for a in atoms if not isinstance(a, (Causal, Window, Stride, Full))]:
                problem = f"mask {', '.join(absolute)} counts keys from 0, and a rolling cache drops the first ones"
                raise InputError(problem, remedy="KVCache() without a window")

    def _project(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, unbatched: bool
    ) -> list[torch.Tensor]:
        """Query, key and value as heads ``[B, H, S, D]``."""
        inputs = (query, key, value)
        for name, x, size in zip(
            ("query", "key", "value"), inputs, (self.embed_dim, self.kdim, self.vdim), strict=True
        ):
            if x.dim() != (2 if unbatched else 3) or x.shape[-1] != size:
                raise InputError(
                    f"{name} must have {size} features and rank {2 if unbatched else 3}, got {list(x.shape)}"
                )
        if query.is_nested and not self.batch_first:
            raise InputError("nested tensors are [B, j, E]", remedy="batch_first=True")
        stacked, bias = self.in_proj_weight, self.in_proj_bias
        if stacked is not None and key is query and value is query:
            parts = F.linear(query, stacked, bias).split(self._sizes, -1)
        else:
            own = [getattr(self, name) for name in _SEPARATE] if stacked is None else stacked.split(self._sizes)
            biases = (None, None, None) if bias is None else bias.split(self._sizes)
            parts = tuple(F.linear(x, w, b) for x, w, b in zip(inputs, own, biases, strict=True))
        heads = []
        for x, n in zip(parts, (self.num_heads, self.kv_heads, self.kv_heads), strict=True):
            x = x.unflatten(-1, (n, x.shape[-1] // n))  # [B, S, H, D], [S, B, H, D] or [S, H, D]
            x = x[None] if unbatched else x if self.batch_first else x.transpose(0, 1)
            heads.append(x.transpose(1, 2))
        return heads

    def _place(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, own: bool, cache: KVCache | None,
        lengths: torch.Tensor | None, positions: torch.Tensor | None, arguments: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        """Turn what has positions, and put the cache's keys before the new ones."""
        if self.rotary is not None:
            if q.is_nested:
                raise InputError("rotary positions of nested tensors are not known here", remedy="a padded batch")
            first: Any = 0 if cache is None else cache.length if cache.lengths is None else cache.lengths[:, None]
            place = torch.arange(q.shape[2], device=q.device) + first if positions is None else positions
            table = self.rotary.table(place, q.dtype)
            q = self.rotary.turn(q, *table)
            if not own:  # cross-attention: the keys count from 0, wherever the queries stand
                table = self.rotary.table(torch.arange(k.shape[2], device=k.device), k.dtype)
            k = self.rotary.turn(k, *table)
        if cache is None:
            if lengths is not None:
                arguments["key_lengths"] = lengths
            return q, k, v
        stored = cache.append(k, v, lengths)
        if stored.key_lengths is not None:
            arguments["key_lengths"] = stored.key_lengths
        if isinstance(
            stored.q_offset, torch.Tensor
        ):  # otherwise the last query sees the last key, as masks count anyway
            arguments["q_offset"] = stored.q_offset
        return q, stored.key, stored.value

    def _mask(
        self, arguments: dict[str, Any], q: torch.Tensor, k: torch.Tensor, causal: bool, attn_mask: Any,
        padding: torch.Tensor | None, cached: bool, unbatched: bool,
    ) -> None:  # fmt: skip
        """Write masks and biases, torch's kind and ours, the module's and the call's, as `dispatch.attention`'s."""
        biases: list[torch.Tensor] = [] if self._slopes is None else [self._slopes.on(q.device)]
        if (own := arguments.pop("bias", None)) is not None:  # the call's
            biases.append(own)
        parts: list[Mask] = [] if self.mask is None else [self.mask]
        tensors: list[tuple[torch.Tensor, type]] = []  # True = attend, and the atom for it
        if self.window is not None:
            arguments["window"] = self.window
        if isinstance(attn_mask, Mask):
            parts.append(attn_mask)
        elif attn_mask is not None:
            four = self._four("attn_mask", attn_mask, q, k)
            if four.dtype == torch.bool:
                tensors.append((~four, Dense))
            else:
                biases.append(four)
        if padding is not None:
            padding = padding[None] if unbatched else padding
            if padding.shape != (q.shape[0], k.shape[2]):
                problem = f"key_padding_mask must be [B, Skv] = {[q.shape[0], k.shape[2]]}, got {list(padding.shape)}"
                raise InputError(problem)
            if padding.dtype == torch.bool:
                tensors.append((~padding, Columns))
            else:
                biases.append(_float("key_padding_mask", padding)[:, None, None, :])
        if causal and cached and q.shape[2] == 1 and "key_lengths" not in arguments:
            causal = False  # the last query sees every key
        if causal and (cached or parts or self.window is not None):
            parts.append(Causal())  # of the last key, like what it is combined with
        elif causal:
            arguments["is_causal"] = True
        if len(tensors) == 1 and not parts:  # as a tensor: its pattern is recognised
            alone = tensors[0][0]
            arguments["attn_mask"] = alone if alone.ndim == 4 else alone[:, None, None, :]
        elif tensors or parts:
            for tensor, atom in tensors:
                parts.append(atom(tensor))
            arguments["attn_mask"] = reduce(and_, parts)
        if len(biases) == 1:
            arguments["bias"] = biases[0]
        elif biases:
            first = 0 if "is_causal" in arguments else k.shape[2] - q.shape[2]
            arguments["bias"] = self._sum(biases, q, k, arguments.get("q_offset", first))

    def _four(self, name: str, mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """torch's ``[Sq, Skv]`` or ``[B * Hq, Sq, Skv]`` as ``[1, 1, ..]`` or ``[B, Hq, ..]``."""
        mask = mask if mask.dtype == torch.bool else _float(name, mask)
        b, hq, sq, skv = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
        if tuple(mask.shape) == (sq, skv):
            return mask[None, None]
        if tuple(mask.shape) == (b * hq, sq, skv):
            return mask.unflatten(0, (b, hq))
        raise InputError(
            f"{name} must be {[sq, skv]} or [B * Hq, Sq, Skv] = {[b * hq, sq, skv]}, got {list(mask.shape)}"
        )

    def _sum(self, biases: list[torch.Tensor], q: torch.Tensor, k: torch.Tensor, offset: Any) -> torch.Tensor:
        if biases[0].ndim == 1:  # ALiBi beside another bias: written out
            if isinstance(offset, torch.Tensor):
                raise InputError("ALiBi with a float mask and rows of different lengths", remedy="a bool mask")
            at = torch.arange(q.shape[2], device=q.device)[:, None] + offset
            distance = (at - torch.arange(k.shape[2], device=q.device)).abs()
            slopes = biases[0].to(torch.promote_types(biases[0].dtype, q.dtype))  # float64 beside float64
            biases = [-slopes[:, None, None] * distance, *biases[1:]]
        total = biases[0]
        for bias in biases[1:]:
            total = total + bias
        return total[(None,) * (4 - total.ndim)]

    def extra_repr(self) -> str:
        """Sizes and what is not at its default."""
        words = [f"{self.embed_dim}, {self.num_heads}", f"kv_heads={self.kv_heads}", f"head_dim={self.head_dim}"]
        named: dict[str, Any] = {"rotary": self.rotary, "is_causal": self.is_causal or None, "window": self.window}
        named |= {"softcap": self.softcap, "mask": self.mask, "variant": self.variant}
        return ", ".join([*words, *(f"{n}={x}" for n, x in named.items() if x is not None and x != Softmax())])


_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def _float(name: str, mask: torch.Tensor) -> torch.Tensor:
    if not mask.is_floating_point():
        problem = f"{name} has dtype {mask.dtype}; it must be bool or float"
        raise InputTypeError(problem, remedy="bool, True = may not attend")
    return mask


def _as_ours(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuse what this module has not, and stack or split the input projections as it has them."""
    assert isinstance(module, MultiheadAttention)
    for name in ("bias_k", "bias_v"):
        if prefix + name in state:
            problem = f"{prefix}{name}: a learned extra key and value (add_bias_kv) is not supported"
            raise InputError(problem, remedy="sinks=True has the same use")
    packed, separate = prefix + "in_proj_weight", [prefix + name for name in _SEPARATE]
    if module.is_packed and packed not in state and all(name in state for name in separate):
        state[packed] = torch.cat([state.pop(name) for name in separate])
    elif not module.is_packed and packed in state:
        state.update(zip(separate, state.pop(packed).split(module._sizes), strict=True))
