"""The one module that reads the environment.

========================  ==============================================================================
``ATTN_DISPATCH_CONFIG``  configuration files to use instead of the search, separated like ``PATH``
``ATTN_DISPATCH_CACHE``   folder of the tuned store; the user's cache folder when it is not set
========================  ==============================================================================
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Settings", "settings"]


@dataclass(frozen=True)
class Settings:
    """What the environment says.

    Args:
        config_files: configuration files that exist, strongest first.
        cache_dir: where tuned results are kept.
    """

    config_files: tuple[Path, ...]
    cache_dir: Path


@functools.cache
def settings() -> Settings:
    """The settings of this process; the environment is read at the first call and not again."""
    import platformdirs

    given = os.environ.get("ATTN_DISPATCH_CONFIG")
    if given:
        places = [Path(part) for part in given.split(os.pathsep) if part]
    else:
        shipped = Path(__file__).parent.parent / "configs"
        places = [Path("attn_dispatch.yaml"), platformdirs.user_config_path("attn_dispatch") / "attn_dispatch.yaml"]
        places += sorted(shipped.glob("*.yaml"))
    cache = os.environ.get("ATTN_DISPATCH_CACHE")
    cache_dir = Path(cache) if cache else platformdirs.user_cache_path("attn_dispatch")
    return Settings(tuple(path for path in places if path.is_file()), cache_dir)
