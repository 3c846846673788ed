"""Measuring a run or a weights file on labelled data: what the commands under "evaluate" call."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jcl.data import ImageData, ImageSource, open_data
from jcl.errors import DataError, RunError
from jcl.evaluate.features import Features
from jcl.evaluate.knn import KnnResult
from jcl.evaluate.online import FeatureSettings, knn_on
from jcl.export import BackboneInfo, load_backbone
from jcl.pretraining import open_run_data
from jcl.train.folder import RunFolder
from jcl.train.runtime import choose_device


def measure_knn(
    weights: Path,
    location: str | None,
    *,
    k: Sequence[int],
    temperature: Sequence[float],
    batch_size: int = 256,
    workers: int = 0,
    device: str = "auto",
) -> list[KnnResult]:
    """Weighted kNN of a run's or file's frozen features on the data at `location` (default: the run's own)."""
    backbone = load_backbone(weights)
    info = backbone.info
    assert isinstance(info, BackboneInfo)
    shown = FeatureSettings(info.image_size, info.mean, info.std)
    target = choose_device(device)
    data = _labelled(weights, location)

    def features(source: ImageSource) -> Features:
        return shown.extract(backbone, source, device=target, batch_size=batch_size, workers=workers)

    return knn_on(data, features, k=k, temperature=temperature, seed=0, device=target)


def _labelled(weights: Path, location: str | None) -> ImageData:
    if location is None:
        if not weights.is_dir():
            raise RunError(
                f"{weights} is a weights file; say which data to measure it on, as in: jcl knn {weights} DATA."
            )
        settings = RunFolder(weights).settings()
        data = open_run_data(settings, Console(stderr=True))
    else:
        data = open_data(location)
    if data.train.labels is None:
        raise DataError(f"{data.train.description} has no labels, so kNN accuracy cannot be measured on it.")
    return data
