"""Commands that measure what features are worth."""

from __future__ import annotations

import contextlib
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from jcl.cli.app import EVALUATE, JsonOption, WorkersOption, app, err, out, seed_option, typed_options
from jcl.cli.location import location_argument
from jcl.cli.printing import in_table, say, say_strangers, tested_on, write_json
from jcl.cli.progress import counting
from jcl.console import pluralize
from jcl.errors import SettingsError

if TYPE_CHECKING:
    from jcl.commands.linear import LinearReport


@app.command(rich_help_panel=EVALUATE)
def knn(
    weights: Annotated[Path, typer.Argument(metavar="RUN_OR_WEIGHTS", help="A run folder or an exported backbone.")],
    data: Annotated[str | None, location_argument("Labelled data (default: what the run was trained on).")] = None,
    k: Annotated[
        list[int] | None,
        typer.Option("-k", help="Neighbours that vote; repeatable (default: 200, fewer for few images)."),
    ] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Of the votes; may be given several times.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 256,
    workers: WorkersOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    json_file: JsonOption = None,
) -> None:
    """Measure frozen features by weighted k-nearest neighbours."""
    from jcl.commands.knn import measure_knn

    with counting("features") as progress:
        results = measure_knn(
            weights,
            data,
            k=k or [],
            temperature=temperature or [0.1],
            batch_size=batch_size,
            workers=workers,
            device=device,
            console=err,
            progress=progress,
        )
    table = Table("k", "temperature", "top-1", "top-5")
    for result in results:
        table.add_row(str(result.k), f"{result.temperature:g}", f"{result.top1:.2f} %", f"{result.top5:.2f} %")
    out.print(table)
    best = results[0]
    if any(result.neighbours < result.k for result in results):
        say(f"No more than the {pluralize(best.bank, 'image')} of the bank can vote, however large k is.")
    say(f"{pluralize(best.queries, 'query', 'queries')} against a bank of {pluralize(best.bank, 'image')}.")
    say_strangers(best.unseen_class_images)
    write_json(_knn_figures(results), json_file)


def _knn_figures(results: list[Any]) -> dict[str, float]:
    """The first result under the plain names, every result under names with its k and temperature."""
    figures: dict[str, float] = {"knn_top1": results[0].top1, "knn_top5": results[0].top5}
    for result in results:
        figures[f"knn_top1_k{result.k}_t{result.temperature:g}"] = result.top1
        figures[f"knn_top5_k{result.k}_t{result.temperature:g}"] = result.top5
    return figures | {"test_images": results[0].queries, "unseen_class_images": results[0].unseen_class_images}


class Protocol(StrEnum):
    """How a linear probe is trained."""

    fast = "fast"
    paper = "paper"


@app.command(rich_help_panel=EVALUATE)
def linear(
    weights: Annotated[Path, typer.Argument(metavar="RUN_OR_WEIGHTS", help="A run folder or an exported backbone.")],
    data: Annotated[str | None, location_argument("Labelled data (default: what the run was trained on).")] = None,
    protocol: Annotated[
        Protocol, typer.Option(help="fast: cached features, best of a grid; paper: random crops, lr 30, 100 epochs.")
    ] = Protocol.fast,
    lr: Annotated[
        list[float] | None, typer.Option(help="Learning rate; several make a grid (default: a grid; 30 for paper).")
    ] = None,
    weight_decay: Annotated[
        list[float] | None, typer.Option(help="Weight decay; several make a grid (default: a grid; 0 for paper).")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the data (default: by the data's size; 100 for paper).")
    ] = None,
    least_crop: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Least part of an image that a training crop keeps (paper).")
    ] = 0.08,
    per_class: Annotated[bool, typer.Option("--per-class", help="Show the accuracy of each class too.")] = False,
    batch_size: Annotated[
        int, typer.Option(min=2, help="Images per forward pass; of the paper's probe, images per step of training.")
    ] = 256,
    workers: WorkersOption = None,
    seed: Annotated[int, seed_option()] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the backbone (paper; pays in long runs).")
    ] = False,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to keep checkpoints in (paper); the same command again then goes on."),
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Measure frozen features by a linear classifier.

    Test labels are looked at once, at the end: whatever is chosen is chosen on a part of the training images.
    """
    from jcl.commands.linear import measure_linear

    # The paper's probe has a bar of its own.
    bar = counting("features") if protocol is Protocol.fast else contextlib.nullcontext()
    with bar as progress:
        report = measure_linear(
            weights,
            data,
            protocol=protocol.value,
            learning_rates=lr or [],
            weight_decays=weight_decay or [],
            epochs=epochs,
            batch_size=batch_size,
            workers=workers,
            device=device,
            seed=seed,
            least_crop=least_crop,
            compiled=compiled,
            out=out_folder,
            console=err,
            progress=progress,
        )
    figures = report.figures
    _print_linear(report)
    if per_class:
        _print_classes(report)
        figures = figures | {
            f"linear_top1_{name}": top1 for name, top1 in zip(report.class_names, report.scores.class_top1, strict=True)
        }
    if out_folder is not None:
        say(f"Everything is in {out_folder}.")
    write_json(figures, json_file)


@app.command(rich_help_panel=EVALUATE)
def finetune(
    context: typer.Context,
    weights: Annotated[
        Path | None, typer.Argument(metavar="RUN_OR_WEIGHTS", help="A run folder or an exported backbone.")
    ] = None,
    data: Annotated[str | None, location_argument("Labelled data (default: what the run was trained on).")] = None,
    labels: Annotated[str, typer.Option(help="How many labels to use: 1%, 10%, 100%, 20-per-class, ...")] = "100%",
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of the results (default: a new one in runs/).")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Continue a stopped fine-tuning exactly where it was.")
    ] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Start from random weights, to compare with.")
    ] = False,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the labelled images.")] = 50,
    batch_size: Annotated[
        int | None, typer.Option(min=2, help="Images per step (default: by the number of labels).")
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of the backbone's last part (default: by the batch).")
    ] = None,
    head_lr: Annotated[
        float | None, typer.Option(help="Learning rate of the new layer (default: by the batch).")
    ] = None,
    layer_decay: Annotated[
        float | None, typer.Option(help="Learning rate of each part over that of the next (default: 0.7).")
    ] = None,
    weight_decay: Annotated[float, typer.Option(help="Not on norms and biases.")] = 1e-4,
    warmup_epochs: Annotated[
        float | None, typer.Option(help="Epochs in which the learning rate rises (default: a tenth).")
    ] = None,
    label_smoothing: Annotated[float, typer.Option(help="Share of each label spread over all classes.")] = 0.0,
    jitter: Annotated[bool, typer.Option("--jitter", help="Change colours too, not only crop and flip.")] = False,
    workers: WorkersOption = None,
    seed: Annotated[int, seed_option()] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the backbone (pays in long runs).")] = False,
    json_file: JsonOption = None,
) -> None:
    """Train the whole network with all labels or a few of them.

    [dim]jcl finetune runs/photos photos/ --labels 10% --out runs/photos-10[/]
    """
    from jcl.commands.finetune import finetune as run_finetuning
    from jcl.commands.finetune import resume_finetuning

    if resume is not None:
        if typed_options(context) - {"resume", "workers", "json_file"}:
            raise SettingsError("--resume continues with the settings it was begun with; give nothing else with it.")
        folder = resume_finetuning(resume, workers=workers, console=err)
    elif weights is None:
        raise SettingsError("say what to fine-tune, for example: jcl finetune runs/photos photos/ --labels 10%.")
    else:
        folder = run_finetuning(
            weights,
            data,
            out=out_folder,
            labels=labels,
            from_scratch=from_scratch,
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            head_lr=head_lr,
            layer_decay=layer_decay,
            weight_decay=weight_decay,
            warmup_epochs=warmup_epochs,
            label_smoothing=label_smoothing,
            jitter=jitter,
            seed=seed,
            device=device,
            compiled=compiled,
            workers=workers,
            console=err,
        )
    summary = folder.summary()
    table = Table("labels used", "top-1", "top-5")
    table.add_row(
        f"{summary['labels_used']:,}", f"{summary['finetune_top1']:.2f} %", f"{summary['finetune_top5']:.2f} %"
    )
    out.print(table)
    say(tested_on(summary))
    say_strangers(summary.get("unseen_class_images", 0))  # not in the folders of older versions
    say(f"Everything is in {folder.path}; the backbone is {folder.backbone_file}.")
    write_json(summary, json_file)


def _print_linear(report: LinearReport) -> None:
    figures, scores = report.figures, report.scores
    table = Table("protocol", "top-1", "top-5", "learning rate", "weight decay")
    table.add_row(
        figures["protocol"],
        f"{scores.top1:.2f} %",
        f"{scores.top5:.2f} %",
        f"{figures['lr']:g}",
        f"{figures['weight_decay']:g}",
    )
    out.print(table)
    trained, classes = pluralize(figures["train_images"], "image"), pluralize(figures["classes"], "class", "classes")
    say(f"Trained on {trained} of {classes}. {tested_on(figures)}")
    say_strangers(scores.unseen_class_images)
    if report.edges:
        say(
            f"The best of the grid lies at its edge ({' and '.join(report.edges)}), so there may be better beyond it: "
            "give other values with --lr and --weight-decay."
        )


def _print_classes(report: LinearReport) -> None:
    table = Table("class", "test images", "top-1")
    scores = report.scores
    for name, images, top1 in zip(report.class_names, scores.class_images, scores.class_top1, strict=True):
        table.add_row(in_table(name), f"{images:,}", "" if top1 is None else f"{top1:.2f} %")
    out.print(table)
