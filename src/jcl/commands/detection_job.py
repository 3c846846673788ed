"""A COCO detector before and after its training: initial backbone, settings, data and model; evaluation and summary."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from jcl.commands.run import RunContext
from jcl.console import pluralize
from jcl.core.encoder import build_backbone
from jcl.cores import default_workers
from jcl.distributed.device import choose_precision
from jcl.errors import SettingsError
from jcl.evaluate.detection.batches import Hardware
from jcl.evaluate.detection.data import coco_files, load_coco, overfit_subset, training_subset
from jcl.evaluate.detection.model import build_detector, build_optimizer, detector_body, prepare_for_training
from jcl.evaluate.detection.predict import KINDS, Results, coco_scores, predict
from jcl.evaluate.folders import DetectionFolder
from jcl.export.loading import open_backbone
from jcl.report.detections import detections_picture
from jcl.runs.checkpoint import Progress, load_checkpoint
from jcl.settings.detection import RANDOM, DetectionSettings, scaled_lr
from jcl.views import IMAGENET_MEAN, IMAGENET_STD

_DEFAULT_BACKBONE = "resnet50"


@dataclass(frozen=True)
class InitialBackbone:
    """The network a detector starts from, its normalization, and a note on where it comes from."""

    body: nn.Module
    name: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    note: str
    label: str


def open_initial_backbone(init: str, backbone: str | None = None, seed: int = 0, **_: Any) -> InitialBackbone:
    """Open `random`, a run folder or a weights file; `backbone` names its network if needed.

    Other settings of a detector are ignored.
    """
    if init == RANDOM:
        name, note = backbone or _DEFAULT_BACKBONE, "with random weights"
        torch.manual_seed(seed)
        return InitialBackbone(build_body(name), name, IMAGENET_MEAN, IMAGENET_STD, f"{name} {note}", init)
    path = Path(init)
    found = open_backbone(path, backbone)
    name, info = found.info.backbone, found.info
    body = open_body(found.network, name, info.stem, str(path))
    skipped = ", ".join(f"{part} ({count})" for part, count in found.unused.items())
    note = (
        f"loaded {found.loaded} tensors of {name} from {path} ({found.source}), all "
        f"{len(body.state_dict())} of the backbone; {f'left out: {skipped}' if skipped else 'nothing left out'}"
    )
    return InitialBackbone(body, name, info.mean, info.std, note, path.name or path.resolve().name)


def build_body(name: str) -> nn.Module:
    """A ResNet or ConvNeXt by name, with random weights."""
    return open_body(build_backbone(name)[0], name, "imagenet", name)


def open_body(network: nn.Module, name: str, stem: str, origin: str) -> nn.Module:
    """The modules of a network that a detector uses."""
    if stem != "imagenet":
        raise SettingsError(f"{origin} has the {stem} stem, for small images. Detectors need the usual stem.")
    body = detector_body(network)
    if body is None:
        raise SettingsError(f"{origin} is a {name}. Detectors need a ResNet, such as resnet50, or a ConvNeXt.")
    return body


class DetectionJob:
    """Data, model and optimizer of a detector, on this rank's device."""

    def __init__(
        self,
        settings: DetectionSettings,
        context: RunContext,
        workers: int | None,
        start: InitialBackbone | None = None,
    ) -> None:
        """Read the data and build the model, with new weights if a checkpoint will be loaded (`start` None)."""
        ranks = context.ranks.count
        if settings.batch_size % (settings.accumulate * ranks):
            raise SettingsError(
                f"--batch-size {settings.batch_size} is not divisible by --accumulate {settings.accumulate} times "
                f"{pluralize(ranks, 'rank')}."
            )
        self.settings, self.context = settings, context
        precision = choose_precision(settings.precision, context.device)
        workers = default_workers() if workers is None else workers
        self.hardware = Hardware(context.device, precision, workers, context.ranks)
        files = coco_files(settings.coco, settings.task)
        dataset, self.val = load_coco(files, settings.task)
        self.train, notes = training_subset(dataset, settings.task)
        if settings.overfit is not None:
            self.train, self.val = overfit_subset(self.train, dataset, settings.overfit)
        self.held_out = files.val_json is None and settings.overfit is None
        self.notes = notes if start is None else [start.note, *notes]
        body = build_body(settings.backbone) if start is None else start.body
        keypoints = len(self.train.keypoints) if settings.task == "keypoint" else 0
        detector = build_detector(body, settings, classes=len(self.train.categories), keypoints=keypoints)
        self.detector = prepare_for_training(detector, context.device, ranks)
        self.optimizer = build_optimizer(self.detector, settings)

    def load(self, checkpoint: Path) -> Progress:
        return load_checkpoint(checkpoint, self.detector, self.optimizer, self.context.device)

    def announce(self, folder: Path) -> None:
        """Print data, schedule, and what differs from the paper."""
        settings, device = self.settings, self.context.device
        source = "held out of the same file" if self.held_out else str(self.val.file)
        self.context.log(
            f"Training {settings.task} on {pluralize(len(self.train.images), 'image')} of {self.train.file} "
            f"({pluralize(len(self.train.categories), 'class', 'classes')}), testing on "
            f"{pluralize(len(self.val.images), 'image')} ({source}), on {device}, into {folder}"
        )
        first, second = settings.milestones
        schedule = (
            f"{pluralize(settings.iterations, 'iteration')}, batch size {settings.batch_size}, learning rate "
            f"{settings.lr:g}, warm-up {settings.warmup:,}, decayed after {first:,} and {second:,}"
        )
        usual = scaled_lr(settings.batch_size)
        unsynchronized = self.context.ranks.count > 1 and device.type == "cpu"
        remarks = {
            f"the paper's learning rate for this batch size is {usual:g}": settings.lr != usual,
            "batch norms are not synchronized across ranks: only GPUs do that": unsynchronized,
            f"batch norms see one of the {settings.accumulate} parts of a batch at a time": settings.accumulate > 1,
            "overfitting: tested on the training images": settings.overfit is not None,
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
            "tested_on_training_images": settings.overfit is not None,
            "test_images_per_second": len(self.val.images) / max(seconds, 1e-9),
        }

    def draw(self, folder: DetectionFolder, results: Results, pictures: int) -> None:
        """Draw annotations and predictions of the first test images."""
        settings = self.settings
        rows = [row for row, image in enumerate(self.val.images) if image.annotations][:pictures]
        if rows:
            title = f"{settings.task}: {settings.label}"
            subtitle = f"{settings.backbone}, {settings.iterations:,} iterations, batch size {settings.batch_size}"
            detections_picture(folder.picture_file, self.val, results, rows, title, subtitle)

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
