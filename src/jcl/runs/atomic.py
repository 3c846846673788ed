"""Write files atomically. Nothing is written through links in run folders, which may come from somebody else."""

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jcl.errors import RunError

_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial")
_SPECIAL = "is a link, a pipe or a device; remove it"


def write_atomically(path: Path, content: bytes, *, follow_links: bool = False) -> None:
    """Replace `path` by `content`, atomically and durably; for `follow_links` see `atomic_open`."""
    with atomic_open(path, follow_links=follow_links) as file:
        file.write(content)


def make_folder(path: Path, *, parents: bool = True) -> None:
    """Create a folder unless it exists."""
    try:
        path.mkdir(parents=parents, exist_ok=True)
    except OSError as error:
        raise RunError(f"The folder {path} could not be written: {error.strerror}.") from error


def refuse_overwrite(path: Path, *, force: bool) -> None:
    """Raise if `path` is a folder, or a file that may not be overwritten without `force`."""
    if path.is_dir():
        raise RunError(f"{path} is a folder; give the name of a file.")
    if path.exists() and not force:
        raise RunError(f"{path} already exists; use --force to overwrite.")


def refuse_links(*paths: Path) -> None:
    """Raise if a file or folder to write in a run folder is a link, a pipe or a device."""
    for path in filter(_is_special, paths):
        raise RunError(f"{path} {_SPECIAL}.")


def _is_special(path: Path) -> bool:
    return path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir())


def open_regular_file(path: Path, flags: int) -> int:
    """Open a file of a run folder, which must be new or a regular file without hard links."""
    if not _is_special(path):
        # O_NOFOLLOW, because a link may take its place meanwhile; O_NONBLOCK, because a pipe would wait for a reader.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
            return descriptor
        os.close(descriptor)
    raise OSError(errno.ELOOP, f"{path.name} {_SPECIAL}")


def append_to(path: Path) -> BinaryIO:
    """Open a file of a run folder, which may be new, to append to it without a buffer."""
    return os.fdopen(open_regular_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def remove_partial_files(folder: Path) -> None:
    """Remove partial files that killed processes left."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _PARTIAL.fullmatch(path.name):
                path.unlink()


@contextlib.contextmanager
def atomic_open(path: Path, *, follow_links: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` when the block ends without an error.

    With `follow_links`, for paths that the user gives, missing folders are created, and links, pipes and devices such
    as /dev/stdout are written to directly. Otherwise they are refused.
    """
    # A random name, because several processes may write the same file.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        if follow_links and _is_special(path):
            with path.open("wb") as file:
                yield file
            return
        if follow_links:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif _is_special(path):
            raise OSError(errno.ELOOP, f"{path.name} {_SPECIAL}")
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)  # a link that has just taken the place of the file is replaced, not followed
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if not isinstance(error, OSError):
            raise
        text = f"{path} could not be written: {error.strerror or error}. The previous file, if any, is unchanged."
        raise RunError(text) from error
