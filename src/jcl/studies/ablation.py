"""An ablation: its folder on disk, the processes of its cells, and the mean and spread of their results."""

import contextlib
import csv
import io
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from jcl.cores import cpu_cores
from jcl.errors import Interrupted, RunError
from jcl.evaluate.baselines import Estimate, estimate
from jcl.evaluate.classification import VALIDATION_SHARE
from jcl.runs.atomic import append_to, make_folder, refuse_links
from jcl.runs.folder import RunFolder
from jcl.runs.json_object import describe_differences, format_value, read_object, write_object
from jcl.settings.schema import Settings
from jcl.settings.values import validated, values_of
from jcl.signals import STARTED_BY, STOP_SIGNALS, StopRequest
from jcl.studies.cells import Cell, distinct_values, short_name

MEASURED = ("linear_top1", "knn_top1")  # the metrics that are plotted and tabulated
SELECTION_METRIC = "validation_top1"  # selects the best value, on held-out training images, never on test images
_POLL_SECONDS = 0.2
_STUDENT_95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
)  # Student's t, of 2 to 10 seeds
_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class CellRecord:
    """A cell with its result or its error; neither while it is unfinished."""

    cell: Cell
    result: dict[str, Any] | None
    failure: str | None

    @property
    def state(self) -> str:
        if self.result is not None:
            return "done"
        return "unfinished" if self.failure is None else "failed"


class CellFolder:
    """A run folder with `cell.json` (the plan) and `result.json` or `failure.json` (how it ended)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan_file = path / "cell.json"
        self.result_file = path / "result.json"
        self.failure_file = path / "failure.json"
        self.log_file = path / "log.txt"

    def plan(self, cell: Cell) -> None:
        """Write the plan; once training has started, the existing one is kept."""
        refuse_links(self.path.parent, self.path)
        if not self.plan_file.exists() or not RunFolder(self.path).holds_run():
            make_folder(self.path)
            write_object(self.plan_file, cell.model_dump(mode="json"))

    def cell(self) -> Cell:
        return validated(Cell, read_object(self.plan_file), str(self.plan_file))

    def result(self) -> dict[str, Any] | None:
        return read_object(self.result_file) if self.result_file.exists() else None

    def failure(self) -> str | None:
        return str(read_object(self.failure_file).get("error")) if self.failure_file.exists() else None

    def fail(self, error: str) -> None:
        """Record the error, if the disk allows it."""
        with contextlib.suppress(RunError):
            write_object(self.failure_file, {"error": error})


class AblationFolder:
    """`study.json` (what is compared), `cells/`, and the tables and plots of the results."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.study_file = path / "study.json"
        self.cells = path.absolute() / "cells"  # absolute, because cells may run elsewhere

    def require_same_study(self, study: Mapping[str, Any]) -> None:
        """Raise if the folder holds anything other than the beginning of this study."""
        if not self.study_file.exists():
            if self.path.is_dir() and any(entry.name != ".lock" for entry in self.path.iterdir()):
                raise RunError(f"{self.path} is not empty and holds no ablation; choose another folder with --out.")
            return
        before, now = _facts(read_object(self.study_file)), _facts(study)
        before = values_of(Settings(), study["settings"]) | before  # a setting that did not exist yet had its default
        if differences := describe_differences(before, now):
            remedy = "Use the same settings and data, or choose another folder with --out"
            raise RunError(f"{self.study_file} was started with {differences}. {remedy}.")

    def begin(self, study: Mapping[str, Any], cells: Sequence[Cell]) -> None:
        """Write the study and the plans of its cells."""
        if not self.study_file.exists():
            write_object(self.study_file, study)
        for cell in cells:
            self.cell(cell).plan(cell)

    def cell(self, cell: Cell) -> CellFolder:
        return CellFolder(self.cells / cell.name)

    def records(self, cells: Sequence[Cell]) -> list[CellRecord]:
        """The records of these cells and, after them, of finished cells of earlier plans."""
        order = {cell.name: number for number, cell in enumerate(cells)}
        folders = [CellFolder(file.parent) for file in sorted(self.cells.glob("*/cell.json"))]
        found = [CellRecord(folder.cell(), folder.result(), folder.failure()) for folder in folders]
        shown = [record for record in found if record.result is not None or record.cell.name in order]
        return sorted(shown, key=lambda record: order.get(record.cell.name, len(order)))


def _facts(study: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that defines a study, flat."""
    over, protocol = sorted(study.get("over", ())), study.get("protocol")
    return {"over": over, "protocol": protocol, **study.get("settings", {}), **study.get("data", {})}


RunCells = Callable[[Sequence[Path], StopRequest], Iterator[Path]]
"""Runs the cells in these folders, yields each folder at the end of its cell, and stops gracefully on request."""


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


def run_in_slots(slots: Sequence[Slot], folders: Sequence[Path], stop: StopRequest) -> Iterator[Path]:
    """Run cells one at a time in each slot."""
    waiting, running, stopping = deque(folders), dict[int, tuple[Path, subprocess.Popen[bytes]]](), False
    try:
        while running or (waiting and not stop.requested):
            for number, slot in enumerate(slots):
                if number not in running and waiting and not stop.requested:
                    path = waiting.popleft()
                    running[number] = path, _start_cell(CellFolder(path), slot)
            if stop.requested and not stopping:
                stopping = True
                for _, process in running.values():
                    process.terminate()  # it saves a checkpoint first
            ended = [number for number, (_, process) in running.items() if process.poll() is not None]
            for number in ended:
                path, process = running.pop(number)
                _record_end(CellFolder(path), process.returncode)
                yield path
            if not ended:
                time.sleep(_POLL_SECONDS)
    finally:
        for _, process in running.values():
            process.kill()
            process.wait()


def _start_cell(folder: CellFolder, slot: Slot) -> "subprocess.Popen[bytes]":
    """Start `jcl ablate-cell FOLDER`, which writes its output to the cell's log."""
    folder.failure_file.unlink(missing_ok=True)  # or an old error would be reported if the process dies early
    command = [sys.executable, "-m", "jcl", "ablate-cell", str(folder.path)]
    command += [] if slot.workers is None else ["--workers", str(slot.workers)]
    environment = os.environ | slot.environment | {STARTED_BY: str(os.getpid()), "COLUMNS": "120"}
    with append_to(folder.log_file) as log:
        # In a session of its own: Ctrl-C in the terminal goes to the parent, which passes it on.
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )


def _record_end(folder: CellFolder, code: int) -> None:
    """Record that a cell failed if its process could not do so itself."""
    stopped = code == Interrupted.exit_code or -code in STOP_SIGNALS
    if not stopped and folder.result() is None and folder.failure() is None:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        folder.fail(f"its process {how}; see {folder.log_file}.")


@dataclass(frozen=True)
class Point:
    """The results of all seeds with the same values."""

    values: Mapping[str, Any]
    results: Sequence[Mapping[str, Any]]
    failed: int = 0

    def each(self, metric: str) -> list[float]:
        return [float(result[metric]) for result in self.results if result.get(metric) is not None]

    def mean(self, metric: str) -> float | None:
        found = self.each(metric)
        return statistics.fmean(found) if found else None

    def spread(self, metric: str) -> float | None:
        """The sample standard deviation over seeds; None for fewer than two."""
        found = self.each(metric)
        return statistics.stdev(found) if len(found) > 1 else None

    def estimate(self, metric: str) -> Estimate | None:
        """The mean with its 95 % interval: Student's of several seeds, binomial of one."""
        mean, spread, seeds = self.mean(metric), self.spread(metric), len(self.each(metric))
        if mean is None:
            return None
        if spread:  # not 0: equal results of a few seeds are chance
            half = _STUDENT_95[min(seeds - 2, len(_STUDENT_95) - 1)] * spread / math.sqrt(seeds)
            return Estimate(mean, mean - half, mean + half)
        if metric == SELECTION_METRIC:
            return estimate(mean, round(VALIDATION_SHARE * self.results[0].get("train_images", 0)))
        return estimate(mean, self.results[0].get("test_images"))


def points_of(records: Sequence[CellRecord], names: Sequence[str]) -> list[Point]:
    """One point for each combination of values; numbers are sorted, other values keep their order."""
    orders = {name: distinct_values(record.cell.values[name] for record in records) for name in names}
    groups: dict[tuple[int, ...], list[CellRecord]] = {}
    for record in sorted(records, key=lambda record: record.cell.seed):
        position = tuple(order.index(record.cell.values[name]) for name, order in orders.items())
        groups.setdefault(position, []).append(record)
    points = []
    for _, group in sorted(groups.items()):
        results = [record.result for record in group if record.result is not None]
        points.append(Point(group[0].cell.values, results, sum(record.state == "failed" for record in group)))
    return points


def best_points(points: Sequence[Point]) -> list[Point]:
    """Of several points, those with the highest validation accuracy; more than one if they tie."""
    scores = [score for point in points if (score := point.mean(SELECTION_METRIC)) is not None]
    return [point for point in points if len(scores) > 1 and point.mean(SELECTION_METRIC) == max(scores)]


def flat_results(points: Sequence[Point]) -> dict[str, Any]:
    """One flat object: means under names such as linear_top1_num_keys_5, spreads under linear_top1_std_..."""
    found: dict[str, Any] = {}
    for point in points:
        suffix = "_".join(f"{short_name(name)}_{_plain(value)}" for name, value in point.values.items())
        for metric in (*MEASURED, SELECTION_METRIC):
            found[f"{metric}_{suffix}"] = point.mean(metric)
            found[f"{metric}_std_{suffix}"] = point.spread(metric)
        found[f"seeds_{suffix}"] = len(point.results)
    best = best_points(points)
    if len(best) == 1:
        found |= {f"best_{short_name(name)}": _scalar(value) for name, value in best[0].values.items()}
        found |= {f"best_{metric}": best[0].mean(metric) for metric in MEASURED}
    return found


def as_csv(records: Sequence[CellRecord], names: Sequence[str]) -> str:
    """One line for each cell: its values, seed, state, metrics, and the error if it failed."""
    metrics = list(dict.fromkeys(metric for record in records for metric in record.result or {} if metric != "seed"))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*map(short_name, names), "seed", "state", *metrics, "error"])
    for record in records:
        values = [_scalar(record.cell.values[name]) for name in names]
        found = [(record.result or {}).get(metric, "") for metric in metrics]
        error = (record.failure or "") if record.result is None else ""
        writer.writerow([*values, record.cell.seed, record.state, *found, error])
    return text.getvalue()


def _scalar(value: Any) -> Any:
    return format_value(value) if isinstance(value, list | dict) else value


def _plain(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "_", format_value(value))
