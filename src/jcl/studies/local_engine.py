"""Cells on this machine: one after another, or several at once, on its CPU or dealt out to its GPUs."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jcl.cores import cpu_cores
from jcl.studies.cell_process import SECONDS_BETWEEN_LOOKS, CellProcess, Outcome
from jcl.train.stop import StopRequest

Engine = Callable[[Sequence[Path], StopRequest], Iterator[Outcome]]
"""Carries cells out, tells of each as it ends, and lets them save themselves when asked to stop."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Slot:
    """A place for one cell at a time: the variables its process gets, and how many processes may decode images."""

    environment: dict[str, str] = field(default_factory=dict)
    workers: int | None = None


def local_slots(device: str, at_once: int) -> list[Slot]:
    """`at_once` places on each GPU, where the device is "auto" or "cuda" and there are any, or else in all."""
    gpus = _gpus() if device in ("auto", "cuda") else []
    count = at_once * max(1, len(gpus))
    if count == 1:
        return [Slot()]
    share = max(1, cpu_cores() // count)
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share))}
    # Neighbours in the list are on different GPUs, so that a few cells do not share one while others idle.
    return [Slot(threads | ({_VISIBLE: gpus[number % len(gpus)]} if gpus else {}), share) for number in range(count)]


def _gpus() -> list[str]:
    """The GPUs that are there for us, by the names that make them visible."""
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get(_VISIBLE, "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]


def local_engine(slots: Sequence[Slot]) -> Engine:
    """Runs each cell in a process of its own, one in each slot at a time."""

    def run(folders: Sequence[Path], stop: StopRequest) -> Iterator[Outcome]:
        waiting, running = deque(folders), dict[int, CellProcess]()
        try:
            while running or (waiting and not stop.requested):
                for number, slot in enumerate(slots):
                    if number not in running and waiting and not stop.requested:
                        folder = waiting.popleft()
                        running[number] = CellProcess(folder, workers=slot.workers, environment=slot.environment)
                if stop.requested:
                    for process in running.values():
                        process.ask_to_stop()
                ended = [number for number, process in running.items() if process.ended]
                for number in ended:
                    yield running.pop(number).outcome()
                if not ended:
                    time.sleep(SECONDS_BETWEEN_LOOKS)
        finally:  # nobody waits for them any more
            for process in running.values():
                process.kill()

    return run
