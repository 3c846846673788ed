"""How Gaussian samples are: skewness, excess kurtosis, and the test of D'Agostino and Pearson.

The test turns skewness (D'Agostino 1970) and kurtosis (Anscombe and Glynn 1983) into two figures that are standard
normal for Gaussian samples of the same size; the sum of their squares is chi-squared with two degrees of freedom,
whose tail is exp(-x/2). Everything is for n samples at once, one a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_VALUES = 20
"""Below so many values a sample's kurtosis is too far from normal for the test to hold."""


@dataclass(frozen=True, eq=False)
class Normality:
    """Of n samples, all (n,): skewness and excess kurtosis (0 for a Gaussian), and the test's p-value."""

    skewness: Tensor
    excess_kurtosis: Tensor
    p_value: Tensor

    def rejected(self, level: float = 0.05) -> float:
        """The share of the samples in percent that are not Gaussian by the test; `level` of truly Gaussian ones are."""
        return 100 * float((self.p_value < level).double().mean())


def normality(samples: Tensor) -> Normality:
    """Test each row of `samples` (n, m)."""
    count = samples.shape[1]
    if count < LEAST_VALUES:
        raise ValueError(f"a test of normality needs at least {LEAST_VALUES} values, but got {count}.")
    centred = samples.double() - samples.double().mean(dim=1, keepdim=True)
    second, third, fourth = (centred.pow(power).mean(dim=1) for power in (2, 3, 4))
    skewness, kurtosis = third / second**1.5, fourth / second**2
    statistic = _skewness_score(skewness, count).square() + _kurtosis_score(kurtosis, count).square()
    return Normality(skewness, kurtosis - 3, torch.exp(-statistic / 2))


def gaussian_reference(samples: int, values: int, seed: int) -> Normality:
    """What truly Gaussian samples of this size give, drawn by the seed."""
    generator = torch.Generator().manual_seed(seed)
    return normality(torch.randn(samples, values, dtype=torch.float64, generator=generator))


def _skewness_score(skewness: Tensor, n: int) -> Tensor:
    """D'Agostino's transform by a Johnson SU curve, whose kurtosis is that of the skewness of Gaussian samples."""
    scaled = skewness * math.sqrt((n + 1) * (n + 3) / (6 * (n - 2)))
    kurtosis = 3 * (n**2 + 27 * n - 70) * (n + 1) * (n + 3) / ((n - 2) * (n + 5) * (n + 7) * (n + 9))
    squared_width = math.sqrt(2 * (kurtosis - 1)) - 1
    return torch.asinh(scaled / math.sqrt(2 / (squared_width - 1))) / math.sqrt(0.5 * math.log(squared_width))


def _kurtosis_score(kurtosis: Tensor, n: int) -> Tensor:
    """Anscombe and Glynn's transform by a cube root, matched to the skewness of the kurtosis of Gaussian samples."""
    mean = 3 * (n - 1) / (n + 1)
    variance = 24 * n * (n - 2) * (n - 3) / ((n + 1) ** 2 * (n + 3) * (n + 5))
    skewness = 6 * (n**2 - 5 * n + 2) / ((n + 7) * (n + 9)) * math.sqrt(6 * (n + 3) * (n + 5) / (n * (n - 2) * (n - 3)))
    freedom = 6 + 8 / skewness * (2 / skewness + math.sqrt(1 + 4 / skewness**2))
    root = 1 + (kurtosis - mean) / math.sqrt(variance) * math.sqrt(2 / (freedom - 4))
    cube = torch.sign(root) * ((1 - 2 / freedom) / root.abs()) ** (1 / 3)
    return (1 - 2 / (9 * freedom) - cube) / math.sqrt(2 / (9 * freedom))
