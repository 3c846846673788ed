"""Where each image lies in a set of local shards, so that any of them is one read away.

Built from the headers of the tar files and their small label files, in one pass; kept in the user's cache for large
sets, and good as long as every shard has the size and the time of change it was indexed with.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jcl.data.arrays import DAMAGE
from jcl.data.listing import IMAGE_EXTENSIONS, NameTable
from jcl.data.tar_members import DamagedTar, Member, tar_members
from jcl.errors import DataError

NO_CONTENT: Final = -1
"""The size given to a member that is a link, a folder or a device."""

_KEEP_FROM: Final = 20_000  # images; fewer are indexed as fast as what is kept is read
_CLOCK_GRAIN: Final = 2_000_000_000  # nanoseconds, that of the coarsest file systems
_LABEL_FILE_LIMIT: Final = 1 << 20  # bytes; a label file is a few, a description with one in it may be some thousand
_LABEL_LIMIT: Final = 200  # letters
_COMPRESSED: Final = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


@dataclass(frozen=True)
class ShardIndex:
    """A set of shards and the n images in them, shard by shard in stored order.

    stamps (s, 2): size and time of change of each shard; ends (s,): how many images there are up to and with it;
    damage: why it was not read to its end, empty where it was; names, offsets (n,), sizes (n,): the members;
    labels (n,): place in `label_texts`, -1 for none.
    """

    shards: NameTable
    stamps: NDArray[np.int64]
    ends: NDArray[np.int64]
    damage: NameTable
    names: NameTable
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    labels: NDArray[np.int64]
    label_texts: NameTable


def index_shards(files: Sequence[Path]) -> ShardIndex:
    """Index local tar files in the order given, or take the kept index where it is still true."""
    shards = NameTable.of([str(file.absolute()) for file in files])
    stamps = np.array([_stamp(file) for file in files], dtype=np.int64)
    kept = _cache_file(shards)
    index = _read_kept(kept)
    if index is None or list(index.shards) != list(shards) or not np.array_equal(index.stamps, stamps):
        index = _build(shards, stamps)
        if len(index.names) >= _KEEP_FROM and time.time_ns() - int(stamps[:, 1].max()) > _CLOCK_GRAIN:
            _keep(kept, index)
    return index


def _stamp(file: Path) -> tuple[int, int]:
    try:
        status = file.stat()
    except OSError as error:
        raise DataError(f"The shard {file} cannot be read: {error.strerror}.") from error
    return status.st_size, status.st_mtime_ns


def _build(shards: NameTable, stamps: NDArray[np.int64]) -> ShardIndex:
    ends: list[int] = []
    damage: list[str] = []
    names: list[str] = []
    places: list[tuple[int, int, int]] = []
    texts: dict[str, int] = {}
    for shard in shards:
        content = _read_shard(Path(shard))
        for member, text in content.images:
            names.append(member.name)
            label = -1 if text is None else texts.setdefault(text, len(texts))
            places.append((member.offset, member.size if member.regular else NO_CONTENT, label))
        ends.append(len(names))
        damage.append(content.damage)
    offsets, sizes, labels = np.array(places, dtype=np.int64).reshape(-1, 3).T.copy()
    return ShardIndex(
        shards,
        stamps,
        np.array(ends, dtype=np.int64),
        NameTable.of(damage),
        NameTable.of(names),
        offsets,
        sizes,
        labels,
        NameTable.of(list(texts)),
    )


class _Image(NamedTuple):
    """A member named like an image: the name without its extension, and what the members of its sample share."""

    member: Member
    stem: str
    key: str


class _Content(NamedTuple):
    """The images of one shard, each with the text of its label, and why it was not read to its end."""

    images: list[tuple[Member, str | None]]
    damage: str


def _read_shard(file: Path) -> _Content:
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"The shard {file} cannot be read: {error.strerror}.") from error
    images: list[_Image] = []
    texts: dict[str, str] = {}
    damage = ""
    try:
        _collect(descriptor, images, texts)
    except DamagedTar as error:
        damage = str(error)
        if not images:
            _refuse_other_kinds(file, descriptor)
    except OSError as error:
        damage = f"it cannot be read to its end: {error.strerror}"
    finally:
        os.close(descriptor)
    labelled = [(image.member, texts.get(image.stem) or texts.get(image.key)) for image in _main_images(images)]
    return _Content(labelled, damage)


def _collect(descriptor: int, images: list[_Image], texts: dict[str, str]) -> None:
    """Add the images, and the labels by the names they belong to, until the shard ends or is damaged."""
    for member in tar_members(descriptor):
        stem, dot, extension = member.name.rpartition(".")
        folder, slash, base = stem.rpartition("/")
        extension = dot + extension.lower()
        if extension in IMAGE_EXTENSIONS and base and not base.startswith("."):
            images.append(_Image(member, stem, folder + slash + base.partition(".")[0]))
        elif extension in (".cls", ".json") and member.regular and member.size <= _LABEL_FILE_LIMIT:
            content = os.pread(descriptor, member.size, member.offset)
            text = _label(content, extension) if len(content) == member.size else None  # half a number is another one
            if text and (extension == ".cls" or stem not in texts):
                texts[stem] = text


def _refuse_other_kinds(file: Path, descriptor: int) -> None:
    """A file that begins like nothing a tar begins with is a mistake to correct, not a damaged shard."""
    start = os.pread(descriptor, 512, 0)
    if start[:2] in _COMPRESSED:
        raise DataError(
            f"The shard {file} is compressed ({_COMPRESSED[start[:2]]}), so its images cannot be read one by one; "
            f"unpack it to a plain .tar first (images are compressed already)."
        )
    if len(start) == 512 and start[257:262] != b"ustar":
        raise DataError(f"The file {file} is no tar file; shards are plain tar files that hold images.")


def _main_images(images: list[_Image]) -> list[_Image]:
    """Without the further pictures of a sample: beside `7.jpg`, a `7.mask.png` is a part of it and no image."""
    samples = {image.key for image in images if image.stem == image.key}
    return [image for image in images if image.stem == image.key or image.key not in samples]


def _label(content: bytes, extension: str) -> str | None:
    """The text of a label file, or of "label" or "cls" in a description; None where there is none to be found."""
    if extension == ".cls":
        text = content.decode("utf-8", "replace")
    else:
        try:
            description = json.loads(content)
        except (ValueError, RecursionError):
            return None
        value = description.get("label", description.get("cls")) if isinstance(description, dict) else None
        if not isinstance(value, int | str) or isinstance(value, bool):
            return None
        text = str(value).encode("utf-8", "replace").decode("utf-8")
    text = text.strip()
    return None if re.fullmatch(r"-\d+", text) else text[:_LABEL_LIMIT] or None


def _cache_file(shards: NameTable) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jcl" / "shards"
    key = hashlib.sha256(b"\0".join(os.fsencode(shard) for shard in shards)).hexdigest()[:32]
    return cache / f"{key}.npz"


def _read_kept(file: Path) -> ShardIndex | None:
    """What is kept; None for none, or for a damaged one."""
    values: dict[str, Any] = {}
    try:
        with np.load(file, allow_pickle=False) as arrays:
            for field in fields(ShardIndex):
                is_table = field.type is NameTable
                values[field.name] = (
                    NameTable.from_arrays(arrays[f"{field.name}_text"], arrays[f"{field.name}_ends"])
                    if is_table
                    else arrays[field.name]
                )
    except (*DAMAGE, KeyError):
        return None
    return ShardIndex(**values)


def _keep(file: Path, index: ShardIndex) -> None:
    """Write the index in one piece; a cache that cannot be written is no reason to stop."""
    arrays: dict[str, NDArray[Any]] = {}
    for field in fields(ShardIndex):
        value = getattr(index, field.name)
        if isinstance(value, NameTable):
            arrays[f"{field.name}_text"], arrays[f"{field.name}_ends"] = value.arrays()
        else:
            arrays[field.name] = value
    partial = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
        partial.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
