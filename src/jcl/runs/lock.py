"""A lock on a run folder: one process at a time trains in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Self

from jcl.errors import RunError
from jcl.runs.atomic import OpenFolder

NAME = ".lock"
_BUSY = (errno.EAGAIN, errno.EACCES)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_MAX_OWNER_BYTES = 4096


class FolderLocked(RunError):
    """Another process trains in the folder."""


def is_locked(folder: Path) -> bool:
    """Whether a process trains in the folder; False where the file system has no locks."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return not try_lock(descriptor, fcntl.LOCK_SH)  # shared, so that several processes can check at once
    except OSError:
        return False
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Try to lock an open file; False if another process holds it."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    return True


class RunLock:
    """Keeps other processes from training in a folder until the block ends or the process dies.

    It is the kernel's lock (`flock`), so a dead process never holds it. The file only names the owner. On a file
    system without locks `warn` is called instead.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder, self._warn = folder, warn
        self._open: OpenFolder | None = None
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            self._open = OpenFolder(self._folder, create=True)
            while self._descriptor is None:
                self._descriptor = self._acquire(self._open)
            with os.fdopen(self._open.open(NAME, os.O_WRONLY), "w", encoding="utf-8") as file:
                file.truncate(0)
                file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        except OSError as error:
            self.__exit__()
            if error.errno not in _UNSUPPORTED:
                raise RunError(f"The run folder {self._folder} cannot be written: {error.strerror}.") from None
            self._warn(
                f"The file system of {self._folder} does not support locks ({error.strerror}). "
                "Make sure that no second process trains in this folder."
            )
        return self

    def __exit__(self, *exception: object) -> None:
        if self._open is None:
            return
        with self._open as folder:
            if self._descriptor is not None:
                with contextlib.suppress(OSError):  # before closing: once unlocked, it may belong to another process
                    folder.remove(NAME)
                os.close(self._descriptor)
        self._open = self._descriptor = None

    def _acquire(self, folder: OpenFolder) -> int | None:
        """The locked file; None if its last owner has just removed it."""
        try:  # read-only, so that the file system can still be remounted read-only
            descriptor = self._open_locked(folder, os.O_RDONLY)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            descriptor = self._open_locked(folder, os.O_RDWR)  # network file systems lock only what can be written
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == os.stat(NAME, dir_fd=folder.descriptor).st_ino:
                return descriptor
        os.close(descriptor)
        return None

    def _open_locked(self, folder: OpenFolder, mode: int) -> int:
        descriptor = folder.open(NAME, mode | os.O_CREAT)
        try:
            if not try_lock(descriptor):
                raise FolderLocked(f"{self._owner()} is training in {self._folder}; wait for it to end, or stop it.")
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _owner(self) -> str:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), (self._folder / NAME).open("rb") as file:
            owner = json.loads(file.read(_MAX_OWNER_BYTES))
            return f"Process {int(owner['pid'])} on {str(owner['host'])!r}"
        return "Another process"
