"""The built-in synthetic image set, drawn by code so that a first run needs no download.

Each picture shows one object whose class is its shape together with its texture (a striped disc, a checked square, a
dotted triangle, ...). Position, size, rotation, colors, lighting and background vary independently of the class, so
nearest neighbours in pixel space are rarely of one class, whereas features invariant to them separate the classes.

Picture ``i`` depends on the seed and on ``i`` alone: a longer set starts with the pictures of a shorter one.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.floating[Any]]
Shape = Callable[[Floats, Floats], Floats]
Texture = Callable[[Floats, Floats, Floats, Floats], Floats]


def _coverage(distance: Floats) -> Floats:
    """The fraction of a pixel inside an outline, given its signed distance in pixels (inside is negative)."""
    cover: Floats = np.clip(0.5 - distance, 0, 1)
    return cover


def _polygon(x: Floats, y: Floats, corners: int, apothem: float) -> Floats:
    """A regular polygon: the maximum of the half-plane distances of its sides."""
    distance = x - apothem
    for side in range(1, corners):
        angle = 2 * math.pi * side / corners
        distance = np.maximum(distance, math.cos(angle) * x + math.sin(angle) * y - apothem)
    return distance


def _star(x: Floats, y: Floats) -> Floats:
    """Five points: fold the plane into one tenth and measure from the edge between a tip and an inner corner."""
    sector = np.abs((np.arctan2(y, x) + math.pi / 5) % (2 * math.pi / 5) - math.pi / 5)
    length = np.hypot(x, y)
    tip, inner = 1.08, 0.5  # radii of the tips and of the inner corners
    edge_x, edge_y = inner * math.cos(math.pi / 5) - tip, inner * math.sin(math.pi / 5)
    from_tip_x, from_tip_y = length * np.cos(sector) - tip, length * np.sin(sector)
    return (from_tip_x * edge_y - from_tip_y * edge_x) / math.hypot(edge_x, edge_y)


def _cross(x: Floats, y: Floats) -> Floats:
    long, short = np.maximum(np.abs(x), np.abs(y)), np.minimum(np.abs(x), np.abs(y))
    return np.maximum(long - 0.95, short - 0.36)


def _flower(x: Floats, y: Floats) -> Floats:
    """Four petals; the factor makes the radial difference about a true distance where the outline is steep."""
    outline = 0.74 + 0.24 * np.cos(4 * np.arctan2(y, x))
    distance: Floats = (np.hypot(x, y) - outline) * 0.75
    return distance


def _wave(position: Floats, period: float, pixel: Floats) -> Floats:
    """Bands of two colors along ``position``, with edges one pixel wide: 0..1."""
    offset = np.abs((position / period) % 1 - 0.5) - 0.25
    blend: Floats = np.clip(0.5 + offset * period * pixel, 0, 1)
    return blend


def _checks(x: Floats, y: Floats, phase: Floats, pixel: Floats) -> Floats:
    first, second = _wave(x + phase[:, 0], 0.8, pixel), _wave(y + phase[:, 1], 0.8, pixel)
    return first + second - 2 * first * second


def _cell(x: Floats, y: Floats, phase: Floats) -> tuple[Floats, Floats]:
    """Position in the cells of a square grid, -0.5..0.5."""
    return (x / _SPACING + phase[:, 0]) % 1 - 0.5, (y / _SPACING + phase[:, 1]) % 1 - 0.5


def _dots(x: Floats, y: Floats, phase: Floats, pixel: Floats) -> Floats:
    return _coverage((np.hypot(*_cell(x, y, phase)) - 0.3) * _SPACING * pixel)


def _net(x: Floats, y: Floats, phase: Floats, pixel: Floats) -> Floats:
    return _coverage((np.minimum(*map(np.abs, _cell(x, y, phase))) - 0.14) * _SPACING * pixel)


def _zigzag(x: Floats, y: Floats, phase: Floats, pixel: Floats) -> Floats:
    fold = np.abs((x / 0.6 + phase[:, 1]) % 1 - 0.5) * 0.6
    return _wave(y + fold + phase[:, 0], 0.5, pixel)


def _speckles(x: Floats, y: Floats, phase: Floats, pixel: Floats) -> Floats:
    """Irregular spots: where the sum of waves in unrelated directions is high."""
    shift = phase * (2 * math.pi)
    total = np.sin(9.1 * x + 3.7 * y + shift[:, 0]) + np.sin(11.3 * y - 5.9 * x + shift[:, 1]) + np.sin(7.3 * (x - y))
    blend: Floats = np.clip(0.5 + (total - 0.5) * pixel / 12, 0, 1)
    return blend


_SPACING: Final = 0.5  # of dots and nets

# The classes in the order of their labels. A shape is the signed distance from its outline in the object's own axes,
# where the object fills about the unit disc. A texture is the weight of the second color, 0..1; ``phase`` (n, 2, 1, 1)
# shifts it and ``pixel`` smooths its edges.
CLASSES: Final[dict[str, tuple[Shape, Texture]]] = {
    "striped disc": (
        lambda x, y: np.hypot(x, y) - 0.9,
        lambda x, y, phase, pixel: _wave(y + phase[:, 0], 0.5, pixel),
    ),
    "checked square": (lambda x, y: np.maximum(np.abs(x), np.abs(y)) - 0.76, _checks),
    "dotted triangle": (lambda x, y: _polygon(x, y, 3, 0.58), _dots),
    "rimmed star": (_star, lambda x, y, phase, pixel: _coverage((_star(x, y) + 0.2) * pixel)),
    "zigzag cross": (_cross, _zigzag),
    "spoked ring": (
        lambda x, y: np.abs(np.hypot(x, y) - 0.7) - 0.27,
        lambda x, y, phase, pixel: _wave(np.arctan2(y, x) / (2 * math.pi) + phase[:, 0], 1 / 8, pixel * 4),
    ),
    "ringed hexagon": (
        lambda x, y: _polygon(x, y, 6, 0.86),
        lambda x, y, phase, pixel: _wave(np.hypot(x, y) + 0.3 * phase[:, 0], 0.46, pixel),
    ),
    "netted flower": (_flower, _net),
    "speckled crescent": (
        lambda x, y: np.maximum(np.hypot(x, y) - 0.95, 0.62 - np.hypot(x - 0.5, y)),
        _speckles,
    ),
    "halved bar": (
        lambda x, y: np.hypot(np.maximum(np.abs(x) - 0.62, 0), y) - 0.4,
        lambda x, y, phase, pixel: _coverage((x - 0.3 * (phase[:, 0] - 0.5)) * pixel),
    ),
}

# Columns of the table of uniform random numbers that describe one picture.
_PLACE, _SCALE, _TURN, _PHASE, _LIGHT = slice(0, 2), 2, 3, slice(4, 6), slice(6, 9)
_OBJECT_COLORS, _GROUND_COLORS, _GROUND_TURN, _NOISE = slice(9, 15), slice(15, 21), 21, 22
_CLUTTER, _CLUTTER_PIECES, _CLUTTER_NUMBERS = 23, 4, 9
_TABLE_WIDTH = _CLUTTER + _CLUTTER_PIECES * _CLUTTER_NUMBERS
_TINT = 0.045  # how far colors stray from gray; vivid ones would identify pictures whatever they show
_CHUNK = 100  # pictures drawn together, so that they fit into the processor's cache


def drawn_objects(count: int, seed: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Draw ``count`` pictures of balanced classes.

    Returns pixels ``(count, 3, size, size)`` uint8 and labels ``(count,)`` int64 that index ``CLASSES``.
    """
    labels = np.arange(count) % len(CLASSES)
    table = np.random.Generator(np.random.PCG64([seed, 0])).random((count, _TABLE_WIDTH), dtype=np.float32)
    grain = np.random.Generator(np.random.PCG64([seed, 1]))
    pixels = np.empty((count, 3, size, size), dtype=np.uint8)
    for start in range(0, count, _CHUNK):
        rows = slice(start, min(start + _CHUNK, count))
        noise = grain.random((rows.stop - start, 3, size, size), dtype=np.float32)
        pixels[rows] = _draw(table[rows], labels[rows], noise, size)
    return torch.from_numpy(pixels), torch.from_numpy(labels)


def _draw(table: Floats, labels: NDArray[np.int64], noise: Floats, size: int) -> NDArray[np.uint8]:
    """Background, clutter, object, light and grain, one over the other."""
    across, down = _pixel_grid(size)
    picture = _background(table, across, down)
    _add_clutter(picture, table[:, _CLUTTER:], across, down, size)
    _add_objects(picture, table, labels, across, down, size)
    picture *= _light(table[:, _LIGHT], across, down)[:, None]
    picture += (noise - 0.5) * (0.04 + 0.1 * table[:, _NOISE, None, None, None])
    return (picture.clip(0, 1) * 255 + 0.5).astype(np.uint8)


def _pixel_grid(size: int) -> tuple[Floats, Floats]:
    """Pixel centres in a square from -1 to 1: ``(size, size)`` each."""
    centres = ((np.arange(size) + 0.5) * 2 / size - 1).astype(np.float32)
    return np.broadcast_to(centres, (size, size)), np.broadcast_to(centres[:, None], (size, size))


def _turned(across: Floats, down: Floats, angle: Floats) -> tuple[Floats, Floats]:
    """The same points in axes rotated by ``angle`` ``(n,)``: ``(n, size, size)`` each."""
    cosine, sine = np.cos(angle)[:, None, None], np.sin(angle)[:, None, None]
    return cosine * across + sine * down, cosine * down - sine * across


def _colors(numbers: Floats) -> tuple[Floats, Floats]:
    """Two colors ``(n, 3)`` from six numbers, at least 0.35 apart in lightness, so that they differ in gray too."""
    first, second = numbers[:, :3].copy(), numbers[:, 3:].copy()
    lightness = 0.1 + 0.4 * numbers[:, :1]
    darker = lightness + _TINT * (first - first.mean(1, keepdims=True))
    lighter = lightness + 0.4 + 0.1 * numbers[:, 3:4] + _TINT * (second - second.mean(1, keepdims=True))
    swap = numbers[:, 5:6] < 0.5
    return np.where(swap, darker, lighter).clip(0, 1), np.where(swap, lighter, darker).clip(0, 1)


def _background(table: Floats, across: Floats, down: Floats) -> Floats:
    """A gradient between two colors: ``(n, 3, size, size)``."""
    first, second = _colors(table[:, _GROUND_COLORS])
    slope, _ = _turned(across, down, 2 * math.pi * table[:, _GROUND_TURN])
    blend = (0.5 + 0.3 * slope).clip(0, 1)[:, None]
    ground: Floats = first[:, :, None, None] * (1 - blend) + second[:, :, None, None] * blend
    return ground


def _add_clutter(picture: Floats, numbers: Floats, across: Floats, down: Floats, size: int) -> None:
    """Strokes and patches that belong to no class."""
    for piece in np.split(numbers, _CLUTTER_PIECES, axis=1):
        place = piece[:, :2, None, None] * 2.4 - 1.2
        along, aside = _turned(across - place[:, 0], down - place[:, 1], 2 * math.pi * piece[:, 2])
        length, width = 0.1 + 0.6 * piece[:, 3, None, None], 0.04 + 0.18 * piece[:, 4, None, None]
        distance = np.maximum(np.abs(along) - length, np.abs(aside) - width)
        cover = _coverage(distance * (size / 2)) * (0.35 + 0.5 * piece[:, 5, None, None])
        lightness = piece[:, 6:9].mean(1, keepdims=True)
        color = lightness + 4 * _TINT * (piece[:, 6:9] - lightness)
        _paint(picture, color[:, :, None, None], cover)


def _add_objects(
    picture: Floats, table: Floats, labels: NDArray[np.int64], across: Floats, down: Floats, size: int
) -> None:
    """The object of each picture, class by class so that only its own shape and texture are computed."""
    for label, (shape, texture) in enumerate(CLASSES.values()):
        rows = np.flatnonzero(labels == label)
        if not len(rows):
            continue
        numbers = table[rows]
        radius = (0.55 + 0.5 * numbers[:, _SCALE])[:, None, None]
        place = (numbers[:, _PLACE, None, None] - 0.5) * 0.6
        x, y = _turned(across - place[:, 0], down - place[:, 1], 2 * math.pi * numbers[:, _TURN])
        x, y = x / radius, y / radius
        pixel = radius * (size / 2)  # pixels per unit of the object's own axes
        blend = texture(x, y, numbers[:, _PHASE, None, None], pixel)[:, None]
        first, second = _colors(numbers[:, _OBJECT_COLORS])
        surface = first[:, :, None, None] * (1 - blend) + second[:, :, None, None] * blend
        painted = picture[rows]
        _paint(painted, surface, _coverage(shape(x, y) * pixel))
        picture[rows] = painted


def _light(numbers: Floats, across: Floats, down: Floats) -> Floats:
    """Brightness that changes across the picture: ``(n, size, size)``."""
    slope, _ = _turned(across, down, 2 * math.pi * numbers[:, 0])
    return 0.75 + 0.35 * numbers[:, 1, None, None] + 0.3 * numbers[:, 2, None, None] * slope


def _paint(picture: Floats, color: Floats, cover: Floats) -> None:
    picture += (color - picture) * cover[:, None]
