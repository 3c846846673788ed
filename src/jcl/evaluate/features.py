"""Features of all images of a source: one center crop each, through a frozen backbone."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jcl.console import ProgressCallback, no_progress
from jcl.data import UNLABELED, ImageSource, read_all
from jcl.data.source import NoReadableImages, select_images
from jcl.distributed.device import autocast
from jcl.distributed.group import Ranks, fail_together
from jcl.views import IMAGENET_MEAN, IMAGENET_STD, center_views


@dataclass(frozen=True, eq=False)
class Features:
    """Features of the images that could be read, in the source's order, on the CPU.

    values (n, d) float32; labels (n,) int64, -1 where an image has none; samples (n,) int64, each row's index in the
    source; skipped: name and reason of each image that could not be read.
    """

    values: Tensor
    labels: Tensor
    samples: Tensor
    skipped: dict[str, str]

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class FeatureSettings:
    """How images are preprocessed for a frozen backbone: a normalized center crop of `image_size` pixels."""

    image_size: int
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    @property
    def crop_ratio(self) -> float:
        """Photographs are resized a little larger than the crop; small images are not cropped."""
        return 0.875 if self.image_size >= 96 else 1.0

    @property
    def canvas(self) -> int:
        """The size at which images are decoded: twice what the crop needs."""
        return 2 * round(self.image_size / self.crop_ratio)

    def extract(
        self, backbone: nn.Module, source: ImageSource, *, progress: ProgressCallback = no_progress, **options: Any
    ) -> Features:
        """Pooled features of all images; `options` are those of `batches`."""
        skipped: dict[str, str] = {}
        values, samples = torch.empty(0), torch.empty(len(source), dtype=torch.int64)
        count = 0
        for found, found_samples in self.batches(backbone, source, skipped=skipped, **options):
            if count == 0:
                values = torch.empty(len(source), found.shape[1])
            values[count : count + len(found)] = found
            samples[count : count + len(found)] = found_samples
            count += len(found)
            progress(count, len(source))
        return Features(values[:count], labels_of(source, samples[:count]), samples[:count], skipped)

    def batches(
        self,
        backbone: nn.Module,
        source: ImageSource,
        *,
        device: torch.device,
        precision: torch.dtype = torch.float32,
        batch_size: int | None = None,
        workers: int = 0,
        skipped: dict[str, str],
        strict: bool = False,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Features (n, d) one batch at a time, in the backbone's dtype, and the index of each row in the source (n,).

        The backbone is moved to `device` and runs in evaluation mode; the mode of each sub-module is then restored.
        `precision` bfloat16 uses autocast. The default `batch_size` depends on the device. Unreadable images are added
        to `skipped`; `strict` raises.
        """
        if batch_size is None:  # a GPU takes more small images at a time
            small = max(1, 224 // self.image_size) ** 2 if device.type == "cuda" else 1
            batch_size = min(256 * small, 1024)
        images = read_all(
            source,
            canvas=self.canvas,
            batch_size=batch_size,
            device=device,
            workers=workers,
            strict=strict,
            skipped=skipped,
        )
        crop = (self.image_size, self.crop_ratio, self.mean, self.std)
        with evaluation_mode(backbone.to(device)):
            for batch in images:
                # Inference mode ends before the yield, so that a probe can be trained on the features.
                with torch.inference_mode(), autocast(device, precision):
                    found = backbone(center_views(batch.pixels, batch.sizes, *crop))
                yield found, batch.samples


def labels_of(source: ImageSource, samples: Tensor) -> Tensor:
    """The labels (n,) of some images, -1 where there are none."""
    return torch.full_like(samples, UNLABELED) if source.labels is None else source.labels[samples]


def extract_features(
    backbone: nn.Module,
    source: ImageSource,
    *,
    image_size: int,
    mean: tuple[float, ...] = IMAGENET_MEAN,
    std: tuple[float, ...] = IMAGENET_STD,
    device: torch.device | str = "cpu",
    workers: int = 0,
) -> Features:
    """Features of all images that can be read, with `values` (n, width), `labels` (n,) and `samples` (n,).

    `source` is the `train` or `test` of `jcl.data.open_data(...)`. Images are resized, cropped in the center and
    normalized; `workers` processes decode files.
    """
    preprocessing = FeatureSettings(image_size, mean, std)
    return preprocessing.extract(backbone, source, device=torch.device(device), workers=workers)


def extract_over_ranks(extract: Callable[[ImageSource], Features], source: ImageSource, ranks: Ranks) -> Features:
    """The features of all images on every rank; each rank extracts those of its part of the images."""
    if ranks.count == 1 or len(source) < ranks.count:
        return extract(source)
    own = torch.arange(ranks.rank * len(source) // ranks.count, (ranks.rank + 1) * len(source) // ranks.count)
    found = Features(torch.empty(0, 0), own[:0], own[:0], {})
    with fail_together(ranks):
        try:
            found = extract(select_images(source, own))
        except NoReadableImages as error:  # other ranks may have read theirs
            found.skipped.update(error.skipped)
    skipped = {name: why for part in ranks.gather_objects(found.skipped) for name, why in part.items()}
    width = max(ranks.gather_objects(found.values.shape[1]))
    if width == 0:
        raise NoReadableImages(source.description, skipped)
    values, samples = ranks.gather_uneven(found.values.reshape(-1, width)), ranks.gather_uneven(own[found.samples])
    return Features(values, labels_of(source, samples), samples, skipped)


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode, and restore the mode of each of its sub-modules at the end."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
