"""Where the values of a setting lie on the axis of a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from jcl.report import style
from jcl.studies.ablation import is_number
from jcl.train.json_object import written

_LEAST_GAP: Final = 0.045  # between neighbouring values, as a share of the axis; with less their labels touch


class Places:
    """Where values lie on an axis: to scale, or on a logarithmic one, or evenly where neither tells them apart."""

    def __init__(self, values: Sequence[Any]) -> None:
        distinct: list[Any] = []
        for value in values:
            if value not in distinct:
                distinct.append(value)
        self.ordered = all(is_number(value) for value in distinct)
        self._values = sorted(distinct) if self.ordered else distinct
        self.even, self.logarithmic = False, False
        if self.ordered and _told_apart(self._values):
            return
        self.logarithmic = self.ordered and min(self._values) > 0 and _told_apart(list(map(math.log, self._values)))
        self.even = not self.logarithmic

    def of(self, value: Any) -> float:
        if self.even:
            return float(self._values.index(value))
        return math.log(value) if self.logarithmic else float(value)

    @property
    def width(self) -> float:
        """Of the axis, with room at its ends."""
        marks = [self.of(value) for value in self._values]
        return max(marks) - min(marks) + 2 * self._room

    @property
    def _room(self) -> float:
        span = self.of(self._values[-1]) - self.of(self._values[0])
        return 0.05 * span if self.ordered and span > 0 else 0.5

    def dress(self, axes: Axes, label: str) -> None:
        """Tick the values themselves."""
        marks = [self.of(value) for value in self._values]
        axes.xaxis.set_major_locator(FixedLocator(marks))
        axes.xaxis.set_minor_locator(NullLocator())
        limit = max(6, 60 // len(marks))
        axes.set_xticklabels([style.plain(written(value), limit) for value in self._values], parse_math=False)
        axes.set_xlim(min(marks) - self._room, max(marks) + self._room)
        scale = ", logarithmic" if self.logarithmic else ", evenly spaced" if self.even and self.ordered else ""
        text = style.plain(f"{label}{scale}", 60)
        axes.set_xlabel(text, color=style.MUTED, fontsize=style.SIZES["label"] + 0.5, labelpad=4, parse_math=False)


def _told_apart(places: Sequence[float]) -> bool:
    if len(places) < 2:
        return True
    gaps = np.diff(np.asarray(places, dtype=np.float64))
    return bool(gaps.min() >= _LEAST_GAP * (places[-1] - places[0]))
