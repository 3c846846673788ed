"""Crop, resize and blur a batch of images, with different parameters for each.

Along each axis an output row is a weighted sum of input rows. `Taps` hold their indices and weights; their number is
the same for all views, so that no shape depends on random draws.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jcl.views.parameters import ViewParameters
from jcl.views.recipe import ViewRecipe


@dataclass(frozen=True)
class Taps:
    """Input rows and weights of each output row of n views."""

    index: Tensor  # (n, outputs, taps) int64
    weight: Tensor  # (n, outputs, taps) float


@dataclass(frozen=True)
class Span:
    """An interval of an image axis for each of n views; only input rows from `low` to `high` - 1 are used."""

    start: Tensor  # (n,) float
    length: Tensor  # (n,) float
    low: Tensor  # (n,) int64
    high: Tensor  # (n,) int64


def resize_taps(span: Span, size: int, largest_scale: float, flip: Tensor | None = None) -> Taps:
    """Antialiased bilinear resizing of a span to `size` outputs, reversed where `flip` (n,) is true.

    As in PIL, the filter is a triangle at least one input wide, cut off at the ends of the span and normalized.
    `largest_scale` is an upper bound on the inputs per output.
    """
    dtype, device = span.start.dtype, span.start.device
    position = torch.arange(size, dtype=dtype, device=device)[None, :]
    if flip is not None:
        position = torch.where(flip[:, None], size - 1 - position, position)
    scale = (span.length / size)[:, None]
    half_width = scale.clamp_min(1.0)
    center = span.start[:, None] + (position + 0.5) * scale
    first = torch.floor(center - half_width + 0.5)

    # The number of pixel centers under the widest triangle.
    taps = torch.arange(math.ceil(2 * max(1.0, largest_scale)), dtype=dtype, device=device)
    place = first[:, :, None] + taps
    weight = (1 - (place + 0.5 - center[:, :, None]).abs() / half_width[:, :, None]).clamp_min(0)
    index = place.to(torch.int64)
    low, high = span.low[:, None, None], span.high[:, None, None]
    weight = weight * ((index >= low) & (index < high))
    return Taps(index.clamp(low, high - 1), weight / weight.sum(dim=2, keepdim=True))


def blur_taps(sigma: Tensor, size: int, radius: int) -> Taps:
    """Gaussian blur with a kernel of this radius and reflected borders; `sigma` (n,) may be 0 for no blur."""
    offsets = torch.arange(-radius, radius + 1, device=sigma.device)
    # At sigma 1e-3 all weights except the center are zero.
    kernel = torch.exp(-0.5 * (offsets / sigma.clamp_min(1e-3)[:, None]) ** 2)
    kernel = kernel / kernel.sum(dim=1, keepdim=True)

    period = max(2 * (size - 1), 1)
    place = torch.remainder(torch.arange(size, device=sigma.device)[:, None] + offsets, period)
    index = torch.minimum(place, period - place)
    return Taps(index.expand(len(sigma), -1, -1), kernel[:, None].expand(-1, size, -1))


def box_crop(pixels: Tensor, parameters: ViewParameters, recipe: ViewRecipe) -> Tensor:
    """Crop a box of each image, resize it to a square and orient the view."""
    size, dtype = recipe.size, working_type(pixels)
    top, left, height, width = parameters.box.unbind(dim=1)
    rows = Span(top.to(dtype), height.to(dtype), top, top + height)
    columns = Span(left.to(dtype), width.to(dtype), left, left + width)
    return resize(
        pixels,
        resize_taps(rows, size, pixels.shape[2] / size, None if recipe.upright else parameters.vertical_flip),
        resize_taps(columns, size, pixels.shape[3] / size, parameters.flip),
        parameters.transpose if recipe.rotation_probability else None,
    )


def center_crop(pixels: Tensor, sizes: Tensor, crop_ratio: float, size: int) -> Tensor:
    """As torchvision's Resize to size / crop_ratio and CenterCrop, for images of `sizes` (n, 2)."""
    short, dtype = round(size / crop_ratio), working_type(pixels)
    resized = short * sizes // sizes.amin(dim=1, keepdim=True)  # (n, 2), the short side exactly `short`
    scale = sizes.to(dtype) / resized.to(dtype)
    start = torch.round((resized - size).to(dtype) / 2) * scale
    low = torch.zeros_like(sizes)
    rows, columns = (Span(start[:, axis], size * scale[:, axis], low[:, axis], sizes[:, axis]) for axis in (0, 1))
    # Rounding makes the scale of the long side larger, by up to one pixel in `short`.
    largest_scale = max(pixels.shape[2:]) / short * (1 + 1 / short)
    return resize(pixels, resize_taps(rows, size, largest_scale), resize_taps(columns, size, largest_scale))


def resize(pixels: Tensor, rows: Taps, columns: Taps, transpose: Tensor | None = None) -> Tensor:
    """Resize images to (n, channels, size, size) float, uint8 to 0..1, and transpose where `transpose` (n,) is true."""
    columns = columns if pixels.is_floating_point() else Taps(columns.index, columns.weight / 255)
    turned = resample_rows(pixels.to(sampling_type(pixels)), rows).mT
    images = resample_rows(turned, columns).mT.to(working_type(pixels))
    return images if transpose is None else torch.where(transpose[:, None, None, None], images.mT, images)


def blur(images: Tensor, taps: Taps, dtype: torch.dtype | None = None) -> Tensor:
    """Blur square images (n, channels, size, size), with sums in `dtype`, by default theirs."""
    # Resized images are column-major, so columns come first and the result is row-major.
    turned = resample_rows(images.to(dtype or images.dtype).mT, taps)
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
    """The type for colors and positions."""
    return torch.float64 if pixels.dtype == torch.float64 else torch.float32


def sampling_type(pixels: Tensor) -> torch.dtype:
    """The type for sums of rows: half precision for uint8 on a GPU, which is accurate to 1/4000."""
    return torch.float16 if pixels.is_cuda and pixels.dtype == torch.uint8 else working_type(pixels)
