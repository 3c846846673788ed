"""Options of the commands that pre-train."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml

from jcl.errors import SettingsError
from jcl.settings.options import (
    DATA,
    HARDWARE,
    OUTPUT,
    SETTINGS,
    DevicesOptions,
    JsonOptions,
    Options,
    SeedOptions,
    argument,
    cli_field,
    option,
    settings_given,
    with_settings,
)
from jcl.settings.recipes import build_settings, recipe_names
from jcl.settings.schema import Settings, parse_yaml

RUN_SETTINGS = (
    "data.location",
    "method.name",
    "model.backbone",
    "views.image_size",
    "train.epochs",
    "train.batch_size",
    "train.lr",
    "method.num_keys",
    "method.covariance_scale",
    "method.temperature",
    "train.seed",
    "train.on_nan",
    "data.strict",
    "data.subset",
    "train.device",
)
"""The settings with an option."""
RUN_PANELS = {"train.on_nan": SETTINGS, "data.strict": DATA, "data.subset": DATA, "train.device": HARDWARE}


class RunOptions(Options):
    """Options that determine the settings of a run."""

    recipe: str | None = option(None, "Recipe (`jcl recipes`) or a file.")
    assignments: tuple[str, ...] = option(
        (),
        "Any setting (`jcl recipes --settings`).",
        "--set",
        metavar="SECTION.NAME=VALUE",
        panel=SETTINGS,
    )

    def values(self) -> dict[str, Any]:
        """The settings that were given, by dotted name: by options and by --set."""
        by_option, assigned = settings_given(self), _assigned(self.assignments)
        if both := by_option.keys() & assigned.keys():
            fields = {cli_field(field).setting: name for name, field in type(self).model_fields.items()}
            name = min(both)
            given = "DATA" if name == "data.location" else f"--{fields[name].replace('_', '-')}"
            raise SettingsError(f"{name} is given both with {given} and with --set; leave one of them out.")
        return by_option | assigned

    def settings(self, values: dict[str, Any] | None = None) -> Settings:
        """The settings of a run with these `values` (default: those given); data sets with a recipe use their own."""
        values = self.values() if values is None else values
        location = values.get("data.location")
        return build_settings(self.recipe or _recipe_of(location), values=values)


@with_settings(*RUN_SETTINGS, panels=RUN_PANELS)
class PretrainOptions(RunOptions, DevicesOptions, JsonOptions):
    """Options of `jcl pretrain`."""

    out: Path | None = option(None, "Run folder (default: in runs/).")
    resume: Literal["never", "auto"] = option("never", "auto: continue a stopped run with the same settings.")
    profile: bool = option(False, "Only show where the time of a step goes.", panel=OUTPUT)


class ResumeOptions(DevicesOptions, JsonOptions):
    """Options of `jcl resume`."""

    run: Path = argument("RUN", "Folder of an unfinished run.")
    device: str | None = option(None, "Device: auto, cpu, cuda, cuda:1, ... (default: the run's).", panel=HARDWARE)


class DemoOptions(SeedOptions, JsonOptions):
    """Options of `jcl demo`."""

    out: Path | None = option(None, "Where to write (default: a new folder in runs/).")


def _recipe_of(location: object) -> str:
    """The recipe named after a known data set, else `folder`; the names of folders do not matter."""
    from jcl.data.named import KNOWN_SETS

    return str(location) if location in KNOWN_SETS and location in recipe_names() else "folder"


def _assigned(texts: tuple[str, ...]) -> dict[str, Any]:
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
