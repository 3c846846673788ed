"""Annotation files: what is kept, what is dropped, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from pycocotools import mask as coder

from jcl.errors import DataError
from jcl.evaluate.detection.batches import PackedImages
from jcl.evaluate.detection.data import (
    CocoFiles,
    clip_box,
    coco_files,
    hold_out,
    load_coco,
    read_coco,
    training_subset,
)
from jcl.settings.detection import CocoSettings
from small_coco import edit, write_coco


def read(file: Path, task: str = "box"):
    return read_coco(file, file.parent / "images", task)


def test_a_file_as_it_is(instances):
    found = read(instances, "mask")
    assert [category.name for category in found.categories] == ["square", "disc"]
    assert found.class_of == {3: 1, 7: 2}
    assert [image.id for image in found.images] == list(range(101, 109))
    assert all(len(image.annotations) == 1 for image in found.images)


def test_what_writers_leave_out_is_filled_in(people):
    def bare(content):
        for entry in content["annotations"]:
            del entry["iscrowd"], entry["area"], entry["num_keypoints"]

    image = read(edit(people, bare), "keypoint").images[0]
    entry = image.annotations[0]
    assert entry["iscrowd"] == 0 and entry["num_keypoints"] == 3
    assert entry["area"] == entry["bbox"][2] * entry["bbox"][3]


def test_training_leaves_out_crowds_empty_images_and_boxes_outside(instances):
    def change(content):
        content["annotations"][0]["iscrowd"] = 1  # of the first image, which has nothing else
        content["annotations"][1]["bbox"] = [200, 10, 30, 30]  # beyond the second image
        content["annotations"][2]["bbox"] = [-10, 5, 30, 30]  # over the edge of the third
        content["annotations"][3]["bbox"] = [5, 5, 0, 30]  # no width

    whole = read(edit(instances, change))
    kept, notes = training_subset(whole, "box")
    assert [image.id for image in kept.images] == [103, 105, 106, 107, 108]
    assert kept.images[0].annotations[0]["bbox"] == [0, 5, 20, 30]
    assert len(notes) == 1 and "2 objects" in notes[0]
    truth = whole.ground_truth()
    assert len(truth["annotations"]) == 8 and truth["annotations"][0]["iscrowd"] == 1  # kept for evaluation
    assert truth["annotations"][1]["bbox"] == [200, 10, 30, 30]


def test_images_without_a_visible_key_point_do_not_train(people):
    def hide(content):
        content["annotations"][0] |= {"keypoints": [0] * 9, "num_keypoints": 0}

    assert len(training_subset(read(edit(people, hide), "keypoint"), "keypoint")[0].images) == 7


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4]),
        ([-5, -5, 10, 10], [0, 0, 5, 5]),
        ([95, 45, 10, 10], [95, 45, 5, 5]),
        ([-20, 0, 10, 10], None),
        ([99.5, 0, 10, 10], None),
        ([5, 5, -3, 10], None),
    ],
)
def test_boxes_are_clipped(box, expected):
    assert clip_box(box, 100, 50) == expected


def test_holding_out_is_a_fixed_part(instances):
    whole = read(instances)
    train, val = hold_out(whole)
    assert len(val.images) == 1 and len(train.images) == 7
    assert {image.id for image in train.images} | {image.id for image in val.images} == set(range(101, 109))
    assert hold_out(whole)[1].images == val.images


def test_images_survive_packing(instances):
    images = read(instances, "mask").images
    packed = PackedImages(images, lambda image, iteration: (image, iteration))
    assert [packed[row, 5] for row in range(len(images))] == [(image, 5) for image in images]


def test_layouts(tmp_path):
    official = tmp_path / "official"
    for part, seed in (("train2017", 0), ("val2017", 1)):
        file = write_coco(tmp_path / part, count=3, seed=seed)
        (official / "annotations").mkdir(parents=True, exist_ok=True)
        file.rename(official / "annotations" / f"instances_{part}.json")
        (tmp_path / part / "images").rename(official / part)
    found = coco_files(CocoSettings(folder=official), "box")
    assert found.train_images == official / "train2017" and found.val_images == official / "val2017"
    train, val = load_coco(found, "box")
    assert len(train.images) == len(val.images) == 3 and train.images != val.images
    flat = write_coco(tmp_path / "flat").parent
    alone = coco_files(CocoSettings(folder=flat), "mask")
    assert alone == CocoFiles(flat / "instances.json", flat / "images", None, flat / "images")
    named = CocoSettings(folder=official, val_json=alone.train_json, val_images=alone.val_images)
    assert coco_files(named, "box").val_json == alone.train_json
    with pytest.raises(DataError, match="person_keypoints"):
        coco_files(CocoSettings(folder=flat), "keypoint")
    with pytest.raises(DataError, match="--coco"):
        coco_files(CocoSettings(), "box")
    with pytest.raises(DataError, match="none"):
        coco_files(CocoSettings(train_json=alone.train_json, images=tmp_path / "none"), "box")


def annotation(**changes):
    return lambda content: content["annotations"][0].update(changes)


@pytest.mark.parametrize(
    ("task", "change", "mentioned"),
    [
        ("box", lambda content: content.pop("categories"), "categories"),
        ("box", lambda content: content["images"][0].pop("width"), r"images\[0\]\.width"),
        ("box", lambda content: content.update(annotations=[]), "--task box"),
        ("box", lambda content: content.update(images=[], annotations=[]), "--task box"),
        ("box", annotation(image_id=5), r"annotations\[0\].*image 5"),
        ("box", annotation(category_id=5), r"annotations\[0\].*category 5"),
        ("box", annotation(bbox=[1, 2, 3]), r"annotations\[0\]\.bbox"),
        ("box", annotation(bbox=[1, 2, 3, float("nan")]), r"annotations\[0\]\.bbox"),
        ("box", lambda content: content["images"][0].update(file_name="gone.png"), "1 of the 8 images"),
        ("box", lambda content: content["images"].append(content["images"][0]), "same id"),
        ("mask", lambda content: [entry.pop("segmentation") for entry in content["annotations"]], "--task"),
        ("mask", annotation(segmentation="x"), r"annotations\[0\]\.segmentation"),
        ("mask", annotation(segmentation=[["a", 1, 2, 3, 4, 5]]), r"annotations\[0\]\.segmentation"),
        ("mask", annotation(segmentation=[[1, 2, 3, 4, 5, float("nan")]]), r"annotations\[0\]\.segmentation"),
        ("mask", annotation(segmentation={"counts": "x"}), r"annotations\[0\]\.segmentation"),
        ("mask", annotation(segmentation=[[0, 0, 1e9, 0, 1e9, 1e9]]), r"annotations\[0\]"),
        ("box", lambda content: content["images"][0].update(id=2**63), r"images\[0\]\.id"),
        ("keypoint", lambda content: None, "--task"),
    ],
)
def test_invalid_files(instances, task, change, mentioned):
    with pytest.raises(DataError, match=mentioned) as caught:
        training_subset(read(edit(instances, change), task), task)
    assert str(instances) in str(caught.value)


def test_fields_of_other_tasks_are_not_checked(instances):
    dataset = read(edit(instances, annotation(segmentation="x", keypoints="x")))
    assert "segmentation" not in dataset.images[0].annotations[0]


def test_key_points_of_the_wrong_number(people):
    with pytest.raises(DataError, match=r"annotations\[0\].*2 keypoints"):
        read(edit(people, annotation(keypoints=[1, 1, 2] * 2)), "keypoint")


def test_nothing_inside_any_image(instances):
    def move(content):
        for entry in content["annotations"]:
            entry["bbox"][0] += 1000

    with pytest.raises(DataError, match="--task box"):
        training_subset(read(edit(instances, move)), "box")


def test_broken_json_and_other_categories(instances, tmp_path):
    other = write_coco(tmp_path / "other")
    files = CocoFiles(instances, instances.parent / "images", other, other.parent / "images")
    assert len(load_coco(files, "box")[1].images) == 8
    edit(other, lambda content: content["categories"][1].update(name="ring"))
    with pytest.raises(DataError, match="different categories"):
        load_coco(files, "box")
    instances.write_text(json.dumps({"images": []})[:-3])
    with pytest.raises(DataError, match="JSON"):
        read(instances)


def test_a_test_set_without_objects_is_refused_before_training(instances, tmp_path):
    other = edit(write_coco(tmp_path / "other"), lambda content: content.update(annotations=[]))
    with pytest.raises(DataError, match="nothing to test --task box"):
        load_coco(CocoFiles(instances, instances.parent / "images", other, other.parent / "images"), "box")


def test_testing_masks_needs_all_outlines(instances):
    edit(instances, lambda content: content["annotations"][0].pop("segmentation"))
    folder = instances.parent / "images"
    with pytest.raises(DataError, match="1 test objects"):
        load_coco(CocoFiles(instances, folder, instances, folder), "mask")
    kept, notes = training_subset(read(instances, "mask"), "mask")
    assert len(kept.images) == 7 and "1 object" in notes[0]


def test_outlines_are_polygons_with_an_area_or_run_lengths(instances):
    def change(content):
        content["annotations"][0]["segmentation"] = [[1, 2], [1, 2, 30, 2, 30, 30]]
        content["annotations"][1]["segmentation"] = [[1, 2]]

    found = read(edit(instances, change), "mask")
    assert found.images[0].annotations[0]["segmentation"] == [[1.0, 2.0, 30.0, 2.0, 30.0, 30.0]]
    _, notes = training_subset(found, "mask")
    assert len(notes) == 1 and "1 object" in notes[0]


def test_run_length_encodings_must_cover_their_image(instances):
    """pycocotools would read past the end of a short one."""
    image = json.loads(instances.read_text())["images"][0]
    height, width = image["height"], image["width"]

    def read_runs(size, runs):
        return read(edit(instances, annotation(segmentation={"size": size, "counts": runs})), "mask")

    good = read_runs([height, width], [10, 20, height * width - 30]).images[0].annotations[0]
    mask = coder.decode(good["segmentation"]).flatten(order="F")
    assert mask[10:30].all() and mask.sum() == 20
    for size, runs in (
        ([height, width], [5, 5]),
        ([height, width], [5, -5, height * width]),
        ([height, width], [0.5, height * width - 0.5]),
        ([width + 1, height], [0, height * width]),
        ([height, width + 1], "packed"),
    ):
        with pytest.raises(DataError, match=r"annotations\[0\]"):
            read_runs(size, runs)


def test_compressed_run_lengths_are_read_exactly_or_refused(instances):
    image = json.loads(instances.read_text())["images"][0]
    height, width = image["height"], image["width"]

    def read_text(text):
        return read(edit(instances, annotation(segmentation={"size": [height, width], "counts": text})), "mask")

    random = np.random.default_rng(0)
    for share in (0.0, 0.5):
        mask = np.asfortranarray(random.random((height, width)) < share, dtype=np.uint8)
        text = coder.encode(mask)["counts"].decode()
        kept = read_text(text).images[0].annotations[0]["segmentation"]
        assert np.array_equal(coder.decode(kept), mask) and kept["counts"].decode() == text
        for damaged in (text[:-1], text[:-3], text + "1", text + "o", "", "zzzz~", "é", "o" * 100_000):
            with pytest.raises(DataError, match=r"annotations\[0\]"):
                read_text(damaged)


def test_a_list_is_no_annotation_file(tmp_path):
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(DataError, match=r"list\.json"):
        read(tmp_path / "list.json")
