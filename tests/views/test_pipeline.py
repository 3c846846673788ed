"""Whole views: against a plain chain of torchvision's functions, and independent of how they are asked for."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as reference

from jcl.views import ViewMaker, ViewRecipe, center_views, view_recipe
from jcl.views.parameters import ViewParameters, draw_parameters
from jcl.views.pipeline import apply_views

Images = Callable[..., Tensor]

RECIPES = ("moco-v2", "moco-v1", "small", "no-color", "microscopy", "aerial", "none")
ADJUST = [
    reference.adjust_brightness,
    reference.adjust_contrast,
    reference.adjust_saturation,
    reference.adjust_hue,
]

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def reference_view(image: Tensor, recipe: ViewRecipe, drawn: ViewParameters, view: int) -> Tensor:
    """One view, made as the MoCo scripts make it, operation by operation."""
    made = reference.resized_crop(image, *drawn.box[view].tolist(), [recipe.size] * 2, antialias=True)
    if recipe.gray_first and drawn.gray[view]:
        made = reference.rgb_to_grayscale(made, 3)
    if drawn.jitter[view]:
        for operation in drawn.order[view].tolist():
            made = ADJUST[operation](made, float(drawn.factors[view, operation]))
    if not recipe.gray_first and drawn.gray[view]:
        made = reference.rgb_to_grayscale(made, 3)
    if drawn.blur_sigma[view] > 0:
        made = reference.gaussian_blur(made, [17, 17], [float(drawn.blur_sigma[view])] * 2)
    if drawn.flip[view]:
        made = reference.hflip(made)
    if drawn.vertical_flip[view]:
        made = reference.vflip(made)
    if drawn.transpose[view]:
        made = made.mT
    return reference.normalize(made, list(recipe.mean), list(recipe.std))


def maker(pixels: Tensor, name: str = "moco-v2", size: int = 24, **options: object) -> ViewMaker:
    count = len(pixels)
    sizes = torch.tensor(pixels.shape[2:], device=pixels.device).expand(count, 2)
    samples = torch.arange(count, device=pixels.device) * 10
    return ViewMaker(view_recipe(name, size), 1, 2, pixels, sizes, samples, **options)


def rows_and_numbers(count: int, views: int) -> tuple[Tensor, Tensor]:
    return torch.arange(count).repeat_interleave(views), torch.arange(views).repeat(count)


@pytest.mark.parametrize("name", RECIPES)
def test_views_equal_torchvisions_chain(images: Images, name: str) -> None:
    pixels = images(40, 50, 61)
    recipe = view_recipe(name, 24)
    samples = torch.arange(40)
    sizes = torch.tensor([[50, 61], [31, 44], [50, 17], [3, 61]]).repeat(10, 1)
    drawn = draw_parameters(recipe, 0, 1, samples, samples % 3, sizes)
    made = apply_views(pixels, drawn, recipe)
    for view, (height, width) in enumerate(sizes.tolist()):
        image = pixels[view, :, :height, :width].float() / 255
        torch.testing.assert_close(made[view], reference_view(image, recipe, drawn, view), rtol=0, atol=1e-4)


def test_rotations_are_those_of_torch(images: Images) -> None:
    """By one, two and three quarters, of crops that are no squares."""
    pixels, samples = images(60, 50, 61), torch.arange(60)
    plain = view_recipe("none", 24, random_crop=True)
    turned = dataclasses.replace(plain, rotation_probability=1.0)
    sizes = torch.tensor([50, 61]).expand(60, 2)
    before, drawn = (draw_parameters(recipe, 0, 1, samples, samples % 3, sizes) for recipe in (plain, turned))
    expected = apply_views(pixels, before, plain)
    quarters = [(True, False, True), (True, True, False), (False, True, True)]
    found = list(zip(drawn.flip.tolist(), drawn.vertical_flip.tolist(), drawn.transpose.tolist(), strict=True))
    assert set(found) == set(quarters)
    expected = torch.stack([expected[i].rot90(1 + quarters.index(each), (1, 2)) for i, each in enumerate(found)])
    torch.testing.assert_close(apply_views(pixels, drawn, turned), expected, rtol=0, atol=1e-5)


def test_views_of_photographs_are_close_to_those_of_pil(photographs: list[Tensor]) -> None:
    """PIL works on whole levels throughout, so the bound is on the mean."""
    recipe = view_recipe("small", 64, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    for sample, photograph in enumerate(photographs):
        drawn = draw_parameters(
            recipe, 0, 0, torch.tensor([sample]), torch.tensor([0]), torch.tensor([photograph.shape[1:]])
        )
        made = apply_views(photograph[None], drawn, recipe)[0]
        picture = reference.to_pil_image(photograph)
        box = drawn.box[0].tolist()
        picture = reference.resized_crop(picture, *box, [64, 64], Image.Resampling.BILINEAR)
        if drawn.jitter[0]:
            for operation in drawn.order[0].tolist():
                picture = ADJUST[operation](picture, float(drawn.factors[0, operation]))
        if drawn.gray[0]:
            picture = reference.to_grayscale(picture, 3)
        if drawn.flip[0]:
            picture = reference.hflip(picture)
        assert (made - reference.to_tensor(picture)).abs().mean() < 2 / 255


def test_views_do_not_depend_on_how_they_are_asked_for(images: Images) -> None:
    make = maker(images(30, 64, 64), size=64)
    rows, numbers = rows_and_numbers(30, 5)  # more views than are made at a time
    together = make(rows, numbers)
    order = torch.randperm(150, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(make(rows[order], numbers[order]), together[order], rtol=0, atol=1e-6)
    torch.testing.assert_close(make(rows[7:8], numbers[7:8]), together[7:8], rtol=0, atol=1e-6)


def test_views_do_not_depend_on_the_rest_of_the_batch(images: Images) -> None:
    pixels = images(6, 40, 40)
    sizes, samples = torch.full((6, 2), 40), torch.tensor([9, 2, 70, 4, 31, 8])
    recipe = view_recipe("moco-v2", 24)
    whole = ViewMaker(recipe, 5, 1, pixels, sizes, samples)
    part = ViewMaker(recipe, 5, 1, pixels[[4, 2]], sizes[[4, 2]], samples[[4, 2]])
    numbers = torch.tensor([1, 3])
    torch.testing.assert_close(
        part(torch.tensor([0, 1]), numbers), whole(torch.tensor([4, 2]), numbers), rtol=0, atol=1e-6
    )


def test_views_of_one_image_differ(images: Images) -> None:
    pixels = images(1, 40, 40).expand(4, 3, 40, 40)
    rows, numbers = rows_and_numbers(4, 3)
    made = maker(pixels)(rows, numbers)
    for first in range(len(made)):
        for second in range(first):
            assert (made[first] - made[second]).abs().max() > 0.01


def test_equal_words_give_equal_views(images: Images) -> None:
    pixels = images(4, 40, 40)
    rows, numbers = rows_and_numbers(4, 2)
    assert torch.equal(maker(pixels)(rows, numbers), maker(pixels)(rows, numbers))


def test_padding_never_reaches_a_view(images: Images) -> None:
    sizes = torch.tensor([[50, 61], [31, 44], [50, 17], [1, 61], [1, 1], [7, 5]]).repeat(20, 1)
    pixels = images(len(sizes), 50, 61)
    garbage = torch.randint_like(pixels, 0, 256)
    for view, (height, width) in enumerate(sizes.tolist()):
        garbage[view, :, :height, :width] = pixels[view, :, :height, :width]
    samples = torch.arange(len(sizes))
    recipe = view_recipe("moco-v2", 24)
    clean, dirty = (ViewMaker(recipe, 0, 0, canvas, sizes, samples)(samples, samples) for canvas in (pixels, garbage))
    assert torch.equal(clean, dirty)
    clean, dirty = (center_views(canvas, sizes, 24, 0.875) for canvas in (pixels, garbage))
    assert torch.equal(clean, dirty)


def test_an_image_of_one_pixel_gives_a_flat_view() -> None:
    pixels = torch.tensor([200, 30, 90], dtype=torch.uint8).view(1, 3, 1, 1)
    rows, numbers = rows_and_numbers(1, 20)
    made = maker(pixels)(rows, numbers)
    assert made.isfinite().all()
    assert (made.amax(dim=(2, 3)) - made.amin(dim=(2, 3))).max() < 1e-5


def test_no_views_are_an_empty_tensor(images: Images) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert maker(images(2, 40, 40))(none, none).shape == (0, 3, 24, 24)


@pytest.mark.parametrize("name", ["moco-v2", "moco-v1"])
def test_types(images: Images, name: str) -> None:
    pixels = images(8, 40, 40)
    rows, numbers = rows_and_numbers(8, 2)
    expected = maker(pixels, name)(rows, numbers)
    assert expected.dtype == torch.float32
    as_float = maker(pixels.float() / 255, name)(rows, numbers)
    torch.testing.assert_close(as_float, expected, rtol=0, atol=1e-4)
    as_half = maker(pixels.to(torch.bfloat16) / 255, name, dtype=torch.bfloat16)(rows, numbers)
    assert as_half.dtype == torch.bfloat16
    assert (as_half.float() - expected).abs().mean() < 0.02
    out_half = maker(pixels, name, dtype=torch.bfloat16)(rows, numbers)
    assert torch.equal(out_half, expected.to(torch.bfloat16))


@pytest.mark.parametrize("ratio", [1.0, 0.875])
def test_center_views_equal_torchvisions(images: Images, ratio: float) -> None:
    sizes = torch.tensor([[50, 61], [31, 44], [50, 17], [61, 61]])
    pixels = images(4, 61, 61)
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    made = center_views(pixels, sizes, 28, ratio, mean, std)
    for view, (height, width) in enumerate(sizes.tolist()):
        image = pixels[view, :, :height, :width].float() / 255
        resized = reference.resize(image, [round(28 / ratio)], antialias=True)
        expected = reference.normalize(reference.center_crop(resized, [28, 28]), mean, std)
        torch.testing.assert_close(made[view], expected, rtol=0, atol=1e-4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", RECIPES)
def test_the_gpu_makes_the_same_views(images: Images, name: str) -> None:
    make = maker(images(16, 40, 40), name)
    rows, numbers = rows_and_numbers(16, 4)
    drawn = draw_parameters(make.recipe, make.seed, make.step, make.samples[rows], numbers, make.sizes[rows])
    names = {field.name for field in dataclasses.fields(drawn)} - {"channels", "noise_key"}
    on_gpu = ViewParameters(**{name: getattr(drawn, name).cuda() for name in names})
    views = apply_views(make.pixels.cuda(), on_gpu, make.recipe, rows=rows.cuda())
    assert views.is_contiguous(memory_format=torch.channels_last)
    error = (views.cpu() - make(rows, numbers)).abs().max() * max(make.recipe.std)
    assert error < 2 / 255


@pytest.mark.gpu
@needs_gpu
def test_the_gpu_draws_the_same_parameters() -> None:
    samples = torch.arange(10_000)
    words = (samples, samples % 6, samples[:, None] % torch.tensor([97, 89]) + 1)
    recipe = view_recipe("moco-v2", 32)
    on_cpu = draw_parameters(recipe, 0, 1, *words)
    on_gpu = draw_parameters(recipe, 0, 1, *(word.cuda() for word in words))
    assert torch.equal(on_gpu.order.cpu(), on_cpu.order)
    torch.testing.assert_close(on_gpu.factors.cpu(), on_cpu.factors)
    # Sizes are rounded to whole pixels, and the last bit of a square root may tip one of them over.
    assert (on_gpu.box.cpu() != on_cpu.box).any(dim=1).float().mean() < 1e-3


@pytest.mark.gpu
@needs_gpu
def test_nothing_waits_for_the_gpu(images: Images) -> None:
    make = maker(images(16, 40, 40).cuda())
    rows, numbers = (each.cuda() for each in rows_and_numbers(16, 4))
    expected = make(rows, numbers)
    torch.cuda.set_sync_debug_mode("error")  # any wait for the device now raises
    try:
        views = make(rows, numbers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(views, expected)
