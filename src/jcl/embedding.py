"""The features of a set of images, as a run or weights file gives them, written to a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from jcl.data import UNLABELLED, ImageSource, open_data
from jcl.data.opening import whole_location
from jcl.errors import DataError, RunError, SettingsError
from jcl.evaluate.feature_file import FeatureInfo, FeatureRows, check_writable, write_feature_file
from jcl.evaluate.features import feature_batches
from jcl.evaluate.online import FeatureSettings
from jcl.exchange import BackboneInfo, load_backbone
from jcl.exchange.backbone_file import weights_digest
from jcl.train.runtime import choose_device

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
    workers: int = 0,
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
    backbone, backbone_info = load(weights)
    sources = _splits(location, split)
    target = choose_device(device)
    info = FeatureInfo(
        weights=str(weights.expanduser().resolve()),
        weights_digest=weights_digest(backbone),
        backbone=backbone_info.backbone,
        image_size=backbone_info.image_size,
        feature_width=backbone_info.feature_width,
        precision=precision,
        data=whole_location(location),
    )
    shown = FeatureSettings(backbone_info.image_size, backbone_info.mean, backbone_info.std)
    images, skipped = dict.fromkeys(sources, 0), dict[str, str]()

    def parts() -> Iterator[FeatureRows]:
        for name, source in sources.items():
            found = feature_batches(
                backbone,
                source,
                image_size=shown.image_size,
                crop_ratio=shown.crop_ratio,
                mean=shown.mean,
                std=shown.std,
                batch_size=batch_size,
                device=target,
                precision=PRECISIONS[precision],
                workers=workers,
                skipped=skipped,
            )
            for values, samples in found:
                if values.shape[1] != info.feature_width:
                    raise RunError(f"{weights} gives features of width {values.shape[1]}, not the width it states.")
                images[name] += len(samples)
                yield _rows(name, source, values, samples.cpu())
                if progress is not None:
                    progress(sum(images.values()), sum(map(len, sources.values())))

    class_names = next((source.class_names for source in sources.values() if source.class_names), None)
    write_feature_file(file, parts(), class_names, info)
    return EmbedReport(images, info.feature_width, skipped, time.perf_counter() - started)


def _keep_apart(file: Path, weights: Path, location: str) -> None:
    """Features never take the place of what they are made from, whatever may be overwritten."""
    if file.exists() and any(
        source.exists() and file.samefile(source) for source in (weights, Path(location).expanduser())
    ):
        raise SettingsError(f"{file} is what the features are to be made from; give them a file of their own.")


def load(weights: Path) -> tuple[nn.Module, BackboneInfo]:
    """The backbone of a run or weights file, and how images are shown to it."""
    backbone = load_backbone(weights.expanduser())
    info = backbone.info
    assert isinstance(info, BackboneInfo)
    return backbone, info


def _splits(location: str, wanted: str) -> dict[str, ImageSource]:
    data = open_data(location)
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
