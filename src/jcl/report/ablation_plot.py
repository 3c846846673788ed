"""Accuracy against the values of a setting: a curve, several, a map of all combinations of two, or a panel for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from jcl.report import style
from jcl.report.ablation_curves import draw_curves, draw_each_alone
from jcl.report.ablation_map import draw_maps
from jcl.report.ablation_words import axis_label
from jcl.studies.ablation import Point
from jcl.studies.cells import described

MOST_CURVES: Final = len(style.PALETTE)
"""More would not be told apart and become a map."""


def plot_ablation(
    points: Sequence[Point],
    path: Path,
    *,
    data: str = "",
    chance: float | None = None,
    centre: Mapping[str, Any] | None = None,
) -> Path:
    """Top-1 of the linear probe and of kNN against the first setting's values, as a PNG 1500 pixels wide.

    Further settings make a curve for each of their combinations, or rows of a map where these are many. With the
    values of a `centre`, each setting has a panel of its own, in which the others are at the centre. Points show
    the mean over seeds, bars one standard deviation, dots the single seeds.
    """
    names = list(points[0].values)
    curves = _curves(points, names)
    seeds = [len(point.results) for point in points if point.results]
    alone = centre is not None and len(names) > 1
    as_map = not alone and len(curves) > MOST_CURVES
    if centre is not None and alone:
        figure = draw_each_alone(points, centre, several=max(seeds) > 1)
    else:
        figure = draw_maps(curves, names) if as_map else draw_curves(curves, names, several=max(seeds) > 1)
    style.write_title(
        figure, style.plain(_title(names), 90), style.plain(_subtitle(points, seeds, data, chance, as_map), 140)
    )
    return style.save(figure, path)


def _title(names: Sequence[str]) -> str:
    labels = [axis_label(name) for name in names]
    return f"Accuracy against {' and '.join([', '.join(labels[:-1]), labels[-1]] if labels[1:] else labels)}"


def _subtitle(points: Sequence[Point], seeds: Sequence[int], data: str, chance: float | None, as_map: bool) -> str:
    about = [
        f"top-1 in percent on {style.plain(data, 24)}" if data else "top-1 in percent",
        _about_seeds(seeds, as_map),
    ]
    about += [f"guessing: {chance:.1f} %"] if chance is not None else []
    failed = sum(point.failed for point in points)
    about += [f"{failed} {'cell' if failed == 1 else 'cells'} failed"] if failed else []
    return "; ".join(about)


def _about_seeds(seeds: Sequence[int], as_map: bool) -> str:
    least, most = min(seeds), max(seeds)
    if most == 1:
        return "one seed"
    count = f"{most} seeds" if least == most else f"{least} to {most} seeds"
    return f"mean of {count}" if as_map else f"mean and standard deviation of {count}, small dots: each"


def _curves(points: Sequence[Point], names: Sequence[str]) -> dict[str, list[Point]]:
    """The points by what their settings but the first are, in words."""
    curves: dict[str, list[Point]] = {}
    for point in points:
        further = {name: point.values[name] for name in names[1:]}
        curves.setdefault(described(further), []).append(point)
    return curves
