"""Commands that measure a backbone by what it is worth on COCO."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from jcl.cli.app import EVALUATE, ForceOption, JsonOption, app, err, out, rank, seed_option
from jcl.cli.printing import in_table, say, write_json
from jcl.console import pluralize
from jcl.errors import SettingsError
from jcl.runs.atomic import write_atomically

if TYPE_CHECKING:
    from jcl.evaluate.detection.folder import DetectionFolder


class TaskChoice(StrEnum):
    """What is to be found."""

    box = "box"
    mask = "mask"
    keypoint = "keypoint"


class ScheduleChoice(StrEnum):
    """How long to train."""

    one = "1x"
    two = "2x"


class HeadsChoice(StrEnum):
    """How large the layers beyond the backbone are."""

    standard = "standard"
    small = "small"


@app.command(rich_help_panel=EVALUATE)
def detect(
    task: Annotated[TaskChoice | None, typer.Option(help="Faster, Mask or Keypoint R-CNN.")] = None,
    coco: Annotated[
        Path | None, typer.Option(help="Folder in COCO's layout, or with images/ and instances.json.")
    ] = None,
    init: Annotated[
        str | None, typer.Option(help="Start: a run, a weights file, supervised:FILE (with classifier) or random.")
    ] = None,
    out_folder: Annotated[Path | None, typer.Option("--out", help="Folder (default: a new one in runs/).")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue the training in this folder.")] = None,
    eval_only: Annotated[Path | None, typer.Option(help="Only evaluate this folder or checkpoint of it.")] = None,
    train_json: Annotated[Path | None, typer.Option(help="Annotations to train on.")] = None,
    val_json: Annotated[Path | None, typer.Option(help="Annotations to test with.")] = None,
    images: Annotated[Path | None, typer.Option(help="Folder of the images.")] = None,
    val_images: Annotated[Path | None, typer.Option(help="Folder of the test images, if another.")] = None,
    overfit: Annotated[
        int | None, typer.Option(min=1, help="Train and test on the same few images, to see that everything learns.")
    ] = None,
    schedule: Annotated[
        ScheduleChoice | None, typer.Option(help="90,000 (1x, the default) or 180,000 iterations.")
    ] = None,
    iterations: Annotated[int | None, typer.Option(help="Another number; milestones scale along.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images of an iteration, over all devices (16).")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Parts in which a batch passes the network (1).")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate (default: 0.02 for 16, in proportion).")] = None,
    warmup: Annotated[int | None, typer.Option(help="Iterations of rising learning rate (1000, or a tenth).")] = None,
    short_side: Annotated[
        tuple[int, int] | None, typer.Option(help="Least and greatest short side in training (640 800).")
    ] = None,
    test_short_side: Annotated[int | None, typer.Option(help="Short side when testing (the greatest).")] = None,
    max_side: Annotated[int | None, typer.Option(help="Longest side (1333, or in proportion).")] = None,
    heads: Annotated[HeadsChoice | None, typer.Option(help="small: to try things out without a GPU.")] = None,
    rois_per_image: Annotated[int | None, typer.Option(help="Regions an image trains the heads with (512).")] = None,
    backbone: Annotated[str | None, typer.Option(help="The network of a random start (resnet50).")] = None,
    label: Annotated[str | None, typer.Option(help="Name in tables (default: of what it starts from).")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16.")] = None,
    checkpoint_every: Annotated[int | None, typer.Option(help="Iterations between checkpoints (1000).")] = None,
    pictures: Annotated[int, typer.Option(min=0, help="Test images to draw with what was found.")] = 6,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that read images (one a CPU core).")] = None,
    seed: Annotated[int | None, seed_option()] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    devices: Annotated[int, typer.Option(min=1, help="Train on so many GPUs of this machine together.")] = 1,
    json_file: JsonOption = None,
) -> None:
    """Train and evaluate a detector on COCO from a pre-trained backbone.

    Other data sets (Pascal VOC, ...) go through their COCO conversion.

    [dim]jcl detect --task mask --coco coco/ --init runs/photos --out runs/photos-mask[/]
    """
    if devices > 1:
        from jcl.distributed.launch import launch

        launch(sys.argv[1:], devices)
        return
    where = _given(folder=coco, train_json=train_json, val_json=val_json, images=images, val_images=val_images)
    given = _given(
        task=task,
        init=init,
        overfit=overfit,
        schedule=schedule,
        iterations=iterations,
        batch_size=batch_size,
        accumulate=accumulate,
        lr=lr,
        warmup=warmup,
        short_side=short_side,
        test_short_side=test_short_side,
        max_side=max_side,
        heads=heads,
        rois_per_image=rois_per_image,
        backbone=backbone,
        label=label,
        precision=precision,
        checkpoint_every=checkpoint_every,
        seed=seed,
    )
    if eval_only is not None and resume is not None:
        raise SettingsError("--resume goes on with training and --eval-only does not train; give one of them.")
    if eval_only is not None:
        figures = _evaluated(eval_only, where, given, out_folder, device, workers)
    elif resume is not None:
        other = _given(out=out_folder, device=None if device == "auto" else device)
        figures = _resumed(resume, where | given | other, pictures, workers)
    else:
        figures = _trained(given | {"device": device}, where, out_folder, pictures, workers)
    if rank > 0:
        return
    _print_figures(figures)
    if "folder" in figures:
        say(f"Everything is in {figures.pop('folder')}.")
    write_json(figures, json_file)


@app.command("detect-table", rich_help_panel=EVALUATE)
def detect_table(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Finished folders of `jcl detect`.")],
    markdown: Annotated[Path | None, typer.Option(help="Write the table to this file as Markdown.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the table to this file as CSV.")] = None,
    force: ForceOption = False,
) -> None:
    """Put finished transfers to COCO side by side, as the paper's Table 2."""
    from jcl.evaluate.detection.folder import DetectionFolder
    from jcl.evaluate.detection.table import detection_table, same_test_images, to_csv, to_markdown, with_unique_labels
    from jcl.runs.atomic import refuse_overwrite

    for file, ending in ((markdown, ".md"), (csv_file, ".csv")):
        if file is not None and file.suffix.lower() != ending:
            raise SettingsError(f"the table is known by its ending: {file} should end in {ending}.")
        if file is not None:
            refuse_overwrite(file, force=force)
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise SettingsError("a folder is named twice; give each once.")
    summaries = [DetectionFolder(folder).summary() for folder in folders]
    heads, rows = detection_table(with_unique_labels(summaries, folders))
    say(to_markdown(heads, rows).rstrip())
    if not same_test_images(summaries):
        say("Not all were tested on the same images, so their figures do not compare.")
    for file, text in ((markdown, to_markdown(heads, rows)), (csv_file, to_csv(heads, rows))):
        if file is not None:
            write_atomically(file, text.encode())


def _print_figures(figures: dict[str, Any]) -> None:
    names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
    table = Table(in_table(str(figures["label"])), "AP", "AP50", "AP75", "AP small", "AP medium", "AP large")
    for kind in ("box", "mask", "keypoint"):
        if f"{kind}_ap" in figures:
            values = [figures.get(f"{kind}_{name}") for name in names]
            table.add_row(kind, *("" if value is None else f"{value:.2f}" for value in values))
    out.print(table)
    source = ", held out of the training images for want of others" if figures["test_held_out"] else ""
    if figures["tested_on_training_images"]:
        source = ", the same that it was trained on"
    iterations, images = pluralize(figures["iterations"], "iteration"), pluralize(figures["test_images"], "image")
    say(f"{iterations}. Tested on {images}{source}.")


def _given(**options: Any) -> dict[str, Any]:
    """The options that were given, paths and choices as text."""
    return {
        name: str(value) if isinstance(value, Path | StrEnum) else value
        for name, value in options.items()
        if value is not None
    }


def _trained(
    given: dict[str, Any], where: dict[str, Any], out_folder: Path | None, pictures: int, workers: int | None
) -> dict[str, Any]:
    from jcl.commands.detect import detect as run_detection
    from jcl.settings.detection import ITERATIONS

    if "task" not in given or "init" not in given:
        raise SettingsError(
            "say what to find and where to start, for example: jcl detect --task box --coco coco/ --init runs/photos."
        )
    if "schedule" in given and "iterations" in given:
        raise SettingsError("--schedule and --iterations both say how long to train; give one of them.")
    schedule = given.pop("schedule", ScheduleChoice.one.value)
    values = {"iterations": ITERATIONS[schedule]} | given | {"coco": where}
    folder = run_detection(values, out=out_folder, pictures=pictures, workers=workers, console=err)
    return _summary(folder)


def _resumed(path: Path, given: dict[str, Any], pictures: int, workers: int | None) -> dict[str, Any]:
    from jcl.commands.detect import resume_detection

    _refuse_given(given, "--resume continues with the settings it was begun with")
    return _summary(resume_detection(path, pictures=pictures, workers=workers, console=err))


def _evaluated(
    path: Path, where: dict[str, Any], given: dict[str, Any], out_folder: Path | None, device: str, workers: int | None
) -> dict[str, Any]:
    from jcl.commands.detect import evaluate_detector

    _refuse_given(given, "--eval-only takes the detector as it was trained")
    return evaluate_detector(path, coco=where or None, out=out_folder, device=device, workers=workers, console=err)


def _refuse_given(given: dict[str, Any], why: str) -> None:
    if given:
        option = "--" + next(iter(given)).replace("_", "-")
        raise SettingsError(f"{why}; leave out {'--coco' if option == '--folder' else option}.")


def _summary(folder: DetectionFolder) -> dict[str, Any]:
    """The figures of a finished folder, which the first rank writes."""
    return folder.summary() | {"folder": str(folder.path)} if rank == 0 else {}
