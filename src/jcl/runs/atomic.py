"""Writing files: replaced in one step, and in run folders, which may come from elsewhere, never through links."""

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Self

from jcl.errors import RunError

_PARTIAL = re.compile(r"\..+\.[0-9a-f]{8}\.partial")
_SPECIAL = "is a link, a pipe or a device; remove it"
_DAY = 24 * 3600.0  # a partial file unchanged for so long belongs to a killed process

Check = Callable[[BinaryIO], object]


class OpenFolder(contextlib.AbstractContextManager["OpenFolder"]):
    """An open folder, in which nothing is written through links; only `path` may be one, unless `within` another."""

    def __init__(self, path: Path, *, within: Self | None = None, create: bool = False) -> None:
        self.path = path
        if within is None:
            if create:
                path.mkdir(parents=True, exist_ok=True)
            self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            return
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path.name, dir_fd=within.descriptor)
        within.refuse_link(path.name)
        self.descriptor = os.open(path.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=within.descriptor)

    def open(self, name: str, flags: int) -> int:
        """Open a file to write or lock it; it must be a regular file without other names."""
        self.refuse_link(name)
        # O_NOFOLLOW, because a link may take its place meanwhile; O_NONBLOCK, because a pipe would wait for a reader.
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=self.descriptor)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            os.close(descriptor)
            raise OSError(errno.ELOOP, f"{name} {_SPECIAL}")
        return descriptor

    def append(self, name: str) -> BinaryIO:
        """Open a file, which may be new, to append to it without a buffer."""
        return os.fdopen(self.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)

    def refuse_link(self, name: str) -> None:
        """Raise if there is a link, pipe or device of this name."""
        with contextlib.suppress(FileNotFoundError):
            mode = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise OSError(errno.ELOOP, f"{name} {_SPECIAL}")

    def in_place(self) -> bool:
        """Whether the folder is still at its path."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.descriptor))
        except OSError as error:  # a network file system may be unavailable for a while
            return error.errno not in (errno.ENOENT, errno.ENOTDIR)

    def current_path(self) -> Path | None:
        """Where the folder is now; None if the system does not tell (Linux does)."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/self/fd/{self.descriptor}").readlink()
        return None

    def names(self) -> list[str]:
        return [entry.name for entry in os.scandir(self.descriptor)]

    def remove(self, name: str) -> bool:
        """Remove a file; returns whether it could be removed."""
        try:
            os.unlink(name, dir_fd=self.descriptor)
        except OSError:
            return False
        return True

    def remove_partial_files(self, unchanged_for: float = 0.0) -> None:
        """Remove partial files that killed processes left, unchanged for that many seconds."""
        with contextlib.suppress(OSError):
            for name in filter(_PARTIAL.fullmatch, self.names()):
                changed = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mtime
                if time.time() - changed >= unchanged_for:
                    self.remove(name)

    def __exit__(self, *exception: object) -> None:
        os.close(self.descriptor)


def write_atomically(path: Path, content: bytes, *, follow_links: bool = False) -> None:
    """Replace `path` by `content`, atomically and durably; for `follow_links` see `atomic_open`."""
    with atomic_open(path, follow_links=follow_links) as file:
        file.write(content)


def make_folder(path: Path, within: OpenFolder | None = None, *, create: bool = True) -> OpenFolder:
    """Open a folder, and create it unless it exists or `create` is False."""
    try:
        return OpenFolder(path, within=within, create=create)
    except OSError as error:
        raise RunError(f"The folder {path} could not be written: {error.strerror}.") from error


def refuse_overwrite(path: Path, *, force: bool) -> None:
    """Raise if `path` is a folder, or a file that may not be overwritten without `force`."""
    if path.is_dir():
        raise RunError(f"{path} is a folder; give the name of a file.")
    if path.exists() and not force:
        raise RunError(f"{path} already exists; use --force to overwrite.")


def refuse_links(*paths: Path) -> None:
    """Raise, before any work, if a file to write in a run folder is a link, a pipe or a device."""
    for path in filter(_is_special, paths):
        raise RunError(f"{path} {_SPECIAL}.")


def _is_special(path: Path) -> bool:
    return path.is_symlink() or (path.exists() and not path.is_file() and not path.is_dir())


@contextlib.contextmanager
def atomic_open(
    path: Path, check: Check | None = None, *, folder: OpenFolder | None = None, follow_links: bool = False
) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path` when the block ends without an error.

    `check` gets the new file, once it is on the disk, and raises if it is not valid. `folder` is the folder of `path`,
    if it is open. With `follow_links`, for paths that the user gives, missing folders are created, and links, pipes
    and devices such as /dev/stdout are written to directly. Otherwise they are refused.
    """
    # A random name, because several processes may write the same file.
    partial = f".{path.name}.{secrets.token_hex(4)}.partial"
    with contextlib.ExitStack() as stack:
        try:
            if follow_links and _is_special(path):
                with path.open("wb") as file:
                    yield file
                return
            if folder is None:
                folder = stack.enter_context(OpenFolder(path.parent, create=follow_links))
            folder.refuse_link(path.name)
            folder.remove_partial_files(unchanged_for=_DAY)
            with os.fdopen(folder.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL), "w+b") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
                if check is not None:
                    with contextlib.suppress(OSError, AttributeError):  # not supported everywhere
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # have it read from the disk
                    file.seek(0)
                    check(file)
            # A link that has just taken the place of the file is replaced, not followed.
            os.replace(partial, path.name, src_dir_fd=folder.descriptor, dst_dir_fd=folder.descriptor)
            os.fsync(folder.descriptor)
        except BaseException as error:
            if folder is not None:
                folder.remove(partial)
            if not isinstance(error, OSError):
                raise
            text = f"{path} could not be written: {error.strerror or error}. The previous file, if any, is unchanged."
            raise RunError(text) from error
