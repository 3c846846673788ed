"""Linear probes of a run or a weights file, by either protocol: what `jcl linear` does."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from jcl.commands.run_data import refuse_inside_data
from jcl.commands.target import EvaluationTarget, data_location, open_target
from jcl.console import StderrConsole, print_line
from jcl.cores import usual_workers
from jcl.data import ImageSource
from jcl.data.source import fingerprint
from jcl.errors import SettingsError
from jcl.evaluate.classification import ClassificationTask, Scores, classification_task
from jcl.evaluate.features import Features
from jcl.evaluate.folders import ProbeFolder
from jcl.evaluate.linear import LEARNING_RATES, WEIGHT_DECAYS, ProbeGrid, linear_probe
from jcl.evaluate.linear_paper import PAPER_EPOCHS, PAPER_LR, paper_probe, paper_settings
from jcl.evaluate.supervised import DEFAULT_MIN_SCALE
from jcl.export.backbone_file import weights_digest
from jcl.settings.evaluation import LinearOptions
from jcl.settings.schema import TrainSettings

_DIGEST_LENGTH = 16


@dataclass(frozen=True)
class LinearReport:
    """The result of a linear probe: scores, class names, and figures with plain names."""

    scores: Scores
    class_names: tuple[str, ...]
    figures: dict[str, Any]
    edges: tuple[str, ...] = ()  # of the grid at which the chosen cell lies


def measure_linear(
    options: LinearOptions,
    *,
    console: Console | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> LinearReport:
    """The linear probe of a run's or file's frozen features on labelled data (default: the data of the run).

    `fast` trains a grid of probes on cached features and selects one on held-out training images. `paper` trains one
    probe on augmented views, with one learning rate (default 30) and no weight decay; its crops keep at least
    `least_crop` of an image's area. With a folder `out` it writes checkpoints there, and the same call again continues
    exactly. `progress(done, total)` reports the feature extraction of `fast`.
    """
    console = console or StderrConsole()
    weights, location, device = options.weights, options.data, options.device
    workers = usual_workers() if options.workers is None else options.workers
    if options.protocol == "fast":
        _refuse_options_of_paper(options.out, options.compile, options.least_crop)
        target = open_target(weights, location, device, console)
        grid = ProbeGrid(options.lr or LEARNING_RATES, options.weight_decay or WEIGHT_DECAYS)
        features = partial(
            target.features, batch_size=options.batch_size, workers=workers, console=console, progress=progress
        )
        task = classification_task(target.data)
        return _fast_linear(features, task, grid, options.epochs, options.seed, target.device)
    train = paper_settings(
        lr=_only_lr(options.lr, options.weight_decay),
        epochs=PAPER_EPOCHS if options.epochs is None else options.epochs,
        batch_size=options.batch_size,
        seed=options.seed,
        compiled=options.compile,
    )
    target = open_target(weights, location, device, console)
    if options.out is not None:
        refuse_inside_data(options.out, data_location(weights, location))
    probe = _PaperProbe(target, classification_task(target.data), train, workers, options.least_crop, console)
    return probe.report() if options.out is None else probe.report_kept_in(ProbeFolder(options.out), weights)


def _refuse_options_of_paper(out: Path | None, compiled: bool, least_crop: float) -> None:
    if out is not None:
        raise SettingsError("--out needs --protocol paper.")
    if compiled or least_crop != DEFAULT_MIN_SCALE:
        option = "--compile" if compiled else "--least-crop"
        raise SettingsError(f"{option} needs --protocol paper.")


def _only_lr(learning_rates: Sequence[float], weight_decays: Sequence[float]) -> float:
    """The learning rate of the paper's protocol, which has no grid."""
    if len(learning_rates) > 1 or any(weight_decays):
        raise SettingsError("--protocol paper takes one --lr and no weight decay; use --protocol fast for a grid.")
    return learning_rates[0] if learning_rates else PAPER_LR


@dataclass(frozen=True)
class _PaperProbe:
    """The paper's probe, ready to start."""

    target: EvaluationTarget
    task: ClassificationTask
    train: TrainSettings
    workers: int
    least_crop: float
    console: Console

    def report(self, folder: ProbeFolder | None = None, *, resumed: bool = False) -> LinearReport:
        """Train, from the newest checkpoint if resumed, and evaluate."""
        target, task, train = self.target, self.task, self.train
        scores, progress, unreadable = paper_probe(
            target.backbone,
            target.info.feature_width,
            target.preprocessing,
            task,
            train,
            device=target.device,
            workers=self.workers,
            min_scale=self.least_crop,
            console=self.console,
            folder=folder,
            resumed=resumed,
        )
        chosen = {"lr": train.lr, "weight_decay": 0.0, "epochs": train.epochs}
        chosen |= {"train_images": len(task.train) - unreadable, "skipped": unreadable}
        chosen |= {"classes": len(task.classes), "least_crop": self.least_crop, "seconds": progress.seconds}
        return LinearReport(scores, task.class_names, _linear_figures("paper", scores, chosen, task, train.seed))

    def report_kept_in(self, folder: ProbeFolder, weights: Path) -> LinearReport:
        """The same with checkpoints in a folder: start, continue, or read the result if it has finished."""
        probe = self.description(weights)
        folder.refuse_other(probe)
        with folder.begun(warn=self.say):
            resumed = folder.begin(probe)
            if folder.finished:
                self.say(f"The linear probe in {folder.path} has finished; showing its result.")
                return LinearReport(folder.scores(), self.task.class_names, folder.summary())
            report = self.report(folder, resumed=resumed)
            folder.write_scores(report.scores)
            folder.write_summary(report.figures)  # last: it marks the probe as finished
        return report

    def description(self, weights: Path) -> dict[str, Any]:
        """Everything the figures depend on; weights and data by name and digest."""
        target, train, task = self.target, self.train, self.task
        network = hashlib.sha256((weights_digest(target.backbone) + target.info.to_text()).encode()).hexdigest()
        return {
            "weights": f"{weights.resolve().name} ({network[:_DIGEST_LENGTH]})",
            "data": f"{target.data.name} ({fingerprint(task.train)}, {fingerprint(task.test)})",
            "lr": train.lr,
            "epochs": train.epochs,
            "batch_size": train.batch_size,
            "least_crop": self.least_crop,
            "seed": train.seed,
        }

    def say(self, text: str) -> None:
        print_line(self.console, text)


def _fast_linear(
    features: Callable[[ImageSource], Features],
    task: ClassificationTask,
    grid: ProbeGrid,
    epochs: int | None,
    seed: int,
    device: torch.device,
) -> LinearReport:
    started = time.perf_counter()
    train, test = features(task.train), features(task.test)
    assert train.labels is not None and test.labels is not None
    labelled = (train.values, train.labels, test.values, test.labels)
    result = linear_probe(*labelled, grid=grid, epochs=epochs, seed=seed, device=device)
    chosen = {
        "lr": result.lr,
        "weight_decay": result.weight_decay,
        "epochs": result.epochs,
        "validation_top1": result.validation_top1,
        "train_images": result.train_images,
        "seconds": time.perf_counter() - started,
    }
    names = dict(zip(task.classes.tolist(), task.class_names, strict=True))
    # A class without readable images was not trained on.
    chosen |= {"classes": len(result.classes)}
    figures = _linear_figures("fast", result.scores, chosen, task, seed)
    return LinearReport(result.scores, tuple(names[label] for label in result.classes), figures, result.edges)


def _linear_figures(
    protocol: str, scores: Scores, chosen: dict[str, Any], task: ClassificationTask, seed: int
) -> dict[str, Any]:
    found = {"linear_top1": scores.top1, "linear_top5": scores.top5, "protocol": protocol}
    about = {
        "test_images": scores.images,
        "unseen_class_images": scores.unseen_class_images,
        "test_held_out": task.held_out,
        "seed": seed,
    }
    return found | chosen | about
