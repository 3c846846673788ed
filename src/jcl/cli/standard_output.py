"""Standard output that may be lost: its reader has gone, or there is no room for what is printed.

A command finishes its work all the same, so that the files it was asked for are written. What a reader did not want to
read (`| head -1`) is nothing to complain of: the command says nothing and ends as it would have; it could not end
otherwise for certain, since whether all was read before the reader went is a matter of chance. Results for which there
was no room are missed by somebody, and that is told at the end.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from jcl.errors import JclError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Lasting(io.FileIO):
    """A file that takes what it is given, also once nothing can be written any more."""

    failure: OSError | None = None

    def write(self, content: ReadableBuffer, /) -> int:
        if self.failure is None:
            try:
                return super().write(content)
            except BlockingIOError:
                raise
            except OSError as error:
                self.failure = error
        return memoryview(content).nbytes


def outlast_readers() -> Callable[[], None]:
    """Have the program go on when its output is lost; gives a function that raises where somebody will miss it."""
    stream = sys.stdout
    if stream is None or stream is not sys.__stdout__ or not isinstance(stream, io.TextIOWrapper):
        return lambda: None  # closed, or whatever somebody has put in its place
    stream.flush()
    raw = _Lasting(stream.fileno(), "wb", closefd=False)
    sys.stdout = io.TextIOWrapper(
        raw if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(raw),  # python -u has no buffer
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )

    def demand_written() -> None:
        sys.stdout.flush()
        if raw.failure is not None and not isinstance(raw.failure, BrokenPipeError):
            raise JclError(
                "what the command printed could not be written to standard output: "
                f"{raw.failure.strerror}. Everything else it was asked for is done; to see what it prints, make room "
                "or let it print elsewhere, and give it again."
            )

    return demand_written
