"""Which image files a folder holds: found once, in an order that does not depend on the file system.

A listing of a large folder is kept in the user's cache. Adding, removing or renaming a file changes the modification
time of its folder, so a kept listing is good as long as every folder in it still has the time it was listed with; that
takes one look per folder instead of one per file.
"""

import contextlib
import errno
import hashlib
import heapq
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from jcl.console import pluralize
from jcl.data.arrays import DAMAGE
from jcl.errors import DataError

_EXTENSIONS = "jpg jpeg jpe jfif mpo png webp gif bmp dib tif tiff ppm pgm pbm pnm jp2 j2k avif tga ico pcx"
IMAGE_EXTENSIONS: Final = frozenset(f".{name}" for name in _EXTENSIONS.split())
_FOREIGN = "heic heif cr2 cr3 nef arw dng orf rw2 raf czi nd2 lif svs dcm"  # of telephones, cameras, microscopes
FOREIGN_EXTENSIONS: Final = frozenset(f".{name}" for name in _FOREIGN.split())
_CACHE_FROM: Final = 20_000  # files; a smaller folder is listed as fast as its cache is read
_LASTING: Final = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)  # why a folder cannot be listed today or tomorrow

_CLOCK_GRAIN: Final = 2_000_000_000  # nanoseconds, that of the coarsest file systems


class NameTable(Sequence[str]):
    """Many names in two arrays, so that millions of them are sent to a worker in milliseconds.

    A Python list of as many strings would take ten times the memory, once in every worker.
    """

    def __init__(self, text: bytes, ends: NDArray[np.int64]) -> None:
        self._text = text
        self._ends = ends

    @classmethod
    def of(cls, names: Sequence[str]) -> "NameTable":
        """A table of these names."""
        encoded = [os.fsencode(name) for name in names]
        return cls(b"".join(encoded), np.cumsum([len(name) for name in encoded], dtype=np.int64))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]  # no slices: nothing here asks for one
        index = range(len(self))[index]
        start = int(self._ends[index - 1]) if index else 0
        return os.fsdecode(self._text[start : int(self._ends[index])])

    def any_has(self, letter: str) -> bool:
        """Whether the letter is in any of the names, without making them."""
        return letter.encode() in self._text

    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The text and where each name ends in it."""
        return np.frombuffer(self._text, dtype=np.uint8), self._ends

    @classmethod
    def from_arrays(cls, text: NDArray[np.uint8], ends: NDArray[np.int64]) -> "NameTable":
        """The way back from `arrays`."""
        return cls(text.tobytes(), ends)


@dataclass(frozen=True)
class Listing:
    """Image files below a folder, as sorted paths relative to it, and the times of the folders they were found in.

    `foreign` are images too, but nothing here can decode their kind. `unlisted` maps the folders that could not be
    looked into, the topmost of which is called "", to the reason.
    """

    files: NameTable
    foreign: NameTable
    folders: NameTable
    folder_times: NDArray[np.int64]
    unlisted: Mapping[str, str] = field(default_factory=dict)


def list_images(root: Path, cache: Path | None = None) -> Listing:
    """List the image files below `root`, however deeply nested, by relative path in code-point order.

    Hidden files and folders are left out, and so are folders that cannot be listed. Links are followed, but below each
    sub-folder of `root` no folder is entered twice. Large listings are kept in the folder `cache`, by default one below
    the user's own cache folder.
    """
    kept = _cache_file(root, cache)
    listing = _read_listing(kept)
    if listing is None or not _still_true(root, listing):
        listing = _walk(root)
        # Being given the right to list a folder does not change its time, so a listing without it would stay for ever.
        if len(listing.files) >= _CACHE_FROM and not listing.unlisted and _settled(listing):
            _keep_listing(kept, listing)
    return listing


def kinds_of(names: Iterable[str]) -> dict[str, int]:
    """How many files there are of each kind, by the endings of their names."""
    return dict(sorted(Counter(_ending(name) for name in names).items()))


def about_foreign(counts: dict[str, int]) -> str:
    """What becomes of images that cannot be decoded, and what to do about it."""
    return (
        f"images of kinds that cannot be read are passed over ({each_kind(counts)}); "
        "save them as JPEG, PNG or TIFF to use them"
    )


def about_unlisted(unlisted: Mapping[str, str]) -> str:
    """How many folders could not be looked into, the first of them, and why."""
    folder, reason = next(iter(unlisted.items()))
    more = f" and {len(unlisted) - 1:,} more" if len(unlisted) > 1 else ""
    are, they_hold, them = ("are", "they hold", "them") if more else ("is", "it holds", "it")
    first = folder.replace("\n", "\\n")
    return (
        f"{pluralize(len(unlisted), 'folder')} cannot be listed and {are} passed over ({first}: {reason}{more}); "
        f"if {they_hold} images, make {them} readable"
    )


def each_kind(counts: dict[str, int]) -> str:
    """`.heic 3, .nef 1`."""
    return ", ".join(f"{ending} {count:,}" for ending, count in counts.items())


def _walk(root: Path) -> Listing:
    files: list[str] = []
    foreign: list[str] = []
    folders: dict[str, int] = {}
    unlisted: dict[str, str] = {}
    for folder, changed, entries in _visited(root, unlisted):
        folders[folder] = changed
        for entry in entries:
            ending = _ending(entry.name)
            if ending in IMAGE_EXTENSIONS and _is_file(entry):
                files.append(_below(folder, entry))
            elif ending in FOREIGN_EXTENSIONS:
                foreign.append(_below(folder, entry))
    files.sort()
    foreign.sort()
    times = np.array(list(folders.values()), dtype=np.int64)
    return Listing(NameTable.of(files), NameTable.of(foreign), NameTable.of(list(folders)), times, unlisted)


def _visited(root: Path, unlisted: dict[str, str]) -> Iterator[tuple[str, int, list[os.DirEntry[str]]]]:
    """Every folder below `root`, itself first: its path from there, when it changed, and what is no folder in it.

    Folders that may not be looked into are entered into `unlisted`: a `lost+found` at the root of a disk stops nothing.

    Of the ways that links make to one folder, one is taken below each sub-folder of `root`, which may be a class: that
    along the fewest links, the first by name. So neither circles nor folders of links are walked for ever.
    """
    waiting = [(0, "")]  # links on the way, and the way: in the order in which folders are visited
    seen: set[tuple[str, int, int]] = set()
    above_all: tuple[int, int] | None = None
    while waiting:
        links, folder = heapq.heappop(waiting)
        try:
            status = (root / folder).stat()
            identity = _identity(status)
            above_all = above_all or identity
            known = (folder.partition("/")[0], *identity)
            # Without links no folder is met twice, whatever identities a file system gives them.
            if links and (identity == above_all or known in seen):
                continue
            seen.add(known)
            entries = _shown(root / folder)
        except OSError as error:
            if error.errno not in _LASTING:  # a disk in trouble must not look like fewer images
                raise DataError(f"The folder {root / folder} cannot be listed: {error.strerror}.") from error
            unlisted[folder] = (error.strerror or "it cannot be read").lower()
            continue
        others = []
        for entry in entries:
            if is_folder(entry):
                heapq.heappush(waiting, (links + entry.is_symlink(), _below(folder, entry)))
            else:
                others.append(entry)
        yield folder, status.st_mtime_ns, others


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _below(folder: str, entry: os.DirEntry[str]) -> str:
    return f"{folder}/{entry.name}" if folder else entry.name


def _shown(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def shown_entries(folder: Path) -> list[os.DirEntry[str]]:
    """What lies in a folder and is not hidden."""
    try:
        return _shown(folder)
    except OSError as error:
        raise DataError(f"The folder {folder} cannot be listed: {error.strerror}.") from error


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or leads to one; a link round in a circle, or to where nobody may look, does not."""
    try:
        return entry.is_dir()
    except OSError:
        return False


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122 - a Path each would double the time


def _is_file(entry: os.DirEntry[str]) -> bool:
    """A file or a link that leads nowhere (to be reported as unreadable); pipes and devices would block."""
    return (entry.is_symlink() and not os.path.exists(entry.path)) or entry.is_file()  # noqa: PTH110


def _cache_file(root: Path, cache: Path | None) -> Path:
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jcl" / "listings"
    key = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:32]
    return cache / f"{key}.npz"


def _read_listing(file: Path) -> Listing | None:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            return Listing(
                NameTable.from_arrays(arrays["file_text"], arrays["file_ends"]),
                NameTable.from_arrays(arrays["foreign_text"], arrays["foreign_ends"]),
                NameTable.from_arrays(arrays["folder_text"], arrays["folder_ends"]),
                arrays["folder_times"],
            )
    except (*DAMAGE, KeyError):
        return None  # none kept, a damaged one or one of an earlier form: list afresh


def _still_true(root: Path, listing: Listing) -> bool:
    times = zip(listing.folders, listing.folder_times.tolist(), strict=True)
    try:
        return all((root / folder).stat().st_mtime_ns == modified for folder, modified in times)
    except OSError:
        return False


def _settled(listing: Listing) -> bool:
    """Not changed a moment ago: a further change could come within the grain of the file system's clock, unseen."""
    return time.time_ns() - int(listing.folder_times.max()) > _CLOCK_GRAIN


def _keep_listing(file: Path, listing: Listing) -> None:
    """Write the listing in one piece; a cache that cannot be written is no reason to stop."""
    file_text, file_ends = listing.files.arrays()
    foreign_text, foreign_ends = listing.foreign.arrays()
    folder_text, folder_ends = listing.folders.arrays()
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as stream:
            np.savez(
                stream,
                file_text=file_text,
                file_ends=file_ends,
                foreign_text=foreign_text,
                foreign_ends=foreign_ends,
                folder_text=folder_text,
                folder_ends=folder_ends,
                folder_times=listing.folder_times,
            )
        partial.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
