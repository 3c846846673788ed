"""Images to make views of."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as reference

PHOTOGRAPHS = Path(__file__).parents[3] / "shared" / "data" / "photos"


def natural_image(height: int, width: int, seed: int) -> Tensor:
    """A drawn uint8 image (3, height, width) with a photograph's spectrum, colored edges and one-pixel detail."""
    draw = torch.Generator().manual_seed(seed)
    frequency = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None, :])
    spectrum = torch.fft.rfft2(torch.randn(3, height, width, generator=draw)) / (frequency + 1 / max(height, width))
    image = torch.fft.irfft2(spectrum, s=(height, width))
    image = image / image.std().clamp_min(1e-6) * 45 + 120
    top, left = height // 4, width // 3
    image[:, top : top + height // 3, left : left + width // 4] += torch.tensor([90.0, -60.0, 20.0])[:, None, None]
    image[:, ::7, : width // 2] -= 80  # lines of one pixel
    return image.round().clamp(0, 255).to(torch.uint8)


@pytest.fixture
def images() -> Callable[..., Tensor]:
    """Makes a batch of different drawn images, uint8 (n, 3, height, width)."""
    return lambda count, height, width: torch.stack([natural_image(height, width, seed) for seed in range(count)])


@pytest.fixture(scope="session")
def photographs() -> list[Tensor]:
    """Drawn images with fine detail and, where they are at hand, real photographs: uint8 (3, height, width) each."""
    found = sorted(PHOTOGRAPHS.rglob("*.JPEG"))[:200:25] if PHOTOGRAPHS.is_dir() else []
    real = [reference.pil_to_tensor(Image.open(path).convert("RGB")) for path in found]
    return [natural_image(240, 320, 1), natural_image(331, 217, 2), *real]
