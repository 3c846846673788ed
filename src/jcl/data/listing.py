"""List the image files of a folder in an order that does not depend on the file system."""

import errno
import heapq
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np

from jcl.errors import DataError

_EXTENSIONS = (
    "jpg jpeg jpe jfif mpo png webp gif bmp dib tif tiff ppm pgm pbm pnm jp2 j2k avif tga ico pcx heic heif dcm"
)
_NEEDED = ((".heic", "pillow_heif", "heic"), (".heif", "pillow_heif", "heic"), (".dcm", "pydicom", "scientific"))
OPTIONAL_EXTENSIONS: Final = {extension: extra for extension, library, extra in _NEEDED if find_spec(library) is None}
"""Extensions of images that need a library which is not installed, and the extra that installs it."""
IMAGE_EXTENSIONS: Final = frozenset(f".{name}" for name in _EXTENSIONS.split()) - OPTIONAL_EXTENSIONS.keys()
ARRAY_EXTENSION: Final = ".npy"  # an image only if there are no others: next to images usually labels or features
_UNSUPPORTED = "cr2 cr3 nef arw dng orf rw2 raf czi nd2 lif svs"  # cameras, microscopes
UNSUPPORTED_EXTENSIONS: Final = frozenset(f".{name}" for name in _UNSUPPORTED.split()) | OPTIONAL_EXTENSIONS.keys()
_SKIPPED_ERRORS: Final = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)  # others, of a failing disk, are raised


class NameTable(Sequence[str]):
    """Many names in one text: sent to workers in milliseconds, with a tenth of the memory of a list of strings."""

    def __init__(self, text: bytes) -> None:
        """`text` has a zero byte after each name."""
        self.text = text
        self._ends = np.flatnonzero(np.frombuffer(text, np.uint8) == 0)

    @classmethod
    def of(cls, names: Iterable[str]) -> "NameTable":
        return cls(b"".join(os.fsencode(name.replace("\0", "?")) + b"\0" for name in names))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]  # no slices
        index = range(len(self))[index]
        start = int(self._ends[index - 1]) + 1 if index else 0
        return os.fsdecode(self.text[start : int(self._ends[index])])


@dataclass(frozen=True)
class Listing:
    """Image files below a folder, as sorted relative paths.

    `unsupported` are image files of formats that cannot be decoded. `unlisted` maps the folders that cannot be listed
    ("" is the root) to the reason.
    """

    files: Sequence[str]
    unsupported: Sequence[str] = ()
    unlisted: Mapping[str, str] = field(default_factory=dict)


def list_images(root: Path) -> Listing:
    """List the image files below `root`, however deeply nested, by relative path in code-point order.

    Hidden files and folders are ignored, and folders that cannot be listed are skipped. Links are followed, but below
    each sub-folder of `root` no folder is visited twice. Paths with fewer links are visited first, so that neither
    cycles nor trees of links multiply the work.
    """
    files: list[str] = []
    arrays: list[str] = []
    unsupported: list[str] = []
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
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            extension = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122 - a Path each would double the time
            if _is_folder(entry):
                heapq.heappush(waiting, (links + entry.is_symlink(), path))
            elif extension in IMAGE_EXTENSIONS and _is_file(entry):
                files.append(path)
            elif extension == ARRAY_EXTENSION and _is_file(entry):
                arrays.append(path)
            elif extension in UNSUPPORTED_EXTENSIONS:
                unsupported.append(path)
    return Listing(sorted(files or arrays), sorted(unsupported), unlisted)


def sub_folders(folder: Path) -> list[str]:
    """The sorted names of the visible folders in a folder."""
    try:
        return sorted(entry.name for entry in _visible_entries(folder) if _is_folder(entry))
    except OSError as error:
        raise DataError(f"The folder {folder} cannot be listed: {error.strerror}.") from error


def has_images(folder: Path) -> bool:
    """Whether visible image files are among the first entries of a folder."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in itertools.islice(entries, 1000) if not entry.name.startswith(".")]
    return any(Path(name).suffix.lower() in IMAGE_EXTENSIONS for name in names)


def _visible_entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()  # noqa: PTH112 - False for a cycle


def _is_file(entry: os.DirEntry[str]) -> bool:
    """A file or a dangling link, to be reported as unreadable; reading pipes and devices would block."""
    return (entry.is_symlink() and not os.path.exists(entry.path)) or entry.is_file()  # noqa: PTH110
