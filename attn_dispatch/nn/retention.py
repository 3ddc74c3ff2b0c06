"""`Retention`: RetNet's multi-scale retention, in its parallel, chunkwise and recurrent form."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from attn_dispatch import variants
from attn_dispatch.errors import InputError
from attn_dispatch.nn.linear_modes import attend, positions_after, rotate
from attn_dispatch.nn.per_device import PerDevice
from attn_dispatch.variants import LinearState, WithState, retention_decay

__all__ = ["Retention"]


class Retention(nn.Module):
    """Multi-scale retention (Sun et al. 2023): rotated projections, retention, a norm per head, a swish gate.

    Parameters have the names and shapes of torchscale's ``MultiScaleRetention``, whose state dict loads here. It
    divides scores by positive numbers per row, which its norm removes again but for eps; we do not.

    Shapes: x ``[B, T, E]`` -> ``[B, T, E]``.

    Args:
        embed_dim: E, also the size of queries and keys. num_heads: heads here.
        value_dim: default ``2 * embed_dim``, as in RetNet.
        decay: ``[num_heads]`` in (0, 1]; default `retention_decay`.
        first_head: global number of the first head, when the heads of a layer are spread over devices: the decay
            follows the global number.
        rotary: turn queries and keys by their position. gate: the swish gate. eps: of the norm.

    Raises:
        InputError: sizes that do not divide.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> layer, x = Retention(16, 2), torch.randn(1, 10, 16)
        >>> whole = layer(x, mode="parallel")
        >>> all(torch.allclose(layer(x, mode=mode), whole, atol=1e-5) for mode in ("chunk", "recurrent"))
        True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        value_dim: int | None = None,
        decay: torch.Tensor | None = None,
        first_head: int = 0,
        rotary: bool = True,
        gate: bool = True,
        eps: float = 1e-6,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        value_dim = 2 * embed_dim if value_dim is None else value_dim
        for name, size in (("embed_dim", embed_dim), ("value_dim", value_dim)):
            if size % num_heads:
                raise InputError(f"{name} {size} is not a multiple of num_heads {num_heads}")
        if rotary and embed_dim // num_heads % 2:
            raise InputError(f"rotary turns pairs of features: head size must be even, got {embed_dim // num_heads}")
        self.num_heads, self.rotary, self.eps = num_heads, rotary, eps
        if decay is None:
            with torch.device("cpu"):  # wherever the weights are made: on meta there would be no values
                decay = retention_decay(num_heads, first=first_head)
        if tuple(decay.shape) != (num_heads,):
            raise InputError(f"decay must be [num_heads] = [{num_heads}], got {list(decay.shape)}")
        if decay.is_meta:
            raise InputError("decay is on meta, where it has no values", remedy="a decay made on the CPU, or none")
        made: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, embed_dim, **made)
        self.k_proj = nn.Linear(embed_dim, embed_dim, **made)
        self.v_proj = nn.Linear(embed_dim, value_dim, **made)
        self.g_proj = nn.Linear(embed_dim, value_dim, **made) if gate else None
        self.out_proj = nn.Linear(value_dim, embed_dim, **made)
        # no buffer: module.to(bfloat16) would round the decay of head 4 and above to 1, which is no decay at all
        self._variants = PerDevice(decay, variants.Retention, self.out_proj.weight.device)
        self.reset_parameters()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._variants.follow(fn)
        return super()._apply(fn, recurse)

    def reset_parameters(self) -> None:
        """RetNet's initial weights: Xavier, narrower by ``2 ** -2.5`` but for the last."""
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.g_proj):
            if layer is not None:
                nn.init.xavier_uniform_(layer.weight, gain=2**-2.5)
        nn.init.xavier_uniform_(self.out_proj.weight)

    @property
    def decay(self) -> torch.Tensor:
        """The decay per head, ``[num_heads]``, on the CPU."""
        return self._variants.table

    def forward(
        self,
        x: torch.Tensor,
        *,
        mode: str = "auto",
        chunk_size: int | None = None,
        lengths: torch.Tensor | None = None,
        state: LinearState | None = None,
        return_state: bool = False,
    ) -> Any:
        """Retain over ``x``, causally.

        Args:
            mode, chunk_size: how it runs, see `linear_modes.attend`; the result is the same.
            lengths: true lengths ``[B]`` of a right-padded batch; rows beyond are 0.
            state: what came before x; its length sets the positions. return_state: return ``(out, state)``.
        """
        q, k, v = (
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.rotary:
            at = positions_after(state, x.shape[1], x.device)
            q, k = rotate(q, at), rotate(k, at)
        variant = self._variants.on(x.device)
        run: dict[str, Any] = {"mode": mode, "chunk_size": chunk_size, "lengths": lengths, "state": state}
        out, after = attend(q, k, v, variant, return_state=return_state, **run)
        out = self._norm(out.transpose(1, 2)).flatten(2)
        if self.g_proj is not None:
            out = F.silu(self.g_proj(x)) * out
        out = self.out_proj(out)
        return WithState(out, after) if after is not None else out

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        """Each head to a root mean square of 1, without weights."""
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
