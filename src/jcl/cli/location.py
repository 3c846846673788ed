"""DATA on the command line: a path, or the name of a data set."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer

from jcl.cli.app import err, rank
from jcl.console import print_line
from jcl.distributed.launch import ERROR_FOLDER


def location_argument(help: str) -> Any:
    """The argument DATA of a command."""
    return typer.Argument(help=help, callback=tell_passed_over)


def tell_passed_over(location: str | None) -> str | None:
    """Say so where a data set's name is that of a folder here too; whoever means the folder learns how to write it."""
    said = rank > 0 or ERROR_FOLDER in os.environ  # by the first rank, or by our launcher
    if location is not None and not said and Path(location).is_dir():
        from jcl.data.named import KNOWN_SETS

        if location in KNOWN_SETS:
            print_line(
                err, f"{location} is the data set of that name, not the folder here; for the folder write ./{location}."
            )
    return location
