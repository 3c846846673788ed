"""The paper's linear probe: a linear layer trained on random crops through a frozen backbone (section 4.1; MoCo).

Batches of 256, SGD with momentum 0.9 and no weight decay, learning rate 30 (10 in the ablation), divided by ten after
60 % and 80 % of 100 epochs. The only difference: the last incomplete batch of an epoch is dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jcl.errors import RunError
from jcl.evaluate.supervised import Classifier
from jcl.settings.schema import TrainSettings, settings_from

_MILESTONES = (0.6, 0.8)  # of the epochs


def paper_settings(
    *, lr: float = 30.0, epochs: int = 100, batch_size: int = 256, seed: int = 0, compiled: bool = False
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
