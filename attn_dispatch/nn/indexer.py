"""`LightningIndexer`: the layer that picks the keys of DeepSeek Sparse Attention (DeepSeek-V3.2)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from attn_dispatch.dispatch import select
from attn_dispatch.errors import InputError
from attn_dispatch.ir.masks import Mask
from attn_dispatch.select import Selection

__all__ = ["Indexed", "LightningIndexer"]


class Indexed(NamedTuple):
    """What a `LightningIndexer` returns.

    Args:
        indices: int64 ``[B, S, top_k]``, ascending, then -1; for `masks.selected`.
        keys: index keys ``[B, P + S, head_dim]`` of all tokens so far: the cache, ``past_keys=`` of the next call.
        scores: scores ``[B, S, top_k]`` of the selected keys, differentiable; None unless asked for.
    """

    indices: torch.Tensor
    keys: torch.Tensor
    scores: torch.Tensor | None


class LightningIndexer(nn.Module):
    """Scores all keys with a few small heads, and selects the best per query, for one attention layer or several.

    Parameters are those of DeepSeek-V3.2 (``wq_b``, ``wk``, ``k_norm``, ``weights_proj``), so that the state dict of
    transformers' ``DeepseekV32Indexer`` loads. The Hadamard rotation of the published kernel is left out: it changes no
    dot product.

    Args:
        hidden_size: size of the hidden states. num_heads, head_dim: of the index queries; keys have one head.
        top_k: keys per query.
        query_size: size of what index queries are made from (MLA's ``q_lora_rank``); default ``hidden_size``.
        rope_dim: the first ``rope_dim`` dimensions of each head are rotated, in halves (not interleaved); 0 for none.
        norm_eps: epsilon of the key's LayerNorm.

    Source: DeepSeek-AI 2025, DeepSeek-V3.2.

    Example:
        One selection serves several layers; decoding hands the index keys on.

        >>> import torch
        >>> from attn_dispatch import attention, masks, nn
        >>> indexer = nn.LightningIndexer(32, num_heads=2, head_dim=8, top_k=4, rope_dim=0)
        >>> x, q, k, v = torch.randn(1, 16, 32), *torch.randn(3, 1, 2, 16, 8)
        >>> chosen = indexer(x)
        >>> keep = masks.causal() & masks.selected(chosen.indices)
        >>> first = attention(q, k, v, keep)
        >>> second = attention(first, k, v, keep)  # the next layer, with the same selection
        >>> indexer(torch.randn(1, 1, 32), past_keys=chosen.keys).indices.shape
        torch.Size([1, 1, 4])
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 64,
        head_dim: int = 128,
        top_k: int = 2048,
        *,
        query_size: int | None = None,
        rope_dim: int = 64,
        norm_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, number in {"num_heads": num_heads, "head_dim": head_dim, "top_k": top_k}.items():
            if number < 1:
                raise InputError(f"{name} must be >= 1, got {number}")
        if rope_dim % 2 or not 0 <= rope_dim <= head_dim:
            raise InputError(f"rope_dim must be even and in [0, head_dim = {head_dim}], got {rope_dim}")
        self.num_heads, self.head_dim, self.top_k, self.rope_dim = num_heads, head_dim, top_k, rope_dim
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.wq_b = nn.Linear(query_size or hidden_size, num_heads * head_dim, bias=False, **where)
        self.wk = nn.Linear(hidden_size, head_dim, bias=False, **where)
        self.k_norm = nn.LayerNorm(head_dim, eps=norm_eps, **where)
        self.weights_proj = nn.Linear(hidden_size, num_heads, bias=False, **where)

    def forward(
        self,
        hidden_states: torch.Tensor,
        query: torch.Tensor | None = None,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        past_keys: torch.Tensor | None = None,
        attn_mask: torch.Tensor | Mask | None = None,
        is_causal: bool = True,
        key_lengths: torch.Tensor | None = None,
        q_offset: int | torch.Tensor | None = None,
        return_scores: bool = False,
    ) -> Indexed:
        """Select keys for the queries of these tokens, among the tokens before (``past_keys``) and these.

        Shapes: hidden_states ``[B, S, hidden_size]``, query ``[B, S, query_size]`` -> indices ``[B, S, top_k]``.

        Args:
            query: what index queries are made from (MLA's compressed query); default ``hidden_states``.
            position_embeddings: ``(cos, sin)``, each ``[S, rope_dim]`` or ``[B, S, rope_dim]``, of these tokens.
            past_keys: ``keys`` of the call before, ``[B, P, head_dim]``.
            attn_mask, is_causal, key_lengths, q_offset: what may be selected, as in `dispatch.select`.
            return_scores: also score the selected keys, with gradients for the indexer's training.

        Raises:
            InputError: ``rope_dim`` is not 0 and there are no position embeddings, or sizes that do not fit.
        """
        query = hidden_states if query is None else query
        queries = self.wq_b(query).unflatten(-1, (self.num_heads, self.head_dim))  # [B, S, H, head_dim]
        keys = self.k_norm(self.wk(hidden_states))
        if self.rope_dim:
            cos, sin = self._checked_rotation(position_embeddings)
            queries = _rotated(queries, cos[..., None, :], sin[..., None, :])
            keys = _rotated(keys, cos, sin)
        if past_keys is not None:
            if past_keys.ndim != 3 or past_keys.shape[0] != keys.shape[0] or past_keys.shape[2] != self.head_dim:
                want = f"[B, P, head_dim] = [{keys.shape[0]}, P, {self.head_dim}]"
                raise InputError(f"past_keys must be {want}, got {list(past_keys.shape)}")
            keys = torch.cat([past_keys, keys], 1)
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype))
        weights = (weights if weights.dtype == torch.float64 else weights.float()) * self.num_heads**-0.5
        found = select(
            queries,
            keys,
            weights,
            self.top_k,
            attn_mask=attn_mask,
            is_causal=is_causal,
            key_lengths=key_lengths,
            q_offset=q_offset,
            layout="bshd",
            return_scores=return_scores,
        )
        if isinstance(found, Selection):
            return Indexed(found.indices, keys, found.scores)
        return Indexed(found, keys, None)

    def _checked_rotation(self, given: tuple[torch.Tensor, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
        if given is None:
            problem = f"rope_dim is {self.rope_dim} and there are no position_embeddings"
            raise InputError(problem, remedy="position_embeddings=(cos, sin), or rope_dim=0 for an indexer without")
        cos, sin = given
        if cos.shape[-1] != self.rope_dim or cos.shape != sin.shape:
            problem = f"position_embeddings must end in rope_dim = {self.rope_dim}, got {list(cos.shape)}"
            raise InputError(f"{problem} and {list(sin.shape)}")
        return cos, sin

    def extra_repr(self) -> str:
        """Sizes, for ``print(module)``."""
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, top_k={self.top_k}, rope_dim={self.rope_dim}"


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of the first dimensions of ``x``: the first half of them pairs with the second.

    The tables are transformers', with a value for each feature and not for each pair as `rotary.turn_pairs` takes them.
    """
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, rest], -1)
