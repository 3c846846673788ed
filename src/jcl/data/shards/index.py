"""The offset of each image in a set of local shards, for random access; and the file `index.json`.

The index is built from the headers of the tar files and their small label files in one pass. For large sets it is
cached, and valid while every shard has the size and modification time it was indexed with. Nothing is extracted, and
no name in a tar file is used as a path.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, StrictInt, StringConstraints, ValidationError

from jcl.data.listing import ARRAY_EXTENSION, IMAGE_EXTENSIONS, NameTable
from jcl.errors import DataError
from jcl.paths import cache_folder

NOT_A_FILE: Final = -1  # the size given to a link, folder or device, or to a sparse file

DESCRIPTION_FILE: Final = "index.json"
_CACHE_FROM: Final = 20_000  # images; fewer are indexed as fast as a cache is read
_FileName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]  # stays in the folder
_HEADER_LIMIT: Final = 1 << 16  # bytes of a long name or of extended attributes
_LABEL_FILE_LIMIT: Final = 1 << 20  # bytes
_LABEL_LIMIT: Final = 200  # characters


@dataclass(frozen=True)
class ShardIndex:
    """A set of shards and the n images in them, shard by shard in stored order.

    stamps (s, 2): size and modification time of each shard; damage: why a shard could not be read to its end, or empty;
    images (n, 4): shard, offset, size, and index into `label_texts` or -1.
    """

    shards: NameTable
    stamps: NDArray[np.int64]
    damage: NameTable
    names: NameTable
    images: NDArray[np.int64]
    label_texts: NameTable


def index_shards(files: Sequence[Path]) -> ShardIndex:
    """Index local tar files in the order given, or load the cached index if it is still valid."""
    shards = NameTable.of([str(file.absolute()) for file in files])
    try:
        stamps = np.array([(status.st_size, status.st_mtime_ns) for status in map(os.stat, files)], dtype=np.int64)
    except OSError as error:
        raise DataError(f"The shard {error.filename} cannot be read: {error.strerror}.") from error
    key = hashlib.sha256(b"\0".join(map(os.fsencode, shards))).hexdigest()[:32]
    cache = cache_folder() / "shards" / f"{key}.npz"
    index = _load(cache)
    if index is None or list(index.shards) != list(shards) or not np.array_equal(index.stamps, stamps):
        index = _build(shards, stamps)
        if len(index.names) >= _CACHE_FROM:
            _save(index, cache)
    return index


def _load(file: Path) -> ShardIndex | None:
    """The cached index; None if there is none, or it is damaged or of another version."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            columns: dict[str, Any] = {
                name: NameTable(array.tobytes()) if array.ndim == 1 else array for name, array in arrays.items()
            }
        return ShardIndex(**columns)
    except Exception:  # NumPy raises many kinds for damaged files
        return None


def _save(index: ShardIndex, file: Path) -> None:
    """Save atomically; errors are ignored, because the cache is optional."""
    arrays: dict[str, Any] = dict(vars(index))
    for name, column in arrays.items():
        arrays[name] = np.frombuffer(column.text, np.uint8) if isinstance(column, NameTable) else column
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as stream:
                np.savez(stream, **arrays)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)


def _build(shards: NameTable, stamps: NDArray[np.int64]) -> ShardIndex:
    damage: list[str] = []
    names: list[str] = []
    rows: list[tuple[int, int, int, int]] = []
    texts: dict[str, int] = {}
    for number, shard in enumerate(shards):
        images, reason = _read_shard(Path(shard))
        for image, text in images:
            label = -1 if text is None else texts.setdefault(text, len(texts))
            names.append(image.name)
            rows.append((number, image.offset, image.size, label))
        damage.append(reason)
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return ShardIndex(shards, stamps, NameTable.of(damage), NameTable.of(names), columns, NameTable.of(texts))


class _Member(NamedTuple):
    """A file in a tar, with the parts of its name: `folder/key.more.extension`."""

    name: str
    offset: int
    size: int
    stem: str  # without the extension
    key: str  # what the files of a sample share
    extension: str


def _read_shard(file: Path) -> tuple[list[tuple[_Member, str | None]], str]:
    """The images of one shard with the texts of their labels, and why it could not be read to its end."""
    images: dict[str, _Member] = {}
    labels: dict[str, dict[str, str | None]] = {".cls": {}, ".json": {}}  # by stem
    damage = ""
    try:
        with _HeaderFile(file) as stream:
            start = os.pread(stream.fileno(), tarfile.BLOCKSIZE, 0)
            for member in _members(stream):
                of_kind = labels.get(member.extension, {})
                if member.name in images or member.stem in of_kind:
                    raise tarfile.ReadError(f"it has {member.name} twice; write shards that were joined anew")
                if member.extension in labels:
                    of_kind[member.stem] = _label(stream, member)
                elif member.extension in IMAGE_EXTENSIONS or member.extension == ARRAY_EXTENSION:
                    images[member.name] = member
    except tarfile.TarError as error:
        damage = str(error)
        if not images and len(start) == tarfile.BLOCKSIZE and start[257:262] != b"ustar":
            raise DataError(f"{file} is not a plain tar file of images; if it is compressed, decompress it.") from None
    except OSError as error:
        raise DataError(f"The shard {file} cannot be read: {error.strerror}.") from error
    texts = {stem: text for of_kind in (labels[".json"], labels[".cls"]) for stem, text in of_kind.items() if text}
    # Beside `7.jpg`, a `7.mask.png` belongs to the same sample and is not an image to train on.
    samples = {image.key for image in images.values() if image.stem == image.key}
    kept = [image for image in images.values() if image.stem == image.key or image.key not in samples]
    return [(image, texts.get(image.stem) or texts.get(image.key)) for image in kept], damage


class _HeaderFile(io.FileIO):
    """A tar file that refuses to read a header of any declared length into memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= _HEADER_LIMIT:
            raise tarfile.ReadError(f"invalid header of {size:,} bytes at byte {self.tell():,}")
        return super().read(size)


def _members(stream: _HeaderFile) -> Iterator[_Member]:
    """Yield the visible members in order, including a truncated one; then raise `tarfile.TarError` if it is damaged."""
    file_size = os.fstat(stream.fileno()).st_size
    try:
        tar = tarfile.TarFile(fileobj=stream, encoding="utf-8", errors="surrogateescape")
        position = -1
        while (member := tar.next()) is not None:
            if member.size < 0 or member.offset_data <= position:  # would loop for ever
                raise tarfile.ReadError(f"invalid size in the header at byte {member.offset:,}")
            position = member.offset_data
            regular = member.isreg() and not member.issparse()
            stem, dot, extension = member.name.rpartition(".")
            folder, slash, base = stem.rpartition("/")
            if base and not base.startswith("."):
                size = min(member.size, file_size) if regular else NOT_A_FILE
                key = folder + slash + base.partition(".")[0]
                yield _Member(member.name, position, size, stem, key, dot + extension.lower())
            if regular and position + member.size > file_size:
                raise tarfile.ReadError("it is truncated")
            tar.members.clear()  # type: ignore[attr-defined]  # else they all stay in memory
    except (ValueError, ArithmeticError, IndexError, RecursionError) as error:  # at malformed headers
        raise tarfile.ReadError(f"invalid header ({type(error).__name__})") from error
    # `tarfile` takes an invalid header for the end.
    end = os.pread(stream.fileno(), 2 * tarfile.RECORDSIZE, tar.offset)  # longer than the padding
    if len(end) < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("it is truncated: the end-of-archive marker is missing")
    if any(end):
        raise tarfile.ReadError(f"no valid header at byte {tar.offset:,}; give joined tar files as separate shards")


def _label(stream: _HeaderFile, member: _Member) -> str | None:
    """The label in a `.cls` file, or the value of "label" or "cls" in a `.json` file; None if there is none."""
    if not 0 <= member.size <= _LABEL_FILE_LIMIT:
        return None
    content = os.pread(stream.fileno(), member.size, member.offset)
    if len(content) < member.size:
        return None
    value: Any = content.decode("utf-8", "replace")
    if member.extension == ".json":
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return None
        value = value.get("label", value.get("cls")) if isinstance(value, dict) else None
        if not isinstance(value, int | str) or isinstance(value, bool):
            return None
    text = str(value).encode("utf-8", "replace").decode("utf-8").strip()
    return None if re.fullmatch(r"-\d+", text) else text[:_LABEL_LIMIT] or None


class ShardSet(BaseModel, frozen=True):
    """A folder of shards as `index.json` describes it: the images in each file by split, and the class names."""

    format: Literal["jcl-shards"] = "jcl-shards"
    version: Literal[1] = 1
    name: str
    class_names: tuple[str, ...] | None
    splits: dict[str, dict[_FileName, StrictInt]]

    @property
    def counts(self) -> dict[str, int]:
        """Images by file name, of all splits."""
        return {name: count for files in self.splits.values() for name, count in files.items()}

    def write(self, folder: Path) -> None:
        with (folder / DESCRIPTION_FILE).open("wb", buffering=0) as file:
            file.write(json.dumps(self.model_dump(), indent=1).encode() + b"\n")
            os.fsync(file.fileno())


def read_description(folder: Path) -> ShardSet | None:
    """Read the description in a folder; None if there is none or the file is another program's."""
    file = folder / DESCRIPTION_FILE
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or content.get("format") != "jcl-shards":
        return None
    try:
        return ShardSet.model_validate(content)
    except ValidationError as error:
        raise DataError(f"The file {file} is damaged or of another version; write the shards again.") from error
