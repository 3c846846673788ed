"""The parts of a transfer to COCO before and after its training: settings, data, network; metrics and pictures."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jcl.commands.context import RunContext
from jcl.commands.detect_start import Start, build_resnet, whole_init
from jcl.console import pluralize
from jcl.distributed.device import choose_precision
from jcl.errors import SettingsError
from jcl.evaluate.detection.coco_data import CocoSet, for_training, only_few, open_coco
from jcl.evaluate.detection.coco_layout import coco_files
from jcl.evaluate.detection.folder import DetectionFolder
from jcl.evaluate.detection.model import build_detector, prepared
from jcl.evaluate.detection.predicting import KINDS, Results, predict
from jcl.evaluate.detection.scoring import coco_scores
from jcl.evaluate.detection.settings import (
    PAPER_BATCH,
    PAPER_LR,
    CocoSettings,
    DetectionSettings,
    detection_settings,
    scaled_lr,
    usual_warmup,
)
from jcl.paths import home_expanded
from jcl.report.detections import detections_picture
from jcl.runs.checkpoint import Progress

ORIGIN = "the options of `jcl detect`"


@dataclass(frozen=True)
class DetectionContext(RunContext):
    """Where a detector is trained, with how many decoding processes."""

    workers: int


@dataclass(frozen=True)
class Work:
    """Data and detector, ready to start; `notes` are for the user."""

    train: CocoSet
    val: CocoSet
    held_out: bool
    detector: nn.Module
    precision: torch.dtype
    notes: list[str]


def whole_paths(coco: dict[str, str]) -> CocoSettings:
    """Where the data lies, by whole paths."""
    return CocoSettings(**{name: str(home_expanded(value).resolve()) for name, value in coco.items()})


def whole_settings(given: dict[str, Any], start: Start) -> DetectionSettings:
    """The paper's values, those that were given, and what follows from both."""
    plain = {name: value for name, value in given.items() if value is not None}
    values = {"label": start.label} | plain
    values |= {"backbone": start.backbone, "mean": start.mean, "std": start.std}
    values |= {"init": whole_init(values["init"]), "coco": whole_paths(values["coco"]).model_dump()}
    first = detection_settings(values, ORIGIN)  # what the rest follows from is known to make sense
    follows = {"lr": scaled_lr(first.batch_size), "warmup": usual_warmup(first.iterations)}
    if "short_side" in values:
        follows["test_short_side"] = first.short_side[1]
        follows["max_side"] = round(first.short_side[1] * 1333 / 800)
    return detection_settings(follows | values, ORIGIN)


def prepare(settings: DetectionSettings, context: DetectionContext, start: Start | None) -> Work:
    """Read the data and build the network; whatever is wrong with the settings shows here."""
    parts = settings.accumulate * context.ranks.count
    if settings.batch_size % parts:
        raise SettingsError(
            f"a batch of {settings.batch_size} cannot be split into {pluralize(settings.accumulate, 'part')} on "
            f"{pluralize(context.ranks.count, 'rank')}; choose another --batch-size or --accumulate."
        )
    files = coco_files(settings.coco, settings.task)
    whole, val = open_coco(files, settings.task)
    train, notes = for_training(whole, settings.task)
    held_out = files.val_json is None
    if settings.overfit is not None:
        train, val = only_few(train, whole, settings.overfit)
        held_out = False
    resnet = build_resnet(settings.backbone) if start is None else start.resnet
    keypoints = len(train.keypoints) if settings.task == "keypoint" else 0
    detector = build_detector(resnet, settings, classes=len(train.categories), keypoints=keypoints)
    precision = choose_precision(settings.precision, context.device)
    if start is not None:
        notes = [start.account, *notes]
    return Work(train, val, held_out, prepared(detector, context.device, context.ranks.count), precision, notes)


def announce(settings: DetectionSettings, folder: DetectionFolder, work: Work, context: DetectionContext) -> None:
    """Say what is about to happen: the data, the schedule, and what is not as in the paper."""
    tested = "a fifth of the same file, held out" if work.held_out else f"{work.val.file}"
    if settings.overfit is not None:
        tested = "the same ones, to see that everything learns"
    classes = pluralize(len(work.train.categories), "class", "classes")
    context.say(
        f"Training {settings.task} on {pluralize(len(work.train.images), 'image')} of {work.train.file} "
        f"({classes}), to be tested on {pluralize(len(work.val.images), 'image')} ({tested}), "
        f"on {context.device}, into {folder.path}"
    )
    for note in work.notes:
        context.say(f"  {note}")
    first, second = settings.milestones
    context.say(
        f"  {pluralize(settings.iterations, 'iteration')} in batches of {settings.batch_size}; "
        f"learning rate {settings.lr:g} ({PAPER_LR:g} for {PAPER_BATCH} images, in proportion: "
        f"{scaled_lr(settings.batch_size):g}) after a warm-up of {settings.warmup:,}, "
        f"a tenth after {first:,} and again after {second:,}"
    )
    if context.ranks.count > 1 and context.device.type == "cpu":
        context.say("  batch norms see one rank's part of the batch: only GPUs synchronise them")
    if settings.accumulate > 1:
        context.say(f"  batch norms see one of the {settings.accumulate} parts of the batch at a time")
    if settings.heads != "standard":
        context.say("  small heads: for trying things out, not comparable with the paper")


def judge(settings: DetectionSettings, work: Work, context: DetectionContext) -> tuple[Results, dict[str, Any]]:
    """What the detector finds in the test images, and COCO's metrics of it, which the first rank computes."""
    context.say(f"Looking at {pluralize(len(work.val.images), 'test image')} ...")
    begun = time.perf_counter()
    results = predict(
        work.detector,
        work.val,
        KINDS[settings.task],
        device=context.device,
        precision=work.precision,
        workers=context.workers,
        ranks=context.ranks,
    )
    seconds = time.perf_counter() - begun
    figures: dict[str, Any] = {}
    if context.ranks.first:
        for kind, entries in results.items():
            figures |= coco_scores(work.val, entries, kind)
    return results, figures | {
        "test_images": len(work.val.images),
        "test_held_out": work.held_out,
        "tested_on_training_images": settings.overfit is not None,
        "test_images_per_second": len(work.val.images) / max(seconds, 1e-9),
    }


def draw(settings: DetectionSettings, folder: DetectionFolder, work: Work, results: Results, pictures: int) -> None:
    """A picture of the first test images with what is there and what was found."""
    rows = [row for row, image in enumerate(work.val.images) if image.annotations][:pictures]
    if rows:
        subtitle = f"{settings.backbone}, {settings.iterations:,} iterations in batches of {settings.batch_size}"
        title = f"{settings.task}: {settings.label}"
        detections_picture(folder.picture_file, work.val, results, rows, title, subtitle)


def summary(settings: DetectionSettings, work: Work, figures: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The figures of the finished work: one flat object with plain names."""
    return {
        **figures,
        "task": settings.task,
        "label": settings.label,
        "init": settings.init,
        "backbone": settings.backbone,
        "heads": settings.heads,
        "iterations": progress.step,
        "batch_size": settings.batch_size,
        "accumulate": settings.accumulate,
        "ranks": progress.ranks,
        "lr": settings.lr,
        "seed": settings.seed,
        "train_images": len(work.train.images),
        "classes": len(work.train.categories),
        "images_per_second": progress.step * settings.batch_size / max(progress.seconds, 1e-9),
        "seconds": progress.seconds,
    }
