"""Commands about images and recipes, before any training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from jcl.cli.app import DATA, JsonOption, app, err, out, seed_option
from jcl.cli.location import location_argument
from jcl.cli.printing import in_table, say, write_json
from jcl.cli.progress import counting
from jcl.console import pluralize, print_line, readable_size, typed


@app.command(rich_help_panel=DATA)
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this recipe's values.")] = None,
    settings: Annotated[
        bool, typer.Option("--settings", help="List every setting with its default, or the recipe's value.")
    ] = False,
) -> None:
    """List the recipes, show one, or list every setting."""
    import yaml

    from jcl.settings.recipes import build_settings, recipe_names, recipe_summary, recipe_values
    from jcl.settings.schema import describe_settings

    if settings:
        # The whole name is what --set wants.
        table = Table(
            Column("setting", no_wrap=True),
            Column("default" if name is None else "value", max_width=10, overflow="fold"),
            Column("meaning", overflow="fold"),
        )
        for row in describe_settings(None if name is None else build_settings(name)):
            table.add_row(*map(in_table, row))
        out.print(table)
    elif name is not None:
        values = yaml.safe_dump(recipe_values(name), sort_keys=False)
        out.print(values, highlight=False, markup=False, soft_wrap=True, end="")
    else:
        table = Table("recipe", "what it is")
        for each in recipe_names():
            table.add_row(each, recipe_summary(each))
        out.print(table)


@app.command(rich_help_panel=DATA)
def check(
    data: Annotated[str, location_argument("Folder of images, .npz file, or a data set's name.")],
    json_file: JsonOption = None,
) -> None:
    """Look at every image before training: sizes, classes, duplicates, and what cannot be read."""
    from jcl.cli.data_report import print_report
    from jcl.data import open_data
    from jcl.data.check import check_data

    with counting("checking") as progress:
        report = check_data(open_data(data), progress=progress)
    print_report(report)
    write_json(report.as_dict(), json_file)


@app.command(rich_help_panel=DATA)
def shard(
    data: Annotated[str, location_argument("Folder of images, .npz file, or a data set's name.")],
    out_folder: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the shards.")],
    images_per_shard: Annotated[int, typer.Option(help="Images in each tar file.", min=1)] = 5000,
    seed: Annotated[int, seed_option("Of the order in which images are dealt to shards.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Pack images into WebDataset tar files, which are read faster than millions of small files."""
    from jcl.commands.run_data import open_told
    from jcl.data import write_shards

    with counting("packing") as progress:
        report = write_shards(
            open_told(data, err),
            out_folder,
            images_per_shard=images_per_shard,
            seed=seed,
            progress=progress,
        )
    for name, split in report.splits.items():
        images, shards = pluralize(split.images, "image"), pluralize(split.shards, "shard")
        say(f"{name}: {images} in {shards}, {readable_size(split.bytes)}")
        for image, reason in split.left_out.items():
            print_line(err, f"left out {image}: {reason}")
    say(f"Train on them with: jcl pretrain {typed(out_folder)}")
    write_json(report.as_dict(), json_file)
