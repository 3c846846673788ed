"""kNN accuracy of the features of a run or weights file (`jcl knn`)."""

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
from jcl.settings.resolve import default_knn_k

RANK_TIMEOUT = 1800.0  # seconds that ranks wait for each other while features are extracted


def measure_knn(
    options: KnnOptions,
    *,
    console: Console | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[KnnResult]:
    """Weighted kNN of the frozen features of a run or file on labelled data (default: the data of the run).

    The default k is that of a run on these images. Ranks started by a launcher share the images and the queries.
    `progress` is called with the number of images done and their total, for the training and then the test set.
    """
    with joined_ranks(options.device, RANK_TIMEOUT) as (ranks, device):
        target = open_target(options.weights, options.data, str(device), console_of(ranks, console))
        workers = max(1, usual_workers() // ranks.count) if options.workers is None else options.workers
        console = console or StderrConsole()
        features = partial(
            target.features, batch_size=options.batch_size, workers=workers, console=console, progress=progress
        )
        data, k = target.data, options.k or [default_knn_k(len(target.data.train))]
        if ranks.first and (data.test is None or data.test.labels is None):
            print_line(console, "No labelled test set: some training images are held out as queries.")
        return knn_on(data, features, k=k, temperature=options.temperature, device=device, ranks=ranks)
