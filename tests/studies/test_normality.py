"""The test of normality: equal to SciPy's, fair to Gaussian samples and hard on others."""

import numpy as np
import pytest
import torch
from scipy import stats

from jcl.studies.normality import gaussian_reference, normality


@pytest.mark.parametrize("count", [20, 57, 1000])
def test_equals_scipy(count: int) -> None:
    draw = np.random.default_rng(count)
    samples = np.stack([draw.normal(3, 2, count), draw.exponential(1, count), draw.uniform(0, 1, count)])
    found = normality(torch.from_numpy(samples))
    assert found.p_value.tolist() == pytest.approx(stats.normaltest(samples, axis=1).pvalue.tolist(), rel=1e-9)
    assert found.skewness.tolist() == pytest.approx(stats.skew(samples, axis=1).tolist())
    assert found.excess_kurtosis.tolist() == pytest.approx(stats.kurtosis(samples, axis=1).tolist())


def test_gaussian_samples_are_rejected_as_often_as_the_level_says() -> None:
    reference = gaussian_reference(4000, 64, seed=0)
    for level, least, most in ((0.05, 4, 7), (0.2, 17, 23)):  # in percent; the test is a little too strict at 5 %
        assert least < reference.rejected(level) < most
    assert abs(float(reference.skewness.median())) < 0.02
    assert torch.equal(reference.p_value, gaussian_reference(4000, 64, seed=0).p_value)


def test_other_samples_are_found_out() -> None:
    skewed = torch.distributions.Exponential(1.0).sample((300, 100))
    assert normality(skewed).rejected() == 100


def test_few_values_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 20"):
        normality(torch.zeros(3, 19))
