"""Color jitter and grayscale with different parameters for each image, equal to torchvision on float images.

Images are float (n, 3, height, width) in 0..1. Brightness, contrast, saturation and grayscale are blends of an image
with its gray version and with the mean of that; only hue is different. So color jitter in any order is three blends,
hue, and three blends again; blends that an image does not use are the identity.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from jcl.random import normals
from jcl.views.parameters import CONTRAST, HUE, SATURATION, ViewParameters

GRAY_WEIGHTS: Final = (0.2989, 0.587, 0.114)


Blends = tuple[Tensor, Tensor, Tensor]
"""Weights (n, k) in k successive blends of n images: of the image, of its gray version, and of the mean of that."""


def jitter_colors(images: Tensor, parameters: ViewParameters) -> Tensor:
    """Color jitter in the order of each image, for images with `jitter`."""
    order, jitter = parameters.order, parameters.jitter[:, None]
    hue_place = (order == HUE).to(torch.uint8).argmax(dim=1, keepdim=True)
    place = torch.arange(4, device=order.device)
    before = _jitter_blends(parameters, order[:, :3], jitter & (place[:3] < hue_place))
    after = _jitter_blends(parameters, order[:, 1:], jitter & (place[1:] > hue_place))
    turns = torch.where(parameters.jitter, parameters.factors[:, HUE], 0.0)
    return blend(shift_hue(blend(images, before), turns), after)


def _jitter_blends(parameters: ViewParameters, operations: Tensor, used: Tensor) -> Blends:
    """The blends of `operations` (n, 3); the identity where `used` (n, 3) is false."""
    factor = torch.where(used, parameters.factors.gather(1, operations), 1.0)  # hue is never used as a blend
    rest = 1.0 - factor
    return factor, rest * (operations == SATURATION), rest * (operations == CONTRAST)


def gray_blends(gray: Tensor) -> Blends:
    """One blend that converts images to grayscale where `gray` (n,) is true."""
    chosen = gray[:, None].to(torch.float32)
    return 1 - chosen, chosen, torch.zeros_like(chosen)


def blend(images: Tensor, blends: Blends) -> Tensor:
    """Apply the blends one after the other, each clamped to 0..1."""
    weights = (part.to(images.dtype)[..., None, None, None] for part in blends)
    for own, gray, mean in zip(*(part.unbind(1) for part in weights), strict=True):
        gray_images = to_gray(images)
        mean_gray = gray_images.mean(dim=(1, 2, 3), keepdim=True)
        images = torch.addcmul(gray_images.mul_(gray).add_(mean_gray * mean), images, own).clamp_(0, 1)
    return images


def solarize(values: Tensor, chosen: Tensor) -> Tensor:
    """Invert values in 0..1 that are at least 0.5, where `chosen`, as torchvision's `RandomSolarize(0.5)`."""
    return torch.where(chosen & (values >= 0.5), 1 - values, values)


def to_gray(images: Tensor) -> Tensor:
    """Luminance: (n, 3, height, width) -> (n, 1, height, width)."""
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    return (red * GRAY_WEIGHTS[0]).add_(green, alpha=GRAY_WEIGHTS[1]).add_(blue, alpha=GRAY_WEIGHTS[2])


def shift_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Shift the hue of each image by `turns` (n,) of a full circle, from -1/2 to 1/2, in HSV.

    Value V and chroma C stay the same. With w = (V - channel) / C, the distance of the hue from red in sixths of a
    circle is 2 + w_red - w_green - w_blue; its sign is positive if green > blue. From the shifted hue, in -3..3 with
    red at 0, each w is a piecewise linear function.
    """
    red, green, blue = images[:, 0:1], images[:, 1:2], images[:, 2:3]
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    # Where the chroma is zero the numerator is too, and the hue has no effect.
    from_red = (green + blue).sub_(red).sub_(value).div_(chroma.clamp_min(1e-30)).add_(2)
    hue = torch.copysign(from_red, green - blue).add_(6 * turns.to(images.dtype).view(-1, 1, 1, 1))
    hue.sub_((hue * (1 / 6)).round_(), alpha=6)
    lacking = torch.empty_like(images)
    lacking[:, 0:1] = hue.abs().sub_(1)
    lacking[:, 1:2] = 2 - (hue + 1).abs_()
    lacking[:, 2:3] = 2 - (hue - 1).abs_()
    return torch.addcmul(value, chroma, lacking.clamp_(0, 1), value=-1)


def change_channels(views: Tensor, means: Tensor, parameters: ViewParameters) -> Tensor:
    """Contrast, brightness and noise of each channel of normalized views, (n, channels, height, width).

    Contrast scales a channel around its mean in the view, (n, channels, 1, 1), brightness is added to it, and noise is
    Gaussian. Values have no bounds, so nothing is clamped.
    """
    assert parameters.channels is not None and parameters.noise_key is not None
    changes, count = parameters.channels[..., None, None], views.shape[1]
    shift, factor, noise = changes[:, :count], changes[:, count:-1], changes[:, -1:]
    drawn = normals(parameters.noise_key, views[0].numel()).view(views.shape)
    return (views - means) * factor + (means + shift) + drawn * noise


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalize images, (n, channels, height, width), by the mean and standard deviation of each channel."""
    return (images - _channels(mean, images)) * _channels([1 / value for value in std], images)


def denormalize(views: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Undo `normalize`: uint8 (n, channels, height, width)."""
    images = views.float() * _channels(std, views) + _channels(mean, views)
    return (images * 255).round().clamp(0, 255).to(torch.uint8)


def as_rgb(images: Tensor, mean: Sequence[float] | None = None, std: Sequence[float] | None = None) -> Tensor:
    """Images (..., channels, height, width) as uint8 RGB to look at; uint8 RGB stays as it is.

    Black is two standard deviations below the mean, white four above it (default: the image's own). One channel is
    gray; of several, the first three are red, green and blue.
    """
    if images.dtype == torch.uint8 and images.shape[-3] == 3:
        return images
    values = images.float() if images.is_floating_point() else images / 255
    if mean is None or std is None:
        own_std, own_mean = torch.std_mean(values, dim=(-2, -1), correction=0, keepdim=True)
        values = (values - own_mean) / own_std.clamp_min(1e-12)
    else:
        values = normalize(values, mean, std)
    shades = ((values + 2) * (255 / 6)).round().clamp(0, 255).to(torch.uint8).unbind(-3)
    black = torch.zeros_like(shades[0])
    return torch.stack(shades * 3 if len(shades) == 1 else (*shades, black)[:3], dim=-3)


def _channels(values: Sequence[float], like: Tensor) -> Tensor:
    """One value per channel, (channels, 1, 1), filled on the device to avoid a copy."""
    dtype = like.dtype if like.dtype == torch.float64 else torch.float32
    return torch.stack([torch.full((1, 1), value, dtype=dtype, device=like.device) for value in values])
