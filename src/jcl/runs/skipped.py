"""`skipped.txt`: the images that a training could not read, one a line with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jcl.console import visible
from jcl.runs.atomic import write_atomically


def read_skipped(file: Path, most: int = -1) -> dict[str, str]:
    """Names and reasons from the first `most` letters of the list, all without it; nothing where there is no list."""
    try:
        with file.open(encoding="utf-8", errors="replace", newline="\n") as stream:
            lines = stream.read(most).split("\n")
    except OSError:
        return {}
    pairs = (line.rpartition("\t") for line in lines)
    return {name: reason for name, _, reason in pairs if name}


def add_skipped(file: Path, skipped: Mapping[str, str], *, anew: bool = False) -> dict[str, str]:
    """Enter images into the list, which keeps those that a training met before it was resumed; gives all of them.

    A training that begins `anew` takes over nothing.
    """
    listed = read_skipped(file)
    together = ({} if anew else listed) | {_on_a_line(name): _on_a_line(reason) for name, reason in skipped.items()}
    if together != listed:
        write_atomically(file, "".join(f"{name}\t{reason}\n" for name, reason in sorted(together.items())).encode())
    return together


def _on_a_line(text: str) -> str:
    return visible(text).replace("\n", "\\n")
