"""The built-in image set: objects drawn by code, so that a first run needs no download.

The pictures are synthetic. Each shows one object whose class is its shape together with its texture (a striped disc,
a checked square, a dotted triangle, ...). RunContext, size, turn, colours, light and background differ from picture to
picture and say nothing about the class, so neighbours in pixel space are rarely of one class, whereas features that
ignore those nuisances tell the classes apart.

Picture ``i`` depends on the seed and on ``i`` alone: a longer set begins with the pictures of a shorter one.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jcl.data.drawn_classes import CLASSES, Floats, coverage

# Columns of the table of random numbers that describe one picture, all uniform in [0, 1).
_PLACE, _SCALE, _TURN, _PHASE, _LIGHT = slice(0, 2), 2, 3, slice(4, 6), slice(6, 9)
_OBJECT_COLOURS, _GROUND_COLOURS, _GROUND_TURN, _NOISE = slice(9, 15), slice(15, 21), 21, 22
_CLUTTER, _CLUTTER_PIECES, _CLUTTER_NUMBERS = 23, 4, 9
_TABLE_WIDTH = _CLUTTER + _CLUTTER_PIECES * _CLUTTER_NUMBERS
_TINT = 0.045  # how far colours stray from gray; vivid ones would tell pictures apart at a glance, whatever is in them
_CHUNK = 100  # pictures drawn together: their planes then stay in a processor's cache


def drawn_objects(count: int, seed: int, size: int = 32) -> tuple[Tensor, Tensor]:
    """Draw ``count`` pictures; the classes take turns, so they are balanced.

    Returns pixels ``(count, 3, size, size)`` uint8 and labels ``(count,)`` int64 that index ``drawn_classes.CLASSES``.
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
    """The same points in axes turned by ``angle`` ``(n,)``: ``(n, size, size)`` each."""
    cosine, sine = np.cos(angle)[:, None, None], np.sin(angle)[:, None, None]
    return cosine * across + sine * down, cosine * down - sine * across


def _colours(numbers: Floats) -> tuple[Floats, Floats]:
    """Two colours ``(n, 3)`` from six numbers, at least 0.35 apart in lightness so that gray pictures show them too."""
    first, second = numbers[:, :3].copy(), numbers[:, 3:].copy()
    lightness = 0.1 + 0.4 * numbers[:, :1]
    darker = lightness + _TINT * (first - first.mean(1, keepdims=True))
    lighter = lightness + 0.4 + 0.1 * numbers[:, 3:4] + _TINT * (second - second.mean(1, keepdims=True))
    swap = numbers[:, 5:6] < 0.5
    return np.where(swap, darker, lighter).clip(0, 1), np.where(swap, lighter, darker).clip(0, 1)


def _background(table: Floats, across: Floats, down: Floats) -> Floats:
    """A slow change from one colour to another: ``(n, 3, size, size)``."""
    first, second = _colours(table[:, _GROUND_COLOURS])
    slope, _ = _turned(across, down, 2 * math.pi * table[:, _GROUND_TURN])
    blend = (0.5 + 0.3 * slope).clip(0, 1)[:, None]
    ground: Floats = first[:, :, None, None] * (1 - blend) + second[:, :, None, None] * blend
    return ground


def _add_clutter(picture: Floats, numbers: Floats, across: Floats, down: Floats, size: int) -> None:
    """Strokes and patches, light and dark, which are no part of any class."""
    for piece in np.split(numbers, _CLUTTER_PIECES, axis=1):
        place = piece[:, :2, None, None] * 2.4 - 1.2
        along, aside = _turned(across - place[:, 0], down - place[:, 1], 2 * math.pi * piece[:, 2])
        length, width = 0.1 + 0.6 * piece[:, 3, None, None], 0.04 + 0.18 * piece[:, 4, None, None]
        distance = np.maximum(np.abs(along) - length, np.abs(aside) - width)
        cover = coverage(distance * (size / 2)) * (0.35 + 0.5 * piece[:, 5, None, None])
        lightness = piece[:, 6:9].mean(1, keepdims=True)
        colour = lightness + 4 * _TINT * (piece[:, 6:9] - lightness)
        _paint(picture, colour[:, :, None, None], cover)


def _add_objects(
    picture: Floats, table: Floats, labels: NDArray[np.int64], across: Floats, down: Floats, size: int
) -> None:
    """The object of each picture, class by class so that only its own shape and texture are worked out."""
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
        first, second = _colours(numbers[:, _OBJECT_COLOURS])
        surface = first[:, :, None, None] * (1 - blend) + second[:, :, None, None] * blend
        painted = picture[rows]
        _paint(painted, surface, coverage(shape(x, y) * pixel))
        picture[rows] = painted


def _light(numbers: Floats, across: Floats, down: Floats) -> Floats:
    """Brightness that changes across the picture, as under a lamp at one side: ``(n, size, size)``."""
    slope, _ = _turned(across, down, 2 * math.pi * numbers[:, 0])
    return 0.75 + 0.35 * numbers[:, 1, None, None] + 0.3 * numbers[:, 2, None, None] * slope


def _paint(picture: Floats, colour: Floats, cover: Floats) -> None:
    picture += (colour - picture) * cover[:, None]
