"""`jcl pretrain` and its settings: what is written, and one sentence for each thing that can be wrong."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from jcl.commands.run import Run
from launch_tools import settings_options
from small_runs import TINY_VALUES, drawn_pixels

TINY = settings_options(TINY_VALUES | {"train.epochs": 1})


def test_a_batch_larger_than_the_data(refused, npz):
    assert "larger than the data" in refused("pretrain", npz, "--out", "run", *TINY, "--set", "train.batch_size=64")


def test_too_few_images_to_choose_a_batch(refused, tmp_path):
    np.savez(tmp_path / "few.npz", x_train=drawn_pixels(5))
    assert "5 images are too few" in refused("pretrain", tmp_path / "few.npz", "--out", "run")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recipe", "imagenet-papr"], "did you mean imagenet-paper?"),
        (["--recipe", "missing.yaml"], "missing.yaml"),
        (["--set", "train.learning=1"], "Unknown setting 'train.learning'"),
        (["--set", "train.batch_sise=1"], "did you mean train.batch_size?"),
        (["--set", "lr=1"], "Unknown setting 'lr'"),
        (["--set", "recipe=demo"], "--recipe demo"),
        (["--set", "train.lr"], "--set takes SECTION.NAME=VALUE"),
        (["--set", "train.milestones=[1, 2"], "--set"),
        (["--set", "train.lr=!!python/object/apply:os.system ['touch hacked']"], "--set"),
        (["--set", "data.root=2020-13-45"], "--set"),
        (["--set", "train.lr=quick"], "train.lr"),
        (["--set", "train.lr="], "train.lr"),
        (["--set", "method.name=[jcl]"], "method.name"),
        (["--method", "moco-v2", "--num-keys", "4"], "exactly one key"),
        (["--backbone", "resnet5"], "did you mean"),
        (["--device", "gpu"], "Unknown device 'gpu'"),
        (["--batch-size", "10", "--set", "model.bn_groups=4"], "cannot be split"),
    ],
)
def test_unknown_names_and_impossible_values(refused, npz, arguments, said):
    assert said in refused("pretrain", npz, "--out", "run", *arguments)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--epochs", "0"),
        ("--batch-size", "-8"),
        ("--batch-size", "1"),
        ("--temperature", "0"),
        ("--lr", "-1"),
        ("--lr", "nan"),
        ("--covariance-scale", "-2"),
        ("--num-keys", "0"),
        ("--seed", "-1"),
        ("--method", "moco-v3"),
    ],
)
def test_impossible_values_of_options(refused, npz, option, value):
    said = refused("pretrain", npz, "--out", "run", option, value, exit_code=2)
    assert said.startswith(f"Invalid value {value} for {option}: must ") and said.endswith("See `jcl pretrain --help`.")


def test_a_hostile_recipe_is_refused(refused, npz, tmp_path):
    (tmp_path / "evil.yaml").write_text("train: !!python/object/apply:os.system ['touch hacked']")
    assert "not valid YAML" in refused("pretrain", npz, "--recipe", tmp_path / "evil.yaml", "--out", "run")


def test_a_folder_that_holds_a_run_or_is_a_file(refused, npz, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.yaml").write_text("recipe: precious\n")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "train"}\n')
    assert "already holds a run" in refused("pretrain", npz, *TINY, "--out", tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refused("pretrain", npz, *TINY, "--out", tmp_path / "file")


def test_set_reads_numbers_lists_and_booleans(call, npz):
    code, _, err = call(
        *("pretrain", npz, "--out", "run", *TINY, "--set", "train.lr=1e-3", "--set", "train.milestones=[1, 2]"),
        *("--set", "data.strict=true", "--set", "method.covariance_scale=5e-1", "--seed", 3),
        *("--set", "views.std=[0.2, 2e-1, 0.25]", "--set", "train.schedule=step", "--set", " record.keep = 1"),
    )
    assert code == 0, err
    settings = Run(Path("run")).settings
    assert (settings.train.lr, settings.train.milestones, settings.data.strict) == (1e-3, (1, 2), True)
    assert (settings.method.covariance_scale, settings.views.std) == (0.5, (0.2, 0.2, 0.25))
    assert (settings.train.epochs, settings.train.seed, settings.record.keep) == (1, 3, 1)


def test_pretrain_reports_and_writes_flat_json(call, npz):
    code, out, err = call("pretrain", npz, *TINY, "--out", "run", "--json", "deep/figures.json")
    assert code == 0 and "Everything is in run" in out
    assert "Pre-training" in err and "data.canvas = 16: arrays are used at their own size" in err
    figures = json.loads(Path("deep/figures.json").read_text())
    assert figures == Run(Path("run")).summary
    assert {"knn_top1", "images_per_second", "loss", "seconds", "peak_memory_bytes"} <= figures.keys()
    assert not any(isinstance(value, dict | list) for value in figures.values())


def test_runs_without_out_are_numbered(call, npz):
    for number in (1, 2):
        code, _, err = call("pretrain", npz, *TINY)
        assert code == 0 and f"1 epoch, into runs/jcl-small-00{number}" in err
        assert Path(f"runs/jcl-small-00{number}/summary.json").exists()


def test_a_refused_run_leaves_no_numbered_folder(refused, npz, image_folder):
    assert "bn_groups" in refused("pretrain", npz, *TINY, "--set", "model.bn_groups=3")
    Path("photos").mkdir()
    shutil.copytree(image_folder, "photos", dirs_exist_ok=True)
    os.chdir("photos")
    assert "The folder runs is inside" in refused("pretrain", ".", *TINY)


def test_too_little_memory_is_one_sentence(call, npz):
    """Half a petabyte, which no machine hands out: the real allocator refuses."""
    code, _, err = call("pretrain", npz, "--out", "run", "--set", "method.queue_size=1000000000000")
    assert code == 1 and "Traceback" not in err
    assert "512,000,000,000,000 bytes" in err


def test_recipes_are_listed_shown_and_usable_again(call, npz):
    code, out, _ = call("recipes")
    assert code == 0 and "imagenet-official" in out and "cifar10" in out
    code, out, _ = call("recipes", "imagenet-official")
    assert code == 0 and yaml.safe_load(out)["method"]["covariance_schedule"] == "linear"
    code, out, _ = call("recipes", "--settings")
    assert code == 0 and "method.covariance_scale" in out and "train.key_passes" in out


def test_settings_of_a_recipe_are_listed_with_its_values(call, tmp_path):
    (tmp_path / "[mine].yaml").write_text("train: {epochs: 7}\n")
    for recipe, epochs in ((tmp_path / "[mine].yaml", "7"), ("imagenet100-ablation", "100")):
        code, out, _ = call("recipes", recipe, "--settings")
        rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines() if "│" in line]
        title = out.splitlines()[1]
        assert code == 0 and "value" in title and "default" not in title and "…" not in out
        assert [row[2] for row in rows if row[1] == "train.epochs"] == [epochs]
        assert [row[2] for row in rows if row[1] == "record.knn_k"] == ["200"]  # not the recipe's: the default
    assert "There is no recipe called 'cifar'" in call("recipes", "cifar", "--settings")[2]


def test_a_narrow_terminal_does_not_cut_names_of_settings(call, monkeypatch):
    monkeypatch.setattr("jcl.cli.data.out", Console(width=60))
    out = call("recipes", "--settings")[1]
    assert "record.checkpoint_minutes" in out and "method.covariance_schedule" in out and "…" not in out


def test_profile_times_the_parts_of_a_step(call, npz):
    code, _, err = call("pretrain", npz, *TINY, "--profile", "--json", "profile.json")
    assert code == 0, err
    figures = json.loads(Path("profile.json").read_text())
    parts = {name: taken for name, taken in figures.items() if name.endswith("_ms") and name != "step_ms"}
    assert set(parts) >= {"views_ms", "keys_ms", "query_ms", "loss_ms", "backward_ms", "optimizer_ms"}
    assert all(taken >= 0 for taken in parts.values()) and 0 < sum(parts.values()) <= 1.01 * figures["step_ms"]
    assert not Path("runs").exists()


@pytest.mark.parametrize("option", [("--out", "run"), ("--resume", "auto")])
def test_profile_goes_without_options_of_a_run(refused, npz, option):
    assert option[0] in refused("pretrain", npz, *TINY, "--profile", *option)


def test_profile_needs_data(refused):
    assert "jcl pretrain photos/" in refused("pretrain", "--profile")


def test_set_accepts_empty_values(refused):
    assert "data.location" in refused("pretrain", "--set=data.location=")


@pytest.mark.parametrize(
    ("option", "assigned"),
    [
        (["--epochs", "3"], "train.epochs=3"),
        (["--num-keys", "2"], "method.num_keys=1"),
        (["--method", "jcl"], "method.name=moco-v2"),
        (["--strict"], "data.strict=false"),
    ],
)
def test_an_option_and_set_may_not_give_the_same_setting(refused, npz, option, assigned):
    name = assigned.partition("=")[0]
    told = f"{name} is given both with {option[0]} and with --set; leave one of them out."
    assert told in refused("pretrain", npz, *option, "--set", assigned)


def test_data_and_set_may_not_both_name_the_images(refused, npz):
    told = "data.location is given both with DATA and with --set; leave one of them out."
    assert told in refused("pretrain", npz, "--set", "data.location=demo")


def test_bfloat16_is_refused_on_a_cpu(refused, npz):
    assert "bfloat16" in refused("pretrain", npz, "--set", "train.precision=bfloat16", "--device", "cpu")
