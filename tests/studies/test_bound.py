"""Eq. 4, Jensen's bound and Eq. 8: against quadrature and plain loops, in the order the paper proves, with errors."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

import jcl
from jcl.studies.bound import (
    GaussianCase,
    attraction,
    bound_row,
    closed_form,
    gaussian_metrics,
    gaussian_reference,
    gaussian_rows,
    infinite_keys,
    jensen_bound,
    normality,
)

NODES = np.polynomial.hermite_e.hermegauss(120)


def integral(mean: float, variance: float, negative: float) -> float:
    """Eq. 4 for Gaussian s by Gauss-Hermite quadrature."""
    nodes, weights = NODES
    values = mean + math.sqrt(variance) * nodes
    return float((weights * (np.logaddexp(values, negative) - values)).sum() / math.sqrt(2 * math.pi))


def random_cases(count: int) -> list[tuple[float, float, float]]:
    """Mean and variance of s, and A: from easy images to hopeless ones."""
    draw = np.random.default_rng(0).uniform
    return [(float(draw(-2, 9)), float(draw(0.01, 1.5)), float(draw(-3, 12))) for _ in range(count)]


def test_order_holds_over_many_gaussian_cases() -> None:
    """Eq. 4 <= Eq. 7 = Eq. 8 at scale 1 <= Eq. 8 beyond, all exact figures; the samples agree within their errors."""
    cases = random_cases(100)
    mean, variance, negative = (torch.tensor(column, dtype=torch.float64) for column in zip(*cases, strict=True))
    noise = torch.randn(100, 2_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sample = mean[:, None] + variance.sqrt()[:, None] * noise
    exact = torch.tensor([integral(*case) for case in cases], dtype=torch.float64)
    bounds = [closed_form(mean, variance, negative, scale) for scale in (1.0, 2.0, 4.0)]
    assert (exact < bounds[0]).all() and (bounds[0] < bounds[1]).all() and (bounds[1] < bounds[2]).all()
    infinite, jensen = infinite_keys(sample, negative), jensen_bound(sample, negative)
    assert (infinite.value <= jensen.value).all()  # of the same sample without any error
    for estimate, truth in ((infinite, exact), (jensen, bounds[0])):
        scores = (estimate.value - truth) / estimate.error()
        # Of 100 standard normal scores the largest is hardly above 4, and their spread is 1 within a fifth.
        assert scores.abs().max() < 4.5
        assert 0.8 < float(scores.std()) < 1.2


def test_control_variate_reduces_the_error_without_bias() -> None:
    cases = random_cases(100)
    mean, variance, negative = (torch.tensor(column, dtype=torch.float64) for column in zip(*cases, strict=True))
    noise = torch.randn(100, 2_000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sample = mean[:, None] + variance.sqrt()[:, None] * noise
    exact = torch.tensor([integral(*case) for case in cases], dtype=torch.float64)
    plain = infinite_keys(sample, negative)
    better = plain.control_mean(sample, mean)
    assert (better.error() <= plain.error()).all() and float((better.error() / plain.error()).median()) < 0.5
    scores = (better.value - exact) / better.error()
    assert scores.abs().max() < 4.5 and 0.8 < float(scores.std()) < 1.25


def test_a_scale_below_one_is_no_bound() -> None:
    """Without the variance term Eq. 8 lies under what it should bound."""
    mean, variance, negative = 4.0, 1.0, 4.0
    values = [torch.tensor([value], dtype=torch.float64) for value in (mean, variance, negative)]
    assert float(closed_form(*values, 0.0)) < integral(mean, variance, negative) < float(closed_form(*values, 1.0))


def test_closed_form_is_the_loss_of_the_package() -> None:
    generator = torch.Generator().manual_seed(3)
    query, keys, negatives = (
        torch.nn.functional.normalize(torch.randn(*shape, dtype=torch.float64, generator=generator), dim=-1)
        for shape in ((6, 8), (6, 5, 8), (30, 8))
    )
    for temperature, scale in ((0.2, 4.0), (0.1, 1.0), (0.5, 0.3)):
        similarities = torch.einsum("nd,nmd->nm", query, keys) / temperature
        negative = torch.logsumexp(query @ negatives.T / temperature, dim=1)
        options = {"temperature": temperature, "reduction": "none"}
        loss = jcl.joint_contrastive_loss(query, keys, negatives, covariance_scale=scale, **options)
        mean, variance = similarities.mean(dim=1), similarities.var(dim=1, correction=0)
        assert closed_form(mean, variance, negative, scale).tolist() == pytest.approx(loss.tolist())
        row = bound_row(similarities, negative, [scale])
        assert row.closed[scale] == pytest.approx(float(loss.mean()))
        vanilla = jcl.multi_key_loss(query, keys, negatives, **options)
        assert infinite_keys(similarities, negative).value.tolist() == pytest.approx(vanilla.tolist())


def test_estimates_equal_plain_loops() -> None:
    sample, negative = torch.tensor([[1.0, 2.0, 0.5], [3.0, 1.0, 1.0]]).double(), torch.tensor([0.7, 2.0]).double()
    for row, own in enumerate(sample.tolist()):
        mass, mean = math.exp(float(negative[row])), sum(own) / 3
        losses = [-math.log(math.exp(s) / (math.exp(s) + mass)) for s in own]
        jensen = math.log(sum(math.exp(s) for s in own) / 3 + mass) - mean
        assert float(infinite_keys(sample, negative).value[row]) == pytest.approx(sum(losses) / 3)
        assert float(jensen_bound(sample, negative).value[row]) == pytest.approx(jensen)


@pytest.mark.parametrize("figure", ["infinite", "jensen"])
def test_influences_are_what_a_key_contributes(figure: str) -> None:
    """Giving one key a little more weight moves the figure by its influence: errors follow from that."""
    generator = torch.Generator().manual_seed(4)
    sample = torch.randn(1, 400, dtype=torch.float64, generator=generator) * 0.7 + 1
    negative = torch.tensor([1.2], dtype=torch.float64)
    estimate = {
        "infinite": lambda s: infinite_keys(s, negative),
        "jensen": lambda s: jensen_bound(s, negative),
    }[figure]
    whole = estimate(sample)
    assert float(whole.influence.mean()) == pytest.approx(0, abs=1e-12)
    for key in (0, 7, 211):
        with_twice = estimate(torch.cat([sample, sample[:, key : key + 1]], dim=1))
        assert float(401 * (with_twice.value - whole.value)) == pytest.approx(float(whole.influence[0, key]), rel=0.02)


def test_large_exponents_do_not_overflow() -> None:
    sample, negative = torch.tensor([[900.0, 1000.0], [-900.0, -1000.0]]).double(), torch.tensor([950.0, 0.0]).double()
    row = bound_row(sample, negative, [1.0])
    assert all(math.isfinite(value) for value in row.metrics().values())


def test_gaussian_keys_equal_keys_drawn_in_all_dimensions() -> None:
    case, images, draws = GaussianCase(16, 0.5, 0.2), 4, 40_000
    ((_, row),) = gaussian_rows([case], [1.0], draws=draws, images=images, negatives=50, seed=0)
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(count, 16, dtype=torch.float64, generator=generator) for count in (images, images, 50)]
    variances = 1 / torch.arange(1, 17).double()
    variances *= 0.5**2 / variances.sum()
    means = torch.nn.functional.normalize(noise[0], dim=1) * 0.75**0.5
    assert float(means[0].square().sum() + variances.sum()) == pytest.approx(1.0)
    queries = torch.nn.functional.normalize(means + noise[1] * variances.sqrt(), dim=1)
    negative = (queries @ torch.nn.functional.normalize(noise[2], dim=1).T / 0.2).logsumexp(dim=1)
    keys = means[:, None] + torch.randn(images, draws, 16, dtype=torch.float64, generator=generator) * variances.sqrt()
    sampled = bound_row(torch.einsum("nd,nmd->nm", queries, keys) / 0.2, negative, [1.0])
    assert abs(row.infinite - sampled.infinite) < 4 * (row.infinite_error + sampled.infinite_error)
    assert row.deviation == pytest.approx(sampled.deviation, rel=0.02)
    assert row.closed[1.0] == pytest.approx(sampled.closed[1.0], rel=0.02)


def test_a_sweep_keeps_the_order_and_shares_keys() -> None:
    cases = [GaussianCase(*values) for values in itertools.product([4, 16], [0.2, 0.5], [0.1, 0.3])]
    results = list(gaussian_rows(cases, [1.0, 4.0], draws=4000, images=4, negatives=64, seed=0))
    assert [case for case, _ in results] == cases and len(cases) == 8
    for _, row in results:
        assert row.infinite <= row.closed[1.0] + 4 * row.infinite_error
        assert abs(row.jensen - row.closed[1.0]) <= 5 * row.jensen_error
        assert row.closed[1.0] <= row.closed[4.0]
    _, alone = next(gaussian_rows(cases[3:4], [1.0], draws=4000, images=4, negatives=64, seed=0))
    assert alone.infinite == pytest.approx(results[3][1].infinite, rel=1e-12)
    figures = gaussian_metrics(results)
    assert figures["closed_form_loss_scale4_d16_spread0.5_t0.1"] == results[6][1].closed[4.0]


@pytest.mark.parametrize("count", [20, 57, 1000])
def test_normality_equals_scipy(count: int) -> None:
    draw = np.random.default_rng(count)
    samples = np.stack([draw.normal(3, 2, count), draw.exponential(1, count), draw.uniform(0, 1, count)])
    found = normality(torch.from_numpy(samples))
    assert found.p_value.tolist() == pytest.approx(stats.normaltest(samples, axis=1).pvalue.tolist(), rel=1e-9)
    assert found.skewness.tolist() == pytest.approx(stats.skew(samples, axis=1).tolist())
    assert found.excess_kurtosis.tolist() == pytest.approx(stats.kurtosis(samples, axis=1).tolist())


def test_gaussian_samples_are_rejected_as_often_as_the_level_says() -> None:
    reference = gaussian_reference(4000, 64, seed=0)
    for level, least, most in ((0.05, 4, 7), (0.2, 17, 23)):  # in percent; the test is a little too strict at 5 %
        assert least < 100 * float((reference.p_value < level).double().mean()) < most
    assert abs(float(reference.skewness.median())) < 0.02
    assert torch.equal(reference.p_value, gaussian_reference(4000, 64, seed=0).p_value)


def test_other_samples_are_found_out() -> None:
    skewed = torch.distributions.Exponential(1.0).sample((300, 100))
    assert normality(skewed).rejected() == 100


def test_attraction_counts_the_weights_of_plain_loops() -> None:
    draw = torch.Generator().manual_seed(0)
    similarities = 3 + torch.randn(7, 30, generator=draw, dtype=torch.float64)
    negative = torch.linspace(1, 6, 7, dtype=torch.float64)
    for scale in (0.0, 1.0, 6.0):
        shares, parts, repelled = [], [], 0
        for own, a in zip(similarities.tolist(), negative.tolist(), strict=True):
            mean, variance = float(np.mean(own)), float(np.var(own))
            positive = math.exp(mean + scale / 2 * variance)
            p = positive / (positive + math.exp(a))
            shares.append(p)
            parts.append(p * scale * math.sqrt(variance))
            repelled += sum(1 - p < p * scale * (s - mean) for s in own)
        found = attraction(similarities, negative, scale)
        assert found == pytest.approx(
            (np.mean(shares), sum(parts) / (7 - sum(shares)), repelled / similarities.numel())
        )
        assert (found.repelled_keys > 0) == (scale > 0)
