"""Steps that are taken back: nothing of them is left, and without any nothing is different."""

import copy
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from jcl.commands.inputs import data_facts, open_run_data
from jcl.commands.pretrain import pretrain, resume
from jcl.commands.run import Run
from jcl.core.method import StepMetrics
from jcl.core.registry import METHODS
from jcl.data import ImageBatch
from jcl.errors import Interrupted, RunError
from jcl.settings.resolve import resolve
from jcl.train.build import build_learner, build_optimizer, run_view_recipe, step_options
from jcl.train.step import TrainingStep
from run_tools import assert_same, stop_after
from small_runs import TINY_VALUES, drawn_pixels, tiny_settings

QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


DEVICES = [
    pytest.param("cpu"),
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def build(npz: Path, device: str, method: str = "jcl", **changes: Any) -> TrainingStep:
    plain = {"train__device": device, "train__precision": "float32", "train__compile": False}
    settings = tiny_settings(npz, method, **(plain | changes))
    settings, _ = resolve(settings, data_facts(open_run_data(settings, QUIET).train))
    place = torch.device(device)
    learner, _ = build_learner(settings, place)
    optimiser = build_optimizer(settings, learner, place)
    return TrainingStep(learner, optimiser, run_view_recipe(settings), 0, step_options(settings, place))


def batch(number: int, device: str) -> ImageBatch:
    pixels = torch.from_numpy(np.ascontiguousarray(drawn_pixels(8, seed=number).transpose(0, 3, 1, 2)))
    return ImageBatch(pixels, torch.full((8, 2), 16), torch.arange(8)).to(device)


def state(step: TrainingStep) -> dict[str, Tensor]:
    tensors = {f"model.{name}": value for name, value in step.learner.state_dict().items()}
    for index, values in step.optimizer.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{name}": value for name, value in values.items()}
    return copy.deepcopy(tensors)


def differing(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert mine.keys() == theirs.keys()
    return [name for name in mine if not torch.equal(mine[name], theirs[name])]


GOOD = {"lr": 0.05, "covariance_scale": 4.0}
BAD = [
    pytest.param({"lr": 0.05, "covariance_scale": math.nan}, id="the loss is not a number"),
    pytest.param({"lr": 0.05, "covariance_scale": math.inf}, id="the loss is infinite"),
    pytest.param({"lr": 3e38, "covariance_scale": 4.0}, id="the loss is fine, but the weights overflow"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", BAD)
def test_nothing_of_a_bad_step_is_left(npz, bad, device):
    """On a GPU the first steps are launched one by one and the later ones replayed from a graph."""
    step, other = build(npz, device, train__on_nan="skip"), build(npz, device, train__on_nan="skip")
    for number in range(2 if device == "cpu" else 8):
        before = state(step)
        metrics = step(batch(100 + number, device), number, **bad).clone()
        assert metrics.tolist() == [0.0] * len(StepMetrics._fields) + [1.0]
        if number:
            assert differing(state(step), before) == []
        step(batch(100 + number, device), number, **bad)
        assert step.skipped_in_a_row() == 2
        mine = step(batch(number, device), number, **GOOD).clone()
        assert torch.equal(mine, other(batch(number, device), number, **GOOD))
        assert mine[-1] == 0 and step.skipped_in_a_row() == 0
        assert differing(state(step), state(other)) == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["jcl", "moco-v2-symmetric", "multi-key-backprop"])
def test_where_nothing_goes_wrong_nothing_is_different(npz, method, device):
    queries = METHODS[method].recipe.get("method.num_queries", 1)
    steps = [
        build(npz, device, method, train__on_nan=choice, method__num_queries=queries) for choice in ("stop", "skip")
    ]
    for number in range(3 if device == "cpu" else 6):
        plain, guarded = (step(batch(number, device), number, **GOOD) for step in steps)
        assert torch.equal(plain, guarded[:-1]) and guarded[-1] == 0
    assert differing(state(steps[0]), state(steps[1])) == []


def test_running_statistics_that_overflow_are_taken_back_too(npz):
    """Activations whose variance is infinite normalize to zeros: a loss as good as any, but statistics are lost."""
    steps = [build(npz, "cpu", train__on_nan=choice, model__bn_groups=1) for choice in ("stop", "skip")]
    for step in steps:
        step(batch(0, "cpu"), 0, **GOOD)
    before = state(steps[1])
    for step in steps:
        first = next(module for module in step.learner.query_encoder.modules() if isinstance(module, torch.nn.Conv2d))
        first.register_forward_hook(lambda module, inputs, output: output * 1e25)
    plain, guarded = (step(batch(1, "cpu"), 1, **GOOD) for step in steps)
    assert torch.isfinite(plain).all() and any(torch.isinf(value).any() for value in state(steps[0]).values())
    assert guarded[-1] == 1.0 and differing(state(steps[1]), before) == []


def go_wrong_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    original = TrainingStep.__call__

    def failing(self, batch, number, lr, scale, *schedule):
        return original(self, batch, number, lr, math.nan if number + 1 in steps else scale, *schedule)

    monkeypatch.setattr(TrainingStep, "__call__", failing)


def test_a_run_leaves_out_what_went_wrong_counts_it_and_can_be_resumed(npz, tmp_path, monkeypatch):
    settings = tiny_settings(npz, train__on_nan="skip", record__knn_every=0)
    go_wrong_at(monkeypatch, 2, 5, 7, 8, 9)
    printed = io.StringIO()
    whole = pretrain(settings, tmp_path / "whole", console=Console(file=printed))
    assert "Warning: 5 of 12 steps were skipped" in printed.getvalue()
    lines = [line for line in whole.metrics if line["kind"] == "train"]
    assert [(line["step"], line["skipped_steps"]) for line in lines] == [(3, 1), (6, 2), (9, 5), (12, 5)]
    assert [line["loss"] is None for line in lines] == [False, False, True, False]  # of no step, no mean
    assert whole.summary["skipped_steps"] == 5 and whole.summary["steps"] == 12
    with monkeypatch.context() as patch:
        stop_after(patch, 8, 15)
        with pytest.raises(Interrupted):
            pretrain(settings, tmp_path / "stopped", console=QUIET)
    assert_same(resume(tmp_path / "stopped", console=QUIET), whole)


@pytest.mark.parametrize("choices", [("stop", "skip"), ("skip", "stop")])
def test_the_choice_may_be_changed_before_a_run_is_resumed(npz, tmp_path, monkeypatch, choices):
    short = {"train__epochs": 1, "record__knn_every": 0}
    whole = pretrain(tiny_settings(npz, **short), tmp_path / "whole", console=QUIET)
    with monkeypatch.context() as patch:
        stop_after(patch, 2, 15)
        with pytest.raises(Interrupted):
            pretrain(tiny_settings(npz, train__on_nan=choices[0], **short), tmp_path / "run", console=QUIET)
    file = tmp_path / "run/settings.yaml"
    file.write_text(file.read_text().replace(f"on_nan: {choices[0]}", f"on_nan: {choices[1]}"))
    resumed = resume(tmp_path / "run", console=QUIET)
    assert [line.get("loss") for line in resumed.metrics] == [line.get("loss") for line in whole.metrics]


def test_the_choice_is_an_option_of_the_command(npz, tmp_path, monkeypatch, capsys):
    from jcl.cli import main

    def command(choice: str) -> object:
        values = TINY_VALUES | {"train.epochs": 1}
        given = [part for name, value in values.items() for part in ("--set", f"{name}={json.dumps(value)}")]
        arguments = ["jcl", "pretrain", str(npz), "--out", str(tmp_path / "run"), "--on-nan", choice, *given]
        monkeypatch.setattr("sys.argv", arguments)
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code

    assert command("sometimes") == 2
    assert "sometimes for --on-nan" in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert command("skip") == 0
    assert Run(tmp_path / "run").summary["skipped_steps"] == 0


def test_too_many_in_a_row_end_the_run(npz, tmp_path, monkeypatch):
    monkeypatch.setattr("jcl.train.pretrain.MAX_SKIPPED_IN_A_ROW", 4)
    go_wrong_at(monkeypatch, 2, 3, 4, *range(6, 13))
    with pytest.raises(RunError, match=r"4 steps in a row were skipped.*step-000000008"):
        pretrain(tiny_settings(npz, train__on_nan="skip"), tmp_path / "run", console=QUIET)
