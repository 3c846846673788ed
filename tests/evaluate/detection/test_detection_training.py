"""Short trainings: each task learns, and the files it leaves tell the same as its figures."""

import json

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from rich.console import Console

from jcl.commands.detect import detect, evaluate_detector
from jcl.evaluate.detection.predict import KINDS, OTHER_SIGMA
from jcl.settings.detection import DetectOptions
from small_coco import small_options, write_coco

QUIET = Console(quiet=True)
ITERATIONS = {"mask": 24, "keypoint": 12}  # enough for each to find most of its shapes
SLOWLY = {"batch_size": 2, "lr": 0.01}


@pytest.mark.parametrize("task", [pytest.param("mask", marks=pytest.mark.slow), "keypoint"])  # both find boxes first
def test_a_short_training_learns(task, tmp_path):
    file = write_coco(tmp_path / "coco", kind="person_keypoints" if task == "keypoint" else "instances")
    changes = SLOWLY | {"iterations": ITERATIONS[task], "pictures": 2}
    folder = detect(small_options(task, file, out=tmp_path / "out", **changes), console=QUIET)
    summary = folder.summary()
    assert summary[f"{task}_ap50"] > 40 and summary[f"{task}_ap"] > 15 and summary["box_ap50"] > 40, summary
    assert summary["iterations"] == ITERATIONS[task] and summary["images_per_second"] > 0 and summary["seconds"] > 0
    losses = [json.loads(line)["loss"] for line in folder.metrics_file.read_text().splitlines()]
    assert len(losses) == ITERATIONS[task] and sum(losses[-4:]) < 0.75 * sum(losses[:4])
    assert folder.picture_file.stat().st_size > 10_000
    for kind in KINDS[task]:  # the files alone give the figures
        truth = COCO(str(file))
        judged = COCOeval(truth, truth.loadRes(str(folder.results_file(kind))), kind)
        judged.params.kpt_oks_sigmas = np.full(3, OTHER_SIGMA)
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
        name = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}[kind]
        assert summary[f"{name}_ap"] == pytest.approx(100 * judged.stats[0], abs=1e-6)
    if task == "keypoint":  # evaluated again in the same way
        return
    again = evaluate_detector(
        folder.path, DetectOptions(workers=0, device="cpu", out=tmp_path / "again"), console=QUIET
    )
    assert {name: again[name] for name in again if "_ap" in name} == {
        name: summary[name] for name in summary if "_ap" in name
    }
    for kind in KINDS[task]:
        assert (tmp_path / "again" / f"results-{kind}.json").read_bytes() == folder.results_file(kind).read_bytes()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("task", ["box", "mask", "keypoint"])
def test_a_short_training_learns_on_a_gpu(task, tmp_path):
    file = write_coco(tmp_path / "coco", kind="person_keypoints" if task == "keypoint" else "instances")
    iterations = 120 if task == "keypoint" else 60
    changes = {"iterations": iterations, "device": "cuda", "precision": "bfloat16", "pictures": 2, "workers": 2}
    folder = detect(small_options(task, file, out=tmp_path / "out", **changes), console=QUIET)
    summary = folder.summary()
    assert summary[f"{task}_ap50"] > 50 and summary["box_ap50"] > 50, summary
    again = evaluate_detector(folder.path, DetectOptions(workers=0, device="cuda"), console=QUIET)
    assert again["box_ap50"] == pytest.approx(summary["box_ap50"], abs=1)
