"""What a run's network makes of a sample of its images, for the page: bounded work, the same sample for every run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from jcl.data import UNLABELLED, ArrayImages, ImageData, ImageSource
from jcl.data.subset import select_images
from jcl.distributed.device import choose_precision
from jcl.errors import DataError
from jcl.evaluate.distribution import Viewer, ViewSpread, view_spreads
from jcl.evaluate.features import Features, FeatureSettings, evaluation_mode
from jcl.evaluate.flat_map import neighbour_map, principal_map
from jcl.evaluate.image_views import ViewPasses
from jcl.evaluate.knn import KnnResult, knn_accuracy
from jcl.evaluate.linear import ProbeGrid, linear_probe
from jcl.evaluate.neighbours import nearest_neighbours
from jcl.export.loading import open_backbone
from jcl.random import permutation
from jcl.report.contents import Answer, FlatMap, Look, ShownImage
from jcl.report.inline import PICTURE_SIDE
from jcl.settings.schema import Settings, known
from jcl.train.build import run_view_recipe

_STREAM: Final = 0x7265706F7274  # of its own beside those that `jcl.random` names
_OPERATIONS: Final = {"cpu": 4e11, "cuda": 2e14}  # a few seconds of work
_OPERATIONS_A_PIXEL: Final = 6000  # to make a view: so much time do they take
_MOST_IMAGES, _MOST_FILES, _LEAST_IMAGES = 1500, 600, 60  # files have to be decoded first
_MOST_SPREAD, _LEAST_SPREAD, _VIEWS = 256, 12, 16
_MAPPED, _ASKED, _NEIGHBOURS = 320, 6, 8
_K: Final = (1, 5, 20, 200)
_PROBE: Final = ProbeGrid((0.1, 1.0, 3.0), (1e-4, 1e-2))
_PROBE_EPOCHS, _PROBE_BATCH = 60, 1024  # few large steps, which cost less than many small ones
_PROBE_SIZE: Final = 2_000_000  # entries of the probes; larger ones take too long here


def look_at(weights: Path, settings: Settings, data: ImageData, device: torch.device) -> Look:
    """Measure, map and ask the network of a run about a sample of `data`.

    How many images there are depends on the network and on the kind of device alone, so that equal runs are looked at
    equally anywhere.
    """
    found = open_backbone(weights)
    backbone, shown = found.network, found.info.shown
    precision = choose_precision(settings.train.precision, device)
    sample = _sample(data, _affordable(backbone, shown, device))

    def features(source: ImageSource) -> Features:
        return shown.extract(backbone, source, device=device, precision=precision)

    bank, queries = features(sample.bank), features(sample.queries)
    if not (bank.values.isfinite().all() and queries.values.isfinite().all()):
        raise DataError("its features hold NaN or infinite values; training has probably diverged.")
    viewer = Viewer("the network", backbone, run_view_recipe(settings))
    passes = ViewPasses(seed=0, device=device, precision=precision, canvas=known(settings.data.canvas))
    return Look(
        bank=len(bank),
        queries=len(queries),
        unseen=sample.unseen,
        knn=_knn(bank, queries),
        probe_top1=_probe(bank, queries, device),
        spread=_spread(viewer, sample.for_spread, passes),
        flat_map=_map(queries, sample.queries),
        answers=_answers(bank, queries, sample),
    )


def _spread(viewer: Viewer, source: ImageSource, passes: ViewPasses) -> ViewSpread | None:
    """How alike the views of an image are, unless none of these images can be read."""
    with contextlib.suppress(DataError):
        (spread,), _ = view_spreads([viewer], source, torch.arange(len(source)), passes, _VIEWS)
        return spread
    return None


@dataclass(frozen=True, eq=False)
class _Sample:
    bank: ImageSource
    queries: ImageSource
    for_spread: ImageSource
    unseen: bool


def _affordable(backbone: nn.Module, shown: FeatureSettings, device: torch.device) -> int:
    """How many views the network may be shown."""
    side = shown.image_size
    with evaluation_mode(backbone.cpu()), torch.no_grad(), FlopCounterMode(display=False) as counter:
        backbone(torch.zeros(1, 3, side, side))
    operations = counter.get_total_flops() + _OPERATIONS_A_PIXEL * side**2
    return int(_OPERATIONS.get(device.type, _OPERATIONS["cpu"]) / operations)


def _sample(data: ImageData, affordable: int) -> _Sample:
    """Two thirds to compare with and one third to ask about: from the test set, or else from the same images.

    The order of the queries does not depend on their number.
    """
    most = _MOST_IMAGES if isinstance(data.train, ArrayImages) else _MOST_FILES
    images = max(_LEAST_IMAGES, min(most, affordable // 2))
    order = permutation(0, _STREAM, 0, len(data.train))
    spread = select_images(data.train, order[: max(_LEAST_SPREAD, min(_MOST_SPREAD, affordable // 2 // _VIEWS))])
    if data.test is not None:
        asked = permutation(0, _STREAM, 1, len(data.test))[: images // 3]
        return _Sample(
            select_images(data.train, order[: images * 2 // 3]), select_images(data.test, asked), spread, unseen=True
        )
    few = max(1, min(images, len(order)) // 3)
    return _Sample(
        select_images(data.train, order[few:images]), select_images(data.train, order[:few]), spread, unseen=False
    )


def _knn(bank: Features, queries: Features) -> Sequence[KnnResult]:
    if not _labelled(bank) or not _labelled(queries):
        return ()
    assert bank.labels is not None and queries.labels is not None
    counts = [k for k in _K if k <= len(bank)]
    return knn_accuracy(bank.values, bank.labels, queries.values, queries.labels, k=counts)


def _probe(bank: Features, queries: Features, device: torch.device) -> float | None:
    """A quick linear probe, where there is something to learn and to choose by and it is small enough."""
    if not _labelled(bank) or not _labelled(queries):
        return None
    assert bank.labels is not None and queries.labels is not None
    counts = torch.unique(bank.labels[bank.labels >= 0], return_counts=True)[1]
    classes = len(counts)
    if classes < 2 or counts.max() < 2 or len(_PROBE.cells) * classes * bank.values.shape[1] > _PROBE_SIZE:
        return None
    found = linear_probe(
        bank.values,
        bank.labels,
        queries.values,
        queries.labels,
        grid=_PROBE,
        epochs=_PROBE_EPOCHS,
        batch_size=_PROBE_BATCH,
        device=device,
    )
    return found.scores.top1


def _labelled(features: Features) -> bool:
    return features.labels is not None and bool((features.labels != UNLABELLED).any())


def _map(features: Features, source: ImageSource) -> FlatMap | None:
    if len(features) < 3:
        return None
    values, samples = features.values[:_MAPPED], features.samples[:_MAPPED].tolist()
    return FlatMap(
        near=neighbour_map(values),
        principal=principal_map(values),
        names=[source.name_of(sample) for sample in samples],
        labels=[label_of(source, sample) for sample in samples],
    )


def _answers(bank: Features, queries: Features, sample: _Sample) -> list[Answer]:
    """The neighbours of a few queries, of as many different classes as there are."""
    rows = _different(queries)
    found = nearest_neighbours(queries.values[rows], bank.values, _NEIGHBOURS)
    return [
        Answer(
            shown_image(sample.queries, int(queries.samples[row])),
            [shown_image(sample.bank, int(bank.samples[place])) for place in places],
            similarities,
        )
        for row, places, similarities in zip(rows, found.rows.tolist(), found.similarities.tolist(), strict=True)
    ]


def _different(queries: Features) -> list[int]:
    if queries.labels is None:
        return list(range(min(_ASKED, len(queries))))
    first = {int(label): row for row, label in reversed(list(enumerate(queries.labels)))}
    chosen = sorted(first.values())[:_ASKED]
    others = [row for row in range(len(queries)) if row not in chosen]
    return chosen + others[: _ASKED - len(chosen)]


def shown_image(source: ImageSource, sample: int) -> ShownImage:
    """An image of a source as the page shows it."""
    pixels: Tensor = source.read(sample, PICTURE_SIDE * 2)
    return ShownImage(pixels, source.name_of(sample), label_of(source, sample))


def label_of(source: ImageSource, sample: int) -> str | None:
    """The name of an image's class, or its number where classes have no names."""
    label = UNLABELLED if source.labels is None else int(source.labels[sample])
    if label == UNLABELLED:
        return None
    return source.class_names[label] if source.class_names and label < len(source.class_names) else f"class {label}"
