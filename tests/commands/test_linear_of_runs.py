"""The paper's linear probe in a folder: a stop changes nothing, and another probe is not mixed up with it."""

import io
import json
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from jcl.commands.probes import LinearReport
from jcl.commands.run import read_classes
from jcl.core.encoder import build_backbone
from jcl.errors import DataError, Interrupted, RunError, SettingsError
from jcl.evaluate.folders import FinetuneFolder, ProbeFolder
from jcl.evaluate.supervised import ClassifierTask
from jcl.export import BackboneInfo, save_backbone
from jcl.runs.checkpoint import list_checkpoints, read_tensors
from jcl.runs.lock import lock_folder
from jcl.train.trainer import Trainer
from jcl.views import IMAGENET_MEAN, IMAGENET_STD
from small_runs import snapshot, write_image_folder
from supervised_tools import finetune, measure_linear, same_tensors, stop_after, untrained_weights

QUIET = Console(quiet=True)
SHORT = {"protocol": "paper", "lr": [3.0], "epochs": 3, "batch_size": 8, "device": "cpu", "workers": 0}
STEPS = 12


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    return untrained_weights(tmp_path_factory.mktemp("weights") / "tiny.safetensors")


def probed(weights: Path, data: Path, out: Path | None, console: Console = QUIET, **changes) -> LinearReport:
    return measure_linear(weights, str(data), out=out, console=console, **SHORT | changes)


@pytest.fixture(scope="module")
def unbroken(weights, npz, tmp_path_factory) -> Path:
    """Three epochs of four steps."""
    out = tmp_path_factory.mktemp("unbroken") / "probe"
    probed(weights, npz, out)
    return out


def assert_same(one: Path, two: Path) -> None:
    folder, other = ProbeFolder(one), ProbeFolder(two)
    assert same_tensors(folder.classifier_file, other.classifier_file)
    assert same_tensors(*(list_checkpoints(each.checkpoints)[-1] for each in (folder, other)))
    assert read_classes(folder) == read_classes(other) != {}
    assert folder.summary() | {"seconds": 0} == other.summary() | {"seconds": 0}
    clock = {"seconds", "images_per_second"}
    lines = [
        [{name: value for name, value in json.loads(line).items() if name not in clock} for line in text.splitlines()]
        for text in (folder.metrics_file.read_text(), other.metrics_file.read_text())
    ]
    assert lines[0] == lines[1]


def test_a_folder_changes_no_figure_and_holds_what_was_found(weights, npz, unbroken):
    assert {path.name for path in unbroken.iterdir()} == {
        *("probe.json", "run_id", "metrics.jsonl", "checkpoints"),
        *("classifier.safetensors", "classes.json", "summary.json"),
    }
    found = probed(weights, npz, None)
    assert found.classes == read_classes(ProbeFolder(unbroken))
    assert found.figures | {"seconds": 0} == ProbeFolder(unbroken).summary() | {"seconds": 0}
    layer, names = ProbeFolder(unbroken).load_classifier()
    assert names == ("0", "1", "2") and layer["weight"].shape == (3, 128)


def test_checkpoints_hold_the_layer_and_not_the_frozen_backbone(unbroken):
    tensors, _ = read_tensors(list_checkpoints(unbroken / "checkpoints")[-1])
    assert {name for name in tensors if name.startswith("model.")} == {"model.weight", "model.bias"}


@pytest.mark.parametrize("stops", [[4], [2, 3, 8, 11], sorted(random.Random(20201).sample(range(1, STEPS), 3))])
def test_stopped_and_given_again_ends_as_if_it_had_not(weights, npz, unbroken, tmp_path, monkeypatch, stops):
    out = tmp_path / "probe"
    for number, step in enumerate(stops):
        with monkeypatch.context() as patch:
            stop_after(patch, step, (signal.SIGINT, signal.SIGTERM)[number % 2])
            with pytest.raises(Interrupted, match=rf"stopped after step {step}\b"):
                probed(weights, npz, out)
        assert not (out / "summary.json").exists()
    probed(weights, npz, out)
    assert_same(out, unbroken)


def test_killed_at_any_moment_ends_as_if_it_had_not(weights, npz, unbroken, tmp_path, monkeypatch):
    """Ended between two checkpoints, at a random step, without a chance to save."""
    moments = random.Random(4)
    monkeypatch.setattr("jcl.evaluate.supervised.CHECKPOINT_SECONDS", 1e-9)
    train = ClassifierTask.step

    class Killed(Exception):
        pass

    for number in range(4):
        end, saved = moments.randrange(2, STEPS), moments.randrange(1, 4)

        def train_until(self, batch, step, lr, end=end):
            if step == end:
                raise Killed
            return train(self, batch, step, lr)

        def due_now_and_then(self, saved=saved):
            return self.progress.step % saved == 0

        out = tmp_path / str(number)
        with monkeypatch.context() as patch:
            patch.setattr(ClassifierTask, "step", train_until)
            patch.setattr(Trainer, "_save_due", due_now_and_then)
            with pytest.raises(Killed):
                probed(weights, npz, out)
        assert not (out / "summary.json").exists()
        probed(weights, npz, out)
        assert_same(out, unbroken)


def test_a_long_epoch_is_saved_in_the_middle(weights, npz, tmp_path, monkeypatch):
    monkeypatch.setattr("jcl.evaluate.supervised.CHECKPOINT_SECONDS", 1e-9)
    probed(weights, npz, tmp_path / "probe", epochs=1)
    within, last = (path.stem for path in list_checkpoints(tmp_path / "probe/checkpoints"))
    # One that is still being written lets the next one pass, so that a slow disk holds nothing up.
    assert within in {f"step-00000000{step}" for step in (1, 2, 3)} and last == "step-000000004"


def test_images_that_cannot_be_read_are_not_counted_as_trained_on(weights, tmp_path, monkeypatch):
    """Nor are they forgotten by a stop in the only epoch, after which those before it are not met again."""
    monkeypatch.setattr("jcl.data.loader.CACHE_BYTES", 0)
    photos = write_image_folder(tmp_path / "photos" / "train", 24)
    write_image_folder(tmp_path / "photos" / "val", 6)
    for file in sorted(photos.glob("cats/*.png"))[::2]:
        file.write_bytes(b"no image")
    figures = probed(weights, tmp_path / "photos", None, epochs=1).figures
    assert (figures["train_images"], figures["skipped"], figures["test_images"]) == (18, 6, 6)
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGINT)
        with pytest.raises(Interrupted):
            probed(weights, tmp_path / "photos", tmp_path / "out", epochs=1)
    assert 0 < len((tmp_path / "out/skipped.txt").read_text().splitlines()) < 6
    kept = probed(weights, tmp_path / "photos", tmp_path / "out", epochs=1).figures
    assert kept | {"seconds": 0} == figures | {"seconds": 0}
    assert len((tmp_path / "out/skipped.txt").read_text().splitlines()) == 6


def test_a_finished_probe_is_only_shown(weights, npz, unbroken):
    before = snapshot(unbroken)
    said = Console(file=io.StringIO(), width=1000)
    found = probed(weights, npz, unbroken, console=said)
    assert "has finished" in said.file.getvalue()
    assert found.classes == read_classes(ProbeFolder(unbroken)) and list(found.classes) == ["0", "1", "2"]
    assert found.figures == ProbeFolder(unbroken).summary() and snapshot(unbroken) == before


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lr": [10.0]}, "lr = 3 instead of 10"),
        ({"epochs": 4}, "epochs = 3 instead of 4"),
        ({"batch_size": 16}, "batch_size = 8 instead of 16"),
        ({"seed": 1}, "seed = 0 instead of 1"),
        ({"least_crop": 0.5}, "least_crop = 0.08 instead of 0.5"),
    ],
)
def test_other_settings_are_refused(weights, npz, unbroken, changes, said):
    before = snapshot(unbroken)
    with pytest.raises(RunError) as error:
        probed(weights, npz, unbroken, **changes)
    assert said in str(error.value) and "--out" in str(error.value) and snapshot(unbroken) == before


def test_other_weights_and_other_images_are_refused(weights, npz, unbroken, tmp_path):
    before = snapshot(unbroken)
    for options in ({"seed": 1}, {"image_size": 32}):
        other = untrained_weights(tmp_path / "tiny.safetensors", **options)
        with pytest.raises(RunError, match=r"weights = \w{16} instead of \w{16}"):
            probed(other, npz, unbroken)
    stored = dict(np.load(npz))
    stored["y_test"] = stored["y_test"][::-1]
    np.savez(tmp_path / "small.npz", **stored)
    with pytest.raises(RunError, match=r"data = \w{16} \w{16} instead of"):
        probed(weights, tmp_path / "small.npz", unbroken)
    assert snapshot(unbroken) == before


def test_the_same_weights_and_images_may_have_moved(weights, npz, unbroken, tmp_path):
    for file, name in ((weights, "tiny.safetensors"), (npz, "small.npz")):
        shutil.copy(file, tmp_path / name)
    found = probed(tmp_path / "tiny.safetensors", tmp_path / "small.npz", unbroken)
    assert found.classes == read_classes(ProbeFolder(unbroken))


def test_a_probe_among_the_images_is_refused(weights, tmp_path):
    photos = write_image_folder(tmp_path / "photos")
    before = snapshot(tmp_path)
    with pytest.raises(RunError, match="inside the image folder"):
        probed(weights, photos, photos / "probe")
    with pytest.raises(RunError, match="inside the image folder"):
        finetune(weights, str(photos), out=photos / "tuned", device="cpu", workers=0, console=QUIET)
    assert snapshot(tmp_path) == before


def test_folders_of_something_else_are_left_alone(weights, npz, tmp_path):
    tuned = finetune(weights, str(npz), out=tmp_path / "tuned", epochs=1, device="cpu", workers=0, console=QUIET)
    (tmp_path / "file").write_text("mine")
    before = snapshot(tmp_path)
    with pytest.raises(RunError, match=r"probe\.json"):
        ProbeFolder(tuned.checkpoints).summary()
    with pytest.raises(RunError, match="already holds a run"):
        probed(weights, npz, tuned.path)
    with pytest.raises(RunError, match="is a file"):
        probed(weights, npz, tmp_path / "file")
    with pytest.raises(SettingsError, match="--out"):
        measure_linear(weights, str(npz), out=tmp_path / "fast", device="cpu", workers=0)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(("given", "option"), [({"compile": True}, "--compile"), ({"least_crop": 0.5}, "--least-crop")])
def test_what_only_the_papers_probe_knows_is_not_ignored(weights, npz, given, option):
    with pytest.raises(SettingsError, match=option):
        measure_linear(weights, str(npz), device="cpu", workers=0, **given)


def test_one_process_at_a_time(weights, npz, tmp_path):
    with lock_folder(tmp_path / "probe", warn=print), pytest.raises(RunError, match=r"Process \d+ on"):
        probed(weights, npz, tmp_path / "probe")
    assert not list((tmp_path / "probe").iterdir())


@pytest.mark.parametrize("kind", [ProbeFolder, FinetuneFolder])
def test_images_of_no_use_leave_nothing_behind(weights, tmp_path, kind):
    for split in ("train", "val"):
        write_image_folder(tmp_path / "photos" / split, 24)
    for file in (tmp_path / "photos/train").rglob("*.png"):
        file.write_bytes(b"no picture")
    with pytest.raises(DataError):
        if kind is ProbeFolder:
            probed(weights, tmp_path / "photos", tmp_path / "out")
        else:
            options = {"out": tmp_path / "out", "device": "cpu", "workers": 0, "console": QUIET}
            finetune(weights, str(tmp_path / "photos"), **options)
    assert not (tmp_path / "out").exists()


def test_an_untrained_network_whose_probe_diverges_is_left_out(npz, tmp_path):
    """At this rate the probe of constant features stays finite, that of the untrained network does not."""
    network = build_backbone("tiny_cnn")[0]
    torch.nn.init.zeros_(network.layers[-1].weight)
    info = BackboneInfo("tiny_cnn", "imagenet", 16, 128, IMAGENET_MEAN, IMAGENET_STD)
    save_backbone(network, info, tmp_path / "constant.safetensors")
    options = {"lr": [1e38], "weight_decay": [0.0], "epochs": 2, "device": "cpu", "workers": 0}
    figures = measure_linear(tmp_path / "constant.safetensors", str(npz), console=QUIET, **options).figures
    assert "linear_top1" in figures and "untrained_linear_top1" not in figures
