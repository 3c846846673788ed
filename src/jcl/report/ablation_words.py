"""What the figures of an ablation call settings and accuracies, and where they are highest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from jcl.report import style
from jcl.runs.json_object import written
from jcl.studies.ablation import Point
from jcl.studies.cells import described, short_name

ACCURACIES: Final = (("linear_top1", "Linear probe"), ("knn_top1", "kNN"))
"""What is drawn, and its title."""
_NARROW: Final = 46  # letters that fit above a panel with two others beside it
_SYMBOLS: Final = {
    "method.num_keys": "number of keys M'",
    "method.covariance_scale": "covariance scale λ",
    "method.temperature": "temperature τ",
    "train.lr": "learning rate",
}


def axis_label(name: str) -> str:
    """What an axis calls a setting: as the paper does, or by its short name."""
    return _SYMBOLS.get(name, short_name(name).replace("_", " "))


def panel_title(name: str) -> str:
    """As a title begins; the letters behind, which may be symbols, stay."""
    label = axis_label(name)
    return style.plain(label[:1].upper() + label[1:], 32)


def highest(points: Sequence[Point], figure: str) -> str:
    """Where a panel has its highest point, in words."""
    best = _highest_point(points, figure)
    if best is None:
        return "not measured"
    return style.plain(f"highest at {described(best.values)}: {best.mean(figure):.2f} %", 70)


def highest_of_each(line: Sequence[Point], name: str) -> str:
    """Where each curve over one setting has its highest point, in words; accuracies are left out for want of space."""
    long, short = [], []
    for figure, title in ACCURACIES:
        best = _highest_point(line, figure)
        if best is not None:
            curve, value = title.split()[0], written(best.values[name])
            long.append(f"{curve} {best.mean(figure):.2f} at {value}")
            short.append(f"{curve} at {value}")
    if not long:
        return "not measured"
    fitting = long if len(", ".join(long)) <= _NARROW - len("highest: ") else short
    return style.plain(f"highest: {', '.join(fitting)}", _NARROW)


def _highest_point(points: Sequence[Point], figure: str) -> Point | None:
    measured = [point for point in points if point.mean(figure) is not None]
    return max(measured, key=lambda point: point.mean(figure) or 0.0) if measured else None
