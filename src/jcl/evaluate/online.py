"""The kNN accuracy of a backbone that is still in training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from jcl.data import ImageData, ImageSource
from jcl.evaluate.features import Features, extract_features
from jcl.evaluate.knn import knn_accuracy, leave_out_split
from jcl.settings import Settings
from jcl.train.runtime import choose_precision


@dataclass(frozen=True)
class FeatureSettings:
    """How images are shown to a frozen backbone."""

    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def crop_ratio(self) -> float:
        """Photographs are resized a little larger than the view and cropped, as is usual; small images are not."""
        return 0.875 if self.image_size >= 96 else 1.0


def online_knn(
    data: ImageData, backbone: nn.Module, settings: Settings, device: torch.device
) -> Callable[[], dict[str, float]] | None:
    """A function that measures `backbone` as it is when called; None where the data has no labels."""
    if data.train.labels is None:
        return None
    image_size = settings.views.image_size
    assert isinstance(image_size, int), "settings of a run are resolved"
    shown = FeatureSettings(image_size, settings.views.mean, settings.views.std)
    record, workers = settings.record, settings.data.workers
    precision = choose_precision(settings, device)

    def features(source: ImageSource) -> Features:
        return extract_features(
            backbone,
            source,
            image_size=shown.image_size,
            crop_ratio=shown.crop_ratio,
            mean=shown.mean,
            std=shown.std,
            device=device,
            precision=precision,
            workers=workers if isinstance(workers, int) else 0,
        )

    def measure() -> dict[str, float]:
        bank, queries = knn_sets(data, features, settings.train.seed)
        assert bank.labels is not None and queries.labels is not None
        result = knn_accuracy(
            bank.values,
            bank.labels,
            queries.values,
            queries.labels,
            k=[record.knn_k],
            temperature=[record.knn_temperature],
            device=device,
        )[0]
        return {"knn_top1": result.top1, "knn_top5": result.top5}

    return measure


def knn_sets(data: ImageData, features: Callable[[ImageSource], Features], seed: int) -> tuple[Features, Features]:
    """Bank and queries: train and test images, or, without a labelled test set, a seeded split of the train images."""
    train = features(data.train)
    if data.test is not None and data.test.labels is not None:
        return train, features(data.test)
    assert train.labels is not None
    bank, queries = leave_out_split(train.labels, seed)
    return _rows(train, bank), _rows(train, queries)


def _rows(features: Features, rows: torch.Tensor) -> Features:
    labels = None if features.labels is None else features.labels[rows]
    return Features(features.values[rows], labels, features.samples[rows], features.skipped)
