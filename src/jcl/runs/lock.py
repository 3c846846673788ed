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
from jcl.runs.atomic import open_regular_file

NAME = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_MAX_OWNER_BYTES = 4096


def is_locked(folder: Path) -> bool:
    """Whether a process trains in the folder; False where the file system has no locks."""
    try:
        with os.fdopen(open_regular_file(folder / NAME, os.O_RDONLY), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that several processes can check at once
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


@contextlib.contextmanager
def lock_folder(folder: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Keep other processes from training in a folder until the block ends or the process dies.

    It is the kernel's lock (`flock`), so a dead process never holds it. The file only names the owner. On a file
    system without locks `warn` is called instead.
    """
    file = folder / NAME
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.callback(_release, file, _acquire(file))
            with os.fdopen(open_regular_file(file, os.O_WRONLY | os.O_TRUNC), "w", encoding="utf-8") as owner:
                owner.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        except BlockingIOError:
            raise RunError(f"{_owner(file)} is training in {folder}; wait for it to end, or stop it.") from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise RunError(f"The run folder {folder} cannot be written: {error.strerror}.") from None
            problem = f"The file system of {folder} does not support locks ({error.strerror})"
            warn(f"{problem}. Make sure that no second process trains in this folder.")
        yield


def _acquire(file: Path, mode: int = os.O_RDONLY) -> int:
    """Open the file for reading, so that its file system can be remounted read-only; or for writing if that fails."""
    descriptor = open_regular_file(file, mode | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.EBADF and mode == os.O_RDONLY:
            return _acquire(file, os.O_RDWR)
        raise
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(file.stat(), os.fstat(descriptor)):
            return descriptor
    os.close(descriptor)  # its last owner has just removed it
    return _acquire(file, mode)


def _release(file: Path, descriptor: int) -> None:
    with contextlib.suppress(OSError):
        file.unlink()  # before closing: once unlocked, it may belong to another process
    os.close(descriptor)


def _owner(file: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), file.open("rb") as opened:
        owner = json.loads(opened.read(_MAX_OWNER_BYTES))
        return f"Process {int(owner['pid'])} on {str(owner['host'])!r}"
    return "Another process"
