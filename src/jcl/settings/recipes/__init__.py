"""Recipes: settings of the paper, of its released script and our own, as YAML files in this folder."""

import difflib
from collections.abc import Mapping
from importlib import resources
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml

from jcl.core.registry import METHODS
from jcl.errors import SettingsError
from jcl.paths import expand_user
from jcl.settings.schema import Settings, setting_fields, setting_names
from jcl.settings.values import parse_yaml, read_yaml, set_value, validated


def recipe_names() -> list[str]:
    folder = resources.files(__package__)
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def recipe_values(name: str) -> dict[str, Any]:
    """The values of a built-in recipe, or of a YAML file when `name` is a path to one."""
    if name not in recipe_names() and not name.endswith((".yaml", ".yml")):
        nearest = difflib.get_close_matches(name, recipe_names(), n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(recipe_names())}."
        raise SettingsError(f"There is no recipe called {name!r}; {hint}")
    values = _read_built_in(name) if name in recipe_names() else read_yaml(expand_user(name))
    values.pop("summary", None)
    return values


def recipe_summary(name: str) -> str:
    """What a built-in recipe is, in a line."""
    return str(_read_built_in(name)["summary"])


def build_settings(
    recipe: str | Path, *, method: str | None = None, values: Mapping[str, Any] | None = None
) -> Settings:
    """Settings for `pretrain`: a recipe, then what `method` implies, then `values`; later ones win.

    Without `method`, what the recipe's own method implies applies where the recipe does not say otherwise.

    `recipe` is a name that `jcl recipes` lists or a YAML file, which may name one of them to start from (`recipe:
    photos`). `values` are by dotted name, such as `{"data.location": "photos/", "train.epochs": 100}`.
    """
    recipe, values = str(recipe), dict(values or {})
    method = values.get("method.name", method)
    nested = _recipe_settings(recipe, method) | {"recipe": recipe}
    _set_method(nested, method)
    for name, value in values.items():
        set_value(nested, name, value)
    return validated(Settings, nested, f"the recipe {recipe}{' with your changes' if values or method else ''}")


def _recipe_settings(recipe: str, method: str | None) -> dict[str, Any]:
    """The settings of a recipe, on top of those of the recipe it names; without what its method implies if another is
    given.
    """
    given = recipe_values(recipe)
    base, own = given.pop("recipe", ""), given.get("method")
    own_method = own.get("name") if isinstance(own, dict) else None
    if base and base not in recipe_names():
        # The settings of a run may name a recipe file; they are complete, so they do not need it.
        sections = {section: entries for section, entries in given.items() if isinstance(entries, dict)}
        names = {f"{section}.{name}" for section, entries in sections.items() for name in entries}
        if not {"recipe", *names} >= {*setting_names()}:
            raise SettingsError(f"{recipe} starts from {base!r}, which `jcl recipes` does not list; remove that line.")
        base = ""
    nested = _recipe_settings(base, method or own_method) if base else {}
    if method is None:
        _set_method(nested, own_method)
    for section, entries in given.items():
        both = isinstance(entries, dict) and isinstance(nested.get(section), dict)
        nested[section] = nested[section] | entries if both else entries
    return nested


def _set_method(nested: dict[str, Any], method: Any) -> None:
    """Set the method and what it implies; invalid values are left to the validation of all settings."""
    if isinstance(method, str):
        set_value(nested, "method.name", method)
        for name, value in METHODS[method].recipe.items() if method in METHODS else ():
            set_value(nested, name, value)


def parse_assignments(texts: tuple[str, ...]) -> dict[str, Any]:
    """The values given as `--set section.name=value`, read as YAML."""
    values = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise SettingsError(f"--set takes SECTION.NAME=VALUE, but got {text!r}.")
        try:
            values[name.strip()] = parse_yaml(value)
        except yaml.YAMLError:
            raise SettingsError(f"--set cannot read the value in {text!r}; write lists as [1, 2, 3].") from None
    return values


def describe_settings(settings: Settings | None = None) -> list[tuple[str, str, str]]:
    """Every setting with its value (its default without `settings`; empty if none) and its meaning."""
    rows = []
    for name, field in setting_fields().items():
        value = field.default if settings is None else attrgetter(name)(settings)
        rows.append((name, "" if value is None else str(value), field.description or ""))
    return rows


def _read_built_in(name: str) -> dict[str, Any]:
    text = resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    values: dict[str, Any] = yaml.safe_load(text)
    return values
