"""Commands that train a backbone without labels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from jcl.cli.app import TRAIN, JsonOption, SetOption, app, err, out, rank
from jcl.cli.printing import say, write_json
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
from jcl.cli.run_table import run_table
from jcl.console import typed

if TYPE_CHECKING:
    from jcl.commands.run import Run
    from jcl.train.profile import StepProfile


DevicesOption = Annotated[
    int, typer.Option(min=1, help="Train on so many GPUs of this machine (or processes, on a CPU) together.")
]


@app.command(rich_help_panel=TRAIN)
def pretrain(
    data: DataArgument = None,
    recipe: RecipeOption = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of the run (default: a new one in runs/).")
    ] = None,
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
    profile: Annotated[bool, typer.Option("--profile", help="Only show where a step's time goes.")] = False,
    devices: DevicesOption = 1,
    settings: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Pre-train a backbone on images without labels.

    [dim]jcl pretrain photos/ --out runs/photos[/]
    """
    values = given_values(locals(), settings)
    if devices > 1:
        from jcl.distributed.launch import launch

        launch(sys.argv[1:], devices)
        return
    from jcl.commands.pretrain import pretrain as run_pretraining
    from jcl.commands.pretrain import profile as profile_pretraining

    chosen = run_settings(recipe, method, values)
    if profile:
        _print_profile(profile_pretraining(chosen, console=err), json_file)
        return
    run = run_pretraining(chosen, out_folder, console=err)
    _report_run(run, json_file)


@app.command(rich_help_panel=TRAIN)
def resume(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of an unfinished run.")],
    devices: DevicesOption = 1,
    json_file: JsonOption = None,
) -> None:
    """Continue a stopped run exactly where it was."""
    if devices > 1:
        from jcl.distributed.launch import launch

        launch(sys.argv[1:], devices)
        return
    from jcl.commands.pretrain import resume as resume_pretraining

    run = resume_pretraining(run_folder, console=err)
    _report_run(run, json_file)


@app.command(rich_help_panel=TRAIN)
def demo(
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Where to write (default: a new folder in runs/).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same numbers.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """See it work in two minutes on a CPU: MoCo v2 and JCL on pictures drawn by code."""
    from jcl.commands.demo import run_demo

    figures = run_demo(out_folder, seed, out, err)
    write_json(figures, json_file)


def _print_profile(profile: StepProfile, json_file: Path | None) -> None:
    table = Table("part of a step", "ms", "share", title=f"{profile.images_per_second:,.0f} images/s")
    for name, taken in [*profile.parts.items(), ("the rest", profile.rest), ("whole step", profile.step)]:
        table.add_row(name, f"{taken:.2f}", f"{taken / profile.step:.0%}")
    out.print(table)
    figures = {f"{name.replace(' ', '_')}_ms": taken for name, taken in profile.parts.items()}
    figures |= {"step_ms": profile.step, "images_per_second": profile.images_per_second}
    write_json(figures, json_file)


def _report_run(run: Run, json_file: Path | None) -> None:
    if rank > 0:
        return  # the first one reports, and only it is sure to see the folder
    folder, summary = run.path, run.summary
    out.print(run_table(summary))
    page = folder / "report.html"
    look = f"look at {page}" if page.exists() else f"make a page of it with `jcl report {typed(folder)}`"
    say(f"Everything is in {folder} ({look}).")
    write_json(summary, json_file)
