"""The kNN accuracy of a backbone that is still in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from jcl.data import ImageData, ImageSource
from jcl.data.source import NoneReadable
from jcl.distributed.device import choose_precision
from jcl.distributed.group import ALONE, Ranks
from jcl.evaluate.features import Features, FeatureSettings, all_skipped, extract_over_ranks
from jcl.evaluate.knn import KnnResult, knn_accuracy, leave_out_split
from jcl.settings.schema import Settings


def online_knn(
    data: ImageData,
    backbone: nn.Module,
    settings: Settings,
    device: torch.device,
    ranks: Ranks = ALONE,
    skipped: dict[str, str] | None = None,
) -> Callable[[], dict[str, float]] | None:
    """A function that measures `backbone` as it is when called; None where the data has no labels.

    Images that cannot be read are entered into `skipped`.
    """
    if data.train.labels is None:
        return None
    image_size, workers, voters = settings.views.image_size, settings.data.workers, settings.record.knn_k
    assert isinstance(image_size, int) and isinstance(workers, int), "settings of a run are resolved"
    assert isinstance(voters, int), "settings of a run are resolved"
    shown = FeatureSettings(image_size, settings.views.mean, settings.views.std)
    precision = choose_precision(settings.train.precision, device)
    record = settings.record

    def features(source: ImageSource) -> Features:
        return shown.extract(backbone, source, device=device, precision=precision, workers=workers)

    def measure() -> dict[str, float]:
        k, temperature = [voters], [record.knn_temperature]
        result = knn_on(data, features, k=k, temperature=temperature, device=device, ranks=ranks, skipped=skipped)[0]
        return {"knn_top1": result.top1, "knn_top5": result.top5}

    return measure


def knn_on(
    data: ImageData,
    features: Callable[[ImageSource], Features],
    *,
    k: Sequence[int],
    temperature: Sequence[float],
    device: torch.device,
    ranks: Ranks = ALONE,
    skipped: dict[str, str] | None = None,
) -> list[KnnResult]:
    """kNN of the test images in the train images; without a labelled test set in a split of them, always the same.

    Images that cannot be read are entered into `skipped`.
    """
    met = {} if skipped is None else skipped
    try:
        bank = extract_over_ranks(features, data.train, ranks)
        assert bank.labels is not None, "only labelled data is measured"
        if data.test is not None and data.test.labels is not None:
            queries = extract_over_ranks(features, data.test, ranks)
            met |= all_skipped(bank, queries)
        else:
            met |= bank.skipped
            bank, queries = _split(bank, data.train)
    except NoneReadable as error:
        met |= error.skipped
        raise
    assert bank.labels is not None and queries.labels is not None
    return knn_accuracy(
        bank.values,
        bank.labels,
        queries.values,
        queries.labels,
        k=k,
        temperature=temperature,
        device=device,
        ranks=ranks,
    )


def _split(features: Features, source: ImageSource) -> tuple[Features, Features]:
    """Features to compare with and to ask about, of the same images as in other probes.

    These are told by all images, for one that cannot be read would move all others; unless nothing readable is among
    the few that are asked about.
    """
    assert features.labels is not None and source.labels is not None, "only labelled data is measured"
    asked = torch.isin(features.samples, leave_out_split(source.labels)[1])
    if not (asked & (features.labels >= 0)).any():
        asked = torch.isin(torch.arange(len(features)), leave_out_split(features.labels)[1])
    return _rows(features, ~asked), _rows(features, asked)


def _rows(features: Features, rows: torch.Tensor) -> Features:
    labels = None if features.labels is None else features.labels[rows]
    return Features(features.values[rows], labels, features.samples[rows], features.skipped)
