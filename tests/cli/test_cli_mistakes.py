"""Mistakes of new users: each is noticed, and the message names the way out."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jcl.runs.folder import RunFolder
from jcl.runs.lock import lock_folder
from small_runs import TINY_BACKBONE, write_image_folder


@pytest.fixture
def unfinished(pretrained, tmp_path) -> Path:
    """A copy of a run without what is written at its end."""
    run = Path(shutil.copytree(pretrained, tmp_path / "unfinished"))
    for file in (RunFolder(run).summary_file, RunFolder(run).backbone_file):
        file.unlink()
    return run


def test_weights_of_an_unfinished_run_are_announced_once(call, unfinished, pretrained, npz):
    settings = unfinished / "settings.yaml"
    settings.write_text(settings.read_text().replace("epochs: 1\n", "epochs: 200\n"))
    for command in (
        ("knn", unfinished, npz, "--json", "knn.json"),
        ("linear", unfinished, npz, "--epochs", 2, "--json", "linear.json"),
        ("export", unfinished, "--to", "safetensors", "-o", "b.safetensors"),
        ("embed", unfinished, npz, "-o", "f.npz"),
    ):
        code, _, err = call(*command)
        assert code == 0 and err.count("epoch 1 of 200") == 1 and f"`jcl resume {unfinished}`" in err, err
    for name in ("knn", "linear"):
        figures = json.loads(Path(f"{name}.json").read_text())
        assert figures["finished"] is False and figures["epoch"] == 1 and figures["classes"] == 3
    finished = call("knn", pretrained, npz, "--json", "finished.json")
    assert finished == (0, call("knn", unfinished, npz)[1], "")
    assert json.loads(Path("finished.json").read_text())["finished"] is True
    with lock_folder(unfinished, warn=pytest.fail):
        assert "jcl resume" not in call("knn", unfinished, npz)[2]


def test_a_checkpoint_is_evaluated_on_the_images_of_its_run(call, unfinished):
    settings = unfinished / "settings.yaml"
    settings.write_text(settings.read_text().replace("  seed: 0\n", "  seed: 7\n"))
    found = []
    for weights in (unfinished, *(unfinished / "checkpoints").glob("step-*")):
        code, _, err = call("knn", weights, "--json", "knn.json")
        assert code == 0, err
        found.append(json.loads(Path("knn.json").read_text()))
    whole, checkpoint = found
    assert whole.pop("finished") is False and whole == checkpoint and "untrained_knn_top1" in whole
    for command in (("compare",), ("knn",)):
        other = shutil.copy(next((unfinished / "checkpoints").glob("step-*")), unfinished / "checkpoints/step-old.bin")
        assert call(*command, other)[0] == 1


def test_linked_foreign_and_damaged_checkpoints(call, refused, pretrained, tmp_path):
    run = shutil.copytree(pretrained, tmp_path / "run")
    newest = max((run / "checkpoints").glob("step-*"))
    (tmp_path / "latest.safetensors").symlink_to(newest)
    assert call("compare", tmp_path / "latest.safetensors", "--images", 8, "--views-per-image", 2)[0] == 0
    foreign = shutil.copy(run / "backbone.safetensors", run / "checkpoints/step-000000001.safetensors")
    assert foreign.name in refused("compare", foreign, exit_code=1)
    (run / "backbone.safetensors").unlink()
    foreign.unlink()
    for checkpoint in (run / "checkpoints").glob("step-*"):
        checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert newest.name in refused("compare", run, exit_code=1)


def test_a_run_given_as_images_is_recognized(refused, pretrained):
    for command in ("check", "pretrain"):
        assert f"`jcl resume {pretrained}`" in refused(command, pretrained, exit_code=1)


def test_images_beside_the_splits_are_named(call, tmp_path):
    photos = tmp_path / "photos"
    for split in ("train", "val", "test"):
        write_image_folder(photos / split)
    (photos / "annotations").mkdir()
    code, out, _ = call("check", photos, "--json", "found.json")
    (line,) = (line for line in out.splitlines() if str(photos / "test") in line)
    assert code == 0 and "annotations" not in line
    assert all(str(photos / name) in line for name in ("train", "val"))
    assert json.loads(Path("found.json").read_text())["unused"] == line
    shutil.copy(photos / "train/cats/000.png", photos)
    tiny = ("--backbone", TINY_BACKBONE, "--epochs", 1, "--set", "record.report=false", "--set", "data.workers=0")
    code, _, err = call("pretrain", photos, *tiny, "--out", tmp_path / "run")
    assert code == 0 and f"the images in {photos} and {photos / 'test'}." in err
    assert err.count("test images: 26 image files") == 1


def test_check_says_if_training_would_stop_at_unreadable_images(call, image_folder):
    (image_folder / "cats/000.png").write_bytes(b"junk")
    assert "max_failed_share" not in call("check", image_folder)[1]
    for number in ("002", "004"):
        (image_folder / f"cats/{number}.png").write_bytes(b"junk")
    code, out, _ = call("check", image_folder)
    assert code == 0 and out.count("data.max_failed_share=0.1") == 1
    tiny = ("--backbone", TINY_BACKBONE, "--epochs", 1, "--set", "data.workers=0")
    assert "data.max_failed_share" in call("pretrain", image_folder, *tiny)[2]


def test_a_run_that_diverges_at_once_does_not_occupy_its_folder(call, npz, tmp_path):
    tiny = ("pretrain", npz, "--backbone", TINY_BACKBONE, "--epochs", 1, "--out", tmp_path / "run")
    code, _, err = call(*tiny, "--lr", 1e30)
    assert code == 1 and "not finite" in err and not (tmp_path / "run").exists()
    assert call(*tiny, "--set", "record.report=false")[0] == 0


@pytest.mark.parametrize("command", ["knn", "linear", "finetune", "embed -o f.npz", "bound"])
def test_swapped_arguments_are_noticed(refused, pretrained, image_folder, npz, command):
    name, *options = command.split()
    for data in (image_folder, npz):
        said = refused(name, data, pretrained, *options, exit_code=2)
        assert f"`jcl {name} {pretrained} {data}`" in said
    weights = pretrained / "backbone.safetensors"
    assert f"`jcl {name} {weights} cifar10`" in refused(name, "cifar10", weights, *options, exit_code=2)


@pytest.mark.parametrize(
    "command", ["check {data}", "pretrain {data}", "knn {run} {data}", "knn {typo}", "resume {typo}", "bound {typo}"]
)
def test_a_similar_path_is_suggested(refused, pretrained, image_folder, command):
    typo = pretrained.with_name("rnu")
    words = command.format(data=image_folder.with_name("phots"), run=pretrained, typo=typo).split()
    meant = pretrained if str(typo) in words else image_folder
    assert refused(*words, exit_code=1).endswith(f"did you mean {meant}?")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("pretrain x --learning-rate 1", "--lr?"),
        ("knn --weights x y", "give WEIGHTS without an option name"),
        ("pretrain x --epoch 1", "--epochs?"),
        ("pretrain x --arch resnet18", "--backbone?"),
        ("pretrain x --queue_size 9", "--set method.queue_size=VALUE."),
        ("pretrain x --wd 1", "--set train.weight_decay=VALUE."),
        ("pretrain x --pretrained imagenet", "--init?"),
        ("knn x --batch 2", "--batch-size?"),
        ("pretrain --data x", "give DATA without"),
        ("pretrain x --method jlc", "did you mean jcl?"),
        ("pretrain x --set method.name=moco", "did you mean moco-v2?"),
        ("export x -o y --to torchvison", "did you mean torchvision?"),
    ],
)
def test_names_of_options_and_values_are_suggested(refused, arguments, meant):
    assert meant in refused(*arguments.split(), exit_code=2)


@pytest.mark.parametrize(
    ("assignment", "wanted"),
    [
        ("train.lr=fast", "must be a valid number or 'auto'."),
        ("train.compile=maybe", "must be a valid boolean or 'auto'."),
        ("views.mean=3", "must be a list such as [1, 2, 3] or 'auto'."),
        ("views.local_scale=[0.1,0.2,0.3]", "at most 2 items"),
        ("train.epochs=1.5", "must be a valid integer"),
    ],
)
def test_invalid_values_say_what_is_valid(refused, assignment, wanted):
    assert wanted in refused("pretrain", "x", "--set", assignment, exit_code=2)


def test_no_far_fetched_data_is_suggested(refused, tmp_path):
    (tmp_path / "work/noise").mkdir()
    assert "noise" not in refused("pretrain", "mnist", exit_code=1)


@pytest.mark.parametrize("url", ["hf://datasets/name", "https://localhost:1/images/", "s3://bucket/photos.zip"])
def test_a_url_without_shards_is_refused_before_it_is_opened(refused, pretrained, url):
    for command in (("check",), ("pretrain",), ("knn", pretrained)):
        assert ".tar" in refused(*command, url, exit_code=1)


def test_only_an_unfinished_run_is_to_be_continued(refused, pretrained, unfinished, npz):
    tiny = ("--backbone", TINY_BACKBONE, "--device", "cpu")
    assert "jcl resume" not in refused("pretrain", npz, *tiny, "--out", pretrained, exit_code=1)
    assert f"`jcl resume {unfinished}`" in refused("pretrain", npz, *tiny, "--out", unfinished, exit_code=1)


def test_a_current_folder_that_is_gone_is_named(tmp_path):
    program = (
        "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, [sys.executable, '-m', 'jcl', 'recipes'])"
    )
    (tmp_path / "gone").mkdir()
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=tmp_path / "gone", capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and "current folder" in ended.stderr and ended.stderr.count("\n") == 1


def test_a_link_to_itself_is_refused(refused, pretrained):
    Path("loop").symlink_to("loop")
    assert "loop" in refused("report", pretrained, "-o", "loop/report.html", exit_code=1)
