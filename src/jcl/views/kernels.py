"""The views of `pipeline` on a GPU, with Triton kernels.

`draw_kernel` draws the parameters. Then one kernel crops and resizes, one changes the colors, one blurs rows, and one
blurs columns and normalizes. Inductor compiles only the jitter of channels that are not colors, so training starts
sooner. Between kernels, images of 8 bits are planes of half precision, accurate to 1/4000 of their range.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from jcl.views.color import change_channels
from jcl.views.draw_kernel import COUNT, FACTORS, GRAY, JITTER, PLACE, SIGMA, SOLARIZE, TURN, ParameterDraws
from jcl.views.parameters import draw_parameters
from jcl.views.recipe import ViewRecipe

_VALUES = 1024  # of a view that a program computes at a time


@triton.jit
def _filter(place, start, length, size: tl.constexpr):
    """Center, half width and first pixel of the triangle."""
    scale = length / size
    half_width = tl.maximum(scale, 1.0)
    center = start + (place + 0.5) * scale
    return center, half_width, tl.floor(center - half_width + 0.5).to(tl.int32)


@triton.jit
def _weight(place, center, half_width, start, length):
    """Zero outside of the crop."""
    weight = tl.maximum(1 - tl.abs(place + 0.5 - center) / half_width, 0.0)
    return tl.where((place >= start) & (place < start + length), weight, 0.0)


@triton.jit(do_not_specialize=["channels", "height", "width"])
def _crop(
    pixels, rows, parameters, planes, channels, height, width, factor, size: tl.constexpr,
    C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Same as `box_crop`. It reads only the pixels that its own crop needs."""
    view = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * P + tl.arange(0, P)
    parameters += view * COUNT
    top, left = tl.load(parameters), tl.load(parameters + 1)
    tall, wide = tl.load(parameters + 2), tl.load(parameters + 3)
    turn = tl.load(parameters + TURN).to(tl.int32)
    transposed = (turn & 4) != 0
    down = tl.where(transposed, place % size, place // size)
    across = tl.where(transposed, place // size, place % size)
    down = tl.where((turn & 2) != 0, size - 1 - down, down)
    across = tl.where((turn & 1) != 0, size - 1 - across, across)
    y, half_height, first_y = _filter(down, top, tall, size)
    x, half_width, first_x = _filter(across, left, wide, size)

    channel = tl.arange(0, C)[:, None]
    inside = (channel < channels) & (place < size * size)[None, :]
    pixels += (tl.load(rows + view) * channels + channel) * height * width
    total = tl.zeros((C, P), tl.float32)
    weights = tl.zeros((P,), tl.float32)
    for tap_y in range(tl.ceil(2 * half_height).to(tl.int32)):
        at_y = first_y + tap_y
        weight_y = _weight(at_y, y, half_height, top, tall)
        for tap_x in range(tl.ceil(2 * half_width).to(tl.int32)):
            at_x = first_x + tap_x
            weight = weight_y * _weight(at_x, x, half_width, left, wide)
            mask = inside & (weight > 0)[None, :]
            value = tl.load(pixels + (at_y * width + at_x)[None, :], mask=mask, other=0)
            total += value.to(tl.float32) * weight[None, :]
            weights += weight
    planes += (view * channels + channel) * size * size + place[None, :]
    tl.store(planes, total * (factor / weights)[None, :], mask=inside)


@triton.jit
def _gray(red, green, blue):
    return red * 0.2989 + green * 0.587 + blue * 0.114


@triton.jit
def _blend(red, green, blue, own, added):
    red, green, blue = red * own + added, green * own + added, blue * own + added
    red, green, blue = tl.maximum(red, 0.0), tl.maximum(green, 0.0), tl.maximum(blue, 0.0)
    return tl.minimum(red, 1.0), tl.minimum(green, 1.0), tl.minimum(blue, 1.0)


@triton.jit
def _lack(distance):
    """The share of the chroma that a channel lacks."""
    return tl.minimum(tl.maximum(distance, 0.0), 1.0)


@triton.jit
def _shift_hue(red, green, blue, turns):
    """Same as `color.shift_hue`, which explains the formula."""
    value = tl.maximum(tl.maximum(red, green), blue)
    chroma = value - tl.minimum(tl.minimum(red, green), blue)
    from_red = (green + blue - red - value) / tl.maximum(chroma, 1e-30) + 2
    hue = tl.where(green < blue, -from_red, from_red) + 6 * turns
    hue -= 6 * tl.floor(hue / 6 + 0.5)
    red = value - chroma * _lack(tl.abs(hue) - 1)
    green = value - chroma * _lack(2 - tl.abs(hue + 1))
    return red, green, value - chroma * _lack(2 - tl.abs(hue - 1))


@triton.jit
def _operate(red, green, blue, parameters, number, mean):
    """Operation `number` of color jitter; `mean` is that of the gray image at the contrast."""
    place = parameters + PLACE
    operation = tl.where(tl.load(place + 1) == number, 1, 0)
    operation = tl.where(tl.load(place + 2) == number, 2, operation)
    operation = tl.where(tl.load(place + 3) == number, 3, operation)
    factor = tl.load(parameters + FACTORS + operation)
    if operation == 3:
        red, green, blue = _shift_hue(red, green, blue, factor)
    else:
        added = tl.where(operation == 1, mean, tl.where(operation == 2, _gray(red, green, blue), 0.0))
        red, green, blue = _blend(red, green, blue, factor, added * (1 - factor))
    return red, green, blue


@triton.jit
def _load_colors(planes, parameters, place, area: tl.constexpr, GRAY_FIRST: tl.constexpr):
    mask = place < area
    red = tl.load(planes + place, mask=mask, other=0.0).to(tl.float32)
    green = tl.load(planes + area + place, mask=mask, other=0.0).to(tl.float32)
    blue = tl.load(planes + 2 * area + place, mask=mask, other=0.0).to(tl.float32)
    if GRAY_FIRST:
        gray = tl.load(parameters + GRAY)
        red, green, blue = _blend(red, green, blue, 1 - gray, gray * _gray(red, green, blue))
    return red, green, blue


@triton.jit
def _change_colors(planes, parameters, area: tl.constexpr, GRAY_FIRST: tl.constexpr, P: tl.constexpr):
    """Color jitter and grayscale of one view, in place."""
    view = tl.program_id(0).to(tl.int64)
    planes += view * 3 * area
    parameters += view * COUNT
    jitter = tl.load(parameters + JITTER) > 0
    contrast = tl.load(parameters + PLACE + 1)
    total = tl.zeros((P,), tl.float32)
    for start in range(0, tl.where(jitter, area, 0), P):
        place = start + tl.arange(0, P)
        red, green, blue = _load_colors(planes, parameters, place, area, GRAY_FIRST)
        for number in tl.static_range(3):
            if number < contrast:
                red, green, blue = _operate(red, green, blue, parameters, number, 0.0)
        total += tl.where(place < area, _gray(red, green, blue), 0.0)
    mean = tl.sum(total) / area
    for start in range(0, area, P):
        place = start + tl.arange(0, P)
        red, green, blue = _load_colors(planes, parameters, place, area, GRAY_FIRST)
        if jitter:
            for number in tl.static_range(4):
                red, green, blue = _operate(red, green, blue, parameters, number, mean)
        if not GRAY_FIRST:
            gray = tl.load(parameters + GRAY)
            red, green, blue = _blend(red, green, blue, 1 - gray, gray * _gray(red, green, blue))
        tl.store(planes + place, red, mask=place < area)
        tl.store(planes + area + place, green, mask=place < area)
        tl.store(planes + 2 * area + place, blue, mask=place < area)


@triton.jit
def _blurred(planes, place, mask, sigma, step: tl.constexpr, size: tl.constexpr):
    """Gaussian blur along one axis, where neighbors are `step` values apart, with reflected borders."""
    position = (place // step) % size
    first = place - position * step
    period: tl.constexpr = max(2 * (size - 1), 1)
    radius = tl.ceil(4 * sigma).to(tl.int32)
    total = tl.load(planes + place, mask=mask, other=0.0).to(tl.float32)
    weights = 1.0
    for offset in range(1, radius + 1):
        weight = tl.exp(-0.5 * (offset / sigma) * (offset / sigma))
        above = (position + offset) % period
        below = (position + period - offset % period) % period
        above, below = tl.minimum(above, period - above), tl.minimum(below, period - below)
        value = tl.load(planes + first + above * step, mask=mask, other=0.0).to(tl.float32)
        value += tl.load(planes + first + below * step, mask=mask, other=0.0).to(tl.float32)
        total += value * weight
        weights += 2 * weight
    return total / weights


@triton.jit(do_not_specialize=["channels"])
def _blur_rows(planes, parameters, blurred, channels, size: tl.constexpr, P: tl.constexpr):
    view, plane = tl.program_id(0).to(tl.int64), tl.program_id(2)
    place = tl.program_id(1) * P + tl.arange(0, P)
    mask = place < size * size
    start = (view * channels + plane) * size * size
    sigma = tl.load(parameters + view * COUNT + SIGMA)
    tl.store(blurred + start + place, _blurred(planes + start, place, mask, sigma, 1, size), mask=mask)


@triton.jit(do_not_specialize=["channels"])
def _finish(
    planes, parameters, means, stds, views, channels,
    size: tl.constexpr, WITH_BLUR: tl.constexpr, WITH_SOLARIZE: tl.constexpr, C: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Blur columns, solarize, normalize, and write channels last."""
    view = tl.program_id(0).to(tl.int64)
    parameters += view * COUNT
    area: tl.constexpr = size * size
    place = (tl.program_id(1) * P + tl.arange(0, P))[:, None]
    channel = tl.arange(0, C)[None, :]
    mask = (place < area) & (channel < channels)
    planes += (view * channels + channel) * area
    if WITH_BLUR:
        value = _blurred(planes, place, mask, tl.load(parameters + SIGMA), size, size)
    else:
        value = tl.load(planes + place, mask=mask, other=0.0).to(tl.float32)
    if WITH_SOLARIZE:
        threshold = 2 - 1.5 * tl.load(parameters + SOLARIZE)  # 2 is never reached
        value = tl.where(value >= threshold, 1 - value, value)
    known = channel < channels
    value = (value - tl.load(means + channel, mask=known, other=0.0)) / tl.load(stds + channel, mask=known, other=1.0)
    tl.store(views + (view * area + place) * channels + channel, value, mask=mask)


class FusedViews:
    """Makes the views that a `ViewMaker` makes, channels last in memory."""

    def __init__(self, recipe: ViewRecipe, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self.recipe, self.seed, self.dtype = recipe, seed, dtype
        self.draw = ParameterDraws(recipe, seed, device)
        self._mean, self._std = (torch.tensor(values, device=device) for values in (recipe.mean, recipe.std))
        self._by_channel = not recipe.color and recipe.jitter_probability > 0
        if self._by_channel:
            self._change_channels = torch.compile(change_channels, dynamic=False)

    def __call__(
        self, step: Tensor, pixels: Tensor, sizes: Tensor, samples: Tensor, rows: Tensor, numbers: Tensor
    ) -> Tensor:
        recipe, size, n, channels = self.recipe, self.recipe.size, len(rows), pixels.shape[1]
        parameters = self.draw(step, samples, sizes, rows, numbers)
        dtype, factor = (torch.float32, 1.0) if pixels.is_floating_point() else (torch.float16, 1 / 255)
        planes = torch.empty((n, channels, size, size), dtype=dtype, device=pixels.device)
        width = triton.next_power_of_2(channels)
        block = min(_VALUES // width, triton.next_power_of_2(size * size))
        blocks, tile = triton.cdiv(size * size, block), {"C": width, "P": block}
        _crop[n, blocks](
            pixels.contiguous(), rows.contiguous(), parameters, planes, *pixels.shape[1:], factor, size, **tile
        )
        if recipe.color and (recipe.jitter_probability or recipe.gray_probability):
            block_of_colors = min(_VALUES, triton.next_power_of_2(size * size))
            _change_colors[n,](planes, parameters, size * size, recipe.gray_first, block_of_colors)
        blur, solarize = recipe.blur_probability > 0, recipe.color and recipe.solarize_probability > 0
        if blur:
            blurred = torch.empty_like(planes)
            _blur_rows[n, blocks, channels](planes, parameters, blurred, channels, size, block)
            planes = blurred
        dtype = torch.float32 if self._by_channel else self.dtype
        views = torch.empty_like(planes, dtype=dtype, memory_format=torch.channels_last)
        kinds = {"WITH_BLUR": blur, "WITH_SOLARIZE": solarize}
        _finish[n, blocks](planes, parameters, self._mean, self._std, views, channels, size, **kinds, **tile)
        if self._by_channel:
            drawn = draw_parameters(recipe, self.seed, step, samples[rows], numbers, sizes[rows])
            means = views.mean(dim=(2, 3), keepdim=True)
            views = self._change_channels(views, means, drawn).to(self.dtype, memory_format=torch.channels_last)
        return views
