"""What each line of FlashAttention can do, by version, as data.

Read from the sources of Dao-AILab/flash-attention: the tags v2.0.8 to v2.8.3, fa4-v4.0.0.beta2 to beta27, and
``hopper/`` and ``flash_attn/cute/`` at 0251105 (August 2026). None of it was run by us.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from dataclasses import dataclass

__all__ = ["LINES", "Line", "Step", "installed_version", "known_at", "parse"]


@dataclass(frozen=True)
class Step:
    """What a version added.

    Args:
        since: the version. features: words of `AttentionOp.features`.
        can: ``cache`` (`flash_attn_with_kvcache`), ``cache_lse`` (it returns lse), ``pages``, ``deterministic`` (an
            argument for the backward pass), ``packed_lse`` (lse of packed sequences is ``[H, total]``).
    """

    since: tuple[int, ...]
    features: frozenset[str] = frozenset()
    can: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Line:
    """One library.

    Args:
        name: of the backend. distributions: names that it is installed by. modules: where its functions are, the first
            that imports.
        majors: of compute capabilities that it has kernels for. head_dim: the largest, by major; 0 for all others.
        steps: what each version added, in order.
    """

    name: str
    distributions: tuple[str, ...]
    modules: tuple[str, ...]
    majors: frozenset[int]
    head_dim: tuple[tuple[int, int], ...]
    steps: tuple[Step, ...]

    @property
    def minimum(self) -> tuple[int, ...]:
        """The first version that is understood."""
        return self.steps[0].since

    def largest_head_dim(self, major: int) -> int:
        """The largest head size on GPUs of this major compute capability."""
        sizes = dict(self.head_dim)
        return sizes.get(major, sizes[0])


_BASE = {"weight:Softmax", "mask:Full", "mask:Causal", "mask:Segments", "combine:And", "q_offset:nonzero", "gqa", "lse"}

LINES = (
    Line(
        "flash_attn_2",
        ("flash-attn",),
        ("flash_attn",),
        frozenset({8, 9, 10, 11, 12}),
        ((0, 256),),
        (
            # 2.1 moved the causal diagonal to the last key; before it the same call meant something else
            Step((2, 1), frozenset(_BASE | {"dropout", "grad"})),
            Step((2, 2), frozenset({"mask:KeyLengths"}), frozenset({"cache"})),
            Step((2, 3), frozenset({"mask:Window"})),
            Step((2, 4), frozenset({"score:Alibi"}), frozenset({"deterministic"})),
            Step((2, 5), can=frozenset({"pages"})),
            Step((2, 6), frozenset({"score:SoftCap"}), frozenset({"cache_lse", "packed_lse"})),
        ),
    ),
    Line(
        "flash_attn_3",
        ("flash_attn_3", "flash-attn-3"),
        ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
        frozenset({9}),
        ((0, 256),),
        (
            Step(
                (3, 0),
                frozenset(_BASE | {"grad", "mask:Window", "mask:KeyLengths", "score:SoftCap", "dv_differs"}),
                frozenset({"cache", "cache_lse", "packed_lse", "pages", "deterministic"}),
            ),
        ),
    ),
    Line(
        "flash_attn_4",
        ("flash-attn-4",),
        ("flash_attn.cute",),
        frozenset({9, 10, 11, 12}),
        ((9, 256), (0, 128)),
        (
            Step(
                (4, 0),
                frozenset(_BASE | {"grad", "mask:Window", "mask:KeyLengths", "score:SoftCap", "sinks", "dv_differs"}),
                frozenset({"packed_lse", "pages"}),
            ),
        ),
    ),
)


def parse(version: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    Example:
        >>> parse("2.8.3.post1"), parse("4.0.0b27"), parse("unknown")
        ((2, 8, 3), (4, 0, 0), ())
    """
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in found.group().split(".")) if found else ()


def known_at(line: Line, version: tuple[int, ...]) -> Step:
    """All that a version of a line can do, summed over its steps.

    Example:
        >>> "score:SoftCap" in known_at(LINES[0], (2, 5, 9)).features
        False
    """
    steps = [step for step in line.steps if step.since <= version]
    features = frozenset[str]().union(*(step.features for step in steps))
    return Step(version, features, frozenset[str]().union(*(step.can for step in steps)))


@functools.cache
def installed_version(line: Line) -> str | None:
    """The version that is installed, without importing the library (that would load its CUDA code); None: it is not."""
    for name in line.distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
