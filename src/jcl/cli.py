"""The command `jcl`: thin, one command, one call.

Nothing heavy is imported at the top: `jcl --help` must answer at once, so each command imports what it calls.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import jcl
from jcl.errors import JclError, SettingsError

if TYPE_CHECKING:
    from jcl.data.check import DataReport
    from jcl.train.profile import StepProfile

TRAIN, EVALUATE, DATA = "Train", "Evaluate", "Data and recipes"

app = typer.Typer(
    name="jcl",
    help="Joint Contrastive Learning: turn a folder of images without labels into a pre-trained backbone.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console()
err = Console(stderr=True)


def main() -> None:
    """Run the command line; an error of the user's becomes its sentence and an exit code, not a trace."""
    try:
        app()
    except JclError as error:
        err.print(f"[bold red]Error:[/] {_escaped(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        err.print("Interrupted.", highlight=False)
        sys.exit(130)


def _show_version(asked: bool) -> None:
    if asked:
        out.print(f"jcl {jcl.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Joint Contrastive Learning: turn a folder of images without labels into a pre-trained backbone."""


JsonOption = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file as JSON.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.NAME=VALUE", help="Change any setting; `jcl recipes --settings` lists them."
    ),
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
        Path | None, typer.Option("--out", help="Folder of the run [default: a new one in runs/].")
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
    subset: Annotated[str | None, typer.Option(help="imagenet100, or a file with one class folder a line.")] = None,
    profile: Annotated[bool, typer.Option("--profile", help="Only show where a step's time goes.")] = False,
    settings: SetOption = None,
    json_file: JsonOption = None,
) -> None:
    """Pre-train a backbone on images without labels.

    [dim]jcl pretrain photos/ --out runs/photos[/]
    """
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
        "data.strict": strict,
        "data.subset": subset,
    }
    values = {name: value for name, value in values.items() if value is not None} | _assignments(settings or [])
    chosen = build_settings(recipe or _recipe_for(data), method=method, values=values)
    if profile:
        _print_profile(profile_pretraining(chosen, console=err), json_file)
        return
    run = run_pretraining(chosen, out_folder, console=err)
    _report_run(run.path, run.summary, json_file)


@app.command(rich_help_panel=TRAIN)
def resume(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of an unfinished run.")],
    json_file: JsonOption = None,
) -> None:
    """Continue a stopped run exactly where it was."""
    from jcl.pretraining import resume as resume_pretraining

    run = resume_pretraining(run_folder, console=err)
    _report_run(run.path, run.summary, json_file)


@app.command(rich_help_panel=TRAIN)
def demo(
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Where to write [default: a new folder in runs/].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same numbers.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """See it work in three minutes on a CPU: MoCo v2 and JCL on pictures drawn by code."""
    from jcl.demo import run_demo

    figures = run_demo(out_folder, seed, out, err)
    _write_json(figures, json_file)


@app.command(rich_help_panel=EVALUATE)
def knn(
    weights: Annotated[Path, typer.Argument(metavar="RUN_OR_WEIGHTS", help="A run folder or an exported backbone.")],
    data: Annotated[str | None, typer.Argument(help="Labelled data [default: what the run was trained on].")] = None,
    k: Annotated[list[int] | None, typer.Option("-k", help="Neighbours that vote; may be given several times.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Of the votes; may be given several times.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 256,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode images.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    json_file: JsonOption = None,
) -> None:
    """Measure frozen features by weighted k-nearest neighbours."""
    from jcl.measure import measure_knn

    results = measure_knn(
        weights,
        data,
        k=k or [200],
        temperature=temperature or [0.1],
        batch_size=batch_size,
        workers=workers,
        device=device,
    )
    table = Table("k", "temperature", "top-1", "top-5")
    for result in results:
        table.add_row(str(result.k), f"{result.temperature:g}", f"{result.top1:.2f} %", f"{result.top5:.2f} %")
    out.print(table)
    best = results[0]
    out.print(f"{best.queries:,} queries against a bank of {best.bank:,} images.", highlight=False)
    _write_json(_knn_figures(results), json_file)


@app.command(rich_help_panel=DATA)
def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this recipe's values.")] = None,
    settings: Annotated[bool, typer.Option("--settings", help="List every setting with its default.")] = False,
) -> None:
    """List the recipes, show one, or list every setting."""
    import yaml

    from jcl.recipes import recipe_names, recipe_summary, recipe_values
    from jcl.settings import describe_settings

    if settings:
        table = Table("setting", "default", "meaning")
        for row in describe_settings():
            table.add_row(*row)
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
    data: Annotated[str, typer.Argument(help="Folder of images, .npz file, or a data set's name.")],
    json_file: JsonOption = None,
) -> None:
    """Look at every image before training: sizes, classes, duplicates, and what cannot be read."""
    from jcl.data import open_data
    from jcl.data.check import check_data

    report = check_data(open_data(data))
    _print_report(report)
    _write_json(report.as_dict(), json_file)


@app.command(rich_help_panel=DATA)
def shard(
    data: Annotated[str, typer.Argument(help="Folder of images, .npz file, or a data set's name.")],
    out_folder: Annotated[Path, typer.Argument(metavar="OUT", help="New folder for the shards.")],
    images_per_shard: Annotated[int, typer.Option(help="Images in each tar file.", min=1)] = 5000,
    seed: Annotated[int, typer.Option(help="Of the order in which images are dealt to shards.")] = 0,
    json_file: JsonOption = None,
) -> None:
    """Pack images into WebDataset tar files, which are read faster than millions of small files."""
    from rich.progress import Progress

    from jcl.data import open_data, write_shards

    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("packing", total=None)
        report = write_shards(
            open_data(data),
            out_folder,
            images_per_shard=images_per_shard,
            seed=seed,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    for name, split in report.splits.items():
        _say(f"{name}: {split.images:,} images in {split.shards} shards, {split.bytes / 2**20:,.1f} MiB")
        for image, reason in split.left_out.items():
            err.print(f"left out {image}: {reason}", highlight=False, markup=False, soft_wrap=True)
    _say(f"Train on them with: jcl pretrain {out_folder}")
    _write_json(report.as_dict(), json_file)


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
    _write_json(figures, json_file)


def _report_run(folder: Path, summary: dict[str, Any], json_file: Path | None) -> None:
    table = Table("figure", "value", title=_escaped(f"{summary['method']} on {summary['data']}"))
    for name, value in summary.items():
        table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else _escaped(str(value)))
    out.print(table)
    out.print(
        f"Everything is in {folder} (curves and example views in {folder / 'figures'}).",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    _write_json(summary, json_file)


def _knn_figures(results: list[Any]) -> dict[str, float]:
    """The first result under the plain names, every result under names with its k and temperature."""
    figures: dict[str, float] = {"knn_top1": results[0].top1, "knn_top5": results[0].top5}
    for result in results:
        figures[f"knn_top1_k{result.k}_t{result.temperature:g}"] = result.top1
    return figures


def _print_report(report: DataReport) -> None:
    table = Table("figure", "value", title="What is in the data")
    for name, value in report.as_dict().items():
        table.add_row(_escaped(name), _escaped(str(value)))
    out.print(table)


def _write_json(figures: dict[str, Any], path: Path | None) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise JclError(f"the figures could not be written to {path}: {error.strerror}.") from None


def _say(text: str) -> None:
    out.print(text, highlight=False, markup=False, soft_wrap=True)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
