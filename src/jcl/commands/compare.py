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
from jcl.evaluate.features import FeatureSettings
from jcl.evaluate.quality import RESAMPLES, Quality, quality_features, rank_correlation
from jcl.export.loading import checkpoint_run
from jcl.runs.folder import RunFolder
from jcl.runs.json_object import is_number
from jcl.runs.metrics import read_metrics
from jcl.settings.evaluation import CompareOptions

CLEAR = 0.975  # share of the halves of the images in which the better one is better
MEASURES = Quality._fields


@dataclass(frozen=True)
class Compared:
    """The measures of one network on all images and on random halves of them, and its recorded kNN accuracy."""

    name: str
    quality: Quality
    halves: Sequence[Quality]
    knn_top1: float | None

    def score(self, measure: str) -> float:
        return float(getattr(self.quality.scores(), measure))

    def share_above(self, other: Compared, measure: str) -> float:
        """The share of the halves in which this one is better; ties count half."""
        pairs = zip(self.halves, other.halves, strict=True)
        scores = [(getattr(own.scores(), measure), getattr(their.scores(), measure)) for own, their in pairs]
        return float(sum((own > their) + 0.5 * (own == their) for own, their in scores)) / len(scores)


@dataclass(frozen=True)
class Comparison:
    """Networks compared on the same images, in the order given."""

    runs: Sequence[Compared]
    images: int
    notes: Sequence[str]

    def best(self, measure: str) -> tuple[Compared, dict[str, float]] | None:
        """The best network by a measure, and the share of halves in which it beats each other; None if not finite."""
        known = [run for run in self.runs if is_number(run.score(measure))]
        if len(known) < 2:
            return None
        best = max(known, key=lambda run: run.score(measure))
        return best, {run.name: best.share_above(run, measure) for run in known if run is not best}

    def correlations(self) -> dict[str, float]:
        """The rank correlation of each measure with kNN, over at least three networks whose accuracy is recorded."""
        found = {}
        for measure in MEASURES:
            known = [run for run in self.runs if run.knn_top1 is not None and is_number(run.score(measure))]
            if len(known) > 2:
                accuracies = [float(run.knn_top1 or 0) for run in known]
                found[measure] = rank_correlation([run.score(measure) for run in known], accuracies)
        return found

    def as_dict(self) -> dict[str, Any]:
        """A flat object for JSON; with several networks, names start with the name of the network."""
        found: dict[str, Any] = {"images": self.images, "halves": RESAMPLES}
        for run, key in zip(self.runs, plain_names([run.name for run in self.runs]), strict=True):
            values = run.quality._asdict() | ({} if run.knn_top1 is None else {"knn_top1": run.knn_top1})
            prefix = "" if len(self.runs) == 1 else f"{key}_"
            found |= {f"{prefix}{name}": value if is_number(value) else None for name, value in values.items()}
        for measure in MEASURES:
            if (best := self.best(measure)) is not None:
                share = min(best[1].values())
                found |= {f"best_{measure}": best[0].name, f"best_{measure}_share": share}
                found[f"best_{measure}_is_clear"] = share >= CLEAR
        return found | {f"rank_correlation_{name}_knn": value for name, value in self.correlations().items()}


def compare(options: CompareOptions, progress: Callable[[int, int], None] | None = None) -> Comparison:
    """Measure all networks on the same images and views; `progress` is called with the number done and in all."""
    paths, location = split_arguments(options.weights)
    if len({path.resolve() for path in paths}) < len(paths):
        raise SettingsError("A run is given twice; give each run or file once.")
    device, settings = choose_device(options.device), settings_of(paths)
    viewers, notes = open_viewers(paths, settings, options.views, "backbone", device)
    source = open_source(paths, settings, location, "train")
    found, images = [], 0
    for path, viewer in zip(paths, viewers, strict=True):
        recipe = viewer.recipe
        features = quality_features(
            *(viewer.network, source, FeatureSettings(recipe.size, recipe.mean, recipe.std), recipe),
            canvas=canvas_of(viewers, paths, settings),
            device=device,
            workers=options.worker_count,
            images=options.images,
            views=options.views_per_image,
        )
        images = len(features.crops)
        halves = features.resample() if len(paths) > 1 else []
        knn_top1 = recorded_knn(path) if location is None else None  # of other images
        found.append(Compared(viewer.name, features.measure(), halves, knn_top1))
        viewer.network.cpu()
        if progress is not None:
            progress(len(found), len(paths))
    return Comparison(found, images, notes)


def recorded_knn(path: Path) -> float | None:
    """The kNN accuracy that a run recorded at its end, or at the step of one of its checkpoints."""
    run = checkpoint_run(path)
    lines = []
    with contextlib.suppress(RunError):
        lines = [line for line in read_metrics(RunFolder(run or path).metrics_file) if line["kind"] == "knn"]
    if run is not None:
        lines = [line for line in lines if line["step"] == int(path.stem.removeprefix("step-"))]
    value = lines[-1].get("knn_top1") if lines else None
    return float(value) if value is not None and (run is not None or lines[-1]["step"]) else None
