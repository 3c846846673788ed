"""The figures of a finished run for a person: plain names, and units that read well; JSON keeps the bare values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from jcl.cli.printing import in_table
from jcl.console import duration, readable_size

_Write = Callable[[Any], str]


def _percent(share: float) -> str:
    return f"{share:.1f} %"


def _whole(number: float) -> str:
    return f"{number:,}"


# By the names in summary.json; the title says the rest.
_ROWS: dict[str, tuple[str, _Write]] = {
    "knn_top1": ("kNN top-1", _percent),
    "knn_top5": ("kNN top-5", _percent),
    "contrastive_accuracy": ("queries that find their own image first", _percent),
    "loss": ("loss", "{:.3f}".format),
    "epochs": ("epochs", _whole),
    "steps": ("steps", _whole),
    "skipped_steps": ("steps skipped, the loss not being finite", _whole),
    "seconds": ("training time", duration),
    "images_per_second": ("images a second", "{:,.1f}".format),
    "peak_memory_bytes": ("peak memory", readable_size),
    "ranks": ("ranks", _whole),
    "seed": ("seed", str),  # as it is typed
}


def run_table(summary: Mapping[str, Any]) -> Table:
    """What the features are worth first, then what they took; figures that a run does not have are left out."""
    table = Table("figure", title=in_table(f"{summary['method']} on {Path(summary['data']).name}"))
    table.add_column("value", justify="right")
    for name, (words, write) in _ROWS.items():
        if summary.get(name) is not None and (name, summary[name]) != ("ranks", 1):
            table.add_row(words, write(summary[name]))
    return table
