"""Fine-tuning from settings to a finished folder: the parts put together.

`finetune` and `resume_finetuning` are what the command calls and what Python users call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from jcl.core.encoder import build_backbone
from jcl.data import ImageSource
from jcl.data.opening import KNOWN_SETS
from jcl.errors import DataError
from jcl.evaluate.classification import ClassificationTask, Scores, classification_task, positions
from jcl.evaluate.finetune import (
    FinetuneSettings,
    backbone_parts,
    finetune_optimiser,
    finetune_settings,
    usual_batch_size,
)
from jcl.evaluate.finetune_folder import FinetuneFolder
from jcl.evaluate.label_subset import label_amount, label_subset, part_of
from jcl.evaluate.labelled_views import crop_and_flip, judge, training_batches
from jcl.evaluate.supervised import Classifier, SupervisedFiles, SupervisedTraining
from jcl.evaluate.supervised_display import SupervisedDisplay
from jcl.exchange import load_backbone, save_backbone
from jcl.measure import Subject, open_subject, usual_workers
from jcl.speech import counted, tell
from jcl.train.checkpoint import Progress, load_checkpoint, newest_checkpoint
from jcl.train.folder import free_folder
from jcl.train.record import Record

USUAL_LR = 0.1  # for a batch of 256, in proportion to the root of the batch
USUAL_HEAD_LR = 0.3  # likewise
USUAL_EPOCHS = 50


def finetune(
    weights: Path,
    location: str | None,
    *,
    out: Path | None = None,
    labels: str = "100%",
    from_scratch: bool = False,
    epochs: int = USUAL_EPOCHS,
    batch_size: int | None = None,
    lr: float | None = None,
    head_lr: float | None = None,
    layer_decay: float | None = None,
    weight_decay: float = 1e-4,
    warmup_epochs: float | None = None,
    label_smoothing: float = 0.0,
    jitter: bool = False,
    seed: int = 0,
    device: str = "auto",
    compiled: bool = False,
    workers: int | None = None,
    console: Console | None = None,
) -> FinetuneFolder:
    """Train a run's or file's whole network with labels into the folder `out` (default: a new one under `runs/`).

    What is not given is chosen by the number of labels: the batch as `usual_batch_size` says, the learning rates in
    proportion to its root, a tenth of the epochs to warm up. `from_scratch` starts from random weights instead; no part
    of the network then has a better start than another, so all have the same learning rate.
    """
    console = console or Console(stderr=True)
    amount = label_amount(labels)
    subject = open_subject(weights, location, device)
    task = classification_task(subject.data)
    used = len(label_subset(_labels(task.train), amount, seed))
    batch_size = usual_batch_size(used) if batch_size is None else batch_size
    lr = round(USUAL_LR * math.sqrt(batch_size / 256), 6) if lr is None else lr
    usual_head_lr = lr if from_scratch else round(USUAL_HEAD_LR * math.sqrt(batch_size / 256), 6)
    usual_decay = 1.0 if from_scratch else 0.7
    train = {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "weight_decay": weight_decay,
        "schedule": "cosine",
        "schedule_by": "step",
        "warmup_epochs": 0.1 * epochs if warmup_epochs is None else warmup_epochs,
        "seed": seed,
        "device": device,
        "compile": compiled,
    }
    values = {
        "weights": str(weights.resolve()),
        "data": _whole_path(location),
        "labels": labels,
        "from_scratch": from_scratch,
        "layer_decay": usual_decay if layer_decay is None else layer_decay,
        "head_lr": usual_head_lr if head_lr is None else head_lr,
        "label_smoothing": label_smoothing,
        "jitter": jitter,
        "train": train,
    }
    settings = finetune_settings(values, "the options of `jcl finetune`")
    folder = FinetuneFolder(free_folder(Path("runs"), f"finetune-{subject.data.name}") if out is None else out)
    folder.refuse_occupied()
    work = _prepare(settings, subject, task, workers)
    folder.create(settings, work.names)
    try:
        return _train(settings, folder, work, console)
    except DataError:
        folder.forget_unless_begun()  # so that the same command can be given again once the data is mended
        raise


def resume_finetuning(path: Path, *, workers: int | None = None, console: Console | None = None) -> FinetuneFolder:
    """Continue a stopped fine-tuning from its newest readable checkpoint, exactly as if it had never stopped."""
    console = console or Console(stderr=True)
    folder = FinetuneFolder(path)
    settings = folder.settings()
    if folder.summary_file.exists():
        _say(console, f"The fine-tuning in {folder.path} has finished; there is nothing to resume.")
        return folder
    subject = open_subject(Path(settings.weights), settings.data, settings.train.device)
    work = _prepare(settings, subject, classification_task(subject.data), workers)
    folder.check_labels(work.names)
    checkpoint = newest_checkpoint(folder.checkpoints)
    _say(console, f"Resuming from {checkpoint}." if checkpoint else "No checkpoint yet: starting from the first step.")
    return _train(settings, folder, work, console, checkpoint)


def load_classifier(path: str | Path) -> tuple[nn.Module, tuple[str, ...]]:
    """The network of a finished fine-tuning, in eval mode, giving logits, and the names of its classes."""
    folder = FinetuneFolder(path)
    tensors, names = folder.load_classifier()
    classes, width = tensors["weight"].shape
    network = Classifier(load_backbone(folder.backbone_file), width, classes, frozen=False, seed=0)
    network.fc.load_state_dict(tensors)
    return network.eval(), names


@dataclass(frozen=True)
class _Work:
    """A fine-tuning ready to start; `names` are those of the labelled images in use."""

    subject: Subject
    task: ClassificationTask
    labelled: ImageSource
    names: list[str]
    network: Classifier
    workers: int


def _prepare(settings: FinetuneSettings, subject: Subject, task: ClassificationTask, workers: int | None) -> _Work:
    """Choose the labels and build the network; whatever is wrong with the settings shows here."""
    seed, info = settings.train.seed, subject.info
    rows = label_subset(_labels(task.train), settings.amount, seed)
    backbone = subject.backbone
    if settings.from_scratch:
        torch.manual_seed(seed)
        backbone, _ = build_backbone(info.backbone, stem=info.stem, image_size=info.image_size)  # type: ignore[arg-type]
    network = Classifier(backbone, info.feature_width, len(task.classes), frozen=False, seed=seed).to(subject.device)
    if subject.device.type == "cuda":
        network.to(memory_format=torch.channels_last)
    return _Work(
        subject=subject,
        task=task,
        labelled=part_of(task.train, rows),
        names=[task.train.name_of(row) for row in rows.tolist()],
        network=network,
        workers=usual_workers() if workers is None else workers,
    )


def _train(
    settings: FinetuneSettings, folder: FinetuneFolder, work: _Work, console: Console, checkpoint: Path | None = None
) -> FinetuneFolder:
    device, shown, network = work.subject.device, work.subject.shown, work.network
    optimiser = finetune_optimiser(network, settings)
    progress = Progress() if checkpoint is None else load_checkpoint(checkpoint, network, optimiser, device)
    _announce(console, settings, folder, work)
    loader = training_batches(work.labelled, shown, settings.train, device=device, workers=work.workers)
    with Record(folder.path, resumed_at=progress.step, tensorboard=False) as record, loader:
        SupervisedTraining(
            network=network,
            optimiser=optimiser,
            loader=loader,
            targets=positions(_labels(work.labelled), work.task.classes).to(device),
            recipe=crop_and_flip(shown, jitter=settings.jitter),
            train=settings.train,
            display=SupervisedDisplay(console, "fine-tuning"),
            label_smoothing=settings.label_smoothing,
            files=SupervisedFiles(folder.checkpoints, record, folder.how_to_resume),
            progress=progress,
        ).run()
    found = judge(network, work.task, shown, settings.train, device=device, workers=work.workers)
    save_backbone(network.backbone, work.subject.info, folder.backbone_file)
    folder.save_classifier(network.fc, work.task.class_names)
    folder.write_summary(_summary(settings, work, found, progress))  # last, because it marks the work as finished
    return folder


def _summary(settings: FinetuneSettings, work: _Work, found: Scores, progress: Progress) -> dict[str, Any]:
    """The figures of the finished work: one flat object with plain names."""
    train = settings.train
    return {
        "finetune_top1": found.top1,
        "finetune_top5": found.top5,
        "labels": settings.labels,
        "labels_used": len(work.names),
        "classes": len(work.task.classes),
        "test_images": found.images,
        "test_held_out": work.task.held_out,
        "from_scratch": settings.from_scratch,
        "epochs": train.epochs,
        "steps": progress.step,
        "batch_size": train.batch_size,
        "lr": train.lr,
        "head_lr": settings.head_lr,
        "layer_decay": settings.layer_decay,
        "weight_decay": train.weight_decay,
        "label_smoothing": settings.label_smoothing,
        "seed": train.seed,
        "seconds": progress.seconds,
    }


def _announce(console: Console, settings: FinetuneSettings, folder: FinetuneFolder, work: _Work) -> None:
    start = "random weights" if settings.from_scratch else settings.weights
    parts = backbone_parts(work.network.backbone)
    lowest = float(settings.train.lr) * settings.layer_decay ** (len(parts) - 1)
    _say(
        console,
        f"Fine-tuning {work.subject.info.backbone} from {start} with {counted(len(work.names), 'labelled image')} "
        f"({settings.labels} of {len(work.task.train):,}, {counted(len(work.task.classes), 'class', 'classes')}) "
        f"on {work.subject.device}, {counted(settings.train.epochs, 'epoch')} "
        f"in batches of {settings.train.batch_size}, into {folder.path}",
    )
    _say(
        console,
        f"  learning rates: {lowest:.2g} ({parts[0].name}) to {settings.train.lr:.2g} ({parts[-1].name}), "
        f"{settings.head_lr:.2g} for the new layer",
    )


def _labels(source: ImageSource) -> torch.Tensor:
    assert source.labels is not None, "a task's training images are labelled"
    return source.labels


def _whole_path(location: str | None) -> str | None:
    """A folder or file by its whole path, so that work can be resumed from anywhere; a data set's name stays one."""
    if location is None or location in KNOWN_SETS or not Path(location).expanduser().exists():
        return location
    return str(Path(location).expanduser().resolve())


def _say(console: Console, text: str) -> None:
    tell(console, text)
