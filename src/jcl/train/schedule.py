"""Learning rate, covariance scale and key momentum as functions of the progress through training."""

import math

from jcl.settings.schema import MethodSettings, TrainSettings


def learning_rate(train: TrainSettings, step: int, steps_per_epoch: int) -> float:
    """The learning rate of step `step` (from 0): warm-up, then the chosen shape.

    `schedule_by: epoch` holds the rate constant within an epoch, as MoCo and the paper do; warm-up always moves by
    step, because it may be shorter than an epoch.
    """
    rate, warmup = float(train.lr), float(train.warmup_epochs)
    epoch = step / steps_per_epoch
    if epoch < warmup:
        return rate * (step + 1) / math.ceil(warmup * steps_per_epoch)
    if train.schedule_by == "epoch":
        epoch = math.floor(epoch)
    return rate * _shape(train, epoch)


def _shape(train: TrainSettings, epoch: float) -> float:
    if train.schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * epoch / train.epochs))
    if train.schedule == "step":
        return train.decay ** sum(epoch >= milestone for milestone in train.milestones)
    return 1.0


def backbone_share(train: TrainSettings, step: int, steps_per_epoch: int) -> float:
    """The backbone's share of the learning rate: 0 for `head_epochs`, then a ramp of the same length to 1."""
    steps = round(train.head_epochs * steps_per_epoch)
    return min(1.0, max(0.0, (step + 1 - steps) / steps)) if steps else 1.0


def covariance_scale(method: MethodSettings, epoch: int, epochs: int) -> float:
    """Lambda in epoch `epoch` (from 0): constant, or ramped to its full value in the last epoch."""
    scale = float(method.covariance_scale)
    return scale * (epoch + 1) / epochs if method.covariance_schedule == "linear" else scale


def key_momentum(method: MethodSettings, step: int, steps: int) -> float | None:
    """The momentum of the key encoder in step `step` of `steps`, if it changes: by a cosine to 1, as in BYOL."""
    if method.key_momentum_schedule == "constant":
        return None
    return 1.0 - (1.0 - float(method.key_momentum)) * 0.5 * (1.0 + math.cos(math.pi * step / steps))
