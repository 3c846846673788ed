"""A stopped run goes on as if it had never stopped."""

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from fault_tools import settings_for
from jcl.commands.pretrain import pretrain, resume
from jcl.commands.run import Run
from jcl.distributed.launch import launch_environment
from jcl.errors import Interrupted
from jcl.evaluate.features import FeatureSettings
from jcl.runs.checkpoint import list_checkpoints, read_tensors
from jcl.runs.folder import RunFolder
from jcl.runs.lock import lock_folder
from run_tools import QUIET, assert_same, figures, state, stop_after
from small_runs import tiny_settings, write_image_folder


class Crash(BaseException):
    """Ends a run at once, as a power cut does: nothing in the program answers to it."""


@pytest.mark.parametrize(("step", "how"), [(1, signal.SIGTERM), (8, signal.SIGTERM), (9, signal.SIGTERM), (7, Crash)])
def test_a_run_stopped_at_any_step_ends_as_if_it_had_not(npz, unbroken, tmp_path, monkeypatch, step, how):
    """In the first step, right after a line of metrics and at the end of an epoch; the crash loses steps."""
    with monkeypatch.context() as patch:
        stop_after(patch, step, how)
        with pytest.raises(Crash if how is Crash else Interrupted):
            pretrain(settings_for(npz), tmp_path / "run", console=QUIET)
    assert not (tmp_path / "run" / "summary.json").exists()
    assert_same(resume(tmp_path / "run", console=QUIET), unbroken)


def test_a_stop_in_the_last_step_leaves_the_last_evaluation(npz, unbroken, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="stopped after step 12"):
        stop_after(patch, 12, signal.SIGINT)
        pretrain(settings_for(npz), tmp_path / "run", console=QUIET)
    assert_same(resume(tmp_path / "run", console=QUIET), unbroken)


def test_a_run_stopped_again_and_again(npz, unbroken, tmp_path, monkeypatch):
    start, stops = (lambda: pretrain(settings_for(npz), tmp_path / "run", console=QUIET)), [2, 4, 6, 11]
    for step in stops:
        with monkeypatch.context() as patch:
            stop_after(patch, step, signal.SIGINT)
            with pytest.raises(Interrupted, match=rf"stopped after step {step}\b.*`jcl resume"):
                start()
        start = lambda: resume(tmp_path / "run", console=QUIET)  # noqa: E731
    assert_same(start(), unbroken)


def test_ranks_started_again_go_on_with_their_own_run_though_another_began_later(npz, unbroken, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        stop_after(patch, 5, signal.SIGTERM)
        with pytest.raises(Interrupted):
            pretrain(settings_for(npz), console=QUIET)
    (own,) = Path("runs").iterdir()
    other = Path(shutil.copytree(own, own.with_name(own.name.replace("001", "002"))))  # the same command, elsewhere
    monkeypatch.setenv("JCL_RESTARTS", "1")
    assert launch_environment().restarts == 0  # alone it is a leftover
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with lock_folder(other, warn=print):
        assert_same(pretrain(settings_for(npz), console=QUIET), unbroken)
    assert (own / "summary.json").exists() and not (other / "summary.json").exists()


def test_the_speed_after_a_stop_is_that_of_the_steps_since(npz, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGTERM)
        with pytest.raises(Interrupted):
            pretrain(settings_for(npz), tmp_path / "run", console=QUIET)
    (checkpoint,) = list_checkpoints(tmp_path / "run" / "checkpoints")
    before = float(read_tensors(checkpoint)[1]["seconds"])
    line = resume(tmp_path / "run", console=QUIET).metrics[2]  # after the kNN of the untrained network
    assert line["step"] == 3 and line["kind"] == "train"  # it sums up three steps, of which one came after the stop
    assert line["images_per_second"] == pytest.approx(8 / (line["seconds"] - before), rel=1e-6)


def test_a_run_in_several_threads_ends_as_if_it_had_not_stopped(npz, tmp_path, monkeypatch):
    """All other tests compute in one thread; what is summed by several must come out the same each time as well."""
    one = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        whole = pretrain(settings_for(npz, train__epochs=1), tmp_path / "whole", console=QUIET)
        with monkeypatch.context() as patch:
            stop_after(patch, 2, signal.SIGTERM)
            with pytest.raises(Interrupted):
                pretrain(settings_for(npz, train__epochs=1), tmp_path / "run", console=QUIET)
        assert_same(resume(tmp_path / "run", console=QUIET), whole)
    finally:
        torch.set_num_threads(one)


def test_a_run_whose_newest_checkpoint_is_torn(npz, unbroken, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 10, signal.SIGTERM)
        with pytest.raises(Interrupted):
            pretrain(settings_for(npz), tmp_path / "run", console=QUIET)
    newest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    assert_same(resume(tmp_path / "run", console=QUIET), unbroken)


def test_a_run_stopped_before_its_results_are_written_has_the_accuracy_of_each_class(
    npz, unbroken, tmp_path, monkeypatch
):
    def crash(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr("jcl.commands.train_run.save_backbone", crash)
        pretrain(settings_for(npz), tmp_path / "run", console=QUIET)
    assert_same(resume(tmp_path / "run", console=QUIET), unbroken)
    assert (tmp_path / "run/classes.json").read_bytes() == (unbroken.path / "classes.json").read_bytes()


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    return write_image_folder(tmp_path_factory.mktemp("images") / "photos")


@pytest.fixture(scope="module")
def unbroken_on_photos(photos, tmp_path_factory) -> Run:
    return pretrain(tiny_settings(photos), tmp_path_factory.mktemp("unbroken") / "run", console=QUIET)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_folder_with_any_number_of_workers(photos, unbroken_on_photos, tmp_path, monkeypatch, workers):
    """Stopped in the second epoch; on resuming the images are decoded again instead of coming from memory."""
    settings = tiny_settings(photos, data__workers=workers, record__knn_every=0)
    with monkeypatch.context() as patch:
        stop_after(patch, 5, signal.SIGTERM)
        with pytest.raises(Interrupted):
            pretrain(settings, tmp_path / "run", console=QUIET)
    run = resume(tmp_path / "run", console=QUIET)
    mine, theirs = state(run), state(unbroken_on_photos)
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert [line for line in figures(run) if line["kind"] == "train"] == [
        line for line in figures(unbroken_on_photos) if line["kind"] == "train"
    ]
    assert figures(run)[-1] == figures(unbroken_on_photos)[-1]


def test_a_run_with_a_wide_head_and_two_queries_is_resumed(npz, tmp_path, monkeypatch):
    settings = tiny_settings(npz, model__head_width=24, method__num_queries=2, train__epochs=2)
    whole = pretrain(settings, tmp_path / "whole", console=QUIET)
    with monkeypatch.context() as patch:
        stop_after(patch, 5, signal.SIGTERM)
        with pytest.raises(Interrupted):
            pretrain(settings, tmp_path / "run", console=QUIET)
    assert_same(resume(tmp_path / "run", console=QUIET), whole)


@pytest.mark.parametrize(("step", "number"), [(0, signal.SIGINT), (0, signal.SIGTERM), (4, signal.SIGTERM)])
def test_a_stop_ends_an_evaluation_which_is_repeated(npz, tmp_path, monkeypatch, unbroken, step, number):
    read, evaluated = FeatureSettings.batches, []

    def batches(self, *given, **options):
        for batch in read(self, *given, **options):
            evaluated.append(len(batch))
            if len(evaluated) == 1 + 2 * (step // 4):  # two sources each time: training images, test images
                os.kill(os.getpid(), number)
            yield batch

    monkeypatch.setattr(FeatureSettings, "batches", batches)
    error = KeyboardInterrupt if (step, number) == (0, signal.SIGINT) else Interrupted
    with pytest.raises(error):
        pretrain(settings_for(npz), tmp_path / "run", console=QUIET)
    assert len(evaluated) == 1 + 2 * (step // 4)
    if step == 0:
        assert not (tmp_path / "run").exists()
        return
    assert [path.stem for path in list_checkpoints(tmp_path / "run/checkpoints")][-1] == f"step-{step:09}"
    assert_same(resume(tmp_path / "run", console=QUIET), unbroken)


def test_broken_images_met_before_a_stop_stay_listed(image_folder, tmp_path, monkeypatch):
    """One epoch that is not kept in memory: what was met before the stop is not met again."""
    monkeypatch.setattr("jcl.data.loader.CACHE_BYTES", 0)
    # They read images before the first step.
    monkeypatch.setattr("jcl.commands.train_run.online_knn", lambda *_: None)
    monkeypatch.setattr("jcl.commands.train_run.online_quality", lambda *_: dict)
    for file in sorted(image_folder.glob("cats/*.png"))[::2]:
        file.write_bytes(b"no image")
    settings = tiny_settings(image_folder, train__epochs=1, data__max_failed_share=1)
    whole = pretrain(settings, tmp_path / "whole", console=QUIET).path / "skipped.txt"
    with monkeypatch.context() as patch:
        stop_after(patch, 2, signal.SIGINT)
        with pytest.raises(Interrupted):
            pretrain(settings, tmp_path / "run", console=QUIET)
    assert 0 < len((tmp_path / "run/skipped.txt").read_text()) < len(whole.read_text())
    resume(tmp_path / "run", console=QUIET)
    assert (tmp_path / "run/skipped.txt").read_text() == whole.read_text()


def test_a_run_is_resumed_on_another_device_than_its_own(npz, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        stop_after(patched, 5, signal.SIGTERM)
        pretrain(tiny_settings(npz, record__log_every="auto"), folder, console=QUIET)
    file = RunFolder(folder).settings_file
    file.write_text(file.read_text().replace("device: cpu", "device: cuda:7"))
    run = resume(folder, console=QUIET, device="cpu")
    assert run.summary["steps"] == 12 and run.settings.train.device == "cuda:7"
    assert [line["step"] for line in run.metrics if line["kind"] == "train"] == list(range(1, 13))
