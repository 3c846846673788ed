"""The loop alone, with a task of a few lines: metric windows, saving, stopping, resuming and errors."""

import io
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from jcl.errors import DataError, Diverged, Interrupted, RunError
from jcl.runs.checkpoint import Progress, list_checkpoints, load_checkpoint, newest_checkpoint
from jcl.runs.folder import TrainingFolder
from jcl.runs.metrics import read_metrics
from jcl.signals import StopRequest
from jcl.train import trainer
from jcl.train.display import Display
from jcl.train.trainer import Trainer, TrainingClock, TrainingTask


class FitFolder(TrainingFolder):
    settings_name = "fit.json"
    how_to_resume = "run it again"


class Regression(TrainingTask):
    """Fit y = 2x by SGD, 3 epochs of 4 steps; `at` maps a step to what happens in it."""

    epochs, steps_per_epoch, batch_size = 3, 4, 8

    def __init__(self, at=None):
        self.module = nn.Linear(1, 1)
        nn.init.zeros_(self.module.weight)
        nn.init.zeros_(self.module.bias)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1.0, momentum=0.9)
        self.at = at or {}
        self.ended_epochs = []

    def batches(self, epoch, start):
        for step in range(start, self.steps_per_epoch):
            yield torch.linspace(-1, 1, 8)[:, None] * (1 + epoch + step)

    def learning_rate(self, step):
        return 0.01 / (1 + step)

    def step(self, batch, step, lr):
        self.optimizer.param_groups[0]["lr"] = lr
        loss = (self.module(batch) - 2 * batch).square().mean()
        loss = loss * float("nan") if self.at.get(step) == "nan" else loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.at.get(step) == "ruined":
            nn.init.constant_(self.module.bias, torch.inf)
        if self.at.get(step) == "stop":
            os.kill(os.getpid(), signal.SIGTERM)
        if self.at.get(step) == "unreadable":
            raise DataError("x.png cannot be read.")
        return loss.detach()[None]

    def metrics(self, progress):
        return {"loss": float(progress.window[0] / progress.window_steps)}

    def between_epochs(self, trainer):
        self.ended_epochs.append(trainer.progress.step // self.steps_per_epoch)


def train(folder: Path, at=None, **options) -> Regression:
    task, progress = Regression(at), Progress()
    checkpoint = newest_checkpoint(folder / "checkpoints")
    if checkpoint is not None:
        progress = load_checkpoint(checkpoint, task.module, task.optimizer, torch.device("cpu"))
    folder.mkdir(exist_ok=True)
    display = Display(Console(file=io.StringIO()), "fit")
    loop = Trainer(task, display, progress, **({"log_every": 5} | options))
    with loop.writing_to(FitFolder(folder)):
        loop.run()
    return task


def test_windows_cover_every_step_once(tmp_path):
    task = train(tmp_path / "run")
    lines = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == [5, 10, 12] and task.ended_epochs == [0, 1, 2, 3]
    assert [line["lr"] for line in lines] == [pytest.approx(0.01 / step) for step in (5, 10, 12)]
    assert [path.stem for path in list_checkpoints(tmp_path / "run/checkpoints")] == ["step-000000012"]


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [(3, range(1, 13)), (15, range(1, 61)), (250, [1, 2, 4, 8, 16, *range(20, 1001, 20)])],
)
def test_curves_of_short_runs_have_many_points_and_long_runs_begin_at_once(tmp_path, monkeypatch, epochs, steps):
    monkeypatch.setattr(Regression, "epochs", epochs)
    train(tmp_path / "run", log_every="auto")
    assert [line["step"] for line in read_metrics(tmp_path / "run/metrics.jsonl")] == list(steps)


@pytest.mark.parametrize("step", [0, 3, 6, 10])
def test_stopped_and_resumed_equals_unbroken(tmp_path, step):
    whole = train(tmp_path / "whole")
    with pytest.raises(Interrupted, match=f"after step {step + 1}"):
        train(tmp_path / "parts", {step: "stop"})
    again = train(tmp_path / "parts")
    assert torch.equal(whole.module.weight, again.module.weight)
    losses = [[line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("whole", "parts")]
    assert losses[0] == losses[1]


def test_a_stop_in_the_last_step_finishes_instead(tmp_path):
    assert train(tmp_path / "run", {11: "stop"}).ended_epochs == [0, 1, 2, 3]


@pytest.mark.parametrize("log_every", [1, 5])
def test_a_loss_that_is_not_finite_ends_training_and_is_never_saved(tmp_path, monkeypatch, log_every):
    monkeypatch.setattr("jcl.train.display.LOG_SECONDS", 0.0)  # a line of the log is due
    with pytest.raises(RunError, match=r"not finite after step \d+.*step-000000002"):
        train(tmp_path / "run", {2: "nan"}, save_every=2, log_every=log_every)
    assert [path.stem for path in list_checkpoints(tmp_path / "run/checkpoints")] == ["step-000000002"]


def test_weights_that_are_not_finite_end_training(tmp_path):
    with pytest.raises(Diverged, match=r"bias is not finite.*step-000000010.*--lr"):
        train(tmp_path / "run", {11: "ruined"}, save_every=10)


def test_unreadable_data_loses_no_step(tmp_path):
    with pytest.raises(DataError, match=r"x\.png.*after step 6.*run it again"):
        train(tmp_path / "run", {6: "unreadable"})
    assert [path.stem for path in list_checkpoints(tmp_path / "run/checkpoints")] == ["step-000000006"]


def test_without_a_folder_signals_keep_their_handlers():
    before = signal.getsignal(signal.SIGTERM)
    seen = []
    task = Regression()
    task.between_epochs = lambda _: seen.append(signal.getsignal(signal.SIGTERM))
    Trainer(task, Display(Console(quiet=True), "fit")).run()
    assert seen == [before] * 4


def test_the_clock_leaves_out_what_was_not_training(monkeypatch):
    now = 100.0
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: now)
    progress = Progress(step=7, seconds=50.0, window_steps=5)  # five steps of a window were done before a stop
    clock = TrainingClock(progress)
    now, progress.step = 104.0, 8
    clock.lap()
    now = 200.0
    clock.restart()
    now, progress.step = 202.0, 10
    assert clock.steps_per_second() == pytest.approx(3 / 6) and progress.seconds == 56.0
    now, progress.step = 203.0, 14
    assert clock.steps_per_second() == 4.0 and progress.seconds == 57.0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_becomes_a_wish(number):
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.signal_name == number.name


def test_handlers_come_back_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ZeroDivisionError), StopRequest():
        assert signal.getsignal(signal.SIGINT) not in before
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_ctrl_c_interrupts_at_once_but_a_second_sigterm_waits():
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_nothing_changes():
    before = signal.getsignal(signal.SIGINT)
    found = []

    def work() -> None:
        with StopRequest() as stop:
            found.append((stop.requested, signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(False, before)]


def test_a_wish_is_passed_on_once():
    heard = []
    with StopRequest(lambda: heard.append("heard")):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert heard == ["heard"]
