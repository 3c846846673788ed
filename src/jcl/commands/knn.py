"""How well nearest neighbours tell classes by the features of a run or a weights file: what `jcl knn` calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from jcl.commands.context import console_of
from jcl.commands.target import open_target
from jcl.console import StderrConsole, print_line
from jcl.cores import usual_workers
from jcl.distributed.group import joined_ranks
from jcl.evaluate.knn import KnnResult
from jcl.evaluate.online import knn_on
from jcl.settings.resolve import voters

RANK_TIMEOUT = 1800.0
"""Seconds that ranks wait for each other while features are measured."""


def measure_knn(
    weights: Path,
    location: str | None,
    *,
    k: Sequence[int],
    temperature: Sequence[float],
    batch_size: int = 256,
    workers: int | None = None,
    device: str = "auto",
    console: Console | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[KnnResult]:
    """Weighted kNN of a run's or file's frozen features on the data at `location` (default: the run's own).

    Without `k` as many vote as in a run on these images. Ranks that a launcher started share the images and the queries
    out among them. Images that cannot be read are left out, which is told. `progress` is told how many of how many
    images are done, of the training and then of the test set.
    """
    with joined_ranks(device, RANK_TIMEOUT) as (ranks, target):
        subject = open_target(weights, location, str(target), console_of(ranks, console))
        decoding = max(1, usual_workers() // ranks.count) if workers is None else workers
        told = console or StderrConsole()
        features = partial(subject.features, batch_size=batch_size, workers=decoding, console=told, progress=progress)
        data, votes = subject.data, k or [voters(len(subject.data.train))]
        if ranks.first and (data.test is None or data.test.labels is None):
            said = "For want of a labelled test set some of the training images are held out to ask about."
            print_line(told, said)
        return knn_on(data, features, k=votes, temperature=temperature, device=target, ranks=ranks)
