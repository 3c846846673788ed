"""The classes of the built-in image set: shapes and textures as functions of a place on the object."""

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]


def coverage(distance: Floats) -> Floats:
    """How much of a pixel lies inside an outline, given its signed distance in pixels (inside is negative)."""
    cover: Floats = np.clip(0.5 - distance, 0, 1)
    return cover


# Shapes: signed distance from the outline in the object's own axes, where the object fills about the unit disc.


def _polygon(x: Floats, y: Floats, corners: int, apothem: float) -> Floats:
    """A regular polygon is the largest of its sides' half-plane distances."""
    distance = x - apothem
    for side in range(1, corners):
        angle = 2 * math.pi * side / corners
        distance = np.maximum(distance, math.cos(angle) * x + math.sin(angle) * y - apothem)
    return distance


def _disc(x: Floats, y: Floats) -> Floats:
    return np.hypot(x, y) - 0.9


def _square(x: Floats, y: Floats) -> Floats:
    return np.maximum(np.abs(x), np.abs(y)) - 0.76


def _triangle(x: Floats, y: Floats) -> Floats:
    return _polygon(x, y, 3, 0.58)


def _star(x: Floats, y: Floats) -> Floats:
    """Five points: fold the plane into one tenth and measure from the edge between a tip and an inner corner."""
    sector = np.abs((np.arctan2(y, x) + math.pi / 5) % (2 * math.pi / 5) - math.pi / 5)
    length = np.hypot(x, y)
    tip, inner = 1.08, 0.5  # how far the tips and the inner corners lie from the middle
    edge_x, edge_y = inner * math.cos(math.pi / 5) - tip, inner * math.sin(math.pi / 5)
    from_tip_x, from_tip_y = length * np.cos(sector) - tip, length * np.sin(sector)
    return (from_tip_x * edge_y - from_tip_y * edge_x) / math.hypot(edge_x, edge_y)


def _cross(x: Floats, y: Floats) -> Floats:
    long, short = np.maximum(np.abs(x), np.abs(y)), np.minimum(np.abs(x), np.abs(y))
    return np.maximum(long - 0.95, short - 0.36)


def _ring(x: Floats, y: Floats) -> Floats:
    return np.abs(np.hypot(x, y) - 0.7) - 0.27


def _hexagon(x: Floats, y: Floats) -> Floats:
    return _polygon(x, y, 6, 0.86)


def _flower(x: Floats, y: Floats) -> Floats:
    """Four petals; the factor makes the radial difference about a true distance where the outline is steep."""
    outline = 0.74 + 0.24 * np.cos(4 * np.arctan2(y, x))
    distance: Floats = (np.hypot(x, y) - outline) * 0.75
    return distance


def _crescent(x: Floats, y: Floats) -> Floats:
    distance: Floats = np.maximum(np.hypot(x, y) - 0.95, 0.62 - np.hypot(x - 0.5, y))
    return distance


def _bar(x: Floats, y: Floats) -> Floats:
    beyond = np.maximum(np.abs(x) - 0.62, 0)
    return np.hypot(beyond, y) - 0.4


# Textures: how much of the second colour, 0..1. ``phase`` (n, 2, 1, 1) shifts the pattern, ``pixel`` smooths its edges.


def _wave(position: Floats, period: float, pixel: Floats) -> Floats:
    """Bands of two colours along ``position``, with edges one pixel wide: 0..1."""
    offset = np.abs((position / period) % 1 - 0.5) - 0.25
    blend: Floats = np.clip(0.5 + offset * period * pixel, 0, 1)
    return blend


def _stripes(x: Floats, y: Floats, phase: Floats, pixel: Floats) -> Floats:
    return _wave(y + phase[:, 0], 0.5, pixel)


def _checks(x: Floats, y: Floats, phase: Floats, pixel: Floats) -> Floats:
    first, second = _wave(x + phase[:, 0], 0.8, pixel), _wave(y + phase[:, 1], 0.8, pixel)
    return first + second - 2 * first * second


def _dots(x: Floats, y: Floats, phase: Floats, pixel: Floats) -> Floats:
    spacing = 0.5
    across = (x / spacing + phase[:, 0]) % 1 - 0.5
    down = (y / spacing + phase[:, 1]) % 1 - 0.5
    return coverage((np.hypot(across, down) - 0.3) * spacing * pixel)


def _rim(x: Floats, y: Floats, phase: Floats, pixel: Floats) -> Floats:
    """A star within the star, in the other colour."""
    return coverage((_star(x, y) + 0.2) * pixel)


def _zigzag(x: Floats, y: Floats, phase: Floats, pixel: Floats) -> Floats:
    fold = np.abs((x / 0.6 + phase[:, 1]) % 1 - 0.5) * 0.6
    return _wave(y + fold + phase[:, 0], 0.5, pixel)


def _spokes(x: Floats, y: Floats, phase: Floats, pixel: Floats) -> Floats:
    turns = np.arctan2(y, x) / (2 * math.pi)
    return _wave(turns + phase[:, 0], 1 / 8, pixel * 4)


def _rings(x: Floats, y: Floats, phase: Floats, pixel: Floats) -> Floats:
    return _wave(np.hypot(x, y) + 0.3 * phase[:, 0], 0.46, pixel)


def _net(x: Floats, y: Floats, phase: Floats, pixel: Floats) -> Floats:
    spacing = 0.5
    across = np.abs((x / spacing + phase[:, 0]) % 1 - 0.5)
    down = np.abs((y / spacing + phase[:, 1]) % 1 - 0.5)
    return coverage((np.minimum(across, down) - 0.14) * spacing * pixel)


def _speckles(x: Floats, y: Floats, phase: Floats, pixel: Floats) -> Floats:
    """Irregular spots: where the sum of waves in unrelated directions is high."""
    shift = phase * (2 * math.pi)
    total = np.sin(9.1 * x + 3.7 * y + shift[:, 0]) + np.sin(11.3 * y - 5.9 * x + shift[:, 1]) + np.sin(7.3 * (x - y))
    blend: Floats = np.clip(0.5 + (total - 0.5) * pixel / 12, 0, 1)
    return blend


def _halves(x: Floats, y: Floats, phase: Floats, pixel: Floats) -> Floats:
    return coverage((x - 0.3 * (phase[:, 0] - 0.5)) * pixel)


Shape = Callable[[Floats, Floats], Floats]
Texture = Callable[[Floats, Floats, Floats, Floats], Floats]

CLASSES: Final[dict[str, tuple[Shape, Texture]]] = {
    "striped disc": (_disc, _stripes),
    "checked square": (_square, _checks),
    "dotted triangle": (_triangle, _dots),
    "rimmed star": (_star, _rim),
    "zigzag cross": (_cross, _zigzag),
    "spoked ring": (_ring, _spokes),
    "ringed hexagon": (_hexagon, _rings),
    "netted flower": (_flower, _net),
    "speckled crescent": (_crescent, _speckles),
    "halved bar": (_bar, _halves),
}
"""By name, in the order of the labels."""
