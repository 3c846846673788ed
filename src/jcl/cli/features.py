"""Commands that write features down and look things up in them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from jcl.cli.app import EVALUATE, ForceOption, JsonOption, WorkersOption, app, err, out
from jcl.cli.location import location_argument
from jcl.cli.printing import demand_free_picture, in_table, say, write_json
from jcl.cli.progress import counting
from jcl.console import pluralize, print_line
from jcl.errors import DataError, SettingsError
from jcl.paths import home_expanded

if TYPE_CHECKING:
    from jcl.commands.neighbours import Matches


@app.command(rich_help_panel=EVALUATE)
def embed(
    weights: Annotated[Path, typer.Argument(metavar="RUN_OR_WEIGHTS", help="A run folder or an exported backbone.")],
    data: Annotated[str, location_argument("Folder of images, .npz file, shards, or a data set's name.")],
    out_file: Annotated[Path, typer.Option("--out", "-o", help="File to write, .npz or .parquet.")],
    split: Annotated[str, typer.Option(help="train, test or all.")] = "all",
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 256,
    workers: WorkersOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    precision: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    force: ForceOption = False,
    json_file: JsonOption = None,
) -> None:
    """Write the features of all images to a file, with their names, labels and splits.

    [dim]jcl embed runs/photos photos/ -o photos.parquet[/]
    """
    from jcl.commands.embed import embed as write_features

    with counting("embedding") as progress:
        report = write_features(
            weights,
            data,
            out_file,
            split=split,
            batch_size=batch_size,
            workers=workers,
            device=device,
            precision=precision,
            force=force,
            progress=progress,
        )
    for image, reason in report.skipped.items():
        print_line(err, f"left out {image}: {reason}")
    skipped = f", {len(report.skipped):,} left out as unreadable" if report.skipped else ""
    counts = ", ".join(pluralize(count, f"{name} image") for name, count in report.images.items())
    say(f"Features of width {report.feature_width} ({counts}{skipped}) are in {out_file}.")
    write_json(report.as_dict(), json_file)


@app.command(rich_help_panel=EVALUATE)
def neighbours(
    index: Annotated[Path, typer.Option("--index", help="Features written by `jcl embed`.")],
    images: Annotated[
        list[str] | None, typer.Argument(metavar="IMAGE", help="Image files, or names of images in the index.")
    ] = None,
    row: Annotated[list[int] | None, typer.Option(help="A row of the index to ask about; repeatable.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Run or weights, if not where the index says they are.")] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Neighbours of each image.")] = 8,
    picture: Annotated[Path | None, typer.Option("--out", "-o", help="Also draw them into this .png file.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    force: ForceOption = False,
    json_file: JsonOption = None,
) -> None:
    """Find the images whose features are most similar to those of one's own.

    [dim]jcl neighbours mine.jpg --index photos.parquet -o neighbours.png[/]
    """
    from jcl.commands.neighbours import find_neighbours

    if picture is not None and any(_same_file(picture, image) for image in images or []):
        raise SettingsError(f"{picture} is one of the images asked about; give the picture a name of its own.")
    demand_free_picture(picture, force=force)
    matches = find_neighbours(index, images or [], row or [], weights=weights, k=k, device=device)
    _print_matches(matches)
    write_json(matches.as_dict(), json_file)
    if picture is not None:
        _draw(matches, picture)


def _same_file(picture: Path, image: str) -> bool:
    asked = home_expanded(image)
    return picture.exists() and asked.exists() and picture.samefile(asked)


def _print_matches(matches: Matches) -> None:
    columns = matches.as_dict()
    lines = list(zip(*columns.values(), strict=True))
    count = matches.found.rows.shape[1]
    shown = ("class", "split") if len(set(columns["split"])) > 1 else ("class",)
    for place, query in enumerate(matches.queries):
        say(query.name)
        table = Table("rank", "similarity", "row")
        for name in ("name", *shown):
            table.add_column(name, overflow="fold")
        for _, rank, similarity, row, *texts in lines[place * count : (place + 1) * count]:
            cells = [in_table(text or "") for text in texts[: 1 + len(shown)]]
            table.add_row(str(rank), f"{similarity:.4f}", str(row), *cells)
        out.print(table)


def _draw(matches: Matches, picture: Path) -> None:
    """The picture is an extra: where the images are gone, the table above has been printed all the same."""
    from jcl.commands.neighbours import DRAWN, draw_matches

    try:
        draw_matches(matches, picture)
    except DataError as error:
        print_line(err, f"No picture was drawn: {error}")
        return
    some = f" of the first {DRAWN} images" if len(matches.queries) > DRAWN else ""
    say(f"The neighbours{some} are drawn in {picture}.")
