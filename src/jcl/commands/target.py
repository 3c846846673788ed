"""What is evaluated: the backbone of a run or weights file, and the data to evaluate it on."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from jcl.commands.run_data import open_own_data, open_with_warnings
from jcl.console import warn_skipped
from jcl.core.encoder import build_backbone
from jcl.data import ImageData, ImageSource
from jcl.data.source import fingerprint
from jcl.distributed.device import choose_device
from jcl.distributed.group import ALONE, Ranks
from jcl.errors import RunError
from jcl.evaluate.classification import no_labels
from jcl.evaluate.features import Features
from jcl.export.backbone_file import BackboneInfo
from jcl.export.loading import open_backbone
from jcl.paths import cache_folder
from jcl.runs.folder import RunFolder
from jcl.runs.json_object import is_number, read_object, write_object


@dataclass(frozen=True)
class EvaluationTarget:
    """A backbone, the data to evaluate it on, and the device."""

    backbone: nn.Module
    info: BackboneInfo
    data: ImageData
    device: torch.device
    seed: int = 0  # that the training of the backbone started from, if known

    def untrained(
        self, measure: Callable[[EvaluationTarget], dict[str, float]], ranks: Ranks = ALONE, **about: Any
    ) -> dict[str, float]:
        """What `measure` gives for the untrained network; `about` is what else the result depends on.

        A single process keeps the result in the user's cache for the next call.
        """
        sources = [source for source in (self.data.train, self.data.test) if source is not None]
        key = json.dumps([self.info.to_text(), self.seed, [*map(fingerprint, sources)], about])
        file = cache_folder() / "untrained" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        with contextlib.suppress(RunError):
            stored = read_object(file) if ranks.count == 1 else {}
            if stored and all(map(is_number, stored.values())):
                return stored
        found = measure(replace(self, backbone=untrained_backbone(self.info, self.seed)))
        with contextlib.suppress(RunError):
            if ranks.first:
                write_object(file, found, follow_links=True)
        return found

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


def untrained_backbone(info: BackboneInfo, seed: int) -> nn.Module:
    """A network of the same architecture as training starts from, with this seed."""
    torch.manual_seed(seed)
    return build_backbone(info.backbone, stem=info.stem, image_size=info.image_size)[0]


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
    run = RunFolder(weights)
    seed = run.settings().train.seed if run.settings_file.is_file() else 0
    return EvaluationTarget(loaded.network, loaded.info, data, choose_device(device), seed)


def data_location(weights: Path, location: str | None) -> str:
    """The location of the data to evaluate on."""
    return RunFolder(weights).settings().data.location if location is None else location
