"""The warm path: from the arguments of a call to a compiled plan in about a microsecond.

A table maps the options of a call (everything that is not a tensor) to a few routes. A route is a guard over the
tensors and what to run behind it; `find` gives the run of the first route whose guard holds.

`find` and the guard are C++ where ``attn-dispatch build`` has compiled them (`attn_dispatch.native`), and Python
elsewhere. The guard there is torch's own `TensorGuards`, the C++ object with which Dynamo guards a graph: one call of
0.5 us compares type, dispatch keys (device, autocast, vmap, inference), dtype, requires_grad and grad mode, sizes and
strides of all tensors. Reading the same facts in Python costs five times as much. It is not public, so `PythonGuard`
says the same in plain Python and is used where it is missing.

A length that grows by one each call (decode) does not add a route per length: the second length turns the route into
one that leaves the key length open within its bucket.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from attn_dispatch.backend import Run
from attn_dispatch.context import active
from attn_dispatch.ir.masks import Mask
from attn_dispatch.native import lookup
from attn_dispatch.registry.discover import on_reset
from attn_dispatch.selection.tuned import on_change

__all__ = ["PythonGuard", "Route", "Routes", "find", "find_in_python", "make_guard"]

Check = Callable[..., bool]

_MAX_ROUTES = 16  # per set of options; models alternate between a handful of shapes
_MAX_OPTIONS = 4096


class Route:
    """A guard, and what to run behind it.

    Args:
        check: says whether tensors are those that the plan was made for.
        run: the plan's run, which takes the tensors of the call beside query, key and value by name, as they come.
        length: the key length it was made for; 0 when that says nothing.
        runs: when the guard leaves the key length open, the run of each bucket by ``(length - 1).bit_length()``.
    """

    __slots__ = ("check", "length", "run", "runs")

    def __init__(self, check: Check, run: Run, length: int = 0, runs: dict[int, Run] | None = None) -> None:
        self.check, self.run, self.length, self.runs = check, run, length, runs


Table = dict[Any, tuple[Route, ...]]


def find_in_python(table: Table, options: tuple[Any, ...], tensors: tuple[Any, ...]) -> Run | None:
    """The run of the first route for these options and tensors; None where there is none.

    Args:
        options: the key of the call; one that cannot be hashed has no route. tensors: query, key, value and the others.
    """
    try:
        if tensors[0].is_nested or tensors[1].is_nested or tensors[2].is_nested:
            return None  # torch's guard ends the process for a strided one
        for route in table.get(options, ()):
            if route.check(*tensors):
                if route.runs is None:
                    return route.run
                length = tensors[1].size(2)  # left open by the guard: one run per bucket
                run = route.runs.get((length - 1).bit_length())
                if run is not None and tensors[2].size(2) == length:
                    return run
    except (TypeError, AttributeError):  # an unhashable or non-tensor argument: the slow path knows what to say of it
        pass
    return None


_compiled = lookup().module
find: Callable[[Table, tuple[Any, ...], tuple[Any, ...]], Run | None]
find = find_in_python if _compiled is None else _compiled.find
# The result of a call whose route was found lately, NotImplemented where there is none; None where nothing is compiled.
answer: Callable[..., Any] | None = None
if _compiled is not None:
    answer = _compiled.answer
    _compiled.watch(active, vars(forward_ad), Mask)


def _forget() -> None:
    if _compiled is not None:
        _compiled.forget()


class PythonGuard:
    """The facts that `TensorGuards` compares, in plain Python."""

    def __init__(self, tensors: Sequence[torch.Tensor], open_key_length: bool) -> None:
        self._open = open_key_length
        self._facts = [self._of(i, x) for i, x in enumerate(tensors)]

    def _of(self, index: int, x: torch.Tensor) -> tuple[Any, ...]:
        if x.is_nested:  # has no sizes, and is not what a guard is made for
            return ()
        shape = list(x.shape)
        if self._open and index in (1, 2) and x.ndim > 2:
            shape[2] = -1
        last = x.stride(-1) if x.ndim and x.size(-1) > 1 else 1
        facts = (type(x), shape, x.dtype, x.device, last, x.requires_grad and torch.is_grad_enabled())
        modes = (torch.is_inference_mode_enabled(), torch._C._is_any_autocast_enabled(), x.is_inference())
        return (*facts, *modes, torch._C._functorch.peek_interpreter_stack() is None)

    def check(self, *tensors: torch.Tensor) -> bool:
        """Whether the tensors are as they were."""
        return [self._of(i, x) for i, x in enumerate(tensors)] == self._facts


def make_guard(tensors: Sequence[torch.Tensor], open_key_length: bool = False) -> Check:
    """A check that holds for tensors like these; the last dimension's stride counts, the other strides do not."""
    if _compiled is not None:
        try:
            return _compiled.Guard(tuple(tensors), open_key_length)
        except (ValueError, TypeError, RuntimeError):  # sizes that are symbols, or a subclass's own
            return PythonGuard(tensors, open_key_length).check
    return _guard_by_torch(tensors, open_key_length)


def _guard_by_torch(tensors: Sequence[torch.Tensor], open_key_length: bool) -> Check:
    first = {id(x): i for i, x in reversed(list(enumerate(tensors)))}
    if len(first) == len(tensors):
        return _guard(tensors, open_key_length)
    # one tensor in several places (k is v): TensorGuards takes each once, so what is the same is compared by identity
    places = tuple((i, first[id(x)]) for i, x in enumerate(tensors) if first[id(x)] != i)
    once = tuple(sorted(first.values()))
    if open_key_length and once != (0, 1):
        return PythonGuard(tensors, True).check
    inner = _guard([tensors[i] for i in once], open_key_length)
    if once == (0, 1) and len(tensors) == 3:
        return lambda q, k, v: v is k and inner(q, k)

    def check(*given: torch.Tensor) -> bool:
        return all(given[i] is given[j] for i, j in places) and inner(*(given[i] for i in once))

    return check


def _guard(tensors: Sequence[torch.Tensor], open_key_length: bool) -> Check:
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: list[list[int | None]] = [list(x.shape) for x in tensors]
        for index in (1, 2) if open_key_length else ():
            if index < len(sizes):
                sizes[index][2] = None
        strides = [
            [*([None] * (x.ndim - 1)), x.stride(-1) if x.size(-1) > 1 else None] if x.ndim else [] for x in tensors
        ]
        guard = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
        return guard.check if guard.check(*tensors) else PythonGuard(tensors, open_key_length).check
    except (ImportError, TypeError, ValueError, RuntimeError):  # private to torch, may change
        return PythonGuard(tensors, open_key_length).check


class Routes:
    """Options of a call -> its routes. Reads take no lock: each value is a tuple that is replaced as a whole."""

    def __init__(self) -> None:
        self.table: Table = {}
        self._lock = threading.Lock()

    def add(self, options: Any, route: Route, replaces: Route | None = None) -> None:
        """Put a route in front of the others with the same options; the oldest go when there are too many."""
        with self._lock:
            kept = tuple(r for r in self.table.get(options, ()) if r is not replaces)
            if options not in self.table and len(self.table) >= _MAX_OPTIONS:
                self.table.pop(next(iter(self.table)))
            self.table[options] = (route, *kept[: _MAX_ROUTES - 1])
        if replaces is not None:
            _forget()

    def renew_lock(self) -> None:
        """Start with a free lock, in a process that was just forked."""
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Forget all routes."""
        with self._lock:
            self.table.clear()
        _forget()


routes = Routes()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=routes.renew_lock)
on_reset.append(routes.clear)
on_change.append(routes.clear)
