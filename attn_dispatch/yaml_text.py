"""YAML as people like to read it: one line for a list of plain values, no anchors, keys in the order given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["yaml_text"]

_ON_ONE_LINE = ("shape", "by", "name")  # a mapping with one of these is a tensor's description, a source, a machine


def yaml_text(data: Mapping[str, Any]) -> str:
    """A mapping of plain types as YAML.

    Example:
        >>> print(yaml_text({"schema": 1, "sizes": [1, 2]}), end="")
        schema: 1
        sizes: [1, 2]
    """
    import yaml

    return yaml.dump(dict(data), Dumper=_dumper(), sort_keys=False, width=120, default_flow_style=False)


def _dumper() -> type:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:  # a file for people has no anchors
            return True

    def sequence(dumper: Any, data: list[Any]) -> Any:
        flat = not any(isinstance(item, (dict, list)) for item in data)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)

    def mapping(dumper: Any, data: dict[str, Any]) -> Any:
        flat = any(name in data for name in _ON_ONE_LINE)
        return dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=flat)

    Dumper.add_representer(list, sequence)
    Dumper.add_representer(dict, mapping)
    return Dumper
