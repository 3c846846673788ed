"""What is measured: a backbone from a run or a weights file, with the labelled data to measure it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from jcl.commands.run_data import open_own_data, open_with_warnings
from jcl.console import tell_left_out
from jcl.data import ImageData, ImageSource
from jcl.distributed.device import choose_device
from jcl.errors import RunError
from jcl.evaluate.classification import no_labels
from jcl.evaluate.features import Features, FeatureSettings
from jcl.export import BackboneInfo
from jcl.export.loading import open_backbone
from jcl.runs.folder import RunFolder


@dataclass(frozen=True)
class EvaluationTarget:
    """A backbone, how images are shown to it, the labelled data to measure it on and the device to do so."""

    backbone: nn.Module
    info: BackboneInfo
    data: ImageData
    device: torch.device

    @property
    def shown(self) -> FeatureSettings:
        return self.info.shown

    def features(
        self,
        source: ImageSource,
        *,
        batch_size: int | None,
        workers: int,
        console: Console,
        progress: Callable[[int, int], None] | None,
    ) -> Features:
        """What the backbone makes of a source's images; which of them could not be read is told."""
        found = self.shown.extract(
            self.backbone, source, device=self.device, batch_size=batch_size, workers=workers, progress=progress
        )
        tell_left_out(console, found.skipped)
        return found


def open_target(weights: Path, location: str | None, device: str, console: Console) -> EvaluationTarget:
    """The backbone of a run or file with the labelled data at `location` (default: what the run was trained on)."""
    found = open_backbone(weights)
    return EvaluationTarget(found.network, found.info, _labelled(weights, location, console), choose_device(device))


def data_location(weights: Path, location: str | None) -> str:
    """Where the data lies that a run or file is measured on."""
    return RunFolder(weights).settings().data.location if location is None else location


def _labelled(weights: Path, location: str | None, console: Console) -> ImageData:
    if location is None:
        if not weights.is_dir():
            raise RunError(
                f"{weights} is a weights file; say which data to measure it on: give the data after the weights."
            )
        data = open_own_data(RunFolder(weights).settings(), console)
    else:
        data = open_with_warnings(location, console)
    if data.train.labels is None:
        raise no_labels(data)
    return data
