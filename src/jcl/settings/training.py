"""Options of the commands that pre-train, and of those about images and recipes."""

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
    ForceOptions,
    JsonOptions,
    Options,
    SeedOptions,
    argument,
    cli_field,
    option,
    with_settings,
)
from jcl.settings.recipes import build_settings, recipe_names
from jcl.settings.schema import PositiveInt, Settings, parse_yaml

_DATA = "A folder of images, a .npz file, .tar shards, or demo, cifar10, cifar100 or stl10."

# The settings with an option, and its panel in the help.
RUN_SETTINGS = {
    "data.location": "",
    "method.name": "",
    "model.backbone": "",
    "model.init": "",
    "views.image_size": "",
    "train.epochs": "",
    "train.batch_size": "",
    "train.lr": "",
    "method.num_keys": "",
    "method.covariance_scale": "",
    "method.temperature": "",
    "train.seed": "",
    "train.on_nan": SETTINGS,
    "data.strict": DATA,
    "data.subset": DATA,
    "train.accumulate": HARDWARE,
    "train.device": HARDWARE,
    "record.track": OUTPUT,
}


@with_settings(RUN_SETTINGS)
class RunOptions(Options):
    """Options that determine the settings of a run."""

    recipe: str | None = option(None, "Recipe (`jcl recipes`) or a file.")
    assignments: tuple[str, ...] = option(
        (), "Any setting (`jcl recipes --settings`).", "--set", metavar="SECTION.NAME=VALUE", panel=SETTINGS
    )

    def values(self) -> dict[str, Any]:
        """The settings that were given, by dotted name: by options and by --set."""
        assigned = _assigned(self.assignments)
        values = dict(assigned)
        for name, field in type(self).model_fields.items():
            setting, value = cli_field(field).setting, getattr(self, name)
            if not setting or value is None:
                continue
            if setting in assigned:
                given = "DATA" if name == "data" else f"--{name.replace('_', '-')}"
                raise SettingsError(f"{setting} is given both with {given} and with --set; leave one of them out.")
            values[setting] = value
        return values

    def settings(self, values: dict[str, Any] | None = None) -> Settings:
        """The settings of a run with these `values` (default: those given); data sets with a recipe use their own.

        Those are for training from scratch: with initial weights, everything is chosen as for your own images.
        """
        values = self.values() if values is None else values
        named = "folder" if values.get("model.init") else _recipe_of(values.get("data.location"))
        return build_settings(self.recipe or named, values=values)


class PretrainOptions(RunOptions, DevicesOptions, JsonOptions):
    out: Path | None = option(None, "Run folder (default: in runs/).")
    resume: Literal["never", "auto"] = option("never", "auto: continue a stopped run.")
    profile: bool = option(False, "Only show where the time of a step goes.", panel=OUTPUT)


class ViewsOptions(RunOptions, ForceOptions, JsonOptions):
    out: Path = option(Path("views.png"), "Picture to write.", "-o", "--out", metavar="OUT.png")


class ResumeOptions(DevicesOptions, JsonOptions):
    run: Path = argument("RUN", "Folder of an unfinished run.")
    device: str | None = option(None, "Device: auto, cpu, cuda, cuda:1, ... (default: the run's).", panel=HARDWARE)


class DemoOptions(SeedOptions, JsonOptions):
    out: Path | None = option(None, "Where to write (default: a new folder in runs/).")


class RecipesOptions(Options):
    name: str | None = argument("NAME", "Show the values of this recipe.", None)
    settings: bool = option(False, "List every setting with its default, or with the recipe's value.")


class CheckOptions(JsonOptions):
    data: str = argument("DATA", _DATA)


class ShardOptions(SeedOptions, JsonOptions):
    data: str = argument("DATA", _DATA)
    out_folder: Path = argument("OUT", "New folder for the shards.")
    images_per_shard: PositiveInt = option(5000, "Images in each tar file.")


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
