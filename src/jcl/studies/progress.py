"""How far an ablation is: a bar in a terminal, and everywhere one line for each cell that ends."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, ProgressColumn, Task, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from jcl.console import duration, pluralize, print_line
from jcl.runs.lock import NAME as LOCK
from jcl.studies.cell_process import Outcome
from jcl.studies.cells import Cell
from jcl.train.display import progress_bar

_SECONDS_BETWEEN_LOOKS = 2.0
_SHOWN_AT_ONCE = 3
_NEWEST_BYTES = 4096  # of the metrics: more than a line


class AblationDisplay:
    """Tells a person what happens to the cells."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total = self._ended = 0
        self._bar: Progress | None = None

    @contextlib.contextmanager
    def of(self, folder: Path, total: int, todo: Mapping[Path, Cell]) -> Iterator[None]:
        """Around the work on those of `total` cells that are to do."""
        done = total - len(todo)
        kept = f"; {done} done before are kept" if done else ""
        self.say(f"{pluralize(total, 'cell')} into {folder}{kept}. Each cell's log.txt tells how it is doing.")
        self._total, self._ended = total, done
        one_line = Column(no_wrap=True)
        self._bar = progress_bar(
            self._console,
            MofNCompleteColumn(table_column=one_line),
            _Epochs(todo),
            TimeElapsedColumn(table_column=one_line),
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
        print_line(self._console, text)


class _Epochs(ProgressColumn):
    """How far the cells are that are being trained, looked up now and then."""

    def __init__(self, todo: Mapping[Path, Cell]) -> None:
        super().__init__(Column(no_wrap=True))
        self._todo = todo
        self._text, self._looked = Text(""), -math.inf

    def render(self, task: Task) -> Text:
        if time.monotonic() - self._looked > _SECONDS_BETWEEN_LOOKS:
            shown = [text for folder, cell in self._todo.items() if (text := _epoch(folder, cell)) is not None]
            more = ", ..." if len(shown) > _SHOWN_AT_ONCE else ""
            self._text = Text(f"epoch {', '.join(shown[:_SHOWN_AT_ONCE])}{more}" if shown else "")
            self._looked = time.monotonic()
        return self._text


def _epoch(folder: Path, cell: Cell) -> str | None:
    """Which epoch a cell is in, if it is being trained; by the newest line of its metrics."""
    if not (folder / LOCK).exists():
        return None
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError), (folder / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _NEWEST_BYTES))
        newest = json.loads(file.read().splitlines()[-1])
        return f"{math.ceil(newest['epoch'])}/{cell.settings.train.epochs}"
    return None


def _found(outcome: Outcome, result: Mapping[str, Any] | None) -> str:
    if result is None:
        return f"failed: {outcome.sentence}"
    accuracies = f"linear {result['linear_top1']:.2f} %, kNN {result['knn_top1']:.2f} %"
    return f"{accuracies} ({duration(result['seconds'])} of training)"
