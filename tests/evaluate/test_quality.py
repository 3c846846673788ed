"""RankMe, alpha-ReQ and LiDAR against their definitions, and what they must not depend on."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.linalg import sqrtm

from jcl.evaluate.quality import Quality, QualityFeatures, alpha_req, lidar, rank_correlation, rankme


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def rotation(width: int) -> torch.Tensor:
    return torch.linalg.qr(drawn(width, width, seed=9))[0]


def with_decay(images: int, width: int, exponent: float) -> torch.Tensor:
    """Centered features whose covariance has the eigenvalues 1, 2^-a, 3^-a, ..."""
    rows = drawn(images, width)
    directions = torch.linalg.qr(rows - rows.mean(0))[0]
    return directions * torch.arange(1, width + 1).double() ** (-exponent / 2)


def entropy_rank(values: np.ndarray) -> float:
    shares = values / values.sum() + 1e-7
    return math.exp(-sum(share * math.log(share) for share in shares))


@pytest.mark.parametrize("shape", [(60, 24), (24, 60)])
def test_rankme_is_the_entropy_of_the_singular_values(shape):
    features = drawn(*shape) + 2
    wanted = entropy_rank(np.linalg.svd(features.numpy(), compute_uv=False))
    assert rankme(features) == pytest.approx(wanted, rel=1e-6)


def test_rankme_of_known_ranks():
    equal = torch.eye(8, dtype=torch.float64).repeat(5, 1)
    assert rankme(equal) == pytest.approx(8, rel=1e-4)
    assert rankme(torch.ones(40, 8, dtype=torch.float64)) == pytest.approx(1, abs=1e-4)  # collapsed
    assert rankme(torch.zeros(40, 8, dtype=torch.float64)) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_alpha_req_is_the_exponent_of_the_decay(exponent):
    assert alpha_req(with_decay(200, 120, exponent) + 3) == pytest.approx(exponent, rel=1e-9)


def test_alpha_req_is_a_weighted_fit_of_the_6th_to_100th_eigenvalue():
    features = drawn(300, 150) @ drawn(150, 150, seed=1)
    values = np.linalg.eigvalsh(np.cov(features.numpy().T))[::-1][5:100]
    ranks = np.arange(6, 101)
    slope = np.polyfit(np.log(ranks), np.log(values), 1, w=1 / np.sqrt(ranks))[0]  # weights of the residuals
    assert alpha_req(features) == pytest.approx(-slope, rel=1e-9)
    assert math.isnan(alpha_req(drawn(40, 6)))


@pytest.mark.parametrize("shape", [(50, 3, 12), (10, 6, 24)])
def test_lidar_is_the_rank_of_the_discriminants(shape):
    views = (drawn(shape[0], 1, shape[2], seed=3) + 0.5 * drawn(*shape)) @ drawn(shape[2], shape[2], seed=4)
    rows = views.numpy()
    means = rows.mean(axis=1)
    within = sum(np.outer(view - mean, view - mean) for image, mean in zip(rows, means, strict=True) for view in image)
    within = within / (shape[0] * shape[1]) + 1e-4 * np.eye(shape[2])
    between = sum(np.outer(mean - means.mean(0), mean - means.mean(0)) for mean in means) / shape[0]
    root = np.linalg.inv(sqrtm(within))
    values = np.linalg.eigvalsh(root @ between @ root).clip(0)
    assert lidar(views) == pytest.approx(entropy_rank(values), rel=1e-6)


def test_what_the_measures_do_not_depend_on():
    features = drawn(80, 5, 30) @ drawn(30, 30, seed=5) + 4 * drawn(80, 1, 30, seed=6)
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    whole = QualityFeatures(features[:, 0], features[:, 1:]).measure()
    for changed in (features[order], features @ rotation(30)):
        assert QualityFeatures(changed[:, 0], changed[:, 1:]).measure() == pytest.approx(whole, rel=1e-8)
    scaled = 1000 * features
    assert rankme(scaled[:, 0]) == pytest.approx(whole.rankme, rel=1e-8)
    assert alpha_req(scaled[:, 0] - 7) == pytest.approx(whole.alpha_req, rel=1e-8)
    assert lidar(features[:, 1:] + 7) == pytest.approx(whole.lidar, rel=1e-8)
    linear = drawn(30, 30, seed=8)
    assert lidar(1000 * features[:, 1:] @ linear) == pytest.approx(lidar(1000 * features[:, 1:]), rel=1e-3)


def test_random_halves_are_the_same_for_every_network():
    features = drawn(60, 5, 16)
    found = QualityFeatures(features[:, 0], features[:, 1:])
    again = QualityFeatures(features[:, 0] @ rotation(16), features[:, 1:])
    whole = found.measure()
    first, second = found.resample(whole, 8), again.resample(whole, 8)
    assert [one.rankme for one in first] == pytest.approx([one.rankme for one in second], rel=1e-8)
    assert len({round(one.rankme, 6) for one in first}) == 8
    assert sum(one.rankme for one in first) / 8 == pytest.approx(whole.rankme)  # not that of half as many images


def test_unusable_features_give_nan():
    broken = drawn(10, 5, 8)
    broken[3, 2, 1] = math.inf
    found = QualityFeatures(broken[:, 0], broken[:, 1:])
    assert all(map(math.isnan, (*found.measure(), *found.resample(found.measure(), 1)[0])))


def test_scores_prefer_alpha_near_one():
    assert Quality(3, 0.9, 2).score("alpha_req") > Quality(3, 1.3, 2).score("alpha_req")
    assert Quality(3, 0.9, 2).score("rankme") == 3


def test_rank_correlation():
    first, second = [0.1, 0.4, 0.4, 2.0, 1.0], [3, 1, 4, 1, 5]
    assert rank_correlation(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)
    assert rank_correlation(range(8), range(8)) == pytest.approx(1, abs=1e-12)
    assert math.isnan(rank_correlation([1, 2, 3], [5, 5, 5]))


def test_lidar_of_large_features_of_low_rank_is_finite():
    views = torch.randn(16, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wide = (views @ torch.ones(3, 64, dtype=torch.float64).triu()) * 1e8
    assert 1 <= lidar(wide) <= 64
