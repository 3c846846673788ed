"""The cells of an ablation: a grid of values, or one setting at a time, for each seed."""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import yaml

from jcl.core.registry import METHODS
from jcl.errors import SettingsError
from jcl.runs.json_object import describe_differences, format_value, is_number
from jcl.settings.commands import ProbeProtocol
from jcl.settings.schema import Section, Settings, affects_results, setting_names
from jcl.settings.values import parse_yaml, set_value, values_of

Axes = Mapping[str, Sequence[Any]]  # settings by their dotted names, and the values to try
Build = Callable[[Mapping[str, Any]], Settings]  # builds the settings of a cell from its values, by dotted names

MAX_NAME_LENGTH = 100  # of a cell's folder
_FIXED = {
    "recipe": "all cells share one recipe; to vary the views, use views.recipe",
    "train.seed": "use --seeds, as in --seeds 3 or --seeds 0,7,42",
    "data.location": "all cells are compared on the same images",
}


class Cell(Section):
    """One run of an ablation. Values are plain JSON values."""

    values: dict[str, Any]
    seed: int
    settings: Settings
    protocol: ProbeProtocol = "fast"

    @property
    def name(self) -> str:
        """A safe folder name, determined by values and seed."""
        known = json.dumps([self.values, self.seed], sort_keys=True)
        parts = [f"{short_name(name)}-{format_value(value)}" for name, value in sorted(self.values.items())]
        readable = re.sub(r"[^A-Za-z0-9.+_-]", "_", "-".join([*parts, f"seed-{self.seed}"]))
        return f"{readable[: MAX_NAME_LENGTH - 9]}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"

    @property
    def title(self) -> str:
        return f"{describe(self.values)}, seed {self.seed}"


def describe(values: Mapping[str, Any]) -> str:
    """Such as "num_keys 5, temperature 0.2"."""
    return ", ".join(f"{short_name(name)} {format_value(value)}" for name, value in values.items())


def short_name(name: str) -> str:
    """A setting's name without its section; `method` for `method.name`."""
    return "method" if name == "method.name" else name.rpartition(".")[2]


def distinct_values(values: Iterable[Any]) -> list[Any]:
    """The distinct values, which need not be hashable: sorted if all are numbers, else in order."""
    distinct: list[Any] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return sorted(distinct) if all(map(is_number, distinct)) else distinct


def parse_axes(texts: Sequence[str], given: Mapping[str, Any], *, alone: bool = False) -> dict[str, list[Any]]:
    """Parse every `--over`. Only with `alone` may a setting also have a value of its own, the center."""
    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, values = parse_axis(text)
        if name in axes:
            raise SettingsError(f"--over {name} is given twice; list all its values in one.")
        if name in given and not alone:
            raise SettingsError(f"{name} is given both with --over and as {given[name]!r}; remove one of them.")
        axes[name] = values
    return axes


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """Parse `--over`: "num_keys=1,2,3" or "train.milestones=[60, 80],[120, 160]"."""
    name, _, listed = text.partition("=")
    name = full_name(name.strip())
    if name in _FIXED:
        raise SettingsError(f"--over {name} is not possible: {_FIXED[name]}.")
    if not affects_results(name) or name.startswith("record."):
        raise SettingsError(f"--over {name} has no effect: the setting does not change what is learned.")
    try:
        values = parse_yaml(f"[{listed}]")
    except yaml.YAMLError:
        values = None
    if not isinstance(values, list) or not values:
        raise SettingsError(f"--over takes NAME=VALUE,VALUE,..., such as {name}=1,2,3, but got {text!r}.")
    return name, values


def full_name(name: str) -> str:
    """A setting's dotted name; the section may be omitted."""
    known = setting_names()
    if name in known:
        return name
    found = [each for each in known if short_name(each) == name]
    if not found:
        set_value({}, name, None)  # raises, and suggests the nearest name
    return found[0]


def parse_seeds(text: str, first: int = 0) -> list[int]:
    """Parse `--seeds`: a count, starting at `first`, or a list such as "0,7,42" ("7," for a single seed)."""
    if not re.fullmatch(r"\s*\d{1,18}\s*(,\s*\d{1,18}\s*)*,?\s*", text):
        raise SettingsError(f"--seeds takes a count, such as 3, or a list such as 0,7,42, but got {text!r}.")
    if "," in text:
        return list(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    if not 1 <= (count := int(text)) <= 1000:
        raise SettingsError(f"--seeds takes 1 to 1000 seeds, but got {count}; for one seed, write {count},.")
    return list(range(first, first + count))


def build_cells(axes: Axes, seeds: Sequence[int], build: Build, *, alone: bool = False) -> list[Cell]:
    """All combinations of the axes' values or, with `alone`, the center and each axis varied by itself around it.

    Values that are equal after validation, such as 0.2 and 2e-1, make one cell. The first seed comes first.
    """
    combinations = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if alone:
        combinations = [{}, *({name: value} for name, values in axes.items() for value in values)]
        _require_independent(combinations, axes, build)
    cells: dict[str, Cell] = {}
    for seed, values in itertools.product(seeds, combinations):
        settings = build({**values, "train.seed": seed})
        cell = Cell(values=values_of(settings, axes), seed=seed, settings=settings)
        cells.setdefault(cell.name, cell)
    return list(cells.values())


def _require_independent(combinations: Sequence[Mapping[str, Any]], axes: Axes, build: Build) -> None:
    """Raise if a value changes another axis, as a method changes the temperature."""
    center = values_of(build({}), axes)
    for values in combinations:
        if changes := describe_differences(values_of(build(values), axes) | dict(values), center | dict(values)):
            remedy = "Remove one of the two --over, or --each-alone"
            raise SettingsError(f"{describe(values)} cannot be varied alone: it implies {changes}. {remedy}.")


def base_settings(axes: Axes, build: Build) -> Settings:
    """The settings that all cells share; the values on the axes are arbitrary."""
    try:
        return build({})
    except SettingsError:  # the settings may be valid only together with values of the axes
        return build({name: values[0] for name, values in axes.items()})


def shared_values(base: Settings, axes: Iterable[str]) -> dict[str, Any]:
    """Everything that determines a cell's result apart from the axes and the seed."""
    varied = {*axes, "train.seed"}
    names = {name for name in setting_names() if affects_results(name)}
    if base.model.bn_groups == "auto":
        names.add("train.accumulate")  # determines the groups
    return values_of(base, [name for name in setting_names() if name in names - varied])


def refuse_ignored(axes: Axes, base: Settings) -> None:
    """Raise if an axis of the covariance has no effect, because no cell of the grid uses it."""
    methods = axes.get("method.name", [base.method.name])
    counts = axes.get("method.num_keys", [base.method.num_keys])
    if any(METHODS[name].uses_covariance for name in methods) and any(count != 1 for count in counts):
        return
    for name in {"method.covariance_scale", "method.covariance_schedule"} & set(axes):
        without = f"{' and '.join(methods)} with method.num_keys={format_value(counts[0])}"
        raise SettingsError(f"--over {name} has no effect: {without} does not use the covariance of the keys.")
