"""A training that was stopped goes on bit for bit."""

import os
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console

from jcl.commands.detect import detect, evaluate_detector, resume_detection
from jcl.errors import DataError, Interrupted, JclError, RunError
from jcl.evaluate.detection import batches
from jcl.evaluate.detection.model import DetectionTask
from jcl.evaluate.folders import DetectionFolder
from jcl.runs.checkpoint import newest_checkpoint, read_tensors
from jcl.settings.detection import DetectOptions
from small_coco import edit, small_options, write_coco

QUIET = Console(quiet=True)


def annotations(task: str, folder: Path) -> Path:
    return write_coco(folder, count=4, kind="person_keypoints" if task == "keypoint" else "instances")


def stopped_after(steps: int):
    """A training step that ends with SIGTERM after a number of steps."""
    train = DetectionTask.step

    def train_and_stop(task, batch, step, lr):
        figures = train(task, batch, step, lr)
        if step + 1 == steps:
            os.kill(os.getpid(), signal.SIGTERM)
        return figures

    return train_and_stop


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    newest = newest_checkpoint(folder / "checkpoints")
    assert newest is not None
    return read_tensors(newest)[0]


def test_a_stopped_training_refuses_other_annotations_and_ends_in_the_same_state(tmp_path, monkeypatch):
    file = annotations("box", tmp_path / "coco")
    changes = {"iterations": 2, "batch_size": 2, "accumulate": 2}
    detect(small_options("box", file, out=tmp_path / "whole", **changes), console=QUIET)
    with monkeypatch.context() as patch:
        patch.setattr(DetectionTask, "step", stopped_after(1))
        with pytest.raises(Interrupted, match="stopped after step 1"):
            detect(small_options("box", file, out=tmp_path / "out", **changes), console=QUIET)
    with pytest.raises(RunError, match="jcl detect --resume"):
        DetectionFolder(tmp_path / "out").summary()
    whole = file.read_bytes()
    edit(file, lambda content: content["annotations"].pop())
    with pytest.raises(RunError, match="annotations have changed"):
        resume_detection(tmp_path / "out", DetectOptions(pictures=0, workers=0), console=QUIET)
    evaluate_detector(tmp_path / "out", DetectOptions(workers=0), console=QUIET)
    names = ["disc", "square"]
    edit(
        file, lambda content: [each.update(name=name) for each, name in zip(content["categories"], names, strict=True)]
    )
    with pytest.raises(RunError, match="classes"):
        evaluate_detector(tmp_path / "out", DetectOptions(workers=0), console=QUIET)
    file.write_bytes(whole)
    about = tmp_path / "out" / "data.json"
    kept = about.read_bytes()
    about.write_text('{"classes": 5, "train_json": "x"}')
    for use in (resume_detection, evaluate_detector):
        with pytest.raises(JclError, match=r"data\.json"):
            use(tmp_path / "out", DetectOptions(pictures=0, workers=0), console=QUIET)
    about.write_bytes(kept)
    assert resume_detection(tmp_path / "out", DetectOptions(pictures=0, workers=0), console=QUIET).summary()
    states = final_state(tmp_path / "whole"), final_state(tmp_path / "out")
    assert states[0].keys() == states[1].keys() and len(states[0]) > 100
    assert [name for name, value in states[0].items() if not torch.equal(value, states[1][name])] == []


@pytest.mark.faults  # for its length
def test_an_image_that_cannot_be_read_loses_no_iteration(tmp_path, monkeypatch):
    changes = {"iterations": 3, "batch_size": 2, "accumulate": 2}
    file = annotations("box", tmp_path / "coco")
    detect(small_options("box", file, out=tmp_path / "whole", **changes), console=QUIET)
    read, asked = batches.read_image, []

    def read_five(image):
        asked.append(image)
        if len(asked) == 6:  # the second part of the third batch
            raise DataError(f"{image.path} cannot be read.")
        return read(image)

    with monkeypatch.context() as patch:
        patch.setattr(batches, "read_image", read_five)
        with pytest.raises(DataError, match=r"cannot be read.*after step 2"):
            detect(small_options("box", file, out=tmp_path / "parts", **changes), console=QUIET)
    resume_detection(tmp_path / "parts", DetectOptions(pictures=0, workers=0), console=QUIET)
    whole, parts = final_state(tmp_path / "whole"), final_state(tmp_path / "parts")
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []


@pytest.mark.slow
def test_ranks_that_start_again_go_on_without_a_folder_and_another_seed_is_another_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = small_options("box", annotations("box", tmp_path / "coco"), iterations=2, batch_size=2)
    with monkeypatch.context() as patch:
        patch.setattr(DetectionTask, "step", stopped_after(1))
        with pytest.raises(Interrupted):
            detect(options, console=QUIET)
    monkeypatch.setenv("JCL_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    folder = detect(options, console=QUIET)
    assert folder.path == Path("runs/detect-box-001") and folder.summary()["iterations"] == 2
    other = detect(options.model_copy(update={"seed": 1}), console=QUIET)
    assert other.path == Path("runs/detect-box-002")
    name = "model.roi_heads.box_predictor.cls_score.weight"
    assert not torch.equal(final_state(folder.path)[name], final_state(other.path)[name])
