"""The demo: MoCo v2 and JCL on images drawn by code, next to raw pixels and an untrained encoder."""

from __future__ import annotations

import time
from functools import partial
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
from jcl.console import format_duration, print_line
from jcl.data import ImageData, open_data
from jcl.errors import Interrupted, RunError
from jcl.evaluate import FeatureSettings, extract_features
from jcl.evaluate.knn import evaluate_knn
from jcl.report.figures import draw_neighbours, plot_comparison
from jcl.runs.folder import new_folder
from jcl.settings.recipes import build_settings
from jcl.settings.resolved import ResolvedSettings


def run_demo(folder: Path | None, seed: int, out: Console, err: Console) -> dict[str, Any]:
    """Train both methods, print the table, write the page and the figures; returns the results for JSON."""
    started = time.perf_counter()
    if folder is not None and folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; choose a folder with --out.")
    if folder is not None and folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is not empty; choose another folder with --out.")
    data = open_data("demo")
    print_line(err, f"Training two runs on {data.train.description}.")
    with new_folder(folder or Path("runs/demo"), numbered=folder is None) as path:
        runs = _train(path, seed, err)
        run = runs["JCL"]  # both start from the same encoder
        accuracies = {"raw pixels": _accuracy_of_pixels(data, run.settings)}
        accuracies |= {"random encoder": run.summary["untrained_knn_top1"]}
        accuracies |= {name: run.summary["knn_top1"] for name, run in runs.items()}
        _draw_figures(path, run, accuracies, data)
        page = _write_page(path, runs, accuracies, err)
    seconds = time.perf_counter() - started
    _print_table(out, accuracies, runs)
    look = f"Open {page} in a browser" if page is not None else f"The figures are in {path}"
    print_line(out, f"Done in {format_duration(seconds)}. {look}; then try your own images: `jcl pretrain FOLDER`.")
    names = ("pixels", "random", "moco_v2", "jcl")
    found = zip(names, accuracies.values(), strict=True)
    return {f"{name}_knn_top1": accuracy for name, accuracy in found} | {"seconds": seconds}


def _train(folder: Path, seed: int, err: Console) -> dict[str, Run]:
    runs = {}
    for name, method in (("MoCo v2", "moco-v2"), ("JCL", "jcl")):
        chosen = build_settings("demo", method=method, values={"train.seed": seed})
        try:
            runs[name] = pretrain(chosen, folder / method, console=err, label=name)
        except Interrupted as stopped:
            raise Interrupted(f"{stopped} For the whole demo, run `jcl demo` again with a new folder.") from None
    return runs


def _write_page(folder: Path, runs: dict[str, Run], accuracies: dict[str, float], err: Console) -> Path | None:
    """The page of both runs; None if it cannot be made."""
    note = (
        f"For comparison, the kNN accuracy of raw pixels is {accuracies['raw pixels']:.1f} %, that of features of the "
        f"untrained encoder {accuracies['random encoder']:.1f} %."
    )
    try:
        paths, title = [run.path for run in runs.values()], "MoCo v2 and JCL on drawn objects"
        return write_report(paths, folder / "report.html", names=list(runs), title=title, note=note).file
    except Exception as error:  # the results are worth more than the page
        print_line(err, f"Could not write the page: {error}")
        return None


def _accuracy_of_pixels(data: ImageData, settings: ResolvedSettings) -> float:
    record, cpu = settings.record, torch.device("cpu")
    features = partial(FeatureSettings(settings.views.image_size).extract, nn.Flatten(), device=cpu)
    (found,) = evaluate_knn(data, features, k=[record.knn_k], temperature=[record.knn_temperature], device=cpu)
    return found.top1


def _draw_figures(folder: Path, run: Run, accuracies: dict[str, float], data: ImageData) -> None:
    """Bars of the accuracies, and the training images nearest to the first test images."""
    assert data.test is not None
    plot_comparison(
        accuracies,
        folder / "comparison.png",
        title="kNN accuracy of the features",
        subtitle=f"top-1 on {len(data.test)} unseen drawn objects, one seed",
        chance=10.0,
    )
    views = run.settings.views
    bank, queries = (
        extract_features(run.backbone(), source, image_size=views.image_size, mean=views.mean, std=views.std)
        for source in (data.train, data.test)
    )
    drawn = neighbour_rows(queries, data.test, bank, data.train, range(6))
    draw_neighbours(drawn, folder / "neighbours.png", title="Nearest neighbors by JCL's features")


def _print_table(out: Console, accuracies: dict[str, float], runs: dict[str, Run]) -> None:
    table = Table("features", "kNN top-1", "seconds", "peak memory", title="kNN accuracy of the features")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, accuracy in accuracies.items():
        cost = runs[name].summary if name in runs else None
        shown = [f"{cost['seconds']:.1f}", f"{cost['peak_memory_bytes'] / 2**20:,.0f} MiB"] if cost else []
        table.add_row(name, f"{accuracy:.1f} %", *shown)
    out.print(table)
