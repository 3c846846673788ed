"""What a person sees of a run: one line of bar in a terminal of any width, and few lines in a log."""

import io
import math
import re
from functools import partial

import pytest
from rich.console import Console

from jcl.console import format_duration
from jcl.train import display as module
from jcl.train.display import Display, health, uniform_guess_loss

HEALTH = partial(health, queue_size=256, embedding_dim=128)
FIGURES = {"kind": "train", "step": 19, "epoch": 1.0, "loss": 2.1234, "images_per_second": 12_321.4}


class Clock:
    """Time that passes as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


def console(file: io.StringIO, width: int, terminal: bool) -> Console:
    return Console(file=file, width=width, force_terminal=terminal, no_color=True, _environ={})


def frames(width: int, *, stopping: bool = False) -> list[str]:
    """What the bar has shown, a text for each time that it was drawn."""
    file = io.StringIO()
    shown = Display(console(file, width, terminal=True), "MoCo v2", HEALTH)
    with shown:
        shown.start(0, 456, 19)
        shown.show(dict(FIGURES))
        shown.advance(199)
        if stopping:
            shown.stopping()
        shown._bar.refresh()
        drawn = re.split(r"\r", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()))
    return [frame for frame in drawn if frame.strip()]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_bar_stays_on_one_line(width):
    newest = frames(width)[-1]
    assert "\n" not in newest and len(newest) <= width
    assert "epoch 11/24" in newest and "loss 2.123  12,321 images/s" in newest and "━" in newest


def test_whoever_presses_ctrl_c_sees_that_it_was_heard():
    newest = frames(60, stopping=True)[-1]
    assert "stopping" in newest and "\n" not in newest


def test_an_evaluation_is_announced_beside_the_bar_and_once_in_a_log():
    file = io.StringIO()
    with Display(console(file, 80, terminal=False), "jcl", HEALTH) as shown:
        shown.start(0, 456, 19)
        shown.evaluating(0)
        shown.evaluating(19)
        assert shown._beside["metrics"] == "evaluating"
        shown.show({"kind": "quality", "step": 19, "rankme": 5.0})
        assert shown._beside["metrics"] == ""
    assert file.getvalue() == "jcl epoch 0: evaluating before the first step\n"


@pytest.mark.parametrize("first", [0, 50])
def test_a_log_shows_life_at_once_and_says_how_long_it_takes_once_plain_steps_tell(monkeypatch, first):
    clock, file = Clock(monkeypatch), io.StringIO()
    with Display(console(file, 80, terminal=False), "jcl", HEALTH) as shown:
        shown.start(first, 456, 19)
        for step in range(1, 9):
            clock.now += 100 if step <= 4 else 40  # these compile, and the last of them is recorded
            shown.advance(first + step)
    lines = [line.split(": ", 1)[1] for line in file.getvalue().splitlines()]
    assert lines[:6] == [f"step {first + step} of 456" for step in range(1, 7)]
    whole = format_duration(40 * (456 - first)) + (" more" if first else "")
    assert lines[6] == f"training takes about {whole} ({456 - first} steps of 40 s)"
    assert lines[7] == f"step {first + 8} of 456, about {format_duration(40 * (456 - first - 8))} left"


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize(("seconds", "after", "told"), [(10, 2, "--epochs"), (2, 4, "")])
def test_the_duration_is_estimated_once_and_soon(monkeypatch, terminal, seconds, after, told):
    """On a CPU, where the first step does not count; long runs are told faster options."""
    clock, file, estimated = Clock(monkeypatch), io.StringIO(), []
    with Display(console(file, 200, terminal), "jcl", HEALTH, "fewer --epochs") as shown:
        shown.start(0, 456, 19, module.WARMUP_STEPS_ON_CPU)
        for step in range(1, 20):
            clock.now += max(seconds, 15) if step == 1 else seconds
            shown.advance(step)
            estimated.append("training takes" in file.getvalue())
    assert estimated == [False] * (after - 1) + [True] * (20 - after)
    (line,) = (line for line in file.getvalue().splitlines() if "training takes" in line)
    assert f"{format_duration(456 * seconds)} (456 steps of {seconds} s)" in line
    assert told in line and ("--epochs" in line) == bool(told)


def test_a_slow_first_step_is_not_counted_in_the_time_left(monkeypatch):
    clock, file = Clock(monkeypatch), io.StringIO()
    with Display(console(file, 200, terminal=False), "jcl", HEALTH) as shown:
        shown.start(0, 101, 19, module.WARMUP_STEPS_ON_CPU)
        for step, seconds in ((1, 60), (2, 20)):
            clock.now += seconds
            shown.advance(step)
        assert shown.seconds_left(2) == 20 * 99
    assert "training takes about 33 min 40 s" in file.getvalue()


@pytest.mark.parametrize("first", [0, 50])
@pytest.mark.parametrize("steps_per_epoch", [19, 456])
def test_the_first_steps_do_not_count_for_the_time_left(first, steps_per_epoch):
    now = 100.0
    screen = Console(file=io.StringIO(), width=80, force_terminal=True, get_time=lambda: now, _environ={})
    shown = Display(screen, "jcl")
    shown.start(first, 456, steps_per_epoch)
    (task,) = shown._bar.tasks
    told = []
    for step in range(1, 9):
        now += 20 if step <= 4 else 2
        shown.advance(first + step)
        told.append(task.time_remaining)
    assert told == [None] * 7 + [2 * (456 - first - 8)]


def test_a_log_has_whole_lines_without_control_characters(monkeypatch):
    clock, file = Clock(monkeypatch), io.StringIO()
    with Display(console(file, 60, terminal=False), "jcl", HEALTH) as shown:
        shown.start(0, 456, 19)
        clock.now += 40
        shown.show(FIGURES | {"feature_std": 0.08, "contrastive_accuracy": 18.6, "queue_filled": 1.0})
        shown.show({"kind": "knn", "step": 19, "epoch": 1.0, "knn_top1": 15.0})
    lines = file.getvalue().splitlines()
    assert len(lines) == 2 and all(line.isprintable() for line in lines)
    assert "step 19 of 456" in lines[0] and "12,321 images/s" in lines[0] and "kNN top-1 15.0 %" in lines[1]
    assert all(line.endswith("contrastive accuracy 19 %") for line in lines)


def test_a_terminal_is_told_how_a_run_without_labels_is_doing():
    file = io.StringIO()
    with Display(console(file, 200, terminal=True), "jcl", HEALTH) as shown:
        shown.start(0, 456, 19)
        shown.report(0)  # nothing is known yet
        shown.show(FIGURES | {"feature_std": 0.001, "contrastive_accuracy": 18.6})
        shown.report(19)
    assert file.getvalue().count("jcl epoch 1: loss 2.12") == 1 and "features have COLLAPSED" in file.getvalue()


def test_a_run_of_three_days_leaves_hundreds_of_lines_not_thousands(monkeypatch):
    clock, file, steps = Clock(monkeypatch), io.StringIO(), 3 * 24 * 360
    with Display(console(file, 80, terminal=False), "jcl") as shown:
        shown.start(0, steps, steps)
        for step in range(1, steps):
            clock.now += 10
            shown.advance(step)
    assert 300 < file.getvalue().count("jcl: step ") < 600


def test_a_slow_run_says_more_than_zero_images_a_second():
    assert module.format_speed(0.42) == "0.4 images/s" and module.format_speed(12_321.4) == "12,321 images/s"


def test_a_task_of_one_epoch_is_shown_by_its_steps():
    file = io.StringIO()
    with Display(console(file, 60, terminal=True), "mask") as shown:
        shown.start(0, 90_000, 90_000)
        shown.advance(1500)
        shown.show(FIGURES)
        shown._bar.refresh()
    assert "mask 1,500/90,000" in file.getvalue() and "loss 2.123" in file.getvalue()


GOOD = {"queue_filled": 1.0, "loss": 4.0, "feature_std": 0.08, "contrastive_accuracy": 62.4}


def line(**changes) -> str:
    return health(GOOD | changes, queue_size=1023, embedding_dim=128)


def test_a_healthy_run():
    assert line() == ("loss 4.00, below a uniform guess (6.93); features well spread (91%); contrastive accuracy 62 %")


def test_a_uniform_guess_costs_log_of_k_plus_1():
    assert uniform_guess_loss(1023) == pytest.approx(math.log(1024))
    assert "above a uniform guess (6.93)" in line(loss=7.0)


def test_a_queue_that_is_still_filling_is_said():
    told = line(queue_filled=0.25, feature_std=0.3 / math.sqrt(128))
    assert "queue still filling (25% real keys" in told and "loss 4.00" in told and "guess" not in told
    assert "collapse" not in told and "contrastive accuracy" not in told  # too early to tell
    assert "queue" not in line(queue_filled=1.0)


@pytest.mark.parametrize(
    ("share", "said"), [(0.02, "COLLAPSED"), (0.3, "watch for collapse"), (0.5, "well spread"), (1.0, "well spread")]
)
def test_spread_is_judged_against_evenly_spread_rows(share, said):
    assert said in line(feature_std=share / math.sqrt(128), contrastive_accuracy=20.0)


def test_a_network_that_tells_images_apart_has_not_collapsed():
    told = line(feature_std=0.08 / math.sqrt(128), contrastive_accuracy=97.0)
    assert "COLLAPSED" not in told and "watch for collapse" in told


def test_an_evaluation_longer_than_the_wait_for_a_line_adds_none(monkeypatch):
    clock, file = Clock(monkeypatch), io.StringIO()
    with Display(console(file, 200, terminal=False), "jcl", HEALTH) as shown:
        shown.start(0, 456, 19)
        shown.show(FIGURES)
        shown.show({"kind": "knn", "step": 456, "epoch": 24.0, "knn_top1": 15.0})
        clock.now += 40
        shown.show({"kind": "quality", "step": 456, "epoch": 24.0, "rankme": 20.0})
    assert file.getvalue().count("\n") == 1


def test_a_loss_that_is_not_finite_and_one_that_is_not_known_yet_are_different_things():
    assert "the loss is not finite" in line(loss=None)
    before_the_first_line = health({"knn_top1": 12.0}, queue_size=10, embedding_dim=8)
    assert before_the_first_line == ""


def test_skipped_steps_are_said():
    assert line(skipped_steps=3).endswith("; 3 steps skipped so far because the loss was not finite")
    assert "1 step skipped" in line(skipped_steps=1) and "skipped" not in line(skipped_steps=0)
