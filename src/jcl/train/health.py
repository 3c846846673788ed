"""The state of a run in words."""

from __future__ import annotations

import math
from collections.abc import Mapping

COLLAPSED, NARROW = 0.1, 0.4
"""Shares of the maximum spread below which features have collapsed, or are close to it."""


def health(figures: Mapping[str, float | None], *, queue_size: int, embedding_dim: int) -> str:
    """One line on the state of training, from its newest figures."""
    parts = [
        _queue(figures.get("queue_filled")),
        _loss(figures["loss"], queue_size) if "loss" in figures else "",
        _spread(figures.get("feature_std"), embedding_dim),
        _accuracy(figures.get("contrastive_accuracy")),
        _skipped(figures.get("skipped_steps")),
    ]
    return "; ".join(part for part in parts if part)


def uniform_guess_loss(queue_size: int) -> float:
    """The loss of a network that cannot tell the positive from the negatives: log(K + 1)."""
    return math.log(queue_size + 1)


def _queue(filled: float | None) -> str:
    if filled is None or filled >= 1.0:
        return ""
    return f"queue still filling ({filled:.0%} real keys, the loss is not comparable yet)"


def _loss(loss: float | None, queue_size: int) -> str:
    if loss is None:
        return "the loss is not finite"
    guess = uniform_guess_loss(queue_size)
    relation = "below" if loss < guess else "above"
    return f"loss {loss:.2f}, {relation} a uniform guess ({guess:.2f})"


def _spread(feature_std: float | None, embedding_dim: int) -> str:
    """Unit vectors spread evenly over the sphere have a standard deviation of 1/sqrt(d) in every coordinate."""
    if feature_std is None:
        return ""
    share = feature_std * math.sqrt(embedding_dim)
    if share < COLLAPSED:
        return f"features have COLLAPSED (spread {share:.0%} of the maximum): lower --lr or use more BN groups"
    if share < NARROW:
        return f"features are spread narrowly ({share:.0%} of the maximum), watch for collapse"
    return f"features well spread ({share:.0%})"


def _accuracy(accuracy: float | None) -> str:
    return "" if accuracy is None else f"{accuracy:.0f} % of queries find their own image first"


def _skipped(steps: float | None) -> str:
    if not steps:
        return ""
    return f"{steps:,.0f} step{'s' if steps > 1 else ''} skipped so far because the loss was not finite"
