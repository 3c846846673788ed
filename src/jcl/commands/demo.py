"""The demonstration: what JCL does, seen in two minutes on a CPU.

The data is drawn by code (see `jcl.data.synthetic`), so nothing is downloaded. Raw pixels and an untrained encoder show
where learning starts; MoCo v2 and JCL show where it gets in the same number of epochs.
"""

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
from jcl.commands.run import Run
from jcl.console import duration, print_line
from jcl.core.encoder import build_backbone
from jcl.data import ImageData, open_data
from jcl.distributed.device import PeakMemory
from jcl.errors import Interrupted, RunError
from jcl.evaluate import Features, FeatureSettings, knn_accuracy, nearest_neighbours
from jcl.report.pictures import draw_neighbours
from jcl.report.plots import plot_comparison
from jcl.runs.folder import starting_folder
from jcl.settings.recipes import build_settings
from jcl.settings.schema import Settings, known


@dataclass(frozen=True)
class Row:
    """One line of the demo's table."""

    name: str
    knn_top1: float
    seconds: float
    peak_memory: int


def run_demo(folder: Path | None, seed: int, out: Console, err: Console) -> dict[str, Any]:
    """Train, measure, print the table and draw the pictures; returns the figures by plain names."""
    started = time.perf_counter()
    if folder is not None:
        _refuse_occupied(folder)
    data = open_data("demo")
    settings = build_settings("demo", values={"train.seed": seed})
    print_line(err, f"Two runs on {data.train.description}, after which you will see what was learned.")
    rows = [_raw_pixels(data, settings), _random_encoder(data, settings)]
    with starting_folder(folder or Path("runs/demo"), numbered=folder is None) as path:
        runs = _train(path, seed, err)
        rows += [_trained_row(name, run) for name, run in runs.items()]
        _draw(path, runs, rows, data, settings)
        page = _write_page(path, runs, rows, err)
    seconds = time.perf_counter() - started
    _print(out, rows, path, page, seconds)
    names = ("pixels", "random", "moco_v2", "jcl")
    return {f"{name}_knn_top1": row.knn_top1 for name, row in zip(names, rows, strict=True)} | {"seconds": seconds}


def _refuse_occupied(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; give the demo a folder of its own with --out.")
    if folder.exists() and any(folder.iterdir()):
        raise RunError(f"{folder} is not empty and is left as it is; choose another folder with --out.")


def _train(folder: Path, seed: int, err: Console) -> dict[str, Run]:
    """Both runs, by their names in the table."""
    runs = {}
    for name, method in (("MoCo v2", "moco-v2"), ("JCL", "jcl")):
        chosen = build_settings("demo", method=method, values={"train.seed": seed})
        try:
            runs[name] = pretrain(chosen, folder / method, console=err, label=name)
        except Interrupted as stopped:
            again = "For the whole demo give `jcl demo` again, without --out or with another."
            raise Interrupted(f"{stopped} {again}") from None
    return runs


def _trained_row(name: str, run: Run) -> Row:
    return Row(name, run.summary["knn_top1"], run.summary["seconds"], run.summary["peak_memory_bytes"])


def _write_page(folder: Path, runs: dict[str, Run], rows: list[Row], err: Console) -> Path | None:
    """Both runs on one page; None, and a sentence, where that does not work."""
    pixels, untrained = rows[:2]
    note = (
        f"For comparison: kNN on raw pixels is right in {pixels.knn_top1:.1f} % of the cases, on features of the "
        f"untrained encoder in {untrained.knn_top1:.1f} %."
    )
    try:
        return write_report(
            [run.path for run in runs.values()],
            folder / "report.html",
            names=list(runs),
            title="MoCo v2 and JCL on drawn objects",
            note=note,
        ).file
    except Exception as error:  # all else has been made, and is worth more than the page
        print_line(err, f"The page could not be made: {error}")
        return None


def _raw_pixels(data: ImageData, settings: Settings) -> Row:
    started, memory = time.perf_counter(), PeakMemory(torch.device("cpu"))
    assert data.test is not None
    shown, cpu = FeatureSettings(_image_size(settings)), torch.device("cpu")
    bank, queries = (shown.extract(nn.Flatten(), source, device=cpu) for source in (data.train, data.test))
    return Row("raw pixels", _top1(bank, queries, settings), time.perf_counter() - started, memory.read())


def _random_encoder(data: ImageData, settings: Settings) -> Row:
    """The encoder that both methods start from, before its first step."""
    started, memory = time.perf_counter(), PeakMemory(torch.device("cpu"))
    assert data.test is not None
    torch.manual_seed(settings.train.seed)
    backbone, _ = build_backbone(settings.model.backbone)
    shown, cpu = _shown(settings), torch.device("cpu")
    bank, queries = (shown.extract(backbone, source, device=cpu) for source in (data.train, data.test))
    return Row("random encoder", _top1(bank, queries, settings), time.perf_counter() - started, memory.read())


def _shown(settings: Settings) -> FeatureSettings:
    return FeatureSettings(_image_size(settings), settings.views.mean, settings.views.std)


def _top1(bank: Features, queries: Features, settings: Settings) -> float:
    assert bank.labels is not None and queries.labels is not None
    record = settings.record
    return knn_accuracy(
        bank.values,
        bank.labels,
        queries.values,
        queries.labels,
        k=[known(record.knn_k)],
        temperature=[record.knn_temperature],
    )[0].top1


def _draw(folder: Path, runs: dict[str, Run], rows: list[Row], data: ImageData, settings: Settings) -> None:
    plot_comparison(
        {row.name: row.knn_top1 for row in rows},
        folder / "comparison.png",
        title="What the features are worth",
        subtitle=f"kNN top-1 on {len(data.test or [])} unseen drawn objects, one seed",
        chance=10.0,
    )
    _draw_neighbours(folder / "neighbours.png", runs["JCL"], data, settings)


def _draw_neighbours(path: Path, run: Run, data: ImageData, settings: Settings, shown: int = 6, count: int = 8) -> None:
    """The images that the learned features put next to a few unseen ones, one of each of the first classes."""
    assert data.test is not None and data.train.labels is not None and data.test.labels is not None
    features, backbone, cpu = _shown(settings), run.backbone(), torch.device("cpu")
    bank, queries = (features.extract(backbone, source, device=cpu) for source in (data.train, data.test))
    found = nearest_neighbours(queries.values[:shown], bank.values, count)
    names = data.train.class_names or ()
    draw_neighbours(
        [data.test.read(row) for row in range(shown)],
        [[data.train.read(int(row)) for row in rows] for rows in found.rows],
        path,
        query_labels=[names[int(data.test.labels[row])] for row in range(shown)],
        neighbour_labels=[[names[int(data.train.labels[row])] for row in rows] for rows in found.rows],
        similarities=found.similarities.tolist(),
        title="Nearest neighbours by JCL's features",
    )


def _print(out: Console, rows: list[Row], folder: Path, page: Path | None, seconds: float) -> None:
    table = Table("features", "kNN top-1", "seconds", "peak memory", title="What the features are worth")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        memory = f"{row.peak_memory / 2**20:,.0f} MiB"
        table.add_row(row.name, f"{row.knn_top1:.1f} %", f"{row.seconds:.1f}", memory)
    out.print(table)
    look = f"Look at {page}, in a browser" if page is not None else f"Curves and neighbours are in {folder}"
    print_line(out, f"Done in {duration(seconds)}. {look}; now try your own images: `jcl pretrain FOLDER`.")


def _image_size(settings: Settings) -> int:
    assert isinstance(settings.views.image_size, int), "the demo recipe fixes the size"
    return settings.views.image_size
