"""The one module that reads the environment.

========================  ==============================================================================
``ATTN_DISPATCH_CONFIG``  configuration files to use instead of the search, separated like ``PATH``
``ATTN_DISPATCH_CACHE``   folder of the tuned store; the user's cache folder when it is not set
``ATTN_DISPATCH_ALLOW_KNOWN_BAD``  names of known-bad entries that may run all the same, with commas between them
``ATTN_DISPATCH_AUTOTUNE``  ``off cached on force assert``, what `dispatch.use` does not say; ``cached`` when not set
``ATTN_DISPATCH_LOOKUP``  ``python`` does without the C++ lookup that ``attn-dispatch build`` makes; read at import
========================  ==============================================================================
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from attn_dispatch.errors import ConfigError

__all__ = ["AUTOTUNE_MODES", "Settings", "child_environment", "settings", "wants_compiled_lookup"]

AUTOTUNE_MODES = ("off", "cached", "on", "force", "assert")  # see attn_dispatch.selection.tuned


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    Args:
        config_files: configuration files, strongest first: those of ``ATTN_DISPATCH_CONFIG`` whether they exist or not,
            so that a wrong path is noticed; else those of the search that exist.
        cache_dir: where tuned results are kept; None when there is no place.
        autotune: the mode outside `dispatch.use`.
        shipped: those of ``config_files`` that come with this package.
        allow_known_bad: names of known-bad entries that may run all the same.
        is_given: ``ATTN_DISPATCH_CONFIG`` names the files, and nothing else is searched.
    """

    config_files: tuple[Path, ...]
    cache_dir: Path | None
    autotune: str = "cached"
    shipped: tuple[Path, ...] = ()
    is_given: bool = False
    allow_known_bad: frozenset[str] = frozenset()


@functools.cache
def settings() -> Settings:
    """The settings of this process; the environment is read at the first call and not again."""
    import platformdirs

    cache = os.environ.get("ATTN_DISPATCH_CACHE")
    cache_dir = Path(cache).expanduser() if cache else platformdirs.user_cache_path("attn_dispatch")
    mode = os.environ.get("ATTN_DISPATCH_AUTOTUNE") or "cached"
    if mode not in AUTOTUNE_MODES:
        known = ", ".join(AUTOTUNE_MODES)
        raise ConfigError(f"ATTN_DISPATCH_AUTOTUNE={mode!r} is no mode; there are {known}")
    # without a home the path stays relative ("~/..."), and nothing must be written there
    usable = cache_dir if cache or cache_dir.is_absolute() else None
    names = os.environ.get("ATTN_DISPATCH_ALLOW_KNOWN_BAD", "").split(",")
    allow = frozenset(name.strip() for name in names if name.strip())
    given = os.environ.get("ATTN_DISPATCH_CONFIG")
    if given:
        files = tuple(Path(part) for part in given.split(os.pathsep) if part)
        return Settings(files, usable, mode, is_given=True, allow_known_bad=allow)
    own = [Path("attn_dispatch.yaml"), platformdirs.user_config_path("attn_dispatch") / "attn_dispatch.yaml"]
    # os.path.isfile: Path.is_file raises where a home may not be entered
    shipped = tuple(sorted(_shipped_folder().glob("*.yaml")))
    files = (*(path for path in own if os.path.isfile(path)), *shipped)
    return Settings(files, usable, mode, shipped, allow_known_bad=allow)


def wants_compiled_lookup() -> bool:
    """Whether the C++ lookup may be used where it was built.

    Raises:
        ConfigError: ``ATTN_DISPATCH_LOOKUP`` says something else than ``python``.
    """
    said = os.environ.get("ATTN_DISPATCH_LOOKUP")
    if said not in (None, "", "python"):
        raise ConfigError(
            f"ATTN_DISPATCH_LOOKUP={said!r} is no lookup; there is python, which does without that in C++"
        )
    return not said


def child_environment() -> dict[str, str]:
    """The environment for a child process that imports what this process can import."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}


def _shipped_folder() -> Path:
    """``configs/`` in this package. In the repository it is a link to the folder beside the package, and a checkout
    that cannot hold links has only that one."""
    package = Path(__file__).parent
    if not (package / "configs").is_dir() and (package.parent / "pyproject.toml").is_file():
        return package.parent / "configs"
    return package / "configs"
