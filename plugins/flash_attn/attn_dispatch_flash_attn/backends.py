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
        known = line.steps[-1].since if self._version is None else parse(self._version)
        self.known: Step = known_at(line, known)
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
        line, problems = self.line, []
        if self._version is None:
            problems.append(f"{line.distributions[0]} is not installed")
        elif parse(self._version) < line.minimum:
            problems.append(f"{line.distributions[0]} {self._version} < {'.'.join(map(str, line.minimum))}")
        major = self.major()
        if major is None:
            problems.append("there is no CUDA device")
        elif major not in line.majors:
            runs_on = ", ".join(f"{m}.x" for m in sorted(line.majors))
            problems.append(f"compute capability {major}.x, has kernels for {runs_on}")
        if not problems:
            return None
        hint = _INSTALL[line.name] if self._version is None else ""
        return Reason("device", "library", self._version, line.name, hint, "; ".join(problems))

    def major(self) -> int | None:
        """Major compute capability of the current GPU; None without one."""
        return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else None

    def extra_reasons(self, op: AttentionOp) -> list[Reason]:
        return [*self._sizes(op), *_positions(op), *_pairs(op, self.name, self.known.can)]

    def _sizes(self, op: AttentionOp) -> list[Reason]:
        major = self.major() or min(self.line.majors)
        largest = self.line.largest_head_dim(major)
        if self.name == "flash_attn_4" and major in (10, 11) and (op.D, op.Dv) in ((192, 128), (256, 256)):
            return []  # kernels of their own
        if self.name == "flash_attn_3" and op.Dv != op.D and not _fits_flash_3(op):
            text = f"head_dim {op.D} with value head_dim {op.Dv}"
            return [Reason("limit", "value head_dim", op.Dv, "(129..192, 97..128) or (..64, ..512)", text=text)]
        wide = max(op.D, 0 if self.name == "flash_attn_3" and op.Dv != op.D else op.Dv)
        if wide > largest:
            text = f"head_dim {wide} > {largest} on compute capability {major}.x"
            return [Reason("limit", "head_dim", wide, f"<= {largest}", text=text)]
        if self.name == "flash_attn_2" and op.grad and op.D > 192 and major not in (8, 9, 10):
            text = f"gradients at head_dim {op.D} > 192 on compute capability {major}.x"
            return [Reason("limit", "head_dim", op.D, "<= 192", text=text)]
        return []

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
    return [Reason("feature_pair", text, True, False, text=f"no {text}") for text, wrong in table.items() if wrong]


def _same_documents(op: AttentionOp) -> bool:
    return op.Sq == op.Skv and all(
        part.queries == part.keys for part in mask_parts(op.mask) if isinstance(part, Segments)
    )
