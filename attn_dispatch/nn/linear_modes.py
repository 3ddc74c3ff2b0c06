"""What the layers of the linear family share: the three ways to run one op, and the rotation of queries and keys."""

from __future__ import annotations

from typing import Any

import torch

from attn_dispatch.dispatch import attention
from attn_dispatch.errors import InputError
from attn_dispatch.nn.rotary import turn_pairs
from attn_dispatch.variants import LinearState, Variant, WithState

__all__ = ["MODES", "attend", "positions_after", "rotate"]

MODES = ("auto", "parallel", "chunk", "recurrent")


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    *,
    mode: str = "auto",
    chunk_size: int | None = None,
    is_causal: bool = True,
    is_self: bool = True,
    lengths: torch.Tensor | None = None,
    state: LinearState | None = None,
    return_state: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, LinearState | None]:
    """One op of the linear family in the form that is asked for; all forms give the same, up to rounding.

    Shapes: q ``[B, Hq, T, D]``, k ``[B, Hkv, T, D]``, v ``[B, Hkv, T, Dv]`` -> ``[B, Hq, T, Dv]``.

    Args:
        mode: ``"auto"`` leaves it to the dispatcher; ``"parallel"`` writes out all pairs; ``"chunk"`` carries a state
            from chunk to chunk, of ``chunk_size`` tokens when given; ``"recurrent"`` goes token by token.
        is_self: whether queries and keys are of one sequence; those of a context may have its length by chance.
        lengths: true lengths ``[B]`` of right-padded keys; of one sequence, rows beyond are 0 when causal.
        state, return_state: as in `dispatch.attention`.

    Returns:
        The output, and the state or None.

    Raises:
        InputError: a mode that there is not, or one that needs causality without it.
    """
    if mode not in MODES:
        raise InputError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    if chunk_size is not None and (mode != "chunk" or chunk_size < 1):
        raise InputError(f"chunk_size is a positive number for mode='chunk', got {chunk_size} with mode={mode!r}")
    step = 1 if mode == "recurrent" else chunk_size
    if not is_causal and step is not None:
        raise InputError(f"mode={mode!r} goes through the tokens in order, so it needs is_causal=True")
    if mode == "parallel":
        options["backend"] = "eager"
    elif mode == "chunk" and q.shape[0] and q.shape[2]:  # of nothing there are no chunks
        options["backend"] = "linear"
    t = q.shape[2]
    if step is not None and t != k.shape[2]:
        problem = f"mode={mode!r} goes through queries and keys together, and there are {t} and {k.shape[2]}"
        raise InputError(problem, remedy="mode='auto' or 'parallel' for a context")
    if step is None or t == 0:
        options |= {"key_lengths": lengths, "query_lengths": lengths if is_causal and is_self else None}
        return _call(q, k, v, variant, is_causal, state, return_state, options)
    outs = []
    for lo in range(0, t, step):
        hi = min(lo + step, t)
        if lengths is not None:
            left = (lengths - lo).clamp(0, hi - lo)
            options |= {"key_lengths": left, "query_lengths": left if is_self else None}
        piece = [x[:, :, lo:hi] for x in (q, k, v)]
        out, state = _call(piece[0], piece[1], piece[2], variant, True, state, return_state or hi < t, options)
        outs.append(out)
    return torch.cat(outs, 2), state if return_state else None


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    variant: Variant,
    is_causal: bool,
    state: LinearState | None,
    return_state: bool,
    options: dict[str, Any],
) -> tuple[torch.Tensor, LinearState | None]:
    options = {"is_causal": is_causal, "enable_gqa": True, **options}
    result = attention(q, k, v, variant=variant, state=state, return_state=return_state, **options)
    return (result.out, result.state) if isinstance(result, WithState) else (result, None)


def positions_after(state: LinearState | None, tokens: int, device: torch.device) -> torch.Tensor:
    """Positions of the tokens behind a state, ``[B, T]``, or ``[1, T]`` when they start at 0."""
    at = torch.arange(tokens, device=device)[None]
    if state is None:
        return at
    return torch.as_tensor(state.length, device=device).reshape(-1, 1) + at


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring pairs of features by an angle that grows with the position, as RetNet does.

    Pair i of ``D / 2`` turns by ``position / 10000 ** (i / (D / 2 - 1))``: the last pair by 1/10000 of the first, where
    other models stop one step before.

    Args:
        x: ``[B, H, T, D]``, D even. positions: ``[B | 1, T]``.
    """
    half = x.shape[-1] // 2
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    speed = 10000.0 ** -torch.linspace(0, 1, half, device=x.device, dtype=wide)
    angle = positions[:, None, :, None] * speed
    return turn_pairs(x, angle.cos().to(x.dtype), angle.sin().to(x.dtype), interleaved=True)
