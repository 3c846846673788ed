"""What is drawn for a view, exactly as torchvision's transforms draw it, for all views of a batch at once.

Each view has its own numbers, a function of (seed, step, sample, view number); see `jcl.random`.
"""

import math
from dataclasses import dataclass, fields
from typing import Final, Self

import torch
from torch import Tensor

from jcl.random import VIEWS, uniforms
from jcl.views.recipe import ViewRecipe

# The numbers by which `ViewParameters.order` names the four operations, as torchvision's ColorJitter numbers them.
BRIGHTNESS: Final = 0
CONTRAST: Final = 1
SATURATION: Final = 2
HUE: Final = 3

_CROP_ATTEMPTS: Final = 10

# How many uniform numbers each part of a view uses, in the order in which they stand in a view's row of draws.
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
}


@dataclass(frozen=True)
class ViewRows:
    """Base of frozen dataclasses whose fields are tensors, or such dataclasses again, with one row per view."""

    def __getitem__(self, rows: slice | Tensor) -> Self:
        """Take the rows of some of the views."""
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass(frozen=True)
class ViewParameters(ViewRows):
    """The draws of n views, one row a view.

    The factors mean what torchvision's `adjust_...` functions mean by them; they hold only where `jitter` is true.
    """

    box: Tensor  # (n, 4) int64: top, left, height, width of the crop in the image's pixels
    flip: Tensor  # (n,) bool
    jitter: Tensor  # (n,) bool
    brightness: Tensor  # (n,) float32
    contrast: Tensor  # (n,) float32
    saturation: Tensor  # (n,) float32
    hue: Tensor  # (n,) float32, in turns
    order: Tensor  # (n, 4) int64: order[:, 0] is the operation that comes first
    gray: Tensor  # (n,) bool
    blur_sigma: Tensor  # (n,) float32 in pixels of the view, 0 for no blur

    def __len__(self) -> int:
        return self.box.shape[0]


def draw_parameters(
    recipe: ViewRecipe, seed: int, step: int | Tensor, samples: Tensor, numbers: Tensor, sizes: Tensor
) -> ViewParameters:
    """Draw the parameters of n views, of the images `samples` (n,) and with the view numbers `numbers` (n,).

    `sizes` (n, 2) int64 is the height and width of each view's image.
    """
    row = uniforms(seed, VIEWS, step, samples, numbers, sum(_DRAWS.values()))
    draws = dict(zip(_DRAWS, torch.split(row, list(_DRAWS.values()), dim=1), strict=True))
    low, high = recipe.blur_sigma
    sigma = low + (high - low) * draws["sigma"]
    return ViewParameters(
        box=_random_box(recipe, sizes, draws) if recipe.random_crop else _centred_square(sizes),
        flip=_happens(draws["flip"], recipe.flip_probability),
        jitter=_happens(draws["jitter"], recipe.jitter_probability),
        brightness=_factor(draws["factors"][:, BRIGHTNESS], recipe.brightness),
        contrast=_factor(draws["factors"][:, CONTRAST], recipe.contrast),
        saturation=_factor(draws["factors"][:, SATURATION], recipe.saturation),
        hue=(2 * draws["factors"][:, HUE] - 1) * recipe.hue,
        order=draws["order"].argsort(dim=1, stable=True),
        gray=_happens(draws["gray"], recipe.gray_probability),
        blur_sigma=(sigma * (draws["blur"] < recipe.blur_probability)).squeeze(1),
    )


def _happens(draw: Tensor, probability: float) -> Tensor:
    """(n, 1) -> (n,) bool."""
    return (draw < probability).squeeze(1)


def _factor(draw: Tensor, strength: float) -> Tensor:
    """Spread a draw evenly over [max(0, 1 - strength), 1 + strength]."""
    low = max(0.0, 1.0 - strength)
    return low + (1.0 + strength - low) * draw


def _random_box(recipe: ViewRecipe, sizes: Tensor, draws: dict[str, Tensor]) -> Tensor:
    """Draw a crop of random area, aspect ratio and place: ten attempts, the first that fits, else a centred crop."""
    image = sizes.to(torch.float32)
    area = image.prod(dim=1, keepdim=True) * (recipe.min_scale + (recipe.max_scale - recipe.min_scale) * draws["area"])
    low, high = math.log(recipe.ratio[0]), math.log(recipe.ratio[1])
    ratio = torch.exp(low + (high - low) * draws["ratio"])
    attempts = torch.stack((area / ratio, area * ratio), dim=2).sqrt().round().to(torch.int64)  # (n, 10, 2)

    fits = ((attempts > 0) & (attempts <= sizes[:, None])).all(dim=2)  # (n, 10)
    first = fits.to(torch.uint8).argmax(dim=1)  # the first of the greatest
    chosen = attempts.gather(1, first[:, None, None].expand(-1, 1, 2)).squeeze(1)
    place = (draws["place"] * (sizes - chosen + 1)).to(torch.int64)

    fallback = _fallback_size(recipe, image)
    found = fits.any(dim=1, keepdim=True)
    return torch.cat((torch.where(found, place, (sizes - fallback) // 2), torch.where(found, chosen, fallback)), dim=1)


def _fallback_size(recipe: ViewRecipe, image: Tensor) -> Tensor:
    """The largest crop of an allowed aspect ratio: the whole image unless it is too narrow or too wide."""
    height, width = image.unbind(dim=1)
    size = torch.stack(
        (torch.minimum(height, width / recipe.ratio[0]), torch.minimum(width, height * recipe.ratio[1])), dim=1
    )
    return size.round().to(torch.int64).clamp_min(1)


def _centred_square(sizes: Tensor) -> Tensor:
    side = sizes.amin(dim=1, keepdim=True).expand(-1, 2)
    return torch.cat(((sizes - side) // 2, side), dim=1)
