"""The tables that the studies print, and in a few sentences what is in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from jcl.cli.app import out
from jcl.cli.printing import in_table, say
from jcl.console import pluralize, readable_size

if TYPE_CHECKING:
    from jcl.commands.cost import CostReport
    from jcl.commands.distribution import DistributionReport
    from jcl.studies.bound import BoundRow, GaussianCase
    from jcl.studies.cost import Growth, StepCost
    from jcl.studies.run_bound import RunBounds

_NO_GROWTH = 0.001  # of MoCo v2's memory with each key: 3 % with 32 keys


def print_distribution(report: DistributionReport) -> None:
    """How alike each network makes the views of an image, and the first beside the others."""
    from jcl.evaluate.distribution import paired_shares

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
    about = report.about
    count = about["views_per_image"]
    say(
        f"Medians over {report.described()}. The first column is over all {count} × {count} pairs of views, as the "
        "paper averages them."
    )
    for name, spread in zip(report.names[1:], report.spreads[1:], strict=True):
        share = paired_shares(report.spreads[0], spread).more_alike
        say(
            f"{report.names[0]} makes the views of an image more alike than {name} does on {share:.1f} % of the images."
        )
    say("For unit features the variance tells nothing new: it is (1 - similarity) / width.")
    if len({spread.width for spread in report.spreads}) > 1:
        say("The features differ in width, so their variances do not compare; their similarities do.")
    for note in report.notes:
        say(f"Note: {note}")
    if about["skipped"]:
        say(f"Left out, because it cannot be read: {pluralize(about['skipped'], 'image')}.")


def print_gaussian_bound(results: Sequence[tuple[GaussianCase, BoundRow]], draws: int, images: int) -> None:
    """The losses of each case of Gaussian keys, and where the bound is loosest."""
    scales = list(results[0][1].closed)
    table = _table("d", "spread", "t", "sd", "Eq. 4", "±", "Eq. 7", *(f"Eq. 8, {scale:g}" for scale in scales))
    for case, row in results:
        table.add_row(str(case.dimension), f"{case.spread:g}", f"{case.temperature:g}", *_losses(row))
    out.print(table)
    say(
        f"Gaussian keys, {draws:,} drawn for each of {pluralize(images, 'image')}. sd: of q·k/t. Eq. 4: the loss with "
        "infinitely many keys, ± its standard error. Eq. 7: Jensen's bound, sampled too. Eq. 8: in closed form, by its "
        "scale."
    )
    if 1.0 in scales:
        worst_case, worst = max(results, key=lambda result: result[1].gap(1.0))
        say(
            f"At scale 1 the bound lies at most {worst.gap(1.0):.3g} above Eq. 4, where d = {worst_case.dimension}, "
            f"spread {worst_case.spread:g}, t = {worst_case.temperature:g}."
        )
    _warn_of_small_scales(scales)


def print_run_bound(bounds: RunBounds) -> None:
    """The losses of a run's keys at each checkpoint, and how Gaussian the keys are."""
    scales = list(bounds.steps[0].row.closed)
    table = _table("step", "sd", "Eq. 4", "±", "Eq. 7", *(f"Eq. 8, {scale:g}" for scale in scales))
    for each in bounds.steps:
        table.add_row(str(each.step), *_losses(each.row))
    out.print(table)
    say(
        f"{bounds.keys} views of each of {pluralize(bounds.images, 'image')} as keys, t = {bounds.temperature:g}, "
        "the run's queue as negatives. sd: of q·k/t. Eq. 4: the mean over the keys, ± its standard error. Eq. 7: "
        f"Jensen's bound. Eq. 8: the closed form, by its scale (the run's own is {bounds.own_scale:g})."
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
        "Of q·k over the views of an image: medians over the images, and the share of images that a test at 5 % finds "
        f"not Gaussian (D'Agostino and Pearson). Gaussian draws of the same size: {bounds.reference.rejected():.1f} %."
    )
    last = bounds.steps[-1].row
    say(
        f"At the last checkpoint Jensen's bound lies {last.jensen - last.infinite:.3g} above Eq. 4; Eq. 8 at scale 1, "
        f"which takes the keys for Gaussian, lies {last.closed[1.0] - last.jensen:+.3g} from it."
    )
    _warn_of_small_scales(scales)


def _warn_of_small_scales(scales: Sequence[float]) -> None:
    if min(scales) < 1:
        say("Eq. 8 bounds the loss for scales of 1 and more; below 1 it is no bound and may lie under Eq. 4.")


def _losses(row: BoundRow) -> list[str]:
    closed = [f"{value:.4f}" for value in row.closed.values()]
    return [f"{row.deviation:.2f}", f"{row.infinite:.4f}", f"{row.infinite_error:.0e}", f"{row.jensen:.4f}", *closed]


def print_cost(report: CostReport) -> None:
    """Memory and time of each method over the number of keys, and how they grow."""
    from jcl.commands.cost import COMPARED, TITLES
    from jcl.studies.cost import baseline, growth

    base = baseline(report.cells)
    table = _table("method", "keys", "memory", "× MoCo v2", "ms a step", "× MoCo v2")
    before = ""
    for cell in report.cells:
        if cell.method != before:
            table.add_section()
        title = TITLES[cell.method] if cell.method != before else ""
        before = cell.method
        if cell.cost is None:
            table.add_row(title, str(cell.keys), "out of memory", "", "", "")
            continue
        memory, taken = cell.cost.bytes, cell.cost.milliseconds
        ratios = ("", "") if base is None else (f"{memory / base.bytes:.2f}", f"{taken / base.milliseconds:.2f}")
        table.add_row(title, str(cell.keys), readable_size(memory), ratios[0], f"{taken:,.1f}", ratios[1])
    out.print(table)
    how = "as PyTorch's allocator counts it" if report.on_gpu else "as PyTorch's profiler sees it allocated and freed"
    say(f"{report.described()}. Memory: the most that is held at any moment of a step, weights included, {how}.")
    for method in COMPARED:
        line = growth(report.cells, method)
        if line is not None:
            say(f"{TITLES[method]}: {described_growth(line, base)}.")
    if report.doubt():
        say(report.doubt())
    say(
        "Without gradients keys are encoded in parts, as many as train.key_passes says, so that memory need not grow; "
        "small parts, as on a CPU, cost time."
    )


def described_growth(line: Growth, base: StepCost | None) -> str:
    """How memory grows with the keys, in words; what is lost in MoCo v2's memory is no growth."""
    if base is not None and abs(line.bytes_per_key) < _NO_GROWTH * base.bytes:
        return "memory does not grow with the keys"
    return f"{readable_size(line.bytes_per_key)} more with each key (R² of a straight line: {line.fit:.3f})"


def _table(first: str, *others: str) -> Table:
    table = Table(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
