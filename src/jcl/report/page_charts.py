"""The charts of the page: how figures of training went, and how similarities and variances are distributed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from jcl.report.contents import RunContents
from jcl.report.plots import points, smoothed
from jcl.report.svg import Chart, Curve, Frame, extent, line_chart
from jcl.train.health import uniform_guess_loss

_MOST_POINTS = 240
_LONG = 60  # a curve of so many points is averaged
_BINS = 24


@dataclass(frozen=True)
class Figure:
    """A chart with its title and what to make of it."""

    key: str
    title: str
    text: str
    chart: Chart


@dataclass(frozen=True)
class _Kind:
    key: str
    title: str
    text: str
    line: str
    name: str
    write: Callable[[float], str]
    from_zero: bool = False


def _plain(value: float) -> str:
    return f"{value:,.4g}"


def _percent(value: float) -> str:
    return f"{value:.3g} %"


_RATE = _Kind("rate", "Learning rate", "Features gain most as it falls.", "train", "lr", _plain, from_zero=True)
_TRAINING = (
    _Kind("loss", "Loss", "Lower is better; losses of different methods do not compare.", "train", "loss", _plain),
    _Kind(
        "accuracy",
        "Contrastive accuracy",
        "How many queries are nearer to their own image's key than to every key in the queue.",
        "train",
        "contrastive_accuracy",
        _percent,
        from_zero=True,
    ),
    _Kind(
        "knn",
        "kNN accuracy of the frozen features",
        "Measured on all images while training, by nearest neighbours' labels.",
        "knn",
        "knn_top1",
        _percent,
    ),
    _RATE,
    _Kind(
        "positive",
        "Similarity of query and keys",
        "Cosine similarity of a query to the mean of its own image's keys.",
        "train",
        "positive_similarity",
        _plain,
    ),
    _Kind(
        "spread",
        "Spread of the features",
        "Standard deviation of a coordinate over a batch; near zero, the features have collapsed.",
        "train",
        "feature_std",
        _plain,
        from_zero=True,
    ),
)
_SPEED = _Kind(
    "speed", "Throughput", "Images a second while training.", "train", "images_per_second", _plain, from_zero=True
)


def training_figures(runs: Sequence[RunContents]) -> list[Figure]:
    """Loss, accuracies, learning rate and spread; what no run has recorded is left out."""
    return [figure for kind in _TRAINING if (figure := _figure(kind, runs)) is not None]


def speed_figure(runs: Sequence[RunContents]) -> Figure | None:
    """Throughput over the epochs, if any run has recorded it."""
    return _figure(_SPEED, runs)


def spread_figures(runs: Sequence[RunContents]) -> list[Figure]:
    """Histograms of similarity and variance over images; empty where no run has looked at its images."""
    looks = [(place, run.look.spread) for place, run in enumerate(runs) if run.look is not None and run.look.spread]
    if not looks:
        return []
    similar = {place: spread.similarity for place, spread in looks}
    varied = {place: spread.variance for place, spread in looks}
    return [
        _histogram("similarity", "Similarity of an image's views", "Further right: the views of an image look more "
                   "alike to the network.", similar, "mean cosine similarity"),
        _histogram("variance", "Variance of an image's views", "Further left: the features change less from view to "
                   "view.", varied, "mean variance of a coordinate"),
    ]  # fmt: skip


def _figure(kind: _Kind, runs: Sequence[RunContents]) -> Figure | None:
    curves = [
        curve for place, run in enumerate(runs) if (curve := _curve(place, run, kind, len(runs) == 1)) is not None
    ]
    if not curves:
        return None
    levels = _guesses(runs, {curve.run for curve in curves}) if kind.key == "loss" else []
    heights = [y for curve in curves for _, y in (*curve.points, *curve.faint)] + [value for value, _ in levels]
    end = max(x for curve in curves for x, _ in curve.points)
    frame = Frame((0.0, end or 1.0), extent(heights, from_zero=kind.from_zero))
    ends = "; ".join(f"{runs[curve.run].name} ends at {kind.write(_last(curve))}" for curve in curves)
    label = f"{kind.title} over epochs. {ends}."
    return Figure(
        kind.key,
        kind.title,
        kind.text,
        line_chart(curves, frame, label=label, x_name="epoch", write=kind.write, levels=levels),
    )


def _curve(place: int, run: RunContents, kind: _Kind, alone: bool) -> Curve | None:
    where, values = points(run.metrics, "epoch", kind.line, kind.name)
    if not np.isfinite(values).any():
        return None
    long = len(values) >= _LONG and kind is not _RATE
    every = max(1, math.ceil(len(values) / _MOST_POINTS))
    # The last point is always there: it is what the curve is read for.
    chosen = np.unique(np.append(np.arange(0, len(values), every), len(values) - 1))
    drawn = smoothed(values) if long else values
    faint = [(float(where[row]), float(values[row])) for row in chosen] if long else []
    line = [(float(where[row]), float(drawn[row])) for row in chosen]
    if kind is _RATE and not alone:
        # Schedules often coincide: those of later runs are thinner, so that the ones below show at their sides.
        return Curve(place, line, width=max(5.0 - 1.6 * place, 1.6))
    return Curve(place, line, faint, marked=len(values) <= 25)


def _last(curve: Curve) -> float:
    return next(y for _, y in reversed(curve.points) if math.isfinite(y))


def _guesses(runs: Sequence[RunContents], drawn: set[int]) -> list[tuple[float, str]]:
    sizes = {run.settings.method.queue_size for place, run in enumerate(runs) if place in drawn}
    known = sorted(size for size in sizes if isinstance(size, int))
    return [(uniform_guess_loss(size), f"uniform guess among {size + 1:,}") for size in known]


def _histogram(key: str, title: str, text: str, values: dict[int, Tensor], x_name: str) -> Figure:
    """Shares of the images in bins that all runs have in common, as steps over the x axis."""
    arrays = {place: own.double().numpy() for place, own in values.items()}
    everything = np.concatenate(list(arrays.values()))
    low, high = float(everything.min()), float(everything.max())
    if high - low < 1e-9:
        low, high = low - 0.05, high + 0.05
    edges = np.linspace(low, high, _BINS + 1)
    curves = []
    for place, own in arrays.items():
        shares = 100 * np.histogram(own, edges)[0] / max(1, len(own))
        steps = [(float(x), float(share)) for left, share in enumerate(shares) for x in edges[left : left + 2]]
        curves.append(Curve(place, [(low, 0.0), *steps, (high, 0.0)], filled=True))
    frame = Frame((low, high), extent([y for curve in curves for _, y in curve.points], from_zero=True))
    means = ", ".join(f"{own.mean():.3g}" for own in arrays.values())
    chart = line_chart(curves, frame, label=f"{title}: histogram, means {means}", x_name=x_name, write=_percent)
    return Figure(key, title, text, chart)
