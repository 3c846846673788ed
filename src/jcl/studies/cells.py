"""The cells of an ablation: every combination of the values to try, or one setting at a time, for each seed."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from jcl.errors import SettingsError
from jcl.runs.json_object import written
from jcl.settings.schema import Settings, affects_results, parse_yaml, put, setting_names, values_of

Build = Callable[[Mapping[str, Any]], Settings]
"""Makes the settings of a cell from the values that are its own, by dotted names."""

LONGEST_NAME = 100  # of a cell's folder, in letters
_NOT_TO_VARY = {
    "recipe": "the cells of an ablation share one recipe; for the kind of views give views.recipe",
    "train.seed": "seeds are given with --seeds, as in --seeds 3 or --seeds 0,7,42",
    "data.location": "the cells of an ablation are compared on the same images",
}


@dataclass(frozen=True)
class Axis:
    """A setting by its dotted name, and the values to try."""

    name: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Cell:
    """One run of an ablation: its settings, and what tells it from the others. Values are those of JSON."""

    values: Mapping[str, Any]
    seed: int
    settings: Settings

    @property
    def name(self) -> str:
        """The name of its folder, a function of values and seed; whatever the values hold, it is a plain name."""
        known = json.dumps([self.values, self.seed], sort_keys=True)
        parts = [f"{short_name(name)}-{written(value)}" for name, value in sorted(self.values.items())]
        readable = re.sub(r"[^A-Za-z0-9.+_-]", "_", "-".join([*parts, f"seed-{self.seed}"]))
        return f"{readable[: LONGEST_NAME - 9]}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"

    @property
    def words(self) -> str:
        return f"{described(self.values)}, seed {self.seed}"


def described(values: Mapping[str, Any]) -> str:
    """Values in words, such as "num_keys 5, temperature 0.2"."""
    return ", ".join(f"{short_name(name)} {written(value)}" for name, value in values.items())


def short_name(name: str) -> str:
    """A setting's name without its section; the method's is the section's."""
    return "method" if name == "method.name" else name.rpartition(".")[2]


def parse_axis(text: str) -> Axis:
    """What `--over` takes: "num_keys=1,2,3" or "train.milestones=[60, 80],[120, 160]"."""
    name, sign, listed = text.partition("=")
    if not sign:
        raise SettingsError(f"--over takes NAME=VALUE,VALUE,..., but got {text!r}.")
    name = whole_name(name.strip())
    _refuse_without_effect(name)
    try:
        values = parse_yaml(f"[{listed}]")
    except yaml.YAMLError:
        values = None
    if not isinstance(values, list):
        raise SettingsError(f"--over cannot make sense of the values in {text!r}; they read 1,2,3.")
    if not values:
        raise SettingsError(f"--over {name} has no values to try; give some, as in --over {name}=1,2,3.")
    return Axis(name, tuple(values))


def whole_name(name: str) -> str:
    """A setting's dotted name; the section may be left away where only one has a setting of that name."""
    known = setting_names()
    if name in known:
        return name
    found = [each for each in known if short_name(each) == name]
    if len(found) > 1:
        raise SettingsError(f"{name!r} may be {' or '.join(found)}; give the whole name.")
    if not found:
        put({}, name, None)  # says that there is none, and which is nearest
    return found[0]


def parse_seeds(text: str, first: int = 0) -> tuple[int, ...]:
    """What `--seeds` takes: how many, from `first` on, or a list such as "0,7,42" ("7," for one alone)."""
    if not re.fullmatch(r"\s*\d{1,18}\s*(,\s*\d{1,18}\s*)*,?\s*", text):
        raise SettingsError(f"--seeds takes how many, such as 3, or a list such as 0,7,42, but got {text!r}.")
    numbers = [int(part) for part in text.split(",") if part.strip()]
    if "," in text:
        return tuple(dict.fromkeys(numbers))
    if not 1 <= numbers[0] <= 1000:
        raise SettingsError(
            f"--seeds takes between 1 and 1000 seeds, but got {numbers[0]}; a list reads {numbers[0]},."
        )
    return tuple(range(first, first + numbers[0]))


def grid(axes: Sequence[Axis], seeds: Sequence[int], build: Build) -> list[Cell]:
    """All combinations of the axes' values, those of the first seed first."""
    names = [axis.name for axis in axes]
    combinations = itertools.product(*(axis.values for axis in axes))
    return _cells(names, [dict(zip(names, values, strict=True)) for values in combinations], seeds, build)


def each_alone(axes: Sequence[Axis], seeds: Sequence[int], build: Build) -> list[Cell]:
    """Each axis by itself, the others at the values that all cells share, the centre; the centre is tried too."""
    names = [axis.name for axis in axes]
    combinations = [{axis.name: value} for axis in axes for value in axis.values]
    for asked in combinations:
        _refuse_company(asked, names, build)
    return _cells(names, [{}, *combinations], seeds, build)


def _refuse_company(asked: Mapping[str, Any], names: Sequence[str], build: Build) -> None:
    """Raise where a value brings about another of one of the other axes, as a method may."""
    centre, found = values_of(build({}), names), values_of(build(asked), names)
    for name in names:
        if name not in asked and found[name] != centre[name]:
            raise SettingsError(
                f"{described(asked)} cannot be tried alone, because it makes {name} {written(found[name])} instead of "
                f"{written(centre[name])}; leave one of the two --over out, or --each-alone."
            )


def _cells(
    names: Sequence[str], combinations: Sequence[Mapping[str, Any]], seeds: Sequence[int], build: Build
) -> list[Cell]:
    """Values that are the same once understood make one cell."""
    cells: dict[str, Cell] = {}
    for seed in seeds:
        for asked in combinations:
            settings = build({**asked, "train.seed": seed})
            cell = Cell(values_of(settings, names), seed, settings)
            cells.setdefault(cell.name, cell)
    return list(cells.values())


def base_settings(axes: Sequence[Axis], build: Build) -> Settings:
    """What all cells share, with whatever value in the places of the axes."""
    try:
        return build({})
    except SettingsError:  # it may be the axes' values that make the others fit together
        return build({axis.name: axis.values[0] for axis in axes})


def shared_values(base: Settings, axes: Sequence[str]) -> dict[str, Any]:
    """By dotted names what decides, beside the axes and the seed, on the figures of a cell."""
    names = [name for name in setting_names() if affects_results(name) and name not in {*axes, "train.seed"}]
    return values_of(base, names)


def refuse_repeated(axes: Sequence[Axis], given: Mapping[str, Any], *, alone: bool = False) -> None:
    """Raise where a setting has two axes, or an axis and a value; an axis alone has one for the others' cells."""
    names = [axis.name for axis in axes]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"--over {name} is given twice; list all its values in one.")
        if name in given and not alone:
            raise SettingsError(f"{name} is given both with --over and as {given[name]!r}; leave one of them out.")


def _refuse_without_effect(name: str) -> None:
    if name in _NOT_TO_VARY:
        raise SettingsError(f"--over {name} does not work: {_NOT_TO_VARY[name]}.")
    if not affects_results(name) or name.startswith("record."):
        raise SettingsError(f"--over {name} would show nothing: the setting does not change what is learned.")
