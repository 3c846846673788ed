"""`jcl ablate` and `jcl ablate-cell` on the command line."""

import json
from pathlib import Path

import numpy as np
import pytest

from ablation_tools import ablated, run_faked, small_plan
from launch_tools import settings_options
from small_runs import TINY_VALUES, drawn_pixels, write_image_folder

VALUES = TINY_VALUES | {"record.knn_every": 0}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--over"),
        (["--over", "nonsense=1"], "nonsense"),
        (["--over", "num_keys"], "NAME=VALUE"),
        (["--over", "num_keys=one"], "'one' for method.num_keys"),
        (["--over", "num_keys=1.5"], "method.num_keys"),
        (["--over", "temperature=0.2,0"], "method.temperature"),
        (["--over", "num_keys=1,2", "--method", "moco-v2"], "moco-v2"),
        (["--over", "covariance_scale=1,2", "--method", "multi-key"], "multi-key"),
        (["--over", "num_keys=1,2", "--num-keys", "3"], "method.num_keys"),
        (["--over", "method=jcl,moco-v2", "--method", "jcl"], "method.name"),
        (["--over", "num_keys=1", "--over", "method.num_keys=2"], "method.num_keys"),
        (["--over", "num_keys=1", "--seeds", "some"], "--seeds"),
        (["--over", "num_keys=1", "--seeds", "1,2", "--seed", "1"], "--seed"),
        (["--over", "num_keys=1", "--recipe", "cifar"], "cifar10"),
        (["--over", "backbone=tiny_cnn,resnet5"], "resnet5"),
        (["--over", "batch_size=8,35"], "35"),
        (
            ["--over", "method=jcl,moco-v2", "--over", "num_keys=2,3", "--each-alone"],
            "method.num_keys",
        ),
    ],
)
def test_what_makes_no_sense_is_a_sentence_and_leaves_nothing(call, npz, tmp_path, arguments, said):
    code, out, err = call("ablate", npz, *arguments, "--out", tmp_path / "out")
    assert code in (1, 2) and out == "" and said in err, err
    assert err.startswith("Error: ") and err.count("\n") == 1 and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_data_that_is_missing_or_cannot_be_measured_on(call, tmp_path):
    np.savez(tmp_path / "bare.npz", x_train=drawn_pixels(20))
    for data, said in ((tmp_path / "missing", "missing"), (tmp_path / "bare.npz", "labels")):
        code, _, err = call("ablate", data, "--over", "num_keys=1", "--out", tmp_path / "out")
        assert code == 1 and said in err and not (tmp_path / "out").exists()


def test_a_finished_ablation_is_shown_again_and_another_one_refused(call, npz, tmp_path):
    out = tmp_path / "out"
    values = VALUES | {"method.covariance_scale": 4.0, "train.weight_decay": 1e-4, "views.min_scale": 0.2}
    changes = {name.replace(".", "__"): value for name, value in values.items()} | {"train__epochs": 1}
    ablated(small_plan(npz, "temperature=0.1,0.3", seeds=(4, 5), **changes), out, run_faked)
    command = ("ablate", npz, "--over", "temperature=0.3,1e-1", "--out", out, *settings_options(values))
    code, printed, err = call(*command, "--seeds", 2, "--seed", 4, "--set", "train.epochs=1", "--json", "deep/a.json")
    assert code == 0, err
    assert "4 cells in" in err and "4 already done" in err
    lines = [line.split("│")[1:-1] for line in printed.splitlines() if line.startswith("│")]
    assert [line[0].strip() for line in lines] == ["0.1", "0.3"] and "±" in lines[0][1] and lines[0][4].strip() == "2"
    assert "Best on held-out training images" in printed and str(out) in printed
    flat = json.loads(Path("deep/a.json").read_text())
    assert f"Tested on {flat['test_images']} images." in printed and not flat["test_held_out"]
    assert flat["seeds_temperature_0.3"] == 2 and flat["linear_top1_std_temperature_0.1"] is not None
    code, _, err = call(*command, "--seeds", "4,5", "--set", "train.epochs=2")
    assert code == 1 and "train.epochs" in err
    (out / "study.json").write_text('{"over": ["method.temperature"]}')
    code, _, err = call(*command, "--seeds", "4,5", "--set", "train.epochs=1")
    assert code == 1 and "study.json" in err


def test_one_cell_by_hand(call, npz, tmp_path):
    values = {name: value for name, value in VALUES.items() if name not in ("method.num_keys", "train.lr")}
    options = ("--out", tmp_path / "out", "--plan-only", *settings_options(values | {"train.epochs": 1}))
    command = ("ablate", npz, "--over", "num_keys=2", "--over", "lr=0.05,1e30", *options)
    code, out, err = call(*command)
    assert code == 0 and "2 cells" in out and "jcl ablate-cell" in out, err
    assert {path.name for path in tmp_path.iterdir()} == {"out", "work"}
    fine, too_fast = sorted((tmp_path / "out/cells").iterdir())
    assert too_fast.name.startswith("num_keys-2-lr-1e+30-seed-0-")
    code, out, err = call("ablate-cell", fine, "--json", "cell.json")
    assert code == 0 and "linear top-1" in out, err
    assert json.loads(Path("cell.json").read_text()) == json.loads((fine / "result.json").read_text())
    assert "2 cells (1 already done)" in call(*command)[1]
    code, _, err = call("ablate-cell", too_fast)
    assert code == 1 and "The loss is not finite" in err and "Traceback" not in err
    assert "The loss is not finite" in json.loads((too_fast / "failure.json").read_text())["error"]
    code, _, err = call("ablate-cell", tmp_path / "nowhere")
    assert code == 1 and "cell.json" in err and not (tmp_path / "nowhere").exists()
    (too_fast / "cell.json").write_text('{"values": 3}')
    code, _, err = call("ablate-cell", too_fast)
    assert code == 2 and "cell.json" in err


@pytest.fixture
def one_cell(call, tmp_path):
    """Ablates with a single cell, done in this process; gives what both commands printed, and the figures."""

    def ablate(file: Path, **arrays: np.ndarray) -> tuple[str, str, dict]:
        np.savez(file, **arrays)
        command = ("ablate", file, "--over", "temperature=0.1", "--out", tmp_path / "out")
        options = settings_options(VALUES | {"train.epochs": 1})
        assert call(*command, "--plan-only", *options)[0] == 0
        (cell,) = (tmp_path / "out/cells").iterdir()
        code, of_the_cell, err = call("ablate-cell", cell)
        assert code == 0, err
        code, printed, err = call(*command, *options, "--json", "figures.json")
        assert code == 0, err
        return of_the_cell, printed, json.loads(Path("figures.json").read_text())

    return ablate


def test_test_images_that_were_held_out_are_told_of(one_cell, tmp_path):
    _, printed, figures = one_cell(tmp_path / "bare.npz", x_train=drawn_pixels(40), y_train=np.arange(40) % 2)
    assert figures["test_held_out"]
    assert f"{figures['test_images']} images" in printed and "held out" in printed


def test_test_images_of_classes_without_training_images_are_told_of(one_cell, tmp_path):
    labels = np.arange(24) % 3
    arrays = {"x_train": drawn_pixels(24), "y_train": labels, "x_test": drawn_pixels(24), "y_test": labels + 1}
    of_the_cell, printed, figures = one_cell(tmp_path / "odd.npz", **arrays)
    assert "8 test images" in of_the_cell and "8 test images" in printed and figures["unseen_class_images"] == 8


def test_images_that_cannot_be_read_are_named_and_not_counted(call, tmp_path):
    """In a process for the cell, as usual."""
    write_image_folder(tmp_path / "photos/train")
    write_image_folder(tmp_path / "photos/val")
    tests = sum(file.is_file() for file in (tmp_path / "photos/val").rglob("*"))
    for broken in ("train/cats/broken.png", "val/cats/broken.png", "val/dogs/broken.png"):
        (tmp_path / "photos" / broken).write_text("no image")
    options = settings_options(VALUES | {"train.epochs": 1, "data.workers": 0})
    out = tmp_path / "out"
    code, printed, err = call("ablate", tmp_path / "photos", "--over", "temperature=0.1", "--out", out, *options)
    assert code == 0 and f"Tested on {tests} images." in printed, err
    assert "cats/broken.png" in err and "3 unreadable images" in err
    (cell,) = (out / "cells").iterdir()
    assert "cats/broken.png" in (cell / "log.txt").read_text()
    assert [line.partition("\t")[0] for line in (cell / "skipped.txt").read_text().splitlines()] == [
        *("cats/broken.png", "cats/broken.png of the test images", "dogs/broken.png of the test images"),
    ]


def test_each_setting_alone_around_values_that_may_be_given(call, npz, tmp_path):
    over = ("--over", "num_keys=1,2,5", "--over", "temperature=0.1,0.2", "--each-alone", "--temperature", "0.1")
    options = ("--out", tmp_path / "out", "--plan-only", *settings_options(VALUES))
    code, out, err = call("ablate", npz, *over, *options, "--json", "plan.json")
    assert code == 0 and "4 cells" in out, err
    assert json.loads(Path("plan.json").read_text()) == {"cells": 4, "cells_done": 0}
    planned = [json.loads(file.read_text()) for file in (tmp_path / "out/cells").glob("*/cell.json")]
    assert sorted(tuple(cell["values"].values()) for cell in planned) == [(1, 0.1), (2, 0.1), (2, 0.2), (5, 0.1)]
    assert all(cell["settings"]["method"]["num_keys"] == cell["values"]["method.num_keys"] for cell in planned)


def test_a_device_that_is_not_there_is_said_before_any_cell_is_started(call, npz, tmp_path):
    options = ("--out", tmp_path / "out", *settings_options(VALUES | {"train.device": "cuda:99"}))
    code, out, err = call("ablate", npz, "--over", "temperature=0.1", *options)
    assert code == 2 and out == "" and "cuda:99" in err
    assert not (tmp_path / "out").exists()
