"""`jcl detect` and `jcl detect-table`: figures, files, signals, ranks and errors."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchvision

from jcl.core.encoder import build_backbone
from jcl.evaluate.detection.model import DetectionTask
from jcl.export import BackboneInfo, save_backbone
from jcl.runs.checkpoint import newest_checkpoint, read_tensors
from launch_tools import wait_until
from small_coco import edit, write_coco

SMALLEST = "timm/test_resnet"
SMALL = ["--heads", "small", "--iterations", "2", "--batch-size", "4", "--short-side", "64", "64"]
SMALL += ["--rois-per-image", "16", "--workers", "0", "--device", "cpu", "--pictures", "1"]


@pytest.fixture(scope="module")
def backbone_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("backbone") / "jcl.safetensors"
    torch.manual_seed(0)
    network, width = build_backbone(SMALLEST)
    info = BackboneInfo(SMALLEST, "imagenet", 64, width, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    save_backbone(network, info, file)
    return file


@pytest.fixture
def coco(tmp_path) -> Path:
    return write_coco(tmp_path / "co[co]").parent


def test_few_images_to_train_on_and_to_test_with(call, coco):
    options = ["detect", "--task", "mask", "--coco", coco, "--init", "random", "--backbone", SMALLEST, *SMALL]
    code, out, err = call(*options, "--batch-size", 2, "--overfit", 5, "--out", "few", "--json", "few.json")
    assert code == 0, err
    assert "on 5 images" in err and "5 images" in out
    figures = json.loads(Path("few.json").read_text())
    assert figures["tested_on_training_images"] and figures["train_images"] == figures["test_images"] == 5
    code, _, err = call(*options, "--overfit", 500, "--out", "many")
    assert code == 1 and "500" in err


def test_from_a_backbone_to_a_table(call, coco, backbone_file):
    code, out, err = call(
        "detect", "--task", "box", "--coco", coco, "--init", backbone_file, "--out", "one", *SMALL, "--json", "one.json"
    )
    assert code == 0, err
    assert f"tensors of {SMALLEST}" in err and "learning rate 0.005" in err
    assert "held out" in err and "1 image, held out" in out
    figures = json.loads(Path("one.json").read_text())
    assert {"box_ap", "box_ap50", "box_ap75", "images_per_second", "iterations", "seconds"} <= figures.keys()
    assert figures["iterations"] == 2 and figures["lr"] == 0.005 and figures["train_images"] == 7
    settings = json.loads(Path("one/detect.json").read_text())
    assert settings["mean"] == [0.5] * 3 and settings["max_side"] == 107 and settings["test_short_side"] == 64
    code, out, err = call("detect", "--eval-only", "one", "--workers", "0", "--json", "again.json")
    assert code == 0, err
    assert json.loads(Path("again.json").read_text())["box_ap"] == figures["box_ap"]
    newest = newest_checkpoint(Path("one/checkpoints"))
    code, out, err = call("detect", "--eval-only", newest, "--workers", "0", "--pictures", "1", "--out", "ev")
    assert Path("ev/detections.png").read_bytes() == Path("one/detections.png").read_bytes(), err
    assert code == 0 and Path("ev/results-bbox.json").read_bytes() == Path("one/results-bbox.json").read_bytes(), err
    code, escape_cell, err = call("detect-table", "ev")
    assert code == 0 and escape_cell == call("detect-table", "one")[1], err
    for options in (("--eval-only", "one"), ("--task", "box", "--coco", coco, "--init", "random", *SMALL)):
        code, _, err = call("detect", *options, "--out", "ev")
        assert code == 1 and "ev" in err and "summary.json" in err
    code, out, err = call("detect-table", "one")
    assert code == 0 and f"| jcl.safetensors | {SMALLEST} | 2 | 4 | 0 |" in out
    code, out, err = call("detect-table", "one", "ev")
    assert code == 0 and "| jcl.safetensors (one) |" in out and "| jcl.safetensors (ev) |" in out, err
    assert "comparable" not in err
    summary = json.loads(Path("ev/summary.json").read_text())
    Path("ev/summary.json").write_text(json.dumps(summary | {"test_images": 30}))
    assert "not comparable" in call("detect-table", "one", "ev")[2]
    Path("ev/summary.json").write_text(json.dumps(summary | {"tested_on_training_images": True}))
    assert "not comparable" in call("detect-table", "one", "ev")[2]
    code, out, err = call("detect", "--resume", "one")
    assert code == 0 and "nothing to resume" in err


def test_what_a_detector_is_evaluated_on(call, coco, tmp_path):
    """Without test annotations, a fifth of the images it was trained on, but all images of other data."""
    file = coco / "instances.json"
    code, _, err = call("detect", "--task", "box", "--coco", coco, "--init", "random", "--backbone", SMALLEST,
                        "--out", "own", *SMALL)  # fmt: skip
    assert code == 0, err
    other = write_coco(tmp_path / "other", count=5, seed=1)
    moved = shutil.copytree(coco, tmp_path / "moved")
    chosen = {
        ("--coco", moved): (1, True, False),
        ("--coco", other.parent): (5, False, False),
        ("--coco", coco, "--val-json", file): (8, False, True),
    }
    for options, expected in chosen.items():
        code, out, err = call("detect", "--eval-only", "own", *options, "--workers", 0, "--json", "own.json")
        assert code == 0, err
        figures = json.loads(Path("own.json").read_text())
        assert (figures["test_images"], figures["test_held_out"], figures["tested_on_training_images"]) == expected
        assert ("held out" in out, ", the training images" in out) == expected[1:]


@pytest.mark.faults
def test_a_signal_saves_and_resuming_ends_in_the_same_state(call, coco, tmp_path):
    arguments = ["detect", "--task", "box", "--coco", coco, "--init", "random", "--backbone", "resnet18", *SMALL]
    arguments += ["--iterations", "6", "--pictures", "0"]
    command = [sys.executable, "-m", "jcl", *map(str, arguments), "--workers", "1", "--checkpoint-every", "1"]
    process = subprocess.Popen([*command, "--out", "parts"], stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        wait_until(lambda: list(Path("parts/checkpoints").glob("step-*.safetensors")))
        os.killpg(process.pid, signal.SIGTERM)  # as a scheduler does: the decoding process hears it too
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75 and "jcl detect --resume parts" in err, err
    settings = Path("parts/detect.json")
    settings.write_text(settings.read_text().replace('"device": "auto"', '"device": "cuda:99"'))
    code, _, err = call("detect", "--resume", "parts", "--workers", "0", "--pictures", "0", "--device", "cpu")
    assert code == 0 and "Resuming from" in err, err
    code, _, err = call(*arguments, "--out", "whole")
    assert code == 0, err
    whole, parts = (read_tensors(newest_checkpoint(Path(name) / "checkpoints"))[0] for name in ("whole", "parts"))
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []


@pytest.mark.faults
def test_two_ranks_train_one_detector(coco, tmp_path):
    arguments = ["detect", "--task", "box", "--coco", coco, "--init", "random", "--backbone", "resnet18", *SMALL]
    command = [sys.executable, "-m", "jcl", *map(str, arguments), "--devices", "2", "--out", tmp_path / "ranks"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "ranks" / "summary.json").read_text())
    assert summary["ranks"] == 2 and summary["iterations"] == 2
    last = json.loads((tmp_path / "ranks" / "metrics.jsonl").read_text().splitlines()[-1])
    saved, _ = read_tensors(newest_checkpoint(tmp_path / "ranks" / "checkpoints"))
    # What is saved is of both ranks, so that either may go on from it; the first rank's own loss is another.
    assert float(saved["progress.window"][0]) == pytest.approx(last["loss"], rel=1e-6)
    assert done.stdout.count("Everything is in") == 1


BOX = ("detect", "--task", "box", "--init", "random", "--backbone", SMALLEST, "--out", "o", *SMALL)


def test_data_that_cannot_be_used(refused, coco, tmp_path):
    assert "none" in refused(*BOX, "--coco", tmp_path / "none")
    assert "--coco" in refused(*BOX)
    assert "none.json" in refused(*BOX, "--coco", coco, "--train-json", tmp_path / "none.json")
    keypoints = (*BOX, "--task", "keypoint")
    assert "person_keypoints" in refused(*keypoints, "--coco", coco)
    assert "--task keypoint" in refused(*keypoints, "--coco", coco, "--train-json", coco / "instances.json")
    other = write_coco(tmp_path / "other", count=3)
    edit(other, lambda content: content["categories"].append({"id": 9, "name": "ring"}))
    named = ("--val-json", other, "--val-images", other.parent / "images")
    assert "different categories" in refused(*BOX, "--coco", coco, *named)
    (coco / "images" / "002.png").unlink()
    assert "1 of the 8 images" in refused(*BOX, "--coco", coco)


def test_an_image_that_breaks_while_training_leaves_nothing(call, coco):
    for image in (coco / "images").iterdir():
        image.write_bytes(b"broken")
    code, out, err = call(*BOX, "--coco", coco)
    assert code == 1 and out == "" and "Traceback" not in err
    assert ".png" in err.splitlines()[-1]
    assert not Path("o").exists()


def test_ctrl_c_before_the_first_step_leaves_nothing(call, coco, monkeypatch):
    def press_ctrl_c(*_: object) -> None:
        assert Path("o/detect.json").exists()
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr("jcl.commands.detect.DetectionJob.announce", press_ctrl_c)
        code, out, err = call(*BOX, "--coco", coco)
    assert (code, out, err) == (130, "", "Interrupted.\n") and not Path("o").exists()


def test_starts_and_values_that_do_not_work(refused, coco, tmp_path, tmp_path_factory):
    where = ("--coco", coco)
    start = ("detect", "--task", "box", "--out", "o", *SMALL, *where, "--init")
    assert "--task" in refused("detect", *where)
    assert "none" in refused(*start, tmp_path / "none")
    weights = torchvision.models.resnet18().state_dict()
    del weights["layer4.1.conv2.weight"]
    half = tmp_path_factory.mktemp("weights") / "half.pth"
    torch.save(weights, half)
    assert "layer4.1.conv2.weight" in refused(*start, half)
    assert "tiny_cnn" in refused(*start, "random", "--backbone", "tiny_cnn")
    assert "iterations" in refused(*BOX, *where, "--iterations", "0", exit_code=2)
    assert "--schedule" in refused(*BOX, *where, "--schedule", "2x")
    assert "3" in refused(*BOX, *where, "--accumulate", "3")
    assert "short_side" in refused(*BOX, *where, "--short-side", "96", "64")
    assert "gpu" in refused(*BOX, *where, "--device", "gpu")
    (tmp_path / "file").write_text("mine")
    assert "file" in refused(*BOX, *where, "--out", tmp_path / "file")
    assert "detector" in refused("detect", "--resume", tmp_path / "none")
    assert "detector" in refused("detect-table", tmp_path / "none")
    (tmp_path / "pretraining").mkdir()
    (tmp_path / "pretraining/summary.json").write_text('{"method": "jcl"}')
    assert "holds no detector" in refused("detect-table", tmp_path / "pretraining")
    assert "--lr" in refused("detect", "--resume", tmp_path / "none", "--lr", 1)
    assert "--coco" in refused("detect", "--resume", tmp_path / "none", "--coco", tmp_path)
    assert "--schedule" in refused("detect", "--eval-only", tmp_path / "none", "--schedule", "2x")
    assert "--resume" in refused("detect", "--eval-only", tmp_path / "none", "--resume", tmp_path)
    assert "detector" in refused("detect", "--eval-only", tmp_path / "none")


FAILING = """
import torch
from jcl.cli import main
from jcl.evaluate.detection.model import DetectionTask

def fail(*_):
    raise ZeroDivisionError

DetectionTask.step = fail
main()
"""


@pytest.mark.faults  # for its length
def test_an_error_in_training_ends_the_workers_too(coco, tmp_path):
    options = ["detect", "--task", "box", "--coco", str(coco), "--init", "random", "--backbone", "resnet18", *SMALL]
    options[options.index("--workers") + 1] = "2"
    done = subprocess.run(
        [sys.executable, "-c", FAILING, *options, "--out", str(tmp_path / "failed")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_too_little_memory_is_a_sentence(call, coco, monkeypatch):
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8.00 GiB. Of")

    monkeypatch.setattr(DetectionTask, "step", fail)
    code, _, err = call(*BOX, "--coco", coco)
    assert code == 1 and "2.00 GiB" in err and "Traceback" not in err
