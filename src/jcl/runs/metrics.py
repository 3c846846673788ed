"""What a run writes down: `metrics.jsonl`, one object a line, and the same figures as TensorBoard events."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jcl.errors import RunError
from jcl.runs.atomic import write_atomically
from jcl.runs.events import EventFile
from jcl.runs.json_object import is_figure


def print_warning(text: str) -> None:
    """To standard error, where nobody listens otherwise."""
    print(text, file=sys.stderr)


class Record:
    """Appends figures to a run's files.

    A line is there at once and whole. Lines that cannot be written (a full disk) are said so once, through `warn`, and
    kept to be written with a later one. On resuming at a step, lines beyond that step are dropped first, since the
    steps they speak of are about to be done again. `newest` has the last line of each kind.
    """

    def __init__(
        self,
        folder: Path,
        *,
        resumed_at: int = 0,
        tensorboard: bool = True,
        warn: Callable[[str], None] = print_warning,
    ) -> None:
        self.path = folder / "metrics.jsonl"
        self.newest: dict[str, dict[str, Any]] = {}
        self._warn = warn
        self._waiting: list[str] = []
        self._failing = False
        kept = [line for line in read_metrics(self.path) if line["step"] <= resumed_at] if self.path.exists() else []
        self.newest |= {line["kind"]: line for line in kept}
        content = "".join(json.dumps(line) + "\n" for line in kept).encode()
        write_atomically(self.path, content)
        self._end = len(content)  # of what is known to be whole
        self._events = EventFile(folder / "tensorboard", resumed_at, warn) if tensorboard else None

    def write(self, kind: str, step: int, epoch: float, figures: dict[str, float]) -> dict[str, Any]:
        """One line; figures that are not finite are written as null, since JSON has no such number."""
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        line = {"kind": kind, "step": step, "epoch": round(epoch, 6), **finite}
        self.newest[kind] = line
        self._waiting.append(json.dumps(line) + "\n")
        self._write_waiting()
        if self._events is not None:
            self._events.write(kind, step, figures)
        return line

    def close(self) -> None:
        self._write_waiting()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_waiting(self) -> None:
        try:
            self._append("".join(self._waiting).encode())
        except OSError as error:
            if not self._failing:
                self._warn(
                    f"{self.path} could not be written: {error.strerror}. Training goes on; "
                    "the lines are kept and written when it can be."
                )
            self._failing = True
        else:
            self._waiting.clear()
            self._failing = False

    def _append(self, content: bytes) -> None:
        """Add to the file behind what is whole; part of a line that a failed attempt has left is cut off."""
        if not content:
            return
        with self.path.open("ab", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            end = min(self._end, size)
            if size > end:
                file.truncate(end)
            try:
                rest = memoryview(content)
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
            self._end = end + len(content)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` that say where they belong; one that is damaged is left out, and no other."""
    lines = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from None
    for line in text.splitlines():
        # The last line may be torn by a crash, any other damaged by a disk.
        with contextlib.suppress(ValueError, RecursionError):
            lines.append(json.loads(line))
    return [line for line in lines if _belongs_somewhere(line)]


def _belongs_somewhere(line: Any) -> bool:
    """Whether it says what it is, of which step and epoch, and holds nothing but figures and gaps."""
    if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
        return False
    figures = [value for name, value in line.items() if name != "kind" and value is not None]
    return all(map(is_figure, [line.get("step"), line.get("epoch"), *figures]))
