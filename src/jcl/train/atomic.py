"""Files that are replaced in one step: a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from jcl.errors import RunError


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step that survives a crash at any moment."""
    with replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def replacing(path: Path, check: Callable[[Path], object] | None = None) -> Iterator[BinaryIO]:
    """Give a file to write to, which takes the place of `path` in one step when the block ends without an error.

    `check` is given the new file before that, once it is on the disk, and raises if it is not what it should be. What
    is no plain file, such as /dev/stdout, a pipe or a link, is written to and stays what it is.
    """
    if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
        try:
            with path.open("wb") as file:
                yield file
        except OSError as error:
            raise RunError(f"{path} could not be written: {error.strerror or error}.") from error
        return
    # A name of its own: of two programs that write the same file neither may get into the other's half.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if check is not None:
                _forget_cached(file)
        if check is not None:
            check(partial)
        partial.replace(path)
        _flush_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or error
        raise RunError(f"{path} could not be written: {reason}; what was there before is untouched.") from error


def remove_partial_files(folder: Path) -> None:
    """Clear away what writers that were killed have left in a folder."""
    for partial in folder.glob(".*.partial"):
        with contextlib.suppress(OSError):
            partial.unlink()


def _forget_cached(file: BinaryIO) -> None:
    """Have the next reader get the content from the disk rather than from memory, where the system knows how to."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _flush_folder(folder: Path) -> None:
    """Put a change of names in a folder on the disk."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
