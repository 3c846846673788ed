"""Where a training happens: as which rank, on which device, and who is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from jcl.console import StderrConsole, print_line
from jcl.distributed.group import Ranks, fail_together
from jcl.runs.folder import starting_folder
from jcl.runs.lock import RunLock


def console_of(ranks: Ranks, console: Console | None) -> Console:
    """The first rank speaks for all: to the console it was given, or to standard error."""
    return (console or StderrConsole()) if ranks.first else Console(quiet=True)


@dataclass(frozen=True)
class RunContext:
    """As which rank, on which device, and who is told."""

    ranks: Ranks
    device: torch.device
    console: Console

    def say(self, text: str) -> None:
        print_line(self.console, text)

    @contextlib.contextmanager
    def starting(self, wanted: Path, *, numbered: bool) -> Iterator[Path]:
        """The folder of work that starts now, as `starting_folder` has it; the first rank makes it and names it."""
        with contextlib.ExitStack() as made:
            folder = starting_folder(wanted, numbered=numbered)
            path = fail_together(self.ranks, lambda: made.enter_context(folder) if self.ranks.first else wanted)
            yield Path(self.ranks.from_first(str(path).encode()).decode())

    @contextlib.contextmanager
    def locked(self, folder: Path) -> Iterator[None]:
        """Keep other processes out of the folder; the first rank holds the lock for all."""
        with contextlib.ExitStack() as held:
            lock = RunLock(folder, warn=self.say)
            fail_together(self.ranks, lambda: held.enter_context(lock) if self.ranks.first else None)
            yield
