"""What a person should know about a run before trusting it, in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jcl.report.contents import RunContents
from jcl.runs.folder import RunFolder
from jcl.train.health import COLLAPSED, NARROW, uniform_guess_loss

SATURATED = 99.0  # percent of queries that find their own image first
_LR_OVER = 0.3  # share of its peak at which a learning rate has not come down
_LOST = 1.0  # percent of kNN accuracy


@dataclass(frozen=True)
class Remark:
    """A sentence or two; a problem makes the run doubtful, a note is worth knowing."""

    kind: Literal["problem", "note"]
    text: str


def remarks(run: RunContents) -> list[Remark]:
    """Everything unusual about a run, problems first."""
    found = [
        *_unfinished(run),
        *_loss(run),
        *_spread(run),
        *_saturation(run),
        *_learning_rate(run),
        *_queue(run),
        *_knn(run),
        *_skipped_images(run),
        *(Remark("note", sentence) for sentence in run.about_images),
    ]
    return sorted(found, key=lambda remark: remark.kind != "problem")


def _unfinished(run: RunContents) -> Iterator[Remark]:
    if run.summary is not None:
        return
    epochs = run.settings.train.epochs
    line = run.newest("train")
    where = f"it stands at epoch {line['epoch']:.1f} of {epochs}" if line else "nothing has been recorded yet"
    yield Remark(
        "problem", f"This run has not finished: {where}. Continue it with `{RunFolder(run.path).how_to_resume}`."
    )


def _loss(run: RunContents) -> Iterator[Remark]:
    lines = [line for line in run.metrics if line.get("kind") == "train"]
    bad = sum(line.get("loss") is None for line in lines)
    skipped = run.newest("train").get("skipped_steps") or 0
    if skipped:
        steps = "1 step was" if skipped == 1 else f"{skipped:,.0f} steps were"
        yield Remark("note", f"{steps} skipped because the loss was not finite; a lower learning rate usually helps.")
    elif bad:
        yield Remark("problem", "The loss was not finite at times, so the weights cannot be trusted; lower --lr.")
    loss, queue = run.newest("train").get("loss"), run.settings.method.queue_size
    if loss is not None and isinstance(queue, int) and loss >= uniform_guess_loss(queue):
        guess = uniform_guess_loss(queue)
        yield Remark(
            "problem",
            f"The loss is {loss:.2f}, no better than a uniform guess ({guess:.2f}): nothing has been learned yet.",
        )


def _spread(run: RunContents) -> Iterator[Remark]:
    std = run.newest("train").get("feature_std")
    if std is None:
        return
    share = std * math.sqrt(run.settings.model.embedding_dim)
    if share < COLLAPSED:
        yield Remark(
            "problem",
            f"The features have collapsed: they use {share:.0%} of the spread that is possible, so all images look "
            "alike to the network. Lower the learning rate, or use more BN groups.",
        )
    elif share < NARROW:
        yield Remark("note", f"The features are spread narrowly ({share:.0%} of the possible); watch for collapse.")


def _saturation(run: RunContents) -> Iterator[Remark]:
    lines = [line for line in run.metrics if line.get("kind") == "train"]
    found = [line.get("contrastive_accuracy") for line in lines[-max(1, len(lines) // 4) :]]
    late = [accuracy for accuracy in found if accuracy is not None]
    if len(lines) >= 4 and late and min(late) >= SATURATED:
        yield Remark(
            "note",
            f"The task has become too easy: for the last quarter of training {min(late):.1f} % or more of the queries "
            "found their own image first, so little was left to learn. Try a longer queue or stronger views.",
        )


def _learning_rate(run: RunContents) -> Iterator[Remark]:
    rates = [line["lr"] for line in run.metrics if line.get("kind") == "train" and line.get("lr") is not None]
    if len(rates) < 2 or rates[-1] <= _LR_OVER * max(rates):
        return
    share = rates[-1] / max(rates)
    if run.summary is None:
        yield Remark("note", f"The learning rate is still at {share:.0%} of its peak; features gain most as it falls.")
    else:
        yield Remark(
            "note",
            f"The learning rate ended at {share:.0%} of its peak; features usually gain from a last stretch at a low "
            "one, which more epochs or a cosine schedule give.",
        )


def _queue(run: RunContents) -> Iterator[Remark]:
    filled = run.newest("train").get("queue_filled")
    if filled is not None and filled < 1:
        yield Remark(
            "note",
            f"The queue holds {filled:.0%} real keys and random ones otherwise, so the loss does not compare yet; "
            "train longer, or set a smaller method.queue_size.",
        )


def _knn(run: RunContents) -> Iterator[Remark]:
    lines = [line for line in run.metrics if line.get("kind") == "knn" and line.get("knn_top1") is not None]
    if not lines:
        return
    best = max(lines, key=lambda line: line["knn_top1"])
    if best["knn_top1"] - lines[-1]["knn_top1"] > _LOST:
        yield Remark(
            "note",
            f"The kNN accuracy was best at epoch {best['epoch']:g} ({best['knn_top1']:.1f} %) and has fallen to "
            f"{lines[-1]['knn_top1']:.1f} % since.",
        )


def _skipped_images(run: RunContents) -> Iterator[Remark]:
    if not run.skipped:
        return
    images = "1 image was" if len(run.skipped) == 1 else f"{len(run.skipped):,} images were"
    name, reason = next(iter(run.skipped.items()))
    yield Remark("note", f"{images} left out because unreadable, for example {name} ({reason}); skipped.txt lists all.")
