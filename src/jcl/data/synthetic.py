"""The built-in synthetic image set, drawn by code so that a first run needs no download.

Each picture shows one object whose class is its shape together with its texture (a striped disc, a checked square, a
dotted triangle, ...). Position, size, rotation, colors, lighting and background vary independently of the class, so
nearest neighbors in pixel space are rarely of one class, whereas features invariant to them separate the classes.

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

_SPACING: Final = 0.5  # of dots and nets


def _coverage(distance: Floats) -> Floats:
    """The fraction of a pixel inside an outline, given its signed distance in pixels (inside is negative)."""
    return (0.5 - distance).clip(0, 1)


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
    x, y = np.abs(x), np.abs(y)
    return np.maximum(np.maximum(x, y) - 0.95, np.minimum(x, y) - 0.36)


def _flower(x: Floats, y: Floats) -> Floats:
    """Four petals; the factor makes the radial difference about a true distance where the outline is steep."""
    distance: Floats = (np.hypot(x, y) - (0.74 + 0.24 * np.cos(4 * np.arctan2(y, x)))) * 0.75
    return distance


def _wave(position: Floats, period: float, pixel: Floats) -> Floats:
    """Bands of two colors along ``position``, with edges one pixel wide: 0..1."""
    offset: Floats = np.abs((position / period) % 1 - 0.5) - 0.25
    return (0.5 + offset * period * pixel).clip(0, 1)


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
    total: Floats = (
        np.sin(9.1 * x + 3.7 * y + shift[:, 0]) + np.sin(11.3 * y - 5.9 * x + shift[:, 1]) + np.sin(7.3 * (x - y))
    )
    return (0.5 + (total - 0.5) * pixel / 12).clip(0, 1)


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
_TINT = 0.045  # saturation; vivid colors would identify a picture regardless of its class
_CHUNK = 100  # pictures drawn together, so that they fit into the processor's cache


def drawn_objects(count: int, seed: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Draw pictures of balanced classes: (count, 3, size, size) uint8, and labels (count,) that index `CLASSES`."""
    labels = np.arange(count) % len(CLASSES)
    table = np.random.Generator(np.random.PCG64([seed, 0])).random((count, _TABLE_WIDTH), dtype=np.float32)
    grain = np.random.Generator(np.random.PCG64([seed, 1]))
    pixels = np.empty((count, 3, size, size), dtype=np.uint8)
    for start in range(0, count, _CHUNK):
        rows = slice(start, min(start + _CHUNK, count))
        noise = grain.random((rows.stop - start, 3, size, size), dtype=np.float32)
        pixels[rows] = _draw(table[rows], labels[rows], noise)
    return torch.from_numpy(pixels), torch.from_numpy(labels)


def _draw(table: Floats, labels: NDArray[np.int64], noise: Floats) -> NDArray[np.uint8]:
    """Background, clutter, object, light and grain, one over the other."""
    size = noise.shape[-1]
    centers = ((np.arange(size) + 0.5) * 2 / size - 1).astype(np.float32)  # of the pixels, in a square from -1 to 1
    grid = np.stack(np.meshgrid(centers, centers))  # (2, size, size)
    slope, _ = _rotate(grid[0], grid[1], table[:, _GROUND_TURN])
    picture = _blend(table[:, _GROUND_COLORS], (0.5 + 0.3 * slope).clip(0, 1))
    for numbers in np.split(table[:, _CLUTTER:], _CLUTTER_PIECES, axis=1):
        _add_clutter(picture, numbers, grid)
    for label, (shape, texture) in enumerate(CLASSES.values()):  # each shape and texture is computed where it is shown
        rows = np.flatnonzero(labels == label)
        picture[rows] = _with_object(picture[rows], table[rows], grid, shape, texture)
    slope, _ = _rotate(grid[0], grid[1], table[:, _LIGHT.start])
    light = table[:, _LIGHT, None, None]
    picture *= (0.75 + 0.35 * light[:, 1] + 0.3 * light[:, 2] * slope)[:, None]
    picture += (noise - 0.5) * (0.04 + 0.1 * table[:, _NOISE, None, None, None])
    return (picture.clip(0, 1) * 255 + 0.5).astype(np.uint8)


def _rotate(across: Floats, down: Floats, turn: Floats) -> tuple[Floats, Floats]:
    """The same points in axes rotated by ``turn`` ``(n,)`` of a circle: ``(n, size, size)`` each."""
    angle = (2 * math.pi * turn)[:, None, None]
    cosine, sine = np.cos(angle), np.sin(angle)
    return cosine * across + sine * down, cosine * down - sine * across


def _blend(numbers: Floats, weight: Floats) -> Floats:
    """Two colors, at least 0.35 apart in lightness: weight of the second (n, size, size) -> (n, 3, size, size)."""
    first, second = numbers[:, :3].copy(), numbers[:, 3:].copy()
    lightness = 0.1 + 0.4 * numbers[:, :1]
    darker = lightness + _TINT * (first - first.mean(1, keepdims=True))
    lighter = lightness + 0.4 + 0.1 * numbers[:, 3:4] + _TINT * (second - second.mean(1, keepdims=True))
    swap = numbers[:, 5:6] < 0.5
    colors: tuple[Floats, Floats] = np.where(swap, darker, lighter), np.where(swap, lighter, darker)
    first, second = (color.clip(0, 1)[:, :, None, None] for color in colors)
    return first * (1 - weight[:, None]) + second * weight[:, None]


def _add_clutter(picture: Floats, numbers: Floats, grid: Floats) -> None:
    """A stroke or patch that belongs to no class."""
    lightness = numbers[:, 6:9].mean(1, keepdims=True)
    color = lightness + 4 * _TINT * (numbers[:, 6:9] - lightness)
    place = numbers[:, :2, None, None] * 2.4 - 1.2
    along, aside = _rotate(grid[0] - place[:, 0], grid[1] - place[:, 1], numbers[:, 2])
    numbers = numbers[:, :, None, None]
    distance = np.maximum(np.abs(along) - (0.1 + 0.6 * numbers[:, 3]), np.abs(aside) - (0.04 + 0.18 * numbers[:, 4]))
    cover = _coverage(distance * (grid.shape[-1] / 2)) * (0.35 + 0.5 * numbers[:, 5])
    picture += (color[:, :, None, None] - picture) * cover[:, None]


def _with_object(picture: Floats, numbers: Floats, grid: Floats, shape: Shape, texture: Texture) -> Floats:
    """The pictures with an object of one class over each."""
    radius = (0.55 + 0.5 * numbers[:, _SCALE])[:, None, None]
    place = (numbers[:, _PLACE, None, None] - 0.5) * 0.6
    x, y = _rotate(grid[0] - place[:, 0], grid[1] - place[:, 1], numbers[:, _TURN])
    x, y = x / radius, y / radius
    pixel = radius * (grid.shape[-1] / 2)  # pixels per unit of the object's own axes
    surface = _blend(numbers[:, _OBJECT_COLORS], texture(x, y, numbers[:, _PHASE, None, None], pixel))
    return picture + (surface - picture) * _coverage(shape(x, y) * pixel)[:, None]
