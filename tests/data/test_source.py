"""Sets of images are told apart by count, labels, names and pixels."""

import torch

from jcl.data import ArrayImages
from jcl.data.source import fingerprint


def images(count: int = 40, value: int = 7, label: int = 0) -> ArrayImages:
    return ArrayImages(torch.full((count, 3, 4, 4), value, dtype=torch.uint8), torch.full((count,), label))


def test_equal_sets_have_equal_fingerprints_and_others_do_not():
    first = fingerprint(images())
    assert first == fingerprint(images())
    others = [images(count=41), images(value=8), images(label=1), ArrayImages(images().pixels)]
    assert len({first, *(fingerprint(other) for other in others)}) == 5
