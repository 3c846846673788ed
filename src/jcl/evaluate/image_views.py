"""Many drawn views of each image of a source, a few images at a time: what studies of views feed to a network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from jcl.data import ImageBatch, ImageSource, read_all
from jcl.data.subset import select_images
from jcl.distributed.device import autocast
from jcl.errors import DataError
from jcl.random import permutation
from jcl.views import ViewMaker, ViewRecipe

_CHOICE_STREAM = 0x766965777321  # a stream of its own beside those that `jcl.random` names
_STEP = 0  # views are drawn as those of a first step


@dataclass(frozen=True)
class ViewPasses:
    """How views are drawn and sent through networks: seeded, and at most `batch_size` of them at a time.

    A view depends on the seed, the image and the view's number alone, so whoever asks for it sees the same one.
    """

    seed: int
    device: torch.device
    precision: torch.dtype = torch.float32
    batch_size: int = 512
    canvas: int = 320
    workers: int = 0
    progress: Callable[[int, int], None] | None = None  # is told how many of how many images are done
    skipped: dict[str, str] = field(default_factory=dict)  # images that could not be read, with the reasons

    def over(self, source: ImageSource, rows: Tensor, views: int) -> Iterator[ViewedImages]:
        """The images `rows` of a source in batches, each small enough for `views` views of every image to be a pass."""
        at_once = max(1, self.batch_size // views)
        batches = read_all(
            select_images(source, rows),
            canvas=self.canvas,
            batch_size=at_once,
            device=self.device,
            workers=self.workers,
            skipped=self.skipped,
        )
        done, whose = 0, rows.to(self.device)
        for batch in batches:
            # By its number in the whole source an image has the same views, whatever other images are asked about.
            yield ViewedImages(self, ImageBatch(batch.pixels, batch.sizes, whose[batch.samples]))
            done += len(batch)
            if self.progress is not None:
                self.progress(done, len(rows))


@dataclass(frozen=True)
class ViewedImages:
    """A few images, whose views can be asked for by number."""

    passes: ViewPasses
    batch: ImageBatch

    def __len__(self) -> int:
        return len(self.batch)

    def parts(self, recipe: ViewRecipe, numbers: range) -> Iterator[Tensor]:
        """The views with these numbers, (n * v, 3, size, size) image by image, with as many v as a pass may hold."""
        at_once = max(1, self.passes.batch_size // len(self))
        for start in range(numbers.start, numbers.stop, at_once):
            yield self._views(recipe, range(start, min(start + at_once, numbers.stop)))

    def encoded(self, network: nn.Module, views: Tensor) -> Tensor:
        """Those views through a network: (n, v, d), in the precision it computes in."""
        with torch.inference_mode(), autocast(self.passes.device, self.passes.precision):
            features: Tensor = network(views)
        return features.view(len(self), -1, features.shape[1])

    def _views(self, recipe: ViewRecipe, numbers: range) -> Tensor:
        batch, device = self.batch, self.passes.device
        maker = ViewMaker(
            recipe,
            self.passes.seed,
            _STEP,
            batch.pixels,
            batch.sizes,
            batch.samples,
            dtype=self.passes.precision,
            memory_format=torch.channels_last if device.type == "cuda" else torch.contiguous_format,
        )
        rows = torch.arange(len(batch), device=device).repeat_interleave(len(numbers))
        return maker(rows, torch.arange(numbers.start, numbers.stop, device=device).repeat(len(batch)))


def chosen_rows(source: ImageSource, count: int, seed: int) -> Tensor:
    """`count` images of a source drawn by the seed, or all of them where there are fewer: their rows, rising.

    The images of a smaller count are among those of a larger one.
    """
    if len(source) < 2 or count < 2:
        raise DataError(
            f"images are compared with each other, so at least two are needed, but there "
            f"{'is' if min(count, len(source)) == 1 else 'are'} {min(count, len(source))} ({source.description})."
        )
    return permutation(seed, _CHOICE_STREAM, 0, len(source))[:count].sort().values
