"""Images in a NumPy `.npy` or `.npz` file (`x_train`, `y_train`, `x_test`, `y_test`)."""

from pathlib import Path

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray
from torch import Tensor

from jcl.core import MAX_CHANNELS
from jcl.data.encoded import channels_last, to_tensor
from jcl.data.source import UNLABELED, ArrayImages, ImageData, PixelFormat, Refused, convert_pixels
from jcl.errors import DataError


def open_npz(file: Path, channels: int | None) -> ImageData:
    """Open a `.npz` file of images (n, h, w, channels), (n, channels, h, w) or (n, h, w), or a `.npy` file of them.

    uint8 stays as it is, gray becomes RGB unless `channels` is 1; uint16 is divided by 65,535. Pickled objects are
    refused, because unpickling can run code.
    """
    if not file.is_file():
        problem = "is not a regular file" if file.exists() else "does not exist"
        raise DataError(f"The file {file} {problem}; give the path of a .npz or .npy file.")
    try:
        content = np.load(file, allow_pickle=False)
    except MemoryError as error:
        raise DataError(f"The file {file} does not fit into memory ({error}).") from error
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
        sizes = [" x ".join(map(str, split.pixels.shape[2:])) for split in (train, test)]
        raise DataError(f"In {file} images of x_train are {sizes[0]} pixels, those of x_test {sizes[1]}; use one size.")
    if test is not None and test.pixels.dtype != train.pixels.dtype:
        types = [str(split.pixels.dtype).removeprefix("torch.") for split in (train, test)]
        raise DataError(f"In {file} images of x_train are {types[0]}, those of x_test {types[1]}; store both alike.")
    return ImageData(file.stem, train, test)


def _split(file: Path, content: NpzFile, split: str, channels: int | None) -> ArrayImages:
    x, y = f"x_{split}", f"y_{split}"
    pixels = _pixels(_array(file, content, x), f"{x} in {file}", channels)
    labels = _labels(_array(file, content, y), f"{y} in {file}") if y in content.files else None
    return ArrayImages(pixels, labels, None, f"{x} in {file}")


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
    if len(labels) and labels.min() < UNLABELED:
        raise DataError(f"The array {place} has the label {int(labels.min())}; only {UNLABELED} may be negative.")
    return labels
