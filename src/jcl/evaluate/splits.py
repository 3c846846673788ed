"""Seeded splits of labelled images: few labels for training, images held out to choose by or to test with."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from jcl.errors import DataError, SettingsError
from jcl.random import hash_words, permutation

_SUBSET_STREAM = 0x6C6162656C  # streams beside those that `jcl.random` names
_SPLIT_STREAM = 0x73706C6974
_TEST_STREAM = 0x6B4E4E


@dataclass(frozen=True)
class LabelAmount:
    """How many labels of each class to use: a fraction of them or a number, and at least one."""

    share: float = 1.0
    per_class: int | None = None

    def of(self, counts: Tensor) -> Tensor:
        """The number of labels to use of classes with `counts` (c,) labels."""
        if self.per_class is not None:
            return counts.clamp_max(self.per_class)
        return (counts * self.share).round().long().clamp_min(1).minimum(counts)


def label_amount(text: str) -> LabelAmount:
    """Parse `--labels`: "1%", "12.5%" or "20-per-class"."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip()):
        share = float(match[1]) / 100
        if 0 < share <= 1:
            return LabelAmount(share=share)
    elif (match := re.fullmatch(r"(\d{1,18})-per-class", text.strip())) and int(match[1]) > 0:
        return LabelAmount(per_class=int(match[1]))
    raise SettingsError(f"invalid value {text!r} for --labels; use for example 10% or 20-per-class.")


def label_subset(labels: Tensor, amount: LabelAmount, seed: int) -> Tensor:
    """Sorted rows of `labels` (n,) with `amount` of each class, never rows labelled -1.

    The order within a class depends on the seed alone, so the rows of 1 % are among those of 10 %.
    """
    rows, places, counts = _shuffled_by_class(labels, seed, _SUBSET_STREAM)
    return rows[places < amount.of(counts)].sort().values


def balanced_split(labels: Tensor, seed: int, *, share: float = 0.2) -> tuple[Tensor, Tensor]:
    """Sorted rows (kept, held out): a share of each class is held out, at least one image and never all of them."""
    rows, places, counts = _shuffled_by_class(labels, seed, _SPLIT_STREAM)
    held_out = (counts * share).round().long().clamp_min(1).minimum(counts - 1)
    return rows[places >= held_out].sort().values, rows[places < held_out].sort().values


def leave_out_split(labels: Tensor, seed: int = 0, *, share: float = 0.1, limit: int = 10_000) -> tuple[Tensor, Tensor]:
    """Sorted rows (train, test) for labelled data without a test split.

    A share of the labelled rows, at least one and at most `limit`, become the test. Evaluations keep the default seed,
    so that their results differ by the training and not by the test images.
    """
    rows = (labels.cpu() >= 0).nonzero().squeeze(1)
    if len(rows) < 2:
        raise DataError(f"at least two labelled images are needed to hold one out for testing, but got {len(rows)}.")
    if not 0 < share < 1 or limit < 1:
        raise SettingsError(f"share must be between 0 and 1 and limit above 0, but got {share} and {limit}.")
    count = min(max(round(share * len(rows)), 1), limit, len(rows) - 1)
    order = permutation(seed, _TEST_STREAM, 0, len(rows))
    return rows[order[count:]].sort().values, rows[order[:count]].sort().values


def _shuffled_by_class(labels: Tensor, seed: int, stream: int) -> tuple[Tensor, Tensor, Tensor]:
    """Labelled rows, the position of each in the seeded order of its class, and the size of its class; all (n,)."""
    labels = labels.cpu()
    rows = (labels >= 0).nonzero().squeeze(1)
    rows = rows[hash_words(seed, stream, rows).argsort(stable=True)]
    rows = rows[labels[rows].argsort(stable=True)]
    _, which, counts = torch.unique_consecutive(labels[rows], return_inverse=True, return_counts=True)
    starts = counts.cumsum(0) - counts
    return rows, torch.arange(len(rows)) - starts[which], counts[which]
