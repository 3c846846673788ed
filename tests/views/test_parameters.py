"""The draws: distributed as torchvision's, one per view, and independent of everything but what names the view."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torchvision.transforms import RandomResizedCrop

from jcl.views import ViewRecipe, view_recipe
from jcl.views.parameters import ViewParameters, draw_parameters

COUNT = 20_000


def draw(recipe: ViewRecipe, count: int = COUNT, size: tuple[int, int] = (48, 64), **words: int) -> ViewParameters:
    samples = torch.arange(count)
    sizes = torch.tensor([size]).expand(count, 2)
    return draw_parameters(recipe, words.get("seed", 0), words.get("step", 3), samples, torch.ones_like(samples), sizes)


def assert_frequency(happened: Tensor, probability: float) -> None:
    deviation = math.sqrt(probability * (1 - probability) / len(happened))
    assert abs(float(happened.double().mean()) - probability) <= 5 * deviation


def assert_uniform(values: Tensor, low: float, high: float) -> None:
    """By the Kolmogorov-Smirnov distance, at five standard deviations."""
    assert values.min() >= low - 1e-6
    assert values.max() <= high + 1e-6
    ranks = (torch.arange(len(values)) + 0.5) / len(values)
    distance = float(((values.sort().values - low) / (high - low) - ranks).abs().max())
    assert distance < 2.74 / math.sqrt(len(values))


def assert_same_distribution(ours: Tensor, theirs: Tensor) -> None:
    """Two-sample Kolmogorov-Smirnov at five standard deviations."""
    grid = torch.cat((ours, theirs)).unique()
    shares = [
        torch.searchsorted(values.sort().values, grid, right=True).double() / len(values) for values in (ours, theirs)
    ]
    assert float((shares[0] - shares[1]).abs().max()) < 2.74 * math.sqrt(1 / len(ours) + 1 / len(theirs))


@pytest.mark.parametrize("size", [(48, 64), (32, 32), (20, 200), (5, 3)])
def test_boxes_are_distributed_as_torchvisions(size: tuple[int, int]) -> None:
    recipe = view_recipe("moco-v2", 32)
    ours = draw(recipe, size=size).box
    torch.manual_seed(0)
    image = torch.zeros(3, *size)
    theirs = torch.tensor([RandomResizedCrop.get_params(image, [0.2, 1.0], [3 / 4, 4 / 3]) for _ in range(1500)])
    for column in range(4):
        assert_same_distribution(ours[:, column].double(), theirs[:, column].double())
    assert_same_distribution(ours[:, 2:].prod(dim=1).double(), theirs[:, 2:].prod(dim=1).double())
    assert_same_distribution((ours[:, 3] / ours[:, 2]).double(), (theirs[:, 3] / theirs[:, 2]).double())


@pytest.mark.parametrize(
    ("size", "box"),
    [((10, 100), [0, 43, 10, 13]), ((100, 10), [43, 0, 13, 10]), ((30, 30), [0, 0, 30, 30]), ((1, 9), [0, 4, 1, 1])],
)
def test_where_no_attempt_fits_the_crop_is_centered(size: tuple[int, int], box: list[int]) -> None:
    whole = view_recipe("moco-v2", 32, min_scale=1.0)
    if size == (30, 30):  # the whole area fits a square image only in a square, which no ratio here is
        whole = dataclasses.replace(whole, ratio=(1.2, 1.2))
        box = [2, 0, 25, 30]
    assert draw(whole, count=50, size=size).box.unique(dim=0).tolist() == [box]


def test_boxes_lie_inside_images_of_every_size() -> None:
    count = 5000
    sizes = torch.randint(1, 40, (count, 2), generator=torch.Generator().manual_seed(0))
    samples = torch.arange(count)
    box = draw_parameters(view_recipe("moco-v2", 32), 0, 0, samples, samples, sizes).box
    assert (box[:, :2] >= 0).all()
    assert (box[:, 2:] >= 1).all()
    assert (box[:, :2] + box[:, 2:] <= sizes).all()


def test_probabilities() -> None:
    drawn = draw(view_recipe("moco-v2", 32))
    assert_frequency(drawn.flip, 0.5)
    assert_frequency(drawn.jitter, 0.8)
    assert_frequency(drawn.gray, 0.2)
    assert_frequency(drawn.blur_sigma > 0, 0.5)
    # Independent of each other: how often two happen together is the product.
    assert_frequency(drawn.flip & drawn.jitter, 0.4)
    assert_frequency(drawn.gray & (drawn.blur_sigma > 0), 0.1)


def test_orientations() -> None:
    drawn = draw(view_recipe("none", 32, vertical_flip_probability=0.3))
    assert_frequency(drawn.vertical_flip, 0.3)
    assert not (drawn.flip | drawn.transpose).any()
    for recipe, probability in (
        (view_recipe("none", 32, rotation_probability=0.6), {"000": 0.4, "101": 0.2, "110": 0.2, "011": 0.2}),
        (view_recipe("microscopy", 32), {f"{number:03b}": 1 / 8 for number in range(8)}),
    ):
        drawn = draw(recipe)
        found = 4 * drawn.flip + 2 * drawn.vertical_flip + drawn.transpose.long()
        assert {f"{number:03b}" for number in found.unique().tolist()} == set(probability)
        for name, share in probability.items():
            assert_frequency(found == int(name, 2), share)


def test_the_draws_of_a_view_stay_the_same() -> None:
    """Runs resume exactly with a later version: new operations draw after the old ones."""
    drawn = draw(view_recipe("moco-v2", 32, solarize_probability=0.5), count=4)
    assert drawn.box.tolist() == [[20, 36, 25, 25], [5, 2, 39, 40], [3, 4, 29, 34], [3, 21, 27, 23]]
    assert drawn.order.tolist() == [[0, 1, 2, 3], [1, 2, 3, 0], [1, 3, 2, 0], [3, 0, 2, 1]]
    assert drawn.flip.tolist() == [False, True, False, False]
    assert drawn.solarize.tolist() == [False, True, False, True]
    turned = draw(view_recipe("moco-v2", 32, vertical_flip_probability=0.5, rotation_probability=0.75))
    upright = draw(view_recipe("moco-v2", 32))
    for field in dataclasses.fields(ViewParameters):
        if field.name not in ("flip", "vertical_flip", "transpose", "channels", "noise_key"):
            assert torch.equal(getattr(turned, field.name), getattr(upright, field.name)), field.name


def test_certain_and_impossible_events() -> None:
    first = draw(view_recipe("moco-v1", 32))
    assert first.jitter.all()
    assert (first.blur_sigma == 0).all()
    plain = draw(view_recipe("none", 32))
    assert not (plain.flip | plain.jitter | plain.gray | (plain.blur_sigma > 0)).any()


def test_factors_are_uniform_over_torchvisions_ranges() -> None:
    drawn = draw(view_recipe("moco-v2", 32, contrast=0.7, saturation=1.5))
    for factors, limits in zip(drawn.factors.T, [(0.6, 1.4), (0.3, 1.7), (0.0, 2.5), (-0.1, 0.1)], strict=True):
        assert_uniform(factors, *limits)
    assert_uniform(drawn.blur_sigma[drawn.blur_sigma > 0], 0.1, 2.0)


def test_every_order_is_equally_likely() -> None:
    order = draw(view_recipe("moco-v2", 32)).order
    assert torch.equal(order.sort(dim=1).values, torch.arange(4).expand(COUNT, 4))
    _, counts = order.unique(dim=0, return_counts=True)
    assert len(counts) == 24
    expected = COUNT / 24
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 23 + 5 * math.sqrt(2 * 23)


def test_without_random_crop_the_box_is_the_largest_centered_square() -> None:
    recipe = view_recipe("none", 32)
    assert draw(recipe, count=2, size=(40, 61)).box.tolist() == [[0, 10, 40, 40]] * 2


def test_draws_belong_to_the_view_and_not_to_the_batch() -> None:
    recipe = view_recipe("moco-v2", 32)
    samples = torch.tensor([4, 8, 15, 16, 23, 4])
    numbers = torch.tensor([0, 1, 2, 3, 4, 5])
    sizes = torch.tensor([[30, 40], [20, 20], [50, 12], [9, 9], [31, 77], [30, 40]])
    together = draw_parameters(recipe, 7, 2, samples, numbers, sizes)
    order = torch.tensor([5, 2, 0])
    apart = draw_parameters(recipe, 7, 2, samples[order], numbers[order], sizes[order])
    for field in dataclasses.fields(ViewParameters):
        if field.name not in ("channels", "noise_key"):  # None with color
            assert torch.equal(getattr(together[order], field.name), getattr(apart, field.name)), field.name


@pytest.mark.parametrize("changed", ["seed", "step", "samples", "numbers"])
def test_draws_change_with_each_word(changed: str) -> None:
    words = {"seed": 1, "step": 1, "samples": torch.arange(100), "numbers": torch.zeros(100, dtype=torch.int64)}
    other = {**words, changed: words[changed] + 1}
    recipe, sizes = view_recipe("moco-v2", 32), torch.full((100, 2), 64)
    first, second = (draw_parameters(recipe, **each, sizes=sizes) for each in (words, other))
    assert ((first.factors - second.factors).abs() > 1e-6).any(dim=1).all()
    assert (first.box != second.box).any(dim=1).float().mean() > 0.9


def test_two_samples_of_a_batch_differ() -> None:
    drawn = draw(view_recipe("moco-v2", 32), count=200)
    assert all(len(factors.unique()) == 200 for factors in drawn.factors.T)
