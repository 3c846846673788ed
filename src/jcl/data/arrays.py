"""Images in a NumPy `.npy` or `.npz` file (`x_train`, `y_train`, `x_test`, `y_test`), or a data set of Hugging Face."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from torch import Tensor

from jcl.core import MAX_CHANNELS
from jcl.data.encoded import EncodedImages, channels_last, to_tensor
from jcl.data.source import UNLABELLED, ArrayImages, ImageData, PixelFormat, Refused, UnreadableImage, convert_pixels
from jcl.errors import DataError, first_line
from jcl.paths import expand_user, hub_name, refuse_expansion

_TEST_SPLITS = ("validation", "test", "val", "valid")  # in order of preference
_LABELS = ("label", "labels", "fine_label", "cls")


def open_npz(file: Path, channels: int | None = None) -> ImageData:
    """Open a `.npz` file of images (n, h, w, channels), (n, channels, h, w) or (n, h, w), or a `.npy` file of them.

    uint8 stays as it is, gray becomes RGB unless `channels` is 1; uint16 is divided by 65,535. Pickled objects are
    refused, because unpickling can run code.
    """
    if not file.is_file():
        problem = "is not a regular file" if file.exists() else "does not exist"
        raise DataError(f"The file {file} {problem}; give the path of a .npz file.")
    refuse_expansion(file, DataError)
    try:
        content = np.load(file, allow_pickle=False)
    except Exception as error:  # NumPy raises many kinds for damaged files
        kind = file.suffix.lower()
        write = "savez" if kind == ".npz" else "save"
        raise DataError(f"The file {file} is not a readable {kind} file of numbers; use numpy.{write}.") from error
    if not isinstance(content, NpzFile):
        pixels = _pixels(content, f"in {file}", channels)
        return ImageData(file.stem, ArrayImages(pixels, None, None, f"{len(pixels):,} images in {file}"))
    with content:
        if "x_train" not in content.files:
            found = ", ".join(content.files) or "nothing"
            raise DataError(f"The file {file} must hold an array named x_train, but has {found}.")
        train = _split(file, content, "train", channels)
        test = _split(file, content, "test", train.pixels.shape[1]) if "x_test" in content.files else None
    if test is not None and test.pixels.shape[1:] != train.pixels.shape[1:]:
        shapes = [" x ".join(map(str, split.pixels.shape[2:])) for split in (train, test)]
        raise DataError(f"The images of x_train are {shapes[0]} pixels in {file} and those of x_test are {shapes[1]}.")
    return ImageData(file.stem, train, test)


def _split(file: Path, content: NpzFile, split: str, channels: int | None) -> ArrayImages:
    pixels = _pixels(_array(file, content, f"x_{split}"), f"x_{split} in {file}", channels)
    labels = None
    if f"y_{split}" in content.files:
        labels = _labels(_array(file, content, f"y_{split}"), f"y_{split} in {file}")
    return ArrayImages(pixels, labels, None, f"x_{split} in {file}")


def _array(file: Path, content: NpzFile, name: str) -> NDArray[np.generic]:
    try:
        array: NDArray[np.generic] = content[name]
    except MemoryError as error:
        raise DataError(f"The array {name} in {file} does not fit into memory ({error}).") from error
    except Exception as error:
        raise DataError(f"The array {name} in {file} is damaged or not an array of numbers.") from error
    return array


def _pixels(array: NDArray[np.generic], place: str, channels: int | None) -> Tensor:
    """Convert any of the accepted layouts to (n, channels, h, w)."""
    pixels = channels_last(array) if array.ndim == 4 else array[..., None]
    try:
        if pixels.ndim != 4 or pixels.shape[3] > MAX_CHANNELS:
            raise Refused(f"its shape is {array.shape}, not (n, h, w, c), (n, c, h, w) or (n, h, w) with c up to 16")
        tensor = to_tensor(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))
        own = 3 if tensor.shape[1] == 1 and tensor.dtype == torch.uint8 else tensor.shape[1]
        return convert_pixels(tensor, PixelFormat(channels or own, tensor.dtype)).contiguous()
    except Refused as error:
        raise DataError(f"The array {place} cannot be used: {error}.") from None


def _labels(array: NDArray[np.generic], place: str) -> Tensor:
    if array.ndim == 2 and array.shape[1] == 1:  # as in some CIFAR files
        array = array[:, 0]
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"The array {place} must be integers of shape (n,), got {array.dtype} of {array.shape}.")
    labels = torch.from_numpy(array.astype(np.int64))
    if len(labels) and labels.min() < UNLABELLED:
        raise DataError(f"The array {place} has the label {int(labels.min())}; only {UNLABELLED} may be negative.")
    return labels


class HubImages(EncodedImages):
    """A split of a data set of Hugging Face's `datasets`; the files stay encoded in its Arrow table until read."""

    def __init__(self, rows: Any, split: str, dataset: str) -> None:
        import datasets

        kinds = rows.features
        columns = [name for name, kind in kinds.items() if isinstance(kind, datasets.Image)]
        if not columns:
            raise DataError(f"{dataset} has no column of images in the split {split}; it has {', '.join(kinds)}.")
        column = next((name for name in ("image", "img") if name in columns), columns[0])
        self._rows = rows.select_columns(column).cast_column(column, datasets.Image(decode=False))
        self._column, self._split = column, split
        self.description = f"{len(rows):,} images in the split {split} of {dataset}"
        classes = [name for name, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
        numbers = [name for name in _LABELS if getattr(kinds.get(name), "dtype", "").startswith(("int", "uint"))]
        label = next((name for name in (*numbers, *classes)), None)
        values = [] if label is None else rows.with_format(None)[label][:]
        labels = torch.tensor([UNLABELLED if value is None else value for value in values], dtype=torch.int64)
        self.labels = labels if bool((labels != UNLABELLED).any()) else None
        self.class_names = tuple(kinds[label].names) if label in classes and self.labels is not None else None

    def __len__(self) -> int:
        return len(self._rows)

    def name_of(self, index: int) -> str:
        return f"{self._split}/{index}"

    def content_of(self, index: int) -> bytes:
        """The bytes of the image file, in the table or beside it; raises `UnreadableImage`."""
        value = self._rows[index][self._column] or {}
        try:
            content: bytes = value["bytes"] if value.get("bytes") else Path(value["path"]).read_bytes()
        except (OSError, KeyError, TypeError) as error:
            reason = (getattr(error, "strerror", None) or "the image is missing").lower()
            raise UnreadableImage(self.name_of(index), reason) from error
        return content

    def warnings(self) -> list[str]:
        return []


def open_hub(location: str, download: bool = True) -> ImageData:
    """Open `hf:USER/DATASET`, `hf:USER/DATASET:SPLIT` or `hf:USER/DATASET:CONFIG:SPLIT`; the name may also be a folder.

    Without a split, `train` or the only one is used; `validation` or `test` has the test images.
    """
    try:
        import datasets
    except ImportError:
        install = "pip install 'joint-contrastive-learning[hf]'"
        raise DataError(f"Opening {location} needs datasets; run: {install}.") from None
    dataset, *parts = hub_name(location).split(":")
    folder = expand_user(dataset)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            found = datasets.load_from_disk(str(folder))
        else:
            offline = datasets.DownloadConfig(local_files_only=not download)
            place = str(folder) if folder.is_dir() else dataset
            found = datasets.load_dataset(place, parts[0] if len(parts) > 1 else None, download_config=offline)
    except Exception as error:  # of the network, the files or the name
        raise DataError(f"The data set {location} cannot be opened: {first_line(error)}.") from None
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    split = parts[-1] if parts else "train" if "train" in splits else next(iter(splits))
    if split not in splits or (not parts and split != "train" and len(splits) > 1):
        raise DataError(
            f"Name a split of {dataset}, such as hf:{dataset}:{next(iter(splits))}; it has {', '.join(splits)}."
        )
    test = next((name for name in _TEST_SPLITS if name in splits and split not in _TEST_SPLITS), None)
    train = HubImages(splits[split], split, dataset)
    return ImageData(Path(dataset).name, train, HubImages(splits[test], test, dataset) if test else None)
