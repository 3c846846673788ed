"""What a report shows of a run: plain values, and images as tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from torch import Tensor

from jcl.console import plain_names
from jcl.evaluate.baselines import Estimate
from jcl.evaluate.knn import KnnResult
from jcl.runs.json_object import is_number
from jcl.settings.resolved import Choice, ResolvedSettings
from jcl.studies.distribution import ViewSpread
from jcl.views import as_rgb

QUALITY: Final = {
    "rankme": ("RankMe", "Number of directions that the features use. Usually higher is better."),
    "alpha_req": ("alpha-ReQ", "How fast the variance of these directions decays. Best near 1."),
    "lidar": ("LiDAR", "Number of directions that tell images apart, given their views. Usually higher is better."),
}
"""The measures without labels: title and meaning."""


@dataclass(frozen=True, eq=False)
class NamedImage:
    """An image with its name and, if it has one, its label; its pixels become uint8 RGB, (3, h, w)."""

    pixels: Tensor
    name: str
    label: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "pixels", as_rgb(self.pixels))


@dataclass(frozen=True, eq=False)
class NeighbourRow:
    """A query and its nearest neighbors, nearest first."""

    query: NamedImage
    neighbours: Sequence[NamedImage]
    similarities: Sequence[float]


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """Positions (n, 2) of n images in the plane: "tsne", if scikit-learn is installed, and "principal" components."""

    layouts: Mapping[str, Tensor]
    names: Sequence[str]
    labels: Sequence[str | None]


@dataclass(frozen=True, eq=False)
class SampleResults:
    """Results on a sample of the images: `bank` images as reference and `queries` images to classify."""

    bank: int
    queries: int
    from_test_set: bool
    knn: Sequence[KnnResult] = ()
    linear_top1: float | None = None
    spread: ViewSpread | None = None
    feature_map: FeatureMap | None = None
    neighbours: Sequence[NeighbourRow] = ()

    def as_dict(self) -> dict[str, float]:
        numbers = {f"sample_knn_top1_k{result.k}": result.top1 for result in self.knn}
        if self.linear_top1 is not None:
            numbers["sample_linear_top1"] = self.linear_top1
        if self.spread is not None:
            numbers["mean_view_similarity"] = float(self.spread.similarity.mean())
            numbers["mean_view_variance"] = float(self.spread.variance.mean())
        return numbers


ExampleViews = Sequence[tuple[NamedImage, Sequence[Tensor]]]
"""Images, each with its training views, (3, S, S) uint8: queries, keys, then local queries."""


class Metric(NamedTuple):
    """The name of a metric and, if it was not measured by the default protocol, a description of the protocol."""

    name: str
    protocol: str = ""

    @property
    def json_name(self) -> str:
        protocol = self.protocol.replace("%", " percent").replace("'s", "")
        return f"{self.name}_{plain_names([protocol])[0]}" if protocol else self.name


@dataclass(frozen=True, eq=False)
class RunContents:
    """One run of a report. `choices` is None if the run did not record how "auto" settings were resolved."""

    name: str
    path: Path
    settings: ResolvedSettings
    metrics: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None
    choices: Sequence[Choice] | None = None
    classes: Mapping[str, tuple[int, float]] = field(default_factory=dict)  # test images and kNN accuracy of each
    skipped: Mapping[str, str] = field(default_factory=dict)
    data_remarks: Sequence[str] = ()
    measured: Mapping[Metric, Estimate] = field(default_factory=dict)
    sample: SampleResults | None = None
    views: ExampleViews | None = None
    missing: Sequence[str] = ()  # what the report lacks, and why

    def last(self, kind: str) -> Mapping[str, Any]:
        """The last line of this kind in `metrics.jsonl`."""
        return next((line for line in reversed(self.metrics) if line.get("kind") == kind), {})

    def accuracy(self, name: str) -> Estimate | None:
        return self.measured.get(Metric(name))

    def number(self, name: str) -> float | None:
        """A number from the summary or, if the run has not finished, from its last training line."""
        value = (self.summary or self.last("train")).get(name)
        return value if is_number(value) else None
