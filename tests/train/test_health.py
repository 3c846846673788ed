import math

import pytest

from jcl.train.display import health, uniform_guess_loss

GOOD = {"queue_filled": 1.0, "loss": 4.0, "feature_std": 0.08, "contrastive_accuracy": 62.4}


def line(**changes) -> str:
    return health(GOOD | changes, queue_size=1023, embedding_dim=128)


def test_a_healthy_run():
    assert line() == (
        "loss 4.00, below a uniform guess (6.93); features well spread (91%); "
        "62 % of queries find their own image first"
    )


def test_a_uniform_guess_costs_log_of_k_plus_1():
    assert uniform_guess_loss(1023) == pytest.approx(math.log(1024))
    assert "above a uniform guess (6.93)" in line(loss=7.0)


def test_a_queue_that_is_still_filling_is_said():
    assert "queue still filling (25% real keys" in line(queue_filled=0.25)
    assert "queue" not in line(queue_filled=1.0)


@pytest.mark.parametrize(
    ("share", "said"), [(0.02, "COLLAPSED"), (0.3, "watch for collapse"), (0.5, "well spread"), (1.0, "well spread")]
)
def test_spread_is_judged_against_evenly_spread_rows(share, said):
    assert said in line(feature_std=share / math.sqrt(128))


def test_a_loss_that_is_not_finite_and_one_that_is_not_known_yet_are_different_things():
    assert "the loss is not finite" in line(loss=None)
    before_the_first_line = health({"knn_top1": 12.0}, queue_size=10, embedding_dim=8)
    assert before_the_first_line == ""


def test_skipped_steps_are_said():
    assert line(skipped_steps=3).endswith("; 3 steps skipped so far because the loss was not finite")
    assert "1 step skipped" in line(skipped_steps=1) and "skipped" not in line(skipped_steps=0)
