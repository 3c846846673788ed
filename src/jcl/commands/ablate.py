"""An ablation from its plan to its figure: an engine carries the cells out, and table and figure are made of them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from jcl.commands.ablation_plan import Plan
from jcl.commands.run_data import refuse_inside_data
from jcl.console import StderrConsole, tell_left_out
from jcl.errors import Interrupted, RunError
from jcl.report.ablation_plot import plot_ablation
from jcl.runs.atomic import write_atomically
from jcl.runs.folder import RunFolder
from jcl.runs.json_object import write_object
from jcl.runs.lock import RunLock
from jcl.studies.ablation import Point, as_csv, plain_figures, points_of
from jcl.studies.ablation_folder import AblationFolder, CellFolder, CellRecord
from jcl.studies.local_engine import Engine
from jcl.studies.progress import AblationDisplay
from jcl.train.stop import StopRequest


@dataclass(frozen=True)
class Ablation:
    """What was found, and what is missing of the cells that were asked for."""

    folder: Path
    names: tuple[str, ...]
    points: Sequence[Point]
    figures: Mapping[str, Any]
    failed: Mapping[str, str] = field(default_factory=dict)  # the cells, in words, and their sentences
    unfinished: int = 0
    stopped_by: str = ""  # a signal's name

    def raise_if_incomplete(self) -> None:
        if self.unfinished:
            by = f"{self.stopped_by} received: " if self.stopped_by else ""
            cells = "1 cell is" if self.unfinished == 1 else f"{self.unfinished} cells are"
            raise Interrupted(
                f"{by}{cells} unfinished, and everything is saved in {self.folder}; "
                "give the same command again to go on."
            )
        if self.failed:
            raise RunError(f"{self._about_failures()} Give the same command again to try anew.")

    def _about_failures(self) -> str:
        cells = "1 cell" if len(self.failed) == 1 else f"{len(self.failed)} cells"
        sentences = list(dict.fromkeys(self.failed.values()))
        if len(sentences) == 1:
            named = ", ".join(self.failed) if len(self.failed) <= 3 else "all for the same reason"
            return f"{cells} failed ({named}): {sentences[0]}"
        first, sentence = next(iter(self.failed.items()))
        return (
            f"{cells} failed; the first ({first}): {sentence} {self.folder / 'ablation.csv'} has the others' reasons."
        )


def prepare(plan: Plan, out: Path | None) -> AblationFolder:
    """Only write down the study and its cells, for others to carry out."""
    folder = _folder_for(plan, out)
    with RunLock(folder.path, warn=AblationDisplay(StderrConsole()).say):
        folder.begin(plan.study, plan.cells)
    return folder


def _folder_for(plan: Plan, out: Path | None) -> AblationFolder:
    """The folder of a plan, unless it is, or holds, something else."""
    folder = AblationFolder(out or plan.usual_folder)
    refuse_inside_data(folder.path, plan.cells[0].settings.data.location)
    folder.refuse_other(plan.study)
    return folder


def ablate(plan: Plan, out: Path | None, engine: Engine, *, console: Console | None = None) -> Ablation:
    """Carry out the cells that have no result yet, and write table and figure of all that the folder holds."""
    folder = _folder_for(plan, out)
    told = console or StderrConsole()
    display = AblationDisplay(told)
    started = time.perf_counter()
    with RunLock(folder.path, warn=display.say):
        folder.begin(plan.study, plan.cells)
        folders = [folder.cell(cell) for cell in plan.cells]
        with StopRequest() as stop:
            failed = _carry_out(folder, plan, folders, engine, stop, display)
        records = _write_table(folder, plan)
        points = points_of(records, plan.names)
        about = _about(plan, records, time.perf_counter() - started)
        figures = about | plain_figures(points)
        write_object(folder.path / "ablation.json", figures)
        _draw(folder, plan, points, about, display)
    left_out: dict[str, str] = {}
    for each in folders:
        left_out |= each.left_out()
    tell_left_out(told, left_out)
    missing = sum(each.result() is None for each in folders) - len(failed)
    return Ablation(folder.path, plan.names, points, figures, failed, missing, stop.signal_name)


def _carry_out(
    folder: AblationFolder,
    plan: Plan,
    folders: Sequence[CellFolder],
    engine: Engine,
    stop: StopRequest,
    display: AblationDisplay,
) -> dict[str, str]:
    """Have the engine carry out what has no result yet; gives the cells that failed, in words, and their sentences."""
    todo = {each.path: cell for each, cell in zip(folders, plan.cells, strict=True) if each.result() is None}
    failed = {}
    with display.of(folder.path, len(plan.cells), todo):
        for outcome in engine(list(todo), stop):
            cell, ended = todo[outcome.folder], CellFolder(outcome.folder)
            if outcome.state == "stopped" and not RunFolder(outcome.folder).holds_run():
                continue  # it had not begun
            if outcome.state == "failed":
                failed[cell.words] = outcome.sentence
                if ended.failure() is None:
                    ended.fail(outcome.sentence)
            display.tell(cell, outcome, ended.result())
            _write_table(folder, plan)
    return failed


def _write_table(folder: AblationFolder, plan: Plan) -> list[CellRecord]:
    """The plan's cells, then those of earlier plans that have figures, as CSV and as they are.

    One that failed, or never ended, and is not asked for any more has nothing to show; its folder stays.
    """
    order = {cell.name: place for place, cell in enumerate(plan.cells)}
    known = [each for each in folder.records() if each.result is not None or each.cell.name in order]
    records = sorted(known, key=lambda record: order.get(record.cell.name, len(order)))
    write_atomically(folder.path / "ablation.csv", as_csv(records, plan.names).encode())
    return records


def _about(plan: Plan, records: Sequence[CellRecord], seconds: float) -> dict[str, Any]:
    """What the figures rest on."""
    settings, counts = plan.study["settings"], plan.study["data"]
    results = [record.result for record in records if record.result is not None]
    return {
        "data": settings["data.location"],
        "over": ",".join(plan.names),
        "cells": len(records),
        "cells_done": len(results),
        "cells_failed": sum(record.result is None and record.failure is not None for record in records),
        "train_images": counts["train_images"],
        # Of all cells the same: those that could be read.
        "test_images": max((result["test_images"] for result in results), default=counts["test_images"]),
        "test_held_out": any(result["test_held_out"] for result in results),
        "unseen_class_images": max(
            (result.get("unseen_class_images", 0) for result in results), default=0
        ),  # all had the same images
        "classes": counts["classes"],
        "training_seconds": sum(result["seconds"] for result in results),
        "seconds": seconds,
    }


def _draw(
    folder: AblationFolder, plan: Plan, points: Sequence[Point], about: Mapping[str, Any], display: AblationDisplay
) -> None:
    if not any(point.results for point in points):
        return
    data, chance = Path(about["data"]).name, 100 / about["classes"]
    try:
        plot_ablation(points, folder.path / "ablation.png", data=data, chance=chance, centre=plan.centre)
    except RunError as error:
        display.say(f"The figure could not be drawn: {error}")
