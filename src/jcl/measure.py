"""Measuring a run or a weights file on labelled data: what the commands under "evaluate" call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from jcl.automatic import voters
from jcl.cores import usual_workers
from jcl.data import ImageData, ImageSource
from jcl.errors import RunError
from jcl.evaluate.classification import no_labels
from jcl.evaluate.features import Features, FeatureSettings
from jcl.evaluate.knn import KnnResult
from jcl.evaluate.online import knn_on
from jcl.exchange import BackboneInfo
from jcl.exchange.loading import open_backbone
from jcl.place import console_of
from jcl.run_data import open_run_data, open_told
from jcl.speech import tell, tell_left_out
from jcl.train.folder import RunFolder
from jcl.train.rank_group import joined_ranks
from jcl.train.runtime import choose_device

RANK_TIMEOUT = 1800.0
"""Seconds that ranks wait for each other while features are measured."""


@dataclass(frozen=True)
class Subject:
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
        batch_size: int,
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


def open_subject(weights: Path, location: str | None, device: str, console: Console) -> Subject:
    """The backbone of a run or file with the labelled data at `location` (default: what the run was trained on)."""
    found = open_backbone(weights)
    return Subject(found.network, found.info, _labelled(weights, location, console), choose_device(device))


def data_location(weights: Path, location: str | None) -> str:
    """Where the data lies that a run or file is measured on."""
    return RunFolder(weights).settings().data.location if location is None else location


def measure_knn(
    weights: Path,
    location: str | None,
    *,
    k: Sequence[int],
    temperature: Sequence[float],
    batch_size: int = 256,
    workers: int | None = None,
    device: str = "auto",
    console: Console | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[KnnResult]:
    """Weighted kNN of a run's or file's frozen features on the data at `location` (default: the run's own).

    Without `k` as many vote as in a run on these images. Ranks that a launcher started share the images and the queries
    out among them. Images that cannot be read are left out, which is told. `progress` is told how many of how many
    images are done, of the training and then of the test set.
    """
    with joined_ranks(device, RANK_TIMEOUT) as (ranks, target):
        subject = open_subject(weights, location, str(target), console_of(ranks, console))
        decoding = max(1, usual_workers() // ranks.count) if workers is None else workers
        told = console or Console(stderr=True)
        features = partial(subject.features, batch_size=batch_size, workers=decoding, console=told, progress=progress)
        data, votes = subject.data, k or [voters(len(subject.data.train))]
        if ranks.first and (data.test is None or data.test.labels is None):
            said = "For want of a labelled test set some of the training images are held out to ask about."
            tell(told, said)
        return knn_on(data, features, k=votes, temperature=temperature, device=target, ranks=ranks)


def _labelled(weights: Path, location: str | None, console: Console) -> ImageData:
    if location is None:
        if not weights.is_dir():
            raise RunError(
                f"{weights} is a weights file; say which data to measure it on: give the data after the weights."
            )
        data = open_run_data(RunFolder(weights).settings(), console)
    else:
        data = open_told(location, console)
    if data.train.labels is None:
        raise no_labels(data, "features cannot be measured on it")
    return data
