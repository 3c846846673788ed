import itertools
import math

import pytest

from jcl.settings.schema import MethodSettings, TrainSettings
from jcl.train.schedule import covariance_scale, key_momentum, learning_rate


def rates(steps_per_epoch: int, **values) -> list[float]:
    train = TrainSettings(**{"lr": 2.0, "epochs": 10} | values)
    return [learning_rate(train, step, steps_per_epoch) for step in range(train.epochs * steps_per_epoch)]


def test_cosine_by_epoch_is_the_papers():
    found = rates(3)
    assert found == [2.0 * 0.5 * (1 + math.cos(math.pi * (step // 3) / 10)) for step in range(30)]
    assert found[0] == 2.0


def test_cosine_by_step_falls_every_step():
    found = rates(3, schedule_by="step")
    assert found == pytest.approx([1 + math.cos(math.pi * step / 30) for step in range(30)])
    assert all(later < earlier for earlier, later in itertools.pairwise(found))
    assert found[-1] > 0


def test_step_schedule_decays_at_its_milestones():
    found = rates(2, schedule="step", milestones=(6, 8), decay=0.1)
    assert found == pytest.approx([2.0] * 12 + [0.2] * 4 + [0.02] * 4)


def test_constant_is_constant():
    assert set(rates(4, schedule="constant")) == {2.0}


@pytest.mark.parametrize("warmup", [0.5, 1, 2.5])
def test_warm_up_rises_linearly_to_the_full_rate_and_never_starts_at_zero(warmup):
    steps_per_epoch = 4
    found = rates(steps_per_epoch, schedule="constant", warmup_epochs=warmup)
    rising = int(warmup * steps_per_epoch)
    assert found[:rising] == pytest.approx([2.0 * (step + 1) / rising for step in range(rising)])
    assert set(found[rising:]) == {2.0}


def test_warm_up_shorter_than_a_step_does_no_harm():
    assert rates(3, schedule="constant", warmup_epochs=0.01) == [2.0] * 30


def test_warm_up_joins_the_cosine_where_it_stands_by_then():
    found = rates(5, schedule_by="step", warmup_epochs=2)
    assert max(found) == pytest.approx(found[9]) == pytest.approx(2.0)
    assert found[10] == pytest.approx(1 + math.cos(math.pi * 2 / 10))


def test_covariance_scale_is_constant_or_ramps_to_its_full_value():
    constant = MethodSettings(covariance_scale=4.0)
    assert [covariance_scale(constant, epoch, 5) for epoch in range(5)] == [4.0] * 5
    ramped = MethodSettings(covariance_scale=2.0, covariance_schedule="linear")
    found = [covariance_scale(ramped, epoch, 5) for epoch in range(5)]
    assert found == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])  # L (e + 1) / E


def test_key_momentum_grows_to_one_by_a_cosine():
    constant = MethodSettings(key_momentum=0.9)
    assert key_momentum(constant, 3, 10) is None
    cosine = MethodSettings(key_momentum=0.9, key_momentum_schedule="cosine")
    found = [key_momentum(cosine, step, 10) for step in range(11)]
    assert found == pytest.approx([1 - 0.05 * (1 + math.cos(math.pi * step / 10)) for step in range(11)])
    assert found[0] == pytest.approx(0.9) and found[10] == 1.0
