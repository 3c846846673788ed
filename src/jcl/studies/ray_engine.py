"""Cells as tasks on a Ray cluster: each takes its share of a GPU, and starts again elsewhere when its node dies.

All that a task knows is in the cell's folder, so that folder must be the same on every node; there the next node finds
the checkpoint from which the cell goes on. Nothing heavy is imported here: the workers that watch over the cells'
processes need no PyTorch themselves.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jcl.errors import RunError, SettingsError
from jcl.studies.ablation_folder import CellFolder
from jcl.studies.cell_process import SECONDS_BETWEEN_LOOKS, CellProcess, Outcome
from jcl.studies.local_engine import Engine
from jcl.train.stop import StopRequest

_STARTS_AGAIN = 10  # of one cell, after as many nodes have died under it
_SECONDS_TO_SAVE = 300.0
_SECONDS_TO_ANSWER = 10.0
_SECONDS_BETWEEN_LOOKS_AT_NODES = 5.0


@dataclass(frozen=True)
class Share:
    """What a cell takes of a node."""

    cpus: float
    gpus: float


def require_ray() -> Any:
    """The library, or a sentence that says how to get it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody is told what is run here
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise SettingsError(
            "--engine ray needs the library ray, which is not installed here; "
            'install it with `pip install "joint-contrastive-learning[ray]"`, or leave --engine out.'
        ) from None
    return ray


@contextlib.contextmanager
def joined_cluster(address: str | None) -> Iterator[Any]:
    """Ray, connected to the cluster at an address ("auto": the one this machine is part of), or to one started here."""
    ray = require_ray()
    try:
        _knock(address)
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", include_dashboard=False)
    except (OSError, ValueError, RuntimeError) as error:
        said = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
        reason = said.splitlines()[0][:200].rstrip(".")
        raise RunError(
            f"no Ray cluster could be joined at {address or 'this machine'} ({reason}); "
            "start one with `ray start --head`, or give its address as in --address 10.0.0.1:6379."
        ) from None
    try:
        # Ray prints what happens to its nodes, by the page, to where our results go.
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield ray
    finally:
        ray.shutdown()


def _knock(address: str | None) -> None:
    """Raise if nobody answers at a host and port; Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=_SECONDS_TO_ANSWER).close()


def usual_share(ray: Any, device: str, at_once: int, gpus: float | None, cpus: float | None) -> Share:
    """One over `at_once` of a GPU where there are any and the device may be one; and a CPU, unless said otherwise."""
    if gpus is None:
        gpus = 1 / at_once if device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0 else 0.0
    return Share(cpus=1.0 if cpus is None else cpus, gpus=gpus)


def ray_engine(ray: Any, share: Share, say: Callable[[str], None], workers: int | None = None) -> Engine:
    """Hands all cells to Ray, which runs as many at a time as their shares allow."""

    def run(folders: Sequence[Path], stop: StopRequest) -> Iterator[Outcome]:
        if not _has_room(ray, share):
            say(f"No node of the cluster has {share.cpus:g} CPUs and {share.gpus:g} GPUs; the cells wait for one.")
        nodes = _Nodes(ray, say)
        task = ray.remote(carry_out).options(num_cpus=share.cpus, num_gpus=share.gpus, max_retries=_STARTS_AGAIN)
        pending = {task.remote(str(folder), workers): folder for folder in folders}
        deadline = None
        while pending:
            if stop.requested and deadline is None:
                deadline = time.monotonic() + _SECONDS_TO_SAVE
                for reference in pending:
                    ray.cancel(reference, recursive=False)
            if deadline is not None and time.monotonic() > deadline:
                return  # whatever does not answer is not waited for; its newest checkpoint stays
            ended, _ = ray.wait(list(pending), num_returns=1, timeout=SECONDS_BETWEEN_LOOKS)
            for reference in ended:
                yield _told(ray, reference, pending.pop(reference))
            nodes.look()

    return run


class _Nodes:
    """Says when a node is lost."""

    def __init__(self, ray: Any, say: Callable[[str], None]) -> None:
        self._ray, self._say = ray, say
        self._alive = self._addresses()
        self._looked = time.monotonic()

    def look(self) -> None:
        """Now and then, see who is still there."""
        if time.monotonic() - self._looked < _SECONDS_BETWEEN_LOOKS_AT_NODES:
            return
        before, self._alive, self._looked = self._alive, self._addresses(), time.monotonic()
        for node in before.keys() - self._alive.keys():
            self._say(f"The node {before[node]} was lost; the cells it was on start again where there is room.")

    def _addresses(self) -> dict[str, str]:
        return {node["NodeID"]: node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]}


def carry_out(path: str, workers: int | None) -> Outcome:
    """The task: one cell in a process of its own on this node."""
    folder = Path(path)
    if not CellFolder(folder).plan_file.exists():
        where = socket.gethostname()
        sentence = f"{folder} is not seen on {where}; --out must lie on a file system that all nodes share."
        return Outcome(folder, "failed", sentence)
    if CellFolder(folder).result_file.exists():  # the node died just after
        return Outcome(folder, "done")
    process = CellProcess(folder, workers=workers)
    try:
        return process.outcome()
    except KeyboardInterrupt:  # which is how Ray cancels a task
        process.ask_to_stop()
        return process.outcome()


def _told(ray: Any, reference: Any, folder: Path) -> Outcome:
    """What a task has ended with."""
    try:
        outcome: Outcome = ray.get(reference)
    except ray.exceptions.TaskCancelledError:
        return Outcome(folder, "stopped")
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError):
        sentence = f"the nodes that it was on died, {_STARTS_AGAIN + 1} times in all; its checkpoints are untouched."
        return Outcome(folder, "failed", sentence)
    except ray.exceptions.RayError as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        return Outcome(folder, "failed", f"Ray could not carry it out: {said[-1]}.")
    return outcome


def _has_room(ray: Any, share: Share) -> bool:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return any(node.get("CPU", 0) >= share.cpus and node.get("GPU", 0) >= share.gpus for node in nodes)
