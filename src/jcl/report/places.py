"""Where the values of a setting lie on the axis of a figure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from jcl.report import style
from jcl.runs.json_object import written
from jcl.studies.ablation import is_number

HALF_A_FIGURE: Final = 4.3  # inches, of an axis that has another beside it
_LETTER: Final = 0.072  # inches, of a label's letters
_BETWEEN_LABELS: Final = 0.08  # inches, at least
_ROOM: Final = 0.05  # at either end of an axis, as a share of what its values span


class AxisPositions:
    """Where values lie on an axis: to scale, or on a logarithmic one, or evenly where in both their labels would touch.

    `inches` is how long the axis is.
    """

    def __init__(self, values: Sequence[Any], inches: float = HALF_A_FIGURE) -> None:
        distinct: list[Any] = []
        for value in values:
            if value not in distinct:
                distinct.append(value)
        self.ordered = all(is_number(value) for value in distinct)
        self._values = sorted(distinct) if self.ordered else distinct
        self.even, self.logarithmic = False, False
        labels = [written(value) for value in self._values]
        if self.ordered and _told_apart(self._values, labels, inches):
            return
        positive = self.ordered and min(self._values) > 0
        self.logarithmic = positive and _told_apart(list(map(math.log, self._values)), labels, inches)
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
        return _ROOM * span if self.ordered and span > 0 else 0.5

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


def _told_apart(places: Sequence[float], labels: Sequence[str], inches: float) -> bool:
    """Whether neighbouring labels, in the order of their places, leave some paper between them."""
    if len(places) < 2:
        return True
    scale = inches / ((1 + 2 * _ROOM) * (places[-1] - places[0]))
    for (place, label), (next_place, next_label) in itertools.pairwise(zip(places, labels, strict=True)):
        letters = (len(label) + len(next_label)) / 2
        if (next_place - place) * scale < letters * _LETTER + _BETWEEN_LABELS:
            return False
    return True
