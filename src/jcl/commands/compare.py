"""Compares runs, checkpoints or weights by the quality of their features without labels (`jcl compare`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jcl.commands.distribution import canvas_of, open_source, open_viewers, settings_of, split_arguments
from jcl.console import plain_names
from jcl.distributed.device import choose_device
from jcl.errors import RunError, SettingsError
from jcl.evaluate.quality import RESAMPLES, Quality, rank_correlation
from jcl.export.loading import checkpoint_run
from jcl.runs.folder import RunFolder
from jcl.runs.json_object import is_number
from jcl.runs.metrics import read_metrics
from jcl.settings.commands import CompareOptions
from jcl.studies.distribution import ViewSampler, quality_features

CLEAR = 0.975  # share of the halves of the images in which the better one is better
MIN_IMAGES = 8  # on fewer, halves hardly differ


@dataclass(frozen=True)
class Compared:
    """The measures of one network on all images and on random halves of them, and its recorded kNN accuracy."""

    name: str
    quality: Quality
    halves: Sequence[Quality]
    knn_top1: float | None

    def share_above(self, other: Compared, measure: str) -> float:
        """The share of the halves in which this one is better; ties count half."""
        pairs = zip(self.halves, other.halves, strict=True)
        scores = [(own.score(measure), their.score(measure)) for own, their in pairs]
        return sum((own > their) + 0.5 * (own == their) for own, their in scores) / len(scores)


@dataclass(frozen=True)
class Comparison:
    """Networks compared on the same images, in the order given."""

    runs: Sequence[Compared]
    images: int
    notes: Sequence[str]

    def best(self, measure: str) -> tuple[Compared, dict[str, float]] | None:
        """The best of several networks, and the share of the halves in which it is above each of the others."""
        known = [run for run in self.runs if is_number(run.quality.score(measure))]
        if len(known) < 2 or self.images < MIN_IMAGES:
            return None
        best = max(known, key=lambda run: run.quality.score(measure))
        return best, {run.name: best.share_above(run, measure) for run in known if run is not best}

    def correlation(self, measure: str) -> float | None:
        """The rank correlation of a measure with kNN, over at least three networks whose accuracy is recorded."""
        pairs = [(run.quality.score(measure), run.knn_top1) for run in self.runs]
        known = [(score, top1) for score, top1 in pairs if is_number(score) and top1 is not None]
        found = rank_correlation(*zip(*known, strict=True)) if len(known) > 2 else None
        return found if is_number(found) else None  # all equal

    def as_dict(self) -> dict[str, Any]:
        """A flat object for JSON; with several networks, names start with the name of the network."""
        found: dict[str, Any] = {"images": self.images, "halves": RESAMPLES}
        for run, key in zip(self.runs, plain_names([run.name for run in self.runs]), strict=True):
            values = run.quality._asdict() | ({} if run.knn_top1 is None else {"knn_top1": run.knn_top1})
            found |= {name if len(self.runs) == 1 else f"{key}_{name}": value for name, value in values.items()}
        for measure in Quality._fields:
            if (best := self.best(measure)) is not None:
                found[f"best_{measure}"], found[f"best_{measure}_share"] = best[0].name, min(best[1].values())
            if (correlation := self.correlation(measure)) is not None:
                found[f"rank_correlation_{measure}_knn"] = correlation
        return {
            name: None if isinstance(value, float) and not is_number(value) else value for name, value in found.items()
        }


def compare(options: CompareOptions, progress: Callable[[int, int], None] | None = None) -> Comparison:
    """Measure all networks on the same images and views; `progress` is called with the number done and in all."""
    paths, location = split_arguments(options.weights)
    if len({path.resolve() for path in paths}) < len(paths):
        raise SettingsError("A run is given twice; give each run or file once.")
    device, settings = choose_device(options.device), settings_of(paths)
    viewers, notes = open_viewers(paths, settings, options.views, "backbone", device)
    source = open_source(paths, settings, location, "train")
    sampler = ViewSampler(0, device, canvas=canvas_of(viewers, paths, settings), workers=options.worker_count)
    found, images = [], 0
    for path, viewer in zip(paths, viewers, strict=True):
        features = quality_features(viewer, source, sampler, options.images, options.views_per_image)
        quality, images = features.measure(), len(features.crops)
        halves = features.resample(quality) if len(paths) > 1 else []
        knn_top1 = recorded_knn(path) if location is None else None  # it is of the run's own images
        found.append(Compared(viewer.name, quality, halves, knn_top1))
        if progress is not None:
            progress(len(found), len(paths))
    few = [f"{MIN_IMAGES} images or more are needed to say which is better."] if images < MIN_IMAGES else []
    return Comparison(found, images, [*notes, *few])


def recorded_knn(path: Path) -> float | None:
    """The kNN accuracy that a run recorded last, or at the step of one of its checkpoints."""
    run, lines = checkpoint_run(path), []
    with contextlib.suppress(RunError):
        lines = [line for line in read_metrics(RunFolder(run or path).metrics_file) if line["kind"] == "knn"]
    step = int(path.resolve().stem.removeprefix("step-")) if run is not None else None
    found = [line.get("knn_top1") for line in lines if line["step"] and step in (None, line["step"])]
    return found[-1] if found else None
