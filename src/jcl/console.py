"""Printing lines, names and numbers for people."""

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text


class RobustConsole(Console):
    """A console that is silent, and does not raise, once its output is lost.

    Training does not end because a pipe or terminal was closed (`| head -1`) or the disk of a log is full. `failure`
    is the error, if it was not a closed pipe.
    """

    failure: OSError | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:  # every print ends here
            super().__exit__(kind, error, trace)
        except OSError as failure:
            self.failure = failure
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with contextlib.suppress(OSError, ValueError):  # no file descriptor
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.file.fileno())  # or Python would try to flush the rest at exit
            os.close(null)


STDERR: Final = RobustConsole(stderr=True)  # for progress and remarks

ProgressCallback = Callable[[int, int], None]  # called with the number done and the total


def no_progress(done: int, total: int) -> None:
    """The default `ProgressCallback`."""


def print_line(console: Console, text: str, *, lead: str = "") -> None:
    """Print a line without markup or line breaks, so that it can be copied; `lead` comes first, highlighted."""
    line = Text(escape_controls(lead + text))
    line.stylize("bold red", 0, len(lead))
    console.print(line, soft_wrap=True)


def describe_skipped(skipped: Mapping[str, str]) -> str:
    """`Skipped 3 unreadable images, for example a.jpg (truncated).`; empty if there are none."""
    for name, reason in skipped.items():
        example = ", for example" if len(skipped) > 1 else ":"
        return f"Skipped {pluralize(len(skipped), 'unreadable image')}{example} {name} ({reason})."
    return ""


def warn_skipped(console: Console, skipped: Mapping[str, str]) -> None:
    if skipped:
        print_line(console, describe_skipped(skipped))


def escape_controls(text: str) -> str:
    """The text with control characters escaped, except line ends."""
    return "".join(letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text)


def pluralize(number: int, noun: str, plural: str = "") -> str:
    """`1 image`, `2,000 images`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def join_words(words: Sequence[str]) -> str:
    """`map`, `map and views`, `map, neighbors and views`."""
    return " and ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)


def list_some(words: Iterable[str], limit: int, separator: str = ", ") -> str:
    """`cats, dogs and 3 more`: the first `limit` words."""
    words = list(words)
    more = len(words) - limit
    return separator.join(words[:limit]) + (f" and {more:,} more" if more > 0 else "")


def unique_names(names: Sequence[str], separator: str) -> list[str]:
    """The names, with a number added to those that repeat."""
    given: list[str] = []
    for name in names:
        number, unique = 2, name
        while unique in given:
            unique, number = f"{name}{separator}{number}", number + 1
        given.append(unique)
    return given


def plain_names(names: Sequence[str]) -> list[str]:
    """Names of runs as keys in JSON: lower case, digits and underscores, without duplicates."""
    return unique_names([re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") or "run" for name in names], "_")


def shell_quote(path: Path) -> str:
    """A path quoted for a shell where necessary."""
    return shlex.quote(str(path))


def format_duration(seconds: float) -> str:
    """`6.3 s`, `1 min 40 s`, `3 h 5 min`."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {left} s" if minutes else f"{seconds:.1f} s"


def format_bytes(count: float) -> str:
    """Bytes in KiB, MiB or GiB."""
    if abs(count) >= 2**30:
        return f"{count / 2**30:,.2f} GiB"
    return f"{count / 2**20:.1f} MiB" if abs(count) >= 2**20 else f"{count / 2**10:.1f} KiB"
