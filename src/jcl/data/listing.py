"""List the image files of a folder in an order that does not depend on the file system.

Listings of large folders are cached. Adding, removing or renaming a file changes the modification time of its folder,
so a cached listing is valid while every folder in it has the time it was listed with: one `stat` per folder instead of
one per file.
"""

import contextlib
import errno
import hashlib
import heapq
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from jcl.data.arrays import NPZ_ERRORS
from jcl.errors import DataError
from jcl.paths import cache_folder

_EXTENSIONS = "jpg jpeg jpe jfif mpo png webp gif bmp dib tif tiff ppm pgm pbm pnm jp2 j2k avif tga ico pcx"
IMAGE_EXTENSIONS: Final = frozenset(f".{name}" for name in _EXTENSIONS.split())
_UNSUPPORTED = "heic heif cr2 cr3 nef arw dng orf rw2 raf czi nd2 lif svs dcm"  # phones, cameras, microscopes
UNSUPPORTED_EXTENSIONS: Final = frozenset(f".{name}" for name in _UNSUPPORTED.split())
_SKIPPED_ERRORS: Final = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)  # others, of a failing disk, are raised

_CACHE_FROM: Final = 20_000  # files; fewer are listed as fast as a cache is read
_CLOCK_RESOLUTION: Final = 2_000_000_000  # nanoseconds, that of the coarsest file systems
T = TypeVar("T")


class NameTable(Sequence[str]):
    """Many names in two arrays, so that millions of them are sent to a worker in milliseconds.

    A list of strings would take ten times the memory in every worker.
    """

    def __init__(self, text: bytes, ends: NDArray[np.int64]) -> None:
        self.text = text
        self.ends = ends

    @classmethod
    def of(cls, names: Sequence[str]) -> "NameTable":
        encoded = [os.fsencode(name) for name in names]
        return cls(b"".join(encoded), np.cumsum([len(name) for name in encoded], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]  # no slices
        index = range(len(self))[index]
        start = int(self.ends[index - 1]) if index else 0
        return os.fsdecode(self.text[start : int(self.ends[index])])


class TableCache:
    """A dataclass of NumPy arrays and name tables in a file of the user's cache folder."""

    def __init__(self, kind: str, key: bytes) -> None:
        self._file = cache_folder() / kind / f"{hashlib.sha256(key).hexdigest()[:32]}.npz"

    def load(self, kind: type[T]) -> T | None:
        """The cached value; None if there is none, or it is damaged or of another version."""
        try:
            with np.load(self._file, allow_pickle=False) as arrays:
                content = dict(arrays)
            for name in [name.removesuffix("_text") for name in content if name.endswith("_text")]:
                content[name] = NameTable(content.pop(f"{name}_text").tobytes(), content.pop(f"{name}_ends"))
            return kind(**content)
        except (*NPZ_ERRORS, KeyError):
            return None

    def save(self, value: Any, count: int, changed: int) -> None:
        """Save atomically, unless it has few entries, or changed (time in ns) too recently for later changes to show.

        Errors are ignored: the cache is optional.
        """
        if count < _CACHE_FROM or time.time_ns() - changed <= _CLOCK_RESOLUTION:
            return
        arrays: dict[str, Any] = {}
        for name, content in ((each.name, getattr(value, each.name)) for each in fields(value)):
            if isinstance(content, NameTable):
                arrays[f"{name}_text"], arrays[f"{name}_ends"] = np.frombuffer(content.text, np.uint8), content.ends
            elif isinstance(content, np.ndarray):
                arrays[name] = content
        partial = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as stream:
                np.savez(stream, **arrays)
            partial.replace(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink()


@dataclass(frozen=True)
class Listing:
    """Image files below a folder, as sorted relative paths, and the folders they were found in with their times.

    `unsupported` are image files of formats that cannot be decoded. `unlisted` maps the folders that cannot be listed
    ("" is the root) to the reason.
    """

    files: NameTable
    unsupported: NameTable
    folders: NameTable
    folder_times: NDArray[np.int64]
    unlisted: Mapping[str, str] = field(default_factory=dict)


def list_images(root: Path) -> Listing:
    """List the image files below `root`, however deeply nested, by relative path in code-point order.

    Hidden files and folders are ignored, and folders that cannot be listed are skipped. Links are followed, but below
    each sub-folder of `root` no folder is visited twice.
    """
    cache = TableCache("listings", os.fsencode(root.resolve()))
    listing = cache.load(Listing)
    if listing is None or not _is_current(root, listing):
        listing = _walk(root)
        if not listing.unlisted:  # a change of permissions does not change a folder's time
            cache.save(listing, len(listing.files), int(listing.folder_times.max()))
    return listing


def _is_current(root: Path, listing: Listing) -> bool:
    times = zip(listing.folders, listing.folder_times.tolist(), strict=True)
    try:
        return all((root / folder).stat().st_mtime_ns == modified for folder, modified in times)
    except OSError:
        return False


def _walk(root: Path) -> Listing:
    """Visit paths with fewer links first, so that neither cycles nor trees of links multiply the work."""
    files: list[str] = []
    unsupported: list[str] = []
    folders: dict[str, int] = {}
    unlisted: dict[str, str] = {}
    waiting = [(0, "")]  # the number of links on the path, and the path
    visited: set[tuple[str, int, int]] = set()
    while waiting:
        links, folder = heapq.heappop(waiting)
        top = folder.partition("/")[0]  # may be a class; two classes may link to one folder
        try:
            status = (root / folder).stat()
            device, inode = status.st_dev, status.st_ino
            if links and not visited.isdisjoint([("", device, inode), (top, device, inode)]):
                continue
            visited.add((top, device, inode))
            entries = _visible_entries(root / folder)
        except OSError as error:
            if error.errno not in _SKIPPED_ERRORS:
                raise DataError(f"The folder {root / folder} cannot be listed: {error.strerror}.") from error
            unlisted[folder] = (error.strerror or "it cannot be read").lower()
            continue
        folders[folder] = status.st_mtime_ns
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            extension = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122 - a Path each would double the time
            if _is_folder(entry):
                heapq.heappush(waiting, (links + entry.is_symlink(), path))
            elif extension in IMAGE_EXTENSIONS and _is_file(entry):
                files.append(path)
            elif extension in UNSUPPORTED_EXTENSIONS:
                unsupported.append(path)
    tables = NameTable.of(sorted(files)), NameTable.of(sorted(unsupported)), NameTable.of(list(folders))
    return Listing(*tables, np.array(list(folders.values()), dtype=np.int64), unlisted)


def sub_folders(folder: Path) -> list[str]:
    """The sorted names of the visible folders in a folder."""
    try:
        return sorted(entry.name for entry in _visible_entries(folder) if _is_folder(entry))
    except OSError as error:
        raise DataError(f"The folder {folder} cannot be listed: {error.strerror}.") from error


def has_images(folder: Path) -> bool:
    """Whether image files are among the first entries of a folder."""
    with os.scandir(folder) as entries:
        return any(Path(entry.name).suffix.lower() in IMAGE_EXTENSIONS for entry in itertools.islice(entries, 1000))


def _visible_entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()  # noqa: PTH112 - False for a cycle


def _is_file(entry: os.DirEntry[str]) -> bool:
    """A file or a dangling link, to be reported as unreadable; reading pipes and devices would block."""
    return (entry.is_symlink() and not os.path.exists(entry.path)) or entry.is_file()  # noqa: PTH110
