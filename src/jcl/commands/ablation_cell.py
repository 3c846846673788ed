"""One cell of an ablation: pre-training, then kNN and a linear probe on the frozen features."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from jcl.commands.pretrain import pretrain, resume
from jcl.commands.probes import measure_linear
from jcl.commands.run import Run
from jcl.commands.target import open_target
from jcl.console import StderrConsole, print_line
from jcl.errors import Interrupted, JclError
from jcl.evaluate.classification import classification_task
from jcl.evaluate.features import all_skipped
from jcl.evaluate.knn import knn_accuracy
from jcl.evaluate.linear import linear_probe
from jcl.runs.folder import RunFolder, add_skipped
from jcl.runs.json_object import write_object
from jcl.runs.lock import FolderLocked
from jcl.settings.commands import LinearOptions
from jcl.settings.schema import Settings, with_values
from jcl.studies.ablation import CellFolder

ABLATION_LR = 10.0  # of the probe in the paper's ablations
_LOCK_SECONDS = 600.0  # how long to wait for a process on a lost node to save and release the folder
_SUMMARY_KEYS = ["loss", "contrastive_accuracy", "epochs", "steps", "images_per_second", "seconds", "peak_memory_bytes"]


def run_cell(path: Path, *, workers: int | None = None, console: Console | None = None) -> dict[str, Any]:
    """Run the cell that `cell.json` in a folder plans, or continue it, and return its result.

    Errors are written to the folder before they are raised. `workers` replaces "auto".
    """
    folder = CellFolder(path)
    cell, existing = folder.cell(), folder.result()
    if existing is not None:
        return existing
    folder.failure_file.unlink(missing_ok=True)
    settings = cell.settings
    if workers is not None and settings.data.workers == "auto":
        settings = with_values(settings, {"data.workers": workers})
    console = console or StderrConsole()
    try:
        run = _train(path, settings, console)
        accuracies, skipped = _evaluate(run, console)
        if cell.protocol == "paper":
            accuracies |= _paper_probe(run, accuracies["linear_top1"], console)
        result = {"seed": cell.seed} | accuracies | {name: run.summary[name] for name in _SUMMARY_KEYS}
        add_skipped(folder.left_out_file, skipped, overwrite=True)
        write_object(folder.result_file, result)  # the last step
    except Interrupted:
        raise
    except Exception as error:
        first_line = (str(error).strip() or "no message").splitlines()[0]
        folder.fail(str(error) if isinstance(error, JclError) else f"{type(error).__name__}: {first_line}")
        raise
    return result


def _train(path: Path, settings: Settings, console: Console) -> Run:
    """Start or resume the run of the cell and finish it."""
    deadline, waiting = time.monotonic() + _LOCK_SECONDS, False
    while True:
        try:
            if RunFolder(path).holds_run():
                return resume(path, console=console)
            return pretrain(settings, path, console=console)
        except FolderLocked as error:  # a process on a lost node may take a moment to notice
            if time.monotonic() > deadline:
                raise
            if not waiting:
                print_line(console, f"Waiting: {error}")
            waiting = True
        time.sleep(0.5)


def _evaluate(run: Run, console: Console) -> tuple[dict[str, Any], dict[str, str]]:
    """kNN and linear probe on the same features, and the unreadable images with the reasons.

    The probe selects its hyperparameters on held-out training images.
    """
    settings = run.settings
    workers, record = settings.data.workers, settings.record
    target = open_target(run.path, None, settings.train.device, Console(quiet=True))
    task = classification_task(target.data)
    features = partial(target.features, workers=workers, console=console)
    train, test = features(task.train), features(task.test)
    labelled = (train.values, train.labels, test.values, test.labels)
    k, temperature = [record.knn_k], [record.knn_temperature]
    knn = knn_accuracy(*labelled, k=k, temperature=temperature, device=target.device)[0]
    linear = linear_probe(*labelled, device=target.device)
    accuracies = {
        "linear_top1": linear.scores.top1,
        "chance_top1": linear.scores.chance_top1,
        "untrained_knn_top1": run.summary.get("untrained_knn_top1"),
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
    return accuracies, all_skipped(train, test)


def _paper_probe(run: Run, fast_top1: float, console: Console) -> dict[str, Any]:
    """The probe of the paper's ablations, in the place of the fast one; it continues from its own checkpoints."""
    options = LinearOptions(
        weights=run.path,
        protocol="paper",
        lr=(ABLATION_LR,),
        no_untrained=True,
        out=run.path / "linear",
        device=run.settings.train.device,
        workers=run.settings.data.workers,
    )
    figures = measure_linear(options, console=console).figures
    found = {f"linear_{name}": figures[name] for name in ("lr", "weight_decay", "epochs")}
    return found | {name: figures[name] for name in ("linear_top1", "linear_top5")} | {"fast_linear_top1": fast_top1}
