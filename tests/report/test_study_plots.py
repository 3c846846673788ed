"""Plots of the studies, with odd names and missing measurements."""

import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from picture_tools import count
from PIL import Image

from jcl.report import style
from jcl.report.study_plots import plot_cost, plot_gaussian_bound, plot_spreads, plot_training_bound
from jcl.settings.recipes import build_settings
from jcl.studies.bound import (
    GaussianCase,
    RunBounds,
    StepBound,
    bound_row,
    gaussian_reference,
    gaussian_rows,
    normality,
)
from jcl.studies.cost import CostCell, CostReport, StepCost
from jcl.studies.distribution import ViewSpread


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def spread(center: float, images: int = 400, seed: int = 0) -> ViewSpread:
    noise = 0.05 * torch.randn(images, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    similarity = (center + noise).clamp(0, 1)
    return ViewSpread(similarity, (1 - similarity) / 64, 32, 64)


def test_histograms_in_the_colors_of_the_methods(tmp_path: Path) -> None:
    path = plot_spreads({"JCL": spread(0.8), "MoCo v2": spread(0.5, seed=1)}, tmp_path / "a" / "f.png", subtitle="x")
    assert size(path)[0] == 1500
    assert count(path, style.BLUE) > 300 and count(path, style.ORANGE) > 300 and count(path, style.GREEN) == 0


@pytest.mark.parametrize(
    "spreads",
    [
        {name: spread(0.1 * place, 9) for place, name in enumerate(["$x", "<b>", "猫", "_a", "x" * 300], start=1)},
        {"all alike": ViewSpread(torch.ones(5).double(), torch.zeros(5).double(), 2, 3)},
    ],
    ids=["odd names", "collapsed"],
)
def test_histograms_bear_what_comes(spreads: dict[str, ViewSpread], tmp_path: Path) -> None:
    assert size(plot_spreads(spreads, tmp_path / "f.png"))[0] == 1500


@pytest.mark.parametrize(
    ("scales", "dimensions", "spreads"), [([0.0, 1.0], (4, 16), (0.2, 0.5)), ([2.0], (4,), (0.5,))]
)
def test_gaussian_bound(
    scales: list[float], dimensions: tuple[int, ...], spreads: tuple[float, ...], tmp_path: Path
) -> None:
    cases = [GaussianCase(d, spread, 0.1) for d in dimensions for spread in spreads]
    results = list(gaussian_rows(cases, scales, draws=300, images=3, negatives=20, seed=0))
    path = plot_gaussian_bound(results, tmp_path / "f.png", subtitle="$1")
    assert count(path, style.BLUE) > 20
    assert (count(path, style.ORANGE) > 200) == (len(scales) == 2)


def test_bound_along_training(tmp_path: Path) -> None:
    scores = torch.distributions.Exponential(1.0).sample((12, 40)).double()
    row = bound_row(scores, torch.ones(12).double(), [1.0, 4.0])
    bounds = RunBounds(
        steps=tuple(StepBound(step, row, normality(scores), 1.0) for step in (0, 50, 1000)),
        reference=gaussian_reference(50, 40, 0),
        temperature=0.2,
        own_scale=4.0,
        images=12,
        keys=40,
    )
    path = plot_training_bound(bounds, tmp_path / "f.png", name="runs/$x")
    assert min(count(path, color) for color in (style.RED, style.BLUE, style.ORANGE)) > 20


def test_cost_marks_what_did_not_fit(tmp_path: Path) -> None:
    def plot(cells: Sequence[CostCell], name: str) -> Path:
        return plot_cost(CostReport(cells, build_settings("demo"), "$"), tmp_path / name)

    methods = ("jcl", "multi-key", "multi-key-backprop")
    fitting = [CostCell("moco-v2", 1, StepCost(2**30, 10.0))]
    fitting += [CostCell(method, keys, StepCost(2**30 * keys, 10.0 * keys)) for method in methods for keys in (1, 2, 4)]
    some = plot([*fitting[:-1], CostCell("multi-key-backprop", 4, None)], "some.png")
    assert size(some)[0] == 1500
    assert min(count(some, color) for color in (style.BLUE, style.RED, style.GREEN, style.ORANGE)) > 30
    assert count(plot([CostCell("moco-v2", 1, None)], "nothing.png"), style.BLUE) == 0
