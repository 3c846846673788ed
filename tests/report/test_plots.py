"""Figures are written in the stated size, show what they are given, and bear odd names and missing figures."""

import math
import warnings
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot
import numpy as np
import pytest
from picture_tools import count, pixels

from jcl.errors import RunError
from jcl.report import style
from jcl.report.plots import RunCurves, plot_comparison, plot_training, points, smoothed

ODD_NAMES = ["$x", r"$\frac{1}$", "<script>alert(1)</script>", "_hidden", "a\nb\x00", "naïve ✓", "猫", "", "x" * 500]


def metrics(steps: int = 100, knn: bool = True) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        line = {"kind": "train", "step": step, "epoch": step / 10, "loss": 7 - 3 * step / steps, "lr": 0.03}
        lines.append(line | {"contrastive_accuracy": 60 * step / steps})
        if knn and step % 20 == 0:
            lines.append({"kind": "knn", "step": step, "epoch": step / 10, "knn_top1": 40 + step / 10})
    return lines


@pytest.fixture(autouse=True)
def no_warnings_and_no_global_state() -> Any:
    settings = dict(matplotlib.rcParams)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert dict(matplotlib.rcParams) == settings
    assert matplotlib.pyplot.get_fignums() == []


def test_training_shows_every_run_in_its_colour(tmp_path: Path) -> None:
    path = plot_training(
        [RunCurves("JCL", metrics(), 1023), RunCurves("MoCo v2", metrics(), 1023)], tmp_path / "a/b.png"
    )
    picture = pixels(path)
    assert picture.shape == (970, 1500, 3)
    assert count(picture, style.BLUE) > 500 and count(picture, style.ORANGE) > 500
    assert count(picture, style.GREEN) == 0


def test_uniform_guess_is_drawn_only_where_the_queue_is_known(tmp_path: Path) -> None:
    with_line = pixels(plot_training([RunCurves("JCL", metrics(), 4095)], tmp_path / "with.png"))
    without = pixels(plot_training([RunCurves("JCL", metrics())], tmp_path / "without.png"))
    left_upper_panel = slice(150, 480), slice(0, 750)
    assert (with_line[left_upper_panel] != without[left_upper_panel]).any()
    assert (with_line[:, 800:] == without[:, 800:]).all()


PANELS = {
    "loss": (slice(100, 490), slice(60, 740)),
    "accuracy": (slice(100, 490), slice(810, 1490)),
    "rate": (slice(560, 900), slice(60, 740)),
    "kNN": (slice(560, 900), slice(810, 1490)),
}


@pytest.mark.parametrize(
    ("lines", "drawn"),
    [
        (metrics(knn=False), {"loss", "accuracy", "rate"}),
        (metrics(steps=1), {"loss", "accuracy", "rate"}),
        (metrics(steps=30), {"loss", "accuracy", "rate", "kNN"}),
        ([], set()),
        ([{"kind": "train", "step": 3, "loss": 2.0}], {"loss"}),
        ([line | {"loss": math.nan} for line in metrics()], {"accuracy", "rate", "kNN"}),
        (
            [line | {"loss": None, "lr": math.inf} if line["step"] % 5 == 0 else line for line in metrics()],
            {"loss", "accuracy", "rate", "kNN"},
        ),
        (
            [line | {"loss": None, "lr": math.inf} if line["step"] % 2 else line for line in metrics()],
            {"loss", "accuracy", "rate", "kNN"},
        ),
        (
            [{"kind": "train", "step": 0, "epoch": 0.0, "loss": 0.0, "lr": 0.0, "contrastive_accuracy": 0.0}],
            {"loss", "accuracy", "rate"},
        ),
    ],
    ids=["no kNN", "one step", "short", "nothing", "loss only", "all NaN", "gaps", "every other one", "zeros"],
)
def test_what_there_is_is_drawn_and_missing_figures_are_borne(
    lines: list[dict[str, Any]], drawn: set[str], tmp_path: Path
) -> None:
    picture = pixels(plot_training([RunCurves("a run", lines, 511)], tmp_path / "curves.png"))
    assert picture.shape == (970, 1500, 3)
    assert {name for name, panel in PANELS.items() if count(picture[panel], style.BLUE) > 20} == drawn


def test_panel_without_figures_says_so(tmp_path: Path) -> None:
    """The kNN panel, at the lower right, holds more than an empty frame."""
    recorded = pixels(plot_training([RunCurves("r", metrics(knn=False))], tmp_path / "curves.png"))
    middle = recorded[700:780, 1050:1250]
    assert count(middle, style.MUTED) > 20


def test_odd_names_are_drawn_as_text(tmp_path: Path) -> None:
    runs = [RunCurves(name, metrics(20), 2**number) for number, name in enumerate(ODD_NAMES, start=3)]
    assert pixels(plot_training(runs, tmp_path / "runs.png", title="$a_b < c")).shape[1] == 1500
    scores = {name: 10.0 * number for number, name in enumerate(ODD_NAMES)}
    picture = pixels(plot_comparison(scores, tmp_path / "bars.png", title="$", subtitle="$_$"))
    assert picture.shape[0] == pytest.approx((1.15 + 0.46 * len(scores)) * 150, abs=1)
    bars = [count(picture, colour) for colour in style.colours_for(ODD_NAMES)[3:6]]  # the colours that one bar has
    assert [bar / bars[0] for bar in bars] == pytest.approx([1, 4 / 3, 5 / 3], rel=0.05)


def test_same_figures_give_the_same_file(tmp_path: Path) -> None:
    run = RunCurves("JCL", metrics(), 1023)
    first, second = (plot_training([run], tmp_path / name) for name in ("1.png", "2.png"))
    assert first.read_bytes() == second.read_bytes()


def test_bars_are_as_long_as_their_figures(tmp_path: Path) -> None:
    scores = {"raw pixels": 20.0, "MoCo v2": 40.0, "JCL": 80.0}
    picture = pixels(plot_comparison(scores, tmp_path / "bars.png"))
    assert picture.shape[1] == 1200 and picture.shape[0] == pytest.approx((1.15 + 0.46 * 3) * 150, abs=1)
    assert count(picture, style.BLUE) / count(picture, style.ORANGE) == pytest.approx(2, rel=0.05)


def test_bar_without_a_figure_and_chance_line(tmp_path: Path) -> None:
    path = plot_comparison({"JCL": math.nan, "MoCo v2": 0.0}, tmp_path / "bars.png", chance=10.0)
    picture = pixels(path)
    assert count(picture, style.BLUE) == 0
    assert count(picture, style.INK) > 50


def test_colours_are_the_methods_own_and_differ() -> None:
    assert style.colours_for(["moco v2", "JCL"]) == [style.ORANGE, style.BLUE]
    colours = style.colours_for(["mine", "jcl", "yours", "moco-v2"])
    assert len(set(colours)) == 4
    assert len(style.colours_for([str(number) for number in range(40)])) == 40


def test_points_take_the_lines_of_their_kind() -> None:
    lines = [*metrics(40), {"kind": "train", "step": 41, "epoch": 4.1, "loss": None}]
    where, values = points(lines, "step", "knn", "knn_top1")
    assert where.tolist() == [20, 40] and values.tolist() == [42, 44]
    assert math.isnan(points(lines, "epoch", "train", "loss")[1][-1])


def test_smoothing_averages_and_skips_gaps() -> None:
    values = np.where(np.arange(120) % 2, 3.0, 1.0)
    values[60] = np.nan
    curve = smoothed(values)  # over five points
    assert np.isnan(curve[60]) and np.isfinite(np.delete(curve, 60)).all()
    assert curve[30] == pytest.approx((1 + 3 + 1 + 3 + 1) / 5)
    assert curve[59] == pytest.approx((3 + 1 + 3 + 3) / 4)
    assert curve[0] == pytest.approx((1 + 3 + 1) / 3)
    assert smoothed(np.full(90, 2.5)) == pytest.approx(2.5)


def test_plain_text_keeps_both_ends() -> None:
    assert style.plain("a  b\n\tc\x00") == "a b c"
    assert style.plain("猫 or cat") == "□ or cat"
    assert style.plain("x" * 10, 10) == "x" * 10
    assert style.plain("beginning and end", 9) == "begi… end"
    assert len(style.plain("y" * 99, 12)) == 12


def test_a_full_disk_is_a_sentence_and_keeps_the_old_picture(tmp_path, no_room_for):
    file = style.save(style.new_figure(1, 1), tmp_path / "a.png")
    before = file.read_bytes()
    no_room_for(file)
    with pytest.raises(RunError, match="No space left"):
        style.save(style.new_figure(2, 2), file)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]
