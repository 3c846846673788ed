"""Errors that the user can fix.

A message says what is wrong, where, and what to do. The command line prints it and exits with a non-zero code; any
other exception is a bug and keeps its traceback.
"""

import importlib
import re
from typing import Any


class JclError(Exception):
    """An error that the user can fix, such as an invalid setting or an unreadable file; the base of all jcl errors."""

    exit_code = 1


class SettingsError(JclError):
    """An option or setting is unknown, invalid or conflicts with another."""

    exit_code = 2


class DataError(JclError):
    """The images cannot be found, read or used."""


class CollectiveDataError(DataError):
    """A data error that all ranks raise before the same step, whichever of them met it."""


class RunError(JclError):
    """A run folder or checkpoint is missing, occupied or damaged."""


class Diverged(RunError):
    """The loss or the weights are not finite."""


class Interrupted(JclError):
    """A run was asked to stop and can be resumed."""

    exit_code = 75  # the conventional "temporary failure, try again"


class OtherRankFailed(JclError):
    """Another rank failed and reports why; this one ends with the same exit code, without a message."""

    def __init__(self, exit_code: int = 1) -> None:
        super().__init__()
        self.exit_code = exit_code


def memory_problem(error: BaseException) -> str:
    """How much memory was requested if PyTorch ran out of it, else empty; torch may not have been imported."""
    text = str(error)
    if on_cpu := re.search(r"DefaultCPUAllocator: .*you tried to allocate (\d+) bytes", text):
        return f"Out of memory: tried to allocate {int(on_cpu[1]):,} bytes"
    return ". ".join(text.split(". ")[:2]).rstrip(".") if type(error).__name__ == "OutOfMemoryError" else ""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, without a full stop."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Import a module of a library that only an extra of this package installs."""
    try:
        return importlib.import_module(module)
    except ImportError:
        problem = f"{purpose} needs {module.partition('.')[0]}, which is not installed"
        raise SettingsError(f"{problem}; run: pip install 'joint-contrastive-learning[{extra}]'.") from None
