"""Mistakes of new users: each is noticed, and the message names the way out."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jcl.runs.folder import RunFolder
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
        ("knn", unfinished, npz),
        ("export", unfinished, "--to", "safetensors", "-o", "b.safetensors"),
        ("embed", unfinished, npz, "-o", "f.npz"),
    ):
        code, _, err = call(*command)
        assert code == 0 and err.count("epoch 1 of 200") == 1 and f"`jcl resume {unfinished}`" in err, err
    assert call("knn", pretrained, npz) == (0, call("knn", unfinished, npz)[1], "")


@pytest.mark.parametrize("command", ["knn", "linear", "finetune", "embed -o f.npz"])
def test_swapped_arguments_are_noticed(refused, pretrained, image_folder, command):
    name, *options = command.split()
    said = refused(name, image_folder, pretrained, *options, exit_code=2)
    assert f"`jcl {name} {pretrained} {image_folder}`" in said
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


def test_a_class_folder_alone_is_noticed(call, tmp_path):
    photos = write_image_folder(tmp_path / "photos")
    code, out, _ = call("check", photos / "cats")
    assert code == 0 and out.count(f"give {photos}.") == 1
    assert str(photos) not in call("check", photos)[1]
    (photos / "notes").mkdir()  # not a class
    assert f"give {photos}." not in call("check", photos / "cats")[1]


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("pretrain x --learning-rate 1", "--lr?"),
        ("pretrain x --epoch 1", "--epochs?"),
        ("pretrain x --arch resnet18", "--backbone?"),
        ("pretrain x --queue_size 9", "--set method.queue_size=VALUE."),
        ("pretrain x --wd 1", "--set train.weight_decay=VALUE."),
        ("pretrain x --pretrained imagenet", "`jcl import`"),
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
        ("train.lr=fast", "must be a number or 'auto'."),
        ("train.compile=maybe", "must be true or false or 'auto'."),
        ("views.mean=3", "must be a list such as [1, 2, 3] or 'auto'."),
        ("views.local_scale=[0.1,0.2,0.3]", "has too many values."),
        ("train.epochs=1.5", "must be an integer."),
    ],
)
def test_invalid_values_say_what_is_valid(refused, assignment, wanted):
    assert refused("pretrain", "x", "--set", assignment, exit_code=2).endswith(wanted)


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
