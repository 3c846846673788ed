"""Errors a person can act on.

Every message is a full sentence: what is wrong, where, and what to do about it. The command line prints the
sentence and exits with a non-zero code; anything that is not a `JclError` is a defect of ours and keeps its trace.
"""


class JclError(Exception):
    """Something the user can put right."""

    exit_code = 1


class SettingsError(JclError):
    """A setting is unknown, of the wrong type or impossible together with another."""


class DataError(JclError):
    """The images cannot be found, read or used as asked."""


class CollectiveDataError(DataError):
    """A data error that all ranks raise before the same step, whichever of them met it."""


class RunError(JclError):
    """A run folder or checkpoint is missing, occupied or not what it should be."""


class Interrupted(JclError):
    """A run was asked to stop, saved itself and can be resumed."""

    exit_code = 75  # the conventional "temporary failure, try again"


class OtherRankFailed(JclError):
    """Another rank failed and reports why; this one ends without a message."""
