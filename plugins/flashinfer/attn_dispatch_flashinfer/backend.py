"""The backend: FlashInfer's facts by version, and which of its wrappers serves an op.

Read from the sources of flashinfer-ai/flashinfer, the tags v0.2.0 to v0.6.18rc7 and fb28d72 (August 2026); none of it
was run by us. Its kernels scale the maximum of the scores, so ``scale <= 0`` is not declared. Its ALiBi has slopes of
its own, so ours is not either.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import re
from typing import Any

import torch

from attn_dispatch.plugin import (
    END,
    And,
    AttentionOp,
    Backend,
    BackendError,
    Capability,
    Causal,
    Cost,
    Executable,
    Full,
    KeyLengths,
    Limit,
    Mask,
    Reason,
    Ref,
    SoftCap,
    Softmax,
    Window,
    dense_cost,
)

__all__ = [
    "FEATURES_SINCE",
    "FlashInfer",
    "has_sinks",
    "is_causal",
    "key_end",
    "leaves_rows_empty",
    "mask_parts",
    "window_left",
]

# Words of `AttentionOp.features` by the version that brought them.
FEATURES_SINCE: tuple[tuple[tuple[int, ...], frozenset[str]], ...] = (
    (
        (0, 2, 5),
        frozenset(
            {"weight:Softmax", "mask:Full", "mask:Causal", "mask:Window", "mask:KeyLengths", "combine:And", "gqa"}
            | {"lse", "score:SoftCap", "q_offset:nonzero"}
        ),
    ),
    ((0, 4), frozenset({"sinks"})),
)
# Before it the kernels mask with -5e4, not -inf: lse of an empty row is about that (in base 2, like all of theirs), and
# on Hopper a row of which every key is masked gets the mean of values. d7f2c64 on main; the branch of 0.6.18 lacks it.
EMPTY_ROWS_SINCE = (0, 6, 19)
HEAD_DIMS = (64, 128, 256)
MAJORS = frozenset({8, 9, 10, 12})


def mask_parts(mask: Mask) -> tuple[Any, ...]:
    """The parts of a conjunction, without Full."""
    parts = mask.args if isinstance(mask, And) else (mask,)
    return tuple(part for part in parts if not isinstance(part, Full))


def is_causal(op: AttentionOp) -> bool:
    """Whether no query attends a key after its own position."""
    return any(isinstance(p, Causal) or (isinstance(p, Window) and p.right == 0) for p in mask_parts(op.mask))


def window_left(op: AttentionOp) -> int:
    """How far back a query sees; -1 is unbounded."""
    lefts = [part.left for part in mask_parts(op.mask) if isinstance(part, Window) and part.left is not None]
    return min(lefts, default=-1)


def has_sinks(op: AttentionOp) -> bool:
    """Whether the op has one more logit per head."""
    return isinstance(op.weight, Softmax) and op.weight.sinks is not None


def key_end(op: AttentionOp, sq: int, skv: int) -> int | None:
    """How many keys to hand over so that the last one stands at the last query's position; None: that cannot be."""
    if not op.mask.positional:
        return skv
    if isinstance(op.q_offset, Ref):
        return None
    end = skv if op.q_offset == END else sq + int(op.q_offset)
    return end if end == skv or (is_causal(op) and 0 < end < skv) else None


def leaves_rows_empty(op: AttentionOp, sq: int, end: int) -> bool:
    """Whether queries stand before the first of ``end`` keys and look back alone. (Rows of key length 0 are another
    matter: no tile of them is computed, so they are 0 in every version.)
    """
    return is_causal(op) and sq > end


class FlashInfer(Backend):
    """FlashInfer's batch wrappers.

    Args:
        version: of the library; default what is installed. When it is not, its newest facts are shown, and every op is
            refused.
    """

    name = "flashinfer"
    tested = "untested"
    # nvcc compiles a kernel at the first call of its kind, unless flashinfer-jit-cache brings it: tens of seconds
    compile_s = 20.0
    hints = {"dtype": "cast to bfloat16 or float16", "weights": 'backend="eager"'}  # noqa: RUF012

    def __init__(self, version: str | None = None) -> None:
        self._version = version if version is not None else installed_version()
        known = EMPTY_ROWS_SINCE if self._version is None else parse(self._version)
        self.masks_with_finite = known < EMPTY_ROWS_SINCE
        features = frozenset[str]().union(*(words for since, words in FEATURES_SINCE if since <= known))
        self.capabilities = (
            Capability(
                devices=frozenset({"cuda"}),
                dtypes=frozenset({"float16", "bfloat16"}),
                features=features,
                limits=tuple(Limit(name, minimum=1) for name in ("B", "Hq", "Sq", "Skv")),
                notes=f"untested here; read from the source; version {self._version or 'not installed'}; forward only",
            ),
        )

    def version(self) -> str:
        return self._version or "none"

    def unavailable(self) -> Reason | None:
        """All that is missing, in one reason: the library, a newer version, a GPU, one that it has kernels for."""
        problems = []
        if self._version is None:
            problems.append("flashinfer-python is not installed")
        elif parse(self._version) < FEATURES_SINCE[0][0]:
            problems.append(f"flashinfer-python {self._version} < {'.'.join(map(str, FEATURES_SINCE[0][0]))}")
        if not torch.cuda.is_available():
            problems.append("there is no CUDA device")
        elif (major := torch.cuda.get_device_capability()[0]) not in MAJORS:
            runs_on = ", ".join(f"{m}.x" for m in sorted(MAJORS))
            problems.append(f"compute capability {major}.x, has kernels for {runs_on}")
        if not problems:
            return None
        hint = "pip install flashinfer-python" if self._version is None else ""
        return Reason("device", "library", self._version, "flashinfer-python", hint, "; ".join(problems))

    def extra_reasons(self, op: AttentionOp) -> list[Reason]:
        reasons = []
        if op.D not in HEAD_DIMS:
            text = f"head_dim {op.D} is none of {', '.join(map(str, HEAD_DIMS))}"
            reasons.append(Reason("limit", "head_dim", op.D, HEAD_DIMS, f"pad_head_dim > {self.name}", text))
        end = key_end(op, op.Sq, op.Skv)
        if end is None:
            text = f"q_offset {op.q_offset}, counts from the last key ({op.Skv - op.Sq})"
            reasons.append(Reason("limit", "q_offset", op.q_offset, op.Skv - op.Sq, 'backend="flex"', text))
        elif self.masks_with_finite and leaves_rows_empty(op, op.Sq, end):
            text = f"rows without a key ({op.Sq} queries over {end} keys) before {'.'.join(map(str, EMPTY_ROWS_SINCE))}"
            reasons.append(Reason("limit", "Sq", op.Sq, f"<= {end}", 'backend="flex"', text))
        parts = mask_parts(op.mask)
        lengths = any(isinstance(part, KeyLengths) for part in parts)
        ahead = not is_causal(op) and any(isinstance(part, Window) and part.right is not None for part in parts)
        table = {
            "key lengths with another mask": lengths and len(parts) > 1,
            "window that looks ahead": ahead,
            "sinks with softcap": has_sinks(op) and any(isinstance(term, SoftCap) for term in op.score),
            "sinks with lse": has_sinks(op) and op.outputs.lse,
        }
        pairs = [Reason("feature_pair", text, True, False, text=f"no {text}") for text, wrong in table.items() if wrong]
        return reasons + pairs

    def load(self) -> Any:
        """The library.

        Raises:
            BackendError: it cannot be imported, with the cause.
        """
        try:
            return importlib.import_module("flashinfer")
        except ImportError as error:
            raise BackendError(f"flashinfer {self._version} is installed and cannot be imported: {error}") from error

    def compile(self, op: AttentionOp) -> Executable:
        from attn_dispatch_flashinfer.wrappers import Planned

        return Executable(Planned(self.load(), op, self.masks_with_finite))

    def estimate(self, op: AttentionOp) -> Cost:
        visited = 0.5 if is_causal(op) and op.Sq == op.Skv else 1.0
        if window_left(op) >= 0:
            visited = min(visited, (window_left(op) + 1) / op.Skv)
        return dense_cost(op, visited)


def parse(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    Example:
        >>> parse("0.6.18rc7")
        (0, 6, 18)
    """
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in found.group().split(".")) if found else ()


@functools.cache
def installed_version() -> str | None:
    """The version that is installed, without importing the library; None: it is not."""
    try:
        return importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        return None
