"""Between images in 0..1, the normalised values a network takes, and pictures to look at."""

from collections.abc import Sequence

import torch
from torch import Tensor


def normalise(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Shift and scale the three channels of images in 0..1, (n, 3, height, width)."""
    return (images - _channels(mean, images)) * _channels([1 / value for value in std], images)


def denormalise(views: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Turn views back into pictures a person can look at: uint8 (n, 3, height, width)."""
    images = views.float() * _channels(std, views) + _channels(mean, views)
    return (images * 255).round().clamp(0, 255).to(torch.uint8)


def _channels(values: Sequence[float], like: Tensor) -> Tensor:
    """One value per channel, (3, 1, 1), filled in on the device so that nothing is copied to it."""
    dtype = like.dtype if like.dtype == torch.float64 else torch.float32
    return torch.stack([torch.full((1, 1), value, dtype=dtype, device=like.device) for value in values])
