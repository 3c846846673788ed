"""Part of the labels: seeded, with every class in its share, for training with few of them or for choosing on some.

Images of a class are put in an order that depends on the seed and on nothing else, and a part is the first few of
each class. So the images of 1 % are among those of 10 %, and both are the same on every machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from jcl.errors import SettingsError
from jcl.random import hash_words

_SUBSET_STREAM = 0x6C6162656C  # streams of their own beside those that `jcl.random` names
_SPLIT_STREAM = 0x73706C6974


@dataclass(frozen=True)
class LabelAmount:
    """How many labels of each class to use: a share of them, or so many; always at least one."""

    share: float = 1.0
    per_class: int | None = None

    def of(self, counts: Tensor) -> Tensor:
        """How many of a class, given how many there are, (c,) -> (c,)."""
        if self.per_class is not None:
            return counts.clamp_max(self.per_class)
        return (counts * self.share).round().long().clamp_min(1).minimum(counts)


def label_amount(text: str) -> LabelAmount:
    """What `--labels` says: "1%", "12.5%" or "100%" of each class, or "20-per-class"."""
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip()):
        share = float(match[1]) / 100
        if 0 < share <= 1:
            return LabelAmount(share=share)
    elif (match := re.fullmatch(r"(\d{1,18})-per-class", text.strip())) and int(match[1]) > 0:
        return LabelAmount(per_class=int(match[1]))
    raise SettingsError(
        f"--labels takes a share above 0 % and up to 100 %, such as 10%, or a number such as 20-per-class, "
        f"but got {text!r}."
    )


def label_subset(labels: Tensor, amount: LabelAmount, seed: int) -> Tensor:
    """The rows, rising, that `amount` takes from `labels` (n,); rows labelled -1 are never among them."""
    rows, places, counts = _ranked(labels, seed, _SUBSET_STREAM)
    return rows[places < amount.of(counts)].sort().values


def balanced_split(labels: Tensor, seed: int, *, share: float = 0.2) -> tuple[Tensor, Tensor]:
    """Row numbers (kept, held out), each rising: a share of each class is held out, where it has two images or more.

    Of such a class at least one image is on either side; a class of one image is kept whole.
    """
    rows, places, counts = _ranked(labels, seed, _SPLIT_STREAM)
    taken = (counts * share).round().long().clamp_min(1).minimum(counts - 1)
    return rows[places >= taken].sort().values, rows[places < taken].sort().values


def _ranked(labels: Tensor, seed: int, stream: int) -> tuple[Tensor, Tensor, Tensor]:
    """Labelled rows, each one's place within its class in the seeded order, and the size of its class; all (n,)."""
    labels = labels.cpu()
    rows = (labels >= 0).nonzero().squeeze(1)
    rows = rows[hash_words(seed, stream, rows).argsort(stable=True)]
    rows = rows[labels[rows].argsort(stable=True)]
    _, which, counts = torch.unique_consecutive(labels[rows], return_inverse=True, return_counts=True)
    starts = counts.cumsum(0) - counts
    return rows, torch.arange(len(rows)) - starts[which], counts[which]
