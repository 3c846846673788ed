"""Weighted k-nearest-neighbor classification of frozen features (Wu et al. 2018; MoCo), also during training.

Each of the k bank rows most similar to a query votes for its class with weight exp(similarity / temperature). Votes
are added one neighbor at a time, nearest first, so one pass serves every k and the sums are the same on every device.
Ties between neighbors go to the lower bank row, ties between classes to the lower class.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from jcl.console import ProgressCallback
from jcl.data import ImageData, ImageSource
from jcl.data.source import select_images
from jcl.distributed.device import choose_precision
from jcl.distributed.group import ALONE, Ranks
from jcl.evaluate import classification
from jcl.evaluate.features import Features, FeatureSettings, extract_over_ranks
from jcl.evaluate.neighbours import DEFAULT_CHUNK, Neighbours, neighbour_chunks
from jcl.settings.resolved import ResolvedSettings


@dataclass(frozen=True)
class KnnResult(classification.Scores):
    """The accuracy for one k and temperature, with the number of images in the bank and the labels of the classes."""

    k: int
    temperature: float
    bank: int
    classes: tuple[int, ...]


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    k: Sequence[int] = (200,),
    temperature: Sequence[float] = (0.1,),
    chunk: int = DEFAULT_CHUNK,
    device: torch.device | str | None = None,
    ranks: Ranks = ALONE,
) -> list[KnnResult]:
    """Top-1 and top-5 of every k with every temperature (k outermost, as listed), from one search.

    Features are (n, d), labels (n,) integers; rows labeled -1 are left out on both sides. A class without votes is
    among the top 5 only if the bank has at most five classes. `chunk` and `device` as in `nearest_neighbours`.
    Several `ranks`, each with all features, share the queries.
    """
    if not k or min(k) < 1:
        raise ValueError(f"k must be one or more numbers of at least 1, got {k}.")
    if not temperature or not all(0 < value < math.inf for value in temperature):
        raise ValueError(f"temperature must be positive and finite, got {temperature}.")
    bank, bank_labels = classification.labeled_rows(train_features, train_labels, "bank")
    queries, query_labels = classification.labeled_rows(test_features, test_labels, "test set")
    classes, bank_classes = torch.unique(bank_labels, return_inverse=True)
    truths = classification.class_positions(query_labels, classes).cpu()
    own = slice(ranks.rank * len(queries) // ranks.count, (ranks.rank + 1) * len(queries) // ranks.count)
    # number of neighbors -> the rank of the true class of this rank's queries, parts of (q, t)
    parts: dict[int, list[Tensor]] = {min(each, len(bank)): [] for each in k}
    search = neighbour_chunks(queries[own], bank, max(k), chunk=chunk, device=device)
    for found, truth in zip(search, torch.split(truths[own], chunk), strict=True):
        for neighbours, votes in _votes(found, bank_classes, len(classes), k, temperature):
            parts[neighbours].append(_rank(votes, truth.to(votes.device)).T.cpu())
    results, labels = [], tuple(classes.tolist())
    for each in k:
        places = ranks.gather_uneven(torch.cat(parts[min(each, len(bank))]))
        for value, column in zip(temperature, places.T, strict=True):
            scores = vars(classification.scores_of_ranks(column, query_labels.cpu(), classes))
            results.append(KnnResult(**scores, k=each, temperature=value, bank=len(bank), classes=labels))
    return results


def evaluate_knn(
    data: ImageData,
    features: Callable[[ImageSource], Features],
    *,
    k: Sequence[int],
    temperature: Sequence[float],
    device: torch.device,
    ranks: Ranks = ALONE,
    skipped: dict[str, str] | None = None,
    most: int | None = None,
) -> list[KnnResult]:
    """kNN of the test images in the training images (`train_and_test`), or in `most` of them (`class_sample`).

    Unreadable images are added to `skipped`.
    """
    train, test = classification.train_and_test(data)
    if most is not None and train.labels is not None:
        train = select_images(train, classification.class_sample(train.labels, most))
    bank, queries = (extract_over_ranks(features, source, ranks) for source in (train, test))
    if skipped is not None:
        mark = " of the test images" if test is data.test else ""  # a training image may have the same name
        skipped |= bank.skipped | {name + mark: reason for name, reason in queries.skipped.items()}
    problem = (bank.values, bank.labels, queries.values, queries.labels)
    return knn_accuracy(*problem, k=k, temperature=temperature, device=device, ranks=ranks)


def online_knn(
    data: ImageData,
    backbone: nn.Module,
    settings: ResolvedSettings,
    device: torch.device,
    skipped: dict[str, str],
    progress: ProgressCallback,
    ranks: Ranks,
    keep: Callable[[KnnResult], None],
) -> Callable[[], dict[str, float]] | None:
    """A function that measures `backbone` and passes the result to `keep`; None if the data has no labels."""
    if data.train.labels is None:
        return None
    views, record = settings.views, settings.record
    features = partial(
        FeatureSettings(views.image_size, views.mean, views.std).extract,
        backbone,
        device=device,
        precision=choose_precision(settings.train.precision, device),
        workers=settings.data.workers,
        progress=progress,
    )

    k, temperature = [record.knn_k], [record.knn_temperature]
    evaluate = partial(evaluate_knn, data, features, k=k, temperature=temperature, most=record.knn_images)

    def measure() -> dict[str, float]:
        (result,) = evaluate(device=device, ranks=ranks, skipped=skipped)
        keep(result)
        return {
            "knn_top1": result.top1,
            "knn_top5": result.top5,
            "chance_top1": result.chance_top1,
            "test_images": result.images,
            "classes": len(result.classes),
        }

    return measure


def _votes(
    found: Neighbours, bank_classes: Tensor, classes: int, k: Sequence[int], temperature: Sequence[float]
) -> Iterator[tuple[int, Tensor]]:
    """For each number of neighbors in `k`, at most those found: that number and the votes (t, q, c).

    Weights are relative to the nearest neighbor's, so that no temperature overflows. The same tensor is yielded each
    time, with more votes in it.
    """
    similarities, rows = found.similarities, found.rows
    scale = similarities.new_tensor(list(temperature))[:, None, None]
    weights = ((similarities - similarities[:, :1]) / scale).exp()  # (t, q, k)
    chosen = bank_classes.to(rows.device)[rows].expand(len(temperature), -1, -1)
    votes = weights.new_zeros(len(temperature), len(rows), classes)
    stops = {min(each, rows.shape[1]) for each in k}
    for number in range(1, max(stops) + 1):
        column = slice(number - 1, number)  # one entry per row, so that the order of additions is fixed
        votes.scatter_add_(2, chosen[:, :, column], weights[:, :, column])
        if number in stops:
            yield number, votes


def _rank(votes: Tensor, truth: Tensor) -> Tensor:
    """The rank of the true class (t, q) by votes (t, q, c); `LAST` if it has no vote among more than five classes."""
    rank = classification.rank_of_true_class(votes, truth)
    if votes.shape[2] <= 5:
        return rank
    own = votes.gather(2, truth.clamp_min(0).expand(len(votes), -1)[:, :, None]).squeeze(2)
    return torch.where(own > 0, rank, classification.LAST)
