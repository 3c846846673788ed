"""Draw the parameters of views on a GPU, same as `parameters`, with a Triton kernel."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from jcl.random import VIEWS
from jcl.views.parameters import FIRST_DRAW
from jcl.views.recipe import ViewRecipe

_VIEWS_PER_PROGRAM = 128

# Columns of the parameters, all float32; the places are those of the four operations of color jitter.
COLUMNS = (
    *("top", "left", "height", "width", "turn", "jitter", "brightness", "contrast", "saturation", "hue"),
    *("place", "place_1", "place_2", "place_3", "gray", "sigma", "solarize"),
)
COUNT = tl.constexpr(len(COLUMNS))
TURN, JITTER, FACTORS, PLACE, GRAY, SIGMA, SOLARIZE = (
    tl.constexpr(COLUMNS.index(name)) for name in ("turn", "jitter", "brightness", "place", "gray", "sigma", "solarize")
)
_AREA_DRAW, _RATIO_DRAW, _PLACE_DRAW, _FLIP_DRAW, _JITTER_DRAW, _ORDER_DRAW, _FACTORS_DRAW = (
    tl.constexpr(FIRST_DRAW[name]) for name in ("area", "ratio", "place", "flip", "jitter", "order", "factors")
)
_GRAY_DRAW, _BLUR_DRAW, _SIGMA_DRAW, _SOLARIZE_DRAW, _VERTICAL_DRAW, _ROTATION_DRAW = (
    tl.constexpr(FIRST_DRAW[name]) for name in ("gray", "blur", "sigma", "solarize", "vertical_flip", "rotation")
)
_ATTEMPTS = tl.constexpr(FIRST_DRAW["ratio"])
_STREAM = tl.constexpr(VIEWS)

# Entries of the table that holds the recipe.
_SCALE, _LOG_RATIO, _BLUR_SIGMA, _STRENGTHS = (tl.constexpr(entry) for entry in (0, 2, 4, 6))
_MIN_RATIO, _MAX_RATIO, _FLIPS, _VERTICAL_FLIPS, _ROTATIONS, _JITTERS, _GRAYS, _BLURS, _SOLARIZES = (
    tl.constexpr(entry) for entry in range(14, 23)
)


def _recipe_table(recipe: ViewRecipe) -> list[float]:
    """What `_draw` needs of a recipe; ranges as their start and length."""
    ratio = [math.log(value) for value in recipe.ratio]
    strengths = (recipe.brightness, recipe.contrast, recipe.saturation)
    factors = [(max(0.0, 1 - strength), 1 + strength) for strength in strengths]
    ranges = [(recipe.min_scale, recipe.max_scale), ratio, recipe.blur_sigma, *factors, (-recipe.hue, recipe.hue)]
    return [
        *(value for low, high in ranges for value in (low, high - low)),
        *recipe.ratio,
        recipe.flip_probability,
        recipe.vertical_flip_probability,
        recipe.rotation_probability,
        recipe.jitter_probability,
        recipe.gray_probability,
        recipe.blur_probability,
        recipe.solarize_probability,
    ]


@triton.jit
def _mix(value):
    """Same as in `jcl.random`."""
    value = value - 0x61C8864680B583EB
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


@triton.jit
def _uniform(state, number):
    return ((_mix(state ^ number) >> 40) & 0xFFFFFF).to(tl.float32) * (1 / 16777216)


@triton.jit
def _between(state, number, table, entry):
    """A draw from a range of the table."""
    return tl.load(table + entry) + tl.load(table + entry + 1) * _uniform(state, number)


@triton.jit
def _round(value):
    return tl.floor(value + 0.5)


@triton.jit(do_not_specialize=["count", "seed"])
def _draw(
    table, step, samples, sizes, rows, numbers, parameters, count, seed,
    RANDOM_CROP: tl.constexpr, UPRIGHT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Same as `draw_parameters`."""
    view = tl.program_id(0) * N + tl.arange(0, N)
    mask = view < count
    row = tl.load(rows + view, mask=mask, other=0)
    state = _mix(tl.zeros((N,), tl.int64) ^ seed)
    state = _mix(_mix(state ^ _STREAM) ^ tl.load(step))
    state = _mix(state ^ tl.load(samples + row, mask=mask, other=0))
    state = _mix(state ^ tl.load(numbers + view, mask=mask, other=0))
    height = tl.load(sizes + 2 * row, mask=mask, other=1).to(tl.float32)
    width = tl.load(sizes + 2 * row + 1, mask=mask, other=1).to(tl.float32)
    parameters += view * COUNT

    if RANDOM_CROP:
        found = tl.zeros((N,), tl.int1)
        # The largest crop with an allowed aspect ratio, unless an attempt fits.
        tall = tl.maximum(_round(tl.minimum(height, tl.div_rn(width, tl.load(table + _MIN_RATIO)))), 1.0)
        wide = tl.maximum(_round(tl.minimum(width, height * tl.load(table + _MAX_RATIO))), 1.0)
        for attempt in range(_ATTEMPTS):
            area = height * width * _between(state, _AREA_DRAW + attempt, table, _SCALE)
            ratio = tl.exp(_between(state, _RATIO_DRAW + attempt, table, _LOG_RATIO))
            down, across = _round(tl.sqrt_rn(tl.div_rn(area, ratio))), _round(tl.sqrt_rn(area * ratio))
            fits = (down > 0) & (down <= height) & (across > 0) & (across <= width) & (found == 0)
            tall, wide = tl.where(fits, down, tall), tl.where(fits, across, wide)
            found = found | fits
        top = tl.floor(tl.where(found, _uniform(state, _PLACE_DRAW) * (height - tall + 1), (height - tall) / 2))
        left = tl.floor(tl.where(found, _uniform(state, _PLACE_DRAW + 1) * (width - wide + 1), (width - wide) / 2))
    else:
        tall = tl.minimum(height, width)
        wide = tall
        top, left = tl.floor((height - tall) / 2), tl.floor((width - wide) / 2)
    tl.store(parameters, top, mask=mask)
    tl.store(parameters + 1, left, mask=mask)
    tl.store(parameters + 2, tall, mask=mask)
    tl.store(parameters + 3, wide, mask=mask)

    turn = (_uniform(state, _FLIP_DRAW) < tl.load(table + _FLIPS)).to(tl.int32)
    if not UPRIGHT:
        draw = _uniform(state, _ROTATION_DRAW)
        probability = tl.load(table + _ROTATIONS)
        quarters = tl.minimum(tl.div_rn(draw, tl.maximum(probability, 1e-9)) * 3, 2).to(tl.int32) + 1
        quarters = tl.where(draw < probability, quarters, 0)
        # A rotation by one or three quarters is a flip and a transposition, a rotation by two is both flips.
        turn = turn ^ ((quarters == 1) | (quarters == 2)).to(tl.int32)
        vertical = (_uniform(state, _VERTICAL_DRAW) < tl.load(table + _VERTICAL_FLIPS)) ^ (quarters >= 2)
        turn = turn + 2 * vertical.to(tl.int32) + 4 * (quarters % 2)
    tl.store(parameters + TURN, turn.to(tl.float32), mask=mask)

    tl.store(parameters + JITTER, (_uniform(state, _JITTER_DRAW) < tl.load(table + _JITTERS)).to(tl.float32), mask=mask)
    for factor in range(4):
        drawn = _between(state, _FACTORS_DRAW + factor, table, _STRENGTHS + 2 * factor)
        tl.store(parameters + FACTORS + factor, drawn, mask=mask)
        own = _uniform(state, _ORDER_DRAW + factor)
        place = tl.zeros((N,), tl.float32)
        for other in range(4):
            draw = _uniform(state, _ORDER_DRAW + other)
            place += ((draw < own) | ((draw == own) & (other < factor))).to(tl.float32)
        tl.store(parameters + PLACE + factor, place, mask=mask)
    tl.store(parameters + GRAY, (_uniform(state, _GRAY_DRAW) < tl.load(table + _GRAYS)).to(tl.float32), mask=mask)
    blurred = _uniform(state, _BLUR_DRAW) < tl.load(table + _BLURS)
    tl.store(parameters + SIGMA, tl.where(blurred, _between(state, _SIGMA_DRAW, table, _BLUR_SIGMA), 0.0), mask=mask)
    solarized = _uniform(state, _SOLARIZE_DRAW) < tl.load(table + _SOLARIZES)
    tl.store(parameters + SOLARIZE, solarized.to(tl.float32), mask=mask)


class ParameterDraws:
    """Draws the parameters of views, (n, columns)."""

    def __init__(self, recipe: ViewRecipe, seed: int, device: torch.device) -> None:
        self.recipe, self.seed = recipe, seed
        self._table = torch.tensor(_recipe_table(recipe), device=device)

    def __call__(self, step: Tensor, samples: Tensor, sizes: Tensor, rows: Tensor, numbers: Tensor) -> Tensor:
        """For views `numbers` (n,) of images `rows` (n,), which have these sample numbers and sizes."""
        recipe, n = self.recipe, len(rows)
        parameters = torch.empty((n, len(COLUMNS)), device=rows.device)
        _draw[triton.cdiv(n, _VIEWS_PER_PROGRAM),](
            self._table, step, samples, sizes.contiguous(), rows.contiguous(), numbers.contiguous(), parameters, n,
            self.seed, RANDOM_CROP=recipe.random_crop, UPRIGHT=recipe.upright, N=_VIEWS_PER_PROGRAM,
        )  # fmt: skip
        return parameters
