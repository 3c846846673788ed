"""Commands about images and recipes, before any training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from jcl.cli.app import DATA, err, out
from jcl.cli.options import command
from jcl.cli.printing import check_output, echo, escape_cell, progress_bar, text_table
from jcl.console import format_bytes, list_some, pluralize, print_line, shell_quote

if TYPE_CHECKING:
    from jcl.data.check import DataReport, SplitReport
    from jcl.settings.commands import CheckOptions, RecipesOptions, ShardOptions, ViewsOptions

_SHOWN = 5  # names per problem; --json has all of them


@command("recipes", "commands.RecipesOptions", group=DATA)
def recipes(options: RecipesOptions) -> None:
    """List the recipes, show one, or list every setting."""
    import yaml

    from jcl.settings.recipes import build_settings, describe_settings, recipe_names, recipe_summary, recipe_values

    name = options.name
    if options.settings:
        table = Table(
            Column("setting", no_wrap=True),  # the whole name is what --set takes
            Column("default" if name is None else "value", max_width=10, overflow="fold"),
            Column("meaning", overflow="fold"),
        )
        for row in describe_settings(None if name is None else build_settings(name)):
            table.add_row(*map(escape_cell, row))
        out.print(table)
    elif name is not None:
        values = yaml.safe_dump(recipe_values(name), sort_keys=False)
        out.print(values, highlight=False, markup=False, soft_wrap=True, end="")
    else:
        out.print(text_table(["recipe", "what it is"], [(each, recipe_summary(each)) for each in recipe_names()]))


@command("check", "commands.CheckOptions", group=DATA)
def check(options: CheckOptions) -> dict[str, Any]:
    """Read every image before training: sizes, classes, duplicates and unreadable files."""
    from jcl.data import open_data
    from jcl.data.check import check_data

    with progress_bar("checking") as progress:
        report = check_data(open_data(options.data), progress=progress)
    _print_report(report)
    return report.as_dict()


@command("views", "commands.ViewsOptions", group=DATA)
def views(options: ViewsOptions) -> dict[str, Any]:
    """Draw the views that the network will see. Takes the settings of `jcl pretrain`.

    [dim]jcl views photos/ -o views.png --set views.recipe=aerial[/]
    """
    settings = options.settings()
    check_output(options.out, ".png", force=options.force)
    from jcl.commands.report_sample import draw_run_views

    recipe = draw_run_views(settings, options.out, err)
    out.print(text_table(["setting", "value"], [(f"views.{name}", str(value)) for name, value in recipe.items()]))
    echo(f"The views are in {options.out}.")
    return recipe


@command("shard", "commands.ShardOptions", group=DATA)
def shard(options: ShardOptions) -> dict[str, Any]:
    """Pack images into WebDataset tar files, which are faster to read than millions of small files."""
    from jcl.commands.run_data import open_with_warnings
    from jcl.data import write_shards

    data = open_with_warnings(options.data, err)
    with progress_bar("packing") as progress:
        size, seed = options.images_per_shard, options.seed
        report = write_shards(data, options.out_folder, images_per_shard=size, seed=seed, progress=progress)
    for name, split in report.splits.items():
        images, shards = pluralize(split.images, "image"), pluralize(split.shards, "shard")
        echo(f"{name}: {images} in {shards}, {format_bytes(split.bytes)}")
        for image, reason in split.left_out.items():
            print_line(err, f"left out {image}: {reason}")
    echo(f"Train on them with: jcl pretrain {shell_quote(options.out_folder)}")
    return report.as_dict()


def _print_report(report: DataReport) -> None:
    """A table of the splits, then a line for each problem."""
    splits = list(report.splits.values())
    rows = {
        "images": [f"{split.images:,}" for split in splits],
        "width (min, median, max)": [_pixels(split.widths) for split in splits],
        "height (min, median, max)": [_pixels(split.heights) for split in splits],
        "formats": [", ".join(f"{kind} {count:,}" for kind, count in split.kinds.items()) for split in splits],
        "classes": [_classes(split) for split in splits],
        "unreadable": [f"{len(split.unreadable):,}" for split in splits],
        "duplicates": [f"{sum(len(group) - 1 for group in split.duplicates):,}" for split in splits],
        "ms to decode one": [f"{1000 * split.seconds_per_image:.1f}" for split in splits],
    }
    lines = [(title, *values) for title, values in rows.items()]
    out.print(text_table(["", *report.splits], lines, title=f"Images of {report.name}"))
    for name, split in report.splits.items():
        for problem in _problems(split):
            echo(f"{name}: {problem}")
    _warn_of_unreadable(report.splits["train"])
    for note in filter(None, (report.why_untested, report.unused)):
        echo(note)
    if report.shared:
        copies = pluralize(len(report.shared), "test image is", "test images are")
        echo(f"Warning: {copies} also among the training images: {_names(report.shared)}")


def _warn_of_unreadable(split: SplitReport) -> None:
    """Print if so many training images are unreadable that training would stop."""
    from jcl.settings.schema import DataSettings

    limit, share = DataSettings().max_failed_share, len(split.unreadable) / split.images
    if share > limit:
        echo(
            f"Warning: training would stop, because {share:.0%} of its images cannot be read, more than "
            f"data.max_failed_share={limit:g}; remove or replace them."
        )


def _pixels(values: tuple[int, int, int]) -> str:
    return ", ".join(f"{value:,}" for value in values) + " px" if any(values) else "none is readable"


def _classes(split: SplitReport) -> str:
    if not split.class_counts:
        return "no labels"
    fewest, most = min(split.class_counts.values()), max(split.class_counts.values())
    each = f"{pluralize(most, 'image')} each" if fewest == most else f"{fewest:,} to {most:,} images"
    return f"{len(split.class_counts):,}, of {each}"


def _problems(split: SplitReport) -> list[str]:
    from jcl.data.check import SMALL_SIDE

    problems = [
        f"{_names([name])} cannot be read: {reason}" for name, reason in list(split.unreadable.items())[:_SHOWN]
    ]
    if len(split.unreadable) > _SHOWN:
        problems.append(f"{len(split.unreadable) - _SHOWN:,} more cannot be read; --json FILE lists them all.")
    problems += split.warnings
    if split.small:
        small = pluralize(len(split.small), "image")
        problems.append(f"{small} with a side below {SMALL_SIDE} px: {_names(split.small)}")
    problems += [f"identical images: {_names(group)}" for group in split.duplicates[:_SHOWN]]
    if len(split.duplicates) > _SHOWN:
        problems.append(f"{pluralize(len(split.duplicates) - _SHOWN, 'more group')} of identical images.")
    return problems


def _names(names: Sequence[str]) -> str:
    return list_some((name.replace("\n", "\\n") for name in names), _SHOWN)
