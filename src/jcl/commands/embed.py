"""Writes the features of a set of images to a file (`jcl embed`)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from jcl.commands.target import EvaluationTarget, open_target
from jcl.console import StderrConsole
from jcl.data import ImageSource, all_class_names
from jcl.data.named import absolute_location
from jcl.errors import DataError, RunError, SettingsError
from jcl.evaluate.feature_file import FeatureInfo, FeatureTable, check_writable, write_feature_file
from jcl.evaluate.features import labels_of
from jcl.export.backbone_file import weights_digest
from jcl.paths import expand_user
from jcl.settings.commands import EmbedOptions

PRECISIONS: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Progress = Callable[[int, int], None]


@dataclass
class EmbedReport:
    """The number of images written from each split, and the unreadable ones with the reasons."""

    feature_width: int
    images: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
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


def embed(options: EmbedOptions, *, progress: Progress | None = None) -> EmbedReport:
    """Write the features of all readable images; `progress` is called with the number of images done and in all."""
    started = time.perf_counter()
    inputs = (options.weights, expand_user(options.data))
    if options.out.exists() and any(path.exists() and options.out.samefile(path) for path in inputs):
        raise SettingsError(f"{options.out} is an input of this command; choose another --out.")
    check_writable(options.out, force=options.force)
    target = open_target(options.weights, options.data, options.device, StderrConsole())
    splits = {"train": target.data.train} | ({} if target.data.test is None else {"test": target.data.test})
    if options.split not in (*splits, "all"):
        raise DataError(f"{options.data} has no split {options.split!r}; use --split {' or '.join(splits)} or all.")
    sources = splits if options.split == "all" else {options.split: splits[options.split]}
    info = FeatureInfo(
        weights=str(expand_user(options.weights).resolve()),
        weights_digest=weights_digest(target.backbone),
        backbone=target.info.backbone,
        image_size=target.info.image_size,
        feature_width=target.info.feature_width,
        precision=options.precision,
        data=absolute_location(options.data),
    )
    report = EmbedReport(info.feature_width)
    write_feature_file(options.out, _tables(target, sources, options, info, report, progress))
    report.seconds = time.perf_counter() - started
    return report


def _tables(
    target: EvaluationTarget,
    sources: dict[str, ImageSource],
    options: EmbedOptions,
    info: FeatureInfo,
    report: EmbedReport,
    progress: Progress | None,
) -> Iterator[FeatureTable]:
    """The features of all splits, a batch at a time; fills in the report."""
    total, width = sum(map(len, sources.values())), info.feature_width
    classes = all_class_names(sources.values())
    if classes is not None:  # names of folders may hold bytes that are not UTF-8
        classes = tuple(os.fsencode(name).decode("utf-8", "replace") for name in classes)
    for split, source in sources.items():
        report.images[split] = 0
        skipped: dict[str, str] = {}
        batches = target.info.preprocessing.batches(
            target.backbone,
            source,
            batch_size=options.batch_size,
            device=target.device,
            precision=PRECISIONS[options.precision],
            workers=options.worker_count,
            skipped=skipped,
        )
        for values, samples in batches:
            if values.shape[1] != width:
                raise RunError(f"The network gives features of width {values.shape[1]}, but its file states {width}.")
            if not values.isfinite().all():
                raise RunError("The features are NaN or infinite; the training of the weights probably diverged.")
            names = [source.name_of(sample) for sample in samples.tolist()]
            labels = labels_of(source, samples.cpu()).numpy()
            splits = [split] * len(names)
            yield FeatureTable(values.float().cpu().numpy(), names, labels, splits, classes, info)
            report.images[split] += len(names)
            if progress is not None:
                progress(sum(report.images.values()), total)
        suffix = f" ({split})" if len(sources) > 1 else ""  # both splits may have an image of the same name
        report.skipped |= {f"{name}{suffix}": reason for name, reason in skipped.items()}
