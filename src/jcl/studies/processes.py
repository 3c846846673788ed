"""Runs the cells of an ablation on this machine, each as a `jcl ablate-cell FOLDER` process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from jcl.cores import cpu_cores
from jcl.errors import Interrupted, RunError
from jcl.runs.atomic import OpenFolder
from jcl.signals import STARTED_BY, STOP_SIGNALS, StopRequest
from jcl.studies.ablation import CellFolder

_POLL_SECONDS = 0.2
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Outcome:
    """How a cell's process ended; a stopped cell continues when it is started again."""

    folder: Path
    state: Literal["done", "failed", "stopped"]
    error: str = ""


RunCells = Callable[[Sequence[Path], StopRequest], Iterator[Outcome]]
"""Runs the cells in these folders, yields each outcome, and stops them gracefully on request."""


@dataclass(frozen=True)
class Slot:
    """Room for one cell at a time: environment variables of its process and its number of loader workers."""

    environment: dict[str, str] = field(default_factory=dict)
    workers: int | None = None


def local_slots(device: str, at_once: int) -> list[Slot]:
    """`at_once` slots for each GPU if the device is "auto" or "cuda" and there are any, else in total."""
    gpus = _visible_gpus() if device in ("auto", "cuda") else []
    count = at_once * max(1, len(gpus))
    if count == 1:
        return [Slot()]
    share = max(1, cpu_cores() // count)
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share))}
    # Consecutive slots use different GPUs, so a few cells spread over all of them.
    gpu_of = [{_VISIBLE_DEVICES: gpus[number % len(gpus)]} if gpus else {} for number in range(count)]
    return [Slot(threads | gpu, share) for gpu in gpu_of]


def _visible_gpus() -> list[str]:
    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get(_VISIBLE_DEVICES, "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]


def run_in_slots(slots: Sequence[Slot], folders: Sequence[Path], stop: StopRequest) -> Iterator[Outcome]:
    """Run cells one at a time in each slot."""
    waiting, running, stopping = deque(folders), dict[int, CellProcess](), False
    try:
        while running or (waiting and not stop.requested):
            for number, slot in enumerate(slots):
                if number not in running and waiting and not stop.requested:
                    running[number] = CellProcess(waiting.popleft(), slot)
            if stop.requested and not stopping:
                stopping = True
                for cell in running.values():
                    cell.process.terminate()  # it saves a checkpoint first
            ended = [number for number, cell in running.items() if cell.process.poll() is not None]
            for number in ended:
                yield running.pop(number).outcome()
            if not ended:
                time.sleep(_POLL_SECONDS)
    finally:
        for cell in running.values():
            cell.process.kill()
            cell.process.wait()


class CellProcess:
    """A `jcl ablate-cell FOLDER` process that writes its output to the cell's log."""

    def __init__(self, path: Path, slot: Slot) -> None:
        self.folder = CellFolder(path)
        # Otherwise an old error would be reported if the process dies early.
        self.folder.failure_file.unlink(missing_ok=True)
        command = [sys.executable, "-m", "jcl", "ablate-cell", str(path)]
        command += [] if slot.workers is None else ["--workers", str(slot.workers)]
        environment = os.environ | slot.environment | {STARTED_BY: str(os.getpid()), "COLUMNS": "120"}
        try:
            with OpenFolder(path) as opened, opened.append(self.folder.log_file.name) as log:
                # In a session of its own: Ctrl-C in the terminal goes to the parent, which passes it on.
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
                )
        except OSError as error:
            raise RunError(f"Cannot start the cell {path}: {error.strerror}.") from None

    def outcome(self) -> Outcome:
        """Wait for the process and return how it ended."""
        folder, code = self.folder, self.process.wait()
        if code == 0 and folder.result_file.exists():
            return Outcome(folder.path, "done")
        if code == Interrupted.exit_code or -code in STOP_SIGNALS:
            return Outcome(folder.path, "stopped")
        error = folder.failure()
        if error is None:
            error = _exit_message(code, folder.log_file)
            folder.fail(error)
        return Outcome(folder.path, "failed", error)


def _exit_message(code: int, log: Path) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed by SIGKILL, possibly because memory ran out; its checkpoints are intact."
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"its process {how}; see {log}."
