"""Normalising as torchvision does it, and back to pictures."""

import torch
from torchvision.transforms import functional as reference

from jcl.views import IMAGENET_MEAN, IMAGENET_STD, denormalise, normalise


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
