"""What is evaluated: the backbone of a run or weights file, and the data to evaluate it on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from jcl.commands.run_data import open_own_data, open_with_warnings
from jcl.console import warn_skipped
from jcl.data import ImageData, ImageSource
from jcl.distributed.device import choose_device
from jcl.errors import RunError
from jcl.evaluate.classification import no_labels
from jcl.evaluate.features import Features
from jcl.export.backbone_file import BackboneInfo
from jcl.export.loading import open_backbone
from jcl.runs.folder import RunFolder


@dataclass(frozen=True)
class EvaluationTarget:
    """A backbone, the data to evaluate it on, and the device."""

    backbone: nn.Module
    info: BackboneInfo
    data: ImageData
    device: torch.device

    def features(
        self,
        source: ImageSource,
        *,
        batch_size: int | None,
        workers: int,
        console: Console,
        progress: Callable[[int, int], None] | None,
    ) -> Features:
        """The features of all readable images of a source; unreadable ones are reported to the console."""
        found = self.info.preprocessing.extract(
            self.backbone, source, device=self.device, batch_size=batch_size, workers=workers, progress=progress
        )
        warn_skipped(console, found.skipped)
        return found


def open_target(
    weights: Path, location: str | None, device: str, console: Console, *, labelled: bool = True
) -> EvaluationTarget:
    """The backbone of a run or file with the data at `location` (default: the data of the run).

    Data without labels is refused if it must be `labelled`.
    """
    loaded = open_backbone(weights)
    if location is not None:
        data = open_with_warnings(location, console)
    elif weights.is_dir():
        data = open_own_data(RunFolder(weights).settings(), console)
    else:
        raise RunError(f"{weights} is a weights file; give the data to evaluate it on after it.")
    if labelled and data.train.labels is None:
        raise no_labels(data)
    return EvaluationTarget(loaded.network, loaded.info, data, choose_device(device))


def data_location(weights: Path, location: str | None) -> str:
    """The location of the data to evaluate on."""
    return RunFolder(weights).settings().data.location if location is None else location
