"""Output of the commands. Of several ranks, only the first prints and writes."""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Column, Table

from jcl.console import STDERR, ProgressCallback, RobustConsole, escape_controls, pluralize, print_line, shell_quote
from jcl.distributed.launch import launch_environment
from jcl.errors import SettingsError
from jcl.paths import expand_user
from jcl.runs.json_object import write_object


def _own_rank() -> int:
    """The rank of this process; 0 if the launcher's variables are incomplete. Commands that use ranks report that."""
    try:
        return launch_environment().rank if "MASTER_ADDR" in os.environ else 0
    except SettingsError:
        return 0


rank = _own_rank()
out = RobustConsole(quiet=rank > 0)  # only the first rank prints results
err = STDERR


def write_json(figures: dict[str, Any], path: Path | None) -> None:
    """Write results to the file given by --json."""
    if path is not None and rank == 0:
        write_object(path, figures, follow_links=True)


def escape_cell(text: str) -> str:
    """Escape text for a table cell: one line, without markup or control characters."""
    return escape(escape_controls(text).replace("\n", "\\n"))


def text_table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "", right: bool = False) -> Table:
    """A table of any text; `right` aligns all columns but the first to the right."""
    columns = [Column(escape_cell(name), overflow="fold", justify="right" if right else "left") for name in titles]
    columns[0].justify = "left"
    table = Table(*columns, title=escape_cell(title))
    for row in rows:
        table.add_row(*map(escape_cell, row))
    return table


def echo(text: str) -> None:
    print_line(out, text)


def print_test(figures: Mapping[str, Any], name: str = "", lead: str = "") -> None:
    """Print the number of test images, and the interval and baselines of the accuracy `name`."""
    from jcl.evaluate.baselines import baseline_warning

    held_out = ", held out of the training images because there is no labeled test set"
    source = held_out if figures.get("test_held_out") else ""
    echo(f"{lead}Tested on {pluralize(figures['test_images'], 'image')}{source}.")
    if name:
        untrained = figures.get(f"untrained_{name}")
        network = "" if untrained is None else f"; an untrained network has {untrained:.2f} %"
        low, high = figures[f"{name}_interval_low"], figures[f"{name}_interval_high"]
        echo(f"95 % interval of top-1: {low:.1f} to {high:.1f} %{network}; chance is {figures['chance_top1']:.2f} %.")
        if warning := baseline_warning(name, figures):
            echo(f"Warning: {warning}")
    if unseen := figures.get("unseen_class_images", 0):
        images = pluralize(unseen, "test image has a class", "test images have classes")
        echo(f"{images} unseen in training; counted as errors.")


def refuse_swapped(weights: Path | None, data: str) -> None:
    """Raise if the arguments RUN_OR_WEIGHTS and DATA were given in the wrong order."""
    from jcl.runs.folder import RunFolder

    if weights is None or (weights.is_file() and weights.suffix != ".npz") or RunFolder(weights).holds_run():
        return
    found = expand_user(data)
    if RunFolder(found).holds_run() or (found.is_file() and found.suffix in (".safetensors", ".pth", ".pt")):
        right = f"jcl {sys.argv[1]} {shell_quote(found)} {shell_quote(weights)}"
        raise SettingsError(f"The arguments are swapped; give the run first and then the data: `{right}`.")


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[ProgressCallback]:
    """A progress bar in a terminal; yields its update function, called with the numbers done and in total."""
    from rich.progress import Progress

    with Progress(console=err, transient=True, disable=rank > 0 or not err.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
