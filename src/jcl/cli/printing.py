"""What commands print and write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from jcl.cli.app import err, out, rank
from jcl.console import pluralize, print_line, visible
from jcl.errors import SettingsError
from jcl.runs.json_object import write_object


def write_json(figures: dict[str, Any], path: Path | None) -> None:
    """What --json asks for; of several ranks the first writes."""
    if path is None or rank > 0:
        return
    write_object(path, figures)


def demand_free_picture(picture: Path | None, *, force: bool) -> None:
    """Before anything is done: a picture is a .png file, and never takes the place of another file unasked."""
    from jcl.runs.atomic import refuse_overwrite

    if picture is None:
        return
    if picture.suffix.lower() != ".png":
        raise SettingsError(f"{picture} does not end in .png, which is how the picture is written.")
    refuse_overwrite(picture, force=force)


def in_table(text: str) -> str:
    """Somebody's words as they go into a table: on one line, no markup, and nothing that steers a terminal."""
    return escape(visible(text).replace("\n", "\\n"))


def say(text: str) -> None:
    """To standard output; of several ranks the first speaks."""
    print_line(out, text)


def say_strangers(count: int) -> None:
    """How many test images no classifier could get right, beside accuracies."""
    if count:
        images = pluralize(count, "test image has a class", "test images have classes")
        say(f"{images} unseen in training; counted as errors.")


def tested_on(figures: Mapping[str, Any]) -> str:
    """How many images accuracies rest on, and where they come from if not from a test set."""
    source = ", held out of the training images for want of a labelled test set" if figures["test_held_out"] else ""
    return f"Tested on {pluralize(figures['test_images'], 'image')}{source}."


def say_aside(text: str) -> None:
    """To standard error, where progress and remarks go."""
    print_line(err, text)
