"""The images of WebDataset shards, read in any order."""

import functools
import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from jcl.console import list_some, pluralize
from jcl.data.decode import describe_failure
from jcl.data.encoded import EncodedImages
from jcl.data.shards.fetch import find_shards
from jcl.data.shards.index import DESCRIPTION_FILE, NOT_A_FILE, ShardIndex, ShardSet, index_shards, read_description
from jcl.data.source import UNLABELED, ImageData, Refused, UnreadableImage
from jcl.errors import DataError
from jcl.paths import expand_user, printable

_BYTES_LIMIT: Final = 1 << 30  # of one image file
_OPEN_FILES: Final = 128  # per process; operating systems allow 256 or more
_TEST_PREFIXES: Final = ("val", "valid", "validation", "test")


class ShardImages(EncodedImages):
    """The images of a set of local shards, each read from its tar file when needed.

    Labels come from the `.cls` or `.json` files beside the images. If all are numbers they are the labels; otherwise
    they are class names, numbered as described or as those of `train`, and then alphabetically. `damage` maps the
    shards that could not be read to their end, or have fewer images than described, to the reason.
    """

    def __init__(self, files: Sequence[Path], described: ShardSet | None, train: "ShardImages | None" = None) -> None:
        self._index = index = index_shards(files)
        texts = list(index.label_texts)
        numbered = all(re.fullmatch(r"\d{1,9}", text) for text in texts)
        class_names = None if described is None else described.class_names
        if class_names is None and train is not None and train.class_names is not None:
            class_names, numbered = train.class_names, False  # labels are names in both splits
        if not numbered:
            class_names = (class_names or ()) + tuple(sorted(set(texts) - set(class_names or ())))
        self.class_names: tuple[str, ...] | None = class_names if texts else None
        self.labels = _labels(index, numbered, class_names) if texts else None
        self.damage = _damage(index, {} if described is None else described.counts)

    @property
    def description(self) -> str:
        return f"{pluralize(len(self), 'image')} in {pluralize(len(self._index.shards), 'shard')}"

    def __len__(self) -> int:
        return len(self._index.names)

    def name_of(self, index: int) -> str:
        """The shard and the name in it, with undecodable bytes replaced."""
        shard = Path(self._index.shards[int(self._index.images[index, 0])]).name
        return printable(f"{shard}/{self._index.names[index]}")

    def content_of(self, index: int) -> bytes:
        """The bytes of the image file; raises `UnreadableImage`."""
        shard, offset, size, _ = self._index.images[index].tolist()
        shard_size, modified = self._index.stamps[shard].tolist()
        try:
            if size == NOT_A_FILE:
                raise Refused("it is a link or not a regular file")
            if size > _BYTES_LIMIT:
                raise Refused(f"its {size:,} bytes exceed the limit of {_BYTES_LIMIT:,}")
            opened = _open_shard(self._index.shards[shard], shard_size, modified)
            content = os.pread(opened.fileno(), size, offset)
            if len(content) < size:
                raise Refused("the shard is truncated")
            return content
        except (OSError, Refused) as error:
            raise UnreadableImage(self.name_of(index), describe_failure(error)) from error

    def folders_inside(self) -> tuple[str, ...]:
        """The folders in shards without labels, if several; in WebDataset they are parts of names, not classes."""
        if self.labels is not None or b"/" not in self._index.names.text:
            return ()
        folders = {name.removeprefix("./").rpartition("/")[0] for name in self._index.names} - {""}
        return tuple(map(printable, sorted(folders))) if len(folders) > 1 else ()

    def warnings(self) -> list[str]:
        """What a user should know about damaged shards and missing labels."""
        found = []
        if self.damage:
            shards = list_some((f"{shard} ({reason})" for shard, reason in self.damage.items()), 3)
            found.append(f"Only the readable part of damaged shards is used: {shards}.")
        if folders := self.folders_inside():
            remedy = "If they are classes, unpack the shards and pack the folder with `jcl shard FOLDER OUT`"
            found.append(f"No labels: folders in shards ({list_some(folders, 2)}) are not used as classes. {remedy}.")
        return found


@functools.lru_cache(maxsize=_OPEN_FILES)  # per process rather than per source, so that a source pickles
def _open_shard(file: str, size: int, modified: int) -> io.FileIO:
    """An open tar file, closed when nothing uses it any more."""
    opened = io.FileIO(file)
    status = os.fstat(opened.fileno())
    if (status.st_size, status.st_mtime_ns) != (size, modified):
        raise Refused("the shard has changed since it was indexed; start again")
    return opened


def open_shards(
    location: str, folder: Path, download: bool, strict: bool, progress: Callable[[str], None]
) -> ImageData:
    """Open shards by a folder that `write_shards` made, a tar file, a glob or brace pattern, or URLs of such.

    A pattern of files named `train...` and `val...` gives both splits. URLs are those that fsspec supports (https://,
    s3://, gs://, hf://, ...), downloaded into `folder`. Damaged shards are used as far as they can be read; `strict`
    raises instead.
    """
    local = expand_user(location)
    described = read_description(local) if local.is_dir() else None
    if described is not None:
        name = described.name
        train, test = ([local / file for file in described.splits.get(split, ())] for split in ("train", "val"))
        if not train:
            raise DataError(f"The shards in {local} have no training split; write them again.")
    else:
        files = find_shards(location, folder, download, progress)
        name = (files[0].stem if len(files) == 1 else files[0].absolute().parent.name) or "shards"
        train, test = _splits(files)
        if len({file.parent for file in files}) == 1:  # some shards of a set that is described there
            described = read_description(files[0].parent)
            if described is not None and not {file.name for file in files} <= described.counts.keys():
                described = None
    train_images = _images(train, described, strict)
    return ImageData(name, train_images, _images(test, described, strict, train_images) if test else None)


def _splits(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Training and test shards by the first word of their names; all are for training if that fails."""
    words = {file: re.split(r"[^a-z]", file.name.lower(), maxsplit=1)[0] for file in files}
    train = [file for file in files if words[file] == "train"]
    test = [file for file in files if words[file] in _TEST_PREFIXES]
    return (train, test) if train and test and len(train) + len(test) == len(files) else (list(files), [])


def _images(
    files: Sequence[Path], described: ShardSet | None, strict: bool, train: ShardImages | None = None
) -> ShardImages:
    images = ShardImages(files, described, train)
    if not len(images):
        why = list_some((f"; {shard}: {reason}" for shard, reason in images.damage.items()), 1)
        raise DataError(f"The shard {list_some(map(str, files), 1)} contains no images (.jpg, .png, ...){why}.")
    for shard, reason in images.damage.items() if strict else ():
        raise DataError(f"The shard {shard} is damaged: {reason}. Replace it, or omit --strict to use what is left.")
    return images


def _damage(index: ShardIndex, expected_counts: Mapping[str, int]) -> dict[str, str]:
    damage = {}
    counts = np.bincount(index.images[:, 0], minlength=len(index.shards)).tolist()
    for shard, reason, count in zip(index.shards, index.damage, counts, strict=True):
        name = Path(shard).name
        expected = expected_counts.get(name, count)
        missing = f"it has {count:,} of {expected:,} images" if count != expected else ""
        if reason or missing:
            damage[name] = ", ".join(filter(None, (reason, missing)))
    return damage


def _labels(index: ShardIndex, numbered: bool, class_names: tuple[str, ...] | None) -> Tensor:
    known = {name: number for number, name in enumerate(class_names or ())}
    numbers = [int(text) if numbered else known[text] for text in index.label_texts]
    if numbered and class_names is not None and max(numbers) >= len(class_names):
        file = Path(index.shards[0]).with_name(DESCRIPTION_FILE)
        raise DataError(f"The file {file} lacks a name of class {max(numbers)}; write the shards again.")
    # The last entry is for index -1, no label.
    return torch.from_numpy(np.array([*numbers, UNLABELED], dtype=np.int64)[index.images[:, 3]])
