"""Features of every image of a source: one centred view each, through a frozen backbone."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jcl.data import ImageSource, read_all
from jcl.evaluate.label_subset import part_of
from jcl.ranks import Ranks
from jcl.train.runtime import autocast
from jcl.views import IMAGENET_MEAN, IMAGENET_STD, centre_views


@dataclass(frozen=True, eq=False)
class Features:
    """Features of the images that could be read, in the source's order, on the CPU.

    values (n, d) float32; labels (n,) int64, -1 where an image has none, None where the source has no labels;
    samples (n,) int64, each row's index in the source; skipped: name and reason of each image that could not be read.
    """

    values: Tensor
    labels: Tensor | None
    samples: Tensor
    skipped: dict[str, str]

    def __len__(self) -> int:
        return len(self.values)


def extract_features(
    backbone: nn.Module,
    source: ImageSource,
    *,
    image_size: int,
    canvas: int | None = None,
    crop_ratio: float = 1.0,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    precision: torch.dtype = torch.float32,
    workers: int = 0,
    strict: bool = False,
) -> Features:
    """Pooled features of all images: `backbone` maps views (n, 3, image_size, image_size) to (n, d).

    The backbone is moved to `device` and runs in evaluation mode, so nothing in it changes, and each of its modules
    gets back the mode it had. `canvas` is the longest side at which images are decoded (default: twice what the view
    needs); `precision` bfloat16 runs the backbone under autocast. Unreadable images are left out; `strict` raises.
    """
    skipped: dict[str, str] = {}
    batches = feature_batches(
        backbone,
        source,
        image_size=image_size,
        canvas=canvas,
        crop_ratio=crop_ratio,
        mean=mean,
        std=std,
        batch_size=batch_size,
        device=device,
        precision=precision,
        workers=workers,
        strict=strict,
        skipped=skipped,
    )
    values, samples = torch.empty(0), torch.empty(len(source), dtype=torch.int64)
    count = 0
    for found, found_samples in batches:
        if count == 0:
            values = torch.empty(len(source), found.shape[1])
        values[count : count + len(found)] = found
        samples[count : count + len(found)] = found_samples
        count += len(found)
    values, samples = values[:count], samples[:count]
    labels = None if source.labels is None else source.labels[samples]
    return Features(values, labels, samples, skipped)


def extract_over_ranks(extract: Callable[[ImageSource], Features], source: ImageSource, ranks: Ranks) -> Features:
    """All features on every rank, of which each extracted those of its part of the images.

    `skipped` holds what this rank could not read.
    """
    if ranks.count == 1 or len(source) < ranks.count:
        return extract(source)
    own = torch.arange(ranks.rank * len(source) // ranks.count, (ranks.rank + 1) * len(source) // ranks.count)
    found = extract(part_of(source, own))
    values, samples = ranks.gather_all(found.values), ranks.gather_all(own[found.samples])
    return Features(values, None if source.labels is None else source.labels[samples], samples, found.skipped)


def feature_batches(
    backbone: nn.Module,
    source: ImageSource,
    *,
    image_size: int,
    canvas: int | None = None,
    crop_ratio: float = 1.0,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
    precision: torch.dtype = torch.float32,
    workers: int = 0,
    strict: bool = False,
    skipped: dict[str, str] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """`extract_features` one batch at a time, for those who do not hold all of them.

    Gives features (n, d), as the backbone made them and where it did, and each row's index in the source (n,). Images
    that cannot be read are entered into `skipped`.
    """
    target = torch.device(device)
    batches = read_all(
        source,
        canvas=canvas or 2 * round(image_size / crop_ratio),
        batch_size=batch_size,
        device=target,
        workers=workers,
        strict=strict,
        skipped=skipped,
    )
    with evaluation_mode(backbone.to(target)):
        for batch in batches:
            # Inference mode ends before the features are handed on, so that a probe can be trained on them.
            with torch.inference_mode(), autocast(target, precision):
                found = backbone(centre_views(batch.pixels, batch.sizes, image_size, crop_ratio, mean, std))
            yield found, batch.samples


def pixel_features(
    source: ImageSource,
    *,
    image_size: int,
    canvas: int | None = None,
    crop_ratio: float = 1.0,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    batch_size: int = 256,
    device: torch.device | str = "cpu",
) -> Features:
    """The normalised pixels of the centred views themselves, (n, 3 * image_size^2): what a backbone has to beat."""
    return extract_features(
        nn.Flatten(),
        source,
        image_size=image_size,
        canvas=canvas,
        crop_ratio=crop_ratio,
        mean=mean,
        std=std,
        batch_size=batch_size,
        device=device,
    )


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module and its parts in evaluation mode, and each of them back into its own mode at the end."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
