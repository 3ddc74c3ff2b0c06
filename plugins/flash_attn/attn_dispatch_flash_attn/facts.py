"""What each line of FlashAttention can do, by version, as data.

Read from the sources of Dao-AILab/flash-attention: the tags v2.0.8 to v2.8.3.post1, fa4-v4.0.0.beta2 to beta27, and
``hopper/`` and ``flash_attn/cute/`` at 0251105 (August 2026). None of it was run by us.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
import re
from dataclasses import dataclass

__all__ = ["LINES", "Line", "Step", "installed_version", "known_at", "parse"]


@dataclass(frozen=True)
class Step:
    """What a version added.

    Args:
        since: the version. features: words of `AttentionOp.features`. majors: of compute capabilities, with kernels.
        can: ``cache`` (`flash_attn_with_kvcache`), ``cache_lse`` (it returns lse), ``pages``, ``deterministic`` (an
            argument for the backward pass), ``packed_lse`` (lse of packed sequences is ``[H, total]``),
            ``small_256 small_224`` (gradients at head sizes 225..256 and 193..224 where a block has 99 KB of shared
            memory), ``head_256`` (head size 256 of line 4 on 10.x and 11.x), ``any_sinks`` (not in bfloat16 alone).
    """

    since: str
    features: frozenset[str] = frozenset()
    can: frozenset[str] = frozenset()
    majors: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Line:
    """One library.

    Args:
        name: of the backend. distributions: names that it is installed by. modules: where its functions are, the first
            that imports.
        head_dim: the largest, by major compute capability; 0 for all others.
        steps: what each version added, in order; the first is the oldest that is understood.
    """

    name: str
    distributions: tuple[str, ...]
    modules: tuple[str, ...]
    head_dim: tuple[tuple[int, int], ...]
    steps: tuple[Step, ...]

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
        ((0, 256),),
        (
            # 2.1 moved the causal diagonal to the last key; before it the same call meant something else
            Step("2.1", frozenset(_BASE | {"dropout", "grad"}), majors=frozenset({8, 9})),
            Step("2.2", frozenset({"mask:KeyLengths"}), frozenset({"cache"})),
            Step("2.3", frozenset({"mask:Window"})),
            Step("2.4", frozenset({"score:Alibi"}), frozenset({"deterministic"})),
            Step("2.5", can=frozenset({"pages"})),
            Step("2.5.5", can=frozenset({"small_256"})),
            Step("2.6", frozenset({"score:SoftCap"}), frozenset({"cache_lse", "packed_lse"})),
            Step("2.6.2", can=frozenset({"small_224"})),
            # it asked for 8.x or 9.0 until then; it is built for 80, 90, 100 and 120, and for 110 since 2.8.4
            Step("2.7.3", majors=frozenset({10, 12})),
            Step("2.8.4", majors=frozenset({11})),
        ),
    ),
    Line(
        "flash_attn_3",
        ("flash_attn_3", "flash-attn-3"),
        ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
        ((0, 256),),
        (
            Step(
                "3.0.0b1",
                frozenset(_BASE | {"grad", "mask:Window", "mask:KeyLengths", "score:SoftCap", "dv_differs"}),
                frozenset({"cache", "cache_lse", "packed_lse", "pages", "deterministic"}),
                frozenset({9}),
            ),
        ),
    ),
    Line(
        "flash_attn_4",
        ("flash-attn-4",),
        ("flash_attn.cute",),
        ((9, 256), (0, 128)),
        (
            # the first with tiles by head size on 9.x (before it, those beyond 160 had no room) and with 12.x
            Step(
                "4.0.0b5",
                frozenset(_BASE | {"grad", "mask:Window", "mask:KeyLengths", "score:SoftCap", "sinks", "dv_differs"}),
                frozenset({"packed_lse", "pages"}),
                frozenset({9, 10, 11, 12}),
            ),
            Step("4.0.0b11", can=frozenset({"head_256"})),
            Step("4.0.0b26", can=frozenset({"any_sinks"})),
        ),
    ),
)


def parse(version: str) -> tuple[float, ...]:
    """A version as numbers that compare as versions do: three, and the number of a beta, which comes before no beta.

    Example:
        >>> parse("2.8.3.post1"), parse("4.0.0b27"), parse("unknown")
        ((2, 8, 3, inf), (4, 0, 0, 27), ())
    """
    found = re.match(r"(\d+(?:\.\d+)*)(?:\.?b(?:eta)?(\d+))?", version)
    if found is None:
        return ()
    numbers = [*(int(number) for number in found[1].split(".")), 0, 0]
    return (*numbers[:3], int(found[2]) if found[2] else math.inf)


def known_at(line: Line, version: str) -> Step:
    """All that a version of a line can do, summed over its steps.

    Example:
        >>> "score:SoftCap" in known_at(LINES[0], "2.5.9").features
        False
    """
    steps = [step for step in line.steps if parse(step.since) <= parse(version)]
    features = frozenset[str]().union(*(step.features for step in steps))
    can = frozenset[str]().union(*(step.can for step in steps))
    return Step(version, features, can, frozenset[int]().union(*(step.majors for step in steps)))


@functools.cache
def installed_version(line: Line) -> str | None:
    """The version that is installed, without importing the library (that would load its CUDA code); None: it is not."""
    for name in line.distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
