"""Fine-tuning: settings, and an optimizer with layer-wise learning-rate decay.

The last part of the backbone uses `lr`, each part before it `layer_decay` times the rate of its successor, and the new
linear layer, which starts from random weights, its own `head_lr`.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from pydantic import Field, field_validator
from torch import nn

from jcl.evaluate.classification import label_amount
from jcl.evaluate.supervised import Classifier
from jcl.settings.schema import Fraction, Positive, Section, TrainSettings

_MIN_PARTS = 4
_MAX_BATCH_SIZE = 128


class FinetuneSettings(Section):
    """Everything that defines a fine-tuning."""

    weights: str
    data: str | None = None  # None: what the run was trained on
    labels: str = "100%"
    from_scratch: bool = False
    layer_decay: Annotated[float, Field(gt=0.0, le=1.0)] = 0.7
    head_lr: Positive
    label_smoothing: Fraction = 0.0
    jitter: bool = False
    train: TrainSettings

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, text: str) -> str:
        label_amount(text)
        return text


def default_batch_size(images: int) -> int:
    """128, or less for few images, so that an epoch has eight steps; at least 8 if there are that many images."""
    return max(2, min(_MAX_BATCH_SIZE, images, max(8, 1 << (max(images // 8, 1).bit_length() - 1))))


class BackbonePart(NamedTuple):
    """Parameters that share a learning rate, named after the first module among them."""

    name: str
    parameters: list[nn.Parameter]
    module: nn.Module | None = None  # None for parameters outside of sub-modules, or of several of them

    @property
    def has_weights(self) -> bool:
        return self.module is not None and any(parameter.ndim > 1 for parameter in self.parameters)


def backbone_parts(backbone: nn.Module) -> list[BackbonePart]:
    """The parts of a backbone from the image to the head.

    They are its sub-modules with weights, in order; while there are fewer than four, the largest one is split into its
    sub-modules. So a ResNet has its stem and four stages, a vision transformer its embedding and its blocks. Norms, and
    parameters outside of sub-modules, belong to the part before them.
    """
    modules = _split(BackbonePart("", [], backbone))
    while len(parts := _joined(modules)) < _MIN_PARTS:
        divisible = [part for part in modules if len(_split(part)) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda part: sum(parameter.numel() for parameter in part.parameters))
        place = modules.index(largest)
        modules[place : place + 1] = _split(largest)
    return parts


def _split(part: BackbonePart) -> list[BackbonePart]:
    """A module's own parameters, then its sub-modules that have parameters."""
    if part.module is None:
        return []
    own = list(part.module.parameters(recurse=False))
    parts = [BackbonePart(part.name, own)] if own else []
    for name, child in part.module.named_children():
        if parameters := list(child.parameters()):
            parts.append(BackbonePart(f"{part.name}.{name}".lstrip("."), parameters, child))
    return parts


def _joined(modules: list[BackbonePart]) -> list[BackbonePart]:
    """Join each module that has weights with the others that follow it; what precedes the first joins the first."""
    runs: list[list[BackbonePart]] = []
    for part in modules:
        if not runs or (part.has_weights and any(other.has_weights for other in runs[-1])):
            runs.append([])
        runs[-1].append(part)
    return [
        BackbonePart(
            next((part.name for part in run if part.has_weights), run[0].name),
            [parameter for part in run for parameter in part.parameters],
        )
        for run in runs
    ]


def finetune_optimizer(network: Classifier, settings: FinetuneSettings) -> torch.optim.Optimizer:
    """SGD with a group per part; each group's `lr_scale` multiplies the learning rate.

    Biases and the scales of norms get no weight decay.
    """
    lr = float(settings.train.lr)
    parts = backbone_parts(network.backbone)
    scaled = [(part, settings.layer_decay**depth) for depth, part in enumerate(reversed(parts))]
    scaled.append((BackbonePart("fc", list(network.fc.parameters())), settings.head_lr / lr))
    groups = []
    for part, scale in scaled:
        for decay, vectors in ((settings.train.weight_decay, False), (0.0, True)):
            parameters = [parameter for parameter in part.parameters if (parameter.ndim <= 1) == vectors]
            if parameters:
                groups.append({"params": parameters, "lr_scale": scale, "weight_decay": decay, "part": part.name})
    return torch.optim.SGD(groups, lr=lr, momentum=settings.train.momentum)
