"""Charts as SVG inside a page: axes that read well at any width, in the page's own colours, light or dark.

Colours are named by CSS variables (`--run-0`, `--hue-0`), so that the page decides them. Every text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final

from markupsafe import Markup

WIDTH: Final = 420
HEIGHT: Final = 236
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 12, 32


@dataclass(frozen=True)
class Chart:
    """A drawing, and what a reader's pointer needs to know about it."""

    svg: Markup
    data: dict[str, Any]


@dataclass(frozen=True)
class Frame:
    """From values to places: the extent of both axes in an area of so many units."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: float = WIDTH
    height: float = HEIGHT
    left: float = _LEFT
    bottom: float = _BOTTOM

    def across(self, value: float) -> float:
        low, high = self.x
        return self.left + (value - low) / (high - low) * (self.width - self.left - _RIGHT)

    def down(self, value: float) -> float:
        low, high = self.y
        return self.height - self.bottom - (value - low) / (high - low) * (self.height - _TOP - self.bottom)

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the area between the axes."""
        return self.left, _TOP, self.width - _RIGHT, self.height - self.bottom


@dataclass(frozen=True)
class Curve:
    """Values of one run over the x axis, with a gap where a value is not finite."""

    run: int
    points: Sequence[tuple[float, float]]
    faint: Sequence[tuple[float, float]] = field(default=())  # the raw values behind an average
    marked: bool = False
    filled: bool = False
    width: float = 2.2


def element(name: str, *children: str, **attributes: object) -> str:
    """An element; `children` are elements already, attributes are escaped (`class_` for class, _ for -)."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items()
    )
    return f"<{name}{written}>{''.join(children)}</{name}>"


def line_chart(
    curves: Sequence[Curve],
    frame: Frame,
    *,
    label: str,
    x_name: str,
    write: Callable[[float], str],
    levels: Sequence[tuple[float, str]] = (),
) -> Chart:
    """Curves over common axes; `levels` are dashed lines with a name each. `label` says it all to those who listen."""
    drawn = [_axes(frame, x_name, write), *(_level(frame, value, name) for value, name in levels)]
    drawn += [_curve(frame, curve) for curve in curves]
    drawn.append(element("g", class_="pointer"))
    left, top, right, bottom = frame.box
    data = {
        "kind": "lines",
        "x": frame.x,
        "y": frame.y,
        "box": [left, top, right, bottom],
        "xName": x_name,
        "series": [
            {"run": curve.run, "points": [[*_short(point), write(point[1])] for point in curve.points if _ok(point)]}
            for curve in curves
        ],
    }
    return Chart(_svg(drawn, frame, label), data)


def svg_text(x: float, y: float, text: str, **attributes: object) -> str:
    """A text element; the text is escaped."""
    return element("text", escape(text), x=_number(x), y=_number(y), **attributes)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round values from `low` to `high`."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def extent(values: Iterable[float], *, from_zero: bool = False, margin: float = 0.06) -> tuple[float, float]:
    """The range of finite values with a little air; never empty."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if from_zero:
        low = min(low, 0.0)
    air = (high - low) * margin or abs(high) * 0.1 or 1.0
    return (low if from_zero and low == 0 else low - air), high + air


def _axes(frame: Frame, x_name: str, write: Callable[[float], str]) -> str:
    left, _, right, bottom = frame.box
    parts = []
    for value in ticks(*frame.y, count=4):
        y = frame.down(value)
        parts.append(element("line", class_="grid", x1=left, x2=right, y1=_number(y), y2=_number(y)))
        parts.append(svg_text(left - 6, y + 3.5, write(value), text_anchor="end"))
    marks = ticks(*frame.x, count=6)
    decimals = _decimals(marks)
    for value in marks:
        parts.append(svg_text(frame.across(value), bottom + 14, f"{value:,.{decimals}f}", text_anchor="middle"))
    parts.append(element("line", class_="axis", x1=left, x2=right, y1=bottom, y2=bottom))
    parts.append(svg_text((left + right) / 2, bottom + 28, x_name, text_anchor="middle"))
    return element("g", *parts, class_="axes")


def _level(frame: Frame, value: float, name: str) -> str:
    left, _, right, _ = frame.box
    y = _number(frame.down(value))
    line = element("line", x1=left, x2=right, y1=y, y2=y)
    return element("g", line, svg_text(right, frame.down(value) - 4, name, text_anchor="end"), class_="level")


def _curve(frame: Frame, curve: Curve) -> str:
    parts = []
    if curve.filled:
        parts.append(element("path", class_="area", d=_closed(frame, curve.points)))
    if curve.faint:
        parts.append(element("path", class_="faint", d=_path(frame, curve.faint)))
    parts.append(element("path", class_="line", d=_path(frame, curve.points), style=f"stroke-width:{curve.width:g}"))
    if curve.marked:
        parts += [
            element("circle", cx=_number(frame.across(x)), cy=_number(frame.down(y)), r=3)
            for x, y in curve.points
            if _ok((x, y))
        ]
    return element("g", *parts, class_=f"curve run-{curve.run}", data_run=curve.run)


def _path(frame: Frame, points: Sequence[tuple[float, float]]) -> str:
    """Lines from point to point, with a gap for those that are not finite."""
    parts, pen_up = [], True
    for point in points:
        if not _ok(point):
            pen_up = True
            continue
        parts.append(f"{'M' if pen_up else 'L'}{_number(frame.across(point[0]))} {_number(frame.down(point[1]))}")
        pen_up = False
    return "".join(parts)


def _closed(frame: Frame, points: Sequence[tuple[float, float]]) -> str:
    """The area between points and the x axis."""
    if not points:
        return ""
    floor = _number(frame.down(frame.y[0]))
    first, last = _number(frame.across(points[0][0])), _number(frame.across(points[-1][0]))
    return f"{_path(frame, points)}L{last} {floor}L{first} {floor}Z"


def _svg(parts: Sequence[str], frame: Frame, label: str) -> Markup:
    view = f"0 0 {frame.width:g} {frame.height:g}"
    text = element("svg", *parts, viewBox=view, role="img", aria_label=label, tabindex=0)
    return Markup(text)  # every part went through `element` and `svg_text`, which escape


def _ok(point: tuple[float, float]) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])


def _short(point: tuple[float, float]) -> tuple[float, float]:
    """Enough digits to place a pointer by."""
    return float(f"{point[0]:.6g}"), float(f"{point[1]:.6g}")


def _decimals(values: Sequence[float]) -> int:
    """How many decimals tell round values apart."""
    return max((len(f"{value:.10f}".rstrip("0").partition(".")[2]) for value in values), default=0)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
