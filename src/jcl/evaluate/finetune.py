"""Fine-tuning: settings, and an optimizer with layer-wise learning-rate decay.

The last part of the backbone uses `lr`, each part before it `layer_decay` times the rate of its successor, and the new
linear layer, which starts from random weights, its own `head_lr`.
"""

from __future__ import annotations

from typing import Annotated

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


def backbone_parts(backbone: nn.Module) -> dict[str, list[nn.Parameter]]:
    """The parameters of a backbone by part, from the image to the head; a part has the name of its module.

    They are its sub-modules with weights, in order; while there are fewer than four, the largest one is split into its
    sub-modules. So a ResNet has its stem and four stages, a vision transformer its embedding and its blocks. Norms, and
    parameters outside of sub-modules, belong to the part before them.
    """
    modules = _submodules("", backbone)
    while len(starts := [name for name, module in modules.items() if _has_weights(module)]) < _MIN_PARTS:
        divisible = [name for name, module in modules.items() if len(_submodules(name, module)) > 1]
        if not divisible:
            break
        largest = max(divisible, key=lambda name: sum(value.numel() for value in modules[name].parameters()))
        modules |= _submodules(largest, modules.pop(largest))
    names, parameters = zip(*backbone.named_parameters(), strict=True)
    owners = [next((start for start in starts if name.startswith(f"{start}.")), "") for name in names]
    part, parts = next(filter(None, owners), ""), dict[str, list[nn.Parameter]]()
    for owner, parameter in zip(owners, parameters, strict=True):
        part = owner or part
        parts.setdefault(part, []).append(parameter)
    return parts


def _submodules(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """The sub-modules that have parameters, by their full names."""
    children = {f"{name}.{child}".lstrip("."): value for child, value in module.named_children()}
    return {child: value for child, value in children.items() if next(value.parameters(), None) is not None}


def _has_weights(module: nn.Module) -> bool:
    return any(parameter.ndim > 1 for parameter in module.parameters())


def finetune_optimizer(network: Classifier, settings: FinetuneSettings) -> torch.optim.Optimizer:
    """SGD with a group per part; each group's `lr_scale` multiplies the learning rate.

    Biases and the scales of norms get no weight decay.
    """
    lr = float(settings.train.lr)
    parts = backbone_parts(network.backbone)
    scaled = [(name, part, settings.layer_decay**depth) for depth, (name, part) in enumerate(reversed(parts.items()))]
    groups = []
    for name, part, scale in [*scaled, ("fc", list(network.fc.parameters()), settings.head_lr / lr)]:
        for decay, vectors in ((settings.train.weight_decay, False), (0.0, True)):
            if parameters := [parameter for parameter in part if (parameter.ndim <= 1) == vectors]:
                groups.append({"params": parameters, "lr_scale": scale, "weight_decay": decay, "part": name})
    return torch.optim.SGD(groups, lr=lr, momentum=settings.train.momentum)
