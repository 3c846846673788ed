"""What commands print and write. Of several ranks only the first does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from jcl.cli.app import err, out, rank
from jcl.console import escape_controls, pluralize, print_line
from jcl.distributed.launch import ERROR_FOLDER
from jcl.errors import SettingsError
from jcl.runs.json_object import write_object


def write_json(figures: dict[str, Any], path: Path | None) -> None:
    """Write results to the file given by --json."""
    if path is not None and rank == 0:
        write_object(path, figures)


def check_picture_path(picture: Path | None, *, force: bool) -> None:
    """Before anything is done: a picture is a .png file, and never takes the place of another file unasked."""
    from jcl.runs.atomic import refuse_overwrite

    if picture is None:
        return
    if picture.suffix.lower() != ".png":
        raise SettingsError(f"{picture} does not end in .png, which is how the picture is written.")
    refuse_overwrite(picture, force=force)


def escape_cell(text: str) -> str:
    """Text from outside as it goes into a table: on one line, without markup or control characters."""
    return escape(escape_controls(text).replace("\n", "\\n"))


def echo(text: str) -> None:
    """Print a line to standard output."""
    print_line(out, text)


def print_unseen_classes(count: int) -> None:
    """How many test images no classifier could get right, beside accuracies."""
    if count:
        images = pluralize(count, "test image has a class", "test images have classes")
        echo(f"{images} unseen in training; counted as errors.")


def tested_on(figures: Mapping[str, Any]) -> str:
    """How many images were tested, and where they come from if there is no test set."""
    source = (
        ", held out of the training images because there is no labelled test set" if figures["test_held_out"] else ""
    )
    return f"Tested on {pluralize(figures['test_images'], 'image')}{source}."


def say_aside(text: str) -> None:
    """Print a line to standard error, where progress and remarks go."""
    print_line(err, text)


def warn_ambiguous_data(location: str | None) -> None:
    """Say so if DATA is the name of a data set and of a folder here."""
    first = rank == 0 and ERROR_FOLDER not in os.environ  # the launcher has said it
    if location is None or not first or not Path(location).is_dir():
        return
    from jcl.data.named import KNOWN_SETS

    if location in KNOWN_SETS:
        say_aside(f"{location} is the data set of that name, not the folder here; for the folder write ./{location}.")


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar in a terminal; gives a function that takes how many are done and how many there are."""
    from rich.progress import Progress

    with Progress(console=err, transient=True, disable=rank > 0 or not err.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
