"""The demo: MoCo v2 and JCL on images drawn by code, next to raw pixels and an untrained encoder."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from jcl.commands.pretrain import pretrain
from jcl.commands.report import write_report
from jcl.commands.report_sample import neighbour_rows
from jcl.commands.run import Run
from jcl.commands.run_data import data_facts
from jcl.console import format_duration, print_line
from jcl.core.encoder import build_backbone
from jcl.data import ImageData, open_data
from jcl.distributed.device import PeakMemory
from jcl.errors import Interrupted, RunError
from jcl.evaluate import Features, FeatureSettings, knn_accuracy
from jcl.report.figures import draw_neighbours, plot_comparison
from jcl.runs.folder import new_folder
from jcl.settings.recipes import build_settings
from jcl.settings.resolve import ResolvedSettings, resolve


@dataclass(frozen=True)
class Row:
    """One row of the demo's table."""

    name: str
    knn_top1: float
    seconds: float
    peak_memory: int


def run_demo(folder: Path | None, seed: int, out: Console, err: Console) -> dict[str, Any]:
    """Train both methods, print the table, write the page and the figures; returns the results for JSON."""
    started = time.perf_counter()
    if folder is not None and folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; choose a folder with --out.")
    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is not empty; choose another folder with --out.")
    data = open_data("demo")
    settings, _ = resolve(build_settings("demo", values={"train.seed": seed}), data_facts(data.train))
    print_line(err, f"Training two runs on {data.train.description}.")
    torch.manual_seed(seed)
    encoder, _ = build_backbone(settings.model.backbone)  # both methods start from it
    unscaled = FeatureSettings(settings.views.image_size)
    preprocessing = FeatureSettings(settings.views.image_size, settings.views.mean, settings.views.std)
    rows = [
        _untrained_row("raw pixels", nn.Flatten(), unscaled, data, settings),
        _untrained_row("random encoder", encoder, preprocessing, data, settings),
    ]
    with new_folder(folder or Path("runs/demo"), numbered=folder is None) as path:
        runs = _train(path, seed, err)
        rows += [
            Row(name, run.summary["knn_top1"], run.summary["seconds"], run.summary["peak_memory_bytes"])
            for name, run in runs.items()
        ]
        _draw_figures(path, runs["JCL"], rows, data, preprocessing)
        page = _write_page(path, runs, rows, err)
    seconds = time.perf_counter() - started
    _print_table(out, rows)
    look = f"Open {page} in a browser" if page is not None else f"The figures are in {path}"
    print_line(out, f"Done in {format_duration(seconds)}. {look}; then try your own images: `jcl pretrain FOLDER`.")
    names = ("pixels", "random", "moco_v2", "jcl")
    return {f"{name}_knn_top1": row.knn_top1 for name, row in zip(names, rows, strict=True)} | {"seconds": seconds}


def _train(folder: Path, seed: int, err: Console) -> dict[str, Run]:
    runs = {}
    for name, method in (("MoCo v2", "moco-v2"), ("JCL", "jcl")):
        chosen = build_settings("demo", method=method, values={"train.seed": seed})
        try:
            runs[name] = pretrain(chosen, folder / method, console=err, label=name)
        except Interrupted as stopped:
            raise Interrupted(f"{stopped} For the whole demo, run `jcl demo` again with a new folder.") from None
    return runs


def _write_page(folder: Path, runs: dict[str, Run], rows: list[Row], err: Console) -> Path | None:
    """The page of both runs; None if it cannot be made."""
    pixels, untrained = rows[:2]
    note = (
        f"For comparison, the kNN accuracy of raw pixels is {pixels.knn_top1:.1f} %, that of features of the untrained "
        f"encoder {untrained.knn_top1:.1f} %."
    )
    try:
        paths, title = [run.path for run in runs.values()], "MoCo v2 and JCL on drawn objects"
        return write_report(paths, folder / "report.html", names=list(runs), title=title, note=note).file
    except Exception as error:  # the results are worth more than the page
        print_line(err, f"Could not write the page: {error}")
        return None


def _untrained_row(
    name: str, network: nn.Module, preprocessing: FeatureSettings, data: ImageData, settings: ResolvedSettings
) -> Row:
    started, memory = time.perf_counter(), PeakMemory(torch.device("cpu"))
    bank, queries = _extract(network, preprocessing, data)
    k, temperature = [settings.record.knn_k], [settings.record.knn_temperature]
    (result,) = knn_accuracy(bank.values, bank.labels, queries.values, queries.labels, k=k, temperature=temperature)
    return Row(name, result.top1, time.perf_counter() - started, memory.read())


def _extract(network: nn.Module, preprocessing: FeatureSettings, data: ImageData) -> tuple[Features, Features]:
    """Features of the training images and of the test images."""
    assert data.test is not None
    cpu = torch.device("cpu")
    train, test = (preprocessing.extract(network, source, device=cpu) for source in (data.train, data.test))
    return train, test


def _draw_figures(folder: Path, run: Run, rows: list[Row], data: ImageData, preprocessing: FeatureSettings) -> None:
    """Bars of the accuracies, and the training images nearest to the first test images."""
    assert data.test is not None
    plot_comparison(
        {row.name: row.knn_top1 for row in rows},
        folder / "comparison.png",
        title="kNN accuracy of the features",
        subtitle=f"top-1 on {len(data.test)} unseen drawn objects, one seed",
        chance=10.0,
    )
    bank, queries = _extract(run.backbone(), preprocessing, data)
    drawn = neighbour_rows(queries, data.test, bank, data.train, range(6))
    draw_neighbours(drawn, folder / "neighbours.png", title="Nearest neighbors by JCL's features")


def _print_table(out: Console, rows: list[Row]) -> None:
    table = Table("features", "kNN top-1", "seconds", "peak memory", title="kNN accuracy of the features")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        memory = f"{row.peak_memory / 2**20:,.0f} MiB"
        table.add_row(row.name, f"{row.knn_top1:.1f} %", f"{row.seconds:.1f}", memory)
    out.print(table)
