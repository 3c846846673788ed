"""Commands that evaluate features and detectors, and write reports."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from jcl.cli.options import EVALUATE, command
from jcl.cli.printing import echo, err, out, print_test, progress_bar, rank, text_table
from jcl.console import format_bytes, no_progress, pluralize, print_line

if TYPE_CHECKING:
    from jcl.commands.compare import Comparison
    from jcl.commands.embed import Matches
    from jcl.settings import commands, detection

_DETECTION_FIGURES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


@command("knn", group=EVALUATE)
def knn(options: commands.KnnOptions) -> dict[str, Any]:
    """Evaluate frozen features: the nearest training images vote (weighted kNN)."""
    from jcl.commands.probes import measure_knn

    with progress_bar("features") as progress:
        results, figures = measure_knn(options, progress)
    bank, rows = results[0].bank, []
    for result in results:
        untrained = figures.get(f"untrained_knn_top1_k{result.k}_t{result.temperature:g}")
        values = map(_percent, (result.top1, result.top5, untrained))
        rows.append([str(result.k), f"{result.temperature:g}", *values])
    out.print(text_table(["k", "temperature", "top-1", "top-5", "untrained top-1"], rows))
    if any(result.bank < result.k for result in results):
        echo(f"Only the {pluralize(bank, 'image')} of the bank can vote, fewer than k.")
    print_test(figures, "knn_top1", f"The bank has {pluralize(bank, 'image')}. ")
    return figures


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} %"


@command("linear", group=EVALUATE)
def linear(options: commands.LinearOptions) -> dict[str, Any]:
    """Evaluate frozen features with a linear classifier.

    Settings are chosen on a part of the training images; test labels are used only once, at the end.
    """
    from jcl.commands.probes import measure_linear

    # The paper's probe shows its own progress bar.
    bar = progress_bar("features") if options.protocol == "fast" else contextlib.nullcontext(no_progress)
    with bar as progress:
        report = measure_linear(options, progress=progress)
    figures = report.figures
    accuracies = [_percent(figures[name]) for name in ("linear_top1", "linear_top5")]
    chosen = [f"{figures[name]:g}" for name in ("lr", "weight_decay")]
    row = [figures["protocol"], *accuracies, *chosen]
    out.print(text_table(["protocol", "top-1", "top-5", "learning rate", "weight decay"], [row]))
    trained, classes = pluralize(figures["train_images"], "image"), pluralize(figures["classes"], "class", "classes")
    print_test(figures, "linear_top1", f"Trained on {trained} of {classes}. ")
    if report.edges:
        echo(f"The best values are at the edge of the grid: {' and '.join(report.edges)}. Try --lr and --weight-decay.")
    if options.per_class:
        rows = [(name, f"{images:,}", _percent(top1)) for name, (images, top1) in report.classes.items()]
        out.print(text_table(["class", "test images", "top-1"], rows))
        figures = figures | {f"linear_top1_{name}": top1 for name, (_, top1) in report.classes.items()}
    if options.out is not None:
        echo(f"Everything is in {options.out}.")
    return figures


@command("finetune", group=EVALUATE)
def finetune(options: commands.FinetuneOptions) -> dict[str, Any]:
    """Fine-tune the whole network with all labels or a few of them.

    [dim]jcl finetune runs/photos photos/ --labels 10% --out runs/photos-10[/]
    """
    from jcl.commands.finetune import finetune as run_finetuning
    from jcl.commands.finetune import resume_finetuning

    if options.resume is not None:
        options.refuse_others("resume", "workers", "device", "json_file")
        folder = resume_finetuning(options.resume, workers=options.worker_count, device=options.given_device)
    else:
        folder = run_finetuning(options)
    summary = folder.summary()
    accuracies = [_percent(summary[name]) for name in ("finetune_top1", "finetune_top5")]
    out.print(text_table(["labels used", "top-1", "top-5"], [[f"{summary['labels_used']:,}", *accuracies]]))
    print_test(summary, "finetune_top1")
    echo(f"Everything is in {folder.path}; the backbone is {folder.backbone_file}.")
    return summary


@command("report", group=EVALUATE)
def report(options: commands.ReportOptions) -> dict[str, Any]:
    """Write one HTML page about one or several runs: curves, accuracies, neighbors, views, settings.

    [dim]jcl report runs/moco-v2 runs/jcl -o compared.html[/]
    """
    from jcl.commands.report import report_runs

    with err.status("writing the report"):
        runs, figures = report_runs(options)
    for run in runs:
        for sentence in run.missing:
            echo(f"{run.name}: {sentence}")
    echo(f"Wrote {figures['file']} ({format_bytes(figures['bytes'])}); open it in a browser.")
    return figures


@command("compare", group=EVALUATE)
def compare(options: commands.CompareOptions) -> dict[str, Any]:
    """Compare the features of runs or checkpoints, without using labels.

    [dim]jcl compare runs/photos runs/photos-2[/]
    [dim]jcl compare runs/photos/checkpoints/*[/]
    """
    from jcl.commands.compare import compare_quality
    from jcl.report.contents import QUALITY

    with progress_bar("networks") as progress:
        found = compare_quality(options, progress)
    titles = {measure: title for measure, (title, _) in QUALITY.items()}
    names, rows = ["", *titles.values()], [[run.name, *map("{:.2f}".format, run.quality)] for run in found.runs]
    if any(run.knn_top1 is not None for run in found.runs):
        names.append("kNN top-1")
        rows = [[*row, _percent(run.knn_top1)] for row, run in zip(rows, found.runs, strict=True)]
    out.print(text_table(names, rows, right=True))
    echo(f"{pluralize(found.images, 'image')}. Usually higher RankMe and LiDAR are better, and alpha-ReQ near 1.")
    for measure, title in titles.items():
        _print_best(found, measure, title)
    correlations = {title: found.correlation(measure) for measure, title in titles.items()}
    if texts := [f"{title} {value:.2f}" for title, value in correlations.items() if value is not None]:
        echo(f"Rank correlation with kNN (1: same order, 0: unrelated): {', '.join(texts)}.")
    return found.as_dict()


def _print_best(found: Comparison, measure: str, title: str) -> None:
    from jcl.commands.compare import CLEAR
    from jcl.evaluate.quality import RESAMPLES

    if (result := found.best(measure)) is None:
        return
    best, shares = result
    other, share = min(shares.items(), key=lambda pair: pair[1])
    halves = f"{RESAMPLES} random halves of the images"
    verdict = f"{best.name} is best" if share >= CLEAR else f"no clear difference; {best.name} has the best value"
    echo(f"{title}: {verdict}, better than {other} on {share:.0%} of {halves}.")


@command("embed", group=EVALUATE)
def embed(options: commands.EmbedOptions) -> dict[str, Any]:
    """Write the features of all images to a file, with their names, labels and splits.

    [dim]jcl embed runs/photos photos/ -o photos.parquet[/]
    """
    from jcl.commands.embed import embed as write_features

    with progress_bar("embedding") as progress:
        figures, skipped = write_features(options, progress=progress)
    for image, reason in skipped.items():
        print_line(err, f"Skipped {image}: {reason}.")
    kinds = [name for name in ("train_images", "test_images") if name in figures]
    counts = [f"{figures[name]:,} {name.replace('_', ' ')}" for name in kinds]
    left_out = [f"{len(skipped):,} unreadable skipped"] if skipped else []
    echo(f"Features of width {figures['feature_width']} ({', '.join(counts + left_out)}) are in {options.out}.")
    return figures


@command("neighbours", group=EVALUATE)
def neighbours(options: commands.NeighboursOptions) -> dict[str, Any]:
    """Find the images with the most similar features.

    [dim]jcl neighbours mine.jpg --index photos.parquet -o neighbours.png[/]
    """
    from jcl.commands.embed import DRAWN, draw_matches, find_neighbours

    matches = find_neighbours(options)
    columns = matches.as_dict()
    _print_matches(matches, columns)
    if options.out is not None:
        some = f" of the first {DRAWN} images" if len(matches.queries) > DRAWN else ""
        echo(f"The neighbors{some} are drawn in {draw_matches(matches, options.out)}.")
    return columns


def _print_matches(matches: Matches, columns: dict[str, list[Any]]) -> None:
    names = ["rank", "similarity", "row", "name"]
    names += ["class"] if any(columns["class"]) else []
    names += ["split"] if len(set(columns["split"])) > 1 else []
    texts = {name: ["" if value is None else str(value) for value in columns[name]] for name in names}
    texts["similarity"] = [f"{value:.4f}" for value in columns["similarity"]]
    rows, k = list(zip(*texts.values(), strict=True)), matches.found.rows.shape[1]
    for number, query in enumerate(matches.queries):
        echo(query.name)
        out.print(text_table(names, rows[number * k : (number + 1) * k]))


@command("detect", group=EVALUATE)
def detect(options: detection.DetectOptions) -> dict[str, Any] | None:
    """Train and evaluate a detector on COCO from a pre-trained backbone.

    Convert other data sets, such as Pascal VOC, to COCO's format first.

    [dim]jcl detect --task mask --coco coco/ --init runs/photos --out runs/photos-mask[/]
    """
    from jcl.commands.detect import detect as run_detection
    from jcl.commands.detect import evaluate_detector, resume_detection

    options.check()
    if options.eval_only is not None:
        figures = evaluate_detector(options.eval_only, options)
        _print_detection(figures)
        return figures
    folder = run_detection(options) if options.resume is None else resume_detection(options.resume, options)
    if rank > 0:
        return None  # only the first rank is sure to see the folder
    figures = folder.summary()
    _print_detection(figures)
    echo(f"Everything is in {folder.path}.")
    return figures


@command("detect-table", group=EVALUATE)
def detect_table(options: detection.DetectTableOptions) -> None:
    """Put finished detectors side by side in a Markdown table, as in the paper's Table 2."""
    from jcl.evaluate.detection.predict import detection_table
    from jcl.evaluate.folders import DetectionFolder

    summaries = [DetectionFolder(folder).summary() for folder in options.folders]
    echo(detection_table(summaries, options.folders))
    tests = ("test_images", "test_held_out", "tested_on_training_images")
    tested = {(summary["task"], *map(summary.get, tests)) for summary in summaries}
    if len(tested) > len({task for task, *_ in tested}):
        print_line(err, "The figures are not comparable: the test images differ.")


def _print_detection(figures: dict[str, Any]) -> None:
    rows = []
    for kind in ("box", "mask", "keypoint"):
        if f"{kind}_ap" in figures:
            values = [figures.get(f"{kind}_{name}") for name in _DETECTION_FIGURES]
            rows.append([kind, *("" if value is None else f"{value:.2f}" for value in values)])
    titles = [name.replace("ap", "AP").replace("_", " ") for name in _DETECTION_FIGURES]
    out.print(text_table([str(figures["label"]), *titles], rows))
    source = ", held out of the training data" if figures["test_held_out"] else ""
    if figures["tested_on_training_images"]:
        source = ", the training images"
    iterations, images = pluralize(figures["iterations"], "iteration"), pluralize(figures["test_images"], "image")
    echo(f"{iterations}. Tested on {images}{source}.")
