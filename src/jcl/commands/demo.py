"""The demo: MoCo v2 and JCL on synthetic images, next to raw pixels and an untrained encoder."""

import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from jcl.commands.pretrain import pretrain
from jcl.commands.report import write_report
from jcl.commands.report_sample import neighbour_rows
from jcl.commands.run import Run
from jcl.console import STDERR, print_line
from jcl.data import ImageData, open_data
from jcl.errors import RunError
from jcl.evaluate import FeatureSettings, extract_features
from jcl.evaluate.knn import evaluate_knn
from jcl.report.figures import draw_neighbours, plot_comparison
from jcl.runs.folder import new_folder
from jcl.settings.recipes import build_settings

CPU = torch.device("cpu")


class Demo(NamedTuple):
    """The kNN accuracy of four kinds of features, the two runs among them by title, and a page about these."""

    accuracies: dict[str, float]
    runs: dict[str, Run]
    page: Path
    seconds: float


def run_demo(folder: Path | None, seed: int) -> Demo:
    """Train both methods and write the figures and the page."""
    started = time.perf_counter()
    if folder is not None and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"{folder} is not an empty folder; choose another one with --out.")
    data = open_data("demo")
    print_line(STDERR, f"Training two runs on {data.train.description}.")
    with new_folder(folder or Path("runs/demo"), numbered=folder is None) as path:
        runs = {}
        for name, method in (("MoCo v2", "moco-v2"), ("JCL", "jcl")):
            settings = build_settings("demo", method=method, values={"train.seed": seed})
            runs[name] = pretrain(settings, path / method, label=name)
        run = runs["JCL"]  # both start from the same encoder
        record = run.settings.record
        pixels = partial(FeatureSettings(run.settings.views.image_size).extract, nn.Flatten(), device=CPU)
        knn = evaluate_knn(data, pixels, k=[record.knn_k], temperature=[record.knn_temperature], device=CPU)
        untrained = run.summary["untrained_knn_top1"]
        accuracies = {"raw pixels": knn[0].top1, "random encoder": untrained}
        accuracies |= {name: run.summary["knn_top1"] for name, run in runs.items()}
        _draw_figures(path, run, accuracies, data)
        title = "MoCo v2 and JCL on synthetic images"
        note = f"For comparison: raw pixels have {knn[0].top1:.1f} %, the untrained encoder {untrained:.1f} %."
        paths, page = [run.path for run in runs.values()], path / "report.html"
        write_report(paths, page, names=list(runs), title=title, note=note)
    return Demo(accuracies, runs, page, time.perf_counter() - started)


def _draw_figures(folder: Path, run: Run, accuracies: dict[str, float], data: ImageData) -> None:
    """Bars of the accuracies, and the training images nearest to the first test images."""
    assert data.test is not None
    plot_comparison(
        accuracies,
        folder / "comparison.png",
        title="kNN accuracy of the features",
        subtitle=f"top-1 on {len(data.test)} synthetic test images, one seed",
        chance=10.0,
    )
    views = run.settings.views
    bank, queries = (
        extract_features(run.backbone(), source, image_size=views.image_size, mean=views.mean, std=views.std)
        for source in (data.train, data.test)
    )
    drawn = neighbour_rows(queries, data.test, bank, data.train, range(6))
    draw_neighbours(drawn, folder / "neighbours.png", title="Nearest neighbors by JCL's features")
