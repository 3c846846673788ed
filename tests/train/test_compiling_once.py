"""What a step has compiled: its views once, though keys are made without gradients and queries with them."""

from functools import partial
from typing import Any

import pytest
import torch
from rich.console import Console

from jcl.automatic import choose
from jcl.building import build_learner, build_optimiser, run_view_recipe, step_options
from jcl.data import BatchLoader
from jcl.run_data import data_facts, open_run_data
from jcl.train.step import TrainingStep
from small_runs import tiny_settings


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        pytest.param("jcl", {"method__num_keys": 4}, id="all keys in one pass"),
        pytest.param("jcl", {"train__key_passes": 2}, id="as many passes as keys"),
        pytest.param("moco-v2", {}, id="one key"),
    ],
)
def test_views_are_compiled_once(method, changes, npz, monkeypatch):
    prepared = []

    def note(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        prepared.extend(value for value in inputs if isinstance(value, torch.Tensor) and value.dtype == torch.uint8)
        return module.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=note))
    settings = tiny_settings(npz, method, train__compile=True, **changes)
    data = open_run_data(settings, Console(quiet=True)).train
    settings, _ = choose(settings, data_facts(data))
    device = torch.device("cpu")
    learner, _ = build_learner(settings, device)
    optimiser = build_optimiser(settings, learner, device)
    step = TrainingStep(learner, optimiser, run_view_recipe(settings), 0, step_options(settings, device))
    with BatchLoader(data, batch_size=8, canvas=16, seed=0, num_keys=learner.num_keys) as loader:
        for number, batch in enumerate(loader.epoch(0)):
            step(batch, number, 0.05, 1.0)
    assert number > 0 and len(prepared) == 1
