"""Labelled images as a task: classes to tell apart, images to learn from, others to be judged by, and the judgement."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jcl.data import ImageData, ImageSource
from jcl.data.subset import select_images
from jcl.errors import DataError
from jcl.evaluate.knn import leave_out_split
from jcl.evaluate.places import NOWHERE, positions, rank_of_true_class


@dataclass(frozen=True)
class ClassificationTask:
    """Images to train on, all labelled, and images to test with, some of which may have no label.

    `classes` (c,) int64 are the labels found among the training images, rising; a classifier's output i stands for
    classes[i]. `held_out` says that the test images were taken from the training images, for want of a test set.
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
    """The task that a data set poses; without a labelled test set a seeded tenth of its images are the test."""
    labels = data.train.labels
    if labels is None:
        raise no_labels(data, "no classifier can be trained on it")
    _check_classes(labels, data.train.description)
    if data.test is not None and data.test.labels is not None:
        rows = (labels >= 0).nonzero().squeeze(1)
        return ClassificationTask(
            select_images(data.train, rows), data.test, torch.unique(labels[rows]), held_out=False
        )
    kept, left_out = leave_out_split(labels)
    train, test = select_images(data.train, kept), select_images(data.train, left_out)
    return ClassificationTask(train, test, _check_classes(labels[kept], train.description), held_out=True)


def no_labels(data: ImageData, so: str) -> DataError:
    """The data has none, `so` something cannot be done, and this is where labels would come from."""
    return DataError(
        f"The data ({data.train.description}) has no labels, so {so}. In a folder every image has to lie in one of "
        "two or more class folders, none beside them; a .npz file needs y_train. `jcl embed` and "
        "`jcl neighbours` do without labels."
    )


def _check_classes(labels: Tensor, description: str) -> Tensor:
    """The classes among the labels, which must be two at least."""
    classes: Tensor = torch.unique(labels[labels >= 0])
    if len(classes) < 2:
        raise DataError(
            f"A classifier needs labelled images of at least two classes, but there are "
            f"{int((labels >= 0).sum())} of {len(classes)} ({description})."
        )
    return classes


@dataclass(frozen=True)
class Scores:
    """Accuracies in percent over `images`; `class_images` and `class_top1` by class, None for a class without any.

    `unseen_class_images` of the images are of classes that the classifier does not know, and count as wrong.
    """

    top1: float
    top5: float
    images: int
    class_images: tuple[int, ...]
    class_top1: tuple[float | None, ...]
    unseen_class_images: int


def scores(logits: Tensor, labels: Tensor, classes: Tensor) -> Scores:
    """Judge logits (n, c), column i for classes[i], by labels (n,); rows labelled -1 are left out.

    Of equal logits the lower class stands first; a row with logits that are not numbers is wrong.
    """
    labels = labels.to(logits.device)
    logits, labels = logits[labels >= 0], labels[labels >= 0]
    if not len(labels):
        raise DataError("None of the test images that could be read has a label, so accuracy cannot be measured.")
    truth = positions(labels, classes)
    place = torch.where(logits.isnan().any(1), NOWHERE, rank_of_true_class(logits, truth))
    members = torch.bincount(truth[truth >= 0], minlength=logits.shape[1])
    right = torch.bincount(truth[place < 1], minlength=logits.shape[1])
    share = (100 * right.double() / members.clamp_min(1)).tolist()
    return Scores(
        top1=100 * int((place < 1).sum()) / len(labels),
        top5=100 * int((place < 5).sum()) / len(labels),
        images=len(labels),
        class_images=tuple(members.tolist()),
        class_top1=tuple(value if count else None for value, count in zip(share, members.tolist(), strict=True)),
        unseen_class_images=int((truth < 0).sum()),
    )
