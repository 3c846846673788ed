"""The paper's linear probe: a linear layer trained on random crops through a frozen backbone (section 4.1; MoCo).

Batches of 256, SGD with momentum 0.9 and no weight decay, learning rate 30 (10 in the ablation), divided by ten after
60 % and 80 % of 100 epochs. The only difference: the last incomplete batch of an epoch is dropped.
"""

from __future__ import annotations

import torch
from rich.console import Console
from torch import Tensor, nn

from jcl.console import StderrConsole
from jcl.distributed.device import on_device
from jcl.errors import RunError
from jcl.evaluate.classification import ClassificationTask
from jcl.evaluate.features import FeatureSettings
from jcl.evaluate.folders import ProbeFolder
from jcl.evaluate.supervised import (
    DEFAULT_MIN_SCALE,
    Classifier,
    ClassifierTraining,
    Evaluated,
    crop_and_flip,
    train_and_evaluate,
)
from jcl.settings.schema import TrainSettings, settings_from

PAPER_LR = 30.0
PAPER_EPOCHS = 100
PAPER_BATCH_SIZE = 256
_MILESTONES = (0.6, 0.8)  # of the epochs


def paper_settings(
    *,
    lr: float = PAPER_LR,
    epochs: int = PAPER_EPOCHS,
    batch_size: int = PAPER_BATCH_SIZE,
    seed: int = 0,
    compiled: bool = False,
) -> TrainSettings:
    """The paper's probe as training settings; the milestones scale with the epochs."""
    values = {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "schedule": "step",
        "schedule_by": "epoch",
        "milestones": tuple(max(1, round(share * epochs)) for share in _MILESTONES),
        "decay": 0.1,
        "seed": seed,
        "compile": compiled,
    }
    return settings_from({"train": values}, "the linear probe").train


def paper_probe(
    backbone: nn.Module,
    feature_width: int,
    shown: FeatureSettings,
    task: ClassificationTask,
    train: TrainSettings,
    *,
    device: torch.device,
    workers: int = 0,
    min_scale: float = DEFAULT_MIN_SCALE,
    console: Console | None = None,
    folder: ProbeFolder | None = None,
    resumed: bool = False,
) -> Evaluated:
    """Train the layer on the task's training images and evaluate it on the test images after the last epoch.

    With a `folder` it writes checkpoints there, continues from the newest if `resumed`, and saves the layer at the end.
    """
    network = Classifier(backbone, feature_width, len(task.classes), frozen=True, seed=train.seed)
    network = on_device(network, device)
    before = state_of(backbone)
    training = ClassifierTraining(
        title="linear probe",
        network=network,
        optimizer=probe_optimizer(network, train),
        task=task,
        labelled=task.train,
        shown=shown,
        recipe=crop_and_flip(shown, min_scale=min_scale),
        train=train,
        device=device,
        workers=workers,
    )
    found = train_and_evaluate(training, console or StderrConsole(), folder, resumed=resumed)
    check_frozen(before, backbone)
    if folder is not None:
        folder.save_classifier(network.fc, task.class_names)
    return found


def probe_optimizer(network: Classifier, train: TrainSettings) -> torch.optim.Optimizer:
    """SGD over the layer only."""
    group = {"params": list(network.fc.parameters()), "lr_scale": 1.0}
    return torch.optim.SGD([group], lr=float(train.lr), momentum=train.momentum, weight_decay=float(train.weight_decay))


def state_of(backbone: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer by name."""
    tensors = [*backbone.named_parameters(), *backbone.named_buffers()]
    return {name: value.detach().clone() for name, value in tensors}


def check_frozen(before: dict[str, Tensor], backbone: nn.Module) -> None:
    """Raise unless every parameter and buffer is unchanged, bit for bit."""
    now = state_of(backbone)
    moved = [name for name, value in before.items() if not torch.equal(value, now[name])]
    if moved:
        raise RunError(
            f"the frozen backbone changed while the probe was trained ({', '.join(moved[:3])}). "
            "Does one of its layers ignore evaluation mode?"
        )
