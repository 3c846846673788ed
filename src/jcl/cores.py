"""CPU cores, and the processes that decode images on them."""

import os

from jcl.signals import signals_blocked

MAX_WORKERS = 16


def cpu_cores() -> int:
    """CPU cores available to this process; in a container or a job these may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def default_workers(ranks: int = 1) -> int:
    """Default number of decoding processes of each rank: one per core of its share, 16 at most."""
    return max(1, min(MAX_WORKERS, cpu_cores() // ranks))


def start_forkserver() -> None:
    """Start the process that decoding processes are forked from. It imports torch once for all of them."""
    import multiprocessing.forkserver  # here, for a quick `jcl --help`

    multiprocessing.get_context("forkserver").set_forkserver_preload(["jcl.data.batch"])
    with signals_blocked():
        multiprocessing.forkserver.ensure_running()
