"""From what a person writes after `jcl pretrain` to the images themselves."""

import difflib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from jcl.data.arrays import open_npz
from jcl.data.downloads import DOWNLOADED_SETS, open_downloaded
from jcl.data.drawn_classes import CLASSES
from jcl.data.folder import folder_remarks, open_folder
from jcl.data.shard_reading import names_shards, open_shards, refuse_damaged, shard_remarks
from jcl.data.source import ArrayImages, ImageData
from jcl.data.synthetic import drawn_objects
from jcl.errors import DataError
from jcl.paths import home_expanded

DEMO_SET: Final = "demo"
KNOWN_SETS: Final = (DEMO_SET, *DOWNLOADED_SETS)


def open_data(
    location: str,
    *,
    root: Path | None = None,
    download: bool = True,
    classes: Sequence[str] | None = None,
    strict: bool = False,
    progress: Callable[[str], None] | None = None,
) -> ImageData:
    """Open a data set by name, as a `.npz` file, as a folder of images or as WebDataset shards.

    Names are "demo" (synthetic, drawn by code), "cifar10", "cifar100" and "stl10" (kept below `root`). Shards are a
    `.tar` file, a pattern such as `shards/{0000..0127}.tar`, an address of such, or a folder that `write_shards` made;
    `progress` is told how far the fetching of remote ones is, and what is unusual about a folder or shards. `classes`
    keeps only these class folders of a folder. Folders that cannot be listed and lost parts of shards are passed over;
    `strict` raises instead.
    """
    path = home_expanded(location)
    sharded = names_shards(location)
    if classes is not None and (sharded or not path.is_dir()):
        raise DataError(f"A list of classes applies to a folder with class folders, and {location} is none.")
    if location == DEMO_SET:
        return open_demo()
    if location in DOWNLOADED_SETS:
        return open_downloaded(location, root, download)
    if sharded:
        data = open_shards(location, root=root, download=download, progress=progress)
        if strict:
            refuse_damaged(data)
        return _told(data, shard_remarks(data), progress)
    if path.is_dir():
        data = open_folder(path, classes, strict=strict)
        return _told(data, folder_remarks(path, data), progress)
    if path.suffix.lower() == ".npz":
        return open_npz(path)
    if path.is_file():
        raise DataError(
            f"The file {location} is no .npz file; give a folder of images, a .npz file, .tar shards or one of "
            f"{_known()}."
        )
    raise DataError(f"There is no folder, .npz file or data set called {location}{_nearest(location)}.")


def _told(data: ImageData, remarks: Iterable[str], progress: Callable[[str], None] | None) -> ImageData:
    if progress is not None:
        for remark in remarks:
            progress(remark)
    return data


def whole_location(location: str) -> str:
    """A folder, a file or a pattern of shards by its whole path, so that it can be opened from anywhere.

    Names of data sets and addresses stay as they are, and so does what does not exist.
    """
    path = home_expanded(location)
    if not location or location in KNOWN_SETS:
        return location
    relative_pattern = names_shards(location) and ":" not in location and not location.startswith("{")
    return str(path.resolve()) if path.exists() or relative_pattern else location


def open_demo(train_count: int = 2500, test_count: int = 1000, seed: int = 0) -> ImageData:
    """The built-in synthetic set: pictures of drawn objects, the first ones to train on and the rest to test with."""
    pixels, labels = drawn_objects(train_count + test_count, seed)
    what = "objects drawn by code (synthetic)"
    return ImageData(
        DEMO_SET,
        ArrayImages(pixels[:train_count], labels[:train_count], tuple(CLASSES), f"{train_count:,} {what}"),
        ArrayImages(pixels[train_count:], labels[train_count:], tuple(CLASSES), f"{test_count:,} {what}"),
    )


def _known() -> str:
    return ", ".join(KNOWN_SETS[:-1]) + f" or {KNOWN_SETS[-1]}"


def _nearest(location: str) -> str:
    """Suggest a name for a typing mistake, else list what there is."""
    close = difflib.get_close_matches(location.lower().replace("-", ""), KNOWN_SETS, n=1)
    return f"; did you mean {close[0]}" if close else f"; known data sets are {_known()}"
