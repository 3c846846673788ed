"""What is unusual about a run is said in words, and what is usual is not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
    return [f"{remark.kind}: {remark.text}" for remark in remarks(contents)]


def test_nothing_unusual() -> None:
    assert said(run()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"feature_std": 0.02}, "problem: The features have collapsed: they use 8% of the spread"),
        ({"feature_std": 0.08}, "note: The features are spread narrowly (32%"),
        ({"contrastive_accuracy": 99.5}, "note: The task has become too easy"),
        ({"loss": 3.6}, "problem: The loss is 3.60, no better than a uniform guess (3.50)"),
        ({"loss": None}, "problem: The loss was not finite at times"),
        ({"skipped_steps": 1}, "note: 1 step was skipped because the loss was not finite"),
        ({"skipped_steps": 3, "loss": None}, "note: 3 steps were skipped"),
        ({"lr": 0.1}, "note: The learning rate ended at 100% of its peak"),
        ({"queue_filled": 0.5}, "note: The queue holds 50% real keys"),
    ],
)
def test_each_has_its_sentence(changes: dict[str, Any], words: str) -> None:
    (sentence,) = said(run(**changes))
    assert sentence.startswith(words)


def test_a_few_easy_steps_are_not_saturation() -> None:
    contents = run()
    lines = [dict(line) for line in contents.metrics]
    lines[-1]["contrastive_accuracy"] = 100.0
    assert said(replace(contents, metrics=lines)) == []


def test_a_run_that_has_not_finished() -> None:
    early = replace(run(), summary=None, metrics=run().metrics[:3])
    problem, note = said(early)
    assert problem.startswith("problem: This run has not finished: it stands at epoch 1.5 of 3.")
    assert "jcl resume /runs/one" in problem
    assert note.startswith("note: The learning rate is still at 71% of its peak")


def test_accuracy_that_was_lost_again() -> None:
    def with_knn(*values: float) -> RunContents:
        lines = [
            {"kind": "knn", "step": 4, "epoch": place + 1.0, "knn_top1": value} for place, value in enumerate(values)
        ]
        return replace(run(), metrics=[*run().metrics, *lines])

    (sentence,) = said(with_knn(40.0, 52.5, 47.0))
    assert sentence == "note: The kNN accuracy was best at epoch 2 (52.5 %) and has fallen to 47.0 % since."
    assert said(with_knn(40.0, 52.5, 52.0)) == []


def test_images_that_were_left_out() -> None:
    (sentence,) = said(replace(run(), skipped={"a.png": "it is empty", "b.png": "it is empty"}))
    assert sentence.startswith("note: 2 images were left out because unreadable, for example a.png (it is empty)")
