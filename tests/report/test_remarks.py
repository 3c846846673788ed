"""Remarks name what is unusual about a run, and nothing else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jcl.evaluate.baselines import baseline_figures
from jcl.report.contents import RunContents
from jcl.report.remarks import remarks
from small_runs import tiny_settings


def run(**changes: Any) -> RunContents:
    """A finished run of eight lines without anything unusual, with these figures changed in all of them."""
    usual = {"loss": 1.0, "contrastive_accuracy": 80.0, "feature_std": 0.2, "queue_filled": 1.0}
    lines = [
        {"kind": "train", "step": step, "epoch": step / 2, "lr": 0.1 * (8 - step) / 8, **usual, **changes}
        for step in range(1, 9)
    ]
    return RunContents("run", Path("/runs/one"), tiny_settings("demo"), lines, {"steps": 8})


def said(contents: RunContents) -> list[str]:
    return [f"{kind}: {text}" for kind, text in remarks(contents)]


def test_nothing_unusual() -> None:
    assert said(run()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"feature_std": 0.02, "contrastive_accuracy": 20.0}, ("problem", "collapsed", "8%")),
        ({"feature_std": 0.02, "contrastive_accuracy": 97.0}, ("note", "standard deviation", "8%")),
        ({"feature_std": 0.08}, ("note", "standard deviation", "32%")),
        ({"contrastive_accuracy": 99.5}, ("note", "too easy", "99.5 %")),
        ({"loss": 3.6}, ("problem", "3.60", "uniform guess", "3.50")),
        ({"loss": None}, ("problem", "not finite", "--lr")),
        ({"skipped_steps": 1}, ("note", "1 step ", "not finite")),
        ({"skipped_steps": 3, "loss": None}, ("note", "3 steps")),
        ({"queue_filled": 0.5}, ("note", "50%", "method.queue_size")),
    ],
)
def test_each_has_its_remark(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    ((kind, text),) = remarks(run(**changes))
    assert kind == words[0] and all(word in text for word in words[1:])


def test_a_run_that_does_not_beat_its_untrained_network() -> None:
    summary = {"knn_top1": 24.0, "test_images": 50} | baseline_figures("knn_top1", 24.0, 50, 12.5, 28.0)
    (problem,) = said(replace(run(), summary=summary))
    assert problem.startswith("problem: ") and "24.0 %" in problem and "28.0 %" in problem
    assert said(replace(run(), summary=summary | {"beats_untrained": True})) == []


def test_a_run_that_is_below_its_untrained_network_so_far() -> None:
    def at(step: int, top1: float | None) -> dict[str, Any]:
        line = {"kind": "knn", "step": step, "epoch": step / 2, "chance_top1": 12.5, "test_images": 50}
        return line | {"knn_top1": top1}

    early = replace(run(), summary=None)
    problems = said(replace(early, metrics=[at(0, 28.0), *early.metrics, at(8, 24.0)]))
    assert "24.0 %" in problems[1] and "the untrained network (28.0 %)" in problems[1]
    for lines in ([at(0, 28.0)], [at(0, 28.0), at(8, 90.0)], [at(0, None), at(8, None)]):
        assert len(said(replace(early, metrics=[*early.metrics, *lines]))) == 1


def test_a_run_that_has_not_finished() -> None:
    early = replace(run(), summary=None, metrics=run().metrics[:3])
    (problem,) = said(early)
    assert problem.startswith("problem: ") and "epoch 1.5 of 3" in problem and "jcl resume /runs/one" in problem


def test_accuracy_that_was_lost_again() -> None:
    def with_knn(*values: float) -> RunContents:
        lines = [
            {"kind": "knn", "step": 4, "epoch": place + 1.0, "knn_top1": value} for place, value in enumerate(values)
        ]
        return replace(run(), metrics=[*run().metrics, *lines])

    (sentence,) = said(with_knn(40.0, 52.5, 47.0))
    assert all(part in sentence for part in ("note: ", "epoch 2 ", "52.5 %", "47.0 %"))
    assert said(with_knn(40.0, 52.5, 52.0)) == []


def test_images_that_were_left_out() -> None:
    (sentence,) = said(replace(run(), skipped={"a.png": "it is empty", "b.png": "it is empty"}))
    assert all(part in sentence for part in ("note: ", "2 unreadable images", "a.png (it is empty)", "skipped.txt"))
