"""Resizing and blurring of many images at once, each in its own way: weighted sums of rows along each axis in turn."""

import torch
import torch.nn.functional as F
from torch import Tensor

from jcl.views.crop import Crop
from jcl.views.taps import Taps


def resize(pixels: Tensor, crop: Crop) -> Tensor:
    """Crop and resize: (n, 3, height, width) uint8 or float in 0..1 -> (n, 3, size, size) float in 0..1."""
    columns = crop.columns if pixels.is_floating_point() else Taps(crop.columns.index, crop.columns.weight / 255)
    turned = resample_rows(pixels.to(_sampling_type(pixels)), crop.rows).mT
    return resample_rows(turned, columns).mT.to(working_type(pixels))


def blur(images: Tensor, taps: Taps) -> Tensor:
    """Blur square images (n, 3, size, size), along both axes alike."""
    # Resized images lie in memory with their columns together; so columns come first, and the result lies upright.
    turned = resample_rows(images.to(_sampling_type(images)).mT, taps)
    return resample_rows(turned.mT, taps).to(images.dtype)


def resample_rows(planes: Tensor, taps: Taps) -> Tensor:
    """Sum input rows of each image into output rows: (n, channels, rows, width) -> (n, channels, outputs, width)."""
    images, channels, rows, width = planes.shape
    first_row = torch.arange(0, images * channels * rows, rows, device=planes.device).view(images, channels, 1, 1)
    index = first_row + taps.index[:, None]
    weight = taps.weight[:, None].to(planes.dtype).expand(index.shape)
    summed = F.embedding_bag(
        index.flatten(0, 2), planes.reshape(-1, width), mode="sum", per_sample_weights=weight.flatten(0, 2)
    )
    return summed.view(images, channels, -1, width)


def working_type(pixels: Tensor) -> torch.dtype:
    """The type in which colours and positions are computed."""
    return torch.float64 if pixels.dtype == torch.float64 else torch.float32


def _sampling_type(pixels: Tensor) -> torch.dtype:
    """The type in which rows are summed: on a GPU half precision, accurate to 1/4000 and the least to move."""
    return torch.float16 if pixels.is_cuda and pixels.dtype != torch.float64 else working_type(pixels)
