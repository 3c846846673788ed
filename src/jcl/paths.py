"""Paths as users write them, the cache folder, and files that would take far more memory than disk space."""

import difflib
import errno
import os
import zipfile
from itertools import islice
from pathlib import Path
from typing import Final

from jcl.console import format_bytes
from jcl.errors import JclError

_MAX_EXPANSION: Final = 100  # of compressed weights and images, which rarely shrink to a tenth
_ALWAYS_FINE: Final = 2**30


def expand_user(path: str | Path) -> Path:
    """The path with `~` expanded; unlike `Path.expanduser` this does not raise if there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def cache_folder() -> Path:
    """The user's cache folder for this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jcl"


def read_file(path: Path, error: type[JclError]) -> bytes:
    """The content of a regular file; reading a pipe or a device might never end."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "not a regular file")
        return path.read_bytes()
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}.") from None


def refuse_size(file: Path, needed: int, limit: int, error: type[JclError]) -> None:
    """Raise if reading a file needs more bytes of memory than a real file of its kind would."""
    if needed > limit:
        raise error(f"{file} was not read: it needs {format_bytes(needed)} of memory, so it is damaged or malicious.")


def refuse_expansion(file: Path, error: type[JclError]) -> None:
    """The same for a zip file, such as `.npz` and what `torch.save` writes, by the sizes in its directory."""
    try:
        with zipfile.ZipFile(file) as archive:
            needed = sum(member.file_size for member in archive.infolist())
    except Exception:  # not a zip file or damaged, which its reader reports
        return
    refuse_size(file, needed, max(_ALWAYS_FINE, _MAX_EXPANSION * file.stat().st_size), error)


def suggest_path(missing: str | Path) -> str:
    """The end of a sentence about a missing path: `; did you mean photos?`, or a full stop."""
    path = expand_user(missing)
    if path.is_symlink():
        return ": it is a broken link."
    try:
        names = [entry.name for entry in islice(path.absolute().parent.iterdir(), 1000)]
    except OSError:
        names = []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.65)
    return f"; did you mean {path.with_name(close[0])}?" if close else "."


def hub_name(location: str | Path) -> str:
    """The name in `hf:NAME`, of a repository of Hugging Face; empty for other locations, also for the URL `hf://...`."""
    text = str(location)
    return text.removeprefix("hf:") if text.startswith("hf:") and not text.startswith("hf://") else ""


def printable(name: str) -> str:
    """The name of a file, with bytes that are not UTF-8 replaced."""
    return os.fsencode(name).decode("utf-8", "replace")


def path_in(location: str) -> Path:
    """The path in a location of images; of `hf:FOLDER:SPLIT` the folder."""
    return Path(hub_name(location).partition(":")[0] or location)
