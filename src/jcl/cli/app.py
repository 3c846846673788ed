"""The Typer app: groups of commands, consoles and the check of `--json`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

import jcl
from jcl.cli.options import app as app
from jcl.console import RobustConsole, StderrConsole
from jcl.distributed.launch import launch_environment
from jcl.errors import SettingsError
from jcl.runs.json_object import holds_results

TRAIN, EVALUATE, STUDY, EXCHANGE, DATA = "Train", "Evaluate", "Study", "Exchange", "Data and recipes"


def _own_rank() -> int:
    """The rank of this process; 0 if the launcher's variables are not all set, which commands that use ranks report."""
    try:
        return launch_environment().rank if "MASTER_ADDR" in os.environ else 0
    except SettingsError:
        return 0


rank = _own_rank()
out = RobustConsole(quiet=rank > 0)  # only the first rank prints results
err = StderrConsole()


def _show_version(asked: bool) -> None:
    if asked:
        out.print(f"jcl {jcl.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Joint Contrastive Learning: turn a folder of images without labels into a pre-trained backbone."""


def check_json_file(path: Path | None) -> None:
    """Raise, before anything is done, if `--json` would overwrite something that is not results of jcl."""
    if path is None:
        return
    if str(path) == "-":
        raise SettingsError("--json takes the name of a file; standard output has the table.")
    from jcl.runs.folder import RunFolder

    # The summary of a run marks it as finished.
    if path.name in ("summary.json", "result.json") and RunFolder(path.parent).holds_run():
        raise SettingsError(f"{path} is the run's own file; choose another name. Its page shows other .json files too.")
    if path.exists() and (path.suffix != ".json" or not holds_results(path)):
        raise SettingsError(f"{path} already exists and does not hold results of jcl; choose another name.")
