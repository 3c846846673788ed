"""Each color change against torchvision's function of the same factor, alone and in every order."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torchvision.transforms import functional as reference

from jcl.views import IMAGENET_MEAN, IMAGENET_STD, denormalize
from jcl.views.color import blend, gray_blends, jitter_colors, normalize, shift_hue, solarize, to_gray
from jcl.views.parameters import ViewParameters

Images = Callable[..., Tensor]

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
        factors=factors,
    )


def random_factors(count: int) -> Tensor:
    """Strong ones, so that values are clamped at both ends."""
    drawn = torch.rand(count, 4, generator=torch.Generator().manual_seed(3)) * 2
    drawn[:, 3] = drawn[:, 3] / 2 - 0.5
    return drawn


@pytest.fixture
def colorful(images: Images) -> Tensor:
    """Images in 0..1 that also hold the colors where formulas for the hue have their corners."""
    batch = images(24, 20, 18).float() / 255
    corners = torch.tensor(list(itertools.product((0.0, 0.5, 1.0), repeat=3)))  # (27, 3)
    batch[:, :, 0, :18] = corners[:18].T
    batch[:, :, 1, :9] = corners[18:].T
    return batch


@pytest.mark.parametrize("operation", range(4))
def test_one_operation_equals_torchvisions(colorful: Tensor, operation: int) -> None:
    neutral = torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat(len(colorful), 1)
    neutral[:, operation] = random_factors(len(colorful))[:, operation]
    order = torch.arange(4).repeat(len(colorful), 1)
    changed = jitter_colors(colorful, parameters(neutral, order))
    for image, result, factors in zip(colorful, changed, neutral.tolist(), strict=True):
        torch.testing.assert_close(result, ADJUST[operation](image, factors[operation]), rtol=0, atol=1e-5)


def test_every_order_equals_torchvisions_functions_one_after_the_other(colorful: Tensor) -> None:
    order = torch.tensor(list(itertools.permutations(range(4))))
    factors = random_factors(24)
    changed = jitter_colors(colorful, parameters(factors, order))
    for view in range(24):
        expected = colorful[view]
        for operation in order[view].tolist():
            expected = ADJUST[operation](expected, float(factors[view, operation]))
        torch.testing.assert_close(changed[view], expected, rtol=0, atol=1e-5)


def test_every_order_holds_in_float64(colorful: Tensor) -> None:
    """Tight where torchvision too computes in float64, that is for all but the hue."""
    order = torch.tensor(list(itertools.permutations(range(4))))
    factors = random_factors(24).double()
    factors[:, 3] = 0
    changed = jitter_colors(colorful.double(), parameters(factors, order))
    for view in range(24):
        expected = colorful[view].double()
        for operation in order[view].tolist():
            if operation != 3:
                expected = ADJUST[operation](expected, float(factors[view, operation]))
        torch.testing.assert_close(changed[view], expected, rtol=0, atol=1e-13)


def test_where_jitter_was_not_drawn_the_image_stays(colorful: Tensor) -> None:
    order = torch.tensor(list(itertools.permutations(range(4))))
    drawn = torch.arange(24) % 2 == 0
    changed = jitter_colors(colorful, parameters(random_factors(24), order, drawn))
    torch.testing.assert_close(changed[~drawn], colorful[~drawn], rtol=0, atol=1e-6)
    assert (changed[drawn] - colorful[drawn]).abs().amax(dim=(1, 2, 3)).min() > 0.05


@pytest.mark.parametrize("turns", [-0.5, -0.4, -0.1, 0.0, 1 / 6, 0.25, 0.5])
def test_hue(colorful: Tensor, turns: float) -> None:
    shifted = shift_hue(colorful, torch.full((24,), turns))
    torch.testing.assert_close(shifted, reference.adjust_hue(colorful, turns), rtol=0, atol=1e-5)
    torch.testing.assert_close(shifted.amax(dim=1), colorful.amax(dim=1))
    torch.testing.assert_close(shifted.amin(dim=1), colorful.amin(dim=1), rtol=0, atol=1e-6)


def test_a_third_of_a_turn_moves_the_channels_on(colorful: Tensor) -> None:
    shifted = shift_hue(colorful.double(), torch.full((24,), 1 / 3, dtype=torch.float64))
    torch.testing.assert_close(shifted, colorful.double().roll(1, dims=1), rtol=0, atol=1e-12)


def test_gray_equals_torchvisions(colorful: Tensor) -> None:
    torch.testing.assert_close(to_gray(colorful), reference.rgb_to_grayscale(colorful))
    gray = torch.arange(24) % 3 == 0
    changed = blend(colorful, gray_blends(gray))
    expected = torch.where(gray[:, None, None, None], reference.rgb_to_grayscale(colorful, 3), colorful)
    torch.testing.assert_close(changed, expected, rtol=0, atol=1e-6)


def test_values_stay_between_0_and_1(colorful: Tensor) -> None:
    order = torch.tensor(list(itertools.permutations(range(4))))
    changed = jitter_colors(colorful, parameters(random_factors(24) * 3, order))
    assert changed.min() >= -1e-6
    assert changed.max() <= 1 + 1e-6


def test_the_images_given_are_left_alone(colorful: Tensor) -> None:
    before = colorful.clone()
    order = torch.tensor(list(itertools.permutations(range(4))))
    jitter_colors(colorful, parameters(random_factors(24), order))
    assert torch.equal(colorful, before)


def test_normalize_equals_torchvisions() -> None:
    images = torch.rand(4, 3, 5, 6)
    expected = reference.normalize(images, list(IMAGENET_MEAN), list(IMAGENET_STD))
    torch.testing.assert_close(normalize(images, IMAGENET_MEAN, IMAGENET_STD), expected)


def test_pictures_come_back_exactly() -> None:
    pictures = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    views = normalize(pictures / 255, IMAGENET_MEAN, IMAGENET_STD)
    assert torch.equal(denormalize(views, IMAGENET_MEAN, IMAGENET_STD), pictures)


def test_values_outside_the_range_are_clamped() -> None:
    views = torch.tensor([-50.0, 50.0]).view(1, 1, 1, 2).expand(1, 3, 1, 2)
    assert denormalize(views, IMAGENET_MEAN, IMAGENET_STD)[0, 0, 0].tolist() == [0, 255]


def test_solarize_equals_torchvisions_where_it_is_chosen(colorful: Tensor) -> None:
    chosen = torch.arange(len(colorful)) % 2 == 0
    changed = solarize(colorful, chosen[:, None, None, None])
    torch.testing.assert_close(changed[chosen], reference.solarize(colorful[chosen], 0.5))
    assert torch.equal(changed[~chosen], colorful[~chosen])
