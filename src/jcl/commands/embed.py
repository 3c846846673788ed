"""The features of a set of images, as a run or weights file gives them, written to a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from jcl.commands.run_data import open_with_warnings
from jcl.console import StderrConsole
from jcl.cores import usual_workers
from jcl.data import UNLABELLED, ImageSource, all_class_names
from jcl.data.named import absolute_location
from jcl.distributed.device import choose_device
from jcl.errors import DataError, RunError, SettingsError
from jcl.evaluate.feature_file import FeatureInfo, FeatureRows, check_writable, write_feature_file
from jcl.export.backbone_file import weights_digest
from jcl.export.loading import LoadedBackbone, open_backbone
from jcl.paths import home_expanded

PRECISIONS: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class EmbedReport:
    """What was written: images of each split, the width of a row, and what could not be read with the reasons."""

    images: dict[str, int]
    feature_width: int
    skipped: dict[str, str]
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """The figures as one flat object of plain names."""
        count = sum(self.images.values())
        return {
            "images": count,
            **{f"{split}_images": images for split, images in self.images.items()},
            "feature_width": self.feature_width,
            "skipped": len(self.skipped),
            "skipped_names": sorted(self.skipped),
            "seconds": self.seconds,
            "images_per_second": count / self.seconds,
        }


def embed(
    weights: Path,
    location: str,
    file: Path,
    *,
    split: str = "all",
    batch_size: int = 256,
    workers: int | None = None,
    device: str = "auto",
    precision: str = "float32",
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> EmbedReport:
    """Write the features of every readable image at `location` to a `.npz` or `.parquet` file.

    `split` is "train", "test" or "all"; `progress` is told how many of how many images are done.
    """
    started = time.perf_counter()
    if precision not in PRECISIONS:
        raise SettingsError(f"There is no precision called {precision!r}; use {' or '.join(PRECISIONS)}.")
    _keep_apart(file, weights, location)
    check_writable(file, force=force)
    found = open_backbone(weights)
    sources = _splits(location, split)
    info = FeatureInfo(
        weights=str(home_expanded(weights).resolve()),
        weights_digest=weights_digest(found.network),
        backbone=found.info.backbone,
        image_size=found.info.image_size,
        feature_width=found.info.feature_width,
        precision=precision,
        data=absolute_location(location),
    )
    decoding = usual_workers() if workers is None else workers
    making = _Making(found, sources, choose_device(device), PRECISIONS[precision], batch_size, decoding, progress)
    write_feature_file(file, making.rows(), all_class_names(sources.values()), info)
    return EmbedReport(making.images, info.feature_width, making.skipped, time.perf_counter() - started)


@dataclass(frozen=True)
class _Making:
    """Features in the making: counts the images of each split, and lists what could not be read."""

    found: LoadedBackbone
    sources: dict[str, ImageSource]
    device: torch.device
    precision: torch.dtype
    batch_size: int
    workers: int
    progress: Callable[[int, int], None] | None
    images: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def rows(self) -> Iterator[FeatureRows]:
        """The features of all splits, in parts."""
        width, total = self.found.info.feature_width, sum(map(len, self.sources.values()))
        for split, source in self.sources.items():
            self.images[split] = 0
            skipped: dict[str, str] = {}
            for values, samples in self._batches(source, skipped):
                if values.shape[1] != width:
                    raise RunError(f"the network gives features of width {values.shape[1]}, not the {width} it states.")
                if not values.isfinite().all():
                    raise RunError(
                        "the features hold NaN or infinite values, so nothing was written; the training that made the "
                        "weights has probably diverged."
                    )
                self.images[split] += len(samples)
                yield _rows(split, source, values, samples.cpu())
                if self.progress is not None:
                    self.progress(sum(self.images.values()), total)
            # Two splits may each have an image of the same name.
            which = f" ({split})" if len(self.sources) > 1 else ""
            self.skipped.update((f"{name}{which}", reason) for name, reason in skipped.items())

    def _batches(self, source: ImageSource, skipped: dict[str, str]) -> Iterator[tuple[Tensor, Tensor]]:
        return self.found.info.shown.batches(
            self.found.network,
            source,
            batch_size=self.batch_size,
            device=self.device,
            precision=self.precision,
            workers=self.workers,
            skipped=skipped,
        )


def _keep_apart(file: Path, weights: Path, location: str) -> None:
    """Features never take the place of what they are made from, whatever may be overwritten."""
    if file.exists() and any(
        source.exists() and file.samefile(source) for source in (weights, home_expanded(location))
    ):
        raise SettingsError(f"{file} is what the features are to be made from; give them a file of their own.")


def _splits(location: str, wanted: str) -> dict[str, ImageSource]:
    data = open_with_warnings(location, StderrConsole())
    sources = {"train": data.train} | ({} if data.test is None else {"test": data.test})
    if wanted == "all":
        return sources
    if wanted not in sources:
        raise DataError(f"{location} has no split called {wanted}; use --split {' or '.join((*sources, 'all'))}.")
    return {wanted: sources[wanted]}


def _rows(split: str, source: ImageSource, values: Tensor, samples: Tensor) -> FeatureRows:
    labels = torch.full_like(samples, UNLABELLED) if source.labels is None else source.labels[samples]
    names = [source.name_of(sample) for sample in samples.tolist()]
    return FeatureRows(values.float().cpu().numpy(), names, labels.numpy(), [split] * len(names))
