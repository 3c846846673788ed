"""Make normalized views of images."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from jcl.views.color import blend, change_channels, gray_blends, jitter_colors, normalize, solarize
from jcl.views.parameters import ViewParameters, draw_parameters
from jcl.views.recipe import IMAGENET_MEAN, IMAGENET_STD, ViewRecipe
from jcl.views.resize import blur, blur_taps, box_crop, center_crop, sampling_type

_CPU_CHUNK_VALUES: Final = 1_000_000  # values of views made at a time on a CPU, to fit its caches
_BLUR_REACH: Final = 4  # standard deviations at which the strongest blur is cut off


def apply_views(
    pixels: Tensor,
    parameters: ViewParameters,
    recipe: ViewRecipe,
    dtype: torch.dtype = torch.float32,
    *,
    rows: Tensor | None = None,
) -> Tensor:
    """Make views with these parameters: (n, channels, size, size), normalized, channels last in memory.

    `pixels` (n, channels, height, width) holds the image of each view at the top left of a canvas: uint8, or floats,
    which with color are in 0..1. With `rows` (n,), the image of view i is `pixels[rows[i]]`.
    """
    count = len(parameters)
    shape = (count, pixels.shape[1], recipe.size, recipe.size)
    views = torch.empty(shape, dtype=dtype, device=pixels.device, memory_format=torch.channels_last)
    for part in _chunks(count, pixels.shape[1] * recipe.size**2, pixels.device):
        images = pixels[part] if rows is None else pixels.index_select(0, rows[part])
        views[part] = _make_views(images, parameters[part], recipe)
    return views


def center_views(
    pixels: Tensor,
    sizes: Tensor,
    size: int,
    crop_ratio: float = 1.0,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
) -> Tensor:
    """Make views for evaluation by resize and center crop: float32 (n, channels, size, size), normalized.

    `crop_ratio` is the fraction of the short side that is left after the crop (0.875: resize to 256, crop 224).
    """
    views = torch.empty((*pixels.shape[:2], size, size), device=pixels.device)
    for part in _chunks(len(pixels), pixels.shape[1] * size**2, pixels.device):
        views[part] = normalize(center_crop(pixels[part], sizes[part], crop_ratio, size), mean, std)
    return views


@dataclass(frozen=True, eq=False)
class ViewMaker:
    """Makes views of a batch of images.

    `pixels` (N, channels, height, width) holds the images at the top left, `sizes` (N, 2) their heights and widths,
    `samples` (N,) their indices in the data. Seed, step, sample and view number determine a view.
    """

    recipe: ViewRecipe
    seed: int
    step: int | Tensor
    pixels: Tensor
    sizes: Tensor
    samples: Tensor
    dtype: torch.dtype = torch.float32

    def __call__(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Views `numbers` (n,) of images `rows` (n,): 0 is the query, 1..M' are the keys, then further queries."""
        drawn = draw_parameters(self.recipe, self.seed, self.step, self.samples[rows], numbers, self.sizes[rows])
        return apply_views(self.pixels, drawn, self.recipe, self.dtype, rows=rows)


def _make_views(pixels: Tensor, parameters: ViewParameters, recipe: ViewRecipe) -> Tensor:
    """Apply the transforms in the order of MoCo and BYOL; those with probability zero are skipped."""
    images = box_crop(pixels, parameters, recipe)
    if recipe.gray_probability and recipe.color and recipe.gray_first:
        images = blend(images, gray_blends(parameters.gray))
    if recipe.jitter_probability and recipe.color:
        images = jitter_colors(images, parameters)
    if recipe.gray_probability and recipe.color and not recipe.gray_first:
        images = blend(images, gray_blends(parameters.gray))
    if recipe.blur_probability:
        radius = math.ceil(_BLUR_REACH * recipe.blur_sigma[1])
        taps = blur_taps(parameters.blur_sigma.to(images.dtype), recipe.size, radius)
        images = blur(images, taps, sampling_type(pixels))
    if recipe.solarize_probability and recipe.color:
        images = solarize(images, parameters.solarize[:, None, None, None])
    views = normalize(images, recipe.mean, recipe.std)
    if parameters.channels is not None:
        views = change_channels(views, views.mean(dim=(2, 3), keepdim=True), parameters)
    return views


def _chunks(count: int, values: int, device: torch.device) -> Iterator[slice]:
    """Small chunks on a CPU, everything at once on other devices; `values` is the size of a view."""
    chunk = max(1, _CPU_CHUNK_VALUES // values) if device.type == "cpu" else max(1, count)
    return (slice(start, start + chunk) for start in range(0, count, chunk))
