"""Memory and time of a training step over the number of keys: the comparison in the paper's supplement.

Memory is the most that PyTorch held at any moment of a step, weights, optimiser and images included: on a GPU as its
allocator counts it, on a CPU as the profiler sees it allocate and free. What libraries below it take for themselves is
not in it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Step = Callable[[], object]
BASELINE = "moco-v2"


@dataclass(frozen=True)
class StepCost:
    """What one step takes."""

    bytes: int
    milliseconds: float
    spread: float = 0.0  # in milliseconds, from the lower to the upper quartile of the timed steps


@dataclass(frozen=True)
class Cell:
    """A method with a number of keys; None for a cost means that it did not fit into the memory."""

    method: str
    keys: int
    cost: StepCost | None


def measure_step(build: Callable[[], Step], device: torch.device, *, repeats: int) -> StepCost:
    """Build a step and carry it out: some steps unmeasured, then `repeats` timed ones.

    On a GPU their median counts, on a CPU the fastest, which was the least disturbed by what else the machine does.
    """
    return _on_gpu(build, device, repeats) if device.type == "cuda" else _on_cpu(build, repeats)


def _on_gpu(build: Callable[[], Step], device: torch.device, repeats: int) -> StepCost:
    step = build()
    for _ in range(3):  # kernels are chosen and the optimiser's state is made, which may take more than a step does
        step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        step()
        end.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(end))
    return StepCost(torch.cuda.max_memory_allocated(device), statistics.median(times), _spread(times))


def _on_cpu(build: Callable[[], Step], repeats: int) -> StepCost:
    # Everything is built within the profiler's sight, or it would not know of the weights. The second step is the
    # first that has all of the optimiser's state.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step = build()
        for _ in range(2):
            step()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - started))
    return StepCost(_peak(profile), min(times), _spread(times))


def _spread(times: Sequence[float]) -> float:
    lower, upper = np.quantile(times, [0.25, 0.75])
    return float(upper - lower)


def _peak(profile: torch.profiler.profile) -> int:
    """The most bytes that were allocated and not yet freed."""
    results: Any = profile.profiler.kineto_results if profile.profiler else None
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])  # what happens at once stays in order
    return int(np.cumsum([size for _, size in changes]).max())


@dataclass(frozen=True)
class Growth:
    """A straight line through a method's memory over its keys, and how well it fits (1: exactly)."""

    bytes_per_key: float
    fit: float


def growth(cells: Sequence[Cell], method: str) -> Growth | None:
    """How a method's memory grows; None where fewer than three numbers of keys fitted."""
    found = [(cell.keys, cell.cost.bytes) for cell in cells if cell.method == method and cell.cost is not None]
    if len(found) < 3:
        return None
    keys, memory = np.array(found, dtype=np.float64).T
    slope, start = np.polyfit(keys, memory, 1)
    left = memory - (start + slope * keys)
    total = float(((memory - memory.mean()) ** 2).sum())
    return Growth(float(slope), 1 - float((left**2).sum()) / total if total > 0 else 1.0)


@dataclass(frozen=True)
class MoreKeys:
    """What a step takes longer for more keys, in milliseconds, and how much equal steps differ."""

    longer: float
    spread: float

    @property
    def in_doubt(self) -> bool:
        """More keys take longer, always; where they seem not to, something else was timed."""
        return self.longer < self.spread


def more_keys(cells: Sequence[Cell]) -> list[MoreKeys]:
    """From each number of keys of a method to the next; where one key is missing, MoCo v2 stands in for it."""
    found = []
    for method in dict.fromkeys(cell.method for cell in cells if cell.method != BASELINE):
        own = [cell for cell in cells if cell.method == method]
        costs = [cell.cost for cell in own]
        if own[0].keys > 1:
            costs.insert(0, baseline(cells))
        fitting = [cost for cost in costs if cost is not None]
        for fewer, more in itertools.pairwise(fitting):
            found.append(MoreKeys(more.milliseconds - fewer.milliseconds, max(fewer.spread, more.spread)))
    return found


def baseline(cells: Sequence[Cell]) -> StepCost | None:
    """MoCo v2, which everything is compared with."""
    return next((cell.cost for cell in cells if cell.method == BASELINE), None)


def most_keys(cells: Sequence[Cell], method: str) -> Cell | None:
    """The cell of a method with the most keys that fitted."""
    fitting = [cell for cell in cells if cell.method == method and cell.cost is not None]
    return max(fitting, key=lambda cell: cell.keys, default=None)
