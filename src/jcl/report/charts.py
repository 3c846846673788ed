"""Charts of the page; the template draws them as SVG."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from jcl.report.contents import QUALITY, FeatureMap, RunContents
from jcl.report.style import PALETTE
from jcl.studies.distribution import ViewSpread
from jcl.train.display import uniform_guess_loss

Points = NDArray[np.float64]  # (n, 2)

PLOT_AREA: Final = (54, 12, 402, 204)  # left, top, right and bottom in a drawing of 420 by 236
_MAP_SIDE, _MAP_MARGIN = 420, 14
_MAX_POINTS, _SMOOTHED, _MARKED = 240, 60, 25  # points drawn; from 60 on they are averaged, up to 25 they are marked
_BINS, _MAX_CLASSES = 24, 12
_CIRCLE: Final = "M-3.6 0A3.6 3.6 0 1 0 3.6 0A3.6 3.6 0 1 0 -3.6 0Z"
_TRIANGLE: Final = "M0 -4.4L4.1 3.2L-4.1 3.2Z"
_DOT: Final = "M-2.2 0A2.2 2.2 0 1 0 2.2 0A2.2 2.2 0 1 0 -2.2 0Z"


@dataclass(frozen=True)
class ChartSpec:
    """Metric, texts and axes of a chart; for training charts also the kind of line in `metrics.jsonl`."""

    metric: str
    title: str
    text: str
    kind: str = "train"
    percent: bool = False
    from_zero: bool = False
    x_name: str = "epoch"

    def format(self, value: float) -> str:
        return f"{value:.3g} %" if self.percent else f"{value:,.4g}"


_TRAINING: Final = (
    ChartSpec(
        "loss", "Loss", "Lower is better. Rises while the queue fills. Losses of different methods are not comparable."
    ),
    ChartSpec(
        "contrastive_accuracy", "Contrastive accuracy",
        "Queries that are closer to their own key than to every key in the queue. Falls while the queue fills.",
        percent=True, from_zero=True,
    ),
    ChartSpec(
        "knn_top1", "kNN accuracy of the frozen features", "Top-1, first of the network before training.",
        kind="knn", percent=True,
    ),
    *(ChartSpec(name, *QUALITY[name], kind="quality", from_zero=True) for name in ("rankme", "lidar")),
    ChartSpec("lr", "Learning rate", "Features improve most as it decays.", from_zero=True),
    ChartSpec(
        "positive_similarity", "Similarity of query and keys", "Cosine similarity of a query and the mean of its keys."
    ),
    ChartSpec(
        "feature_std", "Feature standard deviation", "Over a batch. Near zero, the features have collapsed.",
        from_zero=True,
    ),
)  # fmt: skip
SPEED: Final = ChartSpec("images_per_second", "Throughput", "Images per second in training.", from_zero=True)
_HISTOGRAMS: Final = (
    ChartSpec(
        "similarity", "Similarity of an image's views", "Further right: the network finds the views more alike.",
        percent=True, from_zero=True, x_name="mean cosine similarity",
    ),
    ChartSpec(
        "variance", "Variance of an image's views", "Further left: the features change less between views.",
        percent=True, from_zero=True, x_name="mean variance of a coordinate",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` to SVG units from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)

    def ticks(self, count: int) -> list[float]:
        values = MaxNLocator(count, steps=[1, 2, 2.5, 5, 10]).tick_values(self.low, self.high)
        return [round(float(value), 12) for value in values if self.low <= value <= self.high]


@dataclass(frozen=True)
class Series:
    """The curve of one run; values that are not finite leave a gap."""

    run: int
    points: Points
    raw: Points | None = None  # before smoothing
    marked: bool = False
    filled: bool = False  # down to the x axis, where the curve starts and ends


@dataclass(frozen=True)
class Chart:
    spec: ChartSpec
    label: str  # for screen readers
    x: Axis
    y: Axis
    levels: Sequence[tuple[float, str]]  # dashed horizontal lines
    series: Sequence[Series]

    def path(self, points: Points) -> str:
        """Lines from point to point, with a gap at each point that is not finite."""
        parts, pen_down = [], False
        for x, y in points.tolist():
            if math.isfinite(y):
                start = "" if pen_down else "h0"  # makes a single point visible
                parts.append(f"{'L' if pen_down else 'M'}{self.x(x)} {self.y(y)}{start}")
            pen_down = math.isfinite(y)
        return "".join(parts)

    @property
    def data(self) -> dict[str, Any]:
        """Values for the script that shows them at the pointer."""

        def entry(x: float, y: float) -> list[float | str]:
            return [float(f"{x:.6g}"), float(f"{y:.6g}"), self.spec.format(y)]

        series = [
            {"run": one.run, "points": [entry(x, y) for x, y in one.points.tolist() if math.isfinite(y)]}
            for one in self.series
        ]
        extent = {"x": [self.x.low, self.x.high], "y": [self.y.low, self.y.high], "box": PLOT_AREA}
        return {"kind": "lines", "xName": self.spec.x_name, "series": series, **extent}


def training_charts(runs: Sequence[RunContents]) -> list[Chart]:
    """Charts of the training metrics; those that no run has recorded are left out."""
    return [chart for spec in _TRAINING if (chart := training_chart(spec, runs)) is not None]


def view_histograms(runs: Sequence[RunContents]) -> list[Chart]:
    """Histograms over images of how similar their views are; empty if no run has them."""
    spreads = {index: run.sample.spread for index, run in enumerate(runs) if run.sample and run.sample.spread}
    return [_histogram(spec, spreads) for spec in _HISTOGRAMS] if spreads else []


def metric_points(metrics: Sequence[Mapping[str, Any]], kind: str, name: str) -> Points:
    """Epochs and values of a metric in the lines of one kind; a value that is null becomes NaN."""
    rows = [(line["epoch"], line[name]) for line in metrics if line.get("kind") == kind and name in line]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


def moving_average(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A centered moving average over about a thirtieth of the values that ignores NaN, and keeps it."""
    finite, kernel = np.isfinite(values), np.ones(2 * (len(values) // 60) + 1)
    total = np.convolve(np.where(finite, values, 0.0), kernel, mode="same")
    count = np.convolve(finite, kernel, mode="same")
    return np.where(finite, total / np.maximum(count, 1), np.nan)


def value_range(values: NDArray[np.float64], *, from_zero: bool = False) -> tuple[float, float]:
    """The range of the finite values with a small margin; never empty."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if from_zero:
        low = min(low, 0.0)
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return max(low - margin, 0.0) if low >= 0 else low - margin, high + margin


def training_chart(spec: ChartSpec, runs: Sequence[RunContents]) -> Chart | None:
    found = {index: metric_points(run.metrics, spec.kind, spec.metric) for index, run in enumerate(runs)}
    found = {index: points for index, points in found.items() if np.isfinite(points[:, 1]).any()}
    if not found:
        return None
    series = [_series(index, points) for index, points in found.items()]
    levels: list[tuple[float, str]] = []
    if spec.metric == "loss":
        sizes = sorted({runs[index].settings.method.queue_size for index in found})
        levels = [(uniform_guess_loss(size), f"uniform guess among {size + 1:,}") for size in sizes]
    if spec.metric == "knn_top1":
        chances = {chance.value for index in found if (chance := runs[index].accuracy("chance_top1")) is not None}
        levels = [(chance, "chance") for chance in sorted(chances)]
    final = {runs[index].name: points[np.isfinite(points[:, 1]), 1][-1] for index, points in found.items()}
    ends = "; ".join(f"{name} ends at {spec.format(value)}" for name, value in final.items())
    end = max(float(points[:, 0].max()) for points in found.values())
    return _chart(spec, f"{spec.title} by epoch. {ends}.", series, (0.0, end or 1.0), levels)


def _series(index: int, points: Points) -> Series:
    # Keep the last point: it is the final value.
    shown = np.append(np.arange(0, len(points) - 1, math.ceil(len(points) / _MAX_POINTS)), len(points) - 1)
    if len(points) < _SMOOTHED:
        return Series(index, points[shown], marked=len(points) <= _MARKED)
    smoothed = np.stack([points[:, 0], moving_average(points[:, 1])], axis=1)
    return Series(index, smoothed[shown], raw=points[shown])


def _histogram(spec: ChartSpec, spreads: Mapping[int, ViewSpread]) -> Chart:
    """Percent of the images in bins that all runs share, as step curves."""
    # Rounded, because differences as small as rounding errors cannot be divided into bins.
    rounded = {index: getattr(own, spec.metric).numpy().round(12) for index, own in spreads.items()}
    edges = np.histogram_bin_edges(np.concatenate(list(rounded.values())), _BINS)
    series = []
    for index, own in rounded.items():
        shares = 100 * np.histogram(own, edges)[0] / max(1, len(own))
        heights = np.concatenate([[0.0], np.repeat(shares, 2), [0.0]])
        series.append(Series(index, np.stack([np.repeat(edges, 2), heights], axis=1), filled=True))
    means = ", ".join(f"{own.mean():.3g}" for own in rounded.values())
    return _chart(spec, f"{spec.title}: histogram, means {means}", series, (edges[0].item(), edges[-1].item()))


def _chart(
    spec: ChartSpec,
    label: str,
    series: Sequence[Series],
    x_range: tuple[float, float],
    levels: Sequence[tuple[float, str]] = (),
) -> Chart:
    heights = [one.points[:, 1] for one in series] + [one.raw[:, 1] for one in series if one.raw is not None]
    heights.append(np.array([value for value, _ in levels]))
    left, top, right, bottom = PLOT_AREA
    y_range = value_range(np.concatenate(heights), from_zero=spec.from_zero)
    return Chart(spec, label, Axis(*x_range, left, right), Axis(*y_range, bottom, top), levels, series)


@dataclass(frozen=True)
class ClassMark:
    name: str
    style: str
    shape: str
    images: int


def class_marks(labels: Sequence[str | None]) -> dict[str | None, ClassMark]:
    """A mark for each label by color and shape; rare classes share a gray one if there are too many."""
    counts = Counter(label for label in labels if label is not None)
    if not counts:
        return {None: ClassMark("image", "hue-0", _CIRCLE, len(labels))}
    frequent = sorted(counts, key=lambda name: (-counts[name], name))
    if len(frequent) > _MAX_CLASSES:
        frequent = frequent[: _MAX_CLASSES - 1]
    hues = len(PALETTE)
    marks: dict[str | None, ClassMark] = {
        name: ClassMark(name, f"hue-{index % hues}", (_CIRCLE, _TRIANGLE)[index // hues], counts[name])
        for index, name in enumerate(sorted(frequent))
    }
    others = [label for label in labels if label not in marks]
    name = "no label" if set(others) == {None} else "other classes"
    return marks | dict.fromkeys(others, ClassMark(name, "hue-none", _DOT, len(others)))


def map_chart(run_name: str, feature_map: FeatureMap) -> dict[str, Any]:
    """What the template draws of a feature map, in each layout, and `data` for the script that names the images."""
    labels = feature_map.labels
    marks = class_marks(labels)
    positions = {name: _in_square(found) for name, found in feature_map.layouts.items()}
    order = sorted(range(len(labels)), key=lambda row: marks[labels[row]].style != "hue-none")  # gray below
    names = [f"{name} · {label}" if label else name for name, label in zip(feature_map.names, labels, strict=True)]
    return {
        "label": f"Map of {len(labels)} images by the features of {run_name}, colored by class",
        "legend": list(dict.fromkeys(marks.values())),
        "layouts": {name: [(*found[row], marks[labels[row]]) for row in order] for name, found in positions.items()},
        "data": {"kind": "map", "layouts": positions, "names": names},
    }


def _in_square(positions: Tensor) -> list[tuple[float, float]]:
    low, high = positions.min(0).values, positions.max(0).values
    scaled = _MAP_MARGIN + (positions - low) / (high - low).clamp_min(1e-12) * (_MAP_SIDE - 2 * _MAP_MARGIN)
    return [(round(x, 1), round(y, 1)) for x, y in scaled.tolist()]
