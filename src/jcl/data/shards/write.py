"""Write any data set as WebDataset shards: a few large files, faster to copy and read than many small ones."""

import contextlib
import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Final, NamedTuple

import torch
from PIL import Image

from jcl.cores import cpu_cores
from jcl.data.decode import decode
from jcl.data.folder import FolderImages
from jcl.data.shards.index import DESCRIPTION_FILE, ShardSet, write_description
from jcl.data.shards.read import ShardImages
from jcl.data.source import UNLABELLED, ImageData, ImageSource, UnreadableImage, all_class_names
from jcl.errors import DataError, SettingsError
from jcl.random import SHARD_ORDER, permutation

_READ_TOGETHER: Final = 256  # images in memory at a time
_DECODED_SIDE: Final = 256  # finds damage too, and decodes a photograph in a fraction of the time


@dataclass(frozen=True)
class SplitShards:
    """What was written of one split; `left_out` maps unreadable images to the reason."""

    shards: int
    images: int
    bytes: int
    left_out: dict[str, str]


@dataclass(frozen=True)
class ShardReport:
    """What was written into the folder `out`."""

    out: Path
    splits: dict[str, SplitShards]

    def as_dict(self) -> dict[str, object]:
        """The figures as one flat object with keys such as `train_images` and `train_left_out`."""
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
    seed: int = 0,
    threads: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ShardReport:
    """Write a data set as `train-0000.tar`, ..., `val-0000.tar`, ... and an `index.json` into the new folder `out`.

    Image files are stored unchanged, arrays as PNG. The order is shuffled by `seed`, so that every shard has images of
    every class. Unreadable images are left out and reported. The same data gives the same bytes. Everything is written
    into `OUT.partial`, which is renamed to `out` at the end. `progress` receives the images done and in total.
    """
    if images_per_shard < 1:
        raise SettingsError(f"images_per_shard must be at least 1, got {images_per_shard}.")
    sources = {"train": data.train} | ({} if data.test is None else {"val": data.test})
    partial = _new_folder(out)
    written, files = {}, {}
    try:
        with ThreadPoolExecutor(threads or cpu_cores()) as pool:
            done, total = 0, sum(map(len, sources.values()))
            for split, source in sources.items():
                images = _ReadableImages(source, seed, pool, lambda count, done=done: progress(done + count, total))  # type: ignore[misc]
                written[split], files[split] = _write_split(images, partial, split, images_per_shard)
                done += len(source)
        write_description(partial, ShardSet(data.name, all_class_names(sources.values()), files))
        _rename_durably(partial, out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise DataError(f"The shards cannot be written to {out}: {error.strerror}.") from error
        raise
    return ShardReport(out, written)


def _new_folder(out: Path) -> Path:
    """Create the temporary folder beside `out`."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} already exists; choose another folder or remove it first.")
    partial = out.absolute().with_name(f"{out.absolute().name}.partial")
    if partial.exists():
        raise DataError(
            f"The folder {partial} exists: another process is writing these shards, or one was interrupted. If none "
            "is running, remove it."
        )
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()  # fails if another process has just created it
    except OSError as error:
        raise DataError(f"The shards cannot be written to {out}: {error.strerror}.") from error
    return partial


class _Loaded(NamedTuple):
    """One image as it is stored in a shard, or the reason why it is left out."""

    content: bytes = b""
    extension: str = ""
    label: int | None = None
    reason: str | None = None


class _ReadableImages:
    """The images of a source in shuffled order, read and decoded by several threads; the others are in `left_out`."""

    def __init__(
        self, source: ImageSource, seed: int, pool: ThreadPoolExecutor, progress: Callable[[int], None]
    ) -> None:
        self.source = source
        self.left_out: dict[str, str] = {}
        self._seed, self._pool, self._progress = seed, pool, progress

    def __iter__(self) -> Iterator[_Loaded]:
        done = 0
        for indices in torch.split(permutation(self._seed, SHARD_ORDER, 0, len(self.source)), _READ_TOGETHER):
            for index, loaded in zip(indices.tolist(), self._pool.map(self._load, indices.tolist()), strict=True):
                if loaded.reason is None:
                    yield loaded
                else:
                    self.left_out[self.source.name_of(index)] = loaded.reason
            done += len(indices)
            self._progress(done)

    def _load(self, index: int) -> _Loaded:
        source = self.source
        label = UNLABELLED if source.labels is None else int(source.labels[index])
        try:
            if isinstance(source, FolderImages | ShardImages):
                content, extension = source.content_of(index), source.extension_of(index)
                decode(content, _DECODED_SIDE, source.name_of(index))
            else:
                stream = io.BytesIO()
                Image.fromarray(source.read(index).permute(1, 2, 0).numpy()).save(stream, "PNG")
                content, extension = stream.getvalue(), ".png"
        except UnreadableImage as error:
            return _Loaded(reason=error.reason)
        return _Loaded(content, extension, None if label == UNLABELLED else label)


def _write_split(
    images: _ReadableImages, folder: Path, split: str, images_per_shard: int
) -> tuple[SplitShards, dict[str, int]]:
    """Write the shards of one split; also returns the number of images in each file."""
    total = len(images.source)
    width, key_width = max(4, len(str(total // images_per_shard))), max(6, len(str(total - 1)))
    files: dict[str, int] = {}
    count = 0
    loading = iter(images)
    while (first := next(loading, None)) is not None:
        name = f"{split}-{len(files):0{width}}.tar"
        with _new_tar(folder / name) as tar:
            for image in chain([first], islice(loading, images_per_shard - 1)):
                key = f"{count:0{key_width}}"
                _add(tar, key + image.extension, image.content)
                if image.label is not None:
                    _add(tar, f"{key}.cls", str(image.label).encode())
                count += 1
                files[name] = files.get(name, 0) + 1
    if not count:
        raise DataError(f"None of the images can be read ({images.source.description}).")
    size = sum((folder / name).stat().st_size for name in files)
    return SplitShards(len(files), count, size, images.left_out), files


@contextlib.contextmanager
def _new_tar(file: Path) -> Iterator[tarfile.TarFile]:
    """A tar file that is on the disk at the end; its bytes depend on its members only, not on times or owners."""
    with file.open("xb") as stream:
        tar = tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115 - closed below
        yield tar
        tar.close()
        stream.flush()
        os.fsync(stream.fileno())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _rename_durably(partial: Path, out: Path) -> None:
    _sync(partial / DESCRIPTION_FILE)
    _sync(partial)
    partial.rename(out)  # fails if something has appeared there
    _sync(out.absolute().parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
