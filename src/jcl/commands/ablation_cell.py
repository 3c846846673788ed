"""One cell of an ablation from its plan to its figures: pre-training, then what the frozen features are worth."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console

from jcl.commands.pretrain import pretrain, resume
from jcl.commands.run import Run
from jcl.commands.target import open_target
from jcl.console import StderrConsole, print_line
from jcl.data import ImageSource
from jcl.errors import Interrupted, JclError
from jcl.evaluate.classification import classification_task
from jcl.evaluate.features import Features, all_skipped
from jcl.evaluate.knn import knn_accuracy
from jcl.evaluate.linear import linear_probe
from jcl.runs.folder import RunFolder
from jcl.runs.lock import RunHeld
from jcl.settings.schema import Settings, with_values
from jcl.studies.ablation_folder import CellFolder

_SECONDS_TO_WAIT = 600.0  # for a process that has lost its place but still has the folder, and saves itself
_KEPT_FROM_SUMMARY = (
    *("loss", "contrastive_accuracy", "epochs", "steps", "images_per_second", "seconds", "peak_memory_bytes"),
)


def run_cell(path: Path, *, workers: int | None = None, console: Console | None = None) -> dict[str, Any]:
    """Carry out what `cell.json` in a folder plans, from wherever it stopped, and give the figures.

    What goes wrong is written down before it is raised. `workers` replaces an automatic choice.
    """
    folder = CellFolder(path)
    cell = folder.cell()
    found = folder.result()
    if found is not None:
        return found
    folder.forget_failure()
    settings = cell.settings
    if workers is not None and settings.data.workers == "auto":
        settings = with_values(settings, {"data.workers": workers})
    told = console or StderrConsole()
    try:
        run = _trained(path, settings, told)
        summary = run.summary
        kept = {name: summary[name] for name in _KEPT_FROM_SUMMARY}
        probed, left_out = _probed(run, told)
        figures = {"seed": cell.seed} | probed | kept
        folder.leave_out(left_out)
    except Interrupted:
        raise
    except JclError as error:
        folder.fail(str(error))
        raise
    except Exception as error:
        folder.fail(f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}")
        raise
    folder.finish(figures)
    return figures


def _trained(path: Path, settings: Settings, console: Console) -> Run:
    """The finished run of the cell: begun, or gone on with."""
    deadline = time.monotonic() + _SECONDS_TO_WAIT
    said = False
    while True:
        try:
            if RunFolder(path).holds_run():
                return resume(path, console=console)
            return pretrain(settings, path, console=console)
        except RunHeld as error:  # a process on a node that was given up may take a moment to notice
            if time.monotonic() > deadline:
                raise
            if not said:
                print_line(console, f"Waiting, because {error}")
            said = True
        time.sleep(0.5)


def _probed(run: Run, console: Console) -> tuple[dict[str, Any], dict[str, str]]:
    """kNN and the linear probe on the same features; the probe is chosen on a part of the training images.

    Gives the figures, and which images could not be read and why.
    """
    settings = run.settings
    workers, record = settings.data.workers, settings.record
    subject = open_target(run.path, None, settings.train.device, Console(quiet=True))  # the training has told
    task = classification_task(subject.data)

    def features(source: ImageSource) -> Features:
        return subject.features(source, batch_size=None, workers=workers, console=console, progress=None)

    train, test = features(task.train), features(task.test)
    assert train.labels is not None and test.labels is not None, "a task has labels"
    labelled = (train.values, train.labels, test.values, test.labels)
    k, temperature = [record.knn_k], [record.knn_temperature]
    knn = knn_accuracy(*labelled, k=k, temperature=temperature, device=subject.device)[0]
    linear = linear_probe(*labelled, device=subject.device)
    figures = {
        "linear_top1": linear.scores.top1,
        "linear_top5": linear.scores.top5,
        "knn_top1": knn.top1,
        "knn_top5": knn.top5,
        "validation_top1": linear.validation_top1,
        "linear_lr": linear.lr,
        "linear_weight_decay": linear.weight_decay,
        "train_images": len(train),
        "test_images": len(test),
        "unseen_class_images": linear.scores.unseen_class_images,
        "test_held_out": task.held_out,
        "classes": len(task.classes),
    }
    return figures, all_skipped(train, test)
