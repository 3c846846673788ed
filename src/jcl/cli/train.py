"""Commands that train a backbone without labels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from jcl.cli.app import TRAIN, JsonOption, SetOption, app, err, out, rank
from jcl.cli.printing import write_json
from jcl.errors import SettingsError

if TYPE_CHECKING:
    from jcl.pretraining import Run
    from jcl.train.profile import StepProfile


DevicesOption = Annotated[
    int, typer.Option(min=1, help="Train on so many GPUs of this machine (or processes, on a CPU) together.")
]


@app.command(rich_help_panel=TRAIN)
def pretrain(
    data: Annotated[
        str | None,
        typer.Argument(
            help="Folder of images, .npz file, shards such as 's/{0000..0127}.tar', or demo, cifar10, stl10."
        ),
    ] = None,
    recipe: Annotated[str | None, typer.Option(help="Recipe by name (see `jcl recipes`) or a YAML file.")] = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of the run (default: a new one in runs/).")
    ] = None,
    method: Annotated[str | None, typer.Option(help="jcl, moco-v2, moco-v1, multi-key or multi-key-backprop.")] = None,
    backbone: Annotated[str | None, typer.Option(help="torchvision or timm name.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per step.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    num_keys: Annotated[int | None, typer.Option(help="Key views per image, M'.")] = None,
    covariance_scale: Annotated[float | None, typer.Option(help="Weight of the keys' covariance.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Softmax temperature.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same numbers.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = None,
    strict: Annotated[bool | None, typer.Option("--strict", help="Stop at the first unreadable image.")] = None,
    on_nan: Annotated[str | None, typer.Option(help="What a loss that is not finite does: stop or skip.")] = None,
    subset: Annotated[str | None, typer.Option(help="imagenet100, or a file with one class folder a line.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Only show where a step's time goes.")] = False,
    devices: DevicesOption = 1,
    settings: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Pre-train a backbone on images without labels.

    [dim]jcl pretrain photos/ --out runs/photos[/]
    """
    if devices > 1:
        from jcl.launching import launch

        launch(sys.argv[1:], devices)
        return
    from jcl.pretraining import pretrain as run_pretraining
    from jcl.pretraining import profile as profile_pretraining
    from jcl.recipes import build_settings

    values = {
        "data.location": data,
        "model.backbone": backbone,
        "train.epochs": epochs,
        "train.batch_size": batch_size,
        "train.lr": lr,
        "method.num_keys": num_keys,
        "method.covariance_scale": covariance_scale,
        "method.temperature": temperature,
        "train.seed": seed,
        "train.device": device,
        "train.on_nan": on_nan,
        "data.strict": strict,
        "data.subset": subset,
    }
    values = {name: value for name, value in values.items() if value is not None} | _assignments(settings or [])
    chosen = build_settings(recipe or _recipe_for(data), method=method, values=values)
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
        from jcl.launching import launch

        launch(sys.argv[1:], devices)
        return
    from jcl.pretraining import resume as resume_pretraining

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
    """See it work in three minutes on a CPU: MoCo v2 and JCL on pictures drawn by code."""
    from jcl.demo import run_demo

    figures = run_demo(out_folder, seed, out, err)
    write_json(figures, json_file)


def _recipe_for(data: str | None) -> str:
    """The recipe of a data set known by name is the one called after it; other images have the folder recipe."""
    from jcl.recipes import recipe_names

    return data if data in recipe_names() else "folder"


def _assignments(texts: list[str]) -> dict[str, Any]:
    """`section.name=value` as given to --set; values are read as YAML, so that numbers, lists and true are that."""
    import yaml

    values = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise SettingsError(f"--set takes SECTION.NAME=VALUE, but got {text!r}.")
        try:
            values[name.strip()] = yaml.safe_load(value)
        except (yaml.YAMLError, RecursionError):
            raise SettingsError(f"--set cannot make sense of the value in {text!r}; lists read [1, 2, 3].") from None
    return values


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
    table = Table("figure", "value", title=escape(f"{summary['method']} on {summary['data']}"))
    for name, value in summary.items():
        table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else escape(str(value)))
    out.print(table)
    page = folder / "report.html"
    look = f"look at {page}" if page.exists() else f"curves and example views in {folder / 'figures'}"
    out.print(
        f"Everything is in {folder} ({look}).",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    write_json(summary, json_file)
