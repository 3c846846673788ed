"""The Triton kernels against the views of the pipeline; without a GPU `test_triton.py` runs these tests."""

import pytest
import torch

from jcl.views import ViewMaker, view_recipe
from jcl.views.parameters import draw_parameters
from kernel_tools import DEVICE, INTERPRETED, needs_kernels

pytest.importorskip("triton")


def batch(height: int, width: int, channels: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (5, channels, height, width), dtype=torch.uint8, generator=generator)
    sizes = torch.tensor([[height, width], [height, width // 2], [height // 3, width], [3, 5], [1, 1]])
    return pixels, sizes


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("name", ["moco-v2", "aerial", "none"])
def test_parameters_are_those_of_the_pipeline(name):
    from jcl.views.draw_kernel import COLUMNS, ParameterDraws

    recipe = view_recipe(name, 16, solarize_probability=0.3)
    images = 100 if INTERPRETED else 300  # more views than one program draws
    rows, numbers = torch.arange(2 * images) % images, torch.arange(2 * images) // images
    sizes = torch.stack((torch.arange(images) % 97 + 1, torch.arange(images) % 89 + 1), dim=1)
    samples, step = torch.arange(images) * 7919, torch.tensor(2**33)
    wanted = draw_parameters(recipe, 12345, step, samples[rows], numbers, sizes[rows])
    words = (value.to(DEVICE) for value in (step, samples, sizes, rows, numbers))
    packed = ParameterDraws(recipe, 12345, DEVICE)(*words).cpu()
    found = dict(zip(COLUMNS, packed.unbind(1), strict=True))
    # Sizes are rounded to whole pixels, and the last bit of a square root may tip one of them over.
    assert (packed[:, :4] != wanted.box).any(dim=1).float().mean() < 5e-3
    assert torch.equal(found["turn"], wanted.flip + 2.0 * wanted.vertical_flip + 4 * wanted.transpose)
    for name in ("jitter", "gray", "solarize"):
        assert torch.equal(found[name], getattr(wanted, name).float())
    assert torch.equal(packed[:, 10:14].argsort(dim=1), wanted.order)
    torch.testing.assert_close(found["sigma"], wanted.blur_sigma, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(packed[:, 6:10], wanted.factors, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize(
    ("name", "size", "height", "width", "changes"),
    [
        ("small", 8, 8, 8, {}),
        ("moco-v2", 12, 50, 41, {}),
        ("moco-v2", 17, 12, 9, {}),
        ("moco-v1", 10, 24, 24, {}),
        ("aerial", 8, 30, 33, {}),
        ("microscopy", 9, 20, 20, {"solarize_probability": 0.5}),
        ("no-color", 8, 20, 20, {}),
        ("none", 8, 20, 31, {}),
    ],
)
def test_views_are_those_of_the_pipeline(name, size, height, width, changes):
    if INTERPRETED and (name, size) not in (("moco-v2", 17), ("moco-v1", 10), ("microscopy", 9)):
        pytest.skip("slow in the interpreter")
    check_views(view_recipe(name, size, **changes), *batch(height, width))


@pytest.mark.gpu
@needs_kernels
@pytest.mark.parametrize("channels", [1, 5])
def test_views_of_any_number_of_channels(channels, monkeypatch):
    if INTERPRETED:
        if channels == 1:
            pytest.skip("slow in the interpreter")
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    values = {"mean": (0.4,) * channels, "std": (0.3,) * channels, "color": False, "blur_sigma": (0.1, 0.7)}
    pixels, sizes = batch(9, 12, channels)
    check_views(view_recipe("microscopy", 6, **values), pixels.float() / 255, sizes)


def check_views(recipe, pixels, sizes):
    from jcl.views.kernels import FusedViews

    count = 6 if INTERPRETED else 200
    rows, numbers, samples = torch.arange(count) % 5, torch.arange(count) // 5, torch.arange(5) + 3
    step = torch.tensor(9)
    wanted = ViewMaker(recipe, 4, step, pixels, sizes, samples)(rows, numbers)
    words = (value.to(DEVICE) for value in (step, pixels, sizes, samples, rows, numbers))
    found = FusedViews(recipe, 4, DEVICE, torch.float32)(*words)
    assert found.shape == wanted.shape and found.is_contiguous(memory_format=torch.channels_last)
    limit = 2e-5 if pixels.is_floating_point() else 1 / 500  # half precision
    assert ((found.cpu() - wanted).abs() * max(recipe.std) < limit).float().mean() > 0.99  # crops may differ by a pixel
