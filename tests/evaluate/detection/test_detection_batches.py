"""Images and targets on their way to a detector: order, scale, mirroring, masks and key points."""

import itertools

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from pycocotools import mask as coder

from jcl.distributed.group import Ranks
from jcl.errors import DataError
from jcl.evaluate.detection.batches import (
    DetectionBatch,
    Hardware,
    TrainingSample,
    batch_keys,
    flip_order,
    flip_sample,
    grouped_batches,
    make_target,
    read_image,
    scaled_size,
    training_batches,
)
from jcl.evaluate.detection.data import CocoImage, read_coco, training_subset

_PAIRED = ("eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
COCO_NAMES = ["nose", *(f"{side}_{part}" for part in _PAIRED for side in ("left", "right"))]


def training_set(file, task):
    return training_subset(read_coco(file, file.parent / "images", task), task)[0]


def test_batches_are_of_one_shape_and_each_image_comes_once_an_epoch():
    wide = [number % 3 > 0 for number in range(23)]
    batches = list(itertools.islice(grouped_batches(wide, 4, seed=1), 60))
    assert all(len({wide[row] for row in batch}) == 1 for batch in batches)
    counts = np.bincount([row for batch in batches for row in batch], minlength=23)
    assert counts.max() - counts.min() <= 2  # those of the running epoch and those that wait
    assert batches == list(itertools.islice(grouped_batches(wide, 4, seed=1), 60))
    assert batches != list(itertools.islice(grouped_batches(wide, 4, seed=2), 60))


def test_resumed_batches_are_those_that_were_left(instances, make_settings):
    images = training_set(instances, "box")
    settings = make_settings(iterations=9, accumulate=2)
    whole = list(batch_keys(images, settings, 0))
    assert len(whole) == 18 and all(len(part) == 2 for part in whole)
    assert list(batch_keys(images, settings, 5)) == whole[10:]
    ranks = [list(batch_keys(images, settings, 0, Ranks(rank, 2))) for rank in range(2)]
    assert [first + second for first, second in zip(*ranks, strict=True)] == whole


def test_scale_and_mirroring_are_drawn_by_seed_iteration_and_image(instances, make_settings):
    dataset = training_set(instances, "box")
    sample = TrainingSample(dataset, make_settings(short_side=(640, 800)))
    draws = [sample.draw(image, iteration) for image in dataset.images for iteration in range(20)]
    assert {side for side, _ in draws} == {640, 672, 704, 736, 768, 800}
    assert 60 < sum(mirror for _, mirror in draws) < 100
    assert draws[:20] == [sample.draw(dataset.images[0], iteration) for iteration in range(20)]


def test_sizes():
    assert scaled_size(480, 640, 800, 1333) == (800, 1067)
    assert scaled_size(200, 640, 800, 1333) == (417, 1333)
    assert scaled_size(640, 480, 96, 160) == (128, 96)


def test_coco_flip_pairs():
    pairs = {(place, source) for place, source in enumerate(flip_order(COCO_NAMES)) if place != source}
    expected = {(first, first + 1) for first in range(1, 17, 2)}
    assert pairs == expected | {(second, first) for first, second in expected}
    assert flip_order(COCO_NAMES)[0] == 0


def mirrored_sample(file, task, make_settings):
    """A sample and its mirror image, at the size of the file."""
    dataset = training_set(file, task)
    sample, image = TrainingSample(dataset, make_settings(task)), dataset.images[0]
    draws = {sample.draw(image, iteration)[1]: iteration for iteration in range(50)}
    return sample(image, draws[False]), sample(image, draws[True])


def test_mirrored_key_points_land_on_the_other_hand(people, make_settings):
    plain, flipped = mirrored_sample(people, "keypoint", make_settings)
    yellow, red, blue = [255, 255, 0], [255, 0, 0], [0, 0, 255]
    # The left hand is red. In a mirror it looks like a right hand, so what is called left there is the blue one.
    for sample, colors in ((plain, [yellow, red, blue]), (flipped, [yellow, blue, red])):
        (points,) = sample["keypoints"]
        across, down = points[:, 0].floor().long(), points[:, 1].floor().long()
        assert sample["image"][:, down, across].T.tolist() == colors
        assert points[1, 0] > points[2, 0]  # the left hand of a figure that faces us is at the right


def test_mirroring_moves_pixels_boxes_masks_and_points_alike():
    order = flip_order(["left_hand", "right_hand"])
    sample = {
        "image": torch.arange(240, dtype=torch.uint8).view(3, 8, 10),
        "boxes": torch.tensor([[1.0, 2.0, 4.0, 6.0]]),
        "labels": torch.tensor([1]),
        "masks": torch.zeros(1, 8, 10, dtype=torch.uint8),
        "keypoints": torch.tensor([[[1.5, 2.5, 2.0], [0.0, 0.0, 0.0]]]),
    }
    sample["masks"][0, 2:6, 1:4] = 1
    flipped = flip_sample(sample, order)
    assert torch.equal(flipped["image"][..., 0], sample["image"][..., 9])
    assert flipped["boxes"].tolist() == [[6, 2, 9, 6]]
    assert flipped["masks"][0].nonzero().min(0).values.tolist() == [2, 6]
    assert flipped["masks"][0].nonzero().max(0).values.tolist() == [5, 8]
    assert flipped["keypoints"].tolist() == [
        [[0, 0, 0], [8.5, 2.5, 2]]
    ]  # pixel 1 of 10 becomes pixel 8, the other hand
    again = flip_sample(flipped, order)
    assert all(torch.equal(again[name], sample[name]) for name in sample)


def test_masks_of_polygons_and_run_lengths(tmp_path):
    picture = Image.new("L", (40, 30))
    outline = [4.0, 3.0, 30.0, 5.0, 22.0, 25.0]
    ImageDraw.Draw(picture).polygon([(4, 3), (30, 5), (22, 25)], fill=1)
    code = coder.encode(np.asfortranarray(np.array(picture)))
    text = {"size": [30, 40], "counts": code["counts"].decode()}
    common = {"bbox": [4, 3, 26, 22], "category_id": 3}
    entries = tuple(common | {"segmentation": shape} for shape in ([outline], text, code))
    image = CocoImage(1, tmp_path / "x.png", 40, 30, entries)
    masks = make_target(image, {3: 1}, 30, 40, "mask")["masks"]
    assert torch.equal(masks[1], masks[2]) and torch.equal(masks[1], torch.from_numpy(np.array(picture)))
    assert (masks[0] != masks[1]).float().mean() < 0.05  # two ways of rasterising, apart along the edge
    double = make_target(image, {3: 1}, 60, 80, "mask")
    assert double["boxes"][0].tolist() == [8, 6, 60, 50]
    expected = coder.decode(coder.frPyObjects([[2 * value for value in outline]], 60, 80))[..., 0]
    assert torch.equal(double["masks"][0], torch.from_numpy(expected))
    assert double["masks"][1].float().mean() == pytest.approx(masks[1].float().mean().item(), abs=1e-6)


def test_a_batch_is_unpacked_as_it_was(instances, people, make_settings):
    for file, task in ((instances, "mask"), (people, "keypoint")):
        dataset = training_set(file, task)
        samples = [TrainingSample(dataset, make_settings(task))(dataset.images[row], 0) for row in (0, 3, 4)]
        images, targets = DetectionBatch.pack(samples).unpack(torch.device("cpu"))
        for sample, image, target in zip(samples, images, targets, strict=True):
            assert torch.equal(image, sample["image"].float() / 255) and {"image", *target} == sample.keys()
            assert all(torch.equal(target[name], sample[name]) for name in target)


def test_orientation_marks(tmp_path):
    pixels = np.zeros((20, 30, 3), dtype=np.uint8)
    pixels[:5] = 255  # a bright band at the top, as it lies in the file
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    Image.fromarray(pixels).save(tmp_path / "x.png", exif=exif)
    upright = read_image(CocoImage(1, tmp_path / "x.png", 20, 30, ()))
    assert upright.shape == (3, 30, 20) and upright[:, :, -5:].min() == 255  # the band is at the right
    lying = read_image(CocoImage(1, tmp_path / "x.png", 30, 20, ()))
    assert torch.equal(lying, torch.from_numpy(pixels).permute(2, 0, 1))
    with pytest.raises(DataError, match=r"30×20.*31×20"):
        read_image(CocoImage(1, tmp_path / "x.png", 31, 20, ()))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_ends_in_a_sentence(instances, make_settings, workers):
    images = training_set(instances, "box")
    for image in images.images:
        image.path.write_bytes(b"no image")
    batches = training_batches(images, make_settings(), 0, Hardware(torch.device("cpu"), workers=workers))
    with pytest.raises(DataError, match=r"\.png") as caught:
        next(batches)
    assert "Traceback" not in str(caught.value)


def test_workers_change_nothing(instances, make_settings):
    images, settings = training_set(instances, "mask"), make_settings("mask", iterations=3)
    hardware = [Hardware(torch.device("cpu"), workers=workers) for workers in (0, 2)]
    alone, helped = (list(training_batches(images, settings, 0, which)) for which in hardware)
    for one, other in zip(alone, helped, strict=True):
        assert one.shapes == other.shapes
        assert all(torch.equal(one.values[name], other.values[name]) for name in one.values)
