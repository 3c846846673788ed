import pytest
import torch

from jcl.data.synthetic import CLASSES, drawn_objects


def nearest_neighbour_accuracy(pixels: torch.Tensor, labels: torch.Tensor, train: int, neighbours: int) -> float:
    rows = torch.nn.functional.normalize(pixels.flatten(1).float(), dim=1)
    nearest = (rows[train:] @ rows[:train].T).topk(neighbours).indices
    votes = torch.nn.functional.one_hot(labels[nearest], len(CLASSES)).sum(1)
    return (votes.argmax(1) == labels[train:]).float().mean().item()


@pytest.fixture(scope="module")
def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return drawn_objects(2000, seed=0)


def test_pictures_are_a_function_of_the_seed():
    first, labels = drawn_objects(60, seed=3)
    again, _ = drawn_objects(60, seed=3)
    other, _ = drawn_objects(60, seed=4)
    assert first.shape == (60, 3, 32, 32) and first.dtype == torch.uint8
    assert labels.shape == (60,) and labels.dtype == torch.int64
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_longer_set_begins_with_the_shorter(pictures):
    short, _ = drawn_objects(130, seed=0)
    assert torch.equal(pictures[0][:130], short)


def test_other_size():
    pixels, _ = drawn_objects(10, seed=0, size=48)
    assert pixels.shape == (10, 3, 48, 48)


def test_classes_are_balanced_and_pictures_differ(pictures):
    pixels, labels = (part[:1000] for part in pictures)
    assert labels.bincount(minlength=len(CLASSES)).tolist() == [100] * 10
    assert len(torch.unique(pixels.flatten(1), dim=0)) == 1000


def test_raw_pixels_do_badly(pictures):
    for neighbours, bound in ((1, 0.34), (20, 0.23)):
        assert nearest_neighbour_accuracy(*pictures, 1500, neighbours) < bound


def test_background_says_nothing_about_the_class(pictures):
    """The corners, which objects rarely reach, give the class away no better than a guess."""
    pixels, labels = pictures
    corners = torch.cat([pixels[:, :, :3, :3].flatten(1), pixels[:, :, -3:, -3:].flatten(1)], dim=1)
    accuracy = nearest_neighbour_accuracy(corners, labels, 1500, 5)
    assert accuracy < 0.16
