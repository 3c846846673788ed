"""Runs whose settings somebody edits between stopping and resuming: told, or refused, and never called finished."""

import io
import json
import shutil
import signal
from pathlib import Path

import pytest
from rich.console import Console

from jcl.commands.pretrain import pretrain, resume
from jcl.commands.report import read_run
from jcl.errors import Interrupted, RunError
from jcl.runs.checkpoint import list_checkpoints, read_tensors
from run_tools import QUIET, stop_after
from small_runs import tiny_settings, write_image_folder


def stop_in_step(step, images, folder, **changes):
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, step, signal.SIGTERM)
        with pytest.raises(Interrupted):
            pretrain(tiny_settings(images, **changes), folder, console=QUIET)


@pytest.fixture(scope="module")
def _five_of_twelve_steps(npz, tmp_path_factory):
    folder = tmp_path_factory.mktemp("edited") / "run"
    stop_in_step(5, npz, folder)
    return folder


@pytest.fixture
def folder(_five_of_twelve_steps, tmp_path):
    """A run stopped after five of twelve steps."""
    return shutil.copytree(_five_of_twelve_steps, tmp_path / "run")


def edit_settings(folder, before, after):
    file = folder / "settings.yaml"
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, after))


@pytest.mark.parametrize(
    ("edited", "said"),
    [
        (("epochs: 3", "epochs: 1"), "at step 5, beyond the 4 steps"),
        (("batch_size: 8", "batch_size: 32"), r"at step 5, beyond the 3 steps"),
    ],
)
def test_a_run_is_not_called_finished_because_its_settings_were_edited(folder, edited, said):
    edit_settings(folder, *edited)
    with pytest.raises(RunError, match=said):
        resume(folder, console=QUIET)
    assert not (folder / "summary.json").exists()


def test_settings_that_were_changed_under_a_run_are_told_and_nothing_where_they_were_not(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    edit_settings(folder, "temperature: 0.2", "temperature: 0.3")
    edit_settings(folder, "bn_groups: 2", "bn_groups: 4")
    edit_settings(folder, "log_every: 3", "log_every: 2")
    edit_settings(folder, "windows: true", "windows: false")
    told, untold = (Console(file=io.StringIO(), width=1000) for _ in range(2))
    resume(folder, console=told)
    changes = ("method.temperature = 0.3 instead of 0.2", "model.bn_groups = 4 instead of 2", "data.windows = false")
    for change in changes:
        assert change in told.file.getvalue()
    resume(copy, console=untold)
    assert "have changed" not in untold.file.getvalue()


def test_an_edited_setting_of_the_optimizer_takes_effect_or_is_refused(folder):
    edit_settings(folder, "layer_decay: 1.0", "layer_decay: 0.5")  # other groups of parameters
    with pytest.raises(RunError, match=r"train\.layer_decay"):
        resume(folder, console=QUIET)
    edit_settings(folder, "layer_decay: 0.5", "layer_decay: 1.0")
    edit_settings(folder, "weight_decay: 0.0005", "weight_decay: 0.25")
    _, metadata = read_tensors(list_checkpoints(resume(folder, console=QUIET).path / "checkpoints")[-1])
    assert {group["weight_decay"] for group in json.loads(metadata["optimiser"])["groups"]} == {0.25}


def test_other_images_under_a_run_are_told_and_images_that_moved_are_the_same(tmp_path):
    photos, folder = write_image_folder(tmp_path / "photos", 32), tmp_path / "run"
    stop_in_step(3, photos, folder, train__epochs=1)

    def said_when(change) -> str:
        place, said = tmp_path / change.__name__, Console(file=io.StringIO(), width=1000)
        shutil.copytree(photos, place / "photos")
        change(place / "photos")
        run = Path(shutil.copytree(folder, place / "run"))
        edit_settings(run, f"location: {photos}", f"location: {place / 'photos'}")
        assert resume(run, console=said).summary["steps"] == 4
        return said.file.getvalue()

    def moved(_): ...

    def renamed(place):
        (place / "cats").rename(place / "lions")

    def redrawn(place):
        small, large = sorted((place / "cats/000.png", place / "cats/004.png"), key=lambda file: file.stat().st_size)
        large.write_bytes(small.read_bytes().ljust(large.stat().st_size, b"\0"))

    changed = "These images have changed since the checkpoint: 32 image files"
    assert changed not in said_when(moved) and changed in said_when(renamed) and changed in said_when(redrawn)


def test_an_epoch_of_other_length_is_told(folder):
    said = Console(file=io.StringIO(), width=1000)
    edit_settings(folder, "batch_size: 8", "batch_size: 16")
    resume(folder, console=said)
    assert "epoch 2.5 instead of 1.25" in said.file.getvalue()


def test_other_images_to_test_with_are_told(tmp_path):
    photos, folder, said = tmp_path / "photos", tmp_path / "run", Console(file=io.StringIO(), width=1000)
    write_image_folder(photos / "train", 32)
    write_image_folder(photos / "val", 10)
    stop_in_step(3, photos, folder, train__epochs=1)
    shutil.rmtree(photos / "val/cats")
    resume(folder, console=said)
    assert "changed since the checkpoint: 5 image files" in said.file.getvalue()
    assert "checkpoint: 32 image files" not in said.file.getvalue()


def test_the_page_does_not_show_choices_that_were_edited(folder):
    chosen = {choice["name"] for choice in json.loads((folder / "choices.json").read_text())["choices"]}
    assert {"train.weight_decay", "train.precision", "method.covariance_scale"} <= chosen
    edit_settings(folder, "weight_decay: 0.0005", "weight_decay: 0.001")
    assert {choice.name for choice in read_run(folder, "run").choices} == chosen - {"train.weight_decay"}
