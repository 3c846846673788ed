"""Commands that convert backbones, write features to a file and search it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jcl.cli.app import EVALUATE, EXCHANGE, err, out
from jcl.cli.options import command
from jcl.cli.printing import check_output, echo, progress_bar, text_table
from jcl.console import format_bytes, pluralize, print_line, shell_quote
from jcl.errors import DataError, SettingsError
from jcl.paths import expand_user

if TYPE_CHECKING:
    from jcl.commands.neighbours import Matches
    from jcl.settings.commands import EmbedOptions, ExportOptions, ImportOptions, NeighboursOptions


@command("embed", "commands.EmbedOptions", group=EVALUATE)
def embed(options: EmbedOptions) -> dict[str, Any]:
    """Write the features of all images to a file, with their names, labels and splits.

    [dim]jcl embed runs/photos photos/ -o photos.parquet[/]
    """
    from jcl.commands.embed import embed as write_features

    with progress_bar("embedding") as progress:
        report = write_features(options, progress=progress)
    for image, reason in report.skipped.items():
        print_line(err, f"skipped {image}: {reason}")
    skipped = f", {len(report.skipped):,} unreadable skipped" if report.skipped else ""
    counts = ", ".join(pluralize(count, f"{name} image") for name, count in report.images.items())
    echo(f"Features of width {report.feature_width} ({counts}{skipped}) are in {options.out}.")
    return report.as_dict()


@command("neighbours", "commands.NeighboursOptions", group=EVALUATE)
def neighbours(options: NeighboursOptions) -> dict[str, Any]:
    """Find the images with the most similar features.

    [dim]jcl neighbours mine.jpg --index photos.parquet -o neighbours.png[/]
    """
    from jcl.commands.neighbours import find_neighbours

    picture = options.out
    queries = map(expand_user, options.images)
    if picture is not None and picture.exists() and any(each.exists() and picture.samefile(each) for each in queries):
        raise SettingsError(f"{picture} is one of the query images; choose another name for the picture.")
    check_output(picture, ".png", force=options.force)
    matches = find_neighbours(options)
    columns = matches.as_dict()
    _print_matches(matches, columns)
    if picture is not None:
        _draw(matches, picture)
    return columns


def _print_matches(matches: Matches, columns: dict[str, list[Any]]) -> None:
    lines = list(zip(*columns.values(), strict=True))
    count = matches.found.rows.shape[1]
    shown = ("name", "class", "split") if len(set(columns["split"])) > 1 else ("name", "class")
    for place, query in enumerate(matches.queries):
        echo(query.name)
        rows = [
            [str(rank), f"{similarity:.4f}", str(row), *(text or "" for text in texts[: len(shown)])]
            for _, rank, similarity, row, *texts in lines[place * count : (place + 1) * count]
        ]
        out.print(text_table(["rank", "similarity", "row", *shown], rows))


def _draw(matches: Matches, picture: Path) -> None:
    """Without the images there is no picture, but the table has been printed."""
    from jcl.commands.neighbours import DRAWN, draw_matches

    try:
        draw_matches(matches, picture)
    except DataError as error:
        print_line(err, f"No picture was drawn: {error}")
        return
    some = f" of the first {DRAWN} images" if len(matches.queries) > DRAWN else ""
    echo(f"The neighbors{some} are drawn in {picture}.")


@command("import", "commands.ImportOptions", group=EXCHANGE)
def import_(options: ImportOptions) -> None:
    """Import a backbone that another program trained, without executing anything in its file."""
    from jcl.export import import_backbone

    loaded = import_backbone(
        options.file, options.out, backbone=options.backbone, image_size=options.image_size, force=options.force
    )
    info = loaded.info
    stem = "" if info.stem == "imagenet" else f" with the {info.stem} stem"
    echo(f"Format: {loaded.source}.")
    echo(f"Loaded: {pluralize(loaded.loaded, 'tensor')} of {info.backbone}{stem}, for images of {info.image_size} px.")
    parts = ", ".join(f"{part} ({count:,})" for part, count in loaded.unused.items())
    echo(f"Unused: {parts or 'nothing'}.")
    for note in loaded.notes:
        echo(f"Note: {note}.")
    echo(f"Written to {options.out}. Use it like a run, for example: `jcl knn {shell_quote(options.out)} DATA`.")


@command("export", "commands.ExportOptions", group=EXCHANGE)
def export(options: ExportOptions) -> None:
    """Write a backbone for torchvision, timm, detectron2, mmdetection, ultralytics, ONNX or a model hub."""
    from jcl.export import export_backbone

    written = export_backbone(
        options.weights, options.target, options.out, force=options.force, backbone=options.backbone
    )
    tensors, size = pluralize(written.tensors, "tensor"), format_bytes(written.bytes)
    echo(f"{written.info.backbone}: {tensors}, {size}, written to {options.out}.")
    for hint in written.hints:
        echo(hint)
