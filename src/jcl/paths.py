"""Paths as users write them, and the cache folder."""

import contextlib
import difflib
import errno
import os
from itertools import islice
from pathlib import Path

from jcl.errors import JclError


def expand_user(path: str | Path) -> Path:
    """The path with `~` expanded; unlike `Path.expanduser` this does not raise if there is no such user."""
    return Path(os.path.expanduser(path))  # noqa: PTH111


def cache_folder() -> Path:
    """The user's cache folder for this package."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jcl"


def keep_compiled_code() -> None:
    """Let `torch.compile` store its code in the user's cache folder rather than in /tmp, which a restart empties."""
    with contextlib.suppress(OSError, RuntimeError):  # no home, or a read-only one: in /tmp
        folder = cache_folder() / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def read_file(path: Path, error: type[JclError]) -> bytes:
    """The content of a regular file; reading a pipe or a device might never end."""
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "not a regular file")
        return path.read_bytes()
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}.") from None


def suggest_path(missing: str | Path) -> str:
    """The end of a sentence about a missing path: `; did you mean photos?`, or a full stop."""
    path = expand_user(missing)
    if path.is_symlink():
        return ": it is a broken link."
    try:
        names = [entry.name for entry in islice(path.absolute().parent.iterdir(), 1000) if entry.name != path.name]
    except OSError:
        names = []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.65)
    return f"; did you mean {path.with_name(close[0])}?" if close else "."


def hub_name(location: str | Path) -> str:
    """The name in `hf:NAME`, a repository of Hugging Face; empty for other locations and for URLs (`hf://...`)."""
    text = str(location)
    return text.removeprefix("hf:") if text.startswith("hf:") and not text.startswith("hf://") else ""


def absolute_path(path: str | Path) -> str:
    """The absolute path of a run or weights file; `hf:NAME` is unchanged."""
    return str(path) if hub_name(path) else str(expand_user(path).resolve())


def printable(name: str) -> str:
    """The name of a file, with bytes that are not UTF-8 replaced."""
    return os.fsencode(name).decode("utf-8", "replace")


def location_path(location: str) -> Path:
    """The path that a location of images names, such as the folder in `hf:FOLDER:SPLIT`."""
    return Path(hub_name(location).partition(":")[0] or location)
