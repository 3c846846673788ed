"""A lock on a run folder: one process at a time trains in it."""

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from jcl.errors import RunError
from jcl.runs.atomic import OpenFolder

NAME = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_MAX_OWNER_BYTES = 4096


def is_locked(folder: Path) -> bool:
    """Whether a process trains in the folder; False where the file system has no locks."""
    try:
        with os.fdopen(os.open(folder / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that several processes can check at once
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def lock_folder(folder: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Keep other processes from training in a folder until the block ends or the process dies.

    It is the kernel's lock (`flock`), so a dead process never holds it. The file only names the owner. On a file
    system without locks `warn` is called instead.
    """
    with contextlib.ExitStack() as stack:
        try:
            opened = stack.enter_context(OpenFolder(folder, create=True))
            while not _acquire(opened, stack):
                pass
            with os.fdopen(opened.open(NAME, os.O_WRONLY), "w", encoding="utf-8") as file:
                file.truncate(0)
                file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise RunError(f"The run folder {folder} cannot be written: {error.strerror}.") from None
            problem = f"The file system of {folder} does not support locks ({error.strerror})"
            warn(f"{problem}. Make sure that no second process trains in this folder.")
        yield


def _acquire(folder: OpenFolder, stack: contextlib.ExitStack) -> bool:
    """Hold the lock until `stack` ends; False if the last owner has just removed the file."""
    try:  # read-only, so that the file system can still be remounted read-only
        descriptor = _open_locked(folder, os.O_RDONLY)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        descriptor = _open_locked(folder, os.O_RDWR)  # network file systems lock only what can be written
    stack.callback(os.close, descriptor)
    try:
        current = os.stat(NAME, dir_fd=folder.descriptor).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        current = False
    if current:
        stack.callback(folder.remove, NAME)  # before closing: once unlocked, it may belong to another process
    return current


def _open_locked(folder: OpenFolder, mode: int) -> int:
    descriptor = folder.open(NAME, mode | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise RunError(f"{_owner(folder)} is training in {folder.path}; wait for it to end, or stop it.") from None
        raise
    return descriptor


def _owner(folder: OpenFolder) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), (folder.path / NAME).open("rb") as file:
        owner = json.loads(file.read(_MAX_OWNER_BYTES))
        return f"Process {int(owner['pid'])} on {str(owner['host'])!r}"
    return "Another process"
