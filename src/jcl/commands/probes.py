"""Measure the frozen features of a run or weights file: kNN (`jcl knn`) and linear probes (`jcl linear`)."""

import contextlib
import hashlib
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console

from jcl.commands.inputs import EvaluationTarget, accuracy_figures, open_target, refuse_inside_data
from jcl.commands.run import RunContext, class_accuracies, read_classes, run_context, write_classes
from jcl.console import STDERR, ProgressCallback, no_progress, warn_skipped
from jcl.cores import default_workers
from jcl.data.source import fingerprint
from jcl.distributed.device import to_device
from jcl.distributed.group import ALONE
from jcl.errors import DataError, RunError, SettingsError
from jcl.evaluate import supervised
from jcl.evaluate.classification import ClassificationTask, Scores, classification_task, no_labels
from jcl.evaluate.folders import ProbeFolder
from jcl.evaluate.knn import KnnResult, evaluate_knn
from jcl.evaluate.linear import LEARNING_RATES, WEIGHT_DECAYS, LinearResult, ProbeGrid, linear_probe
from jcl.evaluate.supervised import Classifier
from jcl.export.backbone_file import weights_digest
from jcl.runs.json_object import write_object
from jcl.settings.commands import KnnOptions, LinearOptions
from jcl.settings.resolve import default_knn_k
from jcl.settings.schema import TrainSettings

RANK_TIMEOUT = 1800.0  # seconds that ranks wait for each other while features are extracted


def measure_knn(options: KnnOptions, progress: ProgressCallback) -> tuple[list[KnnResult], dict[str, Any]]:
    """Weighted kNN of frozen features on labeled data (default: the run's); ranks share the images and queries.

    Returns the results, and figures with plain names: the first result, and every result by its k and temperature.
    """
    with run_context(options.device, RANK_TIMEOUT, STDERR) as context:
        ranks, device = context.ranks, context.device
        target = open_target(options.weights, options.data, str(device), context.console)
        workers = default_workers(ranks.count) if options.workers is None else options.workers
        data, record = target.data, target.record
        k = options.k or [default_knn_k(len(data.train)) if record is None else record.knn_k]
        temperature = options.temperature or [0.1 if record is None else record.knn_temperature]
        if data.train.labels is None:
            raise no_labels(data)
        held_out = data.labeled_test is None
        if held_out:
            context.log("No labeled test set: some training images are held out as queries.")

        skipped: dict[str, str] = {}

        def measure(target: EvaluationTarget) -> list[KnnResult]:
            extract = partial(target.info.preprocessing.extract, target.backbone, device=device)
            features = partial(extract, batch_size=options.batch_size, workers=workers, progress=progress)
            return evaluate_knn(
                data, features, k=k, temperature=temperature, device=device, ranks=ranks, skipped=skipped
            )

        results = measure(target)
        warn_skipped(context.console, skipped)
        untrained: list[float] = []
        if not options.no_untrained:
            about = [[*k], [*temperature]]
            untrained = target.untrained(lambda network: [one.top1 for one in measure(network)], ranks, knn=about)
        figures = accuracy_figures("knn", results[0], untrained[0] if untrained else None)
        for number, result in enumerate(results):
            name = f"k{result.k}_t{result.temperature:g}"
            figures |= {f"knn_top1_{name}": result.top1, f"knn_top5_{name}": result.top5}
            if untrained:
                figures[f"untrained_knn_top1_{name}"] = untrained[number]
        figures |= {"knn_k": results[0].k, "knn_temperature": results[0].temperature}
        figures |= {"classes": len(results[0].classes), "test_held_out": held_out}
        return results, figures | target.origin


@dataclass(frozen=True)
class LinearReport:
    """The result of a linear probe: figures with plain names, and test images and accuracy of each class."""

    figures: dict[str, Any]
    classes: dict[str, tuple[int, float]]
    edges: tuple[str, ...] = ()  # of the grid, on which the chosen cell lies


def measure_linear(
    options: LinearOptions, *, console: Console = STDERR, progress: ProgressCallback = no_progress
) -> LinearReport:
    """The linear probe of a run's or file's frozen features on labeled data (default: the data of the run).

    `fast` trains a grid of probes on cached features and selects one on held-out training images. `paper` trains one
    probe on augmented views, with one learning rate (default 30) and no weight decay; its crops keep at least
    `least_crop` of an image's area. With a folder `out` it writes checkpoints there, and the same call again continues
    exactly. `progress(done, total)` reports the feature extraction of `fast`.
    """
    fast = options.protocol == "fast"
    if fast:
        options.refuse(("out", "compile", "least_crop"), "needs --protocol paper")
    elif len(options.lr) > 1 or any(options.weight_decay):
        raise SettingsError("--protocol paper takes one --lr and no weight decay; use --protocol fast for a grid.")
    train = supervised.paper_settings(
        lr=options.lr[0] if options.lr and not fast else 30.0,
        epochs=options.epochs or 100,
        batch_size=options.batch_size,
        seed=options.seed,
        compiled=options.compile,
    )
    rates, decays = (options.lr, options.weight_decay) if fast else ((), ())
    grid = ProbeGrid(rates or LEARNING_RATES, decays or WEIGHT_DECAYS)
    target = open_target(options.weights, options.data, options.device, console)
    task, grid_epochs = classification_task(target.data), options.epochs if fast else None
    probe = LinearProbe(options, train, grid, target, task, console, grid_epochs)
    if fast:
        return probe.report_fast(progress)
    if options.out is None:
        return probe.report_paper()
    refuse_inside_data(options.out, target.location)
    return probe.report_with_folder(ProbeFolder(options.out))


@dataclass(frozen=True)
class LinearProbe:
    """A probe ready to start: a `grid` of them on cached features, or the paper's with the settings `train`."""

    options: LinearOptions
    train: TrainSettings
    grid: ProbeGrid
    target: EvaluationTarget
    task: ClassificationTask
    console: Console
    grid_epochs: int | None = None

    def report_fast(self, progress: ProgressCallback) -> LinearReport:
        started, task = time.perf_counter(), self.task
        result = self.run_grid(progress)
        names = ("lr", "weight_decay", "epochs", "validation_top1", "train_images")
        chosen = {name: getattr(result, name) for name in names} | {
            "seconds": time.perf_counter() - started,
            "classes": len(result.classes),  # without those that have no readable image
        }
        class_names = dict(zip(task.classes.tolist(), task.class_names, strict=True))
        classes = class_accuracies(result.scores, [class_names[label] for label in result.classes])
        return LinearReport(self._figures(result.scores, chosen), classes, result.edges)

    def report_paper(self, folder: ProbeFolder | None = None, *, resumed: bool = False) -> LinearReport:
        """Train the layer, from the newest checkpoint if resumed, and evaluate it after the last epoch."""
        target, train, preprocessing = self.target, self.train, self.target.info.preprocessing
        width, classes = target.info.feature_width, len(self.task.classes)
        network = Classifier(target.backbone, width, classes, frozen=True, seed=train.seed)
        network = to_device(network, target.device)
        work = supervised.ClassifierTask(
            title="linear probe",
            network=network,
            optimizer=supervised.probe_optimizer(network, train),
            data=self.task,
            preprocessing=preprocessing,
            recipe=supervised.crop_and_flip(preprocessing, min_scale=self.options.least_crop),
            train=train,
            device=target.device,
            workers=self.options.worker_count,
        )
        scores, progress, unreadable = supervised.train_and_evaluate(work, self.console, folder, resumed=resumed)
        if folder is not None:
            folder.save_classifier(network.fc, self.task.class_names)
        chosen = {
            "lr": train.lr,
            "weight_decay": 0.0,
            "epochs": train.epochs,
            "train_images": len(self.task.train) - unreadable,
            "skipped": unreadable,
            "classes": classes,
            "least_crop": self.options.least_crop,
            "seconds": progress.seconds,
        }
        return LinearReport(self._figures(scores, chosen), class_accuracies(scores, self.task.class_names))

    def report_with_folder(self, folder: ProbeFolder) -> LinearReport:
        """The same with checkpoints in a folder: start, continue, or read the result if it has finished."""
        context, probe = RunContext(ALONE, self.target.device, self.console), self._description()
        folder.refuse_other(probe)
        with context.starting(folder, numbered=False):
            resumed = folder.settings_file.exists()
            if not resumed:
                write_object(folder.settings_file, probe)
            if folder.summary_file.exists():
                context.log(f"The linear probe in {folder.path} has finished; showing its result.")
                return LinearReport(folder.summary(), read_classes(folder))
            report = self.report_paper(folder, resumed=resumed)
            write_classes(folder, report.classes)
            folder.write_summary(report.figures)  # last: it marks the probe as finished
        return report

    def run_grid(self, progress: ProgressCallback = no_progress) -> LinearResult:
        size, workers = self.options.batch_size, self.options.worker_count
        train, test = (
            self.target.features(images, batch_size=size, workers=workers, console=self.console, progress=progress)
            for images in (self.task.train, self.task.test)
        )
        inputs = (train.values, train.labels, test.values, test.labels)
        seed, device = self.options.seed, self.target.device
        return linear_probe(*inputs, grid=self.grid, epochs=self.grid_epochs, seed=seed, device=device)

    def _description(self) -> dict[str, Any]:
        """Everything the paper's figures depend on; weights and data, which may move, by their digests."""
        target = self.target
        network = hashlib.sha256((weights_digest(target.backbone) + target.info.to_text()).encode()).hexdigest()
        return {
            "weights": network[:16],
            "data": f"{fingerprint(self.task.train)} {fingerprint(self.task.test)}",
            **self.train.model_dump(include={"lr", "epochs", "batch_size", "seed"}),
            "least_crop": self.options.least_crop,
        }

    def _figures(self, scores: Scores, chosen: dict[str, Any]) -> dict[str, Any]:
        """What both protocols report; the untrained network is always measured with the grid."""
        options, untrained = self.options, None

        def measure(network: EvaluationTarget) -> list[float]:
            return [replace(self, target=network, console=Console(quiet=True)).run_grid().scores.top1]

        if not options.no_untrained:
            with contextlib.suppress(DataError, RunError):  # too few images for a grid, or the probe diverges
                about = [asdict(self.grid), self.grid_epochs, options.seed]
                untrained = self.target.untrained(measure, linear=about)[0]
        return {
            **accuracy_figures("linear", scores, untrained),
            "protocol": options.protocol,
            **chosen,
            "test_held_out": self.task.held_out,
            "seed": options.seed,
            **self.target.origin,
        }
