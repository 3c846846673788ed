"""Seeded splits: every class gets its share, and the same seed gives the same images."""

import pickle
from pathlib import Path

import pytest
import torch

from jcl.data import ArrayImages, BatchLoader, ImageData, open_data
from jcl.data.source import select_images
from jcl.errors import DataError, SettingsError
from jcl.evaluate.classification import (
    class_positions,
    class_sample,
    classification_task,
    hold_out_split,
    label_amount,
    label_subset,
    scores,
    stratified_split,
)

# 100 images of class 0, 40 of class 3, 7 of class 5, 1 of class 9, 12 without a label, mixed up.
LABELS = torch.tensor([0] * 100 + [3] * 40 + [5] * 7 + [9] + [-1] * 12)
LABELS = LABELS[torch.randperm(len(LABELS), generator=torch.Generator().manual_seed(0))]


def counts(rows: torch.Tensor) -> dict[int, int]:
    found, numbers = torch.unique(LABELS[rows], return_counts=True)
    return dict(zip(found.tolist(), numbers.tolist(), strict=True))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10%", {0: 10, 3: 4, 5: 1, 9: 1}),
        ("1%", {0: 1, 3: 1, 5: 1, 9: 1}),
        ("100%", {0: 100, 3: 40, 5: 7, 9: 1}),
        ("12.5 %", {0: 12, 3: 5, 5: 1, 9: 1}),
        ("20-per-class", {0: 20, 3: 20, 5: 7, 9: 1}),
        ("1-per-class", {0: 1, 3: 1, 5: 1, 9: 1}),
    ],
)
def test_each_class_gives_its_share_and_at_least_one(text, expected):
    rows = label_subset(LABELS, text, seed=3)
    assert counts(rows) == expected
    assert torch.equal(rows, rows.sort().values) and len(rows.unique()) == len(rows)


@pytest.mark.parametrize(
    "text", ["", "0%", "101%", "-5%", "ten", "0-per-class", "-1-per-class", "3 per class", "1e1%", "nan%", "10"]
)
def test_amounts_that_make_no_sense_are_a_sentence(text):
    with pytest.raises(SettingsError, match="--labels"):
        label_amount(text)


def test_test_images_without_labels_are_refused_before_training():
    train = ArrayImages(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1]))
    with pytest.raises(DataError, match="No test image has a label"):
        classification_task(ImageData("some", train, ArrayImages(train.pixels, torch.full((4,), -1))))


def test_the_seed_decides_and_less_is_part_of_more():
    ten = label_subset(LABELS, "10%", seed=0)
    assert torch.equal(ten, label_subset(LABELS, "10%", seed=0))
    assert not torch.equal(ten, label_subset(LABELS, "10%", seed=1))
    half = label_subset(LABELS, "50%", seed=0)
    assert set(ten.tolist()) < set(half.tolist())


def test_every_image_of_a_class_is_chosen_equally_often():
    labels = torch.arange(12) % 2
    chosen = torch.stack([label_subset(labels, "2-per-class", seed) for seed in range(500)])
    often = torch.bincount(chosen.flatten(), minlength=12) / 500
    assert (often - 1 / 3).abs().max() < 5 * (1 / 3 * 2 / 3 / 500) ** 0.5


def test_a_balanced_split_has_every_class_on_both_sides_but_single_images():
    kept, held_out = stratified_split(LABELS, seed=0)
    assert counts(held_out) == {0: 20, 3: 8, 5: 1}
    assert counts(kept) == {0: 80, 3: 32, 5: 6, 9: 1}
    assert not set(kept.tolist()) & set(held_out.tolist())
    assert stratified_split(torch.tensor([0, 0, 1, 1]), seed=0)[1].numel() == 2  # a fifth of two is one, not none
    assert stratified_split(torch.tensor([0, 1, 2]), seed=0)[1].numel() == 0


def test_a_part_of_arrays_is_an_array_that_keeps_names_and_labels():
    pixels = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 3, 4, 4).contiguous()
    source = ArrayImages(pixels, torch.tensor([0, 1, 0, 1, 0, 1]), ("a", "b"))
    part = select_images(select_images(source, torch.tensor([1, 3, 4, 5])), torch.tensor([3, 1]))
    assert isinstance(part, ArrayImages) and len(part) == 2
    assert [part.name_of(index) for index in range(2)] == ["number 5", "number 3"]
    assert part.labels.tolist() == [1, 1] and part.class_names == ("a", "b")
    assert part.pixels[:, 0, 0, 0].tolist() == [5, 3]
    assert select_images(source, torch.arange(6)) is source


def test_a_part_of_a_folder_reads_the_right_files_in_workers_too(image_folder: Path):
    source = open_data(str(image_folder)).train
    rows = torch.tensor([20, 3, 7])
    part = select_images(source, rows)
    assert [part.name_of(index) for index in range(3)] == [source.name_of(row) for row in rows.tolist()]
    assert part.labels.tolist() == source.labels[rows].tolist()
    again = pickle.loads(pickle.dumps(part))
    assert torch.equal(again.read(1), source.read(3))
    for workers in (0, 1):
        with BatchLoader(part, batch_size=3, canvas=32, seed=0, workers=workers) as loader:
            batch = next(iter(loader.epoch(0)))
        for pixels, sample in zip(batch.pixels, batch.samples.tolist(), strict=True):
            assert torch.equal(pixels[:, :20, :20], source.read(int(rows[sample])))


def test_a_task_without_a_test_set_holds_out_the_images_that_knn_does():
    labels = torch.cat([torch.arange(60) % 3, torch.tensor([-1, -1])])
    source = ArrayImages(torch.zeros(62, 3, 4, 4, dtype=torch.uint8), labels)
    task = classification_task(ImageData("x", source))
    kept, left_out = hold_out_split(labels)
    assert task.held_out and task.class_names == ("0", "1", "2")
    assert [task.test.name_of(index) for index in range(len(task.test))] == [f"number {row}" for row in left_out]
    assert len(task.train) == len(kept) == 54 and (task.train.labels >= 0).all()


def test_a_task_with_a_test_set_uses_it_and_drops_unlabeled_training_images():
    train = ArrayImages(torch.zeros(5, 3, 4, 4, dtype=torch.uint8), torch.tensor([7, -1, 2, 7, 2]))
    test = ArrayImages(torch.zeros(3, 3, 4, 4, dtype=torch.uint8), torch.tensor([7, -1, 4]))
    task = classification_task(ImageData("x", train, test))
    assert not task.held_out and task.test is test
    assert task.classes.tolist() == [2, 7] and task.train.labels.tolist() == [7, 2, 7, 2]


@pytest.mark.parametrize("labels", [None, [1, 1, 1, -1], [-1, -1, -1, -1]])
def test_a_task_needs_two_classes(labels):
    labels = None if labels is None else torch.tensor(labels)
    source = ArrayImages(torch.zeros(4, 3, 4, 4, dtype=torch.uint8), labels)
    with pytest.raises(DataError):
        classification_task(ImageData("x", source))


def test_positions_and_scores():
    classes = torch.tensor([2, 5, 7])
    assert class_positions(torch.tensor([7, 2, 3, 9, -1, 5]), classes).tolist() == [2, 0, -1, -1, -1, 1]
    logits = torch.tensor([[3.0, 2, 1], [1, 1, 0], [1, 1, 0], [0, 0, 9], [float("nan"), 1, 0], [1, 2, 3]])
    found = scores(logits, torch.tensor([2, 2, 5, 4, 2, -1]), classes)
    # right; right by the rule for ties; wrong by it; of a class unknown to the probe; no number; no label
    assert found.images == 5 and found.unseen_class_images == 1
    assert found.top1 == pytest.approx(40) and found.top5 == pytest.approx(60)
    assert found.class_images == (3, 1, 0) and found.class_top1 == (pytest.approx(200 / 3), 0.0, None)
    assert found.chance_top1 == pytest.approx(60)
    assert scores(logits, torch.tensor([4, 4, 4, 5, 2, -1]), classes).chance_top1 == pytest.approx(60)  # an unknown one


def test_a_sample_has_every_class_in_its_share():
    labels = torch.tensor([0] * 60 + [1] * 30 + [-1] * 5 + [2] * 9 + [3])
    rows = class_sample(labels, 20)
    assert torch.bincount(labels[rows]).tolist() == [12, 6, 1, 1] and rows.tolist() == sorted(set(rows.tolist()))
    assert (
        class_sample(labels, 100).tolist()
        == class_sample(labels, 2**62).tolist()
        == (labels >= 0).nonzero()[:, 0].tolist()
    )


def test_top_five_against_sorting():
    logits = torch.randn(200, 30, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(200) % 30
    first_five = logits.argsort(1, descending=True)[:, :5]
    found = scores(logits, labels, torch.arange(30))
    assert found.top5 == pytest.approx(100 * (first_five == labels[:, None]).any(1).double().mean().item())
    assert found.top1 == pytest.approx(100 * (first_five[:, 0] == labels).double().mean().item())
