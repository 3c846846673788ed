"""Memory and time of a training step over the number of keys: the comparison in the paper's supplement.

Memory is the peak that PyTorch held during a step, including weights, optimizer state and images: on a GPU as reported
by the caching allocator, on a CPU as recorded by the profiler.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from jcl.errors import JclError

Argument = TypeVar("Argument")
Result = TypeVar("Result")
Step = Callable[[], object]
BASELINE = "moco-v2"


@dataclass(frozen=True)
class StepCost:
    """The cost of one step."""

    bytes: int
    milliseconds: float
    spread: float = 0.0  # interquartile range of the timed steps, in milliseconds


@dataclass(frozen=True)
class Cell:
    """A method with a number of keys; the cost is None if it ran out of memory."""

    method: str
    keys: int
    cost: StepCost | None


def measure_step(build: Callable[[], Step], device: torch.device, *, repeats: int) -> StepCost:
    """Build a step, warm it up, and time it `repeats` times.

    Reports the median on a GPU, and the minimum on a CPU, which other processes disturb.
    """
    return _measure_on_gpu(build, device, repeats) if device.type == "cuda" else _measure_on_cpu(build, repeats)


def _measure_on_gpu(build: Callable[[], Step], device: torch.device, repeats: int) -> StepCost:
    step = build()
    for _ in range(3):  # selects kernels and creates the optimizer state, which may take more memory
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
    return StepCost(torch.cuda.max_memory_allocated(device), statistics.median(times), _interquartile_range(times))


def _measure_on_cpu(build: Callable[[], Step], repeats: int) -> StepCost:
    # The profiler must see the weights allocated. The second step is the first with all of the optimizer state.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step = build()
        for _ in range(2):
            step()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - started))
    return StepCost(_peak_bytes(profile), min(times), _interquartile_range(times))


def _interquartile_range(times: Sequence[float]) -> float:
    lower, upper = np.quantile(times, [0.25, 0.75])
    return float(upper - lower)


def _peak_bytes(profile: torch.profiler.profile) -> int:
    results: Any = profile.profiler.kineto_results if profile.profiler else None
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda change: change[0])  # stable: simultaneous events keep their order
    return int(np.cumsum([size for _, size in changes]).max())


def run_in_subprocess(work: Callable[[Argument], Result], argument: Argument) -> Result | None:
    """Call `work(argument)` in a fresh process; returns None if it ran out of memory.

    Nothing measured before affects the process, and all of its memory is freed. Everything passed must pickle.
    """
    context: Any = multiprocessing.get_context("spawn")
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([work.__module__])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(work, argument, sender), daemon=True)
    process.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode != -signal.SIGKILL:  # which the system sends when memory runs out
            raise JclError(f"a measuring process exited with code {process.exitcode}; see its output.") from None
        answer = None
    finally:
        receiver.close()
        process.terminate()
        process.join()
    if isinstance(answer, BaseException):
        raise answer
    result: Result | None = answer
    return result


def _send_result(
    work: Callable[[Argument], Result], argument: Argument, sender: multiprocessing.connection.Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with contextlib.suppress(OSError):  # if memory runs out, the system should kill this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    os.environ["KINETO_LOG_LEVEL"] = "99"
    answer: Any
    try:
        answer = work(argument)
    except (torch.OutOfMemoryError, MemoryError):
        answer = None
    except (JclError, RuntimeError) as error:
        # The CPU allocator raises a plain RuntimeError.
        answer = None if "DefaultCPUAllocator" in str(error) else error
    sender.send(answer)


@dataclass(frozen=True)
class Growth:
    """A line fitted to a method's memory over its keys, and its R²."""

    bytes_per_key: float
    fit: float


def growth(cells: Sequence[Cell], method: str) -> Growth | None:
    """How a method's memory grows with the keys; None with fewer than three measurements."""
    found = [(cell.keys, cell.cost.bytes) for cell in cells if cell.method == method and cell.cost is not None]
    if len(found) < 3:
        return None
    keys, memory = np.array(found, dtype=np.float64).T
    slope, intercept = np.polyfit(keys, memory, 1)
    residuals = memory - (intercept + slope * keys)
    total = float(((memory - memory.mean()) ** 2).sum())
    return Growth(float(slope), 1 - float((residuals**2).sum()) / total if total > 0 else 1.0)


def reliable_increases(cells: Sequence[Cell]) -> list[bool]:
    """Whether a step takes longer by more than the noise, from each number of keys of a method to the next.

    The baseline stands in for one key if that is missing.
    """
    found = []
    for method in dict.fromkeys(cell.method for cell in cells if cell.method != BASELINE):
        own = [cell for cell in cells if cell.method == method]
        costs = [baseline(cells)] if own[0].keys > 1 else []
        for fewer, more in itertools.pairwise(cost for cost in costs + [cell.cost for cell in own] if cost is not None):
            found.append(more.milliseconds - fewer.milliseconds >= max(fewer.spread, more.spread))
    return found


def baseline(cells: Sequence[Cell]) -> StepCost | None:
    """The cost of MoCo v2, which everything is compared with."""
    return next((cell.cost for cell in cells if cell.method == BASELINE), None)


def most_keys(cells: Sequence[Cell], method: str) -> Cell | None:
    """The cell of a method with the most keys that fit into memory."""
    fitting = [cell for cell in cells if cell.method == method and cell.cost is not None]
    return max(fitting, key=lambda cell: cell.keys, default=None)
