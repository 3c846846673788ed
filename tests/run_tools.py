"""Runs stopped at a chosen step, and whether two of them ended in the same state."""

import json
import os

import pytest
import torch
from rich.console import Console

from jcl.commands.run import Run
from jcl.runs.checkpoint import list_checkpoints, read_tensors
from jcl.train.step import TrainingStep

QUIET = Console(quiet=True)
WALL_CLOCK = {"seconds", "images_per_second", "peak_memory_bytes"}


def state(run: Run) -> dict[str, torch.Tensor]:
    """Weights, queue, optimizer state and sums of the figures, from the last checkpoint."""
    tensors, metadata = read_tensors(list_checkpoints(run.path / "checkpoints")[-1])
    assert {"progress.window", "model.queue.rows", "model.queue.enqueued"} < tensors.keys()
    assert any(name.endswith(("momentum_buffer", "exp_avg")) for name in tensors)
    settled = {name: metadata[name] for name in ("step", "window_steps", "optimiser")}
    return tensors | {"metadata": torch.tensor(list(json.dumps(settled).encode()))}


def figures(run: Run) -> list[dict[str, float]]:
    return [{name: value for name, value in line.items() if name not in WALL_CLOCK} for line in run.metrics]


def assert_same(found: Run, wanted: Run) -> None:
    mine, theirs = state(found), state(wanted)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert figures(found) == figures(wanted)
    assert found.settings == wanted.settings
    assert_same_backbone(found, wanted)
    summaries = [{k: v for k, v in run.summary.items() if k not in WALL_CLOCK} for run in (found, wanted)]
    assert summaries[0] == summaries[1]


def assert_same_backbone(found: Run, wanted: Run) -> None:
    (mine, my_metadata), (theirs, their_metadata) = (
        read_tensors(run.path / "backbone.safetensors") for run in (found, wanted)
    )
    assert mine.keys() == theirs.keys() and my_metadata == their_metadata
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int, how: int | type[BaseException]) -> None:
    """Send a signal to this process, or crash, while step number `step` (from 1) is being done."""
    original = TrainingStep.__call__

    def stopping(self, batch, number, *schedule):
        result = original(self, batch, number, *schedule)
        if number + 1 == step:
            if not isinstance(how, int):
                raise how
            os.kill(os.getpid(), how)
        return result

    monkeypatch.setattr(TrainingStep, "__call__", stopping)
