"""Features on a plane, for a person to look at: by principal components, and by who is near to whom (t-SNE).

Both start from unit rows and draw nothing at random, so the same features give the same map.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jcl.evaluate.neighbours import unit_rows

_STEPS, _EXAGGERATED_STEPS, _EXAGGERATION = 250, 70, 12.0


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
    """Rows (n, d) placed so that near ones stay near (t-SNE, exact, from the principal map), (n, 2) float32.

    Takes time and memory in proportion to n²: meant for a few hundred rows.
    """
    count = len(features)
    places = principal_map(features).float()
    if count < 5:
        return places
    wanted = _joint_shares(unit_rows(features.cpu()), min(perplexity, (count - 1) / 3)).float()
    places = places * (1e-4 / places[:, 0].std().clamp_min(1e-12))
    speed, gains = torch.zeros_like(places), torch.ones_like(places)
    rate = max(count / _EXAGGERATION / 4, 50.0)
    for step in range(_STEPS):
        early = step < _EXAGGERATED_STEPS
        gradient = _gradient(places, wanted * _EXAGGERATION if early else wanted)
        # Jacobs' rule: where the gradient keeps its direction, steps grow.
        gains = torch.where(gradient * speed < 0, gains + 0.2, gains * 0.8).clamp_min(0.01)
        speed = (0.5 if early else 0.8) * speed - rate * gains * gradient
        places = places + speed
        places = places - places.mean(0)
    return places


def _gradient(places: Tensor, wanted: Tensor) -> Tensor:
    """Of the divergence between the wanted shares (n, n) and those that the places (n, 2) give."""
    squares = places.square().sum(1)
    kernel = torch.addmm(1 + squares[:, None] + squares, places, places.T, alpha=-2).clamp_min_(1).reciprocal_()
    kernel.fill_diagonal_(0)
    pull = (wanted - kernel / kernel.sum()).mul_(kernel)
    gradient: Tensor = 4 * (pull.sum(1, keepdim=True) * places - pull @ places)
    return gradient


def _joint_shares(rows: Tensor, perplexity: float) -> Tensor:
    """How much of its neighbourhood each row is to each other one, (n, n) with sum 1, by Gaussians of equal entropy."""
    distances = (2 - 2 * rows @ rows.T).clamp_min(0)
    distances.fill_diagonal_(math.inf)
    narrow = torch.full((len(rows), 1), 1e-3, dtype=rows.dtype)
    sharp = torch.full((len(rows), 1), 1e6, dtype=rows.dtype)
    for _ in range(25):  # halves the interval of each row's sharpness on a scale of powers
        middle = (narrow * sharp).sqrt()
        logs = torch.log_softmax(-distances * middle, 1)
        entropy = -torch.where(logs.isfinite(), logs.exp() * logs, 0.0).sum(1, keepdim=True)
        flat = entropy > math.log(perplexity)
        narrow, sharp = torch.where(flat, middle, narrow), torch.where(flat, sharp, middle)
    shares = torch.softmax(-distances * narrow, 1)
    return (shares + shares.T) / (2 * len(rows))
