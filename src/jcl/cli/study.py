"""Commands that repeat the paper's studies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jcl.cli.options import STUDY, command
from jcl.cli.printing import echo, err, out, print_test, progress_bar, text_table, write_json
from jcl.console import format_bytes, list_some, pluralize

if TYPE_CHECKING:
    from jcl.commands.ablate import Ablation
    from jcl.settings import commands
    from jcl.studies.ablation import Point
    from jcl.studies.bound import BoundRow, GaussianCase, RunBounds
    from jcl.studies.cost import CostReport
    from jcl.studies.distribution import DistributionReport

_LEGEND = "sd: of q·k/t. Eq. 4: infinitely many keys, ± standard error. Eq. 7: Jensen's bound. Eq. 8: by its scale"


@command("ablate", group=STUDY)
def ablate(options: commands.AblateOptions) -> dict[str, Any] | None:
    """Pre-train with several values of a setting and plot the accuracy.

    The same command again continues where it stopped; finished cells are kept.

    [dim]jcl ablate cifar10 --over num_keys=1,2,3,5,7,9,11 --seeds 3[/]
    """
    from jcl.commands.ablate import ablate as run
    from jcl.commands.ablate import write_plan

    if options.plan_only:
        folder, total, done = write_plan(options, err)
        cells = pluralize(total, "cell") + (f" ({done:,} already done)" if done else "")
        echo(f"Planned {cells} in {folder}; run each with `jcl ablate-cell CELL`.")
        return {"cells": total, "cells_done": done}
    found = run(options, err)
    _print_ablation(found)
    write_json(dict(found.results), options.json_file)
    found.raise_if_incomplete()
    return None


@command("ablate-cell", group=STUDY)
def ablate_cell(options: commands.AblateCellOptions) -> dict[str, Any]:
    """Train and measure one cell (one run) of an ablation, or continue it.

    `jcl ablate` starts this; so can the job arrays of a scheduler.
    """
    from jcl.commands.ablate import run_cell

    result = run_cell(options.folder, workers=options.workers)
    echo(f"linear top-1 {result['linear_top1']:.2f} %, kNN top-1 {result['knn_top1']:.2f} %")
    print_test(result)
    return result


def _print_ablation(found: Ablation) -> None:
    from jcl.evaluate.baselines import clearly_best
    from jcl.runs.json_object import format_value
    from jcl.studies.ablation import SELECTION_METRIC, best_points
    from jcl.studies.cells import describe, short_name

    if not any(point.results or point.failed for point in found.points):
        return
    best = best_points(found.points)
    clear = clearly_best([point.estimate(SELECTION_METRIC) for point in found.points]) is not None
    rows = []
    for point in found.points:
        values = [format_value(point.values[name]) for name in found.names]
        failed = f" ({point.failed} failed)" if point.failed else ""
        means = [_mean(point, metric) for metric in ("linear_top1", "knn_top1", "validation_top1")]
        rows.append([*values, *means, f"{len(point.results)}{failed}"])
    linear = "linear top-1 (paper)" if found.results.get("protocol") == "paper" else "linear top-1"
    titles = [*map(short_name, found.names), linear, "kNN top-1", "validation", "seeds"]
    table = text_table(titles, rows, right=True)
    if clear:
        table.rows[found.points.index(best[0])].style = "bold"
    out.print(table)
    if found.results["cells_done"]:
        print_test(found.results)
    if best:
        doubt = "" if clear or len(best) > 1 else "; others are within the uncertainty"
        verdict, values = "Best" if len(best) == 1 else "Tied", [describe(point.values) for point in best]
        echo(f"{verdict} on held-out training images (validation): {list_some(values, 4, '; ')}{doubt}.")
    plot = "plot in ablation.png, " if (found.folder / "ablation.png").is_file() else ""
    echo(f"Results are in {found.folder}: {plot}all cells in ablation.csv.")


def _mean(point: Point, metric: str) -> str:
    mean, spread = point.mean(metric), point.spread(metric)
    if mean is None:
        return ""
    return f"{mean:.2f}" if spread is None else f"{mean:.2f} ± {spread:.2f}"


@command("distribution", group=STUDY)
def distribution(options: commands.DistributionOptions) -> None:
    """Compare networks by the similarity of the views of an image (the paper's Figure 3).

    [dim]jcl distribution runs/jcl runs/moco-v2 -o figure3.png[/]
    [dim]jcl distribution runs/jcl weights.safetensors photos/[/]
    """
    from jcl.commands.compare import compare_views
    from jcl.report.study_plots import plot_spreads

    with progress_bar("views") as progress:
        report = compare_views(options, progress)
    _print_distribution(report)
    if options.values is not None:
        report.write_values(options.values)
        echo(f"The values of each image are in {options.values}.")
    _save(options, report.metrics(), partial(plot_spreads, report.spreads, subtitle=report.describe()))


def _print_distribution(report: DistributionReport) -> None:
    from jcl.studies.distribution import share_more_similar

    rows = []
    for name, spread in report.spreads.items():
        similarity, different = spread.similarity.quantile(0.5), spread.similarity_of_different_views.quantile(0.5)
        variance = spread.variance.quantile(0.5)
        rows.append([name, f"{similarity:.4f}", f"{different:.4f}", f"{variance:.3e}", str(spread.width)])
    out.print(text_table(["", "similarity", "without self-pairs", "variance", "width"], rows, right=True))
    views = report.summary["views_per_image"]
    echo(f"Medians over {report.describe()}. Similarity is over all {views} × {views} pairs of views, as in the paper.")
    (first_name, first), *others = report.spreads.items()
    for name, spread in others:
        share = share_more_similar(first, spread)
        echo(f"The views of an image are more similar with {first_name} than with {name} on {share:.1f} % of images.")
    echo("The variance of unit features is (1 - similarity) / width.")
    if len({spread.width for spread in report.spreads.values()}) > 1:
        echo("The features differ in width: compare their similarities, not their variances.")


@command("bound", group=STUDY)
def bound(options: commands.BoundOptions) -> None:
    """Measure how tight the paper's bound (Eq. 8) is and how Gaussian the keys are.

    [dim]jcl bound -o gaussian.png[/]
    [dim]jcl bound runs/photos -o bound.png[/]
    """
    from jcl.commands.bound import bound_along_training, bound_of_gaussian_keys
    from jcl.report.study_plots import plot_gaussian_bound, plot_training_bound
    from jcl.studies.bound import gaussian_metrics

    if options.run is None:
        options.refuse(("keys", "batch_size", "workers", "device", "precision"), "needs a run")
        results, images = bound_of_gaussian_keys(options), pluralize(options.images or 16, "image")
        _print_gaussian_bound(results, f"{options.draws:,} for each of {images}")
        subtitle = f"{options.draws:,} keys per image, {images}, {options.negatives:,} negatives"
        _save(options, gaussian_metrics(results), partial(plot_gaussian_bound, results, subtitle=subtitle))
        return
    options.refuse(("dimensions", "spreads", "negatives", "draws"), "is for Gaussian keys, without a run")
    with progress_bar("images") as progress:
        bounds = bound_along_training(options, options.run, progress)
    _print_run_bound(bounds)
    _save(options, bounds.metrics(), partial(plot_training_bound, bounds, name=str(options.run)))


def _print_gaussian_bound(results: Sequence[tuple[GaussianCase, BoundRow]], draws: str) -> None:
    cases = [[str(case.dimension), f"{case.spread:g}", f"{case.temperature:g}"] for case, _ in results]
    _print_losses(["d", "spread", "t"], cases, [row for _, row in results])
    echo(f"Gaussian keys, {draws}. {_LEGEND}.")
    if 1.0 in results[0][1].closed:
        case, row = max(results, key=lambda result: result[1].gap(1.0))
        where = f"d = {case.dimension}, spread {case.spread:g}, t = {case.temperature:g}"
        echo(f"At scale 1 the bound is at most {row.gap(1.0):.3g} above Eq. 4, at {where}.")
    _warn_about_scales(results[0][1])


def _print_run_bound(bounds: RunBounds) -> None:
    steps, last = [str(each.step) for each in bounds.steps], bounds.steps[-1].row
    own = "" if bounds.own_scale is None else f" (the run's is {bounds.own_scale:g})"
    _print_losses(["step"], [[step] for step in steps], [each.row for each in bounds.steps])
    images = pluralize(bounds.images, "image")
    echo(f"Keys: {bounds.keys} views of each of {images}; t = {bounds.temperature:g}; negatives: the run's queue.")
    echo(f"{_LEGEND}{own}.")
    rows = []
    for step, each in zip(steps, bounds.steps, strict=True):
        skewness, kurtosis = each.normality.skewness.quantile(0.5), each.normality.excess_kurtosis.quantile(0.5)
        shares = [f"{each.normality.rejected():.1f} %", f"{100 * each.queue_filled:.0f} %"]
        rows.append([step, f"{skewness:+.2f}", f"{kurtosis:+.2f}", *shares])
    titles = ["step", "skewness", "excess kurtosis", "not Gaussian", "queue filled"]
    out.print(text_table(titles, rows, right=True))
    test = f"D'Agostino and Pearson's test at 5 % rejects (of Gaussian samples: {bounds.reference.rejected():.1f} %)"
    echo(f"Skewness and kurtosis of q·k: medians over the images. Not Gaussian: images that {test}.")
    jensen, closed = last.jensen - last.infinite, last.closed[1.0] - last.jensen
    echo(f"At the end Jensen's bound is {jensen:.3g} above Eq. 4; Eq. 8 at scale 1 differs from it by {closed:+.3g}.")
    weights = [
        [f"{scale:g}", f"{found.positive_share:.4f}", *(f"{100 * value:.1f} %" for value in found[1:])]
        for scale, found in last.attraction.items()
    ]
    out.print(text_table(["scale", "p₊", "covariance", "keys pushed away"], weights, right=True))
    echo("The gradient of Eq. 8 at the end. p₊: share of the softmax. covariance: its pull relative to 1 - p₊.")
    _warn_about_scales(last)


def _print_losses(titles: Sequence[str], cases: Sequence[Sequence[str]], rows: Sequence[BoundRow]) -> None:
    table = []
    for case, row in zip(cases, rows, strict=True):
        closed = [f"{value:.4f}" for value in row.closed.values()]
        sampled = [f"{row.deviation:.2f}", f"{row.infinite:.4f}", f"{row.infinite_error:.0e}", f"{row.jensen:.4f}"]
        table.append([*case, *sampled, *closed])
    titles = [*titles, "sd", "Eq. 4", "±", "Eq. 7", *(f"Eq. 8, {scale:g}" for scale in rows[0].closed)]
    out.print(text_table(titles, table, right=True))


def _warn_about_scales(row: BoundRow) -> None:
    if min(row.closed) < 1:
        echo("Eq. 8 is a bound for scales of at least 1; below 1 it may be less than Eq. 4.")


@command("cost", group=STUDY)
def cost(options: commands.CostOptions) -> None:
    """Measure memory and time of a training step for different numbers of keys.

    [dim]jcl cost --keys 1,2,4,8 -o cost.png[/]
    """
    from jcl.report.study_plots import plot_cost
    from jcl.studies.cost import measure_cost

    with progress_bar("measurements") as progress:
        report = measure_cost(options, progress)
    _print_cost(report)
    _save(options, report.metrics(), partial(plot_cost, report))


def _print_cost(report: CostReport) -> None:
    from jcl.core.registry import METHODS

    base, rows = report.baseline, []
    for number, cell in enumerate(report.cells):
        again = number > 0 and report.cells[number - 1].method == cell.method
        row = ["" if again else METHODS[cell.method].title, str(cell.keys), cell.failure, "", "", ""]
        if cell.cost is not None:
            row[2], row[4] = format_bytes(cell.cost.bytes), f"{cell.cost.milliseconds:,.1f}"
        if cell.cost is not None and base is not None:
            row[3] = f"{cell.cost.bytes / base.bytes:.2f}"
            row[5] = f"{cell.cost.milliseconds / base.milliseconds:.2f}"
        rows.append(row)
    table = text_table(["method", "keys", "memory", "× MoCo v2", "ms per step", "× MoCo v2"], rows, right=True)
    for above, row in zip(table.rows, rows[1:], strict=False):
        above.end_section = bool(row[0])  # a line between the methods
    out.print(table)
    echo(f"{report.describe()}. Memory is the peak of a step that PyTorch allocated, weights included.")
    if warning := report.warning():
        echo(warning)
    echo("Without gradients, keys are encoded in train.key_passes parts, which keeps memory constant but takes time.")
    echo(f"{report.finding()}.")


def _save(options: commands.PlotOptions, metrics: dict[str, Any], draw: Callable[[Path], Path]) -> None:
    """Write the results to --json before they are plotted."""
    write_json(metrics, options.json_file)
    if options.plot is not None:
        echo(f"The plot is in {draw(options.plot)}.")
