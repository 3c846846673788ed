"""WebDataset shards: tar files whose members are images and their labels, read in any order."""

import functools
import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlparse
from urllib.request import url2pathname

import numpy as np
import torch
from torch import Tensor

from jcl.console import pluralize
from jcl.data.decode import decode
from jcl.data.downloads import default_root
from jcl.data.shard_description import DESCRIPTION_FILE, ShardSet, read_description
from jcl.data.shard_fetching import fetch_shards
from jcl.data.shard_index import NO_CONTENT, ShardIndex, index_shards
from jcl.data.shard_patterns import expand_braces
from jcl.data.source import UNLABELLED, ImageData, UnreadableImage
from jcl.errors import DataError
from jcl.paths import home_expanded

_BYTES_LIMIT: Final = 1 << 30  # of one image file
_OPEN_FILES: Final = 128  # kept open in each process; systems allow 256 or more
_TEST_WORDS: Final = ("val", "valid", "validation", "test")
_ADDRESS: Final = re.compile(r"pipe:|file:|[A-Za-z][A-Za-z0-9+.-]*://")


class ShardImages:
    """The images of a set of local shards, each read from its place in its tar file when asked for.

    Labels come from the `.cls` or `.json` members beside the images. Where all are numbers they are the labels;
    otherwise, or where they are `named` though they may read like numbers, they are class names: numbered as
    `class_names` has them, those it lacks after it in alphabetical order. `damage` maps the shards that could not be
    read to their end, or hold fewer images than `expected_counts` says, to the reason; what images they have are in.
    """

    def __init__(
        self,
        index: ShardIndex,
        class_names: tuple[str, ...] | None = None,
        expected_counts: Mapping[str, int] | None = None,
        *,
        named: bool = False,
    ) -> None:
        texts = list(index.label_texts)
        numbered = not named and all(re.fullmatch(r"\d{1,9}", text) for text in texts)
        if not numbered:
            class_names = (class_names or ()) + tuple(sorted(set(texts) - set(class_names or ())))
        self.class_names = class_names if texts else None
        self.labels = _labels(index, numbered, class_names) if texts else None
        self.damage = _damage(index, expected_counts or {})
        self._index = index

    @property
    def description(self) -> str:
        return f"{pluralize(len(self), 'image')} in {pluralize(len(self._index.shards), 'shard')}"

    def __len__(self) -> int:
        return len(self._index.names)

    def read(self, index: int, canvas: int | None = None) -> Tensor:
        return decode(self.content_of(index), canvas, self.name_of(index))

    def name_of(self, index: int) -> str:
        """The shard and the name in it, with what cannot be printed replaced."""
        shard = Path(self._index.shards[self._shard_of(index)]).name
        return _printable(f"{shard}/{self._index.names[index]}")

    def folders_inside(self) -> tuple[str, ...]:
        """The folders in the shards, where there are several and no image has a label: they might be meant as classes.

        They are not taken for classes, because in WebDataset they are part of a sample's name, and often they only say
        in which turn the shard was packed.
        """
        if self.labels is not None or not self._index.names.any_has("/"):
            return ()
        folders = {name.removeprefix("./").rpartition("/")[0] for name in self._index.names} - {""}
        return tuple(map(_printable, sorted(folders))) if len(folders) > 1 else ()

    def extension_of(self, index: int) -> str:
        """How the stored name ends, such as ".jpg"."""
        return os.path.splitext(self._index.names[index])[1].lower()  # noqa: PTH122 - a name in a tar is no path

    def content_of(self, index: int) -> bytes:
        """The bytes of the image file as they are stored; raises `UnreadableImage`."""
        index = range(len(self))[index]
        offset, size = int(self._index.offsets[index]), int(self._index.sizes[index])
        number = self._shard_of(index)
        if size == NO_CONTENT:
            raise UnreadableImage(
                self.name_of(index), "it is a link or no file at all, and nothing in a shard is followed"
            )
        if size > _BYTES_LIMIT:
            raise UnreadableImage(
                self.name_of(index), f"it has {size:,} bytes, more than the limit of {_BYTES_LIMIT:,}"
            )
        if offset + size > int(self._index.stamps[number, 0]):
            raise UnreadableImage(self.name_of(index), "the end of the shard is cut off")
        try:
            shard = _opened(self._index.shards[number], *self._index.stamps[number].tolist())
            return shard.read(offset, size)
        except OSError as error:
            reason = error.strerror.lower() if error.strerror else str(error)
            raise UnreadableImage(self.name_of(index), reason) from error

    def _shard_of(self, index: int) -> int:
        return int(np.searchsorted(self._index.ends, range(len(self))[index], side="right"))


class _OpenShard:
    """A tar file held open; closed when nobody reads from it any more, which may be after it left the cache."""

    def __init__(self, file: str, size: int, modified: int) -> None:
        self._descriptor = os.open(file, os.O_RDONLY)
        status = os.fstat(self._descriptor)
        if (status.st_size, status.st_mtime_ns) != (size, modified):
            raise OSError(f"the shard {Path(file).name} has changed since it was opened; start again")

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def read(self, offset: int, size: int) -> bytes:
        content = os.pread(self._descriptor, size, offset)
        while len(content) < size:  # a network file system may give less at a time
            more = os.pread(self._descriptor, size - len(content), offset + len(content))
            if not more:
                raise OSError("the shard has become shorter since it was opened")
            content += more
        return content


def _printable(name: str) -> str:
    text = os.fsencode(name).decode("utf-8", "replace")
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


# One cache for a process, outside of the source: workers get a source without open files and open their own.
_opened = functools.lru_cache(maxsize=_OPEN_FILES)(_OpenShard)


def names_shards(location: str) -> bool:
    """Whether a location means shards: an address, a tar file or a pattern of them, or a folder written by us."""
    if _ADDRESS.match(location):
        return True
    path = home_expanded(location)
    if path.is_dir():
        return read_description(path) is not None
    return bool(re.search(r"\.tar(?![a-z])", path.name.lower())) or path.suffix.lower() == ".tgz"


def open_shards(
    location: str,
    *,
    root: Path | None = None,
    download: bool = True,
    progress: Callable[[str], None] | None = None,
) -> ImageData:
    """Open shards by a folder that `write_shards` made, a tar file, a glob or brace pattern, or such addresses.

    A pattern whose files are called `train...` and `val...` gives both splits. Addresses are all that webdataset's
    `gopen` opens (https://, gs://, hf://, pipe:, ...); such shards are copied below `root` first, each as a whole, so
    all of them have to fit on the disk. `progress` is told how far that is.
    """
    folder = home_expanded(location)
    described = None if _ADDRESS.match(location) else read_description(folder)
    if described is not None:
        return _open_folder(folder, described)
    files = _files(location, (root or default_root()) / "shards", download, progress)
    train, test = _splits(files)
    return _open_splits(_name(files), train, test, _described_beside(files))


def _files(location: str, folder: Path, download: bool, progress: Callable[[str], None] | None) -> list[Path]:
    if _ADDRESS.match(location) and not location.startswith("file:"):
        return fetch_shards(list(dict.fromkeys(expand_braces(location))), folder, download, progress)
    if home_expanded(location).is_file():  # whatever its name looks like
        return [home_expanded(location)]
    patterns = expand_braces(location)
    if location.startswith("file:"):
        patterns = [url2pathname(urlparse(pattern).path) for pattern in patterns]
    files = [Path(name) for pattern in patterns for name in _matching(os.path.expanduser(pattern))]  # noqa: PTH111
    return list(dict.fromkeys(files))


def _matching(pattern: str) -> list[str]:
    if Path(pattern).is_file():
        return [pattern]
    found = sorted(name for name in glob.glob(pattern) if Path(name).is_file())  # noqa: PTH207 - takes whole paths
    if not found:
        raise DataError(f"There is no shard {pattern}; check the pattern (nothing of it is run by a shell).")
    return found


def _splits(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The shards to train on and those to test with, told by how their names begin; all are for training else."""
    words = [re.match(r"[a-z]*", file.name.lower()) for file in files]
    train = [file for file, word in zip(files, words, strict=True) if word and word[0] == "train"]
    test = [file for file, word in zip(files, words, strict=True) if word and word[0] in _TEST_WORDS]
    return (train, test) if train and test and len(train) + len(test) == len(files) else (list(files), [])


def _name(files: Sequence[Path]) -> str:
    name = files[0].stem if len(files) == 1 else files[0].absolute().parent.name
    return name or "shards"


def _open_splits(
    name: str, train: Sequence[Path], test: Sequence[Path], described: ShardSet | None = None
) -> ImageData:
    class_names = None if described is None else described.class_names
    counts = None if described is None else described.counts
    train_images = _images(train, class_names, counts)
    if not test:
        return ImageData(name, train_images)
    if class_names is not None:
        return ImageData(name, train_images, _images(test, class_names, counts))
    names = train_images.class_names  # where labels are names in one split, they are in the other
    return ImageData(name, train_images, _images(test, names, counts, named=names is not None))


def _images(
    files: Sequence[Path],
    class_names: tuple[str, ...] | None,
    counts: Mapping[str, int] | None,
    *,
    named: bool = False,
) -> ShardImages:
    images = ShardImages(index_shards(files), class_names, counts, named=named)
    if not len(images):
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        why = "".join(f"; {shard}: {reason}" for shard, reason in list(images.damage.items())[:3])
        raise DataError(f"There are no images in the shard {files[0]}{more} (looked for .jpg, .png and the like{why}).")
    return images


def shard_remarks(data: ImageData) -> Iterator[str]:
    """Sentences about shards of which a part is lost, and about labels that may be missed."""
    splits = [split for split in (data.train, data.test) if isinstance(split, ShardImages)]
    for split in splits:
        if split.damage:
            yield f"{about_damage(split.damage)}."
    if folders := next(filter(None, (split.folders_inside() for split in splits)), None):  # once is enough
        yield f"The {about_folders(folders)}."


def refuse_damaged(data: ImageData) -> None:
    """Raise for the first shard of which a part is lost."""
    for split in (data.train, data.test):
        if isinstance(split, ShardImages):
            for shard, why in split.damage.items():
                raise DataError(
                    f"The shard {shard} is damaged: {why}; write or fetch it anew, or leave --strict out to use what "
                    "is left of it."
                )


def about_damage(damage: Mapping[str, str]) -> str:
    """How many shards have lost a part, the first of them, and why."""
    shard, why = next(iter(damage.items()))
    shards = "1 shard is" if len(damage) == 1 else f"{len(damage):,} shards are"
    return f"{shards} damaged, and only what is left is used ({shard}: {why})"


def about_folders(folders: Sequence[str]) -> str:
    """Why folders inside of shards give no labels, and what to do where they should."""
    more = f" and {len(folders) - 2:,} more" if len(folders) > 2 else ""
    return (
        f"folders in the shards ({', '.join(folders[:2])}{more}) are not taken for classes, because labels come from "
        "the .cls or .json file beside each image: no image there has a label, and kNN cannot be measured on them; if "
        "the folders are classes, unpack the shards and pack them anew with `jcl shard FOLDER OUT`"
    )


def _open_folder(folder: Path, described: ShardSet) -> ImageData:
    train, test = ([folder / name for name in described.splits.get(split, ())] for split in ("train", "val"))
    if not train:
        raise DataError(f"The shards in {folder} have no training split; write them anew with it.")
    return _open_splits(described.name, train, test, described)


def _described_beside(files: Sequence[Path]) -> ShardSet | None:
    """The description of the set that all of the files belong to, where they do."""
    described = read_description(files[0].parent) if len({file.parent for file in files}) == 1 else None
    return described if described is not None and all(file.name in described.counts for file in files) else None


def _damage(index: ShardIndex, expected_counts: Mapping[str, int]) -> dict[str, str]:
    found = np.diff(index.ends, prepend=0).tolist()
    damage = {}
    for shard, why, count in zip(index.shards, index.damage, found, strict=True):
        name = Path(shard).name
        expected = expected_counts.get(name, count)
        if why or count != expected:
            reasons = [why] * bool(why) + [f"{count:,} of its {expected:,} images are there"] * (count != expected)
            damage[name] = ", ".join(reasons)
    return damage


def _labels(index: ShardIndex, numbered: bool, class_names: tuple[str, ...] | None) -> Tensor:
    texts = list(index.label_texts)
    if numbered:
        numbers = [int(text) for text in texts]
        if class_names is not None and max(numbers) >= len(class_names):
            raise DataError(
                f"The shard {index.shards[0]} or one beside it has an image of class {max(numbers)}, but "
                f"{DESCRIPTION_FILE} there names {pluralize(len(class_names), 'class', 'classes')} only; write the "
                "shards anew."
            )
    else:
        known = {name: number for number, name in enumerate(class_names or ())}
        numbers = [known[text] for text in texts]
    # The last entry is what the place -1 means.
    return torch.from_numpy(np.array([*numbers, UNLABELLED], dtype=np.int64)[index.labels])
