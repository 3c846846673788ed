"""COCO detectors on a pre-trained backbone (`jcl detect`): train, resume and evaluate."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import nn

from jcl.commands.run import RunContext, run_context
from jcl.console import STDERR, pluralize
from jcl.core.encoder import build_backbone
from jcl.distributed.device import choose_precision
from jcl.distributed.group import fail_together
from jcl.errors import RunError, SettingsError
from jcl.evaluate.detection import model
from jcl.evaluate.detection.batches import Hardware, training_batches
from jcl.evaluate.detection.data import coco_files, coco_module, load_coco, overfit_subset, training_subset
from jcl.evaluate.detection.predict import KINDS, Results, coco_scores, predict
from jcl.evaluate.folders import DetectionFolder
from jcl.export.loading import initial_weights, load_network, open_backbone
from jcl.report.detections import detections_picture
from jcl.runs.atomic import make_folder
from jcl.runs.checkpoint import Progress, checkpoint_to_resume, load_checkpoint, newest_checkpoint
from jcl.runs.folder import unfinished_folder
from jcl.settings.detection import (
    RANDOM,
    RANK_TIMEOUT,
    CocoFacts,
    CocoSettings,
    DetectionSettings,
    DetectOptions,
    Task,
    scaled_lr,
)
from jcl.settings.schema import LIBRARIES
from jcl.train.display import Display
from jcl.train.trainer import Trainer
from jcl.views import IMAGENET_MEAN, IMAGENET_STD


def detect(options: DetectOptions, *, console: Console = STDERR) -> DetectionFolder:
    """Train and evaluate a detector into the folder `out` (default: a new one under `runs/`)."""
    numbered = options.out is None
    wanted = DetectionFolder(options.out or Path("runs") / f"detect-{options.values['task']}")
    with run_context(options.device, RANK_TIMEOUT, console) as context:
        ranks = context.ranks
        with fail_together(ranks):
            given = options.values
            start = open_initial_backbone(given["init"], given.get("backbone"), given.get("seed", 0))
            settings = options.settings(backbone=start.name, mean=start.mean, std=start.std, label=start.label)

        def find() -> DetectionFolder | None:
            return unfinished_folder(wanted, lambda found: found.settings() == settings) if numbered else wanted

        if (begun := context.folder_to_continue(find)) is not None:
            return _resume(DetectionFolder(begun), options, context)
        with fail_together(ranks):
            coco_module("cocoeval")
            if ranks.first and not numbered:
                wanted.refuse_occupied()
            job = DetectionJob(settings, context, options.worker_count, start)
        with context.starting(wanted, numbered=numbered) as folder:
            context.on_first(lambda: folder.create(settings, job.data))
            return _train(job, folder, options.pictures)


def resume_detection(path: Path, options: DetectOptions, *, console: Console = STDERR) -> DetectionFolder:
    """Continue the training in a folder, exactly as if it had not been interrupted."""
    folder = DetectionFolder(path)
    settings = folder.settings()
    with run_context(options.given_device or settings.device, settings.rank_timeout, console) as context:
        return _resume(folder, options, context)


def evaluate_detector(path: Path, options: DetectOptions, *, console: Console = STDERR) -> dict[str, Any]:
    """COCO's metrics of a checkpoint, or of the newest one of a folder; with `out` they are also written there."""
    folder = DetectionFolder(path.parent.parent if path.is_file() else path)
    checkpoint = path if path.is_file() else newest_checkpoint(folder.checkpoints)
    settings = folder.settings()
    if checkpoint is None:
        raise RunError(f"The detector in {folder.path} has no checkpoint yet. Train it for longer first.")
    output = None if options.out is None else DetectionFolder(options.out)
    with run_context(options.device, settings.rank_timeout, console) as context:
        with fail_together(context.ranks):
            coco_module("cocoeval")
            if output is not None:
                output.refuse_occupied()
            trained_on = folder.data().train_json
            if (coco := options.coco()) is not None:
                test_data = _test_data(coco, settings.task, trained_on)
                settings = settings.model_copy(update={"coco": test_data, "overfit": None})
            job = DetectionJob(settings, context, options.worker_count, start=None)
            folder.check_classes(job.data.classes, job.val.file)
            job.trained_on = trained_on
            progress = job.load(checkpoint)
        results, figures = job.evaluate()
        summary = job.summary(figures, progress)
        del summary["train_images"]  # belongs to the test data, which may be another dataset
        if output is not None and context.ranks.first:
            make_folder(output.path)
            job.write(output, results, summary, options.pictures)
        return summary


def _test_data(coco: CocoSettings, task: Task, trained_on: str) -> CocoSettings:
    """Test on all images of a single annotation file, unless the detector was trained on it and held some out."""
    if coco.folder is None and coco.train_json is None:
        coco = coco.model_copy(update={"train_json": coco.val_json, "images": coco.images or coco.val_images})
    files = coco_files(coco, task)
    if files.val_json is None and files.checksums()["train_json"] != trained_on:
        return coco.model_copy(update={"val_json": files.train_json})
    return coco


def _resume(folder: DetectionFolder, options: DetectOptions, context: RunContext) -> DetectionFolder:
    ranks = context.ranks
    with fail_together(ranks):
        settings = folder.settings()
    if ranks.any(folder.summary_file.exists()):
        context.log(f"The detector in {folder.path} has finished; nothing to resume.")
        return folder
    with context.locked(folder):
        with fail_together(ranks):
            folder.refuse_links()
            checkpoint = checkpoint_to_resume(folder.checkpoints, context.log)
            start = None if checkpoint else open_initial_backbone(settings.init, settings.backbone, settings.seed)
            job = DetectionJob(settings, context, options.worker_count, start)
            folder.check_data(job.data)
        return _train(job, folder, options.pictures, checkpoint)


def _train(
    job: DetectionJob, folder: DetectionFolder, pictures: int, checkpoint: Path | None = None
) -> DetectionFolder:
    settings, context, ranks = job.settings, job.context, job.context.ranks
    progress = Progress(ranks=ranks.count)
    if checkpoint is not None:
        with fail_together(ranks):
            progress = job.load(checkpoint)
        progress.ranks = ranks.count
    job.announce(folder.path)
    batches = training_batches(job.train, settings, progress.step, job.hardware)
    task = model.DetectionTask(job.detector, job.optimizer, batches, settings, job.hardware)
    display = Display(context.console, settings.task)
    trainer = Trainer(task, display, progress, ranks, save_every=settings.checkpoint_every)
    with contextlib.closing(batches), trainer.writing_to(folder):
        trainer.run()
    results, figures = job.evaluate()
    if ranks.first:
        job.write(folder, results, job.summary(figures, progress), pictures)
    return folder


class InitialBackbone(NamedTuple):
    """The network a detector starts from, its normalization, and a note on where it comes from."""

    body: nn.Module
    name: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    note: str
    label: str


def open_initial_backbone(init: str, backbone: str | None, seed: int) -> InitialBackbone:
    """Open `random`, weights of a library, a run folder or a weights file; `backbone` names its network."""
    name = backbone or "resnet50"
    if init == RANDOM:
        torch.manual_seed(seed)
        note = f"{name} with random weights"
        return InitialBackbone(build_body(name), name, IMAGENET_MEAN, IMAGENET_STD, note, init)
    path = Path(init)
    if init in LIBRARIES:
        build_body(name)  # raises before anything is downloaded
        found = load_network(initial_weights(init, name), name, None)
    else:
        found = open_backbone(path, backbone)
    info = found.info
    if info.channels != 3:
        raise SettingsError(f"{path} takes images of {info.channels} channels. Detectors need three.")
    body = open_body(found.network, info.backbone, info.stem, str(path))
    loaded = f"loaded {found.loaded} tensors of {info.backbone} from {path}"
    note = f"{loaded} ({found.source}); not used: {found.unused_parts}"
    return InitialBackbone(body, info.backbone, info.mean, info.std, note, path.name or path.resolve().name)


def build_body(name: str) -> nn.Module:
    """A ResNet or ConvNeXt by name, with random weights."""
    return open_body(build_backbone(name)[0], name, "imagenet", name)


def open_body(network: nn.Module, name: str, stem: str, origin: str) -> nn.Module:
    """The modules of a network that a detector uses."""
    body = model.detector_body(network)
    if body is None or stem != "imagenet":
        needed = "a ResNet, such as resnet50, or a ConvNeXt, with the usual stem"
        found = name + (f" with the {stem} stem" if body is not None else "")
        raise SettingsError(f"Detectors need {needed}, not {found}{'' if origin == name else f' ({origin})'}.")
    return body


class DetectionJob:
    """Data, model and optimizer of a detector, on this rank's device."""

    def __init__(
        self, settings: DetectionSettings, context: RunContext, workers: int, start: InitialBackbone | None
    ) -> None:
        """Read the data and build the model, with new weights if a checkpoint will be loaded (`start` None)."""
        ranks = context.ranks.count
        if settings.batch_size % (settings.accumulate * ranks):
            parts = f"--accumulate {settings.accumulate} times {pluralize(ranks, 'rank')}"
            raise SettingsError(f"--batch-size {settings.batch_size} is not divisible by {parts}.")
        self.settings, self.context = settings, context
        precision = choose_precision(settings.precision, context.device)
        self.hardware = Hardware(context.device, precision, workers, context.ranks)
        files = coco_files(settings.coco, settings.task)
        dataset, self.val = load_coco(files, settings.task)
        self.data = CocoFacts(classes=tuple(dataset.class_names(settings.task)), **files.checksums())
        self.train, notes = training_subset(dataset, settings.task)
        if settings.overfit is not None:
            self.train, self.val = overfit_subset(self.train, dataset, settings.overfit)
        self.trained_on = self.data.train_json
        self.held_out = files.val_json is None and settings.overfit is None
        self.notes = notes if start is None else [start.note, *notes]
        body = build_body(settings.backbone) if start is None else start.body
        keypoints = len(self.train.keypoints) if settings.task == "keypoint" else 0
        detector = model.build_detector(body, settings, classes=len(self.train.categories), keypoints=keypoints)
        self.detector = model.prepare_for_training(detector, context.device, ranks)
        self.optimizer = model.build_optimizer(self.detector, settings)

    @property
    def on_training_images(self) -> bool:
        return self.settings.overfit is not None or self.data.val_json == self.trained_on

    def load(self, checkpoint: Path) -> Progress:
        return load_checkpoint(checkpoint, self.detector, self.optimizer, self.context.device)

    def announce(self, folder: Path) -> None:
        """Print data, schedule, and what differs from the paper."""
        settings, device = self.settings, self.context.device
        source = "held out of the same file" if self.held_out else str(self.val.file)
        classes = pluralize(len(self.train.categories), "class", "classes")
        trained = f"{pluralize(len(self.train.images), 'image')} of {self.train.file} ({classes})"
        tested = f"{pluralize(len(self.val.images), 'image')} ({source})"
        self.context.log(f"Training {settings.task} on {trained}, testing on {tested}, on {device}, into {folder}")
        first, second = settings.milestones
        rate = f"learning rate {settings.lr:g}, warm-up {settings.warmup:,}, decayed after {first:,} and {second:,}"
        schedule = f"{pluralize(settings.iterations, 'iteration')}, batch size {settings.batch_size}, {rate}"
        usual = scaled_lr(settings.batch_size)
        remarks = {
            f"the default learning rate for this batch size is {usual:g}": settings.lr != usual,
            "tested on the training images": self.on_training_images,
            "small heads, not comparable with the paper": settings.heads != "standard",
        }
        for note in (*self.notes, schedule, *(remark for remark, applies in remarks.items() if applies)):
            self.context.log(f"  {note}")

    def evaluate(self) -> tuple[Results, dict[str, Any]]:
        """Predictions for the test images, and COCO's metrics, which the first rank computes."""
        settings, context = self.settings, self.context
        context.log(f"Testing on {pluralize(len(self.val.images), 'image')} ...")
        begun = time.perf_counter()
        results = predict(self.detector, self.val, KINDS[settings.task], self.hardware)
        seconds = time.perf_counter() - begun
        figures: dict[str, Any] = {}
        if context.ranks.first:
            for kind, entries in results.items():
                figures |= coco_scores(self.val, entries, kind)
        return results, figures | {
            "test_images": len(self.val.images),
            "test_held_out": self.held_out,
            "tested_on_training_images": self.on_training_images,
            "test_images_per_second": len(self.val.images) / max(seconds, 1e-9),
        }

    def summary(self, figures: dict[str, Any], progress: Progress) -> dict[str, Any]:
        """All figures of a finished detector."""
        settings = self.settings
        names = ("task", "label", "init", "backbone", "heads", "batch_size", "accumulate", "lr", "seed")
        return {
            **figures,
            **{name: getattr(settings, name) for name in names},
            "iterations": progress.step,
            "ranks": progress.ranks,
            "train_images": len(self.train.images),
            "classes": len(self.train.categories),
            "images_per_second": progress.step * settings.batch_size / max(progress.seconds, 1e-9),
            "seconds": progress.seconds,
        }

    def write(self, folder: DetectionFolder, results: Results, summary: dict[str, Any], pictures: int) -> None:
        folder.write_results(results)
        if rows := [row for row, image in enumerate(self.val.images) if image.annotations][:pictures]:
            title = f"{self.settings.task}: {self.settings.label}"
            trained = f"{summary['iterations']:,} iterations, batch size {self.settings.batch_size}"
            subtitle = f"{self.settings.backbone}, {trained}"
            detections_picture(folder.picture_file, self.val, results, rows, title, subtitle)
        folder.write_summary(summary)  # last, because it marks the detector as finished
