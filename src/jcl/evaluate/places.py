"""Where labels stand among classes, and the true class of a row among those that scored more."""

from __future__ import annotations

import torch
from torch import Tensor

NOWHERE = torch.iinfo(torch.int64).max


def positions(labels: Tensor, classes: Tensor) -> Tensor:
    """Where each label (n,) stands in the rising `classes` (c,); -1 for what is none of them."""
    classes = classes.to(labels.device)
    places = torch.searchsorted(classes, labels).clamp_max(len(classes) - 1)
    return torch.where(classes[places] == labels, places, -1)


def rank_of_true_class(scores: Tensor, truth: Tensor) -> Tensor:
    """How many classes stand before the true one (..., n), given scores (..., n, c) and positions `truth` (n,).

    Of equal scores the lower class stands first. Where there is no true class, `NOWHERE`.
    """
    own = scores.gather(-1, truth.clamp_min(0).expand(scores.shape[:-1])[..., None])
    numbers = torch.arange(scores.shape[-1], device=scores.device)
    before = (scores > own) | ((scores == own) & (numbers < truth[:, None]))
    return torch.where(truth >= 0, before.sum(-1), NOWHERE)
