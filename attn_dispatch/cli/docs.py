"""``python -m attn_dispatch.cli.docs``: write the pages that are made from data; ``--check`` fails on stale ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from attn_dispatch.cli.backends import markdown, rows

__all__ = ["main", "pages"]

_DOCS = Path(__file__).parents[2] / "docs"


def pages() -> dict[str, str]:
    """File name under docs/ -> text. Only what this distribution brings, so that a plugin here changes no page."""
    from attn_dispatch.registry import current

    registry = current()
    own = {n: b for n, b in registry.backends.items() if registry.origins[n].split()[0] == "attn-dispatch"}
    return {"support_matrix.md": markdown(rows(own))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; the exit code is 1 when a page is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail when a page is stale")
    parser.add_argument("--docs", type=Path, default=_DOCS, help="folder of the pages")
    given = parser.parse_args(arguments)
    stale = False
    for name, text in pages().items():
        path = given.docs / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if given.check:
            print(f"{path} is stale; run: python -m attn_dispatch.cli.docs", file=sys.stderr)
            stale = True
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
