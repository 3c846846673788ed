"""How tight the paper's bound is, and how Gaussian the keys are.

With s = q·k/t for a positive key k, and A = log Σ_j exp(q·n_j/t) for the negatives:

    Eq. 4   E[log(exp(s) + exp(A))] - E[s]                     the loss with infinitely many keys
    Eq. 7   log(E[exp(s)] + exp(A)) - E[s]                     Jensen's bound on Eq. 4
    Eq. 8   log(exp(E[s] + L/2 var[s]) + exp(A)) - E[s]        closed form, equal to Eq. 7 for Gaussian keys and L = 1

For Gaussian keys Eq. 4 <= Eq. 7 <= Eq. 8 at every L >= 1. Below 1, Eq. 8 is below Eq. 7 and may be below Eq. 4. For
other distributions Eq. 7 still bounds Eq. 4, but Eq. 8 is only an approximation. Expectations are float64 means over
sampled keys, with standard errors.

Normality is tested by D'Agostino and Pearson: skewness (D'Agostino 1970) and kurtosis (Anscombe and Glynn 1983) are
transformed to standard normal scores, whose squares sum to a chi-squared variable with two degrees of freedom.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

MIN_SAMPLES = 20  # with fewer values, the kurtosis test is not valid


@dataclass(frozen=True, eq=False)
class SampledLoss:
    """A value (n,) for each of n images, and the influence (n, m) of each of their m keys on it.

    Influences have zero mean; their standard deviation over √m is the standard error.
    """

    value: Tensor
    influence: Tensor

    def control_mean(self, similarities: Tensor, mean: Tensor) -> "SampledLoss":
        """Reduce the variance with s (n, m), whose exact mean (n,) is known, as a control variate."""
        centered = similarities - similarities.mean(dim=1, keepdim=True)
        slope = (self.influence * centered).mean(dim=1) / centered.square().mean(dim=1)
        error = similarities.mean(dim=1) - mean
        return SampledLoss(self.value - slope * error, self.influence - slope[:, None] * centered)

    def error(self) -> Tensor:
        """The standard error of each image's value, (n,)."""
        return self.influence.std(dim=1) / math.sqrt(self.influence.shape[1])

    def mean(self) -> float:
        """The mean over the images."""
        return float(self.value.mean())

    def mean_error(self) -> float:
        """The standard error of that mean due to the sampled keys."""
        return float(self.error().square().sum().sqrt() / len(self.value))


def infinite_keys(similarities: Tensor, negative: Tensor) -> SampledLoss:
    """Eq. 4 from sampled s (n, m) and A (n,)."""
    losses = torch.logaddexp(similarities, negative[:, None]) - similarities
    value = losses.mean(dim=1)
    return SampledLoss(value, losses - value[:, None])


def jensen_bound(similarities: Tensor, negative: Tensor) -> SampledLoss:
    """Eq. 7 from sampled s (n, m) and A (n,); never below Eq. 4 of the same sample."""
    count = similarities.shape[1]
    mean = similarities.mean(dim=1)
    total = torch.logaddexp(torch.logsumexp(similarities, dim=1) - math.log(count), negative)
    shares = torch.exp(similarities - total[:, None])
    influence = shares - shares.mean(dim=1, keepdim=True) - (similarities - mean[:, None])
    return SampledLoss(total - mean, influence)


def closed_form(mean: Tensor, variance: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Eq. 8 from the mean and variance of s and A, all (n,)."""
    return torch.logaddexp(mean + scale / 2 * variance, negative) - mean


class Attraction(NamedTuple):
    """How Eq. 8 attracts a query to its keys, as means over the images.

    The gradient of the loss with respect to s_m is -(1/M) [(1 - p) - p L (s_m - mean s)], where p is the positive's
    share of the softmax: all keys attract alike, and the covariance weakens the near ones and strengthens the far ones.
    """

    positive_share: float  # p
    covariance_share: float  # mean of p L std(s) over mean of 1 - p, the second part relative to the first
    repelled_keys: float  # fraction of the keys with a negative weight, from which the query is pushed away


def attraction(similarities: Tensor, negative: Tensor, scale: float) -> Attraction:
    """The weights of the keys in the gradient of Eq. 8, from s (n, m) and A (n,)."""
    variance, mean = torch.var_mean(similarities, dim=1, correction=0, keepdim=True)
    share = torch.sigmoid(mean + scale / 2 * variance - negative[:, None])
    weights = (1 - share) - share * scale * (similarities - mean)
    relative = (share * scale * variance.sqrt()).mean() / (1 - share).mean().clamp_min(1e-12)
    return Attraction(float(share.mean()), float(relative), float((weights < 0).double().mean()))


@dataclass(frozen=True)
class BoundRow:
    """Mean losses over the images, with standard errors due to the sampled keys."""

    infinite: float
    infinite_error: float
    jensen: float
    jensen_error: float
    closed: dict[float, float]  # by the covariance scale
    deviation: float  # root mean variance of q·k/t; the gap grows with it
    attraction: dict[float, Attraction]  # by the covariance scale

    def gap(self, scale: float) -> float:
        """Eq. 8 minus Eq. 4."""
        return self.closed[scale] - self.infinite

    def metrics(self) -> dict[str, float]:
        return {
            "infinite_keys_loss": self.infinite,
            "infinite_keys_error": self.infinite_error,
            "jensen_loss": self.jensen,
            "jensen_error": self.jensen_error,
            **{f"closed_form_loss_scale{scale:g}": value for scale, value in self.closed.items()},
            **{
                f"{name}_scale{scale:g}": value
                for scale, found in self.attraction.items()
                for name, value in found._asdict().items()
            },
            "similarity_deviation": self.deviation,
        }


def bound_row(
    similarities: Tensor, negative: Tensor, scales: Sequence[float], exact: tuple[Tensor, Tensor] | None = None
) -> BoundRow:
    """The losses from s (n, m) and A (n,); `exact` is the mean and variance (n,) of s, if they are known."""
    mean, variance = exact or (similarities.mean(dim=1), similarities.var(dim=1, correction=0))  # as in training
    infinite, jensen = infinite_keys(similarities, negative), jensen_bound(similarities, negative)
    if exact is not None:
        infinite, jensen = (loss.control_mean(similarities, mean) for loss in (infinite, jensen))
    return BoundRow(
        infinite=infinite.mean(),
        infinite_error=infinite.mean_error(),
        jensen=jensen.mean(),
        jensen_error=jensen.mean_error(),
        closed={scale: float(closed_form(mean, variance, negative, scale).mean()) for scale in scales},
        deviation=float(variance.mean().sqrt()),
        attraction={scale: attraction(similarities, negative, scale) for scale in scales},
    )


class GaussianCase(NamedTuple):
    """Dimension and spread of Gaussian keys, and the temperature of the loss.

    `spread` is the square root of the trace of the covariance. The mean has length √(1 - spread²), so keys have unit
    length on average. The variances of the coordinates decay as 1, 1/2, 1/3, ...
    """

    dimension: int
    spread: float
    temperature: float


def gaussian_rows(
    cases: Sequence[GaussianCase], scales: Sequence[float], *, draws: int, images: int, negatives: int, seed: int
) -> Iterator[tuple[GaussianCase, BoundRow]]:
    """The losses of each case; cases that differ only in temperature have the same keys.

    A query has the distribution of its image's keys, normalized; negatives are random unit rows. Given the query, q·k
    is Gaussian with mean q·mu and variance qᵀΣq, and is drawn as such.
    """
    for case in cases:
        dimension, spread, t = case
        normal = partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        variances = 1 / torch.arange(1, dimension + 1, dtype=torch.float64)
        variances *= spread**2 / variances.sum()
        means = F.normalize(normal(images, dimension), dim=1) * math.sqrt(1 - spread**2)
        queries = F.normalize(means + normal(images, dimension) * variances.sqrt(), dim=1)
        negative = queries @ F.normalize(normal(negatives, dimension), dim=1).T
        mean, variance = (queries * means).sum(dim=1), queries.square() @ variances
        similarities = mean[:, None] + variance.sqrt()[:, None] * normal(images, draws)
        total = torch.logsumexp(negative / t, dim=1)
        yield case, bound_row(similarities / t, total, scales, (mean / t, variance / t**2))


def gaussian_metrics(results: Sequence[tuple[GaussianCase, BoundRow]]) -> dict[str, float]:
    """One flat object, with the case in each name."""
    return {
        f"{name}_d{case.dimension}_spread{case.spread:g}_t{case.temperature:g}": value
        for case, row in results
        for name, value in row.metrics().items()
    }


@dataclass(frozen=True, eq=False)
class Normality:
    """Skewness, excess kurtosis (0 for a Gaussian) and p-value of n samples, each (n,)."""

    skewness: Tensor
    excess_kurtosis: Tensor
    p_value: Tensor

    def rejected(self) -> float:
        """The percentage of samples for which the test rejects normality at 5 %."""
        return 100 * float((self.p_value < 0.05).double().mean())


def normality(samples: Tensor) -> Normality:
    """Test each row of `samples` (n, m), with m of at least `MIN_SAMPLES`."""
    count = samples.shape[1]
    centered = samples.double() - samples.double().mean(dim=1, keepdim=True)
    second, third, fourth = (centered.pow(power).mean(dim=1) for power in (2, 3, 4))
    skewness, kurtosis = third / second**1.5, fourth / second**2
    statistic = _skewness_score(skewness, count).square() + _kurtosis_score(kurtosis, count).square()
    return Normality(skewness, kurtosis - 3, torch.exp(-statistic / 2))


def gaussian_reference(samples: int, values: int, seed: int) -> Normality:
    """The test on random Gaussian samples of this size."""
    generator = torch.Generator().manual_seed(seed)
    return normality(torch.randn(samples, values, dtype=torch.float64, generator=generator))


def _skewness_score(skewness: Tensor, n: int) -> Tensor:
    """D'Agostino's transform to a standard normal, by a Johnson SU curve."""
    scaled = skewness * math.sqrt((n + 1) * (n + 3) / (6 * (n - 2)))
    kurtosis = 3 * (n**2 + 27 * n - 70) * (n + 1) * (n + 3) / ((n - 2) * (n + 5) * (n + 7) * (n + 9))
    squared_width = math.sqrt(2 * (kurtosis - 1)) - 1
    return torch.asinh(scaled / math.sqrt(2 / (squared_width - 1))) / math.sqrt(0.5 * math.log(squared_width))


def _kurtosis_score(kurtosis: Tensor, n: int) -> Tensor:
    """Anscombe and Glynn's transform to a standard normal, by a cube root."""
    mean = 3 * (n - 1) / (n + 1)
    variance = 24 * n * (n - 2) * (n - 3) / ((n + 1) ** 2 * (n + 3) * (n + 5))
    skewness = 6 * (n**2 - 5 * n + 2) / ((n + 7) * (n + 9)) * math.sqrt(6 * (n + 3) * (n + 5) / (n * (n - 2) * (n - 3)))
    freedom = 6 + 8 / skewness * (2 / skewness + math.sqrt(1 + 4 / skewness**2))
    root = 1 + (kurtosis - mean) / math.sqrt(variance) * math.sqrt(2 / (freedom - 4))
    cube = torch.sign(root) * ((1 - 2 / freedom) / root.abs()) ** (1 / 3)
    return (1 - 2 / (9 * freedom) - cube) / math.sqrt(2 / (9 * freedom))


@dataclass(frozen=True, eq=False)
class StepBound:
    """The losses of a run's keys at one checkpoint, and the normality of q·k over the views of an image."""

    step: int
    row: BoundRow
    normality: Normality
    queue_filled: float  # fraction of the queue that holds keys, not random rows

    def metrics(self) -> dict[str, float]:
        return self.row.metrics() | {
            "skewness_median": float(self.normality.skewness.quantile(0.5)),
            "excess_kurtosis_median": float(self.normality.excess_kurtosis.quantile(0.5)),
            "rejected_percent": self.normality.rejected(),
            "queue_filled": self.queue_filled,
        }


@dataclass(frozen=True, eq=False)
class RunBounds:
    """A run's checkpoints, oldest first, and Gaussian samples of the same size for reference."""

    steps: Sequence[StepBound]
    reference: Normality
    temperature: float
    own_scale: float | None  # None if it is not known
    images: int
    keys: int

    def metrics(self) -> dict[str, Any]:
        """One flat object: the last checkpoint under plain names, every checkpoint under names with its step."""
        return {
            "images": self.images,
            "keys_per_image": self.keys,
            "temperature": self.temperature,
            "covariance_scale": self.own_scale,
            "gaussian_reference_rejected_percent": self.reference.rejected(),
            **self.steps[-1].metrics(),
            **{f"{name}_step{s.step}": value for s in self.steps for name, value in s.metrics().items()},
        }
