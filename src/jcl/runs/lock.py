"""One process a run: a lock on the run folder that no crash leaves behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from jcl.errors import RunError

NAME = ".lock"
_HELD = (errno.EAGAIN, errno.EACCES)
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_HOLDER_BYTES = 4096  # more than a process writes about itself


def try_lock(descriptor: int) -> bool:
    """Whether an open file is now ours alone, until it is closed or the process ends; OSError where it has no locks."""
    return _try(descriptor, fcntl.LOCK_EX)


def held(folder: Path) -> bool:
    """Whether a process trains in the folder, as far as its file system tells."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _try(descriptor, fcntl.LOCK_SH)  # several may ask at once
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _try(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            return False
        raise
    return True


class RunHeld(RunError):
    """Another process trains in the folder."""


class RunLock:
    """Keeps other processes from training in a folder, for as long as the block lasts or the process lives.

    The lock is the kernel's (`flock`), so it ends with its process, however that ends. The file only says who holds
    it; reading a run never needs the lock. Where a file system knows no locks, that is said through `warn`.
    """

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self._folder, self._path, self._warn = folder, folder / NAME, warn
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while self._descriptor is None:
                self._descriptor = self._acquire()
            self._path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}), encoding="utf-8")
        except OSError as error:
            self._release()
            if error.errno in _WITHOUT_LOCKS:
                self._warn(
                    f"The file system of {self._folder} knows no locks ({error.strerror}): "
                    "take care that no second process trains in this folder."
                )
                return self
            raise RunError(f"the run folder {self._folder} cannot be written: {error.strerror}.") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    def _acquire(self) -> int | None:
        """The locked file, or None if it was removed in between by a process that had just finished."""
        descriptor = self._open_locked()
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(descriptor).st_ino == self._path.stat().st_ino:
                return descriptor
        os.close(descriptor)
        return None

    def _open_locked(self) -> int:
        try:  # open for reading only, it does not stand in the way of turning the file system read-only
            return self._locked(os.O_RDONLY)
        except OSError as error:
            if error.errno != errno.EBADF:
                raise
            return self._locked(os.O_RDWR)  # network file systems lock only what can be written

    def _locked(self, mode: int) -> int:
        descriptor = os.open(self._path, mode | os.O_CREAT, 0o644)
        try:
            free = try_lock(descriptor)
        except OSError:
            os.close(descriptor)
            raise
        if not free:
            os.close(descriptor)
            raise RunHeld(
                f"the run in {self._folder} is being trained by {self._holder()}; wait for it to end, or stop it first."
            )
        return descriptor

    def _holder(self) -> str:
        """Who holds the lock, as far as its file tells."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), self._path.open("rb") as file:
            holder = json.loads(file.read(_HOLDER_BYTES))
            return f"process {int(holder['pid'])} on {str(holder['host'])!r}"
        return "another process"

    def _release(self) -> None:
        """Remove the file first: once unlocked, it may be another's."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = None
