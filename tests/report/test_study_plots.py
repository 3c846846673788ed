"""Figures of the studies show what they are given, in the stated size, and bear odd names and missing cells."""

import warnings
from pathlib import Path

import pytest
import torch
from picture_tools import count
from PIL import Image

from jcl.commands.cost import TITLES
from jcl.evaluate.distribution import ViewSpread
from jcl.report import style
from jcl.report.bound_plots import plot_gaussian_bound, plot_training_bound
from jcl.report.cost_plots import plot_cost
from jcl.report.histograms import plot_spreads
from jcl.studies.bound import GaussianCase, gaussian_rows, gaussian_sweep, sampled_row
from jcl.studies.cost import Cell, StepCost
from jcl.studies.normality import gaussian_reference, normality
from jcl.studies.run_bound import RunBounds, StepBound


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def spread(centre: float, images: int = 400, seed: int = 0) -> ViewSpread:
    noise = 0.05 * torch.randn(images, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    similarity = (centre + noise).clamp(0, 1)
    return ViewSpread(similarity, (1 - similarity) / 64, 32, 64)


def test_histograms_in_the_colours_of_the_methods(tmp_path: Path) -> None:
    path = plot_spreads({"JCL": spread(0.8), "MoCo v2": spread(0.5, seed=1)}, tmp_path / "a" / "f.png", subtitle="x")
    assert size(path) == (1500, 645)
    assert count(path, style.BLUE) > 300 and count(path, style.ORANGE) > 300 and count(path, style.GREEN) == 0
    again = plot_spreads({"JCL": spread(0.8), "MoCo v2": spread(0.5, seed=1)}, tmp_path / "g.png", subtitle="x")
    assert path.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(
    "spreads",
    [
        {"alone": spread(0.5)},
        {name: spread(0.1 * place, 9) for place, name in enumerate(["$x", "<b>", "猫", "_a", "x" * 300], start=1)},
        {"all alike": ViewSpread(torch.ones(5).double(), torch.zeros(5).double(), 2, 3)},
    ],
    ids=["one", "odd names", "collapsed"],
)
def test_histograms_bear_what_comes(spreads: dict[str, ViewSpread], tmp_path: Path) -> None:
    assert size(plot_spreads(spreads, tmp_path / "f.png")) == (1500, 645)


@pytest.mark.parametrize("scales", [[1.0, 4.0], [0.0, 1.0], [2.0]])
def test_gaussian_bound(scales: list[float], tmp_path: Path) -> None:
    cases = gaussian_sweep([4, 8], [0.2, 0.5], [0.1])
    results = list(gaussian_rows(cases, scales, draws=300, images=3, negatives=20, seed=0))
    path = plot_gaussian_bound(results, tmp_path / "f.png", subtitle="$1")
    assert size(path) == (1485, 1012)
    assert count(path, style.BLUE) > 200
    assert (count(path, style.ORANGE) > 200) == (len(scales) == 2)
    single = [GaussianCase(4, 0.5, 0.1)]
    one = list(gaussian_rows(single, scales, draws=300, images=3, negatives=20, seed=0))
    assert count(plot_gaussian_bound(one, tmp_path / "one.png", subtitle=""), style.BLUE) > 20


def test_a_bound_with_more_panels_than_there_is_room_for_says_so(tmp_path: Path, monkeypatch) -> None:
    said = []
    monkeypatch.setattr(style, "write_title", lambda figure, title, subtitle: said.append(subtitle))
    for dimensions in ([2, 3, 4, 5], [2, 3, 4, 5, 6]):
        cases = gaussian_sweep(dimensions, [0.2, 0.5], [0.1])
        results = list(gaussian_rows(cases, [1.0], draws=100, images=2, negatives=5, seed=0))
        plot_gaussian_bound(results, tmp_path / "f.png", subtitle="keys")
    assert said == ["keys", "keys; drawn: the 4 lowest of 5 dimensions"]


@pytest.mark.parametrize("steps", [[100], [0, 50, 1000]])
def test_bound_along_training(steps: list[int], tmp_path: Path) -> None:
    scores = torch.distributions.Exponential(1.0).sample((12, 40)).double()
    row = sampled_row(scores, torch.ones(12).double(), [1.0, 4.0])
    bounds = RunBounds(
        steps=tuple(StepBound(step, row, normality(scores), 1.0) for step in steps),
        reference=gaussian_reference(50, 40, 0),
        temperature=0.2,
        own_scale=4.0,
        images=12,
        keys=40,
    )
    path = plot_training_bound(bounds, tmp_path / "f.png", name="runs/$x")
    assert size(path) == (1950, 675) and count(path, style.RED) > 100
    bars = len(steps) == 1  # lone points would hardly be seen
    assert (count(path, style.BLUE) > 5000) == (count(path, style.ORANGE) > 5000) == bars


def test_cost_marks_what_did_not_fit(tmp_path: Path) -> None:
    methods = ("jcl", "multi-key", "multi-key-backprop")
    fitting = [Cell("moco-v2", 1, StepCost(2**30, 10.0))]
    fitting += [Cell(method, keys, StepCost(2**30 * keys, 10.0 * keys)) for method in methods for keys in (1, 2, 4)]
    whole = plot_cost(fitting, TITLES, tmp_path / "whole.png", of="$", finding="all")
    assert size(whole) == (1500, 690)
    assert min(count(whole, colour) for colour in (style.BLUE, style.RED, style.GREEN, style.ORANGE)) > 30
    missing = [*fitting[:-1], Cell("multi-key-backprop", 4, None)]
    some = plot_cost(missing, TITLES, tmp_path / "some.png", of="$", finding="all")
    assert some.read_bytes() != whole.read_bytes()
    nothing = plot_cost([Cell("moco-v2", 1, None)], TITLES, tmp_path / "nothing.png", of="", finding="")
    assert size(nothing) == (1500, 690) and count(nothing, style.BLUE) == 0
