"""COCO's metrics: the same as COCO's own code computes from the files."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from jcl.errors import SettingsError
from jcl.evaluate.detection import data
from jcl.evaluate.detection.data import read_coco
from jcl.evaluate.detection.predict import OTHER_SIGMA, _scorer, coco_scores, detection_table, to_coco
from small_coco import edit

TASK = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}


def shaken_results(file, kind, noise, copies=3, seed=0):
    """What a detector would give that knows the annotations and shakes: torchvision's tensors, made into results."""
    random = np.random.default_rng(seed)
    whole = read_coco(file, file.parent / "images", TASK[kind])
    ids = [category.id for category in whole.categories]
    results = []
    for image in whole.images:
        boxes, labels, masks, points = [], [], [], []
        for entry in image.annotations * copies:
            x, y, width, height = np.array(entry["bbox"]) + random.normal(0, noise, 4)
            boxes.append([x, y, x + width, y + height])
            labels.append(whole.class_of[entry["category_id"]])
            mask = torch.zeros(1, image.height, image.width)
            mask[:, max(0, round(y)) : round(y + height), max(0, round(x)) : round(x + width)] = 0.9
            masks.append(mask)
            if kind == "keypoints":
                place = np.array(entry["keypoints"], dtype=float).reshape(-1, 3)
                place[:, :2] += 0.5 + random.normal(0, noise, (len(place), 2))
                points.append(torch.tensor(place))
        output = {
            "boxes": torch.tensor(np.array(boxes), dtype=torch.float32),
            "labels": torch.tensor(labels),
            "scores": torch.from_numpy(random.random(len(boxes))),
            "masks": torch.stack(masks),
            "keypoints": torch.stack(points).float() if points else torch.zeros(0),
        }
        results += to_coco(kind, output, image.id, ids)
    return whole, results


def reference(truth_file, results_file, kind, keypoints=3):
    truth = COCO(str(truth_file))
    judged = COCOeval(truth, truth.loadRes(str(results_file)), kind)
    if kind == "keypoints":
        judged.params.kpt_oks_sigmas = np.full(keypoints, OTHER_SIGMA)
    judged.evaluate()
    judged.accumulate()
    judged.summarize()
    return judged.stats


@pytest.fixture(params=["pycocotools", "faster_coco_eval"])
def scorer(request, monkeypatch) -> str:
    """The library that computes the metrics; the second one is optional."""
    if request.param == "pycocotools":
        monkeypatch.setitem(sys.modules, "faster_coco_eval", None)
    else:
        pytest.importorskip("faster_coco_eval")
    return request.param


@pytest.mark.parametrize("kind", ["bbox", "segm", "keypoints"])
def test_equal_to_cocos_own_code_on_the_same_files(kind, scorer, instances, people, tmp_path, capsys):
    assert _scorer()[1].__module__.startswith(scorer)
    file = people if kind == "keypoints" else instances

    def one_crowd(content):
        content["annotations"][4]["iscrowd"] = 1
        content["annotations"][5]["area"] = 20_000  # a large one

    if kind == "bbox":
        edit(file, one_crowd)
    whole, results = shaken_results(file, kind, noise=3)
    written = tmp_path / "results.json"
    written.write_text(json.dumps(results))
    read_back = json.loads(written.read_text())
    assert read_back == results
    capsys.readouterr()
    ours = coco_scores(whole, read_back, kind)
    assert capsys.readouterr().out == ""
    stats = reference(file, written, kind)
    name = TASK[kind]
    names = ["ap", "ap50", "ap75", *([] if kind == "keypoints" else ["ap_small"]), "ap_medium", "ap_large"]
    assert list(ours) == [f"{name}_{figure}" for figure in names]
    for value, theirs in zip(ours.values(), stats, strict=False):
        assert (value is None and theirs == -1) or value == pytest.approx(100 * theirs, abs=1e-9)
    assert 5 < ours[f"{name}_ap"] < 95


@pytest.mark.parametrize("kind", ["bbox", "segm", "keypoints"])
def test_perfect_results_score_100_and_none_score_0(kind, scorer, instances, people):
    file = people if kind == "keypoints" else instances
    edit(file, lambda content: content["annotations"][0].update(id=0))  # a number that COCO's code takes for none
    if kind == "segm":  # what is drawn as a mask above is the box
        edit(file, lambda content: content.update(annotations=content["annotations"][::2]))
        edit(file, lambda content: content.update(images=content["images"][::2]))
    whole, results = shaken_results(file, kind, noise=0, copies=1)
    assert coco_scores(whole, results, kind)[f"{TASK[kind]}_ap"] == pytest.approx(100)
    nothing = coco_scores(whole, [], kind)
    assert nothing[f"{TASK[kind]}_ap"] == 0 and nothing[f"{TASK[kind]}_ap_large"] is None


def test_results_have_cocos_ids_and_form():
    output = {
        "boxes": torch.tensor([[1.0, 2.0, 4.0, 8.0]]),
        "labels": torch.tensor([2]),
        "scores": torch.tensor([0.5]),
        "keypoints": torch.tensor([[[3.5, 4.5, 1.0]]]),
    }
    (box,) = to_coco("bbox", output, 42, [3, 7])
    assert box == {"image_id": 42, "category_id": 7, "score": 0.5, "bbox": [1, 2, 3, 6]}
    assert to_coco("keypoints", output, 42, [3, 7])[0]["keypoints"] == [3, 4, 1]


def test_without_the_library_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycocotools.cocoeval", None)
    with pytest.raises(SettingsError, match=r"pip install 'joint-contrastive-learning\[coco\]'"):
        data.coco_module("cocoeval")


def summary(task, label, ap, **changes):
    figures = {f"{task}_ap": ap, f"{task}_ap50": ap + 1, f"{task}_ap75": None}
    common = {"task": task, "label": label, "backbone": "resnet50", "iterations": 90_000, "batch_size": 16, "seed": 0}
    return common | figures | changes


def table(summaries, folders):
    header, _, *rows = [line[2:-2].split(" | ") for line in detection_table(summaries, folders).splitlines()]
    return header, rows


def test_a_row_for_each_start_and_a_group_of_columns_for_each_task():
    keypoint = summary("keypoint", "jcl", 66.0, box_ap=55.0)  # the keypoint detector's boxes are not Faster R-CNN's
    found = [summary("box", "jcl", 41.0), summary("box", "ran|dom", 30.5), keypoint]
    folders = [Path(name) for name in "abcd"]
    header, rows = table(found, folders[:3])
    assert header[5:] == [
        f"{name} {ap}" for name in ("Faster R-CNN", "Keypoint R-CNN") for ap in ("AP", "AP50", "AP75")
    ]
    assert rows[0][0] == "jcl" and rows[0][5:] == ["41.00", "42.00", "", "66.00", "67.00", ""]
    assert rows[1][5:] == ["30.50", "31.50", "", "", "", ""]
    assert rows[1][0] == "ran\\|dom"
    assert len(table([*found, summary("box", "jcl", 41.0, seed=1)], folders)[1]) == 3


def test_transfers_of_one_label_are_told_apart():
    found = [summary("box", "jcl", 41.0, lr=0.02), summary("mask", "jcl", 37.0, lr=0.02)]
    twice = [*found, summary("box", "jcl", 40.0, lr=0.02)]
    folders = [Path("one"), Path("two"), Path("three")]
    assert [row[0] for row in table(twice, folders)[1]] == ["jcl (one)", "jcl", "jcl (three)"]
    starts = [summary("box", "jcl", 41.0, init="a/jcl"), summary("mask", "jcl", 37.0, init="b/jcl")]
    assert [row[0] for row in table(starts, folders[:2])[1]] == ["jcl (one)", "jcl (two)"]
    other = [*found, summary("box", "jcl", 40.0, lr=0.01)]
    header, rows = table(other, folders)
    assert header[5] == "lr" and [row[:1] + row[5:7] for row in rows] == [
        ["jcl", "0.02", "41.00"],
        ["jcl", "0.01", "40.00"],
    ]
