"""Enumerate the candidates of an op: every bounded chain of rewrites before every backend, each legal or refused."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from attn_dispatch.backend import Backend, Executable, Run
from attn_dispatch.capability import Reason
from attn_dispatch.ir.ops import AttentionOp, verify
from attn_dispatch.registry import Registry
from attn_dispatch.rewrites import MAX_CHAIN
from attn_dispatch.rewrites.base import Rewrite, Rewritten

__all__ = ["Candidate", "Chain", "build", "chains", "enumerate_candidates", "parse_name", "reasons_of"]


@dataclass(frozen=True)
class Chain:
    """A chain of rewrites applied to an op, outermost first, and the op that is left for a backend."""

    names: tuple[str, ...]
    steps: tuple[Rewritten, ...]
    op: AttentionOp


@dataclass(frozen=True)
class Candidate:
    """One way to run an op.

    Args:
        name: ``"bands > fold_groups > sdpa_flash"``.
        chain: the rewrites applied; backend: what runs the inner op.
        reasons: why it cannot; empty when it can.
    """

    name: str
    chain: Chain
    backend: Backend
    reasons: tuple[Reason, ...] = ()


def chains(op: AttentionOp, registry: Registry) -> tuple[list[Chain], dict[str, Reason]]:
    """All legal chains of at most `MAX_CHAIN` rewrites, in rising order, and why a rewrite does not apply to the op.

    A rewrite is tried on what the ones before it left, so each chain is found by search, not from a list.
    """
    found = [Chain((), (), op)]
    refused: dict[str, Reason] = {}
    frontier = list(found)
    for _ in range(MAX_CHAIN):
        longer = []
        for chain in frontier:
            last = registry.rewrites[chain.names[-1]].order if chain.names else -1
            for rewrite in registry.rewrites.values():
                if rewrite.order <= last:
                    continue
                result = _apply(rewrite, chain.op)
                if isinstance(result, Reason):
                    if not chain.names:
                        refused[rewrite.name] = result
                    continue
                longer.append(Chain((*chain.names, rewrite.name), (*chain.steps, result), result.inner))
        found += longer
        frontier = longer
    return found, refused


def _apply(rewrite: Rewrite, op: AttentionOp) -> Rewritten | Reason:
    """Apply a rewrite; one that raises or makes an invalid op is refused with the error, never silently."""
    if not rewrite.carries_state and (words := sorted(op.features & {"state:in", "state:out"})):
        return Reason("feature", words[0], True, False, text=f"{rewrite.name} does not hand on a state")
    try:
        result = rewrite.apply(op)
        if isinstance(result, Rewritten):
            verify(result.inner)
        return result
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's rewrite; the error becomes its reason
        return Reason("error", "rewrite", text=f"{type(error).__name__}: {error}", hint=_where(error))


def reasons_of(backend: Backend, op: AttentionOp, registry: Registry) -> tuple[Reason, ...]:
    """A backend's reasons, and what is known to be bad where it has none itself.

    One that raises or answers nonsense is refused with that as the reason.
    """
    try:
        answer = backend.reasons_against(op)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's check; the error becomes its reason
        text = f"its capability check raised {type(error).__name__}: {error}"
        return (Reason("error", "capability", text=text, hint=_where(error)),)
    if not isinstance(answer, (list, tuple)) or not all(isinstance(reason, Reason) for reason in answer):
        text = f"its capability check must return a list of Reason, got {answer!r}"
        return (Reason("error", "capability", text=text),)
    return tuple(answer) or _known_bad(backend, op, registry)


def _known_bad(backend: Backend, op: AttentionOp, registry: Registry) -> tuple[Reason, ...]:
    from attn_dispatch.selection.known_bad import entries, reason_against  # late: it stands above the pins

    if all(entry.backend != backend.name for entry in entries(registry)):
        return ()
    try:
        version = str(backend.version())
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a stranger's backend; the error becomes its reason
        return (Reason("error", "version", text=f"its version() raised {type(error).__name__}: {error}"),)
    reason = reason_against(backend.name, version, op, registry)
    return () if reason is None else (reason,)


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""


def enumerate_candidates(op: AttentionOp, registry: Registry) -> tuple[list[Candidate], dict[str, Reason]]:
    """Every chain before every backend, legal or not, and the rewrites that do not apply."""
    from attn_dispatch.selection.pins import settle  # late: it stands above this

    settle(registry)
    found, refused = chains(op, registry)
    return list(_cross(found, registry)), refused


def _cross(found: list[Chain], registry: Registry) -> Iterator[Candidate]:
    for chain in found:
        for backend in registry.backends.values():
            name = " > ".join((*chain.names, backend.name))
            yield Candidate(name, chain, backend, reasons_of(backend, chain.op, registry))


def parse_name(name: str, registry: Registry) -> tuple[tuple[str, ...], str]:
    """Split ``"fold_groups > sdpa_flash"`` into rewrites and backend.

    Raises:
        UnknownBackendError: a part that is not registered.
    """
    *rewrites, backend = (part.strip() for part in name.split(">"))
    registry.backend(backend)
    for rewrite in rewrites:
        if rewrite not in registry.rewrites:
            from attn_dispatch.errors import UnknownBackendError

            known = ", ".join(registry.rewrites)
            raise UnknownBackendError(f"there is no rewrite {rewrite!r} (in {name!r}). Registered: {known}")
    return tuple(rewrites), backend


def build(candidate: Candidate, op: AttentionOp) -> Executable:
    """Compile a candidate for an op: the backend's executable inside the chain's adapters."""
    compiled = candidate.backend.compile(candidate.chain.op)
    if not candidate.chain.steps:
        return compiled
    run: Run = compiled.behind_rewrites or compiled.run
    for step in reversed(candidate.chain.steps):
        run = step.adapt(run)
    return Executable(run)


def rebuild(name: str, op: AttentionOp, registry: Registry) -> Candidate | None:
    """The candidate of that name for another op of the same bucket; None when it does not apply, or is gone."""
    *rewrites, backend_name = name.split(" > ")
    if backend_name not in registry.backends or any(rewrite not in registry.rewrites for rewrite in rewrites):
        return None
    chain = Chain((), (), op)
    for rewrite_name in rewrites:
        result = _apply(registry.rewrites[rewrite_name], chain.op)
        if isinstance(result, Reason):
            return None
        chain = Chain((*chain.names, rewrite_name), (*chain.steps, result), result.inner)
    backend = registry.backends[backend_name]
    reasons = reasons_of(backend, chain.op, registry)
    return None if reasons else Candidate(name, chain, backend)
