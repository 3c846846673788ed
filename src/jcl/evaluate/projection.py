"""Features in the plane: principal components and t-SNE, both deterministic.

NumPy, not torch: many small operations that would spend their time on thread synchronization.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jcl.evaluate.neighbours import unit_rows

_STEPS, _EXAGGERATED_STEPS, _EXAGGERATION = 250, 70, 12.0
_BISECTIONS = 25
Matrix = NDArray[np.float64]


def principal_components(features: Tensor) -> Tensor:
    """The first two principal components (n, 2) of the unit rows of `features` (n, d), in float64.

    The sign of each is chosen so that its largest entry is positive.
    """
    rows = unit_rows(features.cpu())
    centred = rows - rows.mean(0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    components = torch.zeros(len(rows), 2, dtype=torch.float64)
    found = centred @ directions[:2].T
    components[:, : found.shape[1]] = found
    largest = components.gather(0, components.abs().argmax(0, keepdim=True))
    return components * torch.where(largest < 0, -1.0, 1.0)


def tsne(features: Tensor, perplexity: float = 30.0) -> Tensor:
    """Exact t-SNE (n, 2) of the unit rows of `features` (n, d), from a PCA start; O(n²), for a few hundred rows."""
    count, start = len(features), principal_components(features)
    if count < 5:
        return start
    p = _joint_probabilities(unit_rows(features.cpu()).numpy(), min(perplexity, (count - 1) / 3))
    y: Matrix = start.numpy() * (1e-4 / max(float(start[:, 0].std()), 1e-12))
    velocity, gains = np.zeros_like(y), np.ones_like(y)
    learning_rate = max(count / _EXAGGERATION / 4, 50.0)
    for step in range(_STEPS):
        early = step < _EXAGGERATED_STEPS
        gradient = _gradient(y, p * _EXAGGERATION if early else p)
        gains = np.maximum(np.where(gradient * velocity < 0, gains + 0.2, gains * 0.8), 0.01)
        velocity = (0.5 if early else 0.8) * velocity - learning_rate * gains * gradient
        y = y + velocity
        y = y - y.mean(0)
    return torch.from_numpy(y)


def _gradient(y: Matrix, p: Matrix) -> Matrix:
    """Gradient of KL(P || Q) with respect to the embedding y (n, 2), where Q is Student-t."""
    squares = np.square(y).sum(1)
    kernel = y @ (-2 * y.T)
    kernel += squares[:, None] + (1 + squares)
    np.reciprocal(np.maximum(kernel, 1, out=kernel), out=kernel)
    np.fill_diagonal(kernel, 0)
    weights = (p - kernel / kernel.sum()) * kernel
    gradient: Matrix = 4 * (weights.sum(1, keepdims=True) * y - weights @ y)
    return gradient


def _joint_probabilities(rows: Matrix, perplexity: float) -> Matrix:
    """P (n, n) of unit rows; each row's precision is found by bisection to give the wanted perplexity."""
    distances = np.maximum(2 - 2 * rows @ rows.T, 0)
    low, high = np.full((len(rows), 1), 1e-3), np.full((len(rows), 1), 1e6)
    for _ in range(_BISECTIONS):
        middle = np.sqrt(low * high)
        p = _conditional_probabilities(distances, middle)
        entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(1, keepdims=True)
        too_flat = entropy > math.log(perplexity)
        low, high = np.where(too_flat, middle, low), np.where(too_flat, high, middle)
    p = _conditional_probabilities(distances, low)
    joint: Matrix = (p + p.T) / (2 * len(rows))
    return joint


def _conditional_probabilities(distances: Matrix, precision: Matrix) -> Matrix:
    logits = -distances * precision
    np.fill_diagonal(logits, -np.inf)
    p: Matrix = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return p
