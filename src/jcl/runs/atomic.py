"""Files that are replaced in one step: a reader sees the old one or the new one, never half of it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from jcl.errors import RunError
from jcl.runs.lock import try_lock


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step that survives a crash at any moment."""
    with replacing(path) as file:
        file.write(content)


def refuse_overwrite(path: Path, *, force: bool) -> None:
    """Raise if `path` is a folder, or a file that may not be overwritten without `force`."""
    if path.is_dir():
        raise RunError(f"{path} is a folder; give the name of a file.")
    if path.exists() and not force:
        raise RunError(f"{path} already exists; use --force to overwrite.")


@contextlib.contextmanager
def replacing(path: Path, check: Callable[[Path], object] | None = None) -> Iterator[BinaryIO]:
    """Give a file to write to, which takes the place of `path` in one step when the block ends without an error.

    `check` is given the new file before that, once it is on the disk, and raises if it is not what it should be. What
    is no plain file, such as /dev/stdout, a pipe or a link, is written to and stays what it is. What killed writers of
    `path` have left is cleared away.
    """
    if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
        try:
            with path.open("wb") as file:
                yield file
        except OSError as error:
            raise RunError(f"{path} could not be written: {error.strerror or error}.") from error
        return
    partial: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        partial, half = _open_partial(path)
        with half:  # to the end: closed, it would pass for one that a killed writer has left
            yield half
            half.flush()
            os.fsync(half.fileno())
            if check is not None:
                _forget_cached(half)
                check(partial)
            partial.replace(path)
        _flush_folder(path.parent)
    except BaseException as error:
        if partial is not None:
            with contextlib.suppress(OSError):
                partial.unlink()
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or error
        raise RunError(f"{path} could not be written: {reason}; what was there before is untouched.") from error


def remove_partial_files(folder: Path) -> None:
    """Clear away what writers that were killed have left in a folder, for the one who alone writes there.

    Locks are not asked for, so that it works on file systems without them too.
    """
    for partial in folder.glob(".*.partial"):
        with contextlib.suppress(OSError):
            partial.unlink()


def _open_partial(path: Path) -> tuple[Path, BinaryIO]:
    """A new file beside `path`, locked for as long as it is open, which tells other writers that it is in use.

    It has a name of its own: of two programs that write the same file neither may get into the other's half.
    """
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
        file = partial.open("wb")
        if _lock(file) is not False and partial.exists():
            return partial, file
        file.close()  # it was taken for an abandoned one before it could be locked


def _remove_abandoned(path: Path) -> None:
    """Clear away what killed writers of `path` have left: a lock ends with its process."""
    ours = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{8}\.partial")
    with contextlib.suppress(OSError):
        for partial in [entry for entry in path.parent.iterdir() if ours.fullmatch(entry.name)]:
            with contextlib.suppress(OSError), partial.open("r+b") as file:
                if _lock(file):
                    partial.unlink()


def _lock(file: BinaryIO) -> bool | None:
    """Whether the file is now ours alone; None where there are no locks."""
    try:
        return try_lock(file.fileno())
    except OSError:
        return None


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
