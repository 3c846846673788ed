"""Classification of labelled images: the classes, the images to train on and to test with, and the accuracy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jcl.data import ImageData, ImageSource
from jcl.data.subset import select_images
from jcl.errors import DataError
from jcl.evaluate.splits import leave_out_split

LAST = torch.iinfo(torch.int64).max  # the rank of a true class that cannot be predicted


@dataclass(frozen=True)
class ClassificationTask:
    """Labelled images to train on, and test images, some of which may have no label.

    `classes` (c,) int64 are the labels of the training images in ascending order; output i of a classifier stands for
    classes[i]. `held_out` says that the test images were taken from the training images.
    """

    train: ImageSource
    test: ImageSource
    classes: Tensor
    held_out: bool

    @property
    def class_names(self) -> tuple[str, ...]:
        names = self.train.class_names
        return tuple(str(label) if names is None else names[label] for label in self.classes.tolist())


def classification_task(data: ImageData) -> ClassificationTask:
    """The task of a data set; without a labelled test set, a seeded tenth of the training images are the test."""
    labels = data.train.labels
    if labels is None:
        raise no_labels(data)
    _check_classes(labels, data.train.description)
    if data.test is not None and data.test.labels is not None:
        rows = (labels >= 0).nonzero().squeeze(1)
        train = select_images(data.train, rows)
        return ClassificationTask(train, data.test, torch.unique(labels[rows]), held_out=False)
    kept, held_out = leave_out_split(labels)
    train, test = select_images(data.train, kept), select_images(data.train, held_out)
    return ClassificationTask(train, test, _check_classes(labels[kept], train.description), held_out=True)


def no_labels(data: ImageData) -> DataError:
    """The error for data without labels."""
    return DataError(
        f"the data ({data.train.description}) has no labels. A folder needs two or more class folders and no images "
        "beside them, a .npz file needs y_train. `jcl embed` and `jcl neighbours` work without labels."
    )


def _check_classes(labels: Tensor, description: str) -> Tensor:
    classes: Tensor = torch.unique(labels[labels >= 0])
    if len(classes) < 2:
        raise DataError(
            f"a classifier needs labelled images of at least two classes, but got {int((labels >= 0).sum())} images of "
            f"{len(classes)} ({description})."
        )
    return classes


@dataclass(frozen=True)
class Scores:
    """Accuracies in percent over `images`, and for each class, None for a class without test images.

    `unseen_class_images` of the images have classes that the classifier does not know; they count as errors.
    """

    top1: float
    top5: float
    images: int
    class_images: tuple[int, ...]
    class_top1: tuple[float | None, ...]
    unseen_class_images: int


def scores(logits: Tensor, labels: Tensor, classes: Tensor) -> Scores:
    """The accuracy of logits (n, c), column i for classes[i], for labels (n,); rows labelled -1 are left out.

    Ties go to the lower class. A row with NaN counts as an error.
    """
    labels = labels.to(logits.device)
    logits, labels = logits[labels >= 0], labels[labels >= 0]
    if not len(labels):
        raise DataError("no readable test image has a label, so accuracy cannot be measured.")
    truth = class_positions(labels, classes)
    rank = torch.where(logits.isnan().any(1), LAST, rank_of_true_class(logits, truth))
    members = torch.bincount(truth[truth >= 0], minlength=logits.shape[1])
    correct = torch.bincount(truth[rank < 1], minlength=logits.shape[1])
    share = (100 * correct.double() / members.clamp_min(1)).tolist()
    return Scores(
        top1=100 * int((rank < 1).sum()) / len(labels),
        top5=100 * int((rank < 5).sum()) / len(labels),
        images=len(labels),
        class_images=tuple(members.tolist()),
        class_top1=tuple(value if count else None for value, count in zip(share, members.tolist(), strict=True)),
        unseen_class_images=int((truth < 0).sum()),
    )


def class_positions(labels: Tensor, classes: Tensor) -> Tensor:
    """The index of each label (n,) in the ascending `classes` (c,), or -1."""
    classes = classes.to(labels.device)
    found = torch.searchsorted(classes, labels).clamp_max(len(classes) - 1)
    return torch.where(classes[found] == labels, found, -1)


def rank_of_true_class(scores: Tensor, truth: Tensor) -> Tensor:
    """The number of classes before the true one (..., n), for scores (..., n, c) and class positions `truth` (n,).

    Ties go to the lower class. `LAST` where `truth` is -1.
    """
    own = scores.gather(-1, truth.clamp_min(0).expand(scores.shape[:-1])[..., None])
    numbers = torch.arange(scores.shape[-1], device=scores.device)
    before = (scores > own) | ((scores == own) & (numbers < truth[:, None]))
    return torch.where(truth >= 0, before.sum(-1), LAST)
