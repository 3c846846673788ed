"""What an ablation says when a cell ends."""

import io
from pathlib import Path

from rich.console import Console

from jcl.settings.recipes import build_settings
from jcl.studies.cell_process import Outcome
from jcl.studies.cells import Cell
from jcl.studies.progress import AblationDisplay


def test_a_cell_that_ends_says_its_time_as_all_else_does():
    console = Console(file=io.StringIO(), width=200)
    display = AblationDisplay(console)
    cell = Cell({"method.num_keys": 2}, 7, build_settings("demo"))
    result = {"linear_top1": 50.0, "knn_top1": 40.0, "seconds": 100.0}
    display.tell(cell, Outcome(Path("cell"), "done"), result)
    assert console.file.getvalue().endswith(
        "num_keys 2, seed 7: linear 50.00 %, kNN 40.00 % (1 min 40 s of training)\n"
    )
