"""The command line as a whole: its groups of commands, its consoles and the options commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import jcl
from jcl.cli.options import app as app
from jcl.console import StderrConsole
from jcl.errors import SettingsError
from jcl.runs.json_object import may_hold_figures

TRAIN, EVALUATE, STUDY, EXCHANGE, DATA = "Train", "Evaluate", "Study", "Exchange", "Data and recipes"

# Of several ranks the first speaks for all; an error of another one is its own.
rank = int(os.environ.get("RANK") or 0)  # set to nothing it says nothing
out = Console(quiet=rank > 0)
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


def check_json_file(path: Path | None) -> Path | None:
    """Before anything is done: figures take the place of older figures, and of nothing else."""
    if path is None:
        return None
    if str(path) == "-":
        raise SettingsError(
            "--json takes the name of a file; figures do not go to standard output, where the table is."
        )
    from jcl.runs.folder import RunFolder

    # The summary of a run is what tells that it has finished, and other figures there would be taken for its own.
    if path.name in ("summary.json", "result.json") and RunFolder(path.parent).holds_run():
        raise SettingsError(
            f"{path} is where the run itself keeps its figures; choose another name, which its page shows as well."
        )
    if path.exists():
        if path.is_dir() or path.suffix != ".json":
            raise SettingsError(
                f"{path} is there already and is no .json file; it is left as it is, choose another name."
            )
        if not may_hold_figures(path):
            raise SettingsError(
                f"{path} is there already and holds no figures of jcl; it is left as it is, choose another name."
            )
    return path


JsonOption = Annotated[
    Path | None, typer.Option("--json", callback=check_json_file, help="Also write the figures to this file as JSON.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]
WorkersOption = Annotated[
    int | None, typer.Option(min=0, help="Processes that decode images (default: one a CPU core).")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="SECTION.NAME=VALUE", help="Change any setting; `jcl recipes --settings` lists them."
    ),
]


def seed_option(help: str = "Same seed, same numbers.") -> Any:
    """A seed that every generator takes: one that fits into 63 bits."""
    return typer.Option(min=0, max=2**63 - 1, help=help)


def typed_options(context: typer.Context) -> set[str]:
    """The parameters that were typed, not left at their defaults."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
