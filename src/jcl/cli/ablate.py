"""Commands that train over and over, to see what a setting does."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from jcl.cli.app import STUDY, JsonOption, SetOption, app, err, out
from jcl.cli.printing import in_table, say, say_aside, say_strangers, tested_on, write_json
from jcl.cli.run_options import (
    BackboneOption,
    BatchSizeOption,
    CovarianceScaleOption,
    DataArgument,
    DeviceOption,
    EpochsOption,
    LrOption,
    MethodOption,
    NumKeysOption,
    OnNanOption,
    RecipeOption,
    SeedOption,
    StrictOption,
    SubsetOption,
    TemperatureOption,
    given_values,
    run_settings,
)
from jcl.console import pluralize
from jcl.errors import SettingsError

if TYPE_CHECKING:
    from jcl.commands.ablate import Ablation
    from jcl.settings.schema import Settings
    from jcl.studies.ablation import Point
    from jcl.studies.local_engine import Engine


class EngineChoice(StrEnum):
    """What carries the cells out."""

    local = "local"
    ray = "ray"


@app.command(rich_help_panel=STUDY)
def ablate(
    data: DataArgument = None,
    over: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE,...", help="A setting and its values; several --over make a grid."),
    ] = None,
    each_alone: Annotated[
        bool, typer.Option("--each-alone", help="Vary one setting at a time instead: a panel for each --over.")
    ] = False,
    seeds: Annotated[str | None, typer.Option(help="How many seeds, such as 3, or a list, such as 0,7,42.")] = None,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder (default: one in runs/, named after settings and data); shared, for ray."),
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Cells at once on each GPU, or on the CPU.")] = 1,
    engine: Annotated[EngineChoice, typer.Option(help="This machine, or a Ray cluster.")] = EngineChoice.local,
    address: Annotated[
        str | None, typer.Option(help="Of the Ray cluster; auto: the one this machine is in (default: a new one).")
    ] = None,
    gpus_per_cell: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Share of a GPU for each cell on Ray (default: one over --at-once)."),
    ] = None,
    cpus_per_cell: Annotated[
        float | None, typer.Option(min=0, help="CPUs for each cell on Ray; decoding uses as many (default: 1).")
    ] = None,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Only write down the cells, for `jcl ablate-cell` in other jobs.")
    ] = False,
    recipe: RecipeOption = None,
    method: MethodOption = None,
    backbone: BackboneOption = None,
    epochs: EpochsOption = None,
    batch_size: BatchSizeOption = None,
    lr: LrOption = None,
    num_keys: NumKeysOption = None,
    covariance_scale: CovarianceScaleOption = None,
    temperature: TemperatureOption = None,
    seed: SeedOption = None,
    device: DeviceOption = None,
    strict: StrictOption = None,
    on_nan: OnNanOption = None,
    subset: SubsetOption = None,
    settings: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Train with several values of a setting and draw accuracy against it.

    The same command again goes on where it stopped; what is done is kept.
    With --engine ray, --out must be on a file system that all nodes share:
    a cell whose node dies goes on from its checkpoint on another.

    [dim]jcl ablate cifar10 --over num_keys=1,2,3,5,7,9,11 --seeds 3[/]
    """
    values = given_values(locals(), settings)
    from jcl.commands.ablate import ablate as run_ablation
    from jcl.commands.ablate import prepare
    from jcl.commands.ablation_plan import plan_ablation
    from jcl.studies.cells import parse_axis, parse_seeds, refuse_repeated

    def build(own: Mapping[str, Any]) -> Settings:
        return run_settings(recipe, method, values | dict(own))

    axes = [parse_axis(text) for text in over or []]
    refuse_repeated(axes, values | ({"method.name": method} if method else {}), alone=each_alone)
    if seeds is not None and "," in seeds and "train.seed" in values:
        raise SettingsError("--seeds lists the seeds already; leave --seed out.")
    if engine is EngineChoice.local and any(given is not None for given in (address, gpus_per_cell, cpus_per_cell)):
        raise SettingsError("--address, --gpus-per-cell and --cpus-per-cell are for --engine ray; add that.")
    if plan_only and json_file is not None:
        raise SettingsError("--plan-only measures nothing, so there are no figures for --json; leave one of them out.")
    first = build({}).train.seed if "train.seed" in values else 0
    plan = plan_ablation(axes, parse_seeds(seeds or "1", first), build, err, alone=each_alone)
    if plan_only:
        folder = prepare(plan, out_folder)
        done = sum(folder.cell(cell).result() is not None for cell in plan.cells)
        cells = pluralize(len(plan.cells), "cell") + (f" ({done:,} done before)" if done else "")
        say(f"Planned in {folder.cells}: {cells}; each is carried out by `jcl ablate-cell CELL`.")
        return
    chosen = plan.cells[0].settings.train.device
    with _engine(engine, chosen, at_once, address, gpus_per_cell, cpus_per_cell) as carry_out:
        found = run_ablation(plan, out_folder, carry_out, console=err)
    _print(found)
    write_json(dict(found.figures), json_file)
    found.raise_if_incomplete()


@app.command("ablate-cell", rich_help_panel=STUDY)
def ablate_cell(
    folder: Annotated[Path, typer.Argument(metavar="CELL", help="A folder in cells/ of an ablation.")],
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that decode images, unless set.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Train and measure one cell of an ablation, or go on with it.

    This is what `jcl ablate` starts; job arrays of other schedulers can start it too.
    """
    from jcl.commands.ablation_cell import run_cell
    from jcl.studies.cell_process import stop_with_parent

    stop_with_parent()
    figures = run_cell(folder, workers=workers, console=err)
    say(f"linear top-1 {figures['linear_top1']:.2f} %, kNN top-1 {figures['knn_top1']:.2f} %")
    say_strangers(figures.get("unseen_class_images", 0))  # not in the folders of older versions
    write_json(figures, json_file)


@contextlib.contextmanager
def _engine(
    choice: EngineChoice, device: str, at_once: int, address: str | None, gpus: float | None, cpus: float | None
) -> Iterator[Engine]:
    from jcl.distributed.device import choose_device
    from jcl.studies.local_engine import local_engine, local_slots

    if choice is EngineChoice.local:
        choose_device(device)  # says so where there is no such device
        yield local_engine(local_slots(device, at_once))
        return
    from jcl.studies.ray_engine import joined_cluster, ray_engine, usual_share

    with joined_cluster(address) as ray:
        share = usual_share(ray, device, at_once, gpus, cpus)
        workers = None if cpus is None else max(1, math.floor(cpus))
        yield ray_engine(ray, share, say_aside, workers)


def _print(found: Ablation) -> None:
    from jcl.runs.json_object import written
    from jcl.studies.ablation import best_of, equally_good
    from jcl.studies.cells import described, short_name

    if not any(point.results or point.failed for point in found.points):
        return
    best = best_of(found.points)
    table = Table(*(in_table(short_name(name)) for name in found.names))
    for title in ("linear top-1", "kNN top-1", "validation", "seeds"):
        table.add_column(title, justify="right")
    for point in found.points:
        values = [in_table(written(point.values[name])) for name in found.names]
        failed = f" ({point.failed} failed)" if point.failed else ""
        figures = [_mean(point, figure) for figure in ("linear_top1", "knn_top1", "validation_top1")]
        table.add_row(*values, *figures, f"{len(point.results)}{failed}", style="bold" if point is best else None)
    out.print(table)
    if found.figures["cells_done"]:
        say(tested_on(found.figures))
    say_strangers(found.figures["unseen_class_images"])
    ahead = equally_good(found.points)
    if best is not None:
        say(f"Best on held-out training images (validation): {described(best.values)}.")
    elif len(ahead) > 1:
        say(f"None is best on held-out training images (validation): {len(ahead)} are equally good.")
    picture = "ablation.png shows it, " if (found.folder / "ablation.png").is_file() else ""
    say(f"Everything is in {found.folder}: {picture}ablation.csv lists all cells.")


def _mean(point: Point, figure: str) -> str:
    mean, spread = point.mean(figure), point.spread(figure)
    if mean is None:
        return ""
    return f"{mean:.2f}" if spread is None else f"{mean:.2f} ± {spread:.2f}"
