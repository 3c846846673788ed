"""The views of `pipeline` for `torch.compile`, which makes one kernel of each stage.

On a GPU, passes over memory cost more than arithmetic. So the three color planes are computed together, the crop reads
the uint8 images directly, color jitter takes one pass for the mean that contrast needs and one for the rest, and the
blur is a matrix product along each axis. Between stages, planes are stored in half precision.
"""

import torch
from torch import Tensor

from jcl.views.colour import (
    GRAY_WEIGHTS,
    Blends,
    ColourChange,
    change_channels,
    completed,
    gray_blends,
    jitter_change,
    solarize,
)
from jcl.views.parameters import CONTRAST, HUE, ViewParameters
from jcl.views.recipe import ViewRecipe
from jcl.views.resize import Crop, box_crop

Planes = tuple[Tensor, ...]  # the channels, such as red, green and blue, each (n, size, size)


def fused_views(pixels: Tensor, rows: Tensor, parameters: ViewParameters, recipe: ViewRecipe) -> Tensor:
    """Same as `apply_views`: (images, channels, height, width) -> normalized float32 (n, channels, size, size)."""
    canvas = (pixels.shape[2], pixels.shape[3])
    crop = box_crop(parameters, recipe, canvas, torch.float32)
    half = pixels.is_cuda and not pixels.is_floating_point()  # accurate to 1/4000 of the range
    planes = _kept(_crop(pixels, rows, crop), half)
    gray = gray_blends(parameters.gray) if recipe.gray_probability and recipe.color else None
    if gray is not None and recipe.gray_first:
        planes = _blend_all(planes, gray, None)
    if recipe.jitter_probability and recipe.color:
        planes = _change_colours(planes, parameters)
    if gray is not None and not recipe.gray_first:
        planes = _blend_all(planes, gray, None)
    if recipe.blur_probability:
        planes = _blur(_kept(planes, half), parameters.blur_sigma)
    if recipe.solarize_probability and recipe.color:
        planes = tuple(solarize(plane.float(), parameters.solarize[:, None, None]) for plane in planes)
    views = torch.stack(
        [(plane.float() - mean) * (1 / std) for plane, mean, std in zip(planes, recipe.mean, recipe.std, strict=True)],
        dim=1,
    )
    return change_channels(views, parameters)


def _crop(pixels: Tensor, rows: Tensor, crop: Crop) -> Planes:
    """Sum the taps of both axes; all channels use the same indices."""
    row = rows[:, None, None]

    def at(values: Tensor, tap: int, dim: int) -> Tensor:
        """One tap of (n, size, taps) for broadcasting: (n, size, 1) for dim 2, (n, 1, size) for dim 1."""
        value = values[:, :, tap].unsqueeze(dim)
        return value if crop.transpose is None else torch.where(crop.transpose[:, None, None], value.mT, value)

    def plane(channel: int) -> Tensor:
        total = torch.zeros((), device=pixels.device)
        for down in range(crop.rows.index.shape[2]):
            for across in range(crop.columns.index.shape[2]):
                y, x = at(crop.rows.index, down, 2), at(crop.columns.index, across, 1)
                weight = at(crop.rows.weight, down, 2) * at(crop.columns.weight, across, 1)
                total = total + pixels[row, channel, y, x].float() * weight
        return total if pixels.is_floating_point() else total * (1 / 255)

    return tuple(map(plane, range(pixels.shape[1])))


def _change_colours(planes: Planes, parameters: ViewParameters) -> Planes:
    change = jitter_change(parameters)
    before_contrast = _chain(planes, _up_to_contrast(change, parameters.order), None)
    mean = _gray(before_contrast).mean(dim=(1, 2))
    return _chain(planes, change, completed(mean))


def _up_to_contrast(change: ColourChange, order: Tensor) -> ColourChange:
    """The operations before the contrast of each view."""
    contrast = (order == CONTRAST).to(torch.uint8).argmax(dim=1, keepdim=True)
    hue = (order == HUE).to(torch.uint8).argmax(dim=1)
    place = torch.arange(4, device=order.device)
    return ColourChange(
        _blends_where(change.before, place[:3] < contrast),
        torch.where(hue < contrast.squeeze(1), change.turns, 0.0),
        _blends_where(change.after, place[1:] < contrast),
    )


def _blends_where(blends: Blends, used: Tensor) -> Blends:
    nothing = torch.zeros_like(blends.gray)
    return Blends(torch.where(used, blends.own, 1.0), torch.where(used, blends.gray, 0.0), nothing)


def _chain(planes: Planes, change: ColourChange, mean: Tensor | None) -> Planes:
    planes = _blend_all(planes, change.before, mean)
    return _blend_all(_shift_hue(planes, change.turns), change.after, mean)


def _blend_all(planes: Planes, blends: Blends, mean: Tensor | None) -> Planes:
    """Apply the blends, each clamped to 0..1; `mean` (n,) is the mean of the gray image at the contrast."""
    planes = tuple(plane.float() for plane in planes)
    for number in range(blends.own.shape[1]):
        own, share = blends.own[:, number, None, None], blends.gray[:, number, None, None]
        added = _gray(planes) * share
        if mean is not None:
            added = added + (mean * blends.mean[:, number])[:, None, None]
        planes = tuple((plane * own + added).clamp(0, 1) for plane in planes)
    return planes


def _gray(planes: Planes) -> Tensor:
    return sum(plane.float() * weight for plane, weight in zip(planes, GRAY_WEIGHTS, strict=True))  # type: ignore[return-value]


def _shift_hue(planes: Planes, turns: Tensor) -> Planes:
    """Same as `colour.shift_hue`, which explains the formula."""
    red, green, blue = planes
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    from_red = (green + blue - red - value) / chroma.clamp_min(1e-30) + 2
    hue = torch.copysign(from_red, green - blue) + 6 * turns[:, None, None]
    hue = hue - 6 * torch.round(hue * (1 / 6))
    lacking = (hue.abs() - 1, 2 - (hue + 1).abs(), 2 - (hue - 1).abs())
    return tuple(value - chroma * part.clamp(0, 1) for part in lacking)


def _blur(planes: Planes, sigma: Tensor) -> Planes:
    """Gaussian blur with reflected borders, as a matrix product along each axis."""
    matrix = blur_matrix(sigma, planes[0].shape[1]).to(planes[0].dtype)
    return tuple(torch.bmm(torch.bmm(matrix, plane), matrix.mT) for plane in planes)


def blur_matrix(sigma: Tensor, size: int) -> Tensor:
    """Weights (n, size, size) of input rows for each output row; the identity where sigma is 0.

    Each input row contributes directly and by reflection at both borders. Every output row then has the same sum, that
    of the whole Gaussian, as long as this is narrower than the view (up to 1e-4, for views of at least 8 px and the
    paper's blur). Dividing rows by their own sums would need the values twice in a kernel (see `completed`).
    """
    place = torch.arange(size, device=sigma.device)
    out, into = place[:, None], place[None, :]
    spread = sigma.clamp_min(1e-3)[:, None, None]

    def gaussian(distance: Tensor) -> Tensor:
        return torch.exp(-0.5 * (distance / spread) ** 2)

    weight = gaussian(into - out)
    weight = weight + gaussian(into + out) * (into > 0)
    weight = weight + gaussian(2 * (size - 1) - into - out) * (into < size - 1)
    bell = gaussian(torch.arange(1 - size, size, device=sigma.device)).sum(dim=2, keepdim=True)
    return weight / bell


def _kept(planes: Planes, half: bool) -> Planes:
    return tuple(plane.to(torch.float16) for plane in planes) if half else planes
