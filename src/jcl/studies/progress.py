"""How far an ablation is: a bar in a terminal, and everywhere one line for each cell that ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jcl.studies.cell_process import Outcome
from jcl.studies.cells import Cell


class AblationDisplay:
    """Tells a person what happens to the cells."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total = self._ended = 0
        self._bar: Progress | None = None

    @contextlib.contextmanager
    def of(self, folder: Path, total: int, todo: int) -> Iterator[None]:
        """Around the work on `todo` of `total` cells."""
        kept = f"; {total - todo} done before are kept" if total > todo else ""
        cells = "1 cell" if total == 1 else f"{total} cells"
        self.say(f"{cells} into {folder}{kept}. Each cell's log.txt tells how it is doing.")
        self._total, self._ended = total, total - todo
        columns = (TextColumn("cells"), BarColumn(bar_width=None), MofNCompleteColumn())
        self._bar = Progress(
            *columns,
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
            expand=True,
        )
        with self._bar:
            self._task = self._bar.add_task("cells", total=total, completed=self._ended)
            yield

    def tell(self, cell: Cell, outcome: Outcome, result: Mapping[str, Any] | None) -> None:
        """A cell has ended."""
        if outcome.state == "stopped":
            self.say(f"{cell.words}: stopped; it goes on where it was when the command is given again.")
            return
        self._ended += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._ended)
        self.say(f"[{self._ended}/{self._total}] {cell.words}: {_found(outcome, result)}")

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _found(outcome: Outcome, result: Mapping[str, Any] | None) -> str:
    if result is None:
        return f"failed: {outcome.sentence}"
    accuracies = f"linear {result['linear_top1']:.2f} %, kNN {result['knn_top1']:.2f} %"
    return f"{accuracies} ({duration(result['seconds'])} of training)"


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
