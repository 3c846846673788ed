"""Views of images with any number of channels, against a reference in float64."""

import math
from statistics import NormalDist

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jcl.errors import SettingsError
from jcl.random import normals
from jcl.views import ViewRecipe, as_rgb, view_recipe
from jcl.views.parameters import ViewParameters, draw_parameters
from jcl.views.pipeline import apply_views

VIEWS = 16


def recipe_for(channels: int, **changes: object) -> ViewRecipe:
    mean = tuple(100.0 * channel - 300 for channel in range(channels))
    std = tuple(50.0 + 10 * channel for channel in range(channels))
    return view_recipe("moco-v2", 20, mean=mean, std=std, color=False, **changes)


def images(recipe: ViewRecipe) -> tuple[Tensor, Tensor]:
    """Float images like those of a CT or a microscope, with values far beyond 0..1."""
    noise = torch.randn(4, len(recipe.mean), 30, 34, generator=torch.Generator().manual_seed(1))
    values = torch.tensor(recipe.mean)[:, None, None] + torch.tensor(recipe.std)[:, None, None] * noise
    return values, torch.tensor([[30, 34], [30, 20], [22, 34], [24, 24]])


def reference(image: Tensor, parameters: ViewParameters, row: int, recipe: ViewRecipe) -> Tensor:
    """One view in float64, step by step."""
    assert parameters.channels is not None and parameters.noise_key is not None
    top, left, height, width = parameters.box[row].tolist()
    crop = image.double()[None, :, top : top + height, left : left + width]
    view = F.interpolate(crop, size=(recipe.size,) * 2, mode="bilinear", antialias=True)[0]
    view = view.flip(2) if parameters.flip[row] else view
    if sigma := float(parameters.blur_sigma[row]):
        bell = torch.exp(-0.5 * (torch.arange(-8, 9, dtype=torch.float64) / sigma) ** 2)
        padded = F.pad(view[:, None], (8, 8, 8, 8), mode="reflect")
        view = F.conv2d(F.conv2d(padded, (bell / bell.sum()).view(1, 1, 1, 17)), (bell / bell.sum()).view(1, 1, 17, 1))
        view = view[:, 0]
    count = len(recipe.mean)
    view = (view - torch.tensor(recipe.mean)[:, None, None]) / torch.tensor(recipe.std)[:, None, None]
    changes = parameters.channels[row].double()
    shift, factor, noise = changes[:count, None, None], changes[count:-1, None, None], changes[-1]
    mean = view.mean(dim=(1, 2), keepdim=True)
    drawn = normals(parameters.noise_key[row : row + 1], view.numel()).view(view.shape)
    return mean + factor * (view - mean) + shift + noise * drawn


@pytest.mark.parametrize("channels", [1, 2, 7])
def test_views_of_any_number_of_channels_are_exact(channels: int):
    recipe = recipe_for(channels)
    pixels, sizes = images(recipe)
    rows, numbers = torch.arange(VIEWS) % 4, torch.arange(VIEWS) // 4
    parameters = draw_parameters(recipe, 3, 17, rows, numbers, sizes[rows])
    found = apply_views(pixels, parameters, recipe, rows=rows)
    wanted = torch.stack([reference(pixels[rows[view]], parameters, view, recipe) for view in range(VIEWS)])
    assert found.shape == (VIEWS, channels, 20, 20)
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=2e-5)


def test_each_channel_changes_by_itself_within_the_strengths():
    recipe = recipe_for(3, brightness=0.3, contrast=0.2, noise=0.05, jitter_probability=0.5)
    samples = torch.arange(2000)
    drawn = draw_parameters(recipe, 0, 0, samples, samples * 0, torch.full((2000, 2), 30))
    assert drawn.channels is not None
    jittered, still = drawn.channels[drawn.jitter], drawn.channels[~drawn.jitter]
    assert 900 < len(jittered) < 1100 and torch.equal(
        still, torch.tensor([[0.0] * 3 + [1.0] * 3 + [0.0]]).expand_as(still)
    )
    for columns, low, high in ((slice(0, 3), -0.3, 0.3), (slice(3, 6), 0.8, 1.2), (slice(6, 7), 0.0, 0.05)):
        values = jittered[:, columns]
        assert low <= values.min() < low + 0.01 and high - 0.01 < values.max() <= high
    assert torch.corrcoef(jittered.T).fill_diagonal_(0).abs().max() < 0.15


def test_noise_is_normal_and_belongs_to_the_view():
    keys = torch.tensor([5, -7, 5])
    drawn = normals(keys, 50_000)
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])
    assert abs(float(drawn[0].mean())) < 0.02 and abs(float(drawn[0].std()) - 1) < 0.02
    shares = [float((drawn[0] < value).double().mean()) for value in (-2.0, -1.0, 0.5, 1.5)]
    assert shares == pytest.approx([NormalDist().cdf(value) for value in (-2.0, -1.0, 0.5, 1.5)], abs=0.01)
    assert drawn.isfinite().all() and math.isclose(float(drawn[0, :7].sum()), float(normals(keys, 7)[0].sum()))


def test_bytes_of_five_channels_are_scaled_to_0_to_1():
    recipe = view_recipe("none", 20, mean=(0.0,) * 5, std=(1.0,) * 5, color=False)
    pixels = torch.randint(0, 256, (2, 5, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(2)
    parameters = draw_parameters(recipe, 0, 0, rows, rows, torch.full((2, 2), 20))
    torch.testing.assert_close(apply_views(pixels, parameters, recipe), pixels / 255, rtol=0, atol=1e-6)


def test_color_needs_three_channels():
    with pytest.raises(SettingsError, match="three channels"):
        view_recipe("moco-v2", 20, mean=(0.5,), std=(0.5,))


def test_images_to_look_at_are_rgb():
    photograph = torch.randint(0, 256, (3, 8, 9), dtype=torch.uint8)
    assert as_rgb(photograph) is photograph
    for channels in (1, 2, 5):
        shown = as_rgb(torch.rand(channels, 8, 9) * 1000 - 500)
        assert shown.shape == (3, 8, 9) and shown.dtype == torch.uint8
        assert bool(shown[2].any()) == (channels != 2) and (channels > 1 or torch.equal(shown[0], shown[2]))
    white = as_rgb(torch.tensor([[[-2.0, 1.0, 4.0]]]), [0.0], [1.0])
    assert white[0, 0].tolist() == [0, 128, 255]
