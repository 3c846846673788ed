"""Remarks about anything unusual in a run."""

import math
from collections.abc import Iterator
from typing import Final

from jcl.console import describe_skipped, pluralize
from jcl.evaluate.baselines import baseline_warning, compare_online
from jcl.report.contents import RunContents
from jcl.runs.folder import RunFolder
from jcl.train.display import NARROW, collapse_warning, has_collapsed, uniform_guess_loss

_SATURATED: Final = 99.0  # percent contrastive accuracy
_KNN_DROP: Final = 1.0  # percent


def remarks(run: RunContents) -> list[tuple[str, str]]:
    """Everything unusual about a run: "problem" and a sentence for each problem, then "note" and a sentence."""
    notes = [*_notes(run), *run.data_remarks]
    return [("problem", text) for text in _problems(run)] + [("note", text) for text in notes]


def _problems(run: RunContents) -> Iterator[str]:
    last, epochs = run.last("train"), run.settings.train.epochs
    if run.summary is None:
        where = f"it is at epoch {last['epoch']:.1f} of {epochs}" if last else "no step is recorded yet"
        yield f"This run has not finished: {where}; {RunFolder(run.path).how_to_finish}."
    lines = [line for line in run.metrics if line.get("kind") == "train"]
    if not last.get("skipped_steps") and any(line.get("loss") is None for line in lines):
        yield "The loss was not finite at times, so do not trust the weights. Lower --lr."
    loss, guess = last.get("loss"), uniform_guess_loss(run.settings.method.queue_size)
    if loss is not None and loss >= guess:
        yield f"The loss is {loss:.2f}, no better than a uniform guess ({guess:.2f}): nothing has been learned yet."
    figures, knn = run.summary or {}, [line for line in run.metrics if line.get("kind") == "knn"]
    if run.summary is None and knn:
        figures = {**knn[-1], **compare_online(knn[0], knn[-1], initialized=bool(run.settings.model.init))}
    if warning := baseline_warning("knn_top1", figures, "Train longer or on more images."):
        yield warning
    if warning := collapse_warning(last, run.settings.model.embedding_dim):
        yield warning


def _notes(run: RunContents) -> Iterator[str]:
    last = run.last("train")
    if skipped := int(last.get("skipped_steps") or 0):
        yield f"Skipped {pluralize(skipped, 'step')} with a loss that was not finite; a lower learning rate may help."
    std = last.get("feature_std")
    spread = math.inf if std is None else std * math.sqrt(run.settings.model.embedding_dim)  # 1 is the largest possible
    if spread < NARROW and not has_collapsed(spread, last.get("contrastive_accuracy")):
        yield f"The standard deviation of the features is only {spread:.0%} of the possible one; watch for collapse."
    accuracy = last.get("contrastive_accuracy") or 0.0
    if accuracy >= _SATURATED:
        yield f"The task is too easy: {accuracy:.1f} % contrastive accuracy. Try a larger queue or stronger views."
    filled = last.get("queue_filled")
    if filled is not None and filled < 1:
        yield f"Only {filled:.0%} of the queue holds real keys. Train longer, or reduce method.queue_size."
    # Without the accuracy of the untrained network.
    knn = [line for line in run.metrics if line["kind"] == "knn" and line["step"] and line.get("knn_top1") is not None]
    best = max(knn, key=lambda line: line["knn_top1"], default=None)
    if best is not None and best["knn_top1"] - (final := knn[-1]["knn_top1"]) > _KNN_DROP:
        top = f"{best['knn_top1']:.1f} % at epoch {best['epoch']:g}"
        yield f"The kNN accuracy has fallen from {top} to {final:.1f} %."
    if run.skipped:
        yield f"{describe_skipped(run.skipped)} skipped.txt lists them all."
