"""The learner of a finished or stopped run: both encoders with their heads, and the queue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from jcl.core.method import ContrastiveLearner
from jcl.errors import RunError
from jcl.runs.checkpoint import list_checkpoints, load_weights, read_learner
from jcl.runs.folder import RunFolder
from jcl.settings.resolve import ResolvedSettings
from jcl.train.build import build_learner


@dataclass(frozen=True)
class TrainedRun:
    """A run with at least one checkpoint, or one checkpoint of a run."""

    path: Path
    settings: ResolvedSettings
    checkpoints: tuple[Path, ...]  # oldest first

    def learner(self, checkpoint: Path, device: torch.device) -> tuple[ContrastiveLearner, int]:
        """The learner at a checkpoint, in evaluation mode, and its step."""
        state, step = read_learner(checkpoint)
        learner, _ = build_learner(self.settings, device)
        load_weights(learner, state, checkpoint)
        return learner.eval(), step

    def newest(self, device: torch.device) -> ContrastiveLearner:
        return self.learner(self.checkpoints[-1], device)[0]

    def along_training(self, device: torch.device) -> Iterator[tuple[ContrastiveLearner, int]]:
        """The learner and step of each checkpoint, oldest first."""
        for checkpoint in self.checkpoints:
            yield self.learner(checkpoint, device)


def open_trained(path: Path) -> TrainedRun:
    """Open a run folder, or one checkpoint file in it; other files hold no head, key encoder or queue."""
    if not path.exists():
        raise RunError(f"there is no run or checkpoint at {path}.")
    if path.is_dir():
        folder = RunFolder(path)
        settings, found = folder.settings(), list_checkpoints(folder.checkpoints)
        if not found:
            raise RunError(f"the run in {path} has no checkpoint yet.")
        return TrainedRun(path, settings, tuple(found))
    whole = path.resolve()
    folder = RunFolder(whole.parent.parent)
    if whole not in list_checkpoints(folder.checkpoints):
        raise RunError(
            f"{path} is not a checkpoint of a run, so it has no projection head, key encoder or queue; "
            "give a run folder, or a file in its checkpoints/."
        )
    return TrainedRun(path, folder.settings(), (path,))
