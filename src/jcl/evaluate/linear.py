"""The linear probe on cached features: many learning rates and weight decays trained at once, the best one kept.

Features are extracted once and standardised. The probes of all cells of the grid lie in one tensor and see the same
batches; their losses are added, so that no probe's gradient knows of another, and a batch is one matrix product for
all of them. Which cell is best is decided on a held-out part of the training images; that cell is then trained anew
on all of them, and only then is there a look, one, at the test images.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from jcl.errors import DataError, SettingsError
from jcl.evaluate.classification import Scores, scores
from jcl.evaluate.label_subset import balanced_split
from jcl.evaluate.places import positions
from jcl.random import permutation

LEARNING_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
WEIGHT_DECAYS = (0.0, 1e-4, 1e-3, 1e-2, 1e-1)
BATCH_SIZE = 256
_MOMENTUM = 0.9
_VIEWINGS = 1_000_000  # of images, in all epochs together: few images are seen more often, many less
_LEAST_EPOCHS, _MOST_EPOCHS = 10, 100
_ORDER_STREAM = 0x6C696E656172  # a stream of its own beside those that `jcl.random` names
_JUDGED_AT_ONCE = 1024  # rows
_SHARE_OF_DEVICE = 0.5  # of the memory still free, for features to live there


@dataclass(frozen=True)
class ProbeGrid:
    """The cells to choose from: every learning rate with every weight decay."""

    learning_rates: tuple[float, ...] = LEARNING_RATES
    weight_decays: tuple[float, ...] = WEIGHT_DECAYS

    def __post_init__(self) -> None:
        if not self.learning_rates or not all(0 < lr < math.inf for lr in self.learning_rates):
            raise SettingsError(f"Learning rates must be above 0, but these are {list(self.learning_rates)}.")
        if not self.weight_decays or not all(0 <= decay < math.inf for decay in self.weight_decays):
            raise SettingsError(f"Weight decays must be at least 0, but these are {list(self.weight_decays)}.")

    @property
    def cells(self) -> list[tuple[float, float]]:
        return [(lr, decay) for lr in self.learning_rates for decay in self.weight_decays]

    def edges(self, cell: tuple[float, float]) -> tuple[str, ...]:
        """At which ends of the grid a cell lies, in words: beyond them there may be a better one."""
        found = []
        for name, value, values in zip(
            ("learning rate", "weight decay"), cell, (self.learning_rates, self.weight_decays), strict=True
        ):
            if len(set(values)) > 1 and value == max(values):
                found.append(f"highest {name}")
            if len(set(values)) > 1 and value == min(values) > 0:  # no weight decay is less than none
                found.append(f"lowest {name}")
        return tuple(found)


@dataclass(frozen=True)
class LinearResult:
    """A probe's scores on the test images, and how it was chosen.

    `validation_top1` is the chosen cell's accuracy in percent on the held-out training images, None where there was
    but one cell and so nothing to choose.
    """

    scores: Scores
    classes: tuple[int, ...]  # the labels that the scores by class speak of
    lr: float
    weight_decay: float
    epochs: int
    train_images: int
    validation_top1: float | None
    edges: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Probes:
    """Linear classifiers side by side: weights (k, c, d), biases (k, c)."""

    weights: Tensor
    biases: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Logits (n, k, c) of features (n, d)."""
        logits = F.linear(features, self.weights.flatten(0, 1), self.biases.flatten())
        return logits.view(len(features), *self.biases.shape)


@dataclass(frozen=True, eq=False)
class Standardiser:
    """Shifts and scales each feature to mean 0 and deviation 1 over the features it was made from."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, features: Tensor) -> Standardiser:
        variance, mean = torch.var_mean(features, dim=0, correction=0)
        std = variance.sqrt()
        # What deviates by rounding only is constant: enlarged, it would be noise.
        constant = std <= 1e-6 * mean.abs()
        return cls(mean, torch.where(constant, torch.ones_like(std), std))

    def __call__(self, features: Tensor) -> Tensor:
        return (features - self.mean) / self.std


def linear_probe(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    grid: ProbeGrid | None = None,
    epochs: int | None = None,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> LinearResult:
    """Train the probes on features (n, d) with labels (n,), -1 for none, choose one, and judge it on the test rows.

    Without `epochs` there are as many as make a million viewings of an image, between 10 and 100.
    """
    grid = grid or ProbeGrid()
    features, labels = _labelled(train_features, train_labels)
    classes = torch.unique(labels)
    targets = positions(labels, classes).to(device)
    standardise = Standardiser.of(features)
    features = _near(standardise(features), torch.device(device))
    epochs = epochs or min(_MOST_EPOCHS, max(_LEAST_EPOCHS, round(_VIEWINGS / len(features))))

    cell, validation_top1 = grid.cells[0], None
    if len(grid.cells) > 1:
        cell, validation_top1 = _choose(grid, features, targets, len(classes), epochs, batch_size, seed)
    probe = train_probes(features, targets, len(classes), [cell], epochs=epochs, batch_size=batch_size, seed=seed)
    if not (probe.weights.isfinite().all() and probe.biases.isfinite().all()):
        raise _all_astray()
    logits = torch.cat([part[:, 0] for part in _logits(probe, standardise(test_features))])
    return LinearResult(
        scores=scores(logits, test_labels, classes),
        classes=tuple(classes.tolist()),
        lr=cell[0],
        weight_decay=cell[1],
        epochs=epochs,
        train_images=len(features),
        validation_top1=validation_top1,
        edges=grid.edges(cell),
    )


def train_probes(
    features: Tensor,
    targets: Tensor,
    classes: int,
    cells: Sequence[tuple[float, float]],
    *,
    epochs: int,
    batch_size: int,
    seed: int,
) -> Probes:
    """One probe for each cell (learning rate, weight decay), from zero, by SGD with momentum and a cosine schedule.

    `features` (n, d) are standardised and `targets` (n,) lie in 0..classes-1. Computation happens where the targets
    are. Each epoch goes through all rows in a new order, in batches of sizes that differ by one at most. Weight decay
    is not for the biases.
    """
    device, dtype = targets.device, features.dtype
    rates = torch.tensor([lr for lr, _ in cells], device=device, dtype=dtype)[:, None, None]
    decays = torch.tensor([decay for _, decay in cells], device=device, dtype=dtype)[:, None, None]
    weights = torch.zeros(len(cells), classes, features.shape[1], device=device, dtype=dtype, requires_grad=True)
    biases = torch.zeros(len(cells), classes, device=device, dtype=dtype, requires_grad=True)
    probes = Probes(weights, biases)
    speeds = torch.zeros_like(weights), torch.zeros_like(biases)
    batches = math.ceil(len(features) / batch_size)
    for epoch in range(epochs):
        order = permutation(seed, _ORDER_STREAM, epoch, len(features), features.device)
        for number, rows in enumerate(order.tensor_split(batches)):
            logits = probes(features[rows].to(device))
            wanted = targets[rows.to(device)][:, None].expand(-1, len(cells))
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / len(rows)
            gradients = torch.autograd.grad(loss, (weights, biases))
            shape = 0.5 * (1 + math.cos(math.pi * (epoch + number / batches) / epochs))
            with torch.no_grad():
                speeds[0].mul_(_MOMENTUM).add_(gradients[0]).addcmul_(weights, decays)
                speeds[1].mul_(_MOMENTUM).add_(gradients[1])
                weights.addcmul_(speeds[0], rates, value=-shape)
                biases.addcmul_(speeds[1], rates[:, :, 0], value=-shape)
    return Probes(weights.detach(), biases.detach())


def _choose(
    grid: ProbeGrid, features: Tensor, targets: Tensor, classes: int, epochs: int, batch_size: int, seed: int
) -> tuple[tuple[float, float], float]:
    """The cell that is right most often on held-out training rows, of equals the one of lower loss; and how often."""
    kept, held_out = balanced_split(targets, seed)
    if not len(held_out):
        raise DataError(
            "Every class has a single training image, so none can be held out to choose the learning rate by; "
            "give one --lr and one --weight-decay, or more images."
        )
    fit, judge = kept.to(features.device), held_out.to(features.device)
    probes = train_probes(
        features[fit],
        targets[kept.to(targets.device)],
        classes,
        grid.cells,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
    )
    right = torch.zeros(len(grid.cells), dtype=torch.float64)
    loss = torch.zeros(len(grid.cells), dtype=torch.float64)
    truths = torch.split(targets[held_out.to(targets.device)], _JUDGED_AT_ONCE)
    for logits, truth in zip(_logits(probes, features[judge]), truths, strict=True):
        right += (logits.argmax(2) == truth[:, None]).sum(0).cpu()
        each = F.cross_entropy(logits.movedim(2, 1), truth[:, None].expand(-1, logits.shape[1]), reduction="none")
        loss += each.sum(0, dtype=torch.float64).cpu()
    if not loss.isfinite().any():
        raise _all_astray()
    right = right.masked_fill(~loss.isfinite(), -1.0)  # a probe that has gone astray is no choice
    ranked = sorted(range(len(right)), key=lambda number: (-float(right[number]), float(loss[number])))
    return grid.cells[ranked[0]], 100 * float(right[ranked[0]]) / len(held_out)


def _all_astray() -> SettingsError:
    return SettingsError(
        "No probe stayed finite in training, so there is none to measure with; give a lower --lr or --weight-decay."
    )


def _logits(probes: Probes, features: Tensor) -> Iterator[Tensor]:
    """Logits (m, k, c) of a few rows of features at a time."""
    for rows in torch.split(features, _JUDGED_AT_ONCE):
        yield probes(rows.to(probes.weights.device))


def _labelled(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if labels.shape != features.shape[:1]:
        raise DataError(f"There are {len(features)} rows of features but labels of shape {tuple(labels.shape)}.")
    features, labels = features[(labels >= 0).to(features.device)], labels[labels >= 0]
    if len(torch.unique(labels)) < 2:
        raise DataError(
            f"The linear probe needs training images of at least two classes, but there are {len(labels)} labelled "
            f"images of {len(torch.unique(labels))}."
        )
    if not features.isfinite().all():
        raise DataError(
            "The features hold NaN or infinite values, so no probe can be trained on them; the encoder that made them "
            "has probably diverged (lower its learning rate)."
        )
    return features, labels


def _near(features: Tensor, device: torch.device) -> Tensor:
    """The features on the device that computes, unless they would fill it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if features.nbytes > _SHARE_OF_DEVICE * free:
            return features.cpu()
    return features.to(device)
