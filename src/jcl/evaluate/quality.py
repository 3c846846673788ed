"""Quality of features without labels: RankMe, alpha-ReQ and LiDAR.

All three summarize a spectrum of the features of the same images. RankMe and LiDAR are effective ranks,

    exp(-Σ p_i log p_i),   p_i = s_i / Σ s_j + 1e-7,

of different spectra s, so they lie between 1 (collapsed) and the number of images or coordinates; higher is better.
alpha-ReQ is the exponent of a power law, and best near 1. Values are comparable only on the same images and views.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from jcl.random import IMAGE_CHOICE, permutation

RESAMPLES: Final = 100
_EPSILON: Final = 1e-7
_WITHIN: Final = 1e-4  # added to the variance of an image's views, as in the LiDAR paper
_FITTED: Final = slice(5, 100)  # eigenvalues that alpha-ReQ is fitted to, as in its authors' code


class Quality(NamedTuple):
    """The three measures; NaN where they cannot be computed."""

    rankme: float
    alpha_req: float
    lidar: float

    def score(self, measure: str) -> float:
        """A measure, as a number that is higher for the better features."""
        return -abs(self.alpha_req - 1) if measure == "alpha_req" else float(getattr(self, measure))


def rankme(features: Tensor) -> float:
    """The effective rank of features (n, d), from their singular values (Garrido et al. 2023)."""
    return _effective_rank(_spectrum(features).sqrt())


def alpha_req(features: Tensor) -> float:
    """The exponent a of the decay i^-a of the eigenvalues of the covariance of features (Agrawal et al. 2022).

    Fitted to the logarithms of the 6th to 100th eigenvalue, weighted by 1/i; NaN if there are fewer than two of them.
    """
    values = _spectrum(features - features.mean(dim=0))
    values = values[values > 1e-10 * values[0]]
    ranks = torch.arange(1, len(values) + 1, dtype=values.dtype, device=values.device)[_FITTED]
    if len(ranks) < 2:
        return float("nan")
    x, y, weights = ranks.log(), values[_FITTED].log(), 1 / ranks / (1 / ranks).sum()
    x = x - (weights * x).sum()
    return -float((weights * x * y).sum() / (weights * x * x).sum())


def lidar(views: Tensor) -> float:
    """The effective rank of linear discriminant analysis with images as classes (Thilak et al. 2024).

    `views` (n, v, d) are the features of v views of each image. The spectrum is that of
    S_w^-1/2 S_b S_w^-1/2, with the covariance S_b of the images' means and S_w of the views around them, plus 1e-4 I.
    """
    return _lidar_of(_whitened_means(views))


def _whitened_means(views: Tensor) -> Tensor:
    """The images' mean features (n, d), in coordinates where the views of an image have unit covariance."""
    means = views.mean(dim=1)
    around = (views - means[:, None]).flatten(0, 1)
    within = around.T @ around / len(around)
    added = _WITHIN + 1e-9 * within.diagonal().mean()  # the second is for large features, which rounding makes singular
    within += added * torch.eye(len(within)).to(views)
    whitened: Tensor = torch.linalg.solve_triangular(torch.linalg.cholesky(within), means.T, upper=False)
    return whitened.T


def _lidar_of(whitened: Tensor) -> float:
    values = _spectrum(whitened - whitened.mean(dim=0))
    return _effective_rank(F.pad(values, (0, whitened.shape[1] - len(values))))


def _spectrum(rows: Tensor) -> Tensor:
    """The squared singular values of a matrix, largest first."""
    values: Tensor = torch.linalg.eigvalsh(rows @ rows.T if len(rows) < rows.shape[1] else rows.T @ rows)
    return values.clamp_min(0).flip(0)


def _effective_rank(values: Tensor) -> float:
    shares = values / values.sum().clamp_min(torch.finfo(values.dtype).tiny) + _EPSILON
    return float((-shares * shares.log()).sum().exp())


@dataclass(frozen=True, eq=False)
class QualityFeatures:
    """Features of the same images: of center crops (n, d) and of views (n, v, d), in float64."""

    crops: Tensor
    views: Tensor

    def measure(self) -> Quality:
        if not (self.crops.isfinite().all() and self.views.isfinite().all()):
            return Quality(*[float("nan")] * 3)
        return Quality(rankme(self.crops), alpha_req(self.crops), lidar(self.views))

    def resample(self, whole: Quality, count: int = RESAMPLES) -> list[Quality]:
        """Measure random halves of the images, the same for all networks, to see how much the choice of images matters.

        Halves vary as much as the whole does from sample to sample (delete-half jackknife); a bootstrap would repeat
        images, which lowers the ranks. The values are shifted to the mean `whole`, because ranks depend on the number
        of images. All share the covariance of the views.
        """
        if math.isnan(whole.rankme):
            return [whole] * count
        whitened, found = _whitened_means(self.views), []
        for number in range(count):
            rows = permutation(number, IMAGE_CHOICE, 1, len(self.crops), whitened.device)[: len(self.crops) // 2]
            crops = self.crops[rows]
            found.append((rankme(crops), alpha_req(crops), _lidar_of(whitened[rows])))
        halves = torch.tensor(found, dtype=torch.float64)
        return [Quality(*row) for row in (halves - halves.mean(dim=0) + torch.tensor(whole)).tolist()]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation of finite numbers; NaN if all numbers on one side are equal."""

    def ranks(numbers: Sequence[float]) -> Tensor:
        values = torch.tensor(numbers, dtype=torch.float64)
        return (values[:, None] > values).sum(dim=1) + 0.5 * (values[:, None] == values).sum(dim=1)

    return float(torch.corrcoef(torch.stack([ranks(first), ranks(second)]).double())[0, 1])
