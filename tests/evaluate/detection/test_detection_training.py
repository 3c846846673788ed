"""Short trainings: each task learns, and the files it leaves tell the same as its figures."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from rich.console import Console

from jcl.commands.detect import detect, evaluate_detector, resume_detection
from jcl.evaluate.detection.predict import KINDS, OTHER_SIGMA
from jcl.evaluate.folders import DetectionFolder
from jcl.runs.checkpoint import newest_checkpoint, read_tensors
from jcl.settings.detection import DetectOptions
from small_coco import small_options, write_coco

QUIET = Console(quiet=True)
ITERATIONS = {"mask": 24, "keypoint": 10}  # enough for each to find most of its shapes
LEARNING_RATES = {"mask": 0.01, "keypoint": 0.02}


@pytest.mark.parametrize("task", [pytest.param("mask", marks=pytest.mark.slow), "keypoint"])  # both find boxes first
def test_a_short_training_learns(task, tmp_path):
    kind, count = ("person_keypoints", 4) if task == "keypoint" else ("instances", 8)
    file = write_coco(tmp_path / "coco", count, kind=kind)
    changes = {"batch_size": 2, "lr": LEARNING_RATES[task], "iterations": ITERATIONS[task]}
    folder = detect(small_options(task, file, out=tmp_path / "out", checkpoint_every=8, **changes), console=QUIET)
    summary = folder.summary()
    assert summary[f"{task}_ap50"] > 20 and summary[f"{task}_ap"] > 4 and summary["box_ap50"] > 40, summary
    assert summary["iterations"] == ITERATIONS[task] and summary["images_per_second"] > 0 and summary["seconds"] > 0
    losses = [json.loads(line)["loss"] for line in folder.metrics_file.read_text().splitlines()]
    assert len(losses) == ITERATIONS[task] and sum(losses[-4:]) < 0.9 * sum(losses[:4])
    for kind in KINDS[task]:  # the files alone give the figures
        truth = COCO(str(file))
        judged = COCOeval(truth, truth.loadRes(str(folder.results_file(kind))), kind)
        judged.params.kpt_oks_sigmas = np.full(3, OTHER_SIGMA)
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
        name = {"bbox": "box", "segm": "mask", "keypoints": "keypoint"}[kind]
        assert summary[f"{name}_ap"] == pytest.approx(100 * judged.stats[0], abs=1e-6)
    if task == "keypoint":
        resume_from_the_checkpoint_before_the_last(folder, tmp_path / "parts")
        return
    again = evaluate_detector(
        folder.path, DetectOptions(workers=0, device="cpu", out=tmp_path / "again"), console=QUIET
    )
    assert {name: again[name] for name in again if "_ap" in name} == {
        name: summary[name] for name in summary if "_ap" in name
    }
    for kind in KINDS[task]:
        assert (tmp_path / "again" / f"results-{kind}.json").read_bytes() == folder.results_file(kind).read_bytes()


def resume_from_the_checkpoint_before_the_last(whole: DetectionFolder, copy: Path) -> None:
    """The last steps done again end in the same bits."""
    shutil.copytree(whole.path, copy)
    newest_checkpoint(copy / "checkpoints").unlink()
    (copy / "summary.json").unlink()
    parts = resume_detection(copy, DetectOptions(pictures=0, workers=0), console=QUIET)
    final = [read_tensors(newest_checkpoint(folder.checkpoints))[0] for folder in (whole, parts)]
    assert final[0].keys() == final[1].keys() and len(final[0]) > 100
    assert [name for name, value in final[0].items() if not torch.equal(value, final[1][name])] == []
    for kind in KINDS["keypoint"]:
        assert whole.results_file(kind).read_bytes() == parts.results_file(kind).read_bytes()


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
