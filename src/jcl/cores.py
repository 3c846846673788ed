"""How many processors there are for this process, and how many of them decode images."""

from __future__ import annotations

import os

MOST_WORKERS = 16


def cpu_cores() -> int:
    """The processors that this process may use, which in a container or a job can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def usual_workers() -> int:
    """One process a core to decode images, 16 at most; arrays are not decoded and take none anyway."""
    return min(MOST_WORKERS, cpu_cores())
