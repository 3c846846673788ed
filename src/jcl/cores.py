"""Numbers of CPU cores and image decoding processes."""

import os

MAX_WORKERS = 16


def cpu_cores() -> int:
    """CPU cores available to this process; in a container or a job these may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def default_workers() -> int:
    """Default number of decoding processes: one per core, 16 at most."""
    return min(MAX_WORKERS, cpu_cores())
