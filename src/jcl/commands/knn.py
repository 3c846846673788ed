"""How well nearest neighbours tell classes by the features of a run or a weights file: what `jcl knn` calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rich.console import Console

from jcl.commands.context import console_of
from jcl.commands.target import open_target
from jcl.console import StderrConsole, print_line
from jcl.cores import usual_workers
from jcl.distributed.group import joined_ranks
from jcl.evaluate.knn import KnnResult, knn_on
from jcl.settings.evaluation import KnnOptions
from jcl.settings.resolve import voters

RANK_TIMEOUT = 1800.0
"""Seconds that ranks wait for each other while features are measured."""


def measure_knn(
    options: KnnOptions,
    *,
    console: Console | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[KnnResult]:
    """Weighted kNN of a run's or file's frozen features on labelled data (default: the data of the run).

    Without `k` as many vote as in a run on these images. Ranks that a launcher started share the images and the queries
    out among them. Images that cannot be read are left out, which is told. `progress` is told how many of how many
    images are done, of the training and then of the test set.
    """
    with joined_ranks(options.device, RANK_TIMEOUT) as (ranks, target):
        subject = open_target(options.weights, options.data, str(target), console_of(ranks, console))
        workers = max(1, usual_workers() // ranks.count) if options.workers is None else options.workers
        told = console or StderrConsole()
        features = partial(
            subject.features, batch_size=options.batch_size, workers=workers, console=told, progress=progress
        )
        data, votes = subject.data, options.k or [voters(len(subject.data.train))]
        if ranks.first and (data.test is None or data.test.labels is None):
            said = "For want of a labelled test set some of the training images are held out to ask about."
            print_line(told, said)
        return knn_on(data, features, k=votes, temperature=options.temperature, device=target, ranks=ranks)
