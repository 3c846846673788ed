import pytest
import torch

from jcl.views import view_recipe
from jcl.views.fused import blur_matrix, fused_views
from jcl.views.parameters import draw_parameters
from jcl.views.pipeline import apply_views
from jcl.views.resize import blur, blur_taps


def batch(canvas: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (5, 3, canvas, canvas), dtype=torch.uint8, generator=generator)
    sizes = torch.tensor([[canvas, canvas], [canvas, canvas // 2], [canvas // 3, canvas], [7, 9], [1, 1]])
    return pixels, sizes


@pytest.mark.parametrize(
    ("name", "size", "canvas"),
    [("moco-v2", 24, 40), ("moco-v1", 24, 24), ("small", 16, 60), ("microscopy", 24, 40), ("aerial", 16, 60)],
)
def test_equals_the_views_of_the_pipeline(name, size, canvas):
    pixels, sizes = batch(canvas)
    recipe = view_recipe(name, size)
    rows = torch.arange(200) % len(pixels)
    numbers = torch.arange(200) // len(pixels)
    parameters = draw_parameters(recipe, 3, 17, rows, numbers, sizes[rows])
    wanted = apply_views(pixels, parameters, recipe, rows=rows)
    found = fused_views(pixels, rows, parameters, recipe)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)


def test_no_draws_at_all():
    pixels, sizes = batch(32)
    recipe = view_recipe("none", 16)
    rows = torch.arange(len(pixels))
    parameters = draw_parameters(recipe, 3, 17, rows, rows * 0, sizes)
    found = fused_views(pixels, rows, parameters, recipe)
    torch.testing.assert_close(found, apply_views(pixels, parameters, recipe), rtol=0, atol=1e-5)


def test_blur_matrix_is_the_blur_with_reflected_borders():
    images = torch.rand(6, 3, 20, 20, dtype=torch.float64)
    sigma = torch.tensor([0.0, 0.1, 0.5, 1.0, 1.5, 2.0], dtype=torch.float64)
    matrix = blur_matrix(sigma, 20)
    found = torch.einsum("nij,ncjk,nlk->ncil", matrix, images, matrix)
    torch.testing.assert_close(found, blur(images, blur_taps(sigma, 20, 16)), rtol=0, atol=1e-6)
    assert torch.equal(matrix[0], torch.eye(20, dtype=torch.float64))


def test_compiling_takes_this_path_and_gives_the_same_views():
    pixels, sizes = batch(32)
    recipe = view_recipe("moco-v2", 16)
    rows = torch.arange(len(pixels))
    parameters = draw_parameters(recipe, 0, 0, rows, rows, sizes)
    compiled = torch.compile(lambda p: apply_views(p, parameters, recipe, rows=rows), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(pixels), apply_views(pixels, parameters, recipe), rtol=0, atol=2e-4)
