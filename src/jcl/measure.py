"""Measuring a run or a weights file on labelled data: what the commands under "evaluate" call."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import nn

from jcl.automatic import voters
from jcl.data import ImageData, ImageSource, open_data
from jcl.errors import DataError, RunError, SettingsError
from jcl.evaluate.classification import ClassificationTask, Scores, classification_task
from jcl.evaluate.features import Features
from jcl.evaluate.knn import KnnResult
from jcl.evaluate.labelled_views import USUAL_LEAST_CROP
from jcl.evaluate.linear import LEARNING_RATES, WEIGHT_DECAYS, ProbeGrid, linear_probe
from jcl.evaluate.linear_paper import PAPER_EPOCHS, PAPER_LR, paper_probe, paper_settings
from jcl.evaluate.online import FeatureSettings, knn_on
from jcl.exchange import BackboneInfo, load_backbone
from jcl.run_data import open_run_data
from jcl.settings import TrainSettings
from jcl.train.folder import RunFolder
from jcl.train.rank_group import joined_ranks
from jcl.train.runtime import choose_device

RANK_TIMEOUT = 1800.0
"""Seconds that ranks wait for each other while features are measured."""


@dataclass(frozen=True)
class Subject:
    """A backbone, how images are shown to it, the labelled data to measure it on and the device to do so."""

    backbone: nn.Module
    info: BackboneInfo
    data: ImageData
    device: torch.device

    @property
    def shown(self) -> FeatureSettings:
        return FeatureSettings(self.info.image_size, self.info.mean, self.info.std)


def open_subject(weights: Path, location: str | None, device: str = "auto") -> Subject:
    """The backbone of a run or file with the labelled data at `location` (default: what the run was trained on)."""
    backbone = load_backbone(weights)
    info = backbone.info
    assert isinstance(info, BackboneInfo)
    return Subject(backbone, info, _labelled(weights, location), choose_device(device))


def measure_knn(
    weights: Path,
    location: str | None,
    *,
    k: Sequence[int],
    temperature: Sequence[float],
    batch_size: int = 256,
    workers: int = 0,
    device: str = "auto",
) -> list[KnnResult]:
    """Weighted kNN of a run's or file's frozen features on the data at `location` (default: the run's own).

    Without `k` as many vote as in a run on these images. Ranks that a launcher started share the images and the queries
    out among them.
    """
    with joined_ranks(device, RANK_TIMEOUT) as (ranks, target):
        subject = open_subject(weights, location, str(target))

        def features(source: ImageSource) -> Features:
            return subject.shown.extract(
                subject.backbone, source, device=target, batch_size=batch_size, workers=workers
            )

        votes = k or [voters(len(subject.data.train))]
        return knn_on(subject.data, features, k=votes, temperature=temperature, seed=0, device=target, ranks=ranks)


@dataclass(frozen=True)
class LinearReport:
    """What a linear probe found: its scores, the classes they speak of, and the figures by plain names."""

    scores: Scores
    class_names: tuple[str, ...]
    figures: dict[str, Any]
    edges: tuple[str, ...] = ()  # of the grid, where the chosen cell lies at one


def measure_linear(
    weights: Path,
    location: str | None,
    *,
    protocol: Literal["fast", "paper"] = "fast",
    learning_rates: Sequence[float] = (),
    weight_decays: Sequence[float] = (),
    epochs: int | None = None,
    batch_size: int = 256,
    workers: int | None = None,
    device: str = "auto",
    seed: int = 0,
    least_crop: float = USUAL_LEAST_CROP,
    compiled: bool = False,
    console: Console | None = None,
) -> LinearReport:
    """The linear probe of a run's or file's frozen features on the data at `location` (default: the run's own).

    `fast` trains a grid of probes on cached features and chooses among them on a part of the training images; `paper`
    trains one on augmented views, with one learning rate (default 30) and no weight decay; its crops keep at least
    `least_crop` of an image's area, 8 % as usual, which leaves little of images of 32 px.
    """
    started = time.perf_counter()
    subject = open_subject(weights, location, device)
    task = classification_task(subject.data)
    workers = usual_workers() if workers is None else workers
    if protocol == "fast":
        grid = ProbeGrid(tuple(learning_rates) or LEARNING_RATES, tuple(weight_decays) or WEIGHT_DECAYS)
        report = _fast_linear(subject, task, grid, epochs, batch_size, workers, seed)
    else:
        if len(learning_rates) > 1 or any(weight_decays):
            raise SettingsError(
                "the paper's protocol has one learning rate and no weight decay; "
                "give one --lr, or use --protocol fast to choose among several."
            )
        train = paper_settings(
            lr=learning_rates[0] if learning_rates else PAPER_LR,
            epochs=PAPER_EPOCHS if epochs is None else epochs,
            batch_size=batch_size,
            seed=seed,
            compiled=compiled,
        )
        report = _paper_linear(subject, task, train, workers, least_crop, console)
    report.figures["seconds"] = time.perf_counter() - started
    return report


def usual_workers() -> int:
    """One process a CPU core to decode images, 16 at most; arrays are not decoded and take none anyway."""
    return min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1))


def _fast_linear(
    subject: Subject,
    task: ClassificationTask,
    grid: ProbeGrid,
    epochs: int | None,
    batch_size: int,
    workers: int,
    seed: int,
) -> LinearReport:
    def features(source: ImageSource) -> Features:
        return subject.shown.extract(
            subject.backbone, source, device=subject.device, batch_size=batch_size, workers=workers
        )

    train, test = features(task.train), features(task.test)
    assert train.labels is not None and test.labels is not None
    result = linear_probe(
        train.values,
        train.labels,
        test.values,
        test.labels,
        grid=grid,
        epochs=epochs,
        seed=seed,
        device=subject.device,
    )
    chosen = {
        "lr": result.lr,
        "weight_decay": result.weight_decay,
        "epochs": result.epochs,
        "validation_top1": result.validation_top1,
        "train_images": result.train_images,
    }
    names = dict(zip(task.classes.tolist(), task.class_names, strict=True))
    figures = _linear_figures("fast", result.scores, chosen, task, seed)
    return LinearReport(result.scores, tuple(names[label] for label in result.classes), figures, result.edges)


def _paper_linear(
    subject: Subject,
    task: ClassificationTask,
    train: TrainSettings,
    workers: int,
    least_crop: float,
    console: Console | None,
) -> LinearReport:
    scores = paper_probe(
        subject.backbone,
        subject.info.feature_width,
        subject.shown,
        task,
        train,
        device=subject.device,
        workers=workers,
        least_crop=least_crop,
        console=console,
    )
    chosen = {"lr": train.lr, "weight_decay": 0.0, "epochs": train.epochs, "train_images": len(task.train)}
    chosen["least_crop"] = least_crop
    return LinearReport(scores, task.class_names, _linear_figures("paper", scores, chosen, task, train.seed))


def _linear_figures(
    protocol: str, scores: Scores, chosen: dict[str, Any], task: ClassificationTask, seed: int
) -> dict[str, Any]:
    found = {"linear_top1": scores.top1, "linear_top5": scores.top5, "protocol": protocol}
    about = {"test_images": scores.images, "test_held_out": task.held_out, "classes": len(task.classes), "seed": seed}
    return found | chosen | about


def _labelled(weights: Path, location: str | None) -> ImageData:
    if location is None:
        if not weights.is_dir():
            raise RunError(
                f"{weights} is a weights file; say which data to measure it on: give the data after the weights."
            )
        settings = RunFolder(weights).settings()
        data = open_run_data(settings, Console(stderr=True))
    else:
        data = open_data(location)
    if data.train.labels is None:
        raise DataError(f"{data.train.description} has no labels, so features cannot be measured on it.")
    return data
