"""Commands that train with several values of a setting."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from jcl.cli.app import STUDY, err, out
from jcl.cli.options import command
from jcl.cli.printing import in_table, say, say_strangers, tested_on, write_json
from jcl.console import pluralize

if TYPE_CHECKING:
    from jcl.commands.ablate import Ablation
    from jcl.settings.studies import AblateCellOptions, AblateOptions
    from jcl.studies.ablation import Point


@command("ablate", "studies.AblateOptions", group=STUDY)
def ablate(options: AblateOptions) -> None:
    """Train with several values of a setting and plot the accuracy.

    The same command again continues where it stopped; finished cells are kept.
    With --engine ray, --out must be on a file system that all nodes share:
    a cell whose node dies continues from its checkpoint on another.

    [dim]jcl ablate cifar10 --over num_keys=1,2,3,5,7,9,11 --seeds 3[/]
    """
    from jcl.commands.ablate import ablate as run
    from jcl.commands.ablate import write_plan

    if options.plan_only:
        folder, total, done = write_plan(options, err)
        cells = pluralize(total, "cell") + (f" ({done:,} already done)" if done else "")
        say(f"Planned {cells} in {folder}; run each with `jcl ablate-cell CELL`.")
        return
    found = run(options, err)
    _print(found)
    write_json(dict(found.results), options.json_file)
    found.raise_if_incomplete()


@command("ablate-cell", "studies.AblateCellOptions", group=STUDY)
def ablate_cell(options: AblateCellOptions) -> dict[str, Any]:
    """Train and measure one cell of an ablation, or continue it.

    `jcl ablate` starts this; so can the job arrays of a scheduler.
    """
    from jcl.commands.ablation_cell import run_cell
    from jcl.studies.engines import stop_with_parent

    stop_with_parent()
    result = run_cell(options.folder, workers=options.workers, console=err)
    say(f"linear top-1 {result['linear_top1']:.2f} %, kNN top-1 {result['knn_top1']:.2f} %")
    say_strangers(result.get("unseen_class_images", 0))  # older versions did not write it
    return result


def _print(found: Ablation) -> None:
    from jcl.runs.json_object import written
    from jcl.studies.ablation import best_of, best_points
    from jcl.studies.cells import describe, short_name

    if not any(point.results or point.failed for point in found.points):
        return
    best, tied = best_of(found.points), best_points(found.points)
    table = Table(*(in_table(short_name(name)) for name in found.names))
    for title in ("linear top-1", "kNN top-1", "validation", "seeds"):
        table.add_column(title, justify="right")
    for point in found.points:
        values = [in_table(written(point.values[name])) for name in found.names]
        failed = f" ({point.failed} failed)" if point.failed else ""
        means = [_mean(point, metric) for metric in ("linear_top1", "knn_top1", "validation_top1")]
        table.add_row(*values, *means, f"{len(point.results)}{failed}", style="bold" if point is best else None)
    out.print(table)
    if found.results["cells_done"]:
        say(tested_on(found.results))
    say_strangers(found.results["unseen_class_images"])
    if best is not None:
        say(f"Best on held-out training images (validation): {describe(best.values)}.")
    elif len(tied) > 1:
        say(f"{len(tied)} values are tied on held-out training images (validation).")
    plot = "plot in ablation.png, " if (found.folder / "ablation.png").is_file() else ""
    say(f"Results are in {found.folder}: {plot}all cells in ablation.csv.")


def _mean(point: Point, metric: str) -> str:
    mean, spread = point.mean(metric), point.spread(metric)
    if mean is None:
        return ""
    return f"{mean:.2f}" if spread is None else f"{mean:.2f} ± {spread:.2f}"
