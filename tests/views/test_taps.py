"""Weights of rows: they sum to one, stay inside their span and have the width that antialiasing asks for."""

import pytest
import torch

from jcl.views.taps import Span, Taps, blur_taps, resize_taps


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
