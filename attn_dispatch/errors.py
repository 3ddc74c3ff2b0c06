"""Every exception that attn_dispatch raises on purpose.

::

    AttnDispatchError
    ├── InputError (ValueError)          a value of the call is wrong; raised by the frontend, before any backend
    │   └── InputTypeError (TypeError)   a dtype or a Python type of the call is wrong
    ├── NoBackendError (ValueError)      the call is right and nothing here can run it; carries every reason
    ├── NotTunedError (LookupError)      autotune="assert" and nothing was measured for this op
    ├── UnknownBackendError (ValueError) a name that no registered backend, rewrite or chain has
    ├── ConfigError (ValueError)         a file or an environment variable that cannot be used
    ├── ExportError (RuntimeError)       a model, or an op of it, cannot be written as ONNX as asked, or is wrong there
    ├── BackendError (RuntimeError)      a backend broke its contract while it was compiled or run
    └── BuildError (RuntimeError)        the C++ lookup could not be compiled here

    AttnDispatchWarning (UserWarning)
    ├── PluginWarning                    a plugin was set aside; said once, when it is discovered
    ├── FallbackWarning                  a preference could not be met; said once per reason
    ├── ConfigWarning                    a configuration file, or a name in one, is ignored; said once per file and name
    ├── ExportWarning                    an exported model holds attention that the dispatcher did not write
    ├── StoreWarning                     a file of the tuned store cannot be used or written; said once
    └── RankWarning                      ranks of torch.distributed cannot tune together; names the one that differs

An error of the call has three parts: what was asked, which value broke which limit, and what to do next.
"""

from __future__ import annotations

__all__ = [
    "AttnDispatchError",
    "AttnDispatchWarning",
    "BackendError",
    "BuildError",
    "ConfigError",
    "ConfigWarning",
    "ExportError",
    "ExportWarning",
    "FallbackWarning",
    "InputError",
    "InputTypeError",
    "NoBackendError",
    "NotTunedError",
    "PluginWarning",
    "RankWarning",
    "StoreWarning",
    "UnknownBackendError",
]


class AttnDispatchError(Exception):
    """Base of all errors of this package; catch it to catch them all."""


class InputError(AttnDispatchError, ValueError):
    """A value of the call is wrong.

    Args:
        problem: which value broke which limit, in the caller's words.
        asked: the call in one line; empty when the call cannot even be described.
        remedy: what to do next.
    """

    def __init__(self, problem: str, *, asked: str = "", remedy: str = "") -> None:
        self.problem, self.asked, self.remedy = problem, asked, remedy
        super().__init__(problem)

    def __str__(self) -> str:
        lines = [self.problem]
        if self.asked:
            lines.append(f"  asked  {self.asked}")
        if self.remedy:
            lines.append(f"  try    {self.remedy}")
        return "\n".join(lines)


class InputTypeError(InputError, TypeError):
    """A dtype or a Python type of the call is wrong."""


class NoBackendError(AttnDispatchError, ValueError):
    """No backend can run the op that was asked for.

    Args:
        message: the whole report: what was asked, why each candidate refused, what to try.
        refusals: the reasons as data, ``{candidate name: [Reason, ...]}``.
    """

    def __init__(self, message: str, refusals: dict[str, list] | None = None) -> None:
        self.refusals = refusals or {}
        super().__init__(message)


class UnknownBackendError(AttnDispatchError, ValueError):
    """A backend, rewrite or chain name that nothing registered has."""


class NotTunedError(AttnDispatchError, LookupError):
    """``autotune="assert"`` was asked for and nothing was measured for this op; says how the nearest entry differs."""


class ConfigError(AttnDispatchError, ValueError):
    """A configuration file, pin or environment variable that cannot be used."""


class ExportError(AttnDispatchError, RuntimeError):
    """A model, or an op of it, cannot be written as ONNX as asked, or computes something else there."""


class BackendError(AttnDispatchError, RuntimeError):
    """A backend broke its contract while it was compiled or run; the message names it and its distribution."""


class BuildError(AttnDispatchError, RuntimeError):
    """What is in C++ could not be compiled here; everything works without it."""


class AttnDispatchWarning(UserWarning):
    """Base of all warnings of this package."""


class PluginWarning(AttnDispatchWarning):
    """A plugin was set aside."""


class FallbackWarning(AttnDispatchWarning):
    """A preference could not be met and the next candidate is used."""


class ConfigWarning(AttnDispatchWarning):
    """A configuration file, or a name in one, is ignored."""


class ExportWarning(AttnDispatchWarning):
    """An exported model holds attention that the dispatcher did not write."""


class StoreWarning(AttnDispatchWarning):
    """A file of the tuned store cannot be used or written."""


class RankWarning(AttnDispatchWarning):
    """Ranks of `torch.distributed` cannot tune together."""
