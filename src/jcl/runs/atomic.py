"""Atomic file replacement: a reader sees the old file or the new one, never a part of it."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from jcl.errors import RunError

_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial")
_DAY = 24 * 3600.0  # a partial file unchanged for so long belongs to a killed process


def write_atomically(path: Path, content: bytes) -> None:
    """Replace `path` by `content`, atomically and durably."""
    with atomic_open(path) as file:
        file.write(content)


def refuse_overwrite(path: Path, *, force: bool) -> None:
    """Raise if `path` is a folder, or a file that may not be overwritten without `force`."""
    if path.is_dir():
        raise RunError(f"{path} is a folder; give the name of a file.")
    if path.exists() and not force:
        raise RunError(f"{path} already exists; use --force to overwrite.")


@contextlib.contextmanager
def atomic_open(path: Path, check: Callable[[Path], object] | None = None) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` when the block ends without an error.

    `check` gets the new file, once it is on the disk, and raises if it is not valid. Links, pipes and devices such as
    /dev/stdout are written to directly.
    """
    if path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir()):
        try:
            with path.open("wb") as file:
                yield file
        except OSError as error:
            raise RunError(f"{path} could not be written: {error.strerror or error}.") from error
        return
    # A random name, because several processes may write the same file.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_partial_files(path.parent, unchanged_for=_DAY)
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if check is not None:
                _drop_page_cache(file)
                check(partial)
        partial.replace(path)
        _fsync_folder(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if not isinstance(error, OSError):
            raise
        reason = error.strerror or error
        raise RunError(f"{path} could not be written: {reason}. The previous file, if any, is unchanged.") from error


def remove_partial_files(folder: Path, unchanged_for: float = 0.0) -> None:
    """Remove partial files that killed processes left, unchanged for that many seconds."""
    with contextlib.suppress(OSError):
        for entry in [entry for entry in folder.iterdir() if _PARTIAL.fullmatch(entry.name)]:
            if time.time() - entry.lstat().st_mtime >= unchanged_for:
                entry.unlink()


def _drop_page_cache(file: BinaryIO) -> None:
    """Make the next reader read from the disk rather than from memory, where supported."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
