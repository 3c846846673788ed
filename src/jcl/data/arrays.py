"""Images in a NumPy `.npz` file: `x_train`, and where there are any `y_train`, `x_test`, `y_test`."""

import lzma
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from torch import Tensor

from jcl.console import pluralize
from jcl.data.source import UNLABELLED, ArrayImages, ImageData
from jcl.errors import DataError

# What NumPy and its zip reader raise for files that are cut off, damaged, locked with a password or packed oddly.
NPZ_ERRORS: Final = (
    *(OSError, ValueError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile),
    *(ArithmeticError, SyntaxError, TypeError, tokenize.TokenError),  # at a shape or type that makes no sense
)


def open_npz(file: Path) -> ImageData:
    """Open a `.npz` file of uint8 images: (n, h, w, 3), (n, 3, h, w), or gray as (n, h, w), (n, h, w, 1), (n, 1, h, w).

    The file is data only: pickled objects in it are refused, since reading one would run whatever it says.
    """
    if not file.is_file():
        what = "is no file" if file.exists() else "does not exist"  # a pipe would keep its reader waiting for ever
        raise DataError(f"The file {file} {what}; give the path of a .npz file.")
    try:
        content = np.load(file, allow_pickle=False)
    except NPZ_ERRORS as error:
        raise DataError(f"The file {file} cannot be read as a .npz file; write it with numpy.savez.") from error
    if not isinstance(content, NpzFile):
        raise DataError(f"The file {file} holds a single array; write it with numpy.savez(file, x_train=...).")
    with content:
        if "x_train" not in content.files:
            found = ", ".join(content.files) or "nothing"
            raise DataError(f"The file {file} must hold an array named x_train, but it holds {found}.")
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
        labels = _labels(_array(file, content, f"y_{split}"), len(pixels), f"y_{split} in {file}")
    return ArrayImages(pixels, labels, None, f"x_{split} in {file}")


def _array(file: Path, content: NpzFile, name: str) -> NDArray[np.generic]:
    try:
        array: NDArray[np.generic] = content[name]
    except MemoryError as error:
        raise DataError(f"The array {name} in {file} says that it is larger than the memory ({error}).") from error
    except NPZ_ERRORS as error:
        raise DataError(f"The array {name} in {file} is damaged or is no plain array of numbers.") from error
    return array


def _pixels(array: NDArray[np.generic], place: str) -> Tensor:
    """Bring any of the accepted layouts to (n, 3, h, w)."""
    if array.dtype != np.uint8:
        raise DataError(f"The array {place} must be uint8 (0 to 255), but it is {array.dtype}; convert it first.")
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim == 4 and array.shape[3] not in (1, 3) and array.shape[1] in (1, 3):
        array = array.transpose(0, 2, 3, 1)
    if array.ndim != 4 or array.shape[3] not in (1, 3):
        raise DataError(
            f"The array {place} has shape {array.shape}; images must be (n, height, width, 3), (n, 3, height, width) "
            f"or gray (n, height, width)."
        )
    if array.size == 0:
        raise DataError(f"The array {place} holds no images.")
    channels_first = torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))
    return channels_first.repeat(1, 3, 1, 1) if channels_first.shape[1] == 1 else channels_first


def _labels(array: NDArray[np.generic], count: int, place: str) -> Tensor:
    if array.ndim == 2 and array.shape[1] == 1:  # a column, as some CIFAR files have it
        array = array[:, 0]
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(
            f"The array {place} must be one row of integers, but it is {array.dtype} of shape {array.shape}."
        )
    if len(array) != count:
        raise DataError(f"The array {place} holds {pluralize(len(array), 'label')} for {pluralize(count, 'image')}.")
    labels = torch.from_numpy(array.astype(np.int64))
    if labels.min() < UNLABELLED:
        raise DataError(
            f"The array {place} has the label {int(labels.min())}; classes are 0, 1, 2 and so on, and {UNLABELLED} is "
            f"for images without one."
        )
    return labels
