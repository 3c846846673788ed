"""Fine-tuning from options to a finished folder: what `jcl finetune` does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import nn

from jcl.commands.run_data import refuse_inside_data
from jcl.commands.target import EvaluationTarget, data_location, open_target
from jcl.console import StderrConsole, pluralize, print_line
from jcl.core.encoder import build_backbone
from jcl.cores import usual_workers
from jcl.data import ImageSource
from jcl.data.named import absolute_location
from jcl.data.source import select_images
from jcl.distributed.device import on_device
from jcl.errors import SettingsError
from jcl.evaluate.classification import ClassificationTask, classification_task, label_amount, label_subset
from jcl.evaluate.finetune import (
    FinetuneSettings,
    backbone_parts,
    default_batch_size,
    finetune_optimizer,
    finetune_settings,
)
from jcl.evaluate.folders import FinetuneFolder
from jcl.evaluate.supervised import Classifier, ClassifierTraining, Evaluated, crop_and_flip, train_and_evaluate
from jcl.export import load_backbone, save_backbone
from jcl.runs.folder import starting_folder
from jcl.runs.lock import RunLock
from jcl.settings.evaluation import FinetuneOptions

DEFAULT_LR = 0.1  # for a batch of 256, scaled by the square root of the batch size
DEFAULT_HEAD_LR = 0.3  # likewise


def finetune(options: FinetuneOptions, *, console: Console | None = None) -> FinetuneFolder:
    """Fine-tune the whole network of a run or file with labels, into the folder `out` (default: a new one in `runs/`).

    Defaults depend on the number of labels: the batch size (`default_batch_size`), learning rates scaled by its square
    root, and a warm-up of a tenth of the epochs. `from_scratch` starts from random weights, with one learning rate for
    all layers.
    """
    console = console or StderrConsole()
    weights, location = options.weights, options.data
    if weights is None:
        raise SettingsError("give the weights to fine-tune, as in: jcl finetune runs/photos photos/ --labels 10%.")
    subject, task, settings = _chosen(options, weights, console)
    out = options.out
    refuse_inside_data(Path("runs") if out is None else out, data_location(weights, location))
    if out is not None:
        FinetuneFolder(out).refuse_occupied()
    work = _prepare(settings, subject, task, options.workers)
    wanted = Path("runs") / f"finetune-{subject.data.name}" if out is None else out
    with starting_folder(wanted, numbered=out is None) as path:
        folder = FinetuneFolder(path)
        with folder.begun(warn=lambda text: print_line(console, text)):
            folder.create(settings.model_dump_json(indent=2), work.names)
            return _train(settings, folder, work, console)


def _chosen(
    options: FinetuneOptions, weights: Path, console: Console
) -> tuple[EvaluationTarget, ClassificationTask, FinetuneSettings]:
    """What is fine-tuned, on which task, with which settings."""
    amount, epochs = label_amount(options.labels), options.epochs
    subject = open_target(weights, options.data, options.device, console)
    task = classification_task(subject.data)
    labels = len(label_subset(_labels(task.train), amount, options.seed))
    defaults = _default_rates(labels, options.batch_size, options.lr, options.from_scratch)
    train = {
        "epochs": epochs,
        "batch_size": defaults.batch_size,
        "lr": defaults.lr,
        "weight_decay": options.weight_decay,
        "schedule": "cosine",
        "schedule_by": "step",
        "warmup_epochs": 0.1 * epochs if options.warmup_epochs is None else options.warmup_epochs,
        "seed": options.seed,
        "device": options.device,
        "compile": options.compile,
    }
    values = {
        "weights": str(weights.resolve()),
        "data": None if options.data is None else absolute_location(options.data),
        "labels": options.labels,
        "from_scratch": options.from_scratch,
        "layer_decay": defaults.layer_decay if options.layer_decay is None else options.layer_decay,
        "head_lr": defaults.head_lr if options.head_lr is None else options.head_lr,
        "label_smoothing": options.label_smoothing,
        "jitter": options.jitter,
        "train": train,
    }
    return subject, task, finetune_settings(values, "the options of `jcl finetune`")


class _Rates(NamedTuple):
    batch_size: int
    lr: float
    head_lr: float
    layer_decay: float


def _default_rates(labels: int, batch_size: int | None, lr: float | None, from_scratch: bool) -> _Rates:
    """Defaults for a number of labels; a given batch size and learning rate stay, and the rest follows them."""
    batch_size = default_batch_size(labels) if batch_size is None else batch_size
    root = math.sqrt(batch_size / 256)
    lr = round(DEFAULT_LR * root, 6) if lr is None else lr
    if from_scratch:
        return _Rates(batch_size, lr, head_lr=lr, layer_decay=1.0)
    return _Rates(batch_size, lr, head_lr=round(DEFAULT_HEAD_LR * root, 6), layer_decay=0.7)


def resume_finetuning(path: Path, *, workers: int | None = None, console: Console | None = None) -> FinetuneFolder:
    """Continue a stopped fine-tuning from its newest good checkpoint, exactly as if it had never stopped."""
    console = console or StderrConsole()
    folder = FinetuneFolder(path)
    settings = finetune_settings(folder.stored_settings(), str(folder.settings_file))
    if folder.summary_file.exists():
        print_line(console, f"The fine-tuning in {folder.path} has finished; nothing to resume.")
        return folder
    subject = open_target(Path(settings.weights), settings.data, settings.train.device, console)
    work = _prepare(settings, subject, classification_task(subject.data), workers)
    folder.check_labels(work.names)
    with RunLock(folder.path, warn=lambda text: print_line(console, text)), folder.resumable():
        return _train(settings, folder, work, console, resumed=True)


def load_classifier(path: str | Path) -> tuple[nn.Module, tuple[str, ...]]:
    """The network of a finished fine-tuning, in eval mode, which returns logits, and its class names."""
    folder = FinetuneFolder(path)
    tensors, names = folder.load_classifier()
    classes, width = tensors["weight"].shape
    network = Classifier(load_backbone(folder.backbone_file), width, classes, frozen=False, seed=0)
    network.fc.load_state_dict(tensors)
    return network.eval(), names


@dataclass(frozen=True)
class _Work:
    """A fine-tuning ready to start; `names` are the labelled images in use."""

    subject: EvaluationTarget
    task: ClassificationTask
    labelled: ImageSource
    names: list[str]
    network: Classifier
    workers: int


def _prepare(
    settings: FinetuneSettings, subject: EvaluationTarget, task: ClassificationTask, workers: int | None
) -> _Work:
    """Select the labels and build the network; invalid settings raise here."""
    seed, info = settings.train.seed, subject.info
    rows = label_subset(_labels(task.train), settings.amount, seed)
    backbone = subject.backbone
    if settings.from_scratch:
        torch.manual_seed(seed)
        backbone, _ = build_backbone(info.backbone, stem=info.stem, image_size=info.image_size)  # type: ignore[arg-type]
    network = Classifier(backbone, info.feature_width, len(task.classes), frozen=False, seed=seed)
    return _Work(
        subject=subject,
        task=task,
        labelled=select_images(task.train, rows),
        names=[task.train.name_of(row) for row in rows.tolist()],
        network=on_device(network, subject.device),
        workers=usual_workers() if workers is None else workers,
    )


def _train(
    settings: FinetuneSettings, folder: FinetuneFolder, work: _Work, console: Console, *, resumed: bool = False
) -> FinetuneFolder:
    network, shown = work.network, work.subject.preprocessing
    _announce(console, settings, folder, work)
    training = ClassifierTraining(
        title="fine-tuning",
        network=network,
        optimizer=finetune_optimizer(network, settings),
        task=work.task,
        labelled=work.labelled,
        shown=shown,
        recipe=crop_and_flip(shown, jitter=settings.jitter),
        train=settings.train,
        device=work.subject.device,
        workers=work.workers,
        label_smoothing=settings.label_smoothing,
    )
    found = train_and_evaluate(training, console, folder, resumed=resumed)
    save_backbone(network.backbone, work.subject.info, folder.backbone_file)
    folder.save_classifier(network.fc, work.task.class_names)
    folder.write_summary(_summary(settings, work, found))  # last: it marks the fine-tuning as finished
    return folder


def _summary(settings: FinetuneSettings, work: _Work, outcome: Evaluated) -> dict[str, Any]:
    train, found = settings.train, outcome.scores
    return {
        "finetune_top1": found.top1,
        "finetune_top5": found.top5,
        "labels": settings.labels,
        "labels_used": len(work.names) - outcome.unreadable,
        "skipped": outcome.unreadable,
        "classes": len(work.task.classes),
        "test_images": found.images,
        "unseen_class_images": found.unseen_class_images,
        "test_held_out": work.task.held_out,
        "from_scratch": settings.from_scratch,
        "epochs": train.epochs,
        "steps": outcome.progress.step,
        "batch_size": train.batch_size,
        "lr": train.lr,
        "head_lr": settings.head_lr,
        "layer_decay": settings.layer_decay,
        "weight_decay": train.weight_decay,
        "label_smoothing": settings.label_smoothing,
        "seed": train.seed,
        "seconds": outcome.progress.seconds,
    }


def _announce(console: Console, settings: FinetuneSettings, folder: FinetuneFolder, work: _Work) -> None:
    start = "random weights" if settings.from_scratch else settings.weights
    parts = backbone_parts(work.network.backbone)
    lowest = float(settings.train.lr) * settings.layer_decay ** (len(parts) - 1)
    print_line(
        console,
        f"Fine-tuning {work.subject.info.backbone} from {start} with {pluralize(len(work.names), 'labelled image')} "
        f"({settings.labels} of {len(work.task.train):,}, {pluralize(len(work.task.classes), 'class', 'classes')}) "
        f"on {work.subject.device}, {pluralize(settings.train.epochs, 'epoch')} "
        f"in batches of {settings.train.batch_size}, into {folder.path}",
    )
    print_line(
        console,
        f"  learning rates: {lowest:.2g} ({parts[0].name}) to {settings.train.lr:.2g} ({parts[-1].name}), "
        f"{settings.head_lr:.2g} for the new layer",
    )


def _labels(source: ImageSource) -> torch.Tensor:
    assert source.labels is not None, "a task's training images are labelled"
    return source.labels
