"""Commands that repeat the paper's studies."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from jcl.cli.app import STUDY, ForceOption, JsonOption, WorkersOption, app, seed_option, typed_options
from jcl.cli.location import location_argument, tell_passed_over
from jcl.cli.printing import demand_free_picture, say, write_json
from jcl.cli.progress import counting
from jcl.console import pluralize
from jcl.errors import SettingsError

PictureOption = Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Also draw it as a .png file.")]

# Options of `jcl bound` that one of its two kinds of keys has no use for.
_OF_GAUSSIAN_KEYS = ("dimensions", "spreads", "temperatures", "negatives", "draws")
_OF_A_RUN = ("keys", "batch_size", "workers", "device", "precision")


class FeatureKind(StrEnum):
    """Which features are compared."""

    backbone = "backbone"
    projection = "projection"


@app.command(rich_help_panel=STUDY)
def distribution(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN", help="Runs or weights files, the first compared with the others; the last may be the data."
        ),
    ],
    of: Annotated[FeatureKind, typer.Option("--of", help="The features of the backbone or of its projection head.")] = (
        FeatureKind.backbone
    ),
    images: Annotated[int, typer.Option(min=1, help="Images to look at, drawn by the seed.")] = 32_768,
    views_per_image: Annotated[int, typer.Option(min=1, help="Views of each image.")] = 32,
    views: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="moco-v2, moco-v1 or small (default: the first run's own).")
    ] = None,
    split: Annotated[str, typer.Option(help="train or test.")] = "train",
    picture: PictureOption = None,
    force: ForceOption = False,
    values: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write each image's figures, as .csv or .npz.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Views per forward pass.")] = 512,
    workers: WorkersOption = None,
    seed: Annotated[int, seed_option("Same seed, same images and views.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    precision: Annotated[str, typer.Option(help="Of the networks: auto, float32 or bfloat16.")] = "auto",
    json_file: JsonOption = None,
) -> None:
    """Compare how alike runs make the views of an image (Figure 3).

    [dim]jcl distribution runs/jcl runs/moco-v2 -o figure3.png[/]
    [dim]jcl distribution runs/jcl weights.safetensors photos/[/]
    """
    from jcl.cli.study_tables import print_distribution
    from jcl.commands.distribution import compare_views, split_arguments
    from jcl.evaluate.spread_file import check_values_file, write_values
    from jcl.runs.atomic import refuse_overwrite

    demand_free_picture(picture, force=force)
    if views is not None and views.isdecimal():
        raise SettingsError(f"--views names a kind of views; for {views} of each image say --views-per-image {views}.")
    if values is not None:
        check_values_file(values)
        refuse_overwrite(values, force=force)
    paths, location = split_arguments(arguments)
    tell_passed_over(location)
    with counting("views") as progress:
        report = compare_views(
            paths,
            location,
            of=of.value,
            views=views,
            views_per_image=views_per_image,
            images=images,
            split=split,
            batch_size=batch_size,
            workers=workers,
            seed=seed,
            device=device,
            precision=precision,
            progress=progress,
        )
    print_distribution(report)
    write_json(report.figures(), json_file)
    if values is not None:
        names = [report.source.name_of(row) for row in report.rows.tolist()]
        write_values(values, names, dict(zip(report.keys(), report.spreads, strict=True)))
        say(f"The figures of each image are in {values}.")
    if picture is not None:
        from jcl.report.histograms import plot_spreads

        plot_spreads(dict(zip(report.names, report.spreads, strict=True)), picture, subtitle=report.described())
        say(f"The histograms are drawn in {picture}.")


@app.command(rich_help_panel=STUDY)
def bound(
    context: typer.Context,
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run or one of its checkpoints (default: Gaussian keys).")
    ] = None,
    data: Annotated[str | None, location_argument("Images (default: what the run was trained on).")] = None,
    scales: Annotated[str, typer.Option(metavar="LIST", help="Covariance scales at which Eq. 8 is taken.")] = "1,4",
    dimensions: Annotated[str, typer.Option(metavar="LIST", help="Of Gaussian keys.")] = "32,128",
    spreads: Annotated[str, typer.Option(metavar="LIST", help="Of Gaussian keys, 0 to 1.")] = "0.1,0.2,0.4,0.6",
    temperatures: Annotated[
        str, typer.Option(metavar="LIST", help="For Gaussian keys; a run has its own.")
    ] = "0.1,0.2",
    negatives: Annotated[int, typer.Option(min=1, help="For Gaussian keys; a run has its queue.")] = 4096,
    draws: Annotated[int, typer.Option(min=100, help="Gaussian keys drawn for each image.")] = 16_384,
    images: Annotated[
        int | None, typer.Option(min=1, help="Images (default: 256 of a run, 16 with Gaussian keys).")
    ] = (None),
    keys: Annotated[int, typer.Option(min=1, help="Views of each image of a run that serve as keys.")] = 256,
    picture: PictureOption = None,
    force: ForceOption = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Views per forward pass.")] = 512,
    workers: WorkersOption = None,
    seed: Annotated[int, seed_option()] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    precision: Annotated[str, typer.Option(help="Of the networks: auto, float32 or bfloat16.")] = "auto",
    json_file: JsonOption = None,
) -> None:
    """Measure how tight the bound of Eq. 8 is and how Gaussian keys are.

    [dim]jcl bound -o gaussian.png[/]
    [dim]jcl bound runs/photos -o bound.png[/]
    """
    demand_free_picture(picture, force=force)
    _refuse_without_effect(typed_options(context), of_run=run is not None)
    wanted = numbers_in(scales, "--scales")
    if min(wanted) < 0:
        raise SettingsError(f"a covariance scale must not be negative, but --scales is {scales}.")
    if run is None:
        cases = (dimensions, spreads, temperatures)
        _gaussian_bound(cases, wanted, draws, images or 16, negatives, seed, picture, json_file)
    else:
        from jcl.cli.study_tables import print_run_bound
        from jcl.commands.bound import bound_along_training

        with counting("checkpoints") as progress:
            bounds = bound_along_training(
                run,
                data,
                scales=wanted,
                images=images or 256,
                keys=keys,
                batch_size=batch_size,
                workers=workers,
                seed=seed,
                device=device,
                precision=precision,
                progress=progress,
            )
        print_run_bound(bounds)
        write_json(bounds.figures(), json_file)
        if picture is not None:
            from jcl.report.bound_plots import plot_training_bound

            plot_training_bound(bounds, picture, name=str(run))
    if picture is not None:
        say(f"The losses are drawn in {picture}.")


def _refuse_without_effect(typed: set[str], *, of_run: bool) -> None:
    """Raise where an option is for the keys of a run and there is none, or for Gaussian keys and there is a run."""
    idle = next((name for name in (_OF_GAUSSIAN_KEYS if of_run else _OF_A_RUN) if name in typed), None)
    if idle is not None:
        whose = "Gaussian keys; leave it or the run out" if of_run else "the keys of a run; name one, or leave it out"
        raise SettingsError(f"--{idle.replace('_', '-')} is for {whose}.")


def _gaussian_bound(
    lists: tuple[str, str, str],
    scales: list[float],
    draws: int,
    images: int,
    negatives: int,
    seed: int,
    picture: Path | None,
    json_file: Path | None,
) -> None:
    from jcl.cli.study_tables import print_gaussian_bound
    from jcl.studies.bound import gaussian_figures, gaussian_rows, gaussian_sweep

    dimensions, spreads, temperatures = lists
    cases = gaussian_sweep(
        whole_numbers_in(dimensions, "--dimensions"),
        numbers_in(spreads, "--spreads"),
        numbers_in(temperatures, "--temperatures"),
    )
    results = list(gaussian_rows(cases, scales, draws=draws, images=images, negatives=negatives, seed=seed))
    print_gaussian_bound(results, draws, images)
    write_json(gaussian_figures(results), json_file)
    if picture is not None:
        from jcl.report.bound_plots import plot_gaussian_bound

        subtitle = f"{draws:,} keys per image, {pluralize(images, 'image')}, {negatives:,} negatives"
        plot_gaussian_bound(results, picture, subtitle=subtitle)


@app.command(rich_help_panel=STUDY)
def cost(
    keys: Annotated[str, typer.Option(metavar="LIST", help="Numbers of keys M.")] = "1,2,4,8,16,32",
    recipe: Annotated[
        str | None, typer.Option(help="Recipe (default: the paper's on a GPU, a small network on a CPU).")
    ] = None,
    backbone: Annotated[str | None, typer.Option(help="Network, such as resnet18.")] = None,
    image_size: Annotated[int | None, typer.Option(min=1, help="Side of the views in pixels.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=2, help="Images per step.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps for each figure.")] = 5,
    picture: PictureOption = None,
    force: ForceOption = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    json_file: JsonOption = None,
) -> None:
    """Measure memory and time of a step over the number of keys.

    [dim]jcl cost --keys 1,2,4,8 -o cost.png[/]
    """
    from jcl.cli.study_tables import print_cost
    from jcl.commands.cost import TITLES, measure_cost

    demand_free_picture(picture, force=force)
    counts = whole_numbers_in(keys, "--keys")
    own = {"model.backbone": backbone, "views.image_size": image_size, "train.batch_size": batch_size}
    values = {name: value for name, value in own.items() if value is not None}
    with counting("methods and keys") as progress:
        report = measure_cost(
            counts,
            recipe=recipe,
            values=values,
            repeats=repeats,
            device=device,
            progress=progress,
        )
    print_cost(report)
    say(f"{report.finding()}.")
    write_json(report.figures(), json_file)
    if picture is not None:
        from jcl.report.cost_plots import plot_cost

        plot_cost(report.cells, TITLES, picture, of=report.described(), finding=report.finding())
        say(f"Both are drawn in {picture}.")


def numbers_in(text: str, option: str) -> list[float]:
    """The numbers of a list such as 0.1,0.2."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(math.isfinite(number) for number in numbers):
        raise SettingsError(f"{option} takes numbers with commas between them, such as 1,2,4, but got {text!r}.")
    return list(dict.fromkeys(numbers))


def whole_numbers_in(text: str, option: str) -> list[int]:
    """The whole numbers of a list such as 1,2,4."""
    numbers = numbers_in(text, option)
    if not all(number.is_integer() for number in numbers):
        raise SettingsError(f"{option} takes whole numbers, but got {text!r}.")
    return [int(number) for number in numbers]
