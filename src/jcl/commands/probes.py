"""Measures the frozen features of a run or weights file: kNN (`jcl knn`) and linear probes (`jcl linear`)."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console

from jcl.commands.run import run_context
from jcl.commands.run_data import refuse_inside_data
from jcl.commands.target import EvaluationTarget, data_location, open_target
from jcl.console import StderrConsole, print_line, warn_skipped
from jcl.cores import default_workers
from jcl.data.source import fingerprint
from jcl.distributed.device import to_device
from jcl.errors import DataError, SettingsError
from jcl.evaluate.baselines import compare
from jcl.evaluate.classification import ClassificationTask, Scores, classification_task, no_labels
from jcl.evaluate.features import OF_TEST
from jcl.evaluate.folders import ProbeFolder
from jcl.evaluate.knn import KnnResult, evaluate_knn
from jcl.evaluate.linear import LEARNING_RATES, WEIGHT_DECAYS, LinearResult, ProbeGrid, linear_probe
from jcl.evaluate.supervised import (
    Classifier,
    ClassifierResult,
    ClassifierTask,
    crop_and_flip,
    paper_settings,
    probe_optimizer,
    train_and_evaluate,
)
from jcl.export.backbone_file import weights_digest
from jcl.runs.json_object import write_object
from jcl.settings.commands import KnnOptions, LinearOptions
from jcl.settings.resolve import default_knn_k
from jcl.settings.schema import TrainSettings

RANK_TIMEOUT = 1800.0  # seconds that ranks wait for each other while features are extracted
_PAPER_OPTIONS = ("out", "compile", "least_crop")


def measure_knn(
    options: KnnOptions, *, console: Console | None = None, progress: Callable[[int, int], None] | None = None
) -> list[KnnResult]:
    """Weighted kNN of the frozen features of a run or file on labelled data (default: the data of the run).

    The default k is that of a run on these images. Ranks started by a launcher share the images and the queries.
    `progress` is called with the number of images done and their total, for the training and then the test set.
    """
    with run_context(options.device, RANK_TIMEOUT, console) as context:
        ranks, device = context.ranks, context.device
        target = open_target(options.weights, options.data, str(device), context.console)
        workers = max(1, default_workers() // ranks.count) if options.workers is None else options.workers
        data, k = target.data, options.k or [default_knn_k(len(target.data.train))]
        if data.train.labels is None:
            raise no_labels(data)
        if data.test is None or data.test.labels is None:
            context.log("No labeled test set: some training images are held out as queries.")

        skipped: dict[str, str] = {}

        def measure(target: EvaluationTarget) -> list[KnnResult]:
            extract = partial(target.info.preprocessing.extract, target.backbone, device=device)
            features = partial(extract, batch_size=options.batch_size, workers=workers, progress=progress)
            return evaluate_knn(
                data, features, k=k, temperature=options.temperature, device=device, ranks=ranks, skipped=skipped
            )

        def measure_untrained(target: EvaluationTarget) -> list[float]:
            return [one.top1 for one in measure(target)]

        results = [replace(one, run_state=target.run_state) for one in measure(target)]
        for of_test in (False, True):
            warn_skipped(context.console, {n: why for n, why in skipped.items() if n.endswith(OF_TEST) == of_test})
        if options.no_untrained:
            return results
        found = target.untrained(measure_untrained, ranks, knn=[[*k], options.temperature])
        return [replace(one, untrained_top1=top1) for one, top1 in zip(results, found, strict=True)]


@dataclass(frozen=True)
class LinearReport:
    """The result of a linear probe: scores, class names, and figures with plain names."""

    scores: Scores
    class_names: tuple[str, ...]
    figures: dict[str, Any]
    edges: tuple[str, ...] = ()  # of the grid, on which the chosen cell lies


def measure_linear(
    options: LinearOptions, *, console: Console | None = None, progress: Callable[[int, int], None] | None = None
) -> LinearReport:
    """The linear probe of a run's or file's frozen features on labelled data (default: the data of the run).

    `fast` trains a grid of probes on cached features and selects one on held-out training images. `paper` trains one
    probe on augmented views, with one learning rate (default 30) and no weight decay; its crops keep at least
    `least_crop` of an image's area. With a folder `out` it writes checkpoints there, and the same call again continues
    exactly. `progress(done, total)` reports the feature extraction of `fast`.
    """
    console = console or StderrConsole()
    if options.protocol == "fast":
        for name in _PAPER_OPTIONS:
            if getattr(options, name) != LinearOptions.model_fields[name].default:
                raise SettingsError(f"{options.flag(name)} needs --protocol paper.")
        grid = ProbeGrid(options.lr or LEARNING_RATES, options.weight_decay or WEIGHT_DECAYS)
        target = open_target(options.weights, options.data, options.device, console)
        task, started = classification_task(target.data), time.perf_counter()
        result = _fast_probe(options, target, task, grid, console, progress)
        chosen = {name: getattr(result, name) for name in ("lr", "weight_decay", "epochs", "validation_top1")} | {
            "train_images": result.train_images,
            "seconds": time.perf_counter() - started,
            "classes": len(result.classes),  # without those that have no readable image
        }
        names = dict(zip(task.classes.tolist(), task.class_names, strict=True))
        figures = _figures(options, result.scores, chosen, task, _untrained_top1(options, target, task, grid))
        figures |= target.run_state
        return LinearReport(result.scores, tuple(names[label] for label in result.classes), figures, result.edges)
    if len(options.lr) > 1 or any(options.weight_decay):
        raise SettingsError("--protocol paper takes one --lr and no weight decay; use --protocol fast for a grid.")
    train = paper_settings(
        lr=options.lr[0] if options.lr else 30.0,
        epochs=options.epochs or 100,
        batch_size=options.batch_size,
        seed=options.seed,
        compiled=options.compile,
    )
    target = open_target(options.weights, options.data, options.device, console)
    probe = PaperProbe(target, classification_task(target.data), train, options, console)
    if options.out is None:
        return probe.report()
    refuse_inside_data(options.out, data_location(options.weights, options.data))
    return probe.report_with_folder(ProbeFolder(options.out))


def _fast_probe(
    options: LinearOptions,
    target: EvaluationTarget,
    task: ClassificationTask,
    grid: ProbeGrid,
    console: Console,
    progress: Callable[[int, int], None] | None = None,
) -> LinearResult:
    features = partial(
        target.features, batch_size=options.batch_size, workers=options.worker_count, console=console, progress=progress
    )
    train, test = features(task.train), features(task.test)
    return linear_probe(
        *(train.values, train.labels, test.values, test.labels),
        grid=grid,
        epochs=options.epochs,
        seed=options.seed,
        device=target.device,
    )


@dataclass(frozen=True)
class PaperProbe:
    """The paper's probe, ready to start."""

    target: EvaluationTarget
    task: ClassificationTask
    train: TrainSettings
    options: LinearOptions
    console: Console

    def report(self, folder: ProbeFolder | None = None, *, resumed: bool = False) -> LinearReport:
        """Train, from the newest checkpoint if resumed, and evaluate."""
        scores, progress, unreadable = self.run(folder, resumed=resumed)
        chosen = {
            "lr": self.train.lr,
            "weight_decay": 0.0,
            "epochs": self.train.epochs,
            "train_images": len(self.task.train) - unreadable,
            "skipped": unreadable,
            "classes": len(self.task.classes),
            "least_crop": self.options.least_crop,
            "seconds": progress.seconds,
        }
        fast = self.options.model_copy(update={"epochs": None})
        untrained = _untrained_top1(fast, self.target, self.task, ProbeGrid())
        figures = _figures(self.options, scores, chosen, self.task, untrained) | self.target.run_state
        return LinearReport(scores, self.task.class_names, figures)

    def run(self, folder: ProbeFolder | None = None, *, resumed: bool = False) -> ClassifierResult:
        """Train the layer on the training images and evaluate it on the test images after the last epoch."""
        target, train = self.target, self.train
        width, classes = target.info.feature_width, len(self.task.classes)
        network = Classifier(target.backbone, width, classes, frozen=True, seed=train.seed)
        network = to_device(network, target.device)
        work = ClassifierTask(
            title="linear probe",
            network=network,
            optimizer=probe_optimizer(network, train),
            data=self.task,
            preprocessing=target.info.preprocessing,
            recipe=crop_and_flip(target.info.preprocessing, min_scale=self.options.least_crop),
            train=train,
            device=target.device,
            workers=self.options.worker_count,
        )
        found = train_and_evaluate(work, self.console, folder, resumed=resumed)
        if folder is not None:
            folder.save_classifier(network.fc, self.task.class_names)
        return found

    def report_with_folder(self, folder: ProbeFolder) -> LinearReport:
        """The same with checkpoints in a folder: start, continue, or read the result if it has finished."""
        log = partial(print_line, self.console)
        probe = self.description()
        folder.refuse_other(probe)
        with folder.locked_for_training(warn=log):
            resumed = folder.settings_file.exists()
            if not resumed:
                write_object(folder.settings_file, probe)
            if folder.summary_file.exists() and folder.scores_file.exists():
                log(f"The linear probe in {folder.path} has finished; showing its result.")
                return LinearReport(folder.scores(), self.task.class_names, folder.summary())
            report = self.report(folder, resumed=resumed)
            write_object(folder.scores_file, asdict(report.scores))
            folder.write_summary(report.figures)  # last: it marks the probe as finished
        return report

    def description(self) -> dict[str, Any]:
        """Everything the figures depend on; weights and data by name and digest."""
        target, train = self.target, self.train
        network = hashlib.sha256((weights_digest(target.backbone) + target.info.to_text()).encode()).hexdigest()
        return {
            "weights": f"{self.options.weights.resolve().name} ({network[:16]})",
            "data": f"{target.data.name} ({fingerprint(self.task.train)}, {fingerprint(self.task.test)})",
            "lr": train.lr,
            "epochs": train.epochs,
            "batch_size": train.batch_size,
            "least_crop": self.options.least_crop,
            "seed": train.seed,
        }


def _untrained_top1(
    options: LinearOptions, target: EvaluationTarget, task: ClassificationTask, grid: ProbeGrid
) -> float | None:
    """The accuracy of the untrained network by the fast protocol, also beside the paper's."""

    if options.no_untrained:
        return None

    def measure(untrained: EvaluationTarget) -> list[float]:
        return [_fast_probe(options, untrained, task, grid, Console(quiet=True)).scores.top1]

    with contextlib.suppress(DataError, SettingsError):  # too few images for a grid, or the probe diverges
        return target.untrained(measure, linear=[asdict(grid), options.epochs, options.seed])[0]
    return None


def _figures(
    options: LinearOptions, scores: Scores, chosen: dict[str, Any], task: ClassificationTask, untrained: float | None
) -> dict[str, Any]:
    found = {"linear_top1": scores.top1, "linear_top5": scores.top5, "protocol": options.protocol}
    found |= compare("linear_top1", scores.top1, scores.images, scores.chance_top1, untrained)
    about = {
        "test_images": scores.images,
        "unseen_class_images": scores.unseen_class_images,
        "test_held_out": task.held_out,
        "seed": options.seed,
    }
    return found | chosen | about
