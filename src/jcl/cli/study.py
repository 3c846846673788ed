"""Commands that repeat the paper's studies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from jcl.cli.app import STUDY, out
from jcl.cli.options import command
from jcl.cli.printing import counting, demand_free_picture, in_table, say, warn_of_dataset_name, write_json
from jcl.console import pluralize, readable_size
from jcl.errors import SettingsError

if TYPE_CHECKING:
    from jcl.commands.cost import CostReport
    from jcl.commands.distribution import DistributionReport
    from jcl.settings.studies import BoundOptions, CostOptions, DistributionOptions
    from jcl.studies.bound import BoundRow, GaussianCase, RunBounds


@command("distribution", "studies.DistributionOptions", group=STUDY)
def distribution(options: DistributionOptions) -> None:
    """Compare how similar the views of an image are to networks (Figure 3).

    [dim]jcl distribution runs/jcl runs/moco-v2 -o figure3.png[/]
    [dim]jcl distribution runs/jcl weights.safetensors photos/[/]
    """
    from jcl.commands.distribution import compare_views, split_arguments
    from jcl.runs.atomic import refuse_overwrite
    from jcl.studies.distribution import VALUES_SUFFIXES, write_values

    demand_free_picture(options.plot, force=options.force)
    if options.values is not None:
        if options.values.suffix.lower() not in VALUES_SUFFIXES:
            raise SettingsError(f"--values must end in {' or '.join(VALUES_SUFFIXES)}, but got {options.values}.")
        refuse_overwrite(options.values, force=options.force)
    warn_of_dataset_name(split_arguments(options.weights)[1])
    with counting("views") as progress:
        report = compare_views(options, progress)
    _print_distribution(report)
    write_json(report.metrics(), options.json_file)
    if options.values is not None:
        write_values(options.values, report.image_names, report.by_key())
        say(f"The values of each image are in {options.values}.")
    if options.plot is not None:
        from jcl.report.study_plots import plot_spreads

        plot_spreads(dict(zip(report.names, report.spreads, strict=True)), options.plot, subtitle=report.describe())
        say(f"The plot is in {options.plot}.")


def _print_distribution(report: DistributionReport) -> None:
    from jcl.studies.distribution import paired_shares

    table = _table("", "similarity", "without self-pairs", "variance", "width")
    for name, spread in zip(report.names, report.spreads, strict=True):
        table.add_row(
            in_table(name),
            f"{spread.similarity.quantile(0.5):.4f}",
            f"{spread.similarity_of_different_views.quantile(0.5):.4f}",
            f"{spread.variance.quantile(0.5):.3e}",
            str(spread.width),
        )
    out.print(table)
    views = report.summary["views_per_image"]
    say(f"Medians over {report.describe()}. Similarity is over all {views} × {views} pairs of views, as in the paper.")
    for name, spread in zip(report.names[1:], report.spreads[1:], strict=True):
        share = paired_shares(report.spreads[0], spread).more_alike
        say(f"The views of an image are more similar to {report.names[0]} than to {name} on {share:.1f} % of images.")
    say("The variance of unit features is (1 - similarity) / width.")
    if len({spread.width for spread in report.spreads}) > 1:
        say("The features differ in width: compare their similarities, not their variances.")
    for note in report.notes:
        say(f"Note: {note}")
    if report.summary["skipped"]:
        say(f"Skipped {pluralize(report.summary['skipped'], 'unreadable image')}.")


@command("bound", "studies.BoundOptions", group=STUDY)
def bound(options: BoundOptions) -> None:
    """Measure how tight the bound of Eq. 8 is and how Gaussian keys are.

    [dim]jcl bound -o gaussian.png[/]
    [dim]jcl bound runs/photos -o bound.png[/]
    """
    from jcl.commands.bound import bound_along_training, bound_of_gaussian_keys
    from jcl.studies.bound import gaussian_metrics

    demand_free_picture(options.plot, force=options.force)
    options.require_effect()
    if options.run is None:
        results, images = bound_of_gaussian_keys(options), pluralize(options.images or 16, "image")
        _print_gaussian_bound(results, options.draws, images)
        write_json(gaussian_metrics(results), options.json_file)
        if options.plot is not None:
            from jcl.report.study_plots import plot_gaussian_bound

            subtitle = f"{options.draws:,} keys per image, {images}, {options.negatives:,} negatives"
            plot_gaussian_bound(results, options.plot, subtitle=subtitle)
    else:
        with counting("checkpoints") as progress:
            bounds = bound_along_training(options, progress)
        _print_run_bound(bounds)
        write_json(bounds.metrics(), options.json_file)
        if options.plot is not None:
            from jcl.report.study_plots import plot_training_bound

            plot_training_bound(bounds, options.plot, name=str(options.run))
    if options.plot is not None:
        say(f"The plot is in {options.plot}.")


def _print_gaussian_bound(results: Sequence[tuple[GaussianCase, BoundRow]], draws: int, images: str) -> None:
    scales = list(results[0][1].closed)
    table = _table("d", "spread", "t", "sd", "Eq. 4", "±", "Eq. 7", *(f"Eq. 8, {scale:g}" for scale in scales))
    for case, row in results:
        table.add_row(str(case.dimension), f"{case.spread:g}", f"{case.temperature:g}", *_losses(row))
    out.print(table)
    say(
        f"Gaussian keys, {draws:,} for each of {images}. sd: of q·k/t. Eq. 4: loss with infinitely many keys, "
        "± standard error. Eq. 7: Jensen's bound, sampled. Eq. 8: closed form, by its scale."
    )
    if 1.0 in scales:
        case, row = max(results, key=lambda result: result[1].gap(1.0))
        where = f"d = {case.dimension}, spread {case.spread:g}, t = {case.temperature:g}"
        say(f"At scale 1 the bound is at most {row.gap(1.0):.3g} above Eq. 4, at {where}.")
    _warn_about_scales(scales)


def _print_run_bound(bounds: RunBounds) -> None:
    scales = list(bounds.steps[0].row.closed)
    table = _table("step", "sd", "Eq. 4", "±", "Eq. 7", *(f"Eq. 8, {scale:g}" for scale in scales))
    for each in bounds.steps:
        table.add_row(str(each.step), *_losses(each.row))
    out.print(table)
    say(
        f"{bounds.keys} views of each of {pluralize(bounds.images, 'image')} as keys, t = {bounds.temperature:g}, "
        "the run's queue as negatives. sd: of q·k/t. Eq. 4: mean over the keys, ± standard error. Eq. 7: "
        f"Jensen's bound. Eq. 8: closed form, by its scale (the run's is {bounds.own_scale:g})."
    )
    table = _table("step", "skewness", "excess kurtosis", "not Gaussian", "queue filled")
    for each in bounds.steps:
        test = each.normality
        table.add_row(
            str(each.step),
            f"{test.skewness.quantile(0.5):+.2f}",
            f"{test.excess_kurtosis.quantile(0.5):+.2f}",
            f"{test.rejected():.1f} %",
            f"{100 * each.queue_filled:.0f} %",
        )
    out.print(table)
    say(
        "Of q·k over the views of an image: medians, and the share of images for which D'Agostino and Pearson's test "
        f"rejects normality at 5 % ({bounds.reference.rejected():.1f} % for Gaussian samples of the same size)."
    )
    last = bounds.steps[-1].row
    say(
        f"At the last checkpoint Jensen's bound is {last.jensen - last.infinite:.3g} above Eq. 4; Eq. 8 at scale 1, "
        f"which assumes Gaussian keys, differs from it by {last.closed[1.0] - last.jensen:+.3g}."
    )
    _warn_about_scales(scales)


def _warn_about_scales(scales: Sequence[float]) -> None:
    if min(scales) < 1:
        say("Eq. 8 is a bound for scales of at least 1; below 1 it may be less than Eq. 4.")


def _losses(row: BoundRow) -> list[str]:
    closed = [f"{value:.4f}" for value in row.closed.values()]
    return [f"{row.deviation:.2f}", f"{row.infinite:.4f}", f"{row.infinite_error:.0e}", f"{row.jensen:.4f}", *closed]


@command("cost", "studies.CostOptions", group=STUDY)
def cost(options: CostOptions) -> None:
    """Measure memory and time of a step over the number of keys.

    [dim]jcl cost --keys 1,2,4,8 -o cost.png[/]
    """
    from jcl.commands.cost import measure_cost

    demand_free_picture(options.plot, force=options.force)
    with counting("measurements") as progress:
        report = measure_cost(options, progress)
    _print_cost(report)
    write_json(report.metrics(), options.json_file)
    if options.plot is not None:
        from jcl.report.study_plots import plot_cost

        plot_cost(report.cells, options.plot, of=report.describe(), finding=report.finding())
        say(f"The plot is in {options.plot}.")


def _print_cost(report: CostReport) -> None:
    from jcl.core.registry import METHODS
    from jcl.studies.cost import baseline

    base, before = baseline(report.cells), ""
    table = _table("method", "keys", "memory", "× MoCo v2", "ms per step", "× MoCo v2")
    for cell in report.cells:
        title = METHODS[cell.method].title if cell.method != before else ""
        if title:
            table.add_section()
        before = cell.method
        if cell.cost is None:
            table.add_row(title, str(cell.keys), "out of memory", "", "", "")
            continue
        memory, taken = cell.cost.bytes, cell.cost.milliseconds
        ratios = ("", "") if base is None else (f"{memory / base.bytes:.2f}", f"{taken / base.milliseconds:.2f}")
        table.add_row(title, str(cell.keys), readable_size(memory), ratios[0], f"{taken:,.1f}", ratios[1])
    out.print(table)
    say(f"{report.describe()}. Memory is the peak of a step that PyTorch allocated, weights included.")
    for line in (*report.growth_lines(), report.warning()):
        if line:
            say(line)
    say("Without gradients, keys are encoded in train.key_passes parts, which keeps memory constant but takes time.")
    say(f"{report.finding()}.")


def _table(first: str, *others: str) -> Table:
    table = Table(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
