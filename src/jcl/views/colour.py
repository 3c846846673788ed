"""Colour changes with factors of each image's own, equal to torchvision's functions on float images.

Images are float (n, 3, height, width) in 0..1. Brightness, contrast, saturation and gray are all one operation, a
blend of the image with its gray version and with the mean of that; only the hue is different. So the four in any order
are three blends, the hue and three blends again, of which each image uses those that its order asks for: the others
blend nothing in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from jcl.views.parameters import CONTRAST, HUE, SATURATION, ViewParameters, ViewRows

GRAY_WEIGHTS: Final = (0.2989, 0.587, 0.114)


@dataclass(frozen=True)
class Blends(ViewRows):
    """A sequence of k blends for n images: own * image + gray * (gray image) + mean * (mean of the gray image)."""

    own: Tensor  # (n, k)
    gray: Tensor  # (n, k)
    mean: Tensor  # (n, k)


@dataclass(frozen=True)
class ColourChange(ViewRows):
    """Blends, a hue shift, and blends again."""

    before: Blends
    turns: Tensor  # (n,)
    after: Blends


def jitter_change(parameters: ViewParameters) -> ColourChange:
    """Brightness, contrast, saturation and hue in each image's own order, where jitter was drawn."""
    order, jitter = parameters.order, parameters.jitter[:, None]
    hue_place = (order == HUE).to(torch.uint8).argmax(dim=1, keepdim=True)
    place = torch.arange(4, device=order.device)
    return ColourChange(
        before=_jitter_blends(parameters, order[:, :3], jitter & (place[:3] < hue_place)),
        turns=torch.where(parameters.jitter, parameters.hue, 0.0),
        after=_jitter_blends(parameters, order[:, 1:], jitter & (place[1:] > hue_place)),
    )


def _jitter_blends(parameters: ViewParameters, operations: Tensor, used: Tensor) -> Blends:
    """Each operation (n, 3) as a blend where it is used (n, 3), else as one that changes nothing."""
    # The hue is never used as a blend; its factor stands here only to give each operation's number a column.
    factors = torch.stack((parameters.brightness, parameters.contrast, parameters.saturation, parameters.hue), dim=1)
    factor = torch.where(used, factors.gather(1, operations), 1.0)
    rest = 1.0 - factor
    return Blends(factor, rest * (operations == SATURATION), rest * (operations == CONTRAST))


def gray_blends(gray: Tensor) -> Blends:
    """One blend, that turns images gray where `gray` (n,) is true."""
    chosen = gray[:, None].to(torch.float32)
    return Blends(1 - chosen, chosen, torch.zeros_like(chosen))


def change_colours(images: Tensor, change: ColourChange) -> Tensor:
    """Carry out the blends and the hue shift; the images given stay as they are."""
    return blend(shift_hue(blend(images, change.before), change.turns), change.after)


def blend(images: Tensor, blends: Blends) -> Tensor:
    """Carry out one blend after the other, each clamped to 0..1."""
    for own, gray, mean in zip(
        *(part.to(images.dtype).unbind(1) for part in (blends.own, blends.gray, blends.mean)), strict=True
    ):
        images = _blend(images, own.view(-1, 1, 1, 1), gray.view(-1, 1, 1, 1), mean.view(-1, 1, 1, 1))
    return images


def _blend(images: Tensor, own: Tensor, gray: Tensor, mean: Tensor) -> Tensor:
    gray_images = to_gray(images)
    mean_gray = gray_images.mean(dim=(1, 2, 3), keepdim=True)
    return torch.addcmul(gray_images.mul_(gray).add_(mean_gray * mean), images, own).clamp_(0, 1)


def to_gray(images: Tensor) -> Tensor:
    """The luminance of each pixel: (n, 3, height, width) -> (n, 1, height, width)."""
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    return (red * GRAY_WEIGHTS[0]).add_(green, alpha=GRAY_WEIGHTS[1]).add_(blue, alpha=GRAY_WEIGHTS[2])


def shift_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Turn the hue of each image by `turns` (n,) of a whole circle, -1/2 to 1/2, in the HSV model.

    Value V and chroma C stay. Let w = (V - channel) / C be what each channel lacks. The distance of the hue from red,
    in sixths of a turn, is then 2 + w_red - w_green - w_blue, towards green or blue as the one or the other is
    greater; and from the hue h turned on, -3 to 3 with red at 0, w follows as a ramp for each channel.
    """
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    # Where the chroma is zero so is what it divides, and the hue has no effect: any divisor will do.
    from_red = (green + blue).sub_(red).sub_(value).div_(chroma.clamp_min(1e-30)).add_(2)
    hue = torch.copysign(from_red, green - blue).add_(6 * turns.to(images.dtype).view(-1, 1, 1, 1))
    hue.sub_((hue * (1 / 6)).round_(), alpha=6)
    lacking = torch.empty_like(images)
    lacking[:, 0:1] = hue.abs().sub_(1)
    lacking[:, 1:2] = 2 - (hue + 1).abs_()
    lacking[:, 2:3] = 2 - (hue - 1).abs_()
    return torch.addcmul(value, chroma, lacking.clamp_(0, 1), value=-1)


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Shift and scale the three channels of images in 0..1, (n, 3, height, width)."""
    return (images - _channels(mean, images)) * _channels([1 / value for value in std], images)


def denormalise(views: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Turn views back into pictures a person can look at: uint8 (n, 3, height, width)."""
    images = views.float() * _channels(std, views) + _channels(mean, views)
    return (images * 255).round().clamp(0, 255).to(torch.uint8)


def _channels(values: Sequence[float], like: Tensor) -> Tensor:
    """One value per channel, (3, 1, 1), filled in on the device so that nothing is copied to it."""
    dtype = like.dtype if like.dtype == torch.float64 else torch.float32
    return torch.stack([torch.full((1, 1), value, dtype=dtype, device=like.device) for value in values])
