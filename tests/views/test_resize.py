"""Resizing and blurring against torchvision, PIL and plain convolutions."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as reference

from jcl.views import view_recipe
from jcl.views.parameters import draw_parameters
from jcl.views.resize import Span, Taps, blur, blur_taps, box_crop, center_crop, resample_rows, resize_taps

Images = Callable[..., Tensor]

BOXES = torch.tensor(
    [[0, 0, 97, 83], [5, 7, 50, 61], [60, 20, 37, 20], [3, 80, 9, 3], [96, 82, 1, 1], [10, 0, 1, 83], [40, 40, 40, 40]]
)


def crop(pixels: Tensor, boxes: Tensor, size: int, flip: Tensor | None = None) -> Tensor:
    recipe, count = view_recipe("none", size), torch.arange(len(boxes))
    drawn = draw_parameters(recipe, 0, 0, count, count, boxes[:, 2:])
    drawn = dataclasses.replace(drawn, box=boxes, flip=drawn.flip if flip is None else flip)
    return box_crop(pixels, drawn, recipe)


def test_rows_are_weighted_sums(images: Images) -> None:
    planes = images(2, 6, 5).double()
    taps = Taps(torch.randint(0, 6, (2, 4, 3)), torch.rand(2, 4, 3).double())
    summed = resample_rows(planes, taps)
    for view in range(2):
        for output in range(4):
            rows = planes[view][:, taps.index[view, output]]
            expected = (rows * taps.weight[view, output][:, None]).sum(dim=1)
            torch.testing.assert_close(summed[view, :, output], expected)


@pytest.mark.parametrize("size", [1, 16, 40, 150])
def test_crops_equal_torchvisions(images: Images, size: int) -> None:
    pixels = images(len(BOXES), 97, 83).double() / 255
    made = crop(pixels, BOXES, size)
    for view, (top, left, height, width) in enumerate(BOXES.tolist()):
        expected = reference.resized_crop(pixels[view], top, left, height, width, [size, size], antialias=True)
        torch.testing.assert_close(made[view], expected, rtol=0, atol=1e-12)


def test_crops_of_photographs_equal_pils(photographs: list[Tensor]) -> None:
    size = 112
    for photograph in photographs:
        _, height, width = photograph.shape
        for box in ([0, 0, height, width], [11, 5, height // 2, 2 * width // 3], [20, 30, 71, 64]):
            made = crop(photograph[None], torch.tensor([box]), size)[0]
            picture = reference.to_pil_image(photograph)
            expected = reference.resized_crop(picture, *box, [size, size], Image.Resampling.BILINEAR)
            error = (made * 255 - reference.pil_to_tensor(expected)).abs()
            assert error.mean() < 0.5  # PIL rounds to whole levels after each axis
            assert error.max() < 2


def test_flips(images: Images) -> None:
    pixels = images(len(BOXES), 97, 83)
    flip = torch.arange(len(BOXES)) % 2 == 0
    plain, flipped = crop(pixels, BOXES, 32), crop(pixels, BOXES, 32, flip)
    expected = torch.where(flip[:, None, None, None], plain.flip(3), plain)
    torch.testing.assert_close(flipped, expected, rtol=0, atol=1e-5)


def test_nothing_outside_the_box_reaches_the_view(images: Images) -> None:
    pixels = images(len(BOXES), 97, 83).float() / 255
    garbage = torch.full_like(pixels, 1e6)
    for view, (top, left, height, width) in enumerate(BOXES.tolist()):
        inside = (view, slice(None), slice(top, top + height), slice(left, left + width))
        garbage[inside] = pixels[inside]
    assert torch.equal(crop(pixels, BOXES, 24), crop(garbage, BOXES, 24))


def test_integer_and_float_pixels_give_the_same_view(images: Images) -> None:
    pixels = images(len(BOXES), 97, 83)
    torch.testing.assert_close(crop(pixels, BOXES, 24), crop(pixels.float() / 255, BOXES, 24), rtol=0, atol=1e-6)


@pytest.mark.parametrize("ratio", [1.0, 0.875, 0.5])
@pytest.mark.parametrize("size", [20, 64])
def test_center_crops_equal_torchvisions(images: Images, size: int, ratio: float) -> None:
    sizes = torch.tensor([[97, 83], [97, 20], [11, 83], [50, 50], [1, 1], [64, 65]])
    pixels = images(len(sizes), 97, 83).double() / 255
    made = center_crop(pixels, sizes, ratio, size)
    for view, (height, width) in enumerate(sizes.tolist()):
        resized = reference.resize(pixels[view, :, :height, :width], [round(size / ratio)], antialias=True)
        expected = reference.center_crop(resized, [size, size])
        torch.testing.assert_close(made[view], expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("size", [1, 2, 5, 30])
def test_blur_equals_a_float64_convolution(images: Images, size: int) -> None:
    """With borders reflected as often as it takes, and a kernel far wider than ours."""
    sigma = torch.tensor([0.0, 0.1, 0.7, 1.3, 2.0])
    batch = images(len(sigma), max(size, 4), max(size, 4))[:, :, :size, :size].float() / 255
    blurred = blur(batch, blur_taps(sigma, size, 8))
    reach = 20
    offsets = np.arange(-reach, reach + 1)
    for view, deviation in enumerate(sigma.tolist()):
        kernel = np.exp(-0.5 * (offsets / max(deviation, 1e-3)) ** 2)
        kernel /= kernel.sum()
        expected = batch[view].double().numpy()
        for axis in (1, 2):
            padding = [(reach, reach) if each == axis else (0, 0) for each in range(3)]
            padded = np.pad(expected, padding, mode="reflect" if size > 1 else "edge")
            expected = np.apply_along_axis(lambda row, kernel=kernel: np.convolve(row, kernel, "valid"), axis, padded)
        assert np.abs(blurred[view].numpy() - expected).max() < 0.1 / 255


def test_blur_equals_torchvisions(images: Images) -> None:
    batch = images(3, 40, 40).double() / 255
    sigma = torch.tensor([0.3, 1.0, 2.0]).double()
    blurred = blur(batch, blur_taps(sigma, 40, 8))
    for view in range(3):
        expected = reference.gaussian_blur(batch[view], [17, 17], [float(sigma[view])] * 2)
        torch.testing.assert_close(blurred[view], expected, rtol=0, atol=1e-7)


def span(start: int, length: int) -> Span:
    whole = torch.tensor([start])
    return Span(whole.double(), torch.tensor([float(length)]).double(), whole, whole + length)


def matrix(taps: Taps, inputs: int) -> torch.Tensor:
    """The taps of the first view as a dense (outputs, inputs) matrix."""
    dense = torch.zeros(taps.index.shape[1], inputs, dtype=taps.weight.dtype)
    return dense.scatter_add(1, taps.index[0], taps.weight[0].expand(taps.index.shape[1:]).contiguous())


@pytest.mark.parametrize(("start", "length", "size"), [(0, 10, 10), (3, 50, 7), (5, 4, 9), (2, 1, 6), (0, 64, 45)])
def test_resize_takes_a_mean_of_inputs_in_the_span(start: int, length: int, size: int) -> None:
    taps = resize_taps(span(start, length), size, 64 / size)
    assert (taps.weight >= 0).all()
    torch.testing.assert_close(taps.weight.sum(dim=2), torch.ones(1, size).double())
    assert taps.index.min() >= start
    assert taps.index.max() < start + length


def test_resizing_to_the_same_size_is_the_identity() -> None:
    dense = matrix(resize_taps(span(2, 5), 5, 1.0), 8)
    assert torch.equal(dense, torch.eye(8).double()[2:7])


def test_more_taps_than_needed_change_nothing() -> None:
    narrow, wide = (matrix(resize_taps(span(0, 30), 11, scale), 30) for scale in (30 / 11, 6.0))
    torch.testing.assert_close(narrow, wide, rtol=0, atol=1e-15)


def test_flip_reverses_the_outputs() -> None:
    plain = resize_taps(span(0, 30), 11, 30 / 11, torch.tensor([False]))
    flipped = resize_taps(span(0, 30), 11, 30 / 11, torch.tensor([True]))
    torch.testing.assert_close(matrix(flipped, 30), matrix(plain, 30).flip(0))


def test_blur_keeps_the_mean_and_is_symmetric() -> None:
    dense = matrix(blur_taps(torch.tensor([1.5]).double(), 40, 6), 40)
    torch.testing.assert_close(dense.sum(dim=1), torch.ones(40).double())
    torch.testing.assert_close(dense[20, 14:27], dense[20, 14:27].flip(0))
    assert (dense[20, :14] == 0).all()
    ratio = float(dense[20, 23] / dense[20, 20])
    assert ratio == pytest.approx(torch.exp(torch.tensor(-0.5 * (3 / 1.5) ** 2)).item(), rel=1e-6)


def test_no_blur_is_the_identity() -> None:
    for size in (1, 2, 3, 20):
        assert torch.equal(matrix(blur_taps(torch.zeros(1), size, 8), size), torch.eye(size))
