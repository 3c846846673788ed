"""Which input rows an output row is made of, and how much of each it takes.

Resizing with antialiasing, cropping, flipping and blurring along one axis are all given by such taps. They differ from
view to view, but their number does not, so nothing has a shape that depends on the draws.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jcl.views.rows import ViewRows


@dataclass(frozen=True)
class Taps(ViewRows):
    """For each output row of n views, the input rows it takes and how much of each."""

    index: Tensor  # (n, outputs, taps) int64
    weight: Tensor  # (n, outputs, taps) float


@dataclass(frozen=True)
class Span:
    """A stretch of one image axis for each of n views: outputs are spread evenly from `start` over `length` inputs.

    No output takes inputs before `low` or from `high` on, where the crop or the image ends.
    """

    start: Tensor  # (n,) float
    length: Tensor  # (n,) float
    low: Tensor  # (n,) int64
    high: Tensor  # (n,) int64


def resize_taps(span: Span, size: int, largest_scale: float, flip: Tensor | None = None) -> Taps:
    """Antialiased bilinear resizing of a span to `size` outputs, in reverse order where `flip` (n,) is true.

    As PIL does it: a triangle around the output's centre, as wide as an output when that is more than one input, cut
    off where the span's inputs end and then normalised. `largest_scale` bounds the inputs per output of any view.
    """
    dtype, device = span.start.dtype, span.start.device
    position = torch.arange(size, dtype=dtype, device=device)[None, :]
    if flip is not None:
        position = torch.where(flip[:, None], size - 1 - position, position)
    scale = (span.length / size)[:, None]
    half_width = scale.clamp_min(1.0)
    centre = span.start[:, None] + (position + 0.5) * scale
    first = torch.floor(centre - half_width + 0.5)

    # So many pixel centres fit under the widest triangle.
    taps = torch.arange(math.ceil(2 * max(1.0, largest_scale)), dtype=dtype, device=device)
    place = first[:, :, None] + taps
    weight = (1 - (place + 0.5 - centre[:, :, None]).abs() / half_width[:, :, None]).clamp_min(0)
    index = place.to(torch.int64)
    low, high = span.low[:, None, None], span.high[:, None, None]
    weight = weight * ((index >= low) & (index < high))
    return Taps(index.clamp(low, high - 1), weight / weight.sum(dim=2, keepdim=True))


def blur_taps(sigma: Tensor, size: int, radius: int) -> Taps:
    """Gaussian blur of `size` rows with a standard deviation per view, sigma (n,); 0 leaves the view as it is.

    The kernel is cut off at `radius` and normalised; beyond its border the image is continued by reflection.
    """
    offsets = torch.arange(-radius, radius + 1, device=sigma.device)
    # At the smallest sigma let through, all weights but the middle one are zero.
    kernel = torch.exp(-0.5 * (offsets / sigma.clamp_min(1e-3)[:, None]) ** 2)
    kernel = kernel / kernel.sum(dim=1, keepdim=True)

    period = max(2 * (size - 1), 1)
    place = torch.remainder(torch.arange(size, device=sigma.device)[:, None] + offsets, period)
    index = torch.minimum(place, period - place)
    return Taps(index.expand(len(sigma), -1, -1), kernel[:, None].expand(-1, size, -1))
