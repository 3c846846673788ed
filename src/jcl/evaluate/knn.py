"""Weighted k-nearest-neighbour classification (Wu et al. 2018; MoCo): what frozen features are worth, untrained.

Each of the k bank rows most similar to a query votes for its class with weight exp(similarity / temperature). The
votes are added one neighbour at a time, nearest first, so a smaller k is met on the way to a larger one, and the
sums, and with them the decision between tied classes, are the same on every device. Tied neighbours go by lower bank
row, tied classes by lower class number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jcl.distributed.group import ALONE, Ranks
from jcl.errors import DataError, SettingsError
from jcl.evaluate.neighbours import DEFAULT_CHUNK, Neighbours, neighbour_chunks
from jcl.evaluate.places import NOWHERE, positions, rank_of_true_class
from jcl.random import permutation

DEFAULT_K = 200
DEFAULT_TEMPERATURE = 0.1
_FEW_CLASSES = 5  # all of which are among the first five
_SPLIT_STREAM = 0x6B4E4E  # a stream of its own beside those that `jcl.random` names


@dataclass(frozen=True)
class KnnResult:
    """Accuracies in percent for one k and temperature.

    `neighbours` is the number that voted: k, or the whole bank if it is smaller. `unseen_class_images` counts queries
    whose class the bank does not have; they count as errors.
    """

    k: int
    temperature: float
    top1: float
    top5: float
    neighbours: int
    bank: int
    queries: int
    unseen_class_images: int = 0


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    k: Sequence[int] = (DEFAULT_K,),
    temperature: Sequence[float] = (DEFAULT_TEMPERATURE,),
    chunk: int = DEFAULT_CHUNK,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    ranks: Ranks = ALONE,
) -> list[KnnResult]:
    """Top-1 and top-5 of every k with every temperature (k outermost, as listed), from one search.

    Features are (n, d), of any length per row; labels are (n,) integers, and rows labelled -1 are left out on both
    sides. A class no neighbour voted for is among the top 5 only where the bank has five classes or fewer, which are
    the first five whoever votes. `chunk`, `device` and `dtype` are those of `neighbours.neighbour_chunks`. Several
    `ranks` that all have all features share the queries out among them.
    """
    bank, bank_labels = _labelled(train_features, train_labels, "bank")
    queries, query_labels = _labelled(test_features, test_labels, "test set")
    _check(k, temperature)
    classes, bank_classes = torch.unique(bank_labels, return_inverse=True)
    truths = positions(query_labels, classes)  # -1 for a class that the bank does not have
    own = slice(ranks.rank * len(queries) // ranks.count, (ranks.rank + 1) * len(queries) // ranks.count)
    # number of neighbours -> (t, 2): queries right in the first place, in the first five
    hits = {min(asked, len(bank)): torch.zeros(len(temperature), 2, dtype=torch.int64) for asked in k}
    if own.start < own.stop:  # there may be fewer queries than ranks
        search = neighbour_chunks(queries[own], bank, max(k), chunk=chunk, device=device, dtype=dtype)
        for found, truth in zip(search, torch.split(truths[own], chunk), strict=True):
            for neighbours, votes in _votes(found, bank_classes, len(classes), k, temperature):
                place = _place(votes, truth.to(votes.device))
                hits[neighbours] += torch.stack([(place < 1).sum(1), (place < 5).sum(1)], 1).cpu()
    counted = {neighbours: ranks.total(own_hits) for neighbours, own_hits in hits.items()}
    results, unseen_class_images = [], int((truths < 0).sum())
    for asked in k:
        neighbours = min(asked, len(bank))
        shares = (100 * counted[neighbours].double() / len(queries)).tolist()
        for each, (top1, top5) in zip(temperature, shares, strict=True):
            results.append(KnnResult(asked, each, top1, top5, neighbours, len(bank), len(queries), unseen_class_images))
    return results


def knn_predict(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    *,
    k: int = DEFAULT_K,
    temperature: float = DEFAULT_TEMPERATURE,
    chunk: int = DEFAULT_CHUNK,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The class (q,) that the neighbours of each test row vote for, on the device of the search."""
    bank, bank_labels = _labelled(train_features, train_labels, "bank")
    _check([k], [temperature])
    classes, bank_classes = torch.unique(bank_labels, return_inverse=True)
    search = neighbour_chunks(test_features, bank, k, chunk=chunk, device=device, dtype=dtype)
    answers = [
        votes[0].argmax(1)  # argmax takes the first of equals: the lower class
        for found in search
        for _, votes in _votes(found, bank_classes, len(classes), [k], [temperature])
    ]
    winners = torch.cat(answers)
    predicted: Tensor = classes.to(winners.device)[winners]
    return predicted


def leave_out_split(labels: Tensor, seed: int = 0, *, share: float = 0.1, limit: int = 10_000) -> tuple[Tensor, Tensor]:
    """Row numbers (bank, queries), each rising, for data that has labels but no test split.

    A seeded `share` of the labelled rows, at least one and at most `limit`, become queries; the others the bank. All
    that is measured leaves the seed as it is, so that figures differ by what was trained, not by the test.
    """
    rows = (labels.cpu() >= 0).nonzero().squeeze(1)
    if len(rows) < 2:
        raise DataError(
            f"kNN needs at least two labelled images, one to ask about and one to compare: {len(rows)} found."
        )
    if not 0 < share < 1 or limit < 1:
        raise SettingsError(f"The share of queries must lie between 0 and 1 and their limit above 0: {share}, {limit}.")
    count = min(max(round(share * len(rows)), 1), limit, len(rows) - 1)
    order = permutation(seed, _SPLIT_STREAM, 0, len(rows))
    return rows[order[count:]].sort().values, rows[order[:count]].sort().values


def _check(k: Sequence[int], temperature: Sequence[float]) -> None:
    if not k or min(k) < 1:
        raise SettingsError(f"kNN needs a list of k, each at least 1, but got {list(k)}.")
    if not temperature or not all(each > 0 for each in temperature):
        raise SettingsError(f"kNN needs a list of temperatures, each above 0, but got {list(temperature)}.")


def _labelled(features: Tensor, labels: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The rows that carry a label."""
    if labels.shape != features.shape[:1]:
        raise DataError(f"The {name} has {len(features)} rows of features but labels of shape {tuple(labels.shape)}.")
    keep = labels >= 0
    if not keep.any():
        raise DataError(f"The {name} has no labelled rows, so kNN accuracy cannot be measured on it.")
    return (features, labels) if keep.all() else (features[keep.to(features.device)], labels[keep])


def _votes(
    found: Neighbours, bank_classes: Tensor, classes: int, k: Sequence[int], temperature: Sequence[float]
) -> Iterator[tuple[int, Tensor]]:
    """For each distinct number of neighbours in `k`, clipped to those found: that number and the votes (t, q, c).

    Weights are relative to the nearest neighbour's, so that no temperature overflows. The same tensor of votes is
    yielded each time, with more votes in it.
    """
    similarities, rows = found.similarities, found.rows
    scale = similarities.new_tensor(list(temperature))[:, None, None]
    weights = ((similarities - similarities[:, :1]) / scale).exp()  # (t, q, k)
    chosen = bank_classes.to(rows.device)[rows].expand(len(temperature), -1, -1)
    votes = weights.new_zeros(len(temperature), len(rows), classes)
    stops = {min(each, rows.shape[1]) for each in k}
    for number in range(1, max(stops) + 1):
        column = slice(number - 1, number)  # one entry a row, so that no two additions meet and their order is fixed
        votes.scatter_add_(2, chosen[:, :, column], weights[:, :, column])
        if number in stops:
            yield number, votes


def _place(votes: Tensor, truth: Tensor) -> Tensor:
    """How many classes stand before the true one (t, q), given votes (t, q, c).

    Very many if it has no vote at all, for its number would decide whether it is among the first five; but of five
    classes or fewer each is.
    """
    places = rank_of_true_class(votes, truth)
    if votes.shape[2] <= _FEW_CLASSES:
        return places
    own = votes.gather(2, truth.clamp_min(0).expand(len(votes), -1)[:, :, None]).squeeze(2)
    return torch.where(own > 0, places, NOWHERE)
