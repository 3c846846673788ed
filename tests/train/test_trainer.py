import pytest

from jcl.runs.checkpoint import Progress
from jcl.train import trainer
from jcl.train.trainer import TrainingClock


def test_seconds_and_pace(monkeypatch):
    now = 100.0
    monkeypatch.setattr(trainer.time, "perf_counter", lambda: now)
    progress = Progress(step=7, seconds=50.0, window_steps=5)  # five steps of a line were taken before a stop
    watch = TrainingClock(progress)
    now, progress.step = 104.0, 8
    watch.lap()
    now = 200.0
    watch.restart()  # something else was done meanwhile
    now, progress.step = 202.0, 10
    assert watch.steps_per_second() == pytest.approx(3 / 6)
    assert progress.seconds == 56.0
    now, progress.step = 203.0, 14
    assert watch.steps_per_second() == 4.0 and progress.seconds == 57.0
