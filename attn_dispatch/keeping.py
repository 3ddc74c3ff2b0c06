"""Which plans get a route, and which routes may leave the key length open: the second half of the warm path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from attn_dispatch.backend import Run
from attn_dispatch.ir.ops import END, AttentionOp, bucket
from attn_dispatch.ir.scores import Alibi
from attn_dispatch.passes import canonicalise
from attn_dispatch.plan import Plan, name_at
from attn_dispatch.registry import current
from attn_dispatch.routes import Route, make_guard, routes
from attn_dispatch.selection.known_bad import looks_at_lengths
from attn_dispatch.selection.pins import current_pins

__all__ = ["keep_route"]


def keep_route(
    options: tuple[Any, ...],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    named: Mapping[str, torch.Tensor],
    made: Plan,
) -> None:
    """Remember the way to a plan; a second key length in the same bucket opens the length.

    Args:
        options: the key of the call. query, key, value, named: its tensors. made: what it ran.
    """
    tensors = (query, key, value, *named.values())
    prepare = made.binding.prepare
    as_given = all(step is None for _, step in prepare) and [name for name, _ in prepare] == list(named)
    run = made.run if as_given else _prepared(made)
    length = key.size(2) if key.ndim == 4 and _know_no_length(named, made) else 0
    others = routes.table.get(options, ()) if length else ()
    opened = next((r for r in others if r.runs is not None and r.check(*tensors)), None)
    like = next((r for r in others if _same_but_length(r, tensors)), None)
    if (opened is not None or like is not None) and _is_right_for_its_bucket(made):
        index = (length - 1).bit_length()
        if opened is not None and opened.runs is not None:
            opened.runs[index] = run
            return
        guard = make_guard(tensors, open_key_length=True)
        routes.add(options, Route(guard, run, 0, {index: run}), replaces=like)
        return
    routes.add(options, Route(make_guard(tensors), run, length))


def _prepared(made: Plan) -> Run:
    """The run of a plan that makes its operands of the tensors of the call."""
    run, operands, prepare = made.run, made.binding.operands, made.binding.prepare
    name, step = prepare[0] if len(prepare) == 1 else ("", None)
    if step is not None:  # a mask: each layer of a padded decode step comes here
        return lambda q, k, v, named: run(q, k, v, {name: step(named[name])})
    return lambda q, k, v, named: run(q, k, v, operands(named))


# Tensors that stay as they are when the keys grow. Others (masks, biases, lists) have a size or a check of that length.
_LENGTHLESS = frozenset({"key_lengths", "query_lengths", "q_offset", "sinks", "decay"})


def _know_no_length(named: Mapping[str, torch.Tensor], made: Plan) -> bool:
    """Whether a route of a call with these tensors may be asked to leave the key length open."""
    slopes = {"bias"} if "bias" in named and named["bias"].ndim == 1 else set()
    return not set(named) - _LENGTHLESS - slopes and not made.op.outputs.state


def _same_but_length(route: Route, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a route is for this call at another key length of the same bucket: it accepts keys of its own length."""
    query, key, value, *rest = tensors
    if route.length == 0 or bucket(route.length) != bucket(key.size(2)):
        return False
    own = [x.new_empty((*x.shape[:2], route.length, x.shape[3])).requires_grad_(x.requires_grad) for x in (key, value)]
    return route.check(query, own[0], own[0] if value is key else own[1], *rest)


def _is_right_for_its_bucket(made: Plan) -> bool:
    """Whether this plan is right for every key length of its bucket, so that its route may leave the length open.

    One canonical op and a legal candidate at both ends: the passes change their mind at most once in between.
    """
    op = made.op
    hi = bucket(op.Skv)
    lo = hi // 2 + 1
    if op.Skv <= 16 or lo <= op.Sq <= hi or not made.binding.form.is_plain or _asks_lengths():
        return False
    if op.q_offset == END and any(_has_own_positions(step.inner) for step in made.decision.chosen.chain.steps):
        return False
    for length in (lo, hi):
        other, _ = canonicalise(made.binding.op.resized(op.B, op.Sq, length))
        if _without_lengths(other) != _without_lengths(op) or name_at(made, other) != made.name:
            return False  # another op in between, or a candidate that is liked better and takes other lengths
    return True


def _has_own_positions(inner: AttentionOp) -> bool:
    """Whether a rewrite wrote down as a number where the queries stand, which moves with the key length."""
    counts = inner.mask.positional or any(isinstance(term, Alibi) for term in inner.score)
    return counts and isinstance(inner.q_offset, int)


def _asks_lengths() -> bool:
    return current_pins().has_lengths or looks_at_lengths(current())


def _without_lengths(op: AttentionOp) -> AttentionOp:
    return op.resized(op.B, op.Sq, 1 << 20)
