"""Classification of labeled images: the task, the accuracy, and seeded splits with every class in its share."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from jcl.console import pluralize
from jcl.data import ImageData, ImageSource
from jcl.data.source import select_images
from jcl.errors import DataError, SettingsError
from jcl.random import LABEL_SUBSET, TEST_SPLIT, VALIDATION_SPLIT, hash_words

VALIDATION_SHARE = 0.2  # of the training images, on which hyperparameters are selected
LAST = torch.iinfo(torch.int64).max  # the rank of a true class that cannot be predicted


@dataclass(frozen=True)
class ClassificationTask:
    """Training images with their labels (n,), and test images, some of which may have no label.

    `classes` (c,) int64 are the labels in ascending order; output i of a classifier is classes[i]. `held_out`
    says that the test images were taken from the training images.
    """

    train: ImageSource
    labels: Tensor
    test: ImageSource
    classes: Tensor
    held_out: bool

    @property
    def class_names(self) -> tuple[str, ...]:
        names = self.train.class_names
        return tuple(str(label) if names is None else names[label] for label in self.classes.tolist())

    def select(self, rows: Tensor) -> Self:
        """The task with some of the training images."""
        return replace(self, train=select_images(self.train, rows), labels=self.labels[rows])


def classification_task(data: ImageData) -> ClassificationTask:
    """The task of a data set, split as by `train_and_test`."""
    train, test = train_and_test(data)
    assert train.labels is not None
    classes = torch.unique(train.labels)
    if test.labels is None or not bool((test.labels >= 0).any()):
        raise DataError("No test image has a label, so accuracy cannot be measured.")
    if len(classes) < 2:
        found = f"{pluralize(len(train), 'image')} of {len(classes)} ({data.train.description})"
        raise DataError(f"A classifier needs labeled images of at least two classes, but got {found}.")
    return ClassificationTask(train, train.labels, test, classes, held_out=test is not data.test)


def train_and_test(data: ImageData) -> tuple[ImageSource, ImageSource]:
    """Labeled training images, and the test set or, if it has no labels, a seeded tenth of the training images."""
    labels = data.train.labels
    if labels is None:
        raise no_labels(data)
    if (test := data.labeled_test) is not None:
        return select_images(data.train, (labels >= 0).nonzero().squeeze(1)), test
    kept, held_out = hold_out_split(labels)
    return select_images(data.train, kept), select_images(data.train, held_out)


def no_labels(data: ImageData) -> DataError:
    """The error for data without labels."""
    needed = "A folder needs two or more class folders and no images beside them, a .npz file needs y_train"
    other = "`jcl embed` and `jcl neighbours` work without labels"
    return DataError(f"The data ({data.train.description}) has no labels. {needed}. {other}.")


@dataclass(frozen=True)
class Scores:
    """Accuracies in percent over `images`, and for each class, None for a class without test images.

    `unseen_class_images` of the images have classes that the classifier does not know; they count as errors.
    `chance_top1` is the accuracy of always predicting the most frequent class of the test images.
    """

    top1: float
    top5: float
    images: int
    class_images: tuple[int, ...]
    class_top1: tuple[float | None, ...]
    unseen_class_images: int
    chance_top1: float


def scores(logits: Tensor, labels: Tensor, classes: Tensor) -> Scores:
    """The accuracy of logits (n, c) for labels (n,) without -1; ties go to the lower class, NaN is an error."""
    logits, labels = labeled_rows(logits, labels.to(logits.device), "test set")
    truth = class_positions(labels, classes)
    rank = torch.where(logits.isnan().any(1), LAST, rank_of_true_class(logits, truth))
    return scores_of_ranks(rank, labels, classes)


def scores_of_ranks(rank: Tensor, labels: Tensor, classes: Tensor) -> Scores:
    """The accuracy where the class of `labels` (n,) is at place `rank` (n,) from 0 among `classes` (c,)."""
    truth = class_positions(labels, classes)
    members = torch.bincount(truth[truth >= 0], minlength=len(classes))
    correct = torch.bincount(truth[rank < 1], minlength=len(classes))
    share = (100 * correct.double() / members.clamp_min(1)).tolist()
    return Scores(
        top1=100 * int((rank < 1).sum()) / len(truth),
        top5=100 * int((rank < 5).sum()) / len(truth),
        images=len(truth),
        class_images=tuple(members.tolist()),
        class_top1=tuple(value if count else None for value, count in zip(share, members.tolist(), strict=True)),
        unseen_class_images=int((truth < 0).sum()),
        chance_top1=100 * int(torch.unique(labels, return_counts=True)[1].max()) / len(truth),
    )


def labeled_rows(features: Tensor, labels: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Features (n, d), in at least float32, and int64 labels (n,), without the rows labeled -1."""
    if len(features) != len(labels):
        raise DataError(f"The {name} has {len(features):,} rows of features, but {len(labels):,} labels.")
    features, labels = features.to(torch.promote_types(torch.float32, features.dtype)), labels.long()
    keep = labels >= 0
    if not keep.any():
        raise DataError(f"The {name} has no labeled rows, so accuracy cannot be measured.")
    return (features, labels) if keep.all() else (features[keep.to(features.device)], labels[keep])


def class_positions(labels: Tensor, classes: Tensor) -> Tensor:
    """The index of each label (n,) in the ascending `classes` (c,), or -1."""
    classes = classes.to(labels.device)
    found = torch.searchsorted(classes, labels).clamp_max(len(classes) - 1)
    return torch.where(classes[found] == labels, found, -1)


def rank_of_true_class(scores: Tensor, truth: Tensor) -> Tensor:
    """The number of classes before the true one (..., n) by scores (..., n, c); `LAST` where `truth` (n,) is -1."""
    own = scores.gather(-1, truth.clamp_min(0).expand(scores.shape[:-1])[..., None])
    numbers = torch.arange(scores.shape[-1], device=scores.device)
    before = (scores > own) | ((scores == own) & (numbers < truth[:, None]))
    return torch.where(truth >= 0, before.sum(-1), LAST)


def label_amount(text: str) -> Callable[[Tensor], Tensor]:
    """Parse `--labels` (12.5%, 20-per-class) as a function from class sizes (c,) to numbers of labels, 1 or more."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip()):
        share = float(match[1]) / 100
        if 0 < share <= 1:
            return lambda counts: (counts * share).round().long().clamp_min(1).minimum(counts)
    elif (match := re.fullmatch(r"(\d{1,18})-per-class", text.strip())) and (most := int(match[1])) > 0:
        return lambda counts: counts.clamp_max(most)
    raise SettingsError(f"Invalid value {text!r} for --labels; use for example 10% or 20-per-class.")


def label_subset(labels: Tensor, amount: str, seed: int) -> Tensor:
    """Sorted rows with `amount` of the labels of each class. For one seed, a smaller amount is a subset of a larger."""
    rows, positions, counts = _shuffled_by_class(labels, seed, LABEL_SUBSET)
    return rows[positions < label_amount(amount)(counts)].sort().values


def class_sample(labels: Tensor, most: int) -> Tensor:
    """Sorted rows of at most `most` labels, each class in its share but with one row or more."""
    rows, positions, counts = _shuffled_by_class(labels, 0, LABEL_SUBSET)
    kept = (counts * min(most, len(rows)) // len(rows)).clamp_min(1)
    return rows[positions < kept].sort().values


def stratified_split(
    labels: Tensor, seed: int, stream: int = VALIDATION_SPLIT, share: float = VALIDATION_SHARE
) -> tuple[Tensor, Tensor]:
    """Sorted rows (kept, held out): a share of each class is held out, at least one image but not all of them."""
    rows, positions, counts = _shuffled_by_class(labels, seed, stream)
    held_out = (counts * share).round().long().clamp_min(1).minimum(counts - 1)
    return rows[positions >= held_out].sort().values, rows[positions < held_out].sort().values


def hold_out_split(labels: Tensor, *, limit: int = 10_000) -> tuple[Tensor, Tensor]:
    """Sorted rows (train, test) for labeled data without a test split; always the same for equal labels.

    A tenth of each class, at least one image but not all of them, becomes the test; less of large data, so that there
    are about `limit` test images.
    """
    labeled = int((labels >= 0).sum())
    if labeled < 2:
        raise DataError(f"At least two labeled images are needed to hold one out for testing, but got {labeled}.")
    train, test = stratified_split(labels, 0, TEST_SPLIT, min(0.1, limit / labeled))
    return (train, test) if len(test) else (train[1:], train[:1])  # all classes have one image


def _shuffled_by_class(labels: Tensor, seed: int, stream: int) -> tuple[Tensor, Tensor, Tensor]:
    """Labeled rows, the position of each in the seeded order of its class, and the size of its class; all (n,)."""
    labels = labels.cpu()
    rows = (labels >= 0).nonzero().squeeze(1)
    rows = rows[hash_words(seed, stream, rows).argsort(stable=True)]
    rows = rows[labels[rows].argsort(stable=True)]
    _, which, counts = torch.unique_consecutive(labels[rows], return_inverse=True, return_counts=True)
    starts = counts.cumsum(0) - counts
    return rows, torch.arange(len(rows)) - starts[which], counts[which]
