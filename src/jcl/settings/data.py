"""Options of the commands about images and recipes."""

from __future__ import annotations

from pathlib import Path

from jcl.settings.options import JsonOptions, Options, SeedOptions, argument, option
from jcl.settings.schema import PositiveInt

_DATA = "A folder of images, a .npz file, .tar shards, or demo, cifar10, cifar100 or stl10."


class RecipesOptions(Options):
    name: str | None = argument("NAME", "Show the values of this recipe.", None)
    settings: bool = option(False, "List every setting with its default, or with the recipe's value.")


class CheckOptions(JsonOptions):
    data: str = argument("DATA", _DATA)


class ShardOptions(SeedOptions, JsonOptions):
    data: str = argument("DATA", _DATA)
    out_folder: Path = argument("OUT", "New folder for the shards.")
    images_per_shard: PositiveInt = option(5000, "Images in each tar file.")
