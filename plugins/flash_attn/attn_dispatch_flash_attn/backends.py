"""`FlashAttn`, the backend of one line: its facts at the installed version, and what no single fact can say.

All lines count positions from the last key, take ``[B, S, H, D]``, and share query heads as ``h // groups``, as DESIGN
section 2 does. Their kernels take the maximum of the scores before they scale, so ``scale <= 0`` is not declared.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from attn_dispatch.plugin import (
    Alibi,
    AttentionOp,
    Backend,
    BackendError,
    Capability,
    Causal,
    Cost,
    Executable,
    KeyLengths,
    Limit,
    Reason,
    Segments,
    SoftCap,
    Softmax,
    Window,
    dense_cost,
)
from attn_dispatch_flash_attn.calls import compile_cache, compile_dense, compile_documents, key_end, mask_parts
from attn_dispatch_flash_attn.facts import Line, Step, installed_version, known_at, parse

__all__ = ["FlashAttn"]

_INSTALL = {
    "flash_attn_2": "pip install flash-attn --no-build-isolation",
    "flash_attn_3": "build hopper/ of github.com/Dao-AILab/flash-attention",
    "flash_attn_4": "pip install flash-attn-4",
}


class FlashAttn(Backend):
    """One line of FlashAttention.

    Args:
        line: its facts. version: of the library; default what is installed. A library that is not installed is
            described by its newest facts, and refuses every op.
    """

    tested = "untested"
    hints = {  # noqa: RUF012
        "dtype": "cast to bfloat16 or float16",
        "weights": 'backend="eager"',
        "score:Bias": 'backend="flex"',
    }

    def __init__(self, line: Line, version: str | None = None) -> None:
        self.line = line
        self.name = line.name
        self._version = version if version is not None else installed_version(line)
        self.known: Step = known_at(line, self._version or line.steps[-1].since)
        self.capabilities = (
            Capability(
                devices=frozenset({"cuda"}),
                dtypes=frozenset({"float16", "bfloat16"}),
                features=self.known.features,
                limits=(
                    *(Limit(name, minimum=1) for name in ("B", "Hq", "Sq", "Skv")),
                    *(Limit(name, 8, None, 8, f"pad_head_dim > {line.name}") for name in ("D", "Dv")),
                ),
                deterministic="deterministic" in self.known.can,
                notes=f"untested here; read from the source; version {self._version or 'not installed'}",
            ),
        )

    def version(self) -> str:
        return self._version or "none"

    def unavailable(self) -> Reason | None:
        """All that is missing, in one reason: the library, a GPU, a GPU that it has kernels for, a newer version."""
        line, problems, oldest = self.line, [], self.line.steps[0].since
        too_old = self._version is not None and parse(self._version) < parse(oldest)
        if self._version is None:
            problems.append(f"{line.distributions[0]} is not installed")
        elif too_old:
            problems.append(f"{line.distributions[0]} {self._version} < {oldest}")
        gpu = self.compute_capability()
        if gpu is None:
            problems.append("there is no CUDA device")
        elif not too_old and gpu[0] not in self.known.majors:
            runs_on = ", ".join(f"{m}.x" for m in sorted(self.known.majors))
            problems.append(f"compute capability {gpu[0]}.x, has kernels for {runs_on}")
        if not problems:
            return None
        hint = _INSTALL[line.name] if self._version is None else ""
        return Reason("device", "library", self._version, line.name, hint, "; ".join(problems))

    def compute_capability(self) -> tuple[int, int] | None:
        """Compute capability of the current GPU; None without one. (An op does not say which GPU it is for.)"""
        return torch.cuda.get_device_capability() if torch.cuda.is_available() else None

    def extra_reasons(self, op: AttentionOp) -> list[Reason]:
        gpu = self.compute_capability() or (min(self.known.majors), 0)
        sizes = self._sizes(op, gpu) or self._backward_sizes(op, gpu)
        pairs = _pairs(op, self.name, self.known.can) + self._pairs_on(op, gpu)
        if op.dropout_p >= 1:  # the kernels divide by 1 - p
            text = f"dropout {op.dropout_p:g}, takes less than 1"
            pairs.append(Reason("limit", "dropout_p", op.dropout_p, "< 1", 'backend="eager"', text))
        return [*sizes, *_positions(op), *pairs]

    def _sizes(self, op: AttentionOp, gpu: tuple[int, int]) -> list[Reason]:
        major = gpu[0]
        largest = self.line.largest_head_dim(major)
        own = (op.D, op.Dv) == (192, 128) or (_is_256(op) and "head_256" in self.known.can)
        if self.name == "flash_attn_4" and major in (10, 11) and own:
            return []  # kernels of their own
        if self.name == "flash_attn_3" and op.Dv != op.D and not _fits_flash_3(op):
            text = f"head_dim {op.D} with value head_dim {op.Dv}"
            return [Reason("limit", "value head_dim", op.Dv, "(129..192, 97..128) or (..64, ..512)", text=text)]
        wide = max(op.D, 0 if self.name == "flash_attn_3" and op.Dv != op.D else op.Dv)
        if wide > largest:
            text = f"head_dim {wide} > {largest} on compute capability {major}.x"
            return [Reason("limit", "head_dim", wide, f"<= {largest}", text=text)]
        return []

    def _backward_sizes(self, op: AttentionOp, gpu: tuple[int, int]) -> list[Reason]:
        """Gradients beyond head size 192."""
        wide = max(op.D, op.Dv)
        if not op.grad or wide <= 192:
            return []
        text = ""
        if self.name == "flash_attn_3" and op.deterministic:
            text = f"deterministic gradients at head_dim {wide} > 192"
        elif self.name == "flash_attn_2" and _is_small(gpu):
            # with dropout it raised until 2.7.2; since 2.7.3 it launches no kernel there and leaves dq, dk and dv unset
            since = "2.5.5" if wide > 224 else "2.6.2"
            too_old = ("small_256" if wide > 224 else "small_224") not in self.known.can
            why = f" before {since}" if too_old else " with dropout" if op.dropout_p > 0 else ""
            text = f"gradients at head_dim {wide} > 192{why} on compute capability {gpu[0]}.{gpu[1]}" if why else ""
        return [Reason("limit", "head_dim", wide, "<= 192", text=text)] if text else []

    def _pairs_on(self, op: AttentionOp, gpu: tuple[int, int]) -> list[Reason]:
        """What line 4 does not serve together on one GPU or in one version, and does on or in another."""
        if self.name != "flash_attn_4":
            return []
        kinds = {type(part) for part in mask_parts(op.mask)}
        sinks = op.weight.sinks if isinstance(op.weight, Softmax) else None
        at_256 = gpu[0] in (10, 11) and _is_256(op)
        where, dtype = f"on compute capability {gpu[0]}.x", op.operand(sinks.name).dtype if sinks is not None else ""
        other_values = gpu[0] == 9 and bool(op.grad) and op.groups > 1 and op.Dv != op.D
        table = {
            f"softcap at head_dim 256 {where}": at_256 and any(isinstance(term, SoftCap) for term in op.score),
            f"sinks at head_dim 256 {where}": at_256 and sinks is not None,
            f"key lengths at head_dim 256 {where}": at_256 and KeyLengths in kinds,
            f"window at head_dim 256 {where}": at_256 and Window in kinds,
            f"sinks {where}": gpu[0] == 12 and sinks is not None,
            # rounding them would be another result; bfloat16 ones are handed over as they are
            f"{dtype} sinks before 4.0.0b26": dtype not in ("", "bfloat16") and "any_sinks" not in self.known.can,
            f"gradients of grouped heads with value head_dim {op.Dv} != head_dim {op.D} {where}": other_values,
        }
        return _refused(table)

    def load(self) -> Any:
        """The library's module.

        Raises:
            BackendError: none of its modules can be imported; each with its cause.
        """
        causes = []
        for name in self.line.modules:
            try:
                return importlib.import_module(name)
            except ImportError as error:
                causes.append(f"{name}: {error}")
        raise BackendError(f"{self.name} is installed ({self._version}) and cannot be imported: {'; '.join(causes)}")

    def compile(self, op: AttentionOp) -> Executable:
        library, parts = self.load(), mask_parts(op.mask)
        if any(isinstance(part, KeyLengths) for part in parts):
            return Executable(compile_cache(self.name, library, op))
        if any(isinstance(part, Segments) for part in parts):
            return Executable(compile_documents(self.name, library, op))
        return Executable(compile_dense(self.name, library, op))

    def estimate(self, op: AttentionOp) -> Cost:
        visited = 1.0
        for part in mask_parts(op.mask):
            if isinstance(part, Causal):
                visited = min(visited, 0.5 if op.Sq == op.Skv else 1.0)
            elif isinstance(part, Window):
                seen = sum(op.Skv if side is None else side for side in (part.left, part.right)) + 1
                visited = min(visited, seen / op.Skv)
        return dense_cost(op, visited)


def _is_256(op: AttentionOp) -> bool:
    return (op.D, op.Dv) == (256, 256)


def _is_small(gpu: tuple[int, int]) -> bool:
    """Whether a GPU has 99 KB of shared memory for a block: all of 8.x and 12.x but 8.0 (8.7 has more, and is rare)."""
    return gpu[0] == 12 or (gpu[0] == 8 and gpu[1] > 0)


def _fits_flash_3(op: AttentionOp) -> bool:
    """The head sizes that FlashAttention 3 has kernels for when those of key and value differ; forward only."""
    deepseek = 128 < op.D <= 192 and 96 < op.Dv <= 128
    return not op.grad and (deepseek or (op.D <= 64 and op.Dv <= 512))


def _positions(op: AttentionOp) -> list[Reason]:
    """Positions count from the last key; `key_end` says what else can be brought to that."""
    if key_end(op, op.Sq, op.Skv) is not None:
        return []
    end = op.Skv - op.Sq
    text = f"q_offset {op.q_offset}, counts from the last key ({end})"
    return [Reason("limit", "q_offset", op.q_offset, end, 'backend="flex"', text)]


def _pairs(op: AttentionOp, name: str, can: frozenset[str]) -> list[Reason]:
    """What each part is served with, and not with another: one line of this table for each."""
    parts = mask_parts(op.mask)  # parts and not kinds of them: two of a kind are two masks
    lengths, documents, windows = (sum(isinstance(p, kind) for p in parts) for kind in (KeyLengths, Segments, Window))
    has_alibi, has_cap = (any(isinstance(term, kind) for term in op.score) for kind in (Alibi, SoftCap))
    has_sinks = isinstance(op.weight, Softmax) and op.weight.sinks is not None
    has_grad, wants_lse, drops = bool(op.grad), op.outputs.lse, op.dropout_p > 0
    caches = name != "flash_attn_4"  # these serve lengths with the cache function, which has no backward pass
    table = {
        "key lengths with another mask": lengths and len(parts) > 1,
        "documents with other documents": documents > 1,
        "documents with a window": documents and windows,
        "documents of other keys than queries": documents and not _same_documents(op),
        "key lengths with ALiBi": lengths and has_alibi,
        "documents with ALiBi": documents and has_alibi,
        "key lengths with gradients": lengths and has_grad and caches,
        "key lengths with dropout": lengths and drops,
        "key lengths with lse, before 2.6": lengths and wants_lse and caches and "cache_lse" not in can,
        "documents with lse, before 2.6": documents and wants_lse and "packed_lse" not in can,
        "softcap with dropout": has_cap and drops,
        # with its causal flag the kernel adds slope * key instead of -slope * distance: right but for the lse
        "ALiBi with lse": has_alibi and wants_lse,
        "gradients with softcap": has_cap and has_grad and name == "flash_attn_4",
        "gradients with sinks": has_sinks and has_grad,
    }
    return _refused(table)


def _refused(table: dict[str, Any]) -> list[Reason]:
    return [Reason("feature_pair", text, True, False, text=f"no {text}") for text, wrong in table.items() if wrong]


def _same_documents(op: AttentionOp) -> bool:
    return op.Sq == op.Skv and all(
        part.queries == part.keys for part in mask_parts(op.mask) if isinstance(part, Segments)
    )
