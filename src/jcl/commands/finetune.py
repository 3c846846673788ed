"""Fine-tuning from options to a finished folder (`jcl finetune`)."""

import math
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from jcl.commands.inputs import EvaluationTarget, accuracy_figures, open_target, refuse_inside_data, untrained_backbone
from jcl.commands.run import RunContext
from jcl.console import STDERR, pluralize, print_line
from jcl.data.named import absolute_location
from jcl.data.source import ImageSource, evenly_spaced, fingerprint, select_images
from jcl.distributed.device import to_device
from jcl.distributed.group import ALONE
from jcl.errors import RunError, SettingsError
from jcl.evaluate import supervised
from jcl.evaluate.classification import ClassificationTask, classification_task, label_amount, label_subset
from jcl.evaluate.folders import FinetuneFolder
from jcl.evaluate.supervised import Classifier, FinetuneSettings
from jcl.export import load_backbone, save_backbone
from jcl.paths import absolute_path
from jcl.settings.commands import FinetuneOptions
from jcl.settings.values import validated

DEFAULT_LR, DEFAULT_HEAD_LR = 0.1, 0.3  # for a batch of 256, scaled by the square root of the batch size
_SQUARED_LENGTH = 64.0  # of features; longer ones make the new layer diverge, so its learning rate is lower


def finetune(options: FinetuneOptions, *, console: Console = STDERR) -> FinetuneFolder:
    """Fine-tune the whole network of a run or file with labels, into the folder `out` (default: a new one in `runs/`).

    Defaults depend on the number of labels: the batch size (`default_batch_size`), learning rates scaled by its square
    root, and a warm-up of a tenth of the epochs. The learning rate of the new layer is lower for long features.
    `from_scratch` starts from random weights, with one learning rate for all layers.
    """
    weights, out = options.weights, options.out
    if weights is None:
        raise SettingsError("Give the weights to fine-tune, as in: jcl finetune runs/photos photos/ --labels 10%.")
    label_amount(options.labels)  # refuse an invalid one before the data is read
    target = open_target(weights, options.data, options.device, console)
    task = _labeled_task(target, options.labels, options.seed)
    settings = _choose_settings(options, weights, len(task.train))
    refuse_inside_data(out or Path("runs"), target.location)
    if out is not None:
        FinetuneFolder(out).refuse_occupied()
    fixed: dict[str, Any] = {"images": _fingerprints(task)}
    if options.head_lr is None and not options.from_scratch:
        head_lr = settings.head_lr * _SQUARED_LENGTH / max(_SQUARED_LENGTH, _squared_length(target, task.train))
        fixed["head_lr"] = round(head_lr, 6)
    settings = settings.model_copy(update=fixed)
    wanted = FinetuneFolder(out or Path("runs") / f"finetune-{target.data.name}")
    with RunContext(ALONE, target.device, console).starting(wanted, numbered=out is None) as folder:
        folder.create(settings.model_dump_json(indent=2), _names(task))
        return _train(folder, settings, target, task, options.worker_count, console)


def _choose_settings(options: FinetuneOptions, weights: Path, labels: int) -> FinetuneSettings:
    """The settings for a number of labels: given values are kept, the others derived from them."""
    batch_size = min(options.batch_size or supervised.default_batch_size(labels), max(2, labels))
    root = math.sqrt(batch_size / 256)
    lr = round(DEFAULT_LR * root, 6) if options.lr is None else options.lr
    head_lr, layer_decay = (lr, 1.0) if options.from_scratch else (round(DEFAULT_HEAD_LR * root, 6), 0.7)
    values = options.model_dump(include={"labels", "from_scratch", "label_smoothing", "jitter"}) | {
        "weights": absolute_path(weights),
        "data": None if options.data is None else absolute_location(options.data),
        "head_lr": head_lr if options.head_lr is None else options.head_lr,
        "train": options.model_dump(include={"epochs", "weight_decay", "seed", "device", "compile"})
        | {
            "batch_size": batch_size,
            "lr": lr,
            "layer_decay": layer_decay if options.layer_decay is None else options.layer_decay,
            "schedule": "cosine",
            "schedule_by": "step",
            "warmup_epochs": 0.1 * options.epochs if options.warmup_epochs is None else options.warmup_epochs,
        },
    }
    return validated(FinetuneSettings, values, "the options of `jcl finetune`")


def _labeled_task(target: EvaluationTarget, labels: str, seed: int) -> ClassificationTask:
    """The task with only the training images whose labels are used."""
    task = classification_task(target.data)
    return task.select(label_subset(task.labels, labels, seed))


def _names(task: ClassificationTask) -> list[str]:
    return [task.train.name_of(row) for row in range(len(task.train))]


def _fingerprints(task: ClassificationTask) -> str:
    return f"{fingerprint(task.train)} {fingerprint(task.test)}"


def _squared_length(target: EvaluationTarget, images: ImageSource) -> float:
    """The mean squared length of the features of up to 128 images."""
    sample = select_images(images, torch.tensor(evenly_spaced(len(images), 128)))
    return target.features(sample, console=Console(quiet=True)).values.square().sum(dim=1).mean().item()


def resume_finetuning(
    path: Path, *, workers: int, device: str | None = None, console: Console = STDERR
) -> FinetuneFolder:
    """Continue from the newest good checkpoint as if training had never stopped, on its own device or on `device`."""
    folder = FinetuneFolder(path)
    settings = validated(FinetuneSettings, folder.stored_settings(), str(folder.settings_file))
    if folder.summary_file.exists():
        print_line(console, f"The fine-tuning in {folder.path} has finished; nothing to resume.")
        return folder
    target = open_target(Path(settings.weights), settings.data, device or settings.train.device, console)
    task = _labeled_task(target, settings.labels, settings.train.seed)
    if settings.images != _fingerprints(task) or not folder.holds_labels(_names(task)):
        problem = f"The images or labels have changed since {folder.path} was started"
        raise RunError(f"{problem}. Start again in another folder with --out.")
    folder.refuse_links()
    with RunContext(ALONE, target.device, console).locked(folder):
        return _train(folder, settings, target, task, workers, console, resumed=True)


def load_classifier(path: str | Path) -> tuple[nn.Module, tuple[str, ...]]:
    """Load the network of a finished fine-tuning and the names of its classes.

    The network is in eval mode. It takes images (n, channels, h, w), normalized by `network.backbone.info`, and returns
    logits (n, classes).
    """
    folder = FinetuneFolder(path)
    if not (folder.classifier_file.exists() and folder.backbone_file.exists()):
        folder.summary()  # raises and says what is missing
        raise RunError(f"{folder.path} holds no fine-tuning; start one with `jcl finetune`.")
    tensors, names = folder.load_classifier()
    classes, width = tensors["weight"].shape
    network = Classifier(load_backbone(folder.backbone_file), width, classes, frozen=False, seed=0)
    network.fc.load_state_dict(tensors)
    return network.eval(), names


def _train(
    folder: FinetuneFolder,
    settings: FinetuneSettings,
    target: EvaluationTarget,
    task: ClassificationTask,
    workers: int,
    console: Console,
    *,
    resumed: bool = False,
) -> FinetuneFolder:
    """Train, evaluate, and write network and summary."""
    info, train = target.info, settings.train
    backbone = untrained_backbone(info, train.seed) if settings.from_scratch else target.backbone
    network = Classifier(backbone, info.feature_width, len(task.classes), frozen=False, seed=train.seed)
    network = to_device(network, target.device)
    start = "random weights" if settings.from_scratch else settings.weights
    images, classes = pluralize(len(task.train), "labeled image"), pluralize(len(task.classes), "class", "classes")
    what = f"Fine-tuning {info.backbone} from {start} with {images} ({settings.labels}, {classes}) on {target.device}"
    length = f"{pluralize(train.epochs, 'epoch')} in batches of {train.batch_size}"
    print_line(console, f"{what}, {length}, into {folder.path}")
    work = supervised.ClassifierTask(
        title="fine-tuning",
        network=network,
        optimizer=supervised.finetune_optimizer(network, settings),
        data=task,
        preprocessing=info.preprocessing,
        recipe=supervised.crop_and_flip(info.preprocessing, jitter=settings.jitter),
        train=train,
        device=target.device,
        workers=workers,
        label_smoothing=settings.label_smoothing,
    )
    scores, progress, unreadable = supervised.train_and_evaluate(work, console, folder, resumed=resumed)
    save_backbone(network.backbone, info, folder.backbone_file)
    folder.save_classifier(network.fc, task.class_names)
    summary = {
        **accuracy_figures("finetune", scores),
        **settings.model_dump(include={"labels", "from_scratch", "head_lr", "label_smoothing"}),
        **train.model_dump(include={"epochs", "batch_size", "lr", "layer_decay", "weight_decay", "seed"}),
        "labels_used": len(task.train) - unreadable,
        "skipped": unreadable,
        "classes": len(task.classes),
        "test_held_out": task.held_out,
        "data": target.origin["data"],
        "steps": progress.step,
        "seconds": progress.seconds,
    }
    folder.write_summary(summary)  # last: it marks the fine-tuning as finished
    return folder
