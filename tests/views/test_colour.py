"""Each color change against torchvision's function of the same factor, alone and in every order."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchvision.transforms import functional as reference

from jcl.views import IMAGENET_MEAN, IMAGENET_STD, denormalise
from jcl.views.colour import blend, change_colours, gray_blends, jitter_change, normalise, shift_hue, solarize, to_gray
from jcl.views.parameters import ViewParameters

Images = Callable[..., Tensor]

NAMES = ("brightness", "contrast", "saturation", "hue")
ADJUST = [
    reference.adjust_brightness,
    reference.adjust_contrast,
    reference.adjust_saturation,
    reference.adjust_hue,
]


def parameters(factors: Tensor, order: Tensor, jitter: Tensor | None = None) -> ViewParameters:
    """Only jitter, with the given factors (n, 4) in the given order (n, 4)."""
    count = len(factors)
    never = torch.zeros(count, dtype=torch.bool)
    return ViewParameters(
        box=torch.ones(count, 4, dtype=torch.int64),
        flip=never,
        vertical_flip=never,
        transpose=never,
        jitter=~never if jitter is None else jitter,
        order=order,
        gray=never,
        blur_sigma=torch.zeros(count),
        solarize=never,
        **dict(zip(NAMES, factors.unbind(dim=1), strict=True)),
    )


def random_factors(count: int) -> Tensor:
    """Strong ones, so that values are clamped at both ends."""
    drawn = torch.rand(count, 4, generator=torch.Generator().manual_seed(3)) * 2
    drawn[:, 3] = drawn[:, 3] / 2 - 0.5
    return drawn


@pytest.fixture
def colourful(images: Images) -> Tensor:
    """Images in 0..1 that also hold the colors where formulas for the hue have their corners."""
    batch = images(24, 20, 18).float() / 255
    corners = torch.tensor(list(itertools.product((0.0, 0.5, 1.0), repeat=3)))  # (27, 3)
    batch[:, :, 0, :18] = corners[:18].T
    batch[:, :, 1, :9] = corners[18:].T
    return batch


@pytest.mark.parametrize("operation", range(4))
def test_one_operation_equals_torchvisions(colourful: Tensor, operation: int) -> None:
    neutral = torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat(len(colourful), 1)
    neutral[:, operation] = random_factors(len(colourful))[:, operation]
    order = torch.arange(4).repeat(len(colourful), 1)
    changed = change_colours(colourful, jitter_change(parameters(neutral, order)))
    for image, result, factors in zip(colourful, changed, neutral.tolist(), strict=True):
        torch.testing.assert_close(result, ADJUST[operation](image, factors[operation]), rtol=0, atol=1e-5)


def test_every_order_equals_torchvisions_functions_one_after_the_other(colourful: Tensor) -> None:
    order = torch.tensor(list(itertools.permutations(range(4))))
    factors = random_factors(24)
    changed = change_colours(colourful, jitter_change(parameters(factors, order)))
    for view in range(24):
        expected = colourful[view]
        for operation in order[view].tolist():
            expected = ADJUST[operation](expected, float(factors[view, operation]))
        torch.testing.assert_close(changed[view], expected, rtol=0, atol=1e-5)


def test_every_order_holds_in_float64(colourful: Tensor) -> None:
    """Tight where torchvision too computes in float64, that is for all but the hue."""
    order = torch.tensor(list(itertools.permutations(range(4))))
    factors = random_factors(24).double()
    factors[:, 3] = 0
    changed = change_colours(colourful.double(), jitter_change(parameters(factors, order)))
    for view in range(24):
        expected = colourful[view].double()
        for operation in order[view].tolist():
            if operation != 3:
                expected = ADJUST[operation](expected, float(factors[view, operation]))
        torch.testing.assert_close(changed[view], expected, rtol=0, atol=1e-13)


def test_where_jitter_was_not_drawn_the_image_stays(colourful: Tensor) -> None:
    order = torch.tensor(list(itertools.permutations(range(4))))
    drawn = torch.arange(24) % 2 == 0
    changed = change_colours(colourful, jitter_change(parameters(random_factors(24), order, drawn)))
    torch.testing.assert_close(changed[~drawn], colourful[~drawn], rtol=0, atol=1e-6)
    assert (changed[drawn] - colourful[drawn]).abs().amax(dim=(1, 2, 3)).min() > 0.05


@pytest.mark.parametrize("turns", [-0.5, -0.4, -0.1, 0.0, 1 / 6, 0.25, 0.5])
def test_hue(colourful: Tensor, turns: float) -> None:
    shifted = shift_hue(colourful, torch.full((24,), turns))
    torch.testing.assert_close(shifted, reference.adjust_hue(colourful, turns), rtol=0, atol=1e-5)
    torch.testing.assert_close(shifted.amax(dim=1), colourful.amax(dim=1))
    torch.testing.assert_close(shifted.amin(dim=1), colourful.amin(dim=1), rtol=0, atol=1e-6)


def test_a_third_of_a_turn_moves_the_channels_on(colourful: Tensor) -> None:
    shifted = shift_hue(colourful.double(), torch.full((24,), 1 / 3, dtype=torch.float64))
    torch.testing.assert_close(shifted, colourful.double().roll(1, dims=1), rtol=0, atol=1e-12)


def test_gray_equals_torchvisions(colourful: Tensor) -> None:
    torch.testing.assert_close(to_gray(colourful), reference.rgb_to_grayscale(colourful))
    gray = torch.arange(24) % 3 == 0
    changed = blend(colourful, gray_blends(gray))
    expected = torch.where(gray[:, None, None, None], reference.rgb_to_grayscale(colourful, 3), colourful)
    torch.testing.assert_close(changed, expected, rtol=0, atol=1e-6)


def test_values_stay_between_0_and_1(colourful: Tensor) -> None:
    order = torch.tensor(list(itertools.permutations(range(4))))
    changed = change_colours(colourful, jitter_change(parameters(random_factors(24) * 3, order)))
    assert changed.min() >= -1e-6
    assert changed.max() <= 1 + 1e-6


def test_the_images_given_are_left_alone(colourful: Tensor) -> None:
    before = colourful.clone()
    order = torch.tensor(list(itertools.permutations(range(4))))
    change_colours(colourful, jitter_change(parameters(random_factors(24), order)))
    assert torch.equal(colourful, before)


def test_normalise_equals_torchvisions() -> None:
    images = torch.rand(4, 3, 5, 6)
    expected = reference.normalize(images, list(IMAGENET_MEAN), list(IMAGENET_STD))
    torch.testing.assert_close(normalise(images, IMAGENET_MEAN, IMAGENET_STD), expected)


def test_pictures_come_back_exactly() -> None:
    pictures = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    views = normalise(pictures / 255, IMAGENET_MEAN, IMAGENET_STD)
    assert torch.equal(denormalise(views, IMAGENET_MEAN, IMAGENET_STD), pictures)


def test_values_outside_the_range_are_clamped() -> None:
    views = torch.tensor([-50.0, 50.0]).view(1, 1, 1, 2).expand(1, 3, 1, 2)
    assert denormalise(views, IMAGENET_MEAN, IMAGENET_STD)[0, 0, 0].tolist() == [0, 255]


def test_solarize_equals_torchvisions_where_it_is_chosen(colourful: Tensor) -> None:
    chosen = torch.arange(len(colourful)) % 2 == 0
    changed = solarize(colourful, chosen[:, None, None, None])
    torch.testing.assert_close(changed[chosen], reference.solarize(colourful[chosen], 0.5))
    assert torch.equal(changed[~chosen], colourful[~chosen])
