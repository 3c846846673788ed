"""Write files atomically. Nothing is written through links in run folders, which may come from somebody else."""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from jcl.errors import RunError

_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial")


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


def refuse_links(*folders: Path) -> None:
    """Raise if a folder in a run folder is a link."""
    for folder in folders:
        if folder.is_symlink():
            raise RunError(f"{folder} is a link; remove it.")


def open_own_file(path: Path, flags: int) -> int:
    """Open a file of a run folder without following a link or waiting for the reader of a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def append_to(path: Path) -> BinaryIO:
    """Open a file of a run folder, which may be new, to append to it without a buffer."""
    return os.fdopen(open_own_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def remove_partial_files(folder: Path) -> None:
    """Remove partial files that killed processes left."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _PARTIAL.fullmatch(path.name):
                path.unlink()


@contextlib.contextmanager
def atomic_open(path: Path, *, follow_links: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path`, even if that is a link, when the block ends without an error.

    With `follow_links`, for paths that the user gives, missing folders are created, and links, pipes and devices such
    as /dev/stdout are written to directly.
    """
    # A random name, because several processes may write the same file.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        if follow_links:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_symlink() or (path.exists() and not path.is_file()):
                with path.open("wb") as file:
                    yield file
                return
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
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
