"""Images in a NumPy `.npy` or `.npz` file (`x_train`, `y_train`, `x_test`, `y_test`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        raise DataError(f"The file {file} does not exist; give the path of a .npz or .npy file.")
    content = _load(str(file), lambda: np.load(file, allow_pickle=False))
    if not isinstance(content, NpzFile):
        pixels = _pixels(content, f"in {file}", channels)
        return ImageData(file.stem, ArrayImages(pixels, None, None, f"{len(pixels):,} images in {file}"))
    with content:
        if "x_train" not in content.files:
            found = ", ".join(content.files) or "nothing"
            raise DataError(f"The file {file} must hold an array named x_train, but has {found}.")
        train = _split(file, content, "train", channels)
        test = _split(file, content, "test", train.pixels.shape[1]) if "x_test" in content.files else None
    if test is not None and (test.pixels.shape[1:], test.pixels.dtype) != (train.pixels.shape[1:], train.pixels.dtype):
        kinds = [f"{split.pixels.dtype} of {tuple(split.pixels.shape[1:])}" for split in (train, test)]
        raise DataError(f"In {file} images of x_train are {kinds[0]}, those of x_test {kinds[1]}; store both alike.")
    return ImageData(file.stem, train, test)


def _split(file: Path, content: NpzFile, split: str, channels: int | None) -> ArrayImages:
    x, y = (f"{name}_{split} in {file}" for name in "xy")
    pixels = _pixels(_load(x, lambda: content[f"x_{split}"]), x, channels)
    labels = _labels(_load(y, lambda: content[f"y_{split}"]), y) if f"y_{split}" in content.files else None
    return ArrayImages(pixels, labels, None, x)


def _load(name: str, read: Callable[[], Any]) -> Any:
    """A file or an array in it."""
    try:
        return read()
    except MemoryError as error:
        raise DataError(f"{name} does not fit into memory ({error}).") from error
    except Exception as error:  # NumPy raises many kinds for damaged files
        raise DataError(f"{name} is damaged or has no plain numbers; write it with numpy.save or savez.") from error


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
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or (array.astype(np.int64) < UNLABELED).any():
        found = f"{array.dtype} of {array.shape}"
        raise DataError(f"The array {place} must be integers from {UNLABELED}, of shape (n,), got {found}.")
    return torch.from_numpy(array.astype(np.int64))
