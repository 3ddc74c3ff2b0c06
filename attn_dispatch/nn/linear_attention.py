"""`LinearAttention`: projections around linear attention, with a state of fixed size in and out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from attn_dispatch import variants
from attn_dispatch.errors import InputError
from attn_dispatch.nn.linear_modes import attend, positions_after, rotate
from attn_dispatch.variants import LinearState, WithState

__all__ = ["LinearAttention"]


class LinearAttention(nn.Module):
    """A layer of linear attention (Katharopoulos et al. 2020): project, attend with ``phi(q) phi(k)^T``, project back.

    Shapes: x ``[B, T, E]`` -> ``[B, T, E]``.

    Args:
        embed_dim: E. num_heads: query heads. kv_heads: key and value heads, default as many.
        head_dim: default ``embed_dim // num_heads``.
        feature_map, normalizer_eps: see `variants.LinearAttention`.
        rotary: turn queries and keys by their position before the feature map.
        bias: whether the projections have one.

    Raises:
        InputError: sizes that do not divide.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> layer, x = LinearAttention(16, 2), torch.randn(1, 10, 16)
        >>> first, state = layer(x[:, :6], return_state=True)
        >>> rest = layer(x[:, 6:], state=state)
        >>> torch.allclose(torch.cat([first, rest], 1), layer(x), atol=1e-5)
        True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        feature_map: str = "elu1",
        normalizer_eps: float | None = 1e-6,
        rotary: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.kv_heads = num_heads, num_heads if kv_heads is None else kv_heads
        if head_dim is None and embed_dim % num_heads:
            raise InputError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}", remedy="head_dim=...")
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        if self.kv_heads < 1 or num_heads % self.kv_heads:
            raise InputError(f"num_heads {num_heads} is not a multiple of kv_heads {self.kv_heads}")
        if rotary and self.head_dim % 2:
            raise InputError(f"rotary turns pairs of features: head_dim must be even, got {self.head_dim}")
        self.rotary = rotary
        self.variant = variants.LinearAttention(feature_map, normalizer_eps)
        made: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, **made)
        self.k_proj = nn.Linear(embed_dim, self.kv_heads * self.head_dim, **made)
        self.v_proj = nn.Linear(embed_dim, self.kv_heads * self.head_dim, **made)
        self.out_proj = nn.Linear(num_heads * self.head_dim, embed_dim, **made)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        *,
        is_causal: bool | None = None,
        mode: str = "auto",
        chunk_size: int | None = None,
        lengths: torch.Tensor | None = None,
        state: LinearState | None = None,
        return_state: bool = False,
    ) -> Any:
        """Attend over ``x``, or from ``x`` over ``context``.

        Args:
            context: ``[B, S, E]`` for cross-attention; None attends over x itself.
            is_causal: default True without a context, False with one.
            mode, chunk_size: how it runs, see `linear_modes.attend`; the result is the same.
            lengths: true lengths ``[B]`` of the right-padded keys.
            state: what came before x. return_state: return ``(out, state)``.
        """
        source = x if context is None else context
        causal = context is None if is_causal is None else is_causal
        q = self.q_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = (p(source).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        if self.rotary:
            if context is not None:
                raise InputError("rotary with a context: its keys have no position beside x", remedy="rotary=False")
            at = positions_after(state, x.shape[1], x.device)
            q, k = rotate(q, at), rotate(k, at)
        run = {
            "mode": mode,
            "chunk_size": chunk_size,
            "is_causal": causal,
            "is_self": context is None,
            "lengths": lengths,
        }
        out, after = attend(q, k, v, self.variant, state=state, return_state=return_state, **run)  # type: ignore[arg-type]
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return WithState(out, after) if after is not None else out
