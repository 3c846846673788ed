"""Any data set as WebDataset shards: a few large files that copy, stream and read fast where many small ones do not."""

import contextlib
import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

import torch
from PIL import Image

from jcl.cores import cpu_cores
from jcl.data.decode import decode
from jcl.data.folder import FolderImages
from jcl.data.shard_description import DESCRIPTION_FILE, ShardSet, write_description
from jcl.data.shard_reading import ShardImages
from jcl.data.source import UNLABELLED, ImageData, ImageSource, UnreadableImage, all_class_names
from jcl.errors import DataError, SettingsError
from jcl.random import DATA_ORDER, permutation

SPLITS: Final = ("train", "val")

_READ_TOGETHER: Final = 256  # images in memory at a time
_DECODED_SIDE: Final = 256  # damage shows at reduced size too, and most photographs take a fraction of the time


@dataclass(frozen=True)
class SplitShards:
    """What was written of one split; `left_out` maps the images that cannot be read to the reason."""

    shards: int
    images: int
    bytes: int
    left_out: dict[str, str]


@dataclass(frozen=True)
class ShardReport:
    """What was written where."""

    out: Path
    splits: dict[str, SplitShards]

    def as_dict(self) -> dict[str, object]:
        """The figures as one flat object of plain names, such as `train_images` and `train_left_out`."""
        flat: dict[str, object] = {"out": str(self.out)}
        for split, written in self.splits.items():
            flat |= {
                f"{split}_shards": written.shards,
                f"{split}_images": written.images,
                f"{split}_bytes": written.bytes,
                f"{split}_left_out": len(written.left_out),
                f"{split}_left_out_names": sorted(written.left_out),
            }
        return flat


def write_shards(
    data: ImageData,
    out: Path,
    *,
    images_per_shard: int = 5000,
    splits: Sequence[str] = SPLITS,
    seed: int = 0,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ShardReport:
    """Write a data set as `train-0000.tar`, ..., `val-0000.tar`, ... and an `index.json` into the new folder `out`.

    Image files go in as they are, byte for byte; arrays become PNG. The order is shuffled by `seed`, so that every
    shard has images of every class. Images that cannot be read are left out and reported. The same data gives the same
    bytes. All is written into `OUT.partial`, which becomes `out` at the end: there is never half a set under its name.
    `progress` is told how many of how many images have been looked at.
    """
    sources = _sources(data, splits, images_per_shard)
    partial = _new_folder(out)
    counted = _Counted(sum(map(len, sources.values())), progress)
    try:
        written, files = {}, {}
        for split, source in sources.items():
            with ThreadPoolExecutor(threads or cpu_cores()) as pool:
                written[split], files[split] = _write_split(
                    source, split, partial, images_per_shard, seed, pool, counted
                )
        write_description(partial, ShardSet(data.name, all_class_names(sources.values()), files))
        _settle(partial, out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise DataError(f"The shards cannot be written to {out}: {error.strerror}.") from error
        raise
    return ShardReport(out, written)


def _sources(data: ImageData, splits: Sequence[str], images_per_shard: int) -> dict[str, ImageSource]:
    if images_per_shard < 1:
        raise SettingsError(f"A shard must hold at least one image, but images_per_shard is {images_per_shard}.")
    there = {"train": data.train, "val": data.test}
    unknown = [split for split in splits if split not in there]
    if unknown:
        raise SettingsError(f"The split {unknown[0]} is not known; use {' or '.join(SPLITS)}.")
    sources = {split: source for split in splits if (source := there[split]) is not None}
    if not sources:
        raise DataError(f"The data set {data.name} has none of the splits {', '.join(splits)}.")
    return sources


def _new_folder(out: Path) -> Path:
    """Make the folder to write into, beside the place where it goes in the end."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is there already; nothing is overwritten, so choose another folder or remove it first.")
    partial = out.absolute().with_name(f"{out.absolute().name}.partial")
    if partial.exists():
        raise DataError(
            f"The folder {partial} is there: another process writes these shards, or one broke off; remove it if none "
            f"does."
        )
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()  # fails where another process has just made it
    except OSError as error:
        raise DataError(f"The shards cannot be written to {out}: {error.strerror}.") from error
    return partial


class _Counted:
    """Counts images for whoever wants to know."""

    def __init__(self, total: int, progress: Callable[[int, int], None] | None) -> None:
        self._total, self._progress, self._done = total, progress, 0

    def add(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


class _Loaded(NamedTuple):
    """One image as it goes into a shard, or the reason why it does not."""

    sample: int
    content: bytes
    extension: str
    reason: str | None


def _write_split(
    source: ImageSource,
    split: str,
    folder: Path,
    images_per_shard: int,
    seed: int,
    pool: ThreadPoolExecutor,
    counted: _Counted,
) -> tuple[SplitShards, dict[str, int]]:
    width = max(4, len(str(len(source) // images_per_shard)))
    key_width = max(6, len(str(len(source) - 1)))
    files: dict[str, int] = {}
    left_out: dict[str, str] = {}
    images = 0
    readable = _readable(source, seed, pool, counted, left_out)
    while (first := next(readable, None)) is not None:
        name = f"{split}-{len(files):0{width}}.tar"
        with _ShardFile(folder / name) as shard:
            for number, loaded in enumerate(chain([first], islice(readable, images_per_shard - 1)), start=1):
                shard.add(f"{images:0{key_width}}", loaded, _label(source, loaded.sample))
                images += 1
                files[name] = number
    if not images:
        raise DataError(f"None of the images can be read ({source.description}), so there is nothing to write.")
    size = sum((folder / name).stat().st_size for name in files)
    return SplitShards(len(files), images, size, left_out), files


def _readable(
    source: ImageSource, seed: int, pool: ThreadPoolExecutor, counted: _Counted, left_out: dict[str, str]
) -> Iterator[_Loaded]:
    """The images in shuffled order, read and tried by several threads; those that fail go into `left_out`."""
    for indices in torch.split(permutation(seed, DATA_ORDER, 0, len(source)), _READ_TOGETHER):
        for loaded in pool.map(lambda index: _load(source, index), indices.tolist()):
            if loaded.reason is None:
                yield loaded
            else:
                left_out[source.name_of(loaded.sample)] = loaded.reason
        counted.add(len(indices))


def _load(source: ImageSource, index: int) -> _Loaded:
    try:
        content, extension = _content(source, index)
    except UnreadableImage as error:
        return _Loaded(index, b"", "", error.reason)
    return _Loaded(index, content, extension, None)


def _content(source: ImageSource, index: int) -> tuple[bytes, str]:
    """The bytes and the extension of an image file that can be decoded."""
    if not isinstance(source, FolderImages | ShardImages):
        stream = io.BytesIO()
        Image.fromarray(source.read(index).permute(1, 2, 0).numpy()).save(stream, "PNG")
        return stream.getvalue(), ".png"
    content, extension = source.content_of(index), source.extension_of(index)
    decode(content, _DECODED_SIDE, source.name_of(index))
    return content, extension


def _label(source: ImageSource, index: int) -> int | None:
    label = UNLABELLED if source.labels is None else int(source.labels[index])
    return None if label == UNLABELLED else label


class _ShardFile:
    """A tar file being written, whose bytes depend on its members only: no times, no owners."""

    def __init__(self, file: Path) -> None:
        self._stream = file.open("xb")
        self._tar = tarfile.open(fileobj=self._stream, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - closed at the exit

    def add(self, key: str, image: _Loaded, label: int | None) -> None:
        self._add(key + image.extension, image.content)
        if label is not None:
            self._add(f"{key}.cls", str(label).encode())

    def _add(self, name: str, content: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        self._tar.addfile(member, io.BytesIO(content))

    def __enter__(self) -> "_ShardFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the file and wait until it is on the disk; after an error, let go of it."""
        if error is not None:
            with contextlib.suppress(OSError):
                self._stream.close()
            return
        with self._stream:
            self._tar.close()
            self._stream.flush()
            os.fsync(self._stream.fileno())


def _settle(partial: Path, out: Path) -> None:
    """Give the finished folder its name, once the names in it are on the disk too."""
    _sync(partial / DESCRIPTION_FILE)
    _sync(partial)
    partial.rename(out)  # fails where something has come to be there meanwhile
    _sync(out.absolute().parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
