"""Features on a plane, for a person to look at: by principal components, and by who is near to whom (t-SNE).

Both start from unit rows and draw nothing at random, so the same features give the same map. Many steps on small
tables are taken in NumPy, whose operations do not wait for threads that a busy machine has no time for.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jcl.evaluate.neighbours import unit_rows

_STEPS, _EXAGGERATED_STEPS, _EXAGGERATION = 250, 70, 12.0
_HALVINGS = 25
Rows = NDArray[np.float64]


def principal_map(features: Tensor) -> Tensor:
    """Rows (n, d) on their two principal components, (n, 2) float64; each axis points to its largest entry."""
    rows = unit_rows(features.cpu())
    centred = rows - rows.mean(0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    places = torch.zeros(len(rows), 2, dtype=torch.float64)
    found = centred @ directions[:2].T
    places[:, : found.shape[1]] = found
    largest = places.gather(0, places.abs().argmax(0, keepdim=True))
    return places * torch.where(largest < 0, -1.0, 1.0)


def neighbour_map(features: Tensor, perplexity: float = 30.0) -> Tensor:
    """Rows (n, d) placed so that near ones stay near (t-SNE, exact, from the principal map), (n, 2) float64.

    Takes time and memory in proportion to n²: meant for a few hundred rows.
    """
    count = len(features)
    start = principal_map(features)
    if count < 5:
        return start
    rows: Rows = unit_rows(features.cpu()).numpy()
    wanted = _joint_shares(rows, min(perplexity, (count - 1) / 3))
    places: Rows = start.numpy() * (1e-4 / max(float(start[:, 0].std()), 1e-12))
    speed, gains = np.zeros_like(places), np.ones_like(places)
    rate = max(count / _EXAGGERATION / 4, 50.0)
    for step in range(_STEPS):
        early = step < _EXAGGERATED_STEPS
        gradient = _gradient(places, wanted * _EXAGGERATION if early else wanted)
        # Jacobs' rule: where the gradient keeps its direction, steps grow.
        gains = np.maximum(np.where(gradient * speed < 0, gains + 0.2, gains * 0.8), 0.01)
        speed = (0.5 if early else 0.8) * speed - rate * gains * gradient
        places = places + speed
        places = places - places.mean(0)
    return torch.from_numpy(places)


def _gradient(places: Rows, wanted: Rows) -> Rows:
    """Of the divergence between the wanted shares (n, n) and those that the places (n, 2) give."""
    squares = np.square(places).sum(1)
    kernel = places @ (-2 * places.T)
    kernel += squares[:, None] + (1 + squares)
    np.reciprocal(np.maximum(kernel, 1, out=kernel), out=kernel)
    np.fill_diagonal(kernel, 0)
    pull = (wanted - kernel / kernel.sum()) * kernel
    gradient: Rows = 4 * (pull.sum(1, keepdims=True) * places - pull @ places)
    return gradient


def _joint_shares(rows: Rows, perplexity: float) -> Rows:
    """How much of its neighbourhood each row is to each other one, (n, n) with sum 1, by Gaussians of equal entropy."""
    distances = np.maximum(2 - 2 * rows @ rows.T, 0)
    narrow, sharp = np.full((len(rows), 1), 1e-3), np.full((len(rows), 1), 1e6)
    for _ in range(_HALVINGS):  # of the interval of each row's sharpness, on a scale of powers
        middle = np.sqrt(narrow * sharp)
        shares = _shares(distances, middle)
        entropy = -(shares * np.log(np.maximum(shares, 1e-300))).sum(1, keepdims=True)
        flat = entropy > math.log(perplexity)
        narrow, sharp = np.where(flat, middle, narrow), np.where(flat, sharp, middle)
    shares = _shares(distances, narrow)
    together: Rows = (shares + shares.T) / (2 * len(rows))
    return together


def _shares(distances: Rows, sharpness: Rows) -> Rows:
    """A softmax over each row's distances to the others."""
    levels = -distances * sharpness
    np.fill_diagonal(levels, -np.inf)
    shares: Rows = np.exp(levels - levels.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    return shares
