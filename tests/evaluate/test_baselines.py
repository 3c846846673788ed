"""Uncertainty of accuracies, and when one beats another."""

import math

import pytest

from jcl.evaluate.baselines import Estimate, baseline_figures, baseline_warning, clearly_best, estimate


@pytest.mark.parametrize(("accuracy", "images"), [(50.0, 10), (0.0, 20), (100.0, 20), (89.0, 10_000)])
def test_the_ends_of_an_interval_are_196_standard_errors_from_the_accuracy(accuracy, images):
    """Wilson's definition: the error is that of the end, not that of the accuracy."""
    ends = estimate(accuracy, images)[1:3]
    for end in ends:
        error = math.sqrt(end * (100 - end) / images)
        assert abs(end - accuracy) == pytest.approx(1.96 * error, abs=1e-3)
    assert ends[0] < ends[1] and estimate(50.0, 10) == pytest.approx((50.0, 23.66, 76.34, 10), abs=0.01)


def test_exact_values_and_damaged_ones_have_no_interval():
    assert estimate(12.5) == estimate(12.5, -3) == (12.5, 12.5, 12.5, 0)
    assert estimate(1e9, 10).high == pytest.approx(100)


def test_a_few_points_on_few_images_beat_nothing():
    figures = {"knn_top1": 24.0, "test_images": 50} | baseline_figures("knn_top1", 24.0, 50, 12.5, 28.0)
    assert (figures["beats_chance"], figures["beats_untrained"]) == (True, False)
    warning = baseline_warning("knn_top1", figures)
    assert warning is not None and "28.0 %" in warning and "12.5" not in warning and "14.3 to 37.4 %" in warning
    assert "on 50 test images" in warning
    assert "on 50 held-out images" in (baseline_warning("knn_top1", figures | {"test_held_out": True}) or "")
    few = {"knn_top1": 24.0, "test_images": 20} | baseline_figures("knn_top1", 24.0, 20, 12.5)
    assert few["beats_chance"] is False and "untrained_knn_top1" not in few
    many = {"knn_top1": 32.0, "test_images": 5000} | baseline_figures("knn_top1", 32.0, 5000, 12.5, 28.0)
    assert many["beats_untrained"] is True and baseline_warning("knn_top1", many) is None


def test_the_best_must_beat_all_others():
    assert clearly_best([estimate(80, 100), estimate(60, 100), None]) == 0
    assert clearly_best([estimate(80, 100), estimate(60, 100), estimate(79, 100)]) is None
    assert clearly_best([estimate(5), estimate(5), estimate(4)]) is None, "a tie"
    assert clearly_best([estimate(4), estimate(5)]) == 1
    assert clearly_best([estimate(80, 100), None]) is clearly_best([]) is None
    assert Estimate(5, 4, 6).beats(estimate(3.9)) and not Estimate(5, 4, 6).beats(estimate(4.1))
    assert not Estimate(5, 4, 6).beats(Estimate(3.5, 2, 5)), "the interval of the other counts too"


def test_a_fall_below_the_weights_at_the_start_is_told():
    for accuracy, fell in ((40.0, True), (61.0, False), (90.0, None)):
        figures = baseline_figures("knn_top1", accuracy, 1000, 10.0, start=60.0) | {
            "knn_top1": accuracy,
            "test_images": 1000,
        }
        assert figures["start_knn_top1"] == 60.0 and figures["beats_start"] == (fell is None)
        warning = baseline_warning("knn_top1", figures, "Train longer.")
        assert (warning is None) == (fell is None)
        if warning is not None:
            assert f"{accuracy:.1f} %" in warning and "60.0 %" in warning and "1,000 test images" in warning
            assert ("keep the weights" in warning) == fell != ("Train longer." in warning)
