"""An ablation from its plan to its plot: plans the cells, runs them, and writes the tables."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jcl.commands.run_data import data_facts, open_run_data, refuse_inside_data, with_absolute_location
from jcl.console import format_duration, pluralize, print_line, warn_skipped
from jcl.data import ImageData, ImageSource
from jcl.data.loader import refuse_large_batch
from jcl.data.source import fingerprint
from jcl.distributed.device import choose_device
from jcl.distributed.launch import launch_environment
from jcl.errors import Interrupted, RunError, SettingsError
from jcl.evaluate.classification import classification_task
from jcl.export.loading import read_initial
from jcl.report.ablation_plot import plot_ablation
from jcl.runs.atomic import write_atomically
from jcl.runs.folder import RunFolder, read_skipped
from jcl.runs.json_object import write_object
from jcl.runs.lock import lock_folder
from jcl.settings.commands import AblateOptions, ProbeProtocol
from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts
from jcl.settings.schema import Settings, values_of, with_values
from jcl.signals import StopRequest
from jcl.studies.ablation import (
    AblationFolder,
    CellFolder,
    CellRecord,
    Point,
    RunCells,
    as_csv,
    flat_results,
    local_slots,
    points_of,
    run_in_slots,
)
from jcl.studies.cells import (
    Axes,
    Build,
    Cell,
    base_settings,
    build_cells,
    describe,
    parse_axes,
    parse_seeds,
    refuse_ignored,
    shared_values,
    short_name,
)
from jcl.train.build import build_learner, run_view_recipe


@dataclass(frozen=True)
class Plan:
    """The cells, the settings by which they differ, and everything they share."""

    names: Sequence[str]
    cells: Sequence[Cell]
    study: Mapping[str, Any]
    default_folder: Path
    center: Mapping[str, Any] | None = None  # the shared values, if each setting is varied alone

    @contextlib.contextmanager
    def locked_folder(self, out: Path | None, console: Console) -> Iterator[AblationFolder]:
        """Write the plan to its folder and lock it; raises if the folder holds something else."""
        folder = AblationFolder(out or self.default_folder)
        refuse_inside_data(folder.path, self.cells[0].settings.data.location)
        folder.require_same_study(self.study)
        with lock_folder(folder.path, warn=partial(print_line, console)):
            folder.begin(self.study, self.cells)
            yield folder


def plan_ablation(
    axes: Axes,
    seeds: Sequence[int],
    build: Build,
    console: Console,
    *,
    alone: bool = False,
    protocol: ProbeProtocol = "fast",
) -> Plan:
    """Check all values and the data, and plan the cells. Writes nothing.

    The cells are all combinations of the axes' values or, with `alone`, one axis at a time.
    """
    if launch_environment().world_size > 1:
        raise SettingsError("`jcl ablate` starts its own processes; run it without a launcher such as torchrun.")
    if not axes:
        raise SettingsError("Give at least one --over, for example: jcl ablate photos/ --over num_keys=1,2,3,5.")

    def absolute(values: Mapping[str, Any]) -> Settings:
        return with_absolute_location(build(values))

    base = absolute({}) if alone else base_settings(axes, absolute)
    for together in [{name: values} for name, values in axes.items()] if alone else [axes]:
        refuse_ignored(together, base)
    cells = build_cells(axes, seeds, absolute, alone=alone)  # checks the values before the data is opened
    data = open_run_data(base, console)
    facts = data_facts(data.train, read_initial(base))
    if alone and (resolved := _resolved_center(base, axes, facts)):
        base = absolute(resolved)
        axes = {name: [resolved.get(name, v) if v == "auto" else v for v in axes[name]] for name in axes}
        cells = build_cells(axes, seeds, lambda values: absolute(resolved | dict(values)), alone=True)
    cells = [replace(cell, protocol=protocol) for cell in _without_duplicates(cells, facts, console)]
    study = {"over": list(axes), "settings": shared_values(base, axes), "data": _data_summary(data)}
    study["protocol"] = protocol
    _check_cells(cells, data.train, facts)
    default_folder = Path("runs") / f"ablate-{'-'.join(map(short_name, axes))}-{data.name}"
    return Plan(list(axes), cells, study, default_folder, values_of(base, axes) if alone else None)


def _resolved_center(base: Settings, names: Collection[str], facts: DataFacts) -> dict[str, Any]:
    """What "auto" becomes at the center, so that the center has a position among the other values."""
    if "method.num_keys" in names and base.method.num_queries == "auto":
        base = with_values(base, {"method.num_queries": 1})  # as in all cells with an explicit number of keys
    resolved = values_of(resolve(base, facts)[0], names)
    return {name: resolved[name] for name, value in values_of(base, names).items() if value == "auto"}


def _without_duplicates(cells: Sequence[Cell], facts: DataFacts, console: Console) -> list[Cell]:
    """Drop cells that equal another one once "auto" is resolved; of equal cells the most explicit one stays."""
    kept: dict[str, Cell] = {}
    skipped: dict[str, str] = {}
    for cell in sorted(cells, key=lambda cell: list(cell.values.values()).count("auto")):
        same = kept.setdefault(resolve(cell.settings, facts)[0].model_dump_json(), cell)
        if same is not cell:
            skipped[describe(cell.values)] = describe(same.values)
    for values, same_values in skipped.items():
        print_line(console, f"Skipping {values}: same as {same_values}.")
    return [cell for cell in cells if any(cell is each for each in kept.values())]


def _data_summary(data: ImageData) -> dict[str, Any]:
    """Identifies the data when the ablation is resumed."""
    task = classification_task(data)  # raises if there are no labels
    return {
        "train_images": len(data.train),
        "test_images": len(task.test),
        "classes": len(task.classes),
        "train_content": fingerprint(data.train),
        "test_content": fingerprint(task.test),
    }


def _check_cells(cells: Sequence[Cell], images: ImageSource, facts: DataFacts) -> None:
    """Raise the error that a cell would fail with at its start; builds each kind of network once, on the CPU."""
    built = set()
    for cell in cells:
        settings, _ = resolve(cell.settings, facts)
        refuse_large_batch(images, settings.train.batch_size)
        run_view_recipe(settings)
        network = (settings.model, settings.views.image_size)
        if network not in built:
            build_learner(settings, torch.device("cpu"))
            built.add(network)


@dataclass(frozen=True)
class Ablation:
    """The results, and which of the requested cells are missing."""

    folder: Path
    names: Sequence[str]
    points: Sequence[Point]
    results: Mapping[str, Any]
    failed: Mapping[str, str] = field(default_factory=dict)  # errors by the cells' titles
    unfinished: int = 0
    signal_name: str = ""

    def raise_if_incomplete(self) -> None:
        if self.unfinished:
            prefix = f"{self.signal_name} received: " if self.signal_name else ""
            raise Interrupted(
                f"{prefix}{pluralize(self.unfinished, 'cell')} unfinished; everything is saved in {self.folder}. "
                "Run the same command again to continue."
            )
        if self.failed:
            cells, errors = pluralize(len(self.failed), "cell"), list(dict.fromkeys(self.failed.values()))
            titles = ", ".join(list(self.failed)[:3]) + (", ..." if len(self.failed) > 3 else "")
            others = f" See {self.folder / 'ablation.csv'} for the other errors." if len(errors) > 1 else ""
            raise RunError(f"{cells} failed ({titles}): {errors[0]}{others} Run the same command again to retry.")


def write_plan(options: AblateOptions, console: Console) -> tuple[Path, int, int]:
    """Write the study and its cells without running them; returns their folder, and how many there are and done."""
    if options.json_file is not None:
        raise SettingsError("--plan-only has no results for --json; remove one of them.")
    plan = _plan(options, console)
    with plan.locked_folder(options.out, console) as folder:
        done = sum(folder.cell(cell).result() is not None for cell in plan.cells)
        return folder.cells, len(plan.cells), done


def ablate(options: AblateOptions, console: Console) -> Ablation:
    """Plan an ablation and run it on this machine."""
    plan = _plan(options, console)
    device = plan.cells[0].settings.train.device
    choose_device(device)  # raises if there is no such device
    return run_ablation(plan, options.out, partial(run_in_slots, local_slots(device, options.at_once)), console)


def _plan(options: AblateOptions, console: Console) -> Plan:
    values = options.values()
    axes = parse_axes(options.over, values, alone=options.each_alone)
    if "," in options.seeds and "train.seed" in values:
        raise SettingsError("--seeds is a list of seeds; remove --seed.")

    def build(own: Mapping[str, Any]) -> Settings:
        return options.settings(values | dict(own))

    first = build({}).train.seed if "train.seed" in values else 0
    seeds = parse_seeds(options.seeds, first)
    return plan_ablation(axes, seeds, build, console, alone=options.each_alone, protocol=options.protocol)


def run_ablation(plan: Plan, out: Path | None, run_cells: RunCells, console: Console) -> Ablation:
    """Run the cells without a result, and write tables and plot of everything in the folder."""
    started = time.perf_counter()
    with plan.locked_folder(out, console) as folder:
        with StopRequest() as stop:
            failed = _run_cells(folder, plan, run_cells, stop, console)
        records = _write_csv(folder, plan)
        points = points_of(records, plan.names)
        summary = _summary(plan, records, time.perf_counter() - started)
        results = summary | flat_results(points)
        write_object(folder.path / "ablation.json", results)
        if any(point.results for point in points):
            data = Path(summary["data"]).name
            chance = max((record.result or {}).get("chance_top1", 0.0) for record in records) or None
            try:
                plot_ablation(points, folder.path / "ablation.png", data=data, chance=chance, center=plan.center)
            except RunError as error:
                print_line(console, f"Cannot write the plot: {error}")
    folders = [folder.cell(cell) for cell in plan.cells]
    warn_skipped(console, {k: why for each in folders for k, why in read_skipped(each.left_out_file).items()})
    missing = sum(each.result() is None for each in folders) - len(failed)
    return Ablation(folder.path, plan.names, points, results, failed, missing, stop.signal_name)


def _run_cells(
    folder: AblationFolder, plan: Plan, run_cells: RunCells, stop: StopRequest, console: Console
) -> dict[str, str]:
    """Run the cells without a result; returns the errors of failed cells by title."""
    todo = {folder.cell(cell).path: cell for cell in plan.cells if folder.cell(cell).result() is None}
    total, done = len(plan.cells), len(plan.cells) - len(todo)
    kept = f"; {done} already done" if done else ""
    print_line(console, f"{pluralize(total, 'cell')} in {folder.path}{kept}. Each cell writes a log.txt.")
    failed = {}
    bar = Progress(
        TextColumn("cells"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal, refresh_per_second=1,
        speed_estimate_period=1e9,  # of all cells
    )  # fmt: skip
    with bar:
        task = bar.add_task("cells", total=total, completed=done)
        for outcome in run_cells(list(todo), stop):
            title, ended = todo[outcome.folder].title, CellFolder(outcome.folder)
            if outcome.state == "stopped":
                if RunFolder(outcome.folder).holds_run():
                    print_line(console, f"{title}: stopped; it continues when the command is run again.")
                continue
            if outcome.state == "failed":
                failed[title] = outcome.error
            text = f"failed: {outcome.error}"
            if result := ended.result():
                accuracies = f"linear {result['linear_top1']:.2f} %, kNN {result['knn_top1']:.2f} %"
                text = f"{accuracies} ({format_duration(result['seconds'])} of training)"
            done += 1
            bar.update(task, completed=done)
            print_line(console, f"[{done}/{total}] {title}: {text}")
            _write_csv(folder, plan)
    return failed


def _write_csv(folder: AblationFolder, plan: Plan) -> list[CellRecord]:
    records = folder.records(plan.cells)
    write_atomically(folder.path / "ablation.csv", as_csv(records, plan.names).encode())
    return records


def _summary(plan: Plan, records: Sequence[CellRecord], seconds: float) -> dict[str, Any]:
    settings, counts = plan.study["settings"], plan.study["data"]
    results = [record.result for record in records if record.result is not None]
    return {
        "data": settings["data.location"],
        "over": ",".join(plan.names),
        "protocol": plan.study["protocol"],
        "cells": len(records),
        "cells_done": len(results),
        "cells_failed": sum(record.state == "failed" for record in records),
        "train_images": counts["train_images"],
        # All cells use the same images; this counts the readable ones.
        "test_images": max((result["test_images"] for result in results), default=counts["test_images"]),
        "test_held_out": any(result["test_held_out"] for result in results),
        "unseen_class_images": max((result.get("unseen_class_images", 0) for result in results), default=0),
        "classes": counts["classes"],
        "training_seconds": sum(result["seconds"] for result in results),
        "seconds": seconds,
    }
