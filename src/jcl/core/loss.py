"""The contrastive losses of the paper as pure functions, and thin modules around them.

Shapes everywhere: `query` (N, d), `keys` (N, M, d), `key` (N, d), `negatives` (K, d). Queries and keys are unit rows;
negatives may be shorter, because JCL enqueues mean keys as they are. Gradients flow to whichever inputs ask for them;
in training only the query does.

All losses compute in float32 at least, whatever precision the encoder ran in: exponents of similarities divided by a
small temperature lose too much in half precision.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

Reduction = Literal["mean", "sum", "none"]


def joint_contrastive_loss(
    query: Tensor,
    keys: Tensor,
    negatives: Tensor,
    *,
    temperature: float = 0.2,
    covariance_scale: float | Tensor = 4.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """JCL, Eq. 8 of the paper: a closed-form upper bound on InfoNCE with infinitely many Gaussian positive keys.

        loss = log[ exp(q·mu/t + scale/(2 t²) qᵀΣq) + Σ_j exp(q·n_j/t) ] - q·mu/t

    mu and Σ are the mean and the (biased, 1/M) covariance of the M keys of one image. Both enter only through the
    similarities s_m = q·k_m, since q·mu is their mean and qᵀΣq their variance, so no d×d matrix is ever formed.
    With one key the variance is zero and the loss is MoCo's for every `covariance_scale`.
    """
    query, keys, negatives = _checked(query, keys, negatives, temperature)
    # Written so that NaN fails too; a tensor is not looked at, since that would wait for the device.
    if not isinstance(covariance_scale, Tensor) and not 0 <= covariance_scale < math.inf:
        raise ValueError(f"covariance_scale must not be negative and must be finite, but it is {covariance_scale}.")
    # (N, 1) would pair every image's scale with every other image, and the mean over all pairs would look like a loss.
    if isinstance(covariance_scale, Tensor) and covariance_scale.shape not in ((), (1,), query.shape[:1]):
        raise ValueError(
            f"covariance_scale must be one number or one for each of the {query.shape[0]} images, (N,), "
            f"but its shape is {tuple(covariance_scale.shape)}."
        )
    with torch.autocast(query.device.type, enabled=False):
        similarities = _similarities(query, keys)
        mean = similarities.mean(dim=1) / temperature
        variance = similarities.var(dim=1, correction=0) / temperature**2
        negative = _negative_mass(query, negatives, temperature)
        return _reduce(torch.logaddexp(mean + covariance_scale / 2 * variance, negative) - mean, reduction)


def multi_key_loss(
    query: Tensor, keys: Tensor, negatives: Tensor, *, temperature: float = 0.2, reduction: Reduction = "mean"
) -> Tensor:
    """The vanilla use of several keys, Eq. 3: InfoNCE of each (query, key) pair, averaged over the M keys."""
    query, keys, negatives = _checked(query, keys, negatives, temperature)
    with torch.autocast(query.device.type, enabled=False):
        positives = _similarities(query, keys) / temperature
        negative = _negative_mass(query, negatives, temperature)
        return _reduce((torch.logaddexp(positives, negative[:, None]) - positives).mean(dim=1), reduction)


def info_nce_loss(
    query: Tensor, key: Tensor, negatives: Tensor, *, temperature: float = 0.2, reduction: Reduction = "mean"
) -> Tensor:
    """InfoNCE with one positive key, Eq. 1: the loss of MoCo."""
    return multi_key_loss(query, key.unsqueeze(1), negatives, temperature=temperature, reduction=reduction)


@torch.no_grad()
def contrastive_accuracy(query: Tensor, keys: Tensor, negatives: Tensor) -> Tensor:
    """Share of queries (0..1, a scalar tensor) closer to their own mean key than to every negative.

    The variance term is left out on purpose, so that the figure compares with MoCo's.
    """
    with torch.autocast(query.device.type, enabled=False):
        positive = _similarities(query, keys).mean(dim=1)
        hardest = (query @ negatives.T).amax(dim=1)
        return (positive > hardest).float().mean()


class JointContrastiveLoss(nn.Module):
    """`joint_contrastive_loss` with its constants remembered, for people who build losses as modules."""

    def __init__(self, temperature: float = 0.2, covariance_scale: float = 4.0, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.temperature = temperature
        self.covariance_scale = covariance_scale
        self.reduction: Reduction = reduction

    def forward(self, query: Tensor, keys: Tensor, negatives: Tensor) -> Tensor:
        return joint_contrastive_loss(
            query,
            keys,
            negatives,
            temperature=self.temperature,
            covariance_scale=self.covariance_scale,
            reduction=self.reduction,
        )


class MultiKeyLoss(nn.Module):
    """`multi_key_loss` with its constants remembered."""

    def __init__(self, temperature: float = 0.2, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.temperature = temperature
        self.reduction: Reduction = reduction

    def forward(self, query: Tensor, keys: Tensor, negatives: Tensor) -> Tensor:
        return multi_key_loss(query, keys, negatives, temperature=self.temperature, reduction=self.reduction)


class InfoNCELoss(nn.Module):
    """`info_nce_loss` with its constants remembered."""

    def __init__(self, temperature: float = 0.2, reduction: Reduction = "mean") -> None:
        super().__init__()
        self.temperature = temperature
        self.reduction: Reduction = reduction

    def forward(self, query: Tensor, key: Tensor, negatives: Tensor) -> Tensor:
        return info_nce_loss(query, key, negatives, temperature=self.temperature, reduction=self.reduction)


def _similarities(query: Tensor, keys: Tensor) -> Tensor:
    """s_m = q·k_m for every image: (N, d), (N, M, d) -> (N, M)."""
    return torch.bmm(keys, query.unsqueeze(2)).squeeze(2)


def _negative_mass(query: Tensor, negatives: Tensor, temperature: float) -> Tensor:
    """log Σ_j exp(q·n_j/t), the part of the denominator that the negatives fill: (N,)."""
    return torch.logsumexp(query @ negatives.T / temperature, dim=1)


def _reduce(losses: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "mean":
        return losses.mean()
    if reduction == "sum":
        return losses.sum()
    if reduction == "none":
        return losses
    raise ValueError(f"reduction must be 'mean', 'sum' or 'none', but it is {reduction!r}.")


def _checked(
    query: Tensor, keys: Tensor, negatives: Tensor, temperature: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs in float32 at least, after their shapes were found to fit together."""
    if not isinstance(temperature, Tensor) and not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be positive and finite, but it is {temperature}.")
    if isinstance(temperature, Tensor) and temperature.shape not in ((), (1,)):
        raise ValueError(f"temperature must be one number, but its shape is {tuple(temperature.shape)}.")
    if other := [value for value in (query, keys, negatives) if not isinstance(value, Tensor)]:
        raise TypeError(f"query, keys and negatives must be tensors, but one of them is a {type(other[0]).__name__}.")
    if query.ndim != 2 or keys.ndim != 3 or negatives.ndim != 2:
        raise ValueError(
            "expected query (N, d), keys (N, M, d) and negatives (K, d), "
            f"but got {tuple(query.shape)}, {tuple(keys.shape)} and {tuple(negatives.shape)}."
        )
    if keys.shape[0] != query.shape[0] or {keys.shape[2], negatives.shape[1]} != {query.shape[1]}:
        raise ValueError(
            "query, keys and negatives must agree in the number of images and the dimension, "
            f"but got {tuple(query.shape)}, {tuple(keys.shape)} and {tuple(negatives.shape)}."
        )
    if keys.shape[1] == 0:
        raise ValueError("at least one key per image is needed, but keys has M = 0.")
    common = torch.promote_types(torch.float32, torch.promote_types(query.dtype, keys.dtype))
    return query.to(common), keys.to(common), negatives.to(common)
