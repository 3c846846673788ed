"""Runs on images that cannot be read, and on data without labels or test images."""

import io
import re
import shutil

import numpy as np
import pytest
from rich.console import Console

from fault_tools import at_steps
from jcl.commands.pretrain import pretrain, resume
from jcl.data import open_data
from jcl.errors import DataError
from jcl.evaluate.classification import hold_out_split
from jcl.runs.folder import read_skipped
from run_tools import QUIET
from small_runs import drawn_pixels, tiny_settings, write_image_folder


def test_broken_images_are_skipped_counted_and_listed(image_folder, tmp_path, capsys):
    (image_folder / "cats" / "000.png").write_bytes(b"no image")
    (image_folder / "dogs" / "torn.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    (image_folder / "dogs" / "IMG_1.NEF").touch()
    console = Console(stderr=True, width=500)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/skipped.txt").write_text("old.png\tof an attempt that found nothing to train on\n")
    run = pretrain(tiny_settings(image_folder, train__epochs=1), tmp_path / "run", console=console)
    listed = (run.path / "skipped.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in listed] == ["cats/000.png", "dogs/torn.jpg"]
    assert all(line.split("\t")[1] for line in listed)
    said = capsys.readouterr().err
    assert "2 unreadable images" in said
    assert re.search("Skipped .*(cats/000.png|dogs/torn.jpg): ", said)  # when it was met
    assert "1 file" in said.partition("Pre-training")[0] and said.count(".nef 1") == 1
    with pytest.raises(DataError, match="cannot be read"):
        pretrain(tiny_settings(image_folder, data__strict=True), tmp_path / "strict", console=QUIET)


def test_images_that_fail_while_training_stop_it_above_a_share(image_folder, tmp_path, monkeypatch):
    """As if a disk were lost: what is trained is saved, and the run continues once the images are back."""
    monkeypatch.setattr("jcl.data.loader.CACHE_BYTES", 0)
    files = sorted(image_folder.rglob("*.png"))[:20]
    contents = [file.read_bytes() for file in files]
    said = Console(file=io.StringIO(), width=500)
    with monkeypatch.context() as patch:
        at_steps(patch, {4: lambda: [file.unlink() for file in files]})
        with pytest.raises(DataError, match=r"data\.max_failed_share=0\.1.*after step [4-9].*jcl resume"):
            pretrain(tiny_settings(image_folder), tmp_path / "run", console=said)
    for file, content in zip(files, contents, strict=True):
        file.write_bytes(content)
    assert resume(tmp_path / "run", console=QUIET).summary["steps"] == 9


def test_broken_images_to_test_with_are_listed_too(tmp_path, capsys):
    write_image_folder(tmp_path / "photos/train")
    (write_image_folder(tmp_path / "photos/val") / "cats/000.png").write_bytes(b"no image")
    run = pretrain(
        tiny_settings(tmp_path / "photos", train__epochs=1), tmp_path / "run", console=Console(stderr=True, width=500)
    )
    assert list(read_skipped(run.path / "skipped.txt")) == ["cats/000.png of the test images"]
    assert "1 unreadable image;" in capsys.readouterr().err


def test_a_broken_image_that_is_held_out_is_listed_once(tmp_path):
    files = sorted(write_image_folder(tmp_path / "photos").rglob("*.png"))
    held_out = hold_out_split(open_data(str(tmp_path / "photos")).train.labels)[1]
    files[int(held_out[0])].write_bytes(b"no image")
    run = pretrain(tiny_settings(tmp_path / "photos", train__epochs=1), tmp_path / "run", console=QUIET)
    name = str(files[int(held_out[0])].relative_to(tmp_path / "photos"))
    assert list(read_skipped(run.path / "skipped.txt")) == [name]


@pytest.mark.parametrize("labels", [{"y_train": -1}, {"y_test": -1}])
def test_where_knn_cannot_be_measured_training_goes_on_to_its_end(labels, tmp_path, capsys):
    arrays = {"x_train": drawn_pixels(40), "x_test": drawn_pixels(8)}
    known = {"y_train": np.arange(40) % 2, "y_test": np.arange(8) % 2}
    hidden = {name: np.full_like(known[name], value) for name, value in labels.items()}
    np.savez(tmp_path / "images.npz", **arrays, **(known | hidden))
    run = pretrain(
        tiny_settings(tmp_path / "images.npz", train__epochs=1),
        tmp_path / "run",
        console=Console(stderr=True, width=500),
    )
    assert (run.path / "backbone.safetensors").exists() and "knn_top1" not in run.summary
    assert capsys.readouterr().err.count("kNN is skipped") == 1


def test_where_no_image_has_a_label_none_is_said_to_be_held_out(tmp_path, capsys):
    np.savez(tmp_path / "images.npz", x_train=drawn_pixels(40), y_train=np.full(40, -1))
    pretrain(
        tiny_settings(tmp_path / "images.npz", train__epochs=1),
        tmp_path / "run",
        console=Console(stderr=True, width=500),
    )
    said = capsys.readouterr().err
    assert said.count("kNN is skipped") == 1 and "accuracy is measured" not in said


def test_where_no_test_image_can_be_read_training_goes_on_to_its_end(tmp_path, capsys):
    write_image_folder(tmp_path / "photos/train")
    for file in write_image_folder(tmp_path / "photos/val").rglob("*.png"):
        file.write_text("version of a large file, which was not fetched")
    run = pretrain(
        tiny_settings(tmp_path / "photos", train__epochs=1), tmp_path / "run", console=Console(stderr=True, width=500)
    )
    assert "knn_top1" not in run.summary
    assert capsys.readouterr().err.count("kNN is skipped") == 1


def test_without_labels_there_is_no_knn_but_the_quality(tmp_path, capsys):
    np.savez(tmp_path / "bare.npz", x_train=drawn_pixels(20))
    run = pretrain(tiny_settings(tmp_path / "bare.npz"), tmp_path / "run", console=Console(stderr=True, width=500))
    assert {line["kind"] for line in run.metrics} == {"train", "quality"}
    lines = [line for line in run.metrics if line["kind"] == "quality"]
    assert [line["step"] for line in lines] == [0, 2, 4, 6]
    assert all(1 <= line["rankme"] <= 20 and 1 <= line["lidar"] <= 20 and line["alpha_req"] > 0 for line in lines)
    assert {"rankme", "alpha_req", "lidar"} < run.summary.keys() and "knn_top1" not in run.summary
    assert run.summary["rankme"] == lines[-1]["rankme"] != lines[0]["rankme"]
    assert capsys.readouterr().err.count("RankMe") == 4


def test_where_evaluations_fail_the_values_of_an_earlier_epoch_are_not_repeated(image_folder, tmp_path, monkeypatch):
    said = Console(file=io.StringIO(), width=500)
    at_steps(monkeypatch, {4: lambda: shutil.rmtree(image_folder)})  # training has the images in memory by then
    run = pretrain(tiny_settings(image_folder), tmp_path / "run", console=said)
    assert run.summary["steps"] == 9
    assert said.file.getvalue().count("skipped from now on") == 2 and said.file.getvalue().count("RankMe") == 1
    assert not {"knn_top1", "rankme", "beats_chance"} & run.summary.keys()
    assert not (run.path / "classes.json").exists()


def test_labels_without_a_test_set_are_split(tmp_path):
    np.savez(tmp_path / "labeled.npz", x_train=drawn_pixels(40), y_train=np.arange(40) % 2)
    run = pretrain(tiny_settings(tmp_path / "labeled.npz", train__epochs=1), tmp_path / "run", console=QUIET)
    assert run.summary["knn_top1"] in {25.0 * right for right in range(5)}  # four of the forty are asked about
