"""The same views arranged for a compiler, which turns each stage into one kernel over all views.

The stages of `pipeline` suit a processor that runs one operation after the other on pieces that fit its cache. A GPU
wants the opposite: few passes over memory, any amount of arithmetic in between. So here a view is three planes, red,
green and blue, that each stage computes together; the crop gathers its few taps of both axes at once straight from the
uint8 images; the colours take one pass to find the mean that the contrast needs and one to change them; and the blur
is a matrix product from each side. Between stages planes are kept in half precision on a GPU.
"""

import torch
from torch import Tensor

from jcl.views.colour import GRAY_WEIGHTS, Blends, ColourChange, gray_blends, jitter_change
from jcl.views.parameters import CONTRAST, HUE, ViewParameters
from jcl.views.recipe import ViewRecipe
from jcl.views.resize import Crop, box_crop

Planes = tuple[Tensor, Tensor, Tensor]  # red, green, blue, each (n, size, size)


def fused_views(pixels: Tensor, rows: Tensor, parameters: ViewParameters, recipe: ViewRecipe) -> Tensor:
    """Make views as `apply_views` does: (images, 3, height, width) uint8 -> float32 (n, 3, size, size), normalised."""
    canvas = (pixels.shape[2], pixels.shape[3])
    crop = box_crop(parameters.box, parameters.flip, canvas, recipe.size, torch.float32)
    planes = _kept(_crop(pixels, rows, crop))
    gray = gray_blends(parameters.gray) if recipe.gray_probability else None
    if gray is not None and recipe.gray_first:
        planes = _blend_all(planes, gray, None)
    if recipe.jitter_probability:
        planes = _change_colours(planes, parameters)
    if gray is not None and not recipe.gray_first:
        planes = _blend_all(planes, gray, None)
    if recipe.blur_probability:
        planes = _blur(_kept(planes), parameters.blur_sigma)
    return torch.stack(
        [(plane.float() - mean) * (1 / std) for plane, mean, std in zip(planes, recipe.mean, recipe.std, strict=True)],
        dim=1,
    )


def _crop(pixels: Tensor, rows: Tensor, crop: Crop) -> Planes:
    """Sum the taps of both axes; every channel reads the same places."""
    row = rows[:, None, None]

    def plane(channel: int) -> Tensor:
        total = torch.zeros((), device=pixels.device)
        for down in range(crop.rows.index.shape[2]):
            for across in range(crop.columns.index.shape[2]):
                y, x = _at(crop.rows.index, down, 2), _at(crop.columns.index, across, 1)
                weight = _at(crop.rows.weight, down, 2) * _at(crop.columns.weight, across, 1)
                total = total + pixels[row, channel, y, x].float() * weight
        return total if pixels.is_floating_point() else total * (1 / 255)

    return plane(0), plane(1), plane(2)


def _at(values: Tensor, tap: int, dim: int) -> Tensor:
    """One tap of (n, size, taps), to be spread along the other axis: (n, size, 1) for dim 2, (n, 1, size) for dim 1."""
    return values[:, :, tap].unsqueeze(dim)


def _change_colours(planes: Planes, parameters: ViewParameters) -> Planes:
    change = jitter_change(parameters)
    before_contrast = _chain(planes, _up_to_contrast(change, parameters.order), None)
    mean = _gray(before_contrast).mean(dim=(1, 2))
    return _chain(planes, change, completed(mean))


@torch.library.custom_op("jcl::completed", mutates_args=())
def completed(values: Tensor) -> Tensor:
    """The same values; a compiler, which cannot look into this, has to end its kernel before it and begin another.

    Left alone it takes a mean and what follows from it in one kernel, which keeps what both need in memory and reads it
    back. That is not safe: Triton may let a thread read what another one has not written yet
    (https://github.com/triton-lang/triton/issues/10924), and views then hold whatever was there before.
    """
    return values.clone()


@completed.register_fake
def _(values: Tensor) -> Tensor:
    return torch.empty_like(values)


def _up_to_contrast(change: ColourChange, order: Tensor) -> ColourChange:
    """The same change, ended where each view's contrast would come."""
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
    """One blend after the other, each clamped to 0..1; `mean` (n,) is that of the gray image at the contrast."""
    red, green, blue = (plane.float() for plane in planes)
    for number in range(blends.own.shape[1]):
        own, share = blends.own[:, number, None, None], blends.gray[:, number, None, None]
        added = _gray((red, green, blue)) * share
        if mean is not None:
            added = added + (mean * blends.mean[:, number])[:, None, None]
        red, green, blue = ((plane * own + added).clamp(0, 1) for plane in (red, green, blue))
    return red, green, blue


def _gray(planes: Planes) -> Tensor:
    return sum(plane.float() * weight for plane, weight in zip(planes, GRAY_WEIGHTS, strict=True))  # type: ignore[return-value]


def _shift_hue(planes: Planes, turns: Tensor) -> Planes:
    """Turn the hue as `colour.shift_hue` does, where the formula is explained."""
    red, green, blue = planes
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    from_red = (green + blue - red - value) / chroma.clamp_min(1e-30) + 2
    hue = torch.copysign(from_red, green - blue) + 6 * turns[:, None, None]
    hue = hue - 6 * torch.round(hue * (1 / 6))
    lacking = (hue.abs() - 1, 2 - (hue + 1).abs(), 2 - (hue - 1).abs())
    red, green, blue = (value - chroma * part.clamp(0, 1) for part in lacking)
    return red, green, blue


def _blur(planes: Planes, sigma: Tensor) -> Planes:
    """Gaussian blur with reflected borders, as a product with one matrix per view from each side."""
    matrix = blur_matrix(sigma, planes[0].shape[1]).to(planes[0].dtype)
    red, green, blue = (torch.bmm(torch.bmm(matrix, plane), matrix.mT) for plane in planes)
    return red, green, blue


def blur_matrix(sigma: Tensor, size: int) -> Tensor:
    """The weights (n, size, size) by which each output row takes each input row; the identity where sigma is 0.

    Row j is reached from row i directly and through the reflection at either border. Together these are all distances
    of at least up to `size` - 1 to both sides, so every output row has the same sum, that of the whole bell, as long as
    the bell is narrower than the view (to 1e-4 from 8 px on with the paper's blur).

    Dividing each row by its own sum would be as good, but a kernel would read back what it wrote (see `completed`).
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


def _kept(planes: Planes) -> Planes:
    """Between stages half precision is accurate to 1/4000 of the range and the least to move."""
    if not planes[0].is_cuda:
        return planes
    red, green, blue = (plane.to(torch.float16) for plane in planes)
    return red, green, blue
