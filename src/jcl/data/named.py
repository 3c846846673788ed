"""Open data by what a user writes after `jcl pretrain`: a name, a folder, a `.npz` file or shards."""

import difflib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from jcl.data.arrays import open_npz
from jcl.data.encoded import EncodedImages
from jcl.data.folder import open_folder
from jcl.data.hub import open_hub
from jcl.data.shards.fetch import download_problem, is_shard_location
from jcl.data.shards.read import open_shards
from jcl.data.source import ArrayImages, ImageData
from jcl.data.synthetic import CLASSES, drawn_objects
from jcl.errors import DataError
from jcl.paths import cache_folder, expand_user, hub_name, read_file, suggest_path

DEMO_SET: Final = "demo"
DOWNLOADED_SETS: Final = ("cifar10", "cifar100", "stl10")
KNOWN_SETS: Final = (DEMO_SET, *DOWNLOADED_SETS)


def open_data(
    location: str,
    *,
    root: Path | None = None,
    download: bool = True,
    classes: Sequence[str] | None = None,
    strict: bool = False,
    channels: int | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> ImageData:
    """Open a data set by name, as a `.npz` file, as a folder of images or as WebDataset shards.

    Names are "demo" (synthetic), "cifar10", "cifar100" and "stl10" (stored below `root`), and those of Hugging Face,
    such as `hf:USER/DATASET:SPLIT` (see `open_hub`). Shards are a `.tar` file, a pattern such as
    `shards/{0000..0127}.tar`, a URL of such, or a folder that `write_shards` made. `progress` receives downloads and
    warnings. `classes` selects class folders. Unlistable folders and damaged parts of shards are skipped; `strict`
    raises instead. Images get `channels` channels if given.
    """
    path = expand_user(location)
    sharded = is_shard_location(location)
    if classes is not None and (sharded or not path.is_dir()):
        raise DataError(f"A class list needs a folder with class folders; {location} is not one.")
    if location in KNOWN_SETS:
        if path.is_dir():
            progress(f"Using the data set {location}, not the folder; for the folder write ./{location}.")
        if channels not in (None, 3):
            raise DataError(f"{location} has 3 channels, but data.channels or the weights need {channels}.")
        return open_demo() if location == DEMO_SET else open_downloaded(location, root, download)
    if hub_name(location):
        data = open_hub(location, download)
    elif sharded:
        data = open_shards(location, (root or default_root()) / "shards", download, strict, progress)
    elif path.is_dir():
        data = open_folder(path, classes, strict=strict)
    elif path.suffix.lower() in (".npz", ".npy"):
        return open_npz(path, channels)
    elif path.is_file():
        raise DataError(f"The file {location} is not a data set; give a folder of images, a .npz file or .tar shards.")
    else:
        close = difflib.get_close_matches(location.lower().replace("-", ""), KNOWN_SETS, n=1)
        hint = f"; did you mean {close[0]}?" if close else suggest_path(location)
        known = ", ".join(DOWNLOADED_SETS)
        raise DataError(f"There is no folder, .npz file or data set ({known}) named {location}{hint}")
    train, *test = [split for split in data.splits.values() if isinstance(split, EncodedImages)]
    train.channels = channels
    for split in test:
        split.stored = train.pixel_format()
    for warning in data_warnings(data):
        progress(warning)
    return data


def data_warnings(data: ImageData) -> list[str]:
    """What a user should know about skipped and unused files, damaged shards and missing labels or test images."""
    splits = [split for split in data.splits.values() if isinstance(split, EncodedImages)]
    return [*filter(None, (data.why_untested, data.unused)), *(note for split in splits for note in split.warnings())]


def absolute_location(location: str) -> str:
    """The absolute path of a folder, file or shard pattern; data set names, URLs and missing paths are unchanged."""
    if not location or location in KNOWN_SETS:
        return location
    name, colon, parts = hub_name(location).partition(":")
    path = expand_user(name or location)
    if name:
        return f"hf:{path.resolve()}{colon}{parts}" if path.is_dir() else location
    relative_pattern = is_shard_location(location) and ":" not in location and not location.startswith("{")
    return str(path.resolve()) if path.exists() or relative_pattern else location


def open_demo(train_count: int = 2500, test_count: int = 1000, seed: int = 0) -> ImageData:
    """The built-in synthetic set: the first pictures to train on and the rest to test with."""
    pixels, labels = drawn_objects(train_count + test_count, seed)
    what = "synthetic images"
    return ImageData(
        DEMO_SET,
        ArrayImages(pixels[:train_count], labels[:train_count], tuple(CLASSES), f"{train_count:,} {what}"),
        ArrayImages(pixels[train_count:], labels[train_count:], tuple(CLASSES), f"{test_count:,} {what}"),
    )


def default_root() -> Path:
    """Where downloads are stored: `$JCL_DATA`, or a folder in the user's cache."""
    return Path(os.environ.get("JCL_DATA") or cache_folder() / "data")


def open_downloaded(name: str, root: Path | None, download: bool) -> ImageData:
    """Open one of `DOWNLOADED_SETS`, which torchvision downloads; STL-10 also has 100,000 images without a label."""
    from torchvision import datasets  # slow to import, and workers do not need it

    root = root or default_root()
    sets: list[Any]
    try:
        root.mkdir(parents=True, exist_ok=True)
        if name == "stl10":
            sets = [datasets.STL10(root, split, download=download) for split in ("train+unlabeled", "test")]
        else:
            kind = datasets.CIFAR10 if name == "cifar10" else datasets.CIFAR100
            sets = [kind(root, train=train, download=download) for train in (True, False)]
    except (OSError, RuntimeError) as error:  # URLError is an OSError; torchvision raises RuntimeError for bad files
        what = "could not be downloaded to" if download else "is not in"
        raise DataError(f"The data set {name} {what} {root} ({download_problem(error)}); copy it there.") from error
    splits = []
    for each in sets:  # CIFAR is (n, h, w, 3) with `targets`, STL-10 (n, 3, h, w) with `labels`
        data, labels = (each.data, each.labels) if name == "stl10" else (each.data.transpose(0, 3, 1, 2), each.targets)
        pixels, labels = torch.from_numpy(np.ascontiguousarray(data)), torch.tensor(labels, dtype=torch.int64)
        splits.append(ArrayImages(pixels, labels, tuple(each.classes), f"{name}, {len(pixels):,} images"))
    return ImageData(name, splits[0], splits[1])


def class_list(subset: str) -> tuple[str, ...]:
    """The classes of a subset: "imagenet100", or the lines of a text file (empty lines and # comments ignored)."""
    file = Path(__file__).with_name("imagenet100.txt") if subset == "imagenet100" else expand_user(subset)
    try:
        lines = read_file(file, DataError).decode().splitlines()
    except (DataError, UnicodeDecodeError) as error:
        raise DataError(f"{subset} is neither imagenet100 nor a readable text file of class names.") from error
    names = tuple(dict.fromkeys(name for line in lines if (name := line.partition("#")[0].strip())))
    if not names:
        raise DataError(f"The class list {subset} is empty; write one class name per line.")
    return names
