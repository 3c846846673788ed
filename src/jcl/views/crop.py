"""Which part of each image becomes the view: the box that was drawn, or the centre for evaluation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from jcl.views.rows import ViewRows
from jcl.views.taps import Span, Taps, resize_taps


@dataclass(frozen=True)
class Crop(ViewRows):
    """A part of each of n images, resized to a square."""

    rows: Taps
    columns: Taps


def box_crop(boxes: Tensor, flip: Tensor, canvas: tuple[int, int], size: int, dtype: torch.dtype) -> Crop:
    """Resize each box (n, 4) of its image to a square, flipped left to right where `flip` (n,) is true.

    As cropping first and resizing then: pixels beside the box have no part in the view. `canvas` is the height and
    width of what holds the images.
    """
    top, left, height, width = boxes.unbind(dim=1)
    rows = Span(top.to(dtype), height.to(dtype), top, top + height)
    columns = Span(left.to(dtype), width.to(dtype), left, left + width)
    return Crop(
        resize_taps(rows, size, canvas[0] / size),
        resize_taps(columns, size, canvas[1] / size, flip),
    )


def centre_crop(sizes: Tensor, crop_ratio: float, canvas: tuple[int, int], size: int, dtype: torch.dtype) -> Crop:
    """Resize each image so that the part `crop_ratio` of its short side fills a square, and cut that out of its centre.

    The sizes (n, 2) are those of the images on their canvas. As torchvision's Resize and CenterCrop: whole pixels in
    the resized image, and pixels beside the square do reach into it where images are made smaller.
    """
    short = round(size / crop_ratio)
    resized = short * sizes // sizes.amin(dim=1, keepdim=True)  # (n, 2), the short side exactly `short`
    scale = sizes.to(dtype) / resized.to(dtype)
    start = torch.round((resized - size).to(dtype) / 2) * scale
    low = torch.zeros_like(sizes)
    rows, columns = (Span(start[:, axis], size * scale[:, axis], low[:, axis], sizes[:, axis]) for axis in (0, 1))
    # Whole pixels make the long side's scale larger than the short side's, by up to one pixel in `short`.
    largest_scale = max(canvas) / short * (1 + 1 / short)
    return Crop(resize_taps(rows, size, largest_scale), resize_taps(columns, size, largest_scale))
