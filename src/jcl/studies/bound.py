"""How tight the paper's bound is: Eq. 4 by Monte Carlo, Jensen's bound Eq. 7 and the closed form Eq. 8.

With s = q·k/t for a positive key k, and A = log Σ_j exp(q·n_j/t) for the negatives:

    Eq. 4   E[log(exp(s) + exp(A))] - E[s]                     the loss with infinitely many keys
    Eq. 7   log(E[exp(s)] + exp(A)) - E[s]                     above it, since the logarithm is concave
    Eq. 8   log(exp(E[s] + L/2 var[s]) + exp(A)) - E[s]        equal to Eq. 7 for Gaussian keys and a scale L of 1

For Gaussian keys Eq. 4 <= Eq. 7 <= Eq. 8 at every L >= 1. A scale below 1 takes the proof away: Eq. 8 is then below
Eq. 7, and it may be below Eq. 4. For keys that are not Gaussian Eq. 7 still bounds Eq. 4, but Eq. 8 is a model of it.

Expectations are means over sampled keys, in float64, each with the error that the sample leaves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from jcl.errors import SettingsError

_CHUNK_VALUES = 4_000_000  # of drawn keys at a time


@dataclass(frozen=True, eq=False)
class Estimate:
    """A figure (n,) of n images, and the influence (n, m) of each of their m keys on it.

    Influences average to zero; their spread over √m is the standard error. Figures from the same keys are compared by
    the difference of their influences, in which what they have in common cancels.
    """

    value: Tensor
    influence: Tensor

    def knowing_mean(self, similarities: Tensor, mean: Tensor) -> Estimate:
        """The same figure, less what it owes to the chance by which these s (n, m) miss their known mean (n,)."""
        centred = similarities - similarities.mean(dim=1, keepdim=True)
        slope = (self.influence * centred).mean(dim=1) / centred.square().mean(dim=1)
        missed = similarities.mean(dim=1) - mean
        return Estimate(self.value - slope * missed, self.influence - slope[:, None] * centred)

    def error(self) -> Tensor:
        """The standard error of each image's figure, (n,)."""
        return self.influence.std(dim=1) / math.sqrt(self.influence.shape[1])

    def mean(self) -> float:
        """The mean over the images."""
        return float(self.value.mean())

    def mean_error(self) -> float:
        """The standard error of that mean, as far as it comes from the keys."""
        return float(self.error().square().sum().sqrt() / len(self.value))


def infinite_keys(similarities: Tensor, negative: Tensor) -> Estimate:
    """Eq. 4 from sampled s (n, m) and A (n,)."""
    losses = torch.logaddexp(similarities, negative[:, None]) - similarities
    value = losses.mean(dim=1)
    return Estimate(value, losses - value[:, None])


def jensen_bound(similarities: Tensor, negative: Tensor) -> Estimate:
    """Eq. 7 from sampled s (n, m) and A (n,); never below Eq. 4 of the same sample."""
    count = similarities.shape[1]
    mean = similarities.mean(dim=1)
    total = torch.logaddexp(torch.logsumexp(similarities, dim=1) - math.log(count), negative)
    shares = torch.exp(similarities - total[:, None])
    influence = shares - shares.mean(dim=1, keepdim=True) - (similarities - mean[:, None])
    return Estimate(total - mean, influence)


def closed_form(mean: Tensor, variance: Tensor, negative: Tensor, scale: float) -> Tensor:
    """Eq. 8 from the mean and variance of s and A, all (n,)."""
    return torch.logaddexp(mean + scale / 2 * variance, negative) - mean


def sampled_closed_form(similarities: Tensor, negative: Tensor, scale: float) -> Estimate:
    """Eq. 8 with the mean and the (biased) variance of sampled s (n, m), as in training."""
    mean = similarities.mean(dim=1)
    centred = similarities - mean[:, None]
    variance = centred.square().mean(dim=1)
    share = torch.sigmoid(mean + scale / 2 * variance - negative)[:, None]
    influence = share * (centred + scale / 2 * (centred.square() - variance[:, None])) - centred
    return Estimate(closed_form(mean, variance, negative, scale), influence)


@dataclass(frozen=True)
class GaussianCase:
    """Images whose keys are Gaussian by construction, and at which temperature their loss is taken.

    `spread` is the root of the trace of the keys' covariance, so that with a mean of length √(1 - spread²) keys have
    unit length on average. Variances fall off as 1, 1/2, 1/3, ... over the coordinates; directions are random.
    """

    dimension: int
    spread: float
    temperature: float

    def __post_init__(self) -> None:
        if self.dimension < 2:
            raise SettingsError(f"keys need at least two dimensions, but --dimensions has {self.dimension}.")
        if not 0 < self.spread < 1:
            raise SettingsError(f"the spread of unit keys lies between 0 and 1, but --spreads has {self.spread:g}.")
        if not 0 < self.temperature < math.inf:
            raise SettingsError(f"a temperature must be above 0, but --temperatures has {self.temperature:g}.")


@dataclass(frozen=True, eq=False)
class GaussianKeys:
    """n queries (n, d) with the mean (n, d) and the variances (d,) of their keys' coordinates, and negatives (K, d)."""

    queries: Tensor
    means: Tensor
    variances: Tensor
    negatives: Tensor
    generator: torch.Generator

    def similarities(self, draws: int) -> Tensor:
        """q·k for so many keys drawn for each image, (n, draws), a chunk of keys at a time."""
        images, width = self.queries.shape
        at_once = max(1, _CHUNK_VALUES // (images * width))
        parts = []
        for start in range(0, draws, at_once):
            shape = (images, min(at_once, draws - start), width)
            noise = torch.randn(shape, dtype=torch.float64, generator=self.generator)
            keys = self.means[:, None] + noise * self.variances.sqrt()
            parts.append(torch.einsum("nd,nmd->nm", self.queries, keys))
        return torch.cat(parts, dim=1)

    def exact_mean(self) -> Tensor:
        """q·mu, (n,)."""
        return (self.queries * self.means).sum(dim=1)

    def exact_variance(self) -> Tensor:
        """qᵀΣq, (n,)."""
        return self.queries.square() @ self.variances


def gaussian_keys(dimension: int, spread: float, *, images: int, negatives: int, seed: int) -> GaussianKeys:
    """Draw queries as further keys of their images, cut to unit length, and negatives as random unit rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    variances = 1 / torch.arange(1, dimension + 1, dtype=torch.float64)
    variances *= spread**2 / variances.sum()
    means = F.normalize(normal(images, dimension), dim=1) * math.sqrt(1 - spread**2)
    queries = F.normalize(means + normal(images, dimension) * variances.sqrt(), dim=1)
    return GaussianKeys(queries, means, variances, F.normalize(normal(negatives, dimension), dim=1), generator)


@dataclass(frozen=True)
class BoundRow:
    """The three losses, each a mean over the images; errors are standard errors from the sampled keys."""

    infinite: float
    infinite_error: float
    jensen: float
    jensen_error: float
    closed: dict[float, float]  # by the covariance scale
    deviation: float  # root mean variance of q·k/t: what the gap grows with

    def gap(self, scale: float) -> float:
        """How far Eq. 8 lies above Eq. 4."""
        return self.closed[scale] - self.infinite

    def figures(self) -> dict[str, float]:
        """By plain names."""
        return {
            "infinite_keys_loss": self.infinite,
            "infinite_keys_error": self.infinite_error,
            "jensen_loss": self.jensen,
            "jensen_error": self.jensen_error,
            **{f"closed_form_loss_scale{scale:g}": value for scale, value in self.closed.items()},
            "similarity_deviation": self.deviation,
        }


def gaussian_rows(
    cases: Sequence[GaussianCase], scales: Sequence[float], *, draws: int, images: int, negatives: int, seed: int
) -> Iterator[tuple[GaussianCase, BoundRow]]:
    """The losses of each case; cases that differ in the temperature alone share their keys."""
    keys: GaussianKeys | None = None
    drawn: tuple[int, float] | None = None
    similarities = torch.empty(0)
    for case in cases:
        if keys is None or drawn != (case.dimension, case.spread):
            drawn = (case.dimension, case.spread)
            keys = gaussian_keys(*drawn, images=images, negatives=negatives, seed=seed)
            similarities = keys.similarities(draws)
        yield case, _gaussian_row(keys, similarities / case.temperature, case.temperature, scales)


def gaussian_sweep(
    dimensions: Sequence[int], spreads: Sequence[float], temperatures: Sequence[float]
) -> list[GaussianCase]:
    """Every combination, those with the same keys side by side."""
    return [GaussianCase(*values) for values in itertools.product(dimensions, spreads, temperatures)]


def gaussian_figures(results: Sequence[tuple[GaussianCase, BoundRow]]) -> dict[str, float]:
    """All figures in one flat object, with the case in their names."""
    return {
        f"{name}_d{case.dimension}_spread{case.spread:g}_t{case.temperature:g}": value
        for case, row in results
        for name, value in row.figures().items()
    }


def _gaussian_row(keys: GaussianKeys, similarities: Tensor, temperature: float, scales: Sequence[float]) -> BoundRow:
    negative = torch.logsumexp(keys.queries @ keys.negatives.T / temperature, dim=1)
    mean, variance = keys.exact_mean() / temperature, keys.exact_variance() / temperature**2
    closed = {scale: float(closed_form(mean, variance, negative, scale).mean()) for scale in scales}
    infinite = infinite_keys(similarities, negative).knowing_mean(similarities, mean)
    jensen = jensen_bound(similarities, negative).knowing_mean(similarities, mean)
    return _row(infinite, jensen, closed, variance)


def sampled_row(similarities: Tensor, negative: Tensor, scales: Sequence[float]) -> BoundRow:
    """The losses of keys of any distribution, from s (n, m) and A (n,)."""
    closed = {scale: sampled_closed_form(similarities, negative, scale).mean() for scale in scales}
    variance = similarities.var(dim=1, correction=0)
    return _row(infinite_keys(similarities, negative), jensen_bound(similarities, negative), closed, variance)


def _row(infinite: Estimate, jensen: Estimate, closed: dict[float, float], variance: Tensor) -> BoundRow:
    return BoundRow(
        infinite=infinite.mean(),
        infinite_error=infinite.mean_error(),
        jensen=jensen.mean(),
        jensen_error=jensen.mean_error(),
        closed=closed,
        deviation=float(variance.mean().sqrt()),
    )
