"""Random parameters of views, with the distributions of torchvision's transforms, for a whole batch at once.

The parameters of a view are a function of (seed, step, sample, view number); see `jcl.random`.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from jcl.random import NOISE, VIEWS, hash_words, uniforms
from jcl.views.recipe import ViewRecipe

# The operations in `ViewParameters.order`, numbered as in torchvision's ColorJitter; 0 is brightness.
CONTRAST, SATURATION, HUE = 1, 2, 3

_CROP_ATTEMPTS: Final = 10

# The number of uniform draws for each parameter, in order.
_DRAWS: Final = {
    "area": _CROP_ATTEMPTS,
    "ratio": _CROP_ATTEMPTS,
    "place": 2,
    "flip": 1,
    "jitter": 1,
    "order": 4,
    "factors": 4,
    "gray": 1,
    "blur": 1,
    "sigma": 1,
    "solarize": 1,
    "vertical_flip": 1,
    "rotation": 1,
}
FIRST_DRAW: Final = dict(zip(_DRAWS, itertools.accumulate(_DRAWS.values(), initial=0), strict=False))


@dataclass(frozen=True)
class ViewParameters:
    """Parameters of n views. Where `jitter` is true, `factors` are the arguments of torchvision's `adjust_*`."""

    box: Tensor  # (n, 4) int64: top, left, height, width of the crop in pixels
    flip: Tensor  # (n,) bool: left and right are swapped
    vertical_flip: Tensor  # (n,) bool: top and bottom are swapped
    transpose: Tensor  # (n,) bool: then rows and columns are swapped
    jitter: Tensor  # (n,) bool
    factors: Tensor  # (n, 4) float32: brightness, contrast, saturation, and hue in full circles
    order: Tensor  # (n, 4) int64: order[:, 0] is the first operation
    gray: Tensor  # (n,) bool
    blur_sigma: Tensor  # (n,) float32 in pixels of the view; 0: no blur
    solarize: Tensor  # (n,) bool
    channels: Tensor | None = None  # without color: (n, 2c + 1), shift and factor of each channel, noise
    noise_key: Tensor | None = None  # without color: (n,) int64, the hash that the noise is drawn from

    def __len__(self) -> int:
        return self.box.shape[0]

    def __getitem__(self, rows: slice | Tensor) -> "ViewParameters":
        chosen: dict[str, Any] = {name: value if value is None else value[rows] for name, value in vars(self).items()}
        return ViewParameters(**chosen)


def draw_parameters(
    recipe: ViewRecipe, seed: int, step: int | Tensor, samples: Tensor, numbers: Tensor, sizes: Tensor
) -> ViewParameters:
    """Draw the parameters of views `numbers` (n,) of images `samples` (n,) with heights and widths `sizes` (n, 2)."""
    row = uniforms(seed, VIEWS, step, samples, numbers, sum(_DRAWS.values()))
    draws = dict(zip(_DRAWS, torch.split(row, list(_DRAWS.values()), dim=1), strict=True))
    channels = noise_key = None
    if not recipe.color and recipe.jitter_probability:
        noise_key = hash_words(seed, NOISE, step, samples, numbers)
        row, count = uniforms(seed, NOISE, step, samples, numbers, 2 * len(recipe.mean) + 1), len(recipe.mean)
        shift, factor = (2 * row[:, :count] - 1) * recipe.brightness, _factor(row[:, count:-1], recipe.contrast)
        changes = torch.cat((shift, factor, row[:, -1:] * recipe.noise), dim=1)
        unchanged = torch.arange(2 * count + 1, device=row.device) // count == 1  # factors are 1
        channels = torch.where(draws["jitter"] < recipe.jitter_probability, changes, unchanged.to(row.dtype))
    strengths = (recipe.brightness, recipe.contrast, recipe.saturation)
    factors = [_factor(draws["factors"][:, number], strength) for number, strength in enumerate(strengths)]
    factors.append((2 * draws["factors"][:, HUE] - 1) * recipe.hue)
    low, high = recipe.blur_sigma
    sigma = low + (high - low) * draws["sigma"]
    flip = _happens(draws["flip"], recipe.flip_probability)
    vertical_flip = transpose = torch.zeros_like(flip)
    if not recipe.upright:
        vertical_flip = _happens(draws["vertical_flip"], recipe.vertical_flip_probability)
        quarters = _quarter_turns(draws["rotation"], recipe.rotation_probability)
        # A rotation by one or three quarters is a flip and a transposition, a rotation by two is both flips.
        flip = flip ^ ((quarters == 1) | (quarters == 2))
        vertical_flip = vertical_flip ^ (quarters >= 2)
        transpose = quarters % 2 == 1
    return ViewParameters(
        box=_random_box(recipe, sizes, draws) if recipe.random_crop else _centered_square(sizes),
        flip=flip,
        vertical_flip=vertical_flip,
        transpose=transpose,
        jitter=_happens(draws["jitter"], recipe.jitter_probability),
        factors=torch.stack(factors, dim=1),
        order=draws["order"].argsort(dim=1, stable=True),
        gray=_happens(draws["gray"], recipe.gray_probability),
        blur_sigma=(sigma * (draws["blur"] < recipe.blur_probability)).squeeze(1),
        solarize=_happens(draws["solarize"], recipe.solarize_probability),
        channels=channels,
        noise_key=noise_key,
    )


def _happens(draw: Tensor, probability: float) -> Tensor:
    return (draw < probability).squeeze(1)


def _quarter_turns(draw: Tensor, probability: float) -> Tensor:
    """1, 2 or 3 counterclockwise with this probability, equally likely; else 0: (n, 1) -> (n,)."""
    turns = (draw / max(probability, 1e-9) * 3).to(torch.int64).clamp_max(2) + 1
    return torch.where(_happens(draw, probability), turns.squeeze(1), 0)


def _factor(draw: Tensor, strength: float) -> Tensor:
    """Map a draw from 0..1 to [max(0, 1 - strength), 1 + strength]."""
    low = max(0.0, 1.0 - strength)
    return low + (1.0 + strength - low) * draw


def _random_box(recipe: ViewRecipe, sizes: Tensor, draws: dict[str, Tensor]) -> Tensor:
    """Same as `RandomResizedCrop`: the first of ten attempts that fits, else a centered crop."""
    image = sizes.to(torch.float32)
    area = image.prod(dim=1, keepdim=True) * (recipe.min_scale + (recipe.max_scale - recipe.min_scale) * draws["area"])
    low, high = math.log(recipe.ratio[0]), math.log(recipe.ratio[1])
    ratio = torch.exp(low + (high - low) * draws["ratio"])
    attempts = torch.stack((area / ratio, area * ratio), dim=2).sqrt().round().to(torch.int64)  # (n, 10, 2)

    fits = ((attempts > 0) & (attempts <= sizes[:, None])).all(dim=2)  # (n, 10)
    first = fits.to(torch.uint8).argmax(dim=1)
    chosen = attempts.gather(1, first[:, None, None].expand(-1, 1, 2)).squeeze(1)
    place = (draws["place"] * (sizes - chosen + 1)).to(torch.int64)

    # The largest crop with an allowed aspect ratio.
    height, width = image.unbind(dim=1)
    limits = torch.minimum(height, width / recipe.ratio[0]), torch.minimum(width, height * recipe.ratio[1])
    fallback = torch.stack(limits, dim=1).round().to(torch.int64).clamp_min(1)
    found = fits.any(dim=1, keepdim=True)
    return torch.cat((torch.where(found, place, (sizes - fallback) // 2), torch.where(found, chosen, fallback)), dim=1)


def _centered_square(sizes: Tensor) -> Tensor:
    side = sizes.amin(dim=1, keepdim=True).expand(-1, 2)
    return torch.cat(((sizes - side) // 2, side), dim=1)
