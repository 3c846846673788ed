"""What the page shows of a run, gathered elsewhere: plain values, and pictures as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from jcl.console import plain_names
from jcl.evaluate.distribution import ViewSpread
from jcl.evaluate.knn import KnnResult
from jcl.settings.resolve import Choice
from jcl.settings.schema import Settings


@dataclass(frozen=True, eq=False)
class ShownImage:
    """An image (3, h, w) uint8, what it is called and what it shows, where that is known."""

    pixels: Tensor
    name: str
    label: str | None = None


@dataclass(frozen=True, eq=False)
class Answer:
    """The images of a sample that the features put next to a query, nearest first."""

    query: ShownImage
    neighbours: Sequence[ShownImage]
    similarities: Sequence[float]


@dataclass(frozen=True, eq=False)
class FlatMap:
    """Images on a plane, two ways: places (n, 2) by who is near to whom and by principal components."""

    near: Tensor
    principal: Tensor
    names: Sequence[str]
    labels: Sequence[str | None]


@dataclass(frozen=True, eq=False)
class Look:
    """What a network makes of a sample of its data: `bank` images to learn from and `queries` to ask about."""

    bank: int
    queries: int
    unseen: bool  # whether the queries are from a test set
    knn: Sequence[KnnResult] = ()
    probe_top1: float | None = None
    spread: ViewSpread | None = None
    flat_map: FlatMap | None = None
    answers: Sequence[Answer] = ()


@dataclass(frozen=True, eq=False)
class ExampleViews:
    """Images as they are, and their views (n, v, 3, S, S) uint8 as the network sees them, the queries first."""

    images: Sequence[ShownImage]
    views: Tensor


class Measured(NamedTuple):
    """A figure by its plain name and, where it was not measured as usual, how, in words: it then stands alone."""

    name: str
    how: str = ""

    def plain(self) -> str:
        """Both as one plain name."""
        how = self.how.replace("%", " percent").replace("'s", "")
        return f"{self.name}_{plain_names([how])[0]}" if how else self.name


@dataclass(frozen=True, eq=False)
class RunContents:
    """One run on the page. `choices` is None where the run did not keep what "auto" became."""

    name: str
    path: Path
    settings: Settings
    metrics: Sequence[Mapping[str, Any]]
    summary: Mapping[str, Any] | None
    choices: Sequence[Choice] | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)
    about_images: Sequence[str] = ()  # sentences: what is unusual about the folder they lie in
    measured: Mapping[Measured, float] = field(default_factory=dict)
    look: Look | None = None
    views: ExampleViews | None = None
    absent: Sequence[str] = ()  # sentences: what is not shown, and why

    def newest(self, kind: str) -> Mapping[str, Any]:
        """The last line of metrics of a kind."""
        return next((line for line in reversed(self.metrics) if line.get("kind") == kind), {})
