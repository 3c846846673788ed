"""Ablations: plan the cells, run them and write tables and plot (`jcl ablate`), or run one cell (`jcl ablate-cell`)."""

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from jcl.commands.inputs import data_facts, open_run_data, open_target, refuse_inside_data, with_absolute_paths
from jcl.commands.pretrain import pretrain, resume
from jcl.commands.probes import measure_linear
from jcl.commands.run import Run
from jcl.console import STDERR, format_duration, list_some, pluralize, print_line, warn_skipped
from jcl.data import ImageData, ImageSource
from jcl.data.loader import refuse_large_batch
from jcl.data.source import fingerprint
from jcl.distributed.device import choose_device
from jcl.errors import Interrupted, JclError, RunError, SettingsError, first_line
from jcl.evaluate.classification import classification_task
from jcl.evaluate.knn import knn_accuracy
from jcl.evaluate.linear import linear_probe
from jcl.export.loading import read_initial
from jcl.report.ablation_plot import plot_ablation
from jcl.runs.atomic import write_atomically
from jcl.runs.folder import RunFolder, read_skipped
from jcl.runs.json_object import write_object
from jcl.runs.lock import lock_folder
from jcl.settings.commands import AblateOptions, LinearOptions
from jcl.settings.resolve import resolve
from jcl.settings.resolved import DataFacts
from jcl.settings.schema import Settings
from jcl.settings.values import values_of, with_values
from jcl.signals import StopRequest
from jcl.studies import ablation
from jcl.studies import cells as planning
from jcl.studies.ablation import AblationFolder, CellFolder, CellRecord, Point, RunCells
from jcl.studies.cells import Axes, Cell
from jcl.train.build import build_learner, run_view_recipe

ABLATION_LR = 10.0  # of the probe in the paper's ablations
_SUMMARY_KEYS = ["loss", "contrastive_accuracy", "epochs", "steps", "images_per_second", "seconds", "peak_memory_bytes"]


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


def plan_ablation(options: AblateOptions, console: Console) -> Plan:
    """Check all values and the data, and plan the cells: all combinations or, with `each_alone`, one axis at a time."""
    given, alone = options.values(), options.each_alone
    axes: Axes = planning.parse_axes(options.over, given, alone=alone)
    if not axes:
        raise SettingsError("Give at least one --over, for example: jcl ablate photos/ --over num_keys=1,2,3,5.")
    if "," in options.seeds and "train.seed" in given:
        raise SettingsError("--seeds is a list of seeds; remove --seed.")

    def build(values: Mapping[str, Any]) -> Settings:
        return with_absolute_paths(options.settings(given | dict(values)))

    base = build({}) if alone else planning.base_settings(axes, build)
    seeds = planning.parse_seeds(options.seeds, base.train.seed if "train.seed" in given else 0)
    cells = planning.build_cells(axes, seeds, build, alone=alone)  # checks the values before the data is opened
    for together in [{name: values} for name, values in axes.items()] if alone else [axes]:
        planning.refuse_ignored(together, base)
    data = open_run_data(base, console)
    facts = data_facts(data.train, read_initial(base))
    if alone and (resolved := _resolved_center(base, axes, facts)):
        base = build(resolved)
        axes = {name: [resolved.get(name, v) if v == "auto" else v for v in axes[name]] for name in axes}
        cells = planning.build_cells(axes, seeds, lambda values: build(resolved | dict(values)), alone=True)
    cells = [cell.model_copy(update={"protocol": options.protocol}) for cell in cells]
    study = {"over": list(axes), "settings": planning.shared_values(base, axes), "data": _data_summary(data)}
    study["protocol"] = options.protocol
    _check_cells(cells, data.train, facts)
    default_folder = Path("runs") / f"ablate-{'-'.join(map(planning.short_name, axes))}-{data.name}"
    return Plan(list(axes), cells, study, default_folder, values_of(base, axes) if alone else None)


def _resolved_center(base: Settings, names: Collection[str], facts: DataFacts) -> dict[str, Any]:
    """What "auto" becomes at the center, so that the center has a position among the other values."""
    if "method.num_keys" in names and base.method.num_queries == "auto":
        base = with_values(base, {"method.num_queries": 1})  # as in all cells with an explicit number of keys
    resolved = values_of(resolve(base, facts)[0], names)
    return {name: resolved[name] for name, value in values_of(base, names).items() if value == "auto"}


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

    def raise_if_incomplete(self) -> None:
        if self.unfinished:
            cells = pluralize(self.unfinished, "cell")
            raise Interrupted(f"{cells} unfinished in {self.folder}; run the same command again to continue.")
        if self.failed:
            failed = f"{pluralize(len(self.failed), 'cell')} failed ({list_some(self.failed, 3)})"
            error, table = next(iter(self.failed.values())), self.folder / "ablation.csv"
            raise RunError(f"{failed}: {error} Run the same command again to retry. All errors are in {table}.")


def write_plan(options: AblateOptions, console: Console) -> tuple[Path, int, int]:
    """Write the study and its cells without running them; returns their folder, their number and how many are done."""
    plan = plan_ablation(options, console)
    with plan.locked_folder(options.out, console) as folder:
        done = sum(folder.cell(cell).result() is not None for cell in plan.cells)
        return folder.cells, len(plan.cells), done


def ablate(options: AblateOptions, console: Console) -> Ablation:
    plan = plan_ablation(options, console)
    device = plan.cells[0].settings.train.device
    choose_device(device)  # raises if there is no such device
    slots = ablation.local_slots(device, options.at_once)
    return run_ablation(plan, options.out, partial(ablation.run_in_slots, slots), console)


def run_ablation(plan: Plan, out: Path | None, run_cells: RunCells, console: Console) -> Ablation:
    """Run the cells without a result, and write tables and plot of everything in the folder."""
    started = time.perf_counter()
    with plan.locked_folder(out, console) as folder:
        with StopRequest() as stop:
            failed = _run_cells(folder, plan, run_cells, stop, console)
        records = _write_csv(folder, plan)
        points = ablation.points_of(records, plan.names)
        summary = _summary(plan, records, time.perf_counter() - started)
        results = summary | ablation.flat_results(points)
        write_object(folder.path / "ablation.json", results)
        if any(point.results for point in points):
            data = Path(summary["data"]).name
            chance = max((record.result or {}).get("chance_top1", 0.0) for record in records) or None
            plot_ablation(points, folder.path / "ablation.png", data=data, chance=chance, center=plan.center)
    folders = [folder.cell(cell) for cell in plan.cells]
    lists = [read_skipped(RunFolder(each.path).skipped_file) for each in folders]
    warn_skipped(console, {name: reason for skipped in lists for name, reason in skipped.items()})
    missing = sum(each.result() is None for each in folders) - len(failed)
    return Ablation(folder.path, plan.names, points, results, failed, missing)


def _run_cells(
    folder: AblationFolder, plan: Plan, run_cells: RunCells, stop: StopRequest, console: Console
) -> dict[str, str]:
    """Run the cells without a result; returns the errors of failed cells by title."""
    todo = {folder.cell(cell).path: cell for cell in plan.cells if folder.cell(cell).result() is None}
    total, done = len(plan.cells), len(plan.cells) - len(todo)
    kept = f"; {done} already done" if done else ""
    print_line(console, f"{pluralize(total, 'cell')} in {folder.path}{kept}. Each cell writes a log.txt.")
    failed = {}
    for path in run_cells(list(todo), stop):
        title, result, failure = todo[path].title, CellFolder(path).result(), CellFolder(path).failure()
        if result is not None:
            accuracies = f"linear {result['linear_top1']:.2f} %, kNN {result['knn_top1']:.2f} %"
            text = f"{accuracies} ({format_duration(result['seconds'])} of training)"
        elif failure is not None:
            failed[title], text = failure, f"failed: {failure}"
        else:  # stopped; the same command continues it
            continue
        done += 1
        print_line(console, f"[{done}/{total}] {title}: {text}")
        _write_csv(folder, plan)
    return failed


def _write_csv(folder: AblationFolder, plan: Plan) -> list[CellRecord]:
    records = folder.records(plan.cells)
    write_atomically(folder.path / "ablation.csv", ablation.as_csv(records, plan.names).encode())
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


def run_cell(path: Path, *, workers: int | None = None, console: Console = STDERR) -> dict[str, Any]:
    """Run or continue the cell of a folder; `workers` replaces "auto". Errors are also written to the folder."""
    folder = CellFolder(path)
    cell, existing = folder.cell(), folder.result()
    if existing is not None:
        return existing
    folder.failure_file.unlink(missing_ok=True)
    settings = cell.settings
    if workers is not None and settings.data.workers == "auto":
        settings = with_values(settings, {"data.workers": workers})
    try:
        begun = RunFolder(path).holds_run()
        run = resume(path, console=console) if begun else pretrain(settings, path, console=console)
        accuracies = _evaluate(run, console)
        if cell.protocol == "paper":
            accuracies |= _paper_probe(run, accuracies["linear_top1"], console)
        result = {"seed": cell.seed} | accuracies | {name: run.summary[name] for name in _SUMMARY_KEYS}
        write_object(folder.result_file, result)  # the last step
    except Interrupted:
        raise
    except Exception as error:
        folder.fail(str(error) if isinstance(error, JclError) else f"{type(error).__name__}: {first_line(error)}")
        raise
    return result


def _evaluate(run: Run, console: Console) -> dict[str, Any]:
    """kNN and linear probe on the same features."""
    settings = run.settings
    workers, record = settings.data.workers, settings.record
    target = open_target(run.path, None, settings.train.device, Console(quiet=True))
    task = classification_task(target.data)
    features = partial(target.features, workers=workers, console=console)
    train, test = features(task.train), features(task.test)
    labeled = (train.values, train.labels, test.values, test.labels)
    k, temperature = [record.knn_k], [record.knn_temperature]
    knn = knn_accuracy(*labeled, k=k, temperature=temperature, device=target.device)[0]
    linear = linear_probe(*labeled, device=target.device)
    return {
        "linear_top1": linear.scores.top1,
        "chance_top1": linear.scores.chance_top1,
        # Measured with a sample of the training images, it would not be comparable.
        "untrained_knn_top1": run.summary.get("untrained_knn_top1") if len(task.train) <= record.knn_images else None,
        "linear_top5": linear.scores.top5,
        "knn_top1": knn.top1,
        "knn_top5": knn.top5,
        "validation_top1": linear.validation_top1,
        "linear_lr": linear.lr,
        "linear_weight_decay": linear.weight_decay,
        "train_images": len(train),
        "test_images": len(test),
        "unseen_class_images": linear.scores.unseen_class_images,
        "test_held_out": task.held_out,
        "classes": len(task.classes),
    }


def _paper_probe(run: Run, fast_top1: float, console: Console) -> dict[str, Any]:
    """The probe of the paper's ablations instead of the fast one; it continues from its own checkpoints."""
    options = LinearOptions(
        weights=run.path,
        protocol="paper",
        lr=(ABLATION_LR,),
        no_untrained=True,
        out=run.path / "linear",
        device=run.settings.train.device,
        workers=run.settings.data.workers,
    )
    figures = measure_linear(options, console=console).figures
    found = {f"linear_{name}": figures[name] for name in ("lr", "weight_decay", "epochs")}
    return found | {name: figures[name] for name in ("linear_top1", "linear_top5")} | {"fast_linear_top1": fast_top1}
