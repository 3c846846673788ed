"""The options that say how a backbone is pre-trained, and the settings they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jcl.cli.location import location_argument
from jcl.errors import SettingsError

if TYPE_CHECKING:
    from jcl.settings.schema import Settings

DataArgument = Annotated[
    str | None,
    location_argument(
        "Folder of images, .npz file, shards such as 's/{0000..0127}.tar', or demo, cifar10, cifar100, stl10."
    ),
]
RecipeOption = Annotated[str | None, typer.Option(help="Recipe by name (see `jcl recipes`) or a YAML file.")]
MethodOption = Annotated[str | None, typer.Option(help="jcl, moco-v2, moco-v1, multi-key or multi-key-backprop.")]
BackboneOption = Annotated[str | None, typer.Option(help="torchvision or timm name.")]
EpochsOption = Annotated[int | None, typer.Option(help="Passes over the data.")]
BatchSizeOption = Annotated[int | None, typer.Option(help="Images per step.")]
LrOption = Annotated[float | None, typer.Option(help="Learning rate.")]
NumKeysOption = Annotated[int | None, typer.Option(help="Key views per image, M'.")]
CovarianceScaleOption = Annotated[float | None, typer.Option(help="Weight of the keys' covariance.")]
TemperatureOption = Annotated[float | None, typer.Option(help="Softmax temperature.")]
SeedOption = Annotated[int | None, typer.Option(help="Same seed, same numbers.")]
DeviceOption = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
StrictOption = Annotated[
    bool | None, typer.Option("--strict", help="Stop at the first training image, folder or shard that is unreadable.")
]
OnNanOption = Annotated[str | None, typer.Option(help="What a loss that is not finite does: stop or skip.")]
SubsetOption = Annotated[str | None, typer.Option(help="imagenet100, or a file with one class folder a line.")]

# By the names of the commands' parameters.
_SETTINGS = {
    "data": "data.location",
    "backbone": "model.backbone",
    "epochs": "train.epochs",
    "batch_size": "train.batch_size",
    "lr": "train.lr",
    "num_keys": "method.num_keys",
    "covariance_scale": "method.covariance_scale",
    "temperature": "method.temperature",
    "seed": "train.seed",
    "device": "train.device",
    "on_nan": "train.on_nan",
    "strict": "data.strict",
    "subset": "data.subset",
}


def given_values(parameters: Mapping[str, Any], assignments: list[str] | None) -> dict[str, Any]:
    """The settings that a command was given, by dotted names: its parameters and what --set says."""
    assigned = _assigned(assignments or [])
    for option, name in (_SETTINGS | {"method": "method.name"}).items():
        if name in assigned and parameters.get(option) is not None:
            given = "DATA" if option == "data" else f"--{option.replace('_', '-')}"
            raise SettingsError(f"{name} is given both with {given} and with --set; leave one of them out.")
    values = {name: parameters[option] for option, name in _SETTINGS.items() if parameters.get(option) is not None}
    return values | assigned


def run_settings(recipe: str | None, method: str | None, values: Mapping[str, Any]) -> Settings:
    """The settings of a run; the recipe of a data set known by name is the one called after it."""
    from jcl.settings.recipes import build_settings

    usual = _recipe_of(values.get("data.location")) if recipe is None else recipe
    return build_settings(usual, method=method, values=values)


def _recipe_of(location: object) -> str:
    """A folder may happen to be called as a recipe is; only names of data sets count."""
    from jcl.data.named import KNOWN_SETS
    from jcl.settings.recipes import recipe_names

    return str(location) if location in KNOWN_SETS and location in recipe_names() else "folder"


def _assigned(texts: list[str]) -> dict[str, Any]:
    """`section.name=value` as given to --set; values are read as YAML, so that numbers, lists and true are that."""
    import yaml

    from jcl.settings.schema import parse_yaml

    values = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise SettingsError(f"--set takes SECTION.NAME=VALUE, but got {text!r}.")
        try:
            values[name.strip()] = parse_yaml(value)
        except yaml.YAMLError:
            raise SettingsError(f"--set cannot make sense of the value in {text!r}; lists read [1, 2, 3].") from None
    return values
