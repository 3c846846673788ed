"""Commands that train detectors on a pre-trained backbone and compare them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jcl.cli.app import EVALUATE, err, out, rank
from jcl.cli.options import command
from jcl.cli.printing import echo, text_table
from jcl.console import pluralize, print_line
from jcl.errors import SettingsError

if TYPE_CHECKING:
    from jcl.settings.detection import DetectOptions, DetectTableOptions

_FIGURES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


@command("detect", "detection.DetectOptions", group=EVALUATE)
def detect(options: DetectOptions) -> dict[str, Any] | None:
    """Train and evaluate a detector on COCO from a pre-trained backbone.

    Other datasets (Pascal VOC, ...) need to be converted to COCO format.

    [dim]jcl detect --task mask --coco coco/ --init runs/photos --out runs/photos-mask[/]
    """
    from jcl.commands.detect import detect as run_detection
    from jcl.commands.detect import evaluate_detector, resume_detection

    options.check()
    folder = None
    if options.eval_only is not None:
        figures = evaluate_detector(options.eval_only, options, console=err)
    elif options.resume is not None:
        folder = resume_detection(options.resume, options, console=err)
    else:
        folder = run_detection(options, console=err)
    if rank > 0:
        return None
    _print_figures(figures := folder.summary() if folder is not None else figures)
    if folder is not None:
        echo(f"Everything is in {folder.path}.")
    return figures


@command("detect-table", "detection.DetectTableOptions", group=EVALUATE)
def detect_table(options: DetectTableOptions) -> None:
    """Put finished detectors side by side in a Markdown table, as in the paper's Table 2."""
    from jcl.evaluate.detection.results import DetectionFolder, detection_table

    if len({folder.resolve() for folder in options.folders}) < len(options.folders):
        raise SettingsError("A folder is given twice.")
    summaries = [DetectionFolder(folder).summary() for folder in options.folders]
    echo(detection_table(summaries, options.folders))
    tested = {(summary["task"], summary.get("test_images")) for summary in summaries}
    if len(tested) > len({task for task, _ in tested}):
        print_line(err, "The figures are not comparable: the numbers of test images differ.")


def _print_figures(figures: dict[str, Any]) -> None:
    rows = []
    for kind in ("box", "mask", "keypoint"):
        if f"{kind}_ap" in figures:
            values = [figures.get(f"{kind}_{name}") for name in _FIGURES]
            rows.append([kind, *("" if value is None else f"{value:.2f}" for value in values)])
    titles = [name.replace("ap", "AP").replace("_", " ") for name in _FIGURES]
    out.print(text_table([str(figures["label"]), *titles], rows))
    source = ", held out of the training data" if figures["test_held_out"] else ""
    if figures["tested_on_training_images"]:
        source = ", the training images"
    iterations, images = pluralize(figures["iterations"], "iteration"), pluralize(figures["test_images"], "image")
    echo(f"{iterations}. Tested on {images}{source}.")
