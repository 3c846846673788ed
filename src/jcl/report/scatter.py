"""A map of images: one mark each, told apart by colour and shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from markupsafe import Markup
from torch import Tensor

from jcl.report.contents import FlatMap
from jcl.report.svg import Chart, element

SIDE: Final = 420
COLOURS: Final = 6
_EDGE: Final = 14
_MOST_CLASSES: Final = 12

# Around the origin; circles for the first classes, then shapes in the same colours again.
_SHAPES: Final = (
    "M-3.6 0A3.6 3.6 0 1 0 3.6 0A3.6 3.6 0 1 0 -3.6 0Z",
    "M0 -4.4L4.1 3.2L-4.1 3.2Z",
)
_REST: Final = "M-2.2 0A2.2 2.2 0 1 0 2.2 0A2.2 2.2 0 1 0 -2.2 0Z"


@dataclass(frozen=True)
class ClassMark:
    """A class and how its images are marked; `hue` is None for images of other classes and of none."""

    name: str
    hue: int | None
    shape: str
    images: int

    @property
    def svg(self) -> Markup:
        """The mark by itself, for the legend."""
        path = element("path", d=self.shape)
        return Markup(element("svg", path, viewBox="-6 -6 12 12", class_=f"mark {self.style}", aria_hidden="true"))

    @property
    def style(self) -> str:
        return "hue-none" if self.hue is None else f"hue-{self.hue}"


def class_marks(labels: Sequence[str | None]) -> dict[str | None, ClassMark]:
    """A mark for each label, the most frequent ones first; what does not fit shares a grey one."""
    counts = Counter(label for label in labels if label is not None)
    frequent = sorted(counts, key=lambda name: (-counts[name], name))
    frequent = frequent if len(frequent) <= _MOST_CLASSES else frequent[: _MOST_CLASSES - 1]
    marks: dict[str | None, ClassMark] = {
        name: ClassMark(name, place % COLOURS, _SHAPES[place // COLOURS], counts[name])
        for place, name in enumerate(sorted(frequent))
    }
    if not counts:  # nothing to tell apart, so nothing is left over either
        return {None: ClassMark("image", 0, _SHAPES[0], len(labels))}
    others = [label for label in labels if label not in marks]
    if others:
        known = any(label is not None for label in others)
        rest = ClassMark("other classes" if known else "no label", None, _REST, len(others))
        marks |= dict.fromkeys(others, rest)
    return marks


def map_chart(run_name: str, flat: FlatMap) -> Chart:
    """Both maps of a run in one drawing, of which the page shows one."""
    marks = class_marks(flat.labels)
    layouts = {"near": _places(flat.near), "principal": _places(flat.principal)}
    groups = [
        element("g", *_marks(places, flat, marks), class_="layout", data_layout=name)
        for name, places in layouts.items()
    ]
    label = f"Map of {len(flat.names)} images by the features of {run_name}, coloured by class"
    view = f"0 0 {SIDE} {SIDE}"
    pointer = element("g", class_="pointer")
    svg = element("svg", *groups, pointer, viewBox=view, role="img", aria_label=label, tabindex=0)
    words = [
        f"{name} · {label}" if label is not None else name for name, label in zip(flat.names, flat.labels, strict=True)
    ]
    data: dict[str, Any] = {"kind": "map", "layouts": layouts, "names": words}
    return Chart(Markup(svg), data)


def _marks(places: list[list[float]], flat: FlatMap, marks: dict[str | None, ClassMark]) -> list[str]:
    order = sorted(range(len(places)), key=lambda place: marks[flat.labels[place]].hue is not None)  # grey below
    return [
        element(
            "path",
            class_=marks[flat.labels[place]].style,
            d=marks[flat.labels[place]].shape,
            transform=f"translate({places[place][0]} {places[place][1]})",
        )
        for place in order
    ]


def _places(places: Tensor) -> list[list[float]]:
    """Stretched to fill the square."""
    low, high = places.min(0).values, places.max(0).values
    share = (places - low) / (high - low).clamp_min(1e-12)
    inside = _EDGE + share * (SIDE - 2 * _EDGE)
    return [[round(x, 1), round(y, 1)] for x, y in inside.tolist()]
