"""Commands that measure what features are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from jcl.cli.app import EVALUATE, JsonOption, app, out
from jcl.cli.printing import write_json


@app.command(rich_help_panel=EVALUATE)
def knn(
    weights: Annotated[Path, typer.Argument(metavar="RUN_OR_WEIGHTS", help="A run folder or an exported backbone.")],
    data: Annotated[str | None, typer.Argument(help="Labelled data [default: what the run was trained on].")] = None,
    k: Annotated[list[int] | None, typer.Option("-k", help="Neighbours that vote; may be given several times.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Of the votes; may be given several times.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 256,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode images.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    json_file: JsonOption = None,
) -> None:
    """Measure frozen features by weighted k-nearest neighbours."""
    from jcl.measure import measure_knn

    results = measure_knn(
        weights,
        data,
        k=k or [200],
        temperature=temperature or [0.1],
        batch_size=batch_size,
        workers=workers,
        device=device,
    )
    table = Table("k", "temperature", "top-1", "top-5")
    for result in results:
        table.add_row(str(result.k), f"{result.temperature:g}", f"{result.top1:.2f} %", f"{result.top5:.2f} %")
    out.print(table)
    best = results[0]
    out.print(f"{best.queries:,} queries against a bank of {best.bank:,} images.", highlight=False)
    write_json(_knn_figures(results), json_file)


def _knn_figures(results: list[Any]) -> dict[str, float]:
    """The first result under the plain names, every result under names with its k and temperature."""
    figures: dict[str, float] = {"knn_top1": results[0].top1, "knn_top5": results[0].top5}
    for result in results:
        figures[f"knn_top1_k{result.k}_t{result.temperature:g}"] = result.top1
    return figures
