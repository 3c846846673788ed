"""Shards at an address, copied to this machine once and read from there.

Random access needs the whole file, so each shard is fetched as a whole when the data is opened, and all of them have to
fit on the disk. A copy that is there is used without asking whether the original has changed: delete it to fetch anew.
"""

import contextlib
import hashlib
import importlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

from jcl.console import pluralize
from jcl.errors import DataError

PIPE_CONSENT: Final = "JCL_ALLOW_PIPE"
"""Environment variable, 1 to let `pipe:` addresses run their command."""

_CHUNK: Final = 1 << 20


def fetch_shards(
    addresses: Sequence[str], folder: Path, download: bool, progress: Callable[[str], None] | None
) -> list[Path]:
    """Copy the shards that are not in `folder` yet, one after the other, and give the files in the same order.

    Processes that fetch into one folder take turns, so that each shard is fetched once.
    """
    files = [_place(address, folder) for address in addresses]
    missing = [number for number, file in enumerate(files) if not file.is_file()]
    if missing and not download:
        raise DataError(
            f"The shard {shown(addresses[missing[0]])} is not in {folder} and may not be downloaded; allow downloads "
            f"or fetch it first ({len(missing)} of {pluralize(len(files), 'shard')} missing)."
        )
    if missing:
        _fetch_missing(addresses, files, folder, progress or _silent)
    return files


def shown(address: str) -> str:
    """An address without the password, the key or the signature it may carry."""
    if _runs_a_command(address):
        return address
    return re.sub(r"//[^/@]*@", "//", address).partition("?")[0]


def _fetch_missing(addresses: Sequence[str], files: Sequence[Path], folder: Path, say: Callable[[str], None]) -> None:
    open_address = _opener(addresses)
    total = 0
    with _turn(folder):
        for number, (address, file) in enumerate(zip(addresses, files, strict=True), start=1):
            if not file.is_file():
                _fetch(address, file, open_address)
            total += file.stat().st_size
            needed, free = total * len(files) / number, shutil.disk_usage(folder).free
            say(
                f"Fetched {number} of {pluralize(len(files), 'shard')} ({total / 1e9:.2f} GB) into {folder}; all "
                f"of them take about {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free."
            )


def _silent(message: str) -> None:
    pass


def _runs_a_command(address: str) -> bool:
    """Whether webdataset would run the address; it knows the scheme in whatever letters, as in PIPE://."""
    return address.lower().startswith("pipe:")


def _opener(addresses: Sequence[str]) -> Callable[[str], IO[bytes]]:
    if any(map(_runs_a_command, addresses)) and os.environ.get(PIPE_CONSENT) != "1":
        raise DataError(
            f"A pipe: address runs a command on this machine ({addresses[0]}); if you wrote it yourself, set "
            f"{PIPE_CONSENT}=1 in the environment to allow it."
        )
    for address in addresses:
        # Earlier versions of webdataset put it between such quotes for a shell, where one in it begins a command.
        if "'" in address and not _runs_a_command(address):
            raise DataError(f"The address {shown(address)} holds a quote, which is no part of one; write %27 for it.")
    try:
        opener: Callable[[str], IO[bytes]] = importlib.import_module("webdataset.gopen").gopen  # takes a second
    except ImportError:
        raise DataError(
            f"Reading shards from an address ({shown(addresses[0])}) needs the webdataset library; install it with: "
            f"pip install 'joint-contrastive-learning[shards]'."
        ) from None
    return opener


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Wait until no other process fetches into the folder; the system ends the turn of one that dies."""
    import fcntl  # not on every system, and all else in this package is

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise DataError(f"The folder {folder} for fetched shards cannot be written: {error.strerror}.") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _place(address: str, folder: Path) -> Path:
    """Where the copy lies: told apart by the whole address, called by the last part of it."""
    key = hashlib.sha256(address.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    last = shown(address).rpartition("/")[2]
    name = re.sub(r"[^A-Za-z0-9._-]", "_", last).lstrip(".")[-100:]
    return folder / key / (name or "shard.tar")


def _fetch(address: str, file: Path, open_address: Callable[[str], IO[bytes]]) -> None:
    partial = file.with_name(f"{file.name}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as copy:
            with contextlib.closing(open_address(address)) as stream:  # closing tells whether the command succeeded
                shutil.copyfileobj(stream, copy, _CHUNK)
            if not copy.tell():
                raise ValueError("nothing came")
            copy.flush()
            os.fsync(copy.fileno())
        partial.replace(file)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(
            f"The shard {shown(address)} cannot be fetched into {file.parent}: {_reason(error)}. Shards fetched before "
            f"it are kept."
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _reason(error: Any) -> str:
    """The system's words, or that the program which fetches failed: its own words repeat the whole command."""
    if isinstance(error, OSError):
        exit_status = re.search(r"exit (\d+) \(read\)", str(error))
        if exit_status:
            return f"the program that fetches it ended with status {exit_status[1]}"
        return error.strerror or "it cannot be read"
    return " ".join(shown(str(error)).split()).rstrip(".") or type(error).__name__
