"""Write any data set as WebDataset shards: a few large files, faster to copy and read than many small ones."""

import io
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np
from PIL import Image

from jcl.console import ProgressCallback, no_progress
from jcl.cores import cpu_cores
from jcl.data.encoded import EncodedImages, open_file
from jcl.data.shards.index import ShardSet
from jcl.data.source import RGB, UNLABELED, ImageData, ImageSource, UnreadableImage, all_class_names, pixel_format
from jcl.errors import DataError
from jcl.random import SHARD_ORDER, permutation

_Stored = tuple[bytes, str, int]  # content, extension and label of an image in a shard
_READ_TOGETHER: Final = 256  # images in memory at a time


@dataclass(frozen=True)
class SplitShards:
    """What was written of one split; `left_out` maps unreadable images to the reason."""

    shards: int
    images: int
    bytes: int
    left_out: dict[str, str]


def write_shards(
    data: ImageData,
    out: Path,
    *,
    images_per_shard: int = 5000,
    seed: int = 0,
    progress: ProgressCallback = no_progress,
) -> dict[str, SplitShards]:
    """Write a data set as `train-0000.tar`, ..., `val-0000.tar`, ... and an `index.json` into the new folder `out`.

    Image files are stored unchanged, arrays as PNG or NPY. The order is shuffled by `seed`, so that every shard has
    images of every class. Unreadable images are left out and reported. The same data gives the same bytes. Everything
    is written into a temporary folder beside `out`, then renamed.
    """
    sources = {"train": data.train} | ({} if data.test is None else {"val": data.test})
    total = sum(map(len, sources.values()))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} already exists; choose another folder.")  # it may hold the images
    splits, files, done = {}, {}, 0
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix=f"{out.name}.", dir=out.absolute().parent) as temporary,
            ThreadPoolExecutor(cpu_cores()) as pool,
        ):
            folder = Path(temporary) / out.name
            folder.mkdir()
            for split, source in sources.items():
                left_out: dict[str, str] = {}
                images = _readable_images(source, seed, pool, left_out, lambda read: progress(done + read, total))  # noqa: B023
                files[split] = _write_split(images, len(source), folder, split, images_per_shard)
                if not files[split]:
                    raise DataError(f"None of the images can be read ({source.description}).")
                size = sum((folder / name).stat().st_size for name in files[split])
                splits[split] = SplitShards(len(files[split]), sum(files[split].values()), size, left_out)
                done += len(source)
            ShardSet(name=data.name, class_names=all_class_names(sources.values()), splits=files).write(folder)
            folder.rename(out)  # fails if something has appeared there
    except OSError as error:
        raise DataError(f"The shards cannot be written to {out}: {error.strerror}.") from error
    return splits


def _readable_images(
    source: ImageSource, seed: int, pool: ThreadPoolExecutor, left_out: dict[str, str], advance: Callable[[int], None]
) -> Iterator[_Stored]:
    """Yield the images in shuffled order, read by several threads; unreadable ones are added to `left_out`."""
    order = permutation(seed, SHARD_ORDER, 0, len(source)).tolist()
    for start in range(0, len(order), _READ_TOGETHER):  # to bound memory
        indices = order[start : start + _READ_TOGETHER]
        for loaded in pool.map(lambda index: _load(source, index), indices):
            if isinstance(loaded, UnreadableImage):
                left_out[loaded.name] = loaded.reason
            else:
                yield loaded
        advance(start + len(indices))


def _load(source: ImageSource, index: int) -> _Stored | UnreadableImage:
    label = UNLABELED if source.labels is None else int(source.labels[index])
    try:
        if isinstance(source, EncodedImages):
            content = source.checked_content_of(index)
            return content, PurePosixPath(source.name_of(index)).suffix.lower() or _extension(content), label
        stream, pixels = io.BytesIO(), source.read(index).permute(1, 2, 0).numpy()
        if pixel_format(source) != RGB:
            np.save(stream, pixels)
            return stream.getvalue(), ".npy", label
        Image.fromarray(pixels).save(stream, "PNG")
        return stream.getvalue(), ".png", label
    except UnreadableImage as error:
        return error


def _extension(content: bytes) -> str:
    """The extension for an image file without a name."""
    kind = open_file(content).kind.split()[0].lower()
    return "." + {"dicom": "dcm", "jpeg2000": "jp2"}.get(kind, kind)


def _write_split(
    images: Iterator[_Stored], total: int, folder: Path, split: str, images_per_shard: int
) -> dict[str, int]:
    """Write the shards of one split; returns the number of images in each file. Equal images give equal bytes."""
    width, key_width = max(4, len(str(total // images_per_shard))), max(6, len(str(total - 1)))
    files: dict[str, int] = {}
    for shard, numbered in groupby(enumerate(images), lambda each: each[0] // images_per_shard):
        name = f"{split}-{shard:0{width}}.tar"
        with (folder / name).open("xb") as file:
            with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                for number, (content, extension, label) in numbered:
                    key = f"{number:0{key_width}}"
                    _add(tar, key + extension, content)
                    if label != UNLABELED:
                        _add(tar, f"{key}.cls", str(label).encode())
                    files[name] = files.get(name, 0) + 1
            os.fsync(file.fileno())
    return files


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))
