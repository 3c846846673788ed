"""What is evaluated: the backbone of a run or weights file, and the data to evaluate it on."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from jcl.evaluate.features import Features
from jcl.export.backbone_file import BackboneInfo
from jcl.export.loading import checkpoint_run, open_backbone
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
    run_state: dict[str, Any] = field(default_factory=dict)  # `finished` of a run, `epoch` of a checkpoint

    def untrained(
        self, measure: Callable[[EvaluationTarget], list[float]], ranks: Ranks = ALONE, **about: Any
    ) -> list[float]:
        """What `measure` gives for the untrained network; `about` is what else the result depends on.

        A single process keeps the result in the user's cache for the next call.
        """
        sources = [source for source in (self.data.train, self.data.test) if source is not None]
        key = json.dumps([self.info.to_text(), self.seed, [*map(fingerprint, sources)], about])
        file = cache_folder() / "untrained" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
        with contextlib.suppress(RunError):
            stored = read_object(file).get("found") if ranks.count == 1 else None
            if isinstance(stored, list) and all(map(is_number, stored)):
                return stored
        found = measure(replace(self, backbone=untrained_backbone(self.info, self.seed)))
        with contextlib.suppress(RunError):
            if ranks.first:
                write_object(file, {"found": found}, follow_links=True)
        return found

    def features(self, source: ImageSource, *, console: Console, **options: Any) -> Features:
        """What `FeatureSettings.extract` gives with these options; unreadable images are reported to the console."""
        found = self.info.preprocessing.extract(self.backbone, source, device=self.device, **options)
        warn_skipped(console, found.skipped)
        return found


def untrained_backbone(info: BackboneInfo, seed: int) -> nn.Module:
    """A network of the same architecture as training starts from, with this seed."""
    torch.manual_seed(seed)
    return build_backbone(info.backbone, stem=info.stem, image_size=info.image_size)[0]


def open_target(weights: Path, location: str | None, device: str, console: Console) -> EvaluationTarget:
    """The backbone of a run or file with the data at `location` (default: the data of the run)."""
    loaded, run = open_backbone(weights), _run_of(weights)
    is_run = run.settings_file.is_file()
    if location is not None:
        data = open_with_warnings(location, console)
    elif is_run or weights.is_dir():
        data = open_own_data(run.settings(), console)
    else:
        raise RunError(f"{weights} is a weights file; give the data to evaluate it on after it.")
    state: dict[str, Any] = {} if loaded.epoch is None else {"epoch": loaded.epoch}
    if is_run and weights.is_dir():
        state["finished"] = loaded.epoch is None
    seed = run.settings().train.seed if is_run else 0
    return EvaluationTarget(loaded.network, loaded.info, data, choose_device(device), seed, state)


def _run_of(weights: Path) -> RunFolder:
    """The run folder that is given, or that a checkpoint is in."""
    return RunFolder(checkpoint_run(weights) or weights)


def data_location(weights: Path, location: str | None) -> str:
    """The location of the data to evaluate on."""
    return _run_of(weights).settings().data.location if location is None else location
