"""What commands print and write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.markup import escape

from jcl.cli.app import err, out, rank
from jcl.speech import tell, visible
from jcl.train.json_object import write_object


def write_json(figures: dict[str, Any], path: Path | None) -> None:
    if path is None or rank > 0:
        return
    write_object(path, figures)


def in_table(text: str) -> str:
    """Somebody's words as they go into a table: on one line, no markup, and nothing that steers a terminal."""
    return escape(visible(text).replace("\n", "\\n"))


def say(text: str) -> None:
    """To standard output; of several ranks the first speaks."""
    tell(out, text)


def say_aside(text: str) -> None:
    """To standard error, where progress and remarks go."""
    tell(err, text)
