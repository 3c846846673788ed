"""A grid of linear probes on cached, standardized features.

The grid combines learning rates and weight decays. The probes of all its cells are one tensor and see the same
batches. Their losses are added, so their gradients are independent and a batch is one matrix product. The best cell is
chosen on held-out training images and trained again on all of them; the test images are used once, at the end.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from jcl.errors import DataError, RunError
from jcl.evaluate.classification import Scores, labeled_rows, scores, stratified_split
from jcl.random import PROBE_ORDER, permutation

LEARNING_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
WEIGHT_DECAYS = (0.0, 1e-4, 1e-3, 1e-2, 1e-1)
BATCH_SIZE = 256
_MOMENTUM = 0.9
_IMAGES_SEEN = 1_000_000  # in all epochs together
_MIN_EPOCHS, _MAX_EPOCHS = 10, 100
_ROWS_PER_PASS = 1024
_MEMORY_SHARE = 0.5  # of the free device memory, for features


@dataclass(frozen=True)
class ProbeGrid:
    """The cells to choose from: each learning rate with each weight decay."""

    learning_rates: tuple[float, ...] = LEARNING_RATES
    weight_decays: tuple[float, ...] = WEIGHT_DECAYS

    @property
    def cells(self) -> list[tuple[float, float]]:
        return [(lr, decay) for lr in self.learning_rates for decay in self.weight_decays]

    def edges(self, cell: tuple[float, float]) -> tuple[str, ...]:
        """The edges of the grid that a cell lies on; there may be a better one beyond them."""
        found, axes = [], (self.learning_rates, self.weight_decays)
        for name, value, values in zip(("learning rate", "weight decay"), cell, axes, strict=True):
            if min(values) < value == max(values):
                found.append(f"highest {name}")
            if max(values) > value == min(values) > 0:
                found.append(f"lowest {name}")
        return tuple(found)


@dataclass(frozen=True)
class LinearResult:
    """The test accuracy of a probe, and how it was chosen; a single cell has no `validation_top1` (in percent)."""

    scores: Scores
    classes: tuple[int, ...]  # the labels of the scores by class
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


def standardizer(features: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that scales features, so that each column of these (n, d) has mean 0 and standard deviation 1."""
    variance, mean = torch.var_mean(features, dim=0, correction=0)
    std = variance.sqrt()
    constant = std <= 1e-6 * mean.abs()  # up to rounding errors, which must not be scaled up
    std[constant] = 1.0
    return lambda rows: (rows - mean) / std


@torch.inference_mode(False)
@torch.enable_grad()
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
    """Train probes on features (n, d) with labels (n,), -1 for none, choose the best, and test it.

    This also works where gradients are off, as in the validation of PyTorch Lightning.
    """
    for name, number in (("epochs", epochs), ("batch_size", batch_size)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}.")
    grid = grid or ProbeGrid()
    features, labels = labeled_rows(train_features, train_labels, "training set")
    test_features, test_labels = labeled_rows(test_features, test_labels, "test set")
    if not (features.isfinite().all() and test_features.isfinite().all()):
        raise DataError("The features are NaN or infinite; the training of the encoder probably diverged.")
    classes, targets = torch.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise DataError(f"A linear probe needs training images of at least two classes, but got {len(classes)}.")
    device, targets = torch.device(device), targets.to(device)
    test_features, standardize = test_features.to(features.dtype), standardizer(features)
    features = standardize(features)
    if device.type != "cuda" or features.nbytes <= _MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]:
        features = features.to(device)
    epochs = epochs or min(_MAX_EPOCHS, max(_MIN_EPOCHS, round(_IMAGES_SEEN / len(features))))

    cell, validation_top1 = grid.cells[0], None
    if len(grid.cells) > 1:
        cell, validation_top1 = _choose(grid, features, targets, len(classes), epochs, batch_size, seed)
    probe = train_probes(features, targets, len(classes), [cell], epochs=epochs, batch_size=batch_size, seed=seed)
    if not (probe.weights.isfinite().all() and probe.biases.isfinite().all()):
        raise RunError("The probe diverged; give a lower --lr or --weight-decay.")
    logits = torch.cat([part[:, 0] for part in _logits(probe, standardize(test_features))])
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
    """A probe for each cell (learning rate, weight decay), from zero, by SGD with momentum and a cosine schedule.

    `features` (n, d) are standardized and `targets` (n,) in 0..classes-1; the device is that of the targets. Each epoch
    shuffles all rows into batches whose sizes differ by at most one. Biases have no weight decay.
    """
    device, dtype = targets.device, features.dtype
    rates = torch.tensor([lr for lr, _ in cells], device=device, dtype=dtype)[:, None, None]
    decays = torch.tensor([decay for _, decay in cells], device=device, dtype=dtype)[:, None, None]
    weights = torch.zeros(len(cells), classes, features.shape[1], device=device, dtype=dtype, requires_grad=True)
    biases = torch.zeros(len(cells), classes, device=device, dtype=dtype, requires_grad=True)
    probes = Probes(weights, biases)
    weight_momentum, bias_momentum = torch.zeros_like(weights), torch.zeros_like(biases)
    batches = math.ceil(len(features) / batch_size)
    for epoch in range(epochs):
        order = permutation(seed, PROBE_ORDER, epoch, len(features), features.device)
        for number, rows in enumerate(order.tensor_split(batches)):
            logits = probes(features[rows].to(device))
            wanted = targets[rows.to(device)][:, None].expand(-1, len(cells))
            loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / len(rows)
            gradients = torch.autograd.grad(loss, (weights, biases))
            cosine = 0.5 * (1 + math.cos(math.pi * (epoch + number / batches) / epochs))
            with torch.no_grad():
                weight_momentum.mul_(_MOMENTUM).add_(gradients[0]).addcmul_(weights, decays)
                bias_momentum.mul_(_MOMENTUM).add_(gradients[1])
                weights.addcmul_(weight_momentum, rates, value=-cosine)
                biases.addcmul_(bias_momentum, rates[:, :, 0], value=-cosine)
    return Probes(weights.detach(), biases.detach())


def _choose(
    grid: ProbeGrid, features: Tensor, targets: Tensor, classes: int, epochs: int, batch_size: int, seed: int
) -> tuple[tuple[float, float], float]:
    """The cell with the best accuracy on held-out training rows, ties by lower loss, and that accuracy in percent."""
    kept, held_out = stratified_split(targets, seed)
    if not len(held_out):
        problem = "Every class has a single training image, so none can be held out to choose the learning rate"
        raise DataError(f"{problem}; give one --lr and one --weight-decay, or more images.")
    fit, fit_targets = features[kept.to(features.device)], targets[kept.to(targets.device)]
    probes = train_probes(fit, fit_targets, classes, grid.cells, epochs=epochs, batch_size=batch_size, seed=seed)
    correct = torch.zeros(len(grid.cells), dtype=torch.float64)
    loss = torch.zeros(len(grid.cells), dtype=torch.float64)
    truths = torch.split(targets[held_out.to(targets.device)], _ROWS_PER_PASS)
    for logits, truth in zip(_logits(probes, features[held_out.to(features.device)]), truths, strict=True):
        correct += (logits.argmax(2) == truth[:, None]).sum(0).cpu()
        losses = F.cross_entropy(logits.movedim(2, 1), truth[:, None].expand(-1, logits.shape[1]), reduction="none")
        loss += losses.sum(0, dtype=torch.float64).cpu()
    correct = correct.masked_fill(~loss.isfinite(), -1.0)  # never choose a probe that diverged
    best = min(range(len(correct)), key=lambda cell: (-float(correct[cell]), float(loss[cell])))
    return grid.cells[best], 100 * float(correct[best]) / len(held_out)


def _logits(probes: Probes, features: Tensor) -> Iterator[Tensor]:
    """Logits (m, k, c) of some rows at a time."""
    for rows in torch.split(features, _ROWS_PER_PASS):
        yield probes(rows.to(probes.weights.device))
