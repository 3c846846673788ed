"""Images in a NumPy `.npz` file: `x_train`, and where there are any `y_train`, `x_test`, `y_test`."""

from pathlib import Path

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from torch import Tensor

from jcl.data.source import UNLABELLED, ArrayImages, ImageData
from jcl.errors import DataError
from jcl.paths import refuse_expansion


def open_npz(file: Path) -> ImageData:
    """Open a `.npz` file of uint8 images: (n, h, w, 3), (n, 3, h, w), or gray as (n, h, w), (n, h, w, 1), (n, 1, h, w).

    Pickled objects in it are refused, because unpickling can run code.
    """
    if not file.is_file():
        problem = "is not a regular file" if file.exists() else "does not exist"
        raise DataError(f"The file {file} {problem}; give the path of a .npz file.")
    refuse_expansion(file, DataError)
    try:
        content = np.load(file, allow_pickle=False)
    except Exception as error:  # NumPy raises many kinds for damaged files
        raise DataError(f"The file {file} is not a readable .npz file; write it with numpy.savez.") from error
    if not isinstance(content, NpzFile):
        raise DataError(f"The file {file} holds a single array; write it with numpy.savez(file, x_train=...).")
    with content:
        if "x_train" not in content.files:
            found = ", ".join(content.files) or "nothing"
            raise DataError(f"The file {file} must hold an array named x_train, but has {found}.")
        train = _split(file, content, "train")
        test = _split(file, content, "test") if "x_test" in content.files else None
    if test is not None and test.pixels.shape[1:] != train.pixels.shape[1:]:
        shapes = [" x ".join(map(str, split.pixels.shape[2:])) for split in (train, test)]
        raise DataError(f"The images of x_train are {shapes[0]} pixels in {file} and those of x_test are {shapes[1]}.")
    return ImageData(file.stem, train, test)


def _split(file: Path, content: NpzFile, split: str) -> ArrayImages:
    pixels = _pixels(_array(file, content, f"x_{split}"), f"x_{split} in {file}")
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


def _pixels(array: NDArray[np.generic], place: str) -> Tensor:
    """Convert any of the accepted layouts to (n, 3, h, w)."""
    if array.dtype != np.uint8:
        raise DataError(f"The array {place} must be uint8, got {array.dtype}; convert it first.")
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim == 4 and array.shape[3] not in (1, 3) and array.shape[1] in (1, 3):
        array = array.transpose(0, 2, 3, 1)
    if array.ndim != 4 or array.shape[3] not in (1, 3):
        raise DataError(f"The array {place} has shape {array.shape}, not (n, h, w, 3), (n, 3, h, w) or (n, h, w).")
    channels_first = torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))
    return channels_first.repeat(1, 3, 1, 1) if channels_first.shape[1] == 1 else channels_first


def _labels(array: NDArray[np.generic], place: str) -> Tensor:
    if array.ndim == 2 and array.shape[1] == 1:  # as in some CIFAR files
        array = array[:, 0]
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"The array {place} must be integers of shape (n,), got {array.dtype} of {array.shape}.")
    labels = torch.from_numpy(array.astype(np.int64))
    if len(labels) and labels.min() < UNLABELLED:
        raise DataError(f"The array {place} has the label {int(labels.min())}; only {UNLABELLED} may be negative.")
    return labels
