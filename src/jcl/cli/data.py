"""Commands that convert backbones, and commands about images and recipes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.table import Column, Table

from jcl.cli.options import DATA, EXCHANGE, command
from jcl.cli.printing import echo, err, escape_cell, out, progress_bar, text_table
from jcl.console import format_bytes, list_some, pluralize, print_line, shell_quote

if TYPE_CHECKING:
    from jcl.data.check import DataReport, SplitReport
    from jcl.settings import commands

_SHOWN = 5  # names per problem; --json has all of them


@command("import", group=EXCHANGE)
def import_(options: commands.ImportOptions) -> None:
    """Import a backbone of another library, without executing code in its file."""
    from jcl.export import import_backbone

    loaded = import_backbone(
        options.file, options.out, backbone=options.backbone, image_size=options.image_size, force=options.force
    )
    info = loaded.info
    stem = "" if info.stem == "imagenet" else f" with the {info.stem} stem"
    echo(f"Format: {loaded.source}.")
    echo(f"Loaded: {pluralize(loaded.loaded, 'tensor')} of {info.backbone}{stem}, for images of {info.image_size} px.")
    echo(f"Unused: {loaded.unused_parts}.")
    for note in loaded.notes:
        echo(f"Note: {note}.")
    echo(f"Written to {options.out}. Use it like a run, for example: `jcl knn {shell_quote(options.out)} DATA`.")


@command("export", group=EXCHANGE)
def export(options: commands.ExportOptions) -> None:
    """Write a backbone for torchvision, timm, detectron2, mmdetection, ultralytics, ONNX or a model hub."""
    from jcl.export import export_backbone

    written = export_backbone(
        options.weights, options.target, options.out, force=options.force, backbone=options.backbone
    )
    tensors, size = pluralize(written.tensors, "tensor"), format_bytes(written.bytes)
    echo(f"{written.info.backbone}: {tensors}, {size}, written to {options.out}.")
    for hint in written.hints:
        echo(hint)


@command("recipes", group=DATA)
def recipes(options: commands.RecipesOptions) -> None:
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


@command("check", group=DATA)
def check(options: commands.CheckOptions) -> dict[str, Any]:
    """Read every image before training: sizes, classes, duplicates and unreadable files."""
    from jcl.data import open_data
    from jcl.data.check import check_data

    with progress_bar("checking") as progress:
        report = check_data(open_data(options.data), progress=progress)
    _print_report(report)
    return report.as_dict()


@command("views", group=DATA)
def views(options: commands.ViewsOptions) -> dict[str, Any]:
    """Draw the views that the network will see. Takes the settings of `jcl pretrain`.

    [dim]jcl views photos/ -o views.png --set views.recipe=aerial[/]
    """
    settings = options.settings()
    from jcl.commands.report_sample import draw_run_views

    recipe = draw_run_views(settings, options.out, err)
    out.print(text_table(["setting", "value"], [(f"views.{name}", str(value)) for name, value in recipe.items()]))
    echo(f"The views are in {options.out}.")
    return recipe


@command("shard", group=DATA)
def shard(options: commands.ShardOptions) -> dict[str, Any]:
    """Pack images into WebDataset tar files, which are faster to read than millions of small files."""
    from jcl.data import open_data, write_shards

    data = open_data(options.data, progress=partial(print_line, err))
    with progress_bar("packing") as progress:
        size, seed = options.images_per_shard, options.seed
        splits = write_shards(data, options.out_folder, images_per_shard=size, seed=seed, progress=progress)
    figures: dict[str, Any] = {"out": str(options.out_folder)}
    for name, split in splits.items():
        images, shards = pluralize(split.images, "image"), pluralize(split.shards, "shard")
        echo(f"{name}: {images} in {shards}, {format_bytes(split.bytes)}")
        for image, reason in split.left_out.items():
            print_line(err, f"Skipped {image}: {reason}.")
        values = vars(split) | {"left_out": len(split.left_out), "left_out_names": sorted(split.left_out)}
        figures |= {f"{name}_{key}": value for key, value in values.items()}
    echo(f"Train on them with: jcl pretrain {shell_quote(options.out_folder)}")
    return figures


def _print_report(report: DataReport) -> None:
    """A table of the splits, then a line for each problem."""
    from jcl.settings.schema import DataSettings

    splits = list(report.splits.values())
    rows = {
        "images": [f"{split.images:,}" for split in splits],
        "width (min, median, max)": [_pixels(split.widths) for split in splits],
        "height (min, median, max)": [_pixels(split.heights) for split in splits],
        "formats": [", ".join(f"{count:,} {kind}" for kind, count in split.kinds.items()) for split in splits],
        "classes": [_classes(split) for split in splits],
        "unreadable": [f"{len(split.unreadable):,}" for split in splits],
        "duplicates": [f"{sum(len(group) - 1 for group in split.duplicates):,}" for split in splits],
        "ms to decode one": [f"{1000 * split.seconds_per_image:.1f}" for split in splits],
    }
    lines = [(title, *values) for title, values in rows.items()]
    out.print(text_table(["", *report.splits], lines, title=f"Images of {report.data.name}"))
    for name, split in report.splits.items():
        for problem in _problems(split):
            echo(f"{name}: {problem}")
    train, limit = report.splits["train"], DataSettings().max_failed_share
    if (share := len(train.unreadable) / train.images) > limit:
        echo(f"Warning: training would stop: {share:.0%} of its images are damaged (data.max_failed_share={limit:g}).")
    for note in filter(None, (report.data.why_untested, report.data.unused)):
        echo(note)
    if report.shared:
        copies = pluralize(len(report.shared), "test image is", "test images are")
        echo(f"Warning: {copies} also among the training images: {_names(report.shared)}")


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

    problems = [f"{_names([name])} cannot be read: {why}" for name, why in list(split.unreadable.items())[:_SHOWN]]
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
