"""Images on the command line: missing, broken, badly sorted, in shards, moved, or with odd names."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from jcl.commands.inputs import refuse_inside_data
from jcl.commands.run import Run
from jcl.data import open_demo
from jcl.errors import RunError
from launch_tools import settings_options
from plain_user import unlistable
from run_tools import stop_after
from small_runs import TINY_VALUES, write_image_folder

TINY = settings_options(TINY_VALUES | {"train.epochs": 1})


def test_missing_and_empty_folders(refused, tmp_path):
    assert "There is no folder" in refused("pretrain", tmp_path / "missing", "--out", "run")
    (tmp_path / "empty").mkdir()
    assert "holds no image files" in refused("pretrain", tmp_path / "empty", "--out", "run")
    assert "jcl pretrain photos/" in refused("pretrain", "--out", "run")
    assert "did you mean cifar10" in refused("pretrain", "cifar-10", "--out", "run")


def test_no_readable_image(refused, tmp_path):
    (tmp_path / "bad").mkdir()
    for number in range(20):
        (tmp_path / "bad" / f"{number}.png").write_bytes(b"nothing")
    assert "can be read" in refused("pretrain", tmp_path / "bad", "--out", "run")


def test_broken_images_are_skipped_unless_strict(call, image_folder):
    (image_folder / "cats" / "000.png").write_bytes(b"no image")
    arguments = ["pretrain", image_folder, *TINY]
    code, _, err = call(*arguments, "--out", "run")
    assert code == 0 and "1 unreadable image" in err and "run/skipped.txt" in err
    assert Path("run/skipped.txt").read_text().startswith("cats/000.png\t")
    code, out, err = call(*arguments, "--strict", "--out", "strict")
    assert code == 1 and out == "" and "Traceback" not in err
    assert "cats/000.png cannot be read" in err
    assert not Path("strict/backbone.safetensors").exists()


def test_check_of_a_broken_image_states_no_size(call, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"broken")
    code, out, _ = call("check", tmp_path, "--json", tmp_path / "figures.json")
    assert code == 0 and " px" not in out
    assert json.loads((tmp_path / "figures.json").read_text())["train_width_max"] is None


def test_views_are_drawn_with_the_settings_of_a_run(call, refused, image_folder):
    size = ["--batch-size", 8, "--image-size", 16]
    chosen = ["--set", "views.recipe=microscopy", "--set", "views.hue=0", "--set", "views.blur_sigma=[0.5, 1]"]
    Path("views.png").write_text("mine")
    assert "views.png" in refused("views", image_folder, *size, "-o", "views.png")
    code, out, _ = call("views", image_folder, *size, *chosen, "-o", "views.png", "--force", "--json", "views.json")
    views = json.loads(Path("views.json").read_text())
    assert code == 0 and "views.png" in out
    assert (views["recipe"], views["image_size"], views["hue"], views["saturation"]) == ("microscopy", 16, 0, 0.2)
    assert (views["rotation_probability"], views["blur_sigma"]) == (0.75, [0.5, 1])
    with Image.open("views.png") as picture:
        assert picture.format == "PNG" and min(picture.size) > 500
    assert "inside the image folder" in refused("views", image_folder, *size, "-o", image_folder / "v.png")
    for name, wrong in (("hue", "0.6"), ("blur_sigma", "[2, 1]")):
        assert name in refused("views", image_folder, *size, "-o", "w.png", "--set", f"views.{name}={wrong}")
    assert not Path("w.png").exists()


def test_check_counts_what_is_there(call, image_folder):
    (image_folder / "cats" / "000.png").write_bytes(b"no image")
    code, out, _ = call("check", image_folder, "--json", "check.json")
    figures = json.loads(Path("check.json").read_text())
    assert code == 0 and "cats/000.png cannot be read: it is not an image" in " ".join(out.split())
    assert re.search(r"images\s+│ 26 ", out) and re.search(r"classes\s+│ 2, of 13 images each", out)
    assert (figures["train_images"], figures["train_unreadable"], figures["train_classes"]) == (26, 1, 2)


def test_an_image_outside_class_folders_is_named(call, image_folder):
    (image_folder / "cats" / "000.png").rename(image_folder / "stray.png")
    code, out, _ = call("check", image_folder)
    assert code == 0 and "stray.png" in out
    code, _, err = call("pretrain", image_folder, *TINY, "--out", "run")
    assert code == 0 and "stray.png" in err.partition("Pre-training")[0]
    assert "knn_top1" not in Run(Path("run")).summary


def test_unlistable_folders_are_skipped_unless_strict(call, image_folder):
    said = "lost+found: permission denied"
    arguments = ["pretrain", image_folder, *TINY]
    with unlistable(image_folder / "lost+found"):
        code, out, _ = call("check", image_folder)
        assert code == 0 and said in " ".join(out.split())
        code, _, err = call(*arguments, "--out", "run")
        assert code == 0 and said in err.partition("Pre-training")[0]
        code, _, err = call(*arguments, "--strict", "--out", "strict")
        assert code == 1 and f"{image_folder}/lost+found cannot be listed: permission denied" in err
    assert "26 image files in 2 class folders" in call(*arguments, "--strict", "--out", "strict")[2]


def test_an_empty_test_folder_is_ignored(call, tmp_path):
    photos = tmp_path / "photos"
    write_image_folder(photos / "train")
    (photos / "val").mkdir()
    said = f"The folder {photos / 'val'} holds no image files"
    code, out, _ = call("check", photos)
    assert code == 0 and said in " ".join(out.split())
    code, _, err = call("pretrain", photos, *TINY, "--out", "run")
    assert code == 0 and said in err.partition("Pre-training")[0]
    assert "knn_top1" in Run(Path("run")).summary  # of a part of the training images, as without such a folder


@pytest.fixture
def few_demo_images(monkeypatch):
    monkeypatch.setattr("jcl.data.named.open_demo", functools.partial(open_demo, train_count=40, test_count=10))


@pytest.mark.usefixtures("few_demo_images")
def test_a_folder_with_the_name_of_a_data_set(call):
    write_image_folder(Path("demo"))
    said = "Using the data set demo, not the folder; for the folder write ./demo.\n"
    code, out, err = call("shard", "demo", "shards")
    assert code == 0 and err == said and "40 images" in out
    code, out, err = call("shard", "./demo", "others")
    assert code == 0 and said not in err and "26 images" in out


def test_shards_are_written_and_trained_on(call, image_folder, tmp_path):
    out_folder = tmp_path / "shards"
    (image_folder / "cats" / "IMG_1.nef").touch()
    code, out, err = call("shard", image_folder, out_folder, "--images-per-shard", 10, "--json", "shards.json")
    assert code == 0, err
    figures = json.loads(Path("shards.json").read_text())
    assert figures["train_images"] == 26 and figures["train_shards"] == 3
    assert figures["train_left_out"] == 0 and figures["train_left_out_names"] == [] and figures["train_bytes"] > 0
    assert f"jcl pretrain {out_folder}" in out and ".nef" in err
    code, _, err = call("pretrain", out_folder, *TINY, "--out", "from-shards")
    assert code == 0, err
    again = call("shard", image_folder, out_folder)
    assert again[0] == 1 and str(out_folder) in again[2]


def test_a_damaged_shard_is_used_as_far_as_it_goes_unless_strict(call, image_folder, tmp_path):
    shards = tmp_path / "shards"
    assert call("shard", image_folder, shards, "--images-per-shard", 10)[0] == 0
    os.truncate(shards / "train-0001.tar", (shards / "train-0001.tar").stat().st_size // 2)
    arguments = ["pretrain", shards, *TINY]
    code, out, err = call(*arguments, "--strict", "--out", "run")
    assert code == 1 and out == "" and "Error: The shard train-0001.tar is damaged" in err
    assert not Path("run").exists()
    code, _, err = call(*arguments, "--out", "run")
    assert code == 0 and "damaged shards is used: train-0001.tar (" in err
    # Strict was a training; what it made can be measured though a shard was damaged since.
    settings = Path("run/settings.yaml")
    settings.write_text(settings.read_text().replace("strict: false", "strict: true"))
    code, _, err = call("knn", "run")
    assert code == 0 and "damaged shards is used: train-0001.tar (" in err
    assert (
        call("report", "run", "-o", "page.html")[0] == 0 and "could not be opened" not in Path("page.html").read_text()
    )


def test_class_folders_inside_shards_are_named(call, image_folder):
    subprocess.run(["tar", "-cf", "photos.tar", "-C", image_folder, "."], check=True)
    said = "folders in shards (cats, dogs)"
    code, out, _ = call("check", "photos.tar")
    assert code == 0 and said in " ".join(out.split())
    code, _, err = call("pretrain", "photos.tar", *TINY, "--out", "run")
    assert code == 0 and said in err.partition("Pre-training")[0]
    assert "knn_top1" not in Run(Path("run")).summary


def test_a_subset_of_the_classes(call, image_folder):
    Path("classes.txt").write_text("dogs\n")
    code, _, err = call("pretrain", image_folder, *TINY, "--subset", "classes.txt", "--out", "dogs")
    assert code == 0, err
    assert "13 image files" in err and Run(Path("dogs")).summary["steps"] == 1  # one full batch of 8
    code, out, err = call("embed", "dogs", image_folder, "-o", "dogs.npz", "--device", "cpu")
    assert code == 0 and "data.subset are used; it has 1 class." in err and "13 train images" in out
    Path("classes.txt").unlink()
    code, out, err = call("embed", "dogs", image_folder, "-o", "all.npz", "--device", "cpu")
    assert code == 0 and "data.subset" not in err and "13 train images" not in out


def test_a_run_inside_the_images_folder_is_refused(refused, image_folder):
    said = refused("pretrain", image_folder, *TINY, "--out", image_folder / "run")
    assert "is inside the image folder" in said


def test_output_may_be_in_a_folder_named_like_a_data_set(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("demo").mkdir()  # as `jcl demo --out demo` does
    refuse_inside_data(Path("demo/jcl"), "demo")
    with pytest.raises(RunError, match="inside the image folder"):
        refuse_inside_data(Path("demo/jcl"), "./demo")


def test_the_same_command_works_after_a_strict_stop(call, image_folder):
    broken = image_folder / "cats" / "broken.png"
    broken.write_bytes(b"not an image")
    arguments = ("pretrain", image_folder, *TINY, "--strict", "--out", "run")
    code, _, err = call(*arguments)
    assert code == 1 and "broken.png" in err and not Path("run").exists()
    broken.unlink()
    assert call(*arguments)[0] == 0


def test_a_run_is_resumed_from_another_folder(call, image_folder, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGTERM)
        patch.chdir(image_folder.parent)
        Path("classes.txt").write_text("cats\ndogs\n")
        subset = ("--set", "data.subset=classes.txt")
        code, _, err = call("pretrain", image_folder.name, *TINY, *subset, "--out", tmp_path / "run")
        assert code == 75 and "stopped after step 2" in err
    assert Run(tmp_path / "run").settings.data.location == str(image_folder.resolve())
    code, _, err = call("resume", tmp_path / "run")
    assert code == 0 and Run(tmp_path / "run").summary["steps"] == 3, err


@pytest.mark.usefixtures("few_demo_images")
def test_the_name_of_a_data_set_wins_over_a_folder(call):
    (Path("demo") / "no images here").mkdir(parents=True)
    code, _, err = call("pretrain", "demo", *TINY, "--out", "run")
    assert code == 0, err
    assert Run(Path("run")).settings.data.location == "demo"


def test_names_cannot_steer_the_terminal(call, tmp_path):
    folder = write_image_folder(tmp_path / "\x1b[31m[b]red\n")
    (folder / "cats" / "\x1b[31mred\n.png").write_bytes(b"no image")
    code, out, _ = call("check", folder)
    assert code == 0 and "\x1b" not in out
    assert "\\x1b[31m[b]red\\n" in out and "\\x1b[31mred\\n.png cannot be read" in out
    code, out, _ = call("pretrain", folder, *TINY, "--out", "run")
    assert code == 0 and "\x1b" not in out and "jcl on \\x1b[31m[b]red\\n" in out


def test_a_run_whose_images_have_moved_says_what_to_do(refused, npz, pretrained, tmp_path):
    images = tmp_path / "images.npz"
    run = tmp_path / "run"
    shutil.copytree(pretrained, run)
    settings = run / "settings.yaml"
    settings.write_text(settings.read_text().replace(str(npz), str(images)))
    assert f"no longer at {images}" in refused("knn", run)
    assert "no longer at" in refused("bound", run)
    assert "no longer at" in refused("distribution", run)
    (run / "summary.json").unlink()
    said = refused("resume", run)
    assert f"no longer at {images}" in said and str(settings) in said and "data.location" in said
