"""Whole runs: what they leave behind, what they print, and what they refuse."""

import io
import shutil
from statistics import fmean

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

import jcl
from fault_tools import settings_for
from jcl.commands.pretrain import pretrain, resume
from jcl.commands.run import Run
from jcl.commands.train_run import faster_options
from jcl.core.loss import info_nce_loss
from jcl.core.registry import METHODS, Method, register
from jcl.errors import DataError, RunError, SettingsError
from jcl.runs.checkpoint import list_checkpoints, read_tensors
from jcl.runs.folder import RunFolder
from jcl.train.step import TrainingStep
from run_tools import QUIET, assert_same, assert_same_backbone, figures
from small_runs import TINY_BACKBONE, drawn_pixels, tiny_settings


def test_options_for_a_long_run_are_those_that_make_it_faster(unbroken):
    assert faster_options(unbroken.settings) == "fewer --epochs, --method moco-v2"  # tiny_cnn, small views
    views = unbroken.settings.views.model_copy(update={"image_size": 224})
    model = unbroken.settings.model.model_copy(update={"backbone": "resnet50"})
    large = unbroken.settings.model_copy(update={"views": views, "model": model})
    assert faster_options(large) == "fewer --epochs, --image-size 96, --backbone resnet18, --method moco-v2"


def test_a_run_leaves_what_it_should(unbroken):
    names = {entry.name for entry in unbroken.path.iterdir()}
    assert names == {
        "settings.yaml",
        "run_id",
        "choices.json",
        "classes.json",
        "metrics.jsonl",
        "checkpoints",
        "backbone.safetensors",
        "summary.json",
    }
    assert [path.name for path in list_checkpoints(unbroken.path / "checkpoints")] == [
        "step-000000008.safetensors",
        "step-000000012.safetensors",
    ]
    kinds = [(line["kind"], line["step"]) for line in unbroken.metrics]
    assert kinds == [
        ("knn", 0),
        ("quality", 0),
        ("train", 3),
        ("knn", 4),
        ("quality", 4),
        ("train", 6),
        ("knn", 8),
        ("quality", 8),
        ("train", 9),
        ("train", 12),
        ("knn", 12),
        ("quality", 12),
    ]
    assert unbroken.settings.train.epochs == 3
    summary = unbroken.summary
    assert summary["steps"] == 12 and summary["seconds"] > 0 and 0 <= summary["knn_top1"] <= 100
    assert not any(isinstance(value, dict | list) for value in summary.values())


def test_knn_during_training_compares_with_few_images_of_a_large_set(npz, tmp_path, monkeypatch):
    measure, banks = jcl.evaluate.knn.knn_accuracy, []

    def accuracy(bank, *rest, **options):
        banks.append(len(bank))
        return measure(bank, *rest, **options)

    monkeypatch.setattr("jcl.evaluate.knn.knn_accuracy", accuracy)
    pretrain(settings_for(npz, train__epochs=1, record__knn_images=7), tmp_path / "run", console=QUIET)
    assert 2 <= banks[0] == banks[1] <= 7


def test_a_run_is_compared_with_chance_and_its_untrained_network(unbroken):
    first, *_, last = [line for line in unbroken.metrics if line["kind"] == "knn"]
    summary = unbroken.summary
    assert first["step"] == 0 and summary["untrained_knn_top1"] == first["knn_top1"]
    assert summary["chance_top1"] == last["chance_top1"] == 40.0, "four of the ten test images have the same class"
    assert summary["knn_top1_interval_low"] < summary["knn_top1"] == last["knn_top1"]
    assert summary["test_images"] == 10 and isinstance(summary["beats_untrained"], bool)


def test_a_run_that_is_no_better_than_its_baselines_is_warned_about(tmp_path):
    pixels, labels = drawn_pixels(44), np.arange(44) % 2  # of classes that cannot be seen
    np.savez(tmp_path / "noise.npz", x_train=pixels[:34], y_train=labels[:34], x_test=pixels[34:], y_test=labels[34:])
    text = io.StringIO()
    run = pretrain(tiny_settings(tmp_path / "noise.npz", train__epochs=1), tmp_path / "run", console=Console(file=text))
    assert run.summary["beats_chance"] is run.summary["beats_untrained"] is False
    (warning,) = [line for line in text.getvalue().splitlines() if "Warning" in line]
    assert "chance (50.0 %)" in warning and f"network ({run.summary['untrained_knn_top1']:.1f} %)" in warning


def test_a_run_whose_features_have_collapsed_is_warned_about(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jcl.train.display._TELLS_APART", 101.0)  # equal images are told apart by rounding alone
    np.savez(tmp_path / "black.npz", x_train=np.zeros((32, 16, 16, 3), np.uint8))
    pretrain(tiny_settings(tmp_path / "black.npz", train__lr=1e-9, train__epochs=1), tmp_path / "run")
    assert "Warning: The features have collapsed" in capsys.readouterr().err


def test_a_line_has_the_means_over_its_steps_and_the_rate_of_the_last(npz, tmp_path, monkeypatch):
    original, seen = TrainingStep.__call__, []

    def watched(self, batch, number, lr, *schedule):
        figures = original(self, batch, number, lr, *schedule)
        seen.append([lr, *figures.tolist()])
        return figures

    monkeypatch.setattr(TrainingStep, "__call__", watched)
    settings = tiny_settings(npz, train__epochs=2, train__warmup_epochs=5, record__knn_every=0)
    run = pretrain(settings, tmp_path / "run", console=QUIET)
    means = ("loss", "contrastive_accuracy", "feature_std", "positive_similarity", "key_variance", "positive_share")
    lines = [line for line in run.metrics if line["kind"] == "train"]
    for line, steps in zip(lines, (seen[:3], seen[3:6], seen[6:8]), strict=True):
        expected = [fmean(values) for values in zip(*steps, strict=True)][1:]
        expected[1] *= 100  # in percent
        assert [line[name] for name in means] == pytest.approx(expected, rel=1e-5)
        assert line["lr"] == steps[-1][0] and line["covariance_scale"] == run.settings.method.covariance_scale
    warming_up = [0.05 * (step + 1) / 20 for step in range(8)]  # five epochs of four steps
    assert [lr for lr, *_ in seen] == pytest.approx(warming_up)
    assert [line["queue_filled"] for line in lines] == [0.75, 1.0, 1.0]


def test_same_seed_same_numbers_other_seed_other_numbers(npz, unbroken, tmp_path):
    torch.manual_seed(12345)  # what was drawn elsewhere before does not matter
    assert_same(pretrain(settings_for(npz), tmp_path / "same", console=QUIET), unbroken)
    other = pretrain(tiny_settings(npz, train__seed=1, train__epochs=1), tmp_path / "other", console=QUIET)
    assert figures(other)[2]["loss"] != figures(unbroken)[2]["loss"]


@pytest.mark.parametrize("method", ["moco-v2", "moco-v1", "multi-key", "multi-key-backprop"])
def test_the_other_methods_run_too(npz, tmp_path, method):
    run = pretrain(tiny_settings(npz, method, train__epochs=1), tmp_path / "run", console=QUIET)
    assert run.summary["method"] == method and run.summary["loss"] > 0
    assert run.summary["steps"] == 4


def test_one_key_of_jcl_is_moco_v2_over_a_whole_run(npz, tmp_path):
    runs = [
        pretrain(tiny_settings(npz, method, method__num_keys=1, train__epochs=1), tmp_path / method, console=QUIET)
        for method in ("jcl", "moco-v2")
    ]
    assert figures(runs[0]) == figures(runs[1])
    assert_same_backbone(*runs)


def test_a_loss_that_is_not_finite_stops_the_run_with_a_sentence(npz, tmp_path):
    with pytest.raises(RunError, match=r"loss is not finite after step \d+.*--lr"):
        pretrain(tiny_settings(npz, train__lr=1e30), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run").exists()  # there was no checkpoint yet


def test_a_run_that_broke_in_a_log_without_a_terminal_still_says_so(npz, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jcl.train.display.LOG_SECONDS", 0.0)
    with pytest.raises(RunError, match="not finite"):
        pretrain(tiny_settings(npz, train__lr=1e30), tmp_path / "run", console=Console(stderr=True, width=300))
    assert "the loss is not finite" in capsys.readouterr().err


def test_settings_of_a_finished_run_are_complete(image_folder, tmp_path):
    values = {"data.location": str(image_folder), "train.epochs": 1, "model.backbone": TINY_BACKBONE}
    settings = jcl.build_settings(
        "folder", values=values | {"record.report": False, "record.tensorboard": False, "data.workers": 0}
    )
    run = pretrain(settings, tmp_path / "run", console=QUIET)
    assert "auto" not in {run.settings.train.batch_size, run.settings.method.queue_size, run.settings.data.canvas}
    assert run.settings.views.image_size == 32


def test_backbones_of_finished_runs_files_and_unfinished_runs(npz, unbroken, tmp_path, monkeypatch):
    images = torch.randn(3, 3, 16, 16)
    finished = jcl.load_backbone(unbroken.path)
    assert not finished.training
    wanted = finished(images)
    assert wanted.shape == (3, finished.info.feature_width) and finished.info.image_size == 16
    shutil.copy(unbroken.path / "backbone.safetensors", tmp_path / "weights.safetensors")
    assert torch.equal(jcl.load_backbone(tmp_path / "weights.safetensors")(images), wanted)
    assert torch.equal(unbroken.backbone()(images), wanted)

    shutil.copytree(unbroken.path, tmp_path / "unfinished")
    (tmp_path / "unfinished" / "backbone.safetensors").unlink()
    assert torch.equal(jcl.load_backbone(tmp_path / "unfinished")(images), wanted)  # its newest checkpoint is the last
    list_checkpoints(tmp_path / "unfinished" / "checkpoints")[-1].unlink()
    assert not torch.equal(jcl.load_backbone(tmp_path / "unfinished")(images), wanted)


def test_backbones_that_are_none(unbroken, tmp_path):
    with pytest.raises(RunError, match="no run or weights file"):
        jcl.load_backbone(tmp_path / "missing")
    with pytest.raises(RunError, match="not a run folder"):
        jcl.load_backbone(tmp_path)
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(RunError, match="cannot be read"):
        jcl.load_backbone(tmp_path / "text.safetensors")
    shutil.copy(unbroken.path / "settings.yaml", tmp_path)
    with pytest.raises(RunError, match="has no checkpoint yet"):
        jcl.load_backbone(tmp_path)


@pytest.mark.parametrize("info", [None, "{", "[]", "{}", '{"mean": 1, "std": 2}'])
def test_a_weights_file_that_does_not_say_what_it_is(unbroken, tmp_path, info):
    from safetensors.torch import save_file

    tensors, metadata = read_tensors(unbroken.path / "backbone.safetensors")
    metadata = {"format": metadata["format"]} | ({} if info is None else {"info": info})
    save_file(tensors, tmp_path / "odd.safetensors", metadata)
    with pytest.raises(RunError, match="damaged"):
        jcl.load_backbone(tmp_path / "odd.safetensors")


def test_a_damaged_summary_is_a_sentence(tmp_path):
    (tmp_path / "summary.json").write_text("{")
    with pytest.raises(RunError, match=r"summary\.json is damaged"):
        _ = Run(tmp_path).summary


def test_a_finished_run_is_not_trained_again(unbroken):
    before = {path: path.stat().st_mtime_ns for path in unbroken.path.rglob("*")}
    assert resume(unbroken.path, console=QUIET).summary == unbroken.summary
    assert {path: path.stat().st_mtime_ns for path in unbroken.path.rglob("*")} == before


def test_an_occupied_folder_is_left_byte_for_byte(npz, unbroken):
    before = {path: path.read_bytes() for path in unbroken.path.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="already holds a run"):
        pretrain(settings_for(npz), unbroken.path, console=QUIET)
    assert {path: path.read_bytes() for path in unbroken.path.rglob("*") if path.is_file()} == before


def test_no_location_is_not_the_current_folder(tmp_path, monkeypatch, image_folder):
    monkeypatch.chdir(image_folder)
    with pytest.raises(SettingsError, match="jcl pretrain photos"):
        pretrain(tiny_settings(""), tmp_path / "run", console=QUIET)


@pytest.mark.parametrize("given", ["photos/", {"data.location": "photos/"}, None])
def test_what_is_no_settings_is_told_how_to_become_some(given, tmp_path):
    with pytest.raises(TypeError, match=r"jcl\.build_settings"):
        pretrain(given, tmp_path / "run", console=QUIET)


def test_runs_and_images_are_named_by_text_or_path(npz, unbroken, tmp_path, monkeypatch):
    assert Run(str(unbroken.path)).summary == unbroken.summary
    assert jcl.build_settings("folder", values={"data.location": npz}).data.location == str(npz)
    monkeypatch.setenv("HOME", str(unbroken.path.parent))
    assert Run("~/run") == unbroken
    assert resume("~/run", console=QUIET) == unbroken


def test_bad_settings_are_found_before_the_folder_is_made(npz, tmp_path):
    for name, value, error in (
        ("model.backbone", "resnet5", SettingsError),
        ("train.batch_size", 128, DataError),
        ("train.device", "warp", SettingsError),
        ("train.device", "meta", SettingsError),
    ):
        with pytest.raises(error):
            pretrain(tiny_settings(npz, **{name: value}), tmp_path / "run", console=QUIET)
        assert not (tmp_path / "run").exists()


def test_folders_with_brackets_in_their_names_are_printed_as_they_are(npz, tmp_path, capsys):
    pretrain(tiny_settings(npz, train__epochs=1), tmp_path / "[bold]run[", console=Console(stderr=True, width=40))
    assert str(tmp_path / "[bold]run[") in capsys.readouterr().err


@pytest.mark.parametrize("name", ["method.covariance_scale", "train.weight_decay", "views.recipe", "train.lr"])
def test_a_run_that_has_begun_has_no_auto(name, tmp_path):
    values = {"data.location": "demo", "data.canvas": 32, "data.workers": 0, "data.windows": False}
    values |= {"views.mean": [0.5] * 3, "views.std": [0.5] * 3, "views.local_size": 16}
    values |= {"views.local_scale": [0.1, 0.5], "train.key_passes": 1}
    values |= {"data.channels": 3, "views.color": True}
    values |= {name: "auto"}
    RunFolder(tmp_path / "run").create(jcl.build_settings("demo", values=values))
    with pytest.raises(SettingsError, match=rf"'auto' for {name}"):
        resume(tmp_path / "run", console=QUIET)


def test_a_method_from_outside_trains(npz, tmp_path, monkeypatch):
    def mean_key_loss(query: Tensor, keys: Tensor, negatives: Tensor, *, temperature: float) -> Tensor:
        return info_nce_loss(query, keys.mean(dim=1), negatives, temperature=temperature)

    monkeypatch.setitem(METHODS, "mean-key", None)  # removed after the test
    register(
        Method("mean-key", "Mean key", "InfoNCE with the mean key", mean_key_loss, recipe={"model.head": "linear"})
    )
    settings = tiny_settings(npz, "mean-key", train__epochs=1)
    summary = pretrain(settings, tmp_path / "run", console=QUIET).summary
    assert settings.model.head == "linear" and (summary["method"], summary["steps"]) == ("mean-key", 4)
