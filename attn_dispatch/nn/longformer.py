"""Longformer with projections of its own for global tokens: two attentions and a row select, not an attribute of one.

Local rows see their window and the global tokens, all through the ordinary projections. Global rows see every token,
through the global projections, and replace what the first attention gave them.
"""

from __future__ import annotations

import torch
from torch import nn

from attn_dispatch import masks
from attn_dispatch.dispatch import attention
from attn_dispatch.errors import InputError, InputTypeError

__all__ = ["LongformerSelfAttention", "longformer_untied"]


def longformer_untied(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    side: int,
    *,
    is_global: torch.Tensor,
    query_global: torch.Tensor,
    key_global: torch.Tensor,
    value_global: torch.Tensor,
    valid: torch.Tensor | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Longformer attention of projected tensors, global tokens by their own projections.

    Args:
        query, key, value: ``[B, H, S, D]``. side: one-sided width of the window.
        is_global: bool ``[B, S]``; query_global, key_global, value_global: ``[B, H, S, D]``, of which only the global
            rows of the query are used.
        valid: bool ``[B, S]``, False for padding: such keys are seen by nobody, and such rows are 0.

    Returns:
        ``[B, H, S, D]``.

    Example:
        >>> q, k, v, qg, kg, vg = torch.randn(6, 1, 2, 8, 4).unbind()
        >>> first = torch.arange(8)[None] == 0
        >>> longformer_untied(
        ...     q, k, v, 2, is_global=first, query_global=qg, key_global=kg, value_global=vg
        ... ).shape
        torch.Size([1, 2, 8, 4])
    """
    _check_marks("is_global", is_global, query)
    is_global = is_global if valid is None else is_global & valid
    out = _local_rows(query, key, value, side, is_global, valid, dropout_p)
    at = _positions(is_global)
    if at.shape[1] == 0:
        return out
    picked = query_global.gather(2, at[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3]))
    rows = attention(picked, key_global, value_global, attn_mask=_padding(valid), dropout_p=dropout_p)
    return _select(out, rows, at, is_global)


class LongformerSelfAttention(nn.Module):
    """Longformer's self-attention with projections; takes the state dict of Hugging Face's module of that name.

    Args:
        embed_dim: size of a token, ``num_heads`` times the head size.
        num_heads: heads. attention_window: keys to both sides together, an even number as Hugging Face counts it.
        dropout: probability that an attention weight is dropped in training.

    Example:
        >>> layer = LongformerSelfAttention(32, 4, attention_window=8)
        >>> x = torch.randn(2, 40, 32)
        >>> layer(x, is_global=(torch.arange(40) == 0).expand(2, 40)).shape
        torch.Size([2, 40, 32])
    """

    def __init__(self, embed_dim: int, num_heads: int, attention_window: int, dropout: float = 0.0) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise InputError(f"embed_dim {embed_dim} is not a multiple of num_heads {num_heads}")
        if attention_window < 2 or attention_window % 2:
            remedy = "a window of w keys to each side is attention_window=2 * w"
            raise InputError(f"attention_window must be even and positive, got {attention_window}", remedy=remedy)
        self.num_heads, self.head_dim, self.side = num_heads, embed_dim // num_heads, attention_window // 2
        self.dropout = dropout
        self.query = nn.Linear(embed_dim, embed_dim)
        self.key = nn.Linear(embed_dim, embed_dim)
        self.value = nn.Linear(embed_dim, embed_dim)
        self.query_global = nn.Linear(embed_dim, embed_dim)
        self.key_global = nn.Linear(embed_dim, embed_dim)
        self.value_global = nn.Linear(embed_dim, embed_dim)

    def forward(
        self, x: torch.Tensor, is_global: torch.Tensor | None = None, valid: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend.

        Args:
            x: ``[B, S, embed_dim]``, of any length. is_global: bool ``[B, S]``, the global tokens; None for none.
            valid: bool ``[B, S]``, False for padding, whose rows become 0; None for no padding.

        Returns:
            ``[B, S, embed_dim]``, before any output projection, as in Hugging Face's module.
        """
        dropout_p = self.dropout if self.training else 0.0
        q, k, v = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        if is_global is not None:
            _check_marks("is_global", is_global, q)
            is_global = is_global if valid is None else is_global & valid
        out = _local_rows(q, k, v, self.side, is_global, valid, dropout_p)
        if is_global is not None:
            at = _positions(is_global)
            if at.shape[1]:
                out = _select(out, self._global_rows(x, at, valid, dropout_p), at, is_global)
        return out.transpose(1, 2).flatten(2)

    def _global_rows(
        self, x: torch.Tensor, at: torch.Tensor, valid: torch.Tensor | None, dropout_p: float
    ) -> torch.Tensor:
        """Rows of the global tokens, ``[B, H, n, D]``."""
        picked = self._heads(self.query_global(x.gather(1, at[..., None].expand(-1, -1, x.shape[2]))))
        if dropout_p == 0 and 2 * at.shape[1] <= self.head_dim:
            return self._few_rows(x, picked, valid)
        k, v = self._heads(self.key_global(x)), self._heads(self.value_global(x))
        return attention(picked, k, v, attn_mask=_padding(valid), dropout_p=dropout_p)

    def _few_rows(self, x: torch.Tensor, queries: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        """The same with the projections of key and value moved to the few queries and results.

        ``q . (W x + b) = (W^T q) . x + q . b``, and what is the same for every key changes no softmax. Weights sum to
        1, so ``sum p (W x + b) = W (sum p x) + b``. No token is projected, and all heads share one key: the token.
        """
        w_k = self.key_global.weight.unflatten(0, (self.num_heads, self.head_dim))
        w_v = self.value_global.weight.unflatten(0, (self.num_heads, self.head_dim))
        tokens = x[:, None]
        mixed = attention(
            queries @ w_k, tokens, tokens, attn_mask=_padding(valid), scale=self.head_dim**-0.5, enable_gqa=True
        )
        bias = self.value_global.bias.unflatten(0, (self.num_heads, 1, self.head_dim))
        if torch.is_grad_enabled():  # changes nothing, so its gradient is 0, and not None, which DDP waits for
            bias = bias + self.key_global.bias[:0].sum()
        return mixed @ w_v.transpose(1, 2) + bias

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)


def _local_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    side: int,
    is_global: torch.Tensor | None,
    valid: torch.Tensor | None,
    dropout_p: float,
) -> torch.Tensor:
    if valid is not None:
        _check_marks("valid", valid, q)
    out = attention(q, k, v, attn_mask=masks.longformer(side, is_global, valid, global_rows=False), dropout_p=dropout_p)
    return out if valid is None else out.masked_fill(~valid[:, None, :, None], 0.0)


def _check_marks(name: str, marks: torch.Tensor, query: torch.Tensor) -> None:
    want = (query.shape[0], query.shape[2])
    if marks.dtype != torch.bool:
        raise InputTypeError(f"{name} must be bool, got {marks.dtype}", remedy=f"{name}.bool()")
    if tuple(marks.shape) != want:
        raise InputError(f"{name} must have shape [B, S] = {list(want)}, got {list(marks.shape)}")


def _padding(valid: torch.Tensor | None) -> masks.Mask | None:
    return None if valid is None else masks.columns(keep=valid)


def _positions(marks: torch.Tensor) -> torch.Tensor:
    """Positions of the marked tokens ``[B, n]``; a batch with fewer than n has other tokens behind them."""
    most = int(marks.sum(-1).max()) if marks.shape[0] else 0
    return marks.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, :most]


def _select(out: torch.Tensor, rows: torch.Tensor, at: torch.Tensor, is_global: torch.Tensor) -> torch.Tensor:
    """``out [B, H, S, D]`` with the rows ``at [B, n]`` replaced where they are global."""
    batch, nth = is_global.gather(1, at).nonzero(as_tuple=True)
    values = rows.transpose(1, 2)[batch, nth].to(out.dtype)
    return out.transpose(1, 2).index_put((batch, at[batch, nth]), values).transpose(1, 2)
