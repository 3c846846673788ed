"""`jcl linear` and `jcl finetune`: figures, files, and one sentence for each thing that can be wrong."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from jcl.commands.inputs import untrained_backbone
from jcl.data.folder import FolderImages
from jcl.evaluate.folders import FinetuneFolder
from small_runs import drawn_pixels, write_image_folder
from supervised_tools import stop_after


def figures(file: str) -> dict:
    values = json.loads(Path(file).read_text())
    return {name: value for name, value in values.items() if name not in ("seconds", "finished")}


def test_linear_fast(call, pretrained, npz):
    code, out, err = call("linear", pretrained, "--per-class", "--json", "one.json")
    assert code == 0, err
    one = figures("one.json")
    assert {"linear_top1", "linear_top5", "lr", "weight_decay", "epochs", "validation_top1"} <= one.keys()
    assert one["protocol"] == "fast" and one["train_images"] == 34 and one["test_images"] == 10
    assert one["linear_top5"] == 100 and not one["test_held_out"]
    assert f"{one['linear_top1']:.2f} %" in out and "Trained on 34 images of 3 classes. Tested on 10 images." in out
    by_class = [one[f"linear_top1_{name}"] for name in range(3)]
    members = [sum((34 + number) % 3 == name for number in range(10)) for name in range(3)]
    assert sum(share * count for share, count in zip(by_class, members, strict=True)) / 10 == pytest.approx(
        one["linear_top1"]
    )
    code, _, err = call("linear", pretrained / "backbone.safetensors", npz, "--per-class", "--json", "two.json")
    assert code == 0 and figures("two.json") == one, err


def test_the_untrained_network_is_measured_once(call, pretrained, npz, monkeypatch):
    built = []

    def build(*arguments: object) -> object:
        built.append(arguments)
        return untrained_backbone(*arguments)

    monkeypatch.setattr("jcl.commands.inputs.untrained_backbone", build)
    for command, name in (("knn -k 3", "knn_top1"), ("linear --epochs 2", "linear_top1")):
        found = []
        for weights in (pretrained, pretrained / "backbone.safetensors"):
            code, out, err = call(*command.split(), weights, npz, "--json", "figures.json")
            assert code == 0 and "chance is 40.00 %" in out, err
            found.append(figures("figures.json"))
        assert len(built) == 1 and found[0] == found[1] and found[0][f"untrained_{name}"] > 0
        built.clear()
        assert call(*command.split(), pretrained, "--no-untrained", "--json", "figures.json")[0] == 0
        without = figures("figures.json")
        assert without == {key: value for key, value in found[0].items() if "untrained" not in key} and built == []


def test_linear_says_that_the_choice_lies_at_the_edge(call, pretrained):
    code, out, _ = call("linear", pretrained, "--lr", 1e-9, "--lr", 1e-8, "--weight-decay", 0, "--epochs", 2)
    assert code == 0 and "edge of the grid" in out and "est learning rate" in out
    code, out, _ = call("linear", pretrained, "--lr", 0.1, "--weight-decay", 0, "--epochs", 2)
    assert code == 0 and "edge" not in out


def test_linear_by_the_papers_protocol(call, pretrained):
    arguments = ("linear", pretrained, "--protocol", "paper", "--epochs", 2, "--lr", 10, "--batch-size", 16)
    code, out, err = call(*arguments, "--json", "one.json")
    assert code == 0, err
    one = figures("one.json")
    assert one["chance_top1"] == 40 and 0 < one["untrained_linear_top1"] <= 100
    assert (one["protocol"], one["lr"], one["weight_decay"], one["epochs"]) == ("paper", 10, 0, 2)
    assert "Tested on 10 images." in out


def test_linear_in_a_folder_goes_on_with_the_same_command(call, pretrained, monkeypatch):
    arguments = ("linear", pretrained, "--protocol", "paper", "--epochs", 2, "--batch-size", 16, "--per-class")
    assert call(*arguments, "--json", "whole.json")[0] == 0 and not Path("probe").exists()
    with monkeypatch.context() as patch:
        stop_after(patch, 3, signal.SIGINT)
        code, out, err = call(*arguments, "--out", "probe", "--json", "half.json")
    assert code == 75 and out == "" and not Path("half.json").exists()
    assert "SIGINT received: stopped after step 3" in err
    code, _, err = call(*arguments, "--out", "probe", "--lr", 10)
    assert code == 1 and "lr = 30 instead of 10" in err
    code, out, err = call(*arguments, "--out", "probe", "--json", "resumed.json")
    assert code == 0 and "Resuming from probe/checkpoints/step-000000003.safetensors." in err, err
    assert figures("resumed.json") == figures("whole.json")
    code, again, err = call(*arguments, "--out", "probe", "--json", "again.json")
    assert code == 0 and again == out and "has finished" in err
    assert figures("again.json") == figures("whole.json")


@pytest.mark.parametrize("protocol", ["fast", "paper"])
def test_linear_without_a_test_set_holds_some_images_out_and_says_so(call, pretrained, image_folder, protocol):
    arguments = ("linear", pretrained, image_folder, "--protocol", protocol, "--epochs", 2, "--workers", 0)
    code, out, err = call(*arguments, "--json", "linear.json")
    assert code == 0, err
    assert "held out of the training images" in out
    found = figures("linear.json")
    assert found["test_held_out"] and found["test_images"] == 2 and found["train_images"] == 24


def test_knn_says_whether_it_asks_about_test_images(call, pretrained, image_folder):
    words = "held out"
    assert words in call("knn", pretrained, image_folder, "--workers", 0)[2]
    assert words not in call("knn", pretrained)[2]


@pytest.mark.parametrize("command", ["knn", "linear --epochs 1", "finetune --epochs 1"])
def test_images_that_cannot_be_read_are_told_of(call, pretrained, tmp_path, command):
    name, *options = command.split()
    for split in ("train", "val"):
        write_image_folder(tmp_path / "photos" / split)
        (tmp_path / "photos" / split / "cats" / f"{split}.png").write_bytes(b"no image")
        (tmp_path / "photos" / split / "cats" / "IMG_1.nef").touch()
    code, _, err = call(name, pretrained, tmp_path / "photos", *options, "--workers", 0, "--device", "cpu")
    assert code == 0 and "unreadable image" in err and "cats/train.png" in err, err
    assert "nef" in err


@pytest.mark.parametrize("command", ["knn", "linear --epochs 1"])
def test_test_images_of_classes_without_training_images_are_told_of(call, pretrained, tmp_path, command):
    name, *options = command.split()
    labels = np.arange(24) % 3
    np.savez(
        tmp_path / "odd.npz",
        x_train=drawn_pixels(24),
        y_train=labels,
        x_test=drawn_pixels(24),
        y_test=labels + 1,
    )
    code, out, err = call(name, pretrained, tmp_path / "odd.npz", *options, "--json", "odd.json", "--device", "cpu")
    assert code == 0 and "8 test images have classes unseen in training; counted as errors." in out, err
    assert (figures("odd.json")["unseen_class_images"], figures("odd.json")["test_images"]) == (8, 24)


def test_a_class_of_unreadable_images_is_none_that_the_probe_was_trained_on(call, pretrained, tmp_path):
    for split in ("train", "val"):
        write_image_folder(tmp_path / "photos" / split, classes=("cats", "dogs", "emus"))
    for image in (tmp_path / "photos" / "train" / "dogs").iterdir():
        image.write_bytes(b"no image")
    code, out, err = call(
        "linear", pretrained, tmp_path / "photos", "--workers", 0, "--epochs", 1, "--json", "two.json"
    )
    assert code == 0 and "images of 2 classes." in out and figures("two.json")["classes"] == 2, err


def test_one_class_folder_gives_no_labels_and_the_sentence_says_how_many_there_must_be(refused, pretrained, tmp_path):
    write_image_folder(tmp_path / "photos", classes=("cats",))
    assert "two or more class folders" in refused("knn", pretrained, tmp_path / "photos")


def test_linear_refuses(refused, pretrained, npz, tmp_path):
    np.savez(tmp_path / "bare.npz", x_train=drawn_pixels(20))
    np.savez(tmp_path / "one.npz", x_train=drawn_pixels(20), y_train=np.zeros(20, dtype=int))
    assert "no run or weights file" in refused("linear", tmp_path / "missing")
    assert "has no labels" in refused("linear", pretrained, tmp_path / "bare.npz")
    assert "at least two classes" in refused("linear", pretrained, tmp_path / "one.npz")
    assert "weights file" in refused("linear", pretrained / "backbone.safetensors")
    assert "There is no folder" in refused("linear", pretrained, tmp_path / "nothing")
    assert "--lr" in refused("linear", pretrained, "--lr", 0)
    assert "--weight-decay" in refused("linear", pretrained, "--weight-decay", -1)
    assert "--lr" in refused("linear", pretrained, "--protocol", "paper", "--lr", 1, "--lr", 2)
    assert "--lr" in refused("linear", pretrained, "--protocol", "paper", "--weight-decay", 0.1)
    assert "--lr" in refused("linear", pretrained, "--protocol", "paper", "--lr", -1)
    assert "Unknown device" in refused("linear", pretrained, "--device", "gpu")
    assert "--protocol paper" in refused("linear", pretrained, "--out", tmp_path / "probe")


@pytest.mark.parametrize("option", [("--epochs", 0), ("--protocol", "other"), ("--seed", -1), ("--batch-size", 1)])
def test_options_out_of_range(call, pretrained, option):
    code, _, err = call("linear", pretrained, *option)
    assert code == 2 and option[0] in err and "Traceback" not in err


def test_finetune_writes_its_folder_and_can_go_on_from_there(call, refused, pretrained, npz):
    arguments = ("finetune", pretrained, "--labels", "50%", "--epochs", 2, "--workers", 0)
    code, out, err = call(*arguments, "--out", "tuned", "--json", "tuned.json")
    assert code == 0, err
    summary = json.loads(Path("tuned.json").read_text())
    assert summary == json.loads(Path("tuned/summary.json").read_text())
    assert summary["labels"] == "50%" and summary["labels_used"] == len(
        Path("tuned/labels.txt").read_text().splitlines()
    )
    assert 15 <= summary["labels_used"] <= 19  # half of 34
    assert f"{summary['finetune_top1']:.2f} %" in out and "Everything is in tuned" in out
    assert {path.name for path in Path("tuned").iterdir()} == {
        "finetune.json", "labels.txt", "run_id", "metrics.jsonl", "checkpoints",
        "backbone.safetensors", "classifier.safetensors", "summary.json",
    }  # fmt: skip
    assert call("linear", "tuned/backbone.safetensors", npz, "--epochs", 1)[0] == 0
    code, _, err = call("knn", "tuned", npz)
    assert code == 1 and "tuned/backbone.safetensors." in err
    settings = Path("tuned/finetune.json")
    settings.write_text(settings.read_text().replace('"device": "auto"', '"device": "cuda:99"'))
    Path("tuned/summary.json").unlink()
    assert "cuda:99" in refused("finetune", "--resume", "tuned")
    assert call("finetune", "--resume", "tuned", "--device", "cpu")[0] == 0 and Path("tuned/summary.json").exists()
    code, _, err = call("resume", "tuned")
    assert code == 1 and "`jcl finetune --resume tuned`" in err
    code, _, err = call(*arguments)  # without --out
    assert code == 0 and len(list(Path("runs").glob("finetune-small-001/summary.json"))) == 1, err


def test_finetune_refuses(refused, call, pretrained, npz, tmp_path):
    np.savez(tmp_path / "bare.npz", x_train=drawn_pixels(20))
    (tmp_path / "file").write_text("mine")
    assert "Give the weights to fine-tune" in refused("finetune")
    assert "no run or weights file" in refused("finetune", tmp_path / "missing", npz)
    assert "has no labels" in refused("finetune", pretrained, tmp_path / "bare.npz")
    assert "weights file" in refused("finetune", pretrained / "backbone.safetensors")
    for bad in ("0%", "200%", "ten", "0-per-class"):
        assert "--labels" in refused("finetune", pretrained, "--labels", bad)
    assert "layer_decay" in refused("finetune", pretrained, "--layer-decay", 2)
    assert "for --lr: must be greater than 0. See" in refused("finetune", pretrained, "--lr", 0)
    assert "for --weight-decay: must be at least 0. See" in refused("finetune", pretrained, "--weight-decay", -1)
    assert "is a file" in refused("finetune", pretrained, "--out", tmp_path / "file")
    assert "holds no fine-tuning" in refused("finetune", "--resume", tmp_path / "nothing")
    assert "RUN_OR_WEIGHTS does not go with --resume" in refused(
        "finetune", pretrained, "--resume", tmp_path / "nothing"
    )
    for option, value in (("--epochs", 50), ("--lr", 1), ("--labels", "10%")):  # one of them is what is usual anyway
        assert f"{option} does not go with --resume" in refused(
            "finetune", "--resume", tmp_path / "nothing", option, value
        )
    shutil.copytree(pretrained, tmp_path / "copy")
    assert "already holds a run" in refused("finetune", pretrained, "--out", tmp_path / "copy")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/labels.txt").write_text("mine")
    assert "labels.txt already exists" in refused("finetune", pretrained, "--out", tmp_path / "mine")
    assert [path.read_text() for path in (tmp_path / "mine").iterdir()] == ["mine"]


def test_ctrl_c_saves_and_the_command_it_names_goes_on(call, pretrained, tmp_path, monkeypatch):
    """The same command again is told how to continue."""
    tuned = tmp_path / "tuned [1]"
    arguments = ["finetune", pretrained, "--epochs", 3, "--batch-size", 8, "--workers", 0, "--out", tuned]
    with monkeypatch.context() as patch:
        stop_after(patch, 5, signal.SIGINT)
        code, _, err = call(*arguments)
    assert code == 75 and "Traceback" not in err
    assert "SIGINT received" in err and "Error" not in err
    assert f"`jcl finetune --resume '{tuned}'`" in err  # quoted, for there are brackets in the name
    code, _, err = call(*arguments)
    assert code == 1 and f"continue with `jcl finetune --resume '{tuned}'`" in err
    code, out, err = call("finetune", "--resume", tuned, "--workers", 0)
    assert code == 0 and "Resuming from" in err and "labels used" in out
    whole = tmp_path / "whole"
    assert call(*arguments[:-1], whole)[0] == 0
    ends = [FinetuneFolder(folder).summary() | {"seconds": 0} for folder in (tuned, whole)]
    assert ends[0] == ends[1]
    code, _, err = call("finetune", "--resume", tuned)
    assert code == 0 and "nothing to resume" in err


SHORT_TRAININGS = {
    "finetune": ("finetune", "--epochs", "1", "--workers", "0"),
    "linear": ("linear", "--protocol", "paper", "--epochs", "1", "--workers", "0"),
}


@pytest.mark.parametrize(
    ("command", "first"), [("finetune", "finetune.json"), ("linear", "probe.json")], ids=["finetune", "linear"]
)
def test_ctrl_c_before_the_first_step_leaves_nothing_behind(
    call, pretrained, image_folder, monkeypatch, command, first
):
    """While it reads the test images; then the same command again."""
    arguments = [*SHORT_TRAININGS[command], pretrained, image_folder, "--out"]
    Path("mine").mkdir()
    Path("mine/skipped.txt").write_text("my own list")
    read = FolderImages.read
    for out in (Path("new"), Path("mine")):

        def press_ctrl_c(*arguments: object, begun: Path = out / first) -> torch.Tensor:
            if begun.exists():
                os.kill(os.getpid(), signal.SIGINT)
            return read(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(FolderImages, "read", press_ctrl_c)
            code, _, err = call(*arguments, out)
        assert code == 130 and err.endswith("Interrupted.\n") and "Traceback" not in err, err
    assert not Path("new").exists()
    assert [path.name for path in Path("mine").iterdir()] == ["skipped.txt"]
    assert Path("mine/skipped.txt").read_text() == "my own list"
    code, _, err = call(*arguments, "new")
    assert code == 0 and Path("new/summary.json").exists(), err


@pytest.mark.parametrize("command", list(SHORT_TRAININGS))
def test_ctrl_c_twice_goes_back_to_the_newest_checkpoint_or_to_nothing(call, pretrained, monkeypatch, command):
    def press_twice_in_step(patch: pytest.MonkeyPatch, step: int) -> None:
        stop_after(patch, step, signal.SIGINT)
        stop_after(patch, step, signal.SIGINT)

    arguments = (*SHORT_TRAININGS[command], "--batch-size", 8, pretrained, "--out", "out")
    with monkeypatch.context() as patch:
        press_twice_in_step(patch, 2)
        assert call(*arguments)[0] == 130 and not Path("out").exists(), "there is no checkpoint to go on from"
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGINT)
        assert call(*arguments)[0] == 75
    again = ("finetune", "--resume", "out", "--workers", 0) if command == "finetune" else arguments
    with monkeypatch.context() as patch:
        press_twice_in_step(patch, 3)
        code, _, err = call(*again)
    how = "`jcl finetune --resume out`" if command == "finetune" else "same command"
    assert code == 75 and how in err and "step-000000002" in err
    code, _, err = call(*again)
    assert code == 0 and "Resuming from out/checkpoints/step-000000002.safetensors." in err


def test_values_unlike_those_of_training_are_warned_about(call, pretrained, npz):
    with np.load(npz) as arrays:
        np.savez("wide.npz", **{name: values.astype(np.int64) for name, values in arrays.items()})
    for data, far in ((npz, False), ("wide.npz", True)):
        code, _, err = call("knn", pretrained, data, "--no-untrained")
        assert code == 0 and ("far from those of training" in err) == far, err
