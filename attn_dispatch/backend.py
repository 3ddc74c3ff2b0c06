"""What a backend is: the class to inherit, and the two values it returns, `Executable` and `Cost`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, final

import torch

from attn_dispatch.capability import Capability, Reason, compare
from attn_dispatch.ir.ops import AttentionOp
from attn_dispatch.state import LinearState

__all__ = ["OPTION_TYPES", "Backend", "Cost", "Executable", "Operands", "Raw", "Run", "options_text"]

Operands = Mapping[str, torch.Tensor]

# What an option of a backend may be, in the words of a message.
OPTION_TYPES: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Raw(NamedTuple):
    """What an executable returns when more than the output is wanted; ``lse`` is ``[B, Hq, Sq]`` in fp32 (fp64).

    ``state`` is the linear family's, made of tensors of its own.
    """

    out: torch.Tensor
    lse: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    state: LinearState | None = None


# run(query, key, value, operands) -> out, or Raw when op.outputs asks for more
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Operands], Any]


@dataclass(frozen=True)
class Executable:
    """A compiled op: ``run(query, key, value, operands)`` on ``[B, H, S, D]`` tensors.

    It must be right for every batch and length that its op's bucket and the backend's capability admit.

    Args:
        run: returns the output ``[B, Hq, Sq, Dv]``, or `Raw` when ``op.outputs`` asks for more.
        behind_rewrites: the same for fewer keys than the bucket holds as well, which a rewrite that cuts padding off
            may pass; None when ``run`` is right for those too.
    """

    run: Run
    behind_rewrites: Run | None = None


@dataclass(frozen=True)
class Cost:
    """What running an op costs, for the heuristic: measured rates turn it into time.

    Args:
        flops: floating-point operations; bytes: memory traffic; launches: kernel launches or Python-level steps.
    """

    flops: float = 0.0
    bytes: float = 0.0
    launches: float = 1.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.launches + other.launches)

    def times(self, n: float) -> Cost:
        """This cost n times over."""
        return Cost(self.flops * n, self.bytes * n, self.launches * n)


class Backend:
    """Base class of backends. A backend states its `capabilities`, and compiles ops that nothing speaks against.

    Attributes:
        name: unique among all installed backends.
        capabilities: the facts, one `Capability` for each set of device types whose facts differ.
        hints: remedy by feature word or ``"dtype"``, shown with a refusal.
        tested: where it has been seen to run, for the support matrix; say so honestly.
        compile_s: seconds that `compile` takes for an op it has not seen, when that is worth saying. The tuner counts
            it, and the contract suite runs such a backend on chosen cases only.
        start_s: seconds that its library takes to start in a process, when that is worth saying. An estimate alone
            never chooses such a backend where another can run the op: only a name or a measurement does.
        options: what ``backends:`` of a pin file may set, name -> default: a bool, int, float or str, and of that type
            is what may be set. The values in force are in `configured`.
    """

    name: str = ""
    capabilities: tuple[Capability, ...] = ()
    hints: dict[str, str] = {}  # noqa: RUF012 - a class constant
    tested: str = "cpu"
    compile_s: float = 0.0
    start_s: float = 0.0
    options: Mapping[str, Any] = _NOTHING
    _options_given: Mapping[str, Any] = _NOTHING

    def version(self) -> str:
        """Version of the library behind it; part of what a tuned record depends on."""
        return torch.__version__

    def unavailable(self) -> Reason | None:
        """Why it cannot run on this machine at all (library missing, no such device); None when it can."""
        return None

    def extra_reasons(self, op: AttentionOp) -> list[Reason]:
        """Reasons that no declared fact can express; most backends have none."""
        return []

    def remarks(self, op: AttentionOp) -> list[str]:
        """What `explain` adds about an op that it takes; unlike `reasons_against`, this may load its library."""
        return []

    @final
    @property
    def configured(self) -> Mapping[str, Any]:
        """The options in force: those that pin files give, and the defaults of the rest; read-only.

        They are there before the first question about an op, and not yet in ``__init__``.
        """
        return MappingProxyType({**self.options, **self._options_given})

    @final
    def configure(self, given: Mapping[str, Any]) -> None:
        """Set options in place of those set before; pin files do, when they are read, and tests of a backend may.

        Raises:
            ValueError: there is no such option.
        """
        if unknown := [name for name in given if name not in self.options]:
            raise ValueError(f"{self.name} has no option {unknown[0]!r}. It has: {', '.join(self.options) or 'none'}")
        object.__setattr__(self, "_options_given", dict(given))  # a frozen dataclass forbids the plain way

    def reasons_against(self, op: AttentionOp) -> list[Reason]:
        """Everything that speaks against this op, with values and limits."""
        missing = self.unavailable()
        if missing is not None:
            return [missing]
        return compare(self.capability_on(op.device), op, self.hints) or self.extra_reasons(op)

    def capability_on(self, device_type: str) -> Capability:
        """The facts for a device type; for a type that it does not run on, the first, whose devices say so."""
        for capability in self.capabilities:
            if device_type in capability.devices:
                return capability
        devices = frozenset().union(*(c.devices for c in self.capabilities))
        return replace(self.capabilities[0], devices=devices)

    def compile(self, op: AttentionOp) -> Executable:
        """Make the op executable; called only when `reasons_against` is empty. Import the library here."""
        raise NotImplementedError

    def estimate(self, op: AttentionOp) -> Cost:
        """FLOPs and bytes for the heuristic; the default is dense attention without skipping."""
        return dense_cost(op)


def options_text(backend: Backend) -> str:
    """The options that are not at their defaults, ``"tile=32, fast=True"``; empty when all are."""
    values = backend.configured.items()
    return ", ".join(f"{name}={value!r}" for name, value in values if value != backend.options[name])


def dense_cost(op: AttentionOp, visited: float = 1.0, materialised: int = 0) -> Cost:
    """Cost of attention that visits a fraction of all pairs.

    Args:
        visited: part of the pairs that are computed.
        materialised: how many times a ``[B, Hq, Sq, Skv]`` fp32 array is written or read.
    """
    pairs = op.B * op.Hq * op.Sq * op.Skv
    rows = op.query.itemsize
    io = rows * (op.B * op.Hq * op.Sq * (op.D + op.Dv) + op.B * op.Hkv * op.Skv * (op.D + op.Dv))
    return Cost(2.0 * pairs * (op.D + op.Dv) * visited, io + 4.0 * pairs * visited * materialised, 1.0)
