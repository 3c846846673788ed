"""Small ablations, with cells that run in this process."""

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from jcl.commands.ablate import Ablation, Plan, plan_ablation, run_ablation, run_cell
from jcl.errors import JclError
from jcl.runs.json_object import write_object
from jcl.settings.commands import AblateOptions, ProbeProtocol
from jcl.signals import StopRequest
from jcl.studies.ablation import CellFolder, RunCells
from jcl.studies.cells import parse_axes
from small_runs import TINY_VALUES

QUIET = Console(quiet=True)
# Differ between equal cells: timings, and memory used by other tests.
NOT_COMPARED = {"seconds", "images_per_second", "peak_memory_bytes"}


def run_here(folders: Sequence[Path], stop: StopRequest) -> Iterator[Path]:
    """One after another, until asked to stop."""
    for folder in folders:
        if stop.requested:
            return
        with contextlib.suppress(JclError):
            run_cell(folder, console=QUIET)
        yield folder


def run_faked(folders: Sequence[Path], stop: StopRequest) -> Iterator[Path]:
    """As if cells had been trained: only the files with their results are written; a huge learning rate fails."""
    for folder in map(CellFolder, folders):
        cell = folder.cell()
        if cell.settings.train.lr > 1:
            folder.fail("The loss is not finite.")
        else:
            validation = 55.0 + cell.seed + 100 * cell.settings.method.temperature
            figures = {"linear_top1": 60.0 + cell.seed, "knn_top1": 50.0, "validation_top1": validation}
            about = {"test_images": 10, "train_images": 34, "test_held_out": False, "classes": 3, "seconds": 1.0}
            (folder.path / "metrics.jsonl").touch()
            write_object(folder.result_file, {"seed": cell.seed} | figures | about)
        yield folder.path


def small_plan(
    npz: Path,
    *over: str,
    seeds: Sequence[int] = (0,),
    method: str | None = None,
    alone: bool = False,
    protocol: ProbeProtocol = "fast",
    console: Console = QUIET,
    **changes: Any,
) -> Plan:
    """Cells of half a second each; changes are dotted names with __ for the dot."""
    own = {name.replace("__", "."): value for name, value in changes.items()}
    varied = () if alone else parse_axes(over, {})
    values = {
        name: value
        for name, value in (TINY_VALUES | {"record.knn_every": 0, "train.epochs": 1} | own).items()
        if name not in varied
    }
    options = AblateOptions(
        data=str(npz),
        method=method,
        assignments=tuple(f"{name}={json.dumps(value)}" for name, value in values.items()),
        over=over,
        seeds="".join(f"{seed}," for seed in seeds),
        each_alone=alone,
        protocol=protocol,
    )
    return plan_ablation(options, console)


def ablated(plan: Plan, out: Path, run_cells: RunCells = run_here) -> Ablation:
    plot = contextlib.nullcontext() if run_cells is run_here else mock.patch("jcl.commands.ablate.plot_ablation")
    with plot:
        return run_ablation(plan, out, run_cells, QUIET)


def results(out: Path) -> dict[str, dict[str, Any]]:
    """The results of finished cells by name, without timings."""
    found = {}
    for file in sorted((out / "cells").glob("*/result.json")):
        figures = json.loads(file.read_text())
        found[file.parent.name] = {name: value for name, value in figures.items() if name not in NOT_COMPARED}
    return found


def holder(cell: Path) -> int | None:
    """The process that trains in a cell, once it has written a line of metrics."""
    time.sleep(0.05)  # whoever waits for it should leave the cores to others
    try:
        if (cell / "metrics.jsonl").stat().st_size:
            return int(json.loads((cell / ".lock").read_text())["pid"])
    except (OSError, ValueError):
        pass
    return None
