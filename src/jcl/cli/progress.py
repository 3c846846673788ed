"""A bar for work that is counted: it shows in a terminal, and nothing of it is left in a log."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from jcl.cli.app import err, rank


@contextlib.contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that is told how many of how many are done; of several ranks the first shows it."""
    from rich.progress import Progress

    with Progress(console=err, transient=True, disable=rank > 0 or not err.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
