"""Runs the cells of an ablation as processes on this machine, or as tasks on a Ray cluster.

Each cell is a `jcl ablate-cell FOLDER` process of its own. All state is in the cell's folder, so a cell can continue
from its checkpoint in another process or, if all nodes share the folder, on another node. PyTorch is not imported at
module level: the Ray workers that only watch a process do not need it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jcl.cores import cpu_cores
from jcl.errors import Interrupted, RunError, SettingsError
from jcl.signals import SECONDS_TO_SAVE, STARTED_BY, STOP_SIGNALS, StopRequest
from jcl.studies.ablation import CellFolder

_POLL_SECONDS = 0.2
_NODE_POLL_SECONDS = 5.0
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_MAX_RETRIES = 10  # of a Ray task after its node died
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Outcome:
    """How a cell's process ended; a stopped cell continues when it is started again."""

    folder: Path
    state: Literal["done", "failed", "stopped"]
    error: str = ""


Engine = Callable[[Sequence[Path], StopRequest], Iterator[Outcome]]
"""Runs the cells in these folders, yields each outcome, and stops them gracefully on request."""


@dataclass(frozen=True)
class Slot:
    """Room for one cell at a time: environment variables of its process and its number of loader workers."""

    environment: dict[str, str] = field(default_factory=dict)
    workers: int | None = None


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
            with self.folder.log_file.open("ab") as log:
                # In a session of its own: Ctrl-C in the terminal goes to the parent, which passes it on.
                self.process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
                )
        except OSError as error:
            raise RunError(f"Cannot start the cell {path}: {error.strerror}.") from None

    def outcome(self) -> Outcome:
        """Wait for the process and return how it ended."""
        while self.process.poll() is None:
            time.sleep(_POLL_SECONDS)
        folder, code = self.folder, self.process.returncode
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
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get(_VISIBLE_DEVICES, "").split(",") if name.strip()]
    return named[:count] if named else [str(number) for number in range(count)]


def local_engine(slots: Sequence[Slot]) -> Engine:
    """Runs cells on this machine, one at a time in each slot."""

    def run(folders: Sequence[Path], stop: StopRequest) -> Iterator[Outcome]:
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

    return run


@contextlib.contextmanager
def connect_ray(address: str | None) -> Iterator[Any]:
    """Connect to the Ray cluster at an address ("auto": the one this machine is part of), or start one here."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise SettingsError(
            "--engine ray needs the ray library; "
            'install it with `pip install "joint-contrastive-learning[ray]"`, or remove --engine.'
        ) from None
    try:
        _require_listener(address)
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (OSError, ValueError, RuntimeError) as error:
        text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
        raise RunError(
            f"Cannot connect to Ray at {address or 'this machine'} ({text.splitlines()[0][:200].rstrip('.')}); "
            "start a cluster with `ray start --head`, or give its address as in --address 10.0.0.1:6379."
        ) from None
    try:
        # Ray prints messages about its nodes to standard output, where our results go.
        with Path(os.devnull).open("w") as devnull, contextlib.redirect_stdout(devnull):
            yield ray
    finally:
        ray.shutdown()


def _require_listener(address: str | None) -> None:
    """Raise if nothing listens at a host and port; Ray itself would retry for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


def default_share(
    ray: Any, device: str, at_once: int, gpus: float | None = None, cpus: float | None = None
) -> tuple[float, float]:
    """CPUs and GPUs of a cell: one CPU, and 1/`at_once` of a GPU if the cluster has GPUs and the cell may use them."""
    if gpus is None:
        gpus = 1 / at_once if device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0 else 0.0
    return 1.0 if cpus is None else cpus, gpus


def ray_engine(ray: Any, cpus: float, gpus: float, log: Callable[[str], None], workers: int | None = None) -> Engine:
    """Submits all cells to Ray, which runs as many at a time as their shares allow."""

    def run(folders: Sequence[Path], stop: StopRequest) -> Iterator[Outcome]:
        alive = _nodes(ray)
        if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for _, node in alive.values()):
            log(f"No node has {cpus:g} CPUs and {gpus:g} GPUs; the cells wait for one.")
        task = ray.remote(run_cell_task).options(num_cpus=cpus, num_gpus=gpus, max_retries=_MAX_RETRIES)
        pending = {task.remote(str(folder), workers): folder for folder in folders}
        deadline, checked = None, time.monotonic()
        while pending:
            if stop.requested and deadline is None:
                deadline = time.monotonic() + SECONDS_TO_SAVE
                for reference in pending:
                    ray.cancel(reference, recursive=False)
            if deadline is not None and time.monotonic() > deadline:
                return  # unresponsive cells keep their newest checkpoint
            ended, _ = ray.wait(list(pending), num_returns=1, timeout=_POLL_SECONDS)
            for reference in ended:
                yield _task_outcome(ray, reference, pending.pop(reference))
            if time.monotonic() - checked > _NODE_POLL_SECONDS:
                before, alive, checked = alive, _nodes(ray), time.monotonic()
                for node in before.keys() - alive.keys():
                    log(f"Lost node {before[node][0]}; its cells restart on another node.")

    return run


def _nodes(ray: Any) -> dict[str, tuple[str, dict[str, float]]]:
    """Address and resources of the nodes that are alive, by id."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return {node["NodeID"]: (node["NodeManagerAddress"], node["Resources"]) for node in nodes}


def run_cell_task(path: str, workers: int | None) -> Outcome:
    """The Ray task: runs one cell as a process on this node."""
    folder = CellFolder(Path(path))
    if not folder.plan_file.exists():
        error = f"{path} does not exist on {socket.gethostname()}; --out must be on a file system that all nodes share."
        return Outcome(folder.path, "failed", error)
    if folder.result_file.exists():  # the previous node died right after writing it
        return Outcome(folder.path, "done")
    cell = CellProcess(folder.path, Slot(workers=workers))
    try:
        return cell.outcome()
    except KeyboardInterrupt:  # Ray cancels a task this way
        cell.process.terminate()
        return cell.outcome()


def _task_outcome(ray: Any, reference: Any, folder: Path) -> Outcome:
    try:
        outcome: Outcome = ray.get(reference)
    except ray.exceptions.TaskCancelledError:
        return Outcome(folder, "stopped")
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError):
        error = f"its node died {_MAX_RETRIES + 1} times; its checkpoints are intact."
        return Outcome(folder, "failed", error)
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return Outcome(folder, "failed", f"Ray error: {lines[-1]}.")
    return outcome
